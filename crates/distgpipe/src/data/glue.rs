//! Two tasks of GLUE (Wang et al. 2018), in its own files: RTE (does the first sentence entail the second?) and CoLA (is
//! the sentence grammatical?).
//!
//! ```text
//! RTE     train.tsv, dev.tsv    a header, then: index, sentence1, sentence2, entailment | not_entailment
//! CoLA    train.tsv, dev.tsv    source, 1 | 0, mark, sentence
//! ```
//!
//! Columns are separated by tabs, and quotes have no special meaning. `entailment` is class 0, as in Hugging Face's
//! version. GLUE does not publish the labels of test.tsv, so dev.tsv is the test set.

use super::folder::unreadable;
use super::tokens::Tokens;
use super::{check, DataError, Dataset, FilePosition, LoadPass, Split};
use crate::driver::pipeline::Batch;
use crate::files::open_regular;
use crate::model::layer::SampleShape;
use std::io::Read;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};

/// The largest file accepted, in bytes. The largest official file has less than a million.
const FILE_BYTES_MAX: u64 = 64 << 20;
const COLUMNS: usize = 4;

/// The supported tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Recognizing Textual Entailment.
    Rte,
    /// The Corpus of Linguistic Acceptability.
    Cola,
}

/// A row of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The first sentence.
    pub a: String,
    /// The second sentence, for a task of sentence pairs.
    pub b: Option<String>,
    /// The class number.
    pub label: i64,
}

impl Task {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Task::Rte => "rte",
            Task::Cola => "cola",
        }
    }

    /// The names of the classes, by class number.
    pub fn class_names(self) -> [&'static str; 2] {
        match self {
            Task::Rte => ["entailment", "not_entailment"],
            Task::Cola => ["unacceptable", "acceptable"],
        }
    }

    /// The folder that the official archive unpacks to.
    pub fn folder(self) -> &'static str {
        match self {
            Task::Rte => "RTE",
            Task::Cola => "CoLA",
        }
    }

    /// The published number of rows in a split.
    pub fn rows(self, split: Split) -> usize {
        match (self, split) {
            (Task::Rte, Split::Train) => 2490,
            (Task::Rte, Split::Test) => 277,
            (Task::Cola, Split::Train) => 8551,
            (Task::Cola, Split::Test) => 1043,
        }
    }

    /// Reads a split, from `directory` or from the subfolder that the official archive unpacks to. The file must have all
    /// its [rows](Task::rows), because a file truncated at the end of a line looks valid.
    pub fn read(self, directory: &Path, split: Split) -> Result<Vec<Row>, DataError> {
        let unpacked = directory.join(self.folder());
        let root = if unpacked.is_dir() { unpacked } else { directory.to_owned() };
        let path = root.join(match split {
            Split::Train => "train.tsv",
            Split::Test => "dev.tsv",
        });
        let remedy = format!("get it with `distgpipe data get {} --dir {}`", self.name(), directory.display());
        let mut bytes = Vec::new();
        let read = open_regular(&path).and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes));
        read.map_err(|e| unreadable(&path, &e, &remedy))?;
        let damaged = |place, expected: String, got| DataError::Corrupt { file: path, place, expected, got, remedy };
        match self.parse(&bytes) {
            Ok(rows) if rows.len() == self.rows(split) => Ok(rows),
            Ok(rows) => {
                Err(damaged(FilePosition::File, format!("its {} rows", self.rows(split)), rows.len().to_string()))
            }
            Err((place, expected, got)) => Err(damaged(place, expected.to_owned(), got)),
        }
    }

    fn parse(self, bytes: &[u8]) -> Result<Vec<Row>, (FilePosition, &'static str, String)> {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| (FilePosition::Byte(e.valid_up_to() as u64), "text in UTF-8", "other bytes".to_owned()))?;
        let headings = usize::from(self == Task::Rte);
        let mut rows = Vec::new();
        for (i, line) in text.lines().enumerate().skip(headings) {
            let columns: Vec<&str> = line.split('\t').collect();
            let row = <[&str; COLUMNS]>::try_from(columns).ok().and_then(|columns| self.row(columns));
            rows.push(row.ok_or_else(|| {
                let expected = match self {
                    Task::Rte => "index, sentence1, sentence2 and `entailment` or `not_entailment`, separated by tabs",
                    Task::Cola => "source, 0 or 1, mark and sentence, separated by tabs",
                };
                let start: String = line.chars().take(60).collect();
                (FilePosition::Line(i as u64 + 1), expected, format!("`{start}…`"))
            })?);
        }
        match rows.is_empty() {
            true => Err((FilePosition::File, "rows", "none".to_owned())),
            false => Ok(rows),
        }
    }

    fn row(self, columns: [&str; COLUMNS]) -> Option<Row> {
        match self {
            Task::Rte => {
                let [_, a, b, label] = columns;
                let label = self.class_names().iter().position(|known| *known == label)?;
                Some(Row { a: a.to_owned(), b: Some(b.to_owned()), label: label as i64 })
            }
            Task::Cola => {
                let [_, label, _, sentence] = columns;
                let label = ["0", "1"].iter().position(|known| *known == label)?;
                Some(Row { a: sentence.to_owned(), b: None, label: label as i64 })
            }
        }
    }
}

