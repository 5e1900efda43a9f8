//! Random numbers that depend on what is computed, not on which worker computes it or when.
//!
//! A stream is derived from the run's seed and from its place in the computation (step, layer, micro-batch, nth use in
//! that layer). So a recomputation draws the same masks bit for bit, whatever other threads draw in the meantime, and a
//! model's masks and initial weights do not depend on the cut or the placement.

use super::{bytes_mut, ffi, kernels, layout, recorded_draws};
use crate::failure::Fault;
use tch::{Kind, Tensor};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A named source of random numbers. It has no state: filling twice from one stream gives the same values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub(super) u64);

impl Stream {
    /// The root stream of a run.
    pub fn new(seed: u64) -> Self {
        Stream(xxh3_64_with_seed(b"distgpipe", seed))
    }

    /// The substream of a number, such as a layer's.
    pub fn at(self, number: u64) -> Self {
        Stream(xxh3_64_with_seed(&number.to_le_bytes(), self.0))
    }

    /// The substream of a name, such as a parameter's.
    pub fn named(self, name: &str) -> Self {
        Stream(xxh3_64_with_seed(name.as_bytes(), self.0))
    }

    /// The seed of this stream, for generators outside libtorch.
    pub fn seed(self) -> u64 {
        recorded_draws::refuse("numbers from a generator of its own");
        self.0
    }

    /// Fills the tensor with 1 at probability `p`, else with 0, with the same values on a CPU and a GPU. They are in the order of memory
    /// if the tensor is contiguous or channels-last, and in logical order otherwise.
    ///
    /// Elements `2k` and `2k + 1` take the lower and the upper 32 bits of draw `k` of [`Stream::draws`]. An element is 1 if its bits are
    /// below `p · 2^32`, so `p` is rounded to a multiple of `2^-32`.
    pub fn bernoulli(self, tensor: &mut Tensor, p: f64) -> Result<(), Fault> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Fault::engine(format!("expected a probability between 0 and 1, got {p}")));
        }
        let float = super::is_float(tensor);
        let Some(order) = layout(tensor).filter(|_| float && !tensor.requires_grad()) else {
            // libtorch converts the type, skips the gaps and tells autograd.
            let kind = if float { tensor.kind() } else { Kind::Float };
            let mut drawn = Tensor::f_empty(tensor.size(), (kind, tensor.device()))?;
            self.bernoulli(&mut drawn, p)?;
            tensor.f_copy_(&drawn)?;
            return Ok(());
        };
        match tensor.device() {
            tch::Device::Cpu => fill_tensor(tensor, self.0, threshold(p))?,
            tch::Device::Cuda(index) if kernels::check(index).is_ok() => {
                let seed = match recorded_draws::seed_of(self) {
                    Some(recorded) => recorded?,
                    None => Tensor::f_full([1], self.0 as i64, (Kind::Int64, tensor.device()))?,
                };
                kernels::bernoulli(tensor, p, &seed)?;
            }
            _ => {
                recorded_draws::refuse("masks that are drawn on the CPU");
                let mut drawn = super::empty(&tensor.size(), tensor.kind(), order)?;
                fill_tensor(&mut drawn, self.0, threshold(p))?;
                tch::no_grad(|| tensor.f_copy_(&drawn))?;
            }
        }
        ffi::bump_version(tensor);
        Ok(())
    }

    /// Fills the tensor from a normal distribution.
    pub fn normal(self, tensor: &mut Tensor, mean: f64, deviation: f64) -> Result<(), Fault> {
        recorded_draws::refuse("a normal distribution");
        ffi::normal(tensor, mean, deviation, self.0).map_err(Fault::engine)
    }

    /// Fills the tensor from the uniform distribution on [low, high).
    pub fn uniform(self, tensor: &mut Tensor, low: f64, high: f64) -> Result<(), Fault> {
        recorded_draws::refuse("a uniform distribution");
        ffi::uniform(tensor, low, high, self.0).map_err(Fault::engine)
    }

    /// A sequence of numbers from SplitMix64, the same on every machine.
    pub fn draws(self) -> Draws {
        recorded_draws::refuse("numbers on the host");
        Draws(self.0)
    }

    /// Shuffles the items, the same way on every machine.
    pub fn shuffle<T>(self, items: &mut [T]) {
        let mut draws = self.draws();
        for i in (1..items.len()).rev() {
            items.swap(i, draws.below(i + 1));
        }
    }
}

