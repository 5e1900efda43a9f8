//! Order statistics: the k-th smallest values, for many k at once, without sorting.
//!
//! The bits of a float, suitably flipped, are ordered like the float: its key. The keys of a sample give two pivots
//! between which the value of each rank should lie. One pass counts all values by these pivots and keeps those in
//! between, a few per cent. The search continues among these until few enough are left to select from directly.
//!
//! ```text
//! keys   ────────┃p₀░░░░r₀░░░p₁┃──────────────┃p₂░░r₁░░p₃┃──────     ░ kept
//! segment    0         1              2             3        4
//! ```
//!
//! A value that is frequent in the sample, such as the 0 that a ReLU makes of half a tensor, has its own segment, and
//! ranks in it are found without keeping any values. If a rank lies outside the kept segments, or there are too many
//! ranks for the pivots, a histogram of the upper 16 bits is used instead, and the values in the buckets of the ranks
//! are selected from. On one thread, this is faster for many ranks, unless a few values are frequent. The results are
//! exact either way.

use super::kernel_runner::{check_finite, KernelRunner, PIECES_MAX};
use super::simd::{self, Tally, KEPT_MORE};
use super::{floats, CodecError, CodecId, BLOCK};
use std::ops::Range;

/// Finds the values at some ranks. The buffers are reused from one tensor to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct OrderStatistics {
    sample: Vec<i32>,
    /// The ranks that are not found yet.
    open: Vec<Open>,
    brackets: Vec<Bracket>,
    clusters: Vec<Cluster>,
    spare: Vec<i32>,
    /// The values that the last pass has kept, and those of each piece of the tensor.
    kept: Vec<u8>,
    pieces: Vec<Vec<u8>>,
    counts: Vec<u32>,
    wanted: Vec<bool>,
    keys: Vec<i32>,
    found: Vec<f32>,
    /// The smallest and the largest key, once a pass has found them.
    ends: Option<(i32, i32)>,
}

/// The memory of an `F32` tensor, and the codec that is named in errors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values<'a> {
    pub codec: CodecId,
    pub bytes: &'a [u8],
}

/// A rank among the remaining values, and its index among the requested ranks.
#[derive(Clone, Copy, Debug)]
struct Open {
    rank: usize,
    to: usize,
}

/// Marks a rank that has been found.
const CLOSED: usize = usize::MAX;

/// One more than the largest key.
const KEYS_END: i64 = i32::MAX as i64 + 1;

/// A range of keys of which all values remain: the rank of the first, and their number.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    begin: i64,
    end: i64,
    first: usize,
    count: usize,
}

/// A range of keys in which some ranks should lie, and its position in the sample.
#[derive(Clone, Debug)]
struct Bracket {
    begin: i64,
    end: i64,
    within: Range<usize>,
}

const BUCKETS: usize = 1 << 16;

/// With at most this many values, selecting directly is as fast.
const SELECTED_MAX: usize = 1 << 13;

/// With at least this many values, a histogram of the upper bits pays off.
const COUNTED_MIN: usize = 4 * BUCKETS;

/// The smallest number of ranks for which a histogram is faster than narrowing, and the size of the sample that tells
/// whether values are spread evenly enough.
const COUNTED_RANKS: usize = 20;
const COUNTED_SAMPLE: usize = 256;

/// The smallest sample for each rank, and the largest in total.
const SAMPLE_MIN: usize = 1 << 10;
const SAMPLE_MAX: usize = 1 << 14;

/// The tolerance of the first attempt, in standard deviations of a rank's position in the sample.
const DEVIATIONS: f64 = 3.0;

/// A value that occurs this often within a bracket of the sample gets its own segment.
const TIED_MIN: usize = 12;

