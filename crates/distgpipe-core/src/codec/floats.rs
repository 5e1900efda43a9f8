//! `F32` values in a tensor's memory and in the tables of a body.

use super::{CodecError, CodecId};

/// How many values the codecs process at a time. A block stays in the first-level cache, and its codes fill whole
/// bytes.
pub(super) const BLOCK: usize = 2048;

/// The values in an `F32` tensor's memory.
#[inline(always)]
pub(super) fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    // The compiler loads an array at once, but the elements of a slice one by one.
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_ne_bytes(bytes))
}

/// The bits of the largest magnitude, which are ordered as magnitudes are; an error if a value is not finite.
pub(super) fn magnitude_max(codec: CodecId, bytes: &[u8]) -> Result<u32, CodecError> {
    const INFINITY: u32 = 0x7f80_0000;
    let magnitudes = || floats(bytes).map(|value| value.to_bits() & 0x7fff_ffff);
    // Signed comparison, because baseline x86-64 has no vector instruction for the unsigned one.
    let max = magnitudes().fold(0, |max, magnitude| i32::max(max, magnitude as i32)) as u32;
    if max < INFINITY {
        return Ok(max);
    }
    let at = magnitudes().position(|magnitude| magnitude >= INFINITY);
    Err(CodecError::NotFinite { codec, at: at.unwrap_or(0) })
}

/// Appends a value in wire order.
pub(super) fn push_f32(out: &mut Vec<u8>, value: f32) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// The value at index `at` of a table in wire order. The caller has checked the table's length.
pub(super) fn take_f32(table: &[u8], at: usize) -> f32 {
    let bytes = &table[4 * at..4 * at + 4];
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}
