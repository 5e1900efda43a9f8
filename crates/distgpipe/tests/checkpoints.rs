//! Law 6: nothing is lost. A run that goes on from a checkpoint computes what it would have computed without the stop.

#[path = "one_device/mod.rs"]
#[allow(dead_code)]
mod one_device;

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::data::Split;
use distgpipe::data::{Digits, Loader, LoaderOptions};
use distgpipe::model::zoo::{Mlp, MobileNetV2};
use distgpipe::runtime::optimizer::Optim;
use distgpipe::tch::Tensor;
use distgpipe::train::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use distgpipe::train::{Event, Progress, RunSummary, SaveEvery, TrainError, TrainOptions, Trainer};
use distgpipe::{Builder, Model, Pipeline};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("checkpoints").join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// Five batches an epoch.
fn loader(rows: usize) -> Loader {
    Loader::new(Arc::new(Digits::new(Split::Train, Default::default()).unwrap()), LoaderOptions::training(rows, 3))
        .unwrap()
}

fn mlp() -> Model {
    Mlp { hidden: vec![16, 16, 16], ..Mlp::default() }.model().unwrap()
}

/// What a run did: the bits of each step's loss, by step, and where it ended.
struct Run {
    losses: BTreeMap<u64, u64>,
    summary: RunSummary,
    state: BTreeMap<String, Tensor>,
}

/// One run, with a checkpoint every `every` steps, from a checkpoint if there is one to go on from.
fn run(builder: Builder, options: TrainOptions, to: Option<(&Checkpoints, u64)>, from: Option<&Checkpoint>) -> Run {
    let mut pipeline = builder.device(distgpipe::engine::Device::Cpu).threads(1).build().unwrap();
    let mut losses = BTreeMap::new();
    let mut trainer = Trainer::new(&mut pipeline, loader(256), None, options).unwrap();
    if let Some((checkpoints, every)) = to {
        trainer = trainer.save_to(checkpoints, SaveEvery::Steps(every), "what the caller wants".into());
    }
    if let Some(checkpoint) = from {
        trainer = trainer.resume(checkpoint).unwrap();
    }
    let summary = trainer
        .run(|event, _| {
            if let Event::StepDone(done) = event {
                losses.insert(done.step, done.outcome.loss.to_bits());
            }
            Ok(())
        })
        .unwrap();
    let state = pipeline.state().unwrap();
    let in_order: Vec<f64> = losses.values().map(|bits| f64::from_bits(*bits)).collect();
    let batch = loader(256).epoch(0).next().unwrap().unwrap();
    one_device::soundness::assert_pipeline_sound("a run with checkpoints", &in_order, &mut pipeline, &batch);
    Run { losses, summary, state }
}

/// Runs to the end, then from each of the checkpoints on the way, with the pipelines that `other` makes.
fn assert_resumes_anywhere(
    name: &str,
    options: TrainOptions,
    builder: impl Fn() -> Builder,
    other: impl Fn() -> Builder,
) {
    let folder = folder(name);
    let checkpoints = Checkpoints::open(&folder, 100).unwrap();
    let whole = run(builder(), options.clone(), Some((&checkpoints, 1)), None);
    let steps = checkpoints.steps().unwrap();
    assert_eq!(steps.first(), whole.losses.keys().last().map(|last| last + 1).as_ref(), "{name}: the end is saved");
    let every: &[u64] = if options.accumulate == 2 { &[9, 7, 5, 4, 2] } else { &[8, 7, 6, 5, 4, 3, 2, 1] };
    assert_eq!(steps, every, "{name}: one for each update, which ends with its epoch");
    for step in steps {
        let checkpoint = Checkpoint::open(&folder.join(format!("step-{step:08}"))).unwrap();
        assert_eq!(
            (checkpoint.manifest().progress.step, &checkpoint.manifest().settings),
            (step, &"what the caller wants".into())
        );
        // It saves as the whole run did, because codecs forget there.
        let again = Checkpoints::open(&folder.join("again"), 1).unwrap();
        let rest = run(other(), options.clone(), Some((&again, 1)), Some(&checkpoint));
        let expected: BTreeMap<u64, u64> = whole.losses.range(step..).map(|(s, l)| (*s, *l)).collect();
        assert_eq!(rest.losses, expected, "{name}: losses after step {step}");
        for (tensor, value) in &whole.state {
            assert!(one_device::same_bits(&rest.state[tensor], value), "{name}: {tensor} after step {step}");
        }
        let figures = |run: &Run| -> Vec<(u64, u64, Option<u64>)> {
            let epochs = run.summary.epochs.iter();
            epochs.map(|e| (e.steps, e.train_loss.to_bits(), e.train_accuracy.map(f64::to_bits))).collect()
        };
        assert_eq!(figures(&rest), figures(&whole), "{name}: the epochs' figures after step {step}");
        assert_eq!((rest.summary.resumed_at, rest.summary.steps), (Some(step), whole.losses.len() as u64 - step));
    }
}

