//! The command as its users run it, for the tests of what it says and how it ends.
//!
//! A run that trains must also train soundly: see [`attempt`].

// Each test program has use for some of these.
#![allow(dead_code)]

#[path = "../../../distgpipe/tests/soundness/mod.rs"]
pub mod soundness;

use distgpipe::tch::Tensor;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The command with nothing to read, outside the checkout: what it needs of it is in the binary.
pub fn distgpipe(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distgpipe"));
    command.args(arguments);
    // Tests compare runs bit for bit, which takes the same device and number of threads.
    if arguments.first() == Some(&"train") || arguments.starts_with(&["recipe", "run"]) {
        for flag in [["--threads", "1"], ["--device", "cpu"]] {
            if !arguments.contains(&flag[0]) {
                command.args(flag);
            }
        }
    }
    // Undecided measurements would take a minute.
    if arguments.first() == Some(&"balance") && !arguments.contains(&"--time-limit") {
        command.args(["--time-limit", "5"]);
    }
    // No test reads what another one, or the user, has measured.
    let cache = format!("{}/cache/{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    command.env("XDG_CACHE_HOME", cache);
    command.env_remove("DISTGPIPE_TOKEN").current_dir(env!("CARGO_TARGET_TMPDIR"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command as it is.
fn plain(arguments: &[&str]) -> Output {
    distgpipe(arguments).output().expect("the binary was built with this test")
}

/// Runs a command. If it trains and succeeds, it must have trained soundly: it is made to leave a log and its weights, unless
/// the arguments have it do so already, and both are checked.
pub fn attempt(arguments: &[&str]) -> Output {
    let trains = arguments.first() == Some(&"train") || arguments.starts_with(&["recipe", "run"]);
    // The rows of a table are runs of their own, without files.
    if !trains || arguments.contains(&"--table") || arguments.contains(&"--help") {
        return plain(arguments);
    }
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let run = format!("runs/{}-{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
    let own = directory(&run);
    let mut all: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    let mut path_of = |flag: &str, name: &str| -> PathBuf {
        if let Some(at) = arguments.iter().position(|argument| *argument == flag) {
            return PathBuf::from(arguments[at + 1]);
        }
        let path = own.join(name);
        all.extend([flag.to_owned(), path.to_str().expect("a plain path").to_owned()]);
        path
    };
    let (log, weights) = (path_of("--log", "log"), path_of("--save", "model.safetensors"));
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let output = plain(&all);
    if output.status.success() {
        soundness::assert_sound(&format!("{arguments:?}"), &losses(&log), &tensors(&weights));
    }
    std::fs::remove_dir_all(own).expect("it was made for this run");
    output
}

/// The lines of a log that are of this kind: `step` or `test`.
pub fn logged(log: &Path, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(log.join("steps.jsonl")).expect("a log");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines.filter(|line| line["kind"] == kind).collect()
}

/// The loss of each step in a log.
fn losses(log: &Path) -> Vec<f64> {
    logged(log, "step").iter().map(|line| line["loss"].as_f64().expect("a number")).collect()
}

/// The tensors of a file of weights.
pub fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let mut source = distgpipe::train::weights::open(path).expect("a file of weights");
    let names: Vec<String> = source.entries().iter().map(|entry| entry.name.clone()).collect();
    names.into_iter().enumerate().map(|(i, name)| (name, source.read(i).expect("a tensor"))).collect()
}

/// Standard output and standard error of a command that must end with this status.
pub fn ended(status: i32, arguments: &[&str]) -> (String, String) {
    let output = if status == 0 { attempt(arguments) } else { plain(arguments) };
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {err}");
    (out, err)
}

/// Standard output of a command that must succeed.
pub fn fine(arguments: &[&str]) -> String {
    ended(0, arguments).0
}

/// What a command prints with `--json`.
pub fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&fine(arguments)).expect("--json prints JSON and nothing else")
}

/// Standard error of a command that must end with this status, and must not print anything.
pub fn refused(status: i32, arguments: &[&str]) -> String {
    let (out, err) = ended(status, arguments);
    assert!(out.is_empty(), "{arguments:?}: {out}");
    err
}

/// A directory of one test, empty.
pub fn directory(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("the target directory can be written");
    path
}
