//! The result of a run: tables of epochs, workers and links.

use super::table::{Side, Table};
use super::{carried, units};
use crate::signals::Interrupted;
use distgpipe::runtime::trace::Phase;
use distgpipe::train::{CodecSummary, EpochSummary, LinkSummary, RunSummary};
use distgpipe::{PhaseTiming, Precision};
use distgpipe_core::schedule::{simulate, Costs, Plan};
use serde::{Serialize, Serializer};
use std::io::IsTerminal;

/// What `--json` prints, and the content of summary.json.
#[derive(Serialize)]
pub struct RunReport {
    /// A command that repeats the run.
    pub command: String,
    pub model: String,
    /// Number of trainable parameters.
    pub parameters: u64,
    pub balance: Vec<usize>,
    /// The worker of each partition.
    pub placement: Vec<String>,
    /// Data-parallel copies of the pipeline.
    pub replicas: usize,
    /// Micro-batches per batch and replica.
    pub micro_batches: usize,
    /// Precision of the computation.
    pub precision: Precision,
    /// What the times of phases cover on a GPU.
    pub phases: PhaseTiming,
    #[serde(flatten, serialize_with = "with_epochs_from_1")]
    pub summary: RunSummary,
    /// The signal that stopped the run, and how to go on.
    #[serde(skip)]
    pub interrupted: Option<Interrupted>,
    /// Why the log or the model could not be written after the last step.
    #[serde(skip)]
    pub failed: Option<anyhow::Error>,
}

/// Epochs count from 1 in everything that the command prints and writes.
fn with_epochs_from_1<S: Serializer>(summary: &RunSummary, serializer: S) -> Result<S::Ok, S::Error> {
    let mut summary = summary.clone();
    summary.epochs.iter_mut().for_each(|epoch| epoch.epoch += 1);
    summary.best.iter_mut().for_each(|best| best.epoch += 1);
    summary.serialize(serializer)
}

impl RunReport {
    /// How the run ended, once its report is printed.
    pub fn into_result(self) -> anyhow::Result<()> {
        match (self.failed, self.interrupted) {
            (Some(error), _) => Err(error),
            (None, Some(interrupted)) => Err(interrupted.into()),
            (None, None) => Ok(()),
        }
    }

    /// The tables of workers and links, and the speed; nothing if the run made no step.
    pub fn costs(&self) -> String {
        if self.summary.steps == 0 {
            return String::new();
        }
        let mut text = self.workers();
        if !self.summary.links.is_empty() {
            text.push('\n');
            text.push_str(&self.links());
        }
        if self.summary.links.iter().any(|link| !link.edges.is_empty() || link.shares.is_some()) {
            text.push('\n');
            text.push_str(&self.cuts());
        }
        text.push('\n');
        text.push_str(&self.speed());
        text.push_str(&self.batch_times());
        text
    }

    /// The table of losses and scores by epoch, for a standard output that does not get the progress lines, which show them
    /// already: it leads to a file, while standard error is a terminal. Otherwise empty.
    pub fn epochs_if_unseen(&self) -> String {
        let unseen = !std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        if unseen {
            self.epochs() + "\n"
        } else {
            String::new()
        }
    }

    /// The table of losses and scores by epoch.
    fn epochs(&self) -> String {
        let scored = self.summary.epochs.iter().any(|epoch| two_class_scores(epoch).is_some());
        let mut columns = vec!["epoch", "train loss", "accuracy", "test loss", "accuracy"];
        if scored {
            columns.extend(["F1", "Matthews"]);
        }
        columns.push("samples/s");
        let mut table = Table::new(&columns.into_iter().map(|name| (name, Side::Right)).collect::<Vec<_>>());
        let loss = |loss: Option<f64>| loss.map_or("–".to_owned(), |loss| format!("{loss:.4}"));
        let share = |share: Option<f64>| share.map_or("–".to_owned(), units::percent);
        for epoch in &self.summary.epochs {
            let mut row = vec![
                (epoch.epoch + 1).to_string(),
                loss(Some(epoch.train_loss)),
                share(epoch.train_accuracy),
                loss(epoch.test_loss),
                share(epoch.test_accuracy),
            ];
            if scored {
                let scores = two_class_scores(epoch).map(<[f64; 2]>::from);
                row.extend((0..2).map(|i| scores.map_or("–".to_owned(), |scores| format!("{:.3}", scores[i]))));
            }
            row.push(units::rate(epoch.samples_per_s));
            table.row(row);
        }
        table.render()
    }

