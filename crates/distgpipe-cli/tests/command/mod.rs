//! The command as its users run it, for the tests of what it says and how it ends.

// Each test program has use for some of these.
#![allow(dead_code)]

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The command with nothing to read, outside the checkout: what it needs of it is in the binary.
pub fn distgpipe(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_distgpipe"));
    command.args(arguments).env_remove("DISTGPIPE_TOKEN").current_dir(env!("CARGO_TARGET_TMPDIR"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Standard output and standard error of a command that must end with this status.
pub fn ended(status: i32, arguments: &[&str]) -> (String, String) {
    let output = distgpipe(arguments).output().expect("the binary was built with this test");
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
