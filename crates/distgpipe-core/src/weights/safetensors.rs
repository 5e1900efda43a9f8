//! The header of a safetensors file: its length in eight bytes, then JSON with the type, the dimensions and the
//! position of each tensor. Numbers are little-endian.
//!
//! A header is accepted only if its tensors follow each other without gaps to the end of the file.

use super::{FormatError, TensorType, COPY_AGAIN};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;

/// The longest header that is parsed, in bytes; the same as in other implementations of the format.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The size of the header's length in front of it, in bytes.
pub const LENGTH_BYTES: usize = 8;

const OTHER_FILE: &str = "is this the right file?";
const FAULTY_WRITER: &str = "the program that wrote the file is faulty, write it again with another";

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// The name of the tensor.
    pub name: String,
    /// The type of the elements.
    pub dtype: TensorType,
    /// The dimensions of the tensor.
    pub dims: Vec<u64>,
    /// The position of the tensor's bytes in the file.
    pub range: Range<u64>,
}

/// The length of the header in bytes, from the first [`LENGTH_BYTES`] of a file of `file_bytes` bytes. The first tensor
/// follows the header.
pub fn header_bytes(length: &[u8], file_bytes: u64) -> Result<u64, FormatError> {
    let Some(&length) = length.first_chunk::<LENGTH_BYTES>() else {
        let got = format!("{} bytes", length.len());
        return Err(FormatError::new(0, "8 bytes with the header's length", got, COPY_AGAIN));
    };
    let header = u64::from_le_bytes(length);
    if header > HEADER_BYTES_MAX {
        let expected = format!("a safetensors file, with a header of at most {HEADER_BYTES_MAX} bytes,");
        return Err(FormatError::new(0, expected, "something else", OTHER_FILE));
    }
    if file_bytes.saturating_sub(LENGTH_BYTES as u64) < header {
        let expected = format!("a header of {header} bytes");
        return Err(FormatError::new(LENGTH_BYTES, expected, format!("a file of {file_bytes}"), COPY_AGAIN));
    }
    Ok(header)
}

/// The tensors that a header lists, in the order of their positions in a file of `file_bytes` bytes.
pub fn entries(header: &[u8], file_bytes: u64) -> Result<Vec<TensorEntry>, FormatError> {
    let List(mut listed) = serde_json::from_slice(header).map_err(|e| {
        FormatError::new(LENGTH_BYTES, "a safetensors file's list of tensors", e.to_string(), OTHER_FILE)
    })?;
    let first = (LENGTH_BYTES + header.len()) as u64;
    let mut names = HashSet::new();
    if let Some((name, _)) = listed.iter().find(|(name, _)| !names.insert(name.as_str())) {
        return Err(FormatError::new(LENGTH_BYTES, "each name once", format!("`{name}` twice"), FAULTY_WRITER));
    }
    drop(names);
    // An empty tensor has the same position as the next one, so names break the tie.
    listed.sort_by(|(a_name, a), (b_name, b)| (a.data_offsets, a_name).cmp(&(b.data_offsets, b_name)));
    let mut entries = Vec::with_capacity(listed.len());
    let mut end = first;
    for (name, Info { dtype, shape: dims, data_offsets: (from, to) }) in listed {
        let Some(&dtype) = TensorType::ALL.iter().find(|known| known.name() == dtype) else {
            let got = format!("`{name}` of {dtype}");
            return Err(FormatError::new(LENGTH_BYTES, "types of this version", got, "convert it to F32, F16 or BF16"));
        };
        let size = dtype.tensor_bytes(&dims);
        if Some(first) != end.checked_sub(from) || size.is_none() || size != to.checked_sub(from) {
            let got = format!("`{name}` as {} {dims:?} in bytes {from} to {to}, which do not fit", dtype.name());
            return Err(FormatError::new(LENGTH_BYTES, "tensors without gaps between them", got, FAULTY_WRITER));
        }
        let start = end;
        let Some(next) = first.checked_add(to).filter(|&end| end <= file_bytes) else {
            let expected = format!("`{name}`");
            return Err(FormatError { offset: file_bytes, expected, got: "the file's end".into(), remedy: COPY_AGAIN });
        };
        end = next;
        entries.push(TensorEntry { name, dtype, dims, range: start..end });
    }
    match file_bytes - end {
        0 => Ok(entries),
        more => Err(FormatError {
            offset: end,
            expected: "the file's end".to_owned(),
            got: format!("{more} bytes after its last tensor"),
            remedy: FAULTY_WRITER,
        }),
    }
}

/// The metadata of a header: texts by key, for any purpose. Empty if the file has none.
pub fn metadata(header: &[u8]) -> Result<BTreeMap<String, String>, FormatError> {
    #[derive(Deserialize)]
    struct Members {
        #[serde(default, rename = "__metadata__")]
        metadata: BTreeMap<String, String>,
    }
    serde_json::from_slice(header).map(|Members { metadata }| metadata).map_err(|e| {
        FormatError::new(LENGTH_BYTES, "a safetensors file's header with texts as metadata", e.to_string(), OTHER_FILE)
    })
}

/// The beginning of a file up to its first tensor, and the positions at which to write the tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLayout {
    /// The length and the header, to be written first.
    pub bytes: Vec<u8>,
    /// The position of each tensor, in the order in which they were given.
    pub ranges: Vec<Range<u64>>,
}

