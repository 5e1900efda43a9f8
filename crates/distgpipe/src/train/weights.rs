//! Weights in files: read tensor by tensor, whatever the file's size, and written so that others read them.
//!
//! | module | format |
//! | --- | --- |
//! | [`safetensors`] | safetensors, read and written |
//! | [`pth`] | the archive that `torch.save` writes, read only; nothing in it is executed |
//!
//! [`open`] tells them apart by their first bytes. A [`Source`] knows names, types and dimensions at once and reads a
//! tensor's elements when it is asked for them, so a model that is larger than the memory can be handed on piece by piece.

#[path = "weights/pth.rs"]
pub mod pth;
#[path = "weights/safetensors.rs"]
pub mod safetensors;

pub use safetensors::SafetensorsWriter;

use crate::failure::Fault;
use distgpipe_core::weights::{zip, Dtype, FormatError};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};

/// How a file of `torch.save` before 1.6 begins: a pickle of the number 0x1950a86a20f9469cfc6c.
const LEGACY_MAGIC: [u8; 4] = [0x80, 0x02, 0x8a, 0x0a];

/// A tensor of a file, not yet read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub kind: Kind,
    /// Its dimensions.
    pub dims: Vec<i64>,
}

impl Entry {
    /// An entry to announce to a [`SafetensorsWriter`].
    pub fn new(name: impl Into<String>, kind: Kind, dims: &[i64]) -> Self {
        Entry { name: name.into(), kind, dims: dims.to_vec() }
    }
}

/// An open file of tensors.
pub trait Source: Send {
    /// What is in it.
    fn entries(&self) -> &[Entry];

    /// Reads the entry of this number: a contiguous tensor on the CPU that nobody else holds.
    fn read(&mut self, index: usize) -> Result<Tensor, WeightsError>;
}

/// Why weights cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The operating system refused.
    #[error("{}: {doing}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was attempted.
        doing: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{}{}: {source}", file.display(), part.as_ref().map(|part| format!(" ({part})")).unwrap_or_default())]
    Format {
        /// The file.
        file: PathBuf,
        /// The file in the file, from whose beginning the offset counts.
        part: Option<String>,
        /// Where, what was expected, what came, what to do.
        source: Box<FormatError>,
    },
    /// The file is of the form that PyTorch wrote before 1.6.
    #[error(
        "{}: expected safetensors or a zip archive of torch.save, got the form that PyTorch wrote before 1.6: write it anew with \
         python -c \"import torch; torch.save(torch.load('{}', weights_only=True), 'NEW.pth')\"",
        file.display(),
        file.display()
    )]
    Legacy {
        /// The file.
        file: PathBuf,
    },
    /// A type that libtorch has no tensors of here.
    #[error("{}: expected a type that can be computed with, got `{name}` of {got}: convert it to F32, F16 or BF16", file.display())]
    Type {
        /// The file.
        file: PathBuf,
        /// The tensor.
        name: String,
        /// Its type.
        got: String,
    },
    /// Something else was written than was announced.
    #[error("{}: expected {expected}, got {got}: write the tensors that were announced, in that order", file.display())]
    Unannounced {
        /// The file.
        file: PathBuf,
        /// What was announced.
        expected: String,
        /// What came.
        got: String,
    },
    /// libtorch refused.
    #[error("{}: {source}", file.display())]
    Engine {
        /// The file.
        file: PathBuf,
        /// What it said.
        source: Box<Fault>,
    },
}

/// Opens a file of weights, of whichever format it is.
pub fn open(path: &Path) -> Result<Box<dyn Source>, WeightsError> {
    let mut file = Opened::open(path)?;
    let mut magic = [0; 4];
    if file.bytes >= 4 {
        file.read_at(0, &mut magic)?;
    }
    match magic {
        LEGACY_MAGIC => Err(WeightsError::Legacy { file: path.to_owned() }),
        zip::MAGIC => Ok(Box::new(pth::PthFile::new(file)?)),
        _ => Ok(Box::new(safetensors::SafetensorsFile::new(file)?)),
    }
}

/// A file of known length.
#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Opened {
    fn open(path: &Path) -> Result<Self, WeightsError> {
        let wrong = |source| WeightsError::Io { file: path.to_owned(), doing: "opening it", source };
        let file = File::open(path).map_err(wrong)?;
        let about = file.metadata().map_err(wrong)?;
        if !about.is_file() {
            let got = "expected a file, got a directory, pipe or device: name a file";
            return Err(wrong(std::io::Error::other(got)));
        }
        Ok(Opened { path: path.to_owned(), file, bytes: about.len() })
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), WeightsError> {
        let read = self.file.seek(SeekFrom::Start(offset)).and_then(|_| self.file.read_exact(into));
        read.map_err(|source| WeightsError::Io { file: self.path.clone(), doing: "reading it", source })
    }

    /// As many bytes as somebody has compared with the file's length.
    fn bytes_at(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, WeightsError> {
        let mut bytes = Vec::new();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        bytes.try_reserve_exact(length).map_err(|e| WeightsError::Io {
            file: self.path.clone(),
            doing: "making room to read it",
            source: std::io::Error::other(e),
        })?;
        bytes.resize(length, 0);
        self.read_at(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// A contiguous tensor of the elements from `offset` on.
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

    /// An entry, if libtorch has tensors of its type.
    fn entry(&self, name: &str, dtype: Dtype, dims: &[u64]) -> Result<Entry, WeightsError> {
        let wrong = |got: String| WeightsError::Type { file: self.path.clone(), name: name.to_owned(), got };
        let kind = kind(dtype).ok_or_else(|| wrong(dtype.name().to_owned()))?;
        let dims: Option<Vec<i64>> = dims.iter().map(|&dim| i64::try_from(dim).ok()).collect();
        let dims = dims.ok_or_else(|| wrong("dimensions that libtorch cannot count".to_owned()))?;
        Ok(Entry { name: name.to_owned(), kind, dims })
    }
}

const KINDS: [(Dtype, Kind); 10] = [
    (Dtype::F32, Kind::Float),
    (Dtype::F64, Kind::Double),
    (Dtype::F16, Kind::Half),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::I64, Kind::Int64),
    (Dtype::I32, Kind::Int),
    (Dtype::I16, Kind::Int16),
    (Dtype::I8, Kind::Int8),
    (Dtype::U8, Kind::Uint8),
    (Dtype::Bool, Kind::Bool),
];

fn kind(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|(known, _)| *known == dtype).map(|(_, kind)| *kind)
}

fn dtype(kind: Kind) -> Option<Dtype> {
    KINDS.iter().find(|(_, known)| *known == kind).map(|(dtype, _)| *dtype)
}
