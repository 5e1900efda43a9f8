//! Ctrl-C and SIGTERM from the user's chair: the run finishes its step, saves, reports, and says how to go on. Real signals go to
//! the whole process group, as a terminal sends them.

mod command;

use command::{directory, distgpipe, soundness};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

/// How long anything may take. A stop takes a fraction of a second on an idle machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Far more steps than are made before the signal comes.
const LONG: [&str; 10] = [
    "train",
    "--set",
    "hidden=[16,16]",
    "--partitions",
    "3",
    "--place",
    "client,server,client",
    "--epochs",
    "2000",
    "--no-evaluate",
];

/// With the server in a process of its own.
const PROCESSES: [&str; 2] = ["--workers", "processes"];

/// A run in a process group of its own, with its worker processes.
fn start(arguments: &[&str]) -> Child {
    distgpipe(arguments).process_group(0).spawn().expect("the binary was built with this test")
}

/// Sends a signal to all processes of a run.
fn signal(run: &Child, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -s {name} -- -{}", run.id())]).status().unwrap();
    assert!(sent.success());
}

fn wait_until(what: &str, mut now: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !now() {
        assert!(Instant::now() < deadline, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn steps_in(log: &Path) -> usize {
    std::fs::read_to_string(log.join("steps.jsonl")).map_or(0, |text| text.lines().count())
}

/// The loss of each step in a log, in order.
fn losses(log: &Path) -> BTreeMap<u64, f64> {
    let text = std::fs::read_to_string(log.join("steps.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap())).collect()
}

/// The end of a run that was sent a signal.
fn ended(run: Child, status: i32) -> (Output, String) {
    let output = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{said}");
    (output, said)
}

#[test]
fn a_run_stopped_from_the_terminal_saves_reports_and_goes_on_with_the_command_it_prints() {
    for (name, status) in [("INT", 130), ("TERM", 143)] {
        let folder = directory(&format!("signals/stopped {name}"));
        let [saved, log, weights, whole] =
            ["saved", "log", "model.safetensors", "whole"].map(|file| folder.join(file).to_str().unwrap().to_owned());
        let run =
            start(&[&LONG[..], &PROCESSES, &["--checkpoint", &saved, "--log", &log, "--save", &weights]].concat());
        wait_until("the third step", || steps_in(Path::new(&log)) >= 3);
        signal(&run, name);
        let (output, said) = ended(run, status);
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(printed.contains("samples/s") && printed.contains("client → server"), "{printed}");
        let stopped = said.lines().find(|line| line.starts_with("stopped by SIG")).unwrap_or_else(|| panic!("{said}"));
        assert!(stopped.contains(&format!("SIG{name} after step ")) && stopped.contains(" of 44000"), "{stopped}");
        let done = losses(Path::new(&log)).len();
        assert!(stopped.contains(&format!("after step {done} of")), "{stopped}: {done}");
        assert!(Path::new(&saved).join(format!("step-{done:08}")).is_dir(), "{said}");
        soundness::assert_parameters_moderate("a stopped run", &command::tensors(Path::new(&weights)));
        let summary: Value =
            serde_json::from_str(&std::fs::read_to_string(format!("{log}/summary.json")).unwrap()).unwrap();
        assert_eq!(summary["end"], "stopped");

        // What it printed is a command for a shell, with a path that needs quotes.
        let printed = stopped.split("to resume: ").nth(1).expect("the command to go on");
        assert!(printed.contains("'"), "{printed}");
        let more = done + 5;
        let resumed = printed.strip_prefix("distgpipe ").expect("a command of this program");
        let text = format!("{} {resumed} --steps {more}", env!("CARGO_BIN_EXE_distgpipe"));
        let resumed = Command::new("sh").args(["-c", &text]).output().unwrap();
        assert!(resumed.status.success(), "{text}: {}", String::from_utf8_lossy(&resumed.stderr));
        let steps = more.to_string();
        let once = start(&[&LONG[..], &["--steps", &steps, "--log", &whole]].concat());
        ended(once, 0);
        let (got, expected) = (losses(Path::new(&log)), losses(Path::new(&whole)));
        soundness::assert_losses_sound("a resumed run", &got.values().copied().collect::<Vec<_>>());
        assert_eq!((got.len(), got), (more, expected));
    }
}

#[test]
fn a_run_without_checkpoints_says_that_there_is_nothing_to_go_on_from() {
    let log = directory("signals/plain").join("log");
    let run = start(&[&LONG[..], &["--json", "--log", log.to_str().unwrap()]].concat());
    wait_until("the third step", || steps_in(&log) >= 3);
    signal(&run, "INT");
    let (output, said) = ended(run, 130);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["end"], "stopped");
    assert!(!report["epochs"].as_array().unwrap().is_empty(), "the epoch that was stopped is in the report");
    assert!(said.contains("nothing was saved to resume from: use --checkpoint DIR"), "{said}");
    soundness::assert_losses_sound("a stopped run", &losses(&log).values().copied().collect::<Vec<_>>());
}

/// The link stalls after some steps, so the step in progress cannot be finished.
#[test]
fn a_second_signal_ends_the_run_and_its_workers_at_once() {
    let folder = directory("signals/second");
    let [log, saved] = ["log", "saved"].map(|name| folder.join(name));
    // The link stalls in the fifth step: heartbeats are not counted, and each step sends the same messages.
    const STEPS: usize = 4;
    let stalls = ["--faults", "client>server:stall@40", "--log", log.to_str().unwrap()];
    // No time-out may end the run instead.
    let patient = ["--timeout", "600", "--peer-timeout", "600"];
    // The first checkpoint would come after the epoch. A run that can be restarted sends more messages at its start.
    let checkpoint = ["--checkpoint", saved.to_str().unwrap(), "--restarts", "0"];
    let mut run = start(&[&LONG[..], &PROCESSES, &stalls, &patient, &checkpoint].concat());
    wait_until("the last step before the stall", || steps_in(&log) == STEPS);
    // The next step has begun soon after.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(steps_in(&log), STEPS);
    let mut said = BufReader::new(run.stderr.take().unwrap()).lines();
    let mut next = |wanted: &str| assert!(said.any(|line| line.unwrap().contains(wanted)), "no line with `{wanted}`");
    signal(&run, "INT");
    next("SIGINT: finishing the step; a second one ends the run at once");
    let second = Instant::now();
    signal(&run, "INT");
    next("SIGINT: ended at once");
    assert_eq!(run.wait().unwrap().code(), Some(130));
    assert!(second.elapsed() < LIMIT);
    assert!(!saved.exists(), "a directory without a checkpoint is of no use");
    wait_until("the end of the worker processes", || {
        let left = Command::new("sh").args(["-c", &format!("kill -0 -- -{}", run.id())]).output().unwrap();
        !left.status.success()
    });
}

/// The second one comes while the first lets the run write its results, which go to a pipe that nobody reads.
#[test]
fn a_second_signal_prints_the_command_that_resumes_the_run() {
    let folder = directory("signals/second-resume");
    let [log, weights, saved] = ["log", "model.safetensors", "saved"].map(|name| folder.join(name));
    std::fs::create_dir(&log).unwrap();
    assert!(Command::new("mkfifo").arg(log.join("summary.json")).status().unwrap().success());
    let outputs = ["--log", log.to_str().unwrap(), "--save", weights.to_str().unwrap()];
    let checkpoint = ["--checkpoint", saved.to_str().unwrap()];
    let mut run = start(&[&["train", "--set", "hidden=[16]", "--epochs", "1"], &outputs[..], &checkpoint].concat());
    // It is written after the last step, before the log is finished.
    wait_until("the model", || weights.exists());
    let mut said = BufReader::new(run.stderr.take().unwrap()).lines();
    let mut next = |wanted: &str| assert!(said.any(|line| line.unwrap().contains(wanted)), "no line with `{wanted}`");
    signal(&run, "INT");
    next("a second one ends the run at once");
    signal(&run, "INT");
    next("SIGINT: ended at once");
    next(&format!("to resume from the newest checkpoint: distgpipe train --checkpoint {} --resume", saved.display()));
    assert_eq!(run.wait().unwrap().code(), Some(130));
}

#[test]
fn a_signal_before_the_first_step_ends_the_run_at_once() {
    // A worker that accepts the connection and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let folder = directory("signals/early");
    let [token, used] = ["token", "used"].map(|name| folder.join(name));
    std::fs::write(&token, "7".repeat(64)).unwrap();
    std::fs::create_dir(&used).unwrap();
    for saved in [folder.join("new/saved"), used] {
        let workers = ["--workers", &address, "--token-file", token.to_str().unwrap()];
        let saved = ["--checkpoint", saved.to_str().unwrap()];
        let run = start(&[&["train", "--partitions", "2"], &workers[..], &saved].concat());
        let _connection = silent.accept().unwrap();
        signal(&run, "TERM");
        let (_, said) = ended(run, 143);
        assert!(said.contains("SIGTERM: ended at once, before the first step"), "{said}");
    }
    let mut left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["token", "used"], "what the run created is removed");
    assert_eq!(std::fs::read_dir(folder.join("used")).unwrap().count(), 0);
}

/// The results go to a pipe that nobody reads yet, so that the run waits with them for as long as the test wants.
#[test]
fn a_signal_after_the_last_step_lets_the_run_write_its_results() {
    let folder = directory("signals/late");
    let [log, weights] = ["log", "model.safetensors"].map(|name| folder.join(name));
    std::fs::create_dir(&log).unwrap();
    let summary = log.join("summary.json");
    assert!(Command::new("mkfifo").arg(&summary).status().unwrap().success());
    let outputs = ["--log", log.to_str().unwrap(), "--save", weights.to_str().unwrap()];
    let mut run = start(&[&["train", "--set", "hidden=[16]", "--epochs", "1"], &outputs[..]].concat());
    // It is written after the last step, before the log is finished.
    wait_until("the model", || weights.exists());
    std::thread::sleep(Duration::from_millis(500));
    signal(&run, "INT");
    std::thread::sleep(Duration::from_millis(200));
    assert!(run.try_wait().unwrap().is_none(), "it has ended without its results");
    let written = std::fs::read_to_string(&summary).unwrap();
    let (output, said) = ended(run, 0);
    assert_eq!(serde_json::from_str::<Value>(&written).unwrap()["end"], "complete", "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("samples/s"), "{said}");
}

/// The time left is compared with the time that the run then took, which depends on the machine as the estimate does.
#[test]
fn the_time_left_does_not_count_the_time_for_which_the_run_was_stopped() {
    let slow = ["train", "--partitions", "2", "--chunks", "2", "--faults", "w0>w1:delay=200@0", "--steps", "30"];
    let mut run = start(&slow);
    let mut said = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    let left_s = |line: String| line.rsplit_once(", ")?.1.strip_suffix(" s left")?.parse::<f64>().ok();
    said.find_map(left_s).expect("a line with the time left");
    signal(&run, "STOP");
    std::thread::sleep(Duration::from_secs(12));
    signal(&run, "CONT");
    let estimated_s = said.find_map(left_s).expect("another line with the time left");
    let start = Instant::now();
    said.for_each(drop);
    let took_s = start.elapsed().as_secs_f64();
    assert_eq!(run.wait().unwrap().code(), Some(0));
    assert!(estimated_s < 3.0 * took_s + 5.0, "{estimated_s} s were left, and {took_s} s passed");
}

#[test]
fn a_run_that_fails_after_a_checkpoint_prints_the_command_that_resumes_it() {
    let saved = directory("signals/failed").join("it's saved");
    let saved = saved.to_str().unwrap();
    let cut = ["--faults", "client>server:cut@30", "--reconnect", "0", "--restarts", "0"];
    let run = [&["--checkpoint", saved, "--checkpoint-every", "2"][..], &cut].concat();
    let (_, said) = ended(start(&[&LONG[..], &PROCESSES, &run].concat()), 1);
    let quoted = saved.replace('\'', "'\\''");
    let expected = format!("to resume from the newest checkpoint: distgpipe train --checkpoint '{quoted}' --resume");
    assert!(said.lines().any(|line| line == expected), "{said}");
    let failed = ["--faults", "server:error@1F0"];
    let (_, said) = ended(start(&[&LONG[..], &PROCESSES, &failed].concat()), 1);
    assert!(!said.contains("--resume"), "{said}");
}
