//! Classification metrics: F1 and Matthews correlation.
//!
//! The worker with the last partition counts per class. The driver adds up the counts of all test batches and computes the
//! metrics from the sums: a mean of each batch's F1 would be a different number. Outputs need not travel.
//!
//! The definitions are scikit-learn's: F1 of class 1 where there are two classes, else the unweighted mean over all classes
//! that occur (macro); the Matthews correlation for any number of classes is the R_K statistic (Gorodkin, 2004). Both
//! are 0 where they would divide by 0.

use crate::failure::Fault;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

/// How often each class was predicted, occurred, and was predicted correctly.
// The fields are in alphabetical order, as in the manifest of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassCounts {
    /// Rows of each class.
    pub actual: Vec<u64>,
    /// Rows that were predicted to be of each class.
    pub predicted: Vec<u64>,
    /// Rows of each class that were predicted correctly.
    pub right: Vec<u64>,
}

impl ClassCounts {
    /// Counts the largest scores of `[rows, classes]` against the class numbers `[rows]`. `None` for other shapes.
    pub fn of(scores: &Tensor, target: &Tensor) -> Result<Option<Self>, Fault> {
        let (&[rows, classes], [targets]) = (&scores.size()[..], &target.size()[..]) else { return Ok(None) };
        if rows != *targets {
            return Ok(None);
        }
        // The loss ignores rows without a class, so these counts do too.
        let known = target.f_ge(0)?;
        let target = target.f_masked_select(&known)?;
        let predicted = scores.f_argmax(-1, false)?.f_masked_select(&known)?;
        let right = predicted.f_masked_select(&predicted.f_eq_tensor(&target)?)?;
        let count = |numbers: &Tensor| -> Result<Vec<u64>, Fault> {
            let counts = numbers.f_bincount(None::<&Tensor>, classes)?.f_to_kind(Kind::Int64)?;
            let counts: Vec<i64> = Vec::try_from(counts)?;
            Ok(counts.into_iter().map(|n| u64::try_from(n).unwrap_or(0)).collect())
        };
        Ok(Some(ClassCounts { right: count(&right)?, predicted: count(&predicted)?, actual: count(&target)? }))
    }

    /// Adds the counts of other rows.
    pub fn add(&mut self, other: &ClassCounts) {
        for (mine, theirs) in [
            (&mut self.right, &other.right),
            (&mut self.predicted, &other.predicted),
            (&mut self.actual, &other.actual),
        ] {
            mine.resize(mine.len().max(theirs.len()), 0);
            mine.iter_mut().zip(theirs).for_each(|(sum, n)| *sum = sum.saturating_add(*n));
        }
    }

    /// The F1 score: of class 1 for data with two classes, else the mean over the classes that occur in predictions or data.
    pub fn f1(&self, classes: usize) -> f64 {
        if classes == 2 {
            return self.of_class(1).unwrap_or(0.0);
        }
        let each: Vec<f64> = (0..self.actual.len()).filter_map(|class| self.of_class(class)).collect();
        each.iter().sum::<f64>() / each.len().max(1) as f64
    }

    /// The F1 score of a class; `None` if it was neither predicted nor present.
    fn of_class(&self, class: usize) -> Option<f64> {
        let at = |counts: &[u64]| counts.get(class).copied().unwrap_or(0) as f64;
        let both = at(&self.predicted) + at(&self.actual);
        (both > 0.0).then(|| 2.0 * at(&self.right) / both)
    }

