//! Images in files, a folder per class.
//!
//! ```text
//! DIR/train/CLASS/anything.jpg      to learn from        .jpg, .jpeg and .png
//! DIR/test/CLASS/anything.jpg       to test with; `val` is another name for it
//! ```
//!
//! Classes are numbered in the order of their names. Before anything is learned, every file is opened and looked at from
//! both ends; one that is damaged in between is found when it is decoded.

use super::image::decode::{decode, look, Flaw};
use super::image::{Image, ImageSource};
use super::{DataError, Part, Pass};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

/// The most bytes of an image file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Looking at files is waiting for the disk.
const LOOKING_THREADS: usize = 8;

/// Images in files.
#[derive(Debug)]
pub struct ImageFiles {
    name: &'static str,
    /// The file and its class.
    files: Vec<(PathBuf, usize)>,
    classes: Vec<String>,
    /// For a file that cannot be read, and for one that is damaged.
    remedies: [String; 2],
}

impl ImageFiles {
    /// A part of a directory with a folder per part and class.
    pub fn folder(directory: &Path, part: Part) -> Result<Self, DataError> {
        let remedy =
            format!("put images into {0}/train/CLASS and {0}/test/CLASS (.jpg, .jpeg or .png)", directory.display());
        let train = directory.join("train");
        let classes = names(&train, Entry::Folder, &remedy)?;
        let folder = match part {
            Part::Train => train,
            Part::Test if directory.join("test").is_dir() => directory.join("test"),
            Part::Test => directory.join("val"),
        };
        let mut files = Vec::new();
        for class in names(&folder, Entry::Folder, &remedy)? {
            let path = folder.join(&class);
            let Some(number) = classes.iter().position(|known| *known == class) else {
                let why = "there is no such class to learn".to_owned();
                return Err(DataError::Unreadable { file: path, why, remedy });
            };
            let found = names(&path, Entry::Image, &remedy)?;
            files.extend(found.iter().map(|file| (path.join(file), number)));
        }
        Self::new("image-folder", files, classes, [&remedy, "get it anew, or remove it"])
    }

    /// These files, each with its class, and what to do about one that cannot be read and one that is damaged. Looks at
    /// each of them.
    pub(super) fn new(
        name: &'static str,
        files: Vec<(PathBuf, usize)>,
        classes: Vec<String>,
        remedies: [&str; 2],
    ) -> Result<Self, DataError> {
        let set = ImageFiles { name, files, classes, remedies: remedies.map(str::to_owned) };
        set.each(LOOKING_THREADS, |row, _| look(&mut set.opened(row)?).map_err(|flaw| set.damaged(row, flaw)))?;
        Ok(set)
    }

    /// Decodes every file, which finds what a look from both ends does not.
    pub fn flaws(&self) -> Result<Vec<DataError>, DataError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let flaws = Mutex::new(Vec::new());
        self.each(cores, |row, memory| match self.image(row, memory) {
            Err(flaw @ DataError::Damaged { .. }) => {
                flaws.lock().unwrap_or_else(PoisonError::into_inner).push(flaw);
                Ok(())
            }
            other => other.map(drop),
        })?;
        Ok(flaws.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn each(
        &self,
        threads: usize,
        with: impl Fn(usize, &mut Vec<u8>) -> Result<(), DataError> + Sync,
    ) -> Result<(), DataError> {
        let never = AtomicBool::new(false);
        let rows: Vec<usize> = (0..self.files.len()).collect();
        let pass = Pass::new(0, 0).shared(threads, &never);
        pass.fill(&mut vec![(); rows.len()], &rows, |row, _, memory| with(row, memory))
    }

    /// The names of the classes.
    pub fn class_names(&self) -> &[String] {
        &self.classes
    }

    fn opened(&self, row: usize) -> Result<File, DataError> {
        let path = &self.files[row].0;
        File::open(path).map_err(|e| unreadable(path, &e, &self.remedies[0]))
    }

    fn damaged(&self, row: usize, flaw: Flaw) -> DataError {
        DataError::Damaged {
            file: self.files[row].0.clone(),
            place: flaw.place,
            expected: flaw.expected.to_owned(),
            got: flaw.got,
            remedy: self.remedies[1].clone(),
        }
    }
}

impl ImageSource for ImageFiles {
    fn name(&self) -> &'static str {
        self.name
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn classes(&self) -> usize {
        self.classes.len()
    }

    fn label(&self, row: usize) -> i64 {
        self.files[row].1 as i64
    }

