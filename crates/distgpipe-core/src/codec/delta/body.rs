//! The head of a `delta` body; the module's documentation has the format.

use super::memory::{Key, Rows, StreamPosition};
use super::{CodecError, CodecId};
use crate::wire::TensorMeta;

/// The first byte of a body that is the whole tensor in the inner codec.
pub(super) const ALONE: u8 = 0;
/// The first byte of a body with rows that both ends remember.
pub(super) const ROWS: u8 = 1;
/// The size of everything before the samples.
pub(super) const HEAD_BYTES: usize = 1 + 8 + 8 + 2;

/// Appends the head of a body with rows.
pub(super) fn push_head(out: &mut Vec<u8>, position: StreamPosition, tensor_index: u16, rows: &Rows) {
    out.push(ROWS);
    out.extend_from_slice(&position.number.to_le_bytes());
    out.extend_from_slice(&position.check.to_le_bytes());
    out.extend_from_slice(&tensor_index.to_le_bytes());
    rows.keys.iter().for_each(|key| out.extend_from_slice(&key.sample.to_le_bytes()));
    let byte = |known: &[bool]| known.iter().enumerate().fold(0, |byte, (at, &known)| byte | u8::from(known) << at);
    out.extend(rows.known.chunks(8).map(byte));
}

/// Reads the head that [`push_head`] wrote; returns it with the rest of the body. The tensor has rows, and these have
/// elements.
pub(super) fn take_head<'a>(
    meta: &TensorMeta,
    body: &'a [u8],
    decoded_bytes: usize,
) -> Result<(StreamPosition, Rows, &'a [u8]), CodecError> {
    let rows = meta.shape.dims()[0] as usize;
    let head_bytes = rows.saturating_mul(8).saturating_add(HEAD_BYTES + rows.div_ceil(8));
    let (head, rest) = body.split_at_checked(head_bytes).ok_or_else(|| too_short(head_bytes, body))?;
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| head[at + byte]));
    let tensor_index = u16::from_le_bytes([head[HEAD_BYTES - 2], head[HEAD_BYTES - 1]]);
    let keys = (0..rows).map(|row| Key { sample: u64_at(HEAD_BYTES + 8 * row), tensor_index }).collect();
    let bits = &head[HEAD_BYTES + 8 * rows..];
    let known = (0..rows).map(|row| bits[row / 8] >> (row % 8) & 1 == 1).collect();
    let position = StreamPosition { number: u64_at(1), check: u64_at(9) };
    Ok((position, Rows { keys, known, row_bytes: decoded_bytes / rows }, rest))
}

/// The number of rows of a body that are sent whole, of all rows, and the length of its head; `None` if the tensor went
/// alone. The body is one that this end has encoded.
pub(super) fn rows_of(dims: &[usize], body: &[u8]) -> Option<(usize, usize, usize)> {
    let rows = *dims.first().filter(|_| body.first() == Some(&ROWS))?;
    let bits_at = HEAD_BYTES + 8 * rows;
    let head_bytes = bits_at + rows.div_ceil(8);
    let known: u32 = body.get(bits_at..head_bytes)?.iter().map(|bits| bits.count_ones()).sum();
    Some((rows - known as usize, rows, head_bytes))
}

pub(super) fn too_short(expected: usize, body: &[u8]) -> CodecError {
    CodecError::BodyLength { codec: CodecId::Delta, expected: expected as u64, got: body.len() as u64 }
}
