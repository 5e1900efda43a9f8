//! What a codec works with: the processor's instructions, and the threads of its link.

use super::bits::packed_bytes;
use super::simd::{self, Extremes, Level};
use super::{magnitude_max, Alone, CodecError, CodecId, Crew, BLOCK};
use std::fmt;
use std::sync::{Arc, Mutex};

/// Instructions and threads. Neither shows in the bytes.
#[derive(Clone)]
pub(super) struct Hands {
    pub level: Level,
    crew: Arc<dyn Crew>,
}

/// From so many elements on, a tensor is worth waking other threads for.
const SPLIT_MIN: usize = 1 << 18;

/// The most pieces that a tensor is split into, however large the crew.
pub(super) const PIECES_MAX: usize = 32;

impl Hands {
    pub fn set_crew(&mut self, crew: Arc<dyn Crew>) {
        self.crew = crew;
    }

    /// How many elements of so many a piece has: a multiple of `unit`, and such that there are at most [`PIECES_MAX`].
    pub fn piece(&self, elements: usize, unit: usize) -> usize {
        let pieces = if elements < SPLIT_MIN { 1 } else { self.crew.size().clamp(1, PIECES_MAX) };
        elements.div_ceil(pieces).next_multiple_of(unit).max(unit)
    }

    /// Calls `task` with each of at most [`PIECES_MAX`] pieces, at the same time where there is a crew.
    pub fn each<T: Send>(&self, pieces: impl Iterator<Item = T>, task: impl Fn(T) + Sync) {
        let mut pieces = pieces.peekable();
        let first = pieces.next();
        if pieces.peek().is_none() {
            return first.into_iter().for_each(task);
        }
        let mut pieces = first.into_iter().chain(pieces);
        // Each is taken by the one task that has its number.
        let mut count = 0;
        let waiting: [Mutex<Option<T>>; PIECES_MAX] = std::array::from_fn(|_| {
            let piece = pieces.next();
            count += usize::from(piece.is_some());
            Mutex::new(piece)
        });
        debug_assert!(pieces.next().is_none(), "at most {PIECES_MAX} pieces");
        self.crew.run(count, &|number| {
            let piece = waiting[number].lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
            piece.into_iter().for_each(&task);
        });
    }

    /// Appends codes of so many bits for all values: `task` is given values, a multiple of `BLOCK` but for the last, and the
    /// room for their codes.
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
        // A little room at a time, which is still in the cache when it is filled.
        for bytes in bytes.chunks(4 * 8 * BLOCK) {
            let start = out.len();
            out.resize(start + packed_bytes(bytes.len() / 4, bits), 0);
            task(bytes, &mut out[start..]);
        }
    }

    /// The extremes of an `F32` tensor's values; an error if one is not finite.
    pub fn extremes(&self, codec: CodecId, bytes: &[u8]) -> Result<Extremes, CodecError> {
        let mut found = [Extremes::default(); PIECES_MAX];
        let pieces = bytes.chunks(4 * self.piece(bytes.len() / 4, 1)).zip(&mut found);
        self.each(pieces, |(bytes, found)| *found = simd::extremes(self.level, bytes));
        let extremes = found.into_iter().fold(Extremes::default(), Extremes::and);
        check_finite(codec, bytes, extremes.magnitude_max())?;
        Ok(extremes)
    }
}

/// An error if a tensor with this largest magnitude has values that are not finite.
pub(super) fn check_finite(codec: CodecId, bytes: &[u8], magnitude: u32) -> Result<(), CodecError> {
    if magnitude < f32::INFINITY.to_bits() {
        return Ok(());
    }
    // Looks once more, for the place.
    magnitude_max(codec, bytes).map(|_| ())
}

impl Default for Hands {
    fn default() -> Self {
        Hands { level: Level::best(), crew: Arc::new(Alone) }
    }
}

impl fmt::Debug for Hands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hands").field("level", &self.level).field("crew", &self.crew.size()).finish()
    }
}
