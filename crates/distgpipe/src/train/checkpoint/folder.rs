//! A folder of checkpoints: writes them so that a kill at any moment leaves the previous one intact, and removes old ones.

use super::disk_watch::DiskWatch;
use super::{
    checksum, on_disk, own_rule, Checkpoint, CheckpointError, FileDigest, Manifest, CHECKSUM, FORMAT, MANIFEST, MODEL,
    OPTIMIZER,
};
use crate::driver::pipeline::{Pipeline, StepError};
use crate::failure::{Failure, Fault};
use crate::files::{create_fresh, create_private_directory, missing_directories, open_regular, remove_empty};
use crate::model::layer::{Role, TensorSpec};
use crate::train::weights::{Entry, SafetensorsWriter, WeightsError};
use crate::train::Progress;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use tch::Tensor;

/// The file that a run locks.
const LOCK: &str = "lock";
/// Suffix of a checkpoint that is being written.
const PARTIAL: &str = ".partial";
/// The file with the name of the best checkpoint.
const BEST: &str = "best";
/// The longest content of that file that is read.
const BEST_BYTES_MAX: u64 = 64;
/// Suffix of a checkpoint that another one of the same step replaces.
const OLD: &str = ".old";

/// How often [`newest_in`] looks at a folder that changes.
const LISTINGS_MAX: usize = 100;

/// What `open` returns for the newest checkpoint of a folder for which it succeeds, and its errors for newer ones. Another run
/// may write into the folder and remove old checkpoints meanwhile: when the list of checkpoints has changed, an error counts for
/// nothing, and the search starts again.
pub fn newest_in<T>(
    directory: &Path,
    mut open: impl FnMut(&Path) -> Result<T, CheckpointError>,
) -> Result<(Option<T>, Vec<CheckpointError>), CheckpointError> {
    let (mut steps, mut listings) = (steps_in(directory)?, 1);
    let (mut damaged, mut next) = (Vec::new(), 0);
    while let Some(&step) = steps.get(next) {
        match open(&directory.join(name_of(step))) {
            Ok(opened) => return Ok((Some(opened), damaged)),
            Err(error) => damaged.push(error),
        }
        next += 1;
        let now = steps_in(directory)?;
        if now != steps && listings < LISTINGS_MAX {
            (steps, listings) = (now, listings + 1);
            (damaged, next) = (Vec::new(), 0);
        }
    }
    Ok((None, damaged))
}

