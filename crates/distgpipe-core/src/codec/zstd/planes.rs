//! Rearranges the bytes of a chunk so that they compress better.
//!
//! The bits of a float differ in kind: exponents hardly vary from value to value, the lowest bits are noise. So each
//! byte of a value has a stream of its own, a plane. The sign changes places with the bits below it, so that the last
//! plane of `F32` and `BF16` values is their exponents alone:
//!
//! ```text
//! value of four bytes    s eeeeeeee mmmmmmm mmmmmmmm mmmmmmmm     planes    mmmmmmmm | mmmmmmmm | mmmmmmm s | eeeeeeee
//! ```
//!
//! Many values are exactly 0, after a ReLU and at padded positions. A bitmap tells which, and the planes have only the
//! others.

use super::super::simd::{self, Level, KEPT_MORE};

/// The number of values that are joined and spread together, so that they stay in the first-level cache.
const BLOCK: usize = 2048;

/// The buffers of a chunk of values.
#[derive(Clone, Debug, Default)]
pub(super) struct Planes {
    /// One bit for each value, lowest first, which is set if the value is not 0.
    pub mask: Vec<u8>,
    /// One plane after the other, each with as many bytes as values are not 0.
    pub bytes: Vec<u8>,
    values: Vec<u32>,
}

impl Planes {
    /// Rearranges values of `N` bytes.
    pub fn split<const N: usize>(&mut self, level: Level, bytes: &[u8]) {
        let count = bytes.len() / N;
        self.values.resize(self.values.len().max(count + KEPT_MORE), 0);
        self.mask.resize(count.div_ceil(8), 0);
        let kept = simd::keep_values::<N>(level, bytes, &mut self.mask, &mut self.values);
        self.bytes.resize(N * kept, 0);
        let mut rest = self.bytes.as_mut_slice();
        let planes = std::array::from_fn(|_| {
            let (plane, after) = std::mem::take(&mut rest).split_at_mut(kept);
            rest = after;
            plane
        });
        simd::split_planes::<N>(level, &self.values[..kept], planes);
    }

    /// Undoes [`split`](Self::split). `bytes` must have `N` planes of as many bytes as [`kept`] returns for the bitmap.
    pub fn join<const N: usize>(&mut self, level: Level, out: &mut [u8]) {
        let kept = self.bytes.len() / N;
        self.values.resize(self.values.len().max(BLOCK + KEPT_MORE), 0);
        let mut next = 0;
        for (mask, out) in self.mask.chunks(BLOCK / 8).zip(out.chunks_mut(N * BLOCK)) {
            let count = ones(mask);
            let planes = std::array::from_fn(|plane| &self.bytes[plane * kept + next..][..count]);
            simd::join_planes::<N>(level, planes, &mut self.values[..count]);
            simd::spread_values::<N>(level, mask, &self.values, out);
            next += count;
        }
    }
}

/// The number of values that are not 0 according to a bitmap for `count` values; `None` if it has bits beyond.
pub(super) fn kept(mask: &[u8], count: usize) -> Option<usize> {
    let unused = mask.last().filter(|_| !count.is_multiple_of(8)).is_some_and(|last| last >> (count % 8) != 0);
    (!unused).then(|| ones(mask))
}

fn ones(mask: &[u8]) -> usize {
    mask.iter().map(|bits| bits.count_ones() as usize).sum()
}

/// The length of packed three-bit codes with four bits for each.
pub(super) fn nibble_bytes(packed: usize) -> usize {
    packed.div_ceil(3) * 4
}

/// Makes `nibbles` the three-bit codes with four bits for each, so that equal neighbours are equal bytes.
pub(super) fn widen(packed: &[u8], nibbles: &mut Vec<u8>) {
    let spread = |bytes: [u8; 3]| {
        let codes = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]);
        let codes = codes & 0xfff | (codes & 0xff_f000) << 4;
        let codes = codes & 0x003f_003f | (codes & 0x0fc0_0fc0) << 2;
        (codes & 0x0707_0707 | (codes & 0x3838_3838) << 1).to_le_bytes()
    };
    let (groups, rest) = packed.as_chunks();
    nibbles.resize(nibble_bytes(packed.len()), 0);
    let (rooms, last) = nibbles.as_chunks_mut().0.split_at_mut(groups.len());
    for (room, &group) in rooms.iter_mut().zip(groups) {
        *room = spread(group);
    }
    if let Some(last) = last.first_mut() {
        *last = spread(std::array::from_fn(|at| rest.get(at).copied().unwrap_or(0)));
    }
}

