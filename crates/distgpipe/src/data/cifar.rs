//! CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 images of 32 × 32 pixels, in the binary files of
//! <https://www.cs.toronto.edu/~kriz/cifar.html>.
//!
//! ```text
//! CIFAR-10    data_batch_1.bin … data_batch_5.bin, test_batch.bin    label            1024 red, 1024 green, 1024 blue
//! CIFAR-100   train.bin, test.bin                                    coarse, fine     the same
//! ```
//!
//! Images are held in memory as bytes: 154 MB for training, 31 MB for testing.

use super::folder::unreadable;
use super::image::{Image, ImageSource};
use super::{md5, DataError, FilePosition, Split};
use crate::files::open_regular;
use std::io::Read;
use std::path::Path;

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
const PIXELS: usize = 3 * PLANE;

/// A file's name, and its MD5 hash if known.
type KnownFile = (&'static str, Option<&'static str>);

/// The files of CIFAR-10. The last one is the test set.
const TEN: [KnownFile; 6] = [
    ("data_batch_1.bin", Some("5dd7e06a14cb22eb9f671a540d1b7c25")),
    ("data_batch_2.bin", Some("5ea93a67294ea407fff1d09f752e9692")),
    ("data_batch_3.bin", Some("942cd6a4bcdd0dd3c604fbe906cb4421")),
    ("data_batch_4.bin", Some("ae636b3ba5c66a11e91e8cb52e771fcb")),
    ("data_batch_5.bin", Some("53f37980c15c3d472c316c40844f3f0d")),
    ("test_batch.bin", Some("803d5f7f4d78ea53de84dbe85f74fb6d")),
];

/// The files of CIFAR-100. The last one is the test set.
const HUNDRED: [KnownFile; 2] = [("train.bin", None), ("test.bin", None)];

const TEN_CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

#[rustfmt::skip]
const HUNDRED_CLASSES: [&str; 100] = [
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
    "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel",
    "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
];

/// The two data sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edition {
    /// CIFAR-10, with 10 classes.
    Ten,
    /// CIFAR-100, with its fine labels.
    Hundred,
}

impl Edition {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Edition::Ten => "cifar10",
            Edition::Hundred => "cifar100",
        }
    }

    /// The number of classes.
    pub fn classes(self) -> usize {
        match self {
            Edition::Ten => 10,
            Edition::Hundred => 100,
        }
    }

    /// The names of the classes in the official files `batches.meta.txt` and `fine_label_names.txt`.
    pub fn class_names(self) -> &'static [&'static str] {
        match self {
            Edition::Ten => &TEN_CLASSES,
            Edition::Hundred => &HUNDRED_CLASSES,
        }
    }

    /// The directory that the official archive unpacks to.
    pub fn folder(self) -> &'static str {
        match self {
            Edition::Ten => "cifar-10-batches-bin",
            Edition::Hundred => "cifar-100-binary",
        }
    }

    /// The names of the files.
    pub fn file_names(self) -> Vec<&'static str> {
        let parts = [Split::Train, Split::Test].into_iter();
        parts.flat_map(|split| self.files(split).0).map(|(name, _)| *name).collect()
    }

    /// The files of a split, and the number of records in each.
    fn files(self, split: Split) -> (&'static [KnownFile], usize) {
        match (self, split) {
            (Edition::Ten, Split::Train) => (&TEN[..5], 10_000),
            (Edition::Ten, Split::Test) => (&TEN[5..], 10_000),
            (Edition::Hundred, Split::Train) => (&HUNDRED[..1], 50_000),
            (Edition::Hundred, Split::Test) => (&HUNDRED[1..], 10_000),
        }
    }

    /// The number of label bytes in a record. The last one is used.
    fn labels(self) -> usize {
        match self {
            Edition::Ten => 1,
            Edition::Hundred => 2,
        }
    }

    fn record_bytes(self) -> usize {
        self.labels() + PIXELS
    }
}

