//! The checksum of a large body: fast enough to keep up with memory, so that it costs little next to the copy that MPI makes.
//!
//! Two sums over lanes of 64-bit words, as in Fletcher's checksum: `a += word; b += a`, in four lanes. Every flipped bit and every
//! pair of exchanged words changes it. It detects accidents, not forgery, as the checksum of a frame does.

use distgpipe_core::wire::Header;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const LANES: usize = 4;

/// The bytes that the lanes take at a time.
const BLOCK: usize = 8 * LANES;

/// The checksum of a body that is there piece by piece.
pub(super) struct BodyChecksum {
    header: u64,
    a: [u64; LANES],
    b: [u64; LANES],
    bytes: u64,
}

impl BodyChecksum {
    /// For the body of a frame with this header.
    pub fn new(header: &Header) -> Self {
        BodyChecksum { header: xxh3_64(&header.encode()), a: [0; LANES], b: [0; LANES], bytes: 0 }
    }

    /// Adds the next piece. All but the last must be multiples of 32 bytes.
    pub fn update(&mut self, piece: &[u8]) {
        debug_assert_eq!(self.bytes % BLOCK as u64, 0, "only the last piece may be ragged");
        self.bytes += piece.len() as u64;
        let blocks = piece.chunks_exact(BLOCK);
        let rest = blocks.remainder();
        let (mut a, mut b) = (self.a, self.b);
        for block in blocks {
            add(&mut a, &mut b, block);
        }
        if !rest.is_empty() {
            let mut padded = [0; BLOCK];
            padded[..rest.len()].copy_from_slice(rest);
            add(&mut a, &mut b, &padded);
        }
        (self.a, self.b) = (a, b);
    }

    /// The checksum of all pieces.
    pub fn finish(&self) -> u64 {
        let words = self.a.iter().chain(&self.b).chain([&self.bytes]);
        let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        xxh3_64_with_seed(&bytes, self.header)
    }
}

#[inline(always)]
fn add(a: &mut [u64; LANES], b: &mut [u64; LANES], block: &[u8]) {
    for (lane, word) in block.chunks_exact(8).enumerate().take(LANES) {
        let word = u64::from_le_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]]);
        a[lane] = a[lane].wrapping_add(word);
        b[lane] = b[lane].wrapping_add(a[lane]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::wire::Kind;

    fn of(pieces: &[&[u8]]) -> u64 {
        let mut checksum = BodyChecksum::new(&Header::new(Kind::State));
        pieces.iter().for_each(|piece| checksum.update(piece));
        checksum.finish()
    }

    #[test]
    fn pieces_have_the_checksum_of_the_whole() {
        let body: Vec<u8> = (0..1000u32).map(|n| (n * n % 251) as u8).collect();
        for at in [0, 32, 512, 992] {
            assert_eq!(of(&[&body[..at], &body[at..]]), of(&[&body]), "{at}");
        }
    }

    #[test]
    fn a_flipped_bit_and_exchanged_words_change_it() {
        let body: Vec<u8> = (0..200u32).map(|n| (n * n % 251) as u8).collect();
        let expected = of(&[&body]);
        for bit in 0..body.len() * 8 {
            let mut flipped = body.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&[&flipped]), expected, "{bit}");
        }
        for (one, other) in [(0, 8), (0, 32), (8, 72), (0, 160)] {
            let mut exchanged = body.clone();
            for byte in 0..8 {
                exchanged.swap(one + byte, other + byte);
            }
            assert_ne!(of(&[&exchanged]), expected, "{one} and {other}");
        }
        assert_ne!(of(&[&body[..199]]), of(&[&[&body[..199], &[0]].concat()]), "a zero more");
        let other = BodyChecksum::new(&Header { step: 1, ..Header::new(Kind::State) });
        assert_ne!(other.finish(), of(&[]), "another header");
    }
}