const RATE: f64 = 0.02;

/// An epoch of five steps and three of the next.
fn options() -> TrainOptions {
    TrainOptions { epochs: 2, steps_max: Some(8), ..TrainOptions::default() }
}

#[test]
fn a_run_resumed_at_any_step_has_the_losses_of_one_that_was_not_stopped() {
    let optims = [
        ("sgd", Optim::sgd(0.0), 0.3),
        ("nesterov", Optim::Sgd { momentum: 0.9, weight_decay: 0.01, nesterov: true }, 0.05),
        ("adam", Optim::adam(), 0.01),
        ("adamw", Optim::adamw(), 0.01),
        ("rmsprop", Optim::rms_prop(0.9), 0.002),
    ];
    for (name, optim, learning_rate) in optims {
        let builder = || {
            Pipeline::builder(mlp())
                .place("client,server,client")
                .micro_batches(3)
                .seed(5)
                .optimizer(optim)
                .learning_rate(learning_rate)
        };
        assert_resumes_anywhere(name, options(), builder, builder);
    }
}

#[test]
fn codecs_that_remember_forget_at_each_checkpoint() {
    for codec in ["delta(uniform:8)", "feedback(topk:0.1)", "svd:2"] {
        let builder = || {
            let codecs = CodecPolicy::all(codec.parse().unwrap());
            Pipeline::builder(mlp()).place("client,server").micro_batches(2).codecs(codecs).learning_rate(RATE)
        };
        assert_resumes_anywhere(&codec.replace(['(', ')', ':', '%'], "-"), options(), builder, builder);
    }
}

#[test]
fn codecs_of_replicas_forget_at_each_checkpoint() {
    for codec in ["feedback(tile:2)", "tile:3~"] {
        let builder = || {
            let codecs = CodecPolicy { replicas: codec.parse().unwrap(), ..CodecPolicy::default() };
            Pipeline::builder(mlp()).micro_batches(2).replicas(2).codecs(codecs).learning_rate(RATE)
        };
        let name = format!("replicas-{}", codec.replace(['(', ')', ':', '~'], "-"));
        assert_resumes_anywhere(&name, options(), builder, builder);
    }
}

#[test]
fn batch_norms_and_dropout_resume_with_another_cut_placement_and_number_of_workers() {
    let builder = || {
        let strides = [1, 1, 2, 2, 1, 1, 2, 1];
        let model =
            MobileNetV2 { width: 0.1, image: 8, channels: 1, strides, ..MobileNetV2::default() }.model().unwrap();
        Pipeline::builder(model).micro_batches(2).optimizer(Optim::adamw()).learning_rate(1e-3)
    };
    assert_resumes_anywhere(
        "cut",
        options(),
        || builder().balance([1, 18, 1]).place("client,server,client"),
        || builder().balance([5, 5, 5, 5]),
    );
}

#[test]
fn updates_of_several_batches_are_saved_whole() {
    let builder = || {
        Pipeline::builder(mlp())
            .place("a,b")
            .micro_batches(2)
            .optimizer(Optim::adamw())
            .learning_rate(RATE)
            .clip_norm(0.5)
    };
    let options = TrainOptions { accumulate: 2, ..options() };
    assert_resumes_anywhere("accumulated", options, builder, builder);
}

/// Two checkpoints, of steps 4 and 5.
fn two(name: &str) -> (PathBuf, Checkpoints) {
    let folder = folder(name);
    let checkpoints = Checkpoints::open(&folder, 2).unwrap();
    let options = TrainOptions { epochs: 1, ..options() };
    run(Pipeline::builder(mlp()).micro_batches(2).learning_rate(RATE), options, Some((&checkpoints, 1)), None);
    assert_eq!(checkpoints.steps().unwrap(), [5, 4], "two of five are kept");
    (folder, checkpoints)
}