/// The steps of the checkpoints in a folder, the newest first.
fn steps_in(directory: &Path) -> Result<Vec<u64>, CheckpointError> {
    let mut steps: Vec<u64> = file_names(directory)?.iter().filter_map(|name| step_of(name)).collect();
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// A folder of checkpoints that only this process writes into. If it was created by [`open`](Self::open) and nothing was
/// saved, dropping this value removes it.
#[derive(Debug)]
pub struct Checkpoints {
    directory: PathBuf,
    keep: usize,
    created: Created,
    /// Whether nothing was saved.
    empty: AtomicBool,
    /// The system releases the lock when the process ends, however it ends.
    _lock: File,
}

/// What [`Checkpoints::open`] created, of which nothing is needed if nothing is saved.
#[derive(Clone, Debug)]
pub struct Created {
    /// The file that is locked, unless an earlier run left it.
    lock: Option<PathBuf>,
    /// The folders, the innermost first.
    folders: Vec<PathBuf>,
}

impl Created {
    /// Removes it all. A folder that has got other content stays.
    pub fn remove(&self) {
        self.lock.iter().for_each(|lock| drop(fs::remove_file(lock)));
        remove_empty(&self.folders);
    }
}

impl Checkpoints {
    /// Creates the folder if it does not exist, locks it, and removes incomplete checkpoints of a killed run.
    /// [`save`](Self::save) keeps the newest `keep` checkpoints, at least one.
    pub fn open(directory: &Path, keep: usize) -> Result<Self, CheckpointError> {
        let folders = missing_directories(directory);
        create_private_directory(directory).map_err(on_disk("creating", directory))?;
        let path = directory.join(LOCK);
        let created = Created { lock: (!path.exists()).then(|| path.clone()), folders };
        let lock = File::options().create(true).append(true).open(&path).map_err(on_disk("opening", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::Busy { directory: directory.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(on_disk("locking", &path)(source)),
        }
        for name in file_names(directory)? {
            let (path, hidden) = (directory.join(&name), name.strip_prefix('.'));
            if let Some(step) = hidden.and_then(|name| step_of(name.strip_suffix(OLD)?)) {
                // The run was killed while it replaced this checkpoint.
                let replacement = directory.join(name_of(step));
                match replacement.exists() {
                    true => remove_if_there(&path)?,
                    false => fs::rename(&path, &replacement).map_err(on_disk("moving", &path))?,
                }
            } else if hidden.and_then(|name| step_of(name.strip_suffix(PARTIAL)?)).is_some() {
                remove_if_there(&path)?;
            }
        }
        let empty = AtomicBool::new(true);
        Ok(Checkpoints { directory: directory.to_owned(), keep: keep.max(1), created, empty, _lock: lock })
    }

    /// Changes how many checkpoints [`save`](Self::save) keeps, at least one.
    pub fn set_keep(&mut self, keep: usize) {
        self.keep = keep.max(1);
    }

    /// What [`open`](Self::open) created. A process that ends without dropping this value can remove it, if it has saved
    /// nothing.
    pub fn created(&self) -> Created {
        self.created.clone()
    }

    /// The path of the folder.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The steps of the checkpoints in the folder, the newest first.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        steps_in(&self.directory)
    }

    /// The newest checkpoint that is intact, and the errors of newer ones.
    pub fn newest(&self) -> Result<(Option<Checkpoint>, Vec<CheckpointError>), CheckpointError> {
        newest_in(&self.directory, Checkpoint::open)
    }

    /// The best checkpoint, which a run with [`TrainOptions::best`](crate::TrainOptions::best) has marked.
    pub fn best(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        self.best_step()?.map(|step| Checkpoint::open(&self.path(step))).transpose()
    }

    /// The step of the best checkpoint.
    fn best_step(&self) -> Result<Option<u64>, CheckpointError> {
        let (path, mut text) = (self.directory.join(BEST), String::new());
        let file = match open_regular(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(on_disk("opening", &path))?,
        };
        file.take(BEST_BYTES_MAX).read_to_string(&mut text).map_err(on_disk("reading", &path))?;
        step_of(text.trim()).map(Some).ok_or_else(|| CheckpointError::Corrupt {
            path,
            expected: format!("the name of a checkpoint, such as {}", name_of(120)),
            got: format!("`{}`", text.trim().escape_debug()),
        })
    }

    /// The same. A mark that names no checkpoint protects none, so it is removed.
    fn best_step_or_unmark(&self) -> Result<Option<u64>, CheckpointError> {
        match self.best_step() {
            Err(CheckpointError::Corrupt { .. }) => self.unmark_best().map(|()| None),
            other => other,
        }
    }

    /// Marks a checkpoint as the best, so that it is kept, and removes the one that was the best before if it is beyond
    /// those to keep.
    pub fn mark_best(&self, step: u64) -> Result<(), CheckpointError> {
        let (path, partial) = (self.directory.join(BEST), self.directory.join(format!(".{BEST}{PARTIAL}")));
        let mut file = create_fresh(&partial).map_err(on_disk("creating", &partial))?;
        let written = writeln!(file, "{}", name_of(step)).and_then(|()| file.sync_all());
        written.map_err(on_disk("writing", &partial))?;
        fs::rename(&partial, &path).map_err(on_disk("renaming", &path))?;
        sync_directory(&self.directory)?;
        self.prune(step)
    }

    /// Removes the mark of the best checkpoint, but not the checkpoint.
    pub fn unmark_best(&self) -> Result<(), CheckpointError> {
        let path = self.directory.join(BEST);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(on_disk("removing", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Removes the oldest checkpoints beyond those to keep, of which `newest` is one. The best one stays.
    fn prune(&self, newest: u64) -> Result<(), CheckpointError> {
        let best = self.best_step_or_unmark()?;
        let beyond = self.steps()?.into_iter().filter(|&step| step <= newest).skip(self.keep);
        for step in beyond.filter(|step| Some(*step) != best) {
            remove_if_there(&self.path(step))?;
        }
        Ok(())
    }

    /// Renames the checkpoints of later steps to `unused-…`. A run that resumes from an earlier one reaches these steps
    /// again, and must not count them among those it keeps.
    pub fn retire_after(&self, step: u64) -> Result<(), CheckpointError> {
        for later in self.steps()?.into_iter().filter(|&later| later > step) {
            let (path, aside) = (self.path(later), self.directory.join(format!("unused-{}", name_of(later))));
            remove_if_there(&aside)?;
            fs::rename(&path, &aside).map_err(on_disk("moving", &path))?;
        }
        if self.best_step_or_unmark()?.is_some_and(|best| best > step) {
            self.unmark_best()?;
        }
        Ok(())
    }

    /// Saves a pipeline and the progress of its run, then removes the oldest checkpoints beyond those to keep, except for
    /// the [best](Self::best). Resets the pipeline's codecs; see [`Pipeline::reset_codecs`]. Returns the checkpoint's folder.
    ///
    /// Fails without harm to earlier checkpoints if a parameter is not finite, or if an update is in progress.
    pub fn save(
        &self,
        pipeline: &mut Pipeline,
        progress: &Progress,
        settings: &serde_json::Value,
    ) -> Result<PathBuf, CheckpointError> {
        if pipeline.in_update() {
            return Err(CheckpointError::InUpdate);
        }
        pipeline.reset_codecs()?;
        let partial = self.directory.join(format!(".{}{PARTIAL}", name_of(progress.step)));
        let watch = DiskWatch::start(&self.directory, pipeline.notify());
        watch.disk(|| remove_if_there(&partial))?;
        let written = write_checkpoint(&partial, pipeline, progress, settings, &watch)
            .and_then(|()| watch.disk(|| self.publish(&partial, progress.step)));
        if written.is_err() {
            // The disk may be full: its space is needed now. The error that counts is the first one.
            let _ = watch.disk(|| fs::remove_dir_all(&partial));
        }
        let path = written?;
        self.empty.store(false, Ordering::Relaxed);
        watch.disk(|| self.prune(progress.step))?;
        Ok(path)
    }

    /// Replaces the progress in the checkpoint of the same step, if there is one.
    pub(in crate::train) fn replace_progress(&self, progress: &Progress) -> Result<(), CheckpointError> {
        let path = self.path(progress.step).join(MANIFEST);
        if !path.exists() {
            return Ok(());
        }
        let partial = path.with_extension("json.partial");
        let manifest = Manifest { progress: progress.clone(), ..Manifest::read(&path)? };
        let written = write_manifest(&partial, &manifest)
            .and_then(|()| fs::rename(&partial, &path).map_err(on_disk("renaming", &path)));
        if written.is_err() {
            let _ = fs::remove_file(&partial);
        }
        written
    }

    /// Gives a complete checkpoint its name. One of the same step, which may be corrupt, is replaced.
    fn publish(&self, partial: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
        let (path, old) = (self.path(step), self.directory.join(format!(".{}{OLD}", name_of(step))));
        if path.exists() {
            remove_if_there(&old)?;
            fs::rename(&path, &old).map_err(on_disk("moving", &path))?;
        }
        fs::rename(partial, &path).map_err(on_disk("renaming", &path))?;
        sync_directory(&self.directory)?;
        remove_if_there(&old)?;
        Ok(path)
    }

    fn path(&self, step: u64) -> PathBuf {
        self.directory.join(name_of(step))
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        if self.empty.load(Ordering::Relaxed) {
            self.created.remove();
        }
    }
}

/// Writes all files of a checkpoint into a new folder, and syncs them.
fn write_checkpoint(
    folder: &Path,
    pipeline: &mut Pipeline,
    progress: &Progress,
    settings: &serde_json::Value,
    watch: &DiskWatch,
) -> Result<(), CheckpointError> {
    watch.disk(|| DirBuilder::new().mode(0o700).create(folder)).map_err(on_disk("creating", folder))?;
    write_tensors(folder, pipeline, watch)?;
    watch.disk(|| {
        let manifest = manifest(folder, pipeline, progress, settings)?;
        write_manifest(&folder.join(MANIFEST), &manifest)?;
        sync_directory(folder)
    })
}

/// Writes the model's and the optimizer's tensors. The time for which the workers send them is not the disk's.
fn write_tensors(folder: &Path, pipeline: &mut Pipeline, watch: &DiskWatch) -> Result<(), CheckpointError> {
    let specs = pipeline.state_specs();
    let parameters: BTreeSet<&str> =
        specs.iter().filter(|spec| spec.role == Role::Parameter).map(|spec| &spec.name[..]).collect();
    let mut model = watch.disk(|| writer(&folder.join(MODEL), &specs))?;
    pipeline.state_each(|name, tensor| {
        if parameters.contains(name) && !is_finite(&tensor).map_err(StepError::from)? {
            return Err(CheckpointError::NotFinite { name: name.to_owned() });
        }
        Ok(watch.disk(|| model.write(&tensor))?)
    })?;
    watch.disk(|| model.finish())?;
    let mut optimizer = watch.disk(|| writer(&folder.join(OPTIMIZER), &pipeline.optimizer_specs()))?;
    pipeline.optimizer_each(|_, tensor| watch.disk(|| optimizer.write(&tensor)).map_err(CheckpointError::from))?;
    Ok(watch.disk(|| optimizer.finish())?)
}

/// The manifest of a checkpoint whose other files are written.
fn manifest(
    folder: &Path,
    pipeline: &Pipeline,
    progress: &Progress,
    settings: &serde_json::Value,
) -> Result<Manifest, CheckpointError> {
    let digest = |name: &str| Ok((name.to_owned(), FileDigest::of(&folder.join(name))?));
    Ok(Manifest {
        format: FORMAT,
        model: pipeline.model().spec.clone(),
        seed: pipeline.seed(),
        optim: pipeline.optim(),
        groups: pipeline.parameter_groups().to_vec(),
        frozen: pipeline.frozen().to_vec(),
        update_rule: own_rule(pipeline),
        batches_trained: pipeline.batches_trained(),
        progress: progress.clone(),
        settings: settings.clone(),
        files: [MODEL, OPTIMIZER].into_iter().map(digest).collect::<Result<_, CheckpointError>>()?,
    })
}

fn write_manifest(path: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    let mut manifest = serde_json::to_value(manifest).map_err(|e| on_disk("writing", path)(e.into()))?;
    manifest[CHECKSUM] = checksum(&manifest).into();
    write_durably(path, &manifest)
}

fn writer(path: &Path, specs: &[TensorSpec]) -> Result<SafetensorsWriter, WeightsError> {
    let entries = specs.iter().map(|spec| Entry::new(&spec.name, spec.kind, &spec.dims)).collect();
    SafetensorsWriter::create_private(path, entries)
}

fn is_finite(tensor: &Tensor) -> Result<bool, Failure> {
    let finite = || -> Result<bool, Fault> { Ok(i64::try_from(tensor.f_isfinite()?.f_all()?)? != 0) };
    finite().map_err(|fault| Failure::new("the driver", "saving a checkpoint", fault))
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-").filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
}

fn file_names(directory: &Path) -> Result<Vec<String>, CheckpointError> {
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
    let mut file = create_fresh(path).map_err(on_disk("creating", path))?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(on_disk("writing", path))
}

/// A rename inside a folder survives a power cut only once the folder is synced.
fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(on_disk("syncing", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str, steps: &[u64]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("distgpipe-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        steps.iter().for_each(|&step| fs::create_dir_all(root.join(name_of(step))).unwrap());
        root
    }

    fn damaged(path: &Path) -> CheckpointError {
        CheckpointError::Corrupt { path: path.to_owned(), expected: String::new(), got: String::new() }
    }

    /// Opens whatever exists, except for these steps.
    fn open_except(path: &Path, bad: &[u64]) -> Result<u64, CheckpointError> {
        fs::read_dir(path).map_err(on_disk("opening", path))?;
        let step = step_of(path.file_name().unwrap().to_str().unwrap()).unwrap();
        if bad.contains(&step) {
            return Err(damaged(path));
        }
        Ok(step)
    }

    #[test]
    fn the_newest_intact_checkpoint_is_found_and_the_newer_ones_are_named() {
        let root = folder("newest", &[10, 20, 30]);
        let (found, damaged) = newest_in(&root, |path| open_except(path, &[30])).unwrap();
        assert_eq!((found, damaged.len()), (Some(20), 1));
        let (found, damaged) = newest_in(&root, |path| open_except(path, &[10, 20, 30])).unwrap();
        assert_eq!((found, damaged.len()), (None, 3));
        fs::remove_dir_all(root).unwrap();
    }

    /// A run that goes on removes old checkpoints while another program looks for the newest.
    #[test]
    fn a_checkpoint_that_is_removed_meanwhile_is_not_damaged() {
        for in_part in [false, true] {
            let root = folder("removed", &[10]);
            let mut written = 10;
            let found = newest_in(&root, |path| {
                if written < 40 {
                    fs::create_dir(root.join(name_of(written + 10))).unwrap();
                    // Its files are gone, and the folder is not yet.
                    if in_part && written == 30 {
                        written += 10;
                        return Err(damaged(path));
                    }
                    fs::remove_dir_all(root.join(name_of(written))).unwrap();
                    written += 10;
                }
                open_except(path, &[])
            });
            let (found, damaged) = found.unwrap();
            assert_eq!((found, damaged.len()), (Some(40), 0), "{in_part}");
            fs::remove_dir_all(root).unwrap();
        }
    }
}
