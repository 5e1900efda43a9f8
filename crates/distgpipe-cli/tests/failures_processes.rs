//! Law 5 between processes over TCP: whoever fails is named, everybody ends, no process and no port is left.

#[path = "../../distgpipe/tests/failure_scenarios/mod.rs"]
mod failure_scenarios;
mod servers;

use distgpipe::model::zoo::Mlp;
use distgpipe::{BuildError, Notice, Pipeline, StepError, WorkerProgram, Workers};
use distgpipe_core::codec::CodecId;
use distgpipe_core::wire::{AbortNotice, DType, Header, Kind as WireKind, Layout, Refuse, Shape, TensorMeta, Welcome};
use distgpipe_core::WorkerId;
use failure_scenarios::{
    actions, assert_link_named, assert_named, batch, plan, run_replicas_until_failure, run_until_failure, BOUND,
    PATIENT, SHORT,
};
use servers::{Servers, TOKEN};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Worker processes that complain to nobody: what they say of the failures they are told to have is no news, and would
/// hide the one that is.
fn processes() -> Workers {
    let quietly = ["-c", r#"exec "$0" "$@" 2>/dev/null"#, env!("CARGO_BIN_EXE_distgpipe"), "worker", "--child"];
    Workers::Processes(WorkerProgram { program: PathBuf::from("sh"), arguments: quietly.map(str::to_owned).to_vec() })
}

/// Tests here look at all children of this process, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// The number of each process or thread in such a folder of /proc, its state, and its parent's number.
fn tasks(folder: &str) -> Vec<(u32, String, String)> {
    let all = std::fs::read_dir(folder).expect(folder).flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    let task = |number: u32| {
        let stat = std::fs::read_to_string(format!("{folder}/{number}/stat")).ok()?;
        // After the name in brackets.
        let mut words = stat.rsplit(')').next()?.split_whitespace().map(str::to_owned);
        Some((number, words.next()?, words.next()?))
    };
    numbers.filter_map(task).collect()
}

/// Processes whose parent is this one, zombies included.
fn children() -> Vec<u32> {
    let me = std::process::id().to_string();
    tasks("/proc").into_iter().filter(|(_, _, parent)| *parent == me).map(|(number, ..)| number).collect()
}

/// The states of a process's threads.
fn threads_of(process: u32) -> Vec<String> {
    tasks(&format!("/proc/{process}/task")).into_iter().map(|(_, state, _)| state).collect()
}

#[test]
fn a_worker_process_that_is_killed_panics_or_errs_is_named_and_nothing_is_left() {
    let _alone = alone();
    // Every action for the kill; the others differ from threads only in how the news travels.
    for (i, (worker, action)) in actions(&plan()).into_iter().filter(|(w, _)| w == "server").enumerate() {
        let fault = ["kill", "panic", "kill", "error"][i % 4];
        let scenario = format!("{worker}:{fault}@{action}");
        let phase = (fault != "kill").then_some(action);
        assert_named(run_until_failure(processes(), &scenario), &scenario, &worker, phase);
        assert_eq!(children(), Vec::<u32>::new(), "{scenario}: a process is left");
    }
}

/// Three processes beside the first worker, linked in pipelines and in rings.
#[test]
fn a_replica_process_that_fails_is_named_and_nothing_is_left() {
    let _alone = alone();
    for scenario in ["server/1:kill@1F1", "client/1:kill@0B2", "server/0:hang@1B0", "client/1:panic@2F1"] {
        let (who, action) = (scenario.split(':').next().expect("a name"), scenario.rsplit('@').next());
        let phase = action.filter(|_| !scenario.contains("kill")).map(|a| a.parse().expect("an action"));
        assert_named(run_replicas_until_failure(processes(), scenario), scenario, who, phase);
        assert_eq!(children(), Vec::<u32>::new(), "{scenario}: a process is left");
    }
    for scenario in ["server/1>server/0:stall@1", "client/0>client/1:cut@4", "client/1>client/0:corrupt@3"] {
        assert_link_named(run_replicas_until_failure(processes(), scenario), scenario, "client/0");
        assert_eq!(children(), Vec::<u32>::new(), "{scenario}: a process is left");
    }
}

#[test]
fn a_client_that_fails_ends_its_worker_processes() {
    let _alone = alone();
    for scenario in ["client:panic@0F1", "client:error@2B1", "client:hang@2F0"] {
        let action = scenario.rsplit('@').next().map(|a| a.parse().expect("an action"));
        assert_named(run_until_failure(processes(), scenario), scenario, "client", action);
        assert_eq!(children(), Vec::<u32>::new(), "{scenario}: a process is left");
    }
}

#[test]
fn a_worker_process_that_hangs_is_named() {
    let _alone = alone();
    for scenario in ["server:hang@1F0", "server:hang@1B2"] {
        let action = scenario.rsplit('@').next().map(|a| a.parse().expect("an action"));
        assert_named(run_until_failure(processes(), scenario), scenario, "server", action);
        assert_eq!(children(), Vec::<u32>::new(), "{scenario}: a process is left");
    }
}

#[test]
fn a_broken_connection_is_found_at_any_message() {
    let _alone = alone();
    let plan = plan();
    let (client, server) = (WorkerId(0), WorkerId(1));
    for (from, to, messages) in
        [("client", "server", plan.messages(client, server)), ("server", "client", plan.messages(server, client))]
    {
        for message in 0..messages as u64 {
            let fault = ["corrupt", "cut", "stall"][message as usize % 3];
            let scenario = format!("seed={message};{from}>{to}:{fault}@{message}");
            assert_link_named(run_until_failure(processes(), &scenario), &scenario, "client");
            assert_eq!(children(), Vec::<u32>::new(), "{scenario}: a process is left");
        }
    }
}

/// Between any two processes: the driver dials the workers, and workers dial each other.
#[test]
fn a_connection_that_is_cut_at_any_message_is_restored_and_no_bit_changes() {
    let _alone = alone();
    let losses = |scenario: &str| -> Vec<u64> {
        let mut pipeline = failure_scenarios::builder(processes(), scenario)
            .timeouts(PATIENT)
            .place("client,a,b")
            .balance([1, 1, 1])
            .codecs(Default::default())
            .build()
            .unwrap_or_else(|e| panic!("{scenario}: {e}"));
        let step = |_| pipeline.train_step(&batch()).unwrap_or_else(|e| panic!("{scenario}: {e}")).loss.to_bits();
        (0..2).map(step).collect()
    };
    let undisturbed = losses("");
    let links = ["client>a", "a>client", "a>b", "b>a", "client>b", "b>client"];
    let cuts: Vec<String> = links.iter().flat_map(|link| (0..6).map(move |at| format!("{link}:cut@{at}"))).collect();
    assert_eq!(losses(&cuts.join(";")), undisturbed);
}

#[test]
fn the_cause_survives_large_messages() {
    let _alone = alone();
    failure_scenarios::check_large_messages(processes, |scenario| {
        assert_eq!(children(), Vec::<u32>::new(), "{scenario}: a process is left");
    });
}

fn signal(process: u32, signal: &str) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().expect("kill");
    assert!(sent.success());
}

