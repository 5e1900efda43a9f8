//! Opening files and checking directories that a user names. A named pipe would make an ordinary `open` wait for a writer,
//! possibly forever, so every file is opened without waiting, and what it is gets checked afterwards.

use crate::comm::handshake::random;
use std::ffi::OsString;
use std::fs::{DirBuilder, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
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
    let tried = std::fs::create_dir_all(path).and_then(|()| create_part(&path.join("distgpipe")));
    let tried = tried.and_then(|(part, _)| std::fs::remove_file(part));
    remove_empty(&missing);
    tried
}

/// Creates the file that is written before it gets the name `path`, in the same directory. Nobody can predict its name, and a
/// file or a link that is there already is not written to.
pub fn create_part(path: &Path) -> io::Result<(PathBuf, File)> {
    create_part_with(path, OpenOptions::new())
}

/// As [`create_part`], for a file that its owner alone can read from the beginning.
pub fn create_private_part(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    create_part_with(path, options)
}

fn create_part_with(path: &Path, mut options: OpenOptions) -> io::Result<(PathBuf, File)> {
    let digits: String = random::<8>().map_err(io::Error::other)?.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{digits}.part"));
    let part = path.with_file_name(name);
    let file = options.write(true).create_new(true).open(&part)?;
    Ok((part, file))
}

/// Creates a file anew, for its owner alone. What has the name already, a link for instance, is removed and not written to.
pub fn create_fresh(path: &Path) -> io::Result<File> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Creates a directory and those above it, as far as they do not exist, for its owner alone.
pub fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
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

    #[test]
    fn files_that_are_written_first_follow_no_link_and_have_no_predictable_name() {
        let folder = std::env::temp_dir().join(format!("distgpipe-parts-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        create_private_directory(&folder).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&folder.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o700);
        let (first, _) = create_part(&folder.join("model")).unwrap();
        let (second, _) = create_part(&folder.join("model")).unwrap();
        assert_ne!(first, second);
        // From the moment that it exists: it once had the mode of any other file until that was changed.
        let (private, _) = create_private_part(&folder.join("secret")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&private.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        let victim = folder.join("victim");
        std::fs::write(&victim, "kept").unwrap();
        let link = folder.join("manifest.partial");
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        create_fresh(&link).unwrap().write_all(b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "kept");
        assert_eq!(std::fs::read_to_string(&link).unwrap(), "new");
        std::fs::remove_dir_all(&folder).unwrap();
    }

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
