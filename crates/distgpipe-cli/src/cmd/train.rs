//! `distgpipe train`; `demo` and `recipe run` train through [`execute`] too.

use crate::args::{DataName, TrainFlags};
use crate::capture;
use crate::checkpoint::resume_command as resume_command_in;
use crate::cmd::balance;
use crate::config::RunConfig;
use crate::exit::{usage, ResumeCommand, Usage};
use crate::files::answer_of_disk;
use crate::report::cut::CutReport;
use crate::report::log::Log;
use crate::report::progress::{Progress, RunLength};
use crate::report::run::RunReport;
use crate::report::{self, units};
use crate::signals::{self, Interrupted};
use anyhow::Context;
use distgpipe::train::checkpoint::Checkpoint;
use distgpipe::train::{Event, RunEnd, RunSummary, TestMetric, TrainError, Trainer};
use distgpipe::{CheckpointError, Loader, Pipeline, Plan};
use serde::Serialize;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The examples at the end of `--help`.
pub const EXAMPLES: &str = "\
Examples:
  Train on the built-in digits, with two partitions on two threads:
      distgpipe train --partitions 2
  Split learning: this process runs the first and the last layer, another process the rest:
      distgpipe train --model mobilenet_v2 --set image=32 --cut first=1,last=1 --workers processes
  The same with the middle on another machine, which runs `distgpipe serve`; see `distgpipe join`:
      distgpipe train … --server gpu-box
  Cut by measured time, save memory by recomputation, and write a trace for Perfetto:
      distgpipe train --model mobilenet_v2 --auto-balance 2 --recompute always --log run1 --trace
  Find the best cut for a link of 100 Mbit/s and 2 GiB of memory per worker:
      distgpipe train … --auto-balance 3 --place client,server,client --link-rate 100mbit --memory-limit 2GiB
  Data parallelism: two workers run the whole model, each on half of every batch:
      distgpipe train --replicas 2 --chunks 1 --batch 128
  Send 4.5 bits per value over a slow link:
      distgpipe train … --codec tile:4
  Save a checkpoint every 100 steps, and resume after a failure, here with another cut:
      distgpipe train … --checkpoint run1/saved --checkpoint-every 100
      distgpipe train --checkpoint run1/saved --resume --partitions 3
  Train a new classifier on a pretrained backbone, and stop when the accuracy no longer improves:
      distgpipe train … --weights backbone.pth --init-missing --freeze 'features.*' --checkpoint run1/saved --save-best accuracy --patience 3
  Save the trained model, and classify images with it:
      distgpipe train … --save mine.safetensors
      distgpipe predict --weights mine.safetensors photos/
  Read flags from a file, and override one:
      distgpipe train --config run1/config.toml --chunks 8

On CPUs of one kind, runs with the same --seed and --threads give the same results, wherever their partitions run.";

/// Trains, and prints the result.
pub fn run(flags: TrainFlags) -> anyhow::Result<()> {
    signals::watch()?;
    let config = RunConfig::new(&flags.with_config()?)?;
    let report = match execute(&config, "distgpipe train")? {
        Outcome::Ran(report, _) => report,
        Outcome::NothingLeft(ended) if config.json => return report::print_json(&ended),
        Outcome::NothingLeft(_) => return Ok(()),
    };
    if config.json {
        report::print_json(&report)?;
    } else {
        report::print(&format!("{}{}", report.epochs_if_unseen(), report.costs()))?;
    }
    report.into_result()
}

/// What came of a run.
pub enum Outcome {
    /// It trained, or at least tested: the report and the plan.
    Ran(Box<RunReport>, Plan),
    /// The run to resume had ended. The user has been told.
    NothingLeft(EndedBefore),
}

/// What `--json` prints of a run that had ended before it was resumed: the fields of [`RunReport`] that say so.
#[derive(Serialize)]
pub struct EndedBefore {
    end: RunEnd,
    resumed_at: u64,
    steps: u64,
}

