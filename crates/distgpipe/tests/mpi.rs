//! Laws 1 and 5 between the ranks of an MPI program: gradients, parameters and buffers are those of one device, bit for bit;
//! and whoever fails is named, everybody ends, and the ranks take part in the next run.
//!
//! This program starts itself again under mpirun. Rank 0 runs the checks one after the other, and the other ranks are its workers.
//! As in other test programs, an argument selects the checks whose names contain it.

// Each transport has use for some of these.
#[allow(dead_code)]
#[path = "one_device/coded.rs"]
mod coded;
mod failure_scenarios;
#[allow(dead_code)]
#[path = "one_device/matrix.rs"]
mod matrix;
#[path = "one_device/mod.rs"]
mod one_device;
#[path = "one_device/replicas.rs"]
mod replicas;

use distgpipe::comm::transport::mpi::Tags;
use distgpipe::model::zoo::{self, Mlp};
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{Batch, BuildError, CodecPolicy, MpiProgram, Pipeline, Reduce, Workers};
use distgpipe_core::wire::HEADER_BYTES;
use distgpipe_core::WorkerId;
use failure_scenarios::{
    actions, assert_link_named, assert_named, batch, plan, run_replicas_until_failure, run_until_failure,
    run_wide_until_failure,
};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process::Command;
use std::time::Instant;

/// Three replicas of two workers need most.
const RANKS: usize = 6;

/// Above this, a check has hung. All of them take a few minutes on two cores.
const LIMIT_S: usize = 1200;

fn main() {
    let program = match MpiProgram::start() {
        Ok(Some(program)) => program,
        Ok(None) => start_ranks(),
        Err(fault) => panic!("{fault}"),
    };
    if program.rank() > 0 {
        // The driver tells of the failures that they are told to have.
        std::panic::set_hook(Box::new(|_| {}));
        if let Err(failure) = program.serve(zoo::build) {
            eprintln!("rank {}: {failure}", program.rank());
            program.abort(1);
        }
        return program.end();
    }
    let all = run_checks(program);
    match all {
        true => program.end(),
        false => program.abort(101),
    }
}

/// Starts this program under mpirun, and ends as that does.
fn start_ranks() -> ! {
    let ended = Command::new("mpirun")
        .args(["--oversubscribe", "--allow-run-as-root", "--timeout", &LIMIT_S.to_string(), "-n", &RANKS.to_string()])
        .arg(std::env::current_exe().expect("this program"))
        .args(std::env::args_os().skip(1))
        .status();
    let ended = ended.expect("mpirun starts: install Open MPI (Debian, Ubuntu: openmpi-bin and libopenmpi-dev)");
    std::process::exit(ended.code().unwrap_or(101))
}

type Check = fn(&MpiProgram);

const CHECKS: &[(&str, Check)] = &[
    ("a_run_needs_as_many_ranks_as_workers", a_run_needs_as_many_ranks_as_workers),
    ("mobilenet_v2_is_transparent", |program| matrix::check_model("mobilenet_v2", ranks(program))),
    ("unet_is_transparent", |program| matrix::check_model("unet", ranks(program))),
    ("roberta_is_transparent", |program| matrix::check_model("roberta", ranks(program))),
    ("amoebanet_d_is_transparent", |program| matrix::check_model("amoebanet_d", ranks(program))),
    ("mobilenet_v2_in_bf16_is_transparent", |program| matrix::check_model_in_bf16("mobilenet_v2", ranks(program))),
    ("unet_in_bf16_is_transparent", |program| matrix::check_model_in_bf16("unet", ranks(program))),
    ("amoebanet_d_in_bf16_is_transparent", |program| matrix::check_model_in_bf16("amoebanet_d", ranks(program))),
    ("roberta_in_bf16_is_transparent", |program| matrix::check_model_in_bf16("roberta", ranks(program))),
    ("every_model_may_be_cut_after_any_layer", |program| matrix::check_every_cut(ranks(program))),
    ("every_model_in_bf16_may_be_cut_after_any_layer", |program| matrix::check_every_cut_in_bf16(ranks(program))),
    ("ten_steps_have_the_losses_of_one_device", |program| matrix::check_ten_steps(ranks(program))),
    ("two_replicas_are_two_devices_that_add_up_their_gradients", |program| {
        replicas::check_two(one_device::subjects(), ranks(program))
    }),
    ("two_replicas_in_bf16_are_two_devices_in_bf16", |program| {
        replicas::check_two(one_device::in_bf16(one_device::subjects()), ranks(program))
    }),
    ("three_replicas_train_identically_in_ranks_and_threads", |program| {
        replicas::check_three(one_device::subjects(), || program.first(6).into())
    }),
    ("mpi_sums_gradients_as_the_ring_does_up_to_rounding", mpi_sums_gradients_as_the_ring_does),
    ("with_a_codec_ranks_are_one_device_that_rounds_at_the_cuts", |program| {
        coded::check_rounding(|| program.first(2).into())
    }),
    ("every_codec_trains_identically_in_ranks_and_threads", every_codec_trains_identically),
    ("evaluating_in_between_changes_nothing", evaluating_in_between_changes_nothing),
    ("large_tensors_arrive_whole", large_tensors_arrive_whole),
    ("a_rank_that_panics_or_errs_is_named", a_rank_that_panics_or_errs_is_named),
    ("a_rank_that_hangs_is_named", a_rank_that_hangs_is_named),
    ("a_driver_that_fails_ends_the_run_of_the_ranks", a_driver_that_fails_ends_the_run_of_the_ranks),
    ("a_replica_that_fails_is_named", a_replica_that_fails_is_named),
    ("a_broken_link_is_found_at_any_message", a_broken_link_is_found_at_any_message),
    ("a_broken_link_is_found_within_a_large_body", a_broken_link_is_found_within_a_large_body),
    ("delays_change_nothing", delays_change_nothing),
    ("the_cause_survives_large_messages", the_cause_survives_large_messages),
    ("a_job_that_a_rank_cannot_run_fails_with_its_reason", a_job_that_a_rank_cannot_run_fails_with_its_reason),
];

