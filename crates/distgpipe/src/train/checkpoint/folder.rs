//! A folder of checkpoints: writes them so that a kill at any moment leaves the previous one intact, and removes old ones.

use super::disk::{Answers, Disk};
use super::manifest::{FileDigest, Manifest, MANIFEST};
use super::{on_disk, Checkpoint, CheckpointError, MODEL, OPTIMIZER};
use crate::driver::pipeline::{Pipeline, StepError};
use crate::engine;
use crate::failure::{Failure, Fault};
use crate::files::{create_fresh, create_private_directory, missing_directories, open_regular, remove_empty};
use crate::model::layer::{Role, TensorSpec};
use crate::train::weights::{Entry, SafetensorsWriter};
use crate::train::Progress;
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
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
    folder: Folder,
    created: Created,
    /// Whether nothing was saved.
    empty: AtomicBool,
    /// Has the lock, which the system releases when the process ends, however it ends.
    disk: Disk,
}

/// The operations on the folder that the thread of [`Disk`] performs.
#[derive(Clone, Debug)]
struct Folder {
    directory: PathBuf,
    keep: usize,
    answers: Answers,
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
        let disk = Disk::new(directory, lock);
        let folder = Folder { directory: directory.to_owned(), keep: keep.max(1), answers: disk.answers.clone() };
        Ok(Checkpoints { folder, created, empty, disk })
    }

    /// Changes how many checkpoints [`save`](Self::save) keeps, at least one.
    pub fn set_keep(&mut self, keep: usize) {
        self.folder.keep = keep.max(1);
    }

    /// What [`open`](Self::open) created. A process that ends without dropping this value can remove it, if it has saved
    /// nothing.
    pub fn created(&self) -> Created {
        self.created.clone()
    }

    /// The path of the folder.
    pub fn directory(&self) -> &Path {
        &self.folder.directory
    }

    /// The steps of the checkpoints in the folder, the newest first.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        self.folder.steps()
    }

    /// The newest checkpoint that is intact, and the errors of newer ones.
    pub fn newest(&self) -> Result<(Option<Checkpoint>, Vec<CheckpointError>), CheckpointError> {
        newest_in(self.directory(), Checkpoint::open)
    }

    /// The best checkpoint, which a run with [`TrainOptions::best`](crate::TrainOptions::best) has marked.
    pub fn best(&self) -> Result<Option<Checkpoint>, CheckpointError> {
        self.folder.best_step()?.map(|step| Checkpoint::open(&self.folder.path(step))).transpose()
    }

    /// Marks a checkpoint as the best, so that it is kept, and removes the one that was the best before if it is beyond
    /// those to keep.
    pub fn mark_best(&self, step: u64) -> Result<(), CheckpointError> {
        self.perform(move |folder| folder.mark_best(step))
    }

    /// Removes the mark of the best checkpoint, but not the checkpoint.
    pub fn unmark_best(&self) -> Result<(), CheckpointError> {
        self.perform(Folder::unmark_best)
    }

    /// Renames the checkpoints of later steps to `unused-…`. A run that resumes from an earlier one reaches these steps
    /// again, and must not count them among those it keeps.
    pub fn retire_after(&self, step: u64) -> Result<(), CheckpointError> {
        self.perform(move |folder| folder.retire_after(step))
    }

    /// Replaces the progress in the checkpoint of the same step, if there is one.
    pub(in crate::train) fn replace_progress(&self, progress: &Progress) -> Result<(), CheckpointError> {
        let progress = progress.clone();
        self.perform(move |folder| folder.replace_progress(progress))
    }

    /// Saves a pipeline and the progress of its run, then removes the oldest checkpoints beyond those to keep, except for
    /// the [best](Self::best). Resets the pipeline's codecs; see [`Pipeline::reset_codecs`]. Returns the checkpoint's folder.
    ///
    /// Fails without harm to earlier checkpoints if a parameter is not finite, if an update is in progress, or if the disk does not
    /// answer for 30 s.
    pub fn save(
        &self,
        pipeline: &mut Pipeline,
        progress: &Progress,
        settings: &serde_json::Value,
    ) -> Result<PathBuf, CheckpointError> {
        if pipeline.in_update() {
            return Err(CheckpointError::InUpdate);
        }
        self.disk.check()?;
        pipeline.reset_codecs()?;
        self.disk.set_notify(pipeline.notify());
        let step = progress.step;
        let attempt = Attempt { checkpoints: self, partial: self.folder.partial(step) };
        let saved = attempt.write(pipeline, progress, settings);
        let saved = saved.and_then(|()| attempt.perform(move |folder, partial| folder.publish(partial, step)));
        if saved.is_err() {
            // The disk may be full: its space is needed now. The error that counts is the first one. If the operation was given up,
            // this fails at once.
            let _ = attempt.perform(|_, partial| remove_if_there(partial));
        }
        let path = saved?;
        self.empty.store(false, Ordering::Relaxed);
        match self.perform(move |folder| folder.prune(step)) {
            // The checkpoint is there, and those that are beyond it go when the disk answers.
            Err(CheckpointError::DiskStalled { .. }) => Ok(path),
            pruned => pruned.map(|()| path),
        }
    }

    /// Waits for a disk that has not answered, but not for long.
    pub(in crate::train) fn wait_for_disk(&self) {
        self.disk.wait();
    }

    /// For how long the disk may not answer before a checkpoint is given up.
    pub(in crate::train) fn disk_limit(&self) -> Duration {
        self.disk.limit
    }

    /// Performs an operation on the folder, on the thread for it.
    fn perform<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&Folder) -> Result<T, CheckpointError> + Send + 'static,
    ) -> Result<T, CheckpointError> {
        let folder = self.folder.clone();
        self.disk.perform(None, move || operation(&folder))
    }
}

