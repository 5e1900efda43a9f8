//! `--precision` from the command line to the report.

mod command;

use command::{ended, refused};
use serde_json::Value;

fn fine(arguments: &[&str]) -> (String, String) {
    ended(0, arguments)
}

fn json(arguments: &[&str]) -> Value {
    command::json(&[arguments, &["--json"]].concat())
}

const RUN: [&str; 8] = ["train", "--partitions", "2", "--steps", "6", "--epochs", "1", "--no-evaluate"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], more].concat()
}

/// Bytes that crossed links, as they lie in memory.
fn carried(report: &Value) -> u64 {
    report["links"].as_array().unwrap().iter().map(|link| link["payload_bytes"].as_u64().unwrap()).sum()
}

#[test]
fn bf16_halves_the_bytes_on_links_and_is_reported() {
    let (plain, cast) = (json(&with(&[])), json(&with(&["--precision", "bf16"])));
    assert_eq!((&plain["precision"], &cast["precision"]), (&"fp32".into(), &"bf16".into()));
    assert_eq!(carried(&plain), 2 * carried(&cast));
    assert!(cast["command"].as_str().unwrap().contains("--precision bf16"), "{}", cast["command"]);
    let loss = |report: &Value| report["epochs"][0]["train_loss"].as_f64().unwrap();
    assert!(loss(&plain) != loss(&cast), "computed in something else");
    assert!((loss(&plain) - loss(&cast)).abs() < 0.05 * loss(&plain), "{} {}", loss(&plain), loss(&cast));
    let (out, err) = fine(&with(&["--precision", "bf16"]));
    assert!(err.contains("mlp in bf16: ") && out.contains(" samples/s in bf16 ("), "{err}{out}");
    let (out, err) = fine(&RUN);
    assert!(!err.contains("in fp32") && !out.contains("in fp32"), "{err}{out}");
}

#[test]
fn processes_and_threads_train_identically_in_bf16() {
    let run = |workers: &str| json(&with(&["--precision", "bf16", "--codec", "tile:4", "--workers", workers]));
    let (threads, processes) = (run("threads"), run("processes"));
    assert_eq!(threads["epochs"][0]["train_loss"], processes["epochs"][0]["train_loss"]);
}

#[test]
fn layers_are_measured_in_the_precision_of_the_run() {
    let model = ["models", "mlp", "--profile", "--set", "hidden=[256,256]", "--rows", "64"];
    let held = |precision: &str| {
        let report = json(&[&model[..], &["--precision", precision]].concat());
        assert_eq!(report["precision"].as_str(), Some(precision));
        let layers = report["layers"].as_array().unwrap().clone();
        layers.iter().map(|layer| layer["held_bytes"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_ne!(held("fp32"), held("bf16"));
    assert!(fine(&[&model[..], &["--precision", "bf16"]].concat()).0.contains("64 rows in bf16"));
    fine(&["balance", "mlp", "--partitions", "2", "--precision", "bf16"]);
    fine(&["train", "--auto-balance", "2", "--steps", "2", "--precision", "bf16", "--no-evaluate"]);
}

#[test]
fn an_unknown_precision_lists_the_known_ones() {
    for arguments in [&["train", "--precision", "fp16"][..], &["models", "mlp", "--precision", "half"]] {
        let told = refused(2, arguments);
        assert!(told.contains("--precision") && told.contains("expected `fp32` or `bf16`"), "{told}");
    }
}
