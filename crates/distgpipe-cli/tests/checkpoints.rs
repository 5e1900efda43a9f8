//! Law 6 from the user's chair: `distgpipe train --checkpoint` is killed, and goes on.

mod command;

use command::{directory, distgpipe};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

fn train(arguments: &[&str]) -> (Output, String) {
    let output = distgpipe(&[&["train"], arguments].concat()).output().expect("the binary was built with this test");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

/// The bits of each step's loss, as the log has them.
fn losses(log: &Path) -> BTreeMap<u64, u64> {
    let text = std::fs::read_to_string(log.join("steps.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let pairs: Vec<_> = lines.map(|l| (l["step"].as_u64().unwrap(), l["loss"].as_f64().unwrap().to_bits())).collect();
    let losses: BTreeMap<u64, u64> = pairs.iter().copied().collect();
    assert_eq!(losses.len(), pairs.len(), "each step is in the log once");
    losses
}

/// A client and a server with dropout, Adam's memory, and codecs that remember.
const RUN: [&str; 16] = [
    "--set",
    "hidden=[32,32]",
    "--partitions",
    "3",
    "--place",
    "client,server,client",
    "--optimizer",
    "adamw",
    "--codec",
    "delta(uniform:8)",
    "--epochs",
    "3",
    "--batch",
    "128",
    "--checkpoint-every",
    "2",
];

#[test]
fn a_run_that_is_killed_again_and_again_learns_what_one_learns_that_is_not() {
    let folder = directory("checkpoints/killed");
    let [whole, killed, log, other] = ["whole", "killed", "log", "other"].map(|name| folder.join(name));
    let run = |saved: &Path, log: &Path, more: &[&str]| {
        let saved = ["--checkpoint", saved.to_str().unwrap(), "--log", log.to_str().unwrap()];
        distgpipe(&[&["train"], &RUN[..], &saved, more].concat())
    };
    let output = run(&whole, &log, &[]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected = losses(&log);
    assert_eq!(expected.len(), 33);

    // Each try has a little longer, so the moments of the kills are spread over start, steps, saving and testing, and the
    // last one comes to its end. Server processes at times, which must die with their client.
    let (mut kills, mut interrupted) = (0, 0);
    loop {
        let workers = if kills % 2 == 0 { "threads" } else { "processes" };
        let mut child = run(&killed, &other, &["--resume=if-any", "--workers", workers]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(100 + 60 * kills));
        if child.try_wait().unwrap().is_some_and(|status| status.success()) {
            break;
        }
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        // Killed, or just done: nothing that it could say is an error.
        assert!(matches!(output.status.code(), None | Some(0)), "{}", String::from_utf8_lossy(&output.stderr));
        interrupted += u32::from(killed.is_dir() && std::fs::read_dir(&killed).unwrap().count() > 1);
        kills += 1;
        assert!(kills < 200, "it never comes to its end");
    }
    assert!(interrupted > 0, "no kill came while there was something to lose");
    assert_eq!(losses(&other), expected, "after {kills} kills");
    let newest = |folder: &Path| std::fs::read(folder.join("step-00000033/model.safetensors")).unwrap();
    assert!(newest(&killed) == newest(&whole), "the models differ");
}

/// Stopped in the middle of an epoch; the number of replicas is its own unless it is told another.
#[test]
fn a_run_of_replicas_goes_on_with_as_many_or_others() {
    let folder = directory("checkpoints/replicas");
    let run = |saved: &str, more: &[&str]| {
        let (saved, log) = (folder.join(saved), folder.join(format!("{saved}-log")));
        let to = ["--checkpoint", saved.to_str().unwrap(), "--log", log.to_str().unwrap()];
        let (output, said) = train(&[&to[..], more].concat());
        assert!(output.status.success(), "{more:?}: {said}");
        (losses(&log), said)
    };
    let with = |more: &'static [&str]| [&RUN[..], &["--replicas", "2"], more].concat();
    let (whole, said) = run("whole", &with(&[]));
    assert!(said.contains("on client,server,client, in 2 replicas"), "{said}");
    for (saved, more) in [("same", &["--workers", "processes"][..]), ("other", &["--replicas", "3"])] {
        // Where the whole run saves too, since codecs forget there.
        run(saved, &with(&["--steps", "6"]));
        let (losses, _) = run(saved, &[&["--resume", "--steps", "33"], more].concat());
        assert_eq!(losses.len(), whole.len());
        for (step, bits) in losses {
            let (got, expected) = (f64::from_bits(bits), f64::from_bits(whole[&step]));
            // With others even the micro-batches that a codec sees are not the same.
            let tolerance = if saved == "same" { 0.0 } else { 0.05 };
            assert!((got - expected).abs() <= tolerance * expected, "{saved} step {step}: {got} {expected}");
        }
    }
}

#[test]
fn a_run_goes_on_with_its_own_flags_or_says_what_is_different() {
    let folder = directory("checkpoints/flags");
    let saved = folder.to_str().unwrap();
    let small = ["--set", "hidden=[16,16]", "--batch", "128", "--limit", "512", "--keep", "1"];
    let (first, said) = train(
        &[
            &small[..],
            &[
                "--auto-balance",
                "2",
                "--link-rate",
                "1gbit",
                "--lr-decay",
                "polynomial",
                "--lr-power",
                "3",
                "--sortquant",
                "--quant",
                "6",
                "--epochs",
                "1",
                "--checkpoint",
                saved,
            ],
        ]
        .concat(),
    );
    assert!(first.status.success() && said.contains("saved step 4"), "{said}");

    let (again, said) = train(&["--checkpoint", saved]);
    assert_eq!(again.status.code(), Some(2));
    assert!(said.contains("--resume") && said.contains("another folder"), "{said}");

    // Another cut, another number of epochs; the rest as it was.
    let (longer, said) = train(&["--checkpoint", saved, "--resume", "--balance", "1,1,1", "--epochs", "2", "--json"]);
    assert!(longer.status.success(), "{said}");
    assert!(said.contains("going on after step 4") && said.contains("--epochs 2 (was 1)"), "{said}");
    assert!(said.contains("--balance \"1,1,1\" (was"), "the measured cut is kept: {said}");
    let report: Value = serde_json::from_slice(&longer.stdout).unwrap();
    assert_eq!((&report["resumed_at"], &report["steps"]), (&4.into(), &4.into()));
    assert_eq!((report["epochs"].as_array().unwrap().len(), report["balance"].as_array().unwrap().len()), (2, 3));
    let kept: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(kept.len() == 2 && kept.contains(&"step-00000008".into()), "{kept:?}");

    // What a flag excludes does not come back from the checkpoint.
    let other = ["--resume", "--partitions", "3", "--codec", "tile:4", "--lr-decay", "cosine", "--epochs", "3"];
    let (changed, said) = train(&[&["--checkpoint", saved], &other[..]].concat());
    assert!(changed.status.success() && said.contains("--codec \"tile:4\""), "{said}");

    let resume = |more: &[&str]| {
        let (refused, said) = train(&[&["--checkpoint", saved, "--resume"], more].concat());
        assert!(!refused.status.success(), "{more:?}");
        said
    };
    assert!(resume(&["--batch", "64"]).contains("--batch 64 (was 128)"));
    assert!(resume(&["--seed", "1"]).contains("the seed"));
    assert!(resume(&["--weights", "other.pth"]).contains("--weights other.pth: the checkpoint has the tensors"));
    assert!(resume(&["--optimizer", "adam"]).contains("the optimizer"));
    assert!(resume(&["--set", "hidden=[16,17]"]).contains("the model"));
    let (nowhere, said) = train(&["--checkpoint", folder.join("nowhere").to_str().unwrap(), "--resume"]);
    assert!(nowhere.status.code() == Some(2) && said.contains("no such folder"), "{said}");
    // Killed before its first checkpoint, a run has a log.
    let early = folder.join("early");
    std::fs::create_dir_all(&early).unwrap();
    std::fs::write(early.join("steps.jsonl"), "{}\n").unwrap();
    let again = ["--steps", "1", "--log", early.to_str().unwrap(), "--checkpoint", early.to_str().unwrap()];
    assert!(!train(&again).0.status.success());
    let (started, said) = train(&[&again[..], &["--resume=if-any"]].concat());
    assert!(started.status.success() && losses(&early).len() == 1, "{said}");
    let (nothing, said) = train(&["--resume"]);
    assert!(nothing.status.code() == Some(2) && said.contains("add --checkpoint DIR"), "{said}");
}

#[test]
fn a_damaged_checkpoint_is_told_and_the_one_before_it_goes_on() {
    let folder = directory("checkpoints/spoilt");
    let saved = folder.to_str().unwrap();
    let run = ["--set", "hidden=[16]", "--partitions", "2", "--batch", "256", "--epochs", "2", "--checkpoint", saved];
    assert!(train(&run).0.status.success());
    std::fs::write(folder.join("step-00000010/model.safetensors"), "nothing of the kind").unwrap();
    let (resumed, said) = train(&["--checkpoint", saved, "--resume"]);
    assert!(resumed.status.success(), "{said}");
    assert!(said.contains("left out") && said.contains("going on after step 5"), "{said}");
    assert!(folder.join("unused-step-00000010").is_dir() && folder.join("step-00000010").is_dir());
    for step in ["step-00000005", "step-00000010"] {
        std::fs::write(folder.join(step).join("checkpoint.json"), "{}").unwrap();
    }
    for resume in [&["--resume"][..], &["--resume=if-any"], &[]] {
        let (refused, said) = train(&[&["--checkpoint", saved], resume].concat());
        assert!(refused.status.code() == Some(2) && said.contains("none of its checkpoints can be used"), "{said}");
    }
}