#[test]
fn nobody_but_the_owner_reads_checkpoints() {
    use std::os::unix::fs::MetadataExt;
    let (folder, checkpoints) = two("modes");
    checkpoints.mark_best(5).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
    let newest = folder.join("step-00000005");
    assert_eq!((mode(&folder), mode(&newest)), (0o700, 0o700));
    let files = newest.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let modes: Vec<u32> = files.chain([folder.join("best")]).map(|path| mode(&path)).collect();
    assert_eq!(modes, [0o600; 4]);
}

/// It once ended every run of the folder, although only `--resume=best` needs it.
#[test]
fn a_corrupt_mark_of_the_best_checkpoint_is_removed_and_stops_no_other_run() {
    let (folder, checkpoints) = two("mark");
    for mark in [&b"\xff\xfe"[..], b"../elsewhere"] {
        std::fs::write(folder.join("best"), mark).unwrap();
        assert!(matches!(checkpoints.best(), Err(CheckpointError::Corrupt { .. })));
    }
    checkpoints.retire_after(4).unwrap();
    assert_eq!((checkpoints.steps().unwrap(), checkpoints.best().unwrap().is_none()), (vec![4], true));
    assert!(!folder.join("best").exists());
}

#[test]
fn a_corrupt_checkpoint_is_reported_and_the_previous_one_is_used() {
    let (folder, checkpoints) = two("damaged");
    let newest = folder.join("step-00000005");
    let whole = |file: &str| std::fs::read(newest.join(file)).unwrap();
    for file in ["checkpoint.json", "model.safetensors", "optimizer.safetensors"] {
        let bytes = whole(file);
        let mut flipped = bytes.clone();
        flipped[bytes.len() / 2] ^= 4;
        let cut = bytes[..bytes.len() - 3].to_vec();
        for wrong in [Some(&b""[..]), Some(b"{}"), Some(&bytes[..8]), Some(&flipped), Some(&cut), None] {
            match wrong {
                Some(wrong) => std::fs::write(newest.join(file), wrong).unwrap(),
                None => std::fs::remove_file(newest.join(file)).unwrap(),
            }
            let (found, why) = checkpoints.newest().unwrap();
            let step = found.unwrap().manifest().progress.step;
            assert_eq!(step, 4, "{file}");
            assert!(why.len() == 1 && why[0].to_string().contains(file), "{file}: {why:?}");
        }
        std::fs::write(newest.join(file), bytes).unwrap();
        assert_eq!(checkpoints.newest().unwrap().0.unwrap().manifest().progress.step, 5, "{file} is whole again");
    }
}

#[test]
fn a_half_written_checkpoint_is_ignored_and_removed() {
    let (folder, checkpoints) = two("partial");
    let refused = Checkpoints::open(&folder, 2).unwrap_err();
    assert!(matches!(refused, CheckpointError::Busy { .. }), "{refused}");
    drop(checkpoints);
    let partial = folder.join(".step-00000006.partial");
    std::fs::create_dir(&partial).unwrap();
    std::fs::copy(folder.join("step-00000005/model.safetensors"), partial.join("model.safetensors")).unwrap();
    // One that was moved out of the way of another that did not come, and what is nobody's.
    std::fs::rename(folder.join("step-00000004"), folder.join(".step-00000004.old")).unwrap();
    std::fs::create_dir(folder.join(".step-notes")).unwrap();
    let checkpoints = Checkpoints::open(&folder, 2).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [5, 4]);
    assert!(!partial.exists() && folder.join(".step-notes").exists());
}

#[test]
fn weights_that_are_not_finite_are_not_checkpointed() {
    let (folder, checkpoints) = two("finite");
    let before = checkpoints.newest().unwrap().0.unwrap();
    let mut pipeline = Pipeline::builder(mlp()).micro_batches(2).build().unwrap();
    before.load(&mut pipeline).unwrap();
    let name = "layers.1.weight".to_owned();
    let wrong = pipeline.state().unwrap()[&name].full_like(f64::NAN);
    pipeline.load_state(&BTreeMap::from([(name.clone(), wrong)])).unwrap();
    let mut progress = before.manifest().progress.clone();
    progress.step = 6;
    let refused = checkpoints.save(&mut pipeline, &progress, &Default::default()).unwrap_err();
    assert!(matches!(&refused, CheckpointError::NotFinite { name: told } if *told == name), "{refused}");
    assert_eq!(checkpoints.steps().unwrap(), [5, 4]);
    drop(checkpoints);
    assert_eq!(Checkpoints::open(&folder, 2).unwrap().newest().unwrap().0.unwrap().manifest(), before.manifest());
}