/// One split of a task, tokenized.
#[derive(Debug)]
pub struct Glue {
    /// The token ids: a fixed number for each row.
    ids: Vec<i64>,
    /// For each row, how many tokens are not padding.
    used: Vec<usize>,
    labels: Vec<i64>,
    class_names: Option<[&'static str; 2]>,
    input: [SampleShape; 2],
}

impl Glue {
    /// Reads and tokenizes a split.
    ///
    /// # Errors
    /// If the file or a sentence in it is not valid.
    pub fn open(directory: &Path, task: Task, split: Split, tokens: &Tokens) -> Result<Self, DataError> {
        let set = Glue::encoded(task.read(directory, split)?, tokens, directory)?;
        Ok(Glue { class_names: Some(task.class_names()), ..set })
    }

    /// Sentences, or pairs of them, without classes, for prediction.
    ///
    /// # Errors
    /// If the tokenizer does not take one of them.
    pub fn unlabelled(texts: Vec<(String, Option<String>)>, tokens: &Tokens) -> Result<Self, DataError> {
        let rows = texts.into_iter().map(|(a, b)| Row { a, b, label: 0 }).collect();
        Glue::encoded(rows, tokens, Path::new("text"))
    }

    fn encoded(rows: Vec<Row>, tokens: &Tokens, directory: &Path) -> Result<Self, DataError> {
        let shape = SampleShape::int(&[tokens.length() as i64]);
        let input = [shape.clone(), shape];
        let mut set = Glue { ids: Vec::new(), used: Vec::new(), labels: Vec::new(), class_names: None, input };
        for row in rows {
            let encoded = tokens.encode(&row.a, row.b.as_deref()).map_err(|got| DataError::Corrupt {
                file: PathBuf::from(directory),
                place: FilePosition::Line(set.labels.len() as u64 + 1),
                expected: "a sentence that the tokenizer takes".to_owned(),
                got,
                remedy: "use the tokenizer files that come with the model's weights".to_owned(),
            })?;
            set.ids.extend(encoded.ids.iter().map(|&id| i64::from(id)));
            set.used.push(encoded.used);
            set.labels.push(row.label);
        }
        Ok(set)
    }
}

impl Dataset for Glue {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn classes(&self) -> Option<usize> {
        Some(2)
    }

