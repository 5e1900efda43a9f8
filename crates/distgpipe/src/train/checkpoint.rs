//! Checkpoints: all that a run needs to go on as if it had never been stopped.
//!
//! ```text
//! DIR/lock                       held by the run that writes here
//! DIR/step-00000120/             whole: it got this name when everything in it was on the disk
//!     checkpoint.json            what it is and how far the run was; length and checksum of the other two
//!     model.safetensors          parameters and buffers under the model's names
//!     optimizer.safetensors      steps.NAME, first.NAME and second.NAME of each parameter
//! DIR/.step-00000130.partial/    being written, or left by a run that was killed
//! ```
//!
//! A tensor's name says what it is and not where it was, so a run goes on with any other cut, placement, number of workers
//! or device. Random streams need no file: they are named by the seed and the number of batches learned from. Nor does the
//! order of the data, which the seed and the epoch decide. What codecs remember is not saved either: they forget it at
//! each checkpoint, at both ends, so that a run that goes on from one and a run that only passed it compute the same.
//!
//! ```no_run
//! # use distgpipe::data::{digits::Part, Digits, Loader, LoaderOptions};
//! use distgpipe::checkpoint::Checkpoints;
//! use distgpipe::trainer::{Event, SaveEvery, TrainOptions, Trainer};
//! # use distgpipe::{models::Mlp, Pipeline};
//! # use std::path::Path;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let mut pipeline = Pipeline::builder(Mlp::default().model()?).build()?;
//! # let digits = Digits::new(Part::Train, Default::default())?;
//! # let data = Loader::new(std::sync::Arc::new(digits), LoaderOptions::training(64, 0))?;
//! let checkpoints = Checkpoints::open(Path::new("saved"), 2)?;
//! let mut trainer = Trainer::new(&mut pipeline, data, None, TrainOptions::default())?
//!     .save_to(&checkpoints, SaveEvery::Steps(100), serde_json::Value::Null);
//! if let (Some(newest), _) = checkpoints.newest()? {
//!     trainer = trainer.resume(&newest)?;
//! }
//! trainer.run(&mut |_: &Event<'_>| Ok(()))?;
//! # Ok(())
//! # }
//! ```

use crate::failure::{Failure, Fault};
use crate::layer::{Role, TensorSpec};
use crate::model::Recipe;
use crate::optim::Optim;
use crate::pipeline::{Pipeline, StepError};
use crate::trainer::Progress;
use crate::weights::{self, Entry, SafetensorsWriter, Source, WeightsError};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use tch::Tensor;
use xxhash_rust::xxh3::{xxh3_64, Xxh3Default};

/// The version of the layout above.
const FORMAT: u32 = 1;
const ABOUT: &str = "checkpoint.json";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
/// The field of checkpoint.json that has the checksum of all others.
const SEAL: &str = "xxh3";
/// Of a folder that is being written, and of one that is in its way.
const PARTIAL: &str = ".partial";
const OLD: &str = ".old";
/// The most bytes of a checkpoint.json; it grows with the epochs by some hundreds.
const ABOUT_BYTES_MAX: u64 = 64 << 20;

/// Why a checkpoint could not be written, found or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system said no.
    #[error("{doing} {}: {cause}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// What it said.
        cause: io::Error,
    },
    /// Two runs must not write into one folder.
    #[error("another run writes its checkpoints into {}: wait for it, or use another folder", directory.display())]
    Busy {
        /// The folder.
        directory: PathBuf,
    },
    /// A checkpoint is not what was written.
    #[error("{}: expected {expected}, got {got}: it is damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What should be there.
        expected: String,
        /// What is there.
        got: String,
    },
    /// It was written by another version.
    #[error("{}: expected a checkpoint of format {FORMAT}, got {got}: use the version of distgpipe that wrote it", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What it says.
        got: String,
    },
    /// The parameters are no numbers any more.
    #[error("`{name}` is not finite, so nothing was saved: lower the learning rate (--lr) or clip gradients (--clip-norm), and go on from the checkpoint before")]
    NotFinite {
        /// The tensor.
        name: String,
    },
    /// The run that was saved ended where this one is in the middle of an update.
    #[error("the run was ended at step {step}, within what is now one update of several batches (--accumulate): go on from an earlier checkpoint, or start anew; end runs at whole updates")]
    WithinUpdate {
        /// Where it ended.
        step: u64,
    },
    /// Gradients wait for more.
    #[error("an update of several batches was begun: finish it before saving")]
    InUpdate,
    /// The checkpoint is of another run.
    #[error("the checkpoint is of a run with {what} {expected}, this run has {got}: go on with the same, or start anew without the checkpoint")]
    Differs {
        /// In what.
        what: &'static str,
        /// The checkpoint's.
        expected: String,
        /// This run's.
        got: String,
    },
    /// A file of tensors could not be written or read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A worker failed meanwhile.
    #[error(transparent)]
    Step(#[from] StepError),
}