impl OrderStatistics {
    /// The values at these ranks; an error if a value of the tensor is not finite. The ranks must ascend and be below
    /// the number of values.
    pub fn at_ranks(
        &mut self,
        runner: &KernelRunner,
        tensor: Values<'_>,
        ranks: &[usize],
    ) -> Result<&[f32], CodecError> {
        let elements = tensor.bytes.len() / 4;
        debug_assert!(ranks.is_sorted() && ranks.last().is_none_or(|&last| last < elements));
        self.found.clear();
        self.found.resize(ranks.len(), 0.0);
        self.ends = None;
        self.reopen(ranks, elements);
        if self.should_count(runner, tensor.bytes) && self.gather(tensor.bytes, elements / 8) {
            return self.finish(runner, tensor, ranks);
        }
        self.reopen(ranks, elements);
        if !self.narrow(runner, tensor, DEVIATIONS)? {
            self.reopen(ranks, elements);
            if !self.narrow(runner, tensor, 2.0 * DEVIATIONS)? {
                self.reopen(ranks, elements);
                self.gather(tensor.bytes, elements);
            }
        }
        self.finish(runner, tensor, ranks)
    }

    /// Selects the values of the open ranks from `keys`, and adds the smallest and the largest value.
    fn finish(&mut self, runner: &KernelRunner, tensor: Values<'_>, ranks: &[usize]) -> Result<&[f32], CodecError> {
        let elements = tensor.bytes.len() / 4;
        select(&mut self.keys, 0, &self.open, &mut self.found);
        let (lo, hi) = match self.ends {
            Some((lo, hi)) => (value(lo), value(hi)),
            None => runner.extremes(tensor.codec, tensor.bytes)?.range(),
        };
        for (found, &rank) in self.found.iter_mut().zip(ranks) {
            *found = if rank == 0 { lo } else { *found };
            *found = if rank + 1 == elements { hi } else { *found };
        }
        Ok(&self.found)
    }

    /// Marks all ranks as not found, except the first and the last, whose values every pass finds anyway.
    fn reopen(&mut self, ranks: &[usize], elements: usize) {
        let open = ranks.iter().enumerate().map(|(to, &rank)| Open { rank, to });
        self.open.clear();
        self.open.extend(open.filter(|open| open.rank != 0 && open.rank + 1 != elements));
    }

    /// Fills `keys` with the few values that contain the open ranks; false if that fails.
    fn narrow(&mut self, runner: &KernelRunner, tensor: Values<'_>, deviations: f64) -> Result<bool, CodecError> {
        let mut left = tensor.bytes.len() / 4;
        self.clusters.clear();
        self.clusters.push(Cluster { begin: i32::MIN.into(), end: KEYS_END, first: 0, count: left });
        let mut first = true;
        while left > SELECTED_MAX && !self.open.is_empty() {
            let size = (SAMPLE_MIN * self.open.len()).min(SAMPLE_MAX).min(left / 4);
            sample(if first { tensor.bytes } else { &self.kept }, size, 0, &mut self.sample, &mut self.spare);
            let Some(pivots) = self.pivots(deviations) else { return Ok(false) };
            let tally = if first {
                pass(runner, tensor.bytes, &pivots, &mut self.pieces, &mut self.kept)
            } else {
                pass_within(runner, &pivots, &mut self.kept)
            };
            if first {
                let ends = (tally.key_min, tally.key_max);
                let magnitude = |key| value(key).to_bits() & 0x7fff_ffff;
                check_finite(tensor.codec, tensor.bytes, magnitude(ends.0).max(magnitude(ends.1)))?;
                self.ends = Some(ends);
            }
            if !self.close(&pivots, &tally, left) {
                return Ok(false);
            }
            let kept = self.kept.len() / 4;
            // If most values are kept, a sample cannot separate them.
            let stuck = kept > left / 4 * 3;
            (left, first) = (kept, false);
            if stuck {
                break;
            }
        }
        self.keys.clear();
        if !self.open.is_empty() {
            let values = if first { tensor.bytes } else { &self.kept };
            self.keys.extend(floats(values).map(key));
        }
        Ok(true)
    }

