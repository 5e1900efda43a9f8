//! Food-101 (Bossard et al. 2014): 101 dishes with 750 + 250 photographs each, as unpacked from its
//! archive.
//!
//! ```text
//! meta/classes.txt                    one class per line, numbered from 0
//! meta/train.txt, meta/test.txt       one CLASS/IMAGE per line
//! images/CLASS/IMAGE.jpg
//! ```

use super::folder::{unreadable, ImageFiles};
use super::image::ImageSource;
use super::{DataError, FilePosition, Split};
use crate::files::open_regular;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

/// The folder that the archive unpacks to.
pub const FOLDER: &str = "food-101";
/// The largest list file accepted, in bytes.
const LIST_BYTES_MAX: u64 = 64 << 20;

/// Reads the lists of a split and checks each of its images. The files are in `directory` or in the archive's subfolder.
pub fn open(directory: &Path, split: Split) -> Result<ImageFiles, DataError> {
    let remedy = remedy(directory);
    let unpacked = directory.join(FOLDER);
    let root = if unpacked.is_dir() { unpacked } else { directory.to_owned() };
    let classes: Vec<String> = list(&root.join("meta/classes.txt"), &remedy)?;
    let numbers: HashMap<&str, usize> = classes.iter().enumerate().map(|(i, class)| (&class[..], i)).collect();
    let path = root.join(match split {
        Split::Train => "meta/train.txt",
        Split::Test => "meta/test.txt",
    });
    let mut files = Vec::new();
    for (i, line) in list(&path, &remedy)?.iter().enumerate() {
        let known = line.split_once('/').and_then(|(class, image)| Some((class, image, *numbers.get(class)?)));
        let Some((class, image, number)) = known.filter(|(_, image, _)| is_plain(image)) else {
            return Err(DataError::Corrupt {
                file: path,
                place: FilePosition::Line(i as u64 + 1),
                expected: "a class of classes.txt, a slash and the name of an image".to_owned(),
                got: format!("`{line}`"),
                remedy,
            });
        };
        files.push((root.join("images").join(class).join(format!("{image}.jpg")), number));
    }
    let damaged = format!("{remedy}, or remove its line from {}", path.display());
    ImageFiles::new("food101", files, classes, [&remedy, &damaged])
}

/// Checks that a split has all of its photographs. A truncated list would otherwise go unnoticed.
pub fn check(directory: &Path, split: Split) -> Result<(), DataError> {
    let got = open(directory, split)?.len();
    let expected = match split {
        Split::Train => 75_750,
        Split::Test => 25_250,
    };
    match got == expected {
        true => Ok(()),
        false => Err(DataError::Corrupt {
            file: directory.join("meta"),
            place: FilePosition::File,
            expected: format!("{expected} photographs ({split:?})"),
            got: got.to_string(),
            remedy: remedy(directory),
        }),
    }
}

fn remedy(directory: &Path) -> String {
    format!("get it with `distgpipe data get food101 --dir {}`", directory.display())
}

/// Whether a name refers to a file in its own folder.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

fn list(path: &Path, remedy: &str) -> Result<Vec<String>, DataError> {
    let mut text = String::new();
    let read = open_regular(path).and_then(|file| file.take(LIST_BYTES_MAX).read_to_string(&mut text));
    read.map_err(|e| unreadable(path, &e, remedy))?;
    let lines: Vec<String> = text.lines().map(|line| line.trim_end().to_owned()).collect();
    match lines.is_empty() {
        true => Err(DataError::Corrupt {
            file: path.to_owned(),
            place: FilePosition::File,
            expected: "a list".to_owned(),
            got: "an empty file".to_owned(),
            remedy: remedy.to_owned(),
        }),
        false => Ok(lines),
    }
}

#[cfg(all(test, feature = "jpeg"))]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_lists_say_what_is_learned_and_what_is_tested() {
        let root = std::env::temp_dir().join(format!("distgpipe-{}-food101", std::process::id()));
        let inner = root.join(FOLDER);
        let said = || open(&root, Split::Train).unwrap_err().to_string();
        fs::create_dir_all(inner.join("images/soup")).unwrap();
        fs::create_dir_all(inner.join("meta")).unwrap();
        let missing = said();
        assert!(missing.contains("classes.txt") && missing.contains("`distgpipe data get food101 --dir "), "{missing}");
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images/plain.jpg");
        fs::copy(golden, inner.join("images/soup/12.jpg")).unwrap();
        fs::write(inner.join("meta/classes.txt"), "cake\nsoup\n").unwrap();
        fs::write(inner.join("meta/train.txt"), "soup/12\n").unwrap();
        let set = open(&root, Split::Train).unwrap();
        assert_eq!((set.len(), set.label(0), set.classes()), (1, 1, 2));
        let few = check(&root, Split::Train).unwrap_err().to_string();
        assert!(few.contains("expected 75750 photographs (Train), got 1"), "{few}");
        for (lines, words) in [
            ("soup/12\nsoup/13\n", "images/soup/13.jpg: No such file"),
            ("soup/12\nstew/1\n", "train.txt, line 2: expected a class of classes.txt"),
            ("soup/../../x\n", "train.txt, line 1: expected"),
            ("soup\n", "train.txt, line 1: expected"),
            ("", "train.txt: expected a list, got an empty file"),
        ] {
            fs::write(inner.join("meta/train.txt"), lines).unwrap();
            assert!(said().contains(words), "{lines:?}: {}", said());
        }
        fs::remove_dir_all(root).unwrap();
    }
}