#[test]
fn checkpoints_of_later_steps_are_set_aside_and_not_counted() {
    let (folder, checkpoints) = two("aside");
    let earlier = Checkpoint::open(&folder.join("step-00000004")).unwrap();
    let options = TrainOptions { epochs: 2, ..options() };
    run(
        Pipeline::builder(mlp()).micro_batches(2).learning_rate(RATE),
        options,
        Some((&checkpoints, 3)),
        Some(&earlier),
    );
    assert_eq!(checkpoints.steps().unwrap(), [8, 7]);
    assert!(folder.join("unused-step-00000005").exists(), "it is not for us to remove it");
}

#[test]
fn a_checkpoint_of_another_run_is_refused() {
    let (_folder, checkpoints) = two("another");
    let checkpoint = checkpoints.newest().unwrap().0.unwrap();
    let resume = |builder: Builder, rows: usize| -> String {
        let mut pipeline = builder.micro_batches(2).build().unwrap();
        let trainer = Trainer::new(&mut pipeline, loader(rows), None, options()).unwrap();
        let refused = trainer.resume(&checkpoint).err().expect("it is of another run");
        assert!(matches!(refused, CheckpointError::Mismatch { .. }));
        refused.to_string()
    };
    let wider = Mlp { hidden: vec![16, 16, 17], ..Mlp::default() }.model().unwrap();
    assert!(resume(Pipeline::builder(wider), 256).contains("the model"));
    assert!(resume(Pipeline::builder(mlp()).seed(1), 256).contains("the seed"));
    assert!(resume(Pipeline::builder(mlp()).optimizer(Optim::adam()), 256).contains("the optimizer"));
    assert!(resume(Pipeline::builder(mlp()), 128).contains("batches per epoch"));
}

#[test]
fn a_folder_that_cannot_be_written_to_ends_the_run_with_an_error() {
    let (folder, checkpoints) = two("gone");
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "a file").unwrap();
    let mut pipeline = Pipeline::builder(mlp()).micro_batches(2).build().unwrap();
    let trainer = Trainer::new(&mut pipeline, loader(256), None, options()).unwrap();
    let failed = trainer.save_to(&checkpoints, SaveEvery::Epoch, Default::default()).run(|_, _| Ok(()));
    let Err(TrainError::Checkpoint(CheckpointError::Io { path, .. })) = failed else { panic!("{failed:?}") };
    assert!(path.starts_with(&folder), "{}", path.display());
    std::fs::remove_file(&folder).unwrap();
}

#[test]
fn the_model_of_a_checkpoint_is_a_file_of_weights() {
    let (folder, checkpoints) = two("weights");
    let path: &Path = &folder.join("step-00000005/model.safetensors");
    let tensors: BTreeMap<String, Tensor> = Tensor::read_safetensors(path).unwrap().into_iter().collect();
    let mut pipeline = Pipeline::builder(mlp()).micro_batches(2).build().unwrap();
    checkpoints.newest().unwrap().0.unwrap().load(&mut pipeline).unwrap();
    let state = pipeline.state().unwrap();
    assert_eq!(tensors.keys().collect::<Vec<_>>(), state.keys().collect::<Vec<_>>());
    one_device::assert_identical("the file", &tensors, &state);
}

