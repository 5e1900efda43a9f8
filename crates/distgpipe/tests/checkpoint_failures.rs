//! A disk that fails does not end a run at once: it goes on with the older checkpoint, and tries again.

use distgpipe::data::{Digits, Loader, LoaderOptions, Split};
use distgpipe::model::zoo::Mlp;
use distgpipe::train::checkpoint::Checkpoints;
use distgpipe::train::{Event, SaveEvery, TrainError, TrainOptions, Trainer};
use distgpipe::{CheckpointError, Pipeline};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("checkpoint_failures").join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// Takes the folder of the checkpoints away, as a disk that is full or unplugged, and brings it back.
struct Disk {
    folder: PathBuf,
    away: PathBuf,
}

impl Disk {
    fn new(folder: &Path) -> Self {
        Disk { folder: folder.to_owned(), away: folder.with_extension("away") }
    }

    fn fail(&self) {
        let _ = std::fs::remove_dir_all(&self.away);
        std::fs::rename(&self.folder, &self.away).expect("a folder");
    }

    fn work(&self) {
        std::fs::rename(&self.away, &self.folder).expect("a folder");
    }
}

/// 12 steps with a checkpoint every 4. The disk fails after step 5 and works again after `failures` attempts. Returns what was saved
/// and what was not, by steps done.
fn run(name: &str, failures: u64, options: TrainOptions) -> (Vec<String>, Result<u64, TrainError>) {
    let folder = folder(name);
    let (checkpoints, disk) = (Checkpoints::open(&folder, 2).expect("a folder"), Disk::new(&folder));
    let mut pipeline = Pipeline::builder(Mlp { hidden: vec![8], ..Mlp::default() }.model().expect("a model"))
        .device(distgpipe::Device::Cpu)
        .threads(1)
        .learning_rate(0.01)
        .build()
        .expect("a pipeline");
    let digits = Digits::new(Split::Train, Default::default()).expect("digits");
    let loader = Loader::new(Arc::new(digits), LoaderOptions::training(64, 0)).expect("a loader");
    let trainer = Trainer::new(&mut pipeline, loader, None, TrainOptions { steps_max: Some(12), ..options });
    let trainer = trainer.expect("a trainer").save_to(&checkpoints, SaveEvery::Steps(4), serde_json::Value::Null);
    let mut seen = Vec::new();
    let result = trainer.run(|event, _| {
        match event {
            Event::StepDone(done) if done.step == 5 => disk.fail(),
            Event::Saved { step, .. } => seen.push(format!("saved {step}")),
            Event::SaveFailed { step, error, failures: count, again_at, .. } => {
                assert!(matches!(error, CheckpointError::Io { .. }), "{error}");
                seen.push(format!("failed {step}, again at {again_at}"));
                if *count == failures {
                    disk.work();
                }
            }
            _ => {}
        }
        Ok(())
    });
    (seen, result.map(|summary| summary.steps))
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_tried_again_and_the_run_goes_on() {
    let (seen, steps) = run("again", 2, TrainOptions::default());
    assert_eq!(steps.expect("the run goes on"), 12);
    assert_eq!(seen, ["saved 4", "failed 8, again at 9", "failed 9, again at 11", "saved 11", "saved 12"]);
}

#[test]
fn too_many_failures_in_a_row_end_the_run_and_so_does_a_failure_at_its_end() {
    let (seen, ended) = run("too_many", u64::MAX, TrainOptions { save_failures_max: 1, ..TrainOptions::default() });
    assert_eq!(seen, ["saved 4", "failed 8, again at 9"]);
    assert!(matches!(ended, Err(TrainError::Checkpoint(CheckpointError::Io { .. }))), "{ended:?}");
    let (seen, ended) = run("last", u64::MAX, TrainOptions::default());
    assert_eq!(seen, ["saved 4", "failed 8, again at 9", "failed 9, again at 11", "failed 11, again at 15"]);
    assert!(matches!(ended, Err(TrainError::Checkpoint(CheckpointError::Io { .. }))), "{ended:?}");
}
