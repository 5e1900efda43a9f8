//! A model: a flat list of layers and the shape of its input.

use crate::layer::{Layer, Role, SampleShape, ShapeError, SkipShapes};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How another process can make the same model: a name that [`crate::models::build`] (or a function of yours) knows,
/// and its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The model's name.
    pub name: String,
    /// Its settings.
    pub settings: serde_json::Value,
}

/// A flat list of layers. Cloning copies no numbers: there are none.
#[derive(Clone)]
pub struct Model {
    /// The layers, from input to output.
    pub layers: Vec<Arc<dyn Layer>>,
    /// The input tensors of one sample.
    pub input: Vec<SampleShape>,
    /// How to make it elsewhere; a model without one runs in this process only.
    pub recipe: Option<Recipe>,
}

/// What a layer takes, makes and holds.
#[derive(Clone, Debug)]
pub struct LayerSummary {
    /// The layer's name.
    pub name: String,
    /// What it makes for one sample.
    pub output: Vec<SampleShape>,
    /// How many numbers it learns.
    pub parameters: u64,
    /// Multiply-adds for one sample.
    pub multiply_adds: u64,
}

impl Model {
    /// A model of your own layers.
    pub fn new(layers: Vec<Arc<dyn Layer>>, input: Vec<SampleShape>) -> Self {
        Model { layers, input, recipe: None }
    }

    /// What each layer makes and holds, without building anything.
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
                    parameters: parameters(layer.as_ref()),
                    multiply_adds,
                })
            })
            .collect()
    }

    /// How many numbers it learns.
    pub fn parameters(&self) -> u64 {
        self.layers.iter().map(|l| parameters(l.as_ref())).sum()
    }
}

fn parameters(layer: &dyn Layer) -> u64 {
    layer.tensors().iter().filter(|t| t.role == Role::Parameter).map(|t| t.elements()).sum()
}
