//! `distgpipe train`; `demo` and `recipe run` train through [`execute`] too.

use crate::args::TrainFlags;
use crate::capture;
use crate::config::RunConfig;
use crate::report::cut::CutReport;
use crate::report::log::Log;
use crate::report::progress::Progress;
use crate::report::run::RunReport;
use crate::report::{self, units};
use anyhow::Context;
use distgpipe::train::{Event, Observer, TrainError, Trainer};
use distgpipe::{Pipeline, Plan};
use std::io::IsTerminal;

/// The examples at the end of `--help`.
pub const EXAMPLES: &str = "\
Examples:
  Train on the built-in digits, with two partitions on two threads:
      distgpipe train --partitions 2
  Split learning: this process runs the first and the last layer, another process the rest:
      distgpipe train --model mobilenet_v2 --set image=32 --cut first=1,last=1 --workers processes
  The same with the middle on another machine, which runs `distgpipe worker`:
      distgpipe train … --workers 10.0.0.2:7000 --token-file token.txt
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
  Read flags from a file, and override one:
      distgpipe train --config run1/config.toml --chunks 8

On CPUs of one kind, runs with the same --seed and --threads give the same results, wherever their partitions run.";

/// Trains, and prints the result.
pub fn run(flags: TrainFlags) -> anyhow::Result<()> {
    let config = RunConfig::new(&flags.with_config()?)?;
    let (report, _) = execute(&config)?;
    if config.json {
        return report::print_json(&report);
    }
    // On a terminal, the progress lines already showed the epochs.
    let epochs = if std::io::stdout().is_terminal() { String::new() } else { report.epochs() };
    report::print(&format!("{epochs}\n{}", report.costs()))
}

/// Trains as configured, and returns the report and the plan.
pub fn execute(config: &RunConfig) -> anyhow::Result<(RunReport, Plan)> {
    let mut pipeline = config.start()?;
    let plan = pipeline.plan().clone();
    let placement = plan.placement();
    let (topology, replicas) = (pipeline.topology(), pipeline.topology().replicas());
    let names = topology.members().map(|worker| topology.name(worker)).collect();
    let placed: Vec<String> =
        placement.partition_ids().map(|p| placement.name(placement.worker_of(p)).to_owned()).collect();
    let model = config.model.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let balance = pipeline.balance().sizes().to_vec();
    report::note(&headline(config, &model, &balance, &placed));
    note_setup(config, &pipeline);
    if let Some(directory) = &config.capture {
        capture::prepare(directory)?;
    }
    let (mut log, summary);
    {
        let mut trainer = Trainer::new(&mut pipeline, config.train.clone(), config.test.clone(), config.options)?;
        if let Some(saving) = &config.saving {
            trainer =
                trainer.save_to(&saving.checkpoints, saving.every, saving.settings(&balance, config.compute.threads)?);
            if let Some(checkpoint) = &saving.from {
                trainer = trainer.resume(checkpoint).context("--resume")?;
                let (done, steps) = (checkpoint.manifest().progress.step, trainer.steps());
                if done >= steps {
                    report::note(&format!(
                        "the checkpoint already has all {steps} steps, so there is nothing to train: raise --epochs or --steps to continue"
                    ));
                }
            }
        }
        // Only after the checkpoint is accepted: a rejected run must leave the previous log unchanged.
        log = config.log.as_deref().map(|directory| Log::create(directory, config, &balance, names)).transpose()?;
        let mut progress = Progress::new(trainer.steps(), config.options.epochs);
        summary = trainer.run(&mut |event: &Event<'_>| {
            progress.on(event)?;
            if let (Event::Captured { step, tensors }, Some(directory)) = (event, &config.capture) {
                progress.print(&format!("captured {}", capture::save(directory, *step, tensors)?.display()));
            }
            log.as_mut().map_or(Ok(()), |log| log.on(event))
        });
    }
    let summary = summary.map_err(unwrapped)?;
    // Saved before the report, but its error is raised after it, so that log and figures are not lost.
    let saved = config.flags.save.as_ref().map(|path| crate::weights::save(path, &config.model, &mut pipeline));
    // Ends the workers first, so that their messages come before the report.
    drop(pipeline);
    let report = RunReport {
        command: config.flags.to_command()?,
        model,
        parameters: config.model.parameters(),
        balance,
        placement: placed,
        replicas,
        micro_batches: plan.micro_batches(),
        precision: config.flags.precision.unwrap_or_default(),
        summary,
    };
    if let Some(log) = log {
        log.finish(&report)?;
    }
    if let Some(Err(error)) = saved {
        report::note(&report.epochs());
        return Err(error);
    }
    Ok((report, plan))
}

/// Prints the devices and threads, the cut that `--auto-balance` found, and a warning if the codecs have no link.
fn note_setup(config: &RunConfig, pipeline: &Pipeline) {
    report::note(&config.compute.to_string());
    if let Some(warning) = config.compute.warning() {
        report::note(&warning);
    }
    if let Some(cut) = found_cut(config, pipeline) {
        report::note(&cut);
    }
    if config.encodes() && pipeline.plan().placement().workers() == 1 {
        report::note("warning: the codec has nothing to encode, because one worker runs all partitions: use two, as with --partitions 2 or --place a,b");
    }
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
        units::count(config.train.data().len() as u64),
    )
}
