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

/// Rearranges values of `N` bytes: appends to `mask` one bit for each value, lowest first, which is set if the value is
/// not 0, and to `planes` the `N` planes of these values.
pub(super) fn split<const N: usize>(bytes: &[u8], scratch: &mut Vec<u32>, mask: &mut Vec<u8>, planes: &mut Vec<u8>) {
    let (groups, rest) = bytes.as_chunks::<N>().0.as_chunks::<8>();
    scratch.resize(scratch.len().max(8 * groups.len() + 8), 0);
    let mut kept = 0;
    for group in groups {
        let bits = gather(group, &mut scratch[kept..]);
        mask.push(bits);
        kept += bits.count_ones() as usize;
    }
    if !rest.is_empty() {
        let mut group = [[0; N]; 8];
        group[..rest.len()].copy_from_slice(rest);
        let bits = gather(&group, &mut scratch[kept..]);
        mask.push(bits);
        kept += bits.count_ones() as usize;
    }
    let values = &scratch[..kept];
    for plane in 0..N - 2 {
        planes.extend(values.iter().map(|value| (value >> (8 * plane)) as u8));
    }
    let sign = 8 * N - 1;
    planes.extend(values.iter().map(|value| (value << 1 >> (8 * (N - 2))) as u8 & 0xfe | (value >> sign) as u8));
    planes.extend(values.iter().map(|value| (value >> (sign - 8)) as u8));
}

/// The number of values that are not 0 according to a bitmap for `count` values; `None` if it has bits beyond.
pub(super) fn kept(mask: &[u8], count: usize) -> Option<usize> {
    let unused = mask.last().filter(|_| !count.is_multiple_of(8)).is_some_and(|last| last >> (count % 8) != 0);
    let kept = mask.iter().map(|bits| bits.count_ones() as usize).sum();
    (!unused).then_some(kept)
}

/// Undoes [`split`]. `planes` has `N` planes of as many bytes as [`kept`] returns for `mask`.
pub(super) fn join<const N: usize>(mask: &[u8], planes: &[u8], scratch: &mut Vec<u32>, out: &mut [u8]) {
    let kept = planes.len() / N;
    // A group reads eight values, however few it uses.
    scratch.resize(scratch.len().max(kept + 8), 0);
    let values = &mut scratch[..kept + 8];
    let plane = |at: usize| &planes[at * kept..][..kept];
    for (to, (&low, &high)) in values.iter_mut().zip(plane(N - 2).iter().zip(plane(N - 1))) {
        let (low, high) = (u32::from(low), u32::from(high));
        *to = (low & 1) << (8 * N - 1) | high << (8 * N - 9) | low >> 1 << (8 * (N - 2));
    }
    if N == 4 {
        for (to, (&a, &b)) in values.iter_mut().zip(plane(0).iter().zip(plane(1))) {
            *to |= u32::from(a) | u32::from(b) << 8;
        }
    }
    let mut next = 0;
    let (groups, rest) = out.as_chunks_mut::<N>().0.as_chunks_mut::<8>();
    for (group, &bits) in groups.iter_mut().zip(mask) {
        *group = spread(&values[next..], bits);
        next += bits.count_ones() as usize;
    }
    if let Some(&bits) = mask.last().filter(|_| !rest.is_empty()) {
        rest.copy_from_slice(&spread(&values[next..], bits)[..rest.len()]);
    }
}

/// Writes the values of a group that are not 0 to the beginning of `to`, which has room for eight; returns which.
#[inline(always)]
fn gather<const N: usize>(group: &[[u8; N]; 8], to: &mut [u32]) -> u8 {
    let to: &mut [u32; 8] = to.first_chunk_mut().expect("room for a group");
    let values = group.each_ref().map(value_of);
    let bits = values.iter().enumerate().fold(0, |bits, (at, &value)| bits | u8::from(value != 0) << at);
    match bits {
        0 => {}
        0xff => *to = values,
        _ => {
            let mut kept = 0;
            for value in values {
                // The next value overwrites this one if it is 0.
                to[kept & 7] = value;
                kept += usize::from(value != 0);
            }
        }
    }
    bits
}

/// Undoes [`gather`]. There are eight values, of which as many count as `bits` has ones.
#[inline(always)]
fn spread<const N: usize>(values: &[u32], bits: u8) -> [[u8; N]; 8] {
    let values: &[u32; 8] = values.first_chunk().expect("eight values");
    match bits {
        0 => [[0; N]; 8],
        0xff => values.map(bytes_of),
        _ => {
            let ranks = &RANKS[usize::from(bits)];
            std::array::from_fn(|at| {
                let value = values[usize::from(ranks[at] & 7)];
                bytes_of(value & u32::from(bits >> at & 1).wrapping_neg())
            })
        }
    }
}

/// For each byte and each of its bits, the number of ones below.
const RANKS: [[u8; 8]; 256] = {
    let mut ranks = [[0; 8]; 256];
    let mut bits = 0;
    while bits < 256 {
        let mut at = 1;
        while at < 8 {
            ranks[bits][at] = ranks[bits][at - 1] + (bits >> (at - 1) & 1) as u8;
            at += 1;
        }
        bits += 1;
    }
    ranks
};

#[inline(always)]
fn value_of<const N: usize>(bytes: &[u8; N]) -> u32 {
    let mut wide = [0; 4];
    wide[..N].copy_from_slice(bytes);
    u32::from_le_bytes(wide)
}

#[inline(always)]
fn bytes_of<const N: usize>(value: u32) -> [u8; N] {
    let wide = value.to_le_bytes();
    std::array::from_fn(|at| wide[at])
}

/// The length of packed three-bit codes with four bits for each.
pub(super) fn nibble_bytes(packed: usize) -> usize {
    packed.div_ceil(3) * 4
}

/// Appends three-bit codes with four bits for each, so that equal neighbours are equal bytes.
pub(super) fn widen(packed: &[u8], nibbles: &mut Vec<u8>) {
    let spread = |bytes: [u8; 3]| {
        let codes = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]);
        let codes = codes & 0xfff | (codes & 0xff_f000) << 4;
        let codes = codes & 0x003f_003f | (codes & 0x0fc0_0fc0) << 2;
        (codes & 0x0707_0707 | (codes & 0x3838_3838) << 1).to_le_bytes()
    };
    let (groups, rest) = packed.as_chunks();
    nibbles.extend(groups.iter().flat_map(|&group| spread(group)));
    if !rest.is_empty() {
        nibbles.extend(spread(std::array::from_fn(|at| rest.get(at).copied().unwrap_or(0))));
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
        let (mut scratch, mut mask, mut planes) = (vec![7; 3], Vec::new(), Vec::new());
        split::<N>(bytes, &mut scratch, &mut mask, &mut planes);
        let expected: Vec<&[u8]> = bytes.chunks(N).filter(|value| value.iter().any(|&byte| byte != 0)).collect();
        let count = expected.len();
        assert_eq!((planes.len(), kept(&mask, bytes.len() / N)), (N * count, Some(count)));
        for (at, value) in expected.iter().enumerate() {
            let (upper, next) = (value[N - 1], value[N - 2]);
            assert_eq!(planes[(N - 1) * count + at], upper << 1 | next >> 7, "the bits after the sign");
            assert_eq!(planes[(N - 2) * count + at], next << 1 | upper >> 7, "the bits after those, and the sign");
            (0..N - 2).for_each(|plane| assert_eq!(planes[plane * count + at], value[plane]));
        }
        let mut out = vec![9; bytes.len()];
        join::<N>(&mask, &planes, &mut vec![5; 2], &mut out);
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
