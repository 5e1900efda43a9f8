//! The manifest of a checkpoint. It has the figures of every epoch, and a long run has very many epochs. So it is written from the
//! structures that hold the figures and read into them, without a tree of [`serde_json::Value`].
//!
//! The checksum of a manifest is that of its other fields as JSON without spaces, in alphabetical order. It is verified on the text
//! of the file, so a reader need not know every field. A writer serializes the structures as they are, so their fields are declared
//! in alphabetical order.

use super::{on_disk, own_rule, CheckpointError};
use crate::driver::pipeline::Pipeline;
use crate::engine;
use crate::files::{create_fresh, open_regular};
use crate::model::ModelSpec;
use crate::runtime::optimizer::Optim;
use crate::runtime::parameter_groups::ParameterGroup;
use crate::train::Progress;
use serde::de::value::MapDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Take, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3Default;

/// The version of a checkpoint's layout.
pub(super) const FORMAT: u32 = 1;
/// The name of the file.
pub(super) const MANIFEST: &str = "checkpoint.json";
/// The field with the checksum of all other fields.
const CHECKSUM: &str = "xxh3";
/// The field whose size grows with the run.
const PROGRESS: &str = "progress";
/// The most bytes of all other fields. Some become a [`serde_json::Value`], which takes many times the memory of its text. The progress
/// has no such limit: a run may have any number of epochs.
const OTHER_FIELDS_BYTES_MAX: usize = 64 << 20;
/// The memory that a reader must have for each byte of the file: its text, in a buffer that may have doubled, and the structures.
const MEMORY_PER_BYTE: u128 = 4;
/// The largest part of the file that is read or written at a time.
const PART_BYTES: usize = 1 << 20;
/// After how many bytes the file is synced.
const SYNC_BYTES: usize = 64 << 20;

/// The content of a checkpoint's `checkpoint.json`.
// The fields are in alphabetical order by their names in the file; see the top of this one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    pub(super) files: BTreeMap<String, FileDigest>,
    format: u32,
    /// Patterns of the parameters that are not trained. The optimizer has no state for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<String>,
    /// The parameters that have their own learning rate or weight decay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
    /// Batches trained on; see [`Pipeline::batches_trained`].
    #[serde(rename = "learned")]
    pub batches_trained: u64,
    /// The specification that builds the model; absent for a model of layers of your own.
    pub model: Option<ModelSpec>,
    /// The optimizer of the run, with its settings.
    pub optim: Optim,
    /// How much of the run was done.
    pub progress: Progress,
    /// The seed of initial weights and dropout.
    pub seed: u64,
    /// The caller's settings; see [`Trainer::save_to`](crate::train::Trainer::save_to).
    pub settings: serde_json::Value,
    /// The name of the model's own optimizer, if it has one; `optim` is then unused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_rule: Option<String>,
}

impl Manifest {
    /// The manifest of a checkpoint, without the checksums of its files.
    pub(super) fn new(pipeline: &Pipeline, progress: &Progress, settings: &serde_json::Value) -> Self {
        Manifest {
            files: BTreeMap::new(),
            format: FORMAT,
            frozen: pipeline.frozen().to_vec(),
            groups: pipeline.parameter_groups().to_vec(),
            batches_trained: pipeline.batches_trained(),
            model: pipeline.model().spec.clone(),
            optim: pipeline.optim(),
            progress: progress.clone(),
            seed: pipeline.seed(),
            settings: settings.clone(),
            update_rule: own_rule(pipeline),
        }
    }

    /// Reads a manifest and verifies its checksum. Calls `on_read` after each part.
    pub(super) fn read(file: &Path, on_read: impl Fn()) -> Result<Self, CheckpointError> {
        let opened = open_regular(file).map_err(on_disk("opening", file))?;
        let bytes = opened.metadata().map_err(on_disk("reading", file))?.len();
        let needs_bytes = MEMORY_PER_BYTE * u128::from(bytes);
        if let Err(fault) = engine::require_memory("reading it", needs_bytes, "free some") {
            let expected = "a manifest that fits into memory".to_owned();
            return Err(CheckpointError::Corrupt {
                path: file.to_owned(),
                expected,
                got: format!("{bytes} bytes: {fault}"),
            });
        }
        Self::parse(BufReader::with_capacity(PART_BYTES, Reading { file: opened.take(bytes), on_read }), file)
    }

