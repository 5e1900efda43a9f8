//! Ascending places as the gaps between them, in Golomb–Rice code: for places strewn at random, within a few hundredths of
//! the fewest bits there can be.
//!
//! A gap, the number of places left out, is cut into its lowest `r` bits and the rest. The rest goes first, as that many
//! zeros and a one, and then the `r` bits. `r` is one number for all gaps, about the logarithm of the middle one.
//!
//! ```text
//! places 2, 3, 9      gaps 2, 0, 5      r = 1      01 0 | 1 0 | 001 1      (in the order of the wire, lowest bit first)
//! ```

/// The most lowest bits: so many can be taken from any eight bytes, wherever they begin.
pub(super) const LOWEST_BITS_MAX: u32 = 56;

/// The `r` with which these ascending places take the fewest bits, and how many those are.
pub(super) fn best(places: &[usize]) -> (u32, u128) {
    // With every bit more, each gap costs one more and saves half of its rest: the saving shrinks from bit to bit, so that
    // the first `r` after which it does not improve is the best.
    let mut best = (0, bits(places, 0));
    for lowest in 1..=LOWEST_BITS_MAX {
        let bits = bits(places, lowest);
        if bits >= best.1 {
            break;
        }
        best = (lowest, bits);
    }
    best
}

fn bits(places: &[usize], lowest: u32) -> u128 {
    let rests: u128 = gaps(places).map(|gap| (gap >> lowest) as u128).sum();
    rests + places.len() as u128 * u128::from(lowest + 1)
}

fn gaps(places: &[usize]) -> impl Iterator<Item = usize> + '_ {
    let befores = std::iter::once(0).chain(places.iter().map(|place| place + 1));
    places.iter().zip(befores).map(|(place, before)| place - before)
}

/// Appends the code of ascending places.
pub(super) fn write(places: &[usize], lowest: u32, out: &mut Vec<u8>) {
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
    for gap in gaps(places) {
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

/// Reads places, which ascend whatever the bytes are. Ends at the first that is not below `elements`, or not there.
pub(super) struct Places<'a> {
    bytes: &'a [u8],
    /// The next bit.
    at: usize,
    lowest: u32,
    next: usize,
    elements: usize,
}

impl<'a> Places<'a> {
    pub fn new(bytes: &'a [u8], lowest: u32, elements: usize) -> Self {
        Places { bytes, at: 0, lowest, next: 0, elements }
    }

    /// Whether all bytes have been read, and what is left of the last one is 0.
    pub fn is_at_end(&self) -> bool {
        let unread = self.bytes.len() * 8 - self.at;
        unread < 8 && self.word() == 0
    }

    /// What comes next: at least 57 bits, 0 beyond the end.
    #[inline(always)]
    fn word(&self) -> u64 {
        let rest = &self.bytes[self.at / 8..];
        let word = match rest.first_chunk() {
            Some(bytes) => u64::from_le_bytes(*bytes),
            None => u64::from_le_bytes(std::array::from_fn(|at| rest.get(at).copied().unwrap_or(0))),
        };
        word >> (self.at % 8)
    }

    /// Counts zeros up to a one.
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

impl Iterator for Places<'_> {
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
        let place = self.next.checked_add(gap).filter(|&place| place < self.elements)?;
        self.next = place + 1;
        Some(place)
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
        let mut places = Places::new(&out[1..], 1, 10);
        assert_eq!(places.by_ref().take(3).collect::<Vec<_>>(), [2, 3, 9]);
        assert!(places.is_at_end());
        assert_eq!(Places::new(&out[1..], 1, 9).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn places_at_random_take_about_their_entropy() {
        let mut state = 1u64;
        let mut chance = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f64 / (1u64 << 24) as f64
        };
        for share in [0.2, 0.1, 0.01, 0.001] {
            let places: Vec<usize> = (0..200_000).filter(|_| chance() < share).collect();
            let (_, bits) = best(&places);
            let each = -share.log2() - (1.0 - share) / share * (1.0f64 - share).log2();
            let got = bits as f64 / places.len() as f64;
            assert!(got < 1.04 * each, "{got} bits for each of {share}, where {each} are the fewest");
        }
    }

    proptest! {
        #[test]
        fn places_come_back(gaps in prop::collection::vec(prop_oneof![9 => 0usize..40, 1 => 0usize..5000], 0..200), lowest in 0u32..20) {
            let places: Vec<usize> = gaps.iter().scan(0, |next, gap| { *next += gap + 1; Some(*next - 1) }).collect();
            let elements = places.last().map_or(0, |last| last + 1);
            for lowest in [lowest, best(&places).0] {
                let mut out = Vec::new();
                write(&places, lowest, &mut out);
                prop_assert_eq!(out.len() as u128, bits(&places, lowest).div_ceil(8));
                let mut read = Places::new(&out, lowest, elements);
                prop_assert_eq!(&read.by_ref().take(places.len()).collect::<Vec<_>>(), &places);
                prop_assert!(read.is_at_end());
            }
        }

        #[test]
        fn the_best_is_the_best_of_all(gaps in prop::collection::vec(0usize..3000, 1..100)) {
            let places: Vec<usize> = gaps.iter().scan(0, |next, gap| { *next += gap + 1; Some(*next - 1) }).collect();
            let least = (0..=LOWEST_BITS_MAX).map(|lowest| bits(&places, lowest)).min();
            prop_assert_eq!(Some(best(&places).1), least);
        }

        #[test]
        fn noise_ascends_below_the_end(bytes in prop::collection::vec(any::<u8>(), 0..100), lowest in 0..=LOWEST_BITS_MAX, elements in 0usize..1000) {
            let places: Vec<usize> = Places::new(&bytes, lowest, elements).collect();
            prop_assert!(places.is_sorted_by(|a, b| a < b) && places.iter().all(|&place| place < elements));
        }
    }
}
