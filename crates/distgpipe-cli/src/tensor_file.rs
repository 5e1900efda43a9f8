//! Safetensors files in memory, for codecs that are tried on all of their tensors. They may be anybody's: their size is
//! bounded, and one whose header and length do not agree is refused, so that whoever has a [`TensorFile`] need not check
//! again. Weights are read tensor by tensor instead: see [`distgpipe::weights`].
//!
//! Numbers in the format are little-endian, as they are in the memory of every machine that this runs on.

use crate::exit::usage;
use crate::files::read_bytes;
use distgpipe::core::weights::safetensors::{self, header_bytes, LENGTH_BYTES};
use distgpipe::core::weights::{Dtype, FormatError};
use std::ops::Range;
use std::path::Path;

/// The largest file that is read; it is held in memory.
const FILE_BYTES_MAX: u64 = 16 << 30;

/// A file and where its tensors are in it.
#[derive(Clone, Debug)]
pub struct TensorFile {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions.
    pub dims: Vec<usize>,
    range: Range<usize>,
}

impl TensorFile {
    /// The file that a flag names.
    pub fn read(flag: &str, path: &Path) -> anyhow::Result<Self> {
        let bytes = read_bytes(flag, path, FILE_BYTES_MAX)?;
        let entries = entries(&bytes).map_err(|e| usage(format!("{flag} {}: {e}", path.display())))?;
        Ok(TensorFile { bytes, entries })
    }

    /// The tensors, in the order of the file.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// A tensor's elements; `entry` is one of this file's.
    pub fn data(&self, entry: &Entry) -> &[u8] {
        &self.bytes[entry.range.clone()]
    }

    /// The same, to be changed.
    pub fn data_mut(&mut self, entry: &Entry) -> &mut [u8] {
        &mut self.bytes[entry.range.clone()]
    }

    /// The whole file, with names and metadata as they were read.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn entries(bytes: &[u8]) -> Result<Vec<Entry>, FormatError> {
    let length = header_bytes(bytes, bytes.len() as u64)?;
    let (first, from) = (LENGTH_BYTES, |at: u64| usize::try_from(at).unwrap_or(usize::MAX));
    let header = bytes.get(first..from(first as u64 + length)).unwrap_or_default();
    let found = safetensors::entries(header, bytes.len() as u64)?;
    let entry = |entry: safetensors::Entry| Entry {
        name: entry.name,
        dtype: entry.dtype,
        dims: entry.dims.iter().map(|&dim| from(dim)).collect(),
        range: from(entry.range.start)..from(entry.range.end),
    };
    Ok(found.into_iter().map(entry).collect())
}
