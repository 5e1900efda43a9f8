//! The kernels as plain loops: they run on every processor and are the reference for the other versions.

use super::super::bits::GROUP;
use super::super::floats;
use super::super::grid::{self, Grid, Quantizer};
use super::super::half;
use super::super::order_statistics::{key, Pivots};
use super::super::quantile_bins::{FewGrids, QuantileBins};
use super::super::tile::{Grids, Ranges, ORDINARY_EXPONENT, TILES};
use super::{Extremes, Noise, Tally, Transposition};

#[inline(always)]
pub fn extremes(bytes: &[u8]) -> Extremes {
    floats(bytes).fold(Extremes::default(), |extremes, value| {
        let bits = value.to_bits();
        extremes.and(Extremes { signed_min: bits as i32, signed_max: bits as i32, unsigned_max: bits })
    })
}

pub const fn mask(width: usize) -> u16 {
    u16::MAX >> (16 - width)
}

#[inline(always)]
pub fn pack<const W: usize>(codes: &[u16], out: &mut [u8]) {
    pack_by::<W>(codes, out, join::<W>);
}

/// Packs groups of eight codes; `join` puts a group into the lowest `8 W` bits.
#[inline(always)]
pub fn pack_by<const W: usize>(codes: &[u16], out: &mut [u8], join: impl Fn(&[u16; GROUP]) -> u128) {
    let (groups, rest) = codes.as_chunks::<GROUP>();
    let (rooms, room) = out.split_at_mut(groups.len() * W);
    for (group, room) in groups.iter().zip(rooms.chunks_exact_mut(W)) {
        room.copy_from_slice(&join(group).to_le_bytes()[..W]);
    }
    if !rest.is_empty() {
        let mut group = [0; GROUP];
        group[..rest.len()].copy_from_slice(rest);
        room.copy_from_slice(&join(&group).to_le_bytes()[..room.len()]);
    }
}

#[inline(always)]
pub fn unpack<const W: usize>(bytes: &[u8], out: &mut [u16]) {
    unpack_by::<W>(bytes, out, split::<W>);
}

/// Unpacks groups of eight codes; `split` takes a group from the lowest `8 W` bits.
#[inline(always)]
pub fn unpack_by<const W: usize>(bytes: &[u8], out: &mut [u16], split: impl Fn(u128) -> [u16; GROUP]) {
    let (groups, rest) = out.as_chunks_mut::<GROUP>();
    let (bytes, last) = bytes.split_at(groups.len() * W);
    for (from, group) in bytes.chunks_exact(W).zip(groups) {
        let mut word = [0; 16];
        word[..W].copy_from_slice(from);
        *group = split(u128::from_le_bytes(word));
    }
    if !rest.is_empty() {
        let mut word = [0; 16];
        word[..last.len()].copy_from_slice(last);
        rest.copy_from_slice(&split(u128::from_le_bytes(word))[..rest.len()]);
    }
}

/// Puts eight codes into the lowest `8 W` bits. Codes of up to 8 bits fit one 64-bit accumulator, wider ones need two.
#[inline(always)]
fn join<const W: usize>(codes: &[u16; GROUP]) -> u128 {
    let code = |at: usize| u64::from(codes[at] & mask(W));
    if W <= 8 {
        let word = (0..8).fold(0, |word, at| word | code(at) << (at * W));
        u128::from(word)
    } else {
        let low = (0..4).fold(0, |word, at| word | code(at) << (at * W));
        let high = (0..4).fold(0, |word, at| word | code(at + 4) << (at * W));
        u128::from(low) | u128::from(high) << (4 * W)
    }
}

#[inline(always)]
fn split<const W: usize>(word: u128) -> [u16; GROUP] {
    if W <= 8 {
        let word = word as u64;
        std::array::from_fn(|at| (word >> (at * W)) as u16 & mask(W))
    } else {
        let (low, high) = (word as u64, (word >> (4 * W)) as u64);
        std::array::from_fn(|at| if at < 4 { low >> (at * W) } else { high >> ((at - 4) * W) } as u16 & mask(W))
    }
}

#[inline(always)]
pub fn codes(bytes: &[u8], quantizer: Quantizer, out: &mut [u16]) {
    for (to, value) in out.iter_mut().zip(floats(bytes)) {
        *to = quantizer.code(value);
    }
}

#[inline(always)]
pub fn values(codes: &[u16], lo: f64, step: f64, out: &mut [u8]) {
    let grid = Grid { lo, step };
    for (to, &code) in out.as_chunks_mut().0.iter_mut().zip(codes) {
        *to = grid.value(code).to_ne_bytes();
    }
}

#[inline(always)]
pub fn symbols_of_few<const S: u32>(bytes: &[u8], bins: &QuantileBins, code_bits: u32, out: &mut [u16]) {
    symbols_of_many(bytes, bins, S, code_bits, out);
}

