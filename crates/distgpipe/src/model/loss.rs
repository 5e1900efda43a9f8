//! Loss functions: the built-in ones, and the trait for your own.

use crate::failure::Fault;
use crate::train::metrics::ClassCounts;
use serde::{Deserialize, Serialize};
use tch::{Kind, Reduction, Tensor};

/// A loss function. The worker with the last partition calls it once for each micro-batch.
///
/// Implement this for a loss of your own and attach it with [`Model::with_loss`](crate::Model::with_loss);
/// `examples/own_loss_and_optimizer.rs` shows how.
pub trait LossFunction: Send + Sync {
    /// The mean loss over the rows of a micro-batch, as a scalar tensor with its graph.
    fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault>;

    /// The loss in evaluation, if it differs from the one in training.
    fn evaluate(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        self.compute(output, target)
    }

    /// How many rows are classified correctly, as a scalar tensor; `None` if the loss is not about classes.
    fn correct(&self, _output: &Tensor, _target: &Tensor) -> Result<Option<Tensor>, Fault> {
        Ok(None)
    }

    /// The confusion counts of a micro-batch in evaluation; `None` if the loss is not about classes.
    fn classes(&self, _output: &Tensor, _target: &Tensor) -> Result<Option<ClassCounts>, Fault> {
        Ok(None)
    }
}

/// The built-in loss functions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Loss {
    /// Cross entropy of class scores `[rows, classes]` against class numbers `[rows]`.
    #[default]
    CrossEntropy,
    /// Cross entropy with label smoothing in training. Evaluation uses plain cross entropy, so that test losses can be
    /// compared.
    SmoothedCrossEntropy {
        /// The share of each target that is spread over all classes: at least 0 and below 1.
        label_smoothing: f64,
    },
    /// Mean squared error against a target of the output's shape.
    MeanSquared,
}

impl Loss {
    fn is_about_classes(self) -> bool {
        !matches!(self, Loss::MeanSquared)
    }
}

impl LossFunction for Loss {
    fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        let cross_entropy =
            |smoothing| output.f_cross_entropy_loss(target, None::<&Tensor>, Reduction::Mean, -100, smoothing);
        Ok(match *self {
            Loss::CrossEntropy => cross_entropy(0.0)?,
            Loss::SmoothedCrossEntropy { label_smoothing } => cross_entropy(label_smoothing)?,
            Loss::MeanSquared => output.f_mse_loss(target, Reduction::Mean)?,
        })
    }

    fn evaluate(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        match self {
            Loss::SmoothedCrossEntropy { .. } => Loss::CrossEntropy.compute(output, target),
            loss => loss.compute(output, target),
        }
    }

    fn correct(&self, output: &Tensor, target: &Tensor) -> Result<Option<Tensor>, Fault> {
        if !self.is_about_classes() {
            return Ok(None);
        }
        Ok(Some(output.f_argmax(-1, false)?.f_eq_tensor(target)?.f_sum(Kind::Int64)?))
    }

    fn classes(&self, output: &Tensor, target: &Tensor) -> Result<Option<ClassCounts>, Fault> {
        if !self.is_about_classes() {
            return Ok(None);
        }
        ClassCounts::of(output, target)
    }
}
