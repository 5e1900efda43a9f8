//! The wire format between two workers, byte for byte.
//!
//! Everything on a link is a frame: a header of [`HEADER_BYTES`] bytes, and a body whose length is in the header. The
//! body is a tensor, one of the small messages of this module, or text that the runtime defines.
//!
//! ```text
//! dials ── Hello ──────────────► answers         then, in both directions:
//!       ◄── Welcome or Refuse ──                 Job Ready Input Target Activation Gradient Output Command …
//! ```
//!
//! Nothing here reads a socket: functions take bytes and return values, so they can be fuzzed. They never panic and
//! never allocate more than [`Limits`] allows, whatever a peer sends.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`frame`] | the header and its checksum |
//! | `error` | [`WireError`]: why a frame is rejected |
//! | [`tensor`] | the header's description of a tensor: element type, memory layout, shape |
//! | [`limits`] | the largest frames that are accepted |
//! | [`durable`] | which frames are sent again after a broken connection, and which are duplicates |
//! | [`handshake`] | who connects, for which run, with which token |
//! | [`abort`] | which worker failed first, and why |
//! | [`message`] | the encoding of the fields of the last two |

/// Defines an enum whose variants are numbers on the wire, with their names and the list of all variants.
macro_rules! numbered {
    ($(#[$doc:meta])* pub enum $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $number:literal,)+ }) => {
        $(#[$doc])*
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant = $number,)+ }

        impl $name {
            /// Every variant, in the order of the numbers.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The largest number in use.
            pub(crate) const NUMBER_MAX: u8 = Self::ALL[Self::ALL.len() - 1] as u8;

            /// The variant with this number on the wire, if there is one. Numbers are never reused.
            pub const fn from_number(number: u8) -> Option<Self> {
                match number {
                    $($number => Some($name::$variant),)+
                    _ => None,
                }
            }

            /// The number on the wire; never 0.
            pub const fn number(self) -> u8 {
                self as u8
            }

            /// The name of the variant, for error messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $($name::$variant => stringify!($variant),)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
pub(crate) use numbered;

pub mod abort;
pub mod durable;
mod error;
pub mod frame;
pub mod handshake;
pub mod limits;
pub mod message;
pub mod tensor;

pub use abort::AbortNotice;
pub use durable::{ReceiveWindow, Received, SendWindow, SequenceError};
pub use error::WireError;
pub use frame::{BodyHasher, Header, Kind, HEADER_BYTES, MAGIC, VERSION};
pub use handshake::{HandshakeError, Hello, Refuse, Role, Welcome};
pub use limits::Limits;
pub use message::MessageError;
pub use tensor::{DType, Layout, Shape, ShapeError, TensorMeta, DIMS_MAX, ELEMENTS_MAX};
