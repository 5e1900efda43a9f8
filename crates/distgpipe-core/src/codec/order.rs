//! Order statistics: the k-th smallest values, for many k at once, without sorting.
//!
//! A float's bits, suitably flipped, are ordered as the float is. One pass counts the values by their upper 16 bits, which
//! says in which of 65536 buckets each rank lies; a second one gathers the values of just those buckets, a few in a
//! hundred; among them the ranks are selected. Values that are all in one bucket, such as the half of a tensor that a ReLU
//! has made 0, are gathered too, and selecting among ties is quick.

use super::{floats, BLOCK};

/// The values at some ranks, with the tables of the search, which are kept from one tensor to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct OrderStatistics {
    counts: Vec<u32>,
    wanted: Vec<bool>,
    keys: Vec<u32>,
    ranks: Vec<usize>,
}

const BUCKETS: usize = 1 << 16;

/// From so many values on, counting them first pays.
const COUNTED_MIN: usize = 4 * BUCKETS;

impl OrderStatistics {
    /// The values at these ranks, which ascend and are below the number of values; none of those may be a NaN.
    pub fn at_ranks(&mut self, bytes: &[u8], ranks: &[usize], out: &mut Vec<f32>) {
        debug_assert!(ranks.is_sorted() && ranks.last().is_none_or(|&last| last < bytes.len() / 4));
        self.ranks.clear();
        self.ranks.extend_from_slice(ranks);
        // The counters have 32 bits.
        if bytes.len() / 4 >= COUNTED_MIN && u32::try_from(bytes.len() / 4).is_ok() {
            self.gather(bytes);
        } else {
            self.keys.clear();
            self.keys.extend(floats(bytes).map(key));
        }
        out.clear();
        out.resize(ranks.len(), 0.0);
        select(&mut self.keys, 0, &self.ranks, out);
    }

    /// Fills `keys` with the buckets that hold a rank, and makes `ranks` count among them.
    fn gather(&mut self, bytes: &[u8]) {
        self.count(bytes);
        self.wanted.clear();
        self.wanted.resize(BUCKETS, false);
        let mut ranks = self.ranks.iter_mut().peekable();
        // How many values are in buckets up to here, and how many of them nobody wants.
        let (mut below, mut left_out) = (0, 0);
        for (bucket, &count) in self.counts[..BUCKETS].iter().enumerate() {
            below += count as usize;
            while let Some(rank) = ranks.next_if(|rank| **rank < below) {
                *rank -= left_out;
                self.wanted[bucket] = true;
            }
            left_out += if self.wanted[bucket] { 0 } else { count as usize };
        }

        let wanted: &[bool; BUCKETS] = self.wanted.as_slice().try_into().expect("resized to that");
        self.keys.clear();
        let mut block = [0; BLOCK];
        for bytes in bytes.chunks(4 * BLOCK) {
            // Every key is written, and kept by moving on: whether it is wanted cannot be foretold.
            let mut kept = 0;
            for key in floats(bytes).map(key) {
                block[kept % BLOCK] = key;
                kept += usize::from(wanted[(key >> 16) as usize]);
            }
            self.keys.extend_from_slice(&block[..kept]);
        }
    }

    /// Counts the values by their upper 16 bits. Neighbours that are equal would wait for each other's count, so four
    /// tables take turns.
    fn count(&mut self, bytes: &[u8]) {
        self.counts.clear();
        self.counts.resize(4 * BUCKETS, 0);
        let (front, back) = self.counts.split_at_mut(2 * BUCKETS);
        let ((a, b), (c, d)) = (front.split_at_mut(BUCKETS), back.split_at_mut(BUCKETS));
        let fixed = |table| <&mut [u32; BUCKETS]>::try_from(table).expect("split to that");
        let [a, b, c, d]: [&mut [u32; BUCKETS]; 4] = [a, b, c, d].map(fixed);
        let fours = bytes.chunks_exact(16);
        for value in floats(fours.remainder()) {
            a[bucket(value)] += 1;
        }
        for four in fours {
            let mut four = floats(four).map(bucket);
            for table in [&mut *a, &mut *b, &mut *c, &mut *d] {
                table[four.next().expect("four")] += 1;
            }
        }
        for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
            *a += *b + *c + *d;
        }
    }
}

