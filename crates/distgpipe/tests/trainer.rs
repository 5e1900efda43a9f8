//! The trainer: its events and summary, what observers can do to a run, the best epoch, and runs that end early.

mod soundness;

use distgpipe::data::{DataError, Dataset, Digits, LastBatch, LoadPass, Loader, LoaderOptions, Split};
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::Tensor;
use distgpipe::train::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use distgpipe::train::learning_rate::{Decay, RateSchedule};
use distgpipe::train::{
    Event, RunControl, RunEnd, RunSummary, SaveEvery, TestMetric, TrainError, TrainOptions, Trainer,
};
use distgpipe::{Batch, CodecPolicy, Pipeline, Recompute, SampleShape};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{mpsc, Arc, Mutex};
use std::time::Duration;

fn loader(options: LoaderOptions) -> Loader {
    Loader::new(Arc::new(Digits::new(Split::Train, Default::default()).unwrap()), options).unwrap()
}

/// Fourteen batches of 100 rows an epoch.
fn training() -> Loader {
    loader(LoaderOptions::training(100, 0))
}

/// Three batches.
fn testing() -> Loader {
    loader(LoaderOptions::testing(500))
}

fn pipeline(micro_batches: usize) -> Pipeline {
    let model = Mlp { hidden: vec![8], dropout: 0.1, ..Mlp::default() }.model().unwrap();
    let builder = Pipeline::builder(model).device(distgpipe::engine::Device::Cpu).threads(1);
    let codecs = CodecPolicy::all("feedback(uniform:8)".parse().unwrap());
    builder.balance([1, 1]).place("a,b").micro_batches(micro_batches).codecs(codecs).build().unwrap()
}

fn options(epochs: u64, steps_max: Option<u64>) -> TrainOptions {
    TrainOptions { epochs, steps_max, ..TrainOptions::default() }
}

fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("trainer").join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// What a run did: the bits of each step's loss, by step, and where it ended.
struct Run {
    losses: BTreeMap<u64, u64>,
    summary: RunSummary,
    state: BTreeMap<String, Tensor>,
}

/// A run that trains soundly, with its tests.
fn run(
    options: TrainOptions,
    to: Option<(&Checkpoints, SaveEvery)>,
    from: Option<&Checkpoint>,
    mut observer: impl FnMut(&Event<'_>, &mut RunControl<'_>) -> Result<(), TrainError>,
) -> Run {
    let mut pipeline = pipeline(2);
    pipeline.set_learning_rate(0.05);
    let mut losses = BTreeMap::new();
    let mut trainer = Trainer::new(&mut pipeline, training(), Some(testing()), options).unwrap();
    if let Some((checkpoints, every)) = to {
        trainer = trainer.save_to(checkpoints, every, Default::default());
    }
    if let Some(checkpoint) = from {
        trainer = trainer.resume(checkpoint).unwrap();
    }
    let summary = trainer
        .run(|event, run| {
            if let Event::StepDone(done) = event {
                losses.insert(done.step, done.outcome.loss.to_bits());
            }
            observer(event, run)
        })
        .unwrap();
    let in_order: Vec<f64> = losses.values().map(|bits| f64::from_bits(*bits)).collect();
    let batch = testing().epoch(0).next().unwrap().unwrap();
    soundness::assert_pipeline_sound("a run of the trainer", &in_order, &mut pipeline, &batch);
    let state = pipeline.state().unwrap();
    Run { losses, summary, state }
}

fn assert_same(what: &str, a: &Run, b: &Run) {
    assert_eq!(a.losses, b.losses, "{what}");
    for (name, tensor) in &a.state {
        assert!(tensor.equal(&b.state[name]), "{what}: {name}");
    }
    let tests = |run: &Run| run.summary.epochs.iter().map(|e| e.test_loss.map(f64::to_bits)).collect::<Vec<_>>();
    assert_eq!(tests(a), tests(b), "{what}");
}

