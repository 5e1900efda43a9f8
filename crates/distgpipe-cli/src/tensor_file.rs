//! Safetensors files. They may be anybody's: their size is bounded, and one whose header and length do not agree is
//! refused, so that whoever has a [`TensorFile`] need not check again.
//!
//! Numbers in the format are little-endian, as they are in the memory of every machine that this runs on.

use crate::exit::usage;
use crate::files::read_bytes;
use safetensors::tensor::Metadata;
use safetensors::Dtype;
use std::ops::Range;
use std::path::Path;

/// The largest file that is read; it is held in memory.
const FILE_BYTES_MAX: u64 = 16 << 30;

/// The longest header that is parsed, the same as in the other implementations of the format.
const HEADER_BYTES_MAX: usize = 100_000_000;

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
        let entries = entries(&bytes)
            .map_err(|got| usage(format!("{flag} {}: expected a safetensors file, got {got}", path.display())))?;
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

/// Where the tensors are. The crate's own check adds lengths from the file without asking whether they overflow, so it
/// only parses here.
fn entries(bytes: &[u8]) -> Result<Vec<Entry>, String> {
    let cut = || format!("{} bytes, fewer than its header needs: was it copied to its end?", bytes.len());
    let other = |what: &str| format!("{what} where its header should be: is this the right file?");
    let length = bytes.first_chunk::<8>().ok_or_else(cut)?;
    let header_bytes = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(other("something else"));
    }
    let first = 8 + header_bytes;
    let header = bytes.get(8..first).ok_or_else(cut)?;
    let header: Metadata = serde_json::from_slice(header).map_err(|e| other(&format!("no list of tensors ({e})")))?;
    let mut infos: Vec<_> = header.tensors().into_iter().collect();
    // Empty tensors share their place with the next one, so names decide.
    infos.sort_by(|(a_name, a), (b_name, b)| (a.data_offsets, a_name).cmp(&(b.data_offsets, b_name)));
    let mut entries = Vec::with_capacity(infos.len());
    let mut end = first;
    for (name, info) in infos {
        let (from, to) = info.data_offsets;
        let elements = info.shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let size = elements.and_then(|elements| elements.checked_mul(info.dtype.size()));
        if Some(first) != end.checked_sub(from) || size.is_none() || size != to.checked_sub(from) {
            let shape = format!("{:?} {:?} in bytes {from} to {to}", info.dtype, info.shape);
            return Err(format!("tensor `{name}` as {shape}, which do not fit: ask whoever wrote it"));
        }
        let start = end;
        end = first.checked_add(to).filter(|&end| end <= bytes.len()).ok_or_else(cut)?;
        entries.push(Entry { name, dtype: info.dtype, dims: info.shape.clone(), range: start..end });
    }
    match bytes.len() - end {
        0 => Ok(entries),
        more => Err(format!("{more} bytes after its last tensor: ask whoever wrote it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![7; data]].concat()
    }

    fn one(dtype: &str, shape: &str, from: &str, to: &str) -> String {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}}}"#)
    }

    #[test]
    fn tensors_lie_where_the_header_says_and_empty_ones_nowhere() {
        let header = r#"{"__metadata__":{"by":"hand"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "e":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}"#;
        let bytes = file(header, 9);
        let entries = entries(&bytes).unwrap();
        let found: Vec<_> = entries.iter().map(|entry| (&entry.name[..], entry.range.len())).collect();
        assert_eq!(found, [("e", 0), ("b", 8), ("a", 1)]);
        assert_eq!(entries[2].range.end, bytes.len());
    }

    /// The largest of these made the crate's reader add past the largest number there is.
    #[test]
    fn headers_that_lie_are_refused() {
        let max = u64::MAX.to_string();
        for header in [
            one("F32", "[2]", "0", "4"),
            one("F32", "[2]", "8", "0"),
            one("F32", "[2]", "4", "12"),
            one("U8", &format!("[{max}]"), "0", &max),
            one("U8", &format!("[{}]", u64::MAX - 90), "0", &(u64::MAX - 90).to_string()),
            one("F32", &format!("[{max},{max}]"), "0", "8"),
            one("F32", "[-2]", "0", "8"),
            one("F99", "[2]", "0", "8"),
            "[]".to_owned(),
            "{".to_owned(),
            String::new(),
        ] {
            assert!(entries(&file(&header, 8)).is_err(), "{header}");
        }
        let good = one("F32", "[2]", "0", "8");
        assert!(entries(&file(&good, 8)).is_ok());
        assert!(entries(&file(&good, 9)).unwrap_err().contains("1 bytes after its last tensor"));
        for length in 0..file(&good, 8).len() {
            let why = entries(&file(&good, 8)[..length]).unwrap_err();
            assert!(why.contains("was it copied to its end?"), "{why}");
        }
    }
}
