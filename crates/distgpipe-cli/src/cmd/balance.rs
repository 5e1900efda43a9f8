//! `distgpipe balance`: finds the cut with the fastest step, or the lowest memory use of the worker that uses most.

use super::models::SampleArgs;
use crate::args::OptimizerName;
use crate::balance_options::{no_cut, BalanceFlags, BalanceOptions};
use crate::config::model;
use crate::exit::usage;
use crate::files::read_text;
use crate::report;
use crate::report::cut::CutReport;
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::driver::auto_balance::{problem, RunShape};
use distgpipe::driver::profile::LayerProfile;
use distgpipe::{BuildError, Model, Optim, Precision};
use distgpipe_core::balance::Objective;
use distgpipe_core::codec::CodecSpec;
use distgpipe_core::partition::Balance;
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{Recompute, Schedule};
use distgpipe_core::wire::DType;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The largest file of costs that is read.
const COSTS_BYTES_MAX: u64 = 64 << 20;

/// Flags of `distgpipe balance`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe balance mobilenet_v2 --partitions 2
  distgpipe balance mobilenet_v2 --partitions 3 --set image=96 --rows 16 --chunks 8
  distgpipe models mobilenet_v2 --profile --json > costs.json
  distgpipe balance mobilenet_v2 --partitions 4 --costs costs.json
  distgpipe balance mobilenet_v2 --partitions 3 --place client,server,client --link-rate 100mbit --link-latency 5
  distgpipe balance resnet --partitions 2 --balance-by memory

A file of costs is the output of `distgpipe models NAME --profile --json`, or a JSON list with one number per layer.
The step is simulated with each partition on its own worker, or as --place says. Times, bytes and activations are those
of a micro-batch of --rows rows. Memory counts parameters, gradients, optimizer state and kept activations, but not the
temporary tensors of a backward pass. The time of a step does not include encoding and decoding.")]
pub struct BalanceArgs {
    /// Model to cut; `distgpipe models` lists them
    model: String,
    /// Number of partitions to cut the model into
    #[arg(long, value_name = "N")]
    partitions: usize,
    /// Model setting, such as classes=1000; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Read the costs of the layers from this file instead of measuring them
    #[arg(long, value_name = "FILE.json", help_heading = "Measurement")]
    costs: Option<PathBuf>,
    #[command(flatten)]
    sample: SampleArgs,
    /// Order of forward and backward passes: gpipe, 1f1b or interleaved
    #[arg(long, value_name = "NAME", default_value = "1f1b", help_heading = "Pipeline")]
    schedule: Schedule,
    /// Micro-batches per batch; each has --rows rows
    #[arg(long, alias = "micro-batches", value_name = "N", default_value_t = 4, help_heading = "Pipeline")]
    chunks: usize,
    /// Micro-batches that are recomputed in the backward pass: never, except-last or always
    #[arg(long, value_name = "WHICH", default_value = "never", help_heading = "Pipeline")]
    recompute: Recompute,
    /// Worker of each partition, such as client,server,client [default: one worker per partition]
    #[arg(long, value_name = "WORKER,…", help_heading = "Pipeline")]
    place: Option<String>,
    /// What to minimize: time (of a step) or memory (of the worker that uses most)
    #[arg(long, value_name = "WHAT", default_value = "time", help_heading = "Search")]
    balance_by: Objective,
    /// Memory limit of a worker, such as 2GiB [default: no limit]
    #[arg(long, value_name = "SIZE", help_heading = "Search")]
    memory_limit: Option<String>,
    /// Bandwidth between workers, such as 100mbit, 1gbit or 12.5MB/s [default: links cost nothing]
    #[arg(long, value_name = "RATE", help_heading = "Search")]
    link_rate: Option<String>,
    /// Latency between workers, in milliseconds; needs --link-rate [default: 0]
    #[arg(long, value_name = "MS", help_heading = "Search")]
    link_latency: Option<f64>,
    /// Codec for activations between workers; `distgpipe codecs` lists codecs
    #[arg(long, value_name = "CODEC", default_value = "raw", help_heading = "Pipeline")]
    codec: CodecSpec,
    /// Codec for gradients between workers [default: same as --codec]
    #[arg(long, value_name = "CODEC", help_heading = "Pipeline")]
    codec_backward: Option<CodecSpec>,
    /// Optimizer, whose state counts as memory
    #[arg(long, value_name = "NAME", default_value = "sgd", help_heading = "Pipeline")]
    optimizer: OptimizerName,
    /// Print the result as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// The cost of a layer in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum GivenCost {
    Total(f64),
    Measured {
        forward_s: f64,
        backward_s: f64,
        held_bytes: Option<u64>,
        #[serde(default)]
        output_types: Vec<String>,
        #[serde(default)]
        stash_types: BTreeMap<String, String>,
    },
}

