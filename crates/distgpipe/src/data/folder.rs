//! Image files, one folder per class.
//!
//! ```text
//! DIR/train/CLASS/anything.jpg      training set; .jpg, .jpeg and .png
//! DIR/test/CLASS/anything.jpg       test set; may also be named `val`
//! ```
//!
//! Classes are numbered in the order of their names, which need not be UTF-8. Those of the test set are numbered as in the
//! training set, or as a model's, if they are given; without both, by themselves. Hidden files are skipped; other files that
//! are not images are skipped and [counted](ImageFiles::skipped). Opening the data set checks the beginning and the end of every
//! file. Corruption in between is detected when the image is decoded.

use super::image::decode::{check_ends, decode, DecodeError, ImageDefect};
use super::image::{Image, ImageSource};
use super::{DataError, FilePosition, LoadPass, Split};
use crate::files::open_regular;
use crate::sync::lock;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

/// The largest image file accepted, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Threads that check files; they mostly wait for the disk.
const LOOKING_THREADS: usize = 8;

/// Images in files, decoded when they are needed.
#[derive(Debug)]
pub struct ImageFiles {
    name: &'static str,
    /// Each file with its class.
    files: Vec<(PathBuf, usize)>,
    classes: Vec<String>,
    /// The folder of the split, if it has one folder for each class.
    folder: Option<PathBuf>,
    skipped: Skipped,
    /// What to do about an unreadable file, and about a corrupt one.
    remedies: [String; 2],
}

/// Files and folders of a data set that were not read, because they are not images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// How many there are.
    pub count: usize,
    /// One of them.
    pub example: Option<PathBuf>,
}

impl Skipped {
    fn add(&mut self, path: PathBuf) {
        self.count += 1;
        self.example.get_or_insert(path);
    }
}

impl ImageFiles {
    /// One split of a directory that has a folder per split and class.
    pub fn folder(directory: &Path, split: Split) -> Result<Self, DataError> {
        Self::with_classes(directory, split, None)
    }

    /// The test set of such a directory, for a model with these classes, in the order of its scores. The directory needs no
    /// training set.
    pub fn test_folder(directory: &Path, classes: &[String]) -> Result<Self, DataError> {
        Self::with_classes(directory, Split::Test, Some(classes))
    }

    fn with_classes(directory: &Path, split: Split, classes: Option<&[String]>) -> Result<Self, DataError> {
        let remedy =
            format!("put images into {0}/train/CLASS and {0}/test/CLASS (.jpg, .jpeg or .png)", directory.display());
        let (train, mut skipped) = (directory.join("train"), Skipped::default());
        let folder = match split {
            Split::Train => train.clone(),
            Split::Test => test_folder(directory)?,
        };
        let own = names(&folder, EntryKind::Folder, &remedy, &mut skipped)?;
        // The names of a model's classes are text, and those of folders need not be.
        let of_model = |class: OsString| if classes.is_some() { class_name(&class).into() } else { class };
        let known: Vec<OsString> = match (classes, split) {
            (Some(classes), _) => classes.iter().map(OsString::from).collect(),
            (None, Split::Test) if train.is_dir() => {
                names(&train, EntryKind::Folder, &remedy, &mut Skipped::default())?
            }
            (None, _) => own.clone(),
        };
        let mut files = Vec::new();
        for class in own {
            let (path, class) = (folder.join(&class), of_model(class));
            let mut numbers = known.iter().enumerate().filter(|(_, known)| **known == class).map(|(number, _)| number);
            let number = match (numbers.next(), numbers.next()) {
                (Some(number), None) => number,
                (found, _) => {
                    let (owner, remedy) = match classes {
                        Some(_) => ("the model", "use data with the classes that the model was trained on".to_owned()),
                        None => ("the training set", remedy),
                    };
                    let has = if found.is_some() { "several classes of this name" } else { "no such class" };
                    return Err(DataError::Unreadable { file: path, why: format!("{owner} has {has}"), remedy });
                }
            };
            let found = names(&path, EntryKind::Image, &remedy, &mut skipped)?;
            files.extend(found.iter().map(|file| (path.join(file), number)));
        }
        let classes = known.iter().map(|class| class_name(class)).collect();
        let set = Self::new("image-folder", files, classes, [&remedy, "replace it, or remove it"])?;
        Ok(ImageFiles { skipped, folder: Some(folder), ..set })
    }