    /// The table of how the workers spent their time, and of their memory.
    pub fn workers(&self) -> String {
        let mut columns = vec![("worker", Side::Left), ("partitions", Side::Left)];
        // Only replicas wait for each other's gradients.
        let phases: Vec<Phase> =
            Phase::ALL.into_iter().filter(|phase| self.replicas > 1 || *phase != Phase::GradientWait).collect();
        columns.extend(phases.iter().map(|phase| (phase.name(), Side::Right)));
        columns.extend([("other", Side::Right), ("peak memory", Side::Right)]);
        let mut table = Table::new(&columns);
        for worker in &self.summary.workers {
            let role = match self.replicas {
                1 => &worker.name[..],
                _ => worker.name.rsplit_once('/').map_or("", |(role, _)| role),
            };
            let assigned =
                self.placement.iter().enumerate().filter(|(_, name)| *name == role).map(|(i, _)| i.to_string());
            let mut cells = vec![worker.name.clone(), assigned.collect::<Vec<_>>().join(",")];
            // No step is measured in a run that ends within its warm-up.
            let share = |seconds: f64| match worker.steps_s > 0.0 {
                true => units::percent(seconds / worker.steps_s),
                false => "–".to_owned(),
            };
            let times: Vec<f64> =
                phases.iter().map(|phase| worker.phases_s.get(phase.name()).copied().unwrap_or(0.0)).collect();
            cells.extend(times.iter().map(|&seconds| share(seconds)));
            cells.push(share((worker.steps_s - times.iter().sum::<f64>()).max(0.0)));
            cells.push(units::bytes(worker.peak_bytes as f64));
            table.row(cells);
        }
        table.render()
    }

    /// The table of traffic by link.
    pub fn links(&self) -> String {
        let mut table = Table::new(&[
            ("link", Side::Left),
            ("messages", Side::Right),
            ("tensors", Side::Right),
            ("on the wire", Side::Right),
            ("per step", Side::Right),
            ("delivered at", Side::Right),
            ("receiver waits for", Side::Left),
        ]);
        // The ring of an all-reduce uses one direction of each link.
        for link in self.summary.links.iter().filter(|link| link.messages + link.wire_bytes > 0) {
            let wire = link.wire_bytes > 0;
            table.row(vec![
                format!("{} → {}", link.from, link.to),
                units::count(link.messages),
                units::bytes(link.payload_bytes as f64),
                if wire { units::bytes(link.wire_bytes as f64) } else { "–".to_owned() },
                units::bytes(link.bytes_per_step),
                match link.delivered_bytes_per_s {
                    Some(rate) => format!("{}/s", units::bytes(rate)),
                    None if wire => "not measured".to_owned(),
                    None => "–".to_owned(),
                },
                self.waits(link),
            ]);
        }
        table.render()
    }

    /// What the receiver of a link waits for, in percent of its steps: `link 62.1 %, worker 10.0 %`.
    fn waits(&self, link: &LinkSummary) -> String {
        let receiver = self.summary.workers.iter().find(|worker| worker.name == link.to);
        let steps_s = receiver.map_or(0.0, |worker| worker.steps_s).max(1e-12);
        let waited = link.receiver_waited;
        let mut parts = [("link", waited.link_s), ("encoding", waited.encoding_s), ("worker", waited.worker_s)];
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        let parts = parts.iter().map(|(what, seconds)| (what, seconds / steps_s)).filter(|(_, share)| *share >= 0.001);
        let parts: Vec<String> = parts.map(|(what, share)| format!("{what} {}", units::percent(share))).collect();
        if parts.is_empty() {
            "–".to_owned()
        } else {
            parts.join(", ")
        }
    }

