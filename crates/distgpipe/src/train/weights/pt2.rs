//! Files of `torch.export.save`: a zip archive with a graph and raw tensors. [`distgpipe_core::pt2`] reads them; this file
//! gives it the bytes.

use super::pth::{wrong, Archive};
use super::{Entry, OpenFile, TensorSource, WeightsError};
use crate::model::exported::allowed_operators;
use distgpipe_core::pt2::archive::{self, PlacedTensor};
use distgpipe_core::pt2::{Graph, Pt2Error, State};
use distgpipe_core::weights::zip;
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use tch::Tensor;

/// The graph of an exported model.
///
/// # Errors
/// If the file cannot be read, or its model cannot be trained in a pipeline.
pub fn read_graph(path: &Path) -> Result<Graph, WeightsError> {
    let (mut file, extra) = (OpenFile::open(path)?, allowed_operators());
    let graph = with_reader(&mut file, |bytes, read| archive::graph_with(bytes, read, &extra))?;
    check_sums(&mut file)?;
    Ok(graph)
}

/// What to do about an archive that is not as PyTorch wrote it.
const CHANGED: &str = "the file was changed since it was exported: copy or download it again";
/// How many bytes are read at a time where a part of the file may be of any size.
const READ_BYTES: u64 = 1 << 20;

/// Fails if a file of the archive does not have its checksum.
fn check_sums(file: &mut OpenFile) -> Result<(), WeightsError> {
    let entries = Archive::read(file)?.entries;
    // Entries that overlap would take longer than the file is long.
    let total = entries.values().try_fold(0_u64, |sum, entry| sum.checked_add(entry.bytes));
    if total.is_none_or(|total| total > file.bytes) {
        return Err(wrong(file, 0, "files of the archive that do not overlap", "others", CHANGED));
    }
    for entry in entries.values() {
        let data = Archive::data(file, entry)?;
        let (mut sum, mut at) = (crc32fast::Hasher::new(), data.start);
        while at < data.end {
            let length = READ_BYTES.min(data.end - at);
            sum.update(&file.bytes_at(at, length)?);
            at += length;
        }
        let got = sum.finalize();
        if got != entry.checksum {
            let expected = format!("`{}` with the checksum {:08x}", entry.name, entry.checksum);
            return Err(wrong(file, data.start, expected, format!("{got:08x}"), CHANGED));
        }
    }
    Ok(())
}

/// Whether `python3 -m distgpipe_export` wrote the file, which compares an export with its module; other exports may compute
/// something else.
///
/// # Errors
/// If the file cannot be read.
pub fn is_compared(path: &Path) -> Result<bool, WeightsError> {
    let mut file = OpenFile::open(path)?;
    with_reader(&mut file, |bytes, read| archive::is_compared(bytes, read))
}

/// An error of reading, or of what was read.
enum Failed {
    Read(WeightsError),
    Content(Pt2Error),
}

impl From<Pt2Error> for Failed {
    fn from(error: Pt2Error) -> Self {
        Failed::Content(error)
    }
}

fn with_reader<T>(
    file: &mut OpenFile,
    parse: impl FnOnce(u64, &mut archive::ReadRange<'_, Failed>) -> Result<T, Failed>,
) -> Result<T, WeightsError> {
    let (bytes, path) = (file.bytes, file.path.clone());
    let mut read = |range: Range<u64>| file.bytes_at(range.start, range.end - range.start).map_err(Failed::Read);
    parse(bytes, &mut read).map_err(|failed| match failed {
        Failed::Read(error) => error,
        Failed::Content(source) => WeightsError::Exported { file: path, source: Box::new(source) },
    })
}

/// Whether a zip archive is one of `torch.export.save`.
pub(super) fn is_export(file: &mut OpenFile) -> Result<bool, WeightsError> {
    let entries: Vec<zip::ArchiveEntry> = Archive::read(file)?.entries.into_values().collect();
    Ok(archive::is_export(&entries))
}

/// The parameters and buffers of an exported model.
pub(super) struct Pt2File {
    file: OpenFile,
    entries: Vec<Entry>,
    tensors: Vec<PlacedTensor>,
}

impl Pt2File {
    pub(super) fn new(mut file: OpenFile) -> Result<Self, WeightsError> {
        let extra = allowed_operators();
        let graph = with_reader(&mut file, |bytes, read| archive::graph_with(bytes, read, &extra))?;
        let listed = with_reader(&mut file, |bytes, read| archive::weights(bytes, read))?;
        check_sums(&mut file)?;
        let names =
            |state: &'_ State| std::iter::once(state.name.clone()).chain(state.tied.clone()).collect::<Vec<_>>();
        let known: HashSet<String> = graph.states.iter().flat_map(names).collect();
        let tensors: Vec<PlacedTensor> = listed.into_iter().filter(|(t, _)| known.contains(&t.name)).collect();
        let entries = tensors.iter().map(|(tensor, _)| file.entry(&tensor.name, tensor.dtype, &tensor.dims));
        let entries = entries.collect::<Result<_, _>>()?;
        Ok(Pt2File { file, entries, tensors })
    }
}

impl TensorSource for Pt2File {
    fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn read(&mut self, index: usize) -> Result<Tensor, WeightsError> {
        let (entry, (tensor, start)) = (&self.entries[index], &self.tensors[index]);
        if tensor.is_contiguous() || tensor.span() == 0 {
            return self.file.tensor_at(*start, entry.kind, &entry.dims);
        }
        // All elements from the first to the last, including those in between that belong to others.
        let around = self.file.tensor_at(*start, entry.kind, &[tensor.span() as i64])?;
        let strides: Vec<i64> = tensor.strides.iter().map(|&stride| stride as i64).collect();
        let view = around.f_as_strided(&entry.dims, &strides, 0).and_then(|view| view.f_contiguous());
        view.map_err(|error| self.file.engine(error))
    }
}
