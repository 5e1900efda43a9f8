//! The bounded state of a codec: a cache that evicts the least recently inserted value.
//!
//! Evictions depend on the sequence of insertions alone, so two ends that make the same insertions keep the same
//! values.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// The overhead of an entry in bytes: its nodes in both maps, and the allocator's. Without counting it, a peer could
/// store millions of small values for free.
pub(super) const ENTRY_BYTES: usize = 256;

/// Values by key, with a bound on their total size.
#[derive(Debug)]
pub struct LruCache<K, V> {
    bytes_max: usize,
    bytes: usize,
    clock: u64,
    entries: HashMap<K, Cached<V>>,
    oldest_first: BTreeMap<u64, K>,
}

#[derive(Debug)]
struct Cached<V> {
    value: V,
    bytes: usize,
    time: u64,
}

impl<K: Copy + Eq + Hash, V> LruCache<K, V> {
    /// An empty cache for at most this many bytes.
    pub fn new(bytes_max: usize) -> Self {
        LruCache { bytes_max, bytes: 0, clock: 0, entries: HashMap::new(), oldest_first: BTreeMap::new() }
    }

    /// The most bytes that its entries have together.
    pub fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// The value of a key. This does not count as a use.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// Inserts a value of `value_bytes` bytes as the most recent one, and evicts the oldest ones if there is no room. A
    /// value that is larger than the whole cache is not kept. Returns the former value of the key.
    pub fn insert(&mut self, key: K, value: V, value_bytes: usize) -> Option<V> {
        let before = self.remove(&key);
        let bytes = value_bytes.saturating_add(ENTRY_BYTES);
        if bytes > self.bytes_max {
            return before;
        }
        while self.bytes > self.bytes_max - bytes {
            let (_, &oldest) = self.oldest_first.first_key_value().expect("what has bytes has entries");
            self.remove(&oldest);
        }
        self.clock += 1;
        self.bytes += bytes;
        self.oldest_first.insert(self.clock, key);
        self.entries.insert(key, Cached { value, bytes, time: self.clock });
        before
    }

    /// Drops all entries.
    pub fn clear(&mut self) {
        *self = LruCache::new(self.bytes_max);
    }

    fn remove(&mut self, key: &K) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.oldest_first.remove(&entry.time);
        self.bytes -= entry.bytes;
        Some(entry.value)
    }

    /// All entries, the oldest first.
    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.oldest_first.values().map(|key| (key, &self.entries[key].value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EACH: usize = 100 + ENTRY_BYTES;

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut store = LruCache::new(3 * EACH);
        for key in [1, 2, 3, 1] {
            store.insert(key, key, 100);
        }
        assert_eq!(store.insert(4, 4, 100), None);
        assert_eq!(store.iter().map(|(&key, _)| key).collect::<Vec<_>>(), [3, 1, 4]);
        assert_eq!(store.insert(1, 10, 100), Some(1));
        // A value of twice the size evicts two.
        store.insert(5, 5, EACH + 100);
        assert_eq!(store.iter().map(|(&key, &value)| (key, value)).collect::<Vec<_>>(), [(1, 10), (5, 5)]);
        // A value that never fits evicts nothing but the former value of its key.
        assert_eq!(store.insert(5, 6, 3 * EACH), Some(5));
        assert_eq!(store.insert(6, 6, usize::MAX), None);
        assert_eq!(store.iter().map(|(&key, _)| key).collect::<Vec<_>>(), [1]);
        store.clear();
        assert_eq!((store.bytes, store.get(&1)), (0, None));
    }

    proptest! {
        #[test]
        fn the_bound_holds(inserts in prop::collection::vec((0u8..20, 0usize..1000), 0..200)) {
            let mut store = LruCache::new(4000);
            for (key, bytes) in inserts {
                store.insert(key, bytes, bytes);
                let held: usize = store.iter().map(|(_, bytes)| bytes + ENTRY_BYTES).sum();
                prop_assert!(held == store.bytes && held <= 4000 && store.entries.len() == store.oldest_first.len());
                prop_assert_eq!(store.get(&key), Some(&bytes));
            }
        }
    }
}