    fn image<'a>(&'a self, row: usize, memory: &'a mut Vec<u8>) -> Result<Image<'a>, DataError> {
        let mut bytes = Vec::new();
        let read = self.opened(row)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(|e| unreadable(&self.files[row].0, &e, &self.remedies[0]))?;
        let (width, height) = decode(&bytes, memory).map_err(|flaw| self.damaged(row, flaw))?;
        Ok(Image { width, height, pixels: memory })
    }
}

/// An error that names a file or directory.
pub(super) fn unreadable(path: &Path, error: &std::io::Error, remedy: &str) -> DataError {
    DataError::Unreadable { file: path.to_owned(), why: error.to_string(), remedy: remedy.to_owned() }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    Folder,
    Image,
}

/// What a directory holds, sorted by name; none is an error.
fn names(directory: &Path, kind: Entry, remedy: &str) -> Result<Vec<String>, DataError> {
    let failed = |e: std::io::Error| unreadable(directory, &e, remedy);
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // Hidden entries are other programs' notes.
        let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.')) else {
            continue;
        };
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
        let fits = match kind {
            Entry::Folder => path.is_dir(),
            Entry::Image => matches!(&extension[..], "jpg" | "jpeg" | "png"),
        };
        if fits {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    if names.is_empty() {
        let why = match kind {
            Entry::Folder => "no folder of a class is there",
            Entry::Image => "no image is there",
        };
        return Err(DataError::Unreadable {
            file: directory.to_owned(),
            why: why.to_owned(),
            remedy: remedy.to_owned(),
        });
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Dataset, ImageOptions, ImageSet};
    use crate::engine::Layout;

    /// An empty directory of one test.
    pub fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("distgpipe-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn put(directory: &Path, file: &str, from: &str) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images").join(from);
        fs::create_dir_all(directory.join(file).parent().unwrap()).unwrap();
        fs::copy(golden, directory.join(file)).unwrap();
    }

    #[test]
    fn folders_are_classes_in_the_order_of_their_names() {
        let root = directory("folder");
        put(&root, "train/wolf/b.JPG", "plain.jpg");
        put(&root, "train/wolf/a.png", "plain.png");
        put(&root, "train/cat/x.jpeg", "grey.jpg");
        put(&root, "val/wolf/y.png", "alpha.png");
        fs::write(root.join("train/cat/.notes"), "none").unwrap();
        fs::write(root.join("train/cat/readme.txt"), "none").unwrap();
        let train = ImageFiles::folder(&root, Part::Train).unwrap();
        assert_eq!(train.class_names(), ["cat", "wolf"]);
        assert_eq!((0..train.len()).map(|row| train.label(row)).collect::<Vec<_>>(), [0, 1, 1]);
        let test = ImageFiles::folder(&root, Part::Test).unwrap();
        assert_eq!((test.len(), test.label(0), test.classes()), (1, 1, 2));
        let options = ImageOptions { side: 8, part: Part::Train, layout: Layout::ChannelsLast };
        let batch = ImageSet::new(train, options).unwrap().batch(&[2, 0, 1], Pass::new(0, 0)).unwrap();
        assert_eq!(batch.inputs[0].size(), [3, 3, 8, 8]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_missing_or_damaged_is_named_before_anything_is_learned() {
        let root = directory("damaged");
        let error = |part| ImageFiles::folder(&root, part).unwrap_err().to_string();
        assert!(error(Part::Train).contains("/train: No such file"), "{}", error(Part::Train));
        fs::create_dir_all(root.join("train/cat")).unwrap();
        assert!(error(Part::Train).contains("train/cat: no image is there: put images into"), "{}", error(Part::Train));
        put(&root, "train/cat/x.jpg", "plain.jpg");
        put(&root, "train/cat/y.jpg", "plain.jpg");
        put(&root, "test/dog/y.jpg", "plain.jpg");
        assert!(error(Part::Test).contains("test/dog: there is no such class"), "{}", error(Part::Test));
        let whole = fs::read(root.join("train/cat/y.jpg")).unwrap();
        for (bytes, words) in [
            (&whole[..200], "y.jpg, byte 200: expected the rest of the image"),
            (b"", "y.jpg, byte 0: expected a JPEG or PNG image, got an empty file"),
            (b"<html>", "y.jpg, byte 0: expected a JPEG or PNG image, got [3c"),
        ] {
            fs::write(root.join("train/cat/y.jpg"), bytes).unwrap();
            let said = error(Part::Train);
            assert!(said.contains(words) && said.ends_with("get it anew, or remove it"), "{said}");
        }
        // Both ends are there, the middle is not.
        fs::write(root.join("train/cat/y.jpg"), [&whole[..700], &whole[whole.len() - 2..]].concat()).unwrap();
        let set = ImageFiles::folder(&root, Part::Train).unwrap();
        let flaws = set.flaws().unwrap();
        let said = flaws[0].to_string();
        assert!(flaws.len() == 1 && said.contains("y.jpg, byte 700: expected a whole JPEG image, got"), "{said}");
        fs::remove_dir_all(root).unwrap();
    }
}
