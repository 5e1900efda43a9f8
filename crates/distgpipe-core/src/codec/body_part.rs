//! How a codec describes the bytes of its bodies to the lossless stage behind it, [`zstd`](super::zstd).

/// Consecutive bytes of a body that have the same form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyPart {
    /// What the bytes are.
    pub form: PartForm,
    /// The number of bytes.
    pub bytes: usize,
}

/// What the bytes of a [`BodyPart`] are. It affects how well they compress, nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartForm {
    /// Nothing is known about them.
    Bytes,
    /// Packed codes of three bits.
    Codes3,
    /// Little-endian values of two bytes, such as `F16`.
    Values16,
    /// Little-endian values of four bytes, such as `F32`.
    Values32,
}

impl PartForm {
    /// The form of the bytes of a tensor with elements of this type.
    pub(super) fn of(dtype: crate::wire::DType) -> Self {
        use crate::wire::DType;
        match dtype {
            DType::F32 => PartForm::Values32,
            DType::F16 | DType::BF16 => PartForm::Values16,
            _ => PartForm::Bytes,
        }
    }
}
