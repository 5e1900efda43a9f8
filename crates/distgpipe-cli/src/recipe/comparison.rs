//! What a run here reached beside what the seed's row says, metric by metric. A metric that was not measured says why;
//! none is estimated. The model's part of the memory is counted, as it is there, and says so.

use super::Recipe;
use crate::args::TrainFlags;
use crate::report::run::RunReport;
use crate::report::table::{Side, Table};
use crate::report::units;
use distgpipe::engine::Device;
use distgpipe::trace::Phase;
use distgpipe::trainer::WorkerSummary;
use distgpipe::Optim;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Bytes of a number.
const NUMBER_BYTES: u64 = 4;
/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// The share of right rows.
    Accuracy,
    /// The share of wrong rows.
    Error,
    /// Matthews's correlation.
    Matthews,
    /// Rows a second.
    Throughput,
    /// Against another row.
    SpeedUp,
    /// Bytes sent over bytes of the tensors.
    Compression,
    /// Of each link.
    Bandwidth,
    /// Of all workers together.
    Memory,
    /// Parameters, gradients and what the optimizer keeps.
    ModelMemory,
    /// What is above that.
    ActivationMemory,
    /// Numbers that are learned.
    Parameters,
    /// Of a data-parallel batch.
    BatchTime,
    /// Of it, moving data.
    TransferTime,
    /// Of it, going backward.
    BackwardTime,
}

impl Metric {
    /// In the order of the tables.
    pub const ALL: [Metric; 14] = [
        Metric::Accuracy,
        Metric::Error,
        Metric::Matthews,
        Metric::Throughput,
        Metric::SpeedUp,
        Metric::Compression,
        Metric::Bandwidth,
        Metric::Memory,
        Metric::ModelMemory,
        Metric::ActivationMemory,
        Metric::Parameters,
        Metric::BatchTime,
        Metric::TransferTime,
        Metric::BackwardTime,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Accuracy => "top-1 accuracy",
            Metric::Error => "top-1 error",
            Metric::Matthews => "Matthews's correlation, in %",
            Metric::Throughput => "throughput",
            Metric::SpeedUp => "speed-up",
            Metric::Compression => "bytes sent to raw bytes",
            Metric::Bandwidth => "bandwidth of links",
            Metric::Memory => "peak memory, all workers",
            Metric::ModelMemory => "memory of the model",
            Metric::ActivationMemory => "memory of activations",
            Metric::Parameters => "parameters",
            Metric::BatchTime => "time of a batch",
            Metric::TransferTime => "of it moving data",
            Metric::BackwardTime => "of it backward",
        }
    }

    /// Whether a run has it that took no step: it is counted, or comes with the checkpoint.
    fn is_known_without_steps(self) -> bool {
        use Metric::{Accuracy, Error, Matthews, ModelMemory, Parameters};
        matches!(self, Accuracy | Error | Matthews | ModelMemory | Parameters)
    }

    /// Where the figure alone would not say what it is.
    pub fn short(self) -> &'static str {
        match self {
            Metric::Error => "error",
            Metric::Matthews => "Matthews",
            Metric::Compression => "ratio",
            Metric::Memory => "memory",
            Metric::ModelMemory => "model",
            Metric::ActivationMemory => "activations",
            Metric::Parameters => "parameters",
            Metric::BatchTime => "batch",
            Metric::TransferTime => "moving",
            Metric::BackwardTime => "backward",
            _ => "",
        }
    }
}

/// One metric of both.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// Which.
    pub metric: Metric,
    /// The seed's figure, as it is written.
    pub seed: Option<String>,
    /// Ours, or why there is none.
    pub ours: String,
    /// Ours as a number in the seed's unit; bytes are bytes.
    pub value: Option<f64>,
}

/// Ours, or why there is none.
enum Ours {
    Measured { text: String, value: Option<f64> },
    Not(String),
}

impl Ours {
    fn number(value: f64, text: String) -> Self {
        Ours::Measured { text, value: Some(value) }
    }
}

/// What the run brought, and how.
pub struct Ran<'a> {
    /// What came of it.
    pub report: &'a RunReport,
    /// With every default filled in.
    pub flags: &'a TrainFlags,
    /// How parameters were stepped.
    pub optim: Optim,
}

/// Every metric that the seed has or that was measured here.
pub fn compare(recipe: &Recipe, ran: &Ran<'_>) -> anyhow::Result<Vec<Line>> {
    let report = serde_json::to_value(ran.report)?;
    let lines = Metric::ALL.iter().filter_map(|&metric| {
        let seed = recipe.seed.figure(metric);
        let (ours, value) = match ours(metric, recipe, ran, &report) {
            Ours::Measured { text, value } => (text, value),
            // Neither has it: no line.
            Ours::Not(_) if seed.is_none() => return None,
            Ours::Not(why) => (format!("not measured{why}"), None),
        };
        Some(Line { metric, seed, ours, value })
    });
    Ok(lines.collect())
}

