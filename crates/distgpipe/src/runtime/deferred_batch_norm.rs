//! Batch norm under micro-batches.
//!
//! Each micro-batch is normalized by its own statistics, as in any training with micro-batches. The running statistics
//! must nevertheless be those that one pass over the whole batch would leave, whatever the number of micro-batches. So
//! the layer collects statistics per micro-batch and commits them once a step. Count, mean and variance are merged as
//! Chan, Golub and LeVeque describe, one micro-batch after another, in double precision; the mean of squares minus the
//! square of the mean would cancel. A recomputed forward pass collects nothing.
//!
//! ```text
//!   micro-batches   0 … 15 │ 16 … 31 │ 32 33     collected as libtorch computes them
//!   merged                 ▲         ▲       ▲   for all norms of a partition at once: few tensors are held, and
//!                                        commit   one operation per norm would cost more than the norm itself
//! ```

use crate::failure::Fault;
use crate::model::layer::PassMode;
use distgpipe_core::MicroBatchId;
use std::collections::{BTreeMap, HashMap};
use tch::{Kind, Tensor};

/// The tensors and constants of one batch norm.
pub struct NormTensors<'a> {
    /// The scale of each channel, if it is learned.
    pub weight: Option<&'a Tensor>,
    /// The shift of each channel, if it is learned.
    pub bias: Option<&'a Tensor>,
    /// The running mean of each channel.
    pub running_mean: &'a Tensor,
    /// The running variance of each channel, unbiased as PyTorch stores it.
    pub running_var: &'a Tensor,
    /// How many batches the running statistics have seen (`num_batches_tracked`), if they are counted.
    pub batches: Option<&'a Tensor>,
    /// Added to the variance before the division.
    pub eps: f64,
    /// The weight of a new batch in the running statistics.
    pub momentum: f64,
}

/// The statistics of one micro-batch.
struct MicroBatchStatistics {
    /// How many values of each channel the statistics cover.
    count: f64,
    mean: Tensor,
    /// The unbiased variance of each channel.
    var: Tensor,
}

impl MicroBatchStatistics {
    fn shallow_clone(&self) -> Self {
        MicroBatchStatistics { count: self.count, mean: self.mean.shallow_clone(), var: self.var.shallow_clone() }
    }
}

/// What the norms of a partition have collected of one micro-batch.
#[derive(Default)]
pub(crate) struct CollectedStatistics(Vec<((usize, usize), MicroBatchStatistics)>);

/// The merged statistics of the first micro-batches of a step.
struct MergedStatistics {
    micro_batches: u32,
    /// How many values of each channel the statistics cover.
    count: f64,
    mean: Tensor,
    /// The sum of squared differences from the mean.
    squares: Tensor,
}

/// One batch norm: handles of its running statistics, and the statistics of the current step.
struct Norm {
    running_mean: Tensor,
    running_var: Tensor,
    batches: Option<Tensor>,
    momentum: f64,
    merged: Option<MergedStatistics>,
    /// Not merged yet. Ordered by micro-batch, so that the result does not depend on the schedule.
    collected: BTreeMap<MicroBatchId, MicroBatchStatistics>,
}

/// How many micro-batches are collected before they are merged.
const COLLECTED_MAX: usize = 16;

/// The batch norms of a partition, by layer and position within the layer.
#[derive(Default)]
pub struct DeferredBatchNorm {
    norms: BTreeMap<(usize, usize), Norm>,
}

impl DeferredBatchNorm {
    /// Normalizes `x`. `position` is the layer's number and the norm's number within the layer.
    pub(crate) fn forward(
        &mut self,
        x: &Tensor,
        tensors: NormTensors<'_>,
        mode: PassMode,
        micro_batch: MicroBatchId,
        position: (usize, usize),
    ) -> Result<Tensor, Fault> {
        let NormTensors { weight, bias, running_mean, running_var, batches, eps, momentum } = tensors;
        let normalize = |mean: &Tensor, var: &Tensor, train: bool| {
            x.f_batch_norm(weight, bias, Some(mean), Some(var), train, 1.0, eps, true)
        };
        if mode == PassMode::Evaluate {
            return Ok(normalize(running_mean, running_var, false)?);
        }
        let count = x.numel() / running_mean.numel().max(1);
        if count < 2 {
            let source = format!(
                "a batch norm in training needs more than one value of each channel in a micro-batch, got an input of \
                 {:?}; raise `LoaderOptions::batch_rows`, lower `Builder::micro_batches`, or use larger images",
                x.size()
            );
            return Err(Fault::invalid_job("the size of a micro-batch", source));
        }
        // With momentum 1, libtorch leaves the statistics of this micro-batch in the two scratch tensors.
        let (mean, var) = tch::no_grad(|| Ok::<_, Fault>((running_mean.f_zeros_like()?, running_var.f_zeros_like()?)))?;
        let y = normalize(&mean, &var, true)?;
        if mode == PassMode::Train {
            let norm = self.norms.entry(position).or_insert_with(|| Norm {
                running_mean: running_mean.shallow_clone(),
                running_var: running_var.shallow_clone(),
                batches: batches.map(Tensor::shallow_clone),
                momentum,
                merged: None,
                collected: BTreeMap::new(),
            });
            norm.collected.insert(micro_batch, MicroBatchStatistics { count: count as f64, mean, var });
        }
        Ok(y)
    }

