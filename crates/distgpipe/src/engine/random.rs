//! Random numbers that depend on what is computed, not on which worker computes it or when.
//!
//! A stream is derived from the run's seed and from its place in the computation (step, layer, micro-batch, nth use in
//! that layer). So a recomputation draws the same masks bit for bit, whatever other threads draw in the meantime, and a
//! model's masks and initial weights do not depend on the cut or the placement.

use super::ffi;
use crate::failure::Fault;
use tch::Tensor;
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
        self.0
    }

    /// Fills the tensor with 1 at probability `p`, else with 0.
    pub fn bernoulli(self, tensor: &mut Tensor, p: f64) -> Result<(), Fault> {
        ffi::bernoulli(tensor, p, self.0).map_err(Fault::engine)
    }

    /// Fills the tensor from a normal distribution.
    pub fn normal(self, tensor: &mut Tensor, mean: f64, deviation: f64) -> Result<(), Fault> {
        ffi::normal(tensor, mean, deviation, self.0).map_err(Fault::engine)
    }

    /// Fills the tensor from the uniform distribution on [low, high).
    pub fn uniform(self, tensor: &mut Tensor, low: f64, high: f64) -> Result<(), Fault> {
        ffi::uniform(tensor, low, high, self.0).map_err(Fault::engine)
    }

    /// A sequence of numbers from SplitMix64, the same on every machine.
    pub fn draws(self) -> Draws {
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

/// A sequence of random numbers from SplitMix64, which does not involve libtorch.
#[derive(Clone, Debug)]
pub struct Draws(u64);

impl Draws {
    /// The next 64 random bits.
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
