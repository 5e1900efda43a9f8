//! The parts of an archive of `torch.export.save`, and the places of its tensors.
//!
//! ```text
//! NAME/models/model.json                           the graph
//! NAME/data/weights/model_weights_config.json      the names, types and sizes of parameters and buffers
//! NAME/data/weights/weight_0, weight_1, …          their elements
//! NAME/data/constants/…                            the same for tensors that are no parameters
//! NAME/data/sample_inputs/model.pt                 a pickle, which is never opened
//! NAME/extra/distgpipe_export                      written by distgpipe_export alone
//! NAME/byteorder, NAME/archive_version             `little`, `0`
//! ```

use super::model_json::{self, size_of, TensorMeta};
use super::{Graph, Pt2Error, EXPORT_AGAIN};
use crate::weights::zip::{self, ArchiveEntry};
use crate::weights::{FormatError, TensorType, COPY_AGAIN};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// The path of the graph after the top folder.
pub(super) const GRAPH: &str = "models/model.json";
/// The path of the file that `distgpipe_export` adds after it has compared an export with its module.
const COMPARED: &str = "extra/distgpipe_export";
/// The path of the order of bytes in the raw tensors.
const BYTE_ORDER: &str = "byteorder";
/// The largest graph that is read, in bytes.
const GRAPH_BYTES_MAX: u64 = 256 << 20;
/// The largest list of tensors that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 64 << 20;
/// The most bytes of all constants together. They travel with the graph.
pub(super) const CONSTANT_BYTES_MAX: u64 = 4 << 20;

/// The tensors of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Folder {
    /// Parameters and buffers.
    Weights,
    /// Tensors that are no part of the state dict.
    Constants,
}

impl Folder {
    /// The path of the list of tensors after the top folder.
    fn config(self) -> &'static str {
        match self {
            Folder::Weights => "data/weights/model_weights_config.json",
            Folder::Constants => "data/constants/model_constants_config.json",
        }
    }

    fn path(self, name: &str) -> String {
        match self {
            Folder::Weights => format!("data/weights/{name}"),
            Folder::Constants => format!("data/constants/{name}"),
        }
    }
}

/// The directory of an archive: its entries by their paths after the top folder.
struct Archive {
    entries: HashMap<String, ArchiveEntry>,
}

/// Whether a zip archive is one of `torch.export.save`.
pub fn is_export(entries: &[ArchiveEntry]) -> bool {
    entries.iter().any(|entry| top_of(&entry.name).is_some())
}

fn top_of(path: &str) -> Option<&str> {
    path.strip_suffix(GRAPH).filter(|top| top.ends_with('/') && top.matches('/').count() == 1)
}

/// A tensor in the archive. Its span is inside the entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// The name in the state dict, or that of the constant.
    pub name: String,
    /// The type of the elements.
    pub dtype: TensorType,
    /// The dimensions.
    pub dims: Vec<u64>,
    /// For each dimension, the distance between neighbouring elements.
    pub strides: Vec<u64>,
    /// The index of the first element in the entry.
    pub offset: u64,
    /// The path of the entry after the top folder. Tied parameters have the same.
    pub path: String,
    /// Whether the tensor is trained.
    pub trained: bool,
}

impl StoredTensor {
    /// The number of elements of the entry from the tensor's first to its last.
    pub fn span(&self) -> u64 {
        match self.dims.contains(&0) {
            true => 0,
            false => 1 + self.dims.iter().zip(&self.strides).map(|(dim, stride)| (dim - 1) * stride).sum::<u64>(),
        }
    }

    /// The elements in row-major order, from those of the tensor's span.
    fn row_major(&self, around: &[u8]) -> Vec<u8> {
        let size = self.dtype.size_bytes() as usize;
        let count: u64 = self.dims.iter().product();
        let mut bytes = Vec::with_capacity(count as usize * size);
        for mut index in 0..count {
            let mut at = 0;
            for (dim, stride) in self.dims.iter().zip(&self.strides).rev() {
                at += (index % dim) * stride;
                index /= dim;
            }
            let at = at as usize * size;
            bytes.extend_from_slice(&around[at..at + size]);
        }
        bytes
    }

    /// Whether the elements are contiguous, with the last dimension varying fastest.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(&dim, &stride)| {
            let fits = dim == 1 || stride == expected;
            expected = u64::saturating_mul(expected, dim.max(1));
            fits
        })
    }
}

#[derive(Deserialize)]
struct Config {
    config: BTreeMap<String, Payload>,
}

#[derive(Deserialize)]
struct Payload {
    path_name: String,
    #[serde(default)]
    is_param: bool,
    #[serde(default)]
    use_pickle: bool,
    tensor_meta: Option<TensorMeta>,
}

