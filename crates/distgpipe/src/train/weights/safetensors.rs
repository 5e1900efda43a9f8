//! Safetensors files: read tensor by tensor, and written tensor by tensor.

use super::{dtype, Entry, OpenFile, TensorSource, WeightsError};
use crate::engine::{self, Layout};
use crate::files::{create_part, create_private_part, description};
use distgpipe_core::weights::safetensors::{entries, header_bytes, layout, metadata, LENGTH_BYTES};
use distgpipe_core::weights::TensorType;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{Error, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tch::Tensor;

/// An open safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    file: OpenFile,
    entries: Vec<Entry>,
    offsets: Vec<u64>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    pub(super) fn new(mut file: OpenFile) -> Result<Self, WeightsError> {
        let first = file.bytes_at(0, file.bytes.min(LENGTH_BYTES as u64))?;
        let length = header_bytes(&first, file.bytes).map_err(file.format(None))?;
        let header = file.bytes_at(LENGTH_BYTES as u64, length)?;
        let found = entries(&header, file.bytes).map_err(file.format(None))?;
        let metadata = metadata(&header).map_err(file.format(None))?;
        let offsets = found.iter().map(|entry| entry.range.start).collect();
        let entries = found.iter().map(|entry| file.entry(&entry.name, entry.dtype, &entry.dims));
        let entries = entries.collect::<Result<_, _>>()?;
        Ok(SafetensorsFile { file, entries, offsets, metadata })
    }
}

impl TensorSource for SafetensorsFile {
    fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    fn read(&mut self, index: usize) -> Result<Tensor, WeightsError> {
        let Entry { kind, dims, .. } = &self.entries[index];
        self.file.tensor_at(self.offsets[index], *kind, dims)
    }
}

/// Writes a safetensors file: first the list of tensors, then one tensor after the other. It writes into a temporary file
/// next to the target and renames that once all tensors are on the disk. If it is dropped before, it removes the
/// temporary file.
///
/// PyTorch and Hugging Face read the result: the metadata says `"format": "pt"`.
#[derive(Debug)]
pub struct SafetensorsWriter {
    path: PathBuf,
    part: PathBuf,
    file: File,
    entries: Vec<Entry>,
    ranges: Vec<Range<u64>>,
    /// The index of the next tensor.
    next: usize,
    finished: bool,
    /// Bytes written since the file was last synced.
    unsynced: usize,
    on_written: OnWritten,
}

/// Called after each part.
struct OnWritten(Option<Box<dyn Fn() + Send>>);

impl std::fmt::Debug for OnWritten {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OnWritten(…)")
    }
}

/// The size of such a part.
const PART_BYTES: usize = 16 << 20;
/// After how many bytes a file with [`OnWritten`] is synced.
const SYNC_BYTES: usize = 64 << 20;

impl SafetensorsWriter {
    /// Starts a file with these tensors. `metadata` is added to its header.
    pub fn create(path: &Path, entries: Vec<Entry>, metadata: &BTreeMap<String, String>) -> Result<Self, WeightsError> {
        Self::create_as(path, entries, metadata, create_part)
    }

    /// The same for a file that its owner alone can read. Calls `on_written` when a part is written, and
    /// syncs the file every now and then, so that no call takes long.
    pub fn create_private(
        path: &Path,
        entries: Vec<Entry>,
        on_written: impl Fn() + Send + 'static,
    ) -> Result<Self, WeightsError> {
        let mut writer = Self::create_as(path, entries, &BTreeMap::new(), create_private_part)?;
        writer.on_written = OnWritten(Some(Box::new(on_written)));
        Ok(writer)
    }

