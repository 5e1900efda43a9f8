//! Files that flags name. Input is untrusted, so reading is bounded. Output is written atomically: a file is complete or absent.

use crate::exit::usage;
use crate::report::note;
use anyhow::Context;
use distgpipe::files::{self, check_reader, create_part, open_regular, open_stream};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// How long a disk that may have failed is asked.
const DISK_PATIENCE: Duration = Duration::from_secs(2);

/// What a disk answers that may have failed. `None` if it does not answer: then the thread that asks it is left alone.
pub fn answer_of_disk<T: Send + 'static>(ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, answer) = mpsc::channel();
    let asking = distgpipe::engine::spawn("disk", move || drop(sender.send(ask())));
    asking.ok().and_then(|_| answer.recv_timeout(DISK_PATIENCE).ok())
}

/// Reads a text file of at most `bytes_max` bytes, or a pipe, such as that of a process substitution. Errors start with `flag` and
/// the path.
pub fn read_text(flag: &str, path: &Path, bytes_max: u64) -> anyhow::Result<String> {
    let wrong = |why: String| usage(format!("{flag} {}: {why}", path.display()));
    let mut text = String::new();
    open_stream(path)
        .and_then(|file| file.take(bytes_max + 1).read_to_string(&mut text))
        .map_err(|e| wrong(e.to_string()))?;
    if text.len() as u64 > bytes_max {
        return Err(wrong(format!("expected at most {bytes_max} bytes, got more: check that this is the right file")));
    }
    Ok(text)
}

/// Reads a file of at most `bytes_max` bytes. Pipes and devices are rejected, because the memory is reserved first and they have no
/// length.
pub fn read_bytes(flag: &str, path: &Path, bytes_max: u64) -> anyhow::Result<Vec<u8>> {
    let wrong = |why: String| usage(format!("{flag} {}: {why}", path.display()));
    let file = open_regular(path).map_err(|e| wrong(e.to_string()))?;
    let about = file.metadata().map_err(|e| wrong(e.to_string()))?;
    if about.len() > bytes_max {
        return Err(wrong(format!(
            "expected at most {bytes_max} bytes, got {}: check that this is the right file, or split it",
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

/// Warns if other users can read a file with a secret. Pipes, such as those of process substitutions, have no such mode.
pub fn warn_if_others_read(flag: &str, path: &Path) {
    let Ok(about) = path.metadata() else { return };
    let mode = about.mode() & 0o777;
    if about.is_file() && mode & 0o077 != 0 {
        let path = path.display();
        note(&format!(
            "warning: {flag} {path}: its mode {mode:o} gives other users access to a secret: run chmod 600 {path}"
        ));
    }
}

/// Checks before the work that files can be written into the directory that a flag names; it need not exist.
pub fn check_directory(flag: &str, path: &Path) -> anyhow::Result<()> {
    files::check_directory(path)
        .map_err(|e| usage(format!("{flag} {}: {e}: name a directory that can be written to", path.display())))
}

/// A file to write, in a directory that exists. Create this before the work that produces the content, so that a misspelt path is
/// found early.
#[derive(Debug)]
pub struct NewFile {
    flag: String,
    path: PathBuf,
}

impl NewFile {
    /// The file that a flag names. An existing file is replaced by [`write`](Self::write).
    pub fn at(flag: &str, path: &Path) -> anyhow::Result<Self> {
        let wrong = |why: &str| usage(format!("{flag} {}: {why}", path.display()));
        if path.file_name().is_none() || path.is_dir() {
            return Err(wrong("expected the name of a file, got a directory: add a name"));
        }
        if !directory(path).is_dir() {
            return Err(wrong("expected a path in a directory that exists: create the directory, or name another one"));
        }
        // Follow symbolic links, so that the target is replaced and not the link.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        Ok(NewFile { flag: flag.to_owned(), path })
    }

    /// Whether `path` leads to this file.
    pub fn is(&self, path: &Path) -> bool {
        path.canonicalize().is_ok_and(|path| path == self.path)
    }

    /// Writes the whole file, or leaves the old one in place.
    pub fn write(&self, bytes: &[u8]) -> anyhow::Result<()> {
        let flag = || format!("{} {}", self.flag, self.path.display());
        // Devices such as /dev/null are written to directly: a rename would replace them.
        if self.path.exists() && !self.path.is_file() {
            return write_special(&self.path, bytes).with_context(flag);
        }
        let (part, mut file) = create_part(&self.path).with_context(flag)?;
        let written = file.write_all(bytes).and_then(|()| std::fs::rename(&part, &self.path));
        if written.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        written.with_context(flag)
    }
}

/// Writes to a pipe or a device. A pipe that nobody reads is an error, because an ordinary `open` would wait for a reader.
fn write_special(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let _reader = check_reader(path)?;
    std::fs::write(path, bytes)
}

/// The user's directory for one purpose: the one that `variable` names, or `fallback` in the home directory.
pub fn user_directory(variable: &str, fallback: &str) -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(variable).or_else(|| Some(absolute("HOME")?.join(fallback)))
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
