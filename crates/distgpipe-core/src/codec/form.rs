//! The parameters of codecs whose bodies can be made and read by other means than the code of this crate, such as kernels on a GPU.

use super::half::HalfFormat;
use super::tile::Rounding;

/// What a body holds, and how. The members' files have the formulas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodecForm {
    /// The form of the body.
    pub body: BodyForm,
    /// Whether the encoder adds the error of one tensor to the next one of its slot, as [`feedback`](super::feedback) does.
    pub feedback: bool,
}

/// The form of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyForm {
    /// [`half`](super::half).
    Half(HalfFormat),
    /// [`tile`](super::tile).
    Tile {
        /// The bits of a code.
        bits: u32,
        /// The number of values in a tile.
        tile: u32,
        /// How a value between two codes is rounded.
        rounding: Rounding,
    },
    /// `2^bin_bits` lower ends and as many steps, and then the symbols: [`uniform`](super::uniform), [`sort`](super::sort) and
    /// [`fast`](super::fast).
    Bins {
        /// The bits of a code within its bin.
        code_bits: u32,
        /// The bits of the index of a bin.
        bin_bits: u32,
        /// Where the bins come from.
        ends: BinEnds,
    },
}

/// Where the bins of [`BodyForm::Bins`] come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinEnds {
    /// One bin is the range of the values.
    Range,
    /// The quantiles of the values.
    Quantiles,
    /// The quantiles of a sample of this many values.
    Sample(u32),
}

impl From<BodyForm> for CodecForm {
    fn from(body: BodyForm) -> Self {
        CodecForm { body, feedback: false }
    }
}
