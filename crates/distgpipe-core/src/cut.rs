//! Rules for cutting a model that do not require counting all of its layers.
//!
//! `first=1,last=1` is split learning: the client keeps the first and the last layer, and the server runs those in
//! between. `after=embeddings,encoder.layer.10` cuts after the layers with these names.

use crate::partition::{Balance, PartitionError};
use std::fmt;
use std::str::FromStr;

/// The number of layer names that an error lists from each end of the model.
const LISTED: usize = 6;

/// Why a rule is invalid, or does not fit a model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// The text is not a rule.
    #[error("expected `first=1,last=1`, `first=1` or `after=LAYER,LAYER…`, got `{got}`")]
    Text {
        /// The beginning of the text.
        got: String,
    },
    /// The two ends take all layers, or one of them takes none.
    #[error(
        "expected first and last to be at least 1 and to leave a layer between them, got {cut} of {layers} layers"
    )]
    Ends {
        /// The rule in question.
        cut: CutRule,
        /// The number of layers of the model.
        layers: usize,
    },
    /// No layer other than the last has this name.
    #[error("expected a layer to cut after, got `{got}`: the model has {known}")]
    Unknown {
        /// The beginning of the name.
        got: String,
        /// The names of the layers after which the model can be cut.
        known: String,
    },
    /// The resulting partitions are invalid.
    #[error(transparent)]
    Partition(#[from] PartitionError),
}

/// A rule for cutting a model into partitions. It becomes a [`Balance`] when it is applied to a model.
///
/// ```
/// use distgpipe_core::cut::CutRule;
/// let layers = ["stem", "block.0", "block.1", "head"];
/// assert_eq!("first=1,last=1".parse::<CutRule>()?.balance(&layers)?.sizes(), [1, 2, 1]);
/// assert_eq!("after=block.0".parse::<CutRule>()?.balance(&layers)?.sizes(), [2, 2]);
/// # Ok::<(), distgpipe_core::cut::CutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutRule {
    /// The numbers of layers in the first and in the last partition.
    Ends {
        /// The number of layers in the first partition.
        first: usize,
        /// The number of layers in the last partition; `None` for two partitions.
        last: Option<usize>,
    },
    /// Cuts after the layers with these names, given in any order.
    After(Vec<String>),
}

impl CutRule {
    /// Applies the rule to a model with these layers.
    pub fn balance(&self, layers: &[&str]) -> Result<Balance, CutError> {
        let all = layers.len();
        match self {
            CutRule::Ends { first, last } => {
                let ends = first.saturating_add(last.unwrap_or(0));
                if ends >= all || *first == 0 || *last == Some(0) {
                    return Err(CutError::Ends { cut: self.clone(), layers: all });
                }
                let sizes = [Some(*first), Some(all - ends), *last];
                Ok(Balance::new(sizes.into_iter().flatten().collect())?)
            }
            CutRule::After(names) => {
                let inner = &layers[..all.saturating_sub(1)];
                let place = |name: &String| {
                    let found = inner.iter().position(|layer| layer == name);
                    found.ok_or_else(|| CutError::Unknown { got: shortened(name), known: listed(inner) })
                };
                let mut ends = names.iter().map(|name| Ok(place(name)? + 1)).collect::<Result<Vec<_>, CutError>>()?;
                ends.sort_unstable();
                ends.push(all);
                let starts = std::iter::once(0).chain(ends.iter().copied());
                Ok(Balance::new(starts.zip(&ends).map(|(start, end)| end - start).collect())?)
            }
        }
    }
}

/// The default placement for split learning: the client runs the first partition, the server the second, and the client
/// the third if there is one. There is no default for other numbers of partitions.
pub fn placement(partitions: usize) -> Option<&'static str> {
    match partitions {
        2 => Some("client,server"),
        3 => Some("client,server,client"),
        _ => None,
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

fn listed(names: &[&str]) -> String {
    if names.len() <= 2 * LISTED {
        return names.join(", ");
    }
    format!("{}, …, {}", names[..LISTED].join(", "), names[names.len() - LISTED..].join(", "))
}

impl FromStr for CutRule {
    type Err = CutError;

    fn from_str(text: &str) -> Result<Self, CutError> {
        let wrong = || CutError::Text { got: shortened(text) };
        if let Some(names) = text.strip_prefix("after=") {
            let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
            return if names.iter().any(String::is_empty) { Err(wrong()) } else { Ok(CutRule::After(names)) };
        }
        let (mut first, mut last) = (None, None);
        for piece in text.split(',') {
            let (key, value) = piece.split_once('=').ok_or_else(wrong)?;
            let slot = match key.trim() {
                "first" => &mut first,
                "last" => &mut last,
                _ => return Err(wrong()),
            };
            let value = value.trim().parse().map_err(|_| wrong())?;
            if slot.replace(value).is_some() {
                return Err(wrong());
            }
        }
        Ok(CutRule::Ends { first: first.ok_or_else(wrong)?, last })
    }
}

impl fmt::Display for CutRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CutRule::Ends { first, last: Some(last) } => write!(f, "first={first},last={last}"),
            CutRule::Ends { first, last: None } => write!(f, "first={first}"),
            CutRule::After(names) => write!(f, "after={}", names.join(",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LAYERS: [&str; 5] = ["a", "b.0", "b.1", "b.2", "c"];

    fn sizes(text: &str) -> Result<Vec<usize>, CutError> {
        Ok(text.parse::<CutRule>()?.balance(&LAYERS)?.sizes().to_vec())
    }

    #[test]
    fn cuts_are_where_they_say() {
        assert_eq!(sizes("first=1,last=1").unwrap(), [1, 3, 1]);
        assert_eq!(sizes("last=3, first=1").unwrap(), [1, 1, 3]);
        assert_eq!(sizes("first=4").unwrap(), [4, 1]);
        assert_eq!(sizes("after=b.1,a").unwrap(), [1, 2, 2]);
        assert_eq!(sizes("after=a,b.0,b.1,b.2").unwrap(), [1, 1, 1, 1, 1]);
    }

    #[test]
    fn errors_say_what_is_possible() {
        let error = |text: &str| sizes(text).unwrap_err().to_string();
        assert!(error("first=2,last=3").contains("leave a layer between them, got first=2,last=3 of 5 layers"));
        assert!(error("first=0,last=1").contains("at least 1"));
        assert!(error("after=c").contains("got `c`: the model has a, b.0, b.1, b.2"));
        assert!(error("after=a,a").contains("got 0 in partition 1"), "{}", error("after=a,a"));
        for text in ["", "last=1", "first=1,first=2", "first=one", "after=", "middle=3", "first=-1", "roberta-9"] {
            assert!(error(text).contains("expected `first=1,last=1`"), "{text}: {}", error(text));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in ".*", layers in prop::collection::vec("[a-c]", 0..6)) {
            let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
            if let Ok(cut) = text.parse::<CutRule>() {
                prop_assert_eq!(cut.to_string().parse::<CutRule>().unwrap(), cut.clone());
                let _ = cut.balance(&layers);
            }
        }

        #[test]
        fn ends_cover_the_model(first in 0usize..9, last in prop::option::of(0usize..9), layers in 0usize..12) {
            let names = vec!["x"; layers];
            if let Ok(balance) = (CutRule::Ends { first, last }).balance(&names) {
                prop_assert!(balance.check(layers).is_ok());
                prop_assert_eq!(balance.sizes()[0], first);
            }
        }
    }
}
