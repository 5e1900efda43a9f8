//! Which epoch is the best by the metric of its test. It is computed from the figures of the epochs, which every
//! checkpoint has, so a resumed run knows it too.

use crate::train::summary::EpochSummary;
use serde::{Deserialize, Serialize};

/// A metric of the test after an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TestMetric {
    /// The mean loss; lower is better.
    Loss,
    /// The fraction of rows classified correctly.
    Accuracy,
    /// F1: of class 1 where there are two classes, else the mean over the classes.
    F1,
    /// The Matthews correlation of predicted and actual classes.
    Matthews,
}

impl TestMetric {
    /// The name of the metric.
    pub fn name(self) -> &'static str {
        match self {
            TestMetric::Loss => "loss",
            TestMetric::Accuracy => "accuracy",
            TestMetric::F1 => "F1",
            TestMetric::Matthews => "Matthews correlation",
        }
    }

    /// The metric of an epoch, if its test has it.
    pub fn value_in(self, epoch: &EpochSummary) -> Option<f64> {
        match self {
            TestMetric::Loss => epoch.test_loss,
            TestMetric::Accuracy => epoch.test_accuracy,
            TestMetric::F1 => epoch.test_f1,
            TestMetric::Matthews => epoch.test_matthews,
        }
    }

    /// Whether one value is better than another; never if one of them is NaN.
    pub fn is_better(self, value: f64, than: f64) -> bool {
        match self {
            TestMetric::Loss => value < than,
            TestMetric::Accuracy | TestMetric::F1 | TestMetric::Matthews => value > than,
        }
    }
}

/// The epoch with the best test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BestEpoch {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Steps done at its end. The checkpoint of that step has its weights.
    pub step: u64,
    /// The metric that was compared.
    pub metric: TestMetric,
    /// Its value after that epoch.
    pub value: f64,
}

impl BestEpoch {
    /// The best of the whole epochs, the earliest of several equal ones. Epochs that the end of a run cut short do not
    /// count.
    pub(super) fn of(metric: TestMetric, epochs: &[EpochSummary], epoch_batches: u64) -> Option<Self> {
        let mut best: Option<BestEpoch> = None;
        for epoch in epochs.iter().filter(|epoch| epoch.steps == epoch_batches) {
            let Some(value) = metric.value_in(epoch).filter(|value| !value.is_nan()) else { continue };
            if best.is_none_or(|best| metric.is_better(value, best.value)) {
                let step = (epoch.epoch + 1).saturating_mul(epoch_batches);
                best = Some(BestEpoch { epoch: epoch.epoch, step, metric, value });
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(losses: &[f64]) -> Vec<EpochSummary> {
        let epoch = |(epoch, &loss): (u64, &f64)| EpochSummary {
            epoch,
            steps: 5,
            train_loss: 0.0,
            train_accuracy: None,
            test_loss: Some(loss),
            test_accuracy: Some(loss),
            test_classes: None,
            test_f1: None,
            test_matthews: None,
            samples_per_s: 0.0,
            train_s: 0.0,
            test_s: 0.0,
        };
        (0..).zip(losses).map(epoch).collect()
    }

    #[test]
    fn the_earliest_of_equal_epochs_is_the_best_and_nan_never_is() {
        let best =
            |metric, values: &[f64]| BestEpoch::of(metric, &epochs(values), 5).map(|best| (best.epoch, best.step));
        assert_eq!(best(TestMetric::Loss, &[f64::NAN, 2.0, 1.0, 1.0, 3.0]), Some((2, 15)));
        assert_eq!(best(TestMetric::Accuracy, &[0.5, 0.9, f64::NAN, 0.9]), Some((1, 10)));
        assert_eq!(best(TestMetric::F1, &[0.5, 0.9]), None);
        assert_eq!(best(TestMetric::Loss, &[]), None);
        assert_eq!(BestEpoch::of(TestMetric::Loss, &epochs(&[1.0]), 6), None, "cut short");
    }
}
