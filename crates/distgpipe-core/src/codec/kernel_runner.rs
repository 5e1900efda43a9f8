//! Runs a codec's kernels with the instruction set in use, on the threads of the link.

use super::bits::packed_bytes;
use super::simd::{self, Extremes, Level};
use super::{magnitude_max, CodecError, CodecId, Executor, SerialExecutor, BLOCK};
use std::fmt;
use std::sync::{Arc, Mutex};

/// The instruction set and the executor of a codec. The encoded bytes depend on neither.
#[derive(Clone)]
pub(super) struct KernelRunner {
    pub level: Level,
    executor: Arc<dyn Executor>,
}

/// Tensors with fewer elements are not worth splitting over threads.
const SPLIT_MIN: usize = 1 << 18;

/// The largest number of pieces that a tensor is split into, however many threads there are.
pub(super) const PIECES_MAX: usize = 32;

impl KernelRunner {
    pub fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.executor = executor;
    }

    /// The number of elements in each piece of a tensor: a multiple of `unit`, such that there are at most
    /// [`PIECES_MAX`] pieces.
    pub fn piece(&self, elements: usize, unit: usize) -> usize {
        let pieces = if elements < SPLIT_MIN { 1 } else { self.executor.size().clamp(1, PIECES_MAX) };
        elements.div_ceil(pieces).next_multiple_of(unit).max(unit)
    }

    /// Calls `task` with each of at most [`PIECES_MAX`] pieces, concurrently if the executor has several threads.
    pub fn each<T: Send>(&self, pieces: impl Iterator<Item = T>, task: impl Fn(T) + Sync) {
        let mut pieces = pieces.peekable();
        let first = pieces.next();
        if pieces.peek().is_none() {
            return first.into_iter().for_each(task);
        }
        let mut pieces = first.into_iter().chain(pieces);
        // Each piece is taken by the task with its number.
        let mut count = 0;
        let waiting: [Mutex<Option<T>>; PIECES_MAX] = std::array::from_fn(|_| {
            let piece = pieces.next();
            count += usize::from(piece.is_some());
            Mutex::new(piece)
        });
        debug_assert!(pieces.next().is_none(), "at most {PIECES_MAX} pieces");
        self.executor.run(count, &|number| {
            let piece = waiting[number].lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
            piece.into_iter().for_each(&task);
        });
    }

    /// Appends packed codes of `bits` bits for all values. `task` gets the values of a piece, a multiple of `BLOCK`
    /// except for the last, and the buffer for their codes.
    pub fn append(&self, bytes: &[u8], bits: u32, out: &mut Vec<u8>, task: impl Fn(&[u8], &mut [u8]) + Sync) {
        let elements = bytes.len() / 4;
        let piece = self.piece(elements, BLOCK);
        out.reserve(packed_bytes(elements, bits));
        if piece < elements {
            let start = out.len();
            out.resize(start + packed_bytes(elements, bits), 0);
            let rooms = out[start..].chunks_mut(packed_bytes(piece, bits));
            return self.each(bytes.chunks(4 * piece).zip(rooms), |(bytes, room)| task(bytes, room));
        }
        // The output grows in small steps, so that the zeroed bytes are still in the cache when they are overwritten.
        for bytes in bytes.chunks(4 * 8 * BLOCK) {
            let start = out.len();
            out.resize(start + packed_bytes(bytes.len() / 4, bits), 0);
            task(bytes, &mut out[start..]);
        }
    }

    /// The extremes of an `F32` tensor; an error if a value is not finite.
    pub fn extremes(&self, codec: CodecId, bytes: &[u8]) -> Result<Extremes, CodecError> {
        let mut found = [Extremes::default(); PIECES_MAX];
        let pieces = bytes.chunks(4 * self.piece(bytes.len() / 4, 1)).zip(&mut found);
        self.each(pieces, |(bytes, found)| *found = simd::extremes(self.level, bytes));
        let extremes = found.into_iter().fold(Extremes::default(), Extremes::and);
        check_finite(codec, bytes, extremes.magnitude_max())?;
        Ok(extremes)
    }
}

/// Returns an error if the largest magnitude, given as the bits of an `f32`, is not finite.
pub(super) fn check_finite(codec: CodecId, bytes: &[u8], magnitude: u32) -> Result<(), CodecError> {
    if magnitude < f32::INFINITY.to_bits() {
        return Ok(());
    }
    // A second pass, which finds the index for the error.
    magnitude_max(codec, bytes).map(|_| ())
}

impl Default for KernelRunner {
    fn default() -> Self {
        KernelRunner { level: Level::in_use(), executor: Arc::new(SerialExecutor) }
    }
}

impl fmt::Debug for KernelRunner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelRunner").field("level", &self.level).field("executor", &self.executor.size()).finish()
    }
}
