//! Reads and writes channels-last tensors in logical order, a few planes at a time.
//!
//! ```text
//! memory    pixel 0: c₀ c₁ c₂ …   pixel 1: c₀ c₁ c₂ …        logical   c₀: pixel 0, 1, 2 …   c₁: pixel 0, 1, 2 …
//! ```
//!
//! A cache line has 16 channels of one pixel. The channels of two lines are transposed together. If planes consist of
//! whole units, this is done in strips of pixels that fit the first-level cache when they are read, and the second when
//! they are written; otherwise in whole planes.

use super::simd::{self, Level, Transposition};
use crate::wire::Layout;
use std::ops::Range;

/// The shape of the samples of a channels-last tensor with several channels and several pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChannelPlanes {
    pub channels: usize,
    /// The number of pixels in one plane.
    pub pixels: usize,
}

/// The number of planes that are transposed together: those of two cache lines.
const TOGETHER: usize = 32;

/// Rows of consecutive values: the index of the first value, the number of rows, the distance from one to the next in
/// logical order, and the length of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub first: usize,
    pub count: usize,
    pub stride: usize,
    pub length: usize,
}

/// The approximate number of pixels in a strip that is read, and in one that is written.
const READ_STRIP: usize = 128;
const WRITE_STRIP: usize = 1024;

/// The number of unused values between two strips in the buffer for writing. Without it, strips at distances of a power of two
/// would compete for the same cache sets.
const GAP: usize = 16;

/// The smallest number of values that are transposed together if planes are not whole units.
const WHOLE_MIN: usize = 1 << 13;

impl ChannelPlanes {
    /// The planes of a tensor whose number of elements fits a `usize`; `None` if its order in memory is the logical one.
    pub fn of(layout: Layout, dims: &[usize]) -> Option<ChannelPlanes> {
        match (layout, dims) {
            // The product of the other dimensions may overflow.
            _ if dims.contains(&0) => None,
            (Layout::ChannelsLast, &[_, channels, height, width]) if channels > 1 && height * width > 1 => {
                Some(ChannelPlanes { channels, pixels: height * width })
            }
            _ => None,
        }
    }

    /// A tensor may be read in pieces whose size is a multiple of this.
    pub fn unit(self, unit: usize) -> usize {
        if self.pixels.is_multiple_of(unit) {
            self.pixels
        } else {
            unit
        }
    }

    /// Calls `take` with parts of the values in `range`, in an order that suits the memory: rows that follow each other
    /// without a gap. Each row begins at a multiple of `unit`, and ends at one or at the end of the range.
    pub fn read(
        self,
        level: Level,
        memory: &[u8],
        range: Range<usize>,
        unit: usize,
        room: &mut Vec<u8>,
        mut take: impl FnMut(Rows, &[u8]),
    ) {
        if !self.pixels.is_multiple_of(unit) {
            let block = (TOGETHER * self.pixels).max(WHOLE_MIN).next_multiple_of(unit);
            for first in range.clone().step_by(block) {
                let length = block.min(range.end - first);
                room.resize(room.len().max(4 * length), 0);
                self.gather(level, memory, first, &mut room[..4 * length]);
                take(Rows { first, count: 1, stride: 0, length }, &room[..4 * length]);
            }
            return;
        }
        let strip = unit * (READ_STRIP / unit).max(1);
        self.strips(range, strip, TOGETHER, |plane, planes, pixels| {
            let length = pixels.len();
            room.resize(room.len().max(4 * length * planes), 0);
            let from = &memory[4 * self.place(plane, pixels.start)..];
            let shape = Transposition { rows: length, columns: planes, from_stride: self.channels, to_stride: length };
            simd::transpose(level, from, room, shape);
            let first = plane * self.pixels + pixels.start;
            take(Rows { first, count: planes, stride: self.pixels, length }, &room[..4 * length * planes]);
        });
    }

    /// The inverse: calls `make` to fill parts of the values in `range`, which are whole samples, and writes them to
    /// `memory`. Each part begins at a multiple of the first of `units`, and ends at one or at the second.
    pub fn write(
        self,
        level: Level,
        memory: &mut [u8],
        range: Range<usize>,
        units: (usize, usize),
        room: &mut Vec<u8>,
        mut make: impl FnMut(usize, &mut [u8]),
    ) {
        let (unit, end) = units;
        let base = range.start;
        let aligned = self.pixels.is_multiple_of(unit);
        let strip = if aligned { unit * (WRITE_STRIP / unit).max(1) } else { self.pixels };
        let together = if aligned { TOGETHER } else { TOGETHER.max(WHOLE_MIN / self.pixels) };
        self.strips(range, strip, together, |plane, planes, pixels| {
            // A part that is not made of whole units is extended to them.
            let first = plane * self.pixels + pixels.start;
            let begin = first / unit * unit;
            let stride = if aligned { pixels.len() + GAP } else { pixels.len() };
            if aligned {
                room.resize(room.len().max(4 * stride * planes), 0);
                for (at, values) in room.chunks_exact_mut(4 * stride).take(planes).enumerate() {
                    make((plane + at) * self.pixels + pixels.start, &mut values[..4 * pixels.len()]);
                }
            } else {
                let made = (first + stride * planes).next_multiple_of(unit).min(end) - begin;
                room.resize(room.len().max(4 * made), 0);
                make(begin, &mut room[..4 * made]);
            }
            let from = &room[4 * (first - begin)..];
            let to = &mut memory[4 * (self.place(plane, pixels.start) - base)..];
            let shape =
                Transposition { rows: planes, columns: pixels.len(), from_stride: stride, to_stride: self.channels };
            simd::transpose(level, from, to, shape);
        });
    }

    /// The index in memory of a pixel of a plane. Planes are counted through all samples.
    fn place(self, plane: usize, pixel: usize) -> usize {
        let (sample, channel) = (plane / self.channels, plane % self.channels);
        (sample * self.pixels + pixel) * self.channels + channel
    }

    /// Calls `each` with the first plane, the number of planes of one sample, and the pixels of each strip in a range
    /// of whole planes.
    fn strips(
        self,
        range: Range<usize>,
        strip: usize,
        together: usize,
        mut each: impl FnMut(usize, usize, Range<usize>),
    ) {
        let (mut plane, end) = (range.start / self.pixels, range.end / self.pixels);
        while plane < end {
            // The remaining planes of a sample. All planes of a strip are adjacent in memory.
            let left = (self.channels - plane % self.channels).min(end - plane);
            for begin in (0..self.pixels).step_by(strip) {
                for first in (0..left).step_by(together) {
                    each(plane + first, together.min(left - first), begin..self.pixels.min(begin + strip));
                }
            }
            plane += left;
        }
    }

    /// Fills `out` with consecutive values from index `first` on.
    fn gather(self, level: Level, memory: &[u8], mut first: usize, mut out: &mut [u8]) {
        while !out.is_empty() {
            let (plane, pixel) = (first / self.pixels, first % self.pixels);
            let wanted = out.len() / 4;
            let whole = (wanted / self.pixels).min(self.channels - plane % self.channels);
            // Part of a plane, or as many whole planes as fit.
            let (columns, rows) =
                if pixel > 0 || whole == 0 { (1, wanted.min(self.pixels - pixel)) } else { (whole, self.pixels) };
            let (room, rest) = out.split_at_mut(4 * rows * columns);
            let shape = Transposition { rows, columns, from_stride: self.channels, to_stride: rows };
            simd::transpose(level, &memory[4 * self.place(plane, pixel)..], room, shape);
            (first, out) = (first + rows * columns, rest);
        }
    }
}
