//! Stands in for `tokens.rs` where the feature `tokenizers` is off: the same items, but no tokenizer can be opened.

use super::DataError;
use std::path::Path;

/// A tokenizer. There is none in this build: enable the feature `tokenizers`.
pub enum Tokens {}

/// The token ids of a sentence or a pair of sentences, padded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizedText {
    /// The token ids, padding included.
    pub ids: Vec<u32>,
    /// How many of the ids are not padding.
    pub used: usize,
}

impl Tokens {
    /// Always [`DataError::MissingFeature`].
    pub fn open(path: &Path, _length: usize) -> Result<Self, DataError> {
        let (format, feature) = ("tokenizers of Hugging Face", "tokenizers");
        Err(DataError::MissingFeature { file: path.to_owned(), format, feature })
    }

    /// Cannot be called.
    pub fn vocabulary(&self) -> usize {
        match *self {}
    }

    /// Cannot be called.
    pub fn length(&self) -> usize {
        match *self {}
    }

    /// Cannot be called.
    pub fn encode(&self, _a: &str, _b: Option<&str>) -> Result<TokenizedText, String> {
        match *self {}
    }
}

/// Always [`DataError::MissingFeature`].
pub(super) fn encode_text(tokenizer: &Path, _text: &str) -> Result<(Vec<u32>, usize), DataError> {
    match Tokens::open(tokenizer, 0)? {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opening_a_tokenizer_names_the_feature_that_is_off() {
        let said = Tokens::open(Path::new("x/tokenizer.json"), 32).err().unwrap().to_string();
        let expected =
            "x/tokenizer.json: this build of distgpipe cannot read tokenizers of Hugging Face: enable the crate \
                        feature `tokenizers`";
        assert_eq!(said, expected);
    }
}
