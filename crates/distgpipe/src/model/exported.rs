//! Models that come from PyTorch: the graph that `torch.export` wrote, cut into layers that call libtorch's operators by
//! name.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `layer` | [`Layer`](crate::Layer) for consecutive nodes of a graph |
//! | `step` | one node, ready to be called |
//!
//! `distgpipe_core::pt2` reads the archive, checks the graph and finds the layers. The graph is the model's setting, so it
//! travels in the job, and a worker that receives it checks it again. A layer is cheap until it runs: a worker allocates
//! tensors and constants for the layers of its own partitions alone.

mod layer;
mod step;

use crate::engine::Operator;
use crate::model::zoo::ModelError;
use crate::model::{Model, ModelSpec};
use crate::train::weights::{self, WeightsError};
use distgpipe_core::pt2::{operators, Boundaries, Graph};
use layer::ExportedLayer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

/// The name of exported models in specs.
pub const NAME: &str = "exported";

/// The operators outside of the list that exported models may use in this process.
static ALLOWED: RwLock<BTreeSet<String>> = RwLock::new(BTreeSet::new());

/// Lets exported models use further operators in this process, from now on: exact overloads of the namespace `aten`, such as
/// `erfinv.default`. Models that come from others may use them too. An operator is refused, whoever asks for it, if its schema
/// has it change an argument, return a view, or take anything but tensors and numbers: one that takes a text could open a file.
///
/// # Errors
/// Names an operator that libtorch does not have, or that is refused, and why. None is allowed then.
pub fn allow_operators<S: AsRef<str>>(names: &[S]) -> Result<(), ModelError> {
    let bare = |name: &S| {
        let name = name.as_ref();
        let name = name.strip_prefix("torch.ops.").unwrap_or(name);
        name.strip_prefix("aten.").or(name.strip_prefix("aten::")).unwrap_or(name).to_owned()
    };
    let names: Vec<String> = names.iter().map(bare).filter(|name| operators::effect(name).is_none()).collect();
    for name in &names {
        let refused = |why: String| ModelError::exported(format!("operator {name}: {why}"));
        if !operators::is_name(name) {
            return Err(refused("expected an operator of aten and its overload, such as erfinv.default".to_owned()));
        }
        let operator = Operator::find(name).map_err(refused)?;
        let remedy = "exported models may use only operators that compute new tensors from tensors and numbers";
        operator.check_computes().map_err(|why| refused(format!("{why}; {remedy}")))?;
    }
    ALLOWED.write().unwrap_or_else(PoisonError::into_inner).extend(names);
    Ok(())
}

/// The operators of [`allow_operators`].
pub(crate) fn allowed_operators() -> Vec<String> {
    ALLOWED.read().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
}

/// The settings of an exported model: its graph, and where layers end.
///
/// ```no_run
/// use distgpipe::prelude::*;
/// use distgpipe::zoo::Exported;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Exported::open("my.pt2")?;
/// let pipeline = Pipeline::builder(model).place("client,server").build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exported {
    /// The graph of the model in training.
    pub graph: Graph,
    /// Which of the places where the graph can be cut end a layer.
    #[serde(default)]
    pub layers: Boundaries,
}

/// How [`Exported::open_with`] divides a model into layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportedOptions {
    /// Which of the places where the graph can be cut end a layer.
    pub layers: Boundaries,
    /// Whether tied parameters become independent copies, so that the model can be cut between their uses.
    pub untie: bool,
}

impl Exported {
    /// The model in a file of `python3 -m distgpipe_export` or `torch.export.save`, with a layer for each module that it can
    /// be cut after. A pipeline starts from the weights in the file.
    ///
    /// # Errors
    /// If the file cannot be read, or the model in it cannot be trained in a pipeline.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, ModelError> {
        Self::open_with(path, ExportedOptions::default())
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: impl AsRef<Path>, options: ExportedOptions) -> Result<Model, ModelError> {
        let (path, ExportedOptions { layers, untie }) = (path.as_ref(), options);
        let graph = weights::read_graph(path).map_err(|error: WeightsError| ModelError::exported(error.to_string()))?;
        let graph = if untie { graph.untied().map_err(|e| ModelError::exported(e.to_string()))? } else { graph };
        let mut model = Exported { graph, layers }.model()?;
        model.weights = Some(path.to_owned());
        Ok(model)
    }

    /// Builds the list of layers.
    ///
    /// # Errors
    /// If libtorch lacks an operator or an argument that the graph uses, or the graph uses operators outside of the list that
    /// this process does not [allow](allow_operators).
    pub fn model(&self) -> Result<Model, ModelError> {
        let allowed = allowed_operators();
        let refused: Vec<&String> = self.graph.extra.iter().filter(|op| !allowed.contains(op)).collect();
        if !refused.is_empty() {
            let names: Vec<String> = refused.iter().map(|op| format!("aten.{op}")).collect();
            return Err(ModelError::exported(format!(
                "the model uses operators that this machine does not allow: {}; its owner can allow them with `zoo::allow_operators`",
                names.join(", ")
            )));
        }
        let plans = self.graph.layers(self.layers).map_err(|error| ModelError::exported(error.to_string()))?;
        // Layers that use the same constant share its bytes.
        let constants = (0..self.graph.constants.len()).map(|constant| self.graph.constant_bytes(constant));
        let constants: Vec<Arc<[u8]>> = constants.map(|bytes| bytes.unwrap_or_default().into()).collect();
        let layers: Result<Vec<ExportedLayer>, String> =
            plans.into_iter().map(|plan| ExportedLayer::new(&self.graph, plan, &constants)).collect();
        let layers = layers.map_err(ModelError::exported)?;
        let input = (0..self.graph.inputs).map(|value| layer::sample_shape(&self.graph, value)).collect();
        let layers = layers.into_iter().map(|layer| Arc::new(layer) as Arc<dyn crate::Layer>).collect();
        let mut model = Model::new(layers, input).with_spec(ModelSpec::with_settings(NAME, self)?);
        let tied = self.graph.states.iter().flat_map(|state| state.tied.iter().map(|other| (other, &state.name)));
        model.tied = tied.map(|(other, name)| (other.clone(), name.clone())).collect();
        Ok(model)
    }
}
