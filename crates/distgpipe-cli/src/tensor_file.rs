//! Safetensors files held in memory, for trials of codecs on all of their tensors. Files are untrusted: their size is bounded, and
//! the header is checked against the length once, when a [`TensorFile`] is read. Weights are read tensor by tensor instead: see
//! [`distgpipe::train::weights`].
//!
//! The format is little-endian, as are all supported machines.

use crate::exit::usage;
use crate::files::read_bytes;
use distgpipe_core::weights::safetensors::{self, header_bytes, LENGTH_BYTES};
use distgpipe_core::weights::{FormatError, TensorType};
use std::ops::Range;
use std::path::Path;

/// The largest file that is read into memory.
const FILE_BYTES_MAX: u64 = 16 << 30;

/// The bytes of a file and the positions of its tensors.
#[derive(Clone, Debug)]
pub struct TensorFile {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    pub dtype: TensorType,
    pub dims: Vec<usize>,
    range: Range<usize>,
}

impl TensorFile {
    /// Reads the file that a flag names.
    pub fn read(flag: &str, path: &Path) -> anyhow::Result<Self> {
        let bytes = read_bytes(flag, path, FILE_BYTES_MAX)?;
        let entries = entries(&bytes).map_err(|e| usage(format!("{flag} {}: {e}", path.display())))?;
        Ok(TensorFile { bytes, entries })
    }

    /// The tensors, in the order of the file.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The elements of a tensor; `entry` comes from this file.
    pub fn data(&self, entry: &Entry) -> &[u8] {
        &self.bytes[entry.range.clone()]
    }

    /// The elements of a tensor, for overwriting; `entry` comes from this file.
    pub fn data_mut(&mut self, entry: &Entry) -> &mut [u8] {
        &mut self.bytes[entry.range.clone()]
    }

    /// The whole file, with its names and metadata unchanged.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn entries(bytes: &[u8]) -> Result<Vec<Entry>, FormatError> {
    let length = header_bytes(bytes, bytes.len() as u64)?;
    let (first, from) = (LENGTH_BYTES, |at: u64| usize::try_from(at).unwrap_or(usize::MAX));
    let header = bytes.get(first..from(first as u64 + length)).unwrap_or_default();
    let found = safetensors::entries(header, bytes.len() as u64)?;
    let entry = |entry: safetensors::TensorEntry| Entry {
        name: entry.name,
        dtype: entry.dtype,
        dims: entry.dims.iter().map(|&dim| from(dim)).collect(),
        range: from(entry.range.start)..from(entry.range.end),
    };
    Ok(found.into_iter().map(entry).collect())
}
