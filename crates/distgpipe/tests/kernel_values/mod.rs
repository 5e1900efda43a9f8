//! What the tests of the kernels encode, on the CPU and on a GPU.

use distgpipe_core::codec::{parse, ALL};

/// The texts of all codecs that have a form, without those around others.
pub fn texts() -> impl Iterator<Item = &'static str> {
    let texts = ALL.iter().flat_map(|member| member.examples).copied();
    texts.filter(|text| parse(text).unwrap().form().is_some_and(|form| !form.feedback))
}

/// Numbers that do not repeat soon.
pub fn mixed(seed: u32) -> impl Iterator<Item = u32> {
    (seed..).map(|at| {
        let mixed = (at ^ at >> 16).wrapping_mul(0x7feb_352d);
        let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x846c_a68b);
        mixed ^ mixed >> 16
    })
}

/// Values spread like those of a layer: sums of uniform numbers.
pub fn bell(seed: u32, count: usize) -> Vec<f32> {
    let mut numbers = mixed(seed).map(|number| number as f32 / u32::MAX as f32);
    (0..count).map(|_| (0..4).map(|_| numbers.next().unwrap()).sum::<f32>() - 2.0).collect()
}
