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

use crate::engine::TensorList;
use crate::failure::Fault;
use crate::model::layer::PassMode;
use distgpipe_core::MicroBatchId;
use std::collections::{BTreeMap, BTreeSet, HashMap};
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

/// A batch norm of a partition: the number of its layer, and its number within the layer.
type Position = (usize, usize);

/// The statistics of one batch norm in one micro-batch.
struct MicroBatchStatistics {
    /// How many values of each channel the statistics cover.
    count: f64,
    mean: Tensor,
    /// The unbiased variance of each channel.
    var: Tensor,
}

/// What the batch norms of a partition have collected in one micro-batch. A CUDA graph of the forward pass writes these tensors
/// whenever it is replayed.
#[derive(Default)]
pub(crate) struct CollectedStatistics(Vec<(Position, MicroBatchStatistics)>);

impl MicroBatchStatistics {
    fn shallow_clone(&self) -> Self {
        let MicroBatchStatistics { count, mean, var } = self;
        MicroBatchStatistics { count: *count, mean: mean.shallow_clone(), var: var.shallow_clone() }
    }
}

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

/// The start of each norm's statistics in a [`Scratch`] tensor is a multiple of this many values, so that it
/// is aligned as a tensor of its own would be.
const SCRATCH_ALIGNMENT: u64 = 64;

/// Zeros that the norms of one forward pass fill with their statistics: one tensor for all, because filling one for each norm would
/// launch as many kernels as the norms themselves.
struct Scratch {
    micro_batch: MicroBatchId,
    /// Two rows: means and variances.
    zeros: Tensor,
    /// The norms that have filled their part.
    filled: BTreeSet<Position>,
}

/// The batch norms of a partition.
#[derive(Default)]
pub struct DeferredBatchNorm {
    norms: BTreeMap<Position, Norm>,
    /// Where the statistics of each norm that has run before begin in a scratch tensor.
    scratch_starts: BTreeMap<Position, i64>,
    scratch_length: i64,
    scratch: Option<Scratch>,
    constants: Constants,
}

