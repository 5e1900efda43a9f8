//! Crops, resizes, mirrors and normalises an image, in one pass over the output.
//!
//! Bilinear interpolation as in torchvision: half-pixel centres, no pixel outside the box is read, and when the image
//! shrinks, the triangle filter covers the source pixels of one output pixel (antialias).
//!
//! ```text
//! source row ─► normalised ─► resized along x ─► kept ┐
//!                                  the rows before ───┴► weighted sum ─► output row
//! ```
//!
//! Normalisation may come first because the weights of a pixel sum to 1. Only the rows that one output row needs are kept,
//! so everything but the output stays in the L1 cache.

use super::Image;
use crate::engine::Layout;

const CHANNELS: usize = 3;

/// The source pixels and weights of each output pixel, along one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Source pixels per output pixel. Unused ones have weight 0.
    taps: usize,
    /// The first source pixel of each output pixel.
    starts: Vec<usize>,
    /// `taps` weights for each output pixel.
    weights: Vec<f32>,
}

/// A resized interval of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizedInterval {
    /// The first source pixel of the interval.
    pub from: usize,
    /// The number of source pixels, at least 1.
    pub length: usize,
    /// The number of output pixels that they are resized to, at least 1.
    pub resized: usize,
    /// The first output pixel that is needed.
    pub first: usize,
}

impl Axis {
    /// The weights of `outputs` pixels of an interval.
    pub fn new(stretch: ResizedInterval, outputs: usize) -> Self {
        let ResizedInterval { from, length, resized, first } = stretch;
        let scale = length as f64 / resized as f64;
        let support = scale.max(1.0);
        let taps = Self::taps_of(length, resized);
        let mut axis = Axis { taps, starts: Vec::with_capacity(outputs), weights: Vec::with_capacity(outputs * taps) };
        for output in first..first + outputs {
            let centre = scale * (output as f64 + 0.5);
            let low = (centre - support + 0.5).max(0.0) as usize;
            // Moved back so that all taps lie within the interval; the first ones may have weight 0.
            let start = low.min(length - taps);
            let weight = |tap: usize| {
                let distance = ((start + tap) as f64 - centre + 0.5).abs() / support;
                (1.0 - distance).max(0.0)
            };
            let sum: f64 = (0..taps).map(weight).sum();
            axis.starts.push(from + start);
            axis.weights.extend((0..taps).map(|tap| (weight(tap) / sum) as f32));
        }
        axis
    }

    /// The number of taps when an interval of this length is resized.
    pub fn taps_of(length: usize, resized: usize) -> usize {
        let support = (length as f64 / resized as f64).max(1.0);
        ((2.0 * support).ceil() as usize).min(length)
    }

    /// Source pixels per output pixel.
    pub fn taps(&self) -> usize {
        self.taps
    }

    /// The first source pixel of each output pixel.
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// The weights of all output pixels, one after the other.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The same weights for the mirrored axis.
    pub fn mirrored(mut self) -> Self {
        self.starts.reverse();
        let reversed = self.weights.chunks_exact(self.taps).rev().flatten().copied().collect();
        self.weights = reversed;
        self
    }

    fn weights_of(&self, output: usize) -> &[f32] {
        &self.weights[output * self.taps..][..self.taps]
    }
}

/// The part of the image to resample, and the form of the output.
#[derive(Clone, Copy, Debug)]
pub struct ResampleSpec<'a> {
    /// The horizontal interval, within the image.
    pub columns: &'a Axis,
    /// The vertical interval, within the image.
    pub lines: &'a Axis,
    /// The normalisation of the colours.
    pub normalisation: Normalisation,
    /// The layout of the output.
    pub layout: Layout,
}

/// The normalisation of each channel: a value from 0 to 255 is scaled, then shifted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalisation {
    /// The scale.
    pub scale: [f32; CHANNELS],
    /// The shift.
    pub shift: [f32; CHANNELS],
}