fn on_disk(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |cause| CheckpointError::Io { doing, path, cause }
}

/// What a checkpoint says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct About {
    format: u32,
    /// How the model is made; absent for a model of somebody's own layers.
    pub model: Option<Recipe>,
    /// Of the random streams.
    pub seed: u64,
    /// How parameters are stepped.
    pub optim: Optim,
    /// How many batches were learned from: where the random streams are.
    pub learned: u64,
    /// How far the run was.
    pub progress: Progress,
    /// Whatever the caller wants to find again.
    pub settings: serde_json::Value,
    files: BTreeMap<String, Facts>,
}

/// What a file must be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    bytes: u64,
    xxh3: String,
}

impl Facts {
    fn of(path: &Path) -> Result<Self, CheckpointError> {
        let mut file = File::open(path).map_err(on_disk("opening", path))?;
        let (mut hash, mut bytes) = (Xxh3Default::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer).map_err(on_disk("reading", path))? {
                0 => return Ok(Facts { bytes, xxh3: format!("{:016x}", hash.digest()) }),
                n => {
                    hash.update(&buffer[..n]);
                    bytes += n as u64;
                }
            }
        }
    }
}

/// A checkpoint that is whole.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    about: About,
}

impl Checkpoint {
    /// Reads what it says of itself, and checks that its files are as they were written.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = path.join(ABOUT);
        let damaged = |path: &Path, expected: &str, got: String| CheckpointError::Damaged {
            path: path.to_owned(),
            expected: expected.to_owned(),
            got,
        };
        let mut text = Vec::new();
        let opened = File::open(&file).map_err(on_disk("opening", &file))?;
        opened.take(ABOUT_BYTES_MAX).read_to_end(&mut text).map_err(on_disk("reading", &file))?;
        let mut value: serde_json::Value = serde_json::from_slice(&text)
            .map_err(|e| damaged(&file, "what a checkpoint says of itself", e.to_string()))?;
        // Asked first: another format may have other fields.
        if value.get("format") != Some(&FORMAT.into()) {
            let got = value.get("format").map_or_else(|| "none".to_owned(), ToString::to_string);
            return Err(CheckpointError::Format { path: file, got });
        }
        let sealed = value.as_object_mut().and_then(|fields| fields.remove(SEAL));
        if sealed != Some(seal(&value).into()) {
            return Err(damaged(&file, "its own checksum", "another".to_owned()));
        }
        let about: About = serde_json::from_value(value)
            .map_err(|e| damaged(&file, "what a checkpoint says of itself", e.to_string()))?;
        for name in [MODEL, OPTIMIZER] {
            let path = path.join(name);
            let expected = about
                .files
                .get(name)
                .ok_or_else(|| damaged(&file, &format!("facts about {name}"), "none".to_owned()))?;
            let got = Facts::of(&path)?;
            if got != *expected {
                let text = |facts: &Facts| format!("{} bytes with checksum {}", facts.bytes, facts.xxh3);
                return Err(damaged(&path, &text(expected), text(&got)));
            }
        }
        Ok(Checkpoint { path: path.to_owned(), about })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says of itself.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Puts a pipeline where the run was. Whatever decides what would be computed must be the same; how it is cut, where
    /// it runs and what its links do need not.
    pub fn load(&self, pipeline: &mut Pipeline) -> Result<(), CheckpointError> {
        let about = &self.about;
        fn same<T: PartialEq + Serialize>(what: &'static str, expected: &T, got: &T) -> Result<(), CheckpointError> {
            if expected == got {
                return Ok(());
            }
            let text = |value: &T| serde_json::to_string(value).unwrap_or_default();
            Err(CheckpointError::Differs { what, expected: text(expected), got: text(got) })
        }
        same("the model", &about.model, &pipeline.model().recipe)?;
        same("the seed", &about.seed, &pipeline.seed())?;
        same("the optimizer", &about.optim, &pipeline.optim())?;
        let mut model = Named::open(&self.path.join(MODEL))?;
        pipeline.load_from(&names_of(&pipeline.state_specs()), |name| model.read(name))?;
        let mut optimizer = Named::open(&self.path.join(OPTIMIZER))?;
        pipeline.load_optimizer_from(&names_of(&pipeline.optimizer_specs()), |name| optimizer.read(name))?;
        pipeline.set_learned(about.learned);
        Ok(())
    }
}

