//! Law 6 from the user's chair: `distgpipe train --checkpoint` is killed, and goes on.

mod command;

use command::{directory, distgpipe, logged};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn train(arguments: &[&str]) -> (Output, String) {
    let output = command::attempt(&[&["train"], arguments].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

/// The bits of each step's loss, as the log has them.
fn losses(log: &Path) -> BTreeMap<u64, u64> {
    bits(log, "step", "loss")
}

/// The bits of a figure by step, as the lines of this kind in the log have them.
fn bits(log: &Path, kind: &str, figure: &str) -> BTreeMap<u64, u64> {
    let lines = logged(log, kind);
    let pair = |line: &Value| (line["step"].as_u64().unwrap(), line[figure].as_f64().unwrap().to_bits());
    let bits: BTreeMap<u64, u64> = lines.iter().map(pair).collect();
    assert_eq!(bits.len(), lines.len(), "each {kind} is in the log once");
    bits
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

/// When a run is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    /// As soon as the process is there.
    Start,
    /// After its first step.
    Step,
    /// While it writes a checkpoint, or right after.
    Saving,
    /// After the last step of an epoch, when it tests.
    Testing,
    /// Three checkpoints further: so that tries come to the end of the run.
    Later,
}

const MOMENTS: [Moment; 5] = [Moment::Start, Moment::Step, Moment::Saving, Moment::Testing, Moment::Later];

/// With 1437 rows in batches of 128.
const STEPS_PER_EPOCH: u64 = 11;

/// How far a run is, from what it has written.
struct Seen {
    last_step: Option<u64>,
    last_checkpoint: u64,
    saving: bool,
}

impl Seen {
    fn of(saved: &Path, log: &Path) -> Self {
        let steps = std::fs::read_to_string(log.join("steps.jsonl")).unwrap_or_default();
        let last =
            steps.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?["step"].as_u64()).next_back();
        let files = std::fs::read_dir(saved).into_iter().flatten().flatten();
        let names: Vec<String> = files.filter_map(|file| file.file_name().into_string().ok()).collect();
        let checkpoints = names.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok());
        Seen {
            last_step: last,
            last_checkpoint: checkpoints.max().unwrap_or(0),
            saving: names.iter().any(|name| name.ends_with(".partial")),
        }
    }

    fn is(&self, moment: Moment, before: &Seen) -> bool {
        let stepped = self.last_step != before.last_step;
        match moment {
            Moment::Start => true,
            Moment::Step => stepped,
            Moment::Saving => self.saving && !before.saving || self.last_checkpoint > before.last_checkpoint,
            Moment::Testing => stepped && self.last_step.is_some_and(|step| step % STEPS_PER_EPOCH == 0),
            Moment::Later => self.last_checkpoint >= before.last_checkpoint + 6,
        }
    }
}

/// Waits until a run is at this moment; whether it came, and the run did not end before it.
fn came(moment: Moment, before: &Seen, child: &mut Child, now: impl Fn() -> Seen) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !now().is(moment, before) {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(Instant::now() < deadline, "{moment:?} does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

#[test]
fn a_run_killed_many_times_has_the_losses_and_weights_of_an_uninterrupted_one() {
    let folder = directory("checkpoints/killed");
    let [whole, killed, log, other] = ["whole", "killed", "log", "other"].map(|name| folder.join(name));
    let run = |saved: &Path, log: &Path, more: &[&str]| {
        let saved = ["--checkpoint", saved.to_str().unwrap(), "--log", log.to_str().unwrap()];
        distgpipe(&[&["train"], &RUN[..], &saved, more].concat())
    };
    let output = run(&whole, &log, &[]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected = losses(&log);
    let tests = bits(&log, "test", "test_loss");
    assert_eq!((expected.len(), tests.keys().copied().collect::<Vec<_>>()), (33, vec![11, 22, 33]));

    // Server processes at times, which must die with their client.
    let (mut kills, mut interrupted) = (0, 0);
    loop {
        let workers = if kills % 2 == 0 { "threads" } else { "processes" };
        let before = Seen::of(&killed, &other);
        let mut child = run(&killed, &other, &["--resume=if-any", "--workers", workers]).spawn().unwrap();
        let moment = MOMENTS[kills % MOMENTS.len()];
        if !came(moment, &before, &mut child, || Seen::of(&killed, &other)) {
            assert!(child.wait().unwrap().success(), "the last try ends by itself");
            break;
        }
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        // Killed, or just done: nothing that it could say is an error.
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), None | Some(0)), "{moment:?}: {said}");
        interrupted += u32::from(killed.is_dir() && std::fs::read_dir(&killed).unwrap().count() > 1);
        kills += 1;
        assert!(kills < 100, "it never comes to its end");
    }
    assert!(kills > MOMENTS.len(), "a kill at each of the moments");
    assert!(interrupted > 0, "no kill came while there was something to lose");
    assert_eq!(losses(&other), expected, "after {kills} kills");
    assert_eq!(bits(&other, "test", "test_loss"), tests, "after {kills} kills");
    let newest = |folder: &Path| std::fs::read(folder.join("step-00000033/model.safetensors")).unwrap();
    assert!(newest(&killed) == newest(&whole), "the models differ");
}