/// The bits of an element of probability `p` are below this number.
pub(super) fn threshold(p: f64) -> u64 {
    // A conversion to an integer saturates.
    (p * 2f64.powi(32)).round() as u64
}

/// Fills a dense tensor of floats on the CPU for [`Stream::bernoulli`].
fn fill_tensor(tensor: &mut Tensor, seed: u64, threshold: u64) -> Result<(), Fault> {
    let kind = tensor.kind();
    let Some(bytes) = bytes_mut(tensor) else {
        return Err(Fault::internal("a dense tensor on the CPU", format!("{tensor:?}")));
    };
    // All bits of an element that is 1, no bits of another one: a branch would be mispredicted half of the time.
    let mask = |half: u32| u64::from(u64::from(half) < threshold).wrapping_neg();
    match kind {
        Kind::Float => fill(bytes, seed, |half| (1f32.to_bits() & mask(half) as u32).to_ne_bytes()),
        Kind::Double => fill(bytes, seed, |half| (1f64.to_bits() & mask(half)).to_ne_bytes()),
        Kind::Half => fill(bytes, seed, |half| (0x3c00 & mask(half) as u16).to_ne_bytes()),
        Kind::BFloat16 => fill(bytes, seed, |half| (0x3f80 & mask(half) as u16).to_ne_bytes()),
        other => return Err(Fault::internal("a tensor of floats", format!("one of {other:?}"))),
    }
    Ok(())
}

/// Fills memory with elements of `SIZE` bytes, each made from half a draw. It is compiled for several instruction sets, because the
/// compiler vectorizes the draws: with AVX-512 an element takes a tenth of the time that it takes without.
fn fill<const SIZE: usize>(bytes: &mut [u8], seed: u64, element: impl Fn(u32) -> [u8; SIZE]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512dq")]
        fn with_avx512<const SIZE: usize>(bytes: &mut [u8], seed: u64, element: impl Fn(u32) -> [u8; SIZE]) {
            fill_inlined(bytes, seed, element);
        }
        #[target_feature(enable = "avx2")]
        fn with_avx2<const SIZE: usize>(bytes: &mut [u8], seed: u64, element: impl Fn(u32) -> [u8; SIZE]) {
            fill_inlined(bytes, seed, element);
        }
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: the processor has these instructions.
            return unsafe { with_avx512(bytes, seed, element) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has these instructions.
            return unsafe { with_avx2(bytes, seed, element) };
        }
    }
    fill_inlined(bytes, seed, element);
}

#[inline(always)]
fn fill_inlined<const SIZE: usize>(bytes: &mut [u8], seed: u64, element: impl Fn(u32) -> [u8; SIZE]) {
    let mut draws = Draws(seed);
    let (elements, _) = bytes.as_chunks_mut::<SIZE>();
    let (pairs, last) = elements.as_chunks_mut::<2>();
    for [first, second] in pairs {
        let bits = draws.bits();
        (*first, *second) = (element(bits as u32), element((bits >> 32) as u32));
    }
    if let [last] = last {
        *last = element(draws.bits() as u32);
    }
}

/// A sequence of random numbers from SplitMix64, which does not involve libtorch.
#[derive(Clone, Debug)]
pub struct Draws(u64);