impl DeferredBatchNorm {
    /// Normalizes `x`. `position` is the layer's number and the norm's number within the layer.
    pub(crate) fn forward(
        &mut self,
        x: &Tensor,
        tensors: NormTensors<'_>,
        mode: PassMode,
        micro_batch: MicroBatchId,
        position: Position,
    ) -> Result<Tensor, Fault> {
        let NormTensors { weight, bias, running_mean, running_var, batches, eps, momentum } = tensors;
        let normalize = |statistics: Option<(&Tensor, &Tensor)>, train: bool| {
            let (mean, var) = statistics.unzip();
            x.f_batch_norm(weight, bias, mean, var, train, 1.0, eps, true)
        };
        if mode == PassMode::Evaluate {
            return Ok(normalize(Some((running_mean, running_var)), false)?);
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
        if mode == PassMode::Recompute {
            return Ok(normalize(None, true)?);
        }
        // With momentum 1, libtorch leaves the statistics of this micro-batch in the two scratch tensors.
        let (mean, var) = tch::no_grad(|| self.scratch(micro_batch, position, running_mean, running_var))?;
        let y = normalize(Some((&mean, &var)), true)?;
        let norm = self.norms.entry(position).or_insert_with(|| Norm {
            running_mean: running_mean.shallow_clone(),
            running_var: running_var.shallow_clone(),
            batches: batches.map(Tensor::shallow_clone),
            momentum,
            merged: None,
            collected: BTreeMap::new(),
        });
        norm.collected.insert(micro_batch, MicroBatchStatistics { count: count as f64, mean, var });
        Ok(y)
    }

    /// Two tensors of zeros for the statistics of a norm.
    fn scratch(
        &mut self,
        micro_batch: MicroBatchId,
        position: Position,
        running_mean: &Tensor,
        running_var: &Tensor,
    ) -> Result<(Tensor, Tensor), Fault> {
        let channels = running_mean.size()[0];
        let Some(&start) = self.scratch_starts.get(&position) else {
            // The first pass finds out which norms there are.
            self.scratch_starts.insert(position, self.scratch_length);
            self.scratch_length += (channels as u64).next_multiple_of(SCRATCH_ALIGNMENT) as i64;
            return Ok((running_mean.f_zeros_like()?, running_var.f_zeros_like()?));
        };
        let (kind, device, length) = (running_mean.kind(), running_mean.device(), self.scratch_length);
        let fits = |scratch: &Scratch| {
            let zeros = &scratch.zeros;
            let unused = scratch.micro_batch == micro_batch && !scratch.filled.contains(&position);
            unused && (zeros.kind(), zeros.size()[1]) == (kind, length)
        };
        let scratch = match self.scratch.take().filter(fits) {
            Some(scratch) => scratch,
            None => {
                Scratch { micro_batch, zeros: Tensor::f_zeros([2, length], (kind, device))?, filled: BTreeSet::new() }
            }
        };
        let scratch = self.scratch.insert(scratch);
        scratch.filled.insert(position);
        let part = |row: i64| scratch.zeros.f_get(row)?.f_narrow(0, start, channels);
        Ok((part(0)?, part(1)?))
    }

    /// Whether the next training pass merges.
    pub(crate) fn is_full(&self) -> bool {
        self.norms.values().any(|norm| norm.collected.len() >= COLLECTED_MAX)
    }

    /// Merges what has been collected if it is much, so that a step of many micro-batches holds few tensors. Must be called before
    /// each forward pass in training, with its micro-batch; the pass itself only collects.
    pub(crate) fn merge_if_full(&mut self, next: MicroBatchId) -> Result<(), Fault> {
        // A pass that failed while it was recorded has left one without values.
        self.scratch = None;
        if self.is_full() {
            // Only norms that have collected every micro-batch before `next`, so that none of them can still be missing.
            let complete = |norm: &&mut Norm| {
                let first = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
                norm.collected.keys().map(|m| m.0).eq(first..next.0)
            };
            merge(self.norms.values_mut().filter(complete), &mut self.constants)?;
        }
        Ok(())
    }

    /// What the last forward pass of a micro-batch has collected. Empty if it was merged already.
    pub(crate) fn collected(&self, micro_batch: MicroBatchId) -> CollectedStatistics {
        let collected =
            self.norms.iter().filter_map(|(position, norm)| Some((position, norm.collected.get(&micro_batch)?)));
        CollectedStatistics(collected.map(|(position, statistics)| (*position, statistics.shallow_clone())).collect())
    }

    /// Enters statistics as if the forward pass of this micro-batch had collected them, for a pass that ran without its layers: the
    /// replay of a CUDA graph. The tensors must not be written again before [`commit`](Self::commit), or before the call of
    /// `merge_if_full` that merges them.
    pub(crate) fn enter(&mut self, micro_batch: MicroBatchId, statistics: &CollectedStatistics) -> Result<(), Fault> {
        for (position, statistics) in &statistics.0 {
            let norm = self.norms.get_mut(position).ok_or_else(|| {
                Fault::internal(
                    "statistics of a batch norm that has run",
                    format!("layer {}, norm {}", position.0, position.1),
                )
            })?;
            norm.collected.insert(micro_batch, statistics.shallow_clone());
        }
        Ok(())
    }

    /// Updates the running statistics with those of the step, and starts the next step.
    pub fn commit(&mut self) -> Result<(), Fault> {
        self.scratch = None;
        merge(self.norms.values_mut().filter(|norm| !norm.collected.is_empty()), &mut self.constants)?;
        let norms = self.norms.values_mut().filter(|norm| norm.merged.is_some());
        tch::no_grad(|| {
            in_turn(norms).iter_mut().try_for_each(|norms| update_running_statistics(norms, &mut self.constants))
        })
    }

    /// Drops the statistics of the step.
    pub fn discard(&mut self) {
        self.scratch = None;
        for norm in self.norms.values_mut() {
            norm.merged = None;
            norm.collected.clear();
        }
    }
}

/// Merges the collected statistics of some norms. Norms that saw the same micro-batches are merged as one vector of
/// channels: a model has dozens of norms, and an operation on all of them costs as much as one on a single norm.
fn merge<'a>(norms: impl Iterator<Item = &'a mut Norm>, constants: &mut Constants) -> Result<(), Fault> {
    let mut groups: BTreeMap<(u32, Vec<MicroBatchId>), Vec<&mut Norm>> = BTreeMap::new();
    for norm in norms {
        let merged = norm.merged.as_ref().map_or(0, |merged| merged.micro_batches);
        groups.entry((merged, norm.collected.keys().copied().collect())).or_default().push(norm);
    }
    groups.into_iter().try_for_each(|((_, micro_batches), mut norms)| {
        tch::no_grad(|| merge_group(&mut norms, &micro_batches, constants))
    })
}