#[test]
fn the_summary_agrees_with_the_events() {
    let mut pipeline = pipeline(4);
    let trainer = Trainer::new(&mut pipeline, training(), Some(testing()), options(3, Some(20))).unwrap();
    assert_eq!(trainer.steps(), 20);
    let (mut losses, mut epochs, mut tests) = (Vec::new(), 0, 0);
    let summary = trainer
        .run(|event, _| {
            match event {
                Event::StepDone(done) => {
                    assert_eq!(done.step, losses.len() as u64);
                    losses.push(done.outcome.loss);
                }
                Event::TestStepDone { .. } => tests += 1,
                Event::EpochDone(_) => epochs += 1,
                _ => panic!("unexpected {event:?}"),
            }
            Ok(())
        })
        .unwrap();
    let batch = testing().epoch(0).next().unwrap().unwrap();
    soundness::assert_pipeline_sound("twenty steps", &losses, &mut pipeline, &batch);
    // 14 steps, then the 6 that are left; 3 test batches after each.
    assert_eq!((losses.len(), epochs, tests), (20, 2, 6));
    assert_eq!(summary.end, RunEnd::Complete);
    assert_eq!(summary.epochs.iter().map(|e| e.steps).collect::<Vec<_>>(), [14, 6]);
    let mean = losses[14..].iter().sum::<f64>() / 6.0;
    assert!((summary.epochs[1].train_loss - mean).abs() < 1e-12);
    assert_eq!((summary.steps, summary.warm_up_steps), (20, 2));
    assert!(summary.samples_per_s_median.is_some_and(|rate| rate > 0.0));
    assert_eq!(summary.links.iter().map(|l| (&l.from[..], &l.to[..])).collect::<Vec<_>>(), [("a", "b"), ("b", "a")]);
    // Every step, training or testing, sends each micro-batch once; only training sends gradients back.
    assert_eq!((summary.links[0].messages, summary.links[1].messages), (26 * 4, 20 * 4));
    // 100 rows of 8 values in each direction. Tests count in the traffic of the run, and not in that of a step.
    assert_eq!(summary.links.iter().map(|link| link.bytes_per_step).collect::<Vec<_>>(), [3200.0; 2]);
    let times = summary.batch_times.expect("steps were measured");
    assert!(times.forward_s > 0.0 && times.backward_s > 0.0, "{times:?}");
    assert!(summary.links[0].payload_bytes > 20 * 3200 && summary.links[1].payload_bytes == 20 * 3200);
    assert!(summary.links.iter().all(|link| link.delivered_bytes_per_s.is_none()), "threads have no link");
    assert!(summary.workers.iter().all(|w| w.phases_s["forward"] > 0.0 && w.peak_bytes > 0 && w.steps_s > 0.0));
    // A second run of the pipeline has figures of its own.
    let again = Trainer::new(&mut pipeline, training(), None, options(1, Some(5))).unwrap().run(|_, _| Ok(())).unwrap();
    for link in &again.links {
        assert_eq!((link.messages, link.payload_bytes, link.bytes_per_step), (5 * 4, 5 * 3200, 3200.0), "{link:?}");
        assert!(
            link.edges.iter().all(|edge| (edge.coded.tensors, edge.coded.raw_bytes) == (5 * 4, 5 * 3200)),
            "{link:?}"
        );
    }
}

/// The published tables count the exchange of gradients and the update as parts of the backward pass.
#[test]
fn the_time_per_batch_has_the_phases_of_the_published_tables() {
    let model = Mlp { hidden: vec![8], dropout: 0.1, ..Mlp::default() }.model().unwrap();
    let builder = Pipeline::builder(model).device(distgpipe::engine::Device::Cpu).threads(1).replicas(2);
    let mut pipeline = builder.balance([2]).micro_batches(2).recompute(Recompute::Always).build().unwrap();
    let mut losses = Vec::new();
    let trainer = Trainer::new(&mut pipeline, training(), None, options(1, Some(12))).unwrap();
    let summary = trainer
        .run(|event, _| {
            if let Event::StepDone(done) = event {
                losses.push(done.outcome.loss);
            }
            Ok(())
        })
        .unwrap();
    let batch = testing().epoch(0).next().unwrap().unwrap();
    soundness::assert_pipeline_sound("two replicas", &losses, &mut pipeline, &batch);
    let (times, phases) = (summary.batch_times.expect("steps were measured"), &summary.workers[0].phases_s);
    let steps = (summary.steps - summary.warm_up_steps) as f64;
    assert_eq!((summary.workers.len(), steps), (2, 10.0));
    let sum = |names: &[&str]| {
        assert!(names.iter().all(|&name| phases[name] > 0.0), "{names:?}: {phases:?}");
        names.iter().map(|&name| phases[name]).sum::<f64>()
    };
    let backward_s = sum(&["recompute", "backward", "gradient wait", "optimizer"]);
    assert!((times.backward_s * steps - backward_s).abs() < 1e-6, "{times:?}, expected {backward_s} s in {phases:?}");
    let forward_s = sum(&["forward"]);
    assert!((times.forward_s * steps - forward_s).abs() < 1e-6, "{times:?}, expected {forward_s} s in {phases:?}");
    let all_s = (times.transfer_s + times.forward_s + times.backward_s) * steps - summary.loading_s;
    assert!(all_s <= summary.workers[0].steps_s, "{all_s} s in steps of {} s", summary.workers[0].steps_s);
}

