//! The kernels for AVX2: mostly the portable ones, compiled for it.

use super::super::grid::Quantizer;
use super::super::order_statistics::Pivots;
use super::super::quantile_bins::QuantileBins;
use super::super::tile::{Grids, Ranges};
use super::{portable, Extremes, Noise, Tally, Transposition};
use std::arch::x86_64::{_pdep_u64, _pext_u64};

macro_rules! compiled_for_avx2 {
    ($(fn $name:ident $(<const $constant:ident: $kind:ty>)? ($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[target_feature(enable = "avx2,f16c,bmi1,bmi2,popcnt")]
        pub fn $name $(<const $constant: $kind>)? ($($argument: $type),*) $(-> $result)? {
            portable::$name $(::<$constant>)? ($($argument),*)
        }
    )*};
}

compiled_for_avx2! {
    fn extremes(bytes: &[u8]) -> Extremes;
    fn codes(bytes: &[u8], quantizer: Quantizer, out: &mut [u16]);
    fn values(codes: &[u16], lo: f64, step: f64, out: &mut [u8]);
    fn symbols_of_few<const S: u32>(bytes: &[u8], bins: &QuantileBins, code_bits: u32, out: &mut [u16]);
    fn symbols_of_many(bytes: &[u8], bins: &QuantileBins, bin_bits: u32, code_bits: u32, out: &mut [u16]);
    fn values_of_few(symbols: &[u16], los: &[f32; 16], steps: &[f32; 16], code_bits: u32, out: &mut [u8]);
    fn look_up_few(symbols: &[u16], table: &[f32; 16], out: &mut [u8]);
    fn look_up(symbols: &[u16], table: &[f32], out: &mut [u8]);
    fn f16s(bytes: &[u8], out: &mut [u8]);
    fn values_of_f16s(bytes: &[u8], out: &mut [u8]);
    fn bf16s(bytes: &[u8], out: &mut [u8]);
    fn values_of_bf16s(bytes: &[u8], out: &mut [u8]);
    fn narrow(bytes: &[u8], pivots: &Pivots, tally: &mut Tally, kept: &mut [u8]) -> usize;
    fn transpose(from: &[u8], to: &mut [u8], shape: Transposition);
    fn tile_ends(bytes: &[u8], tile: usize, ranges: &mut Ranges);
    fn tile_ranges(exponent: i32, code_max: u16, ranges: &mut Ranges);
    fn tile_codes(bytes: &[u8], tile: usize, ranges: &Ranges, code_max: u16, out: &mut [u16]);
    fn tile_codes_stochastic(bytes: &[u8], tile: usize, ranges: &Ranges, noise: Noise, out: &mut [u16]);
    fn tile_values(codes: &[u16], tile: usize, grids: &Grids, out: &mut [u8]);
    fn tile_grids(table: &[u8], exponent: i32, grids: &mut Grids);
}

/// A mask of the lowest `W` bits of each of four 16-bit numbers.
const fn lowest<const W: usize>() -> u64 {
    portable::mask(W) as u64 * 0x0001_0001_0001_0001
}

#[target_feature(enable = "avx2,bmi1,bmi2")]
pub fn pack<const W: usize>(codes: &[u16], out: &mut [u8]) {
    portable::pack_by::<W>(codes, out, |group| {
        let four = |at: usize| (0..4).fold(0, |four, code| four | u64::from(group[at + code]) << (16 * code));
        let [low, high] = [0, 4].map(|at| _pext_u64(four(at), lowest::<W>()));
        u128::from(low) | u128::from(high) << (4 * W)
    });
}

#[target_feature(enable = "avx2,bmi1,bmi2")]
pub fn unpack<const W: usize>(bytes: &[u8], out: &mut [u16]) {
    portable::unpack_by::<W>(bytes, out, |word| {
        let [low, high] = [word as u64, (word >> (4 * W)) as u64].map(|four| _pdep_u64(four, lowest::<W>()));
        std::array::from_fn(|at| (if at < 4 { low } else { high } >> (16 * (at % 4))) as u16)
    });
}
