//! `svd:R`: every matrix of the tensor as a product of two thin ones, of rank `R`, found by power iteration.
//!
//! ```text
//! body   for each matrix:  R columns of P, f32 | R columns of Q, f32          4 R N (A + B) bytes
//! value  P Qᵀ
//! ```
//!
//! A tensor [N, A, …] is N matrices of A × B, where B is the product of all further dimensions; [A, B] is one matrix; a
//! tensor of fewer dimensions is none, and refused. Channels-last memory [N, C, H, W] is taken as it lies, N matrices of
//! HW × C: the transposed ones, with the same factors the other way round.
//!
//! ```text
//! P = M Q     P: columns made orthonormal     Q = Mᵀ P          then M ≈ P Qᵀ, the projection of M onto P's columns
//! ```
//!
//! Each time round brings P closer to the directions in which M is largest. The first tensor of a slot starts from random
//! numbers and goes round twice. Later ones go round once, from the last Q, as long as their shape is the same: what the
//! tensors of a slot have in common is found over time, and for a tensor that stays, P Qᵀ comes as close to it as any
//! matrix of rank R. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
//! (2019), which adds what is lost to the next tensor: `feedback(svd:R)`.
//!
//! A matrix of rank R or less comes back, to rounding. Factors are smaller than a matrix if R < AB/(A + B); a larger R
//! is not refused up to the smaller side, and costs what the formula says. What is kept from tensor to tensor takes at
//! most [`BYTES_MAX`], and the slot that was used least recently goes first. A tensor that the model does not learn from
//! starts from random numbers and leaves nothing behind. The decoder keeps nothing.

use super::store::Store;
use super::{check_f32, check_meta, floats, magnitude_max, number, push_f32, take_f32};
use super::{Arguments, Codec, CodecError, CodecId, Context, Member, TensorView};
use crate::wire::{DType, Layout, TensorMeta};

pub(super) const MEMBER: Member = Member {
    name: "svd",
    id: CodecId::PowerSvd,
    lossless: false,
    examples: &["svd:1", "svd:2"],
    about: "svd:R, factors of rank R for each sample's matrix, 32 R (A + B)/(A B) bits a value, found over time",
    parse,
};

const EXPECTED: &str = "svd:R with R, the rank of the factors, from 1 to 4096, such as svd:8";
const RANK_MAX: u32 = 4096;

/// The most that one encoder keeps.
pub const BYTES_MAX: usize = 256 << 20;

/// How often an encoder goes round with random numbers to start from, and with the last tensor's factor.
const ROUNDS_COLD: usize = 2;
const ROUNDS_WARM: usize = 1;

/// A column that is so much smaller than the largest says nothing about the next tensor.
const COLUMN_WITHOUT_WEIGHT: f64 = 1e-6;
/// So much of a column is left, or less, if the others before it already span it.
const COLUMN_SPANNED: f64 = 1e-12;

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("svd", EXPECTED)?;
    let codec = number(got).and_then(PowerSvd::new);
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("svd", EXPECTED, got))
}

/// The codec for one rank.
pub struct PowerSvd {
    rank: usize,
    /// By slot; only an encoder has any.
    starts: Store<u64, Start>,
    work: Work,
}

/// Where the next tensor of a slot starts from: the Q of every matrix.
struct Start {
    matrices: Matrices,
    right: Vec<f32>,
}

/// How a tensor's memory is cut into matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Matrices {
    count: usize,
    rows: usize,
    columns: usize,
}

/// One matrix at work. Factors lie column by column.
#[derive(Default)]
struct Work {
    left: Vec<f64>,
    right: Vec<f64>,
    row: Vec<f64>,
}

impl PowerSvd {
    /// Factors of rank 1 to 4096.
    pub fn new(rank: u32) -> Option<Self> {
        let valid = (1..=RANK_MAX).contains(&rank);
        valid.then(|| PowerSvd { rank: rank as usize, starts: Store::new(BYTES_MAX), work: Work::default() })
    }

