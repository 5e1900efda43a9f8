//! The validated text of a codec, from which both ends of a link make their instances.

use super::{parse, Codec, CodecError, Executor, SerialExecutor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The text of a codec, such as `sort:6+2`. Only valid texts can be represented.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CodecSpec(String);

impl CodecSpec {
    /// Makes a new codec that runs on this executor.
    pub fn codec(&self, executor: Arc<dyn Executor>) -> Box<dyn Codec> {
        let mut codec = parse(&self.0).expect("parsed when the spec was made");
        codec.set_executor(executor);
        codec
    }

    /// Whether the codec is `raw`, so that tensors are sent unencoded.
    pub fn is_raw(&self) -> bool {
        self.0 == "raw"
    }

    /// Whether the codec uses [`CodecContext::samples`](super::CodecContext::samples).
    pub fn wants_samples(&self) -> bool {
        self.codec(Arc::new(SerialExecutor)).wants_samples()
    }

    /// How many bytes each end of a link keeps of earlier tensors at most, where the text says so.
    pub fn kept_bytes_max(&self) -> u64 {
        self.codec(Arc::new(SerialExecutor)).kept_bytes_max()
    }

    /// Whether what the codec does to a tensor depends on earlier ones.
    pub fn remembers(&self) -> bool {
        self.codec(Arc::new(SerialExecutor)).remembers()
    }

    /// The text that [`parse`] reads.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for CodecSpec {
    fn default() -> Self {
        CodecSpec("raw".to_owned())
    }
}

impl FromStr for CodecSpec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Self, CodecError> {
        parse(text).map(|_| CodecSpec(text.to_owned()))
    }
}

impl TryFrom<String> for CodecSpec {
    type Error = CodecError;

    fn try_from(text: String) -> Result<Self, CodecError> {
        text.parse()
    }
}

impl From<CodecSpec> for String {
    fn from(spec: CodecSpec) -> String {
        spec.0
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_is_text_on_both_sides_and_checked() {
        let spec: CodecSpec = serde_json::from_str("\"sort:6+2\"").unwrap();
        assert_eq!((spec.to_string().as_str(), spec.is_raw()), ("sort:6+2", false));
        assert_eq!(serde_json::to_string(&spec).unwrap(), "\"sort:6+2\"");
        let refused = serde_json::from_str::<CodecSpec>("\"sort:6\"").unwrap_err();
        assert!(refused.to_string().contains("such as sort:6+2"), "{refused}");
        assert!(CodecSpec::default().is_raw());
        let kept = |text: &str| text.parse::<CodecSpec>().unwrap().kept_bytes_max();
        assert_eq!((kept("zstd(delta:3(tile:4))"), kept("tile:4")), (3 << 20, 0));
        let remembers = |text: &str| text.parse::<CodecSpec>().unwrap().remembers();
        for text in ["zstd(feedback(tile:4))", "delta:3(tile:4)", "svd:2"] {
            assert!(remembers(text), "{text}");
        }
        assert!(!remembers("zstd(tile:4)") && !remembers("raw"));
    }
}
