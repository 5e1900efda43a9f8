//! Files that a flag names. They may be anybody's: what is read is bounded, and what is written is there whole or not at
//! all.

use crate::exit::usage;
use anyhow::Context;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The text of a file of at most `bytes_max` bytes.
pub fn read_text(flag: &str, path: &Path, bytes_max: u64) -> anyhow::Result<String> {
    let wrong = |why: String| usage(format!("{flag} {}: {why}", path.display()));
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(bytes_max + 1).read_to_string(&mut text))
        .map_err(|e| wrong(e.to_string()))?;
    if text.len() as u64 > bytes_max {
        return Err(wrong(format!("expected at most {bytes_max} bytes: is this the right file?")));
    }
    Ok(text)
}

/// The bytes of a file of at most `bytes_max` bytes. No pipe or device: those do not say how long they are, and the
/// memory is asked for first.
pub fn read_bytes(flag: &str, path: &Path, bytes_max: u64) -> anyhow::Result<Vec<u8>> {
    let wrong = |why: String| usage(format!("{flag} {}: {why}", path.display()));
    let file = File::open(path).map_err(|e| wrong(e.to_string()))?;
    let about = file.metadata().map_err(|e| wrong(e.to_string()))?;
    if !about.is_file() {
        return Err(wrong("expected a file, got a directory, pipe or device: name a file".to_owned()));
    }
    if about.len() > bytes_max {
        return Err(wrong(format!(
            "expected at most {bytes_max} bytes, got {}: is this the right file? If so, split it",
            about.len()
        )));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(about.len()).ok().filter(|&length| bytes.try_reserve_exact(length).is_ok());
    if room.is_none() {
        return Err(wrong(format!("not enough memory for its {} bytes: split it", about.len())));
    }
    file.take(about.len()).read_to_end(&mut bytes).map_err(|e| wrong(e.to_string()))?;
    Ok(bytes)
}

/// A file to be written, in a directory that is there. Made before the work whose result it is to hold, so that a
/// misspelt path costs nothing.
#[derive(Debug)]
pub struct NewFile {
    flag: String,
    path: PathBuf,
}

impl NewFile {
    /// The file that a flag names; one that is there already is replaced when this is written.
    pub fn at(flag: &str, path: &Path) -> anyhow::Result<Self> {
        let wrong = |why: &str| usage(format!("{flag} {}: {why}", path.display()));
        if path.file_name().is_none() || path.is_dir() {
            return Err(wrong("expected the name of a file, got a directory: add a name"));
        }
        if !directory(path).is_dir() {
            return Err(wrong("expected a directory that exists in front of the name: make it, or name another"));
        }
        // Whoever names a link means the file behind it.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Ok(NewFile { flag: flag.to_owned(), path })
    }

    /// Whether this is the file at `path`.
    pub fn is(&self, path: &Path) -> bool {
        path.canonicalize().is_ok_and(|path| path == self.path)
    }

    /// Writes all of it, or leaves what was there.
    pub fn write(&self, bytes: &[u8]) -> anyhow::Result<()> {
        let flag = || format!("{} {}", self.flag, self.path.display());
        // A device such as /dev/null is written to and must not be replaced.
        if self.path.exists() && !self.path.is_file() {
            return std::fs::write(&self.path, bytes).with_context(flag);
        }
        let mut name = OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(format!(".{}.part", std::process::id()));
        let part = directory(&self.path).join(name);
        let written = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, &self.path));
        if written.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        written.with_context(flag)
    }
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