impl Archive {
    fn new(entries: Vec<ArchiveEntry>) -> Result<Self, Pt2Error> {
        let tops: Vec<&str> = entries.iter().filter_map(|entry| top_of(&entry.name)).collect();
        let [top] = tops[..] else {
            let got = format!("{} such files", tops.len());
            return Err(Pt2Error::part(GRAPH, "one file of this name in a folder", got, EXPORT_AGAIN));
        };
        let top = top.to_owned();
        let mut known = HashMap::with_capacity(entries.len());
        for entry in entries {
            let Some(path) = entry.name.strip_prefix(&top).map(str::to_owned) else {
                return Err(Pt2Error::part(&entry.name, "every entry in one folder", "another one", EXPORT_AGAIN));
            };
            if path.starts_with("data/aotinductor/") {
                let remedy = "export the model itself, not a compiled form of it";
                return Err(Pt2Error::part(&path, "no compiled code", "some", remedy));
            }
            if known.insert(path.clone(), entry).is_some() {
                return Err(Pt2Error::part(&path, "each entry once", "it twice", EXPORT_AGAIN));
            }
        }
        Ok(Archive { entries: known })
    }

    /// The entry with this path after the top folder.
    fn entry(&self, path: &str) -> Result<&ArchiveEntry, Pt2Error> {
        self.entries.get(path).ok_or_else(|| Pt2Error::part(path, "the file", "none", EXPORT_AGAIN))
    }

    /// The tensors that a list of tensors has. Each is inside its entry.
    fn tensors(&self, folder: Folder, config: &[u8]) -> Result<Vec<StoredTensor>, Pt2Error> {
        let config: Config = model_json::parse(folder.config(), config)?;
        config.config.into_iter().map(|(name, payload)| self.tensor(folder, name, payload)).collect()
    }

    fn tensor(&self, folder: Folder, name: String, payload: Payload) -> Result<StoredTensor, Pt2Error> {
        let wrong = |expected: &str, got: String, remedy| {
            Pt2Error::part(folder.config(), format!("{expected} for `{name}`"), got, remedy)
        };
        let (Some(meta), false) = (&payload.tensor_meta, payload.use_pickle) else {
            let remedy = "pickled parts are never opened: make it a plain tensor in the module";
            return Err(wrong("a raw tensor", "a pickled object".to_owned(), remedy));
        };
        let dtype = meta.tensor_type(&format!("`{name}`"))?;
        let numbers = |sizes: &[model_json::SymInt]| -> Option<Vec<u64>> {
            sizes.iter().map(|size| u64::try_from(size_of(size)?).ok()).collect()
        };
        let sizes = numbers(&meta.sizes).zip(numbers(&meta.strides));
        let offset = size_of(&meta.storage_offset).and_then(|offset| u64::try_from(offset).ok());
        let (Some((dims, strides)), Some(offset)) = (sizes, offset) else {
            return Err(wrong("fixed sizes, strides and offset", "others".to_owned(), EXPORT_AGAIN));
        };
        let path = folder.path(&payload.path_name);
        let entry = self.entry(&path)?;
        let elements = entry.bytes / dtype.size_bytes();
        let last = |(dim, stride): (&u64, &u64)| dim.saturating_sub(1).checked_mul(*stride);
        let end = dims.iter().zip(&strides).try_fold(offset, |sum, pair| sum.checked_add(last(pair)?));
        let count = dims.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
        let inside = end.is_some_and(|end| end < elements) || (count == Some(0) && offset <= elements);
        // A view may repeat elements, so the number of elements is bounded as well.
        if dims.len() != strides.len() || !inside || count.is_none_or(|count| count > elements) {
            let got = format!("dimensions {dims:?}, strides {strides:?} and {} bytes", entry.bytes);
            return Err(wrong("a tensor inside its file", got, COPY_AGAIN));
        }
        let trained = payload.is_param && meta.requires_grad;
        Ok(StoredTensor { name, dtype, dims, strides, offset, path, trained })
    }
}

/// The content of an archive, as far as the graph depends on it.
pub(super) struct Contents {
    /// The file [`GRAPH`].
    pub graph: Vec<u8>,
    /// The parameters and buffers.
    pub weights: Vec<StoredTensor>,
    /// The constants, with their elements in row-major order.
    pub constants: Vec<(StoredTensor, Vec<u8>)>,
}

/// Reads these bytes of the file. The range is inside the file.
pub type ReadRange<'a, E> = dyn FnMut(Range<u64>) -> Result<Vec<u8>, E> + 'a;

/// A parameter or buffer, and the position of its first element in the file.
pub type PlacedTensor = (StoredTensor, u64);

/// The graph of an archive of `file_bytes` bytes.
pub fn graph<E: From<Pt2Error>>(file_bytes: u64, read: &mut ReadRange<'_, E>) -> Result<Graph, E> {
    graph_with(file_bytes, read, &[])
}

