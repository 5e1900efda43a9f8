//! Opening files that a user names. A named pipe would make an ordinary `open` wait for a writer, possibly forever, so
//! every file is opened without waiting, and what it is gets checked afterwards.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
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

    fn fifo(name: &str) -> std::path::PathBuf {
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