/// One split of a CIFAR data set.
#[derive(Debug)]
pub struct Cifar {
    edition: Edition,
    /// The pixels, with red, green and blue interleaved.
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl Cifar {
    /// Reads and checks the files of a split, from `directory` or from the subfolder that the official archive unpacks
    /// to.
    pub fn open(directory: &Path, edition: Edition, split: Split) -> Result<Self, DataError> {
        let (files, records) = edition.files(split);
        let unpacked = directory.join(edition.folder());
        let found = if unpacked.is_dir() { unpacked } else { directory.to_owned() };
        let mut set = Cifar {
            edition,
            pixels: Vec::with_capacity(files.len() * records * PIXELS),
            labels: Vec::with_capacity(files.len() * records),
        };
        for (file, published) in files {
            let path = found.join(file);
            let remedy = remedy(edition, directory);
            let bytes = read(&path, records * edition.record_bytes(), &remedy)?;
            set.add(&bytes, records, &path, &remedy)?;
            // Checked last, because the checks above report the place of the error.
            if let Some(expected) = published {
                let got = md5(&bytes[..]).map_err(|e| unreadable(&path, &e, &remedy))?;
                let (expected, got) = (format!("MD5 {expected}"), format!("MD5 {got}"));
                if got != expected {
                    return Err(DataError::Corrupt { file: path, place: FilePosition::File, expected, got, remedy });
                }
            }
        }
        Ok(set)
    }

    /// Appends the records of a file.
    fn add(&mut self, bytes: &[u8], records: usize, path: &Path, remedy: &str) -> Result<(), DataError> {
        let record_bytes = self.edition.record_bytes();
        let damaged = |place, expected: String, got: String| DataError::Corrupt {
            file: path.to_owned(),
            place,
            expected,
            got,
            remedy: remedy.to_owned(),
        };
        if bytes.len() != records * record_bytes {
            let expected = format!("{} bytes", records * record_bytes);
            let got = if bytes.len() > records * record_bytes { "more".to_owned() } else { bytes.len().to_string() };
            return Err(damaged(FilePosition::File, expected, got));
        }
        let classes = self.edition.classes();
        for (i, record) in bytes.chunks_exact(record_bytes).enumerate() {
            let (labels, planes) = record.split_at(self.edition.labels());
            let label = labels[labels.len() - 1];
            if usize::from(label) >= classes {
                let offset = (i * record_bytes + labels.len() - 1) as u64;
                let expected = format!("a label of 0 to {} in record {i}", classes - 1);
                return Err(damaged(FilePosition::Byte(offset), expected, label.to_string()));
            }
            self.labels.push(label);
            let (red, rest) = planes.split_at(PLANE);
            let (green, blue) = rest.split_at(PLANE);
            for ((r, g), b) in red.iter().zip(green).zip(blue) {
                self.pixels.extend([*r, *g, *b]);
            }
        }
        Ok(())
    }
}

impl ImageSource for Cifar {
    fn name(&self) -> &'static str {
        self.edition.name()
    }

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn classes(&self) -> usize {
        self.edition.classes()
    }

    fn class_names(&self) -> Option<Vec<String>> {
        Some(self.edition.class_names().iter().map(|&name| name.to_owned()).collect())
    }

    fn size(&self) -> Option<[u32; 2]> {
        Some([SIDE as u32; 2])
    }

    fn label(&self, row: usize) -> i64 {
        i64::from(self.labels[row])
    }

    fn image<'a>(&'a self, row: usize, _: &'a mut Vec<u8>) -> Result<Image<'a>, DataError> {
        Ok(Image { width: SIDE, height: SIDE, pixels: &self.pixels[row * PIXELS..][..PIXELS] })
    }
}

fn remedy(edition: Edition, directory: &Path) -> String {
    format!("get it with `distgpipe data get {} --dir {}`", edition.name(), directory.display())
}

