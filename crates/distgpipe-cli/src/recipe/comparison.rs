//! Compares the figures of a run with the published ones, metric by metric. A metric that was not measured has the reason instead;
//! nothing is estimated. The memory of the model is counted, as in the published tables, and marked as such.

mod memory;
mod metric;

pub use metric::Metric;

use super::Recipe;
use crate::args::TrainFlags;
use crate::report::run::RunReport;
use crate::report::table::{Side, Table};
use crate::report::units;
use distgpipe::train::LinkSummary;
use distgpipe::Optim;
use distgpipe::PhaseTiming;
use memory::memory;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// One metric of the published row and of the run.
#[derive(Clone, Debug, Serialize)]
pub struct ComparisonRow {
    pub metric: Metric,
    pub published: Option<String>,
    /// The figure of the run, or why there is none.
    pub ours: String,
    /// The figure of the run as a number in the published unit; memory is in bytes.
    pub value: Option<f64>,
    /// The share of each worker, where workers are measured apart.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub workers: BTreeMap<String, f64>,
}

/// The figure of the run, or why there is none.
enum RunFigure {
    Measured { text: String, value: Option<f64>, workers: BTreeMap<String, f64> },
    Missing(String),
}

impl RunFigure {
    fn number(value: f64, text: String) -> Self {
        RunFigure::Measured { text, value: Some(value), workers: BTreeMap::new() }
    }
}

/// A run that has ended.
pub struct FinishedRun<'a> {
    /// The result of the run.
    pub report: &'a RunReport,
    /// The flags of the run, with all defaults.
    pub flags: &'a TrainFlags,
    /// The optimizer of the run.
    pub optim: Optim,
}

/// Compares every metric that was published or measured.
pub fn compare(recipe: &Recipe, ran: &FinishedRun<'_>) -> anyhow::Result<Vec<ComparisonRow>> {
    let report = serde_json::to_value(ran.report)?;
    let lines = Metric::ALL.iter().filter_map(|&metric| {
        let published = recipe.published.figure(metric);
        let (ours, value, workers) = match figure_of_run(metric, recipe, ran, &report) {
            RunFigure::Measured { text, value, workers } => (text, value, workers),
            // Neither published nor measured: no line.
            RunFigure::Missing(_) if published.is_none() => return None,
            RunFigure::Missing(why) => (format!("not measured{why}"), None, BTreeMap::new()),
        };
        Some(ComparisonRow { metric, published, ours, value, workers })
    });
    Ok(lines.collect())
}

/// The comparison as a table.
pub fn table(lines: &[ComparisonRow]) -> String {
    let mut table = Table::new(&[("", Side::Left), ("published", Side::Left), ("this run", Side::Left)]);
    for line in lines {
        let published = line.published.clone().unwrap_or_else(|| "–".to_owned());
        table.row(vec![line.metric.name().to_owned(), published, line.ours.clone()]);
    }
    table.render()
}

fn figure_of_run(metric: Metric, recipe: &Recipe, ran: &FinishedRun<'_>, report: &Value) -> RunFigure {
    let summary = &ran.report.summary;
    // A resumed run may have had no steps left.
    if summary.steps == 0 && !metric.is_known_without_steps() {
        return RunFigure::Missing(": there were no steps left to train".to_owned());
    }
    let tested = |name: &str| last_epoch(report, name);
    let share = |value: Option<f64>| match value {
        Some(share) => RunFigure::number(100.0 * share, format!("{:.2} %", 100.0 * share)),
        None => RunFigure::Missing(String::new()),
    };
    match metric {
        // Rows with an error are compared by it, not by the accuracy.
        Metric::Accuracy if recipe.published.error.is_some() => RunFigure::Missing(String::new()),
        Metric::Accuracy => share(tested("test_accuracy")),
        Metric::Error if recipe.published.error.is_none() => RunFigure::Missing(String::new()),
        Metric::Error => share(tested("test_accuracy").map(|right| 1.0 - right)),
        // Published for tasks of two classes only; the run's own report always has it.
        Metric::Matthews if recipe.published.matthews.is_none() => RunFigure::Missing(String::new()),
        Metric::Matthews => match tested("test_matthews") {
            Some(value) => RunFigure::number(100.0 * value, format!("{:.2}", 100.0 * value)),
            None => RunFigure::Missing(String::new()),
        },
        Metric::Throughput => match summary.samples_per_s_mean {
            Some(rate) => RunFigure::number(rate, format!("{rate:.2}/s")),
            None => RunFigure::Missing(format!(
                ": {} steps, of which the first {} are warm-up",
                summary.steps, summary.warm_up_steps
            )),
        },
        Metric::SpeedUp => RunFigure::Missing(match &recipe.published.speed_up_to {
            Some(other) => format!(": it needs a run of {other}"),
            None => ": this is the baseline of its table".to_owned(),
        }),
        Metric::Compression => compression(ran.report),
        Metric::Bandwidth => bandwidth(ran.report),
        // The parts of the memory are shown where they are published.
        Metric::ModelMemory if recipe.published.model_memory.is_none() => RunFigure::Missing(String::new()),
        Metric::ActivationMemory if recipe.published.activation_memory.is_none() => RunFigure::Missing(String::new()),
        Metric::Memory | Metric::ModelMemory | Metric::ActivationMemory => memory(metric, ran),
        Metric::Parameters => RunFigure::number(ran.report.parameters as f64, units::count(ran.report.parameters)),
        // The times of a batch are shown where they are published.
        Metric::BatchTime | Metric::TransferTime | Metric::BackwardTime
            if recipe.published.figure(metric).is_none() =>
        {
            RunFigure::Missing(String::new())
        }
        Metric::BatchTime | Metric::TransferTime | Metric::BackwardTime => time(metric, ran),
    }
}