/// Trains as configured. `command` is the one to resume with; an error of a run that has a checkpoint comes with it. Calls of
/// [`signals::watch`] before this let signals stop the run.
pub fn execute(config: &RunConfig, command: &str) -> anyhow::Result<Outcome> {
    let resume_command =
        || config.saving.as_ref().and_then(|saving| resume_command_in(saving.checkpoints.directory(), command));
    let with_command = |error: anyhow::Error| match resume_command() {
        Some(command) if !error.is::<Usage>() => error.context(ResumeCommand(command)),
        _ => error,
    };
    if let Some(saving) = &config.saving {
        let (directory, command) = (saving.checkpoints.directory().to_owned(), command.to_owned());
        signals::resume_with(move || resume_command_in(&directory, &command));
    }
    if let Some((checkpoint, end)) = config.saving.as_ref().and_then(|saving| saving.ended(&config.options)) {
        return nothing_left(config, checkpoint, end).map(Outcome::NothingLeft).map_err(with_command);
    }
    let (mut report, plan) = train(config).map_err(with_command)?;
    report.failed = report.failed.map(with_command);
    if let Some(interrupted) = &mut report.interrupted {
        interrupted.message += &match (resume_command(), &config.saving) {
            (Some(command), _) => format!("; to resume: {command}"),
            (None, Some(_)) => ", before the first checkpoint".to_owned(),
            (None, None) => "; nothing was saved to resume from: use --checkpoint DIR".to_owned(),
        };
    }
    Ok(Outcome::Ran(Box::new(report), plan))
}

/// Says that the run to resume has ended. It writes no output again, only a model that is missing.
fn nothing_left(config: &RunConfig, checkpoint: &Checkpoint, end: RunEnd) -> anyhow::Result<EndedBefore> {
    let step = checkpoint.manifest().progress.step;
    report::note(&match (end, config.options.patience) {
        (RunEnd::OutOfPatience, Some(patience)) => format!(
            "already finished after step {step}, by early stopping (--patience {patience}); to train further, raise --patience"
        ),
        _ => format!("already finished after step {step}; to train further, raise --epochs or --steps"),
    });
    match &config.flags.save {
        Some(path) if path.exists() => report::note(&format!("--save {} stays as it is", path.display())),
        Some(_) => {
            let mut pipeline = start(config)?;
            checkpoint.load(&mut pipeline).context("--resume")?;
            save_model(config, &mut pipeline)?;
        }
        None => {}
    }
    Ok(EndedBefore { end, resumed_at: step, steps: 0 })
}

fn train(config: &RunConfig) -> anyhow::Result<(RunReport, Plan)> {
    // Before the workers start, which takes long with too many threads.
    if let Some(warning) = config.compute.warning() {
        report::note(&warning);
    }
    let mut pipeline = start(config)?;
    let plan = pipeline.plan().clone();
    let (placement, replicas) = (plan.placement(), pipeline.topology().replicas());
    let placed: Vec<String> =
        placement.partition_ids().map(|p| placement.name(placement.worker_of(p)).to_owned()).collect();
    let model = config.model.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let balance = pipeline.balance().sizes().to_vec();
    report::note(&headline(config, &model, &balance, &placed));
    note_setup(config, &pipeline);
    let StepsRun { summary, total, done, log, log_failed, training } = run_steps(config, &mut pipeline, &balance)?;
    let summary = match summary {
        Ok(summary) => summary,
        Err(error) => {
            rescue_model(config, &mut pipeline, &error, done);
            return Err(unwrapped(error));
        }
    };
    // Its error is raised after the report, so that log and figures are not lost.
    let saved = save_model(config, &mut pipeline);
    // Ends the workers first, so that their messages come before the report.
    drop(pipeline);
    note_end(config, &summary);
    let done = summary.resumed_at.unwrap_or(0) + summary.steps;
    let interrupted = training.stop_requested().filter(|_| summary.end == RunEnd::Stopped);
    let interrupted =
        interrupted.map(|signal| Interrupted { signal, message: format!("after step {done} of {total}") });
    drop(training);
    let report = RunReport {
        command: config.flags.to_command()?,
        model,
        parameters: config.model.parameters(),
        balance,
        placement: placed,
        replicas,
        micro_batches: plan.micro_batches(),
        precision: config.flags.precision.unwrap_or_default(),
        phases: config.flags.phases.unwrap_or_default(),
        summary,
        interrupted,
        failed: None,
    };
    let logged = match log_failed {
        Some(error) => Err(error),
        None => log.map_or(Ok(()), |log| log.finish(&report)),
    };
    if let (Err(first), Err(_)) = (&saved, &logged) {
        report::note(&format!("error: {first:#}"));
    }
    let failed = logged.and(saved).err();
    Ok((RunReport { failed, ..report }, plan))
}

