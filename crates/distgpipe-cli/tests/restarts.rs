//! A lost worker is replaced: the run goes back to its last state, repeats the steps since then, and computes what it would have
//! computed.

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::data::{Digits, Loader, LoaderOptions, Split};
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Kind, Tensor};
use distgpipe::train::checkpoint::Checkpoints;
use distgpipe::train::{Event, SaveEvery, TrainError, TrainOptions, Trainer};
use distgpipe::{Optim, Pipeline, WorkerProgram, Workers};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Tests here look at all children of this process, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

fn processes() -> Workers {
    let quietly = ["-c", r#"exec "$0" "$@" 2>/dev/null"#, env!("CARGO_BIN_EXE_distgpipe"), "worker", "--child"];
    Workers::Processes(WorkerProgram { program: PathBuf::from("sh"), arguments: quietly.map(str::to_owned).to_vec() })
}

/// Kills the worker processes of this process.
fn kill_workers() {
    let me = std::process::id().to_string();
    let mut killed = 0;
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{id}/stat")) else { continue };
        let mut words = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        if words.next() != Some("Z") && words.next() == Some(&me) {
            killed += 1;
            assert!(Command::new("kill").args(["-KILL", &id.to_string()]).status().expect("kill").success());
        }
    }
    assert!(killed > 0, "there is a worker to kill");
}

fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("restarts").join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// Eight batches an epoch, 20 steps.
const STEPS: u64 = 20;

fn options(restarts: u64) -> TrainOptions {
    TrainOptions { epochs: 3, steps_max: Some(STEPS), restarts, ..TrainOptions::default() }
}

/// The bits of each step's loss and of the final weights, and what happened.
#[derive(Debug, Default)]
struct Run {
    losses: BTreeMap<u64, u64>,
    weights: BTreeMap<String, Vec<u32>>,
    events: Vec<String>,
}

/// What happens to the worker.
#[derive(Default)]
struct Losses<'a> {
    /// It is killed after each of these steps, once.
    kill_after: &'a [u64],
    /// It is killed after the first checkpoint that is saved.
    kill_at_save: bool,
    /// It is cut off for good (`cut`) or killed (`kill`) before this message of its own.
    fault_at: Option<(&'a str, u64)>,
    /// It is killed when this file of a checkpoint that is being written is there.
    kill_at_file: Option<PathBuf>,
}

/// Kills the workers when a file is there, until the value that it returns is dropped.
fn kill_at_file(file: PathBuf) -> impl Drop {
    struct Watcher(Arc<AtomicBool>, Option<JoinHandle<()>>);
    impl Drop for Watcher {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
            self.1.take().expect("a thread").join().expect("no panic");
        }
    }
    let over = Arc::new(AtomicBool::new(false));
    let ended = over.clone();
    let watch = move || {
        while !ended.load(Ordering::SeqCst) {
            if file.exists() {
                return kill_workers();
            }
        }
    };
    Watcher(over, Some(std::thread::spawn(watch)))
}

/// Trains with a codec that remembers, Adam and dropout.
fn run(checkpoints: Option<&Checkpoints>, options: TrainOptions, losses: Losses<'_>) -> Result<Run, TrainError> {
    let reconnect_s = if losses.fault_at.is_some_and(|(fault, _)| fault == "cut") { 0.0 } else { 60.0 };
    let codec: distgpipe_core::codec::CodecSpec = "feedback(tile:8)".parse().expect("a codec");
    let mut pipeline = Pipeline::builder(Mlp { hidden: vec![16, 16], ..Mlp::default() }.model().expect("a model"))
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .place("client,server,client")
        .micro_batches(2)
        .optimizer(Optim::adam())
        .learning_rate(1e-3)
        .codecs(CodecPolicy { forward: codec.clone(), backward: codec, ..CodecPolicy::default() })
        .timeouts(Timeouts { stall_s: 60.0, silence_s: 60.0, connect_s: 60.0, reconnect_s })
        .faults(losses.fault_at.map(|(fault, at)| format!("server>client:{fault}@{at}")).unwrap_or_default())
        .workers(processes())
        .build()
        .expect("a pipeline");
    let digits = Digits::new(Split::Train, Default::default()).expect("digits");
    let loader = Loader::new(Arc::new(digits), LoaderOptions::training(180, 3)).expect("a loader");
    let steps = options.steps_max.expect("it is set");
    let mut trainer = Trainer::new(&mut pipeline, loader, None, options).expect("a trainer");
    if let Some(checkpoints) = checkpoints {
        trainer = trainer.save_to(checkpoints, SaveEvery::Steps(3), serde_json::Value::Null);
    }
    let _watcher = losses.kill_at_file.map(kill_at_file);
    let (mut run, mut kills, mut at_save) = (Run::default(), losses.kill_after.to_vec(), losses.kill_at_save);
    let summary = trainer.run(|event, _| {
        match event {
            Event::StepDone(done) => {
                let bits = done.outcome.loss.to_bits();
                let earlier = run.losses.insert(done.step, bits);
                assert!(
                    earlier.is_none_or(|earlier| earlier == bits),
                    "step {} is repeated with another loss",
                    done.step
                );
                if let Some(at) = kills.iter().position(|step| *step == done.step) {
                    kills.remove(at);
                    kill_workers();
                }
            }
            Event::Saved { .. } if std::mem::take(&mut at_save) => kill_workers(),
            Event::StateKept { .. } => run.events.push("kept".to_owned()),
            Event::WorkerLost { failure, restart, step, .. } => {
                assert_eq!(failure.worker, "server", "{failure}");
                run.events.push(format!("lost {restart}: back to {step}"));
            }
            Event::Restarted { step, .. } => run.events.push(format!("restarted at {step}")),
            _ => {}
        }
        Ok(())
    })?;
    assert_eq!(summary.steps, steps, "repeated steps count once");
    let bits = |tensor: &Tensor| {
        let values = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).view(-1)).expect("floats");
        values.into_iter().map(f32::to_bits).collect()
    };
    run.weights = pipeline.state()?.iter().map(|(name, tensor)| (name.clone(), bits(tensor))).collect();
    Ok(run)
}