impl Folder {
    /// The steps of the checkpoints in the folder, the newest first.
    fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        steps_in(&self.directory)
    }

    /// The step of the best checkpoint.
    fn best_step(&self) -> Result<Option<u64>, CheckpointError> {
        let (path, mut text) = (self.directory.join(BEST), Vec::new());
        let file = match open_regular(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(on_disk("opening", &path))?,
        };
        file.take(BEST_BYTES_MAX).read_to_end(&mut text).map_err(on_disk("reading", &path))?;
        let text = String::from_utf8_lossy(&text);
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

    fn mark_best(&self, step: u64) -> Result<(), CheckpointError> {
        let (path, partial) = (self.directory.join(BEST), self.directory.join(format!(".{BEST}{PARTIAL}")));
        let mut file = create_fresh(&partial).map_err(on_disk("creating", &partial))?;
        let written = writeln!(file, "{}", name_of(step)).and_then(|()| file.sync_all());
        written.map_err(on_disk("writing", &partial))?;
        fs::rename(&partial, &path).map_err(on_disk("renaming", &path))?;
        sync_directory(&self.directory)?;
        self.prune(step)
    }

    fn unmark_best(&self) -> Result<(), CheckpointError> {
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
            self.remove(&self.path(step))?;
        }
        Ok(())
    }

    /// Removes a checkpoint file by file: a large one may take a disk long.
    fn remove(&self, path: &Path) -> Result<(), CheckpointError> {
        for name in file_names(path).unwrap_or_default() {
            if fs::remove_file(path.join(name)).is_ok() {
                self.answers.add();
            }
        }
        remove_if_there(path)
    }

    fn retire_after(&self, step: u64) -> Result<(), CheckpointError> {
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

    fn replace_progress(&self, progress: Progress) -> Result<(), CheckpointError> {
        let path = self.path(progress.step).join(MANIFEST);
        if !path.exists() {
            return Ok(());
        }
        let partial = path.with_extension("json.partial");
        let mut manifest = Manifest::read(&path, || self.answers.add())?;
        manifest.progress = progress;
        let written = manifest
            .write(&partial, || self.answers.add())
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

    /// Where the checkpoint of a step is written.
    fn partial(&self, step: u64) -> PathBuf {
        self.directory.join(format!(".{}{PARTIAL}", name_of(step)))
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        // Whatever is written to a disk that does not answer waits for it.
        if self.empty.load(Ordering::Relaxed) && !self.disk.is_stuck() {
            self.created.remove();
        }
    }
}

/// A checkpoint that is being written.
struct Attempt<'a> {
    checkpoints: &'a Checkpoints,
    /// The folder that becomes the checkpoint.
    partial: PathBuf,
}