/// The time per batch, or the part of it that the first worker spends on one thing.
fn time(metric: Metric, ran: &FinishedRun<'_>) -> RunFigure {
    let summary = &ran.report.summary;
    let (Some(rate), Some(first), Some(times)) =
        (summary.samples_per_s_mean, summary.workers.first(), summary.batch_times)
    else {
        return RunFigure::Missing(format!(
            ": {} steps, of which the first {} are warm-up",
            summary.steps, summary.warm_up_steps
        ));
    };
    let (seconds, what) = match metric {
        Metric::BatchTime => (ran.flags.batch.unwrap_or(0) as f64 / rate, ""),
        // As the published tables count them.
        Metric::TransferTime => (times.transfer_s, ", with the wait for the loader"),
        _ => (times.backward_s, ", with the exchange of gradients and the optimizer"),
    };
    // The time of a whole batch includes the execution of kernels, that of a phase only if the worker waits for them.
    let how = match first.reserved_bytes.is_some() && metric != Metric::BatchTime {
        true if ran.flags.phases == Some(PhaseTiming::Exact) => "; on a GPU, with a wait after each action",
        true => "; on a GPU, the time to launch it (--phases exact measures it)",
        false => "",
    };
    RunFigure::number(seconds, format!("{seconds:.3} s{what}{how}"))
}

/// A figure of the last epoch, by its key in the report's JSON; `None` if the task does not have it.
fn last_epoch(report: &Value, name: &str) -> Option<f64> {
    report["epochs"].as_array()?.last()?.get(name)?.as_f64()
}

fn compression(report: &RunReport) -> RunFigure {
    let sent = || {
        report.summary.links.iter().flat_map(|link| &link.edges).map(|cut| &cut.coded).filter(|cut| cut.wire_bytes > 0)
    };
    let (raw, wire) = sent().fold((0, 0), |(raw, wire), cut| (raw + cut.raw_bytes, wire + cut.wire_bytes));
    if raw == 0 {
        return RunFigure::Missing(": tensors moved between threads without encoding".to_owned());
    }
    let ratio = wire as f64 / raw as f64;
    RunFigure::number(ratio, format!("{ratio:.3}, headers included"))
}

