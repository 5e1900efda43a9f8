//! The header's description of a tensor: number type, memory order, shape and codec.
//!
//! A [`Shape`] that exists is one that can be held: its constructor bounds the number of dimensions and of
//! elements, so nobody after it has to check a product again.

use crate::codec::CodecId;
use thiserror::Error;

/// The most dimensions a tensor may have.
pub const DIMS_MAX: usize = 8;

/// The most elements a tensor may have. Below it, the size in bytes and every stride of any [`DType`] fit the
/// signed 64-bit numbers that libtorch counts in.
pub const ELEMENTS_MAX: u64 = (1 << 60) - 1;

numbered! {
    /// The type of a tensor's elements.
    pub enum DType {
        /// 32-bit IEEE float.
        F32 = 1,
        /// 64-bit IEEE float.
        F64 = 2,
        /// 16-bit IEEE float.
        F16 = 3,
        /// bfloat16: the upper half of an `F32`.
        BF16 = 4,
        /// Signed 64-bit integer; token ids and labels.
        I64 = 5,
        /// Signed 32-bit integer.
        I32 = 6,
        /// Unsigned 8-bit integer; image bytes.
        U8 = 7,
        /// One byte, 0 or 1.
        Bool = 8,
        /// Signed 16-bit integer.
        I16 = 9,
        /// Signed 8-bit integer.
        I8 = 10,
    }
}

impl DType {
    /// The size of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::U8 | DType::Bool | DType::I8 => 1,
            DType::F16 | DType::BF16 | DType::I16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }
}

numbered! {
    /// The order of a tensor's elements in memory. Sent along, so that a convolution's activations arrive in the
    /// order that the next convolution is fast in.
    pub enum Layout {
        /// The last dimension varies fastest.
        Contiguous = 1,
        /// Four dimensions N C H W, stored as N H W C.
        ChannelsLast = 2,
    }
}

/// A tensor's dimensions: at most [`DIMS_MAX`] of them and [`ELEMENTS_MAX`] elements. No dimensions is a scalar.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    rank: u8,
    /// Zero beyond `rank`, so that equality and the encoding need no special case.
    dims: [u64; DIMS_MAX],
}

/// Why a list of dimensions is not a [`Shape`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// Too many dimensions.
    #[error("a tensor on the wire has at most {DIMS_MAX} dimensions, got {got}: reshape it before sending")]
    Rank {
        /// How many there are.
        got: usize,
    },
    /// Too many elements, or a dimension that would overflow a stride even though another one is 0.
    #[error("a tensor on the wire has at most {ELEMENTS_MAX} elements, and the dimensions multiply to more: no real tensor has this shape, so the sender is faulty or the bytes are damaged")]
    Elements,
}

impl Shape {
    /// The shape with these dimensions.
    pub fn new(dims: &[usize]) -> Result<Self, ShapeError> {
        let mut all = [0u64; DIMS_MAX];
        let Some(used) = all.get_mut(..dims.len()) else {
            return Err(ShapeError::Rank { got: dims.len() });
        };
        for (to, &from) in used.iter_mut().zip(dims) {
            *to = u64::try_from(from).map_err(|_| ShapeError::Elements)?;
        }
        Self::from_parts(dims.len(), all)
    }

    /// The shape whose first `rank` entries of `dims` count; the others must be 0.
    pub(super) fn from_parts(rank: usize, dims: [u64; DIMS_MAX]) -> Result<Self, ShapeError> {
        let Some(used) = dims.get(..rank) else {
            return Err(ShapeError::Rank { got: rank });
        };
        // A dimension of 0 counts as 1: strides are products of the others, and they must not overflow either.
        used.iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(dim.max(1)))
            .filter(|&product| product <= ELEMENTS_MAX)
            .ok_or(ShapeError::Elements)?;
        Ok(Self { rank: rank as u8, dims })
    }

    /// The dimensions.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..usize::from(self.rank)]
    }

    /// How many dimensions.
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// How many elements: 1 for a scalar, 0 if any dimension is 0. The constructor has checked that this fits.
    pub fn elements(&self) -> u64 {
        self.dims().iter().product()
    }

    /// All entries, the unused ones 0.
    pub(super) fn padded_dims(&self) -> &[u64; DIMS_MAX] {
        &self.dims
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.dims().fmt(f)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// What a frame's body decodes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// The type of the elements, after decoding.
    pub dtype: DType,
    /// The order of the elements in memory, after decoding.
    pub layout: Layout,
    /// The dimensions, in the logical order whatever the layout.
    pub shape: Shape,
    /// How the body is encoded.
    pub codec: CodecId,
}

impl TensorMeta {
    /// The size of the decoded tensor.
    pub fn decoded_bytes(&self) -> u64 {
        // At most 8 × ELEMENTS_MAX, which is below 2^63.
        self.shape.elements() * self.dtype.size_bytes() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_counts_its_elements() {
        for (dims, elements) in
            [(&[][..], 1), (&[0], 0), (&[7], 7), (&[2, 3, 4], 24), (&[2, 0, 4], 0), (&[1, 1, 1, 1, 1, 1, 1, 5], 5)]
        {
            let shape = Shape::new(dims).unwrap();
            assert_eq!(shape.elements(), elements, "{dims:?}");
            assert_eq!(shape.rank(), dims.len());
            assert!(shape.dims().iter().map(|&dim| dim as usize).eq(dims.iter().copied()));
        }
    }

    #[test]
    fn a_shape_that_cannot_be_held_is_refused() {
        assert_eq!(Shape::new(&[1; 9]), Err(ShapeError::Rank { got: 9 }));
        let max = ELEMENTS_MAX as usize;
        assert!(Shape::new(&[max]).is_ok());
        assert_eq!(Shape::new(&[max + 1]), Err(ShapeError::Elements));
        assert_eq!(Shape::new(&[1 << 32, 1 << 32]), Err(ShapeError::Elements));
        // The product is 0, whichever way round, but the strides are not.
        assert_eq!(Shape::new(&[0, 1 << 32, 1 << 32]), Err(ShapeError::Elements));
        assert_eq!(Shape::new(&[1 << 32, 1 << 32, 0]), Err(ShapeError::Elements));
        // As a signed number this dimension would be −1.
        assert_eq!(Shape::new(&[usize::MAX, 0]), Err(ShapeError::Elements));
    }

    #[test]
    fn the_largest_tensor_has_a_size() {
        let meta = TensorMeta {
            dtype: DType::F64,
            layout: Layout::Contiguous,
            shape: Shape::new(&[ELEMENTS_MAX as usize]).unwrap(),
            codec: CodecId::Raw,
        };
        assert_eq!(meta.decoded_bytes(), ELEMENTS_MAX * 8);
        assert!(i64::try_from(meta.decoded_bytes()).is_ok());
    }
}
