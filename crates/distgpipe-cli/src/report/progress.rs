//! The progress of a run: a bar on a terminal, a line per epoch elsewhere. It goes to standard error, so that results can be piped.

use super::run::two_class_scores;
use super::{carried, note, print_above, units};
use distgpipe::comm::traffic::PartitionEdge;
use distgpipe::driver::pipeline::StepOutcome;
use distgpipe::train::{EpochSummary, Event};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::BTreeSet;
use std::io::IsTerminal;

/// Prints progress and warnings.
pub struct Progress {
    bar: Option<ProgressBar>,
    epochs: u64,
    /// The edges and kinds of refusal by a codec that a warning was printed for.
    warned: BTreeSet<(PartitionEdge, String)>,
}

impl Progress {
    /// For a run of `steps` steps in at most `epochs` epochs.
    pub fn new(steps: u64, epochs: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} steps, {eta} left  {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        print_above(bar.clone());
        Progress { bar, epochs, warned: BTreeSet::new() }
    }

    pub fn finish(&self) {
        print_above(None);
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Prints a line, above the bar if there is one.
    pub fn print(&self, line: &str) {
        note(line);
    }
}

impl Progress {
    /// Warns once for each edge and kind of reason that a codec refuses tensors, which are then sent raw.
    fn warn_of_refusals(&mut self, outcome: &StepOutcome) {
        for worker in &outcome.workers {
            for (edge, sent) in worker.report.links.iter().flat_map(|(_, traffic)| &traffic.sent) {
                for (kind, refusal) in &sent.refusals {
                    if !self.warned.insert((*edge, kind.clone())) {
                        continue;
                    }
                    self.print(&format!(
                        "warning: {} sends some {} {} → {} raw, because the codec refuses them: {refusal}",
                        worker.name,
                        carried(edge.pass),
                        edge.from,
                        edge.to
                    ));
                }
            }
        }
    }
}

impl Progress {
    /// Prints what there is to say about an event.
    pub fn on(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        match event {
            Event::StepDone(done) => {
                self.warn_of_refusals(done.outcome);
                if let Some(bar) = &self.bar {
                    let rate = units::rate(done.outcome.rows as f64 / done.seconds.max(1e-9));
                    bar.set_message(format!("loss {:.4}, {rate} samples/s", done.outcome.loss));
                    bar.set_position(done.step + 1);
                }
            }
            Event::Saved { step, path } if self.bar.is_none() => {
                self.print(&format!("saved step {step}: {}", path.display()))
            }
            Event::WeightsExploding { step, largest } => self.print(&format!(
                "warning: a weight has reached {largest:.1e} after step {}: the run diverges; lower --lr, or clip gradients with \
                 --clip-norm",
                step + 1
            )),
            Event::EpochDone(epoch) => self.print(&line(epoch, self.epochs)),
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