#[test]
fn a_run_that_loses_its_worker_goes_back_to_its_checkpoint_and_computes_the_same() {
    let _alone = alone();
    let (quiet, disturbed) = (folder("quiet"), folder("disturbed"));
    let checkpoints = Checkpoints::open(&quiet, 2).expect("a folder");
    let expected = run(Some(&checkpoints), options(0), Losses::default()).expect("a run");
    let checkpoints = Checkpoints::open(&disturbed, 2).expect("a folder");
    // Before the first checkpoint, right after one, between two, and at the end of an epoch.
    let got = run(
        Some(&checkpoints),
        options(9),
        Losses { kill_after: &[1, 10, 15], kill_at_save: true, ..Losses::default() },
    )
    .expect("the run goes on");
    assert_eq!((got.losses, got.weights), (expected.losses, expected.weights));
    let events = [
        "lost 1: back to 0",
        "restarted at 0",
        "lost 2: back to 3",
        "restarted at 3",
        "lost 3: back to 9",
        "restarted at 9",
        "lost 4: back to 15",
        "restarted at 15",
    ];
    assert_eq!(got.events, events);
}

/// A run that lost its worker in a checkpoint once saved the next one a step later than an undisturbed run, which resets codecs.
#[test]
fn a_worker_that_is_lost_in_any_phase_of_a_checkpoint_changes_nothing() {
    let _alone = alone();
    let train = |fault_at: Option<(&str, u64)>| {
        let name = format!("fault-{fault_at:?}").replace('"', "");
        let checkpoints = Checkpoints::open(&folder(&name), 2).expect("a folder");
        let steps = TrainOptions { steps_max: Some(8), ..options(1) };
        run(Some(&checkpoints), steps, Losses { fault_at, ..Losses::default() })
            .unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let expected = train(None);
    // From the end of the third step to the beginning of the fourth: the codecs are reset, the names of the tensors, the tensors.
    for (fault, first) in [("cut", 22), ("kill", 24)] {
        let mut lost = 0;
        for message in (first..62).step_by(4) {
            let got = train(Some((fault, message)));
            assert_eq!((&got.losses, &got.weights), (&expected.losses, &expected.weights), "{fault} at {message}");
            lost += usize::from(got.events.len() > 1);
        }
        assert!(lost > 4, "most of the faults happen: {lost} times {fault}");
    }
}

/// The worker has sent some or all of its tensors, and the driver writes them.
#[test]
fn a_worker_that_is_killed_while_a_checkpoint_is_written_changes_nothing() {
    let _alone = alone();
    let train = |name: &str, file: Option<&str>| {
        let folder = folder(&format!("killed-{name}"));
        let checkpoints = Checkpoints::open(&folder, 2).expect("a folder");
        let kill_at_file = file.map(|file| folder.join(".step-00000006.partial").join(file));
        let steps = TrainOptions { steps_max: Some(11), ..options(1) };
        run(Some(&checkpoints), steps, Losses { kill_at_file, ..Losses::default() })
            .unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let expected = train("never", None);
    let mut lost = 0;
    for (i, file) in
        ["model.safetensors", "optimizer.safetensors", "checkpoint.json"].into_iter().cycle().take(6).enumerate()
    {
        let got = train(&format!("{i}"), Some(file));
        assert_eq!((&got.losses, &got.weights), (&expected.losses, &expected.weights), "{file}");
        // The checkpoint is complete or it is not.
        assert!(
            got.events.is_empty() || ["lost 1: back to 3", "lost 1: back to 6"].contains(&&got.events[0][..]),
            "{:?}",
            got.events
        );
        lost += usize::from(!got.events.is_empty());
    }
    assert!(lost > 0, "the files are there for too short a time");
}

#[test]
fn without_checkpoints_the_state_is_kept_in_memory() {
    let _alone = alone();
    let expected = run(None, options(1), Losses::default()).expect("a run");
    assert_eq!(expected.events, ["kept"]);
    let got = run(None, options(2), Losses { kill_after: &[3, 12], ..Losses::default() }).expect("the run goes on");
    let events: Vec<&str> = got.events.iter().map(String::as_str).collect();
    assert_eq!(events[..3], ["lost 1: back to 0", "restarted at 0", "kept"], "no copy is made of new workers' state");
    // The state after the first epoch, which has 10 batches of 180 rows or fewer.
    assert!(events[3].starts_with("lost 2: back to ") && events[3] != "lost 2: back to 0", "{events:?}");
    assert_eq!((got.losses, got.weights), (expected.losses, expected.weights));
}

#[test]
fn restarts_are_bounded_and_off_by_default() {
    let _alone = alone();
    for (restarts, kills) in [(0, &[2][..]), (1, &[2, 4])] {
        let error = run(None, options(restarts), Losses { kill_after: kills, ..Losses::default() })
            .expect_err("too many losses")
            .to_string();
        assert!(error.starts_with("lost the connection to server: the process ended or was killed"), "{error}");
    }
    assert_eq!(TrainOptions::default().restarts, 0);
}