    /// The Matthews correlation, from −1 to 1; guessing gives 0.
    pub fn matthews(&self) -> f64 {
        // In integers, so that a denominator of 0 is exactly 0.
        let dot = |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(a, b)| i128::from(*a) * i128::from(*b)).sum::<i128>();
        let sum = |counts: &[u64]| counts.iter().map(|&n| i128::from(n)).sum::<i128>();
        let (rows, right) = (sum(&self.actual), sum(&self.right));
        let together = right * rows - dot(&self.predicted, &self.actual);
        let predicted = rows * rows - dot(&self.predicted, &self.predicted);
        let actual = rows * rows - dot(&self.actual, &self.actual);
        if predicted <= 0 || actual <= 0 {
            return 0.0;
        }
        together as f64 / ((predicted as f64).sqrt() * (actual as f64).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Stream;

    fn scores(predicted: &[i64], classes: i64) -> Tensor {
        Tensor::from_slice(predicted).one_hot(classes).to_kind(Kind::Float)
    }

    fn counts(predicted: &[i64], actual: &[i64], classes: i64) -> ClassCounts {
        ClassCounts::of(&scores(predicted, classes), &Tensor::from_slice(actual)).unwrap().unwrap()
    }

    /// Pseudo-random class numbers; the same for the same name.
    fn labels(name: &str, rows: usize, classes: u64) -> Vec<i64> {
        (0..rows as u64).map(|row| (Stream::new(1).named(name).at(row).seed() % classes) as i64).collect()
    }

    /// The correlation of Pearson between two lists of one-hot rows, summed over the classes: how R_K is defined.
    fn correlation(predicted: &[i64], actual: &[i64], classes: i64) -> f64 {
        let rows = predicted.len() as f64;
        let is = |label: i64, class: i64| f64::from(u8::from(label == class));
        let covariance = |x: &[i64], y: &[i64]| -> f64 {
            let mean = |list: &[i64], class| list.iter().map(|&label| is(label, class)).sum::<f64>() / rows;
            let of = |class| {
                let (mean_x, mean_y) = (mean(x, class), mean(y, class));
                x.iter().zip(y).map(|(&x, &y)| (is(x, class) - mean_x) * (is(y, class) - mean_y)).sum::<f64>()
            };
            (0..classes).map(of).sum()
        };
        covariance(predicted, actual) / (covariance(predicted, predicted) * covariance(actual, actual)).sqrt()
    }

    /// Precision and recall, row by row.
    fn f1(predicted: &[i64], actual: &[i64], class: i64) -> f64 {
        let both = predicted.iter().zip(actual).filter(|(p, a)| **p == class && **a == class).count() as f64;
        let of = |list: &[i64]| list.iter().filter(|label| **label == class).count() as f64;
        let (precision, recall) = (both / of(predicted), both / of(actual));
        2.0 / (1.0 / precision + 1.0 / recall)
    }

    #[test]
    fn f1_and_matthews_are_those_of_the_label_lists() {
        for classes in [2_i64, 3, 7] {
            let actual = labels("actual", 60, classes as u64);
            // Right about every other time, so that no figure is near its ends.
            let guess = labels("guess", 60, classes as u64);
            let coin = labels("coin", 60, 2);
            let predicted: Vec<i64> =
                (0..60).map(|row| if coin[row] == 0 { actual[row] } else { guess[row] }).collect();
            let mut sum = ClassCounts::default();
            for part in [0..13, 13..14, 14..60] {
                sum.add(&counts(&predicted[part.clone()], &actual[part], classes));
            }
            let each: Vec<f64> = (0..classes).map(|class| f1(&predicted, &actual, class)).collect();
            let expected = if classes == 2 { each[1] } else { each.iter().sum::<f64>() / each.len() as f64 };
            assert!((sum.f1(classes as usize) - expected).abs() < 1e-12, "{classes} classes: {sum:?}");
            assert!((sum.matthews() - correlation(&predicted, &actual, classes)).abs() < 1e-12, "{sum:?}");
        }
    }

    /// [[2, 1], [3, 5]] of actual by predicted: F1 of class 1 is 2·5 / (6 + 8), and Matthews' own formula for two classes
    /// (TP·TN − FP·FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)) = (10 − 3) / √(6·8·3·5).
    #[test]
    fn two_classes_have_the_textbooks_figures() {
        let sum = counts(&[0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1], &[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], 2);
        assert_eq!(sum, ClassCounts { right: vec![2, 5], predicted: vec![5, 6], actual: vec![3, 8] });
        assert!((sum.f1(2) - 10.0 / 14.0).abs() < 1e-12);
        assert!((sum.matthews() - 7.0 / (6.0_f64 * 8.0 * 3.0 * 5.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn what_is_undefined_is_0_and_classes_that_do_not_occur_do_not_count() {
        let nothing = ClassCounts::default();
        assert_eq!((nothing.f1(2), nothing.f1(5), nothing.matthews()), (0.0, 0.0, 0.0));
        // Always the same guess.
        assert_eq!(counts(&[0, 0, 0], &[0, 1, 0], 2).matthews(), 0.0);
        assert_eq!(counts(&[0, 0, 0], &[0, 1, 0], 2).f1(2), 0.0);
        // Of ten classes two occur, and all is right.
        let few = counts(&[3, 5, 5], &[3, 5, 5], 10);
        assert_eq!((few.f1(10), few.matthews()), (1.0, 1.0));
        // A row without a class.
        assert_eq!(counts(&[1, 0], &[1, -100], 2).actual, [0, 1]);
    }
}
