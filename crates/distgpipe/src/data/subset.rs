//! A subset of a data set, for small runs.

use super::image::ImageBytes;
use super::{check, DataError, Dataset, LoadPass};
use crate::driver::pipeline::Batch;
use crate::model::layer::SampleShape;

/// Some rows of a data set, spread evenly, so that a data set sorted by class keeps all its classes.
pub struct Subset<D> {
    data: D,
    rows: usize,
}

impl<D: Dataset> Subset<D> {
    /// At most this many rows of a data set.
    pub fn new(data: D, rows_max: usize) -> Self {
        let rows = rows_max.min(data.len());
        Subset { data, rows }
    }

    fn row(&self, row: usize) -> usize {
        (row as u128 * self.data.len() as u128 / self.rows as u128) as usize
    }

    /// The rows of the data set that these rows are.
    fn of_data(&self, rows: &[usize]) -> Result<Vec<usize>, DataError> {
        check(rows, self.rows)?;
        Ok(rows.iter().map(|&row| self.row(row)).collect())
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    fn len(&self) -> usize {
        self.rows
    }

    fn classes(&self) -> Option<usize> {
        self.data.classes()
    }

    fn class_names(&self) -> Option<Vec<String>> {
        self.data.class_names()
    }

    fn input(&self) -> &[SampleShape] {
        self.data.input()
    }

    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
        self.data.batch(&self.of_data(rows)?, pass)
    }

    fn image_bytes(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Option<ImageBytes>, DataError> {
        self.data.image_bytes(&self.of_data(rows)?, pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Digits, Split};
    use std::sync::Arc;

    #[test]
    fn rows_are_spread_over_the_whole_set() {
        let digits = Arc::new(Digits::new(Split::Test, Default::default()).unwrap());
        let pass = LoadPass::new(0, 0);
        let few = Subset::new(digits.clone(), 4);
        assert_eq!((few.len(), few.classes()), (4, Some(10)));
        let expected = digits.batch(&[0, 90, 180, 270], pass).unwrap();
        let got = few.batch(&[0, 1, 2, 3], pass).unwrap();
        assert_eq!((got.inputs, got.target), (expected.inputs, expected.target));
        assert!(matches!(few.batch(&[4], pass), Err(DataError::NoSuchRow { len: 4, got: 4 })));
        assert_eq!(Subset::new(digits, 1000).len(), 360);
    }
}
