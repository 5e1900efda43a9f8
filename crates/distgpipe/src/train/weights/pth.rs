//! Files of `torch.save` since PyTorch 1.6: a zip archive with a pickle that lists tensors, and with the storages that the
//! tensors are views of. [`distgpipe_core::weights::pickle`] reads the pickle; nothing of it is executed.

use super::{Entry, OpenFile, TensorSource, WeightsError};
use distgpipe_core::weights::pickle::{self, PickledTensor, PICKLE_BYTES_MAX};
use distgpipe_core::weights::{zip, FormatError, COPY_AGAIN, SAVE_AGAIN};
use std::collections::HashMap;
use std::ops::Range;
use tch::Tensor;

/// The most bytes of an archive's directory: some 500,000 entries.
const DIRECTORY_BYTES_MAX: u64 = 64 << 20;

/// An open file of `torch.save`.
#[derive(Debug)]
pub struct PthFile {
    file: OpenFile,
    entries: Vec<Entry>,
    tensors: Vec<PickledTensor>,
    /// The range of each tensor's storage in the file.
    storages: Vec<Range<u64>>,
}

impl PthFile {
    pub(super) fn new(mut file: OpenFile) -> Result<Self, WeightsError> {
        let archive = Archive::read(&mut file)?;
        let top = archive.top(&file)?;
        if let Some(entry) = archive.entries.get(&format!("{top}byteorder")) {
            let range = Archive::data(&mut file, entry)?;
            let order = file.bytes_at(range.start, entry.bytes.min(8))?;
            if order != b"little" {
                let got = String::from_utf8_lossy(&order).into_owned();
                return Err(wrong(
                    &file,
                    range.start,
                    "numbers in little-endian order",
                    got,
                    "save it on a little-endian machine",
                ));
            }
        }
        let name = format!("{top}data.pkl");
        let listed = &archive.entries[&name];
        let range = Archive::data(&mut file, listed)?;
        if listed.bytes > PICKLE_BYTES_MAX {
            let expected = format!("a list of tensors of at most {PICKLE_BYTES_MAX} bytes");
            return Err(wrong(&file, range.start, expected, listed.bytes.to_string(), "split the model"));
        }
        let bytes = file.bytes_at(range.start, listed.bytes)?;
        let tensors = pickle::tensors(&bytes).map_err(file.format(Some(name)))?;
        let mut known: HashMap<&str, Range<u64>> = HashMap::new();
        let mut storages = Vec::with_capacity(tensors.len());
        let mut entries = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            let range = match known.get(tensor.storage.as_str()) {
                Some(range) => range.clone(),
                None => archive.storage(&mut file, &top, tensor)?,
            };
            // Checked for each tensor, because two of them may disagree on the length or type of a shared storage.
            let bytes = tensor.storage_elements.checked_mul(tensor.dtype.size_bytes());
            if bytes.is_none_or(|bytes| bytes > range.end - range.start) {
                let expected = format!("{} {} for `{}`", tensor.storage_elements, tensor.dtype.name(), tensor.name);
                let got = format!("{} bytes", range.end - range.start);
                return Err(wrong(&file, range.start, expected, got, COPY_AGAIN));
            }
            known.insert(&tensor.storage, range.clone());
            storages.push(range);
            entries.push(file.entry(&tensor.name, tensor.dtype, &tensor.dims)?);
        }
        Ok(PthFile { file, entries, tensors, storages })
    }
}

impl TensorSource for PthFile {
    fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn read(&mut self, index: usize) -> Result<Tensor, WeightsError> {
        let (entry, tensor) = (&self.entries[index], &self.tensors[index]);
        // The tensor was checked to be inside its storage, and the storage inside the file.
        let start = self.storages[index].start + tensor.offset * tensor.dtype.size_bytes();
        if tensor.is_contiguous() || tensor.elements() == 0 {
            return self.file.tensor_at(start, entry.kind, &entry.dims);
        }
        // All elements from the view's first to its last, including those in between that are not the view's.
        let around = self.file.tensor_at(start, entry.kind, &[tensor.span() as i64])?;
        let strides: Vec<i64> = tensor.strides.iter().map(|&stride| stride as i64).collect();
        let view = around.f_as_strided(&entry.dims, &strides, 0).and_then(|view| view.f_contiguous());
        view.map_err(|error| self.file.engine(error))
    }
}

/// The archive's directory, by name.
pub(super) struct Archive {
    pub(super) entries: HashMap<String, zip::ArchiveEntry>,
}

impl Archive {
    pub(super) fn read(file: &mut OpenFile) -> Result<Self, WeightsError> {
        let tail_bytes = file.bytes.min(zip::TAIL_BYTES);
        let tail = file.bytes_at(file.bytes - tail_bytes, tail_bytes)?;
        let range = zip::directory(&tail, file.bytes).map_err(file.format(None))?;
        let length = range.end - range.start;
        if length > DIRECTORY_BYTES_MAX {
            let expected = format!("a directory of at most {DIRECTORY_BYTES_MAX} bytes");
            return Err(wrong(file, range.start, expected, length.to_string(), "split the model"));
        }
        let directory = file.bytes_at(range.start, length)?;
        let listed = zip::entries(&directory, range.start).map_err(file.format(None))?;
        let mut entries = HashMap::with_capacity(listed.len());
        for entry in listed {
            let name = entry.name.clone();
            if entries.insert(name.clone(), entry).is_some() {
                return Err(wrong(file, range.start, "each entry once", format!("`{name}` twice"), SAVE_AGAIN));
            }
        }
        Ok(Archive { entries })
    }

    /// The archive's top folder, with its slash.
    fn top(&self, file: &OpenFile) -> Result<String, WeightsError> {
        let tops = self.entries.keys().filter_map(|name| name.strip_suffix("data.pkl"));
        let tops: Vec<&str> = tops.filter(|top| top.ends_with('/') && top.matches('/').count() == 1).collect();
        match tops[..] {
            [top] => Ok(top.to_owned()),
            _ => {
                let got = format!("{} such files", tops.len());
                Err(wrong(file, 0, "one file `data.pkl` in a folder of the archive", got, SAVE_AGAIN))
            }
        }
    }

    pub(super) fn data(file: &mut OpenFile, entry: &zip::ArchiveEntry) -> Result<Range<u64>, WeightsError> {
        let mut local = [0; zip::LOCAL_BYTES];
        if entry.header.checked_add(local.len() as u64).is_some_and(|end| end <= file.bytes) {
            file.read_at(entry.header, &mut local)?;
        }
        zip::data(entry, &local, file.bytes).map_err(file.format(None))
    }

    fn storage(&self, file: &mut OpenFile, top: &str, tensor: &PickledTensor) -> Result<Range<u64>, WeightsError> {
        let path = format!("{top}data/{}", tensor.storage);
        match self.entries.get(&path) {
            Some(entry) => Archive::data(file, entry),
            None => Err(wrong(file, 0, format!("an entry `{path}`"), "none", "was it changed since it was saved?")),
        }
    }
}

pub(super) fn wrong(
    file: &OpenFile,
    offset: u64,
    expected: impl Into<String>,
    got: impl Into<String>,
    remedy: &'static str,
) -> WeightsError {
    let source = FormatError { offset, expected: expected.into(), got: got.into(), remedy };
    WeightsError::Format { file: file.path.clone(), part: None, source: Box::new(source) }
}
