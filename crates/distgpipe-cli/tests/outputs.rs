//! What a run prints as it goes, what it writes, and what it leaves behind when it fails.

mod command;

use command::{directory, distgpipe, ended, fine, json, refused};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// Where standard error is no terminal, lines say how far the run is. The table of epochs does not repeat them.
#[test]
fn lines_of_progress_have_step_loss_rate_and_time_left() {
    // Some 4 s, because of a slow link: up to 0.2 s for each of 40 messages.
    let slow =
        ["--partitions", "2", "--chunks", "2", "--faults", "w0>w1:delay=200@0", "--epochs", "5", "--steps", "20"];
    let (out, said) = ended(0, &[&["train"], &slow[..]].concat());
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("step ")).collect();
    assert!((1..20).contains(&lines.len()), "a line a second: {said}");
    for line in lines {
        let (step, rest) =
            line.strip_prefix("step ").and_then(|line| line.split_once("/20: loss ")).expect("step N/20");
        assert!((1..20).contains(&step.parse::<u64>().expect("a number")), "{line}");
        assert!(rest.contains(", learning rate 0.05, ") && rest.ends_with(" s left"), "{line}");
    }
    // The epochs that 20 steps reach, not those that --epochs allows.
    assert!(said.contains("epoch 1/1: loss "), "{said}");
    assert!(!out.contains("train loss"), "{out}");
}

/// To start many threads takes long, so the user is told before.
#[test]
fn a_warning_of_too_many_threads_is_the_first_line() {
    let threads = (std::thread::available_parallelism().expect("known").get() + 1).to_string();
    let run = ["train", "--set", "hidden=[16]", "--steps", "1", "--no-evaluate", "--threads", &threads];
    let (_, said) = ended(0, &run);
    assert!(said.starts_with("warning: 1 worker on this host with "), "{said}");
}