#[inline(always)]
pub fn symbols_of_many(bytes: &[u8], bins: &QuantileBins, bin_bits: u32, code_bits: u32, out: &mut [u16]) {
    let code_max = grid::code_max(code_bits);
    let (least, most) = (bins.begins[0], bins.end);
    let begins = &bins.begins[..1 << bin_bits];
    let per_steps = &bins.per_steps[..1 << bin_bits];
    for (to, value) in out.iter_mut().zip(floats(bytes)) {
        let value = if value < most { value } else { most };
        let value = if value > least { value } else { least };
        // Binary search: each bit of the index, from the highest, is set if the value is not below that bin.
        let mut bin = 0;
        for bit in (0..bin_bits).rev() {
            bin |= usize::from(value >= begins[bin | 1 << bit]) << bit;
        }
        let quantizer = Quantizer { lo: begins[bin].into(), per_step: per_steps[bin], code_max };
        *to = (bin as u16) << code_bits | quantizer.code(value);
    }
}

#[inline(always)]
pub fn values_of_few(symbols: &[u16], grids: &FewGrids, out: &mut [u8]) {
    let mask = grid::code_max(grids.code_bits);
    for (to, &symbol) in out.as_chunks_mut().0.iter_mut().zip(symbols) {
        let bin = usize::from(symbol) >> grids.code_bits & 15;
        let grid = Grid { lo: grids.los[bin].into(), step: grids.steps[bin].into() };
        *to = grid.value(symbol & mask).to_ne_bytes();
    }
}

#[inline(always)]
pub fn look_up_few(symbols: &[u16], table: &[f32; 16], out: &mut [u8]) {
    for (to, &symbol) in out.as_chunks_mut().0.iter_mut().zip(symbols) {
        *to = table[usize::from(symbol & 15)].to_ne_bytes();
    }
}

#[inline(always)]
pub fn look_up(symbols: &[u16], table: &[f32], out: &mut [u8]) {
    for (to, &symbol) in out.as_chunks_mut().0.iter_mut().zip(symbols) {
        *to = table[usize::from(symbol)].to_ne_bytes();
    }
}

#[inline(always)]
pub fn f16s(bytes: &[u8], out: &mut [u8]) {
    for (to, value) in out.as_chunks_mut().0.iter_mut().zip(floats(bytes)) {
        *to = half::f16_from_f32(value).to_le_bytes();
    }
}

#[inline(always)]
pub fn values_of_f16s(bytes: &[u8], out: &mut [u8]) {
    for (to, &from) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        *to = half::f32_from_f16(u16::from_le_bytes(from)).to_ne_bytes();
    }
}

#[inline(always)]
pub fn bf16s(bytes: &[u8], out: &mut [u8]) {
    for (to, value) in out.as_chunks_mut().0.iter_mut().zip(floats(bytes)) {
        *to = half::bf16_from_f32(value).to_le_bytes();
    }
}

#[inline(always)]
pub fn values_of_bf16s(bytes: &[u8], out: &mut [u8]) {
    for (to, &from) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        *to = half::f32_from_bf16(u16::from_le_bytes(from)).to_ne_bytes();
    }
}

#[inline(always)]
pub fn narrow(bytes: &[u8], pivots: &Pivots, tally: &mut Tally, kept: &mut [u8]) -> usize {
    let mut counts = [0u64; 32];
    let mut length = 0;
    for value in floats(bytes) {
        let key = key(value);
        tally.key_min = tally.key_min.min(key);
        tally.key_max = tally.key_max.max(key);
        let segment = pivots.segment(key);
        counts[segment] += 1;
        // Branch-free: every value is written, and the position advances only if the value is kept.
        kept[4 * length..4 * length + 4].copy_from_slice(&value.to_ne_bytes());
        length += (pivots.kept >> segment & 1) as usize;
    }
    let mut at_least = 0;
    for segment in (0..32).rev() {
        at_least += counts[segment];
        tally.at_least[segment] += if segment <= pivots.count { at_least } else { 0 };
    }
    length
}

#[inline(always)]
pub fn keep_values<const N: usize>(bytes: &[u8], mask: &mut [u8], kept: &mut [u32]) -> usize {
    let mut length = 0;
    for (group, mask) in bytes.as_chunks::<N>().0.chunks(8).zip(mask) {
        *mask = 0;
        for (at, bytes) in group.iter().enumerate() {
            let mut wide = [0; 4];
            wide[..N].copy_from_slice(bytes);
            let value = u32::from_le_bytes(wide);
            // Branch-free: the next value overwrites this one if it is 0.
            kept[length] = value;
            length += usize::from(value != 0);
            *mask |= u8::from(value != 0) << at;
        }
    }
    length
}

#[inline(always)]
pub fn spread_values<const N: usize>(mask: &[u8], values: &[u32], out: &mut [u8]) {
    let mut next = 0;
    for (group, mask) in out.as_chunks_mut::<N>().0.chunks_mut(8).zip(mask) {
        for (at, to) in group.iter_mut().enumerate() {
            let is_set = mask >> at & 1;
            to.copy_from_slice(&(values[next] & u32::from(is_set).wrapping_neg()).to_le_bytes()[..N]);
            next += usize::from(is_set);
        }
    }
}

