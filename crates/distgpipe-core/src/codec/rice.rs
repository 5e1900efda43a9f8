//! Encodes ascending positions as the gaps between them in Golomb–Rice code. For random positions this is within a few
//! per cent of the entropy.
//!
//! A gap, the number of positions that are skipped, is split into its lowest `r` bits and the quotient. The quotient
//! goes first, in unary (that many zeros and a one), then the `r` bits. `r` is the same for all gaps, about the
//! logarithm of the median gap.
//!
//! ```text
//! positions 2, 3, 9      gaps 2, 0, 5      r = 1      01 0 | 1 0 | 001 1      (in wire order, lowest bit first)
//! ```

/// The largest `r`: this many bits can be read from any eight bytes, at whatever bit they begin.
pub(super) const LOWEST_BITS_MAX: u32 = 56;

/// The `r` with which these ascending positions take the fewest bits, and the number of bits.
pub(super) fn best(positions: &[usize]) -> (u32, u128) {
    // With every increment of `r`, each gap costs one bit more and saves half of its quotient. The savings shrink, so
    // the first `r` after which the total does not improve is the best.
    let mut best = (0, bits(positions, 0));
    for lowest in 1..=LOWEST_BITS_MAX {
        let bits = bits(positions, lowest);
        if bits >= best.1 {
            break;
        }
        best = (lowest, bits);
    }
    best
}

fn bits(positions: &[usize], lowest: u32) -> u128 {
    let quotients: u128 = gaps(positions).map(|gap| (gap >> lowest) as u128).sum();
    quotients + positions.len() as u128 * u128::from(lowest + 1)
}

fn gaps(positions: &[usize]) -> impl Iterator<Item = usize> + '_ {
    let befores = std::iter::once(0).chain(positions.iter().map(|position| position + 1));
    positions.iter().zip(befores).map(|(position, before)| position - before)
}

/// Appends the code of ascending positions.
pub(super) fn write(positions: &[usize], lowest: u32, out: &mut Vec<u8>) {
    let (mut word, mut filled) = (0u64, 0);
    let mut put = |value: u64, bits: u32| {
        word |= value << filled;
        filled += bits;
        while filled >= 8 {
            out.push(word as u8);
            word >>= 8;
            filled -= 8;
        }
    };
    for gap in gaps(positions) {
        let mut rest = gap >> lowest;
        while rest >= 32 {
            put(0, 32);
            rest -= 32;
        }
        put(1 << rest, rest as u32 + 1);
        put(gap as u64 & ((1 << lowest) - 1), lowest);
    }
    if filled > 0 {
        out.push(word as u8);
    }
}

/// Reads positions, which ascend whatever the bytes are. Ends at the first one that is not below `elements`, or at the
/// end of the bytes.
pub(super) struct GapReader<'a> {
    bytes: &'a [u8],
    /// The index of the next bit.
    at: usize,
    lowest: u32,
    next: usize,
    elements: usize,
}

impl<'a> GapReader<'a> {
    pub fn new(bytes: &'a [u8], lowest: u32, elements: usize) -> Self {
        GapReader { bytes, at: 0, lowest, next: 0, elements }
    }

    /// Whether all bytes have been read, and the unused bits of the last one are 0.
    pub fn is_at_end(&self) -> bool {
        let unread = self.bytes.len() * 8 - self.at;
        unread < 8 && self.word() == 0
    }

    /// The next bits: at least 57, with 0 beyond the end.
    #[inline(always)]
    fn word(&self) -> u64 {
        let rest = &self.bytes[self.at / 8..];
        let word = match rest.first_chunk() {
            Some(bytes) => u64::from_le_bytes(*bytes),
            None => u64::from_le_bytes(std::array::from_fn(|at| rest.get(at).copied().unwrap_or(0))),
        };
        word >> (self.at % 8)
    }

    /// Reads a quotient in unary.
    #[inline(always)]
    fn rest(&mut self) -> Option<usize> {
        let begin = self.at;
        while self.at < self.bytes.len() * 8 {
            let word = self.word();
            if word != 0 {
                self.at += word.trailing_zeros() as usize + 1;
                return Some(self.at - 1 - begin);
            }
            self.at = (self.at / 8 + 8).min(self.bytes.len()) * 8;
        }
        None
    }
}

impl Iterator for GapReader<'_> {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let rest = self.rest()?;
        if self.bytes.len() * 8 - self.at < self.lowest as usize {
            return None;
        }
        let lower = (self.word() & ((1 << self.lowest) - 1)) as usize;
        self.at += self.lowest as usize;
        let gap = rest.checked_mul(1 << self.lowest)?.checked_add(lower)?;
        let position = self.next.checked_add(gap).filter(|&position| position < self.elements)?;
        self.next = position + 1;
        Some(position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_example_of_the_documentation() {
        let mut out = vec![7];
        write(&[2, 3, 9], 1, &mut out);
        // 010 10 001 | 1
        assert_eq!(out, [7, 0b1000_1010, 0b1]);
        assert_eq!(bits(&[2, 3, 9], 1), 9);
        let mut positions = GapReader::new(&out[1..], 1, 10);
        assert_eq!(positions.by_ref().take(3).collect::<Vec<_>>(), [2, 3, 9]);
        assert!(positions.is_at_end());
        assert_eq!(GapReader::new(&out[1..], 1, 9).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn places_at_random_take_about_their_entropy() {
        let mut state = 1u64;
        let mut chance = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f64 / (1u64 << 24) as f64
        };
        for share in [0.2, 0.1, 0.01, 0.001] {
            let positions: Vec<usize> = (0..200_000).filter(|_| chance() < share).collect();
            let (_, bits) = best(&positions);
            let each = -share.log2() - (1.0 - share) / share * (1.0f64 - share).log2();
            let got = bits as f64 / positions.len() as f64;
            assert!(got < 1.04 * each, "{got} bits for each of {share}, where {each} are the fewest");
        }
    }

    proptest! {
        #[test]
        fn places_come_back(gaps in prop::collection::vec(prop_oneof![9 => 0usize..40, 1 => 0usize..5000], 0..200), lowest in 0u32..20) {
            let positions: Vec<usize> = gaps.iter().scan(0, |next, gap| { *next += gap + 1; Some(*next - 1) }).collect();
            let elements = positions.last().map_or(0, |last| last + 1);
            for lowest in [lowest, best(&positions).0] {
                let mut out = Vec::new();
                write(&positions, lowest, &mut out);
                prop_assert_eq!(out.len() as u128, bits(&positions, lowest).div_ceil(8));
                let mut read = GapReader::new(&out, lowest, elements);
                prop_assert_eq!(&read.by_ref().take(positions.len()).collect::<Vec<_>>(), &positions);
                prop_assert!(read.is_at_end());
            }
        }

        #[test]
        fn the_best_is_the_best_of_all(gaps in prop::collection::vec(0usize..3000, 1..100)) {
            let positions: Vec<usize> = gaps.iter().scan(0, |next, gap| { *next += gap + 1; Some(*next - 1) }).collect();
            let least = (0..=LOWEST_BITS_MAX).map(|lowest| bits(&positions, lowest)).min();
            prop_assert_eq!(Some(best(&positions).1), least);
        }

        #[test]
        fn noise_ascends_below_the_end(bytes in prop::collection::vec(any::<u8>(), 0..100), lowest in 0..=LOWEST_BITS_MAX, elements in 0usize..1000) {
            let positions: Vec<usize> = GapReader::new(&bytes, lowest, elements).collect();
            prop_assert!(positions.is_sorted_by(|a, b| a < b) && positions.iter().all(|&position| position < elements));
        }
    }
}