/// The highest memory use of a run, in bytes.
fn peak_bytes(arguments: &[&str]) -> u64 {
    let mut child = distgpipe(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let mut peak = 0;
    while child.try_wait().expect("a child").is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
        peak = peak.max(line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert!(child.wait().expect("it ended").success(), "{arguments:?}");
    peak
}

/// It once kept all events, and at the end a tree of JSON made of them: 200 MB more in this run.
#[test]
fn a_trace_takes_no_memory_however_long_it_is() {
    let log = directory("outputs/trace").join("log");
    let many = ["train", "--partitions", "4", "--chunks", "64", "--epochs", "2", "--no-evaluate"];
    let traced = peak_bytes(&[&many[..], &["--log", text(&log), "--trace"]].concat());
    let plain = peak_bytes(&many);
    let events: Vec<Value> =
        serde_json::from_slice(&std::fs::read(log.join("trace.json")).expect("written")).expect("JSON");
    assert!(events.len() > 60_000, "{} events", events.len());
    assert!(traced < plain + (16 << 20), "{traced} bytes with a trace, {plain} without");
}

#[test]
fn a_refused_run_leaves_nothing_behind() {
    let root = directory("outputs/refused");
    let [saved, log, capture] = ["a/saved", "b/log", "c/capture"].map(|name| root.join(name));
    let used = root.join("used");
    std::fs::create_dir_all(&used).expect("created");
    std::fs::write(used.join("steps.jsonl"), "").expect("written");
    let save = root.join("model.safetensors");
    let all = ["--checkpoint", text(&saved), "--log", text(&log), "--capture", text(&capture), "--save", text(&save)];
    let left = || {
        let names = std::fs::read_dir(&root).expect("a directory").map(|entry| entry.expect("an entry").file_name());
        names.filter(|name| name != "used").collect::<Vec<_>>()
    };
    let in_file = root.join("used/steps.jsonl/log");
    let refusals: [(&[&str], &str); 6] = [
        (&["--lr", "2000"], "--lr 2000"),
        (&["--log", text(&used)], "has the log of another run"),
        (&["--log", text(&in_file)], "name a directory that can be written to"),
        (&["--capture-step", "1000"], "--capture-step"),
        (&["--keep", "0"], "--keep 0"),
        (&["--workers", "127.0.0.1:1"], "--token-file"),
    ];
    for (more, words) in refusals {
        // The last of a flag counts.
        let kept: Vec<&str> = match more.first() {
            Some(&"--log") => all.iter().enumerate().filter(|(i, _)| !(2..4).contains(i)).map(|(_, a)| *a).collect(),
            _ => all.to_vec(),
        };
        let output = distgpipe(&[&["train", "--partitions", "2"], &kept[..], more].concat()).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{more:?}: expected `{words}` in: {said}");
        assert!(left().is_empty(), "{more:?} left {:?}", left());
    }
}

#[test]
fn a_resumed_run_says_what_it_overwrites_and_when_nothing_is_left() {
    let root = directory("outputs/resumed");
    let [saved, log, model] = ["saved", "log", "model.safetensors"].map(|name| root.join(name));
    let outputs = ["--checkpoint", text(&saved), "--log", text(&log), "--save", text(&model)];
    let run = ["--set", "hidden=[16]", "--batch", "256", "--epochs", "2"];
    ended(0, &[&["train"], &run[..], &outputs].concat());
    let plain = |more: &[&str]| {
        let output = distgpipe(&[&["train", "--checkpoint", text(&saved), "--resume"], more].concat()).output();
        let output = output.expect("it runs");
        assert!(output.status.success());
        [output.stderr, output.stdout].map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    // The summary of a finished run was once replaced by figures of no steps.
    let written = || {
        let files = [log.join("summary.json"), log.join("steps.jsonl"), log.join("config.toml"), model.clone()];
        files.map(|file| (std::fs::read(&file).expect("written"), file.metadata().unwrap().modified().unwrap()))
    };
    let before = written();
    let [said, printed] = plain(&[]);
    assert!(said.contains("already finished after step 10;") && !said.contains("resuming after"), "{said}");
    assert!(said.contains(&format!("--save {} stays as it is", model.display())), "{said}");
    assert_eq!(printed, "");
    let [_, printed] = plain(&["--json"]);
    let ended: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(ended, serde_json::json!({ "end": "complete", "resumed_at": 10, "steps": 0 }));
    assert!(written() == before, "an output was written again");
    // A model that is missing is what such a run is resumed for.
    let other = root.join("other.safetensors");
    plain(&["--save", text(&other)]);
    assert!(std::fs::read(&other).expect("saved") == before[3].0, "the same model");
    let [said, _] = plain(&["--epochs", "3"]);
    let at = |words: &str| said.find(words).unwrap_or_else(|| panic!("expected `{words}` in: {said}"));
    at("resuming after step 10, with --epochs 3 (was 2)");
    let noted = at(&format!("the resumed run replaces --save {}, continues --log {}", model.display(), log.display()));
    assert!(noted < at("epoch 3/3") && noted < at("saved 4 tensors"), "{said}");
}

/// Its last checkpoint is inside an epoch, before the test.
#[test]
fn a_run_that_its_last_step_ended_inside_an_epoch_is_finished_once_it_is_tested() {
    let root = directory("outputs/cut-short");
    let [saved, log, model] = ["saved", "log", "model.safetensors"].map(|name| root.join(name));
    let run = ["train", "--set", "hidden=[16]", "--batch", "256", "--steps", "3", "--log", text(&log)];
    let best = ["--checkpoint", text(&saved), "--save-best", "accuracy", "--save", text(&model)];
    let (_, said) = ended(0, &[&run[..], &best].concat());
    assert!(said.contains("--save-best: no checkpoint is marked as the best, because no whole epoch"), "{said}");
    let summary = std::fs::read(log.join("summary.json")).expect("written");
    let output = distgpipe(&["train", "--checkpoint", text(&saved), "--resume"]).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("already finished after step 3;"), "{said}");
    assert!(output.stdout.is_empty() && !said.contains("epoch "), "{said}");
    assert!(std::fs::read(log.join("summary.json")).expect("written") == summary);
}

#[test]
fn a_model_that_cannot_be_saved_costs_neither_the_report_nor_the_log() {
    let root = directory("outputs/unsaved");
    let (log, folder) = (root.join("log"), root.join("folder"));
    std::fs::create_dir(&folder).expect("created");
    let save = folder.join("model.safetensors");
    // The folder is gone when the run ends.
    let steps =
        ["--set", "hidden=[16]", "--epochs", "400", "--no-evaluate", "--log", text(&log), "--save", text(&save)];
    let child = distgpipe(&[&["train"], &steps[..]].concat()).spawn().expect("it starts");
    while !std::fs::read_to_string(log.join("steps.jsonl")).is_ok_and(|steps| steps.lines().count() > 1) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::fs::remove_dir_all(&folder).expect("removed");
    let output = child.wait_with_output().expect("it ends");
    let [printed, said] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(printed.contains("samples/s") && said.contains("error: --save"), "{printed}{said}");
    assert!(log.join("summary.json").is_file());
}

/// With a limit on the size of files that the model fits and Adam's state does not: what a full disk is to the checkpoint, while
/// --save has a healthy one.
#[test]
fn a_checkpoint_that_cannot_be_written_does_not_lose_the_model() {
    let root = directory("outputs/full");
    let (saved, save, whole) = (root.join("saved"), root.join("model.safetensors"), root.join("whole.safetensors"));
    let run = ["train", "--set", "hidden=[256]", "--optimizer", "adam", "--epochs", "1", "--threads", "1"];
    fine(&[&run[..], &["--save", text(&whole)]].concat());
    let limit_kb = std::fs::metadata(&whole).expect("saved").len() / 1024 + 8;
    let program = env!("CARGO_BIN_EXE_distgpipe");
    let limited = format!("trap '' XFSZ; ulimit -f {limit_kb}; exec \"$@\"");
    let outputs = ["--device", "cpu", "--checkpoint", text(&saved), "--save", text(&save)];
    let mut command = Command::new("bash");
    let command = command.args(["-c", &limited, "bash", program]).args(run).args(outputs).stdin(Stdio::null());
    let output = command.output().expect("bash runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: ") && said.contains("optimizer.safetensors: writing it: File too large"), "{said}");
    assert!(
        said.contains("the run failed, but --save") && said.contains("has the model as it is after step 22"),
        "{said}"
    );
    assert!(std::fs::read(&save).expect("saved") == std::fs::read(&whole).expect("saved"), "the same model");
    // What the checkpoint had written is removed at once, and so is the folder, which has nothing else.
    assert!(!saved.exists(), "{:?}", std::fs::read_dir(&saved).map(|entries| entries.count()));
    let scores = json(&["evaluate", "--weights", text(&save), "--json", "--device", "cpu"]);
    assert!(scores["accuracy"].as_f64() > Some(0.5), "{scores}");
    assert!(refused(2, &["evaluate", "--weights", text(&saved)]).contains("--weights"));
}

/// With a limit on the size of files that everything but the log of the steps fits: what a full disk is to --log, while
/// --checkpoint has a healthy one.
#[test]
fn a_log_that_cannot_be_written_does_not_lose_the_checkpoint() {
    let root = directory("outputs/full_log");
    let (saved, log) = (root.join("saved"), root.join("log"));
    let run =
        ["train", "--set", "hidden=[8]", "--epochs", "400", "--limit", "320", "--threads", "1", "--device", "cpu"];
    let outputs = ["--checkpoint", text(&saved), "--checkpoint-every", "100000", "--log", text(&log)];
    let mut command = Command::new("bash");
    let limited = ["-c", "trap '' XFSZ; ulimit -f 32; exec \"$@\"", "bash", env!("CARGO_BIN_EXE_distgpipe")];
    let command = command.args(limited).args(run).args(outputs).stdin(Stdio::null());
    let output = command.output().expect("bash runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: --log") && said.contains("File too large"), "{said}");
    assert!(said.contains("to resume from the newest checkpoint: distgpipe train --checkpoint"), "{said}");
    let more = distgpipe(&["train", "--checkpoint", text(&saved), "--resume", "--epochs", "1"]).output().expect("runs");
    let said = String::from_utf8_lossy(&more.stderr);
    assert!(more.status.success() && said.contains("already finished after step "), "{said}");
    // The directory of the checkpoint itself is a likely mistake.
    let step = std::fs::read_dir(&saved).expect("a directory").map(|entry| entry.expect("an entry").path());
    let step = step.into_iter().find(|path| path.is_dir()).expect("a checkpoint");
    let said = refused(2, &["train", "--checkpoint", text(&step), "--resume"]);
    assert!(
        said.contains("single checkpoint") && said.contains(&format!("--checkpoint {}", saved.display())),
        "{said}"
    );
}
