//! Groups, frozen parameters, the best checkpoint and patience, as flags.

mod command;

use command::{directory, fine, json, refused, tensors};
use std::path::Path;

const SMALL: [&str; 11] =
    ["train", "--set", "hidden=[32,32]", "--partitions", "3", "--batch", "64", "--limit", "512", "--threads", "1"];

#[test]
fn frozen_partitions_receive_no_gradients_and_keep_their_weights() {
    let folder = directory("fine_tuning/frozen");
    let [start, end] =
        ["start", "end"].map(|name| folder.join(format!("{name}.safetensors")).to_str().unwrap().to_owned());
    fine(&[&SMALL[..], &["--epochs", "3", "--save", &start]].concat());
    let frozen =
        ["--epochs", "4", "--weights", &start, "--freeze", "layers.0.*, layers.1.weight", "--freeze", "layers.1.bias"];
    let report = json(&[&SMALL[..], &frozen, &["--save", &end, "--json"]].concat());
    let links: Vec<(&str, &str)> = report["links"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|link| link["messages"] != 0)
        .map(|link| (link["from"].as_str().unwrap(), link["to"].as_str().unwrap()))
        .collect();
    assert_eq!(links, [("w0", "w1"), ("w1", "w2")], "nothing goes back");
    let (before, after) = (tensors(Path::new(&start)), tensors(Path::new(&end)));
    for (name, tensor) in &after {
        assert_eq!(tensor.equal(&before[name]), !name.starts_with("layers.2."), "{name}");
    }
    assert!(report["command"]
        .as_str()
        .unwrap()
        .contains("--freeze 'layers.0.*, layers.1.weight' --freeze layers.1.bias"));
}

#[test]
fn errors_of_patterns_name_the_flag_and_close_names() {
    let error = |more: &[&str]| refused(2, &[&SMALL[..], more].concat());
    let said = error(&["--freeze", "layer.0.*"]);
    assert!(said.contains("--freeze: no parameter matches `layer.0.*`") && said.contains("`layers.0."), "{said}");
    assert!(error(&["--freeze", "*"]).contains("nothing to train"));
    assert!(error(&["--group", "bias:weight-decay=0"]).contains("--group: no parameter matches `bias`"));
    assert!(error(&["--group", "*.bias"]).contains("--group *.bias: expected PATTERN:SETTING"));
    assert!(error(&["--group", "*.bias:lr=0.1"]).contains("use lr-factor, which multiplies the rate of --lr"));
    assert!(error(&["--group", "*.bias:lr-factor=-1"]).contains("expected a rate factor of at least 0, got -1"));
}

#[test]
fn a_resumed_run_keeps_its_groups() {
    let folder = directory("fine_tuning/groups");
    let saved = folder.to_str().unwrap();
    let groups = ["--group", "layers.0.*:lr-factor=0.1,weight-decay=0.5", "--group", "*.bias:weight-decay=0"];
    let model = folder.join("model.safetensors");
    // Named, because a resumed run writes to the same places.
    let to = ["--save", model.to_str().unwrap(), "--log", saved];
    fine(&[&SMALL[..], &groups, &["--epochs", "1", "--checkpoint", saved], &to].concat());
    let resume = ["train", "--checkpoint", saved, "--resume"];
    fine(&[&resume[..], &["--epochs", "2"], &to].concat());
    let other = ["--epochs", "3", "--group", "*.bias:weight-decay=0.1"];
    let said = command::ended(2, &[&resume[..], &other, &to].concat()).1;
    assert!(said.contains("--group *.bias:weight-decay=0.1 (was "), "{said}");
}

