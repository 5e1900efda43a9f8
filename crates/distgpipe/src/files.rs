//! Opening files and checking directories that a user names. A named pipe would make an ordinary `open` wait for a writer,
//! possibly forever, so every file is opened without waiting, and what it is gets checked afterwards.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a pipe or a terminal may stay silent.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// How often a silent pipe is looked at.
const PAUSE: Duration = Duration::from_millis(10);

/// Opens a regular file for reading. Anything else is an error.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let file = open_without_waiting(path)?;
    let kind = file.metadata()?.file_type();
    match kind.is_file() {
        true => Ok(file),
        false => Err(io::Error::other(format!("expected a regular file, got {}", description(kind)))),
    }
}

/// Opens a regular file, a pipe or a device for reading from its beginning to its end. A pipe into which nothing is
/// written for five seconds is an error.
pub fn open_stream(path: &Path) -> io::Result<impl Read> {
    let file = open_without_waiting(path)?;
    let kind = file.metadata()?.file_type();
    Ok(Stream { file, kind, empty: true })
}

/// Opens the other end of a pipe for writing; an error if nobody reads from it. Other files are only opened.
pub fn check_reader(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(|error| {
        match error.raw_os_error() == Some(libc::ENXIO) {
            true => {
                io::Error::other("expected a pipe that is being read, got one without a reader: start the reader first")
            }
            false => error,
        }
    })
}

/// Checks that files can be written into a directory, which need not exist. Leaves nothing behind.
pub fn check_directory(path: &Path) -> io::Result<()> {
    if let Some(kind) = path.metadata().ok().map(|about| about.file_type()).filter(|kind| !kind.is_dir()) {
        return Err(io::Error::other(format!("expected a directory, got {}", description(kind))));
    }
    let missing = missing_directories(path);
    let file = path.join(format!(".distgpipe.{}.part", std::process::id()));
    let tried = std::fs::create_dir_all(path).and_then(|()| File::create(&file).map(drop));
    let _ = std::fs::remove_file(&file);
    remove_empty(&missing);
    tried
}

/// The directories of a path that do not exist, the innermost first.
pub fn missing_directories(path: &Path) -> Vec<PathBuf> {
    let named = path.ancestors().filter(|folder| !folder.as_os_str().is_empty());
    named.take_while(|folder| !folder.exists()).map(Path::to_owned).collect()
}

/// Removes directories, the innermost first, as far as they exist and are empty.
pub fn remove_empty(directories: &[PathBuf]) {
    directories.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
}

/// What a file is, for an error message.
pub fn description(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_file() => "a regular file",
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

fn open_without_waiting(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

struct Stream {
    file: File,
    kind: FileType,
    /// Whether nothing has been read yet.
    empty: bool,
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let start = Instant::now();
        loop {
            match self.file.read(into) {
                // Nobody has opened the other end of the pipe yet.
                Ok(0) if self.kind.is_fifo() && self.empty && !into.is_empty() => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    self.empty = false;
                    return done;
                }
            }
            if start.elapsed() >= SILENCE_MAX {
                let (kind, limit_s) = (description(self.kind), SILENCE_MAX.as_secs());
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("expected text in {kind}, got none within {limit_s} s: write to it first, or name a regular file"),
                ));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn fifo(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("distgpipe-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    #[test]
    fn a_pipe_is_not_a_regular_file_and_is_not_waited_for() {
        let path = fifo("regular");
        let said = open_regular(&path).unwrap_err().to_string();
        assert_eq!(said, "expected a regular file, got a pipe");
        std::fs::remove_file(path).unwrap();
        let said = open_regular(&std::env::temp_dir()).unwrap_err().to_string();
        assert!(said.contains("got a directory"), "{said}");
        assert!(open_regular(Path::new("/dev/null")).unwrap_err().to_string().contains("got a device"));
    }

    #[test]
    fn a_directory_is_checked_without_a_trace() {
        let root = std::env::temp_dir().join(format!("distgpipe-{}-check", std::process::id()));
        let deep = root.join("a/b");
        check_directory(&deep).unwrap();
        assert!(!root.exists(), "it was created only to try");
        std::fs::create_dir_all(&root).unwrap();
        check_directory(&deep).unwrap();
        check_directory(&root).unwrap();
        assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0);
        let file = root.join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(check_directory(&file).unwrap_err().to_string(), "expected a directory, got a regular file");
        assert!(check_directory(&file.join("a")).is_err());
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_pipe_is_read_to_its_end_and_a_silent_one_is_an_error() {
        let path = fifo("stream");
        let writer = std::thread::spawn({
            let path = path.clone();
            // The writer waits for a reader, so it may come first or second.
            move || OpenOptions::new().write(true).open(path).unwrap().write_all(b"two\nlines\n").unwrap()
        });
        let mut text = String::new();
        open_stream(&path).unwrap().read_to_string(&mut text).unwrap();
        writer.join().unwrap();
        assert_eq!(text, "two\nlines\n");
        let said = open_stream(&path).unwrap().read_to_string(&mut text).unwrap_err().to_string();
        assert!(said.contains("expected text in a pipe, got none within 5 s"), "{said}");
        std::fs::remove_file(path).unwrap();
    }
}
