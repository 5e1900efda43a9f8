//! The checksum of a large body: fast enough to keep up with memory, so that it costs little next to the copy that MPI makes.
//!
//! Two sums over lanes of 64-bit words; see [`BlockSums`]. Every flipped bit and every pair of exchanged words changes it. It detects
//! accidents, not forgery, as the checksum of a frame does.

use crate::engine::{BlockSums, BLOCK_BYTES};
use distgpipe_core::wire::Header;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The checksum of a body that is there piece by piece.
pub(super) struct BodyChecksum {
    header: u64,
    sums: BlockSums,
    bytes: u64,
}

impl BodyChecksum {
    /// For the body of a frame with this header.
    pub fn new(header: &Header) -> Self {
        BodyChecksum { header: xxh3_64(&header.encode()), sums: BlockSums::default(), bytes: 0 }
    }

    /// Adds the next piece. All but the last must be whole blocks of the sums.
    pub fn update(&mut self, piece: &[u8]) {
        debug_assert_eq!(self.bytes % BLOCK_BYTES as u64, 0, "only the last piece may be ragged");
        self.bytes += piece.len() as u64;
        let (blocks, rest) = piece.as_chunks::<BLOCK_BYTES>();
        self.sums.add(blocks);
        if !rest.is_empty() {
            let mut padded = [0; BLOCK_BYTES];
            padded[..rest.len()].copy_from_slice(rest);
            self.sums.add(&[padded]);
        }
    }

    /// The checksum of all pieces.
    pub fn finish(&self) -> u64 {
        let words = self.sums.a.iter().chain(&self.sums.b).chain([&self.bytes]);
        let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        xxh3_64_with_seed(&bytes, self.header)
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
        for at in [0, 64, 512, 960] {
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
        for (one, other) in [(0, 8), (0, 64), (8, 72), (0, 128)] {
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
