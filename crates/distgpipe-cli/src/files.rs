//! Files that a flag names. They may be anybody's: what is read is bounded.

use crate::exit::usage;
use std::fs::File;
use std::io::Read;
use std::path::Path;

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
