//! Links outlive their connections: whatever breaks, the run goes on where it was, bit for bit.

mod cutting_relay;
mod soundness;

use cutting_relay::{Act, At, CuttingRelay, From, Script};
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::handshake::{self, Credentials, Token};
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::comm::transport::tcp::Resume;
use distgpipe::comm::watchdog::CLAIMED_STALLS_MAX;
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{
    Batch, BuildError, Builder, Failure, Fault, Notice, Pipeline, ServeOptions, Server, StepError, Workers,
};
use distgpipe_core::codec::ALL;
use distgpipe_core::wire::{Hello, Kind as FrameKind, Role, HEADER_BYTES};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TOKEN: Token = Token([7; 32]);

/// Long enough for a busy machine.
const PATIENT: Timeouts = Timeouts { stall_s: 60.0, silence_s: 60.0, connect_s: 60.0, reconnect_s: 60.0 };

/// A worker on a thread of this process that serves one run.
fn server() -> SocketAddr {
    serve(true)
}

/// A worker that serves one run, or one after the other.
fn serve(once: bool) -> SocketAddr {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let server = Server::bind(ServeOptions { once, ..ServeOptions::new(listen, TOKEN) }).expect("a port");
    let address = server.address().expect("an address");
    std::thread::spawn(move || server.run(|| false, |_| {}));
    address
}

fn builder(address: SocketAddr, codec: &str) -> Builder {
    let model = Mlp { hidden: vec![24, 24], dropout: 0.2, ..Mlp::default() }.model().expect("a model");
    let codec = codec.parse::<distgpipe_core::codec::CodecSpec>().expect("a codec");
    Pipeline::builder(model)
        .device(distgpipe::Device::Cpu)
        .threads(1)
        .place("client,server,client")
        .micro_batches(2)
        .learning_rate(0.01)
        .codecs(CodecPolicy { forward: codec.clone(), backward: codec, ..CodecPolicy::default() })
        .timeouts(PATIENT)
        .workers(Workers::Remote { addresses: vec![address.to_string()], token: TOKEN })
}

fn batch(step: i64) -> Batch {
    let pixels = Tensor::arange(8 * 64, (Kind::Float, Device::Cpu)).view([8, 1, 8, 8]);
    let inputs = ((pixels + 37 * step).sin() * 0.5).to_kind(Kind::Float);
    let samples = (0..8).map(|row| 8 * (step as u64 % 2) + row).collect();
    Batch { inputs: vec![inputs], target: Tensor::arange(8, (Kind::Int64, Device::Cpu)), samples }
}

const STEPS: i64 = 3;

/// The losses and the final weights, bit for bit.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<u64>,
    weights: BTreeMap<String, Vec<u32>>,
}

fn train(pipeline: &mut Pipeline) -> Result<Trained, StepError> {
    let mut losses = Vec::new();
    for step in 0..STEPS {
        losses.push(pipeline.train_step(&batch(step))?.loss);
    }
    soundness::assert_losses_sound("a few steps", &losses);
    let bits = |tensor: &Tensor| {
        let values = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).view(-1)).expect("floats");
        values.into_iter().map(f32::to_bits).collect()
    };
    let weights = pipeline.state()?.iter().map(|(name, tensor)| (name.clone(), bits(tensor))).collect();
    Ok(Trained { losses: losses.into_iter().map(f64::to_bits).collect(), weights })
}

fn undisturbed(codec: &str) -> Trained {
    train(&mut builder(server(), codec).build().expect("a pipeline")).expect("a run")
}

/// Trains through a relay, and asserts that everything in its script has happened.
fn disturbed(codec: &str, script: Script, timeouts: Timeouts) -> (Result<Trained, StepError>, CuttingRelay) {
    let relay = CuttingRelay::start(server(), script);
    let mut pipeline = builder(relay.address, codec).timeouts(timeouts).build().expect("a pipeline");
    let trained = train(&mut pipeline);
    drop(pipeline);
    assert_eq!(relay.left(), vec![], "{codec}: some of the script did not happen");
    (trained, relay)
}

fn failure(result: Result<Trained, StepError>) -> Failure {
    match result {
        Err(StepError::Failed(failure)) => failure,
        other => panic!("expected a failure, got {other:?}"),
    }
}

