//! Training and test data. Data sets, one file each:
//!
//! - [`cifar`]: CIFAR-10 and CIFAR-100, from their official files
//! - [`digits`]: 1,797 handwritten digits, embedded in the library
//! - [`folder`]: image files, one folder per class
//! - [`food101`]: Food-101, as unpacked from its archive
//! - [`glue`]: GLUE's RTE and CoLA, tokenized by [`tokens`]
//! - [`synthetic`]: generated data for any model's input, for training or benchmarks
//! - [`tensors`]: tensors in memory
//! - [`tensor_files`]: tensors in safetensors or NumPy files
//! - [`text`]: files of text for language models, one token after the other
//!
//! A data set returns the rows it is asked for; the [`Loader`] decides which rows make which batch. [`image`] has the
//! preprocessing of images.
//!
//! To add a data set, write its file, implement [`Dataset`] (or [`image::ImageSource`] for images), and give it a name on
//! the command line in `distgpipe-cli/src/datasets.rs`.

pub mod cifar;
pub mod digits;
pub mod folder;
pub mod food101;
pub mod glue;
pub mod image;
mod loader;
mod pass;
mod subset;
pub mod synthetic;
pub mod tensor_files;
pub mod tensors;
pub mod text;
#[cfg_attr(not(feature = "tokenizers"), path = "data/tokens_off.rs")]
pub mod tokens;

pub use cifar::Cifar;
pub use digits::{DigitFiles, Digits};
pub use folder::ImageFiles;
pub use glue::Glue;
pub use image::{ImageOptions, ImageSet};
pub(crate) use loader::BatchDevices;
pub use loader::{Epoch, LastBatch, Loader, LoaderOptions, Order};
pub use pass::LoadPass;
pub use subset::Subset;
pub use synthetic::Synthetic;
pub use tensor_files::TensorFiles;
pub use tensors::TensorDataset;
pub use text::Text;
pub use tokens::Tokens;

use crate::driver::pipeline::Batch;
use crate::failure::Fault;
use crate::model::layer::SampleShape;
use crate::train::weights::WeightsError;
use md5::{Digest, Md5};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// A part of a data set. The two parts share no rows and never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The rows to train on.
    Train,
    /// The rows to test with.
    Test,
}

/// A place in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilePosition {
    /// The file as a whole.
    File,
    /// The byte at this offset, from 0.
    Byte(u64),
    /// This line, from 1.
    Line(u64),
}

impl fmt::Display for FilePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FilePosition::File => Ok(()),
            FilePosition::Byte(offset) => write!(f, ", byte {offset}"),
            FilePosition::Line(line) => write!(f, ", line {line}"),
        }
    }
}

/// Why data could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A data file is corrupt, truncated, or not the expected one.
    #[error("{}{place}: expected {expected}, got {got}: {remedy}", file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// Where in the file the error was found.
        place: FilePosition,
        /// The expected content.
        expected: String,
        /// What was found instead.
        got: String,
        /// What the user can do about it.
        remedy: String,
    },
    /// A data file or directory is missing or cannot be read.
    #[error("{}: {why}: {remedy}", file.display())]
    Unreadable {
        /// The file or directory.
        file: PathBuf,
        /// The system's error.
        why: String,
        /// What the user can do about it.
        remedy: String,
    },
    /// The file needs a reader that this build does not have, because a feature of the crate is off.
    #[error("{}: this build of distgpipe cannot read {format}: enable the crate feature `{feature}`", file.display())]
    MissingFeature {
        /// The first file in that format.
        file: PathBuf,
        /// The format.
        format: &'static str,
        /// The feature of the crate `distgpipe` that reads it.
        feature: &'static str,
    },
    /// The data set does not support the requested form.
    #[error("data set `{set}`: expected {expected}, got {got}")]
    Unsuitable {
        /// The data set's name.
        set: &'static str,
        /// The forms that the data set supports.
        expected: String,
        /// The requested form.
        got: String,
    },
    /// The data set has no such row.
    #[error("expected a row below {len}, got {got}")]
    NoSuchRow {
        /// The number of rows in the data set.
        len: usize,
        /// The requested row.
        got: usize,
    },
    /// The batch size does not fit the data set, so the loader would return no batch.
    #[error(
        "expected a batch size of 1 to {rows}, the rows of the data set, got {batch}: use a smaller batch or more data"
    )]
    BatchSize {
        /// The number of rows in the data set.
        rows: usize,
        /// The number of rows in a batch.
        batch: usize,
    },
    /// The loading thread ended before the epoch did.
    #[error("the loading thread ended before the epoch did: the data set panicked")]
    LoaderPanicked,
    /// The epoch was dropped while a batch was being loaded.
    #[error("the epoch was dropped while a batch was being loaded")]
    Cancelled,
    /// A file of tensors cannot be read.
    #[error(transparent)]
    Tensors(Box<WeightsError>),
    /// libtorch or the operating system returned an error.
    #[error(transparent)]
    Failed(#[from] Fault),
}