/// Digits of which each batch is loaded only when the step before it is done, and then takes a while.
struct Slow {
    digits: Digits,
    rows: usize,
    step_done: Mutex<mpsc::Receiver<()>>,
}

const SLOWNESS: Duration = Duration::from_millis(40);

impl Dataset for Slow {
    fn len(&self) -> usize {
        self.rows
    }
    fn classes(&self) -> Option<usize> {
        self.digits.classes()
    }
    fn input(&self) -> &[SampleShape] {
        self.digits.input()
    }
    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
        self.step_done.lock().unwrap().recv().expect("the run goes on");
        std::thread::sleep(SLOWNESS);
        self.digits.batch(rows, pass)
    }
}

/// The wait for the loader was in no figure of a batch: the published tables count it as data transfer.
#[test]
fn the_transfer_of_a_batch_includes_the_wait_for_the_loader() {
    let (step_done, wait) = mpsc::channel();
    let digits = Digits::new(Split::Train, Default::default()).unwrap();
    let data = Slow { digits, rows: 600, step_done: Mutex::new(wait) };
    let loader = Loader::new(data, LoaderOptions::training(100, 0)).unwrap();
    let mut pipeline = pipeline(4);
    step_done.send(()).unwrap();
    let (mut losses, mut waited) = (Vec::new(), Vec::new());
    let trainer = Trainer::new(&mut pipeline, loader, None, options(1, None)).unwrap();
    let summary = trainer
        .run(|event, _| {
            if let Event::StepDone(done) = event {
                losses.push(done.outcome.loss);
                waited.push(done.loading_s);
                step_done.send(()).unwrap();
            }
            Ok(())
        })
        .unwrap();
    let batch = testing().epoch(0).next().unwrap().unwrap();
    soundness::assert_pipeline_sound("a slow loader", &losses, &mut pipeline, &batch);
    let measured = waited.split_off(2);
    assert_eq!(measured.len(), 4);
    let waited_s = measured.iter().sum::<f64>() / 4.0;
    // The loader may begin before the trainer asks.
    assert!(waited_s > 0.5 * SLOWNESS.as_secs_f64(), "{waited_s} s");
    let times = summary.batch_times.expect("steps were measured");
    let expected = waited_s + summary.workers[0].phases_s["loading"] / 4.0;
    assert!((times.transfer_s - expected).abs() < 1e-6, "{times:?}, expected {expected} s of transfer");
}

#[test]
fn batches_with_fewer_rows_than_micro_batches_are_refused_before_the_first_step() {
    let mut pipeline = pipeline(40);
    // 1437 % 100 = 37 rows would be left for the last batch.
    let kept = LoaderOptions { last: LastBatch::Keep, ..LoaderOptions::training(100, 0) };
    let error = Trainer::new(&mut pipeline, loader(kept), None, options(1, None)).err().unwrap();
    assert!(matches!(error, TrainError::TooFewRows { micro_batches: 40, rows: 37 }), "{error}");
    assert!(Trainer::new(&mut pipeline, training(), None, options(1, None)).is_ok());
}

/// Reports travel as JSON, which has no NaN; a loss of NaN once arrived as 0 and training went on. This run diverges on
/// purpose, so it is exempt from the rule that tests train soundly.
#[test]
fn a_loss_of_nan_ends_the_run() {
    let model = Mlp { hidden: vec![8], ..Mlp::default() }.model().unwrap();
    let mut pipeline = Pipeline::builder(model).place("a,b").learning_rate(1e30).build().unwrap();
    let trainer = Trainer::new(&mut pipeline, training(), None, options(1, None)).unwrap();
    let error = trainer.run(|_, _| Ok(()));
    assert!(matches!(error, Err(TrainError::Diverged { .. })), "{:?}", error.map(|summary| summary.epochs));
}