/// The rate of every link that was measured. The figure is that of the link from the worker with the first partition.
fn bandwidth(report: &RunReport) -> RunFigure {
    let rates = report.summary.links.iter().filter_map(|link| Some((link, link.delivered_bytes_per_s?)));
    let rates: Vec<(&LinkSummary, f64)> = rates.collect();
    if rates.is_empty() {
        return RunFigure::Missing(
            ": tensors moved between threads, or in messages too small to measure a link".to_owned(),
        );
    }
    let first = report.summary.workers.first().map(|worker| &worker.name);
    let value = rates.iter().find(|(link, _)| Some(&link.from) == first).map(|(_, rate)| *rate);
    let texts = rates.iter().map(|(link, rate)| format!("{} → {} {}/s", link.from, link.to, units::bytes(*rate)));
    RunFigure::Measured { text: texts.collect::<Vec<_>>().join(", "), value, workers: BTreeMap::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::train::{RunEnd, RunSummary, WorkerSummary};
    use distgpipe::Precision;
    use serde_json::json;

    #[test]
    fn figures_come_from_the_last_epoch_and_may_be_absent() {
        let report = json!({ "epochs": [{ "test_matthews": 0.1 }, { "test_matthews": 0.6, "test_accuracy": null }] });
        assert_eq!(last_epoch(&report, "test_matthews"), Some(0.6));
        assert_eq!(last_epoch(&report, "test_accuracy"), None);
        assert_eq!(last_epoch(&json!({ "epochs": [] }), "test_matthews"), None);
    }

    /// The report of a run with two workers of 70 MB each, and a model of 5 MB.
    pub(super) fn report(reserved_bytes: Option<u64>, steps: u64) -> RunReport {
        let worker = |name: &str| WorkerSummary {
            name: name.to_owned(),
            phases_s: Default::default(),
            steps_s: 1.0,
            peak_bytes: 70_000_000,
            reserved_bytes,
        };
        let summary = RunSummary {
            epochs: Vec::new(),
            end: RunEnd::Complete,
            best: None,
            resumed_at: None,
            steps,
            warm_up_steps: 0,
            samples_per_s_median: None,
            samples_per_s_mean: None,
            seconds: 1.0,
            loading_s: 0.0,
            batch_times: None,
            workers: vec![worker("w0"), worker("w1")],
            links: Vec::new(),
        };
        RunReport {
            command: String::new(),
            model: String::new(),
            parameters: 1_250_000,
            balance: vec![1, 1],
            placement: vec!["w0".to_owned(), "w1".to_owned()],
            replicas: 1,
            micro_batches: 1,
            precision: Precision::Fp32,
            phases: PhaseTiming::Launch,
            summary,
            interrupted: None,
            failed: None,
        }
    }

    #[test]
    fn a_run_without_steps_has_a_reason_instead_of_zero() {
        let recipe = super::super::find("cifar10-sort8").unwrap();
        let flags = TrainFlags::default();
        let (none, one) = (report(None, 0), report(None, 1));
        let line = |report, metric: Metric| {
            let lines = compare(&recipe, &FinishedRun { report, flags: &flags, optim: Optim::sgd(0.0) }).unwrap();
            lines.into_iter().find(|line| line.metric == metric).unwrap().ours
        };
        assert_eq!(line(&none, Metric::Compression), "not measured: there were no steps left to train");
        assert_ne!(line(&one, Metric::Compression), "not measured: there were no steps left to train");
        assert_eq!(line(&none, Metric::Parameters), "1,250,000");
    }

    /// Messages of one link may be too small to measure. The rate of another one must not stand for it.
    #[test]
    fn the_bandwidth_is_that_of_the_first_workers_link() {
        let link = |from: &str, to: &str, rate| LinkSummary {
            from: from.to_owned(),
            to: to.to_owned(),
            messages: 1,
            payload_bytes: 1,
            wire_bytes: 1,
            bytes_per_step: 1.0,
            delivered_bytes_per_s: rate,
            receiver_waited: Default::default(),
            limited_by: None,
            edges: Vec::new(),
            shares: None,
        };
        let measured = |there, back| {
            let mut run = report(None, 1);
            run.summary.links = vec![link("w1", "w0", back), link("w0", "w1", there)];
            match bandwidth(&run) {
                RunFigure::Measured { text, value, .. } => (text, value),
                RunFigure::Missing(why) => (why, None),
            }
        };
        let both = "w1 → w0 3.0 GB/s, w0 → w1 2.0 GB/s".to_owned();
        assert_eq!(measured(Some(2e9), Some(3e9)), (both, Some(2e9)));
        assert_eq!(measured(None, Some(3e9)), ("w1 → w0 3.0 GB/s".to_owned(), None));
        assert!(measured(None, None).0.contains("too small to measure"));
    }

    #[test]
    fn the_table_has_the_figures_side_by_side() {
        let line = |metric, published: Option<&str>| ComparisonRow {
            metric,
            published: published.map(str::to_owned),
            ours: "1.00/s".to_owned(),
            value: Some(1.0),
            workers: BTreeMap::new(),
        };
        let text = table(&[line(Metric::Throughput, Some("35.502/s")), line(Metric::Parameters, None)]);
        let rows: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert_eq!(
            rows,
            ["            published  this run", "throughput  35.502/s   1.00/s", "parameters  –          1.00/s"]
        );
    }
}
