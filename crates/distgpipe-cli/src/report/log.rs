//! The log directory of a run: its flags, every step and test, a trace if wanted, and the result. Steps and epochs count from 1.

use crate::config::RunConfig;
use crate::report::run::RunReport;
use anyhow::Context;
use distgpipe::files::{create_part, open_regular};
use distgpipe::runtime::trace::{write_jsonl, ChromeTrace, Phase, Span};
use distgpipe::train::{EpochSummary, Event, StepDone};
use distgpipe::StepLink;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The file with one line per step and per test.
const STEPS: &str = "steps.jsonl";
const TRACE: &str = "trace.jsonl";
/// How much of the end of a file is read at a time.
const TAIL_BYTES: u64 = 1 << 16;

/// Writes the log directory.
pub struct Log {
    directory: PathBuf,
    steps: BufWriter<File>,
    /// The number of the last step.
    last_step: u64,
    trace: Option<Trace>,
}

/// The two trace files. Both are written step by step, so that a trace of any length takes no memory.
struct Trace {
    lines: BufWriter<File>,
    chrome: ChromeTrace,
}

/// A line of steps.jsonl.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line<'a> {
    Step(StepLine<'a>),
    Test(TestLine),
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

/// The test after an epoch.
#[derive(Serialize)]
struct TestLine {
    /// The last step before the test.
    step: u64,
    epoch: u64,
    test_loss: f64,
    test_accuracy: Option<f64>,
    test_f1: Option<f64>,
    test_matthews: Option<f64>,
    test_s: f64,
}

/// Whether the directory already has a log.
pub fn is_used(directory: &Path) -> bool {
    directory.join(STEPS).exists()
}

impl Log {
    /// Creates the directory and writes config.toml, with the cut that the pipeline has. `names` are the workers' names.
    pub fn create(directory: &Path, config: &RunConfig, balance: &[usize], names: &[String]) -> anyhow::Result<Self> {
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
        let resumed = resumed.map(|checkpoint| &checkpoint.manifest().progress);
        let path = directory.join(STEPS);
        match resumed {
            // The checkpoint's epoch counts from 0, so it is the number of epochs that are done.
            Some(progress) => keep_before(&path, progress.step, progress.epoch),
            None => File::create(&path).map(drop),
        }
        .with_context(flag)?;
        let file = |name: &str, append: bool| {
            let mut options = File::options();
            options.create(true).write(true).append(append).truncate(!append);
            options.open(directory.join(name)).map(BufWriter::new)
        };
        let trace = || -> std::io::Result<Trace> {
            // Events before the resume stay in the files, even of steps that are repeated.
            cut_incomplete_line(&directory.join(TRACE))?;
            let (lines, chrome) = (file(TRACE, resumed.is_some())?, directory.join("trace.json"));
            let chrome = match resumed {
                Some(_) => ChromeTrace::resume(&chrome, names)?,
                None => ChromeTrace::create(&chrome, names)?,
            };
            Ok(Trace { lines, chrome })
        };
        Ok(Log {
            directory: directory.to_owned(),
            steps: file(STEPS, true).with_context(flag)?,
            last_step: resumed.map_or(0, |progress| progress.step),
            trace: config.trace.then(trace).transpose().with_context(flag)?,
        })
    }

    /// Writes summary.json and finishes the other files. A run that only repeated its last test keeps the summary of its steps.
    pub fn finish(self, report: &RunReport) -> anyhow::Result<()> {
        let flag = || format!("--log {}", self.directory.display());
        if let Some(trace) = self.trace {
            trace.chrome.finish().with_context(flag)?;
        }
        let path = self.directory.join("summary.json");
        if report.summary.steps == 0 && path.exists() {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(report)? + "\n";
        std::fs::write(path, text).with_context(flag)
    }

    /// Writes a line. It is complete on disk, in case the run is killed.
    fn line(&mut self, line: &Line<'_>) -> std::io::Result<()> {
        serde_json::to_writer(&mut self.steps, line)?;
        self.steps.write_all(b"\n")?;
        self.steps.flush()
    }

    fn step(&mut self, done: &StepDone<'_>) -> std::io::Result<()> {
        let outcome = done.outcome;
        self.last_step = done.step + 1;
        self.line(&Line::Step(StepLine {
            step: self.last_step,
            epoch: done.epoch + 1,
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
                    phases_s: Phase::ALL
                        .iter()
                        .map(|&phase| (phase.name(), worker.report.phases.time_in(phase) as f64 / 1e9))
                        .collect(),
                    peak_bytes: worker.report.peak_bytes,
                })
                .collect(),
            links: &outcome.step_links,
        }))?;
        if let Some(trace) = &mut self.trace {
            // Numbered as in steps.jsonl: a pipeline also counts evaluation steps, and starts at 0 after a resume.
            let step = self.last_step;
            let spans: Vec<Span> = outcome.spans().map(|span| Span { step, ..span.clone() }).collect();
            write_jsonl(&mut trace.lines, &spans)?;
            trace.lines.flush()?;
            trace.chrome.write(&spans)?;
        }
        Ok(())
    }

    /// Drops the lines of what is repeated.
    fn restart(&mut self, step: u64, epoch: u64) -> std::io::Result<()> {
        let path = self.directory.join(STEPS);
        keep_before(&path, step, epoch)?;
        self.steps = BufWriter::new(File::options().append(true).open(&path)?);
        self.last_step = step;
        Ok(())
    }

    fn test(&mut self, epoch: &EpochSummary) -> std::io::Result<()> {
        let Some(test_loss) = epoch.test_loss else { return Ok(()) };
        self.line(&Line::Test(TestLine {
            step: self.last_step,
            epoch: epoch.epoch + 1,
            test_loss,
            test_accuracy: epoch.test_accuracy,
            test_f1: epoch.test_f1,
            test_matthews: epoch.test_matthews,
            test_s: epoch.test_s,
        }))
    }

    /// Writes what belongs in the log of an event.
    pub fn on(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        match event {
            Event::StepDone(done) => self.step(done),
            Event::EpochDone(epoch) => self.test(epoch),
            Event::Restarted { step, epoch } => self.restart(*step, *epoch),
            _ => Ok(()),
        }
        .map_err(|e| std::io::Error::new(e.kind(), format!("--log {}: {e}", self.directory.display())))
    }
}