/// As a table.
pub fn table(lines: &[Line]) -> String {
    let mut table = Table::new(&[("", Side::Left), ("the seed's", Side::Left), ("here", Side::Left)]);
    for line in lines {
        let seed = line.seed.clone().unwrap_or_else(|| "–".to_owned());
        table.row(vec![line.metric.name().to_owned(), seed, line.ours.clone()]);
    }
    table.render()
}

fn ours(metric: Metric, recipe: &Recipe, ran: &Ran<'_>, report: &Value) -> Ours {
    let summary = &ran.report.summary;
    // A run that is resumed may have had all of its steps behind it.
    if summary.steps == 0 && !metric.is_known_without_steps() {
        return Ours::Not(": nothing was left to train".to_owned());
    }
    let tested = |name: &str| last_epoch(report, name);
    let share = |value: Option<f64>| match value {
        Some(share) => Ours::number(100.0 * share, format!("{:.2} %", 100.0 * share)),
        None => Ours::Not(String::new()),
    };
    match metric {
        // A row that has the error is compared by that alone.
        Metric::Accuracy if recipe.seed.error.is_some() => Ours::Not(String::new()),
        Metric::Accuracy => share(tested("test_accuracy")),
        Metric::Error if recipe.seed.error.is_none() => Ours::Not(String::new()),
        Metric::Error => share(tested("test_accuracy").map(|right| 1.0 - right)),
        // Of two classes, and not of ten; the run's own report has it whatever the row.
        Metric::Matthews if recipe.seed.matthews.is_none() => Ours::Not(String::new()),
        Metric::Matthews => match tested("test_matthews") {
            Some(value) => Ours::number(100.0 * value, format!("{:.2}", 100.0 * value)),
            None => Ours::Not(String::new()),
        },
        Metric::Throughput => match summary.samples_per_s_mean {
            Some(rate) => Ours::number(rate, format!("{rate:.2}/s")),
            None => {
                Ours::Not(format!(": {} steps, and the first {} are warm-up", summary.steps, summary.warm_up_steps))
            }
        },
        Metric::SpeedUp => Ours::Not(match &recipe.seed.speed_up_to {
            Some(other) => format!(": it needs a run of {other} too"),
            None => ": it is the 1× of its table".to_owned(),
        }),
        Metric::Compression => compression(ran.report),
        Metric::Bandwidth => bandwidth(ran.report),
        // Two parts that add up are of interest where the seed has them.
        Metric::ModelMemory if recipe.seed.model_memory.is_none() => Ours::Not(String::new()),
        Metric::ActivationMemory if recipe.seed.activation_memory.is_none() => Ours::Not(String::new()),
        Metric::Memory | Metric::ModelMemory | Metric::ActivationMemory => memory(metric, ran),
        Metric::Parameters => Ours::number(ran.report.parameters as f64, units::count(ran.report.parameters)),
        // Parts of a batch are of interest where the seed has them.
        Metric::BatchTime | Metric::TransferTime | Metric::BackwardTime if recipe.seed.figure(metric).is_none() => {
            Ours::Not(String::new())
        }
        Metric::BatchTime | Metric::TransferTime | Metric::BackwardTime => time(metric, ran),
    }
}

/// Seconds of a batch, or of a part of it at the first worker.
fn time(metric: Metric, ran: &Ran<'_>) -> Ours {
    let summary = &ran.report.summary;
    let steps = summary.steps.saturating_sub(summary.warm_up_steps);
    let (Some(rate), Some(first), true) = (summary.samples_per_s_mean, summary.workers.first(), steps > 0) else {
        return Ours::Not(format!(": {} steps, and the first {} are warm-up", summary.steps, summary.warm_up_steps));
    };
    let spent = |phases: &[Phase]| {
        let seconds = phases.iter().filter_map(|phase| first.phases_s.get(phase.name()));
        seconds.sum::<f64>() / steps as f64
    };
    let (seconds, what) = match metric {
        Metric::BatchTime => (ran.flags.batch.unwrap_or(0) as f64 / rate, ""),
        Metric::TransferTime => {
            let phases = [Phase::Loading, Phase::Send, Phase::ReceiveWait];
            (spent(&phases), ", input and gradients, waiting for the others included")
        }
        _ => (spent(&[Phase::Backward]), ""),
    };
    // What is measured there is the launching, except for a whole batch, whose end is waited for.
    let launched = metric != Metric::BatchTime && first.reserved_bytes.is_some();
    let how = if launched { "; on a GPU, of launching it" } else { "" };
    Ours::number(seconds, format!("{seconds:.3} s{what}{how}"))
}