/// What is left when the trainer has returned.
struct StepsRun {
    summary: Result<RunSummary, TrainError>,
    /// The steps of the whole run.
    total: u64,
    /// The steps that are done, including those before a resume.
    done: u64,
    log: Option<Log>,
    /// Why the log could not be written. The run was stopped, so that its checkpoint is not lost.
    log_failed: Option<anyhow::Error>,
    training: signals::Training,
}

/// Trains, and reports the progress on the terminal and in the log.
fn run_steps(config: &RunConfig, pipeline: &mut Pipeline, balance: &[usize]) -> anyhow::Result<StepsRun> {
    let topology = pipeline.topology();
    let names: Vec<String> = topology.members().map(|worker| topology.name(worker)).collect();
    let (mut log, mut log_failed, mut done) = (None, None, 0);
    let trainer = Trainer::new(pipeline, config.train.clone(), config.test.clone(), config.options.clone());
    let mut trainer = trainer.map_err(|e| usage(e.to_string()))?;
    let total = trainer.steps();
    if let Some(saving) = &config.saving {
        trainer = trainer.save_to(&saving.checkpoints, saving.every, saving.settings(balance, config.compute.threads)?);
        if let Some(checkpoint) = &saving.from {
            trainer = trainer.resume(checkpoint).map_err(cannot_resume)?;
            done = checkpoint.manifest().progress.step;
        }
        saving.resume_notes().iter().for_each(|note| report::note(note));
    }
    // Only after the checkpoint is accepted: a rejected run must leave the previous log unchanged.
    if let Some(directory) = &config.log {
        log = Some(Log::create(directory, config, balance, &names)?);
    }
    if let Some(directory) = &config.capture {
        capture::prepare(directory)?;
    }
    let length = RunLength {
        steps: total,
        epochs: total.div_ceil(config.train.batches() as u64),
        test_batches: config.test.as_ref().map_or(0, Loader::batches),
        next_token: config.flags.data == Some(DataName::Text),
    };
    let mut progress = Progress::new(length, done);
    let training = signals::begin();
    let summary = trainer.run(|event, run| {
        if training.stop_requested().is_some() {
            run.stop();
            if matches!(event, Event::StepDone(_)) {
                training.finish();
            }
        }
        progress.on(event)?;
        match (event, &config.capture) {
            (Event::StepDone(step), _) => done = step.step + 1,
            (Event::Captured { step, tensors }, Some(directory)) => {
                report::note(&format!("captured {}", capture::save(directory, *step, tensors)?.display()));
            }
            _ => {}
        }
        if let Some(Err(error)) = log.as_mut().filter(|_| log_failed.is_none()).map(|log: &mut Log| log.on(event)) {
            log_failed = Some(anyhow::Error::from(error));
            run.stop();
        }
        Ok(())
    });
    Ok(StepsRun { summary, total, done, log, log_failed, training })
}

/// The error of a checkpoint that does not fit the run: the flags, or the data that they name, are others.
fn cannot_resume(error: CheckpointError) -> anyhow::Error {
    match error {
        CheckpointError::Mismatch { .. } | CheckpointError::WithinUpdate { .. } => usage(format!("--resume: {error}")),
        other => anyhow::Error::from(other).context("--resume"),
    }
}

/// Starts the pipeline. For `--auto-balance`, the costs of the layers come from where those of `distgpipe balance` come from.
fn start(config: &RunConfig) -> anyhow::Result<Pipeline> {
    let sample = config.balance_sample();
    let measured = sample.map(|sample| balance::kept_or_measured(&config.model, &sample)).transpose()?;
    config.start(measured)
}

/// Writes the model where `--save` says.
fn save_model(config: &RunConfig, pipeline: &mut Pipeline) -> anyhow::Result<()> {
    match &config.flags.save {
        Some(path) => crate::weights::save(path, &config.about_model()?, pipeline),
        None => Ok(()),
    }
}

