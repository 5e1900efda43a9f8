//! How far the run is: a bar on a terminal, a line an epoch elsewhere. On standard error, so that results can be piped.

use super::run::two_class_scores;
use super::{carried, note, units};
use distgpipe::pipeline::StepOutcome;
use distgpipe::trainer::{EpochSummary, Event, Observer};
use distgpipe::transport::Cut;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::BTreeSet;
use std::io::IsTerminal;

/// Shows how far the run is.
pub struct Progress {
    bar: Option<ProgressBar>,
    epochs: u64,
    /// Where tensors were refused by their codec, and the user has been told.
    told: BTreeSet<(Cut, String)>,
}

impl Progress {
    /// For a run of so many steps and at most so many epochs.
    pub fn new(steps: u64, epochs: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} steps, {eta} left  {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Progress { bar, epochs, told: BTreeSet::new() }
    }

    /// Ends the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Says something, above the bar if there is one.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => note(line),
        }
    }
}

impl Progress {
    /// Says once for each cut and kind of reason that its codec does not take all that it is given.
    fn tell_refusals(&mut self, outcome: &StepOutcome) {
        for worker in &outcome.workers {
            for (cut, sent) in worker.report.links.iter().flat_map(|(_, traffic)| &traffic.sent) {
                for (kind, refusal) in &sent.refusals {
                    if !self.told.insert((*cut, kind.clone())) {
                        continue;
                    }
                    self.say(&format!(
                        "warning: {} sends {} {} → {} raw where the codec refuses: {refusal}",
                        worker.name,
                        carried(cut.pass),
                        cut.from,
                        cut.to
                    ));
                }
            }
        }
    }
}

impl Observer for Progress {
    fn on(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        match event {
            Event::StepDone(done) => {
                self.tell_refusals(done.outcome);
                if let Some(bar) = &self.bar {
                    let rate = units::rate(done.outcome.rows as f64 / done.seconds.max(1e-9));
                    bar.set_message(format!("loss {:.4}, {rate} samples/s", done.outcome.loss));
                    bar.set_position(done.step + 1);
                }
            }
            Event::Saved { step, path } if self.bar.is_none() => {
                self.say(&format!("saved step {step}: {}", path.display()))
            }
            Event::EpochDone(epoch) => self.say(&line(epoch, self.epochs)),
            _ => {}
        }
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // An error is about to be printed: the bar must not stand in its way.
        self.finish();
    }
}

fn line(epoch: &EpochSummary, epochs: u64) -> String {
    let accuracy = epoch.train_accuracy.map(|a| format!(", accuracy {}", units::percent(a))).unwrap_or_default();
    let test = epoch.test_loss.map(|loss| format!("; test loss {loss:.4}")).unwrap_or_default();
    let tested = epoch.test_accuracy.map(|a| format!(", accuracy {}", units::percent(a))).unwrap_or_default();
    let scored = match two_class_scores(epoch) {
        Some((f1, matthews)) => format!(", F1 {f1:.3}, Matthews {matthews:.3}"),
        None => String::new(),
    };
    format!(
        "epoch {}/{epochs}: loss {:.4}{accuracy}{test}{tested}{scored}; {} samples/s",
        epoch.epoch + 1,
        epoch.train_loss,
        units::rate(epoch.samples_per_s)
    )
}
