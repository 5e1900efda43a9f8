//! A model: a flat list of layers and the shape of its input.

pub mod blocks;
pub mod exported;
pub mod layer;
pub mod loss;
pub mod ties;
pub mod zoo;

use crate::model::layer::{Layer, Role, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::loss::{Loss, LossFunction};
use crate::model::zoo::ModelError;
use crate::runtime::optimizer::{FusedOptim, NotFused, Optim, UpdateRule};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

/// What another process needs to build the same model: a name that [`zoo::build`], or a function of your own, knows,
/// and the settings of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// The name to look the model up by.
    pub name: String,
    /// The model's settings, as its type serializes them.
    pub settings: serde_json::Value,
}

impl ModelSpec {
    /// The spec of a model without settings.
    pub fn new(name: impl Into<String>) -> Self {
        ModelSpec { name: name.into(), settings: serde_json::Value::Null }
    }

    /// The spec of a model with settings, such as a struct that derives `Serialize`.
    ///
    /// # Errors
    /// If the settings cannot be written as JSON.
    pub fn with_settings(name: impl Into<String>, settings: &impl Serialize) -> Result<Self, ModelError> {
        let name = name.into();
        let settings = serde_json::to_value(settings).map_err(|e| ModelError::settings(&name, e.to_string()))?;
        Ok(ModelSpec { name, settings })
    }

    /// Whether two specs are of models with the same tensors and the same results: equal specs, or those of an
    /// [exported](exported::NAME) model that is divided into layers in two ways.
    pub fn computes_like(&self, other: &ModelSpec) -> bool {
        let divided = self.name == exported::NAME && other.name == exported::NAME;
        let without_layers = |spec: &ModelSpec| {
            let mut settings = spec.settings.clone();
            if let Some(settings) = settings.as_object_mut() {
                settings.remove("layers");
            }
            settings
        };
        self == other || (divided && without_layers(self) == without_layers(other))
    }

    /// The settings, as [`with_settings`](Self::with_settings) was given them.
    ///
    /// # Errors
    /// If they are not settings of this type.
    pub fn settings<T: DeserializeOwned>(&self) -> Result<T, ModelError> {
        serde_json::from_value(self.settings.clone()).map_err(|e| ModelError::settings(&self.name, e.to_string()))
    }
}

/// A flat list of layers. It holds no tensors, so cloning is cheap.
#[derive(Clone)]
pub struct Model {
    /// The layers, from input to output.
    pub layers: Vec<Arc<dyn Layer>>,
    /// The shapes of one sample's input tensors.
    pub input: Vec<SampleShape>,
    /// How to build the model in another process. A model without a spec runs on threads of this process only.
    pub spec: Option<ModelSpec>,
    /// The file whose weights a pipeline of this model starts from, instead of the initial values of the tensors' specs.
    pub weights: Option<PathBuf>,
    /// Other names of [tied](ties) tensors, as (name in files, name in the model). Files are written with both. Several layers
    /// may use a tensor whose name in the model is listed here; they share it, and must be on one worker.
    pub tied: Vec<(String, String)>,
    /// A loss function of your own, which replaces the pipeline's built-in one.
    pub loss: Option<Arc<dyn LossFunction>>,
    /// An optimizer of your own, which replaces the pipeline's built-in one.
    pub update_rule: Option<Arc<dyn UpdateRule>>,
}

/// A layer's output shape and size, computed without building it.
#[derive(Clone, Debug)]
pub struct LayerSummary {
    /// The layer's name.
    pub name: String,
    /// The shapes of its output tensors for one sample.
    pub output: Vec<SampleShape>,
    /// The number of trained values, tied ones included.
    pub parameters: u64,
    /// Multiply-adds for one sample.
    pub multiply_adds: u64,
}

impl Model {
    /// A model of your own layers. To run it in other processes, give it a [spec](Self::with_spec).
    pub fn new(layers: Vec<Arc<dyn Layer>>, input: Vec<SampleShape>) -> Self {
        Model { layers, input, spec: None, weights: None, tied: Vec::new(), loss: None, update_rule: None }
    }

    /// Sets the spec by which other processes build this model; see [`worker_mode`](crate::worker_mode).
    pub fn with_spec(mut self, spec: ModelSpec) -> Self {
        self.spec = Some(spec);
        self
    }

    /// Trains with a loss function of your own. It travels with the model: a remote worker gets it from the function that
    /// builds the model there.
    pub fn with_loss(mut self, loss: impl LossFunction + 'static) -> Self {
        self.loss = Some(Arc::new(loss));
        self
    }

    /// Trains with an optimizer of your own, which travels with the model as [`with_loss`](Self::with_loss)'s function does.
    pub fn with_optimizer(mut self, rule: impl UpdateRule + 'static) -> Self {
        self.update_rule = Some(Arc::new(rule));
        self
    }

    pub(crate) fn loss_function(&self, built_in: Loss) -> Arc<dyn LossFunction> {
        self.loss.clone().unwrap_or_else(|| Arc::new(built_in))
    }

    pub(crate) fn update_rule(&self, built_in: Optim) -> Arc<dyn UpdateRule> {
        self.update_rule.clone().unwrap_or_else(|| Arc::new(built_in))
    }

    /// The same, made of libtorch's fused kernels.
    pub(crate) fn fused_update_rule(&self, built_in: Optim) -> Result<Arc<dyn UpdateRule>, NotFused> {
        match &self.update_rule {
            Some(own) => Err(NotFused::own_rule(&own.name())),
            None => Ok(Arc::new(FusedOptim::new(built_in)?)),
        }
    }

    /// The output shapes and sizes of all layers, in order. No tensor is allocated.
    ///
    /// # Errors
    /// If a layer does not accept the output of the layer before it.
    pub fn summary(&self) -> Result<Vec<LayerSummary>, ShapeError> {
        let mut shapes = self.input.clone();
        let mut skips = SkipShapes::new();
        self.layers
            .iter()
            .map(|layer| {
                let multiply_adds = layer.multiply_adds(&shapes);
                shapes = layer.shapes(std::mem::take(&mut shapes), &mut skips)?;
                Ok(LayerSummary {
                    name: layer.name().to_owned(),
                    output: shapes.clone(),
                    parameters: parameters(&layer.tensors()),
                    multiply_adds,
                })
            })
            .collect()
    }

    /// The number of trained values. Tied ones count once.
    pub fn parameters(&self) -> u64 {
        parameters(&self.tensors())
    }

    /// Every tensor once, in the order of the layers that use it first.
    pub(crate) fn tensors(&self) -> Vec<TensorSpec> {
        let mut named = HashSet::new();
        let all = self.layers.iter().flat_map(|layer| layer.tensors());
        all.filter(|spec| named.insert(spec.name.clone())).collect()
    }
}

fn parameters(tensors: &[TensorSpec]) -> u64 {
    tensors.iter().filter(|t| t.role == Role::Parameter).map(|t| t.elements()).sum()
}