/// A number that is ordered as the float is, −0.0 below 0.0.
#[inline(always)]
fn key(value: f32) -> u32 {
    let bits = value.to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 0x8000_0000)
}

fn value(key: u32) -> f32 {
    f32::from_bits(key ^ (!(key as i32 >> 31) as u32 | 0x8000_0000))
}

#[inline(always)]
fn bucket(value: f32) -> usize {
    (key(value) >> 16) as usize
}

/// The values at `ranks` of keys of which `before` smaller ones have been taken off: the middle rank is selected, and the
/// others are looked for on their side of it. So deep as the logarithm of their number.
fn select(keys: &mut [u32], before: usize, ranks: &[usize], out: &mut [f32]) {
    let middle = ranks.len() / 2;
    let Some(&rank) = ranks.get(middle) else { return };
    let (smaller, &mut found, larger) = keys.select_nth_unstable(rank - before);
    out[middle] = value(found);
    // A run may be one value, which then is both of its ends.
    let first = ranks.partition_point(|&other| other < rank);
    let last = ranks.partition_point(|&other| other <= rank);
    out[first..last].fill(value(found));
    select(smaller, before, &ranks[..first], &mut out[..first]);
    select(larger, rank + 1, &ranks[last..], &mut out[last..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_ordered_as_the_values_are() {
        let denormal = f32::from_bits(1);
        let values = [f32::MIN, -1.5, -1.0, -f32::MIN_POSITIVE, -denormal, -0.0, 0.0, denormal, 2.0, f32::MAX];
        assert!(values.map(key).is_sorted());
        assert_eq!(values.map(|v| value(key(v)).to_bits()), values.map(f32::to_bits));
    }

    fn bits(values: impl IntoIterator<Item = f32>) -> Vec<u32> {
        values.into_iter().map(f32::to_bits).collect()
    }

    fn check(statistics: &mut OrderStatistics, values: &[f32], ranks: &[usize]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f32::total_cmp);
        let mut found = Vec::new();
        statistics.at_ranks(&bytes, ranks, &mut found);
        assert_eq!(bits(found), bits(ranks.iter().map(|&rank| sorted[rank])));

        // The way of large tensors, whatever the size.
        statistics.ranks = ranks.to_vec();
        statistics.gather(&bytes);
        let mut found = vec![0.0; ranks.len()];
        select(&mut statistics.keys, 0, &statistics.ranks, &mut found);
        assert_eq!(bits(found), bits(ranks.iter().map(|&rank| sorted[rank])));
    }

    #[test]
    fn large_tensors_are_counted() {
        let n = COUNTED_MIN + 3;
        let ranks = [0, n / 4 - 1, n / 4, n / 2, n / 2, n - 1];
        let mut statistics = OrderStatistics::default();
        let spread = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as i32 as f32;
        check(&mut statistics, &(0..n).map(spread).collect::<Vec<_>>(), &ranks);
        check(&mut statistics, &(0..n).map(|i| spread(i).max(0.0)).collect::<Vec<_>>(), &ranks);
        check(&mut statistics, &vec![2.5; n], &ranks);
        check(&mut statistics, &(0..n).map(|i| 5.0 + spread(i) * 1e-12).collect::<Vec<_>>(), &ranks);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_is_found_is_what_sorting_finds(
            values in prop::collection::vec(
                prop_oneof![Just(0.0f32), Just(-0.0), -1.0f32..1.0, -1e-40f32..1e-40, any::<f32>()],
                1..400,
            ),
            ranks in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let values: Vec<f32> = values.into_iter().filter(|value| !value.is_nan()).collect();
            prop_assume!(!values.is_empty());
            let mut ranks: Vec<usize> = ranks.iter().map(|index| index.index(values.len())).collect();
            ranks.sort_unstable();
            let mut statistics = OrderStatistics::default();
            // Twice, because the tables are used again.
            check(&mut statistics, &values, &ranks);
            check(&mut statistics, &values, &ranks);
        }
    }
}
