//! The flags of checkpoints: where a run is saved, and what it resumes from.

use crate::args::{with_value, CodecChoice, DataName, ResumeName, TrainFlags};
use crate::exit::usage;
use crate::files::answer_of_disk;
use crate::report::note;
use crate::signals;
use anyhow::Context;
use distgpipe::engine::Device;
use distgpipe::train::checkpoint::{newest_in, Checkpoint, Checkpoints};
use distgpipe::train::{RunEnd, SaveEvery, TrainOptions};
use distgpipe::{Model, Optim, ParameterGroup};
use std::path::Path;

/// The default of `--keep`.
const KEEP: usize = 2;

/// Flags that decide which rows are in which step, and so cannot change when a run resumes.
const DATA: [&str; 5] = ["data", "limit", "samples", "batch", "accumulate"];

/// Flags that say what to resume from, not how to train.
const WHERE_FROM: [&str; 2] = ["resume", "checkpoint"];

/// Where a run saves its checkpoints.
pub struct CheckpointConfig {
    /// The directory, locked against other runs.
    pub checkpoints: Checkpoints,
    /// When checkpoints are written.
    pub every: SaveEvery,
    /// The checkpoint to resume from.
    pub from: Option<Checkpoint>,
    /// Whether `--resume` was given, even if there was no checkpoint.
    pub resumes: bool,
    /// The flags that differ from those of the checkpoint.
    changed: Vec<Change>,
    flags: TrainFlags,
}

/// A flag that differs from that of the checkpoint.
struct Change {
    /// The flag's name, without dashes.
    name: String,
    /// Both values, for the user.
    text: String,
}

impl CheckpointConfig {
    /// Opens the directory that `--checkpoint` names. Also returns the flags to run with: those of the checkpoint to resume from,
    /// overridden by `given`; or `otherwise`, if the run does not resume.
    pub fn open(given: &TrainFlags, otherwise: &TrainFlags) -> anyhow::Result<(Option<Self>, TrainFlags)> {
        let Some(directory) = &given.checkpoint else {
            check_without_directory(given)?;
            return Ok((None, otherwise.clone()));
        };
        let flag = || format!("--checkpoint {}", directory.display());
        if matches!(given.resume, Some(ResumeName::Newest | ResumeName::Best)) && !directory.is_dir() {
            return Err(usage(format!("{}: no such directory: check the name, or start without --resume", flag())));
        }
        if let Some(parent) = directory.parent().filter(|_| Checkpoint::is_at(directory)) {
            return Err(usage(format!(
                "{}: this is a single checkpoint: name the directory that it is in, --checkpoint {}",
                flag(),
                parent.display()
            )));
        }
        let mut checkpoints = Checkpoints::open(directory, KEEP).with_context(flag)?;
        let created = checkpoints.created();
        signals::if_nothing_saved(move || created.remove());
        let (newest, damaged) = match given.resume {
            Some(ResumeName::Best) => (checkpoints.best().with_context(flag)?, Vec::new()),
            _ => checkpoints.newest().with_context(flag)?,
        };
        for error in &damaged {
            note(&format!("warning: skipping a damaged checkpoint: {error}"));
        }
        let (from, (mut flags, changed)) = match (given.resume, newest) {
            (None, None) if damaged.is_empty() => (None, (otherwise.clone(), Vec::new())),
            (None, Some(_)) => {
                return Err(usage(format!(
                    "{}: the directory already has checkpoints: add --resume to continue from the newest, or choose another directory",
                    flag()
                )));
            }
            (Some(_), Some(checkpoint)) => {
                let resumed = resumed(&checkpoint, given)?;
                (Some(checkpoint), resumed)
            }
            (Some(ResumeName::IfAny), None) if damaged.is_empty() => (None, (otherwise.clone(), Vec::new())),
            (Some(ResumeName::Best), None) => {
                return Err(usage(format!(
                    "{}: no checkpoint is marked as the best: use --resume, and --save-best METRIC to mark one",
                    flag()
                )));
            }
            (Some(_), None) if damaged.is_empty() => {
                return Err(usage(format!(
                    "{}: there is no checkpoint to resume from: start without --resume",
                    flag()
                )));
            }
            (_, None) => {
                return Err(usage(format!(
                    "{}: none of its checkpoints can be used, for the reasons above: repair one, or choose another directory",
                    flag()
                )));
            }
        };
        flags.resume = None;
        match flags.keep {
            Some(0) => return Err(usage("--keep 0: the newest checkpoint is always kept: use 1 or more")),
            keep => checkpoints.set_keep(keep.unwrap_or(KEEP)),
        }
        let every = match flags.checkpoint_every {
            Some(0) => return Err(usage("--checkpoint-every 0: use 1 step or more, or leave it out for every epoch")),
            Some(steps) => SaveEvery::Steps(steps),
            None => SaveEvery::Epoch,
        };
        let resumes = given.resume.is_some();
        Ok((Some(CheckpointConfig { checkpoints, every, from, resumes, changed, flags: flags.clone() }), flags))
    }