/// How many constants are kept. A step uses five; they depend on the rows of its micro-batches.
const CONSTANTS_MAX: usize = 64;

/// Numbers on the device of the norms, kept from step to step: a copy from the host waits for the device.
#[derive(Default)]
struct Constants(HashMap<(tch::Device, ConstantKey), Tensor>);

#[derive(Clone, PartialEq, Eq, Hash)]
enum ConstantKey {
    /// For each channel of norms with this many channels, the index of its norm.
    NormOfChannel(Vec<usize>),
    /// The bits of one number of each norm, for one micro-batch after another.
    Numbers(Vec<u64>),
}

impl Constants {
    fn get(&mut self, device: tch::Device, key: ConstantKey) -> Result<Tensor, Fault> {
        let key = (device, key);
        if let Some(tensor) = self.0.get(&key) {
            return Ok(tensor.shallow_clone());
        }
        let tensor = match &key.1 {
            ConstantKey::NormOfChannel(channels) => {
                let of_norm = (0..).zip(channels).flat_map(|(i, &channels)| std::iter::repeat_n(i, channels));
                Tensor::f_from_slice(&of_norm.collect::<Vec<i64>>())?
            }
            ConstantKey::Numbers(bits) => {
                Tensor::f_from_slice(&bits.iter().map(|&bits| f64::from_bits(bits)).collect::<Vec<_>>())?
            }
        };
        let tensor = tensor.f_to_device(device)?;
        if self.0.len() >= CONSTANTS_MAX {
            self.0.clear();
        }
        self.0.insert(key, tensor.shallow_clone());
        Ok(tensor)
    }
}

/// Joins values of several norms into vectors of doubles over all their channels.
struct JoinedChannels<'a> {
    norms: i64,
    /// For each channel, the index of its norm.
    norm_of_channel: Tensor,
    constants: &'a mut Constants,
}

impl<'a> JoinedChannels<'a> {
    fn new(norms: &[&mut Norm], constants: &'a mut Constants) -> Result<Self, Fault> {
        let channels = norms.iter().map(|norm| norm.running_mean.numel()).collect();
        let norm_of_channel = constants.get(norms[0].running_mean.device(), ConstantKey::NormOfChannel(channels))?;
        Ok(JoinedChannels { norms: norms.len() as i64, norm_of_channel, constants })
    }

