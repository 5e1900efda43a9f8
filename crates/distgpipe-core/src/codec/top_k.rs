//! `topk:F`: the fraction `F` of the values with the largest magnitude, and their positions. The others decode to 0.
//!
//! ```text
//! body   how u8 | kept u64 | kept × value f32 | positions          at most 9 + 4 ⌈Fn⌉ + ⌈n/8⌉ bytes
//!        how = 0      positions are a bitmap of the n values, lowest bit first
//!        how = 1 + r  positions are gaps in Rice code with r low bits (`rice.rs`)
//! ```
//!
//! Of n values the `⌈Fn⌉` of largest magnitude are sent without loss; among equal ones, the first. Zeros (and −0) are
//! never sent, because they decode to 0 anyway: after a ReLU, the values that it has zeroed cost nothing. With `F` 0.1
//! a gap takes 4.7 bits, where a bitmap would take 10 bits for each value kept: 3.7 bits a value in all.
//!
//! The small values are always the ones that are dropped, so this codec is meant for use with error feedback:
//! `feedback(topk:F)`. Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); Stich et al.,
//! "Sparsified SGD with Memory" (2018).

use super::rice;
use super::{check_f32, check_meta, elements_of, floats, magnitude_max};
use super::{Arguments, Codec, CodecContext, CodecError, CodecId, Member, TensorView};
use crate::wire::{DType, TensorMeta};

pub(super) const MEMBER: Member = Member {
    name: "topk",
    id: CodecId::TopK,
    examples: &["topk:0.1", "topk:0.01", "topk:0.5", "topk:0.333333333", "topk:1"],
    about: "topk:F, the fraction F of the values with the largest magnitude, exactly; the others become 0",
    parse,
};

const EXPECTED: &str = "topk:F with F a fraction above 0 and at most 1, of up to 9 decimals, such as topk:0.1";
const DECIMALS_MAX: usize = 9;
/// The whole that `TopK::parts` are parts of.
const WHOLE: u64 = 1_000_000_000;

/// The first byte of a body with a bitmap.
const BITMAP: u8 = 0;
const HEAD_BYTES: usize = 1 + 8;

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("topk", EXPECTED)?;
    let codec = parts(got).and_then(TopK::new);
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("topk", EXPECTED, got))
}

/// Parses a decimal fraction to billionths. Exact, unlike a float, so that ⌈0.1 · 30⌉ is 3.
fn parts(text: &str) -> Option<u64> {
    let (whole, decimals) = match text.split_once('.') {
        Some((_, "")) => return None,
        Some((whole, decimals)) => (whole, decimals),
        None => (text, ""),
    };
    let digits = decimals.len() <= DECIMALS_MAX && decimals.bytes().all(|byte| byte.is_ascii_digit());
    let padded = digits.then(|| format!("{decimals:0<9}"))?;
    let whole = ["0", "1"].iter().position(|&digit| digit == whole)? as u64;
    Some(whole * WHOLE + padded.parse::<u64>().ok()?)
}

/// The codec `topk:F`, with buffers that are reused.
#[derive(Clone, Debug)]
pub struct TopK {
    /// The fraction, in billionths.
    parts: u64,
    magnitudes: Vec<u32>,
    positions: Vec<usize>,
}

impl TopK {
    /// The codec that keeps this many billionths of a tensor, at least 1; `None` for other numbers.
    pub fn new(parts: u64) -> Option<Self> {
        (1..=WHOLE).contains(&parts).then(|| TopK { parts, magnitudes: Vec::new(), positions: Vec::new() })
    }

    /// The largest number of values that are kept of this many.
    fn most(&self, elements: usize) -> usize {
        (elements as u128 * u128::from(self.parts)).div_ceil(u128::from(WHOLE)) as usize
    }

    /// Sets `self.positions` to the positions of the values to keep.
    fn select(&mut self, bytes: &[u8], most: usize) {
        let magnitude = |value: f32| value.to_bits() & 0x7fff_ffff;
        self.magnitudes.clear();
        self.magnitudes.extend(floats(bytes).map(magnitude).filter(|&magnitude| magnitude > 0));
        // The smallest magnitude that is kept, and how many values of that magnitude.
        let (least, mut equal) = if self.magnitudes.len() <= most {
            (1, most)
        } else {
            let (larger, least, _) = self.magnitudes.select_nth_unstable_by(most - 1, |a, b| b.cmp(a));
            let above = larger.iter().filter(|&magnitude| magnitude > least).count();
            (*least, most - above)
        };
        self.positions.clear();
        for (at, magnitude) in floats(bytes).map(magnitude).enumerate() {
            if magnitude > least || magnitude == least && equal > 0 {
                equal -= usize::from(magnitude == least);
                self.positions.push(at);
            }
        }
    }
}