    /// The checkpoint to resume from and how its run ended, if that run has nothing left to do.
    pub fn ended(&self, options: &TrainOptions) -> Option<(&Checkpoint, RunEnd)> {
        let checkpoint = self.from.as_ref()?;
        Some((checkpoint, checkpoint.manifest().progress.end(options)?))
    }

    /// Checks that the run to resume has this model, seed and optimizer. The error names the flag that changed.
    pub fn check_same(
        &self,
        model: &Model,
        seed: u64,
        optim: Optim,
        groups: &[ParameterGroup],
        frozen: &[&str],
    ) -> anyhow::Result<()> {
        let Some(checkpoint) = &self.from else { return Ok(()) };
        let manifest = checkpoint.manifest();
        let same_model = match (&manifest.model, &model.spec) {
            (Some(saved), Some(given)) => saved.computes_like(given),
            (saved, given) => saved == given,
        };
        let kept: [(bool, &[&str]); 5] = [
            (same_model, &["model", "set", "untie"]),
            (manifest.seed == seed, &["seed"]),
            (manifest.optim == optim, &["optimizer", "momentum", "nesterov", "weight-decay"]),
            (manifest.groups == groups, &["group"]),
            (manifest.frozen == frozen, &["freeze"]),
        ];
        let names = kept.iter().filter(|(same, _)| !same).flat_map(|(_, names)| *names);
        match names.filter_map(|name| self.changed.iter().find(|change| change.name == *name)).next() {
            Some(change) => Err(cannot_change(checkpoint, &change.text, "its model, seed and optimizer")),
            None if !same_model => {
                let name = self.flags.model.as_deref().unwrap_or_default();
                Err(cannot_change(checkpoint, &format!("another content of --model {name}"), "its model"))
            }
            None => Ok(()),
        }
    }

    /// Lines that say where the run resumes, with what, and which outputs it writes to again; nothing if it does not resume.
    pub fn resume_notes(&self) -> Vec<String> {
        let Some(checkpoint) = &self.from else { return Vec::new() };
        let changes: Vec<&str> = self.changed.iter().map(|change| &change.text[..]).collect();
        let with = if changes.is_empty() { String::new() } else { format!(", with {}", changes.join(", ")) };
        let mut notes = vec![format!("resuming after step {}{with}", checkpoint.manifest().progress.step)];
        let outputs = [
            ("save", "replaces", &self.flags.save),
            ("log", "continues", &self.flags.log),
            ("capture", "writes into", &self.flags.capture),
        ];
        let outputs = outputs.iter().filter_map(|(flag, does, path)| {
            let path = path.as_deref().filter(|path| path.exists())?;
            Some(format!("{does} --{flag} {}", path.display()))
        });
        let outputs: Vec<String> = outputs.collect();
        if !outputs.is_empty() {
            notes.push(format!("the resumed run {}", outputs.join(", ")));
        }
        notes
    }

    /// Saves this codec in checkpoints, where `--codec` was `auto`: a link that is measured again might be given another one.
    pub fn keep_codec(&mut self, codec: Option<&CodecChoice>) {
        self.flags.codec = codec.cloned();
    }

    /// The flags to save in checkpoints. They have the cut that `--auto-balance` found: a second search might find another one, and
    /// codecs at other places would change the results. They have the number of threads for the same reason. Paths are absolute,
    /// because the run may be resumed in another working directory.
    pub fn settings(&self, balance: &[usize], threads: usize) -> serde_json::Result<serde_json::Value> {
        let mut flags = self.flags.clone().with_absolute_paths();
        flags.keep_cut(balance);
        flags.threads = Some(threads);
        serde_json::to_value(flags)
    }
}

/// A command that resumes from the newest checkpoint of a directory, or `None` if there is none or the disk does not answer.
pub fn resume_command(directory: &Path, command: &str) -> Option<String> {
    let listed = directory.to_owned();
    let (newest, _) = answer_of_disk(move || newest_in(&listed, |_| Ok(())).ok())??;
    newest.map(|()| format!("{command} {} --resume", with_value("--checkpoint", &directory.display().to_string())))
}

/// Checks that no flag needs the directory that `--checkpoint` would name.
fn check_without_directory(given: &TrainFlags) -> anyhow::Result<()> {
    let others = [
        ("--resume", given.resume.is_some()),
        ("--keep", given.keep.is_some()),
        ("--checkpoint-every", given.checkpoint_every.is_some()),
        ("--save-best", given.save_best.is_some()),
    ];
    match others.iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(usage(format!("{flag}: add --checkpoint DIR, the directory of the checkpoints"))),
        None => Ok(()),
    }
}

