//! `distgpipe balance`: finds the cut with the fastest step, or the lowest memory use of the worker that uses most.

mod cache;
mod costs;
mod output;
mod ranking;
mod search;

pub use search::kept_or_measured;

use super::models::SampleArgs;
use crate::args::{LayersName, OptimizerName};
use crate::balance_options::BalanceFlags;
use crate::config::{model, ExportedFlags};
use crate::exit::usage;
use crate::report;
use crate::report::cut::CutReport;
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::driver::auto_balance::RunShape;
use distgpipe::model::zoo;
use distgpipe::{Model, Optim};
use distgpipe_core::balance::Objective;
use distgpipe_core::codec::CodecSpec;
use distgpipe_core::cut::placement as client_server_placement;
use distgpipe_core::partition::Balance;
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{Recompute, Schedule};
use ranking::Clock;
use search::CutSearch;
use std::path::PathBuf;
use std::time::Duration;

/// The default of `--time-limit`, which is also the limit of `train --auto-balance`.
pub const TIME_LIMIT_S: f64 = 60.0;

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
  distgpipe balance mobilenet_v2 --balance 7,6,7

The command measures the layers in rounds until they show which is faster, the best cut or its rival (your cut, or else the second \
best), or until --time-limit. It caches the costs in $XDG_CACHE_HOME/distgpipe (by default ~/.cache/distgpipe) for the next call. \
A file of costs is the output of `distgpipe models NAME --profile --json`, or a JSON list with one number per layer. The step is \
simulated with each partition on its own worker, or as --place says. Times, bytes and activations are those of a micro-batch of \
--rows rows. Memory counts parameters, gradients, optimizer state and kept activations, but not the temporary tensors of a backward \
pass. The time of a step does not include encoding and decoding.")]
pub struct BalanceArgs {
    /// Model to cut: one that `distgpipe models` lists, or a file of `python3 -m distgpipe_export`
    #[arg(value_name = "NAME|FILE.pt2")]
    model: String,
    /// Number of partitions to cut the model into [default: as many as --balance, --cut or --place has]
    #[arg(long, value_name = "N")]
    partitions: Option<usize>,
    /// Also estimate this cut, the number of layers in each partition, such as 3,5,2, and compare it with the best one
    #[arg(long, value_name = "LAYERS,…")]
    balance: Option<String>,
    /// The same for a cut by rule: first=1,last=1 or after=LAYER,…; roberta also has roberta-1, roberta-2 and roberta-3.
    /// Three partitions are placed client,server,client unless --place is given
    #[arg(long, value_name = "CUT")]
    cut: Option<String>,
    /// Model setting, such as classes=1000; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Where the layers of an exported model end: with modules, or at all places where it can be cut [default: modules]
    #[arg(long, value_name = "modules|all")]
    layers: Option<LayersName>,
    /// Make tied parameters of an exported model independent copies, so that it can be cut between their uses
    #[arg(long)]
    untie: bool,
    /// Read the costs of the layers from this file instead of measuring them
    #[arg(long, value_name = "FILE.json", help_heading = "Measurement")]
    costs: Option<PathBuf>,
    /// Measure the layers again, and replace the costs kept from an earlier call
    #[arg(long, conflicts_with = "costs", help_heading = "Measurement")]
    measure_again: bool,
    /// End measuring and searching after this many seconds, counting the measurements kept from earlier calls; the result is
    /// then the best cut found so far
    #[arg(long, value_name = "SECONDS", default_value_t = TIME_LIMIT_S, help_heading = "Measurement")]
    time_limit: f64,
    #[command(flatten)]
    sample: SampleArgs,
    /// Order of forward and backward passes: gpipe, 1f1b or interleaved
    #[arg(long, value_name = "NAME", default_value = "1f1b", help_heading = "Pipeline")]
    schedule: Schedule,
    /// Micro-batches per batch; each has --rows rows
    #[arg(long, alias = "micro-batches", value_name = "N", default_value_t = 4, help_heading = "Pipeline")]
    chunks: usize,
    /// Micro-batches that are recomputed in the backward pass
    #[arg(long, value_name = "never|except-last|always", default_value = "never", help_heading = "Pipeline")]
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

/// Measures the layers, searches the best cut, and prints it.
pub fn run(args: &BalanceArgs) -> anyhow::Result<()> {
    let model = model("MODEL", &args.model, &args.set, ExportedFlags { layers: args.layers, untie: Some(args.untie) })?;
    let balance_options = BalanceFlags {
        by: Some(args.balance_by),
        memory_limit: args.memory_limit.as_deref(),
        link_rate: args.link_rate.as_deref(),
        link_latency: args.link_latency,
    };
    let balance_options = balance_options.read()?;
    let given = given_cut(args, &model)?;
    let placement = placement(args, &model, given.as_ref())?;
    if let Some(cut) = &given {
        model.check_ties(cut, &placement).map_err(|e| usage(format!("--balance: {e}")))?;
    }
    let limit = Duration::try_from_secs_f64(args.time_limit).ok().filter(|limit| !limit.is_zero());
    let limit = limit
        .ok_or_else(|| usage(format!("--time-limit {}: expected seconds above 0 and below 1e19", args.time_limit)))?;
    let codecs = CodecPolicy {
        forward: args.codec.clone(),
        backward: args.codec_backward.clone().unwrap_or_else(|| args.codec.clone()),
        ..CodecPolicy::default()
    };
    let search = CutSearch {
        args,
        model: &model,
        given: given.as_ref(),
        run: RunShape {
            placement: placement.clone(),
            schedule: args.schedule,
            micro_batches: args.chunks,
            recompute: args.recompute,
            codecs: &codecs,
            optim: optim(args.optimizer),
            frozen_layers: 0,
        },
        options: balance_options,
    };
    let outcome = match &args.costs {
        Some(path) => search.with_costs(path, Clock::start(limit))?,
        None => search.with_measurements(Clock::start(limit))?,
    };
    let report = CutReport {
        found: &outcome.ranked.found,
        model: &model,
        placement: &placement,
        micro_batches: args.chunks,
        link: balance_options.link,
        memory_limit_bytes: balance_options.memory_limit_bytes,
        memory_known: outcome.costs.memory_known,
    };
    if args.json {
        return report::print_json(&output::json(args, &report, &outcome)?);
    }
    report::print(&output::text(args, &report, &outcome)?)
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

/// The cut of `--balance` or `--cut`.
fn given_cut(args: &BalanceArgs, model: &Model) -> anyhow::Result<Option<Balance>> {
    match (&args.balance, &args.cut) {
        (Some(_), Some(_)) => Err(usage("--balance and --cut both name a cut: keep one")),
        (Some(text), None) => {
            let cut = text.parse::<Balance>().and_then(|cut| cut.check(model.layers.len()).map(|()| cut));
            Ok(Some(cut.map_err(|e| usage(format!("--balance: {e}")))?))
        }
        (None, Some(text)) => Ok(Some(zoo::cut(model, text).map_err(|e| usage(format!("--cut: {e}")))?)),
        (None, None) => Ok(None),
    }
}

/// The worker of each partition. `--partitions`, `--place` and the given cut must agree on the number of partitions.
fn placement(args: &BalanceArgs, model: &Model, given: Option<&Balance>) -> anyhow::Result<Placement> {
    let implied = given.filter(|_| args.cut.is_some()).and_then(|cut| client_server_placement(cut.partitions()));
    let place = args.place.as_deref().or(implied);
    let placed = place.map(str::parse::<Placement>).transpose().map_err(|e| usage(format!("--place: {e}")))?;
    let cut_flag = if args.cut.is_some() { "--cut" } else { "--balance" };
    let counts = [
        (cut_flag, given.map(Balance::partitions)),
        ("--partitions", args.partitions),
        ("--place", args.place.as_ref().and(placed.as_ref()).map(Placement::partitions)),
    ];
    let counts: Vec<(&str, usize)> = counts.iter().filter_map(|(flag, count)| Some((*flag, (*count)?))).collect();
    let Some(&(first, partitions)) = counts.first() else {
        return Err(usage(
            "--partitions: add --partitions N, the number of partitions, or a cut with --balance or --cut",
        ));
    };
    if let Some((other, count)) = counts.iter().find(|(_, count)| *count != partitions) {
        return Err(usage(format!(
            "{first} has {partitions} partitions, and {other} has {count}: give both the same number"
        )));
    }
    Balance::even(model.layers.len(), partitions).map_err(|e| usage(format!("{first}: {e}")))?;
    Ok(placed.unwrap_or_else(|| Placement::one_worker_each(partitions)))
}