/// Suspends a process.
fn stop(process: u32) {
    signal(process, "-STOP");
    // The signal is on its way when `kill` returns; on a busy machine a step is over before it is there.
    let patience = Instant::now();
    while !threads_of(process).iter().all(|state| state == "T") {
        assert!(patience.elapsed() <= BOUND, "the process does not stop: {:?}", threads_of(process));
        std::thread::yield_now();
    }
}

/// The user hears of a worker that is silent before the run fails, and when it is back.
#[test]
fn a_silent_worker_is_reported_and_so_is_its_return() {
    let _alone = alone();
    let notices = Arc::new(Mutex::new(Vec::new()));
    let seen = notices.clone();
    // The notice comes after five seconds, and leaves 55 to wake the worker up.
    let mut pipeline = failure_scenarios::builder(processes(), "")
        .on_notice(move |notice| seen.lock().unwrap().push(notice.clone()))
        .build()
        .expect("a pipeline");
    pipeline.train_step(&batch()).expect("a step");
    notices.lock().unwrap().clear();
    let server = children()[0];
    stop(server);
    let waiter = std::thread::spawn({
        let notices = notices.clone();
        move || {
            let patience = Instant::now();
            while notices.lock().unwrap().is_empty() && patience.elapsed() < BOUND {
                std::thread::sleep(Duration::from_millis(10));
            }
            signal(server, "-CONT");
        }
    });
    pipeline.train_step(&batch()).expect("it goes on once the worker is back");
    waiter.join().expect("it ends");
    // This process may have been starved as well.
    let starved = |notice: &&Notice| matches!(notice, Notice::Suspended { .. });
    let notices: Vec<Notice> = notices.lock().unwrap().iter().filter(|notice| !starved(notice)).cloned().collect();
    let [Notice::Silent { worker, limit_s, .. }, Notice::Back { worker: back, .. }] = &notices[..] else {
        panic!("{notices:?}");
    };
    assert_eq!((&worker[..], &back[..], *limit_s), ("server", "server", PATIENT.silence_s));
}

