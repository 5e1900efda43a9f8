//! What both ends of a `delta` stream remember, and how they notice that they differ.

use super::super::lru_cache::LruCache;
use super::super::raw::to_or_from_little_endian;
use crate::wire::DType;
use std::borrow::Cow;
use std::fmt;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The position of one end of a `delta` stream. Encoder and decoder must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPosition {
    /// The number of bodies before this position.
    pub number: u64,
    /// A hash of these bodies and of the rows that the next one builds on.
    pub check: u64,
}

impl fmt::Display for StreamPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "body {} with check {:016x}", self.number, self.check)
    }
}

/// The rows that both ends of one direction of a link have.
#[derive(Debug)]
pub(super) struct Memory {
    pub rows: LruCache<Key, Box<[u8]>>,
    /// The number of bodies remembered so far.
    pub number: u64,
    /// The hash of all of these bodies.
    pub chain: u64,
}

/// Identifies a row: its sample, and the index of its tensor in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub sample: u64,
    pub tensor_index: u16,
}

/// The rows of a tensor, as a body describes them.
pub(super) struct Rows {
    pub keys: Vec<Key>,
    /// Which rows are sent as differences.
    pub known: Vec<bool>,
    pub row_bytes: usize,
}

impl Rows {
    pub fn known_count(&self) -> usize {
        self.known.iter().filter(|&&known| known).count()
    }

    /// The rows of a tensor that are known, or those that are not.
    pub fn select<'a>(&'a self, tensor: &'a [u8], known: bool) -> impl Iterator<Item = &'a [u8]> + 'a {
        let rows = tensor.chunks_exact(self.row_bytes).zip(&self.known);
        rows.filter(move |(_, &is)| is == known).map(|(row, _)| row)
    }
}

impl Memory {
    pub fn new(bytes_max: usize) -> Self {
        Memory { rows: LruCache::new(bytes_max), number: 0, chain: 0 }
    }

    pub fn forget(&mut self) {
        self.rows.clear();
        (self.number, self.chain) = (0, 0);
    }

    pub fn base(&self, key: &Key, row_bytes: usize) -> Option<&[u8]> {
        self.rows.get(key).map(|row| &row[..]).filter(|row| row.len() == row_bytes)
    }

    /// Copies the known rows into `bases`, and returns the position of a body that builds on them; `None` if a row is
    /// missing.
    pub fn bases(&self, rows: &Rows, bases: &mut Vec<u8>) -> (StreamPosition, Option<()>) {
        bases.clear();
        let known = rows.keys.iter().zip(&rows.known).filter(|(_, &known)| known);
        let complete = known.map(|(key, _)| self.base(key, rows.row_bytes).map(|row| bases.extend_from_slice(row)));
        let complete = complete.collect();
        let check = xxh3_64_with_seed(&little_endian(bases), self.chain);
        (StreamPosition { number: self.number, check }, complete)
    }

    /// Stores the rows of `decoded`, the whole tensor as the receiver has it, and adds `body` to the history.
    pub fn remember(&mut self, rows: &Rows, decoded: &[u8], body: &[u8]) {
        for (key, row) in rows.keys.iter().zip(decoded.chunks_exact(rows.row_bytes)) {
            self.rows.insert(*key, row.into(), row.len());
        }
        self.number += 1;
        self.chain = xxh3_64_with_seed(body, self.chain);
    }
}

/// A tensor's bytes in the order in which both ends hash them.
fn little_endian(bytes: &[u8]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        return bytes.into();
    }
    let mut turned = bytes.to_vec();
    to_or_from_little_endian(DType::F32, &mut turned);
    turned.into()
}