impl Draws {
    /// The next 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next integer below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        // The high half of the product. Its bias is negligible for bounds below 2^32.
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }

    /// The next number in [low, high).
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        // A double holds 53 bits exactly.
        low + (high - low) * ((self.bits() >> 11) as f64 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::Device;

    fn drawn(seed: u64, dims: &[i64], kind: Kind, p: f64) -> Tensor {
        let mut tensor = Tensor::full(dims, 7.0, (kind, Device::Cpu));
        Stream(seed).bernoulli(&mut tensor, p).unwrap();
        tensor
    }

    fn values(tensor: &Tensor) -> Vec<f64> {
        Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap()
    }

    /// Checkpoints and other processes rely on these values: they never change.
    #[test]
    fn the_first_values_of_a_seed() {
        let expected = [1., 0., 0., 1., 1., 1., 1., 0., 1., 1., 1., 0., 1., 1., 0., 0., 1., 0., 1., 0., 0.];
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64] {
            assert_eq!(values(&drawn(42, &[21], kind, 0.3)), expected, "{kind:?}");
        }
        // The definition: halves of SplitMix64's draws, the first of which are published for the seed 1234567.
        let mut draws = Draws(1_234_567);
        assert_eq!([draws.bits(), draws.bits()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
        for p in [0.0, 1e-9, 0.25, 0.5, 1.0 - 1e-9, 1.0] {
            let mut draws = Draws(42);
            let halves: Vec<u32> =
                (0..11).map(|_| draws.bits()).flat_map(|bits| [bits as u32, (bits >> 32) as u32]).collect();
            let by_definition = halves.iter().map(|&half| f64::from(f64::from(half) < (p * 2f64.powi(32)).round()));
            assert_eq!(values(&drawn(42, &[21], Kind::Float, p)), by_definition.take(21).collect::<Vec<_>>(), "{p}");
        }
    }

    #[test]
    fn the_ends_are_certain_and_other_numbers_refused() {
        assert!(values(&drawn(1, &[100_000], Kind::Float, 1.0)).iter().all(|&value| value == 1.0));
        assert!(values(&drawn(1, &[100_000], Kind::Float, 0.0)).iter().all(|&value| value == 0.0));
        assert_eq!(drawn(1, &[0], Kind::Float, 0.5).numel(), 0);
        for p in [-0.1, 1.1, f64::NAN] {
            let refused = Stream(1).bernoulli(&mut Tensor::zeros([2], (Kind::Float, Device::Cpu)), p).unwrap_err();
            assert!(refused.to_string().contains("expected a probability between 0 and 1"), "{refused}");
        }
    }

    /// A partition boundary makes a transposed tensor contiguous. The mask of a layer must not depend on the cut.
    #[test]
    fn tensors_of_other_strides_are_filled_in_logical_order() {
        let contiguous = drawn(5, &[6, 4], Kind::Float, 0.5);
        let mut transposed = Tensor::zeros([4, 6], (Kind::Float, Device::Cpu)).transpose(0, 1);
        Stream(5).bernoulli(&mut transposed, 0.5).unwrap();
        assert_eq!(transposed, contiguous);
        let base = Tensor::full([6, 9], 3.0, (Kind::Float, Device::Cpu));
        Stream(5).bernoulli(&mut base.narrow(1, 2, 4), 0.5).unwrap();
        assert_eq!(base.narrow(1, 2, 4), contiguous);
        assert!(values(&base.narrow(1, 0, 2)).iter().all(|&value| value == 3.0));
    }

    /// What libtorch has saved for the backward pass must not change unnoticed.
    #[test]
    fn filling_counts_as_a_change_in_place() {
        let mut tensor = Tensor::zeros([8], (Kind::Float, Device::Cpu));
        let before = super::super::version(&tensor);
        Stream(1).bernoulli(&mut tensor, 0.5).unwrap();
        assert!(super::super::version(&tensor) > before);
        let x = Tensor::ones([8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut y = &x * 2.0;
        Stream(1).bernoulli(&mut y, 0.5).unwrap();
        y.sum(Kind::Float).backward();
        assert_eq!(values(&x.grad()), [0.0; 8]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// The mean is `p`, and an element says nothing about the one beside it, about the same one of another stream, or about the
        /// other half of its draw. Each sum is within five standard deviations.
        #[test]
        fn elements_are_independent_and_have_the_mean(seed in any::<u64>(), p in 0.02f64..0.98) {
            const N: usize = 1 << 16;
            let (here, there) = (drawn(seed, &[N as i64], Kind::Float, p), drawn(seed.wrapping_add(1), &[N as i64], Kind::Float, p));
            let (here, there) = (values(&here), values(&there));
            let deviation = (p * (1.0 - p)).sqrt();
            let mean = here.iter().sum::<f64>() / N as f64;
            prop_assert!((mean - p).abs() < 5.0 * deviation / (N as f64).sqrt(), "mean {mean} of {p}");
            let correlation = |pairs: &mut dyn Iterator<Item = (f64, f64)>| {
                let (sum, count) = pairs.fold((0.0, 0.0), |(sum, count), (a, b)| (sum + (a - p) * (b - p), count + 1.0));
                sum / (deviation * deviation * f64::sqrt(count))
            };
            let neighbours = correlation(&mut here.iter().copied().zip(here[1..].iter().copied()));
            let halves = correlation(&mut here.chunks_exact(2).map(|pair| (pair[0], pair[1])));
            let streams = correlation(&mut here.iter().copied().zip(there.iter().copied()));
            for found in [neighbours, halves, streams] {
                prop_assert!(found.abs() < 5.0, "{neighbours} {halves} {streams}");
            }
        }
    }
}
