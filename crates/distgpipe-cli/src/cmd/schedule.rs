//! `distgpipe schedule`: prints, checks, simulates and draws plans without running them.

use crate::config::read_plan;
use crate::exit::usage;
use crate::files::NewFile;
use crate::report;
use crate::report::table::{Side, Table};
use crate::report::units::percent;
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{
    simulate, Costs, LinkCost, Plan, Recompute, Request, Schedule, ScheduleError, Simulation,
};
use distgpipe_core::PartitionId;
use serde_json::json;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Flags of `distgpipe schedule`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  Compare three schedules:
      distgpipe schedule --partitions 4 --chunks 8 --schedule gpipe --draw
      distgpipe schedule --partitions 4 --chunks 8 --schedule 1f1b --draw
      distgpipe schedule --place a,b,a,b --chunks 8 --schedule interleaved --draw
  Simulate split learning over a slow link, with measured times in any unit:
      distgpipe schedule --place client,server,client --forward 1,9,1 --backward 2,18,2 --link 3 --draw
  Edit a plan by hand, check it, and train with it:
      distgpipe schedule --place client,server,client > plan.txt
      distgpipe schedule --check plan.txt
      distgpipe train --balance 1,2,1 --plan plan.txt

Without --draw, --text, --svg or --json, a terminal gets the drawing, and a file or pipe the text format. In the text format, `2F0` \
is the forward pass of micro-batch 0 in partition 2; `2F0>3` sends its output to partition 3, and `3F0<2` receives it there. B is a \
backward pass, R a recomputation. All times are in one unit of your choice.")]
pub struct ScheduleArgs {
    /// Order of forward and backward passes: gpipe, 1f1b or interleaved
    #[arg(long, value_name = "NAME", default_value = "1f1b", help_heading = "Plan")]
    schedule: Schedule,
    /// Number of partitions, each on its own worker [default: 2]
    #[arg(long, value_name = "N", conflicts_with = "place", help_heading = "Plan")]
    partitions: Option<usize>,
    /// Worker of each partition, such as client,server,client
    #[arg(long, value_name = "WORKER,…", help_heading = "Plan")]
    place: Option<String>,
    /// Micro-batches per batch
    #[arg(long, alias = "micro-batches", value_name = "N", default_value_t = 4, help_heading = "Plan")]
    chunks: usize,
    /// Micro-batches that are recomputed in the backward pass
    #[arg(long, value_name = "never|except-last|always", default_value = "never", help_heading = "Plan")]
    recompute: Recompute,
    /// Skip connection from a partition to a later one, such as '0>2'; repeatable
    #[arg(long, value_name = "FROM>TO", help_heading = "Plan")]
    skip: Vec<String>,
    /// Number of partitions at the front that are frozen: they run forward only, and receive no gradients
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Plan")]
    frozen: usize,
    /// Read a plan from this file instead, and check it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["partitions", "place", "skip", "frozen"], help_heading = "Plan")]
    check: Option<PathBuf>,
    /// Time of a forward pass, one for all partitions or one for each [default: 1]
    #[arg(long, value_name = "X,…", value_delimiter = ',', help_heading = "Simulation")]
    forward: Vec<f64>,
    /// Time of a backward pass, likewise [default: twice the forward pass]
    #[arg(long, value_name = "X,…", value_delimiter = ',', help_heading = "Simulation")]
    backward: Vec<f64>,
    /// Time of a recomputation, likewise [default: same as the forward pass]
    #[arg(long, value_name = "X,…", value_delimiter = ',', help_heading = "Simulation")]
    recompute_cost: Vec<f64>,
    /// Time for which a message occupies its link
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Simulation")]
    link: f64,
    /// Additional time until a message arrives
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Simulation")]
    latency: f64,
    /// Print the plan in the text format
    #[arg(long, conflicts_with = "draw", help_heading = "Output")]
    text: bool,
    /// Draw the plan, and print what the simulation found
    #[arg(long, help_heading = "Output")]
    draw: bool,
    /// Write the drawing to this file
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    svg: Option<PathBuf>,
    /// Print the plan and the simulation as JSON
    #[arg(long, conflicts_with_all = ["draw", "text"], help_heading = "Output")]
    json: bool,
}

/// Creates or reads the plan, and prints it.
pub fn run(args: &ScheduleArgs) -> anyhow::Result<()> {
    let plan = match &args.check {
        Some(path) => read_plan("--check", path)?,
        None => planned(args)?,
    };
    let simulation = simulate(&plan, &costs(args, plan.partitions())?)
        .map_err(|e| usage(format!("--forward, --backward, --recompute-cost, --link: {e}")))?;
    if let Some(path) = &args.svg {
        NewFile::at("--svg", path)?.write(simulation.to_svg().as_bytes())?;
    }
    if args.json {
        return report::print_json(&as_json(&plan, &simulation));
    }
    let draw = args.draw || (!args.text && args.svg.is_none() && std::io::stdout().is_terminal());
    let mut text = String::new();
    if args.check.is_some() {
        text.push_str(&format!(
            "valid: {} partitions on {} workers, {} micro-batches\n",
            plan.partitions(),
            plan.placement().workers(),
            plan.micro_batches()
        ));
    }
    if draw {
        text.push_str(&simulation.to_text(report::width()));
        text.push('\n');
        text.push_str(&workers(&simulation));
    } else if args.text || (args.check.is_none() && args.svg.is_none()) {
        text.push_str(&plan.to_string());
    }
    report::print(&text)
}

