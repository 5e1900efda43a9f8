//! The formats of weight files: finds the position of each tensor in a file.
//!
//! | module | what it reads |
//! | --- | --- |
//! | [`safetensors`] | the header of a safetensors file |
//! | [`zip`] | the directory of the archive that `torch.save` writes |
//! | [`pickle`] | the list of tensors in that archive |
//! | [`npy`] | the header of a NumPy file |
//!
//! The files are untrusted. No code in them is executed, no content causes a panic, and the memory is bounded by a
//! small multiple of the input's length; a pickle, where one byte can become a value of a hundred, takes at most a
//! gigabyte. The results are consistent with the length of the file, so callers need not check that again. The caller
//! opens the file and reads the tensors.

pub mod npy;
pub mod pickle;
pub mod safetensors;
pub mod zip;

use thiserror::Error;

/// The content of a file is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected {expected} at byte {offset}, got {got}: {remedy}")]
pub struct FormatError {
    /// The offset of the error from the first byte that was read.
    pub offset: u64,
    /// What was expected there.
    pub expected: String,
    /// What was found instead.
    pub got: String,
    /// What the user can do.
    pub remedy: &'static str,
}

impl FormatError {
    fn new(offset: usize, expected: impl Into<String>, got: impl Into<String>, remedy: &'static str) -> Self {
        FormatError { offset: offset as u64, expected: expected.into(), got: got.into(), remedy }
    }
}

/// The remedy for a file that is truncated.
pub const COPY_AGAIN: &str = "the file is truncated, copy or download it again";

/// The remedy for an archive that `torch.save` would not write.
pub const SAVE_AGAIN: &str = "write it with torch.save of PyTorch 1.6 or later";

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $size:literal)*) => {
        /// The type of a tensor's elements in a weight file.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum TensorType {
            $($(#[$doc])* $variant,)*
        }

        impl TensorType {
            /// Every element type, in the order of declaration.
            pub const ALL: &[TensorType] = &[$(TensorType::$variant,)*];

            /// The name of the type in safetensors files.
            pub const fn name(self) -> &'static str {
                match self { $(TensorType::$variant => $name,)* }
            }

            /// The size of one element in bytes.
            pub const fn size_bytes(self) -> u64 {
                match self { $(TensorType::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool "BOOL" 1
    /// An unsigned 8-bit integer.
    U8 "U8" 1
    /// A signed 8-bit integer.
    I8 "I8" 1
    /// A signed 16-bit integer.
    I16 "I16" 2
    /// An unsigned 16-bit integer.
    U16 "U16" 2
    /// A 16-bit IEEE float.
    F16 "F16" 2
    /// bfloat16: the upper half of an `F32`.
    BF16 "BF16" 2
    /// A signed 32-bit integer.
    I32 "I32" 4
    /// An unsigned 32-bit integer.
    U32 "U32" 4
    /// A 32-bit IEEE float.
    F32 "F32" 4
    /// A 64-bit IEEE float.
    F64 "F64" 8
    /// A signed 64-bit integer.
    I64 "I64" 8
    /// An unsigned 64-bit integer.
    U64 "U64" 8
}

impl TensorType {
    /// The size in bytes of a tensor with these dimensions; `None` if it does not fit 64 bits.
    pub fn tensor_bytes(self, dims: &[u64]) -> Option<u64> {
        dims.iter().try_fold(self.size_bytes(), |product, &dim| product.checked_mul(dim))
    }
}
