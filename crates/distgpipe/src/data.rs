//! What is learned from. Data sets, one file each:
//!
//! - [`cifar`]: CIFAR-10 and CIFAR-100, out of their official files
//! - [`digits`]: 1,797 handwritten digits, embedded in the library
//! - [`folder`]: image files, a folder per class
//! - [`food101`]: Food-101, as its archive unpacks
//! - [`glue`]: GLUE's RTE and CoLA, as [`tokens`] makes numbers of sentences
//! - [`synthetic`]: made up for any model's input, to learn from or to measure with
//!
//! A data set answers for single rows; the [`Loader`] decides which rows make which batch. What images go through on
//! their way is in [`image`].

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
pub mod tokens;

pub use cifar::Cifar;
pub use digits::Digits;
pub use folder::ImageFiles;
pub use glue::Glue;
pub use image::{ImageOptions, ImageSet};
pub use loader::{Epoch, LastBatch, Loader, LoaderOptions, Order};
pub use pass::Pass;
pub use subset::Subset;
pub use synthetic::Synthetic;
pub use tokens::Tokens;

use crate::failure::Fault;
use crate::layer::SampleShape;
use crate::pipeline::Batch;
use md5::{Digest, Md5};
use std::fmt;
use std::path::PathBuf;

/// Which rows of a data set: the two parts have none in common and never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// To learn from.
    Train,
    /// To test with.
    Test,
}

/// Where in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere in particular.
    Whole,
    /// At this byte, from 0.
    Byte(u64),
    /// In this line, from 1.
    Line(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Whole => Ok(()),
            Place::Byte(offset) => write!(f, ", byte {offset}"),
            Place::Line(line) => write!(f, ", line {line}"),
        }
    }
}

/// Why there is no batch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A data file is not what it should be.
    #[error("{}{place}: expected {expected}, got {got}: {remedy}", file.display())]
    Damaged {
        /// Which file.
        file: PathBuf,
        /// Where in it.
        place: Place,
        /// What should be there.
        expected: String,
        /// What is.
        got: String,
        /// What to do.
        remedy: String,
    },
    /// A data file or directory cannot be read, or is not there.
    #[error("{}: {why}: {remedy}", file.display())]
    Unreadable {
        /// Which.
        file: PathBuf,
        /// What the system says.
        why: String,
        /// What to do.
        remedy: String,
    },
    /// The data set cannot be made as asked.
    #[error("data set `{set}`: expected {expected}, got {got}")]
    Unsuitable {
        /// Which data set.
        set: &'static str,
        /// What it can do.
        expected: String,
        /// What was asked.
        got: String,
    },
    /// A row that the data set does not have.
    #[error("expected a row below {len}, got {got}")]
    NoSuchRow {
        /// Rows of the data set.
        len: usize,
        /// The row asked for.
        got: usize,
    },
    /// The loader would never give a batch.
    #[error("expected a batch of 1 to {rows} rows of the data set, got {batch}: use a smaller batch or more data")]
    BatchSize {
        /// Rows of the data set.
        rows: usize,
        /// Rows of a batch.
        batch: usize,
    },
    /// The thread that loads ahead is gone.
    #[error("the loading thread ended before the epoch did: the data set panicked, see above")]
    LoaderDied,
    /// Nobody waits for the batch any more.
    #[error("the epoch was given up while a batch was being made")]
    GivenUp,
    /// libtorch or the system refused.
    #[error(transparent)]
    Failed(#[from] Fault),
}

impl From<tch::TchError> for DataError {
    fn from(error: tch::TchError) -> Self {
        DataError::Failed(error.into())
    }
}

/// Rows that can be asked for in any order, from any thread.
pub trait Dataset: Send + Sync {
    /// How many rows it has.
    fn len(&self) -> usize;

    /// Whether it has none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many classes its targets tell apart; `None` where a target is no class number.
    fn classes(&self) -> Option<usize>;

    /// The input tensors of one row.
    fn input(&self) -> &[SampleShape];

    /// These rows, in this order, as they look in this pass.
    fn batch(&self, rows: &[usize], pass: Pass<'_>) -> Result<Batch, DataError>;
}

/// An error if a row is not there.
fn check(rows: &[usize], len: usize) -> Result<(), DataError> {
    match rows.iter().find(|&&row| row >= len) {
        Some(&got) => Err(DataError::NoSuchRow { len, got }),
        None => Ok(()),
    }
}

/// The MD5 of what a reader gives, in hexadecimal: published beside data sets, to compare files with.
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
