//! Weight files as others write them, as far as bytes go: where in a file each tensor is.
//!
//! | module | what it reads |
//! | --- | --- |
//! | [`safetensors`] | the header of a safetensors file |
//! | [`zip`] | the directory of the archive that `torch.save` writes |
//! | [`pickle`] | the list of tensors in that archive |
//!
//! The files may be anybody's. Nothing here is executed, panics, or takes more memory than a small multiple of the bytes
//! it is given; a pickle, of which one byte can make a value of a hundred, takes at most a gigabyte. Whoever has the
//! result need not check it against those bytes again. Opening files and reading tensors is left to the caller.

pub mod pickle;
pub mod safetensors;
pub mod zip;

use thiserror::Error;

/// Bytes that are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected {expected} at byte {offset}, got {got}: {remedy}")]
pub struct FormatError {
    /// Where, counted from the first byte of what was read.
    pub offset: u64,
    /// What should be there.
    pub expected: String,
    /// What is.
    pub got: String,
    /// What to do.
    pub remedy: &'static str,
}

impl FormatError {
    fn new(offset: usize, expected: impl Into<String>, got: impl Into<String>, remedy: &'static str) -> Self {
        FormatError { offset: offset as u64, expected: expected.into(), got: got.into(), remedy }
    }
}

/// What to do with a file that ends too soon.
pub const COPY_AGAIN: &str = "was it copied to its end?";

/// What to do with an archive of another form.
pub const SAVE_AGAIN: &str = "write it with torch.save of PyTorch 1.6 or later";

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $size:literal)*) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Dtype {
            $($(#[$doc])* $variant,)*
        }

        impl Dtype {
            /// All of them.
            pub const ALL: &[Dtype] = &[$(Dtype::$variant,)*];

            /// As safetensors writes it.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// The size of one element.
            pub const fn size_bytes(self) -> u64 {
                match self { $(Dtype::$variant => $size,)* }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool "BOOL" 1
    /// Unsigned, 8 bits.
    U8 "U8" 1
    /// Signed, 8 bits.
    I8 "I8" 1
    /// Signed, 16 bits.
    I16 "I16" 2
    /// Unsigned, 16 bits.
    U16 "U16" 2
    /// IEEE float of 16 bits.
    F16 "F16" 2
    /// The upper half of an `F32`.
    BF16 "BF16" 2
    /// Signed, 32 bits.
    I32 "I32" 4
    /// Unsigned, 32 bits.
    U32 "U32" 4
    /// IEEE float of 32 bits.
    F32 "F32" 4
    /// IEEE float of 64 bits.
    F64 "F64" 8
    /// Signed, 64 bits.
    I64 "I64" 8
    /// Unsigned, 64 bits.
    U64 "U64" 8
}

impl Dtype {
    /// Bytes of a tensor of these dimensions; `None` if there is no such number.
    pub fn tensor_bytes(self, dims: &[u64]) -> Option<u64> {
        dims.iter().try_fold(self.size_bytes(), |product, &dim| product.checked_mul(dim))
    }
}
