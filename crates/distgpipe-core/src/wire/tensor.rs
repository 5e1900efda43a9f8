//! The header's description of a tensor: element type, memory layout, shape and codec.
//!
//! The constructor of [`Shape`] bounds the number of dimensions and of elements, so no code after it needs to check a
//! product for overflow.

use crate::codec::CodecId;
use thiserror::Error;

/// The largest number of dimensions of a tensor.
pub const DIMS_MAX: usize = 8;

/// The largest number of elements of a tensor. Up to it, the size in bytes and every stride fit libtorch's signed
/// 64-bit integers, for any [`DType`].
pub const ELEMENTS_MAX: u64 = (1 << 60) - 1;

numbered! {
    /// The type of a tensor's elements.
    pub enum DType {
        /// A 32-bit IEEE float.
        F32 = 1,
        /// A 64-bit IEEE float.
        F64 = 2,
        /// A 16-bit IEEE float.
        F16 = 3,
        /// bfloat16: the upper half of an `F32`.
        BF16 = 4,
        /// Signed 64-bit integer; token ids and labels.
        I64 = 5,
        /// A signed 32-bit integer.
        I32 = 6,
        /// Unsigned 8-bit integer; image bytes.
        U8 = 7,
        /// One byte, 0 or 1.
        Bool = 8,
        /// A signed 16-bit integer.
        I16 = 9,
        /// A signed 8-bit integer.
        I8 = 10,
    }
}

impl DType {
    /// The size of one element in bytes.
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
    /// The order of a tensor's elements in memory. It is preserved, so that the activations of a convolution arrive in
    /// the layout that is fastest for the next one.
    pub enum Layout {
        /// The last dimension varies fastest.
        Contiguous = 1,
        /// Four dimensions N C H W, stored as N H W C.
        ChannelsLast = 2,
    }
}

/// The dimensions of a tensor: at most [`DIMS_MAX`] of them, and at most [`ELEMENTS_MAX`] elements. A scalar has none.
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
    /// There are too many dimensions.
    #[error("expected a tensor of at most {DIMS_MAX} dimensions, got {got}: reshape it before it is sent")]
    Rank {
        /// The number of dimensions.
        got: usize,
    },
    /// There are too many elements, or a dimension would overflow a stride even though another one is 0.
    #[error("expected a tensor of at most {ELEMENTS_MAX} elements, got dimensions with a larger product: the sender is faulty, or the frame is corrupt")]
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

    /// The shape with the first `rank` entries of `dims`; the others must be 0.
    pub(super) fn from_parts(rank: usize, dims: [u64; DIMS_MAX]) -> Result<Self, ShapeError> {
        let Some(used) = dims.get(..rank) else {
            return Err(ShapeError::Rank { got: rank });
        };
        // A dimension of 0 counts as 1, because strides are products of the others and must not overflow either.
        used.iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(dim.max(1)))
            .filter(|&product| product <= ELEMENTS_MAX)
            .ok_or(ShapeError::Elements)?;
        Ok(Self { rank: rank as u8, dims })
    }

    /// The dimensions, in logical order.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..usize::from(self.rank)]
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// The number of elements: 1 for a scalar, 0 if any dimension is 0. The constructor has checked that it fits.
    pub fn elements(&self) -> u64 {
        self.dims().iter().product()
    }

    /// All entries; unused ones are 0.
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

/// The tensor that a frame's body decodes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// The type of the elements, after decoding.
    pub dtype: DType,
    /// The order of the elements in memory, after decoding.
    pub layout: Layout,
    /// The dimensions, in the logical order whatever the layout.
    pub shape: Shape,
    /// The codec of the body.
    pub codec: CodecId,
}

impl TensorMeta {
    /// The size of the decoded tensor in bytes.
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
        // The product is 0 in either order, but the strides are not.
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