/// The error of a flag that differs from that of the checkpoint. `kept` is what the flag would change.
fn cannot_change(checkpoint: &Checkpoint, change: &str, kept: &str) -> anyhow::Error {
    usage(format!(
        "--resume: {}: {change}: a resumed run keeps {kept}: remove the flag, or start a new run in another directory",
        checkpoint.path().display()
    ))
}

/// The checkpoint's flags, overridden by the given ones, and the changes. A change of [`DATA`] or of the weights is an error.
fn resumed(checkpoint: &Checkpoint, given: &TrainFlags) -> anyhow::Result<(TrainFlags, Vec<Change>)> {
    let named = || format!("--resume: {}", checkpoint.path().display());
    let table = |flags: &TrainFlags| toml::Table::try_from(flags);
    let saved: TrainFlags = serde_json::from_value(checkpoint.manifest().settings.clone())
        .with_context(|| format!("{}: its flags do not belong to this version of `distgpipe train`", named()))?;
    // Paths of earlier versions may be relative.
    let saved = with_former_defaults(saved).with_absolute_paths();
    let mut given = given.clone().with_absolute_paths();
    if let Some(weights) = given.weights.take_if(|weights| saved.weights.as_ref() != Some(weights)) {
        return Err(usage(format!(
            "{}: --weights {}: the checkpoint has the tensors, and a resumed run uses those: remove the flag, or start a new run in another directory",
            named(),
            weights.display()
        )));
    }
    (given.weights, given.init_missing) = (None, None);
    let flags = saved.clone().overlaid(&given)?;
    let (before, now) = (table(&saved.or_defaults()?)?, table(&flags.or_defaults()?)?);
    let mut changed = Vec::new();
    for name in before.keys().chain(now.keys().filter(|name| !before.contains_key(*name))) {
        let (was, is) = (before.get(name), now.get(name));
        if was == is || WHERE_FROM.contains(&name.as_str()) {
            continue;
        }
        let text = format!("--{name} {} (was {})", plain(is), plain(was));
        if DATA.contains(&name.as_str()) {
            return Err(cannot_change(checkpoint, &text, "its data and updates"));
        }
        changed.push(Change { name: name.clone(), text });
    }
    Ok((flags, changed))
}

/// The value of a flag as on the command line.
fn plain(value: Option<&toml::Value>) -> String {
    match value {
        None => "not given".to_owned(),
        Some(toml::Value::String(text)) => text.clone(),
        Some(toml::Value::Array(values)) => values.iter().map(|value| plain(Some(value))).collect::<Vec<_>>().join(" "),
        Some(other) => other.to_string(),
    }
}

/// The flags of a checkpoint. Earlier versions left `--threads` and `--device` out where they had their defaults, which were one
/// thread and the CPU; this version always saves the number of threads. They also ignored `--data-dir` where it has no effect.
fn with_former_defaults(mut saved: TrainFlags) -> TrainFlags {
    saved.data_dir.take_if(|_| !saved.data.is_some_and(DataName::has_files));
    match saved.threads {
        Some(_) => saved,
        None => {
            let device = saved.device.or_else(|| Some(Device::Cpu.into()));
            TrainFlags { threads: Some(1), device, ..saved }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit-for-bit equality after a resume takes the same number of threads.
    #[test]
    fn a_checkpoint_keeps_the_number_of_threads() {
        let directory = std::env::temp_dir().join(format!("distgpipe-{}-keeps-threads", std::process::id()));
        let flags = TrainFlags { checkpoint: Some(directory.clone()), ..TrainFlags::default() };
        let (saving, given) = CheckpointConfig::open(&flags, &flags).unwrap();
        assert_eq!(given.threads, None);
        let saved = saving.unwrap().settings(&[1, 1], 3).unwrap();
        assert!(!directory.exists(), "nothing was saved there");
        let saved: TrainFlags = serde_json::from_value(saved).unwrap();
        assert_eq!((saved.threads, saved.device.clone()), (Some(3), None));
        assert_eq!(with_former_defaults(saved.clone()), saved);
    }

    #[test]
    fn checkpoints_of_earlier_versions_ran_with_one_thread_on_the_cpu() {
        let former = with_former_defaults(TrainFlags::default());
        assert_eq!((former.threads, former.device), (Some(1), Some(Device::Cpu.into())));
        let chosen = TrainFlags { device: Some(Device::Auto.into()), ..TrainFlags::default() };
        assert_eq!(with_former_defaults(chosen).device, Some(Device::Auto.into()));
    }
}