/// A figure of the last epoch, by its name in the report's JSON: one that a task does not have is absent there.
fn last_epoch(report: &Value, name: &str) -> Option<f64> {
    report["epochs"].as_array()?.last()?.get(name)?.as_f64()
}

fn compression(report: &RunReport) -> Ours {
    let sent = || report.summary.links.iter().flat_map(|link| &link.cuts).filter(|cut| cut.wire_bytes > 0);
    let (raw, wire) = sent().fold((0, 0), |(raw, wire), cut| (raw + cut.raw_bytes, wire + cut.wire_bytes));
    if raw == 0 {
        return Ours::Not(": tensors moved between threads as they were".to_owned());
    }
    let ratio = wire as f64 / raw as f64;
    Ours::number(ratio, format!("{ratio:.3}, headers included"))
}

fn bandwidth(report: &RunReport) -> Ours {
    let links = report
        .summary
        .links
        .iter()
        .filter_map(|link| Some(format!("{} → {} {}/s", link.from, link.to, units::bytes(link.bytes_per_s?))));
    let links: Vec<String> = links.collect();
    if links.is_empty() {
        return Ours::Not(": tensors moved between threads".to_owned());
    }
    Ours::Measured { text: links.join(", "), value: None }
}

fn memory(metric: Metric, ran: &Ran<'_>) -> Ours {
    let workers = &ran.report.summary.workers;
    let on_gpu = workers.iter().any(|worker| worker.reserved_bytes.is_some());
    // A GPU's allocator does not tell the threads of a process apart: each worker has the figure of all that are on it.
    let threads = ran.flags.workers.as_deref().unwrap_or("threads") == "threads";
    let devices = ran.flags.device.clone().unwrap_or_default();
    let shared = |worker: usize| match devices.of(worker).found() {
        Device::Cuda(gpu) if threads => Some(gpu),
        _ => None,
    };
    let gpus: Vec<Option<usize>> = (0..workers.len()).map(shared).collect();
    let peak = together(workers, &gpus, peak_of);
    let held = together(workers, &gpus, |worker| worker.peak_bytes);
    // Counted as the benchmark counts it: whole copies of the parameters, and the rest is activations.
    let copies = copies(ran.optim);
    let model = ran.report.parameters * NUMBER_BYTES * copies * ran.report.replicas as u64;
    let less = if metric == Metric::ActivationMemory { model } else { 0 };
    let bytes = match metric {
        Metric::ModelMemory => model,
        _ => peak.saturating_sub(less),
    };
    let mut text = amount(bytes);
    if metric == Metric::ModelMemory {
        text = format!("{text}, counted as {copies} copies of the parameters");
    } else if on_gpu {
        text = format!("{text} taken from the GPU, {} of it held by tensors", amount(held.saturating_sub(less)));
    }
    // Some rows have the memory of each GPU.
    let alone = gpus.iter().enumerate().all(|(i, gpu)| gpu.is_none() || !gpus[..i].contains(gpu));
    if metric == Metric::Memory && alone && workers.len() > 1 {
        let each = workers.iter().map(|worker| format!("{} {}", worker.name, amount(peak_of(worker))));
        text = format!("{text}: {}", each.collect::<Vec<_>>().join(", "));
    }
    Ours::number(bytes as f64, text)
}

/// The bytes of all workers, of which those that share a GPU all have its figure.
fn together(workers: &[WorkerSummary], gpus: &[Option<usize>], bytes: fn(&WorkerSummary) -> u64) -> u64 {
    let (mut alone, mut shared) = (0, BTreeMap::<usize, u64>::new());
    for (worker, gpu) in workers.iter().zip(gpus) {
        match gpu {
            None => alone += bytes(worker),
            Some(gpu) => {
                let most = shared.entry(*gpu).or_default();
                *most = bytes(worker).max(*most);
            }
        }
    }
    alone + shared.values().sum::<u64>()
}

/// What the seeds measure: what a GPU's allocator took from it; on a CPU, what tensors held.
fn peak_of(worker: &WorkerSummary) -> u64 {
    worker.reserved_bytes.unwrap_or(worker.peak_bytes)
}

/// Large amounts in the unit of the seeds.
fn amount(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= GIB => format!("{:.2} GiB", bytes / GIB),
        bytes => units::bytes(bytes),
    }
}

