//! `distgpipe balance`: the cut with which a step is quickest or the fullest worker holds least, and what it costs.

use super::models::SampleArgs;
use crate::args::OptimizerName;
use crate::balancing::{no_cut, JudgingFlags};
use crate::config::model;
use crate::exit::usage;
use crate::files::read_text;
use crate::report;
use crate::report::cut::CutReport;
use distgpipe::auto_balance::{problem, Run};
use distgpipe::codecs::Codecs;
use distgpipe::core::balance::Objective;
use distgpipe::core::codec::Spec;
use distgpipe::core::partition::Balance;
use distgpipe::core::placement::Placement;
use distgpipe::core::schedule::{Recompute, Schedule};
use distgpipe::core::wire::DType;
use distgpipe::profile::LayerCost;
use distgpipe::{BuildError, Model, Optim, Precision};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The most bytes of a file of costs.
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

A file of costs is what `distgpipe models NAME --profile --json` prints, or a list with a number per layer. The step
is simulated with every partition on a worker of its own (or as --place says). Times, bytes sent and what is held are
those of a micro-batch of --rows rows. Memory is what parameters, gradients, optimizer and kept activations take;
what a layer needs for itself while it goes backward is not in it, nor is the time of coding in the step.")]
pub struct BalanceArgs {
    /// Which model; `distgpipe models` lists them
    model: String,
    /// Into how many partitions
    #[arg(long, value_name = "N")]
    partitions: usize,
    /// A setting of the model; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Take the layers' costs from this file instead of measuring
    #[arg(long, value_name = "FILE.json")]
    costs: Option<PathBuf>,
    #[command(flatten)]
    sample: SampleArgs,
    /// The order of the work: gpipe, 1f1b or interleaved
    #[arg(long, value_name = "NAME", default_value = "1f1b")]
    schedule: Schedule,
    /// Micro-batches per batch; each has --rows rows
    #[arg(long, alias = "micro-batches", value_name = "N", default_value_t = 4)]
    chunks: usize,
    /// Which micro-batches are computed again: never, except-last or always
    #[arg(long, value_name = "WHICH", default_value = "never")]
    recompute: Recompute,
    /// The worker of each partition
    #[arg(long, value_name = "WORKER,…")]
    place: Option<String>,
    /// What to make small: time (of a step) or memory (of the worker that holds most)
    #[arg(long, value_name = "WHAT", default_value = "time")]
    balance_by: Objective,
    /// The most that a worker may hold, such as 2GiB
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<String>,
    /// What a link between two workers carries, such as 100mbit, 1gbit or 12.5MB/s [default: links are free]
    #[arg(long, value_name = "RATE")]
    link_rate: Option<String>,
    /// How long a message takes beyond that, in milliseconds [default: 0]
    #[arg(long, value_name = "MS")]
    link_latency: Option<f64>,
    /// How activations are encoded between workers; `distgpipe codecs` lists codecs
    #[arg(long, value_name = "CODEC", default_value = "raw")]
    codec: Spec,
    /// How gradients are encoded [default: as activations]
    #[arg(long, value_name = "CODEC")]
    codec_backward: Option<Spec>,
    /// How parameters are stepped, which says what else is kept for each
    #[arg(long, value_name = "NAME", default_value = "sgd")]
    optimizer: OptimizerName,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// A layer's cost in a file.
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

/// What the layers cost, wherever that is from.
struct LayerCosts {
    layers: Vec<LayerCost>,
    /// For so many rows.
    rows: usize,
    /// In this.
    precision: Precision,
    memory_known: bool,
}

/// Measures, cuts, simulates.
pub fn run(args: &BalanceArgs) -> anyhow::Result<()> {
    let model = model("MODEL", &args.model, &args.set)?;
    let judging = JudgingFlags {
        by: Some(args.balance_by),
        memory_limit: args.memory_limit.as_deref(),
        link_rate: args.link_rate.as_deref(),
        link_latency: args.link_latency,
    };
    let judging = judging.read()?;
    Balance::even(model.layers.len(), args.partitions).map_err(|e| usage(format!("--partitions: {e}")))?;
    let placement = placement(args)?;
    let costs = match &args.costs {
        Some(path) => read_costs(path, &model, &args.sample)?,
        None => LayerCosts {
            layers: args.sample.measure(&model)?,
            rows: args.sample.rows,
            precision: args.sample.precision,
            memory_known: true,
        },
    };
    if !costs.memory_known && (judging.by == Objective::Memory || judging.memory_limit_bytes.is_some()) {
        return Err(usage(
            "--costs: the file does not say what layers hold, which memory is judged by: use one that `distgpipe models \
             NAME --profile --json` printed, or measure",
        ));
    }
    let codecs = Codecs {
        forward: args.codec.clone(),
        backward: args.codec_backward.clone().unwrap_or_else(|| args.codec.clone()),
        ..Codecs::default()
    };
    let run = Run {
        placement,
        schedule: args.schedule,
        micro_batches: args.chunks,
        recompute: args.recompute,
        codecs: &codecs,
        optim: match args.optimizer {
            OptimizerName::Sgd => Optim::default(),
            OptimizerName::Adam => Optim::adam(),
            OptimizerName::Adamw => Optim::adamw(),
            OptimizerName::Rmsprop => Optim::rms_prop(0.0),
        },
    };
    let mut problem = problem(&model, &costs.layers, costs.rows, run).map_err(|e| match e {
        BuildError::Schedule(e) => usage(format!("--chunks or --schedule: {e}")),
        BuildError::Settings(e) => usage(format!("--rows or --costs: {e}")),
        other => other.into(),
    })?;
    problem.objective = judging.by;
    problem.link = judging.link;
    problem.memory_limit_bytes = judging.memory_limit_bytes;
    let found = problem.search().map_err(|e| no_cut("--costs, --chunks or --schedule", e))?;
    let report = CutReport {
        found: &found,
        model: &model,
        placement: &problem.placement,
        micro_batches: args.chunks,
        link: judging.link,
        memory_limit_bytes: judging.memory_limit_bytes,
        memory_known: costs.memory_known,
    };
    if args.json {
        let mut value = report.json();
        value["model"] = args.model.clone().into();
        value["rows"] = costs.rows.into();
        value["precision"] = serde_json::to_value(costs.precision)?;
        return report::print_json(&value);
    }
    report::print(&format!("{}\nuse it: --balance {}\n", report.text(), found.balance))
}

fn placement(args: &BalanceArgs) -> anyhow::Result<Placement> {
    let placement = match &args.place {
        Some(place) => place.parse::<Placement>().map_err(|e| usage(format!("--place: {e}")))?,
        None => Placement::one_worker_each(args.partitions),
    };
    if placement.partitions() != args.partitions {
        let (named, wanted) = (placement.partitions(), args.partitions);
        return Err(usage(format!(
            "--place names workers for {named} partitions, --partitions is {wanted}: give both the same number"
        )));
    }
    Ok(placement)
}

fn read_costs(path: &Path, model: &Model, sample: &SampleArgs) -> anyhow::Result<LayerCosts> {
    let flag = || format!("--costs {}", path.display());
    let text = read_text("--costs", path, COSTS_BYTES_MAX)?;
    let given: GivenCosts = serde_json::from_str(&text).map_err(|_| {
        usage(format!(
            "{}: expected a list of numbers, or what `distgpipe models NAME --profile --json` prints",
            flag()
        ))
    })?;
    let (costs, settings, rows, precision) = match given {
        GivenCosts::List(costs) => (costs, None, None, None),
        GivenCosts::Models { settings, rows, precision, layers } => (layers, settings, rows, precision),
    };
    let ours = model.recipe.as_ref().map(|recipe| &recipe.settings);
    for (name, measured) in settings.iter().flatten() {
        if let Some(asked) = ours.and_then(|ours| ours.get(name)).filter(|asked| *asked != measured) {
            return Err(usage(format!(
                "{}: it was measured with {name}={measured}, and the model has {name}={asked}: measure it anew, or give --set {name}={measured}",
                flag()
            )));
        }
    }
    // What the file does not say, flags do.
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
            // Backward passes take about twice as long where only the sum is known.
            GivenCost::Total(cost) => LayerCost {
                name,
                forward_s: cost / 3.0,
                backward_s: cost * 2.0 / 3.0,
                held_bytes: 0,
                output_types: Vec::new(),
                stash_types: BTreeMap::new(),
            },
            GivenCost::Measured { forward_s, backward_s, held_bytes, output_types, stash_types } => LayerCost {
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
