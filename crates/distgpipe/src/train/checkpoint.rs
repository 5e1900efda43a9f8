//! Checkpoints: everything that a run needs to continue as if it had never been stopped.
//!
//! ```text
//! DIR/lock                       locked by the run that writes here
//! DIR/step-00000120/             complete: the folder gets this name once all its files are on the disk
//!     checkpoint.json            the manifest: settings and progress of the run; length and checksum of the other files
//!     model.safetensors          parameters and buffers under the model's names
//!     optimizer.safetensors      steps.NAME, first.NAME and second.NAME of each parameter
//! DIR/.step-00000130.partial/    being written, or left by a run that was killed
//! DIR/best                       the name of the best checkpoint, if the run looks for one
//! ```
//!
//! Tensor names do not depend on the partition or worker that owned the tensor, so a run can resume with any other cut,
//! placement, number of workers or device. Random streams need no file: the seed and the number of batches trained on name
//! them. Neither does the order of the data, which the seed and the epoch decide. The state of codecs is not saved: both
//! ends of each link reset it at every checkpoint, so a run that resumes from one and a run that passed it compute the same.
//!
//! ```no_run
//! # use distgpipe::data::{Split, Digits, Loader, LoaderOptions};
//! use distgpipe::train::checkpoint::Checkpoints;
//! use distgpipe::train::{SaveEvery, TrainOptions, Trainer};
//! # use distgpipe::{model::zoo::Mlp, Pipeline};
//! # use std::path::Path;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let mut pipeline = Pipeline::builder(Mlp::default().model()?).build()?;
//! # let digits = Digits::new(Split::Train, Default::default())?;
//! # let data = Loader::new(std::sync::Arc::new(digits), LoaderOptions::training(64, 0))?;
//! let checkpoints = Checkpoints::open(Path::new("saved"), 2)?;
//! let mut trainer = Trainer::new(&mut pipeline, data, None, TrainOptions::default())?
//!     .save_to(&checkpoints, SaveEvery::Steps(100), serde_json::Value::Null);
//! if let (Some(newest), _) = checkpoints.newest()? {
//!     trainer = trainer.resume(&newest)?;
//! }
//! trainer.run(|_, _| Ok(()))?;
//! # Ok(())
//! # }
//! ```

mod disk;
mod folder;
mod manifest;

pub use folder::{newest_in, Checkpoints, Created};
pub use manifest::Manifest;

use crate::driver::pipeline::{Pipeline, StepError};
use crate::model::layer::TensorSpec;
use crate::train::weights::{self, TensorSource, WeightsError};
use manifest::{FORMAT, MANIFEST};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tch::Tensor;

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";

/// Why a checkpoint could not be written, found or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system returned an error.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was attempted with it.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error that the system returned.
        source: io::Error,
    },
    /// Another run writes into the folder.
    #[error("another run writes its checkpoints into {}: wait for it, or use another folder", directory.display())]
    Busy {
        /// The folder that is locked.
        directory: PathBuf,
    },
    /// A file of the checkpoint is not as it was written.
    #[error("{} is corrupt: expected {expected}, got {got}; use an earlier checkpoint", path.display())]
    Corrupt {
        /// The file that is corrupt.
        path: PathBuf,
        /// The content that was written.
        expected: String,
        /// The content that was read.
        got: String,
    },
    /// Another version of distgpipe wrote the checkpoint.
    #[error("{}: expected checkpoint format {FORMAT}, got {got}: use the version of distgpipe that wrote it", path.display())]
    Format {
        /// The manifest that was read.
        path: PathBuf,
        /// The format that it names.
        got: String,
    },
    /// A parameter is NaN or infinite.
    #[error("`{name}` is not finite, so no checkpoint was written: lower `Builder::learning_rate` or set `Builder::clip_norm`, and resume from the previous checkpoint")]
    NotFinite {
        /// The name of the parameter.
        name: String,
    },
    /// The checkpoint is at a step that is inside an update of this run.
    #[error("the checkpoint is at step {step}, which is inside an update of several batches now: set `TrainOptions::accumulate` as in the run that wrote it, or start a new run")]
    WithinUpdate {
        /// The step at which the checkpoint was written.
        step: u64,
    },
    /// The model's specification, the parameter groups, the frozen patterns or the settings cannot be read from a checkpoint again, so
    /// none was written.
    #[error("no checkpoint was written, because the model's specification, the parameter groups, the frozen patterns or the settings of \
             the run could not be read again: {why}; make them smaller, or train without checkpoints")]
    Settings {
        /// The limit that they exceed.
        why: String,
    },
    /// An update of several batches is in progress, and its gradients are not saved.
    #[error("an update of several batches is in progress: finish it before saving")]
    InUpdate,
    /// The checkpoint is of a run with other settings.
    #[error("cannot resume: {what} of the checkpoint is {expected}, this run has {got}; use the same settings, or start a new run without the checkpoint")]
    Mismatch {
        /// The setting, such as `the seed`.
        what: &'static str,
        /// The value in the checkpoint.
        expected: String,
        /// The value in this run.
        got: String,
    },
    /// The disk did not answer in time, or still does not answer since an earlier checkpoint was given up. The thread that waits for it
    /// removes what it has written when the disk answers again.
    #[error(
        "saving a checkpoint to {}: the disk {} for {:.0} s: check the disk, or save to another one", directory.display(),
        if *earlier { "still does not answer, and has not" } else { "has not answered" }, waited.as_secs_f64()
    )]
    DiskStalled {
        /// The directory of the checkpoints.
        directory: PathBuf,
        /// How long it has not answered.
        waited: Duration,
        /// Whether an earlier operation still waits for it.
        earlier: bool,
    },
    /// A tensor file could not be written or read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A transfer of tensors from or to the workers failed.
    #[error(transparent)]
    Step(#[from] StepError),
}