impl From<WeightsError> for DataError {
    fn from(error: WeightsError) -> Self {
        DataError::Tensors(Box::new(error))
    }
}

impl From<tch::TchError> for DataError {
    fn from(error: tch::TchError) -> Self {
        DataError::Failed(error.into())
    }
}

/// A data set: rows that can be read in any order. `examples/own_dataset.rs` shows how to write one.
///
/// A data set moves to the threads of its loader, so it must be `Send`. It need not be `Sync`, so it may hold tensors: the
/// loader asks for one batch at a time. If a data set is `Sync`, an `Arc` of it is a data set too, which several loaders
/// can share.
pub trait Dataset: Send {
    /// The number of rows.
    fn len(&self) -> usize;

    /// Whether there are no rows.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of classes; `None` if targets are not class numbers.
    fn classes(&self) -> Option<usize>;

    /// The names of the classes, by class number; `None` if there are none.
    fn class_names(&self) -> Option<Vec<String>> {
        None
    }

    /// The shapes of one row's input tensors.
    fn input(&self) -> &[SampleShape];

    /// A batch of these rows, in this order. `pass` is the source of randomness for augmentation, and of threads.
    ///
    /// # Errors
    /// If a row does not exist or cannot be loaded.
    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError>;

    /// The same batch as bytes from which a GPU makes the input; `None` if there is no such form, or if it is no smaller. Images of one
    /// size have it: see [`ImageSource::size`](image::ImageSource::size). A wrapper forwards this only if its `batch` returns the batch of
    /// the wrapped set unchanged.
    ///
    /// # Errors
    /// As for [`batch`](Self::batch).
    fn image_bytes(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Option<image::ImageBytes>, DataError> {
        let _ = (rows, pass);
        Ok(None)
    }
}

impl<D: Dataset + Sync + ?Sized> Dataset for Arc<D> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn is_empty(&self) -> bool {
        (**self).is_empty()
    }

    fn classes(&self) -> Option<usize> {
        (**self).classes()
    }

    fn class_names(&self) -> Option<Vec<String>> {
        (**self).class_names()
    }

    fn input(&self) -> &[SampleShape] {
        (**self).input()
    }

    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
        (**self).batch(rows, pass)
    }

    fn image_bytes(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Option<image::ImageBytes>, DataError> {
        (**self).image_bytes(rows, pass)
    }
}

/// Checks that all rows exist.
fn check(rows: &[usize], len: usize) -> Result<(), DataError> {
    match rows.iter().find(|&&row| row >= len) {
        Some(&got) => Err(DataError::NoSuchRow { len, got }),
        None => Ok(()),
    }
}

/// The MD5 hash of a reader's content, in hexadecimal. Data sets publish it for their files.
pub fn md5(mut from: impl std::io::Read) -> std::io::Result<String> {
    let (mut hash, mut block) = (Md5::new(), vec![0; 1 << 16]);
    loop {
        match from.read(&mut block) {
            Ok(0) => return Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            Ok(bytes) => hash.update(&block[..bytes]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