    /// Pivots around the estimated positions of the open ranks, this many standard deviations to either side.
    fn pivots(&mut self, deviations: f64) -> Option<Pivots> {
        self.brackets.clear();
        let mut clusters = self.clusters.iter().peekable();
        for open in &self.open {
            while clusters.next_if(|cluster| cluster.first + cluster.count <= open.rank).is_some() {}
            let cluster = *clusters.peek()?;
            let place = |end: i64| self.sample.partition_point(|&key| i64::from(key) < end);
            let members = place(cluster.begin)..place(cluster.end);
            // The expected number of the cluster's members in the sample below the value of the rank, and its
            // tolerance.
            let part = ((open.rank - cluster.first) as f64 + 0.5) / cluster.count as f64;
            let middle = members.len() as f64 * part;
            let margin = deviations * (middle * (1.0 - part)).sqrt() + 4.0;
            let from = members.start + (middle - margin).max(0.0) as usize;
            let to = members.start + (middle + margin).ceil() as usize;
            let begin = if middle < margin { cluster.begin } else { self.sample[from].into() };
            let end = if to < members.end { i64::from(self.sample[to]) + 1 } else { cluster.end };
            let within = from..members.end.min(to);
            match self.brackets.last_mut() {
                Some(last) if begin < last.end => {
                    (last.end, last.within.end) = (last.end.max(end), last.within.end.max(within.end));
                }
                _ => self.brackets.push(Bracket { begin, end, within }),
            }
        }
        let mut pivots = Pivots::default();
        for bracket in &self.brackets {
            pivots.push(bracket.begin)?;
            for tied in self.sample[bracket.within.clone()].chunk_by(|a, b| a == b) {
                if tied.len() >= TIED_MIN {
                    pivots.push(tied[0].into())?;
                    pivots.push(i64::from(tied[0]) + 1)?;
                }
            }
            pivots.push(bracket.end)?;
        }
        pivots.keep(&self.brackets);
        Some(pivots)
    }

    /// Stores the values of ranks that lie in a segment of one key, and makes the others relative to the kept values;
    /// false if a rank lies outside of these.
    fn close(&mut self, pivots: &Pivots, tally: &Tally, elements: usize) -> bool {
        self.clusters.clear();
        let mut open = self.open.iter_mut().peekable();
        let mut left_out = 0;
        for segment in 0..=pivots.count {
            let begin = elements - tally.at_least[segment] as usize;
            let next = if segment < pivots.count { tally.at_least[segment + 1] as usize } else { 0 };
            let (end, kept) = (elements - next, pivots.kept >> segment & 1 == 1);
            while let Some(open) = open.next_if(|open| open.rank < end) {
                if kept {
                    open.rank -= left_out;
                } else if pivots.is_single(segment) {
                    self.found[open.to] = value(pivots.table[segment]);
                    open.rank = CLOSED;
                } else {
                    return false;
                }
            }
            if kept {
                let (from, to) = pivots.keys(segment);
                self.clusters.push(Cluster { begin: from, end: to, first: begin - left_out, count: end - begin });
            } else {
                left_out += end - begin;
            }
        }
        self.open.retain(|open| open.rank != CLOSED);
        true
    }

    /// Whether counting is faster than narrowing: if there are many ranks, and one thread, and no value is so frequent
    /// that a bucket is likely to have a large part of the tensor.
    fn should_count(&mut self, runner: &KernelRunner, bytes: &[u8]) -> bool {
        let elements = bytes.len() / 4;
        if self.open.len() < COUNTED_RANKS || elements < COUNTED_MIN || runner.piece(elements, BLOCK) < elements {
            return false;
        }
        sample(bytes, COUNTED_SAMPLE, 0, &mut self.sample, &mut self.spare);
        self.sample.chunk_by(|a, b| a >> 16 == b >> 16).all(|tied| tied.len() < COUNTED_SAMPLE / 16)
    }

    /// Fills `keys` with the values of all buckets that contain a rank, and makes the open ranks relative to them; false
    /// if these are more than `most` values.
    fn gather(&mut self, bytes: &[u8], most: usize) -> bool {
        self.keys.clear();
        // The counters of the histogram have 32 bits.
        if bytes.len() / 4 < COUNTED_MIN || u32::try_from(bytes.len() / 4).is_err() {
            self.keys.extend(floats(bytes).map(key));
            return true;
        }
        self.count(bytes);
        self.wanted.clear();
        self.wanted.resize(BUCKETS, false);
        let mut open = self.open.iter_mut().peekable();
        // The number of values in the buckets so far, and how many of them are kept.
        let (mut below, mut kept) = (0, 0);
        for bucket in buckets() {
            let count = self.counts[bucket] as usize;
            if open.peek().is_some_and(|open| open.rank < below + count) {
                while let Some(open) = open.next_if(|open| open.rank < below + count) {
                    open.rank -= below - kept;
                }
                self.wanted[bucket] = true;
                kept += count;
            }
            below += count;
        }
        if kept > most {
            return false;
        }

        let wanted: &[bool; BUCKETS] = self.wanted.as_slice().try_into().expect("resized to that");
        let mut block = [0.0; BLOCK];
        for bytes in bytes.chunks(4 * BLOCK) {
            // Branch-free: every value is written, and the position advances only if the value is wanted.
            let mut kept = 0;
            for value in floats(bytes) {
                block[kept % BLOCK] = value;
                kept += usize::from(wanted[bucket(value)]);
            }
            self.keys.extend(block[..kept].iter().copied().map(key));
        }
        true
    }