    /// Must be called before each training pass: if many micro-batches have been collected, merges the norms that have all those
    /// before `next`, so that none of them can still be missing.
    pub(crate) fn merge_if_full(&mut self, next: MicroBatchId) -> Result<(), Fault> {
        if !self.norms.values().any(|norm| norm.collected.len() >= COLLECTED_MAX) {
            return Ok(());
        }
        let complete = |norm: &&mut Norm| {
            let first = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
            norm.collected.keys().map(|m| m.0).eq(first..next.0)
        };
        merge(self.norms.values_mut().filter(complete))
    }

    /// Updates the running statistics with those of the step, and starts the next step.
    pub fn commit(&mut self) -> Result<(), Fault> {
        merge(self.norms.values_mut().filter(|norm| !norm.collected.is_empty()))?;
        let norms = self.norms.values_mut().filter(|norm| norm.merged.is_some());
        tch::no_grad(|| in_turn(norms).iter_mut().try_for_each(|norms| update_running_statistics(norms)))
    }

    /// What the norms have collected of a micro-batch, to be [entered](Self::enter) again when a CUDA graph has computed new values
    /// in the same memory.
    pub(crate) fn collected(&self, micro_batch: MicroBatchId) -> CollectedStatistics {
        let collected = self.norms.iter().filter_map(|(place, norm)| {
            norm.collected.get(&micro_batch).map(|statistics| (*place, statistics.shallow_clone()))
        });
        CollectedStatistics(collected.collect())
    }

    /// Enters statistics that were collected before.
    pub(crate) fn enter(&mut self, micro_batch: MicroBatchId, statistics: &CollectedStatistics) -> Result<(), Fault> {
        for (place, statistics) in &statistics.0 {
            let norm = self.norms.get_mut(place).ok_or_else(|| Fault::internal("a batch norm that has run", "none"))?;
            norm.collected.insert(micro_batch, statistics.shallow_clone());
        }
        Ok(())
    }

    /// Drops the statistics of the step.
    pub fn discard(&mut self) {
        for norm in self.norms.values_mut() {
            norm.merged = None;
            norm.collected.clear();
        }
    }
}

/// Merges the collected statistics of some norms. Norms that saw the same micro-batches are merged as one vector of
/// channels: a model has dozens of norms, and an operation on all of them costs as much as one on a single norm.
fn merge<'a>(norms: impl Iterator<Item = &'a mut Norm>) -> Result<(), Fault> {
    let mut groups: BTreeMap<(u32, Vec<MicroBatchId>), Vec<&mut Norm>> = BTreeMap::new();
    for norm in norms {
        let merged = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
        groups.entry((merged, norm.collected.keys().copied().collect())).or_default().push(norm);
    }
    groups
        .into_iter()
        .try_for_each(|((_, micro_batches), mut norms)| tch::no_grad(|| merge_group(&mut norms, &micro_batches)))
}

/// Joins values of several norms into one vector of doubles over all their channels.
struct JoinedChannels {
    /// For each channel, the index of its norm.
    norm: Tensor,
}

impl JoinedChannels {
    fn new(norms: &[&mut Norm]) -> Result<Self, Fault> {
        let channels = norms.iter().map(|norm| norm.running_mean.numel());
        let norm: Vec<i64> = (0..).zip(channels).flat_map(|(i, channels)| std::iter::repeat_n(i, channels)).collect();
        Ok(JoinedChannels { norm: Tensor::f_from_slice(&norm)?.f_to_device(norms[0].running_mean.device())? })
    }

    /// Concatenates one tensor of each norm.
    fn tensors<'a>(&self, tensors: impl Iterator<Item = &'a Tensor>) -> Result<Tensor, Fault> {
        let parts: Vec<&Tensor> = tensors.collect();
        Ok(Tensor::f_cat(&parts, 0)?.f_to_kind(Kind::Double)?)
    }

    /// Repeats one number of each norm for all its channels.
    fn numbers(&self, numbers: impl Iterator<Item = f64>) -> Result<Tensor, Fault> {
        let numbers: Vec<f64> = numbers.collect();
        let numbers = Tensor::f_from_slice(&numbers)?.f_to_device(self.norm.device())?;
        Ok(numbers.f_index_select(0, &self.norm)?)
    }
}