/// Every codec, and every kind of memory: a codec that encoded or decoded a tensor twice, or not at all, would go on differently.
#[test]
fn a_link_that_is_cut_at_every_frame_changes_no_bit_with_any_codec() {
    let of_each = ALL.iter().map(|member| member.examples[0]);
    // The runs mostly wait for connections, so they all go on at once.
    std::thread::scope(|scope| {
        for (i, codec) in of_each.chain(["feedback(topk:0.2)", "feedback(svd:2)"]).enumerate() {
            let acts = [Act::CutInside, Act::CutBefore, Act::CutAfter];
            let mut script = Script::new();
            for sequence in 1..16 {
                // Over the codecs, every frame is cut in every way.
                script.push((From::Driver, At::Sequence(sequence), acts[(i + sequence as usize) % 3]));
                script.push((From::Worker, At::Sequence(sequence), acts[(i + sequence as usize + 1) % 3]));
            }
            scope.spawn(move || {
                let cuts = script.len();
                let (trained, relay) = disturbed(codec, script, PATIENT);
                assert_eq!(trained.expect("the run goes on"), undisturbed(codec), "{codec}");
                assert!(relay.connections() > cuts / 2, "{codec}: {} connections for {cuts} cuts", relay.connections());
            });
        }
    });
}

#[test]
fn a_link_that_is_cut_while_it_resumes_resumes_at_the_next_attempt() {
    let script = vec![
        (From::Driver, At::Sequence(6), Act::CutInside),
        (From::Driver, At::Handshake(1, FrameKind::Hello), Act::CutInside),
        (From::Worker, At::Handshake(2, FrameKind::Welcome), Act::CutBefore),
        (From::Worker, At::Handshake(3, FrameKind::Welcome), Act::CutInside),
        (From::Worker, At::Handshake(4, FrameKind::Welcome), Act::CutAfter),
        (From::Worker, At::Sequence(9), Act::CutInside),
    ];
    let (trained, _) = disturbed("feedback(tile:4)", script, PATIENT);
    assert_eq!(trained.expect("the run goes on"), undisturbed("feedback(tile:4)"));
}

#[test]
fn a_frame_that_arrives_again_is_ignored_and_a_missing_one_is_refused() {
    for act in [Act::Repeat, Act::Stale] {
        let script = (3..12)
            .flat_map(|s| [(From::Driver, At::Sequence(s), act), (From::Worker, At::Sequence(s), act)])
            .collect();
        let (trained, relay) = disturbed("feedback(tile:4)", script, PATIENT);
        assert_eq!(trained.expect("the run goes on"), undisturbed("feedback(tile:4)"), "{act:?}");
        assert_eq!(relay.connections(), 1);
    }
    for (from, act) in [From::Driver, From::Worker].into_iter().flat_map(|from| [(from, Act::Skip), (from, Act::Swap)])
    {
        let (trained, _) = disturbed("raw", vec![(from, At::Sequence(7), act)], PATIENT);
        let failure = failure(trained);
        assert!(failure.message.contains("expected frame 7 of the link, got frame 8"), "{from:?}, {act:?}: {failure}");
    }
}

/// The wait for a connection once counted as progress that the lost worker claims, which the watchdog believes only so often and for
/// so long. A cut within `reconnect_s` then ended the run as a stall.
#[test]
fn a_cut_that_outlasts_every_limit_of_a_stall_is_no_stall() {
    let stall_s = 1.5;
    // The pauses between attempts grow to a second.
    let attempts = 40;
    let mut script = vec![(From::Driver, At::Sequence(6), Act::CutInside)];
    script.extend((1..=attempts).map(|n| (From::Driver, At::Handshake(n, FrameKind::Hello), Act::CutBefore)));
    let start = Instant::now();
    let (trained, relay) = disturbed("raw", script, Timeouts { stall_s, reconnect_s: 300.0, ..PATIENT });
    assert_eq!(trained.expect("the run goes on"), undisturbed("raw"));
    assert!(relay.connections() > attempts);
    let cut_max = f64::from(CLAIMED_STALLS_MAX + 1) * stall_s;
    assert!(start.elapsed().as_secs_f64() > cut_max, "{:?} is no test of {cut_max} s", start.elapsed());
}