    /// Concatenates tensors of each norm, for one micro-batch after another, to a matrix with a row for each micro-batch.
    fn tensors<'t>(&self, tensors: impl Iterator<Item = &'t Tensor>) -> Result<Tensor, Fault> {
        let parts: Vec<&Tensor> = tensors.collect();
        let joined = Tensor::f_cat(&parts, 0)?.f_to_kind(Kind::Double)?;
        Ok(joined.f_view([-1, self.norm_of_channel.size()[0]])?)
    }

    /// Repeats one number of each norm for all its channels, for one micro-batch after another.
    fn numbers(&mut self, numbers: impl Iterator<Item = f64>) -> Result<Tensor, Fault> {
        let key = ConstantKey::Numbers(numbers.map(f64::to_bits).collect());
        let numbers = self.constants.get(self.norm_of_channel.device(), key)?;
        Ok(numbers.f_view([-1, self.norms])?.f_index_select(1, &self.norm_of_channel)?)
    }
}

/// Merges norms that saw the same micro-batches, in the order of micro-batches and element by element. So the result
/// for a norm depends neither on the other norms nor on how many micro-batches are merged at once.
fn merge_group(
    norms: &mut [&mut Norm],
    micro_batches: &[MicroBatchId],
    constants: &mut Constants,
) -> Result<(), Fault> {
    let mut joined = JoinedChannels::new(norms, constants)?;
    let collected = || micro_batches.iter().flat_map(|m| norms.iter().map(|norm| &norm.collected[m]));
    let own_means = joined.tensors(collected().map(|s| &s.mean))?;
    let own_squares = joined.tensors(collected().map(|s| &s.var))?;
    let own_squares = own_squares.f_mul(&joined.numbers(collected().map(|s| s.count - 1.0))?)?;
    // The values of each channel before each micro-batch, and with it.
    let mut counts: Vec<f64> = norms.iter().map(|n| n.merged.as_ref().map_or(0.0, |merged| merged.count)).collect();
    let mut pairs: Vec<(f64, f64)> = Vec::new();
    for m in micro_batches {
        for (count, norm) in counts.iter_mut().zip(norms.iter()) {
            let own = norm.collected[m].count;
            pairs.push((*count, own));
            *count += own;
        }
    }
    let steps = joined.numbers(pairs.iter().map(|(n, own)| own / (n + own)))?;
    let betweens = joined.numbers(pairs.iter().map(|(n, own)| n * own / (n + own)))?;
    let mut merged = match norms.iter().map(|n| n.merged.as_ref()).collect::<Option<Vec<_>>>() {
        Some(merged) => Some((
            joined.tensors(merged.iter().map(|merged| &merged.mean))?.f_get(0)?,
            joined.tensors(merged.iter().map(|merged| &merged.squares))?.f_get(0)?,
        )),
        None => None,
    };
    for m in 0..micro_batches.len() as i64 {
        let (own_mean, own_squares) = (own_means.f_get(m)?, own_squares.f_get(m)?);
        merged = Some(match merged {
            None => (own_mean, own_squares),
            Some((mean, squares)) => {
                let gap = own_mean.f_sub(&mean)?;
                let squares = squares.f_add(&own_squares)?.f_add(&gap.f_square()?.f_mul(&betweens.f_get(m)?)?)?;
                (mean.f_add(&gap.f_mul(&steps.f_get(m)?)?)?, squares)
            }
        });
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
fn update_running_statistics(norms: &mut [&mut Norm], constants: &mut Constants) -> Result<(), Fault> {
    let merged: Vec<MergedStatistics> = norms.iter_mut().filter_map(|norm| norm.merged.take()).collect();
    if merged.is_empty() {
        return Ok(());
    }
    let mut joined = JoinedChannels::new(norms, constants)?;
    let divisors = joined.numbers(merged.iter().map(|merged| (merged.count - 1.0).max(1.0)))?;
    let momentum = joined.numbers(norms.iter().map(|norm| norm.momentum))?;
    let blend = |old: Tensor, new: &Tensor| old.f_add(&new.f_sub(&old)?.f_mul(&momentum)?);
    let var = joined.tensors(merged.iter().map(|merged| &merged.squares))?.f_div(&divisors)?;
    let var = blend(joined.tensors(norms.iter().map(|norm| &norm.running_var))?, &var)?.f_get(0)?;
    let mean = joined.tensors(merged.iter().map(|merged| &merged.mean))?;
    let mean = blend(joined.tensors(norms.iter().map(|norm| &norm.running_mean))?, &mean)?.f_get(0)?;
    let channels: Vec<i64> = norms.iter().map(|norm| norm.running_mean.size()[0]).collect();
    let running: TensorList =
        norms.iter().map(|norm| &norm.running_mean).chain(norms.iter().map(|norm| &norm.running_var)).collect();
    let updated =
        mean.f_split_with_sizes(&channels[..], 0)?.into_iter().chain(var.f_split_with_sizes(&channels[..], 0)?);
    running.copy_(&updated.collect())?;
    norms.iter().filter_map(|norm| norm.batches.as_ref()).collect::<TensorList>().add_scalar_(1.0)?;
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

    /// Norms of several sizes, the running statistics of each, and passes over them. In double precision, so that the order of
    /// operations shows.
    struct Norms {
        running: Vec<(Tensor, Tensor, Tensor)>,
        deferred: DeferredBatchNorm,
    }

    impl Norms {
        fn new(device: Device) -> Self {
            let norm = |channels: i64| {
                let wave = Tensor::arange(channels, (Kind::Double, device)).sin();
                (&wave * 0.5, &wave * &wave + 0.5, Tensor::zeros([], (Kind::Int64, device)))
            };
            Norms { running: [3, 70, 1].map(norm).into(), deferred: DeferredBatchNorm::default() }
        }

        fn forward(&mut self, rows: i64, micro_batch: u32, mode: PassMode) -> Vec<Tensor> {
            let pass = |(i, (mean, var, batches)): (usize, &(Tensor, Tensor, Tensor))| {
                let (channels, side) = (mean.size()[0], 1 + i as i64);
                let count = rows * channels * side * side;
                let x =
                    (Tensor::arange(count, (Kind::Double, mean.device())) * (0.1 + f64::from(micro_batch))).cos() + 3.0;
                let tensors = NormTensors {
                    weight: None,
                    bias: None,
                    running_mean: mean,
                    running_var: var,
                    batches: Some(batches),
                    eps: 1e-5,
                    momentum: 0.1 * (1 + i) as f64,
                };
                let x = x.view([rows, channels, side, side]);
                self.deferred.forward(&x, tensors, mode, MicroBatchId(micro_batch), (i, 0)).unwrap()
            };
            self.running.iter().enumerate().map(pass).collect()
        }

        fn bits(&self) -> Vec<u64> {
            let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_device(Device::Cpu)).unwrap();
            let all = self.running.iter().flat_map(|(mean, var, _)| [values(mean), values(var)]);
            all.flatten().map(f64::to_bits).collect()
        }
    }

    fn devices() -> impl Iterator<Item = Device> {
        [crate::engine::Device::Cpu, crate::engine::Device::Cuda(0)].into_iter().filter_map(|device| device.open().ok())
    }

    /// Chan's formulas, channel by channel and one micro-batch after another.
    fn committed(running: (f64, f64), of: &[(f64, f64, f64)], momentum: f64) -> (f64, f64) {
        let (mut count, mut mean, mut squares) = (0.0, 0.0, 0.0);
        for &(own, own_mean, own_var) in of {
            let own_squares = own_var * (own - 1.0);
            if count == 0.0 {
                (mean, squares) = (own_mean, own_squares);
            } else {
                let gap = own_mean - mean;
                squares = squares + own_squares + gap * gap * (count * own / (count + own));
                mean += gap * (own / (count + own));
            }
            count += own;
        }
        let blend = |old: f64, new: f64| old + (new - old) * momentum;
        (blend(running.0, mean), blend(running.1, squares / (count - 1.0)))
    }

    /// Two steps of 37 micro-batches of unequal sizes, so that some are merged before the end.
    #[test]
    fn running_statistics_have_the_bits_of_chans_formulas() {
        let host = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_device(Device::Cpu)).unwrap();
        for device in devices() {
            let mut norms = Norms::new(device);
            for step in 0..2 {
                let before: Vec<_> = norms.running.iter().map(|(mean, var, _)| (host(mean), host(var))).collect();
                let mut seen = vec![Vec::new(); before.len()];
                for m in 0..37 {
                    norms.deferred.merge_if_full(MicroBatchId(m)).unwrap();
                    norms.forward(2 + i64::from(m % 3), m, PassMode::Train);
                    for (seen, (_, s)) in seen.iter_mut().zip(norms.deferred.collected(MicroBatchId(m)).0) {
                        seen.push((s.count, host(&s.mean), host(&s.var)));
                    }
                    let held = norms.deferred.norms.values().map(|norm| norm.collected.len()).max();
                    assert!(held <= Some(COLLECTED_MAX), "{held:?} micro-batches are held");
                }
                norms.deferred.commit().unwrap();
                for (i, ((mean, var, batches), (old_mean, old_var))) in norms.running.iter().zip(&before).enumerate() {
                    for (c, got) in host(mean).into_iter().zip(host(var)).enumerate() {
                        let of: Vec<_> = seen[i].iter().map(|(count, mean, var)| (*count, mean[c], var[c])).collect();
                        let expected = committed((old_mean[c], old_var[c]), &of, 0.1 * (1 + i) as f64);
                        assert_eq!(got, expected, "{device:?}: step {step}, norm {i}, channel {c}");
                    }
                    assert_eq!(batches.int64_value(&[]), step + 1);
                }
            }
        }
    }

    #[test]
    fn statistics_that_are_entered_again_count_as_those_of_a_pass() {
        for device in devices() {
            let (mut run, mut replayed) = (Norms::new(device), Norms::new(device));
            for step in 0..2 {
                let statistics: Vec<_> = (0..3)
                    .map(|m| {
                        replayed.forward(2 + i64::from(m), m, PassMode::Train);
                        replayed.deferred.collected(MicroBatchId(m))
                    })
                    .collect();
                replayed.deferred.discard();
                assert!(replayed.deferred.collected(MicroBatchId(0)).0.is_empty());
                for (m, statistics) in (0..).zip(&statistics) {
                    run.forward(2 + i64::from(m), m, PassMode::Train);
                    replayed.deferred.enter(MicroBatchId(m), statistics).unwrap();
                }
                run.deferred.commit().unwrap();
                replayed.deferred.commit().unwrap();
                assert_eq!(replayed.bits(), run.bits(), "{device:?}, step {step}");
            }
            run.forward(2, 0, PassMode::Train);
            let (_, statistics) = run.deferred.collected(MicroBatchId(0)).0.remove(0);
            let unknown = CollectedStatistics(vec![((9, 9), statistics)]);
            assert!(replayed.deferred.enter(MicroBatchId(0), &unknown).is_err());
        }
    }

    /// A pass that runs twice must not find the statistics of the first one in its scratch: 0 · NaN is NaN.
    #[test]
    fn a_repeated_pass_starts_from_zeros() {
        let mut norms = Norms::new(Device::Cpu);
        let y = norms.forward(4, 0, PassMode::Train);
        norms.forward(4, 0, PassMode::Train);
        for (_, statistics) in &mut norms.deferred.collected(MicroBatchId(0)).0 {
            let _ = statistics.mean.fill_(f64::NAN);
        }
        assert_eq!(norms.forward(4, 0, PassMode::Train), y);
        let means = norms.deferred.collected(MicroBatchId(0)).0;
        assert!(means.iter().all(|(_, s)| bool::try_from(s.mean.isfinite().all()).unwrap()));
        assert_eq!(norms.forward(4, 0, PassMode::Recompute), y);
    }
}
