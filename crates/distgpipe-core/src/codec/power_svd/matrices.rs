//! The matrices of a tensor.

use crate::wire::Layout;

/// How a tensor's memory is divided into matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrices {
    pub count: usize,
    pub rows: usize,
    pub columns: usize,
}

impl Matrices {
    /// The matrices of a tensor; `None` if it has fewer than two dimensions. A tensor without elements has no matrices.
    pub fn of(dims: &[usize], layout: Layout) -> Option<Self> {
        let product = |dims: &[usize]| dims.iter().fold(1usize, |product, &dim| product.saturating_mul(dim));
        let (count, rows, columns) = match *dims {
            [] | [_] => return None,
            _ if dims.contains(&0) => (0, 1, 1),
            [rows, columns] => (1, rows, columns),
            [count, channels, height, width] if layout == Layout::ChannelsLast => {
                (count, product(&[height, width]), channels)
            }
            [count, rows, ref columns @ ..] => (count, rows, product(columns)),
        };
        Some(Matrices { count, rows, columns })
    }
}