    fn create_as(
        path: &Path,
        entries: Vec<Entry>,
        metadata: &BTreeMap<String, String>,
        create_part: fn(&Path) -> std::io::Result<(PathBuf, File)>,
    ) -> Result<Self, WeightsError> {
        let wrong = |expected: &str, got: String| WeightsError::UnexpectedTensor {
            file: path.to_owned(),
            expected: expected.to_owned(),
            got,
        };
        let mut names = HashSet::new();
        for entry in &entries {
            // The header uses this name for its metadata.
            if entry.name == "__metadata__" || !names.insert(&entry.name) {
                return Err(wrong("each name once", format!("`{}`", entry.name)));
            }
        }
        let dims: Vec<Vec<u64>> = entries
            .iter()
            .map(|entry| entry.dims.iter().map(|&dim| u64::try_from(dim).unwrap_or(u64::MAX)).collect())
            .collect();
        let mut tensors: Vec<(&str, TensorType, &[u64])> = Vec::with_capacity(entries.len());
        for (entry, dims) in entries.iter().zip(&dims) {
            let dtype = dtype(entry.kind).ok_or_else(|| WeightsError::Type {
                file: path.to_owned(),
                name: entry.name.clone(),
                got: format!("{:?}", entry.kind),
            })?;
            tensors.push((&entry.name, dtype, dims));
        }
        let mut metadata = metadata.clone();
        metadata.insert("format".to_owned(), "pt".to_owned());
        let layout = layout(&tensors, &metadata).ok_or_else(|| {
            wrong("a file within the limits of the format", format!("{} tensors that exceed them", tensors.len()))
        })?;
        // A symbolic link is written through, not replaced.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if let Some(kind) = path.metadata().ok().map(|about| about.file_type()).filter(|kind| !kind.is_file()) {
            let got = format!("expected a regular file, got {}", description(kind));
            return Err(io(&path, "creating it", Error::other(got)));
        }
        let (part, created) = create_part(&path).map_err(|source| io(&path, "creating it", source))?;
        // From here on dropping the writer removes the file.
        let mut writer = SafetensorsWriter {
            path,
            part,
            file: created,
            entries,
            ranges: layout.ranges,
            next: 0,
            finished: false,
            unsynced: 0,
            on_written: OnWritten(None),
        };
        let total = writer.ranges.iter().map(|range| range.end).max().unwrap_or(layout.bytes.len() as u64);
        let written = writer.file.write_all(&layout.bytes).and_then(|()| writer.file.set_len(total));
        written.map_err(|source| io(&writer.path, "writing it", source))?;
        Ok(writer)
    }

    /// The tensor that [`write`](Self::write) takes next.
    pub fn expected(&self) -> Option<&Entry> {
        self.entries.get(self.next)
    }

    /// Writes the next tensor, from any device and in any layout. Its type and dimensions must be those of the entry.
    pub fn write(&mut self, tensor: &Tensor) -> Result<(), WeightsError> {
        let unannounced =
            |expected: String, got: String| WeightsError::UnexpectedTensor { file: self.path.clone(), expected, got };
        let (dims, kind) = (tensor.size(), tensor.kind());
        let Some(entry) = self.entries.get(self.next) else {
            return Err(unannounced(format!("{} tensors", self.entries.len()), "one more".to_owned()));
        };
        if (&dims, kind) != (&entry.dims, entry.kind) {
            let expected = format!("`{}` {:?} of {:?}", entry.name, entry.dims, entry.kind);
            return Err(unannounced(expected, format!("{dims:?} of {kind:?}")));
        }
        let flat = engine::on_host(tensor).and_then(|host| engine::with_layout(&host.f_detach()?, Layout::Contiguous));
        let flat = flat.map_err(|source| WeightsError::Engine { file: self.path.clone(), source: Box::new(source) })?;
        let bytes = engine::bytes(&flat).unwrap_or_default();
        let range = &self.ranges[self.next];
        if bytes.len() as u64 != range.end - range.start {
            return Err(unannounced(format!("{} bytes", range.end - range.start), format!("{}", bytes.len())));
        }
        let written = self.file.seek(SeekFrom::Start(range.start)).and_then(|_| self.write_parts(bytes));
        written.map_err(|source| io(&self.path, "writing it", source))?;
        self.next += 1;
        Ok(())
    }

    fn write_parts(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let Some(on_written) = &self.on_written.0 else { return self.file.write_all(bytes) };
        for part in bytes.chunks(PART_BYTES) {
            self.file.write_all(part)?;
            self.unsynced += part.len();
            if self.unsynced >= SYNC_BYTES {
                self.file.sync_data()?;
                self.unsynced = 0;
            }
            on_written();
        }
        Ok(())
    }

    /// Syncs the file and gives it its name. Fails if tensors are missing.
    pub fn finish(mut self) -> Result<(), WeightsError> {
        if let Some(entry) = self.expected() {
            let expected = format!("`{}` and {} more", entry.name, self.entries.len() - self.next - 1);
            return Err(WeightsError::UnexpectedTensor {
                file: self.path.clone(),
                expected,
                got: "the end".to_owned(),
            });
        }
        self.file.sync_all().map_err(|source| io(&self.path, "writing it", source))?;
        std::fs::rename(&self.part, &self.path).map_err(|source| io(&self.path, "renaming it", source))?;
        self.finished = true;
        // The new name is durable once the directory is synced.
        let directory = match self.path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        synced.map_err(|source| io(&self.path, "renaming it", source))
    }
}

impl Drop for SafetensorsWriter {
    fn drop(&mut self) {
        if !self.finished {
            let _ = std::fs::remove_file(&self.part);
        }
    }
}

fn io(path: &Path, doing: &'static str, source: Error) -> WeightsError {
    WeightsError::Io { file: path.to_owned(), doing, source }
}
