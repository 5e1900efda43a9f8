//! Files that are not files, names that are not text, numbers that are too large: errors name the flag and the remedy, and
//! nothing hangs, is dropped silently or ends the process.

mod command;

use command::{directory, distgpipe, ended, refused};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../distgpipe/tests/golden").join(file)
}

fn fifo(path: &Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo");
    assert!(made.success());
}

fn put(root: &Path, file: impl AsRef<Path>) {
    let path = root.join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::copy(golden("images/plain.jpg"), path).unwrap();
}

/// Each of them used to hang: opening a pipe waits for somebody to write to it.
#[test]
fn a_pipe_is_never_waited_for() {
    let root = directory("pipes");
    let pipe = root.join("pipe");
    fifo(&pipe);
    let pipe = pipe.to_str().unwrap();
    put(&root, "images/train/a/x.jpg");
    fifo(&root.join("images/train/a/y.jpg"));
    let images = root.join("images");
    let images = images.to_str().unwrap();
    for name in ["data_batch_1.bin", "train.tsv"] {
        fifo(&root.join(name));
    }
    let root = root.to_str().unwrap();
    let mobilenet = ["train", "--model", "mobilenet_v2", "--set", "image=32"];
    let cases: [(&[&str], &[&str]); 11] = [
        (&["train", "--log", pipe], &["--log", "expected a directory, got a pipe"]),
        (&["train", "--checkpoint", pipe], &["--checkpoint", "expected a directory, got a pipe"]),
        (&["data", "get", "cifar10", "--from", pipe], &["--from", "expected an archive or a directory, got a pipe"]),
        (&["train", "--weights", pipe], &["--weights", "expected a regular file, got a pipe"]),
        (&["train", "--config", pipe], &["--config", "expected text in a pipe, got none within 5 s"]),
        (&["balance", "mlp", "--partitions", "2", "--costs", pipe], &["--costs", "expected text in a pipe"]),
        (&["train", "--plan", pipe], &["--plan", "expected text in a pipe"]),
        (&["codecs", "--input", pipe], &["--input", "expected a regular file, got a pipe"]),
        (
            &[&mobilenet[..], &["--data", "image-folder", "--data-dir", images]].concat(),
            &["y.jpg", "expected a regular file, got a pipe"],
        ),
        (
            &[&mobilenet[..], &["--data", "cifar10", "--data-dir", root]].concat(),
            &["data_batch_1.bin", "expected a regular file, got a pipe"],
        ),
        (
            &["train", "--model", "roberta", "--data", "rte", "--data-dir", root, "--tokenizer", pipe],
            &["--tokenizer", "expected a regular file, got a pipe"],
        ),
    ];
    for (arguments, words) in cases {
        let start = Instant::now();
        let said = refused(2, arguments);
        assert!(start.elapsed() < Duration::from_secs(60), "{arguments:?}: {:?}", start.elapsed());
        for word in words {
            assert!(said.contains(word), "{arguments:?}: expected `{word}` in: {said}");
        }
    }
}

#[test]
fn a_pipe_with_text_in_it_is_read() {
    let root = directory("process-substitution");
    let pipe = root.join("config");
    fifo(&pipe);
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::write(pipe, "steps = 1\nno-evaluate = true\n").unwrap()
    });
    let (out, _) = ended(0, &["train", "--config", pipe.to_str().unwrap(), "--json"]);
    writer.join().unwrap();
    assert!(out.contains("\"steps\": 1"), "{out}");
}

#[test]
fn output_into_a_pipe_without_a_reader_is_an_error() {
    let pipe = directory("silent-output").join("plan.svg");
    fifo(&pipe);
    let (_, said) = ended(1, &["schedule", "--partitions", "2", "--svg", pipe.to_str().unwrap()]);
    assert!(said.contains("--svg") && said.contains("without a reader"), "{said}");
}