    /// Counts the values by their upper 16 bits. Four tables take turns, because increments of the same counter by
    /// equal neighbours would wait for each other.
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

/// The pivots that divide the keys into segments, and the segments whose values are kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pivots {
    /// The first key of each segment; `i32::MAX` for unused entries.
    pub table: [i32; 32],
    /// The number of pivots, one less than that of segments.
    pub count: usize,
    /// A bit for each segment: 1 if its values are kept.
    pub kept: u32,
}

impl Default for Pivots {
    fn default() -> Self {
        let mut table = [i32::MAX; 32];
        table[0] = i32::MIN;
        Pivots { table, count: 0, kept: 0 }
    }
}

impl Pivots {
    /// Adds a pivot that is not below the last one; `None` if there are too many.
    pub fn push(&mut self, key: i64) -> Option<()> {
        // A pivot beyond the range of keys separates nothing.
        if key > self.table[self.count].into() && key <= i32::MAX.into() {
            *self.table.get_mut(self.count + 1)? = key as i32;
            self.count += 1;
        }
        Some(())
    }

    /// Keeps the segments within these brackets, whose ends are pivots, except those of a single key.
    fn keep(&mut self, brackets: &[Bracket]) {
        for segment in 0..=self.count {
            let (begin, _) = self.keys(segment);
            let wanted = brackets.iter().any(|bracket| (bracket.begin..bracket.end).contains(&begin));
            self.kept |= u32::from(wanted && !self.is_single(segment)) << segment;
        }
    }

    /// The first key of a segment, and the first after it.
    fn keys(&self, segment: usize) -> (i64, i64) {
        let end = if segment < self.count { self.table[segment + 1].into() } else { KEYS_END };
        (self.table[segment].into(), end)
    }

    /// Whether a segment is a single key.
    fn is_single(&self, segment: usize) -> bool {
        let (begin, end) = self.keys(segment);
        end - begin == 1
    }

    /// The segment that a key is in.
    #[inline(always)]
    pub fn segment(&self, key: i32) -> usize {
        let mut segment = 0;
        for bit in [16, 8, 4, 2, 1] {
            segment |= if key >= self.table[segment | bit] { bit } else { 0 };
        }
        segment
    }
}

/// Counts all values by segment, and collects those to keep.
fn pass(runner: &KernelRunner, bytes: &[u8], pivots: &Pivots, pieces: &mut Vec<Vec<u8>>, kept: &mut Vec<u8>) -> Tally {
    let piece = runner.piece(bytes.len() / 4, BLOCK);
    let count = bytes.len().div_ceil(4 * piece);
    kept.clear();
    let mut tallies = [Tally::default(); PIECES_MAX];
    if count == 1 {
        collect(runner, bytes, pivots, &mut tallies[0], kept);
        return tallies[0];
    }
    pieces.resize_with(pieces.len().max(count), Vec::new);
    let work = bytes.chunks(4 * piece).zip(&mut *pieces).zip(&mut tallies);
    runner.each(work, |((bytes, kept), tally)| {
        kept.clear();
        collect(runner, bytes, pivots, tally, kept);
    });
    pieces[..count].iter().for_each(|piece| kept.extend_from_slice(piece));
    tallies.into_iter().fold(Tally::default(), |mut sum, tally| {
        sum.at_least.iter_mut().zip(tally.at_least).for_each(|(sum, count)| *sum += count);
        sum.key_min = sum.key_min.min(tally.key_min);
        sum.key_max = sum.key_max.max(tally.key_max);
        sum
    })
}