/// A file of costs.
#[derive(Deserialize)]
#[serde(untagged)]
enum GivenCosts {
    List(Vec<GivenCost>),
    Models {
        settings: Option<serde_json::Map<String, Value>>,
        rows: Option<usize>,
        precision: Option<Precision>,
        layers: Vec<GivenCost>,
    },
}

/// The costs of all layers, measured or read from a file.
struct LayerCosts {
    layers: Vec<LayerProfile>,
    /// Rows of the micro-batch that was measured.
    rows: usize,
    precision: Precision,
    memory_known: bool,
}

/// Measures the layers, searches the best cut, and prints it.
pub fn run(args: &BalanceArgs) -> anyhow::Result<()> {
    let model = model("MODEL", &args.model, &args.set)?;
    let balance_options = BalanceFlags {
        by: Some(args.balance_by),
        memory_limit: args.memory_limit.as_deref(),
        link_rate: args.link_rate.as_deref(),
        link_latency: args.link_latency,
    };
    let balance_options = balance_options.read()?;
    Balance::even(model.layers.len(), args.partitions).map_err(|e| usage(format!("--partitions: {e}")))?;
    let placement = placement(args)?;
    let costs = layer_costs(args, &model, &placement, &balance_options)?;
    let codecs = CodecPolicy {
        forward: args.codec.clone(),
        backward: args.codec_backward.clone().unwrap_or_else(|| args.codec.clone()),
        ..CodecPolicy::default()
    };
    let run = RunShape {
        placement,
        schedule: args.schedule,
        micro_batches: args.chunks,
        recompute: args.recompute,
        codecs: &codecs,
        optim: optim(args.optimizer),
        frozen_layers: 0,
    };
    let mut problem = problem(&model, &costs.layers, costs.rows, run).map_err(|e| match e {
        BuildError::Schedule(e) => usage(format!("--chunks or --schedule: {e}")),
        BuildError::CutTensor(e) => usage(format!("--rows or --costs: {e}")),
        other => other.into(),
    })?;
    problem.objective = balance_options.by;
    problem.link = balance_options.link;
    problem.memory_limit_bytes = balance_options.memory_limit_bytes;
    let found = problem.search().map_err(|e| no_cut("--costs, --chunks or --schedule", e))?;
    let report = CutReport {
        found: &found,
        model: &model,
        placement: &problem.placement,
        micro_batches: args.chunks,
        link: balance_options.link,
        memory_limit_bytes: balance_options.memory_limit_bytes,
        memory_known: costs.memory_known,
    };
    if args.json {
        let mut value = report.json();
        value["model"] = args.model.clone().into();
        value["rows"] = costs.rows.into();
        value["precision"] = serde_json::to_value(costs.precision)?;
        return report::print_json(&value);
    }
    let mut text = report.text();
    if args.costs.is_none() {
        let sample = args.sample.describe(problem.placement.workers())?;
        text.push_str(&format!("layers measured with {sample}\n"));
    }
    report::print(&format!("{text}\nto use this cut: --balance {}\n", found.balance))
}

/// The costs of the layers, from `--costs` or measured. Memory figures are required where the search uses them.
fn layer_costs(
    args: &BalanceArgs,
    model: &Model,
    placement: &Placement,
    balance_options: &BalanceOptions,
) -> anyhow::Result<LayerCosts> {
    let costs = match &args.costs {
        Some(path) => read_costs(path, model, &args.sample)?,
        None => LayerCosts {
            layers: args.sample.measure(model, placement.workers())?,
            rows: args.sample.rows,
            precision: args.sample.precision,
            memory_known: true,
        },
    };
    if !costs.memory_known && (balance_options.by == Objective::Memory || balance_options.memory_limit_bytes.is_some())
    {
        return Err(usage(
            "--costs: the file has no memory figures, which --balance-by memory and --memory-limit need: use the output of \
             `distgpipe models NAME --profile --json`, or measure",
        ));
    }
    Ok(costs)
}