/// The same, of a model that may use these operators besides those of the list.
pub fn graph_with<E: From<Pt2Error>>(
    file_bytes: u64,
    read: &mut ReadRange<'_, E>,
    extra: &[String],
) -> Result<Graph, E> {
    let mut opened = Opened::new(file_bytes, read)?;
    let weights = opened.tensors(Folder::Weights)?.into_iter().map(|(tensor, _)| tensor).collect();
    let listed = opened.tensors(Folder::Constants)?;
    check_constants(listed.iter().map(|(tensor, _)| tensor))?;
    let mut constants = Vec::with_capacity(listed.len());
    for (tensor, start) in listed {
        let around = (opened.read)(start..start + tensor.span() * tensor.dtype.size_bytes())?;
        let bytes = tensor.row_major(&around);
        constants.push((tensor, bytes));
    }
    let graph = opened.part(GRAPH, GRAPH_BYTES_MAX)?;
    Ok(model_json::read(&Contents { graph, weights, constants }, extra)?)
}

/// The parameters and buffers of an archive, with their positions in the file.
pub fn weights<E: From<Pt2Error>>(file_bytes: u64, read: &mut ReadRange<'_, E>) -> Result<Vec<PlacedTensor>, E> {
    Opened::new(file_bytes, read)?.tensors(Folder::Weights)
}

/// Whether `distgpipe_export` wrote the archive, after it has compared the export with its module. Nothing proves it: the mark
/// tells users what they forgot, not what others did.
pub fn is_compared<E: From<Pt2Error>>(file_bytes: u64, read: &mut ReadRange<'_, E>) -> Result<bool, E> {
    Ok(Opened::new(file_bytes, read)?.archive.entries.contains_key(COMPARED))
}

/// An archive whose directory has been read.
struct Opened<'a, 'b, E> {
    archive: Archive,
    file_bytes: u64,
    read: &'a mut ReadRange<'b, E>,
}

impl<'a, 'b, E: From<Pt2Error>> Opened<'a, 'b, E> {
    fn new(file_bytes: u64, read: &'a mut ReadRange<'b, E>) -> Result<Self, E> {
        let wrong = |error: FormatError| E::from(error.into());
        let tail = read(file_bytes - file_bytes.min(zip::TAIL_BYTES)..file_bytes)?;
        let directory = zip::directory(&tail, file_bytes).map_err(wrong)?;
        let length = directory.end - directory.start;
        if length > CONFIG_BYTES_MAX {
            let expected = format!("at most {CONFIG_BYTES_MAX} bytes");
            return Err(Pt2Error::part("the directory", expected, length.to_string(), EXPORT_AGAIN).into());
        }
        let entries = zip::entries(&read(directory.clone())?, directory.start).map_err(wrong)?;
        let mut opened = Opened { archive: Archive::new(entries)?, file_bytes, read };
        let order = opened.part(BYTE_ORDER, 16)?;
        if order != b"little" {
            let got = String::from_utf8_lossy(&order).into_owned();
            return Err(Pt2Error::part(BYTE_ORDER, "`little`", got, "export it on a little-endian machine").into());
        }
        Ok(opened)
    }

    /// The position of an entry's data.
    fn data(&mut self, path: &str) -> Result<Range<u64>, E> {
        let entry = self.archive.entry(path)?.clone();
        let header_end = entry.header.checked_add(zip::LOCAL_BYTES as u64).filter(|&end| end <= self.file_bytes);
        let header = header_end.map(|end| (self.read)(entry.header..end)).transpose()?;
        let local = header.as_deref().and_then(<[u8]>::first_chunk).copied().unwrap_or([0; zip::LOCAL_BYTES]);
        zip::data(&entry, &local, self.file_bytes).map_err(|error| E::from(error.into()))
    }

    /// The content of an entry that must be at most so long.
    fn part(&mut self, path: &str, bytes_max: u64) -> Result<Vec<u8>, E> {
        let range = self.data(path)?;
        if range.end - range.start > bytes_max {
            let (expected, got) = (format!("at most {bytes_max} bytes"), format!("{}", range.end - range.start));
            return Err(Pt2Error::part(path, expected, got, "use a smaller model").into());
        }
        (self.read)(range)
    }

    fn tensors(&mut self, folder: Folder) -> Result<Vec<PlacedTensor>, E> {
        let config = self.part(folder.config(), CONFIG_BYTES_MAX)?;
        let mut placed = Vec::new();
        for tensor in self.archive.tensors(folder, &config)? {
            let start = self.data(&tensor.path)?.start + tensor.offset * tensor.dtype.size_bytes();
            placed.push((tensor, start));
        }
        Ok(placed)
    }
}

/// Whether these constants are small enough to travel with the graph. Asked before their elements are read.
fn check_constants<'a>(constants: impl Iterator<Item = &'a StoredTensor>) -> Result<(), Pt2Error> {
    let bytes = |tensor: &StoredTensor| {
        let elements = tensor.span().max(tensor.dims.iter().product::<u64>());
        elements.saturating_mul(tensor.dtype.size_bytes())
    };
    let all = constants.map(bytes).fold(0, u64::saturating_add);
    if all <= CONSTANT_BYTES_MAX {
        return Ok(());
    }
    let expected = format!("at most {CONSTANT_BYTES_MAX} bytes of constants");
    let remedy = "register large constants as buffers with persistent=True";
    Err(Pt2Error::part(Folder::Constants.config(), expected, all.to_string(), remedy))
}