fn collect(runner: &KernelRunner, bytes: &[u8], pivots: &Pivots, tally: &mut Tally, kept: &mut Vec<u8>) {
    let mut room = [0; 4 * (BLOCK + KEPT_MORE)];
    for block in bytes.chunks(4 * BLOCK) {
        let length = simd::narrow(runner.level, block, pivots, tally, &mut room);
        kept.extend_from_slice(&room[..4 * length]);
    }
}

/// A pass over the values that an earlier pass has kept. It moves those that are kept again to the front.
fn pass_within(runner: &KernelRunner, pivots: &Pivots, kept: &mut Vec<u8>) -> Tally {
    let mut tally = Tally::default();
    let mut room = [0; 4 * (BLOCK + KEPT_MORE)];
    let mut end = 0;
    for begin in (0..kept.len()).step_by(4 * BLOCK) {
        let block = &kept[begin..kept.len().min(begin + 4 * BLOCK)];
        let bytes = 4 * simd::narrow(runner.level, block, pivots, &mut tally, &mut room);
        kept[end..end + bytes].copy_from_slice(&room[..bytes]);
        end += bytes;
    }
    kept.truncate(end);
    tally
}

/// The keys of about `size` values, in ascending order. One value is taken at random from each of as many equal parts,
/// so that periodic tensors do not bias the sample.
pub(super) fn sample(bytes: &[u8], size: usize, seed: u64, out: &mut Vec<i32>, spare: &mut Vec<i32>) {
    let values = bytes.as_chunks().0;
    let (length, size) = (values.len() as u64, size.min(values.len()) as u64);
    let (mut state, mut begin) = (seed, 0);
    out.clear();
    out.extend((1..=size).map(|part| {
        // Knuth's constants for a linear congruential generator, whose upper bits are good.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let end = length * part / size;
        let at = begin + (((state >> 32) * (end - begin)) >> 32);
        begin = end;
        key(f32::from_ne_bytes(values[at as usize]))
    }));
    sort(out, spare);
}

/// Sorts keys by a radix sort with three digits.
fn sort(keys: &mut Vec<i32>, spare: &mut Vec<i32>) {
    const DIGIT: u32 = 11;
    const VALUES: usize = 1 << DIGIT;
    if keys.len() < VALUES {
        return keys.sort_unstable();
    }
    let digit = |key: i32, which: usize| ((key as u32 ^ 0x8000_0000) >> (DIGIT * which as u32)) as usize % VALUES;
    let mut counts = [[0u32; VALUES]; 3];
    for &key in keys.iter() {
        (0..3).for_each(|which| counts[which][digit(key, which)] += 1);
    }
    spare.resize(keys.len(), 0);
    for (which, places) in counts.iter_mut().enumerate() {
        let mut begin = 0;
        for place in &mut *places {
            begin += std::mem::replace(place, begin);
        }
        for &key in keys.iter() {
            let place = &mut places[digit(key, which)];
            spare[*place as usize] = key;
            *place += 1;
        }
        std::mem::swap(keys, spare);
    }
}

/// An integer that is ordered like the float, with −0.0 below 0.0.
#[inline(always)]
pub(super) fn key(value: f32) -> i32 {
    let bits = value.to_bits() as i32;
    bits ^ ((bits >> 31) & i32::MAX)
}

/// The float that has this key.
pub(super) fn value(key: i32) -> f32 {
    f32::from_bits((key ^ ((key >> 31) & i32::MAX)) as u32)
}

#[inline(always)]
fn bucket(value: f32) -> usize {
    (value.to_bits() >> 16) as usize
}

/// All buckets in the order of the keys in them: those of negative numbers, the largest magnitude first, and then the
/// others.
fn buckets() -> impl Iterator<Item = usize> {
    (BUCKETS / 2..BUCKETS).rev().chain(0..BUCKETS / 2)
}