/// Drops the lines of steps and tests that the checkpoint does not have, which a resumed run repeats. The file is replaced
/// atomically.
fn keep_before(path: &Path, steps_done: u64, epochs_done: u64) -> std::io::Result<()> {
    #[derive(Deserialize)]
    struct Number {
        kind: Option<String>,
        step: u64,
        epoch: u64,
    }
    let old = match open_regular(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        opened => BufReader::new(opened?),
    };
    let (part, file) = create_part(path)?;
    let mut kept = BufWriter::new(file);
    // A kill may have truncated the last line, even inside a UTF-8 sequence.
    for line in old.split(b'\n') {
        let line = line?;
        let keep = serde_json::from_slice::<Number>(&line).is_ok_and(|line| match line.kind.as_deref() {
            Some("test") => line.epoch <= epochs_done,
            _ => line.step <= steps_done,
        });
        if keep {
            kept.write_all(&line)?;
            kept.write_all(b"\n")?;
        }
    }
    kept.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    std::fs::rename(&part, path)
}

/// Cuts off a last line that a kill or a full disk has left incomplete. The file may be long, so only its end is read.
fn cut_incomplete_line(path: &Path) -> std::io::Result<()> {
    let mut file = match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let (mut end, mut part) = (file.metadata()?.len(), Vec::new());
    while end > 0 {
        let start = end.saturating_sub(TAIL_BYTES);
        part.clear();
        file.seek(SeekFrom::Start(start))?;
        Read::by_ref(&mut file).take(end - start).read_to_end(&mut part)?;
        if let Some(at) = part.iter().rposition(|&byte| byte == b'\n') {
            return file.set_len(start + at as u64 + 1);
        }
        end = start;
    }
    file.set_len(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_short_goes_and_all_others_stay() {
        let path = std::env::temp_dir().join(format!("distgpipe-{}-trace.jsonl", std::process::id()));
        let cut = |text: &str| {
            std::fs::write(&path, text).unwrap();
            cut_incomplete_line(&path).unwrap();
            std::fs::read_to_string(&path).unwrap()
        };
        let long = "a".repeat(3 * TAIL_BYTES as usize);
        assert_eq!(cut("one\ntwo\n{\"thr"), "one\ntwo\n");
        assert_eq!(cut("one\n"), "one\n");
        assert_eq!((cut("on"), cut("")), (String::new(), String::new()));
        assert_eq!(cut(&format!("one\n{long}")), "one\n");
        assert!(cut(&format!("{long}\n")) == format!("{long}\n"));
        std::fs::remove_file(&path).unwrap();
        cut_incomplete_line(&path).unwrap();
        assert!(!path.exists());
    }

    /// In epochs of 10 steps. A checkpoint at the end of an epoch is written after its test; one inside an epoch, even at the end of
    /// the run, before it.
    #[test]
    fn a_resumed_run_keeps_the_steps_and_tests_that_its_checkpoint_has() {
        let path = std::env::temp_dir().join(format!("distgpipe-{}-steps.jsonl", std::process::id()));
        let line = |kind: &str, step: u64| {
            format!("{{\"kind\":\"{kind}\",\"step\":{step},\"epoch\":{}}}\n", step.div_ceil(10))
        };
        let steps = |range: std::ops::RangeInclusive<u64>| range.map(|step| line("step", step)).collect::<String>();
        let text = format!("{}{}{}{}", steps(1..=10), line("test", 10), steps(11..=15), line("test", 15));
        let kept = |steps_done: u64, epochs_done: u64| {
            std::fs::write(&path, format!("{text}{{\"kind\":\"st")).unwrap();
            keep_before(&path, steps_done, epochs_done).unwrap();
            std::fs::read_to_string(&path).unwrap()
        };
        assert_eq!(kept(10, 1), format!("{}{}", steps(1..=10), line("test", 10)));
        assert_eq!(kept(15, 1), format!("{}{}{}", steps(1..=10), line("test", 10), steps(11..=15)));
        assert_eq!(kept(4, 0), steps(1..=4));
        std::fs::remove_file(&path).unwrap();
    }
}
