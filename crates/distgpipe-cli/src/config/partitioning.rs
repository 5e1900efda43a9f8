//! How flags cut the model into partitions, and which worker runs which.

use crate::args::TrainFlags;
use crate::balance_options::{BalanceFlags, BalanceOptions};
use crate::exit::usage;
use distgpipe::model::zoo;
use distgpipe::Model;
use distgpipe_core::cut::placement as client_server_placement;
use distgpipe_core::partition::Balance;
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::Plan;

/// How the model is cut.
pub(super) enum Partitioning {
    /// With these numbers of layers.
    Balance(Balance),
    /// By a search over measured layers, when the pipeline is built.
    AutoBalance {
        /// The number of partitions to cut into.
        partitions: usize,
    },
}

impl Partitioning {
    pub(super) fn partitions(&self) -> usize {
        match self {
            Partitioning::Balance(balance) => balance.partitions(),
            Partitioning::AutoBalance { partitions } => *partitions,
        }
    }
}

/// The placement that `--cut` implies where neither `--place` nor `--plan` is given: three partitions are those of split learning.
pub(super) fn implied_placement(
    flags: &TrainFlags,
    model: &Model,
    plan: Option<&Plan>,
) -> anyhow::Result<Option<String>> {
    let (Some(text), None, None) = (&flags.cut, &flags.place, plan) else {
        return Ok(flags.place.clone());
    };
    let balance = zoo::cut(model, text).map_err(|e| usage(format!("--cut: {e}")))?;
    Ok(client_server_placement(balance.partitions()).map(str::to_owned))
}

/// The placement of `--place`, or of the plan.
pub(super) fn placement(flags: &TrainFlags, plan: Option<&Plan>) -> anyhow::Result<Option<Placement>> {
    let placement = flags.place.as_deref().map(str::parse::<Placement>).transpose();
    let placement = placement.map_err(|e| usage(format!("--place: {e}")))?;
    Ok(placement.or_else(|| plan.map(|plan| plan.placement().clone())))
}

/// The cut that the flags describe; it has as many partitions as `placement`, which is the plan's if `from_plan`.
pub(super) fn partitioning(
    flags: &TrainFlags,
    model: &Model,
    placement: Option<&Placement>,
    from_plan: bool,
) -> anyhow::Result<Partitioning> {
    let layers = model.layers.len();
    let given = [
        ("--partitions", flags.partitions.is_some()),
        ("--balance", flags.balance.is_some()),
        ("--cut", flags.cut.is_some()),
        ("--auto-balance", flags.auto_balance.is_some()),
    ];
    let given: Vec<&str> = given.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
    if let [first, second, ..] = given[..] {
        return Err(usage(format!("{first} and {second} both cut the model: keep one")));
    }
    let source = if from_plan { "--plan" } else { "--place" };
    let flag = given.first().copied().unwrap_or(source);
    let placed = placement.map(Placement::partitions);
    let fits = |partitions: usize| match placed {
        Some(placed) if placed != partitions => Err(usage(format!(
            "{flag} makes {partitions} partitions, and {source} names workers for {placed}: give both the same number"
        ))),
        _ => Ok(()),
    };
    if let Some(partitions) = flags.auto_balance {
        Balance::even(layers, partitions).map_err(|e| usage(format!("{flag}: {e}")))?;
        fits(partitions)?;
        return Ok(Partitioning::AutoBalance { partitions });
    }
    let balance = match (&flags.balance, &flags.cut) {
        (Some(text), _) => text.parse::<Balance>().and_then(|balance| balance.check(layers).map(|()| balance)),
        (None, Some(text)) => Ok(zoo::cut(model, text).map_err(|e| usage(format!("--cut: {e}")))?),
        (None, None) => Balance::even(layers, flags.partitions.or(placed).unwrap_or(1)),
    };
    let balance = balance.map_err(|e| usage(format!("{flag}: {e}")))?;
    fits(balance.partitions())?;
    Ok(Partitioning::Balance(balance))
}

/// The options of `--auto-balance`; they are an error without it.
pub(super) fn balance_options(flags: &TrainFlags) -> anyhow::Result<BalanceOptions> {
    let balance_options = BalanceFlags {
        by: flags.balance_by,
        memory_limit: flags.memory_limit.as_deref(),
        link_rate: flags.link_rate.as_deref(),
        link_latency: flags.link_latency,
    };
    match balance_options.first_given() {
        Some(flag) if flags.auto_balance.is_none() => {
            Err(usage(format!("{flag}: it applies to --auto-balance only: add --auto-balance N, or remove it")))
        }
        _ => balance_options.read(),
    }
}