/// Runs `distgpipe train`, suspends it in the middle for longer than these limits, and returns its status and what it said.
fn suspended_driver(limits: &[&str]) -> (Option<i32>, String) {
    let slow = ["--faults", "client>server:delay=20@0", "--epochs", "4", "--no-evaluate", "--batch", "100"];
    let mut driver = Command::new(env!("CARGO_BIN_EXE_distgpipe"))
        .args(["train", "--place", "client,server", "--workers", "processes", "--device", "cpu", "--threads", "1"])
        .args(slow)
        .args(limits)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut said = BufReader::new(driver.stderr.take().expect("piped"));
    let mut text = String::new();
    while !text.contains("epoch 1/4") {
        assert!(said.read_line(&mut text).expect("text") > 0, "{text}");
    }
    stop(driver.id());
    std::thread::sleep(Duration::from_secs(8));
    signal(driver.id(), "-CONT");
    said.read_to_string(&mut text).expect("text");
    (driver.wait().expect("it ends").code(), text)
}

/// A laptop that wakes up once blamed the server for the time in which it had slept itself.
#[test]
fn a_driver_that_was_suspended_does_not_blame_its_workers() {
    let _alone = alone();
    // The worker waits longer than the driver was away, and the driver does not count the time against the worker.
    let (status, said) = suspended_driver(&["--timeout", "5", "--peer-timeout", "60"]);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("this process did not run for "), "{said}");
    // The worker has given the connection up meanwhile, and waits for another one.
    let (status, said) = suspended_driver(&["--timeout", "60", "--peer-timeout", "4"]);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("reconnected to server after "), "{said}");
    // The worker has given the run up meanwhile.
    let (status, said) = suspended_driver(&["--timeout", "60", "--peer-timeout", "4", "--reconnect", "0"]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("error: client was suspended: this process did not run for"), "{said}");
    assert!(said.contains("raise --peer-timeout") && !said.contains("lost the connection to"), "{said}");
    // The worker process once blamed the client beside it.
    assert_eq!(said.matches("error: ").count(), 1, "{said}");
}

/// SIGSTOP: the process is there, its sockets are open, and it says nothing.
#[test]
fn a_suspended_worker_process_times_out() {
    let _alone = alone();
    let mut pipeline = failure_scenarios::builder(processes(), "").timeouts(SHORT).build().expect("a pipeline");
    pipeline.train_step(&batch()).expect("a step");
    let server = children();
    assert_eq!(server.len(), 1);
    stop(server[0]);
    let start = Instant::now();
    let failure = match pipeline.train_step(&batch()) {
        Err(StepError::Failed(failure)) => failure,
        other => panic!("expected a failure, got {:?}", other.map(|o| o.loss)),
    };
    drop(pipeline);
    assert!(failure.worker.contains("server"), "{failure}");
    assert!(failure.phase != "lost connection" || failure.message.contains("`Timeouts::silence_s`"), "{failure}");
    assert!(start.elapsed() <= BOUND, "took {:?}", start.elapsed());
    assert_eq!(children(), Vec::<u32>::new(), "a process is left");
}

/// The time of the attempts to connect again was once taken for one in which the driver itself had not run.
#[test]
fn a_worker_process_that_is_suspended_for_too_long_does_not_make_the_driver_believe_that_it_was() {
    let _alone = alone();
    let notices = Arc::new(Mutex::new(Vec::new()));
    let seen = notices.clone();
    let (silence_s, reconnect_s) = (1.0, 6.0);
    let mut pipeline = failure_scenarios::builder(processes(), "")
        .timeouts(distgpipe::Timeouts { silence_s, reconnect_s, ..PATIENT })
        .on_notice(move |notice| seen.lock().unwrap().push(notice.clone()))
        .build()
        .expect("a pipeline");
    pipeline.train_step(&batch()).expect("a step");
    stop(children()[0]);
    let start = Instant::now();
    let failure = match pipeline.train_step(&batch()) {
        Err(StepError::Failed(failure)) => failure,
        other => panic!("expected a failure, got {:?}", other.map(|o| o.loss)),
    };
    // An attempt takes up to five seconds, and the last one only what is left.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    drop(pipeline);
    assert!(failure.to_string().contains("not restored within 6.0 s"), "{failure}");
    // This process may have been starved, but hardly for so long.
    let suspended = |notice: &&Notice| matches!(notice, Notice::Suspended { seconds } if *seconds > reconnect_s / 2.0);
    let notices = notices.lock().unwrap();
    assert_eq!(notices.iter().find(suspended), None, "{notices:?}");
    assert_eq!(children(), Vec::<u32>::new(), "a process is left");
}