#[test]
fn the_best_checkpoint_is_kept_and_can_be_resumed() {
    let folder = directory("fine_tuning/best");
    let saved = folder.to_str().unwrap();
    let best = ["--epochs", "4", "--checkpoint", saved, "--keep", "1", "--save-best", "loss"];
    let (_, said) = command::ended(0, &[&SMALL[..], &best].concat());
    let line = said.lines().find(|line| line.starts_with("best epoch: ")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("with a test loss of"), "{line}");
    let marked = std::fs::read_to_string(folder.join("best")).unwrap();
    assert!(
        line.ends_with(&format!("kept in {saved}/{}", marked.trim())) && folder.join(marked.trim()).is_dir(),
        "{line}"
    );
    let (_, said) = command::ended(0, &["train", "--checkpoint", saved, "--resume=best", "--epochs", "5"]);
    let step: u64 = marked.trim().trim_start_matches("step-").parse().unwrap();
    assert!(said.contains(&format!("resuming after step {step}")), "{said}");
    let plain = directory("fine_tuning/plain");
    fine(&[&SMALL[..], &["--epochs", "1", "--checkpoint", plain.to_str().unwrap()]].concat());
    let said = refused(2, &["train", "--checkpoint", plain.to_str().unwrap(), "--resume=best"]);
    assert!(said.contains("no checkpoint is marked as the best"), "{said}");
    assert!(refused(2, &[&SMALL[..], &["--save-best", "loss"]].concat()).contains("--checkpoint DIR"));
}

/// The accuracy on 32 rows soon stays the same.
#[test]
fn a_run_without_improvement_ends_early_and_says_so() {
    let folder = directory("fine_tuning/patience");
    let (saved, model) = (folder.to_str().unwrap(), folder.join("model.safetensors"));
    let best = ["--save-best", "accuracy", "--patience", "2", "--checkpoint", saved, "--save", model.to_str().unwrap()];
    let (out, said) =
        command::ended(0, &[&SMALL[..], &["--epochs", "500", "--limit-test", "32", "--json"], &best].concat());
    assert!(said.contains("stopped early: the test accuracy has not improved for 2 epochs"), "{said}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let (epochs, best) = (report["epochs"].as_array().unwrap().len() as u64, report["best"]["epoch"].as_u64().unwrap());
    assert_eq!((&report["end"], epochs), (&"out_of_patience".into(), best + 2));
    assert!(said.contains(&format!("best epoch: {}, with a test accuracy of", best)), "{said}");
    let again = command::distgpipe(&["train", "--checkpoint", saved, "--resume"]).output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success(), "{said}");
    let ended: serde_json::Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!((&ended["end"], &ended["steps"]), (&"out_of_patience".into(), &0.into()));
    assert!(said.contains("already finished after step ") && said.contains("by early stopping (--patience "), "{said}");
    assert!(said.contains("raise --patience") && !said.contains("resuming"), "{said}");
    assert!(refused(2, &[&SMALL[..], &["--patience", "2", "--no-evaluate"]].concat()).contains("--patience"));
}

#[test]
fn a_run_evaluates_as_often_as_asked_and_at_the_end() {
    let (out, _) = command::ended(
        0,
        &[&SMALL[..], &["--epochs", "3", "--evaluate-every", "2", "--limit-test", "32", "--json"]].concat(),
    );
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let tested: Vec<bool> =
        report["epochs"].as_array().unwrap().iter().map(|epoch| !epoch["test_loss"].is_null()).collect();
    assert_eq!(tested, [false, true, true]);
    let error = |more: &[&str]| refused(2, &[&SMALL[..], more].concat());
    assert!(error(&["--evaluate-every", "0"]).contains("--evaluate-every 0: use 1 epoch or more, or --no-evaluate"));
    assert!(error(&["--evaluate-every", "2", "--no-evaluate"]).contains("--evaluate-every: the run does not evaluate"));
}

#[test]
fn negative_numbers_are_told_the_range_of_the_flag() {
    let error = |more: &[&str]| refused(2, &[&SMALL[..], more].concat());
    assert!(error(&["--lr", "-1"]).contains("--lr -1: expected a number from 0 to 1000"));
    assert!(error(&["--epochs", "-1"]).contains("expected a whole number of at least 1"));
    assert!(error(&["--chunks", "-2"]).contains("expected a whole number of at least 1"));
    assert!(error(&["--seed", "-2"]).contains("expected a whole number of at least 0"));
    assert!(error(&["--clip-norm", "-0.5"]).contains("--clip-norm -0.5: expected a number above 0"));
    assert!(refused(2, &["schedule", "--partitions", "-2"]).contains("expected a whole number of at least 1"));
}