    /// Parses the content of a file.
    fn parse(content: impl Read, file: &Path) -> Result<Self, CheckpointError> {
        let damaged = |expected: &str, got: String| CheckpointError::Corrupt {
            path: file.to_owned(),
            expected: expected.to_owned(),
            got,
        };
        let no_manifest = |error: serde_json::Error| match error.is_io() {
            true => on_disk("reading", file)(error.into()),
            false => damaged("a checkpoint's manifest", error.to_string()),
        };
        let mut fields: Fields = serde_json::from_reader(content).map_err(no_manifest)?;
        // Checked first, because another format may have other fields.
        let format = fields.0.get("format").map_or("none", |value| value.get());
        if format != FORMAT.to_string() {
            return Err(CheckpointError::Format { path: file.to_owned(), got: format.chars().take(40).collect() });
        }
        let expected = fields.0.remove(CHECKSUM).and_then(|value| serde_json::from_str::<String>(value.get()).ok());
        if expected != Some(fields.checksum()) {
            return Err(damaged("content with the checksum in it", "another checksum".to_owned()));
        }
        let fields = fields.0.iter().map(|(name, value)| (&name[..], &**value));
        Manifest::deserialize(MapDeserializer::new(fields)).map_err(no_manifest)
    }

    /// Writes a manifest with its checksum, and syncs the file. Calls `on_written` after each part. Settings that
    /// [`read`](Self::read) would refuse are an error.
    pub(super) fn write(mut self, file: &Path, on_written: impl Fn()) -> Result<(), CheckpointError> {
        self.check_readable()?;
        let failed = |error: serde_json::Error| on_disk("writing", file)(error.into());
        let mut hash = TextHash::default();
        serde_json::to_writer(&mut hash, &self).map_err(failed)?;
        let created = create_fresh(file).map_err(on_disk("creating", file))?;
        let mut parts = BufWriter::with_capacity(PART_BYTES, Parts { file: created, unsynced: 0, on_written });
        serde_json::to_writer_pretty(&mut parts, &Signed { manifest: &self, xxh3: hash.digest() }).map_err(failed)?;
        let written = parts.write_all(b"\n").and_then(|()| parts.flush());
        written.and_then(|()| parts.get_ref().file.sync_all()).map_err(on_disk("writing", file))
    }

    /// Checks that the fields other than the progress can be read again.
    pub(super) fn check_readable(&mut self) -> Result<(), CheckpointError> {
        let progress = std::mem::take(&mut self.progress);
        let checked = || {
            let text = serde_json::to_vec_pretty(self).map_err(|error| error.to_string())?;
            if text.len() > OTHER_FIELDS_BYTES_MAX {
                return Err(format!("expected at most {OTHER_FIELDS_BYTES_MAX} bytes, got {}", text.len()));
            }
            serde_json::from_slice::<Manifest>(&text).map(drop).map_err(|error| error.to_string())
        };
        let checked = checked();
        self.progress = progress;
        checked.map_err(|why| CheckpointError::Settings { why })
    }

    /// Verifies the checksum of a file in the checkpoint's folder, and returns its path.
    pub(super) fn verify(&self, folder: &Path, name: &str) -> Result<PathBuf, CheckpointError> {
        let Some(expected) = self.files.get(name) else {
            let expected = format!("the checksum of {name}");
            return Err(CheckpointError::Corrupt { path: folder.join(MANIFEST), expected, got: "none".to_owned() });
        };
        let file = folder.join(name);
        let got = FileDigest::of(&file, || {})?;
        if got != *expected {
            return Err(CheckpointError::Corrupt { path: file, expected: expected.text(), got: got.text() });
        }
        Ok(file)
    }
}