impl CheckpointError {
    /// Whether the disk is the cause. A later attempt may succeed.
    pub fn is_of_disk(&self) -> bool {
        use CheckpointError::{DiskStalled, Io, Weights};
        matches!(self, Io { .. } | Weights(_) | DiskStalled { .. })
    }
}

fn on_disk(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::Io { doing, path, source }
}

/// A checkpoint whose files are complete and intact.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

/// The name of the optimizer that the model brings along.
fn own_rule(pipeline: &Pipeline) -> Option<String> {
    pipeline.model().update_rule.as_ref().map(|rule| rule.name())
}

impl Checkpoint {
    /// Reads the manifest of a checkpoint's folder and verifies the checksums of its files.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(&path.join(MANIFEST), || {})?;
        manifest.verify(path, MODEL)?;
        manifest.verify(path, OPTIMIZER)?;
        Ok(Checkpoint { path: path.to_owned(), manifest })
    }

    /// The manifest of a checkpoint's folder, and its file of parameters and buffers, whose checksum is verified. Whoever only
    /// runs the model needs no more: the optimizer's state may be damaged.
    pub fn model_at(path: &Path) -> Result<(Manifest, PathBuf), CheckpointError> {
        let manifest = Manifest::read(&path.join(MANIFEST), || {})?;
        let file = manifest.verify(path, MODEL)?;
        Ok((manifest, file))
    }

    /// Whether a folder is a checkpoint, intact or not.
    pub fn is_at(path: &Path) -> bool {
        path.join(MANIFEST).exists()
    }

    /// The folder that holds the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file with the model's parameters and buffers.
    pub fn model_file(&self) -> PathBuf {
        self.path.join(MODEL)
    }

    /// The settings and the progress of the run that wrote it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Loads the checkpoint into a pipeline: parameters, buffers, optimizer state and the position of the random streams.
    /// The model, the seed, the optimizer, the parameter groups and the frozen parameters must be those of the checkpoint; the
    /// cut, the division of an exported model into layers, the placement, the devices and the codecs need not be.
    pub fn load(&self, pipeline: &mut Pipeline) -> Result<(), CheckpointError> {
        fn same<T: PartialEq + Serialize + ?Sized>(
            what: &'static str,
            expected: &T,
            got: &T,
        ) -> Result<(), CheckpointError> {
            if expected == got {
                return Ok(());
            }
            let text = |value: &T| serde_json::to_string(value).unwrap_or_default();
            Err(CheckpointError::Mismatch { what, expected: text(expected), got: text(got) })
        }
        let manifest = &self.manifest;
        let specs = (&manifest.model, &pipeline.model().spec);
        if !matches!(specs, (Some(saved), Some(given)) if saved.computes_like(given)) {
            same("the model", specs.0, specs.1)?;
        }
        same("the seed", &manifest.seed, &pipeline.seed())?;
        same("the optimizer", &manifest.optim, &pipeline.optim())?;
        same("the list of parameter groups", &manifest.groups[..], pipeline.parameter_groups())?;
        same("the list of frozen parameters", &manifest.frozen[..], pipeline.frozen())?;
        same("the model's own optimizer", &manifest.update_rule, &own_rule(pipeline))?;
        let mut model = TensorFile::open(&self.model_file())?;
        pipeline.load_from(&names_of(&pipeline.state_specs()), |name| model.read(name))?;
        let mut optimizer = TensorFile::open(&self.path.join(OPTIMIZER))?;
        pipeline.load_optimizer_from(&names_of(&pipeline.optimizer_specs()), |name| optimizer.read(name))?;
        pipeline.set_batches_trained(manifest.batches_trained);
        Ok(())
    }
}

fn names_of(specs: &[TensorSpec]) -> Vec<String> {
    specs.iter().map(|spec| spec.name.clone()).collect()
}

/// A file whose tensors are read by name.
struct TensorFile {
    source: Box<dyn TensorSource>,
    indices: BTreeMap<String, usize>,
}

impl TensorFile {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let source = weights::open(path)?;
        let indices = source.entries().iter().enumerate().map(|(i, entry)| (entry.name.clone(), i)).collect();
        Ok(TensorFile { source, indices })
    }

    fn read(&mut self, name: &str) -> Result<Tensor, CheckpointError> {
        let index = self.indices.get(name).ok_or_else(|| CheckpointError::Mismatch {
            what: "the model",
            expected: format!("one without a tensor `{name}`"),
            got: "one with it".to_owned(),
        })?;
        Ok(self.source.read(*index)?)
    }
}