#[test]
fn a_folder_that_was_created_and_got_no_checkpoint_is_removed() {
    let root = folder("unused");
    let inner = root.join("a/b");
    drop(Checkpoints::open(&inner, 1).unwrap());
    assert!(!root.exists());
    // What was there before, or has come since, stays.
    std::fs::create_dir_all(&root).unwrap();
    drop(Checkpoints::open(&inner, 1).unwrap());
    assert!(root.is_dir() && !root.join("a").exists());
    let opened = Checkpoints::open(&inner, 1).unwrap();
    std::fs::write(inner.join("notes"), "mine").unwrap();
    drop(opened);
    assert!(inner.join("notes").is_file() && !inner.join("lock").exists());
    let saved = root.join("saved");
    let checkpoints = Checkpoints::open(&saved, 1).unwrap();
    let options = TrainOptions { steps_max: Some(1), ..TrainOptions::default() };
    run(Pipeline::builder(mlp()), options, Some((&checkpoints, 1)), None);
    drop(checkpoints);
    assert_eq!(Checkpoints::open(&saved, 1).unwrap().steps().unwrap(), [1]);
    drop(Checkpoints::open(&saved, 1).unwrap());
    assert!(saved.join("step-00000001").is_dir());
}

/// The space of an incomplete checkpoint is needed when the disk is full.
#[test]
fn a_checkpoint_that_fails_leaves_no_part_of_itself() {
    let root = folder("failed");
    let checkpoints = Checkpoints::open(&root, 2).unwrap();
    let options = TrainOptions { steps_max: Some(2), ..TrainOptions::default() };
    run(Pipeline::builder(mlp()), options, Some((&checkpoints, 1)), None);
    let mut pipeline = Pipeline::builder(mlp()).device(distgpipe::engine::Device::Cpu).threads(1).build().unwrap();
    let nan = Tensor::full([16], f64::NAN, (tch::Kind::Float, tch::Device::Cpu));
    pipeline.load_state(&BTreeMap::from([("layers.1.bias".to_owned(), nan)])).unwrap();
    let (newest, _) = checkpoints.newest().unwrap();
    let progress = newest.unwrap().manifest().progress.clone();
    let error = checkpoints.save(&mut pipeline, &progress, &serde_json::Value::Null).unwrap_err();
    assert!(matches!(error, CheckpointError::NotFinite { .. }), "{error}");
    let mut names: Vec<_> = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["lock", "step-00000001", "step-00000002"]);
}

/// The progress of a run that has done so many epochs of 5 steps.
fn after_epochs(epochs: u64) -> Progress {
    let epoch = |epoch: u64| {
        let loss = 2.345678901234567 / (epoch + 1) as f64;
        format!(
            r#"{{"epoch":{epoch},"steps":5,"train_loss":{loss},"train_accuracy":0.9131886477462437,"test_loss":{loss},
            "test_accuracy":0.8972222222222223,"test_classes":10,"test_f1":0.8961403508771931,
            "test_matthews":0.8858024691358024,"samples_per_s":143780.48780487805,"train_s":0.009994,"test_s":0.002501}}"#
        )
    };
    let figures: Vec<String> = (0..epochs).map(epoch).collect();
    let totals = r#"{"steps":0,"rows":0,"loss_sum":0.0,"seconds":0.0}"#;
    let (step, figures) = (5 * epochs, figures.join(","));
    serde_json::from_str(&format!(
        r#"{{"step":{step},"epoch":{epochs},"batch":0,"epoch_batches":5,"totals":{totals},"epochs":[{figures}]}}"#
    ))
    .unwrap()
}

/// The manifest of such a run has more than 64 MiB, and was once written and then refused.
#[test]
fn a_run_of_very_many_epochs_resumes() {
    let root = folder("many_epochs");
    let checkpoints = Checkpoints::open(&root, 1).unwrap();
    let mut pipeline = Pipeline::builder(mlp()).device(distgpipe::engine::Device::Cpu).threads(1).build().unwrap();
    let progress = after_epochs(200_000);
    let path = checkpoints.save(&mut pipeline, &progress, &serde_json::Value::Null).unwrap();
    assert!(path.join("checkpoint.json").metadata().unwrap().len() > 64 << 20);
    let (newest, damaged) = checkpoints.newest().unwrap();
    assert!(damaged.is_empty(), "{damaged:?}");
    let newest = newest.unwrap();
    assert!(newest.manifest().progress == progress, "other figures");
    let options = TrainOptions { epochs: 200_001, ..TrainOptions::default() };
    let trainer = Trainer::new(&mut pipeline, loader(256), None, options).unwrap();
    let summary = trainer.resume(&newest).unwrap().run(|_, _| Ok(())).unwrap();
    assert_eq!((summary.steps, summary.epochs.len()), (5, 200_001));
    std::fs::remove_dir_all(root).unwrap();
}
