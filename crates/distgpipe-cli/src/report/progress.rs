//! The progress of a run: a bar on a terminal, lines elsewhere. It goes to standard error, so that results can be piped.

mod pace;

pub use pace::{Pace, RunningClock};

use super::run::two_class_scores;
use super::{carried, note, print_above, units};
use distgpipe::driver::pipeline::{StepOutcome, WorkerStep};
use distgpipe::failure::Failure;
use distgpipe::train::{EpochSummary, Event, StepDone};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::BTreeSet;
use std::io::IsTerminal;

/// How long a run is, and how its tests are reported.
#[derive(Clone, Copy, Debug)]
pub struct RunLength {
    /// Training steps, including those before a resume.
    pub steps: u64,
    /// Epochs, of which the last may be cut short.
    pub epochs: u64,
    /// Batches of each test.
    pub test_batches: usize,
    /// Whether the loss is that of the next token, so that tests also have a perplexity.
    pub next_token: bool,
}

/// Prints progress and warnings.
pub struct Progress {
    bar: Option<ProgressBar>,
    run: RunLength,
    clock: RunningClock,
    pace: Pace,
    /// Batches of the test in progress that are done.
    tested: usize,
    /// The edges and kinds of refusal by a codec that a warning was printed for.
    warned: BTreeSet<(String, String)>,
    /// For how long the run had waited for lost workers when a line last said so, in seconds.
    rejoining_told: Option<f64>,
}

/// How often a line says that the run still waits for lost workers, in seconds.
const REJOINING_EVERY_S: f64 = 10.0;

impl Progress {
    /// For a run of which `done` steps are done.
    pub fn new(run: RunLength, done: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| bar(run.steps, "steps"));
        if let Some(bar) = &bar {
            bar.set_position(done);
        }
        print_above(bar.clone());
        let mut clock = RunningClock::start();
        let pace = Pace::new(run.steps, done, clock.now());
        Progress { bar, run, clock, pace, tested: 0, warned: BTreeSet::new(), rejoining_told: None }
    }

    pub fn finish(&self) {
        print_above(None);
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn step(&mut self, done: &StepDone<'_>) {
        let (step, now) = (done.step + 1, self.clock.now());
        let left = self.pace.left_s(step, now).map(|left| format!(", {} left", units::duration(left)));
        let left = left.unwrap_or_default();
        if let Some(bar) = &self.bar {
            let rate = units::rate(done.outcome.rows as f64 / done.seconds.max(1e-9));
            bar.set_message(format!("loss {:.4}, {rate} samples/s{left}", done.outcome.loss));
            bar.set_position(step);
        } else if self.pace.is_due(step, now) && step < self.run.steps {
            note(&format!(
                "step {step}/{}: loss {:.4}, learning rate {}{left}",
                self.run.steps,
                done.outcome.loss,
                units::significant(done.learning_rate),
            ));
        }
    }

    fn test_step(&mut self) {
        self.tested += 1;
        let text = format!("testing: batch {}/{}", self.tested, self.run.test_batches);
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None if self.pace.is_late(self.clock.now()) => note(&text),
            None => {}
        }
    }

    /// Warns once for each edge and kind of reason that a codec refuses tensors, which are then sent raw.
    fn warn_of_refusals(&mut self, outcome: &StepOutcome) {
        for worker in &outcome.workers {
            for (_, traffic) in &worker.report.links {
                let edges = traffic.sent.iter().map(|(edge, sent)| {
                    (format!("{} {} → {}", carried(edge.pass), edge.from, edge.to), &sent.refusals)
                });
                let shares = ("gradients of replicas".to_owned(), &traffic.shares.refusals);
                for (what, refusals) in edges.chain([shares]) {
                    for (kind, refusal) in refusals {
                        if self.warned.insert((what.clone(), kind.clone())) {
                            note(&format!(
                                "warning: {} sends some {what} raw, because the codec rejects them: {refusal}",
                                worker.name
                            ));
                        }
                    }
                }
            }
        }
    }

    /// The bar shows every attempt to start the workers again, lines come now and then.
    fn rejoining(&mut self, failure: &Failure, seconds: f64, limit_s: f64) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("waiting for the workers, {seconds:.0} s"));
        }
        // A shorter wait than the last one is that of another loss.
        if self.rejoining_told.is_none_or(|told| seconds < told || seconds >= told + REJOINING_EVERY_S) {
            self.rejoining_told = Some(seconds);
            note(&format!(
                "waiting for the workers, {seconds:.0} s; the run fails after {limit_s:.0} s (--reconnect): {failure}"
            ));
        }
    }

    /// Prints what there is to say about an event.
    pub fn on(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        match event {
            Event::StepDone(done) => {
                self.warn_of_refusals(done.outcome);
                done.outcome.workers.iter().for_each(tell_of_graphs);
                self.step(done);
            }
            Event::TestStepDone { .. } => self.test_step(),
            Event::Saved { step, path } if self.bar.is_none() => {
                note(&format!("saved step {step}: {}", path.display()))
            }
            Event::WorkerLost { failure, restart, restarts, step } => note(&format!(
                "warning: {failure}; starting the workers again and going back to step {step} (restart {restart} of {restarts})"
            )),
            Event::Rejoining { failure, seconds, limit_s } => self.rejoining(failure, *seconds, *limit_s),
            Event::Restarted { step, .. } => {
                note(&format!("all workers are back; continuing after step {step}"));
                if let Some(bar) = &self.bar {
                    bar.set_position(*step);
                }
            }
            Event::StateKept { bytes } => note(&format!(
                "while there is no checkpoint, the state to restart from is kept in memory ({})",
                units::bytes(*bytes as f64)
            )),
            Event::StateNotKept { fault } => note(&format!(
                "warning: until there is a checkpoint, the loss of a worker ends the run (--restarts): {fault}"
            )),
            Event::SaveFailed { error, failures, failures_max, again_at, pause_s, .. } => {
                let pause = if *pause_s > 0.0 { format!(" and {pause_s:.0} s") } else { String::new() };
                note(&format!(
                    "warning: the checkpoint could not be written ({failures} of at most {failures_max} failures in a row), so \
                     the older one stays, and the next attempt is after step {again_at}{pause}: {error}"
                ));
            }
            Event::WeightsExploding { step, largest } => note(&format!(
                "warning: a weight has reached {largest:.1e} after step {}: the run diverges; lower --lr, or clip gradients with \
                 --clip-norm",
                step + 1
            )),
            Event::EpochDone(epoch) => {
                self.tested = 0;
                note(&line(epoch, self.run));
            }
            _ => {}
        }
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // An error may follow, and must not be drawn over.
        self.finish();
    }
}

