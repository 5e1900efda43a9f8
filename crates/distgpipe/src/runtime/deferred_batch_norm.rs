//! Batch norm under micro-batches.
//!
//! Each micro-batch is normalised by its own statistics, as anywhere. The running statistics, though, must be what one
//! pass over the whole batch would have left, whatever the number of micro-batches: so they are gathered per
//! micro-batch and committed once a step. Mean and variance are merged from (count, mean, variance) per micro-batch
//! as Chan, Golub and LeVeque do, one after the other, in double precision; the mean of squares minus the square of the mean
//! would cancel. Recomputation gathers nothing.
//!
//! ```text
//!   micro-batches   0 … 15 │ 16 … 31 │ 32 33     gathered as libtorch leaves them
//!   merged                 ▲         ▲       ▲   all norms at once: what is gathered stays small,
//!                                        commit   and an operation for each norm would cost more than the norm
//! ```

use crate::failure::Fault;
use crate::layer::Passing;
use distgpipe_core::MicroBatchId;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// The tensors and constants of one batch norm.
pub struct NormTensors<'a> {
    /// Scale per channel.
    pub weight: &'a Tensor,
    /// Shift per channel.
    pub bias: &'a Tensor,
    /// Running mean per channel.
    pub running_mean: &'a Tensor,
    /// Running variance per channel, unbiased as PyTorch keeps it.
    pub running_var: &'a Tensor,
    /// How many batches went into them.
    pub batches: &'a Tensor,
    /// Added to the variance.
    pub eps: f64,
    /// The weight of a new batch in the running statistics.
    pub momentum: f64,
}

/// What one micro-batch contributes.
struct Gathered {
    count: f64,
    mean: Tensor,
    /// Unbiased.
    var: Tensor,
}

/// One batch norm's handles and what has been gathered for it in this step.
struct Norm {
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    momentum: f64,
    /// Merged before, in the order of micro-batches.
    merged: Option<Merged>,
    // Ordered by micro-batch, so that the result does not depend on the schedule.
    gathered: BTreeMap<MicroBatchId, Gathered>,
}

/// The statistics of the first micro-batches of a step.
struct Merged {
    micro_batches: u32,
    count: f64,
    mean: Tensor,
    /// Of the differences from the mean, summed.
    squares: Tensor,
}

/// How many micro-batches are gathered before they are merged.
const GATHERED_MAX: usize = 16;

/// The batch norms of a partition, by (layer, nth in that layer).
#[derive(Default)]
pub struct DeferredBatchNorm {
    norms: BTreeMap<(usize, usize), Norm>,
}

impl DeferredBatchNorm {
    pub(crate) fn forward(
        &mut self,
        x: &Tensor,
        tensors: NormTensors<'_>,
        passing: Passing,
        micro_batch: MicroBatchId,
        place: (usize, usize),
    ) -> Result<Tensor, Fault> {
        let NormTensors { weight, bias, running_mean, running_var, batches, eps, momentum } = tensors;
        let normalise = |mean: &Tensor, var: &Tensor, train: bool| {
            x.f_batch_norm(Some(weight), Some(bias), Some(mean), Some(var), train, 1.0, eps, true)
        };
        if passing == Passing::Evaluate {
            return Ok(normalise(running_mean, running_var, false)?);
        }
        if passing == Passing::Train && self.norms.get(&place).is_some_and(|norm| norm.gathered.len() >= GATHERED_MAX) {
            self.merge_before(micro_batch)?;
        }
        let count = x.numel() / weight.numel().max(1);
        if count < 2 {
            let got = format!("an input of {:?}", x.size());
            let expected = "more than one value of each channel in a micro-batch, without which a batch norm cannot learn (more rows in a micro-batch, or larger images)";
            return Err(Fault::protocol(expected, got));
        }
        // With momentum 1 libtorch leaves this micro-batch's own statistics in the scratch tensors.
        let (mean, var) = tch::no_grad(|| Ok::<_, Fault>((running_mean.f_zeros_like()?, running_var.f_zeros_like()?)))?;
        let y = normalise(&mean, &var, true)?;
        if passing == Passing::Train {
            let norm = self.norms.entry(place).or_insert_with(|| Norm {
                running_mean: running_mean.shallow_clone(),
                running_var: running_var.shallow_clone(),
                batches: batches.shallow_clone(),
                momentum,
                merged: None,
                gathered: BTreeMap::new(),
            });
            norm.gathered.insert(micro_batch, Gathered { count: count as f64, mean, var });
        }
        Ok(y)
    }

    /// Merges what no earlier micro-batch can come before any more: all that there are up to this one.
    fn merge_before(&mut self, next: MicroBatchId) -> Result<(), Fault> {
        let whole = |norm: &&mut Norm| {
            let first = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
            norm.gathered.keys().map(|m| m.0).eq(first..next.0)
        };
        merge_alike(self.norms.values_mut().filter(whole))
    }

    /// Brings what has been gathered into the running statistics, and starts anew.
    pub fn commit(&mut self) -> Result<(), Fault> {
        merge_alike(self.norms.values_mut().filter(|norm| !norm.gathered.is_empty()))?;
        let mut norms: Vec<&mut Norm> = self.norms.values_mut().filter(|norm| norm.merged.is_some()).collect();
        tch::no_grad(|| commit_together(&mut norms))
    }

    /// Forgets what has been gathered.
    pub fn discard(&mut self) {
        self.norms.clear();
    }
}