/// Stopped in the middle of an epoch; the number of replicas is its own unless it is told another.
#[test]
fn a_run_with_replicas_resumes_with_the_same_or_another_number_of_them() {
    let folder = directory("checkpoints/replicas");
    let run = |saved: &str, more: &[&str]| {
        let (saved, log) = (folder.join(saved), folder.join(format!("{saved}-log")));
        let to = ["--checkpoint", saved.to_str().unwrap(), "--log", log.to_str().unwrap()];
        let (output, said) = train(&[&to[..], more].concat());
        assert!(output.status.success(), "{more:?}: {said}");
        (losses(&log), said)
    };
    let replicas = ["--replicas", "2", "--codec-replicas", "feedback(tile:6)"];
    let with = |more: &'static [&str]| [&RUN[..], &replicas, more].concat();
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
fn a_resumed_run_keeps_its_flags_and_reports_changed_ones() {
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
    assert!(said.contains("--resume") && said.contains("another directory"), "{said}");

    // Another cut, another number of epochs; the rest as it was.
    let (longer, said) = train(&["--checkpoint", saved, "--resume", "--balance", "1,1,1", "--epochs", "2", "--json"]);
    assert!(longer.status.success(), "{said}");
    assert!(said.contains("resuming after step 4") && said.contains("--epochs 2 (was 1)"), "{said}");
    assert!(said.contains("--balance 1,1,1 (was"), "the measured cut is kept: {said}");
    let report: Value = serde_json::from_slice(&longer.stdout).unwrap();
    assert_eq!((&report["resumed_at"], &report["steps"]), (&4.into(), &4.into()));
    assert_eq!((report["epochs"].as_array().unwrap().len(), report["balance"].as_array().unwrap().len()), (2, 3));
    let kept: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(kept.len() == 2 && kept.contains(&"step-00000008".into()), "{kept:?}");

    // What a flag excludes does not come back from the checkpoint.
    let other = ["--resume", "--partitions", "3", "--codec", "tile:4", "--lr-decay", "cosine", "--epochs", "3"];
    let (changed, said) = train(&[&["--checkpoint", saved], &other[..]].concat());
    assert!(changed.status.success() && said.contains("--codec tile:4 (was not given)"), "{said}");

    let resume = |more: &[&str]| {
        let (refused, said) = train(&[&["--checkpoint", saved, "--resume"], more].concat());
        assert_eq!(refused.status.code(), Some(2), "{more:?}: {said}");
        said
    };
    assert!(resume(&["--batch", "64"]).contains("--batch 64 (was 128)"));
    assert!(resume(&["--seed", "1"]).contains("--seed 1 (was 0): a resumed run keeps its model, seed and optimizer"));
    assert!(resume(&["--freeze", "*.bias"]).contains("--freeze *.bias (was not given)"));
    assert!(resume(&["--weights", "other.pth"]).contains("other.pth: the checkpoint has the tensors"));
    assert!(resume(&["--optimizer", "adam"]).contains("--optimizer adam (was sgd)"));
    assert!(resume(&["--momentum", "0.5"]).contains("--momentum 0.5 (was 0.9)"));
    assert!(resume(&["--set", "hidden=[16,17]"]).contains("--set hidden=[16,17] (was hidden=[16,16])"));
    let (nowhere, said) = train(&["--checkpoint", folder.join("nowhere").to_str().unwrap(), "--resume"]);
    assert!(nowhere.status.code() == Some(2) && said.contains("no such directory"), "{said}");
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

/// Relative paths, and a name that looks like a flag.
#[test]
fn a_run_resumes_in_another_working_directory_with_the_files_of_the_first() {
    let root = directory("checkpoints/elsewhere");
    let [first, second] = ["first", "second"].map(|name| root.join(name));
    for folder in [&first, &second] {
        std::fs::create_dir(folder).unwrap();
    }
    let run = ["train", "--set", "hidden=[16]", "--batch", "256", "--no-evaluate", "--checkpoint=-saved"];
    let fails = ["--checkpoint-every", "2", "--partitions", "2", "--log", "log", "--save", "model.safetensors"];
    let faults = ["--faults", "w0>w1:cut@18"];
    let failed = distgpipe(&[&run[..], &fails, &faults].concat()).current_dir(&first).output().unwrap();
    let said = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(1), "{said}");
    let to_go_on = said.lines().find_map(|line| line.strip_prefix("to resume from the newest checkpoint: distgpipe "));
    assert_eq!(to_go_on, Some("train --checkpoint=-saved --resume"), "{said}");
    let resume = ["train", "--checkpoint=../first/-saved", "--resume", "--faults", ""];
    let resumed = distgpipe(&resume).current_dir(&second).output().unwrap();
    let said = String::from_utf8_lossy(&resumed.stderr);
    assert!(resumed.status.success() && said.contains("resuming after step "), "{said}");
    assert!(first.join("log/summary.json").is_file() && first.join("model.safetensors").is_file(), "{said}");
    assert_eq!(std::fs::read_dir(&second).unwrap().count(), 0);
    // The same file, however it is named, is no change.
    let again = ["train", "--checkpoint=-saved", "--resume", "--save", "model.safetensors", "--epochs", "6"];
    let again = distgpipe(&again).current_dir(&first).output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success() && !said.contains("--save model") && !said.contains("with --save"), "{said}");
}

