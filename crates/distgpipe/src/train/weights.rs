//! Weight files: read tensor by tensor, whatever the file's size, and written in a format that other programs read.
//!
//! | module | format |
//! | --- | --- |
//! | [`safetensors`] | safetensors, read and written |
//! | [`pth`] | the archive that `torch.save` writes, read only; nothing in it is executed |
//! | `pt2` | the archive that `torch.export.save` writes, read only; nothing pickled in it is opened |
//! | `npy` | a NumPy array, read only, as data and not as weights |
//! | `fit`, `names` | the comparison of a file with the model; what tensors are called in files |
//! | `model_file` | [`Pipeline::save`](crate::Pipeline::save) and [`Pipeline::load`](crate::Pipeline::load) |
//!
//! [`open`] recognizes the format by the first bytes. A [`TensorSource`] knows the names, types and dimensions of all tensors and
//! reads a tensor's elements on request, so a model larger than memory can be loaded piece by piece.

mod fit;
mod model_file;
mod names;
mod npy;
mod pt2;
pub mod pth;
pub mod safetensors;

pub use fit::{fit, fit_opened, FittedWeights, MissingTensors};
pub use model_file::save;
pub use npy::read_npy;
pub use pt2::{is_compared, read_graph};
pub use safetensors::SafetensorsWriter;

use crate::failure::Fault;
use crate::files::open_regular;
use distgpipe_core::pt2::Pt2Error;
use distgpipe_core::weights::{zip, FormatError, TensorType};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};

/// The first bytes of a file of `torch.save` before 1.6: a pickle of the number 0x1950a86a20f9469cfc6c.
const LEGACY_MAGIC: [u8; 4] = [0x80, 0x02, 0x8a, 0x0a];

/// Name, type and dimensions of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name of the tensor in the file.
    pub name: String,
    /// The type of the elements.
    pub kind: Kind,
    /// The size of each dimension.
    pub dims: Vec<i64>,
}

impl Entry {
    /// An entry for [`SafetensorsWriter::create`].
    pub fn new(name: impl Into<String>, kind: Kind, dims: &[i64]) -> Self {
        Entry { name: name.into(), kind, dims: dims.to_vec() }
    }
}

/// An open file of tensors.
pub trait TensorSource: Send {
    /// The tensors of the file.
    fn entries(&self) -> &[Entry];

    /// The text that the file has under this key of its metadata. Only safetensors files have metadata.
    fn metadata(&self, _key: &str) -> Option<&str> {
        None
    }

    /// Reads the entry with this index: a contiguous tensor on the CPU that shares no memory.
    fn read(&mut self, index: usize) -> Result<Tensor, WeightsError>;
}

/// Why weights cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The operating system returned an error.
    #[error("{}: {doing}: {source}", file.display())]
    Io {
        /// The file that was read or written.
        file: PathBuf,
        /// What was attempted with the file.
        doing: &'static str,
        /// The error that the system returned.
        source: std::io::Error,
    },
    /// The file is not valid in its format.
    #[error("{}{}: {source}", file.display(), part.as_ref().map(|part| format!(" ({part})")).unwrap_or_default())]
    Format {
        /// The file that is not valid.
        file: PathBuf,
        /// The file inside the archive, if the offset counts from its beginning.
        part: Option<String>,
        /// The offset, what was expected, what was found, and what to do.
        source: Box<FormatError>,
    },
    /// The file is an archive of `torch.export` that cannot be used.
    #[error("{}: {source}", file.display())]
    Exported {
        /// The file that cannot be used.
        file: PathBuf,
        /// What is wrong with it, where, and what to do.
        source: Box<Pt2Error>,
    },
    /// The file has the format that PyTorch wrote before 1.6.
    #[error(
        "{}: expected safetensors or a zip archive of torch.save, got the format that PyTorch wrote before 1.6: convert it with \
         python -c \"import torch; torch.save(torch.load('{}', weights_only=True), 'NEW.pth')\"",
        file.display(),
        file.display()
    )]
    Legacy {
        /// The file that has the old format.
        file: PathBuf,
    },
    /// A tensor has a type that libtorch does not support here.
    #[error("{}: expected a supported element type, got `{name}` of {got}: convert it to F32, F16 or BF16", file.display())]
    Type {
        /// The file that has the tensor.
        file: PathBuf,
        /// The name of the tensor in the file.
        name: String,
        /// The type of the tensor, by name.
        got: String,
    },
    /// The tensors written are not those that [`SafetensorsWriter::create`] was given.
    #[error("{}: expected {expected}, got {got}: write the tensors given to `SafetensorsWriter::create`, in that order", file.display())]
    UnexpectedTensor {
        /// The file that was being written.
        file: PathBuf,
        /// The entry that comes next.
        expected: String,
        /// The tensor that was given.
        got: String,
    },
    /// The tensors of the file are not those of the model.
    #[error(
        "{} does not fit the model: check the model's settings, or rename the tensors; with `Pipeline::load_partial`, tensors that \
         are missing and last-layer tensors of another shape keep their initial values:\n{mismatches}",
        file.display()
    )]
    Mismatch {
        /// The file that does not fit.
        file: PathBuf,
        /// A line for each kind of mismatch, with the names of the tensors.
        mismatches: String,
    },
    /// A tensor in the file is NaN or infinite.
    #[error("{}: expected finite values in `{name}`, got one that is not finite: the file may come from a run that diverged", file.display())]
    NotFiniteInFile {
        /// The file that has the tensor.
        file: PathBuf,
        /// The model's name of the tensor.
        name: String,
    },
    /// A parameter of the model to save is NaN or infinite.
    #[error("{}: `{name}` has values that are not finite, so nothing was saved: the last update diverged; lower `Builder::learning_rate`, or set `Builder::clip_norm`", file.display())]
    NotFiniteInModel {
        /// The file that was not written.
        file: PathBuf,
        /// The name of the parameter.
        name: String,
    },
    /// libtorch returned an error.
    #[error("{}: {source}", file.display())]
    Engine {
        /// The file that was read or written.
        file: PathBuf,
        /// The error that libtorch returned.
        source: Box<Fault>,
    },
}