/// Runs the checks that the arguments select. Returns whether all succeeded.
fn run_checks(program: MpiProgram) -> bool {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let selected = |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()));
    let mut failed = Vec::new();
    for (name, check) in CHECKS.iter().filter(|(name, _)| selected(name)) {
        let start = Instant::now();
        let passed = catch_unwind(AssertUnwindSafe(|| check(&program))).is_ok();
        println!("test {name} ... {} ({:.1} s)", if passed { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        if !passed {
            failed.push(*name);
        }
    }
    if !failed.is_empty() {
        println!("\nfailures:\n    {}", failed.join("\n    "));
    }
    println!("\ntest result: {}. {} failed", if failed.is_empty() { "ok" } else { "FAILED" }, failed.len());
    failed.is_empty()
}

/// The first ranks, as many as a placement has workers.
fn ranks(program: &MpiProgram) -> impl Fn(usize) -> Workers + use<> {
    let program = *program;
    move |workers| program.first(workers).into()
}

fn a_run_needs_as_many_ranks_as_workers(program: &MpiProgram) {
    assert!(Tags::of(0) != Tags::of(1) && Tags::of(7999).control <= 32767, "MPI has tags up to 32767");
    for (ranks, workers) in [(2, 3), (6, 4)] {
        let placement = ["a", "b", "c", "d"][..workers].join(",");
        let model = Mlp::default().model().unwrap();
        let built = Pipeline::builder(model).place(placement).workers(program.first(ranks).into()).build();
        let said = built.err().expect("an error").to_string();
        assert!(
            said.contains(&format!("expected {workers} ranks")) && said.contains(&format!("got {ranks}")),
            "{said}"
        );
        assert!(said.contains(&format!("`mpirun -n {workers}`")), "{said}");
    }
}

/// Pure data parallelism, and replicas of two workers.
fn mpi_sums_gradients_as_the_ring_does(program: &MpiProgram) {
    let build = |subject: &one_device::Subject, placement: &str, workers: Workers, reduce: Reduce| {
        let count = if placement == "one" { 6 } else { 3 };
        replicas::replicas(subject, count, placement).micro_batches(1).workers(workers).reduce(reduce).build()
    };
    for subject in one_device::subjects() {
        for placement in ["one", "client,server,client"] {
            let what = format!("{} on {placement}", subject.name);
            let learned = |reduce: Reduce| {
                let mut pipeline = build(&subject, placement, program.ranks().into(), reduce).unwrap();
                let gradients = pipeline.gradients(&subject.batch(18, 0)).unwrap().1;
                let loss = |step: u64| pipeline.train_step(&subject.batch(18, step)).unwrap().loss;
                let losses: Vec<f64> = (0..3).map(loss).collect();
                one_device::soundness::assert_losses_sound(&what, &losses);
                // All replicas answer the same to the same rows, so they have the same parameters.
                let (rows, count) = (3, if placement == "one" { 6 } else { 3 });
                let inputs = subject.batch(rows, 9).inputs.into_iter();
                let inputs = inputs
                    .map(|input| input.repeat([&[count as i64][..], &vec![1; input.dim() - 1]].concat()))
                    .collect();
                let answers = pipeline.predict(inputs).unwrap();
                for replica in 1..count as i64 {
                    let (first, other) = (answers.narrow(0, 0, rows), answers.narrow(0, replica * rows, rows));
                    assert!(one_device::same_bits(&first, &other), "{what}: replica {replica} differs");
                }
                (gradients, losses)
            };
            let (ring, mpi) = (learned(Reduce::Ring), learned(Reduce::Mpi));
            let largest = |tensor: &Tensor| f64::try_from(tensor.abs().max().to_kind(Kind::Double)).unwrap();
            let all = ring.0.values().map(largest).fold(0.0, f64::max);
            for (name, expected) in &ring.0 {
                let gap = largest(&(&mpi.0[name] - expected)) / largest(expected).max(1e-4 * all);
                assert!(gap < 1e-5, "{what}: {name}: {gap}");
            }
            for (ring, mpi) in ring.1.iter().zip(&mpi.1) {
                assert!((ring - mpi).abs() < 1e-3 * ring.abs(), "{what}: {ring} {mpi}");
            }
        }
    }
    let subject = &one_device::subjects()[0];
    for workers in [Workers::Threads, program.first(3).into()] {
        let said = build(subject, "client,server,client", workers, Reduce::Mpi).err().expect("an error").to_string();
        assert!(said.contains("`Builder::reduce`: expected workers that are all the ranks"), "{said}");
    }
    let codecs = CodecPolicy { replicas: "bf16".parse().unwrap(), ..CodecPolicy::default() };
    let builder = replicas::replicas(subject, 6, "one").workers(program.ranks().into()).reduce(Reduce::Mpi);
    let said = builder.codecs(codecs).build().err().expect("an error").to_string();
    assert!(
        said.contains("`Builder::reduce`") && said.contains("`CodecPolicy::replicas` must be raw; got bf16"),
        "{said}"
    );
}

fn every_codec_trains_identically(program: &MpiProgram) {
    for text in distgpipe_core::codec::ALL.iter().map(|member| member.examples[0]) {
        let learned = |workers| coded::learned(coded::codecs(text, text), workers, false);
        one_device::assert_identical(text, &learned(program.first(2).into()), &learned(Workers::Threads));
        let learned = |workers| coded::learned_in_bf16(coded::codecs(text, text), workers, false);
        one_device::assert_identical(text, &learned(program.first(2).into()), &learned(Workers::Threads));
    }
}

fn evaluating_in_between_changes_nothing(program: &MpiProgram) {
    for text in distgpipe_core::codec::ALL.iter().map(|member| member.examples[0]) {
        let learned = |evaluate| coded::learned(coded::codecs(text, text), program.first(2).into(), evaluate);
        one_device::assert_identical(text, &learned(true), &learned(false));
        let learned = |evaluate| coded::learned_in_bf16(coded::codecs(text, text), program.first(2).into(), evaluate);
        one_device::assert_identical(text, &learned(true), &learned(false));
    }
}

/// Bodies of one piece, of several, and with a ragged last one, in both directions.
fn large_tensors_arrive_whole(program: &MpiProgram) {
    for hidden in [4096, 20_000, 65_536, 100_001] {
        let model = Mlp { hidden: vec![hidden, 8], dropout: 0.0, ..Mlp::default() }.model().unwrap();
        let learned = |workers: Workers| {
            let builder = Pipeline::builder(model.clone()).place("a,b").balance([1, 2]).micro_batches(2);
            let builder = builder.device(distgpipe::engine::Device::Cpu).threads(1).workers(workers);
            let mut pipeline = builder.build().unwrap();
            let x = Tensor::ones([7, 1, 8, 8], (Kind::Float, Device::Cpu));
            let step = pipeline.train_step(&Batch::new(x, Tensor::zeros([7], (Kind::Int64, Device::Cpu)))).unwrap();
            (pipeline.state().unwrap(), step.step_links)
        };
        let ((ranks, links), (threads, _)) = (learned(program.first(2).into()), learned(Workers::Threads));
        one_device::assert_identical(&format!("{hidden} wide"), &ranks, &threads);
        // Two frames in each direction, with a header, a byte that says how the body comes, and two checksums, and the driver's frames
        // of the targets.
        let header = HEADER_BYTES as u64;
        let tensors = 7 * u64::try_from(hidden).unwrap() * 4 + 2 * (header + 1 + 16);
        let sent: Vec<u64> = links.iter().map(|link| link.training_bytes).collect();
        assert_eq!(sent, [tensors + 7 * 8 + 2 * header, tensors], "{hidden} wide");
    }
}

/// The next run of the same ranks has nothing of the one before it.
fn assert_goes_on(program: &MpiProgram, after: &str) {
    let mut pipeline = failure_scenarios::pipeline(program.first(2).into(), "");
    pipeline.train_step(&batch()).unwrap_or_else(|e| panic!("after {after}: {e}"));
}

fn a_rank_that_panics_or_errs_is_named(program: &MpiProgram) {
    for (i, (worker, action)) in actions(&plan()).into_iter().filter(|(w, _)| w == "server").enumerate() {
        let scenario = format!("{worker}:{}@{action}", ["panic", "error"][i % 2]);
        assert_named(run_until_failure(program.first(2).into(), &scenario), &scenario, &worker, Some(action));
        assert_goes_on(program, &scenario);
    }
}

fn a_rank_that_hangs_is_named(program: &MpiProgram) {
    for (worker, action) in actions(&plan()).into_iter().filter(|(worker, _)| worker == "server") {
        let scenario = format!("{worker}:hang@{action}");
        assert_named(run_until_failure(program.first(2).into(), &scenario), &scenario, &worker, Some(action));
        assert_goes_on(program, &scenario);
    }
}

fn a_driver_that_fails_ends_the_run_of_the_ranks(program: &MpiProgram) {
    for scenario in ["client:panic@0F1", "client:error@2B1", "client:hang@2F0"] {
        let action = scenario.rsplit('@').next().map(|a| a.parse().expect("an action"));
        assert_named(run_until_failure(program.first(2).into(), scenario), scenario, "client", action);
        assert_goes_on(program, scenario);
    }
}

fn a_replica_that_fails_is_named(program: &MpiProgram) {
    for scenario in ["server/1:panic@1F1", "client/1:error@0B2", "server/0:hang@1B0", "client/1:panic@2F1"] {
        let (who, action) = (scenario.split(':').next().expect("a name"), scenario.rsplit('@').next());
        let phase = action.map(|a| a.parse().expect("an action"));
        assert_named(run_replicas_until_failure(program.first(4).into(), scenario), scenario, who, phase);
        assert_goes_on(program, scenario);
    }
    for scenario in ["server/1>server/0:stall@1", "client/0>client/1:cut@4", "client/1>client/0:corrupt@3"] {
        assert_link_named(run_replicas_until_failure(program.first(4).into(), scenario), scenario, "client/0");
        assert_goes_on(program, scenario);
    }
}

fn a_broken_link_is_found_at_any_message(program: &MpiProgram) {
    let plan = plan();
    let (client, server) = (WorkerId(0), WorkerId(1));
    for (from, to, messages) in
        [("client", "server", plan.messages(client, server)), ("server", "client", plan.messages(server, client))]
    {
        for message in 0..messages as u64 {
            let fault = ["corrupt", "cut", "stall"][message as usize % 3];
            let scenario = format!("seed={message};{from}>{to}:{fault}@{message}");
            assert_link_named(run_until_failure(program.first(2).into(), &scenario), &scenario, "client");
        }
    }
    assert_goes_on(program, "broken links");
}

/// A large body has another path than one that travels with its header. The seeds damage the message that announces it as well as its
/// pieces.
fn a_broken_link_is_found_within_a_large_body(program: &MpiProgram) {
    let (plan, workers) = (plan(), || program.first(2).into());
    for (from, to, messages) in [
        ("client", "server", plan.messages(WorkerId(0), WorkerId(1))),
        ("server", "client", plan.messages(WorkerId(1), WorkerId(0))),
    ] {
        for message in 0..messages as u64 {
            let faults = ["corrupt", "corrupt", "corrupt", ["cut", "stall"][message as usize % 2]];
            for (seed, fault) in faults.into_iter().enumerate() {
                let scenario = format!("seed={};{from}>{to}:{fault}@{message}", 10 * message + seed as u64);
                assert_link_named(run_wide_until_failure(workers(), &scenario), &scenario, "client");
            }
        }
    }
    assert_goes_on(program, "links that broke within a body");
}

fn delays_change_nothing(program: &MpiProgram) {
    let loss = |scenario: &str| {
        let mut pipeline = failure_scenarios::pipeline(program.first(2).into(), scenario);
        pipeline.train_step(&batch()).expect("a step").loss.to_bits()
    };
    assert_eq!(loss("seed=3;client>server:delay=20@0;server>client:delay=20@0"), loss(""));
}

fn the_cause_survives_large_messages(program: &MpiProgram) {
    failure_scenarios::check_large_messages(|| program.first(2).into(), |scenario| assert_goes_on(program, scenario));
}

fn a_job_that_a_rank_cannot_run_fails_with_its_reason(program: &MpiProgram) {
    let mut model = Mlp::default().model().unwrap();
    model.spec = Some(distgpipe::ModelSpec { name: "mine".to_owned(), settings: serde_json::Value::Null });
    let built = Pipeline::builder(model).place("a,b").workers(program.first(2).into()).build();
    match built {
        Err(BuildError::Failed(failure)) => {
            assert!(failure.worker == "b" && failure.message.contains("got `mine`"), "{failure}");
        }
        other => panic!("expected a failure, got {:?}", other.map(|_| ())),
    }
    assert_goes_on(program, "a model that it does not know");
}
