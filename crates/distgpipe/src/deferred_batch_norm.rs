//! Batch norm under micro-batches.
//!
//! Each micro-batch is normalised by its own statistics, as anywhere. The running statistics, though, must be what one
//! pass over the whole batch would have left, whatever the number of micro-batches: so they are gathered per
//! micro-batch and committed once a step. Mean and variance are merged from (count, mean, variance) per micro-batch
//! as Chan, Golub and LeVeque do, in double precision; the mean of squares minus the square of the mean would cancel.
//! Recomputation gathers nothing.

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
    // Ordered by micro-batch, so that the result does not depend on the schedule.
    gathered: BTreeMap<MicroBatchId, Gathered>,
}

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
        // With momentum 1 libtorch leaves this micro-batch's own statistics in the scratch tensors.
        let (mean, var) = tch::no_grad(|| Ok::<_, Fault>((running_mean.f_zeros_like()?, running_var.f_zeros_like()?)))?;
        let y = normalise(&mean, &var, true)?;
        if passing == Passing::Train {
            let channels = weight.numel().max(1);
            let count = (x.numel() / channels) as f64;
            let norm = self.norms.entry(place).or_insert_with(|| Norm {
                running_mean: running_mean.shallow_clone(),
                running_var: running_var.shallow_clone(),
                batches: batches.shallow_clone(),
                momentum,
                gathered: BTreeMap::new(),
            });
            // A single value has no variance of its own; libtorch says NaN, but it adds nothing.
            let var = if count > 1.0 { var } else { var.f_zeros_like()? };
            norm.gathered.insert(micro_batch, Gathered { count, mean, var });
        }
        Ok(y)
    }

    /// Brings what has been gathered into the running statistics, and starts anew.
    pub fn commit(&mut self) -> Result<(), Fault> {
        // All norms that saw the same micro-batches are one vector of channels: a model has dozens of norms, and an
        // operation on all of them costs as much as one on a single norm.
        let mut alike: BTreeMap<Vec<MicroBatchId>, Vec<&mut Norm>> = BTreeMap::new();
        for norm in self.norms.values_mut().filter(|n| !n.gathered.is_empty()) {
            alike.entry(norm.gathered.keys().copied().collect()).or_default().push(norm);
        }
        alike.into_values().try_for_each(|mut norms| tch::no_grad(|| commit_together(&mut norms)))
    }

    /// Forgets what has been gathered.
    pub fn discard(&mut self) {
        self.norms.clear();
    }
}

/// Commits norms that saw the same micro-batches. Sums run over micro-batches in their order, value by value, so that
/// no result depends on which other norms are here.
fn commit_together(norms: &mut [&mut Norm]) -> Result<(), Fault> {
    let device = norms[0].running_mean.device();
    let join = |of: &dyn Fn(&Norm) -> &Tensor| -> Result<Tensor, Fault> {
        let parts: Vec<&Tensor> = norms.iter().map(|n| of(n)).collect();
        Ok(Tensor::f_cat(&parts, 0)?.f_to_kind(Kind::Double)?)
    };
    let per_channel = |of: &dyn Fn(&Norm) -> f64| -> Result<Tensor, Fault> {
        let values: Vec<f64> = norms.iter().flat_map(|n| vec![of(n); n.running_mean.numel()]).collect();
        Ok(Tensor::f_from_slice(&values)?.f_to_device(device)?)
    };
    let micro_batches: Vec<MicroBatchId> = norms[0].gathered.keys().copied().collect();
    let mut shares = Vec::new();
    for m in &micro_batches {
        let count = per_channel(&|n| n.gathered[m].count)?;
        let mean = join(&|n| &n.gathered[m].mean)?;
        let within = join(&|n| &n.gathered[m].var)?.f_mul(&count.f_sub_scalar(1.0)?)?;
        shares.push((count, mean, within));
    }
    let total = per_channel(&|n| n.gathered.values().map(|g| g.count).sum())?;
    let mut sum = total.f_zeros_like()?;
    for (count, mean, _) in &shares {
        sum = sum.f_add(&mean.f_mul(count)?)?;
    }
    let mean = sum.f_div(&total)?;
    let mut spread = total.f_zeros_like()?;
    for (count, own_mean, within) in &shares {
        let between = own_mean.f_sub(&mean)?.f_square()?.f_mul(count)?;
        spread = spread.f_add(within)?.f_add(&between)?;
    }
    let var = spread.f_div(&total.f_sub_scalar(1.0)?.f_clamp_min(1.0)?)?;
    let momentum = per_channel(&|n| n.momentum)?;
    let blend = |old: Tensor, new: &Tensor| old.f_add(&new.f_sub(&old)?.f_mul(&momentum)?);
    let mean = blend(join(&|n| &n.running_mean)?, &mean)?;
    let var = blend(join(&|n| &n.running_var)?, &var)?;
    let mut start = 0;
    for norm in norms {
        let channels = norm.running_mean.size()[0];
        norm.running_mean.f_copy_(&mean.f_narrow(0, start, channels)?)?;
        norm.running_var.f_copy_(&var.f_narrow(0, start, channels)?)?;
        let _ = norm.batches.f_add_scalar_(1)?;
        norm.gathered.clear();
        start += channels;
    }
    Ok(())
}