#[test]
fn a_corrupt_checkpoint_is_reported_and_the_previous_one_is_resumed() {
    let folder = directory("checkpoints/spoilt");
    let saved = folder.to_str().unwrap();
    let run = ["--set", "hidden=[16]", "--partitions", "2", "--batch", "256", "--epochs", "2", "--checkpoint", saved];
    assert!(train(&run).0.status.success());
    std::fs::write(folder.join("step-00000010/model.safetensors"), "nothing of the kind").unwrap();
    let (resumed, said) = train(&["--checkpoint", saved, "--resume"]);
    assert!(resumed.status.success(), "{said}");
    assert!(said.contains("skipping a damaged checkpoint") && said.contains("resuming after step 5"), "{said}");
    assert!(folder.join("unused-step-00000010").is_dir() && folder.join("step-00000010").is_dir());
    for step in ["step-00000005", "step-00000010"] {
        std::fs::write(folder.join(step).join("checkpoint.json"), "{}").unwrap();
    }
    for resume in [&["--resume"][..], &["--resume=if-any"], &[]] {
        let (refused, said) = train(&[&["--checkpoint", saved], resume].concat());
        assert!(refused.status.code() == Some(2) && said.contains("none of its checkpoints can be used"), "{said}");
    }
}

/// A limit on the size of files stands for a disk that is full in the middle of a file. The run goes on with the older checkpoint,
/// and saves again when there is room.
#[test]
fn a_disk_that_is_full_for_a_while_does_not_end_the_run() {
    let saved = directory("full disk").join("saved");
    let slow = ["--faults", "client>server:delay=100@0", "--chunks", "2", "--place", "client,server"];
    let often = ["--steps", "30", "--no-evaluate", "--checkpoint-every", "3", "--checkpoint", saved.to_str().unwrap()];
    // The signal would end the process; a full disk is an error of the write alone.
    let run = ["-c", r#"trap '' XFSZ; exec "$0" "$@""#, env!("CARGO_BIN_EXE_distgpipe"), "train", "--device", "cpu"];
    let mut run = Command::new("sh")
        .args(run)
        .args(slow)
        .args(often)
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let process = run.id();
    let limit = |bytes: &str| {
        let flags = [format!("--pid={process}"), format!("--fsize={bytes}:unlimited")];
        assert!(Command::new("prlimit").args(flags).status().unwrap().success());
    };
    let mut said = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut next = |wanted: &str| said.find(|line| line.contains(wanted)).unwrap_or_else(|| panic!("no `{wanted}`"));
    next("saved step");
    limit("4096");
    let warning = next("warning: the checkpoint could not be written (1 of at most 5 failures in a row)");
    assert!(warning.contains("File too large"), "{warning}");
    assert!(std::fs::read_dir(&saved).unwrap().count() > 0, "the older checkpoint stays");
    limit("unlimited");
    next("saved step");
    next("saved step 30");
    assert_eq!(run.wait().unwrap().code(), Some(0));
    let names = std::fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.collect();
    assert!(names.iter().all(|name| name == "lock" || name.starts_with("step-")), "{names:?}");
}
