//! Power iteration on one matrix, and the linear algebra that it needs.

use super::super::{floats, take_f32};
use super::matrices::Matrices;

/// A column of the last factor whose norm is smaller than this fraction of the largest is replaced by random numbers.
const COLUMN_WITHOUT_WEIGHT: f64 = 1e-6;
/// If projecting a column on the earlier ones leaves at most this fraction of its norm, they already span it.
const COLUMN_SPANNED: f64 = 1e-12;

/// The factors of one matrix during the iteration, column by column, and buffers that are reused between matrices.
#[derive(Default)]
pub(super) struct PowerIteration {
    /// The factor P, column by column.
    pub left: Vec<f64>,
    /// The factor Q, column by column.
    pub right: Vec<f64>,
    /// One row of the matrix in `f64`.
    row: Vec<f64>,
}

impl PowerIteration {
    /// Sets Q to the factor of the last tensor, or to random numbers where there is none.
    pub fn start(&mut self, warm: Option<&[f32]>, seed: u64, columns: usize, rank: usize) {
        self.right.clear();
        let weights: Vec<f64> = warm.map_or(vec![0.0; rank], |warm| warm.chunks_exact(columns).map(norm_f32).collect());
        let least = COLUMN_WITHOUT_WEIGHT * weights.iter().copied().fold(0.0, f64::max);
        for (at, &weight) in weights.iter().enumerate() {
            let kept = warm.filter(|_| weight > least).map(|warm| &warm[at * columns..(at + 1) * columns]);
            match kept {
                Some(column) => self.right.extend(column.iter().map(|&value| f64::from(value))),
                // Each column has its own seed, so that the start of a higher rank contains that of a lower one.
                None => self.right.extend(random(mix(seed ^ mix(at as u64))).take(columns)),
            }
        }
    }

    /// One iteration: P = M Q, made orthonormal and rounded to `f32` as it will be sent; then Q = Mᵀ P.
    pub fn iterate(&mut self, matrix: &[u8], Matrices { rows, columns, .. }: Matrices) {
        let rank = self.right.len() / columns;
        self.left.resize(rank * rows, 0.0);
        for (at, row) in matrix.chunks_exact(4 * columns).enumerate() {
            self.row.clear();
            self.row.extend(floats(row).map(f64::from));
            for (left, right) in self.left.chunks_exact_mut(rows).zip(self.right.chunks_exact(columns)) {
                left[at] = dot(&self.row, right);
            }
        }
        orthonormalise(&mut self.left, rows);
        self.left.iter_mut().for_each(|value| *value = f64::from(*value as f32));
        self.right.fill(0.0);
        for (at, row) in matrix.chunks_exact(4 * columns).enumerate() {
            self.row.clear();
            self.row.extend(floats(row).map(f64::from));
            for (left, right) in self.left.chunks_exact(rows).zip(self.right.chunks_exact_mut(columns)) {
                add_scaled(right, left[at], &self.row);
            }
        }
    }

    /// Whether Q and every value of P Qᵀ are finite as `f32`. The rows of P have a norm of at most 1, so no value
    /// exceeds the norm of its row of Q.
    pub fn decodes_to_finite(&self, columns: usize) -> bool {
        let squares = |at: usize| self.right.iter().skip(at).step_by(columns).map(|value| value * value).sum::<f64>();
        (0..columns).all(|at| squares(at).sqrt() < 0.9999 * f64::from(f32::MAX))
    }
}

impl PowerIteration {
    /// Decodes the factors in `body` to the matrix P Qᵀ.
    pub fn multiply(&mut self, body: &[u8], matrix: &mut [u8], Matrices { rows, columns, .. }: Matrices) {
        let rank = body.len() / 4 / (rows + columns);
        self.right.clear();
        self.right.extend((0..rank * columns).map(|at| f64::from(take_f32(body, rank * rows + at))));
        for (at, row) in matrix.chunks_exact_mut(4 * columns).enumerate() {
            self.row.clear();
            self.row.resize(columns, 0.0);
            for (column, right) in self.right.chunks_exact(columns).enumerate() {
                add_scaled(&mut self.row, f64::from(take_f32(body, column * rows + at)), right);
            }
            for (to, &value) in row.chunks_exact_mut(4).zip(&self.row) {
                to.copy_from_slice(&(value as f32).to_ne_bytes());
            }
        }
    }
}

/// Makes columns of this many rows orthonormal by the modified Gram–Schmidt method. Each column is projected twice,
/// because the rounding errors of the first projection may be large compared with what remains of the column.
pub(super) fn orthonormalise(columns: &mut [f64], rows: usize) {
    for at in 0..columns.len() / rows {
        let (before, rest) = columns.split_at_mut(at * rows);
        let column = &mut rest[..rows];
        let length = norm(column);
        subtract_all(before, column);
        if norm(column) <= COLUMN_SPANNED * length {
            // The earlier columns span this one. Any orthogonal direction will do: start from the unit vector of the
            // row in which they are smallest.
            let used = |row: usize| before.iter().skip(row).step_by(rows).map(|value| value * value).sum::<f64>();
            let free = (0..rows).min_by(|&a, &b| used(a).total_cmp(&used(b))).expect("a matrix has rows");
            column.fill(0.0);
            column[free] = 1.0;
            subtract_all(before, column);
        }
        let length = norm(column);
        column.iter_mut().for_each(|value| *value /= length);
    }
}

/// Removes from a column its projections on the columns before it, twice.
fn subtract_all(before: &[f64], column: &mut [f64]) {
    for _ in 0..2 {
        for other in before.chunks_exact(column.len()) {
            let common = dot(other, column);
            add_scaled(column, -common, other);
        }
    }
}

/// The dot product in eight partial sums, which the compiler vectorizes. The order of additions is the same on every
/// machine.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (blocks, rest) = (a.chunks_exact(8).zip(b.chunks_exact(8)), a.len() / 8 * 8);
    for (a, b) in blocks {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter_mut().zip(a[rest..].iter().zip(&b[rest..])).for_each(|(sum, (a, b))| *sum += a * b);
    sums.iter().sum()
}

pub(super) fn add_scaled(to: &mut [f64], by: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += by * from);
}

pub(super) fn norm(values: &[f64]) -> f64 {
    dot(values, values).sqrt()
}

fn norm_f32(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt()
}

/// Random numbers from −1 to 1.
pub(super) fn random(seed: u64) -> impl Iterator<Item = f64> {
    (0u64..).map(move |at| (mix(seed.wrapping_add(at)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
}

/// The output function of SplitMix64.
pub(super) fn mix(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}