/// A folder of checkpoints that this process alone writes into.
#[derive(Debug)]
pub struct Checkpoints {
    directory: PathBuf,
    keep: usize,
    /// Unlocked by the system when the process ends, however it ends.
    _lock: File,
}

impl Checkpoints {
    /// Makes the folder if need be, and clears away what a killed run left half written. `keep` of the whole ones stay,
    /// at least one.
    pub fn open(directory: &Path, keep: usize) -> Result<Self, CheckpointError> {
        fs::create_dir_all(directory).map_err(on_disk("making", directory))?;
        let path = directory.join("lock");
        let lock = File::options().create(true).append(true).open(&path).map_err(on_disk("opening", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::Busy { directory: directory.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(on_disk("locking", &path)(source)),
        }
        for name in names(directory)? {
            let (path, hidden) = (directory.join(&name), name.strip_prefix('.'));
            if let Some(step) = hidden.and_then(|name| step_of(name.strip_suffix(OLD)?)) {
                // It was moved out of the way of one that did not come.
                let whole = directory.join(name_of(step));
                match whole.exists() {
                    true => remove_if_there(&path)?,
                    false => fs::rename(&path, &whole).map_err(on_disk("moving", &path))?,
                }
            } else if hidden.and_then(|name| step_of(name.strip_suffix(PARTIAL)?)).is_some() {
                remove_if_there(&path)?;
            }
        }
        Ok(Checkpoints { directory: directory.to_owned(), keep: keep.max(1), _lock: lock })
    }

    /// Changes how many stay, at least one.
    pub fn set_keep(&mut self, keep: usize) {
        self.keep = keep.max(1);
    }

    /// Where they are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The steps of those that are there, the newest first.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<u64> = names(&self.directory)?.iter().filter_map(|name| step_of(name)).collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        Ok(steps)
    }

    /// The newest one that is whole, and why newer ones are not.
    pub fn newest(&self) -> Result<(Option<Checkpoint>, Vec<CheckpointError>), CheckpointError> {
        let mut damaged = Vec::new();
        for step in self.steps()? {
            match Checkpoint::open(&self.path(step)) {
                Ok(checkpoint) => return Ok((Some(checkpoint), damaged)),
                Err(error) => damaged.push(error),
            }
        }
        Ok((None, damaged))
    }

    /// Moves those of later steps aside, under another name: the run that goes on from an earlier one comes to these steps
    /// again, and must not count them among those that are kept.
    pub fn set_aside_after(&self, step: u64) -> Result<(), CheckpointError> {
        for later in self.steps()?.into_iter().filter(|&later| later > step) {
            let (path, aside) = (self.path(later), self.directory.join(format!("unused-{}", name_of(later))));
            remove_if_there(&aside)?;
            fs::rename(&path, &aside).map_err(on_disk("moving", &path))?;
        }
        Ok(())
    }

    /// Saves a pipeline and how far its run is. The codecs forget; see [`Pipeline::forget`]. Older checkpoints go when
    /// this one is on the disk.
    pub fn save(
        &self,
        pipeline: &mut Pipeline,
        progress: &Progress,
        settings: &serde_json::Value,
    ) -> Result<PathBuf, CheckpointError> {
        if pipeline.in_update() {
            return Err(CheckpointError::InUpdate);
        }
        pipeline.forget()?;
        let path = self.path(progress.step);
        let partial = self.directory.join(format!(".{}{PARTIAL}", name_of(progress.step)));
        remove_if_there(&partial)?;
        fs::create_dir(&partial).map_err(on_disk("making", &partial))?;
        let specs = pipeline.state_specs();
        let parameters: BTreeSet<&str> =
            specs.iter().filter(|spec| spec.role == Role::Parameter).map(|spec| &spec.name[..]).collect();
        let mut writer = writer(&partial.join(MODEL), &specs)?;
        pipeline.state_each(|name, tensor| {
            if parameters.contains(name) && !is_finite(&tensor).map_err(StepError::from)? {
                return Err(CheckpointError::NotFinite { name: name.to_owned() });
            }
            Ok(writer.write(&tensor)?)
        })?;
        writer.finish()?;
        let mut writer = self::writer(&partial.join(OPTIMIZER), &pipeline.optimizer_specs())?;
        pipeline.optimizer_each(|_, tensor| writer.write(&tensor).map_err(CheckpointError::from))?;
        writer.finish()?;
        let facts = |name: &str| Ok((name.to_owned(), Facts::of(&partial.join(name))?));
        let mut about = serde_json::to_value(About {
            format: FORMAT,
            model: pipeline.model().recipe.clone(),
            seed: pipeline.seed(),
            optim: pipeline.optim(),
            learned: pipeline.learned(),
            progress: progress.clone(),
            settings: settings.clone(),
            files: [MODEL, OPTIMIZER].into_iter().map(facts).collect::<Result<_, CheckpointError>>()?,
        })
        .map_err(|e| on_disk("writing", &partial)(e.into()))?;
        about[SEAL] = seal(&about).into();
        write_durably(&partial.join(ABOUT), &about)?;
        sync_directory(&partial)?;
        // A damaged one of this step may be in the way.
        let aside = self.directory.join(format!(".{}{OLD}", name_of(progress.step)));
        if path.exists() {
            remove_if_there(&aside)?;
            fs::rename(&path, &aside).map_err(on_disk("moving", &path))?;
        }
        fs::rename(&partial, &path).map_err(on_disk("naming", &path))?;
        sync_directory(&self.directory)?;
        remove_if_there(&aside)?;
        for step in self.steps()?.into_iter().filter(|&step| step < progress.step).skip(self.keep - 1) {
            remove_if_there(&self.path(step))?;
        }
        Ok(path)
    }

    fn path(&self, step: u64) -> PathBuf {
        self.directory.join(name_of(step))
    }
}

fn names_of(specs: &[TensorSpec]) -> Vec<String> {
    specs.iter().map(|spec| spec.name.clone()).collect()
}

fn writer(path: &Path, specs: &[TensorSpec]) -> Result<SafetensorsWriter, WeightsError> {
    let entries = specs.iter().map(|spec| Entry::new(&spec.name, spec.kind, &spec.dims)).collect();
    SafetensorsWriter::create(path, entries, &BTreeMap::new())
}

/// A file whose tensors are asked for by name.
struct Named {
    source: Box<dyn Source>,
    places: BTreeMap<String, usize>,
}

impl Named {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let source = weights::open(path)?;
        let places = source.entries().iter().enumerate().map(|(i, entry)| (entry.name.clone(), i)).collect();
        Ok(Named { source, places })
    }