impl Codec for TopK {
    fn id(&self) -> CodecId {
        CodecId::TopK
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        let elements = elements_of(dims);
        self.most(elements).saturating_mul(4).saturating_add(elements.div_ceil(8)).saturating_add(HEAD_BYTES)
    }

    fn size_varies(&self) -> bool {
        true
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &CodecContext<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        self.select(tensor.bytes, self.most(elements));
        let (lowest, bits) = rice::best(&self.positions);
        let gaps = bits.div_ceil(8) < elements.div_ceil(8) as u128;

        out.push(if gaps { 1 + lowest as u8 } else { BITMAP });
        out.extend_from_slice(&(self.positions.len() as u64).to_le_bytes());
        for &position in &self.positions {
            let bytes = &tensor.bytes[4 * position..4 * position + 4];
            out.extend_from_slice(&f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).to_le_bytes());
        }
        if gaps {
            rice::write(&self.positions, lowest, out);
        } else {
            let start = out.len();
            out.resize(start + elements.div_ceil(8), 0);
            self.positions.iter().for_each(|position| out[start + position / 8] |= 1 << (position % 8));
        }
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_meta(self.id(), meta, out)?;
        let elements = out.len() / 4;
        let most = self.most(elements);
        let wrong = || CodecError::Positions { codec: CodecId::TopK, most: most as u64, elements: elements as u64 };
        let too_short = |expected: usize| CodecError::BodyLength {
            codec: CodecId::TopK,
            expected: expected as u64,
            got: body.len() as u64,
        };
        let (&[how, ref kept @ ..], rest) =
            body.split_first_chunk::<HEAD_BYTES>().ok_or_else(|| too_short(HEAD_BYTES))?;
        let kept = usize::try_from(u64::from_le_bytes(*kept)).ok().filter(|&kept| kept <= most).ok_or_else(wrong)?;
        let (values, positions) = rest.split_at_checked(4 * kept).ok_or_else(|| too_short(HEAD_BYTES + 4 * kept))?;
        out.fill(0);
        if how == BITMAP {
            let expected = HEAD_BYTES + 4 * kept + elements.div_ceil(8);
            if body.len() != expected {
                return Err(too_short(expected));
            }
            let set = positions.iter().map(|byte| byte.count_ones() as usize).sum::<usize>();
            // The bits beyond the last value.
            let beyond = positions.last().map_or(0, |&byte| u32::from(byte) >> ((elements - 1) % 8 + 1));
            if set != kept || beyond != 0 {
                return Err(wrong());
            }
            return scatter(values, &mut set_bits(positions), out).map(|_| ());
        }
        let lowest = u32::from(how - 1);
        if lowest > rice::LOWEST_BITS_MAX {
            return Err(CodecError::FirstByte { codec: self.id(), expected: "0 to 57", got: how });
        }
        let mut positions = rice::GapReader::new(positions, lowest, elements);
        let complete = scatter(values, &mut positions, out)? && positions.is_at_end();
        complete.then_some(()).ok_or_else(wrong)
    }
}

/// The positions of the bits that are set.
fn set_bits(bytes: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let bits = |(at, byte): (usize, u8)| (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| 8 * at + bit);
    bytes.iter().copied().enumerate().flat_map(bits)
}