/// The trainer once overwrote the rate that the pipeline was built with.
#[test]
fn the_schedule_multiplies_the_pipelines_learning_rate_and_leaves_it_as_it_is() {
    let quarters = RateSchedule::custom(|update, updates| if 2 * update < updates { 1.0 } else { 0.25 });
    for (schedule, factors) in [(Decay::Linear.into(), [1.0, 0.75, 0.5, 0.25]), (quarters, [1.0, 1.0, 0.25, 0.25])] {
        let mut pipeline = pipeline(2);
        pipeline.set_learning_rate(0.04);
        let options = TrainOptions { rate_schedule: schedule, ..options(1, Some(4)) };
        let trainer = Trainer::new(&mut pipeline, training(), None, options).unwrap();
        let (mut rates, mut losses) = (Vec::new(), Vec::new());
        trainer
            .run(|event, _| {
                if let Event::StepDone(done) = event {
                    rates.push(done.learning_rate);
                    losses.push(done.outcome.loss);
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(rates, factors.map(|factor| 0.04 * factor));
        assert_eq!(pipeline.learning_rate(), 0.04);
        soundness::assert_sound("four steps", &losses, &pipeline.state().unwrap());
    }
}

#[test]
fn an_observer_that_fails_ends_the_run() {
    let mut pipeline = pipeline(1);
    let trainer = Trainer::new(&mut pipeline, training(), None, options(1, None)).unwrap();
    let mut seen = 0;
    let error = trainer.run(|_, _| {
        seen += 1;
        Err(std::io::Error::other("disk full").into())
    });
    assert!(matches!(error, Err(TrainError::Observer(_))));
    assert_eq!(seen, 1);
}

/// After every event: also between two batches of an update, and in the middle of a test. The codec and the dropout would
/// show a trace.
#[test]
fn what_an_observer_evaluates_leaves_no_trace() {
    let options = TrainOptions { accumulate: 3, ..options(2, Some(20)) };
    let plain = run(options.clone(), None, None, |_, _| Ok(()));
    let path = folder("observed").with_extension("safetensors");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let (batch, test) = (testing().epoch(0).next().unwrap().unwrap(), testing());
    let mut evaluations = Vec::new();
    let observed = run(options, None, None, |event, run| {
        let outcome = run.evaluate(&batch)?;
        let output = run.predict(batch.inputs.iter().map(Tensor::shallow_clone).collect())?;
        assert_eq!(output.size(), [500, 10]);
        if let Event::EpochDone(epoch) = event {
            let all = run.evaluate_all(&test)?;
            evaluations.push((Some(all.loss), all.accuracy));
            assert_eq!((Some(all.loss), all.accuracy), (epoch.test_loss, epoch.test_accuracy));
            run.save(&path)?;
            let state = run.state()?;
            let saved: BTreeMap<String, Tensor> = Tensor::read_safetensors(&path).unwrap().into_iter().collect();
            assert!(saved.len() == state.len() && saved.iter().all(|(name, tensor)| tensor.equal(&state[name])));
        }
        assert!(outcome.loss.is_finite());
        assert_eq!(run.pipeline().micro_batches(), 2);
        Ok(())
    });
    assert_eq!(evaluations.len(), 2);
    assert_same("observed", &plain, &observed);
}

/// Where a run is stopped.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Step(u64),
    Test,
    Epoch,
}

#[test]
fn a_stopped_run_keeps_its_summary_and_its_checkpoint_and_resumes_as_if_it_had_not_been_stopped() {
    let mut wholes = BTreeMap::new();
    for (accumulate, moment, ended) in [
        (1, Moment::Step(4), 5),
        // Inside the update of steps 3 to 5.
        (3, Moment::Step(3), 6),
        // The last of the epoch.
        (1, Moment::Step(13), 14),
        (1, Moment::Test, 14),
        (3, Moment::Epoch, 14),
    ] {
        let what = format!("{moment:?}, {accumulate}");
        let options = TrainOptions { accumulate, best: Some(TestMetric::Accuracy), ..options(2, Some(18)) };
        let checkpoints = Checkpoints::open(&folder("stopped"), 1).unwrap();
        let whole = wholes.entry(accumulate).or_insert_with(|| {
            // Codecs forget at each checkpoint, so the run that is not stopped saves at the same step.
            let whole = Checkpoints::open(&folder("whole"), 1).unwrap();
            run(options.clone(), Some((&whole, SaveEvery::Steps(1))), None, |_, _| Ok(()))
        });
        let (mut tests, mut events_after) = (0, 0);
        let stopped = run(options.clone(), Some((&checkpoints, SaveEvery::Steps(1))), None, |event, run| {
            events_after += u64::from(tests > 1 || matches!(event, Event::EpochDone(_)));
            tests += u64::from(matches!(event, Event::TestStepDone { .. }));
            let now = match (moment, event) {
                (Moment::Step(step), Event::StepDone(done)) => done.step == step,
                (Moment::Test, Event::TestStepDone { .. }) | (Moment::Epoch, Event::EpochDone(_)) => true,
                _ => false,
            };
            if now {
                run.stop();
            }
            Ok(())
        });
        assert_eq!((stopped.summary.end, stopped.losses.len()), (RunEnd::Stopped, ended), "{what}");
        assert_eq!(stopped.summary.epochs.len(), 1, "{what}");
        assert_eq!(stopped.summary.epochs[0].steps, ended as u64, "{what}");
        let tested = matches!(moment, Moment::Epoch);
        assert_eq!(stopped.summary.epochs[0].test_loss.is_some(), tested, "{what}");
        assert!(tested || events_after == 0, "{what}: the test was not ended");
        let newest = checkpoints.newest().unwrap().0.unwrap();
        assert_eq!(newest.manifest().progress.step, ended as u64, "{what}");
        let rest = run(options, Some((&checkpoints, SaveEvery::Steps(1))), Some(&newest), |_, _| Ok(()));
        assert_eq!(rest.summary.end, RunEnd::Complete, "{what}");
        let mut losses = stopped.losses.clone();
        losses.extend(&rest.losses);
        assert_same(&what, &Run { losses, ..rest }, whole);
    }
}

#[test]
fn a_run_that_would_end_inside_an_update_ends_after_it_and_can_be_continued() {
    let checkpoints = Checkpoints::open(&folder("inside"), 2).unwrap();
    let options = |steps| TrainOptions { accumulate: 3, ..options(1, Some(steps)) };
    let whole = Checkpoints::open(&folder("inside-whole"), 5).unwrap();
    let whole = run(options(9), Some((&whole, SaveEvery::Steps(3))), None, |_, _| Ok(()));
    let short = run(options(4), Some((&checkpoints, SaveEvery::Steps(3))), None, |_, _| Ok(()));
    assert_eq!(short.losses.len(), 6, "two whole updates");
    let newest = checkpoints.newest().unwrap().0.unwrap();
    let rest = run(options(9), Some((&checkpoints, SaveEvery::Steps(3))), Some(&newest), |_, _| Ok(()));
    let mut losses = short.losses.clone();
    losses.extend(&rest.losses);
    assert_same("continued", &Run { losses, ..rest }, &whole);
    // With other updates, the same step may be inside one.
    let mut pipeline = pipeline(2);
    let other = TrainOptions { accumulate: 4, ..options(9) };
    let refused = Trainer::new(&mut pipeline, training(), None, other).unwrap().resume(&newest).err().unwrap();
    assert!(matches!(refused, CheckpointError::WithinUpdate { step: 6 }), "{refused}");
}

/// It once tested the epoch again and reported it as epoch 2 of 1.
#[test]
fn a_checkpoint_beyond_the_end_of_the_run_leaves_nothing_to_do() {
    let checkpoints = Checkpoints::open(&folder("beyond"), 2).unwrap();
    run(options(2, Some(18)), Some((&checkpoints, SaveEvery::Epoch)), None, |_, _| Ok(()));
    let newest = checkpoints.newest().unwrap().0.unwrap();
    assert_eq!(newest.manifest().progress.step, 18);
    let nothing = run(options(1, None), None, Some(&newest), |event, _| panic!("{event:?}"));
    assert_eq!((nothing.summary.end, nothing.summary.steps), (RunEnd::Complete, 0));
}

/// The checkpoint of a run that ends inside an epoch is written before the test, and marked after it.
#[test]
fn a_run_has_ended_when_its_last_epoch_is_tested() {
    let checkpoints = Checkpoints::open(&folder("ended"), 2).unwrap();
    let options = |steps| options(2, steps);
    let progress = || checkpoints.newest().unwrap().0.unwrap().manifest().progress.clone();
    let mut steps = 0;
    run(options(Some(18)), Some((&checkpoints, SaveEvery::Epoch)), None, |event, run| {
        steps += u64::from(matches!(event, Event::StepDone(_)));
        if steps == 18 && matches!(event, Event::TestStepDone { .. }) {
            run.stop();
        }
        Ok(())
    });
    assert_eq!((progress().step, progress().end(&options(Some(18)))), (18, None));
    let newest = checkpoints.newest().unwrap().0.unwrap();
    let rest = run(options(Some(18)), Some((&checkpoints, SaveEvery::Epoch)), Some(&newest), |_, _| Ok(()));
    assert_eq!((rest.summary.steps, rest.summary.epochs.len()), (0, 2), "only the test was left");
    for (steps, end) in [(Some(18), Some(RunEnd::Complete)), (Some(17), Some(RunEnd::Complete)), (Some(19), None)] {
        assert_eq!(progress().end(&options(steps)), end, "{steps:?}");
    }
}

/// The accuracy rises in this run; the loss on few rows of an easy test then rises again, but that takes long. So the tests
/// compare with what the summary says, and force a worst epoch by the metric's own figures.
#[test]
fn the_best_checkpoint_is_kept_beside_the_newest_and_survives_a_resume() {
    let directory = folder("best");
    let checkpoints = Checkpoints::open(&directory, 1).unwrap();
    let every = SaveEvery::Steps(5);
    let saved = |run: &Run| {
        let best = run.summary.best.expect("a best epoch");
        let by = |metric: f64| if best.metric == TestMetric::Loss { -metric } else { metric };
        let metrics: Vec<f64> = run.summary.epochs.iter().filter_map(|epoch| best.metric.value_in(epoch)).collect();
        let largest = metrics.iter().map(|&metric| by(metric)).fold(f64::NEG_INFINITY, f64::max);
        assert_eq!(by(best.value), largest, "{metrics:?}");
        assert_eq!(metrics[best.epoch as usize], best.value);
        let kept = checkpoints.best().unwrap().expect("a best checkpoint");
        assert_eq!((kept.manifest().progress.step, best.step), (best.step, 14 * (best.epoch + 1)));
        best.step
    };
    // A negative rate makes the last epochs worse than the first ones.
    let schedule = RateSchedule::custom(|update, _| if update < 28 { 1.0 } else { -1.0 });
    let options = |epochs| TrainOptions {
        rate_schedule: schedule.clone(),
        best: Some(TestMetric::Accuracy),
        ..options(epochs, None)
    };
    let first = unsound_run(options(3), &checkpoints, every, None);
    assert_eq!((saved(&first), checkpoints.steps().unwrap()), (28, vec![42, 28]));
    let newest = checkpoints.newest().unwrap().0.unwrap();
    // The mark is lost, as when a run is killed before it is written.
    checkpoints.unmark_best().unwrap();
    let second = unsound_run(options(4), &checkpoints, every, Some(&newest));
    assert_eq!((saved(&second), checkpoints.steps().unwrap()), (28, vec![56, 28]));
    // Resumed from the best, the later ones are set aside.
    let best = checkpoints.best().unwrap().unwrap();
    let again = unsound_run(options(3), &checkpoints, every, Some(&best));
    assert_eq!((saved(&again), checkpoints.steps().unwrap()), (28, vec![42, 28]));
    assert!(directory.join("unused-step-00000056").is_dir());
    std::fs::write(directory.join("best"), "step-x").unwrap();
    assert!(matches!(checkpoints.best(), Err(CheckpointError::Corrupt { .. })));
}

#[test]
fn a_run_without_improvement_ends_when_patience_does() {
    let checkpoints = Checkpoints::open(&folder("patience"), 1).unwrap();
    let schedule = RateSchedule::custom(|update, _| if update < 28 { 1.0 } else { -1.0 });
    let options = |patience| TrainOptions {
        rate_schedule: schedule.clone(),
        best: Some(TestMetric::Loss),
        patience: Some(patience),
        ..options(9, None)
    };
    let stopped = unsound_run(options(2), &checkpoints, SaveEvery::Steps(100), None);
    assert_eq!((stopped.summary.end, stopped.summary.epochs.len()), (RunEnd::OutOfPatience, 4));
    assert_eq!(stopped.summary.best.map(|best| best.epoch), Some(1));
    assert_eq!(checkpoints.steps().unwrap(), [56, 28], "the end is saved, and the best is kept");
    let newest = checkpoints.newest().unwrap().0.unwrap();
    let nothing = unsound_run(options(2), &checkpoints, SaveEvery::Steps(100), Some(&newest));
    assert_eq!((nothing.summary.end, nothing.summary.steps), (RunEnd::OutOfPatience, 0));
    let progress = &newest.manifest().progress;
    assert_eq!((progress.end(&options(2)), progress.end(&options(3))), (Some(RunEnd::OutOfPatience), None));
    let longer = unsound_run(options(3), &checkpoints, SaveEvery::Steps(100), Some(&newest));
    assert_eq!((longer.summary.end, longer.summary.steps), (RunEnd::OutOfPatience, 14));
}

#[test]
fn tests_come_as_often_as_asked_and_at_the_end() {
    let tested = |every, epochs, steps| {
        let options = TrainOptions { test_every: every, ..options(epochs, steps) };
        let mut pipeline = pipeline(2);
        let trainer = Trainer::new(&mut pipeline, training(), Some(testing()), options).unwrap();
        let summary = trainer.run(|_, _| Ok(())).unwrap();
        summary.epochs.iter().map(|epoch| epoch.test_loss.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(tested(1, 3, None), [true, true, true]);
    assert_eq!(tested(2, 5, None), [false, true, false, true, true]);
    assert_eq!(tested(9, 2, None), [false, true]);
    // The second epoch is cut short.
    assert_eq!(tested(9, 5, Some(16)), [false, true]);
    let mut pipeline = pipeline(2);
    let never = TrainOptions { test_every: 0, ..options(1, None) };
    let refused = Trainer::new(&mut pipeline, training(), Some(testing()), never).err().unwrap().to_string();
    assert_eq!(refused, "`TrainOptions::test_every`: expected 1 epoch or more, got 0");
}

/// Epochs without a test say nothing about patience.
#[test]
fn patience_counts_to_the_last_test() {
    let checkpoints = Checkpoints::open(&folder("patience-between-tests"), 1).unwrap();
    let schedule = RateSchedule::custom(|update, _| if update < 28 { 1.0 } else { -1.0 });
    let options = TrainOptions {
        rate_schedule: schedule,
        test_every: 2,
        best: Some(TestMetric::Loss),
        patience: Some(1),
        ..options(9, None)
    };
    let stopped = unsound_run(options, &checkpoints, SaveEvery::Steps(100), None);
    assert_eq!((stopped.summary.end, stopped.summary.epochs.len()), (RunEnd::OutOfPatience, 4));
    assert_eq!(stopped.summary.best.map(|best| best.epoch), Some(1));
    let tested = stopped.summary.epochs.iter().map(|epoch| epoch.test_loss.is_some()).collect::<Vec<_>>();
    assert_eq!(tested, [false, true, false, true]);
}

/// A run that climbs the loss in its last epochs, on purpose, so it is exempt from the rule that tests train soundly.
fn unsound_run(options: TrainOptions, to: &Checkpoints, every: SaveEvery, from: Option<&Checkpoint>) -> Run {
    let mut pipeline = pipeline(2);
    let mut trainer = Trainer::new(&mut pipeline, training(), Some(testing()), options).unwrap();
    trainer = trainer.save_to(to, every, Default::default());
    if let Some(checkpoint) = from {
        trainer = trainer.resume(checkpoint).unwrap();
    }
    let summary = trainer.run(|_, _| Ok(())).unwrap();
    Run { losses: BTreeMap::new(), summary, state: pipeline.state().unwrap() }
}

#[test]
fn the_best_epoch_needs_a_test_and_a_metric_that_the_loss_has() {
    let mut pipeline = pipeline(2);
    let mut refused = |test: bool, best, patience| {
        let options = TrainOptions { best, patience, ..options(1, None) };
        let trainer = Trainer::new(&mut pipeline, training(), test.then(testing), options);
        trainer.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refused(false, Some(TestMetric::Loss), None).contains("test data"));
    assert!(refused(true, None, Some(2)).contains("`TrainOptions::best`"));
    assert!(refused(true, Some(TestMetric::Loss), Some(0)).contains("1 epoch or more"));
    assert_eq!(refused(true, Some(TestMetric::F1), Some(1)), "");
}