impl Attempt<'_> {
    /// Performs an operation on the folder of checkpoints and that of this one. If it is given up, this one's is removed.
    fn perform<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&Folder, &Path) -> Result<T, CheckpointError> + Send + 'static,
    ) -> Result<T, CheckpointError> {
        let (folder, partial) = (self.checkpoints.folder.clone(), self.partial.clone());
        self.checkpoints.disk.perform(Some(&self.partial), move || operation(&folder, &partial))
    }

    /// Writes all files of the checkpoint, and syncs them.
    fn write(
        &self,
        pipeline: &mut Pipeline,
        progress: &Progress,
        settings: &serde_json::Value,
    ) -> Result<(), CheckpointError> {
        let mut manifest = Manifest::new(pipeline, progress, settings);
        manifest.check_readable()?;
        self.perform(|_, partial| {
            remove_if_there(partial)?;
            DirBuilder::new().mode(0o700).create(partial).map_err(on_disk("creating", partial))
        })?;
        let specs = pipeline.state_specs();
        let parameters: BTreeSet<String> =
            specs.iter().filter(|spec| spec.role == Role::Parameter).map(|spec| spec.name.clone()).collect();
        let mut model = TensorsWriter::create(self, MODEL, &specs)?;
        // The time for which the workers send tensors is not the disk's.
        pipeline.state_each(|name, tensor| {
            if parameters.contains(name) && !is_finite(&tensor)? {
                return Err(CheckpointError::NotFinite { name: name.to_owned() });
            }
            model.write(&tensor)
        })?;
        model.finish()?;
        let mut optimizer = TensorsWriter::create(self, OPTIMIZER, &pipeline.optimizer_specs())?;
        pipeline.optimizer_each(|_, tensor| optimizer.write(&tensor))?;
        optimizer.finish()?;
        let answers = self.checkpoints.disk.answers.clone();
        self.perform(move |_, partial| {
            let digest = |name: &str| Ok((name.to_owned(), FileDigest::of(&partial.join(name), || answers.add())?));
            manifest.files = [MODEL, OPTIMIZER].into_iter().map(digest).collect::<Result<_, CheckpointError>>()?;
            manifest.write(&partial.join(MANIFEST), || answers.add())?;
            sync_directory(partial)
        })
    }
}

/// Writes a file of tensors, on the thread of [`Disk`].
struct TensorsWriter<'a> {
    attempt: &'a Attempt<'a>,
    /// The thread has it while it writes, and drops it after an error, which ends the attempt.
    writer: Option<SafetensorsWriter>,
}

impl<'a> TensorsWriter<'a> {
    fn create(attempt: &'a Attempt<'a>, file: &'static str, specs: &[TensorSpec]) -> Result<Self, CheckpointError> {
        let entries = specs.iter().map(|spec| Entry::new(&spec.name, spec.kind, &spec.dims)).collect();
        let answers = attempt.checkpoints.disk.answers.clone();
        let create = move |_: &Folder, partial: &Path| {
            Ok(SafetensorsWriter::create_private(&partial.join(file), entries, move || answers.add())?)
        };
        Ok(TensorsWriter { attempt, writer: Some(attempt.perform(create)?) })
    }

    fn write(&mut self, tensor: &Tensor) -> Result<(), CheckpointError> {
        let tensor = engine::on_host(tensor).map_err(failed_here)?;
        let mut writer = self.writer.take();
        self.writer = self.attempt.perform(move |_, _| {
            writer.iter_mut().try_for_each(|writer| writer.write(&tensor))?;
            Ok(writer)
        })?;
        Ok(())
    }

    fn finish(self) -> Result<(), CheckpointError> {
        self.attempt.perform(move |_, _| Ok(self.writer.map_or(Ok(()), SafetensorsWriter::finish)?))
    }
}

fn is_finite(tensor: &Tensor) -> Result<bool, CheckpointError> {
    let finite = || -> Result<bool, Fault> { Ok(i64::try_from(tensor.f_isfinite()?.f_all()?)? != 0) };
    finite().map_err(failed_here)
}

