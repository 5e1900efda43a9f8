//! A multi-layer perceptron: the smallest model. Each linear map with its ReLU and dropout is a layer.

use super::{model_spec, require, ModelError};
use crate::failure::Fault;
use crate::model::blocks::Linear;
use crate::model::layer::{Context, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::Tensor;

/// The settings of the perceptron.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mlp {
    /// The dimensions of a sample, which is flattened.
    pub input: Vec<i64>,
    /// The sizes of the hidden layers.
    pub hidden: Vec<i64>,
    /// The number of classes.
    pub classes: i64,
    /// Dropout probability after each hidden layer.
    pub dropout: f64,
}

impl Default for Mlp {
    fn default() -> Self {
        Mlp { input: vec![1, 8, 8], hidden: vec![128, 128, 128], classes: 10, dropout: 0.1 }
    }
}

impl Mlp {
    /// Builds the list of layers.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn model(&self) -> Result<Model, ModelError> {
        let mut sizes = self.input.iter().chain(&self.hidden).chain([&self.classes]);
        require(sizes.all(|n| (1..=1 << 24).contains(n)), "mlp", "all sizes must be 1 to 2^24")?;
        let values = self.input.iter().try_fold(1_i64, |product, n| product.checked_mul(*n));
        require(values.is_some_and(|n| n <= 1 << 32), "mlp", "a sample must have at most 2^32 values")?;
        require((0.0..1.0).contains(&self.dropout), "mlp", "dropout must be at least 0 and below 1")?;
        let mut from = self.input.iter().product();
        let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
        let sizes = self.hidden.iter().map(|&n| (n, true)).chain([(self.classes, false)]);
        for (i, (to, hidden)) in sizes.enumerate() {
            let dropout = if hidden { self.dropout } else { 0.0 };
            layers.push(Arc::new(Dense { name: format!("layers.{i}"), linear: Linear { from, to }, hidden, dropout }));
            from = to;
        }
        Ok(Model::new(layers, vec![SampleShape::float(&self.input)]).with_spec(model_spec("mlp", self)))
    }
}

struct Dense {
    name: String,
    linear: Linear,
    hidden: bool,
    dropout: f64,
}

impl Layer for Dense {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.linear.tensors(&self.name)
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        match &input[..] {
            [x] if x.dims.iter().product::<i64>() == self.linear.from => {
                Ok(vec![SampleShape::float(&[self.linear.to])])
            }
            _ => Err(ShapeError {
                layer: self.name.clone(),
                expected: format!("{} values", self.linear.from),
                got: input,
            }),
        }
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let y = self.linear.forward(tensors, &input[0].f_flatten(1, -1)?)?;
        Ok(vec![if self.hidden { context.dropout(y.f_relu()?, self.dropout)? } else { y }])
    }

    fn multiply_adds(&self, _: &[SampleShape]) -> u64 {
        u64::try_from(self.linear.from * self.linear.to).unwrap_or(0)
    }
}