/// Reads a file, but at most one byte more than expected.
fn read(path: &Path, expected_bytes: usize, remedy: &str) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::with_capacity(expected_bytes + 1);
    let read = open_regular(path).and_then(|file| file.take(expected_bytes as u64 + 1).read_to_end(&mut bytes));
    read.map(|_| bytes).map_err(|error| unreadable(path, &error, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn add(edition: Edition, bytes: &[u8], records: usize) -> Result<Cifar, DataError> {
        let mut set = Cifar { edition, pixels: Vec::new(), labels: Vec::new() };
        set.add(bytes, records, Path::new("some.bin"), "get it anew").map(|()| set)
    }

    /// Two records whose colour planes each count up from a given number.
    fn file(labels: [&[u8]; 2]) -> Vec<u8> {
        let record = |label: &[u8], first: usize| {
            let planes = (0..PIXELS).map(move |i| (first + i / PLANE * 50 + i % PLANE % 7) as u8);
            label.iter().copied().chain(planes).collect::<Vec<u8>>()
        };
        [record(labels[0], 0), record(labels[1], 100)].concat()
    }

    #[test]
    fn planes_become_pixels_and_the_fine_label_counts() {
        for (edition, labels, expected) in
            [(Edition::Ten, [&[9][..], &[0]], [9, 0]), (Edition::Hundred, [&[3, 99][..], &[19, 7]], [99, 7])]
        {
            let set = add(edition, &file(labels), 2).unwrap();
            assert_eq!((set.len(), [set.label(0), set.label(1)]), (2, expected));
            let mut memory = Vec::new();
            let image = set.image(1, &mut memory).unwrap();
            assert_eq!((image.width, image.height, image.pixels.len()), (32, 32, 3072));
            assert_eq!(image.pixels[..6], [100, 150, 200, 101, 151, 201]);
        }
    }

    /// Class names are numbered in alphabetical order in both sets.
    #[test]
    fn every_class_has_its_name() {
        for edition in [Edition::Ten, Edition::Hundred] {
            let names = edition.class_names();
            assert!(names.len() == edition.classes() && names.is_sorted(), "{edition:?}");
        }
        // The first records of the official test files are a cat, and a mountain.
        assert_eq!((Edition::Ten.class_names()[3], Edition::Hundred.class_names()[49]), ("cat", "mountain"));
    }

    #[test]
    fn damaged_files_are_told_with_the_place_and_the_remedy() {
        let text = |bytes: &[u8]| add(Edition::Ten, bytes, 2).unwrap_err().to_string();
        let whole = file([&[9], &[0]]);
        assert_eq!(text(&whole[..6000]), "some.bin: expected 6146 bytes, got 6000: get it anew");
        let longer = [&whole[..], &[1]].concat();
        assert_eq!(text(&longer), "some.bin: expected 6146 bytes, got more: get it anew");
        assert_eq!(
            text(&file([&[9], &[10]])),
            "some.bin, byte 3073: expected a label of 0 to 9 in record 1, got 10: get it anew"
        );
        let hundred = add(Edition::Hundred, &file([&[200, 99], &[0, 100]]), 2).unwrap_err().to_string();
        assert!(hundred.starts_with("some.bin, byte 3075: expected a label of 0 to 99 in record 1"), "{hundred}");
    }

    #[test]
    fn a_missing_set_names_the_command_that_gets_it() {
        let error = Cifar::open(Path::new("/nowhere/c10"), Edition::Ten, Split::Train).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/c10/data_batch_1.bin: "), "{error}");
        assert!(error.ends_with(": get it with `distgpipe data get cifar10 --dir /nowhere/c10`"), "{error}");
    }

    /// Any pixel value is valid, so only the hash detects a corrupt one.
    #[test]
    fn a_file_with_other_pixels_is_told_by_its_hash() {
        let root = std::env::temp_dir().join(format!("distgpipe-{}-cifar", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(root.join("test_batch.bin"), vec![0; 10_000 * Edition::Ten.record_bytes()]).unwrap();
        let said = Cifar::open(&root, Edition::Ten, Split::Test).unwrap_err().to_string();
        assert!(said.contains("test_batch.bin: expected MD5 803d5f7f4d78ea53de84dbe85f74fb6d, got MD5 "), "{said}");
        std::fs::remove_dir_all(root).unwrap();
    }

    proptest! {
        #[test]
        fn bytes_never_panic(
            records in 0usize..3,
            extra in -2i64..3,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..9),
        ) {
            for edition in [Edition::Ten, Edition::Hundred] {
                let bytes = (records * edition.record_bytes()).saturating_add_signed(extra as isize);
                let mut bytes = vec![0; bytes];
                for (place, value) in changes.iter().filter(|_| !bytes.is_empty()).cloned().collect::<Vec<_>>() {
                    let place = place.index(bytes.len());
                    bytes[place] = value;
                }
                if let Ok(set) = add(edition, &bytes, records) {
                    prop_assert!(set.labels.iter().all(|&label| usize::from(label) < edition.classes()));
                }
            }
        }
    }
}