    /// The table of codecs, by partition edge and for the gradients of replicas.
    pub fn cuts(&self) -> String {
        let mut table = Table::new(&[
            ("link", Side::Left),
            ("carries", Side::Left),
            ("codec", Side::Left),
            ("raw", Side::Right),
            ("on the wire", Side::Right),
            ("ratio", Side::Right),
            ("encode", Side::Right),
            ("decode", Side::Right),
            ("sent raw", Side::Right),
        ]);
        let milliseconds = |ms: f64| format!("{ms:.1} ms");
        let mut row = |link: &LinkSummary, carries: String, coded: &CodecSummary| {
            table.row(vec![
                format!("{} → {}", link.from, link.to),
                carries,
                coded.codec.clone(),
                units::bytes(coded.raw_bytes as f64),
                if coded.wire_bytes > 0 { units::bytes(coded.wire_bytes as f64) } else { "–".to_owned() },
                coded.ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}")),
                milliseconds(coded.encode_ms),
                milliseconds(coded.decode_ms),
                format!("{} of {}", units::count(coded.sent_raw), units::count(coded.tensors)),
            ]);
        };
        for link in &self.summary.links {
            for cut in &link.edges {
                row(link, format!("{} {} → {}", carried(cut.edge.pass), cut.edge.from, cut.edge.to), &cut.coded);
            }
            if let Some(shares) = &link.shares {
                row(link, "gradients of replicas".to_owned(), shares);
            }
        }
        table.render()
    }

    /// A summary of a few lines.
    pub fn short(&self) -> String {
        let mut table = Table::new(&[("", Side::Left), ("", Side::Left)]);
        let mut row = |name: String, value: String| table.row(vec![name, value]);
        if let Some(accuracy) = self.summary.test_accuracy() {
            row("test accuracy".to_owned(), units::percent(accuracy));
        }
        if let Some(rate) = self.summary.samples_per_s_median {
            row("samples/s".to_owned(), units::rate(rate));
        }
        for link in &self.summary.links {
            let carried = units::bytes(if link.wire_bytes > 0 { link.wire_bytes } else { link.payload_bytes } as f64);
            row(
                format!("{} → {}", link.from, link.to),
                format!("{carried} in {} messages", units::count(link.messages)),
            );
        }
        row("time".to_owned(), units::seconds(self.summary.seconds));
        table.render().trim_start().to_owned()
    }

    /// A line with the first worker's time per batch, as published tables count it; empty if no step was measured.
    fn batch_times(&self) -> String {
        let (Some(times), Some(first)) = (self.summary.batch_times, self.summary.workers.first()) else {
            return String::new();
        };
        let launches = match first.reserved_bytes.is_some() && self.phases == PhaseTiming::Launch {
            true => "; on a GPU these are launch times (--phases exact shows execution times)",
            false => "",
        };
        format!(
            "per batch, {} spends {} on data transfer (including the wait for the loader), {} on forward and {} on backward \
             passes (including recomputation, exchange of gradients and update){launches}\n",
            first.name,
            units::seconds(times.transfer_s),
            units::seconds(times.forward_s),
            units::seconds(times.backward_s),
        )
    }

    /// A line with the throughput and the time of the run.
    pub fn speed(&self) -> String {
        let summary = &self.summary;
        match (summary.samples_per_s_median, summary.samples_per_s_mean) {
            (Some(median), Some(mean)) => format!(
                "{} samples/s{} ({} on average over {}, after {}); {} in total, {} of it waiting for data\n",
                units::rate(median),
                unless_fp32(self.precision),
                units::rate(mean),
                units::plural(summary.steps - summary.warm_up_steps, "step"),
                units::plural(summary.warm_up_steps, "warm-up step"),
                units::seconds(summary.seconds),
                units::seconds(summary.loading_s),
            ),
            _ => format!("{} in total; too few steps to measure the throughput\n", units::seconds(summary.seconds)),
        }
    }
}

/// F1 and Matthews correlation of a test with two classes. With more classes, tables have the accuracy only; the JSON has all
/// scores.
pub fn two_class_scores(epoch: &EpochSummary) -> Option<(f64, f64)> {
    epoch.test_f1.zip(epoch.test_matthews).filter(|_| epoch.test_classes == Some(2))
}

/// ` in bf16`, or nothing for fp32.
pub fn unless_fp32(precision: Precision) -> String {
    match precision {
        Precision::Fp32 => String::new(),
        other => format!(" in {other}"),
    }
}

/// Draws a plan whose forward passes all take equally long and whose backward passes take twice as long.
pub fn picture(plan: &Plan, width: usize) -> anyhow::Result<String> {
    let partitions = plan.partitions();
    let simulation = simulate(plan, &Costs::new(vec![1.0; partitions], vec![2.0; partitions]))?;
    Ok(simulation.to_text(width))
}