    /// The matrices of a tensor that has elements, if they have as high a rank.
    fn matrices(&self, dims: &[usize], layout: Layout) -> Result<Matrices, CodecError> {
        let matrices = Matrices::of(dims, layout).ok_or_else(|| CodecError::Shape {
            codec: CodecId::PowerSvd,
            expected: "two dimensions or more",
            got: dims.to_vec(),
        })?;
        if self.has_too_few_rows(dims) {
            return Err(CodecError::Shape {
                codec: CodecId::PowerSvd,
                expected: "at least as many rows as the rank",
                got: dims.to_vec(),
            });
        }
        let most = matrices.rows.min(matrices.columns);
        if matrices.count > 0 && self.rank > most {
            return Err(CodecError::Rank { rank: self.rank, most, dims: dims.to_vec() });
        }
        Ok(matrices)
    }

    /// Where rows of the batch are rows of the matrix, too few of them are no fault of whoever chose the rank.
    fn has_too_few_rows(&self, dims: &[usize]) -> bool {
        matches!(*dims, [rows, columns] if (1..self.rank).contains(&rows) && columns >= self.rank)
    }

    /// The factors of all matrices, one after the other; Q of each also into `right`.
    fn factors(
        &mut self,
        bytes: &[u8],
        matrices: Matrices,
        context: &Context<'_>,
        (out, right): (&mut Vec<u8>, &mut Vec<f32>),
    ) -> Result<(), CodecError> {
        let start = self.starts.get(&context.slot);
        let start = start.filter(|start| context.learning && start.matrices == matrices);
        let each = self.rank * matrices.columns;
        for (at, matrix) in bytes.chunks_exact(4 * matrices.rows * matrices.columns).enumerate() {
            let seed = mix(context.seed ^ mix(at as u64));
            let warm = start.map(|start| &start.right[at * each..(at + 1) * each]);
            let rounds = if warm.is_some() { ROUNDS_WARM } else { ROUNDS_COLD };
            self.work.start(warm, seed, matrices.columns, self.rank);
            (0..rounds).for_each(|_| self.work.go_round(matrix, matrices));
            if !self.work.decodes_to_finite(matrices.columns) {
                return Err(CodecError::Overflow { codec: CodecId::PowerSvd, at: 0 });
            }
            right.extend(self.work.right.iter().map(|&value| value as f32));
            self.work.left.iter().chain(&self.work.right).for_each(|&value| push_f32(out, value as f32));
        }
        Ok(())
    }
}

