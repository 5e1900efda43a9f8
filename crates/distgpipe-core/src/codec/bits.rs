//! Packs codes of 1 to 16 bits without gaps: a 12-bit code takes 12 bits on the wire.
//!
//! The first code is in the lowest bits of the first byte; unused bits of the last byte are 0. Eight codes of `w` bits
//! take exactly `w` bytes, so a tensor may be packed in pieces of any multiple of [`GROUP`] codes.
//!
//! ```text
//! width 3   byte 0            byte 1
//!           c₂c₂c₁c₁ c₁c₀c₀c₀  c₅c₄c₄c₄ c₃c₃c₃c₂      (highest bit first)
//! ```

use super::simd::{self, Level};

/// Calls the version of a function for a width, so that all shifts are constants.
macro_rules! by_width {
    ($width:expr, $function:ident($($argument:expr),*)) => {
        by_width!(@ $width, $function, ($($argument),*), 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16)
    };
    (@ $width:expr, $function:ident, $arguments:tt, $($number:literal)*) => {
        match $width {
            $($number => by_width!(! $function, $number, $arguments),)*
            other => panic!("a code has 1 to 16 bits, not {other}"),
        }
    };
    (! $function:ident, $number:literal, ($($argument:expr),*)) => { simd::$function::<$number>($($argument),*) };
}
/// The number of codes that fill whole bytes, whatever the width.
pub const GROUP: usize = 8;

/// The largest width of a code in bits.
pub const WIDTH_MAX: u32 = 16;

/// The size in bytes of packed codes of `width` bits; `usize::MAX` if it does not fit a `usize`.
pub fn packed_bytes(codes: usize, width: u32) -> usize {
    let bits = codes as u128 * u128::from(width);
    usize::try_from(bits.div_ceil(8)).unwrap_or(usize::MAX)
}

/// Packs the lowest `width` bits of each code.
///
/// # Panics
/// If `width` is not 1 to 16, or `out` is not [`packed_bytes`] long.
pub fn pack(codes: &[u16], width: u32, out: &mut [u8]) {
    pack_with(Level::in_use(), codes, width, out);
}

/// Unpacks as many codes as `out` has.
///
/// # Panics
/// If `width` is not 1 to 16, or `bytes` is not [`packed_bytes`] long.
pub fn unpack(bytes: &[u8], width: u32, out: &mut [u16]) {
    unpack_with(Level::in_use(), bytes, width, out);
}

/// [`pack`] at a given SIMD level.
pub(super) fn pack_with(level: Level, codes: &[u16], width: u32, out: &mut [u8]) {
    assert_eq!(out.len(), packed_bytes(codes.len(), width), "room for {} codes of {width} bits", codes.len());
    by_width!(width, pack(level, codes, out));
}

/// [`unpack`] at a given SIMD level.
pub(super) fn unpack_with(level: Level, bytes: &[u8], width: u32, out: &mut [u16]) {
    assert_eq!(bytes.len(), packed_bytes(out.len(), width), "bytes of {} codes of {width} bits", out.len());
    by_width!(width, unpack(level, bytes, out));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: bit `i` of the stream is bit `i % 8` of byte `i / 8`.
    fn pack_bit_by_bit(codes: &[u16], width: u32) -> Vec<u8> {
        let mut out = vec![0; (codes.len() * width as usize).div_ceil(8)];
        for (at, code) in codes.iter().enumerate() {
            for bit in 0..width as usize {
                let to = at * width as usize + bit;
                out[to / 8] |= ((code >> bit & 1) as u8) << (to % 8);
            }
        }
        out
    }

    #[test]
    fn sizes_are_exact() {
        assert_eq!(packed_bytes(0, 7), 0);
        assert_eq!(packed_bytes(1, 1), 1);
        assert_eq!(packed_bytes(8, 3), 3);
        assert_eq!(packed_bytes(9, 3), 4);
        assert_eq!(packed_bytes(25_088, 12), 37_632);
        assert_eq!(packed_bytes(usize::MAX, 8), usize::MAX);
        assert_eq!(packed_bytes(usize::MAX, 16), usize::MAX);
    }

    #[test]
    fn the_order_of_bits_is_that_of_the_picture() {
        let mut out = [0; 3];
        pack(&[0b001, 0b010, 0b011, 0b100, 0b101, 0b110, 0b111, 0b000], 3, &mut out);
        assert_eq!(out, [0b1101_0001, 0b0101_1000, 0b0001_1111]);
    }

    #[test]
    #[should_panic(expected = "a code has 1 to 16 bits, not 17")]
    fn a_width_beyond_16_is_a_fault_of_the_caller() {
        pack(&[], 17, &mut []);
    }

    proptest! {
        #[test]
        fn packing_equals_the_definition_and_comes_back(
            codes in prop::collection::vec(any::<u16>(), 0..300),
            width in 1u32..=16,
        ) {
            let cut: Vec<u16> = codes.iter().map(|code| code & (u16::MAX >> (16 - width))).collect();
            for level in Level::all_here() {
                let mut packed = vec![0xa5; packed_bytes(codes.len(), width)];
                pack_with(level, &codes, width, &mut packed);
                prop_assert_eq!(&packed, &pack_bit_by_bit(&codes, width));

                let mut back = vec![0xffff; codes.len()];
                unpack_with(level, &packed, width, &mut back);
                prop_assert_eq!(&back, &cut);
            }
        }

        #[test]
        fn groups_may_be_packed_apart(codes in prop::collection::vec(any::<u16>(), 16..40), width in 1u32..=16) {
            let mut apart = vec![0; packed_bytes(codes.len(), width)];
            let (front, back) = apart.split_at_mut(2 * width as usize);
            pack(&codes[..16], width, front);
            pack(&codes[16..], width, back);
            let mut whole = vec![0; apart.len()];
            pack(&codes, width, &mut whole);
            prop_assert_eq!(apart, whole);
        }
    }
}
