//! The directory of a zip archive in the form that `torch.save` writes: uncompressed entries, with their sizes in the
//! directory at the end of the archive, in the 32-bit or the 64-bit form.
//!
//! Checksums are the reader's to verify, because it reads tensors in parts.

use super::{FormatError, COPY_AGAIN, SAVE_AGAIN};
use std::ops::Range;

/// The first bytes of a zip archive.
pub const MAGIC: [u8; 4] = *b"PK\x03\x04";

/// The number of bytes at the end of the archive that contain its last record: the record with the longest comment, and
/// the 64-bit records before it.
pub const TAIL_BYTES: u64 = 22 + 0xffff + 20 + 56;

/// The size of the fixed part of the header in front of an entry's data. The name and padding follow it.
pub const LOCAL_BYTES: usize = 30;

/// An entry of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveEntry {
    /// The path of the entry in the archive.
    pub name: String,
    /// The size of the entry's data in bytes.
    pub bytes: u64,
    /// The offset of its [local header](LOCAL_BYTES).
    pub header: u64,
    /// The CRC-32 of its data.
    pub checksum: u32,
}

/// The position of the directory in a file of `file_bytes` bytes; `tail` is the last [`TAIL_BYTES`] of it, or all.
pub fn directory(tail: &[u8], file_bytes: u64) -> Result<Range<u64>, FormatError> {
    let tail_at = file_bytes.saturating_sub(tail.len() as u64);
    let missing = || FormatError {
        offset: file_bytes,
        expected: "the record that ends a zip archive".to_owned(),
        got: "none".to_owned(),
        remedy: COPY_AGAIN,
    };
    let ends = |&at: &usize| {
        let comment = tail.get(at + 20..).and_then(<[u8]>::first_chunk).map(|b| usize::from(u16::from_le_bytes(*b)));
        tail[at..].starts_with(b"PK\x05\x06") && comment.is_some_and(|comment| at + 22 + comment == tail.len())
    };
    let at = (0..tail.len()).rev().find(ends).ok_or_else(missing)?;
    let (mut size, mut start) = (u64::from(u32_at(tail, at + 12)), u64::from(u32_at(tail, at + 16)));
    let before = at.checked_sub(20).filter(|&at| tail[at..].starts_with(b"PK\x06\x07"));
    if let Some(locator) = before {
        // Archives of more than 4 GiB have these numbers in a 64-bit record.
        let record = u64_at(tail, locator + 8).checked_sub(tail_at).and_then(|at| usize::try_from(at).ok());
        let record = record.filter(|&at| at <= locator && tail[at..].starts_with(b"PK\x06\x06"));
        let record = record.filter(|&at| at + 56 <= locator).ok_or_else(missing)?;
        (size, start) = (u64_at(tail, record + 40), u64_at(tail, record + 48));
    }
    let end = start.checked_add(size).filter(|&end| end <= tail_at + at as u64);
    end.map(|end| start..end).ok_or_else(|| FormatError {
        offset: tail_at + at as u64,
        expected: "a directory inside the archive".to_owned(),
        got: format!("one of {size} bytes at {start}"),
        remedy: COPY_AGAIN,
    })
}

/// The entries of the directory, which begins at offset `start` of the file.
pub fn entries(directory: &[u8], start: u64) -> Result<Vec<ArchiveEntry>, FormatError> {
    let mut entries = Vec::new();
    let mut at = 0;
    while at < directory.len() {
        let wrong = |expected: &str, got: &str, remedy| FormatError {
            offset: start + at as u64,
            expected: expected.to_owned(),
            got: got.to_owned(),
            remedy,
        };
        let cut = || wrong("an entry of the archive's directory", "something else", COPY_AGAIN);
        let fixed = directory.get(at..at + 46).filter(|fixed| fixed.starts_with(b"PK\x01\x02")).ok_or_else(cut)?;
        let [name, extra, comment] = [28, 30, 32].map(|field| usize::from(u16_at(fixed, field)));
        let rest = directory.get(at + 46..at + 46 + name + extra + comment).ok_or_else(cut)?;
        let utf8 = std::str::from_utf8(&rest[..name]);
        let name_text = utf8.map_err(|_| wrong("a name in UTF-8", "other bytes", SAVE_AGAIN))?;
        if u16_at(fixed, 8) & 1 != 0 || u16_at(fixed, 10) != 0 {
            let got = format!("`{name_text}` compressed or encrypted");
            return Err(wrong("entries stored as they are", &got, SAVE_AGAIN));
        }
        let large = Large::read(&rest[name..name + extra]);
        let mut large = large.iter();
        // The 64-bit form has only those numbers that do not fit 32 bits, in this order.
        let [bytes, stored, header] = [24, 20, 42].map(|field| match u32_at(fixed, field) {
            u32::MAX => large.next(),
            small => Some(u64::from(small)),
        });
        let (Some(bytes), Some(header)) = (bytes, header) else { return Err(cut()) };
        if stored != Some(bytes) {
            return Err(wrong("entries stored as they are", "two sizes", SAVE_AGAIN));
        }
        entries.push(ArchiveEntry { name: name_text.to_owned(), bytes, header, checksum: u32_at(fixed, 16) });
        at += 46 + name + extra + comment;
    }
    Ok(entries)
}

/// The position of an entry's data, from the header in front of it.
pub fn data(entry: &ArchiveEntry, local: &[u8; LOCAL_BYTES], file_bytes: u64) -> Result<Range<u64>, FormatError> {
    let before = LOCAL_BYTES as u64 + u64::from(u16_at(local, 26)) + u64::from(u16_at(local, 28));
    let start = entry.header.checked_add(before).filter(|_| local.starts_with(&MAGIC));
    let end = start.and_then(|start| start.checked_add(entry.bytes)).filter(|&end| end <= file_bytes);
    start.zip(end).map(|(start, end)| start..end).ok_or_else(|| FormatError {
        offset: entry.header,
        expected: format!("entry `{}` of {} bytes", entry.name, entry.bytes),
        got: "something else".to_owned(),
        remedy: COPY_AGAIN,
    })
}

/// The 64-bit numbers in the extra fields of an entry.
struct Large<'a>(&'a [u8]);

impl<'a> Large<'a> {
    fn read(mut extra: &'a [u8]) -> Self {
        while let Some((&[id0, id1, length0, length1], rest)) = extra.split_first_chunk::<4>() {
            let length = usize::from(u16::from_le_bytes([length0, length1])).min(rest.len());
            if u16::from_le_bytes([id0, id1]) == 1 {
                return Large(&rest[..length]);
            }
            extra = &rest[length..];
        }
        Large(&[])
    }

    fn iter(&self) -> impl Iterator<Item = u64> + 'a {
        self.0.chunks_exact(8).map(|bytes| u64_at(bytes, 0))
    }
}

// Fields beyond the end read as 0, which the checks above treat like any other offset or length.

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u16::from_le_bytes(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_le_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_le_bytes(*b))
}