/// A manifest as it is written.
#[derive(Serialize)]
struct Signed<'a> {
    #[serde(flatten)]
    manifest: &'a Manifest,
    /// The [`CHECKSUM`].
    xxh3: String,
}

/// The fields of a manifest as text.
struct Fields(BTreeMap<String, Box<RawValue>>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Fields, A::Error> {
                let (mut fields, mut bytes) = (BTreeMap::new(), 0);
                while let Some((name, value)) = object.next_entry::<String, Box<RawValue>>()? {
                    if name != PROGRESS {
                        bytes += name.len() + value.get().len();
                    }
                    if bytes > OTHER_FIELDS_BYTES_MAX {
                        let most =
                            format!("more than {OTHER_FIELDS_BYTES_MAX} bytes of other fields than `{PROGRESS}`");
                        return Err(A::Error::custom(most));
                    }
                    fields.insert(name, value);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

impl Fields {
    /// The checksum of the fields.
    fn checksum(&self) -> String {
        let (mut hash, mut before) = (TextHash::default(), '{');
        for (name, value) in &self.0 {
            hash.add(format!("{before}{}:", serde_json::Value::from(&name[..])).as_bytes());
            hash.add(value.get().as_bytes());
            before = ',';
        }
        hash.add(b"}");
        hash.digest()
    }
}

/// The checksum of JSON, whose spaces between tokens do not count.
#[derive(Default)]
struct TextHash {
    hash: Xxh3Default,
    in_string: bool,
    /// Whether the next character of the string follows a backslash.
    escaped: bool,
}

impl TextHash {
    fn add(&mut self, text: &[u8]) {
        let mut start = 0;
        for (i, byte) in text.iter().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = self.in_string,
                b'"' => self.in_string = !self.in_string,
                b' ' | b'\n' | b'\r' | b'\t' if !self.in_string => {
                    self.hash.update(&text[start..i]);
                    start = i + 1;
                }
                _ => {}
            }
        }
        self.hash.update(&text[start..]);
    }

    fn digest(&self) -> String {
        format!("{:016x}", self.hash.digest())
    }
}

impl Write for TextHash {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.add(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that is read.
struct Reading<F> {
    file: Take<File>,
    /// Called after each part.
    on_read: F,
}

impl<F: Fn()> Read for Reading<F> {
    fn read(&mut self, part: &mut [u8]) -> io::Result<usize> {
        let most = part.len().min(PART_BYTES);
        let bytes = self.file.read(&mut part[..most])?;
        (self.on_read)();
        Ok(bytes)
    }
}

/// A file that is synced every now and then, so that no call takes long.
struct Parts<F> {
    file: File,
    /// Bytes written since the file was last synced.
    unsynced: usize,
    /// Called after each part.
    on_written: F,
}

impl<F: Fn()> Write for Parts<F> {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        let bytes = self.file.write(&part[..part.len().min(PART_BYTES)])?;
        self.unsynced += bytes;
        if self.unsynced >= SYNC_BYTES {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        (self.on_written)();
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Length and checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileDigest {
    bytes: u64,
    xxh3: String,
}

impl FileDigest {
    /// Calls `on_read` after each part.
    pub fn of(path: &Path, on_read: impl Fn()) -> Result<Self, CheckpointError> {
        let mut file = open_regular(path).map_err(on_disk("opening", path))?;
        let (mut hash, mut bytes) = (Xxh3Default::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer).map_err(on_disk("reading", path))? {
                0 => return Ok(FileDigest { bytes, xxh3: format!("{:016x}", hash.digest()) }),
                n => {
                    hash.update(&buffer[..n]);
                    bytes += n as u64;
                    on_read();
                }
            }
        }
    }

    fn text(&self) -> String {
        format!("{} bytes with checksum {}", self.bytes, self.xxh3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As the first version of this program wrote it, with everything that a manifest may have.
    const FIRST: &str = include_str!("../../../tests/golden/checkpoint/checkpoint.json");

    fn parse(text: &[u8]) -> Result<Manifest, CheckpointError> {
        Manifest::parse(text, Path::new("checkpoint.json"))
    }

    /// A file of this test's own.
    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("distgpipe-{}-manifest-{name}", std::process::id()))
    }

    fn written(manifest: &Manifest, file: &Path) -> String {
        manifest.clone().write(file, || {}).unwrap();
        let text = std::fs::read_to_string(file).unwrap();
        std::fs::remove_file(file).unwrap();
        text
    }

    /// The fields of [`FIRST`] without the checksum.
    fn first_fields() -> &'static str {
        FIRST.split_once(",\n  \"xxh3\": \"01f").unwrap().0.strip_prefix('{').unwrap()
    }

    /// The text of a manifest with these fields, whose checksum is right.
    fn signed(fields: &str) -> String {
        let mut hash = TextHash::default();
        hash.add(format!("{{{fields}}}").as_bytes());
        format!("{{{fields},\"xxh3\":\"{}\"}}", hash.digest())
    }

    #[test]
    fn a_manifest_of_the_first_version_is_read_and_written_byte_for_byte() {
        let manifest = parse(FIRST.as_bytes()).unwrap();
        assert_eq!((manifest.batches_trained, manifest.seed, &manifest.settings["lr"]), (13, 7, &json!(1e21)));
        assert_eq!(written(&manifest, &file("first")), FIRST);
    }

    /// A version that verifies the checksum of the sorted fields reads it too. If this fails, a field is out of order.
    #[test]
    fn the_fields_of_all_structures_are_in_alphabetical_order() {
        let mut manifest = parse(FIRST.as_bytes()).unwrap();
        for optim in [Optim::sgd(0.9), Optim::adam(), Optim::adamw(), Optim::rms_prop(0.9)] {
            manifest.optim = optim;
            // The keys of a `Value` are sorted.
            let sorted = serde_json::to_value(&manifest).unwrap().to_string();
            assert_eq!(serde_json::to_string(&manifest).unwrap(), sorted);
            assert_eq!(parse(written(&manifest, &file("order")).as_bytes()).unwrap(), manifest);
        }
    }

    #[test]
    fn a_manifest_that_is_cut_short_or_changed_in_any_place_is_refused() {
        let (text, manifest) = (FIRST.trim_end().as_bytes(), parse(FIRST.as_bytes()).unwrap());
        for end in 0..text.len() {
            assert!(matches!(parse(&text[..end]), Err(CheckpointError::Corrupt { .. })), "{end}");
        }
        for place in 0..text.len() {
            for wrong in [text[place] ^ 1, text[place] ^ 4, b'"', b' ', 0, 0xff] {
                let mut changed = text.to_vec();
                changed[place] = wrong;
                if let Ok(read) = parse(&changed) {
                    let spaces = [text[place], wrong].iter().all(u8::is_ascii_whitespace);
                    assert!(read == manifest && (spaces || wrong == text[place]), "{place}: {wrong}");
                }
            }
        }
    }

    #[test]
    fn spaces_and_the_order_of_the_outer_fields_do_not_count_and_unknown_fields_do() {
        let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(FIRST).unwrap();
        let backwards: Vec<String> = fields.iter().rev().map(|(name, value)| format!("{name:?}:\n{value}")).collect();
        let manifest = parse(format!("{{\t{}\r}}", backwards.join(" ,")).as_bytes()).unwrap();
        assert_eq!(manifest, parse(FIRST.as_bytes()).unwrap());
        let later = signed(&format!("\"a\":{{}},{}", first_fields()));
        assert_eq!(parse(later.as_bytes()).unwrap(), manifest, "of a later version");
        let unsigned = FIRST.replacen('{', "{\"a\":{},", 1);
        assert!(parse(unsigned.as_bytes()).unwrap_err().to_string().contains("another checksum"));
    }

    /// A file that was written and then refused once cost a run all its checkpoints.
    #[test]
    fn settings_that_could_not_be_read_again_are_not_written() {
        let file = file("limit");
        let mut manifest = parse(FIRST.as_bytes()).unwrap();
        manifest.settings = "".into();
        let rest = Manifest { progress: Progress::default(), ..manifest.clone() };
        let rest = OTHER_FIELDS_BYTES_MAX - serde_json::to_vec_pretty(&rest).unwrap().len();
        manifest.settings = "a".repeat(rest).into();
        manifest.clone().write(&file, || {}).unwrap();
        assert!(Manifest::read(&file, || {}).unwrap() == manifest);
        std::fs::remove_file(&file).unwrap();
        manifest.settings = "a".repeat(rest + 1).into();
        let refused = manifest.clone().write(&file, || {}).unwrap_err();
        assert!(refused.to_string().contains(": expected at most 67108864 bytes, got 67108865;"), "{refused}");
        let nested = |levels: usize| (0..levels).fold(json!(0), |inner, _| json!([inner]));
        manifest.settings = nested(126);
        manifest.clone().write(&file, || {}).unwrap();
        assert!(Manifest::read(&file, || {}).unwrap() == manifest);
        std::fs::remove_file(&file).unwrap();
        manifest.settings = nested(127);
        let refused = manifest.write(&file, || {}).unwrap_err();
        assert!(matches!(refused, CheckpointError::Settings { .. }) && !file.exists(), "{refused}");
    }

    #[test]
    fn hostile_manifests_are_refused() {
        let deep = |open: &str, close: &str| format!("{}0{}", open.repeat(1 << 20), close.repeat(1 << 20));
        let (arrays, objects) = (deep("[", "]"), deep("{\"a\":", "}"));
        let epochs = signed(&first_fields().replace("\"epochs\": [", "\"epochs\": [[],"));
        let texts = [
            String::new(),
            "\0".repeat(1000),
            "[]".to_owned(),
            arrays.clone(),
            "[".repeat(1 << 20),
            signed(&format!("\"format\":1,\"settings\":{arrays}")),
            signed(&format!("\"format\":1,\"progress\":{objects}")),
            epochs,
        ];
        for text in texts {
            let refused = parse(text.as_bytes()).unwrap_err();
            assert!(matches!(refused, CheckpointError::Corrupt { .. }), "{refused}");
        }
        let large = format!("{{\"a\":\"{}\"}}", "a".repeat(OTHER_FIELDS_BYTES_MAX));
        let refused = parse(large.as_bytes()).unwrap_err().to_string();
        assert!(refused.contains("more than 67108864 bytes of other fields than `progress`"), "{refused}");
        // More than the memory of any machine: an endless string would fill it.
        let file = file("sparse");
        std::fs::write(&file, "{\"progress\":\"").unwrap();
        File::options().write(true).open(&file).unwrap().set_len(1 << 42).unwrap();
        let refused = Manifest::read(&file, || {}).unwrap_err().to_string();
        assert!(
            refused.contains("a manifest that fits into memory") && refused.contains("4398046511104 bytes"),
            "{refused}"
        );
        std::fs::remove_file(file).unwrap();
        for (format, got) in [("2", "2"), ("\"1\"", "\"1\""), (&arrays[..], &arrays[..40])] {
            let refused = parse(format!("{{\"format\": {format}}}").as_bytes()).unwrap_err();
            assert!(matches!(&refused, CheckpointError::Format { got: told, .. } if told == got), "{refused}");
        }
    }

    /// A disk that takes long over all of a long manifest has not stalled.
    #[test]
    fn each_part_of_a_long_manifest_is_an_answer_of_the_disk() {
        let (file, parts) = (file("parts"), std::cell::Cell::new(0));
        let count = || parts.set(parts.get() + 1);
        let mut manifest = parse(FIRST.as_bytes()).unwrap();
        manifest.settings = "a".repeat(30 * PART_BYTES).into();
        manifest.clone().write(&file, count).unwrap();
        assert!(parts.replace(0) >= 30, "written");
        assert!(Manifest::read(&file, count).unwrap() == manifest);
        assert!(parts.get() >= 30, "{} read", parts.get());
        std::fs::remove_file(file).unwrap();
    }
}
