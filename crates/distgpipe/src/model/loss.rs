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
    /// Cross entropy of class scores against class numbers: `[rows, classes]` against `[rows]`, `[rows, tokens, classes]`
    /// against `[rows, tokens]`, or as in PyTorch `[rows, classes, height, width]` against `[rows, height, width]`.
    ///
    /// The loss is the sum over all tokens, divided by their number: rows × tokens per row. A token whose target is
    /// [`IGNORED`] adds nothing to the sum but is part of the number, so that a token has the same weight whatever the
    /// number of micro-batches. (PyTorch divides by the number of tokens that are not ignored.)
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
    /// Binary cross entropy of scores (before a sigmoid) against targets from 0 to 1 of the same shape, as PyTorch's
    /// `binary_cross_entropy_with_logits`.
    BinaryCrossEntropy,
}

/// The target of a token that counts neither for the loss nor for its gradient.
pub const IGNORED: i64 = -100;

impl Loss {
    /// Whether the output has one vector of class scores per row.
    fn is_about_classes(self, output: &Tensor) -> bool {
        matches!(self, Loss::CrossEntropy | Loss::SmoothedCrossEntropy { .. }) && output.dim() == 2
    }
}

impl LossFunction for Loss {
    fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        let cross_entropy = |smoothing| {
            // libtorch wants the classes in the second dimension.
            let scores = if output.dim() == 3 { output.f_transpose(1, 2)? } else { output.shallow_clone() };
            let classes = scores.size().get(1).copied().unwrap_or(1).max(1);
            let sum = scores.f_cross_entropy_loss(target, None::<&Tensor>, Reduction::Sum, IGNORED, smoothing)?;
            sum.f_div_scalar(scores.numel() as i64 / classes)
        };
        Ok(match *self {
            Loss::CrossEntropy => cross_entropy(0.0)?,
            Loss::SmoothedCrossEntropy { label_smoothing } => cross_entropy(label_smoothing)?,
            Loss::MeanSquared => output.f_mse_loss(target, Reduction::Mean)?,
            Loss::BinaryCrossEntropy => {
                output.f_binary_cross_entropy_with_logits(target, None::<&Tensor>, None::<&Tensor>, Reduction::Mean)?
            }
        })
    }

    fn evaluate(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        match self {
            Loss::SmoothedCrossEntropy { .. } => Loss::CrossEntropy.compute(output, target),
            loss => loss.compute(output, target),
        }
    }

    fn correct(&self, output: &Tensor, target: &Tensor) -> Result<Option<Tensor>, Fault> {
        if !self.is_about_classes(output) {
            return Ok(None);
        }
        Ok(Some(output.f_argmax(-1, false)?.f_eq_tensor(target)?.f_sum(Kind::Int64)?))
    }

    fn classes(&self, output: &Tensor, target: &Tensor) -> Result<Option<ClassCounts>, Fault> {
        if !self.is_about_classes(output) {
            return Ok(None);
        }
        ClassCounts::of(output, target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn scores(size: &[i64]) -> Tensor {
        let count: i64 = size.iter().product();
        let scores = Tensor::arange(count, (Kind::Double, Device::Cpu)).f_mul_scalar(0.7).unwrap().sin();
        scores.view(size).set_requires_grad(true)
    }

    /// The gradient of a batch in micro-batches of so many rows, each weighted by its share of the rows.
    fn gradient(loss: Loss, target: &Tensor, rows: i64) -> Tensor {
        let output = scores(&[4, 3, 5]);
        for part in 0..4 / rows {
            let cut = |tensor: &Tensor| tensor.narrow(0, part * rows, rows);
            let loss = loss.compute(&cut(&output), &cut(target)).unwrap();
            (loss * (rows as f64 / 4.0)).backward();
        }
        output.grad()
    }

    /// The mean over the tokens that are not ignored weighted tokens by their micro-batch, and was no number if all of them
    /// were ignored.
    #[test]
    fn the_gradient_with_ignored_tokens_does_not_depend_on_the_micro_batches() {
        let x = IGNORED;
        let target = Tensor::from_slice(&[1, x, 3, x, x, x, 0, 4, 2, x, x, 1]).view([4, 3]);
        for loss in [Loss::CrossEntropy, Loss::SmoothedCrossEntropy { label_smoothing: 0.1 }] {
            let whole = gradient(loss, &target, 4);
            for rows in [1, 2] {
                let gap = f64::try_from((gradient(loss, &target, rows) - &whole).abs().max()).unwrap();
                assert!(gap < 1e-12, "{loss:?} in micro-batches of {rows} rows: off by {gap}");
            }
            let ignored = f64::try_from(whole.narrow(0, 1, 1).abs().max()).unwrap();
            assert!(ignored == 0.0 && f64::try_from(whole.abs().max()).unwrap() > 0.0);
        }
    }

    #[test]
    fn without_ignored_targets_the_loss_is_the_mean_of_pytorch() {
        let target = Tensor::from_slice(&[1_i64, 0, 2, 1]);
        for (size, target) in [(vec![4, 3], target.shallow_clone()), (vec![1, 3, 2, 2], target.view([1, 2, 2]))] {
            let scores = scores(&size);
            let ours = f64::try_from(Loss::CrossEntropy.compute(&scores, &target).unwrap()).unwrap();
            let mean = f64::try_from(scores.cross_entropy_loss(&target, None::<&Tensor>, Reduction::Mean, -100, 0.0));
            assert!((ours - mean.unwrap()).abs() < 1e-12, "{size:?}");
        }
    }
}