    fn read(&mut self, name: &str) -> Result<Tensor, CheckpointError> {
        let place = self.places.get(name).ok_or_else(|| CheckpointError::Differs {
            what: "a model",
            expected: format!("without `{name}`"),
            got: "one with it".to_owned(),
        })?;
        Ok(self.source.read(*place)?)
    }
}

fn is_finite(tensor: &Tensor) -> Result<bool, Failure> {
    let finite = || -> Result<bool, Fault> { Ok(i64::try_from(tensor.f_isfinite()?.f_all()?)? != 0) };
    finite().map_err(|fault| Failure::new("the driver", "saving", fault))
}

/// The checksum of what a checkpoint says of itself.
fn seal(about: &serde_json::Value) -> String {
    format!("{:016x}", xxh3_64(about.to_string().as_bytes()))
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-").filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
}

fn names(directory: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = fs::read_dir(directory).map_err(on_disk("listing", directory))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    names.collect::<io::Result<_>>().map_err(on_disk("listing", directory))
}

fn remove_if_there(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(on_disk("removing", path)(error)),
        _ => Ok(()),
    }
}

fn write_durably(path: &Path, value: &impl Serialize) -> Result<(), CheckpointError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| on_disk("writing", path)(e.into()))?;
    text.push(b'\n');
    let mut file = File::create(path).map_err(on_disk("making", path))?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(on_disk("writing", path))
}

/// What was renamed in a folder is there after a power cut only if the folder was synced.
fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(on_disk("syncing", path))
}