/// Parameters, their gradients, and the tensors of that size which the optimizer keeps.
fn copies(optim: Optim) -> u64 {
    2 + optim.remembers() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::trainer::RunSummary;
    use distgpipe::Precision;
    use serde_json::json;

    #[test]
    fn the_last_epoch_counts_and_an_absent_figure_is_none() {
        let report = json!({ "epochs": [{ "test_matthews": 0.1 }, { "test_matthews": 0.6, "test_accuracy": null }] });
        assert_eq!(last_epoch(&report, "test_matthews"), Some(0.6));
        assert_eq!(last_epoch(&report, "test_accuracy"), None);
        assert_eq!(last_epoch(&json!({ "epochs": [] }), "test_matthews"), None);
    }

    /// AmoebaNet-D's table counts three copies of the parameters, U-Net's two.
    #[test]
    fn copies_of_the_parameters_are_those_that_the_optimizer_keeps() {
        let optims = [Optim::sgd(0.0), Optim::sgd(0.9), Optim::rms_prop(0.0), Optim::adamw()];
        assert_eq!(optims.map(copies), [2, 3, 3, 4]);
    }

    /// A run of two workers that held 70 MB each, with a model of 5 MB and its gradients.
    fn report(reserved_bytes: Option<u64>, steps: u64) -> RunReport {
        let worker = |name: &str| WorkerSummary {
            name: name.to_owned(),
            phases_s: Default::default(),
            steps_s: 1.0,
            peak_bytes: 70_000_000,
            reserved_bytes,
        };
        let summary = RunSummary {
            epochs: Vec::new(),
            resumed_at: None,
            steps,
            warm_up_steps: 0,
            samples_per_s_median: None,
            samples_per_s_mean: None,
            seconds: 1.0,
            loading_s: 0.0,
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
            summary,
        }
    }

    /// The published figures are what allocators had taken, so ours are too, where there is such a thing; threads share
    /// an allocator.
    #[test]
    fn memory_is_what_a_gpu_s_allocator_took_and_once_for_threads_that_share_it() {
        let said = |metric, reserved, workers: &str| {
            let (workers, devices) = match workers {
                "two GPUs" => ("threads", "cuda:0,cuda:1"),
                "one GPU twice" => ("threads", "cuda:0,cuda:0"),
                "CPU" => ("threads", "cpu"),
                workers => (workers, "cuda:0"),
            };
            let device = Some(devices.parse().unwrap());
            let flags = TrainFlags { workers: Some(workers.to_owned()), device, ..TrainFlags::default() };
            let report = report(reserved, 1);
            let Ours::Measured { text, value } =
                memory(metric, &Ran { report: &report, flags: &flags, optim: Optim::sgd(0.0) })
            else {
                panic!("memory is always measured")
            };
            (text, value)
        };
        let whole = |reserved, workers| said(Metric::Memory, reserved, workers);
        let taken = "90.0 MB taken from the GPU, 70.0 MB of it held by tensors";
        assert_eq!(whole(Some(90_000_000), "threads"), (taken.to_owned(), Some(90e6)));
        let each = "180.0 MB taken from the GPU, 140.0 MB of it held by tensors: w0 90.0 MB, w1 90.0 MB";
        assert_eq!(whole(Some(90_000_000), "processes"), (each.to_owned(), Some(180e6)));
        assert_eq!(whole(Some(90_000_000), "two GPUs"), (each.to_owned(), Some(180e6)));
        assert_eq!(whole(Some(90_000_000), "one GPU twice"), (taken.to_owned(), Some(90e6)));
        assert_eq!(whole(None, "CPU"), ("140.0 MB: w0 70.0 MB, w1 70.0 MB".to_owned(), Some(140e6)));
        let above = "80.0 MB taken from the GPU, 60.0 MB of it held by tensors";
        let activations = said(Metric::ActivationMemory, Some(90_000_000), "threads");
        assert_eq!(activations, (above.to_owned(), Some(80e6)));
    }

    #[test]
    fn a_run_without_steps_says_so_and_not_zero() {
        let recipe = super::super::find("cifar10-sort8").unwrap();
        let flags = TrainFlags::default();
        let (none, one) = (report(None, 0), report(None, 1));
        let line = |report, metric: Metric| {
            let lines = compare(&recipe, &Ran { report, flags: &flags, optim: Optim::sgd(0.0) }).unwrap();
            lines.into_iter().find(|line| line.metric == metric).unwrap().ours
        };
        assert_eq!(line(&none, Metric::Compression), "not measured: nothing was left to train");
        assert_ne!(line(&one, Metric::Compression), "not measured: nothing was left to train");
        assert_eq!(line(&none, Metric::Parameters), "1,250,000");
    }

    #[test]
    fn the_table_has_the_figures_side_by_side() {
        let line = |metric, seed: Option<&str>| Line {
            metric,
            seed: seed.map(str::to_owned),
            ours: "1.00/s".to_owned(),
            value: Some(1.0),
        };
        let text = table(&[line(Metric::Throughput, Some("35.502/s")), line(Metric::Parameters, None)]);
        let rows: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert_eq!(
            rows,
            ["            the seed's  here", "throughput  35.502/s    1.00/s", "parameters  –           1.00/s"]
        );
    }
}