fn planned(args: &ScheduleArgs) -> anyhow::Result<Plan> {
    let placement = match (&args.place, args.partitions) {
        (Some(place), _) => place.parse().map_err(|e| usage(format!("--place: {e}")))?,
        (None, Some(0)) => return Err(usage("--partitions 0: use 1 or more")),
        // Checked here, before a name is created for each worker.
        (None, Some(n)) if n > distgpipe_core::schedule::PARTITIONS_MAX => {
            return Err(usage(format!("--partitions {n}: use at most {}", distgpipe_core::schedule::PARTITIONS_MAX)));
        }
        (None, partitions) => Placement::one_worker_each(partitions.unwrap_or(2)),
    };
    let mut request = Request::new(placement, args.chunks);
    request.recompute = args.recompute;
    request.skips = args.skip.iter().map(|text| skip(text)).collect::<anyhow::Result<_>>()?;
    request.frozen = args.frozen;
    args.schedule.plan(&request).map_err(|e| {
        let flag = match e {
            ScheduleError::AllFrozen { .. } => "--frozen",
            ScheduleError::BadSkip { .. } => "--skip",
            _ => "--chunks, --partitions or --place",
        };
        usage(format!("{flag}: {e}"))
    })
}

fn skip(text: &str) -> anyhow::Result<(PartitionId, PartitionId)> {
    let ends = text.split_once('>').and_then(|(from, to)| Some((from.trim().parse().ok()?, to.trim().parse().ok()?)));
    let (from, to) = ends.ok_or_else(|| usage(format!("--skip {text}: expected FROM>TO, such as '0>2'")))?;
    Ok((PartitionId(from), PartitionId(to)))
}

fn costs(args: &ScheduleArgs, partitions: usize) -> anyhow::Result<Costs> {
    let per_partition = |flag: &str, given: &[f64], default: Vec<f64>| match given.len() {
        0 => Ok(default),
        1 => Ok(vec![given[0]; partitions]),
        n if n == partitions => Ok(given.to_vec()),
        n => Err(usage(format!("{flag}: expected 1 cost, or one for each of {partitions} partitions, got {n}"))),
    };
    let forward = per_partition("--forward", &args.forward, vec![1.0; partitions])?;
    let backward = per_partition("--backward", &args.backward, forward.iter().map(|f| 2.0 * f).collect())?;
    let recompute = per_partition("--recompute-cost", &args.recompute_cost, forward.clone())?;
    Ok(Costs {
        recompute,
        other_links: LinkCost { latency: args.latency, transfer: args.link },
        ..Costs::new(forward, backward)
    })
}

fn workers(simulation: &Simulation) -> String {
    let mut table = Table::new(&[
        ("worker", Side::Left),
        ("partitions", Side::Left),
        ("busy", Side::Right),
        ("idle", Side::Right),
        ("peak activations", Side::Right),
        ("peak saved inputs", Side::Right),
    ]);
    for worker in &simulation.workers {
        let partitions: Vec<String> = worker.partitions.iter().map(ToString::to_string).collect();
        table.row(vec![
            worker.name.clone(),
            partitions.join(","),
            format!("{:.3}", worker.busy),
            percent(worker.bubble),
            worker.live_peak.to_string(),
            worker.saved_inputs_peak.to_string(),
        ]);
    }
    table.render()
}

fn as_json(plan: &Plan, simulation: &Simulation) -> serde_json::Value {
    let placement = plan.placement();
    json!({
        "plan": plan.to_string(),
        "partitions": plan.partitions(),
        "micro_batches": plan.micro_batches(),
        "placement": placement.partition_ids().map(|p| placement.name(placement.worker_of(p))).collect::<Vec<_>>(),
        "actions": placement.worker_ids().map(|w| {
            (placement.name(w).to_owned(), plan.actions(w).iter().map(ToString::to_string).collect::<Vec<_>>())
        }).collect::<std::collections::BTreeMap<_, _>>(),
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "workers": simulation.workers.iter().map(|worker| json!({
            "name": worker.name,
            "partitions": worker.partitions.iter().map(|p| p.index()).collect::<Vec<_>>(),
            "busy": worker.busy,
            "bubble": worker.bubble,
            "live_peak": worker.live_peak,
            "saved_inputs_peak": worker.saved_inputs_peak,
        })).collect::<Vec<_>>(),
        "events": simulation.events.iter().map(|event| json!({
            "worker": placement.name(event.worker),
            "action": event.action.to_string(),
            "start": event.start,
            "end": event.end,
        })).collect::<Vec<_>>(),
    })
}