/// Finds the values at the open ranks among keys that have `before` smaller keys in front. Selects the middle rank, and
/// recurses for the ranks on either side; the depth is the logarithm of the number of ranks.
fn select(keys: &mut [i32], before: usize, open: &[Open], out: &mut [f32]) {
    let Some(&Open { rank, .. }) = open.get(open.len() / 2) else { return };
    let (smaller, &mut found, larger) = keys.select_nth_unstable(rank - before);
    // A bin may be a single value, which is then both of its ends.
    let first = open.partition_point(|other| other.rank < rank);
    let last = open.partition_point(|other| other.rank <= rank);
    open[first..last].iter().for_each(|open| out[open.to] = value(found));
    select(smaller, before, &open[..first], out);
    select(larger, rank + 1, &open[last..], out);
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
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
        for level in Level::all_here() {
            let runner = level.force(KernelRunner::default);
            let tensor = Values { codec: CodecId::Sort, bytes: &bytes };
            let found = statistics.at_ranks(&runner, tensor, ranks).unwrap();
            assert_eq!(bits(found.iter().copied()), bits(ranks.iter().map(|&rank| sorted[rank])), "{level:?}");
        }

        // Large tensors must take the fast path, or it would go untested.
        if values.len() > SELECTED_MAX {
            statistics.reopen(ranks, values.len());
            let tensor = Values { codec: CodecId::Sort, bytes: &bytes };
            assert!(statistics.narrow(&KernelRunner::default(), tensor, DEVIATIONS).unwrap());
            assert!(statistics.keys.len() <= values.len() / 16, "{} are left", statistics.keys.len());
        }

        // The histogram, whatever the size.
        statistics.open = ranks.iter().enumerate().map(|(to, &rank)| Open { rank, to }).collect();
        assert!(statistics.gather(&bytes, values.len()));
        let mut found = vec![0.0; ranks.len()];
        select(&mut statistics.keys, 0, &statistics.open, &mut found);
        assert_eq!(bits(found), bits(ranks.iter().map(|&rank| sorted[rank])));
    }

    #[test]
    fn large_tensors_are_narrowed_down() {
        let n = COUNTED_MIN + 3;
        let ranks = [0, n / 4 - 1, n / 4, n / 2, n / 2, n - 1];
        let mut statistics = OrderStatistics::default();
        let spread = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as i32 as f32;
        check(&mut statistics, &(0..n).map(spread).collect::<Vec<_>>(), &ranks);
        check(&mut statistics, &(0..n).map(|i| spread(i).max(0.0)).collect::<Vec<_>>(), &ranks);
        check(&mut statistics, &vec![2.5; n], &ranks);
        check(&mut statistics, &(0..n).map(|i| 5.0 + spread(i) * 1e-12).collect::<Vec<_>>(), &ranks);
    }

    /// Many ranks are counted, unless a bucket or all wanted buckets together have too large a part of the values.
    #[test]
    fn many_ranks_are_found_in_evenly_and_unevenly_spread_values() {
        let n = COUNTED_MIN + 3;
        let ranks: Vec<usize> = (0..32).map(|rank| rank * (n - 1) / 31).collect();
        let spread = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as i32 as f32;
        let near_one_of_twenty = |i: usize| (i % 20) as f32 + spread(i) * 1e-13;
        let tensors: [(Vec<f32>, bool, bool); 3] = [
            ((0..n).map(spread).collect(), true, true),
            ((0..n).map(|i| spread(i).max(0.0)).collect(), false, false),
            ((0..n).map(near_one_of_twenty).collect(), true, false),
        ];
        let (mut statistics, runner) = (OrderStatistics::default(), KernelRunner::default());
        for (values, tried, counted) in tensors {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            let mut sorted = values;
            sorted.sort_unstable_by(f32::total_cmp);
            let found = statistics.at_ranks(&runner, Values { codec: CodecId::Sort, bytes: &bytes }, &ranks).unwrap();
            assert_eq!(bits(found.iter().copied()), bits(ranks.iter().map(|&rank| sorted[rank])));
            statistics.reopen(&ranks, n);
            assert_eq!(statistics.should_count(&runner, &bytes), tried);
            assert_eq!(statistics.gather(&bytes, n / 8), counted);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn order_statistics_equal_those_of_sorting(
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
            // Twice, because the buffers are reused.
            check(&mut statistics, &values, &ranks);
            check(&mut statistics, &values, &ranks);
        }
    }
}
