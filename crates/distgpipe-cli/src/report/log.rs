//! The log directory of a run: its flags, every step, a trace if wanted, and the result.

use crate::config::RunConfig;
use anyhow::Context;
use distgpipe::runtime::trace::{write_chrome, write_jsonl, Span};
use distgpipe::train::{Event, StepDone};
use distgpipe::StepLink;
use serde::Serialize;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The file with one line per step.
const STEPS: &str = "steps.jsonl";

/// The most events in trace.json, which is kept in memory until the end; trace.jsonl has all events.
const CHROME_SPANS_MAX: usize = 500_000;

/// Writes the log directory.
pub struct Log {
    directory: PathBuf,
    steps: BufWriter<File>,
    trace: Option<Trace>,
}

struct Trace {
    lines: BufWriter<File>,
    spans: Vec<Span>,
    names: Vec<String>,
}

#[derive(Serialize)]
struct StepLine<'a> {
    step: u64,
    epoch: u64,
    rows: usize,
    loss: f64,
    correct: Option<u64>,
    learning_rate: f64,
    /// Before clipping; null without `--clip-norm`.
    gradient_norm: Option<f64>,
    seconds: f64,
    loading_s: f64,
    workers: Vec<WorkerLine<'a>>,
    links: &'a [StepLink],
}

#[derive(Serialize)]
struct WorkerLine<'a> {
    name: &'a str,
    seconds: f64,
    phases_s: std::collections::BTreeMap<&'static str, f64>,
    peak_bytes: u64,
}

/// Whether the directory already has a log.
pub fn is_used(directory: &Path) -> bool {
    directory.join(STEPS).exists()
}

impl Log {
    /// Creates the directory and writes config.toml, with the cut that the pipeline has. `names` are the workers' names.
    pub fn create(directory: &Path, config: &RunConfig, balance: &[usize], names: Vec<String>) -> anyhow::Result<Self> {
        let flag = || format!("--log {}", directory.display());
        std::fs::create_dir_all(directory).with_context(flag)?;
        let mut flags = config.flags.clone();
        // A second search might find another cut.
        flags.keep_cut(balance);
        // A run repeated from config.toml must not overwrite the output of this one.
        (flags.log, flags.trace, flags.json) = (None, None, None);
        (flags.checkpoint, flags.checkpoint_every, flags.keep) = (None, None, None);
        (flags.save, flags.capture, flags.capture_step) = (None, None, None);
        std::fs::write(directory.join("config.toml"), flags.to_toml()?).with_context(flag)?;
        let resumed = config.saving.as_ref().and_then(|saving| saving.from.as_ref());
        let path = directory.join(STEPS);
        match resumed {
            Some(from) => keep_before(&path, from.manifest().progress.step),
            None => File::create(&path).map(drop),
        }
        .with_context(flag)?;
        let file = |name: &str, append: bool| {
            let mut options = File::options();
            options.create(true).write(true).append(append).truncate(!append);
            options.open(directory.join(name)).map(BufWriter::new).with_context(flag)
        };
        let trace = match config.trace {
            // Events before the resume stay in the trace, even of steps that are repeated.
            true => Some(Trace { lines: file("trace.jsonl", resumed.is_some())?, spans: Vec::new(), names }),
            false => None,
        };
        Ok(Log { directory: directory.to_owned(), steps: file(STEPS, true)?, trace })
    }

    /// Writes summary.json and finishes the other files.
    pub fn finish(mut self, summary: &impl Serialize) -> anyhow::Result<()> {
        let flag = format!("--log {}", self.directory.display());
        self.steps.flush().with_context(|| flag.clone())?;
        if let Some(mut trace) = self.trace.take() {
            trace.lines.flush().with_context(|| flag.clone())?;
            let mut out = BufWriter::new(File::create(self.directory.join("trace.json"))?);
            write_chrome(&mut out, &trace.spans, &trace.names)
                .and_then(|()| out.flush())
                .with_context(|| flag.clone())?;
        }
        std::fs::write(self.directory.join("summary.json"), serde_json::to_string_pretty(summary)? + "\n").context(flag)
    }

    fn step(&mut self, done: &StepDone<'_>) -> std::io::Result<()> {
        let outcome = done.outcome;
        let line = StepLine {
            step: done.step,
            epoch: done.epoch,
            rows: outcome.rows,
            loss: outcome.loss,
            correct: outcome.correct,
            learning_rate: done.learning_rate,
            gradient_norm: outcome.gradient_norm,
            seconds: done.seconds,
            loading_s: done.loading_s,
            workers: outcome
                .workers
                .iter()
                .map(|worker| WorkerLine {
                    name: &worker.name,
                    seconds: worker.report.step_ns as f64 / 1e9,
                    phases_s: distgpipe::runtime::trace::Phase::ALL
                        .iter()
                        .map(|&phase| (phase.name(), worker.report.phases.of(phase) as f64 / 1e9))
                        .collect(),
                    peak_bytes: worker.report.peak_bytes,
                })
                .collect(),
            links: &outcome.step_links,
        };
        serde_json::to_writer(&mut self.steps, &line)?;
        self.steps.write_all(b"\n")?;
        // Complete on disk after every step, in case the run is killed.
        self.steps.flush()?;
        if let Some(trace) = &mut self.trace {
            // Numbered as in steps.jsonl: a pipeline also counts evaluation steps, and starts at 0 after a resume.
            let mut spans: Vec<Span> = outcome.spans().map(|span| Span { step: done.step, ..span.clone() }).collect();
            write_jsonl(&mut trace.lines, &spans)?;
            spans.truncate(CHROME_SPANS_MAX.saturating_sub(trace.spans.len()));
            trace.spans.append(&mut spans);
        }
        Ok(())
    }
}

impl Log {
    /// Writes what belongs in the log of an event.
    pub fn on(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        match event {
            Event::StepDone(done) => self
                .step(done)
                .map_err(|e| std::io::Error::new(e.kind(), format!("--log {}: {e}", self.directory.display()))),
            Event::EpochDone(_) => self.trace.as_mut().map_or(Ok(()), |trace| trace.lines.flush()),
            _ => Ok(()),
        }
    }
}

/// Drops the lines of `step` and later steps, which a resumed run repeats. The file is replaced atomically.
fn keep_before(path: &Path, step: u64) -> std::io::Result<()> {
    let old = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        opened => BufReader::new(opened?),
    };
    let part = path.with_extension("jsonl.part");
    let mut kept = BufWriter::new(File::create(&part)?);
    // A kill may have truncated the last line, even inside a UTF-8 sequence.
    for line in old.split(b'\n') {
        let line = line?;
        let at = serde_json::from_slice::<serde_json::Value>(&line).ok().and_then(|line| line.get("step")?.as_u64());
        if at.is_some_and(|at| at < step) {
            kept.write_all(&line)?;
            kept.write_all(b"\n")?;
        }
    }
    kept.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    std::fs::rename(&part, path)
}