/// Merges norms that saw the same micro-batches, in the order of micro-batches and element by element. So the result
/// for a norm depends neither on the other norms nor on how many micro-batches are merged at once.
fn merge_group(norms: &mut [&mut Norm], micro_batches: &[MicroBatchId]) -> Result<(), Fault> {
    let joined = JoinedChannels::new(norms)?;
    let mut counts: Vec<f64> = norms.iter().map(|n| n.merged.as_ref().map_or(0.0, |merged| merged.count)).collect();
    let mut merged = match norms.iter().map(|n| n.merged.as_ref()).collect::<Option<Vec<_>>>() {
        Some(merged) => Some((
            joined.tensors(merged.iter().map(|merged| &merged.mean))?,
            joined.tensors(merged.iter().map(|merged| &merged.squares))?,
        )),
        None => None,
    };
    for m in micro_batches {
        let collected = || norms.iter().map(|norm| &norm.collected[m]);
        let own_mean = joined.tensors(collected().map(|s| &s.mean))?;
        let own_squares =
            joined.tensors(collected().map(|s| &s.var))?.f_mul(&joined.numbers(collected().map(|s| s.count - 1.0))?)?;
        merged = Some(match merged {
            None => (own_mean, own_squares),
            Some((mean, squares)) => {
                let pairs = || counts.iter().zip(collected().map(|s| s.count));
                let step = joined.numbers(pairs().map(|(n, own)| own / (n + own)))?;
                let between = joined.numbers(pairs().map(|(n, own)| n * own / (n + own)))?;
                let gap = own_mean.f_sub(&mean)?;
                let squares = squares.f_add(&own_squares)?.f_add(&gap.f_square()?.f_mul(&between)?)?;
                (mean.f_add(&gap.f_mul(&step)?)?, squares)
            }
        });
        let own: Vec<f64> = collected().map(|s| s.count).collect();
        counts.iter_mut().zip(own).for_each(|(count, own)| *count += own);
    }
    let Some((mean, squares)) = merged else { return Ok(()) };
    let mut start = 0;
    for (norm, count) in norms.iter_mut().zip(counts) {
        let channels = norm.running_mean.size()[0];
        let before = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
        norm.merged = Some(MergedStatistics {
            micro_batches: before + u32::try_from(micro_batches.len()).unwrap_or(u32::MAX),
            count,
            mean: mean.f_narrow(0, start, channels)?,
            squares: squares.f_narrow(0, start, channels)?,
        });
        norm.collected.clear();
        start += channels;
    }
    Ok(())
}

/// Divides norms into groups in which no two have the same running statistics: a module that is called twice has two
/// norms, and as in PyTorch, the second update starts from the result of the first.
fn in_turn<'a>(norms: impl Iterator<Item = &'a mut Norm>) -> Vec<Vec<&'a mut Norm>> {
    let mut calls: HashMap<*mut std::ffi::c_void, usize> = HashMap::new();
    let mut groups: Vec<Vec<&mut Norm>> = Vec::new();
    for norm in norms {
        let call = calls.entry(norm.running_mean.data_ptr()).or_default();
        if groups.len() == *call {
            groups.push(Vec::new());
        }
        groups[*call].push(norm);
        *call += 1;
    }
    groups
}

/// Blends the merged statistics into the running statistics, which no two of the norms share.
fn update_running_statistics(norms: &mut [&mut Norm]) -> Result<(), Fault> {
    let mut merged: Vec<MergedStatistics> = norms.iter_mut().filter_map(|norm| norm.merged.take()).collect();
    if merged.is_empty() {
        return Ok(());
    }
    let joined = JoinedChannels::new(norms)?;
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
        if let Some(batches) = &mut norm.batches {
            let _ = batches.f_add_scalar_(1)?;
        }
        start += channels;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// A module that is called twice once lost the first of its two updates.
    #[test]
    fn a_batch_norm_that_is_called_twice_updates_its_statistics_twice() {
        let batch = |seed: i64| (Tensor::arange(24, (Kind::Float, Device::Cpu)) * seed).sin().view([8, 3]);
        let state = || (Tensor::zeros([3], (Kind::Float, Device::Cpu)), Tensor::ones([3], (Kind::Float, Device::Cpu)));
        let (expected, got) = (state(), state());
        let inputs = [batch(1), batch(2)];
        for x in &inputs {
            let none = None::<&Tensor>;
            let _ = x.f_batch_norm(none, none, Some(&expected.0), Some(&expected.1), true, 0.1, 1e-5, true).unwrap();
        }
        let batches = Tensor::zeros([1], (Kind::Int64, Device::Cpu));
        let mut norms = DeferredBatchNorm::default();
        for micro_batch in 0..2 {
            for (call, x) in inputs.iter().enumerate() {
                let tensors = NormTensors {
                    weight: None,
                    bias: None,
                    running_mean: &got.0,
                    running_var: &got.1,
                    batches: Some(&batches),
                    eps: 1e-5,
                    momentum: 0.1,
                };
                let x = x.narrow(0, 4 * i64::from(micro_batch), 4);
                let _ = norms.forward(&x, tensors, PassMode::Train, MicroBatchId(micro_batch), (0, call)).unwrap();
            }
        }
        norms.commit().unwrap();
        for (expected, got) in [(&expected.0, &got.0), (&expected.1, &got.1)] {
            let gap = f64::try_from((expected - got).abs().max()).unwrap();
            assert!(gap < 1e-6, "expected {expected:?}, got {got:?}");
        }
        assert_eq!(batches.int64_value(&[0]), 2);
    }
}
