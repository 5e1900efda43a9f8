//! `svd:R`: every matrix of the tensor as a product of two thin factors of rank `R`, found by power iteration.
//!
//! ```text
//! body   for each matrix:  R columns of P, f32 | R columns of Q, f32          4 R N (A + B) bytes
//! value  P Qᵀ
//! ```
//!
//! A tensor [N, A, …] is N matrices of A × B, where B is the product of all further dimensions; [A, B] is one matrix.
//! Tensors of fewer dimensions are refused. Channels-last memory [N, C, H, W] is used as it is, as N matrices of HW ×
//! C: the transposed ones, with the factors swapped.
//!
//! ```text
//! P = M Q     P: columns made orthonormal     Q = Mᵀ P          then M ≈ P Qᵀ, the projection of M onto P's columns
//! ```
//!
//! Each iteration brings P closer to the dominant singular vectors of M. The first tensor of a slot starts from random
//! numbers and takes two iterations. Later ones of the same shape take one iteration from the last Q: over time it
//! finds what the tensors of a slot have in common, and for a constant tensor P Qᵀ converges to the best approximation
//! of rank R. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019),
//! which adds the error to the next tensor: `feedback(svd:R)`.
//!
//! A matrix of rank R or less is reproduced up to rounding. The factors are smaller than the matrix if R < AB/(A + B).
//! A larger R is allowed up to the smaller side of the matrix and costs what the formula says. The state takes at most
//! [`BYTES_MAX`]; beyond that, the least recently used slot is evicted. A tensor that the model is not trained on
//! starts from random numbers and leaves the state unchanged. The decoder has no state.

mod matrices;
mod power_iteration;
#[cfg(test)]
mod tests;

use super::lru_cache::LruCache;
use super::{check_f32, check_meta, magnitude_max, number, push_f32};
use super::{Arguments, BodyPart, Codec, CodecContext, CodecError, CodecId, Member, PartForm, TensorView};
use crate::wire::{DType, Layout, TensorMeta};
use matrices::Matrices;
use power_iteration::{mix, PowerIteration};

pub(super) const MEMBER: Member = Member {
    name: "svd",
    id: CodecId::PowerSvd,
    examples: &["svd:1", "svd:2"],
    about: "svd:R, two factors of rank R for each sample's A × B matrix, 32 R (A + B)/(A B) bits a value",
    parse,
};

const EXPECTED: &str = "svd:R with R, the rank of the factors, from 1 to 4096, such as svd:8";
const RANK_MAX: u32 = 4096;

/// The most state that one encoder keeps, in bytes.
pub const BYTES_MAX: usize = 256 << 20;

/// The iterations from a random start, and from the factor of the slot's last tensor.
const ITERATIONS_COLD: usize = 2;
const ITERATIONS_WARM: usize = 1;

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("svd", EXPECTED)?;
    let codec = number(got).and_then(PowerSvd::new);
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("svd", EXPECTED, got))
}

/// The codec `svd:R`: an encoder or a decoder.
pub struct PowerSvd {
    rank: usize,
    /// The start for the next tensor of each slot. Decoders have none.
    starts: LruCache<u64, Start>,
    iteration: PowerIteration,
}

/// The start for the next tensor of a slot: the factor Q of every matrix of the last one.
struct Start {
    matrices: Matrices,
    right: Vec<f32>,
}

impl PowerSvd {
    /// The codec with factors of this rank, from 1 to 4096; `None` for other ranks.
    pub fn new(rank: u32) -> Option<Self> {
        let valid = (1..=RANK_MAX).contains(&rank);
        valid.then(|| PowerSvd {
            rank: rank as usize,
            starts: LruCache::new(BYTES_MAX),
            iteration: PowerIteration::default(),
        })
    }

    /// The matrices of a tensor; an error if its shape has none, or none of this rank.
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

    /// Whether a two-dimensional tensor has fewer rows than the rank. Its rows are those of the batch, so a short last
    /// batch is refused and goes raw instead of being reported as a wrong rank.
    fn has_too_few_rows(&self, dims: &[usize]) -> bool {
        matches!(*dims, [rows, columns] if (1..self.rank).contains(&rows) && columns >= self.rank)
    }

    /// Appends the factors of all matrices to `out`, and the factors Q alone to `right`.
    fn factors(
        &mut self,
        bytes: &[u8],
        matrices: Matrices,
        context: &CodecContext<'_>,
        (out, right): (&mut Vec<u8>, &mut Vec<f32>),
    ) -> Result<(), CodecError> {
        let start = self.starts.get(&context.slot);
        let start = start.filter(|start| context.training && start.matrices == matrices);
        let each = self.rank * matrices.columns;
        for (at, matrix) in bytes.chunks_exact(4 * matrices.rows * matrices.columns).enumerate() {
            let seed = mix(context.seed ^ mix(at as u64));
            let warm = start.map(|start| &start.right[at * each..(at + 1) * each]);
            let iterations = if warm.is_some() { ITERATIONS_WARM } else { ITERATIONS_COLD };
            self.iteration.start(warm, seed, matrices.columns, self.rank);
            (0..iterations).for_each(|_| self.iteration.iterate(matrix, matrices));
            if !self.iteration.decodes_to_finite(matrices.columns) {
                return Err(CodecError::Overflow { codec: CodecId::PowerSvd, at: 0 });
            }
            right.extend(self.iteration.right.iter().map(|&value| value as f32));
            self.iteration.left.iter().chain(&self.iteration.right).for_each(|&value| push_f32(out, value as f32));
        }
        Ok(())
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
        // The memory layout swaps P and Q, which does not change their total size.
        let Some(Matrices { count, rows, columns }) = Matrices::of(dims, Layout::Contiguous) else {
            return usize::MAX;
        };
        rows.saturating_add(columns).saturating_mul(count).saturating_mul(4 * self.rank)
    }

    fn body_parts(&self, _: DType, _: &[usize], body: &[u8], each: &mut dyn FnMut(BodyPart)) {
        each(BodyPart { form: PartForm::Values32, bytes: body.len() });
    }

    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        let matrices = self.matrices(tensor.dims, tensor.layout)?;
        let (start, mut right) = (out.len(), Vec::new());
        let factors = self.factors(tensor.bytes, matrices, context, (out, &mut right));
        factors.inspect_err(|_| out.truncate(start))?;
        if context.training && matrices.count > 0 {
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
            self.iteration.multiply(body, matrix, matrices);
        }
        match magnitude_max(self.id(), out) {
            Err(CodecError::NotFinite { codec, at }) => Err(CodecError::Value { codec, at }),
            checked => checked.map(|_| ()),
        }
    }

    fn remembers(&self) -> bool {
        true
    }

    fn reset(&mut self) {
        self.starts.clear();
    }
}