    /// The folder of the split, and the classes of which it has no image.
    pub fn missing_classes(&self) -> Option<(&Path, Vec<&str>)> {
        let mut missing: Vec<Option<&str>> = self.classes.iter().map(|class| Some(&class[..])).collect();
        self.files.iter().for_each(|(_, class)| missing[*class] = None);
        let missing: Vec<&str> = missing.into_iter().flatten().collect();
        self.folder.as_deref().filter(|_| !missing.is_empty()).map(|folder| (folder, missing))
    }

    /// The files and folders beside the images, which are not part of the data set. Hidden ones do not count.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// A data set of these files, each with its class. `remedies` says what to do about an unreadable file and about a
    /// corrupt one. Checks the beginning and the end of each file.
    pub(super) fn new(
        name: &'static str,
        files: Vec<(PathBuf, usize)>,
        classes: Vec<String>,
        remedies: [&str; 2],
    ) -> Result<Self, DataError> {
        let skipped = Skipped::default();
        let set = ImageFiles { name, files, classes, folder: None, skipped, remedies: remedies.map(str::to_owned) };
        set.each(LOOKING_THREADS, |row, _| check_ends(&mut set.opened(row)?).map_err(|error| set.named(row, error)))?;
        Ok(set)
    }

    /// Decodes every file and returns the errors. Detects corruption that opening the data set does not.
    pub fn defects(&self) -> Result<Vec<DataError>, DataError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let defects = Mutex::new(Vec::new());
        self.each(cores, |row, memory| match self.image(row, memory) {
            Err(defect @ DataError::Corrupt { .. }) => {
                lock(&defects).push(defect);
                Ok(())
            }
            other => other.map(drop),
        })?;
        Ok(defects.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn each(
        &self,
        threads: usize,
        with: impl Fn(usize, &mut Vec<u8>) -> Result<(), DataError> + Sync,
    ) -> Result<(), DataError> {
        let never = AtomicBool::new(false);
        let rows: Vec<usize> = (0..self.files.len()).collect();
        let pass = LoadPass::new(0, 0).shared(threads, &never);
        pass.fill(&mut vec![(); rows.len()], &rows, |row, _, memory| with(row, memory))
    }

    /// These files, without classes, for prediction. No file is checked: loading the row of a bad one fails.
    pub fn unlabelled(files: Vec<PathBuf>) -> Self {
        let remedies = ["name a JPEG or PNG file", "replace it"].map(str::to_owned);
        ImageFiles {
            name: "files",
            files: files.into_iter().map(|file| (file, 0)).collect(),
            classes: Vec::new(),
            folder: None,
            skipped: Skipped::default(),
            remedies,
        }
    }

    fn opened(&self, row: usize) -> Result<File, DataError> {
        let path = &self.files[row].0;
        open_regular(path).map_err(|e| unreadable(path, &e, &self.remedies[0]))
    }

    /// The error of a file that is an image, but not the expected one.
    pub(super) fn defect(&self, row: usize, expected: &'static str, got: String) -> DataError {
        self.named(row, ImageDefect { place: FilePosition::File, expected, got }.into())
    }

    /// The error with the file's name and what to do.
    fn named(&self, row: usize, error: DecodeError) -> DataError {
        let file = self.files[row].0.clone();
        match error {
            DecodeError::Damaged(defect) => DataError::Corrupt {
                file,
                place: defect.place,
                expected: defect.expected.to_owned(),
                got: defect.got,
                remedy: self.remedies[1].clone(),
            },
            DecodeError::MissingFeature { format, feature } => DataError::MissingFeature { file, format, feature },
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

    /// Bytes that are not UTF-8 are replaced.
    fn class_names(&self) -> Option<Vec<String>> {
        Some(self.classes.clone())
    }

    fn label(&self, row: usize) -> i64 {
        self.files[row].1 as i64
    }

    fn image<'a>(&'a self, row: usize, memory: &'a mut Vec<u8>) -> Result<Image<'a>, DataError> {
        let mut bytes = Vec::new();
        let read = self.opened(row)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|e| unreadable(&self.files[row].0, &e, &self.remedies[0]))?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(self.defect(row, "an image file of at most 64 MiB", "a larger one".to_owned()));
        }
        let (width, height) = decode(&bytes, memory).map_err(|error| self.named(row, error))?;
        Ok(Image { width, height, pixels: memory })
    }
}

/// An error about a file or directory that cannot be read.
pub(super) fn unreadable(path: &Path, error: &std::io::Error, remedy: &str) -> DataError {
    DataError::Unreadable { file: path.to_owned(), why: error.to_string(), remedy: remedy.to_owned() }
}

/// The images directly in a directory, in the order of their names: .jpg, .jpeg and .png files that are not hidden.
///
/// # Errors
/// If the directory cannot be read or has no image.
pub fn images_in(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let remedy = "name a directory that has .jpg, .jpeg or .png files itself, not only in its subdirectories";
    let failed = |e: std::io::Error| unreadable(directory, &e, remedy);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && has_image_extension(&entry.path()) {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    match files.is_empty() {
        true => Err(failed(std::io::Error::other(NO_IMAGE))),
        false => Ok(files),
    }
}

const NO_IMAGE: &str = "there is no image";

fn has_image_extension(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default();
    ["jpg", "jpeg", "png"].iter().any(|known| extension.eq_ignore_ascii_case(OsStr::new(known)))
}

/// The name of a class. Bytes that are not UTF-8 are replaced.
fn class_name(folder: &OsStr) -> String {
    folder.to_string_lossy().into_owned()
}

/// The folder of the test set.
fn test_folder(directory: &Path) -> Result<PathBuf, DataError> {
    let names = ["test", "val"];
    names.iter().map(|name| directory.join(name)).find(|folder| folder.is_dir()).ok_or_else(|| DataError::Unreadable {
        file: directory.to_owned(),
        why: "expected test images in a folder test or val, got neither".to_owned(),
        remedy: format!("put images into {0}/test/CLASS or {0}/val/CLASS", directory.display()),
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryKind {
    Folder,
    Image,
}

/// The entries of a directory that are of one kind, sorted by name. It is an error if there is none.
fn names(directory: &Path, kind: EntryKind, remedy: &str, skipped: &mut Skipped) -> Result<Vec<OsString>, DataError> {
    let failed = |e: std::io::Error| unreadable(directory, &e, remedy);
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (path, name) = (entry.path(), entry.file_name());
        // Other programs leave hidden entries behind.
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let fits = match kind {
            EntryKind::Folder => path.is_dir(),
            EntryKind::Image => has_image_extension(&path),
        };
        match fits {
            true => names.push(name),
            false => skipped.add(path),
        }
    }
    names.sort_unstable();
    if names.is_empty() {
        let why = match kind {
            EntryKind::Folder => "there is no class folder",
            EntryKind::Image => NO_IMAGE,
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

    /// An empty directory for one test.
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
    #[cfg(not(all(feature = "jpeg", feature = "png")))]
    fn an_image_whose_decoder_is_off_names_the_feature() {
        let root = directory("features");
        put(&root, "train/cat/x.jpg", "plain.jpg");
        put(&root, "test/cat/x.png", "plain.png");
        let opened = |split| ImageFiles::folder(&root, split).map(drop).map_err(|error| error.to_string());
        for (split, file, format, feature, on) in [
            (Split::Train, "train/cat/x.jpg", "JPEG", "jpeg", cfg!(feature = "jpeg")),
            (Split::Test, "test/cat/x.png", "PNG", "png", cfg!(feature = "png")),
        ] {
            let file = root.join(file);
            let said = format!(
                "{}: this build of distgpipe cannot read {format} images: enable the crate feature `{feature}`",
                file.display()
            );
            assert_eq!(opened(split), if on { Ok(()) } else { Err(said) });
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    #[cfg(all(feature = "jpeg", feature = "png"))]
    fn folders_are_classes_in_the_order_of_their_names() {
        use crate::data::{Dataset, ImageOptions, ImageSet};
        use crate::engine::Layout;
        let root = directory("folder");
        put(&root, "train/wolf/b.JPG", "plain.jpg");
        put(&root, "train/wolf/a.png", "plain.png");
        put(&root, "train/cat/x.jpeg", "grey.jpg");
        put(&root, "val/wolf/y.png", "alpha.png");
        fs::write(root.join("train/cat/.notes"), "none").unwrap();
        fs::write(root.join("train/cat/readme.txt"), "none").unwrap();
        let train = ImageFiles::folder(&root, Split::Train).unwrap();
        assert_eq!(train.class_names().unwrap(), ["cat", "wolf"]);
        assert_eq!((0..train.len()).map(|row| train.label(row)).collect::<Vec<_>>(), [0, 1, 1]);
        let test = ImageFiles::folder(&root, Split::Test).unwrap();
        assert_eq!((test.len(), test.label(0), test.classes()), (1, 1, 2));
        let options = ImageOptions { side: 8, split: Split::Train, layout: Layout::ChannelsLast };
        let batch = ImageSet::new(train, options).unwrap().batch(&[2, 0, 1], LoadPass::new(0, 0)).unwrap();
        assert_eq!(batch.inputs[0].size(), [3, 3, 8, 8]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    #[cfg(all(feature = "jpeg", feature = "png"))]
    fn what_is_missing_or_damaged_is_named_before_anything_is_learned() {
        let root = directory("damaged");
        let error = |split| ImageFiles::folder(&root, split).unwrap_err().to_string();
        assert!(error(Split::Train).contains("/train: No such file"), "{}", error(Split::Train));
        fs::create_dir_all(root.join("train/cat")).unwrap();
        assert!(
            error(Split::Train).contains("train/cat: there is no image: put images into"),
            "{}",
            error(Split::Train)
        );
        put(&root, "train/cat/x.jpg", "plain.jpg");
        put(&root, "train/cat/y.jpg", "plain.jpg");
        put(&root, "test/dog/y.jpg", "plain.jpg");
        let classes = |names: &[&str]| {
            ImageFiles::test_folder(&root, &names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
        };
        let said = classes(&["cat"]).unwrap_err().to_string();
        assert!(said.contains("test/dog: the model has no such class"), "{said}");
        let test = classes(&["bird", "dog"]).unwrap();
        assert_eq!((test.label(0), test.missing_classes()), (1, Some((&*root.join("test"), vec!["bird"]))));
        assert!(error(Split::Test).contains("test/dog: the training set has no such class"), "{}", error(Split::Test));
        let whole = fs::read(root.join("train/cat/y.jpg")).unwrap();
        for (bytes, words) in [
            (&whole[..200], "y.jpg, byte 200: expected the rest of the image"),
            (b"", "y.jpg, byte 0: expected a JPEG or PNG image, got an empty file"),
            (b"<html>", "y.jpg, byte 0: expected a JPEG or PNG image, got [3c"),
        ] {
            fs::write(root.join("train/cat/y.jpg"), bytes).unwrap();
            let said = error(Split::Train);
            assert!(said.contains(words) && said.ends_with("replace it, or remove it"), "{said}");
        }
        // The beginning and the end are intact, the middle is missing.
        fs::write(root.join("train/cat/y.jpg"), [&whole[..700], &whole[whole.len() - 2..]].concat()).unwrap();
        let set = ImageFiles::folder(&root, Split::Train).unwrap();
        let defects = set.defects().unwrap();
        let said = defects[0].to_string();
        assert!(defects.len() == 1 && said.contains("y.jpg, byte 700: expected a whole JPEG image, got"), "{said}");
        fs::remove_dir_all(root).unwrap();
    }
}