/// Tells what a worker has recorded as CUDA graphs in this step, and what it could not.
fn tell_of_graphs(worker: &WorkerStep) {
    let Some(report) = &worker.report.graphs else { return };
    if report.micro_batches > 0 {
        let (passes, streams) = (report.micro_batches, report.streams);
        note(&format!("{}: {passes} forward and backward passes run as CUDA graphs, {streams} at a time", worker.name));
    }
    for (partition, why) in &report.refused {
        note(&format!("{}: partition {partition} runs without CUDA graphs: {why}", worker.name));
    }
}

/// A bar on standard error for so many things.
pub fn bar(total: u64, things: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(&format!("{{bar:30}} {{pos}}/{{len}} {things}  {{msg}}"));
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

fn line(epoch: &EpochSummary, run: RunLength) -> String {
    let epochs = run.epochs;
    let accuracy = epoch.train_accuracy.map(|a| format!(", accuracy {}", units::percent(a))).unwrap_or_default();
    let test = epoch.test_loss.map(|loss| format!("; test loss {loss:.4}")).unwrap_or_default();
    let perplexity = epoch.test_loss.filter(|_| run.next_token).map(|loss| units::significant(loss.exp()));
    let perplexity = perplexity.map(|perplexity| format!(", perplexity {perplexity}")).unwrap_or_default();
    let tested = epoch.test_accuracy.map(|a| format!(", accuracy {}", units::percent(a))).unwrap_or_default();
    let scored = match two_class_scores(epoch) {
        Some((f1, matthews)) => format!(", F1 {f1:.3}, Matthews {matthews:.3}"),
        None => String::new(),
    };
    format!(
        "epoch {}/{epochs}: loss {:.4}{accuracy}{test}{perplexity}{tested}{scored}; {} samples/s",
        epoch.epoch + 1,
        epoch.train_loss,
        units::rate(epoch.samples_per_s)
    )
}
