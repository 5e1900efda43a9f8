//! Text for language models: files of text, tokenized and packed into rows of one length. The target of every token is the
//! token after it.
//!
//! ```text
//!   To be, or not to be: that is the question: …         tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 …
//!                                                        row 0    input t0 t1 t2 t3   target t1 t2 t3 t4
//!                                                        row 1    input t4 t5 t6 t7   target t5 t6 t7 t8
//! ```
//!
//! The last tenth of the rows is for testing. Without a tokenizer, every byte is a token.

use super::folder::unreadable;
use super::tokens::encode_text;
use super::{check, DataError, Dataset, FilePosition, LoadPass, Split};
use crate::driver::pipeline::Batch;
use crate::files::open_regular;
use crate::model::layer::SampleShape;
use std::io::Read;
use std::path::{Path, PathBuf};
use tch::Tensor;

/// The longest text that is read, all files together.
const TEXT_BYTES_MAX: u64 = 1 << 30;
/// One row in so many is for testing.
const TEST_SHARE: usize = 10;
const REMEDY: &str = "name a file of text in UTF-8, or a directory of .txt files";

/// A part of a text.
#[derive(Clone, Debug)]
pub struct Text {
    /// The tokens of all rows of this part, and the one after them.
    tokens: Vec<u32>,
    rows: usize,
    length: usize,
    vocabulary: usize,
    input: Vec<SampleShape>,
}

impl Text {
    /// Reads a file of text, or all `.txt` files of a directory in the order of their names. `tokenizer` is a
    /// `tokenizer.json` of Hugging Face, a directory with that file, or one with `vocab.json` and `merges.txt`.
    ///
    /// # Errors
    /// If a file cannot be read, is not text in UTF-8, or has fewer than two rows of `length` tokens.
    pub fn open(path: &Path, tokenizer: Option<&Path>, length: usize, split: Split) -> Result<Self, DataError> {
        let text = read(path)?;
        let (tokens, vocabulary) = match tokenizer {
            Some(tokenizer) => encode_text(tokenizer, &text)?,
            None => (text.bytes().map(u32::from).collect(), 256),
        };
        Self::new(&tokens, vocabulary, length, split).ok_or_else(|| DataError::Corrupt {
            file: path.to_owned(),
            place: FilePosition::File,
            expected: format!("at least two rows of {length} tokens"),
            got: format!("{} tokens", tokens.len()),
            remedy: "use more text, or a model of fewer tokens".to_owned(),
        })
    }

    fn new(tokens: &[u32], vocabulary: usize, length: usize, split: Split) -> Option<Self> {
        let all = tokens.len().checked_sub(1)?.checked_div(length).filter(|&rows| rows >= 2)?;
        let test = all.div_ceil(TEST_SHARE);
        let rows = match split {
            Split::Train => 0..all - test,
            Split::Test => all - test..all,
        };
        let tokens = tokens.get(rows.start * length..rows.end * length + 1)?.to_vec();
        let input = vec![SampleShape::int(&[i64::try_from(length).ok()?])];
        Some(Text { tokens, rows: rows.len(), length, vocabulary, input })
    }

    /// The number of different tokens that the tokenizer has.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }
}

impl Dataset for Text {
    fn len(&self) -> usize {
        self.rows
    }

