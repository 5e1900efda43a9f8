//! Tokenizes sentences for RoBERTa: `<s> a </s>` or `<s> a </s></s> b </s>`, truncated at the longer sentence and padded
//! with `<pad>` to a fixed length.
//!
//! Hugging Face's `tokenizers` does the work. This module finds the files and sets the options.

use super::folder::unreadable;
use super::{DataError, FilePosition};
use crate::files::open_regular;
use std::io::ErrorKind;
use std::path::Path;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::{AddedToken, EncodeInput, PaddingParams, PaddingStrategy, Tokenizer, TruncationParams};

/// Special tokens of RoBERTa.
const START: &str = "<s>";
const END: &str = "</s>";
const PADDING: &str = "<pad>";
/// The shortest length with room for two sentences.
const LENGTH_MIN: usize = 8;
const LENGTH_MAX: usize = 1 << 16;

/// A tokenizer with a fixed output length.
pub struct Tokens {
    tokenizer: Tokenizer,
    length: usize,
}

/// The token ids of a sentence or a pair of sentences, padded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizedText {
    /// The token ids, padding included.
    pub ids: Vec<u32>,
    /// How many of the ids are not padding.
    pub used: usize,
}

impl Tokens {
    /// Reads a `tokenizer.json`, a folder with that file, or a folder with `vocab.json` and `merges.txt`.
    pub fn open(path: &Path, length: usize) -> Result<Self, DataError> {
        if !(LENGTH_MIN..=LENGTH_MAX).contains(&length) {
            return Err(DataError::Unsuitable {
                set: "tokens",
                expected: format!("a model of {LENGTH_MIN} to {LENGTH_MAX} tokens"),
                got: length.to_string(),
            });
        }
        Tokens::new(read(path)?, length, path)
    }

    fn new(mut tokenizer: Tokenizer, length: usize, path: &Path) -> Result<Self, DataError> {
        let Some(pad_id) = tokenizer.token_to_id(PADDING) else {
            return Err(damaged(path, format!("a token `{PADDING}`"), "none".to_owned()));
        };
        tokenizer.with_padding(Some(PaddingParams {
            strategy: PaddingStrategy::Fixed(length),
            pad_id,
            pad_token: PADDING.to_owned(),
            ..PaddingParams::default()
        }));
        // The default strategy truncates the longer sentence first.
        let truncation = TruncationParams { max_length: length, ..TruncationParams::default() };
        tokenizer
            .with_truncation(Some(truncation))
            .map_err(|e| damaged(path, format!("room for {length} tokens"), e.to_string()))?;
        Ok(Tokens { tokenizer, length })
    }

    /// The size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// The length that every sentence is padded to.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Tokenizes a sentence or a pair of sentences.
    pub fn encode(&self, a: &str, b: Option<&str>) -> Result<TokenizedText, String> {
        let input: EncodeInput<'_> = match b {
            Some(b) => (a, b).into(),
            None => a.into(),
        };
        let encoding = self.tokenizer.encode(input, true).map_err(|e| e.to_string())?;
        let used = encoding.get_attention_mask().iter().filter(|&&mask| mask == 1).count();
        if encoding.len() != self.length {
            return Err(format!("{} tokens instead of {}", encoding.len(), self.length));
        }
        Ok(TokenizedText { ids: encoding.get_ids().to_vec(), used })
    }
}

/// The tokens of a text, without special ones, and the size of the vocabulary. `tokenizer` is what [`Tokens::open`] takes.
pub(super) fn encode_text(tokenizer: &Path, text: &str) -> Result<(Vec<u32>, usize), DataError> {
    let mut opened = read(tokenizer)?;
    opened.with_padding(None);
    let untruncated = opened.with_truncation(None).map(|_| ());
    let encoding = untruncated.and_then(|()| opened.encode(text, false));
    let encoding = encoding.map_err(|e| damaged(tokenizer, "a tokenizer for this text".to_owned(), e.to_string()))?;
    Ok((encoding.get_ids().to_vec(), opened.get_vocab_size(true)))
}

/// Checks that a file of the tokenizer is not a pipe, for which the library that reads it would wait. The library reports
/// a file that does not exist.
fn check_regular(path: &Path) -> Result<(), DataError> {
    let remedy = "name RoBERTa's tokenizer.json, or the directory with vocab.json and merges.txt";
    match open_regular(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(unreadable(path, &error, remedy)),
        _ => Ok(()),
    }
}