impl Matrices {
    /// `None` for a tensor of fewer than two dimensions. None of them has rows or columns without elements.
    fn of(dims: &[usize], layout: Layout) -> Option<Self> {
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

impl Work {
    /// Puts the factor to start from into `right`.
    fn start(&mut self, warm: Option<&[f32]>, seed: u64, columns: usize, rank: usize) {
        self.right.clear();
        let weights: Vec<f64> = warm.map_or(vec![0.0; rank], |warm| warm.chunks_exact(columns).map(norm_f32).collect());
        let least = COLUMN_WITHOUT_WEIGHT * weights.iter().copied().fold(0.0, f64::max);
        for (at, &weight) in weights.iter().enumerate() {
            let kept = warm.filter(|_| weight > least).map(|warm| &warm[at * columns..(at + 1) * columns]);
            match kept {
                Some(column) => self.right.extend(column.iter().map(|&value| f64::from(value))),
                // A column's numbers depend on no other, so that a higher rank begins with all of a lower one.
                None => self.right.extend(random(mix(seed ^ mix(at as u64))).take(columns)),
            }
        }
    }

    /// P = M Q, orthonormal and rounded as it will be sent; Q = Mᵀ P.
    fn go_round(&mut self, matrix: &[u8], Matrices { rows, columns, .. }: Matrices) {
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

    /// Whether Q can be sent and every value of P Qᵀ is an `f32`. A value is at most as large as its row of Q, since a row
    /// of P is at most 1 long.
    fn decodes_to_finite(&self, columns: usize) -> bool {
        let squares = |at: usize| self.right.iter().skip(at).step_by(columns).map(|value| value * value).sum::<f64>();
        (0..columns).all(|at| squares(at).sqrt() < 0.9999 * f64::from(f32::MAX))
    }
}

impl Codec for PowerSvd {
    fn id(&self) -> CodecId {
        CodecId::PowerSvd
    }

    fn refuses_shape(&self, dims: &[usize]) -> bool {
        dims.len() < 2 || self.has_too_few_rows(dims)
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        // The order in memory swaps P and Q, which are as large together.
        let Some(Matrices { count, rows, columns }) = Matrices::of(dims, Layout::Contiguous) else {
            return usize::MAX;
        };
        rows.saturating_add(columns).saturating_mul(count).saturating_mul(4 * self.rank)
    }

    fn encode(&mut self, tensor: TensorView<'_>, context: &Context<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        let matrices = self.matrices(tensor.dims, tensor.layout)?;
        let (start, mut right) = (out.len(), Vec::new());
        let factors = self.factors(tensor.bytes, matrices, context, (out, &mut right));
        factors.inspect_err(|_| out.truncate(start))?;
        if context.learning && matrices.count > 0 {
            let bytes = 4 * right.len();
            self.starts.insert(context.slot, Start { matrices, right }, bytes);
        }
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_meta(self.id(), meta, out)?;
        let dims: Vec<usize> = meta.shape.dims().iter().map(|&dim| dim as usize).collect();
        let matrices = self.matrices(&dims, meta.layout)?;
        let expected = self.encoded_bytes(meta.dtype, &dims);
        if body.len() != expected {
            let (expected, got) = (expected as u64, body.len() as u64);
            return Err(CodecError::BodyLength { codec: self.id(), expected, got });
        }
        let Matrices { rows, columns, .. } = matrices;
        let bodies = body.chunks_exact(4 * self.rank * (rows + columns));
        for (body, matrix) in bodies.zip(out.chunks_exact_mut(4 * rows * columns)) {
            self.work.multiply(body, matrix, matrices);
        }
        match magnitude_max(self.id(), out) {
            Err(CodecError::NotFinite { codec, at }) => Err(CodecError::Value { codec, at }),
            checked => checked.map(|_| ()),
        }
    }

    fn reset(&mut self) {
        self.starts.clear();
    }
}

impl Work {
    /// P Qᵀ.
    fn multiply(&mut self, body: &[u8], matrix: &mut [u8], Matrices { rows, columns, .. }: Matrices) {
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

/// Makes columns of so many rows orthonormal, by the modified method of Gram and Schmidt: each loses what it has in common
/// with those before it, twice, since the first time leaves rounding errors that may be large beside what remains.
fn orthonormalise(columns: &mut [f64], rows: usize) {
    for at in 0..columns.len() / rows {
        let (before, rest) = columns.split_at_mut(at * rows);
        let column = &mut rest[..rows];
        let length = norm(column);
        subtract_all(before, column);
        if norm(column) <= COLUMN_SPANNED * length {
            // Any direction will do that the others leave free, and there is one in the row in which they are smallest.
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

fn subtract_all(before: &[f64], column: &mut [f64]) {
    for _ in 0..2 {
        for other in before.chunks_exact(column.len()) {
            let common = dot(other, column);
            add_scaled(column, -common, other);
        }
    }
}

/// In eight sums, which a compiler can put side by side; the order is the same on every machine.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (blocks, rest) = (a.chunks_exact(8).zip(b.chunks_exact(8)), a.len() / 8 * 8);
    for (a, b) in blocks {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter_mut().zip(a[rest..].iter().zip(&b[rest..])).for_each(|(sum, (a, b))| *sum += a * b);
    sums.iter().sum()
}

fn add_scaled(to: &mut [f64], by: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += by * from);
}

fn norm(values: &[f64]) -> f64 {
    dot(values, values).sqrt()
}

fn norm_f32(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt()
}

/// Numbers from −1 to 1.
fn random(seed: u64) -> impl Iterator<Item = f64> {
    (0u64..).map(move |at| (mix(seed.wrapping_add(at)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
}

/// One number for another, as SplitMix64 does it.
fn mix(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use super::super::store::ENTRY_BYTES;
    use super::*;
    use crate::wire::Shape;
    use proptest::prelude::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn encode(
        codec: &mut PowerSvd,
        (dims, layout): (&[usize], Layout),
        values: &[f32],
        context: &Context<'_>,
    ) -> Result<Vec<u8>, CodecError> {
        let (bytes, mut body) = (bytes(values), Vec::new());
        codec.encode(TensorView { dtype: DType::F32, dims, layout, bytes: &bytes }, context, &mut body).map(|()| body)
    }

    fn decode(rank: u32, (dims, layout): (&[usize], Layout), body: &[u8]) -> Result<Vec<f32>, CodecError> {
        let meta = TensorMeta { dtype: DType::F32, layout, shape: Shape::new(dims).unwrap(), codec: CodecId::PowerSvd };
        let mut out = vec![0xcc; meta.decoded_bytes() as usize];
        PowerSvd::new(rank).unwrap().decode(&meta, body, &mut out)?;
        Ok(floats(&out).collect())
    }

    /// What the other end has of one tensor of its own, and of the next ones of a slot.
    fn send(codec: &mut PowerSvd, dims: &[usize], values: &[f32]) -> Vec<f32> {
        let form = (dims, Layout::Contiguous);
        let body = encode(codec, form, values, &Context::default()).unwrap();
        assert_eq!(body.len(), codec.encoded_bytes(DType::F32, dims));
        decode(codec.rank as u32, form, &body).unwrap()
    }

    fn distance(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>().sqrt()
    }

    fn length(values: &[f32]) -> f64 {
        distance(values, &vec![0.0; values.len()])
    }

    /// A matrix whose singular values fall, by a third from one to the next.
    fn falling(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
        of_rank(rows, columns, rows.min(columns), seed, 0.66)
    }

    /// A sum of so many products of a column and a row, each smaller by `ratio`.
    fn of_rank(rows: usize, columns: usize, rank: usize, seed: u64, ratio: f64) -> Vec<f32> {
        let mut sums = vec![0.0; rows * columns];
        for at in 0..rank {
            let left: Vec<f64> = random(mix(seed << 32 | at as u64)).take(rows).collect();
            let right: Vec<f64> = random(!mix(seed << 32 | at as u64)).take(columns).collect();
            for (row, scale) in left.iter().enumerate() {
                add_scaled(&mut sums[row * columns..(row + 1) * columns], scale * ratio.powi(at as i32), &right);
            }
        }
        sums.into_iter().map(|value| value as f32).collect()
    }

    /// The singular values, largest first, by turning pairs of rows until all are orthogonal (Jacobi).
    fn singular_values(matrix: &[f32], rows: usize) -> Vec<f64> {
        let columns = matrix.len() / rows;
        let mut turned: Vec<Vec<f64>> =
            matrix.chunks_exact(columns).map(|row| row.iter().map(|&value| f64::from(value)).collect()).collect();
        for _ in 0..60 {
            for p in 0..rows {
                for q in p + 1..rows {
                    let (upper, lower) = turned.split_at_mut(q);
                    let (a, b) = (&mut upper[p], &mut lower[0]);
                    let (aa, bb, ab) = (dot(a, a), dot(b, b), dot(a, b));
                    if ab.abs() <= 1e-15 * (aa * bb).sqrt() {
                        continue;
                    }
                    let half = (bb - aa) / (2.0 * ab);
                    let tangent = half.signum() / (half.abs() + (1.0 + half * half).sqrt());
                    let cosine = 1.0 / (1.0 + tangent * tangent).sqrt();
                    for (a, b) in a.iter_mut().zip(b.iter_mut()) {
                        let turn = cosine * tangent;
                        (*a, *b) = (cosine * *a - turn * *b, turn * *a + cosine * *b);
                    }
                }
            }
        }
        let mut values: Vec<f64> = turned.iter().map(|row| norm(row)).collect();
        values.sort_by(|a, b| b.total_cmp(a));
        values
    }

    /// No matrix of this rank is nearer.
    fn least_error(matrix: &[f32], rows: usize, rank: usize) -> f64 {
        singular_values(matrix, rows)[rank..].iter().map(|value| value * value).sum::<f64>().sqrt()
    }

    #[test]
    fn a_matrix_of_the_rank_or_less_comes_back() {
        for (rows, columns, of) in [(9, 14, 3), (14, 9, 2), (5, 5, 1), (64, 49, 3), (3, 200, 3)] {
            let values = of_rank(rows, columns, of, 7, 0.5);
            let back = send(&mut PowerSvd::new(3).unwrap(), &[rows, columns], &values);
            let error = distance(&values, &back) / length(&values);
            assert!(error < 3e-7, "{rows} × {columns} of rank {of}: {error}");
        }
        for zero in [vec![0.0; 12], vec![-0.0; 12]] {
            assert_eq!(send(&mut PowerSvd::new(3).unwrap(), &[3, 4], &zero), [0.0; 12]);
        }
    }

    #[test]
    fn a_tensor_is_a_matrix_for_each_sample() {
        let (one, two) = (of_rank(6, 20, 2, 1, 0.9), of_rank(6, 20, 2, 5, 0.9));
        let both = [one, two].concat();
        let mut codec = PowerSvd::new(2).unwrap();
        assert_eq!(codec.encoded_bytes(DType::F32, &[2, 6, 4, 5]), 4 * 2 * 2 * (6 + 20));
        let back = send(&mut codec, &[2, 6, 4, 5], &both);
        assert!(distance(&both, &back) < 1e-6 * length(&both));
        // As one matrix of 12 rows, or of rows of another length, it has a higher rank.
        assert!(distance(&both, &send(&mut PowerSvd::new(2).unwrap(), &[12, 20], &both)) > 0.01 * length(&both));
        assert!(distance(&both, &send(&mut PowerSvd::new(2).unwrap(), &[2, 10, 12], &both)) > 0.01 * length(&both));

        // Channels last: the same tensor lies transposed in memory, and P and Q change places.
        let mut turned = vec![0.0; both.len()];
        for (at, &value) in both.iter().enumerate() {
            let (sample, channel, pixel) = (at / 120, at / 20 % 6, at % 20);
            turned[sample * 120 + pixel * 6 + channel] = value;
        }
        let form = (&[2, 6, 4, 5][..], Layout::ChannelsLast);
        let body = encode(&mut PowerSvd::new(2).unwrap(), form, &turned, &Context::default()).unwrap();
        assert_eq!(body.len(), 4 * 2 * 2 * (6 + 20));
        assert!(distance(&turned, &decode(2, form, &body).unwrap()) < 1e-6 * length(&turned));
    }

    #[test]
    fn a_higher_rank_loses_less() {
        let mut of_least = 0.0;
        for seed in 0..20 {
            let values = falling(17, 23, seed);
            let errors: Vec<f64> = (1..=17)
                .map(|rank| distance(&values, &send(&mut PowerSvd::new(rank).unwrap(), &[17, 23], &values)))
                .collect();
            assert!(errors.is_sorted_by(|a, b| a > b || *b < 1e-6 * length(&values)), "{errors:?}");
            assert!(errors[16] < 1e-6 * length(&values), "{errors:?}");
            let ratios = errors[..10].iter().zip(1..).map(|(error, rank)| error / least_error(&values, 17, rank));
            of_least += ratios.sum::<f64>() / 10.0 / 20.0;
        }
        // Two rounds from random numbers are not far from the best.
        assert!((1.0..1.2).contains(&of_least), "{of_least} times the least error");
    }

    #[test]
    fn a_tensor_that_stays_comes_as_close_as_the_rank_allows() {
        for rank in [1, 2, 5] {
            let values = falling(12, 30, u64::from(rank));
            let mut codec = PowerSvd::new(rank).unwrap();
            let errors: Vec<f64> = (0..30).map(|_| distance(&values, &send(&mut codec, &[12, 30], &values))).collect();
            let least = least_error(&values, 12, rank as usize);
            assert!(errors.iter().all(|&error| error > 0.999_999 * least), "{errors:?} against {least}");
            assert!(errors[29] < 1.0001 * least, "{errors:?} against {least}");
            assert!(errors[1] < errors[0] && errors[29] < errors[1], "{errors:?} against {least}");
        }
    }

    /// A factor's column that a tensor of low rank leaves at 0 would otherwise stay 0 in every tensor after it.
    #[test]
    fn what_an_earlier_tensor_did_not_need_is_there_for_a_later_one() {
        let mut codec = PowerSvd::new(3).unwrap();
        send(&mut codec, &[8, 11], &of_rank(8, 11, 1, 3, 1.0));
        let values = of_rank(8, 11, 3, 9, 0.8);
        assert!(distance(&values, &send(&mut codec, &[8, 11], &values)) < 1e-6 * length(&values));
        send(&mut codec, &[8, 11], &[0.0; 88]);
        assert!(distance(&values, &send(&mut codec, &[8, 11], &values)) < 1e-6 * length(&values));
    }

    #[test]
    fn a_slot_is_warm_for_its_own_shape_within_the_bound() {
        let values = falling(6, 8, 1);
        let form = (&[6, 8][..], Layout::Contiguous);
        let context = |slot| Context { slot, ..Context::default() };
        let cold = encode(&mut PowerSvd::new(2).unwrap(), form, &values, &context(0)).unwrap();
        let mut codec = PowerSvd::new(2).unwrap();
        codec.starts = Store::new(2 * (4 * 2 * 8 + ENTRY_BYTES));
        let mut is_cold = |slot| encode(&mut codec, form, &values, &context(slot)).unwrap() == cold;
        let expected = [(0, true), (1, true), (0, false), (2, true), (0, false), (1, true), (2, true)];
        for (at, (slot, cold)) in expected.into_iter().enumerate() {
            assert_eq!(is_cold(slot), cold, "{at}");
        }
        let other = falling(8, 6, 1);
        encode(&mut codec, (&[8, 6], Layout::Contiguous), &other, &context(2)).unwrap();
        assert_eq!(encode(&mut codec, form, &values, &context(2)).unwrap(), cold);
        codec.reset();
        assert_eq!(encode(&mut codec, form, &values, &context(2)).unwrap(), cold);
    }

    #[test]
    fn a_warm_tensor_goes_round_once() {
        let (values, form) = (falling(6, 8, 1), (&[6, 8][..], Layout::Contiguous));
        let mut codec = PowerSvd::new(2).unwrap();
        encode(&mut codec, form, &values, &Context::default()).unwrap();
        let mut work = Work::default();
        work.start(Some(&codec.starts.get(&0).unwrap().right), 0, 8, 2);
        work.go_round(&bytes(&values), Matrices { count: 1, rows: 6, columns: 8 });
        let factors = work.left.iter().chain(&work.right).map(|&value| value as f32);
        let expected: Vec<u8> = factors.flat_map(f32::to_le_bytes).collect();
        assert_eq!(encode(&mut codec, form, &values, &Context::default()).unwrap(), expected);
    }

    #[test]
    fn the_wrong_shape_is_refused_and_the_wrong_rank_is_told() {
        let mut codec = PowerSvd::new(3).unwrap();
        let mut refused = |dims: &[usize]| {
            let values = vec![1.0; dims.iter().product()];
            encode(&mut codec, (dims, Layout::Contiguous), &values, &Context::default()).unwrap_err()
        };
        for dims in [&[][..], &[7]] {
            assert!(refused(dims).refuses_tensor(), "{dims:?}");
        }
        let error = refused(&[2, 4, 1, 2]);
        assert!(!error.refuses_tensor());
        assert_eq!(
            error.to_string(),
            "expected a rank of at most 2 for matrices of a tensor of [2, 4, 1, 2], got svd:3: use svd:2 or less on this \
             link, or another codec"
        );
        assert_eq!(
            decode(3, (&[4, 2], Layout::Contiguous), &[]),
            Err(CodecError::Rank { rank: 3, most: 2, dims: vec![4, 2] })
        );
        // A last batch with few rows goes raw; every batch with few columns is a rank that was chosen wrongly.
        assert!(refused(&[2, 4]).refuses_tensor() && !refused(&[4, 2]).refuses_tensor());
        assert!(matches!(decode(3, (&[7], Layout::Contiguous), &[]), Err(CodecError::Shape { .. })));
        // Nothing to send has no rank.
        assert_eq!(decode(3, (&[2, 0], Layout::Contiguous), &[]), Ok(vec![]));
    }

    #[test]
    fn what_cannot_be_a_number_is_refused_at_both_ends() {
        // All values are the largest: their direction is four times as long as a number can be.
        let form = (&[4, 4][..], Layout::Contiguous);
        let error = encode(&mut PowerSvd::new(1).unwrap(), form, &[f32::MAX; 16], &Context::default()).unwrap_err();
        assert_eq!(error, CodecError::Overflow { codec: CodecId::PowerSvd, at: 0 });
        let large = [f32::MAX / 4.1; 16];
        let body = encode(&mut PowerSvd::new(1).unwrap(), form, &large, &Context::default()).unwrap();
        assert!(decode(1, form, &body).unwrap().iter().all(|value| value.is_finite()));
        let value = |at| Err(CodecError::Value { codec: CodecId::PowerSvd, at });
        for (place, with, at) in [(0, f32::NAN, 0), (3, f32::INFINITY, 12), (6, f32::NEG_INFINITY, 2), (2, 1e10, 8)] {
            let mut body = body.clone();
            body[4 * place..4 * place + 4].copy_from_slice(&with.to_le_bytes());
            assert_eq!(decode(1, form, &body), value(at), "{with} at {place}");
        }
    }

    proptest! {
        #[test]
        fn columns_are_orthonormal_whatever_they_were(
            values in prop::collection::vec(prop_oneof![2 => -1.0f64..1.0, 1 => Just(0.0), 1 => Just(1.0), 1 => -1e-30..1e-30f64], 60),
            rank in 1usize..=6,
            doubled in 0usize..6,
            nearly in prop::sample::select(&[0.0, 1e-9, 1e-5, 1.0][..]),
        ) {
            let mut columns = values[..10 * rank].to_vec();
            // All but the same as the first: what is left of it is smaller than the rounding of one projection.
            let first = columns[..10].to_vec();
            let near = &mut columns[10 * (doubled % rank)..][..10];
            near.iter_mut().zip(&first).for_each(|(value, first)| *value = first + nearly * *value);
            orthonormalise(&mut columns, 10);
            for (at, a) in columns.chunks_exact(10).enumerate() {
                for (other, b) in columns.chunks_exact(10).enumerate() {
                    let expected = if at == other { 1.0 } else { 0.0 };
                    prop_assert!((dot(a, b) - expected).abs() < 1e-12, "{} {}: {}", at, other, dot(a, b));
                }
            }
        }
    }
}
