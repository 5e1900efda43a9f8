//! Batch norm under micro-batches.
//!
//! Each micro-batch is normalised by its own statistics, as anywhere. The running statistics, though, must be what one
//! pass over the whole batch would have left, whatever the number of micro-batches: so they are gathered per
//! micro-batch and committed once a step. Mean and variance are merged from (count, mean, variance) per micro-batch
//! as Chan, Golub and LeVeque do, in double precision; E[x²] − mean² would cancel. Recomputation gathers nothing.

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
            norm.gathered.insert(micro_batch, Gathered { count, mean, var });
        }
        Ok(y)
    }

    /// Brings what has been gathered into the running statistics, and starts anew.
    pub fn commit(&mut self) -> Result<(), Fault> {
        for norm in self.norms.values_mut() {
            tch::no_grad(|| norm.commit())?;
        }
        Ok(())
    }

    /// Forgets what has been gathered.
    pub fn discard(&mut self) {
        self.norms.clear();
    }
}

impl Norm {
    fn commit(&mut self) -> Result<(), Fault> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        let gathered: Vec<Gathered> = std::mem::take(&mut self.gathered).into_values().collect();
        let total: f64 = gathered.iter().map(|g| g.count).sum();
        let stack = |of: fn(&Gathered) -> &Tensor| -> Result<Tensor, Fault> {
            let rows: Vec<&Tensor> = gathered.iter().map(of).collect();
            Ok(Tensor::f_stack(&rows, 0)?.f_to_kind(Kind::Double)?)
        };
        let (means, vars) = (stack(|g| &g.mean)?, stack(|g| &g.var)?);
        let column = |of: fn(&Gathered) -> f64| -> Result<Tensor, Fault> {
            let values: Vec<f64> = gathered.iter().map(of).collect();
            Ok(Tensor::f_from_slice(&values)?.f_to_device(means.device())?.f_unsqueeze(1)?)
        };
        let counts = column(|g| g.count)?;
        let mean = (&means * &counts).sum_dim_intlist(0, false, Kind::Double) / total;
        // A micro-batch of a single value has no variance of its own (libtorch says NaN): it adds nothing within.
        let within = vars.f_nan_to_num(0.0, 0.0, 0.0)? * (&counts - 1.0);
        let between = (&means - &mean).square() * &counts;
        let spread = (within + between).sum_dim_intlist(0, false, Kind::Double);
        let var = spread / (total - 1.0).max(1.0);
        let blend = |running: &mut Tensor, new: &Tensor| -> Result<(), Fault> {
            let old = running.f_to_kind(Kind::Double)?;
            let _ = running.f_copy_(&(old * (1.0 - self.momentum) + new * self.momentum))?;
            Ok(())
        };
        blend(&mut self.running_mean, &mean)?;
        blend(&mut self.running_var, &var)?;
        let _ = self.batches.f_add_scalar_(1)?;
        Ok(())
    }
}