/// The tokenizer in a `tokenizer.json`, in a folder with that file, or in one with `vocab.json` and `merges.txt`.
fn read(path: &Path) -> Result<Tokenizer, DataError> {
    let json = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    if json.is_file() || !path.is_dir() {
        whole(&json)
    } else {
        from_parts(path)
    }
}

fn whole(path: &Path) -> Result<Tokenizer, DataError> {
    check_regular(path)?;
    Tokenizer::from_file(path).map_err(|e| damaged(path, "a tokenizer.json of Hugging Face".to_owned(), e.to_string()))
}

/// Builds RoBERTa's tokenizer from its two files, as Hugging Face does.
fn from_parts(directory: &Path) -> Result<Tokenizer, DataError> {
    let (vocabulary, merges) = (directory.join("vocab.json"), directory.join("merges.txt"));
    check_regular(&vocabulary)?;
    check_regular(&merges)?;
    let wrong =
        |e: tokenizers::Error| damaged(directory, "vocab.json and merges.txt of RoBERTa".to_owned(), e.to_string());
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let bpe = BPE::from_file(&text(&vocabulary), &text(&merges)).build().map_err(wrong)?;
    let mut tokenizer = Tokenizer::new(bpe);
    let number = |token: &str| {
        let id = tokenizer.token_to_id(token);
        id.map(|id| (token.to_owned(), id))
            .ok_or_else(|| damaged(&vocabulary, format!("a token `{token}`"), "none".to_owned()))
    };
    let processing = RobertaProcessing::new(number(END)?, number(START)?).trim_offsets(true).add_prefix_space(false);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer.with_post_processor(Some(processing));
    let special: Vec<AddedToken> = [START, PADDING, END, "<unk>", "<mask>"]
        .iter()
        .map(|token| AddedToken::from(*token, true).lstrip(*token == "<mask>"))
        .collect();
    tokenizer.add_special_tokens(&special);
    Ok(tokenizer)
}

fn damaged(path: &Path, expected: String, got: String) -> DataError {
    DataError::Corrupt {
        file: path.to_owned(),
        place: FilePosition::File,
        expected,
        got,
        remedy: "use the tokenizer files that come with the model's weights".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::path::PathBuf;

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
    }

    #[test]
    fn both_forms_of_a_tokenizer_give_what_hugging_face_gives() {
        let golden_text = std::fs::read_to_string(golden().join("tokens.json")).unwrap();
        let expected: Value = serde_json::from_str(&golden_text).unwrap();
        let length = expected["length"].as_u64().unwrap() as usize;
        // A tokenizer.json in the folder takes precedence, so the two files are read from a folder without it.
        let parts = Tokens::new(from_parts(&golden().join("tokenizer")).unwrap(), length, &golden()).unwrap();
        let whole = Tokens::open(&golden().join("tokenizer"), length).unwrap();
        let file = Tokens::open(&golden().join("tokenizer/tokenizer.json"), length).unwrap();
        assert_eq!((whole.vocabulary(), parts.vocabulary()), (file.vocabulary(), file.vocabulary()));
        for case in expected["cases"].as_array().unwrap() {
            let numbers = |key: &str| case[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32);
            let encoded = TokenizedText { ids: numbers("ids").collect(), used: numbers("mask").sum::<u32>() as usize };
            for tokens in [&whole, &file, &parts] {
                assert_eq!(
                    tokens.encode(case["a"].as_str().unwrap(), case["b"].as_str()),
                    Ok(encoded.clone()),
                    "{case}"
                );
            }
        }
    }

    #[test]
    fn files_that_are_no_tokenizer_are_named() {
        let said = |path: PathBuf| Tokens::open(&path, 32).err().unwrap().to_string();
        assert!(said(golden().join("tokens.json")).contains("expected a tokenizer.json of Hugging Face"));
        assert!(said(golden().join("images")).contains("expected vocab.json and merges.txt of RoBERTa"));
        let missing = said(golden().join("missing"));
        assert!(missing.contains("missing: expected") && missing.contains("weights"), "{missing}");
        assert!(Tokens::open(&golden().join("tokenizer"), 4).is_err());
    }
}
