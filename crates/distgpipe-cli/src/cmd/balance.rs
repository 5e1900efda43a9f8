//! `distgpipe balance`: the cut whose slowest partition is quickest, and what a step would take with it.

use super::models::SampleArgs;
use crate::config::model;
use crate::exit::usage;
use crate::files::read_text;
use crate::report;
use crate::report::table::{Side, Table};
use crate::report::units::{percent, seconds};
use distgpipe::core::partition::Balance;
use distgpipe::core::placement::Placement;
use distgpipe::core::schedule::{simulate, Costs, Recompute, Request, Schedule, Simulation};
use distgpipe::core::skip::{SkipLayout, SkipUse};
use distgpipe::core::PartitionId;
use distgpipe::profile::LayerCost;
use distgpipe::Model;
use serde::Deserialize;
use serde_json::json;
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

A file of costs is what `distgpipe models NAME --profile --json` prints, or a list with a number per layer. The step
is simulated with every partition on a worker of its own (or as --place says) and links that cost nothing.")]
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
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// A layer's cost in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum GivenCost {
    Total(f64),
    Measured { forward_s: f64, backward_s: f64 },
}

/// A file of costs.
#[derive(Deserialize)]
#[serde(untagged)]
enum GivenCosts {
    List(Vec<GivenCost>),
    Models { layers: Vec<GivenCost> },
}

/// Measures, cuts, simulates.
pub fn run(args: &BalanceArgs) -> anyhow::Result<()> {
    let model = model("MODEL", &args.model, &args.set)?;
    let layers: Vec<(f64, f64)> = match &args.costs {
        Some(path) => read_costs(path, model.layers.len())?,
        None => args.sample.measure(&model)?.iter().map(|cost: &LayerCost| (cost.forward_s, cost.backward_s)).collect(),
    };
    let totals: Vec<f64> = layers.iter().map(|(forward, backward)| forward + backward).collect();
    let flag = |e| usage(format!("--partitions: {e}"));
    let best = Balance::optimal(&totals, args.partitions).map_err(flag)?;
    let even = Balance::even(layers.len(), args.partitions).map_err(flag)?;
    let best = Cut::new(best, &layers, &model, args)?;
    let even = Cut::new(even, &layers, &model, args)?;
    if args.json {
        return report::print_json(&json!({
            "model": args.model,
            "rows": args.sample.rows,
            "precision": args.sample.precision,
            "micro_batches": args.chunks,
            "balance": best.balance.sizes(),
            "partitions": best.json(),
            "step_s": best.simulation.makespan,
            "bubble": best.simulation.bubble,
            "even": { "balance": even.balance.sizes(), "step_s": even.simulation.makespan, "bubble": even.simulation.bubble },
        }));
    }
    report::print(&format!(
        "{}\nstep of {} micro-batches: {}, {} idle\nwith as many layers each ({}): {}, {} idle\n\nuse it: --balance {}\n",
        best.table(&model),
        args.chunks,
        seconds(best.simulation.makespan),
        percent(best.simulation.bubble),
        even.balance,
        seconds(even.simulation.makespan),
        percent(even.simulation.bubble),
        best.balance,
    ))
}

fn read_costs(path: &Path, layers: usize) -> anyhow::Result<Vec<(f64, f64)>> {
    let flag = || format!("--costs {}", path.display());
    let text = read_text("--costs", path, COSTS_BYTES_MAX)?;
    let given: GivenCosts = serde_json::from_str(&text).map_err(|_| {
        usage(format!(
            "{}: expected a list of numbers, or what `distgpipe models NAME --profile --json` prints",
            flag()
        ))
    })?;
    let (GivenCosts::List(costs) | GivenCosts::Models { layers: costs }) = given;
    if costs.len() != layers {
        return Err(usage(format!("{}: expected a cost for each of {layers} layers, got {}", flag(), costs.len())));
    }
    // Backward passes take about twice as long where only the sum is known.
    let split = |cost: GivenCost| match cost {
        GivenCost::Total(cost) => (cost / 3.0, cost * 2.0 / 3.0),
        GivenCost::Measured { forward_s, backward_s } => (forward_s, backward_s),
    };
    Ok(costs.into_iter().map(split).collect())
}

/// A balance and what it costs.
struct Cut {
    balance: Balance,
    /// Forward and backward of each partition.
    costs: Vec<(f64, f64)>,
    simulation: Simulation,
}

impl Cut {
    fn new(balance: Balance, layers: &[(f64, f64)], model: &Model, args: &BalanceArgs) -> anyhow::Result<Self> {
        let sum = |partition: PartitionId| {
            layers[balance.range(partition)]
                .iter()
                .fold((0.0, 0.0), |(f, b), (forward, backward)| (f + forward, b + backward))
        };
        let costs: Vec<(f64, f64)> = (0..balance.partitions()).map(PartitionId::new).map(sum).collect();
        let placement = match &args.place {
            Some(place) => place.parse::<Placement>().map_err(|e| usage(format!("--place: {e}")))?,
            None => Placement::one_worker_each(balance.partitions()),
        };
        if placement.partitions() != balance.partitions() {
            let (named, wanted) = (placement.partitions(), balance.partitions());
            return Err(usage(format!(
                "--place names workers for {named} partitions, --partitions is {wanted}: give both the same number"
            )));
        }
        let uses: Vec<SkipUse> = model.layers.iter().map(|layer| layer.skips()).collect();
        let mut request = Request::new(placement, args.chunks);
        request.recompute = args.recompute;
        request.skips = SkipLayout::new(&uses, &balance)?.edges();
        let plan = args.schedule.plan(&request).map_err(|e| usage(format!("--chunks or --schedule: {e}")))?;
        let (forward, backward) = costs.iter().copied().unzip();
        let simulation = simulate(&plan, &Costs::new(forward, backward))?;
        Ok(Cut { balance, costs, simulation })
    }

    fn partitions(&self) -> impl Iterator<Item = (PartitionId, (f64, f64))> + '_ {
        self.costs.iter().enumerate().map(|(i, &cost)| (PartitionId::new(i), cost))
    }

    fn table(&self, model: &Model) -> String {
        let mut table = Table::new(&[
            ("partition", Side::Right),
            ("layers", Side::Right),
            ("from", Side::Left),
            ("to", Side::Left),
            ("forward", Side::Right),
            ("backward", Side::Right),
            ("share", Side::Right),
        ]);
        let all: f64 = self.costs.iter().map(|(forward, backward)| forward + backward).sum();
        for (partition, (forward, backward)) in self.partitions() {
            let range = self.balance.range(partition);
            table.row(vec![
                partition.to_string(),
                range.len().to_string(),
                model.layers[range.start].name().to_owned(),
                model.layers[range.end - 1].name().to_owned(),
                seconds(forward),
                seconds(backward),
                percent((forward + backward) / all.max(1e-300)),
            ]);
        }
        table.render()
    }

    fn json(&self) -> Vec<serde_json::Value> {
        let one = |(partition, (forward_s, backward_s)): (PartitionId, (f64, f64))| json!({ "layers": self.balance.range(partition).len(), "forward_s": forward_s, "backward_s": backward_s });
        self.partitions().map(one).collect()
    }
}