/// Opens a weight file of any supported format.
pub fn open(path: &Path) -> Result<Box<dyn TensorSource>, WeightsError> {
    let mut file = OpenFile::open(path)?;
    let mut magic = [0; 4];
    if file.bytes >= 4 {
        file.read_at(0, &mut magic)?;
    }
    match magic {
        LEGACY_MAGIC => Err(WeightsError::Legacy { file: path.to_owned() }),
        zip::MAGIC if pt2::is_export(&mut file)? => Ok(Box::new(pt2::Pt2File::new(file)?)),
        zip::MAGIC => Ok(Box::new(pth::PthFile::new(file)?)),
        _ => Ok(Box::new(safetensors::SafetensorsFile::new(file)?)),
    }
}

/// Whether all values are finite. Checked piece by piece, because libtorch's temporary results are larger than the tensor.
fn is_finite(tensor: &Tensor) -> Result<bool, tch::TchError> {
    const PIECE: i64 = 1 << 18;
    for piece in tensor.f_flatten(0, -1)?.f_split(PIECE, 0)? {
        if i64::try_from(piece.f_isfinite()?.f_all()?)? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// An open file and its length.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl OpenFile {
    fn open(path: &Path) -> Result<Self, WeightsError> {
        let wrong = |source| WeightsError::Io { file: path.to_owned(), doing: "opening it", source };
        let file = open_regular(path).map_err(wrong)?;
        let bytes = file.metadata().map_err(wrong)?.len();
        Ok(OpenFile { path: path.to_owned(), file, bytes })
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), WeightsError> {
        let read = self.file.seek(SeekFrom::Start(offset)).and_then(|_| self.file.read_exact(into));
        read.map_err(|source| WeightsError::Io { file: self.path.clone(), doing: "reading it", source })
    }

    /// Reads `length` bytes. The caller has checked that the file is long enough.
    fn bytes_at(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = Vec::new();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        bytes.try_reserve_exact(length).map_err(|e| WeightsError::Io {
            file: self.path.clone(),
            doing: "allocating memory for it",
            source: std::io::Error::other(e),
        })?;
        bytes.resize(length, 0);
        self.read_at(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a contiguous tensor whose first element is at `offset`.
    fn tensor_at(&mut self, offset: u64, kind: Kind, dims: &[i64]) -> Result<Tensor, WeightsError> {
        let tensor = crate::engine::empty(dims, kind, crate::engine::Layout::Contiguous);
        let mut tensor = tensor.map_err(|fault| self.engine(fault))?;
        if let Some(bytes) = crate::engine::bytes_mut(&mut tensor) {
            self.read_at(offset, bytes)?;
        }
        Ok(tensor)
    }

    fn format(&self, part: Option<String>) -> impl FnOnce(FormatError) -> WeightsError {
        let file = self.path.clone();
        |source| WeightsError::Format { file, part, source: Box::new(source) }
    }

    fn engine(&self, source: impl Into<Fault>) -> WeightsError {
        WeightsError::Engine { file: self.path.clone(), source: Box::new(source.into()) }
    }

    /// The entry of a tensor. Fails if libtorch does not support its type.
    fn entry(&self, name: &str, dtype: TensorType, dims: &[u64]) -> Result<Entry, WeightsError> {
        let wrong = |got: String| WeightsError::Type { file: self.path.clone(), name: name.to_owned(), got };
        let kind = kind(dtype).ok_or_else(|| wrong(dtype.name().to_owned()))?;
        let dims: Option<Vec<i64>> = dims.iter().map(|&dim| i64::try_from(dim).ok()).collect();
        let dims = dims.ok_or_else(|| wrong("dimensions beyond 63 bits".to_owned()))?;
        Ok(Entry { name: name.to_owned(), kind, dims })
    }
}

const KINDS: [(TensorType, Kind); 10] = [
    (TensorType::F32, Kind::Float),
    (TensorType::F64, Kind::Double),
    (TensorType::F16, Kind::Half),
    (TensorType::BF16, Kind::BFloat16),
    (TensorType::I64, Kind::Int64),
    (TensorType::I32, Kind::Int),
    (TensorType::I16, Kind::Int16),
    (TensorType::I8, Kind::Int8),
    (TensorType::U8, Kind::Uint8),
    (TensorType::Bool, Kind::Bool),
];

fn kind(dtype: TensorType) -> Option<Kind> {
    KINDS.iter().find(|(known, _)| *known == dtype).map(|(_, kind)| *kind)
}

fn dtype(kind: Kind) -> Option<TensorType> {
    KINDS.iter().find(|(_, known)| *known == kind).map(|(dtype, _)| *dtype)
}