/// SIGSTOP for longer than a silence may last: the connection is given up, and restored when the process runs again.
#[test]
fn a_worker_process_that_is_suspended_below_the_limit_is_waited_for() {
    let _alone = alone();
    let losses = |interrupted: bool| -> Vec<u64> {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notices = seen.clone();
        let mut pipeline = failure_scenarios::builder(processes(), "")
            .timeouts(distgpipe::Timeouts { silence_s: 2.0, ..PATIENT })
            .on_notice(move |notice| notices.lock().unwrap().push(notice.clone()))
            .build()
            .expect("a pipeline");
        let mut losses = vec![pipeline.train_step(&batch()).expect("a step").loss.to_bits()];
        let server = children()[0];
        if interrupted {
            stop(server);
        }
        let waiter = std::thread::spawn(move || {
            let patience = Instant::now();
            let gone = |notice: &Notice| matches!(notice, Notice::Reconnecting { .. });
            while interrupted && !seen.lock().unwrap().iter().any(gone) && patience.elapsed() < BOUND {
                std::thread::sleep(Duration::from_millis(10));
            }
            if interrupted {
                signal(server, "-CONT");
            }
        });
        losses.push(pipeline.train_step(&batch()).expect("it goes on once the worker is back").loss.to_bits());
        waiter.join().expect("it ends");
        losses
    };
    assert_eq!(losses(true), losses(false));
}

#[test]
fn a_server_survives_garbage_strangers_and_failed_runs() {
    let _alone = alone();
    let servers = Servers::start(1);
    let address = &servers.addresses()[0];
    let serves = |what: &str| {
        let mut pipeline = failure_scenarios::pipeline(servers.first(1), "");
        pipeline.train_step(&batch()).unwrap_or_else(|e| panic!("after {what}: {e}"));
    };
    serves("nothing");
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"", b"\x89DGP"] {
        let mut stream = TcpStream::connect(address).expect("it listens");
        let _ = stream.write_all(garbage);
        drop(stream);
    }
    serves("garbage");
    // Those who connect and say nothing keep nobody waiting, however many they are.
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    let start = Instant::now();
    serves("silent strangers");
    // If each were waited for, it would take minutes.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    drop(silent);
    // A frame that asks for a gigabyte before any token was shown.
    let mut header = Header { slots: 1, ..Header::new(WireKind::Activation) };
    let shape = Shape::new(&[1 << 28]).expect("a shape");
    header.tensor = Some(TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::Raw });
    header.body_bytes = 1 << 30;
    let mut greedy = TcpStream::connect(address).expect("it listens");
    greedy.write_all(&header.encode()).expect("it reads");
    let mut answer = Vec::new();
    // The worker would wait for the rest of a hello for five seconds.
    greedy.set_read_timeout(Some(Duration::from_secs(4))).expect("a time-out");
    assert!(matches!(greedy.read_to_end(&mut answer), Ok(0)), "it is sent away at once, not read from");
    serves("a greedy stranger");
    let wrong: distgpipe::comm::handshake::Token = "f".repeat(64).parse().expect("a token");
    let model = Mlp::default().model().expect("a model");
    let refused = Pipeline::builder(model)
        .place("client,server")
        .workers(Workers::Remote { addresses: vec![address.clone()], token: wrong })
        .build();
    let refused = refused.err().expect("an error").to_string();
    assert!(refused.contains("token"), "{refused}");
    serves("a stranger");
    assert_named(run_until_failure(servers.first(1), "server:panic@1F1"), "panic", "server", None);
    serves("a failed run");
    drop(servers);
}

