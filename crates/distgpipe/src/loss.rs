//! What training makes small.

use crate::failure::Fault;
use crate::metrics::ClassCounts;
use serde::{Deserialize, Serialize};
use tch::{Kind, Reduction, Tensor};

/// The loss, as the mean over a micro-batch's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Of class scores `[rows, classes]` against class numbers `[rows]`.
    #[default]
    CrossEntropy,
    /// Mean squared error against a target of the output's shape.
    MeanSquared,
}

impl Loss {
    /// The mean loss of a micro-batch.
    pub fn compute(self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        Ok(match self {
            Loss::CrossEntropy => output.f_cross_entropy_loss(target, None::<&Tensor>, Reduction::Mean, -100, 0.0)?,
            Loss::MeanSquared => output.f_mse_loss(target, Reduction::Mean)?,
        })
    }

    /// How many rows have their largest score at the right class, where that means something.
    pub fn correct(self, output: &Tensor, target: &Tensor) -> Result<Option<Tensor>, Fault> {
        match self {
            Loss::CrossEntropy => Ok(Some(output.f_argmax(-1, false)?.f_eq_tensor(target)?.f_sum(Kind::Int64)?)),
            Loss::MeanSquared => Ok(None),
        }
    }

    /// What each class was taken for, where there are classes.
    pub fn classes(self, output: &Tensor, target: &Tensor) -> Result<Option<ClassCounts>, Fault> {
        match self {
            Loss::CrossEntropy => ClassCounts::of(output, target),
            Loss::MeanSquared => Ok(None),
        }
    }
}