    fn classes(&self) -> Option<usize> {
        None
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    fn batch(&self, rows: &[usize], _: LoadPass<'_>) -> Result<Batch, DataError> {
        check(rows, self.rows)?;
        let tensor = |shift: usize| {
            let row = |&row: &usize| &self.tokens[row * self.length + shift..][..self.length];
            let tokens: Vec<i64> = rows.iter().flat_map(row).map(|&token| i64::from(token)).collect();
            Tensor::f_from_slice(&tokens)?.f_view([rows.len() as i64, self.length as i64])
        };
        Ok(Batch::new(tensor(0)?, tensor(1)?))
    }
}

fn read(path: &Path) -> Result<String, DataError> {
    let mut files: Vec<PathBuf> = Vec::new();
    if path.is_dir() {
        let entries = std::fs::read_dir(path).map_err(|e| unreadable(path, &e, REMEDY))?;
        files.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
        files.retain(|file| file.extension().is_some_and(|extension| extension == "txt"));
        files.sort();
    } else {
        files.push(path.to_owned());
    }
    let (mut bytes, mut left) = (Vec::new(), TEXT_BYTES_MAX);
    for file in &files {
        let read = open_regular(file).and_then(|opened| opened.take(left).read_to_end(&mut bytes));
        left -= read.map_err(|e| unreadable(file, &e, REMEDY))? as u64;
    }
    let wrong = |expected: String, place, got: String| DataError::Corrupt {
        file: path.to_owned(),
        place,
        expected,
        got,
        remedy: REMEDY.to_owned(),
    };
    if left == 0 || bytes.is_empty() {
        let expected = format!("text of 1 to {} bytes", TEXT_BYTES_MAX - 1);
        return Err(wrong(expected, FilePosition::File, if left == 0 { "more" } else { "none" }.to_owned()));
    }
    String::from_utf8(bytes).map_err(|error| {
        let place = FilePosition::Byte(error.utf8_error().valid_up_to() as u64);
        wrong("text in UTF-8".to_owned(), place, "other bytes".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor.view(-1)).unwrap()
    }

    #[test]
    fn every_token_has_the_next_one_as_target_and_the_parts_share_no_row() {
        let tokens: Vec<u32> = (0..82).collect();
        let part = |split| Text::new(&tokens, 100, 4, split).unwrap();
        let (train, test) = (part(Split::Train), part(Split::Test));
        assert_eq!((train.len(), test.len()), (18, 2));
        let batch = train.batch(&[17, 0], LoadPass::new(0, 0)).unwrap();
        assert_eq!(batch.inputs[0].size(), [2, 4]);
        assert_eq!(numbers(&batch.inputs[0]), [68, 69, 70, 71, 0, 1, 2, 3]);
        assert_eq!(numbers(&batch.target), [69, 70, 71, 72, 1, 2, 3, 4]);
        assert_eq!(numbers(&test.batch(&[1], LoadPass::new(0, 0)).unwrap().target), [77, 78, 79, 80]);
        assert!(train.batch(&[18], LoadPass::new(0, 0)).is_err());
        for (count, length) in [(0, 4), (8, 4), (9, 0)] {
            assert!(Text::new(&tokens[..count], 100, length, Split::Train).is_none(), "{count} tokens of {length}");
        }
    }

    /// A tokenizer of Hugging Face with a byte-level vocabulary and three merges, and its directory without the JSON.
    #[cfg(feature = "tokenizers")]
    #[test]
    fn a_tokenizer_is_a_file_or_a_directory_and_its_tokens_are_packed() {
        let folder = std::env::temp_dir().join(format!("distgpipe-text-tokens-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // `Ġ` is a space in byte-level vocabularies.
        let words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "c", "Ġ", "ab", "abc", "Ġc"];
        let vocabulary: serde_json::Map<_, _> =
            words.iter().zip(0..).map(|(&w, id)| (w.to_owned(), id.into())).collect();
        let merges = ["a b", "ab c", "Ġ c"];
        let byte_level = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": byte_level, "post_processor": null, "decoder": null,
            "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
        });
        let text = folder.join("text");
        std::fs::write(&text, "abc c ab abc c ab abc c ab abc").unwrap();
        let open = |path: &Path, split| Text::open(&text, Some(path), 2, split).unwrap();
        // abc, Ġc, Ġ, ab, Ġ, abc, …
        let expected = [10, 11, 8, 9, 8, 10, 11, 8, 9, 8, 10, 11, 8, 9, 8, 10];
        let write = |name: &str, content: &str| std::fs::write(folder.join(name), content).unwrap();
        let check = |path: &Path| {
            let (train, test) = (open(path, Split::Train), open(path, Split::Test));
            assert_eq!((train.len(), test.len(), train.vocabulary()), (6, 1, 12), "{}", path.display());
            let batch = train.batch(&[0, 1, 2, 3, 4, 5], LoadPass::new(0, 0)).unwrap();
            assert_eq!(numbers(&batch.inputs[0]), expected[..12]);
            assert_eq!(numbers(&batch.target), expected[1..13]);
            assert_eq!(numbers(&test.batch(&[0], LoadPass::new(0, 0)).unwrap().target), expected[13..15]);
        };
        write("vocab.json", &serde_json::Value::from(vocabulary).to_string());
        write("merges.txt", &format!("#version: 0.2\n{}\n", merges.join("\n")));
        check(&folder);
        write("tokenizer.json", &json.to_string());
        check(&folder.join("tokenizer.json"));
        std::fs::remove_file(folder.join("merges.txt")).unwrap();
        check(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn files_are_read_in_the_order_of_their_names_and_what_is_no_text_is_named() {
        let folder = std::env::temp_dir().join(format!("distgpipe-text-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in [("b.txt", "world"), ("a.txt", "hello "), ("c.md", "not this")] {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let set = Text::open(&folder, None, 2, Split::Train).unwrap();
        assert_eq!((set.len(), set.vocabulary()), (4, 256));
        let batch = set.batch(&[0, 1, 2, 3], LoadPass::new(0, 0)).unwrap();
        assert_eq!(numbers(&batch.inputs[0]), b"hello wo".map(i64::from));
        std::fs::write(folder.join("a.txt"), [b'x', 0xff]).unwrap();
        let said = |path: &Path| Text::open(path, None, 2, Split::Train).unwrap_err().to_string();
        assert!(said(&folder).contains("byte 1: expected text in UTF-8"), "{}", said(&folder));
        assert!(said(&folder.join("missing.txt")).contains(REMEDY));
        let short = Text::open(&folder.join("c.md"), None, 64, Split::Test).unwrap_err().to_string();
        assert!(short.contains("expected at least two rows of 64 tokens, got 8 tokens"), "{short}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