#[inline(always)]
pub fn split_planes<const N: usize>(values: &[u32], planes: [&mut [u8]; N]) {
    for (number, plane) in planes.into_iter().enumerate() {
        for (to, value) in plane.iter_mut().zip(values) {
            // The upper two bytes are rotated by one bit.
            let sign = value >> (8 * N - 1) & 1;
            let upper = value << 1 >> (8 * (N - 2)) & 0xfffe | sign;
            *to = if number < N - 2 { value >> (8 * number) } else { upper >> (8 * (number + 2 - N)) } as u8;
        }
    }
}

#[inline(always)]
pub fn join_planes<const N: usize>(planes: [&[u8]; N], values: &mut [u32]) {
    for (at, to) in values.iter_mut().enumerate() {
        let byte = |plane: usize| u32::from(planes[plane][at]);
        let upper = byte(N - 1) << 8 | byte(N - 2);
        let upper = upper >> 1 | (upper & 1) << 15;
        *to = (0..N - 2).fold(upper << (8 * (N - 2)), |value, plane| value | byte(plane) << (8 * plane));
    }
}

#[inline(always)]
pub fn transpose(from: &[u8], to: &mut [u8], shape: Transposition) {
    let (from, to) = (from.as_chunks::<4>().0, to.as_chunks_mut::<4>().0);
    // A few columns at a time, so that each cache line of a row is used while it is cached.
    for begin in (0..shape.columns).step_by(16) {
        let end = shape.columns.min(begin + 16);
        for row in 0..shape.rows {
            let from = &from[row * shape.from_stride..][begin..end];
            for (column, value) in (begin..end).zip(from) {
                to[column * shape.to_stride + row] = *value;
            }
        }
    }
}

#[inline(always)]
pub fn tile_ends(bytes: &[u8], tile: usize, lo: &mut [f32], hi: &mut [f32]) -> bool {
    for (tile, (to_lo, to_hi)) in bytes.chunks(4 * tile).zip(lo.iter_mut().zip(hi)) {
        let first = floats(tile).next().unwrap_or(0.0);
        let lo = floats(tile).fold(first, |lo, value| if value < lo { value } else { lo });
        let hi = floats(tile).fold(first, |hi, value| if value > hi { value } else { hi });
        // Adding 0.0 turns −0.0 into 0.0.
        (*to_lo, *to_hi) = (lo + 0.0, hi + 0.0);
    }
    floats(bytes).fold(false, |has_nan, value| has_nan | value.is_nan())
}

#[inline(always)]
pub fn tile_ranges(exponent: i32, code_max: u16, ranges: &mut Ranges) {
    ranges.are_ordinary = exponent.unsigned_abs() <= ORDINARY_EXPONENT;
    for at in 0..ranges.count.min(TILES) {
        ranges.find(at, exponent, code_max);
    }
}

#[inline(always)]
pub fn tile_codes(bytes: &[u8], tile: usize, ranges: &Ranges, code_max: u16, out: &mut [u16]) {
    for (at, (tile, out)) in bytes.chunks(4 * tile).zip(out.chunks_mut(tile)).enumerate() {
        codes(tile, Quantizer { lo: ranges.grid_lo[at], per_step: ranges.per_step[at], code_max }, out);
    }
}

#[inline(always)]
pub fn tile_codes_stochastic(bytes: &[u8], tile: usize, ranges: &Ranges, noise: Noise, out: &mut [u16]) {
    for (at, (bytes, out)) in bytes.chunks(4 * tile).zip(out.chunks_mut(tile)).enumerate() {
        let quantizer = Quantizer { lo: ranges.grid_lo[at], per_step: ranges.per_step[at], code_max: noise.code_max };
        for ((to, value), element) in out.iter_mut().zip(floats(bytes)).zip(0u32..) {
            *to = quantizer.code_stochastic(value, grid::random(noise.key, ranges.first[at].wrapping_add(element)));
        }
    }
}

#[inline(always)]
pub fn tile_values(codes: &[u16], tile: usize, grids: &Grids, out: &mut [u8]) {
    for (at, (codes, out)) in codes.chunks(tile).zip(out.chunks_mut(4 * tile)).enumerate() {
        let grid = Grid { lo: grids.lo[at], step: grids.step[at] };
        for (to, &code) in out.as_chunks_mut().0.iter_mut().zip(codes) {
            *to = grid.value_within(code).to_ne_bytes();
        }
    }
}

#[inline(always)]
pub fn tile_grids(table: &[u8], exponent: i32, grids: &mut Grids) {
    for (at, entry) in table.as_chunks::<4>().0.iter().enumerate() {
        let (lo, step) = (u16::from_le_bytes([entry[0], entry[1]]), u16::from_le_bytes([entry[2], entry[3]]));
        grids.set(at, lo, step, exponent);
    }
}