/// Both sockets stay open and nothing arrives: the heartbeats are missed, and another connection takes over.
#[test]
fn a_half_open_connection_is_replaced() {
    let impatient = Timeouts { silence_s: 2.0, ..PATIENT };
    for from in [From::Driver, From::Worker] {
        let (trained, relay) = disturbed("feedback(tile:4)", vec![(from, At::Sequence(8), Act::Freeze)], impatient);
        assert_eq!(trained.expect("the run goes on"), undisturbed("feedback(tile:4)"), "{from:?}");
        assert!(relay.connections() > 1);
    }
}

#[test]
fn without_reconnection_the_first_cut_ends_the_run() {
    let at_once = Timeouts { reconnect_s: 0.0, ..PATIENT };
    let (trained, relay) = disturbed("raw", vec![(From::Worker, At::Sequence(6), Act::CutInside)], at_once);
    let failure = failure(trained);
    assert_eq!(
        failure.to_string(),
        "lost the connection to server: the process ended or was killed, or the network is down"
    );
    assert_eq!(relay.connections(), 1);
}

/// The user hears what is going on, and that it is over.
#[test]
fn a_cut_that_lasts_is_reported_until_it_is_over() {
    let frozen = vec![(From::Worker, At::Sequence(8), Act::Freeze)];
    let relay = CuttingRelay::start(server(), frozen);
    let notices = Arc::new(Mutex::new(Vec::new()));
    let seen = notices.clone();
    let mut pipeline = builder(relay.address, "raw")
        .timeouts(Timeouts { silence_s: 2.0, ..PATIENT })
        .on_notice(move |notice| seen.lock().expect("no panic").push(notice.clone()))
        .build()
        .expect("a pipeline");
    train(&mut pipeline).expect("the run goes on");
    let notices = notices.lock().expect("no panic");
    let back = notices.iter().any(|notice| matches!(notice, Notice::Reconnected { worker, .. } if worker == "server"));
    assert!(back, "{notices:?}");
}

/// A connection that was given up, or somebody who has recorded its hello, cannot take the place of the newer one.
#[test]
fn a_hello_of_an_earlier_connection_is_refused() {
    let worker = server();
    let cuts = [2, 4].map(|s| (From::Driver, At::Sequence(s), Act::CutBefore));
    let relay = CuttingRelay::start(worker, cuts.to_vec());
    let mut pipeline = builder(relay.address, "raw").build().expect("a pipeline");
    pipeline.train_step(&batch(0)).expect("a step");
    let hellos = relay.hellos.lock().expect("no panic").clone();
    let epochs: Vec<u64> =
        hellos.iter().map(|hello| Hello::decode(&hello[HEADER_BYTES..]).expect("a hello").epoch).collect();
    assert!(epochs.len() >= 3 && epochs.windows(2).all(|pair| pair[0] < pair[1]), "{epochs:?}");
    for hello in &hellos {
        let mut stale = TcpStream::connect(worker).expect("it listens");
        stale.write_all(hello).expect("it reads");
        stale.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        let mut answer = vec![0; HEADER_BYTES];
        stale.read_exact(&mut answer).expect("an answer");
        let epoch = Hello::decode(&hello[HEADER_BYTES..]).expect("a hello").epoch;
        // The first hello of a run is welcomed once more, and then nobody reads from it.
        assert!(epoch == 0 || answer[6] == FrameKind::Refuse.number(), "epoch {epoch}: kind {}", answer[6]);
    }
    let before = relay.connections();
    pipeline.train_step(&batch(1)).expect("the run goes on");
    assert_eq!(relay.connections(), before, "nothing was cut");
}

/// A driver that was killed does not come back. Its worker would wait for it, and refuse all others meanwhile.
#[test]
fn a_worker_whose_driver_is_gone_takes_another_long_before_it_gives_up_waiting() {
    let worker = serve(false);
    let relay = CuttingRelay::start(worker, vec![(From::Driver, At::Sequence(4), Act::CutBefore)]);
    let mut first = builder(relay.address, "raw").build().expect("a pipeline");
    // The driver finds nobody to connect to, so the worker does not hear from it.
    relay.stop();
    let lost = failure(train(&mut first));
    assert_eq!(lost.worker, "server", "{lost}");
    drop(first);
    let start = Instant::now();
    let mut second = loop {
        match builder(worker, "raw").build() {
            Ok(pipeline) => break pipeline,
            Err(BuildError::Failed(busy)) if busy.is_busy() => std::thread::sleep(Duration::from_millis(100)),
            Err(other) => panic!("{other}"),
        }
        assert!(start.elapsed() < PATIENT.reconnect() / 2, "the worker waits for a driver that is gone");
    };
    assert_eq!(train(&mut second).expect("a run"), undisturbed("raw"));
}

