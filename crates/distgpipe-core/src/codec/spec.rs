//! A codec as it is written down: checked when it is made, so that both ends of a link can make their own from it.

use super::{parse, Alone, Codec, CodecError, Crew};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The text of a codec that exists, such as `sort:6+2`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Spec(String);

impl Spec {
    /// A codec of this kind, as new, with threads to work on.
    pub fn codec(&self, crew: Arc<dyn Crew>) -> Box<dyn Codec> {
        let mut codec = parse(&self.0).expect("parsed when the spec was made");
        codec.set_crew(crew);
        codec
    }

    /// Whether tensors go as they are.
    pub fn is_raw(&self) -> bool {
        self.0 == "raw"
    }

    /// Whether it remembers samples.
    pub fn wants_samples(&self) -> bool {
        self.codec(Arc::new(Alone)).wants_samples()
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Spec {
    fn default() -> Self {
        Spec("raw".to_owned())
    }
}

impl FromStr for Spec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Self, CodecError> {
        parse(text).map(|_| Spec(text.to_owned()))
    }
}

impl TryFrom<String> for Spec {
    type Error = CodecError;

    fn try_from(text: String) -> Result<Self, CodecError> {
        text.parse()
    }
}

impl From<Spec> for String {
    fn from(spec: Spec) -> String {
        spec.0
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_is_text_on_both_sides_and_checked() {
        let spec: Spec = serde_json::from_str("\"sort:6+2\"").unwrap();
        assert_eq!((spec.to_string().as_str(), spec.is_raw()), ("sort:6+2", false));
        assert_eq!(serde_json::to_string(&spec).unwrap(), "\"sort:6+2\"");
        let refused = serde_json::from_str::<Spec>("\"sort:6\"").unwrap_err();
        assert!(refused.to_string().contains("such as sort:6+2"), "{refused}");
        assert!(Spec::default().is_raw());
    }
}
