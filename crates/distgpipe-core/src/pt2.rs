//! Models that `torch.export` wrote: reads the archive, checks the graph, and finds where it can be cut.
//!
//! ```text
//!   my.pt2 ──archive──► model.json ──model_json──► Graph ──layers──► Layer, Layer, …   ──► a worker runs its nodes
//!                       names and places of weights   │
//!                                                     └── as JSON in the job: other workers check it again
//! ```
//!
//! | module | subject |
//! | --- | --- |
//! | [`archive`] | the parts of the archive, and the places of its tensors |
//! | `model_json` | PyTorch's JSON, turned into a [`Graph`] |
//! | `expression` | sizes that depend on the batch, as PyTorch writes them |
//! | [`graph`] | values, nodes and arguments; the form that travels |
//! | [`operators`] | the operators that a graph may use, and what they do to their arguments |
//! | `check` | what holds for every [`Graph`] |
//! | `aliases` | which values share memory, and which depend on nothing but the number of rows |
//! | [`layers`] | live values, legal boundaries, layers and skips |
//! | `untie` | tied parameters made independent |
//!
//! An archive is untrusted, and so is a graph from another process. Nothing pickled is opened, nothing in the archive is
//! executed but operators of a fixed list, no content causes a panic, and memory is bounded by a small multiple of the
//! input's length.

mod aliases;
pub mod archive;
mod check;
mod expression;
pub mod graph;
pub mod layers;
mod model_json;
pub mod operators;
mod untie;

pub use graph::{Arg, Graph, Node, Size, State, ValueId, ValueInfo};
pub use layers::{Boundaries, Layer};

use crate::weights::FormatError;
use thiserror::Error;

/// The version of PyTorch whose operators this program calls.
pub const TORCH_VERSION: &str = "2.11.";

/// The remedy for an archive that is not what the exporter writes.
const EXPORT_AGAIN: &str = "export the model again with `python3 -m distgpipe_export`";

/// Why an archive or a graph is not used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Pt2Error {
    /// The archive itself is damaged.
    #[error(transparent)]
    Archive(#[from] FormatError),
    /// A part of the archive is not what it should be.
    #[error("`{part}` of the archive: expected {expected}, got {got}: {remedy}")]
    Part {
        /// The path in the archive.
        part: String,
        /// What was expected there.
        expected: String,
        /// What was found instead.
        got: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// The model does something that cannot be trained in a pipeline.
    #[error("{place}: expected {expected}, got {got}: {remedy}")]
    Model {
        /// Where in the user's module it stands.
        place: String,
        /// What was expected there.
        expected: String,
        /// What was found instead.
        got: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// The model uses operators that are not on the list.
    #[error(
        "the model uses operators that exported models may not use here: {}: use others there, or allow those of aten with \
         `zoo::allow_operators`",
        .refused.join(", ")
    )]
    Operators {
        /// `NAME in MODULE`, each operator once.
        refused: Vec<String>,
    },
}

impl Pt2Error {
    fn part(part: &str, expected: impl Into<String>, got: impl Into<String>, remedy: &'static str) -> Self {
        Pt2Error::Part { part: part.to_owned(), expected: expected.into(), got: short(&got.into()), remedy }
    }

    fn model(
        place: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Pt2Error::Model { place: short(&place.into()), expected: expected.into(), got: short(&got.into()), remedy }
    }
}

/// A text from the file, truncated for an error message.
fn short(text: &str) -> String {
    match text.char_indices().nth(200) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
