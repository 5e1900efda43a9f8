//! Files that a flag names. They may be anybody's: what is read is bounded.

use crate::exit::usage;
use std::io::Read;
use std::path::Path;

/// The text of a file of at most `bytes_max` bytes.
pub fn read_text(flag: &str, path: &Path, bytes_max: u64) -> anyhow::Result<String> {
    let wrong = |why: String| usage(format!("{flag} {}: {why}", path.display()));
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(bytes_max + 1).read_to_string(&mut text))
        .map_err(|e| wrong(e.to_string()))?;
    if text.len() as u64 > bytes_max {
        return Err(wrong(format!("expected at most {bytes_max} bytes: is this the right file?")));
    }
    Ok(text)
}
