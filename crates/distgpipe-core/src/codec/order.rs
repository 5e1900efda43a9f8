//! Order statistics: the k-th smallest values, for many k at once, without sorting.
//!
//! A float's bits, suitably flipped, are ordered as the float is. Three passes count them by 11, 11 and 10 bits from
//! the top: the first says which of 2048 buckets holds each rank, and the later ones look only into buckets that hold
//! one. Ties cost nothing, which matters: half of what a ReLU lets through is exactly 0.

use super::floats;

/// A number that is ordered as the float is, −0.0 below 0.0.
#[inline(always)]
fn key(value: f32) -> u32 {
    let bits = value.to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 0x8000_0000)
}

fn value(key: u32) -> f32 {
    f32::from_bits(key ^ (!(key as i32 >> 31) as u32 | 0x8000_0000))
}

/// Below so many values for each rank, sorting is faster than making the tables.
const SORT_BELOW: usize = 2048;

/// Above so many ranks, the tables would be larger than the caches.
const RANKS_COUNTED_MAX: usize = 512;

/// The tables of the search, kept from one tensor to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct OrderStatistics {
    keys: Vec<u32>,
    counts: Vec<u32>,
    found: Vec<u32>,
}

impl OrderStatistics {
    /// The values at these ranks, in ascending order of rank, all below the number of values; none may be a NaN.
    pub fn at_ranks(&mut self, bytes: &[u8], ranks: &[usize], out: &mut Vec<f32>) {
        debug_assert!(ranks.is_sorted() && ranks.last().is_none_or(|&last| last < bytes.len() / 4));
        out.clear();
        let elements = bytes.len() / 4;
        let counters_hold = u32::try_from(elements).is_ok();
        if counters_hold && ranks.len() <= RANKS_COUNTED_MAX.min(elements / SORT_BELOW) {
            self.by_counting(bytes, ranks, out);
        } else {
            self.by_sorting(bytes, ranks, out);
        }
    }

    fn by_sorting(&mut self, bytes: &[u8], ranks: &[usize], out: &mut Vec<f32>) {
        self.keys.clear();
        self.keys.extend(floats(bytes).map(key));
        self.keys.sort_unstable();
        out.extend(ranks.iter().map(|&rank| value(self.keys[rank])));
    }

    fn by_counting(&mut self, bytes: &[u8], ranks: &[usize], out: &mut Vec<f32>) {
        const TOP: usize = 1 << 11;
        // For every bucket, which table of the next pass counts it: 0 for none.
        let mut tables = [0u16; TOP];
        let mut searches: Vec<Search> = ranks.iter().map(|&rank| Search { rank, prefix: 0, table: 0 }).collect();

        // Neighbours that are equal would wait for each other's count, so four tables take turns.
        self.counts.clear();
        self.counts.resize(4 * TOP, 0);
        let mut quarters = self.counts.chunks_exact_mut(TOP);
        let mut quarter = || <&mut [u32; TOP]>::try_from(quarters.next().expect("four")).expect("of that length");
        let (a, b, c, d) = (quarter(), quarter(), quarter(), quarter());
        let fours = bytes.chunks_exact(16);
        for value in floats(fours.remainder()) {
            a[(key(value) >> 21) as usize] += 1;
        }
        for four in fours {
            let mut four = floats(four).map(|value| (key(value) >> 21) as usize);
            let mut next = || four.next().expect("four");
            let (i, j, k, l) = (next(), next(), next(), next());
            a[i] += 1;
            b[j] += 1;
            c[k] += 1;
            d[l] += 1;
        }
        for (at, a) in a.iter_mut().enumerate() {
            *a += b[at] + c[at] + d[at];
        }

        let used = descend(&mut searches, &self.counts[..TOP], 11);
        for search in &searches {
            tables[search.prefix as usize] = search.table + 1;
        }

        // Table 0 counts what nobody looks for, which spares a branch that would be guessed wrong.
        self.counts.clear();
        self.counts.resize((used + 1) * 2048, 0);
        for value in floats(bytes) {
            let key = key(value);
            let table = usize::from(tables[(key >> 21) as usize]);
            self.counts[table * 2048 + (key >> 10 & 0x7ff) as usize] += 1;
        }
        let used = descend(&mut searches, &self.counts[2048..], 11);

        // The last ten bits: the prefixes are few and in order, so they are looked up through their first eleven bits.
        self.found.clear();
        self.found.resize((self.counts.len() / 2048) * 2048, 0);
        for search in &searches {
            let table = usize::from(tables[(search.prefix >> 11) as usize]);
            self.found[table * 2048 + (search.prefix & 0x7ff) as usize] = u32::from(search.table) + 1;
        }
        self.counts.clear();
        self.counts.resize((used + 1) * 1024, 0);
        for value in floats(bytes) {
            let key = key(value);
            let table = usize::from(tables[(key >> 21) as usize]);
            let table = self.found[table * 2048 + (key >> 10 & 0x7ff) as usize] as usize;
            self.counts[table * 1024 + (key & 0x3ff) as usize] += 1;
        }
        descend(&mut searches, &self.counts[1024..], 10);
        out.extend(searches.iter().map(|search| value(search.prefix)));
    }
}

/// One rank that is looked for: among the values that begin with `prefix`, counted in table `table`, the `rank`-th.
struct Search {
    rank: usize,
    prefix: u32,
    table: u16,
}

/// Follows every search into the bucket of its table that holds its rank, and numbers the buckets so found. Searches
/// come in ascending order and stay so. Gives how many buckets there are.
fn descend(searches: &mut [Search], counts: &[u32], bits: u32) -> usize {
    let mut used = 0u16;
    let mut last = None;
    for search in searches {
        let table = &counts[usize::from(search.table) << bits..][..1 << bits];
        let mut bucket = 0;
        while search.rank >= table[bucket] as usize {
            search.rank -= table[bucket] as usize;
            bucket += 1;
        }
        search.prefix = search.prefix << bits | bucket as u32;
        if last.is_some_and(|last| last != search.prefix) {
            used += 1;
        }
        last = Some(search.prefix);
        search.table = used;
    }
    usize::from(used) + usize::from(last.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_ordered_as_the_values_are() {
        let values =
            [f32::MIN, -1.5, -1.0, -f32::MIN_POSITIVE, -f32::from_bits(1), -0.0, 0.0, f32::from_bits(1), 2.0, f32::MAX];
        assert!(values.map(key).is_sorted());
        assert_eq!(values.map(|v| value(key(v)).to_bits()), values.map(f32::to_bits));
    }

    proptest! {
        #[test]
        fn counting_finds_what_sorting_finds(
            values in prop::collection::vec(prop_oneof![Just(0.0f32), Just(-0.0), -1.0f32..1.0, -1e-40f32..1e-40, any::<f32>()], 1..400),
            ranks in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let values: Vec<f32> = values.into_iter().filter(|value| !value.is_nan()).collect();
            prop_assume!(!values.is_empty());
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            let mut ranks: Vec<usize> = ranks.iter().map(|index| index.index(values.len())).collect();
            ranks.sort_unstable();
            let (mut counted, mut sorted) = (Vec::new(), Vec::new());
            let mut statistics = OrderStatistics::default();
            // Twice, because the tables are used again.
            for _ in 0..2 {
                (counted, sorted) = (Vec::new(), Vec::new());
                statistics.by_counting(&bytes, &ranks, &mut counted);
                statistics.by_sorting(&bytes, &ranks, &mut sorted);
            }
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&counted), bits(&sorted));
        }
    }
}
