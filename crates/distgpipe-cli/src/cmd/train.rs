//! `distgpipe train`, and what `distgpipe demo` runs.

use crate::args::TrainFlags;
use crate::capture;
use crate::config::RunConfig;
use crate::report::cut::CutReport;
use crate::report::log::Log;
use crate::report::progress::Progress;
use crate::report::run::RunReport;
use crate::report::{self, units};
use anyhow::Context;
use distgpipe::trainer::{Event, Observer, TrainError, Trainer};
use distgpipe::{Pipeline, Plan};
use std::io::IsTerminal;

/// What `--help` shows after the flags.
pub const EXAMPLES: &str = "\
Examples:
  Learn the built-in digits, two partitions on two threads:
      distgpipe train --partitions 2
  Split learning: this process keeps the first and the last layer, another process runs the middle:
      distgpipe train --model mobilenet_v2 --set image=32 --cut first=1,last=1 --workers processes
  The same with the middle on another machine, where `distgpipe worker` waits:
      distgpipe train … --workers 10.0.0.2:7000 --token-file token.txt
  Cut by measured time, save memory, and keep a trace for Perfetto:
      distgpipe train --model mobilenet_v2 --auto-balance 2 --recompute always --log run1 --trace
  Cut for a link of 100 Mbit/s and a server with 2 GiB:
      distgpipe train … --auto-balance 3 --place client,server,client --link-rate 100mbit --memory-limit 2GiB
  Data parallelism: two workers have the whole model, and each learns from half of every batch:
      distgpipe train --replicas 2 --chunks 1 --batch 128
  Send 4.5 bits a value over a slow link, and see what that did:
      distgpipe train … --codec tile:4
  Save the run every 100 steps; after a kill, go on where it was, here with another cut:
      distgpipe train … --checkpoint run1/saved --checkpoint-every 100
      distgpipe train --checkpoint run1/saved --resume --partitions 3
  The flags out of a file, one of them changed:
      distgpipe train --config run1/config.toml --chunks 8

With one seed every run learns the same, wherever its partitions are.";

/// Trains and prints what came of it.
pub fn run(flags: TrainFlags) -> anyhow::Result<()> {
    let config = RunConfig::new(&flags.with_config()?)?;
    let (report, _) = execute(&config)?;
    if config.json {
        return report::print_json(&report);
    }
    // On a terminal the epochs have been seen one by one.
    let epochs = if std::io::stdout().is_terminal() { String::new() } else { report.epochs() };
    report::print(&format!("{epochs}\n{}", report.costs()))
}

/// Trains as configured: the one way of `train` and `demo`.
pub fn execute(config: &RunConfig) -> anyhow::Result<(RunReport, Plan)> {
    let mut pipeline = config.start()?;
    let plan = pipeline.plan().clone();
    let placement = plan.placement();
    let (roster, replicas) = (pipeline.roster(), pipeline.roster().replicas());
    let names = roster.members().map(|worker| roster.name(worker)).collect();
    let placed: Vec<String> =
        placement.partition_ids().map(|p| placement.name(placement.worker_of(p)).to_owned()).collect();
    let model = config.model.recipe.as_ref().map(|recipe| recipe.name.clone()).unwrap_or_default();
    let balance = pipeline.balance().sizes().to_vec();
    report::note(&headline(config, &model, &balance, &placed));
    if let Some(cut) = found_cut(config, &pipeline) {
        report::note(&cut);
    }
    if config.encodes() && placement.workers() == 1 {
        report::note("warning: the codec has nothing to encode, as one worker has all partitions: use two, as with --partitions 2 or --place a,b");
    }
    if let Some(directory) = &config.capture {
        capture::prepare(directory)?;
    }
    let (mut log, summary);
    {
        let mut trainer = Trainer::new(&mut pipeline, config.train.clone(), config.test.clone(), config.options)?;
        if let Some(saving) = &config.saving {
            trainer = trainer.save_to(&saving.checkpoints, saving.every, saving.settings(&balance)?);
            if let Some(checkpoint) = &saving.from {
                trainer = trainer.resume(checkpoint).context("--resume")?;
                let (done, steps) = (checkpoint.about().progress.step, trainer.steps());
                if done >= steps {
                    report::note(&format!(
                        "it has all of its {steps} steps behind it: nothing is trained; for more, raise --epochs or --steps"
                    ));
                }
            }
        }
        // After the checkpoint was taken: a run that is refused leaves the log of the one before it as it is.
        log = config.log.as_deref().map(|directory| Log::create(directory, config, &balance, names)).transpose()?;
        let mut progress = Progress::new(trainer.steps(), config.options.epochs);
        summary = trainer.run(&mut |event: &Event<'_>| {
            progress.on(event)?;
            if let (Event::Captured { step, tensors }, Some(directory)) = (event, &config.capture) {
                progress.say(&format!("captured {}", capture::save(directory, *step, tensors)?.display()));
            }
            log.as_mut().map_or(Ok(()), |log| log.on(event))
        });
    }
    let summary = summary.map_err(unwrapped)?;
    // The log and the figures are there even if this cannot be written.
    let saved = config.flags.save.as_ref().map(|path| crate::weights::save(path, &config.model, &mut pipeline));
    // Goodbye to the workers first: what they say comes before what we print.
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

/// An observer's error is the system's: a closed pipe must be told from a failed run.
fn unwrapped(error: TrainError) -> anyhow::Error {
    match error {
        TrainError::Observer(error) => error.into(),
        other => other.into(),
    }
}

/// The table of a cut that was found by measuring.
fn found_cut(config: &RunConfig, pipeline: &Pipeline) -> Option<String> {
    let report = CutReport {
        found: pipeline.auto_balanced()?,
        model: &config.model,
        placement: pipeline.plan().placement(),
        micro_batches: pipeline.plan().micro_batches(),
        link: config.judging.link,
        memory_limit_bytes: config.judging.memory_limit_bytes,
        memory_known: true,
    };
    let mut text = report.text();
    if config.judging.link.is_none() && !config.links_are_memory() {
        text.push_str("to count what the links cost, say how fast they are: --link-rate 1gbit --link-latency 0.5\n");
    }
    Some(text)
}

fn headline(config: &RunConfig, model: &str, balance: &[usize], placed: &[String]) -> String {
    let layers: Vec<String> = balance.iter().map(ToString::to_string).collect();
    format!(
        "{model}{}: {} parameters in {} layers, cut {} on {}{}; {} rows to learn from",
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