/// A worker has one run at a time. A second driver once waited for 20 seconds, and then heard of a guess.
#[test]
fn a_busy_worker_says_so_at_once() {
    let _alone = alone();
    let servers = Servers::start(1);
    let mut first = failure_scenarios::pipeline(servers.first(1), "");
    let start = Instant::now();
    let failure = match failure_scenarios::builder(servers.first(1), "").build() {
        Err(BuildError::Failed(failure)) => failure,
        other => panic!("expected a failure, got {:?}", other.map(|_| ())),
    };
    let said = failure.to_string();
    assert!(failure.is_busy() && said.starts_with("server has been busy with another run since 20"), "{said}");
    assert!(said.contains("wait until that run is over"), "{said}");
    // It would wait for an answer for a minute.
    assert!(start.elapsed() < BOUND, "it took {:?}", start.elapsed());
    // A script can tell from the exit status that it may try again later.
    let second = Command::new(env!("CARGO_BIN_EXE_distgpipe"))
        .args(["train", "--partitions", "2", "--steps", "1", "--workers", &servers.addresses()[0]])
        .env("DISTGPIPE_TOKEN", TOKEN)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(3), "{said}");
    assert!(said.contains("error: w1 has been busy with another run since 20"), "{said}");
    first.train_step(&batch()).expect("the first run goes on");
    drop(first);
    failure_scenarios::pipeline(servers.first(1), "").train_step(&batch()).expect("and the next has its turn");
}

/// A stranger who connects to a worker in a run does not learn that there is one.
#[test]
fn a_stranger_learns_nothing_of_a_run() {
    let _alone = alone();
    let servers = Servers::start(1);
    let mut first = failure_scenarios::pipeline(servers.first(1), "");
    let token: distgpipe::comm::handshake::Token = "f".repeat(64).parse().expect("a token");
    let stranger = Workers::Remote { addresses: servers.addresses().to_vec(), token };
    let refused = failure_scenarios::builder(stranger, "").build().err().expect("an error").to_string();
    assert!(refused.contains("different tokens") && !refused.contains("busy"), "{refused}");
    first.train_step(&batch()).expect("the run goes on");
}

/// What a peer says could otherwise move the cursor of the user's terminal, or hide text.
#[test]
fn control_characters_of_a_peer_are_printed_escaped() {
    let _alone = alone();
    let text = "\u{1b}[2Jgone\u{7}\u{9b}";
    let refuse = (WireKind::Refuse, Refuse { reason: text.to_owned() }.encode());
    let welcome = (WireKind::Welcome, Welcome { worker: None, next: 1, build: text.to_owned() }.encode());
    let notice = AbortNotice { worker: text.to_owned(), phase: text.to_owned(), message: text.to_owned() };
    let abort = (WireKind::Abort, notice.encode());
    for answers in [vec![refuse], vec![welcome, abort]] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a driver");
            for (kind, body) in answers {
                let mut header = Header::new(kind);
                header.seal(&body);
                stream.write_all(&header.encode()).and_then(|()| stream.write_all(&body)).expect("it reads");
            }
            // Until the driver has gone.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let output = Command::new(env!("CARGO_BIN_EXE_distgpipe"))
            .args(["train", "--partitions", "2", "--steps", "1", "--workers", &address])
            .env("DISTGPIPE_TOKEN", TOKEN)
            .output()
            .expect("it runs");
        peer.join().expect("it ends");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(r"\u{1b}[2Jgone\u{7}\u{9b}"), "{said}");
        assert!(!said.contains(|c: char| c.is_control() && c != '\n'), "{said:?}");
    }
}

#[test]
fn no_port_is_held_after_a_run() {
    let _alone = alone();
    let servers = Servers::start(1);
    let address = servers.addresses()[0].clone();
    failure_scenarios::pipeline(servers.first(1), "").train_step(&batch()).expect("a step");
    drop(servers);
    TcpListener::bind(&address).expect("the port is free again");
}

#[test]
fn a_worker_that_cannot_be_started_says_so() {
    let _alone = alone();
    let missing = WorkerProgram { program: PathBuf::from("no-such-program"), arguments: vec![] };
    let mute = WorkerProgram { program: PathBuf::from("true"), arguments: vec![] };
    for (program, expected) in [(missing, "no-such-program"), (mute, "listening")] {
        let model = Mlp::default().model().expect("a model");
        let built = Pipeline::builder(model).place("a,b").workers(Workers::Processes(program)).build();
        let error = built.err().expect("an error").to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(children(), Vec::<u32>::new(), "a process is left");
    }
}
