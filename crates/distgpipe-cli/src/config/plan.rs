//! Plan files, and how a run divides batches into micro-batches.

use crate::args::TrainFlags;
use crate::exit::usage;
use crate::files::read_text;
use anyhow::Context;
use distgpipe_core::microbatch::MicroBatches;
use distgpipe_core::schedule::{check, Plan};
use std::path::Path;

/// The largest plan file that is read; the largest plan is smaller.
const PLAN_BYTES_MAX: u64 = 64 << 20;

/// Reads and checks the plan file that a flag names.
pub fn read_plan(flag: &str, path: &Path) -> anyhow::Result<Plan> {
    let named = || format!("{flag} {}", path.display());
    let plan: Plan = read_text(flag, path, PLAN_BYTES_MAX)?.parse().with_context(named)?;
    check(&plan).with_context(named)?;
    Ok(plan)
}

/// The plan of `--plan`; flags that the plan already determines are an error.
pub(super) fn given(path: &Path, given: &TrainFlags) -> anyhow::Result<Plan> {
    let others = [
        ("--schedule", given.schedule.is_some()),
        ("--chunks", given.chunks.is_some()),
        ("--recompute", given.recompute.is_some()),
        ("--place", given.place.is_some()),
    ];
    if let Some((flag, _)) = others.iter().find(|(_, given)| *given) {
        return Err(usage(format!("--plan: the plan already determines this: remove {flag}")));
    }
    read_plan("--plan", path).map_err(|e| usage(format!("{e:#}")))
}

/// Whether every micro-batch of every replica gets at least one row.
pub(super) fn check_batch(flags: &TrainFlags, plan: Option<&Plan>) -> anyhow::Result<()> {
    let (batch, replicas) = (flags.batch.unwrap_or_default(), flags.replicas.unwrap_or(1));
    let micro_batches = micro_batches(flags, plan);
    let needed = micro_batches.saturating_mul(replicas);
    if MicroBatches::split(batch, needed).is_ok() {
        return Ok(());
    }
    if micro_batches == 0 {
        return Err(usage("--chunks 0: use 1 to run each batch in one piece"));
    }
    let source = if plan.is_some() { "--plan has" } else { "--chunks asks for" };
    let each = if replicas > 1 { format!(" in each of {replicas} replicas") } else { String::new() };
    let mut remedies = vec![format!("--batch {needed} or more")];
    let most = batch / replicas;
    remedies.extend((most > 0).then(|| format!("at most {most} micro-batches")));
    remedies.extend((replicas > 1).then(|| "fewer --replicas".to_owned()));
    Err(usage(format!(
        "--batch {batch}: {source} {micro_batches} micro-batches{each}, and each needs at least one row: use {}",
        remedies.join(", or ")
    )))
}

/// Micro-batches per batch and replica.
pub(super) fn micro_batches(flags: &TrainFlags, plan: Option<&Plan>) -> usize {
    plan.map_or(flags.chunks.unwrap_or(1), Plan::micro_batches)
}
