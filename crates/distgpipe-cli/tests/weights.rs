//! `distgpipe train --save` and `--weights`: what is written is what comes back.

mod command;

use command::{directory, ended, refused};
use std::collections::BTreeMap;
use std::path::Path;

/// What a run that must succeed said on standard error.
fn fine(arguments: &[&str]) -> String {
    ended(0, &[&["train"], arguments].concat()).1
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the target directory has a name in UTF-8")
}

/// Batch norms with their counters, channels-last weights, three partitions on two workers; then from the file into
/// another cut, in processes, without a step.
#[test]
fn a_saved_model_comes_back_bit_for_bit_through_any_cut() {
    let directory = directory("save");
    let [first, second] = ["first", "second"].map(|name| directory.join(format!("{name}.safetensors")));
    // One batch again and again, with enough rows and pixels for batch norms: its loss falls.
    let model = ["--model", "mobilenet_v2", "--set", "image=8", "--set", "width=0.25"];
    let data = ["--set", "strides=[1,1,1,2,1,1,2,1]", "--data", "digits", "--limit", "64", "--batch", "64"];
    let model = [&model[..], &data].concat();
    let run = ["--epochs", "8", "--lr", "0.03", "--no-evaluate", "--cut", "first=1,last=1", "--seed", "1"];
    let said = fine(&[&model[..], &run, &["--save", text(&first)]].concat());
    assert!(said.contains("saved 314 tensors to "), "{said}");
    let again =
        ["--steps", "0", "--balance", "7,13", "--workers", "processes", "--seed", "2", "--weights", text(&first)];
    fine(&[&model[..], &again, &["--save", text(&second)]].concat());
    let [first, second] = [first, second].map(|path| tensors(&path));
    assert_eq!(first.len(), 314);
    let other: Vec<&String> = first.keys().filter(|name| first.get(*name) != second.get(*name)).collect();
    assert!(other.is_empty() && first.len() == second.len(), "{other:?}");
    for name in ["features.0.1.num_batches_tracked", "classifier.1.weight"] {
        assert!(first.contains_key(name), "{name}");
    }
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2, "nothing else is left there");
}

/// By name: the order of a file is that of the workers that wrote it.
fn tensors(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = |tensor| distgpipe::engine::bytes(&tensor).unwrap().to_vec();
    command::tensors(path).into_iter().map(|(name, tensor)| (name, bytes(tensor))).collect()
}

#[test]
fn a_path_that_cannot_be_saved_to_is_rejected_before_training() {
    let directory = directory("save-wrong");
    for (path, why) in [
        (directory.join("model.pth"), "ends in .safetensors"),
        (directory.join("none").join("model.safetensors"), "a directory that exists"),
        (directory.clone(), "got a directory"),
    ] {
        let said = refused(2, &["train", "--save", text(&path)]);
        assert!(said.contains("--save") && said.contains(why), "{said}");
    }
}

#[test]
fn a_weights_file_that_would_run_code_is_rejected() {
    let evil = concat!(env!("CARGO_MANIFEST_DIR"), "/../distgpipe/tests/golden/pth/evil.pth");
    let said = refused(2, &["train", "--weights", evil]);
    assert!(
        said.contains("--weights") && said.contains("expected tensors only") && said.contains("posix.system"),
        "{said}"
    );
}

#[test]
fn weights_that_are_not_finite_are_rejected_before_training() {
    let path = directory("not-finite").join("model.safetensors");
    let model = ["--set", "hidden=[4]", "--steps", "1", "--no-evaluate"];
    fine(&[&model[..], &["--save", text(&path)]].concat());
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let said = refused(1, &[&["train"], &model[..], &["--weights", text(&path)]].concat());
    assert!(said.contains("model.safetensors") && said.contains("not finite"), "{said}");
}