/// The worker takes another driver by then, and once handed the link of the lost one to whoever resumed any run.
#[test]
fn a_driver_that_resumes_another_run_is_refused_also_when_the_driver_is_gone() {
    let worker = serve(false);
    let relay = CuttingRelay::start(worker, vec![(From::Driver, At::Sequence(4), Act::CutBefore)]);
    let mut first = builder(relay.address, "raw").build().expect("a pipeline");
    relay.stop();
    failure(train(&mut first));
    drop(first);
    let start = Instant::now();
    // The worker waits two seconds for the driver before it would take another.
    for epoch in 100.. {
        let resume = Resume { epoch, ..Resume::first(PATIENT.connect()) };
        let credentials = Credentials { run: [9; 16], token: TOKEN };
        let answer = handshake::dial_again(&worker.to_string(), Role::Driver, &credentials, resume).map(|_| ());
        assert!(matches!(answer, Err(Fault::Refused { .. } | Fault::Busy { .. })), "{answer:?}");
        if start.elapsed() > Duration::from_secs(4) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A disk that stalls while a checkpoint is collected once killed the run: the tensors filled the mailbox, nobody read the socket,
/// and the worker gave the driver up.
#[test]
fn a_driver_that_takes_tensors_slowly_loses_no_worker() {
    let model = Mlp { hidden: vec![192; 70], dropout: 0.0, ..Mlp::default() }.model().expect("a model");
    let silence = Duration::from_secs(3);
    let mut pipeline = Pipeline::builder(model)
        .device(distgpipe::Device::Cpu)
        .threads(1)
        .balance([1, 70])
        .place("client,server")
        .workers(Workers::Remote { addresses: vec![server().to_string()], token: TOKEN })
        .timeouts(Timeouts { silence_s: silence.as_secs_f64(), reconnect_s: 0.0, ..PATIENT })
        .build()
        .expect("a pipeline");
    let mut taken = 0;
    pipeline
        .state_each(|_, _| {
            taken += 1;
            if taken == 4 {
                let start = Instant::now();
                while start.elapsed() < 2 * silence {
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            Ok::<(), StepError>(())
        })
        .expect("the worker waits");
    assert!(taken > 130, "{taken} tensors");
}

/// The thread that encodes once sent the heartbeats too, so a worker that encoded for longer than a silence may last counted as
/// dead.
#[test]
fn an_encoder_that_takes_long_is_no_silence() {
    let silence_s = 2.0;
    let timeouts = Timeouts { silence_s, reconnect_s: 0.0, ..PATIENT };
    let step = |faults: &str| {
        let mut pipeline = builder(server(), "raw").timeouts(timeouts).faults(faults).build().expect("a pipeline");
        let start = Instant::now();
        let loss = pipeline.train_step(&batch(0)).expect("the worker is not given up").loss.to_bits();
        (loss, start.elapsed().as_secs_f64())
    };
    // The last message of the step is the sixth. The seed draws a delay close to its maximum.
    let (loss, took_s) = step("seed=7;server>client:delay=4000@5");
    assert!(took_s > 1.2 * silence_s, "{took_s} s");
    assert_eq!(loss, step("").0);
}

/// It never comes to an end here, and is found by the limit that is for that.
#[test]
fn an_encoder_that_does_not_end_is_no_progress() {
    let timeouts = Timeouts { silence_s: 2.0, stall_s: 6.0, reconnect_s: 0.0, ..PATIENT };
    let builder = builder(server(), "raw").timeouts(timeouts).faults("server>client:stall@4");
    let failure = failure(train(&mut builder.build().expect("a pipeline")));
    assert!(failure.message.starts_with("made no progress for 6.0 s"), "{failure}");
}