/// The optimizer with its default settings, which determine the size of its state.
fn optim(name: OptimizerName) -> Optim {
    match name {
        OptimizerName::Sgd => Optim::default(),
        OptimizerName::Adam => Optim::adam(),
        OptimizerName::Adamw => Optim::adamw(),
        OptimizerName::Rmsprop => Optim::rms_prop(0.0),
    }
}

fn placement(args: &BalanceArgs) -> anyhow::Result<Placement> {
    let placement = match &args.place {
        Some(place) => place.parse::<Placement>().map_err(|e| usage(format!("--place: {e}")))?,
        None => Placement::one_worker_each(args.partitions),
    };
    if placement.partitions() != args.partitions {
        let (named, wanted) = (placement.partitions(), args.partitions);
        return Err(usage(format!(
            "--place names workers for {named} partitions, and --partitions is {wanted}: give both the same number"
        )));
    }
    Ok(placement)
}

fn read_costs(path: &Path, model: &Model, sample: &SampleArgs) -> anyhow::Result<LayerCosts> {
    let flag = || format!("--costs {}", path.display());
    let text = read_text("--costs", path, COSTS_BYTES_MAX)?;
    let given: GivenCosts = serde_json::from_str(&text).map_err(|_| {
        usage(format!(
            "{}: expected a list of numbers, or the output of `distgpipe models NAME --profile --json`",
            flag()
        ))
    })?;
    let (costs, settings, rows, precision) = match given {
        GivenCosts::List(costs) => (costs, None, None, None),
        GivenCosts::Models { settings, rows, precision, layers } => (layers, settings, rows, precision),
    };
    let ours = model.spec.as_ref().map(|spec| &spec.settings);
    for (name, measured) in settings.iter().flatten() {
        if let Some(asked) = ours.and_then(|ours| ours.get(name)).filter(|asked| *asked != measured) {
            return Err(usage(format!(
                "{}: measured with {name}={measured}, and the model has {name}={asked}: measure again, or use --set {name}={measured}",
                flag()
            )));
        }
    }
    // Flags apply where the file has no value.
    let (rows, precision) = (rows.unwrap_or(sample.rows), precision.unwrap_or(sample.precision));
    if rows == 0 {
        return Err(usage(format!("--rows or {}: expected costs of 1 row or more, got 0", flag())));
    }
    let layers = model.layers.len();
    if costs.len() != layers {
        return Err(usage(format!("{}: expected a cost for each of {layers} layers, got {}", flag(), costs.len())));
    }
    let memory_known = costs.iter().all(|cost| matches!(cost, GivenCost::Measured { held_bytes: Some(_), .. }));
    let layers = costs.into_iter().zip(&model.layers).map(|(cost, layer)| {
        let name = layer.name().to_owned();
        Ok(match cost {
            // Only the sum is known: assume that a backward pass takes twice as long as a forward pass.
            GivenCost::Total(cost) => LayerProfile {
                name,
                forward_s: cost / 3.0,
                backward_s: cost * 2.0 / 3.0,
                held_bytes: 0,
                output_types: Vec::new(),
                stash_types: BTreeMap::new(),
            },
            GivenCost::Measured { forward_s, backward_s, held_bytes, output_types, stash_types } => LayerProfile {
                name,
                forward_s,
                backward_s,
                held_bytes: held_bytes.unwrap_or(0),
                output_types: output_types.iter().map(|name| dtype(name)).collect::<Result<_, _>>()?,
                stash_types: stash_types
                    .into_iter()
                    .map(|(skip, name)| Ok((skip, dtype(&name)?)))
                    .collect::<Result<_, String>>()?,
            },
        })
    });
    let layers = layers.collect::<Result<_, String>>().map_err(|e| usage(format!("{}: {e}", flag())))?;
    Ok(LayerCosts { layers, rows, precision, memory_known })
}

fn dtype(name: &str) -> Result<DType, String> {
    let found = DType::ALL.iter().find(|dtype| dtype.name() == name);
    found.copied().ok_or_else(|| {
        let got: String = name.chars().take(40).collect();
        format!("expected element types such as F32 or BF16, got `{got}`")
    })
}