/// The error of an operation on a tensor.
fn failed_here(fault: Fault) -> CheckpointError {
    StepError::from(Failure::new("the driver", "saving a checkpoint", fault)).into()
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

/// A rename inside a folder survives a power cut only once the folder is synced.
fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(on_disk("syncing", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Digits, Loader, LoaderOptions, Split};
    use crate::model::zoo::Mlp;
    use crate::train::{Event, SaveEvery, TrainError, TrainOptions, Trainer};
    use std::sync::Arc;

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

    /// Trains 40 steps with a checkpoint every 4. From the 6th step on, the disk performs `operations` more until step 30 is over, if it
    /// works again at all. Returns the final state, and what was saved or not.
    fn train(name: &str, operations: Option<usize>, works_again: bool) -> (Result<Vec<u8>, TrainError>, Vec<String>) {
        let root = folder(name, &[]);
        let mut checkpoints = Checkpoints::open(&root, 2).unwrap();
        if operations.is_some() {
            checkpoints.disk.limit = Duration::from_secs(1);
        }
        let limit = checkpoints.disk.limit;
        let gate = checkpoints.disk.gate.clone();
        let mut pipeline = Pipeline::builder(Mlp { hidden: vec![8], ..Mlp::default() }.model().unwrap())
            .device(crate::Device::Cpu)
            .threads(1)
            .place("a,b")
            .build()
            .unwrap();
        let digits = Digits::new(Split::Train, Default::default()).unwrap();
        let loader = Loader::new(Arc::new(digits), LoaderOptions::training(64, 0)).unwrap();
        let options = TrainOptions { epochs: 9, steps_max: Some(40), save_failures_max: 50, ..TrainOptions::default() };
        let trainer = Trainer::new(&mut pipeline, loader, None, options).unwrap();
        let trainer = trainer.save_to(&checkpoints, SaveEvery::Steps(4), serde_json::Value::Null);
        let (mut seen, mut frozen) = (Vec::new(), None);
        let trained = trainer.run(|event, _| {
            match event {
                Event::StepDone(done) if operations.is_some() => match done.step {
                    5 => {
                        gate.skip.store(operations.unwrap_or_default(), Ordering::SeqCst);
                        frozen = Some(gate.lock());
                    }
                    20 => std::thread::sleep(limit),
                    30 if works_again => {
                        frozen = None;
                        while checkpoints.disk.is_stuck() {
                            std::thread::sleep(limit);
                        }
                        std::thread::sleep(limit);
                    }
                    _ => {}
                },
                Event::Saved { step, .. } => seen.push(format!("saved {step}")),
                Event::SaveFailed { step, error, .. } => {
                    let CheckpointError::DiskStalled { earlier, .. } = error else { panic!("{error}") };
                    seen.push(format!("{} {step}", if *earlier { "still stalled" } else { "stalled" }));
                }
                _ => {}
            }
            Ok(())
        });
        let state = trained.map(|_| {
            let state = pipeline.state().unwrap();
            state.values().flat_map(|tensor| engine::bytes(&tensor.contiguous()).unwrap().to_vec()).collect()
        });
        drop(frozen);
        while checkpoints.disk.is_stuck() {
            std::thread::sleep(limit);
        }
        let left = file_names(&root).unwrap();
        assert!(!left.iter().any(|name| name.ends_with(PARTIAL)), "{left:?}");
        drop(checkpoints);
        fs::remove_dir_all(root).unwrap();
        (state, seen)
    }

    /// Training once waited for such a disk without an end.
    #[test]
    fn a_disk_that_does_not_answer_delays_a_checkpoint_and_not_the_run() {
        let (undisturbed, all) = train("undisturbed", None, true);
        let undisturbed = undisturbed.unwrap();
        assert_eq!(all.len(), 10, "{all:?}");
        // It stalls before the folder is there, in the middle of the model's tensors, and of the optimizer's.
        for operations in [0, 4, 9] {
            let (state, seen) = train(&format!("stalled-{operations}"), Some(operations), true);
            assert!(state.unwrap() == undisturbed, "other weights");
            assert_eq!(seen[..2], ["saved 4", "stalled 8"], "{operations}");
            assert!(seen.iter().any(|line| line.starts_with("still stalled")), "{operations}: {seen:?}");
            let saved: Vec<&str> = seen.iter().filter_map(|line| line.strip_prefix("saved ")).collect();
            // Steps 9 to 30 were made meanwhile.
            assert!(saved[0] == "4" && saved[1].parse::<u64>().unwrap() >= 31, "{operations}: {seen:?}");
            assert_eq!(saved.last(), Some(&"40"), "{operations}");
        }
    }

    #[test]
    fn a_run_whose_last_checkpoint_cannot_be_written_ends_although_the_disk_does_not_answer() {
        let (ended, seen) = train("last", Some(0), false);
        let Err(TrainError::Checkpoint(CheckpointError::DiskStalled { earlier: true, .. })) = ended else {
            panic!("{seen:?}");
        };
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