/// Undoes [`widen`]. Returns `false` if a code has more than three bits, or if there are codes beyond the end.
pub(super) fn narrow(nibbles: &[u8], packed: &mut [u8]) -> bool {
    let mut surplus = 0;
    let mut join = |bytes: [u8; 4]| {
        let codes = u32::from_le_bytes(bytes);
        surplus |= codes & 0x8888_8888;
        let codes = codes & 0x0707_0707 | (codes & 0x7070_7070) >> 1;
        let codes = codes & 0x003f_003f | (codes & 0x3f00_3f00) >> 2;
        (codes & 0xfff | (codes & 0xfff_0000) >> 4).to_le_bytes()
    };
    let (from, last) = nibbles.as_chunks().0.split_at(packed.len() / 3);
    let (groups, rest) = packed.as_chunks_mut::<3>();
    for (group, &from) in groups.iter_mut().zip(from) {
        let [a, b, c, _] = join(from);
        *group = [a, b, c];
    }
    if let Some(&from) = last.first() {
        let codes = join(from);
        rest.copy_from_slice(&codes[..rest.len()]);
        surplus |= codes[rest.len()..].iter().fold(0, |all, &byte| all | u32::from(byte));
    }
    surplus == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check<const N: usize>(bytes: &[u8]) {
        // Buffers are reused.
        let mut rearranged = Planes { mask: vec![7; 3], bytes: vec![7; 3], values: vec![7; 3] };
        rearranged.split::<N>(Level::in_use(), bytes);
        let Planes { mask, bytes: planes, .. } = &rearranged;
        let expected: Vec<&[u8]> = bytes.chunks(N).filter(|value| value.iter().any(|&byte| byte != 0)).collect();
        let count = expected.len();
        assert_eq!((planes.len(), kept(mask, bytes.len() / N)), (N * count, Some(count)));
        for (at, value) in expected.iter().enumerate() {
            let (upper, next) = (value[N - 1], value[N - 2]);
            assert_eq!(planes[(N - 1) * count + at], upper << 1 | next >> 7, "the bits after the sign");
            assert_eq!(planes[(N - 2) * count + at], next << 1 | upper >> 7, "the bits after those, and the sign");
            (0..N - 2).for_each(|plane| assert_eq!(planes[plane * count + at], value[plane]));
        }
        let mut out = vec![9; bytes.len()];
        rearranged.join::<N>(Level::in_use(), &mut out);
        assert_eq!(out, bytes);
    }

    proptest! {
        #[test]
        fn planes_come_back(words in prop::collection::vec(prop_oneof![Just(0u32), any::<u32>(), 0u32..300], 0..100)) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            check::<4>(&bytes);
            check::<2>(&bytes);
        }

        #[test]
        fn codes_come_back(packed in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut nibbles = Vec::new();
            widen(&packed, &mut nibbles);
            prop_assert_eq!(nibbles.len(), nibble_bytes(packed.len()));
            let bit = |at: usize| packed.get(at / 8).map_or(0, |byte| byte >> (at % 8) & 1);
            for code in 0..2 * nibbles.len() {
                let expected = bit(3 * code) | bit(3 * code + 1) << 1 | bit(3 * code + 2) << 2;
                prop_assert_eq!(nibbles[code / 2] >> (4 * (code % 2)) & 15, expected);
            }
            let mut back = vec![9; packed.len()];
            prop_assert!(narrow(&nibbles, &mut back));
            prop_assert_eq!(&back, &packed);
            if let Some(last) = nibbles.last_mut() {
                *last |= 0x80;
                prop_assert!(!narrow(&nibbles, &mut back));
            }
        }
    }

    #[test]
    fn bits_beyond_the_last_value_are_refused() {
        assert_eq!(kept(&[0b101, 0b11], 10), Some(4));
        assert_eq!(kept(&[0b101, 0b111], 10), None);
        assert_eq!(kept(&[0xff], 8), Some(8));
    }
}