/// Puts every value into its position; whether there are enough positions. They are within `out`.
fn scatter(values: &[u8], positions: &mut impl Iterator<Item = usize>, out: &mut [u8]) -> Result<bool, CodecError> {
    for (at, value) in values.chunks_exact(4).enumerate() {
        let value = f32::from_le_bytes([value[0], value[1], value[2], value[3]]);
        if !value.is_finite() {
            return Err(CodecError::Value { codec: CodecId::TopK, at });
        }
        let Some(position) = positions.next() else { return Ok(false) };
        out[4 * position..4 * position + 4].copy_from_slice(&value.to_ne_bytes());
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Layout, Shape};

    fn encode(parts: u64, values: &[f32]) -> Vec<u8> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let view = TensorView { dtype: DType::F32, dims: &[values.len()], layout: Layout::Contiguous, bytes: &bytes };
        let mut body = Vec::new();
        TopK::new(parts).unwrap().encode(view, &CodecContext::default(), &mut body).unwrap();
        body
    }

    fn decode(parts: u64, body: &[u8], elements: usize) -> Result<Vec<f32>, CodecError> {
        let shape = Shape::new(&[elements]).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::TopK };
        let mut out = vec![0xcc; 4 * elements];
        TopK::new(parts).unwrap().decode(&meta, body, &mut out)?;
        Ok(floats(&out).collect())
    }

    fn body(how: u8, values: &[f32], positions: &[u8]) -> Vec<u8> {
        let mut body = vec![how];
        body.extend_from_slice(&(values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| body.extend_from_slice(&value.to_le_bytes()));
        body.extend_from_slice(positions);
        body
    }

    #[test]
    fn the_documented_body() {
        // Three of ten values; of two with equal magnitude, the first.
        let mut values = [0.5, -2.0, 0.0, 7.0, 1.0, -1.0, 0.25, -0.0, 0.5, 0.5];
        let bitmap = body(0, &[-2.0, 7.0, 1.0], &[0b0001_1010, 0]);
        // Gaps 1, 1, 0 with r = 0: 01 01 1.
        let gaps = body(1, &[-2.0, 7.0, 1.0], &[0b1_1010]);
        assert_eq!(encode(WHOLE / 10 * 3, &values), gaps);
        let expected = [0.0, -2.0, 0.0, 7.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        for body in [&bitmap, &gaps] {
            assert_eq!(decode(WHOLE / 10 * 3, body, 10).unwrap(), expected);
        }
        // Zeros are not sent, whatever their sign.
        values.iter_mut().skip(2).for_each(|value| *value = -0.0);
        assert_eq!(encode(WHOLE, &values), body(1, &[0.5, -2.0], &[0b11]));
        let smallest = f32::from_bits(1);
        assert_eq!(encode(1, &[0.0, -smallest, smallest]), body(0, &[-smallest], &[0b10]));
        assert_eq!(encode(1, &[0.0; 9]), body(1, &[], &[]));
        assert_eq!(encode(1, &[]), body(0, &[], &[]));
    }

    #[test]
    fn a_fraction_is_what_it_says() {
        for (text, elements, most) in [
            ("0.1", 30, 3),
            ("0.1", 31, 4),
            ("0.7", 10, 7),
            ("0.07", 100, 7),
            ("0.000000001", 1_000_000_000, 1),
            ("0.000000001", 1, 1),
            ("1", 9, 9),
            ("1.0", 9, 9),
            ("0.10", 20, 2),
            ("0.5", 0, 0),
        ] {
            assert_eq!(TopK::new(parts(text).unwrap()).unwrap().most(elements), most, "{text} of {elements}");
        }
        assert_eq!(TopK::new(WHOLE).unwrap().most(usize::MAX), usize::MAX);
    }

    #[test]
    fn hostile_places_are_refused() {
        let wrong = Err(CodecError::Positions { codec: CodecId::TopK, most: 5, elements: 10 });
        let two = [1.0, 2.0];
        let decode = |body: &[u8]| decode(WHOLE / 2, body, 10);
        assert!(decode(&body(0, &two, &[3, 0])).is_ok());
        assert_eq!(decode(&body(0, &two, &[7, 0])), wrong, "more positions than values");
        assert_eq!(decode(&body(0, &two, &[1, 0])), wrong, "fewer");
        assert_eq!(decode(&body(0, &two, &[1, 4])), wrong, "position 10 of 10");
        assert_eq!(decode(&body(0, &[1.0; 6], &[63, 0])), wrong, "more than half");
        assert!(decode(&body(1, &two, &[3])).is_ok());
        assert_eq!(decode(&body(1, &two, &[1])), wrong, "fewer");
        assert_eq!(decode(&body(1, &two, &[7])), wrong, "a position left over");
        assert_eq!(decode(&body(1, &two, &[3, 0])), wrong, "a byte left over");
        assert_eq!(decode(&body(1, &two, &[1, 4])), wrong, "position 10 of 10");
        assert_eq!(decode(&body(57, &[1.0], &[255; 8])), wrong, "a position that is a huge number");
        let mut claims = body(1, &two, &[3]);
        claims[1..9].fill(0xff);
        assert_eq!(decode(&claims), wrong, "more values than can be counted");
        let value = |at| Err(CodecError::Value { codec: CodecId::TopK, at });
        assert_eq!(decode(&body(0, &[1.0, f32::NAN], &[3, 0])), value(1));
        assert_eq!(decode(&body(1, &[f32::INFINITY, 1.0], &[3])), value(0));
        assert!(matches!(decode(&body(58, &two, &[3])), Err(CodecError::FirstByte { got: 58, .. })));
        assert!(matches!(decode(&body(0, &two, &[3])), Err(CodecError::BodyLength { expected: 19, got: 18, .. })));
        assert!(matches!(decode(&[0; 8]), Err(CodecError::BodyLength { expected: 9, got: 8, .. })));
    }

    #[test]
    fn a_tenth_at_random_takes_less_than_four_bits_a_value() {
        let values: Vec<f32> = (0..100_000u32).map(|at| (at.wrapping_mul(2654435761) >> 8) as f32).collect();
        let body = encode(WHOLE / 10, &values);
        assert!(body.len() * 8 < 100_000 * 4, "{} bytes", body.len());
    }
}
