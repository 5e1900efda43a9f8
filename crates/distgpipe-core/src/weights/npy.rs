//! The header of a NumPy file (`.npy`), which holds one array.
//!
//! ```text
//!   \x93NUMPY  version  length   {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   elements
//!   6 bytes    2        2 or 4
//! ```

use super::{FormatError, TensorType, COPY_AGAIN};
use std::ops::Range;

/// The beginning of a file that is enough for [`array()`].
pub const HEAD_BYTES_MAX: u64 = 12 + HEADER_BYTES_MAX as u64;

/// The longest header. NumPy writes some hundred bytes.
const HEADER_BYTES_MAX: usize = 1 << 14;
const MAGIC: &[u8] = b"\x93NUMPY";
const DIMS_MAX: usize = 16;
const SAVE_AGAIN: &str = "write the file with numpy.save";
const PLAIN: &str = "save numpy.ascontiguousarray of numbers, of at most 64 bits and in little-endian order";

/// The array in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// The type of its elements.
    pub dtype: TensorType,
    /// The size of each dimension.
    pub dims: Vec<u64>,
    /// The bytes of the file that hold the elements, in row-major order.
    pub range: Range<u64>,
}

/// Reads the header of a file of `file_bytes` bytes, of which `head` are the first ([`HEAD_BYTES_MAX`] or all).
pub fn array(head: &[u8], file_bytes: u64) -> Result<Array, FormatError> {
    if !head.starts_with(MAGIC) {
        return Err(FormatError::new(0, "a NumPy file", "another beginning", SAVE_AGAIN));
    }
    let truncated = || FormatError::new(head.len(), "a header of at most 16384 bytes", "its end", COPY_AGAIN);
    let (start, length) = match (head.get(6), head.get(8..12)) {
        (Some(1), Some(&[low, high, ..])) => (10, usize::from(u16::from_le_bytes([low, high]))),
        (Some(2 | 3), Some(&[a, b, c, d])) => (12, u32::from_le_bytes([a, b, c, d]) as usize),
        (Some(version), Some(_)) => {
            return Err(FormatError::new(6, "version 1, 2 or 3", version.to_string(), SAVE_AGAIN));
        }
        _ => return Err(truncated()),
    };
    if length > HEADER_BYTES_MAX {
        return Err(FormatError::new(8, "a header of at most 16384 bytes", length.to_string(), SAVE_AGAIN));
    }
    let header = head.get(start..start + length).ok_or_else(truncated)?;
    let text = String::from_utf8_lossy(header);
    let wrong = |expected: &str, remedy| {
        let got: String = text.trim_end().chars().take(120).collect();
        FormatError::new(start, expected, format!("`{got}`"), remedy)
    };
    let value = |name: &str| {
        let after = text.split_once(&format!("'{name}'"))?.1.trim_start().strip_prefix(':')?;
        Some(after.trim_start())
    };
    let dtype = value("descr").and_then(|text| text.strip_prefix('\'')?.split_once('\'')).and_then(|(t, _)| dtype(t));
    let dtype = dtype.ok_or_else(|| wrong("numbers of a type that tensors have", PLAIN))?;
    if !value("fortran_order").is_some_and(|text| text.starts_with("False")) {
        return Err(wrong("elements in row-major order", PLAIN));
    }
    let shape = value("shape").and_then(|text| text.strip_prefix('(')?.split_once(')'));
    let dims = shape.map(|(dims, _)| dims.split(',').map(str::trim).filter(|dim| !dim.is_empty()));
    let dims: Option<Vec<u64>> = dims.and_then(|dims| dims.map(|dim| dim.parse().ok()).collect());
    let dims = dims.filter(|dims| dims.len() <= DIMS_MAX).ok_or_else(|| wrong("a shape", SAVE_AGAIN))?;
    let start = (start + length) as u64;
    let end = dtype.tensor_bytes(&dims).and_then(|bytes| bytes.checked_add(start));
    match end {
        Some(end) if end == file_bytes => Ok(Array { dtype, dims, range: start..end }),
        _ => {
            let expected = format!("{} of {dims:?}", dtype.name());
            let got = format!("{} bytes", file_bytes.saturating_sub(start));
            Err(FormatError { offset: start, expected, got, remedy: COPY_AGAIN })
        }
    }
}

/// The type that NumPy writes so.
fn dtype(text: &str) -> Option<TensorType> {
    Some(match text {
        "|b1" => TensorType::Bool,
        "|u1" => TensorType::U8,
        "|i1" => TensorType::I8,
        "<i2" => TensorType::I16,
        "<i4" => TensorType::I32,
        "<i8" => TensorType::I64,
        "<f2" => TensorType::F16,
        "<f4" => TensorType::F32,
        "<f8" => TensorType::F64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// numpy.save('x.npy', numpy.arange(6, dtype='<i4').reshape(2, 3)), byte for byte.
    fn file() -> Vec<u8> {
        let mut file = b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }".to_vec();
        file.resize(127, b' ');
        file.push(b'\n');
        file.extend((0..6_i32).flat_map(i32::to_le_bytes));
        file
    }

    fn read(file: &[u8]) -> Result<Array, FormatError> {
        array(&file[..file.len().min(HEAD_BYTES_MAX as usize)], file.len() as u64)
    }

    #[test]
    fn the_array_is_where_the_header_says() {
        let array = read(&file()).unwrap();
        assert_eq!((array.dtype, &array.dims[..], array.range), (TensorType::I32, &[2, 3][..], 128..152));
    }

    #[test]
    fn what_is_no_array_of_numbers_is_refused_in_words() {
        let with = |from: &str, to: &str| {
            let text: Vec<u8> = file();
            let at = text.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
            [&text[..at], to.as_bytes(), &text[at + from.len()..]].concat()
        };
        for (file, said) in [
            (with("<i4", ">i4"), "little-endian"),
            (with("<i4", "|O8"), "numbers of a type"),
            (with("False", "True "), "row-major"),
            (with("(2, 3)", "(2, 9)"), "I32 of [2, 9]"),
            (with("(2, 3)", "(-2,3)"), "a shape"),
            (with("(2, 3), }", "(18446744073709551615,9)"), "truncated"),
            (file()[..151].to_vec(), "truncated"),
            (file()[..9].to_vec(), "truncated"),
            (b"PK\x03\x04".to_vec(), "numpy.save"),
            (b"\x93NUMPY\x09\x00v\x00xx".to_vec(), "version 1, 2 or 3"),
            (b"\x93NUMPY\x02\x00\xff\xff\xff\xff".to_vec(), "at most 16384"),
        ] {
            let refused = read(&file).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn changed_files_never_panic_and_stay_inside(changes in prop::collection::vec((0..152_usize, any::<u8>()), 1..9)) {
            let mut file = file();
            for (at, byte) in changes {
                file[at] = byte;
            }
            if let Ok(array) = read(&file) {
                prop_assert_eq!(array.range.end, 152);
            }
        }
    }
}
