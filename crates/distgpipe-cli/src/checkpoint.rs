//! The flags of checkpoints: where a run is saved, and what it goes on from.

use crate::args::{ResumeName, TrainFlags};
use crate::exit::usage;
use crate::report::note;
use anyhow::Context;
use distgpipe::checkpoint::{Checkpoint, Checkpoints};
use distgpipe::trainer::SaveEvery;

/// How many checkpoints stay where nobody says.
const KEEP: usize = 2;

/// What decides which rows come in which step: a run cannot go on with another.
const DATA: [&str; 5] = ["data", "limit", "samples", "batch", "accumulate"];

/// Where a run is saved.
pub struct Saving {
    /// The folder, locked.
    pub checkpoints: Checkpoints,
    /// When.
    pub every: SaveEvery,
    /// What it goes on from.
    pub from: Option<Checkpoint>,
    /// Whether it was to go on, if there was something to go on from.
    pub resumes: bool,
    flags: TrainFlags,
}

impl Saving {
    /// The folder that the flags name, and the flags to run with: those of the checkpoint to go on from, below the given
    /// ones; or `otherwise`, if there is nothing to go on from.
    pub fn open(given: &TrainFlags, otherwise: &TrainFlags) -> anyhow::Result<(Option<Self>, TrainFlags)> {
        let Some(directory) = &given.checkpoint else {
            let others = [
                ("--resume", given.resume.is_some()),
                ("--keep", given.keep.is_some()),
                ("--checkpoint-every", given.checkpoint_every.is_some()),
            ];
            return match others.iter().find(|(_, given)| *given) {
                Some((flag, _)) => {
                    Err(usage(format!("{flag}: add --checkpoint DIR, which says where checkpoints are")))
                }
                None => Ok((None, otherwise.clone())),
            };
        };
        let flag = || format!("--checkpoint {}", directory.display());
        if given.resume == Some(ResumeName::Newest) && !directory.is_dir() {
            return Err(usage(format!(
                "{}: there is no such folder to resume from: check the name, or start without --resume",
                flag()
            )));
        }
        let mut checkpoints = Checkpoints::open(directory, KEEP).with_context(flag)?;
        let (newest, damaged) = checkpoints.newest().with_context(flag)?;
        for error in &damaged {
            note(&format!("warning: left out: {error}"));
        }
        let (from, mut flags) = match (given.resume, newest) {
            (None, None) if damaged.is_empty() => (None, otherwise.clone()),
            (None, Some(_)) => {
                return Err(usage(format!(
                    "{}: it holds checkpoints already: add --resume to go on from the newest, or name another folder",
                    flag()
                )));
            }
            (Some(_), Some(checkpoint)) => {
                let flags = resumed(&checkpoint, given)?;
                (Some(checkpoint), flags)
            }
            (Some(ResumeName::IfAny), None) if damaged.is_empty() => (None, otherwise.clone()),
            (Some(_), None) if damaged.is_empty() => {
                return Err(usage(format!(
                    "{}: there is no checkpoint to resume from: start without --resume",
                    flag()
                )));
            }
            (_, None) => {
                return Err(usage(format!(
                    "{}: none of its checkpoints can be used, for the reasons above: see to them, or name another folder",
                    flag()
                )));
            }
        };
        flags.resume = None;
        match flags.keep {
            Some(0) => return Err(usage("--keep 0: the newest one always stays: use 1 or more")),
            keep => checkpoints.set_keep(keep.unwrap_or(KEEP)),
        }
        let every = match flags.checkpoint_every {
            Some(0) => return Err(usage("--checkpoint-every 0: use 1 step or more, or leave it out for every epoch")),
            Some(steps) => SaveEvery::Steps(steps),
            None => SaveEvery::Epoch,
        };
        Ok((Some(Saving { checkpoints, every, from, resumes: given.resume.is_some(), flags: flags.clone() }), flags))
    }

    /// The flags for whoever resumes. A cut that was measured is kept: measured again, it might be another, and what codecs
    /// do with it.
    pub fn settings(&self, balance: &[usize]) -> serde_json::Result<serde_json::Value> {
        let mut flags = self.flags.clone();
        flags.keep_cut(balance);
        serde_json::to_value(flags)
    }
}

/// The given flags above the checkpoint's. What is different is said; what must not be is an error.
fn resumed(checkpoint: &Checkpoint, given: &TrainFlags) -> anyhow::Result<TrainFlags> {
    let named = || format!("--resume: {}", checkpoint.path().display());
    let table = |flags: &TrainFlags| toml::Table::try_from(flags);
    let saved: TrainFlags = serde_json::from_value(checkpoint.about().settings.clone())
        .with_context(|| format!("{}: its flags are not those of this version of `distgpipe train`", named()))?;
    let mut given = given.clone();
    if let Some(weights) = given.weights.take_if(|weights| saved.weights.as_ref() != Some(weights)) {
        return Err(usage(format!(
            "{}: --weights {}: the checkpoint has the tensors, and those are used: leave the flag out, or start anew in another folder",
            named(),
            weights.display()
        )));
    }
    (given.weights, given.init_missing) = (None, None);
    let flags = saved.clone().overlaid(&given)?;
    let (before, now) = (table(&saved.or_defaults()?)?, table(&flags.or_defaults()?)?);
    let text = |value: Option<&toml::Value>| value.map_or_else(|| "not given".to_owned(), ToString::to_string);
    let mut changed = Vec::new();
    for name in before.keys().chain(now.keys().filter(|name| !before.contains_key(*name))) {
        let (was, is) = (before.get(name), now.get(name));
        if was == is {
            continue;
        }
        let change = format!("--{name} {} (was {})", text(is), text(was));
        if DATA.contains(&name.as_str()) {
            return Err(usage(format!(
                "{}: {change}: a run goes on with the data and the updates it began with: leave the flag out, or start anew in another folder",
                named()
            )));
        }
        changed.push(change);
    }
    let step = checkpoint.about().progress.step;
    let with = if changed.is_empty() { String::new() } else { format!(", with {}", changed.join(", ")) };
    note(&format!("going on after step {step}{with}"));
    Ok(flags)
}
