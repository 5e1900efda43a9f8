//! What training makes small.

use crate::failure::Fault;
use crate::metrics::ClassCounts;
use serde::{Deserialize, Serialize};
use tch::{Kind, Reduction, Tensor};

/// The loss, as the mean over a micro-batch's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Of class scores `[rows, classes]` against class numbers `[rows]`.
    #[default]
    CrossEntropy,
    /// The same while learning, against targets that leave a share to all classes alike; in evaluation it is
    /// [`CrossEntropy`](Loss::CrossEntropy), so that tests can be compared.
    SmoothedCrossEntropy {
        /// The share, from 0 to below 1.
        label_smoothing: f64,
    },
    /// Mean squared error against a target of the output's shape.
    MeanSquared,
}

impl Loss {
    /// The loss that tests are judged by.
    pub fn in_evaluation(self) -> Self {
        match self {
            Loss::SmoothedCrossEntropy { .. } => Loss::CrossEntropy,
            other => other,
        }
    }

    /// The mean loss of a micro-batch.
    pub fn compute(self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        let cross_entropy =
            |smoothing| output.f_cross_entropy_loss(target, None::<&Tensor>, Reduction::Mean, -100, smoothing);
        Ok(match self {
            Loss::CrossEntropy => cross_entropy(0.0)?,
            Loss::SmoothedCrossEntropy { label_smoothing } => cross_entropy(label_smoothing)?,
            Loss::MeanSquared => output.f_mse_loss(target, Reduction::Mean)?,
        })
    }

    /// How many rows have their largest score at the right class, where that means something.
    pub fn correct(self, output: &Tensor, target: &Tensor) -> Result<Option<Tensor>, Fault> {
        match self {
            Loss::CrossEntropy | Loss::SmoothedCrossEntropy { .. } => {
                Ok(Some(output.f_argmax(-1, false)?.f_eq_tensor(target)?.f_sum(Kind::Int64)?))
            }
            Loss::MeanSquared => Ok(None),
        }
    }

    /// What each class was taken for, where there are classes.
    pub fn classes(self, output: &Tensor, target: &Tensor) -> Result<Option<ClassCounts>, Fault> {
        match self {
            Loss::CrossEntropy | Loss::SmoothedCrossEntropy { .. } => ClassCounts::of(output, target),
            Loss::MeanSquared => Ok(None),
        }
    }
}