/// The layout of a file with these tensors and this metadata. Larger elements come first, as in other implementations,
/// so every tensor is aligned to its elements' size, which readers that map the file need. `None` if the file or its
/// header would be too long.
pub fn layout(tensors: &[(&str, TensorType, &[u64])], about: &BTreeMap<String, String>) -> Option<FileLayout> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(tensors[i].1.size_bytes()));
    let mut ranges = vec![0..0; tensors.len()];
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), serde_json::to_value(about).ok()?);
    let mut end = 0u64;
    for i in order {
        let (name, dtype, dims) = tensors[i];
        let start = end;
        end = end.checked_add(dtype.tensor_bytes(dims)?)?;
        ranges[i] = start..end;
        let info = Info { dtype: dtype.name().to_owned(), shape: dims.to_vec(), data_offsets: (start, end) };
        header.insert(name.to_owned(), serde_json::to_value(info).ok()?);
    }
    let mut text = serde_json::to_vec(&header).ok()?;
    // Padded with spaces, so that the first tensor is aligned too.
    text.resize(text.len().next_multiple_of(LENGTH_BYTES), b' ');
    let length = text.len() as u64;
    let first = LENGTH_BYTES as u64 + length;
    end.checked_add(first).filter(|&end| end <= i64::MAX as u64 && length <= HEADER_BYTES_MAX)?;
    ranges.iter_mut().for_each(|range| *range = range.start + first..range.end + first);
    Some(FileLayout { bytes: [&length.to_le_bytes()[..], &text].concat(), ranges })
}

#[derive(Serialize, Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The members of the header in order, including repeated names, which a map would hide.
struct List(Vec<(String, Info)>);

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = List;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with a member for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<List, A::Error> {
                let mut pairs = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>()?;
                    } else {
                        pairs.push((name, map.next_value()?));
                    }
                }
                Ok(List(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![7; data]].concat()
    }

    fn read(bytes: &[u8]) -> Result<Vec<TensorEntry>, FormatError> {
        let total = bytes.len() as u64;
        let header = header_bytes(bytes, total)?;
        entries(&bytes[LENGTH_BYTES..LENGTH_BYTES + header as usize], total)
    }

    fn one(dtype: &str, shape: &str, from: &str, to: &str) -> String {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}}}"#)
    }

    #[test]
    fn tensors_lie_where_the_header_says_and_empty_ones_nowhere() {
        let header = r#"{"__metadata__":{"by":"hand"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "e":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}"#;
        let bytes = file(header, 9);
        let entries = read(&bytes).unwrap();
        let found: Vec<_> =
            entries.iter().map(|entry| (&entry.name[..], entry.range.end - entry.range.start)).collect();
        assert_eq!(found, [("e", 0), ("b", 8), ("a", 1)]);
        assert_eq!(entries[2].range.end, bytes.len() as u64);
        assert_eq!(read(&file("{}", 0)).unwrap(), []);
    }

    #[test]
    fn metadata_is_text_by_key() {
        let header =
            r#"{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"__metadata__":{"by":"hand","x":"{\"y\":1}"}}"#;
        let found = metadata(header.as_bytes()).unwrap();
        assert_eq!((&found["by"][..], &found["x"][..], found.len()), ("hand", r#"{"y":1}"#, 2));
        assert!(metadata(b"{}").unwrap().is_empty());
        for wrong in [r#"{"__metadata__":{"by":1}}"#, r#"{"__metadata__":3}"#, "3", ""] {
            assert!(metadata(wrong.as_bytes()).unwrap_err().to_string().contains("metadata"), "{wrong}");
        }
    }

    /// Regression of another reader: the largest of these overflowed an addition.
    #[test]
    fn headers_that_lie_are_refused() {
        let max = u64::MAX.to_string();
        let twice =
            one("F32", "[1]", "0", "4").replace("}}", r#"},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#);
        for header in [
            one("F32", "[2]", "0", "4"),
            one("F32", "[2]", "8", "0"),
            one("F32", "[2]", "4", "12"),
            one("U8", &format!("[{max}]"), "0", &max),
            one("U8", &format!("[{}]", u64::MAX - 90), "0", &(u64::MAX - 90).to_string()),
            one("F32", &format!("[{max},{max}]"), "0", "8"),
            one("F32", "[-2]", "0", "8"),
            one("F99", "[2]", "0", "8"),
            twice,
            "[]".to_owned(),
            "{".to_owned(),
            String::new(),
        ] {
            assert!(read(&file(&header, 8)).is_err(), "{header}");
        }
        let good = one("F32", "[2]", "0", "8");
        assert!(read(&file(&good, 8)).is_ok());
        assert!(read(&file(&good, 9)).unwrap_err().to_string().contains("1 bytes after its last tensor"));
        for length in 0..file(&good, 8).len() {
            let why = read(&file(&good, 8)[..length]).unwrap_err().to_string();
            assert!(why.contains("the file is truncated"), "{length}: {why}");
        }
    }

    #[test]
    fn what_is_laid_out_is_read_back_and_aligned() {
        let tensors: [(&str, TensorType, &[u64]); 4] = [
            ("h", TensorType::BF16, &[3]),
            ("count", TensorType::I64, &[]),
            ("w", TensorType::F32, &[2, 3]),
            ("quote \" and ü", TensorType::U8, &[0, 5]),
        ];
        let about = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let layout = layout(&tensors, &about).unwrap();
        let total = layout.ranges.iter().map(|range| range.end).max().unwrap();
        let header = header_bytes(&layout.bytes, total).unwrap() as usize;
        let entries = entries(&layout.bytes[LENGTH_BYTES..LENGTH_BYTES + header], total).unwrap();
        for ((name, dtype, dims), range) in tensors.iter().zip(&layout.ranges) {
            let entry = entries.iter().find(|entry| entry.name == *name).unwrap();
            assert_eq!((entry.dtype, &entry.dims[..], &entry.range), (*dtype, *dims, range));
            assert_eq!(range.start % dtype.size_bytes(), 0, "{name}");
        }
    }
}