    fn class_names(&self) -> Option<Vec<String>> {
        self.class_names.map(|names| names.map(str::to_owned).to_vec())
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    fn batch(&self, rows: &[usize], _: LoadPass<'_>) -> Result<Batch, DataError> {
        check(rows, self.len())?;
        let length = self.input[0].dims[0] as usize;
        let ids: Vec<i64> = rows.iter().flat_map(|row| &self.ids[row * length..][..length]).copied().collect();
        let mask: Vec<i64> =
            rows.iter().flat_map(|&row| (0..length).map(move |i| i64::from(i < self.used[row]))).collect();
        let labels: Vec<i64> = rows.iter().map(|&row| self.labels[row]).collect();
        let shape = [rows.len() as i64, length as i64];
        let tensor = |values: &[i64]| Tensor::f_from_slice(values)?.f_view(shape);
        Ok(Batch {
            inputs: vec![tensor(&ids)?, tensor(&mask)?],
            target: Tensor::f_from_slice(&labels)?,
            samples: Vec::new(),
        })
    }
}

/// The number of tokens per sample that a model takes, if its input is token ids and their mask.
pub fn token_length(input: &[SampleShape]) -> Option<usize> {
    match input {
        [ids, mask] if ids == mask && ids.kind == Kind::Int64 => match ids.dims[..] {
            [length] => usize::try_from(length).ok(),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RTE: &str = "index\tsentence1\tsentence2\tlabel\n\
                       0\tNo \"weapons were found.\tThere are weapons.\tnot_entailment\r\n\
                       7\tIt rains in Spain.\tIt rains.\tentailment\n";
    const COLA: &str = "gj04\t1\t\tThe more we study verbs, the crazier they get.\nks08\t0\t*\tThey drank the pub.\n";

    #[test]
    fn rows_are_read_by_the_official_columns() {
        let row = |a: &str, b: Option<&str>, label| Row { a: a.to_owned(), b: b.map(str::to_owned), label };
        assert_eq!(
            Task::Rte.parse(RTE.as_bytes()).unwrap(),
            [
                row("No \"weapons were found.", Some("There are weapons."), 1),
                row("It rains in Spain.", Some("It rains."), 0)
            ]
        );
        assert_eq!(
            Task::Cola.parse(COLA.as_bytes()).unwrap(),
            [row("The more we study verbs, the crazier they get.", None, 1), row("They drank the pub.", None, 0)]
        );
    }

    #[test]
    fn bad_rows_are_told_with_their_line() {
        for (task, text, place) in [
            (Task::Rte, RTE.replace("not_", "un"), FilePosition::Line(2)),
            (Task::Rte, RTE.replace("rains in Spain.\t", ""), FilePosition::Line(3)),
            (Task::Rte, format!("{RTE}\n"), FilePosition::Line(4)),
            (Task::Rte, "index\tsentence1\tsentence2\tlabel\n".to_owned(), FilePosition::File),
            (Task::Cola, COLA.replace("\t0\t", "\t2\t"), FilePosition::Line(2)),
            (Task::Cola, String::new(), FilePosition::File),
        ] {
            assert_eq!(task.parse(text.as_bytes()).unwrap_err().0, place, "{text:?}");
        }
        assert_eq!(Task::Cola.parse(b"a\t1\t\t\xff").unwrap_err().0, FilePosition::Byte(5));
        let missing = Task::Rte.read(Path::new("/nowhere"), Split::Test).unwrap_err().to_string();
        assert!(missing.contains("/nowhere/dev.tsv: ") && missing.contains("`distgpipe data get rte --dir /nowhere`"));
    }

    /// A file truncated at the end of a line is well-formed.
    #[test]
    fn a_file_that_was_cut_short_is_told_by_its_rows() {
        let root = std::env::temp_dir().join(format!("distgpipe-{}-glue", std::process::id()));
        std::fs::create_dir_all(root.join("CoLA")).unwrap();
        let file = root.join("CoLA/dev.tsv");
        let read = |rows: usize| {
            std::fs::write(&file, "gj04\t1\t\tThey left.\n".repeat(rows)).unwrap();
            Task::Cola.read(&root, Split::Test)
        };
        assert_eq!(read(1043).unwrap().len(), 1043);
        let said = read(1042).unwrap_err().to_string();
        assert!(said.contains("dev.tsv: expected its 1043 rows, got 1042: get it with `distgpipe data get"), "{said}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    #[cfg(feature = "tokenizers")]
    fn batches_are_numbers_masks_and_classes() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizer");
        let tokens = Tokens::open(&golden, 40).unwrap();
        let set = Glue::encoded(Task::Rte.parse(RTE.as_bytes()).unwrap(), &tokens, Path::new("RTE")).unwrap();
        assert_eq!(token_length(set.input()), Some(40));
        let batch = set.batch(&[1, 0], LoadPass::new(0, 0)).unwrap();
        assert_eq!(Vec::<i64>::try_from(&batch.target).unwrap(), [0, 1]);
        let expected = tokens.encode("It rains in Spain.", Some("It rains.")).unwrap();
        let ids = Vec::<i64>::try_from(&batch.inputs[0].get(0)).unwrap();
        assert_eq!(ids, expected.ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>());
        let mask = Vec::<i64>::try_from(&batch.inputs[1].get(0)).unwrap();
        assert_eq!(mask.iter().sum::<i64>(), expected.used as i64);
        // This vocabulary's padding token is 1; it fills the positions where the mask is 0.
        assert!(ids.iter().zip(&mask).all(|(&id, &mask)| (id == 1) == (mask == 0)));
    }

    proptest! {
        #[test]
        fn bytes_never_panic(bytes in prop::collection::vec(prop_oneof![Just(b'\t'), Just(b'\n'), any::<u8>()], 0..200)) {
            let _ = (Task::Rte.parse(&bytes), Task::Cola.parse(&bytes));
        }
    }
}
