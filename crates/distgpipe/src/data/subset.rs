//! Fewer rows of a data set, to run small.

use super::{check, DataError, Dataset, Pass};
use crate::layer::SampleShape;
use crate::pipeline::Batch;
use std::sync::Arc;

/// So many rows of a data set, spread evenly: sets that are sorted by class keep all their classes.
pub struct Subset {
    data: Arc<dyn Dataset>,
    rows: usize,
}

impl Subset {
    /// At most so many rows of a data set.
    pub fn new(data: Arc<dyn Dataset>, rows_max: usize) -> Self {
        let rows = rows_max.min(data.len());
        Subset { data, rows }
    }

    fn row(&self, row: usize) -> usize {
        (row as u128 * self.data.len() as u128 / self.rows as u128) as usize
    }
}

impl Dataset for Subset {
    fn len(&self) -> usize {
        self.rows
    }

    fn classes(&self) -> Option<usize> {
        self.data.classes()
    }

    fn input(&self) -> &[SampleShape] {
        self.data.input()
    }

    fn batch(&self, rows: &[usize], pass: Pass<'_>) -> Result<Batch, DataError> {
        check(rows, self.rows)?;
        self.data.batch(&rows.iter().map(|&row| self.row(row)).collect::<Vec<_>>(), pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Digits, Part};

    #[test]
    fn rows_are_spread_over_the_whole_set() {
        let digits: Arc<dyn Dataset> = Arc::new(Digits::new(Part::Test, Default::default()).unwrap());
        let pass = Pass::new(0, 0);
        let few = Subset::new(digits.clone(), 4);
        assert_eq!((few.len(), few.classes()), (4, Some(10)));
        let expected = digits.batch(&[0, 90, 180, 270], pass).unwrap();
        let got = few.batch(&[0, 1, 2, 3], pass).unwrap();
        assert_eq!((got.inputs, got.target), (expected.inputs, expected.target));
        assert!(matches!(few.batch(&[4], pass), Err(DataError::NoSuchRow { len: 4, got: 4 })));
        assert_eq!(Subset::new(digits, 1000).len(), 360);
    }
}