/// Writes the model where `--save` says although the run failed, if the failure is one of files, such as a full disk, and not one of
/// the workers: the place of `--save` may be another disk.
fn rescue_model(config: &RunConfig, pipeline: &mut Pipeline, error: &TrainError, done: u64) {
    let of_files = match error {
        TrainError::Checkpoint(error) => error.is_of_disk(),
        other => matches!(other, TrainError::Observer(_)),
    };
    let Some(path) = config.flags.save.as_ref().filter(|_| of_files) else { return };
    if let TrainError::Checkpoint(CheckpointError::DiskStalled { directory, .. }) = error {
        let (file, directory) = (path.clone(), directory.clone());
        if answer_of_disk(move || is_on_disk_of(&file, &directory)).unwrap_or(true) {
            report::note(&format!("--save {} is on the disk that does not answer: it was not written", path.display()));
            return;
        }
    }
    report::note(&match save_model(config, pipeline) {
        Ok(()) => format!("the run failed, but --save {} has the model as it is after step {done}", path.display()),
        Err(error) => format!("error: {error:#}"),
    });
}

/// Whether a file is, or would be, in the file system of a directory.
fn is_on_disk_of(file: &Path, directory: &Path) -> bool {
    let parent = file.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let device = |path: &Path| path.metadata().ok().map(|about| about.dev());
    device(file).or_else(|| device(parent)) == device(directory)
}

/// Prints the devices and threads, the cut that `--auto-balance` found, and a warning if the codecs have no link.
fn note_setup(config: &RunConfig, pipeline: &Pipeline) {
    report::note(&config.compute.to_string());
    if config.compute.uses_gpu() {
        crate::mpi::note_gpus();
    }
    if let Some(cut) = found_cut(config, pipeline) {
        report::note(&cut);
    }
    if config.encodes() && pipeline.plan().placement().workers() == 1 {
        report::note("warning: the codec has nothing to encode, because one worker runs all partitions: use two, as with --partitions 2 or --place a,b");
    }
}

/// Prints which epoch was the best, and whether the run ended because nothing improved.
fn note_end(config: &RunConfig, summary: &RunSummary) {
    let Some(best) = summary.best else {
        if let Some(metric) = config.options.best.filter(|_| config.flags.save_best.is_some()) {
            report::note(&format!(
                "--save-best: no checkpoint is marked as the best, because no whole epoch was tested for its {}",
                metric.name()
            ));
        }
        return;
    };
    let (metric, epoch) = (best.metric.name(), best.epoch + 1);
    let value = match best.metric {
        TestMetric::Accuracy => units::percent(best.value),
        _ => format!("{:.4}", best.value),
    };
    if let (RunEnd::OutOfPatience, Some(patience)) = (summary.end, config.options.patience) {
        let epochs = units::plural(patience, "epoch");
        report::note(&format!("stopped early: the test {metric} has not improved for {epochs}"));
    }
    let kept = config.saving.as_ref().and_then(|saving| saving.checkpoints.best().ok().flatten());
    let kept = kept.filter(|kept| kept.manifest().progress.step == best.step);
    let kept = kept.map(|kept| format!(", kept in {}", kept.path().display())).unwrap_or_default();
    report::note(&format!("best epoch: {epoch}, with a test {metric} of {value}{kept}"));
}

/// Unwraps an observer's I/O error, so that a closed pipe is not reported as a failed run.
fn unwrapped(error: TrainError) -> anyhow::Error {
    match error {
        TrainError::Observer(error) => error.into(),
        other => other.into(),
    }
}

/// The table of the cut that `--auto-balance` found.
fn found_cut(config: &RunConfig, pipeline: &Pipeline) -> Option<String> {
    let report = CutReport {
        found: pipeline.auto_balanced()?,
        model: &config.model,
        placement: pipeline.plan().placement(),
        micro_batches: pipeline.plan().micro_batches(),
        link: config.balance_options.link,
        memory_limit_bytes: config.balance_options.memory_limit_bytes,
        memory_known: true,
    };
    let mut text = report.text();
    if config.balance_options.link.is_none() && !config.links_are_memory() {
        text.push_str("to include the cost of links, give their speed: --link-rate 1gbit --link-latency 0.5\n");
    }
    Some(text)
}

fn headline(config: &RunConfig, model: &str, balance: &[usize], placed: &[String]) -> String {
    let layers: Vec<String> = balance.iter().map(ToString::to_string).collect();
    format!(
        "{model}{}: {} parameters in {} layers, cut {} on {}{}; {} training rows",
        report::run::unless_fp32(config.flags.precision.unwrap_or_default()),
        units::count(config.model.parameters()),
        config.model.layers.len(),
        layers.join(","),
        placed.join(","),
        match config.flags.replicas {
            None | Some(1) => String::new(),
            Some(replicas) => format!(", in {replicas} replicas"),
        },
        units::count(config.train.data_rows() as u64),
    )
}