/// All norms that saw the same micro-batches are one vector of channels: a model has dozens of norms, and an operation on
/// all of them costs as much as one on a single norm.
fn merge_alike<'a>(norms: impl Iterator<Item = &'a mut Norm>) -> Result<(), Fault> {
    let mut alike: BTreeMap<(u32, Vec<MicroBatchId>), Vec<&mut Norm>> = BTreeMap::new();
    for norm in norms {
        let merged = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
        alike.entry((merged, norm.gathered.keys().copied().collect())).or_default().push(norm);
    }
    alike
        .into_iter()
        .try_for_each(|((_, micro_batches), mut norms)| tch::no_grad(|| merge_together(&mut norms, &micro_batches)))
}

/// The channels of several norms as one vector of doubles.
struct Joined {
    /// The norm of each channel.
    owner: Tensor,
}

impl Joined {
    fn new(norms: &[&mut Norm]) -> Result<Self, Fault> {
        let channels = norms.iter().map(|norm| norm.running_mean.numel());
        let owner: Vec<i64> = (0..).zip(channels).flat_map(|(i, channels)| std::iter::repeat_n(i, channels)).collect();
        Ok(Joined { owner: Tensor::f_from_slice(&owner)?.f_to_device(norms[0].running_mean.device())? })
    }

    /// A tensor of each norm.
    fn tensors<'a>(&self, tensors: impl Iterator<Item = &'a Tensor>) -> Result<Tensor, Fault> {
        let parts: Vec<&Tensor> = tensors.collect();
        Ok(Tensor::f_cat(&parts, 0)?.f_to_kind(Kind::Double)?)
    }

    /// A number of each norm, for all its channels.
    fn numbers(&self, numbers: impl Iterator<Item = f64>) -> Result<Tensor, Fault> {
        let numbers: Vec<f64> = numbers.collect();
        let numbers = Tensor::f_from_slice(&numbers)?.f_to_device(self.owner.device())?;
        Ok(numbers.f_index_select(0, &self.owner)?)
    }
}

/// Merges norms that saw the same micro-batches, in their order, value by value, so that no result depends on which other
/// norms are here or how many micro-batches are merged at once.
fn merge_together(norms: &mut [&mut Norm], micro_batches: &[MicroBatchId]) -> Result<(), Fault> {
    let joined = Joined::new(norms)?;
    let mut counts: Vec<f64> = norms.iter().map(|n| n.merged.as_ref().map_or(0.0, |merged| merged.count)).collect();
    let mut merged = match norms.iter().map(|n| n.merged.as_ref()).collect::<Option<Vec<_>>>() {
        Some(merged) => Some((
            joined.tensors(merged.iter().map(|merged| &merged.mean))?,
            joined.tensors(merged.iter().map(|merged| &merged.squares))?,
        )),
        None => None,
    };
    for m in micro_batches {
        let gathered = || norms.iter().map(|norm| &norm.gathered[m]);
        let own_mean = joined.tensors(gathered().map(|g| &g.mean))?;
        let own_squares =
            joined.tensors(gathered().map(|g| &g.var))?.f_mul(&joined.numbers(gathered().map(|g| g.count - 1.0))?)?;
        merged = Some(match merged {
            None => (own_mean, own_squares),
            Some((mean, squares)) => {
                let pairs = || counts.iter().zip(gathered().map(|g| g.count));
                let step = joined.numbers(pairs().map(|(n, own)| own / (n + own)))?;
                let between = joined.numbers(pairs().map(|(n, own)| n * own / (n + own)))?;
                let gap = own_mean.f_sub(&mean)?;
                let squares = squares.f_add(&own_squares)?.f_add(&gap.f_square()?.f_mul(&between)?)?;
                (mean.f_add(&gap.f_mul(&step)?)?, squares)
            }
        });
        let own: Vec<f64> = gathered().map(|g| g.count).collect();
        counts.iter_mut().zip(own).for_each(|(count, own)| *count += own);
    }
    let Some((mean, squares)) = merged else { return Ok(()) };
    let mut start = 0;
    for (norm, count) in norms.iter_mut().zip(counts) {
        let channels = norm.running_mean.size()[0];
        let before = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
        norm.merged = Some(Merged {
            micro_batches: before + u32::try_from(micro_batches.len()).unwrap_or(u32::MAX),
            count,
            mean: mean.f_narrow(0, start, channels)?,
            squares: squares.f_narrow(0, start, channels)?,
        });
        norm.gathered.clear();
        start += channels;
    }
    Ok(())
}

/// Brings what was merged into the running statistics.
fn commit_together(norms: &mut [&mut Norm]) -> Result<(), Fault> {
    let mut merged: Vec<Merged> = norms.iter_mut().filter_map(|norm| norm.merged.take()).collect();
    if merged.is_empty() {
        return Ok(());
    }
    let joined = Joined::new(norms)?;
    let divisors = joined.numbers(merged.iter().map(|merged| (merged.count - 1.0).max(1.0)))?;
    let momentum = joined.numbers(norms.iter().map(|norm| norm.momentum))?;
    let blend = |old: Tensor, new: &Tensor| old.f_add(&new.f_sub(&old)?.f_mul(&momentum)?);
    let var = joined.tensors(merged.iter().map(|merged| &merged.squares))?.f_div(&divisors)?;
    let var = blend(joined.tensors(norms.iter().map(|norm| &norm.running_var))?, &var)?;
    let mean = joined.tensors(merged.iter().map(|merged| &merged.mean))?;
    let mean = blend(joined.tensors(norms.iter().map(|norm| &norm.running_mean))?, &mean)?;
    merged.clear();
    let mut start = 0;
    for norm in norms {
        let channels = norm.running_mean.size()[0];
        norm.running_mean.f_copy_(&mean.f_narrow(0, start, channels)?)?;
        norm.running_var.f_copy_(&var.f_narrow(0, start, channels)?)?;
        let _ = norm.batches.f_add_scalar_(1)?;
        start += channels;
    }
    Ok(())
}