/// 15 of 16 images and two of three classes were left out, without a word.
#[test]
fn image_folders_may_have_names_that_are_not_text() {
    let root = directory("odd-names");
    let odd = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    for class in [&b"caf\xe9"[..], b"plain", b"\xff\xfe"] {
        for file in [&b"a.jpg"[..], b"b\xe9.JPG"] {
            put(&root, odd(&[&b"train/"[..], class, b"/", file].concat()));
        }
        put(&root, odd(&[&b"test/"[..], class, b"/\xf0.jpeg"].concat()));
    }
    std::fs::write(root.join("train/plain/x.webp"), "not read").unwrap();
    let train = ["train", "--data", "image-folder", "--data-dir", root.to_str().unwrap()];
    let flags = ["--model", "mobilenet_v2", "--set", "image=64", "--set", "width=0.35", "--set", "classes=3"];
    let steps = ["--batch", "6", "--chunks", "1", "--epochs", "1", "--lr", "0.001", "--json"];
    let (out, said) = ended(0, &[&train[..], &flags, &steps].concat());
    assert!(out.contains("\"steps\": 1"), "all six images make one batch: {out}");
    assert!(said.contains("skipped 1 file such as") && said.contains("x.webp"), "{said}");
    // The number of classes that the error suggests is that of the folder.
    let said = refused(2, &train);
    assert!(said.contains("use a model for images, such as --model mobilenet_v2 --set classes=3"), "{said}");
    std::fs::remove_dir_all(root.join("test")).unwrap();
    let said = refused(2, &[&train[..], &flags, &steps].concat());
    let looked = format!("{}: expected test images in a folder test or val, got neither", root.display());
    assert!(said.contains(&looked) && said.contains("--no-evaluate"), "{said}");
}

/// The name of the file in the message is not the one on the disk, so the flag must be there.
#[test]
fn a_path_that_is_not_utf_8_is_refused_by_its_flag() {
    for flag in ["--checkpoint", "--log", "--save"] {
        let path = OsStr::from_bytes(b"not\xfftext");
        let output = distgpipe(&["train", "--steps", "1"]).arg(flag).arg(path).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(flag) && said.contains("expected a path in UTF-8"), "{said}");
    }
}

/// Some of these ended the process ("memory allocation failed"), others would have been killed for their memory.
#[test]
fn numbers_that_no_memory_can_hold_are_refused_by_their_flag() {
    const HUGE: &str = "1000000000000";
    let synthetic = ["train", "--data", "synthetic", "--samples", HUGE];
    let cases: [(&[&str], &[&str]); 16] = [
        (&synthetic, &["--samples 1000000000000", "takes 16.0 TB of memory, and this host has", "fewer rows"]),
        (&[&synthetic[..], &["--batch", HUGE]].concat(), &["--samples 1000000000000", "TB of memory"]),
        (&["train", "--batch", HUGE], &["--batch 1000000000000", "use a smaller batch"]),
        (&["train", "--chunks", HUGE], &["--chunks"]),
        (&["train", "--partitions", HUGE], &["--partitions"]),
        (&["train", "--replicas", HUGE], &["--replicas"]),
        (&["train", "--auto-balance", HUGE], &["--auto-balance"]),
        (&["train", "--seed", "18446744073709551615"], &["--seed 18446744073709551615: expected at most"]),
        (&["train", "--set", "hidden=[1000000000000]"], &["--set", "1 to 2^24"]),
        (
            &["train", "--set", "hidden=[16777216,16777216]"],
            &["holding the tensors of partition 0 takes 1.1 PB of memory", "a smaller model"],
        ),
        (&["train", "--model", "mobilenet_v2", "--data", "synthetic", "--set", "image=1000000"], &["--set", "image"]),
        (&["balance", "mlp", "--partitions", "2", "--rows", HUGE], &["--rows 1000000000000", "takes 1.0 PB of memory"]),
        (&["models", "mlp", "--profile", "--rows", HUGE], &["--rows 1000000000000", "takes 1.0 PB of memory"]),
        (&["balance", "mlp", "--partitions", "2", "--chunks", HUGE], &["--chunks"]),
        (&["schedule", "--partitions", HUGE], &["--partitions"]),
        (&["schedule", "--chunks", HUGE], &["--chunks"]),
    ];
    for (arguments, words) in cases {
        let output = distgpipe(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}: {:?} {said}", output.status);
        assert!(!said.contains("panicked"), "{arguments:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{arguments:?}: expected `{word}` in: {said}");
        }
    }
}

#[test]
fn options_of_codecs_without_a_codec_are_pointed_out() {
    let flags = ["train", "--partitions", "2", "--steps", "1", "--no-evaluate", "--codec-warm-up", "3"];
    let (_, said) = ended(0, &flags);
    assert!(said.contains("warning: --codec-warm-up: it has no effect, because no link has a codec"), "{said}");
    for codec in [["--codec", "tile:8"], ["--codec-link", "0-1=tile:8"]] {
        let (_, said) = ended(0, &[&flags[..], &codec].concat());
        assert!(!said.contains("--codec-warm-up"), "{said}");
    }
}