/// Buffers that are reused between images.
#[derive(Debug, Default)]
pub struct Rows {
    /// A source row, normalised.
    source: Vec<f32>,
    /// Source rows resized along x. Row y is in slot y modulo the taps.
    resized: Vec<f32>,
}

/// Writes the output pixels from top to bottom. `into` has exactly their size.
pub fn resample(image: &Image<'_>, wanted: &ResampleSpec<'_>, rows: &mut Rows, into: &mut [f32]) {
    let ResampleSpec { columns, lines, normalisation, layout } = *wanted;
    let width = CHANNELS * columns.starts.len();
    rows.resized.resize(width * lines.taps, 0.0);
    rows.source.resize(CHANNELS * image.width, 0.0);
    let mut next = 0;
    for (output, &start) in lines.starts.iter().enumerate() {
        next = next.max(start);
        while next < start + lines.taps {
            let source = &image.pixels[CHANNELS * image.width * next..][..CHANNELS * image.width];
            normalise(source, &normalisation, &mut rows.source);
            let slot = &mut rows.resized[next % lines.taps * width..][..width];
            match layout {
                Layout::ChannelsLast => resize_interleaved(&rows.source, columns, slot),
                Layout::Contiguous => resize_planar(&rows.source, columns, slot),
            }
            next += 1;
        }
        let row = |tap: usize| &rows.resized[(start + tap) % lines.taps * width..][..width];
        match layout {
            Layout::ChannelsLast => blend(lines.weights_of(output), row, &mut into[output * width..][..width]),
            Layout::Contiguous => {
                let (plane, side) = (into.len() / CHANNELS, width / CHANNELS);
                for channel in 0..CHANNELS {
                    let part = |tap: usize| &row(tap)[channel * side..][..side];
                    blend(lines.weights_of(output), part, &mut into[channel * plane + output * side..][..side]);
                }
            }
        }
    }
}

fn normalise(pixels: &[u8], by: &Normalisation, into: &mut [f32]) {
    for (into, pixel) in into.chunks_exact_mut(CHANNELS).zip(pixels.chunks_exact(CHANNELS)) {
        for c in 0..CHANNELS {
            into[c] = f32::from(pixel[c]) * by.scale[c] + by.shift[c];
        }
    }
}

/// Resizes a row along x, with interleaved channels.
fn resize_interleaved(row: &[f32], columns: &Axis, into: &mut [f32]) {
    let each = into.chunks_exact_mut(CHANNELS).zip(&columns.starts).zip(columns.weights.chunks_exact(columns.taps));
    for ((into, &start), weights) in each {
        into.copy_from_slice(&pixel(row, start, weights));
    }
}

/// Resizes a row along x, with planar channels.
fn resize_planar(row: &[f32], columns: &Axis, into: &mut [f32]) {
    let side = columns.starts.len();
    for (x, (&start, weights)) in columns.starts.iter().zip(columns.weights.chunks_exact(columns.taps)).enumerate() {
        let pixel = pixel(row, start, weights);
        for c in 0..CHANNELS {
            into[c * side + x] = pixel[c];
        }
    }
}

#[inline]
fn pixel(row: &[f32], start: usize, weights: &[f32]) -> [f32; CHANNELS] {
    let mut sum = [0.0; CHANNELS];
    for (source, weight) in row[CHANNELS * start..].chunks_exact(CHANNELS).zip(weights) {
        for c in 0..CHANNELS {
            sum[c] += source[c] * weight;
        }
    }
    sum
}

/// Writes the weighted sum of rows.
fn blend<'a>(weights: &[f32], row: impl Fn(usize) -> &'a [f32], into: &mut [f32]) {
    if let [first, second] = weights {
        // Two rows, when an image is enlarged: the most frequent case, in one pass.
        return into.iter_mut().zip(row(0)).zip(row(1)).for_each(|((out, a), b)| *out = a * first + b * second);
    }
    into.fill(0.0);
    for (tap, weight) in weights.iter().enumerate() {
        into.iter_mut().zip(row(tap)).for_each(|(out, a)| *out += a * weight);
    }
}
