//! What two workers say to each other, byte for byte.
//!
//! Everything on a link is a frame: a header of [`HEADER_BYTES`] bytes and a body whose length the header gives.
//! The body is a tensor, one of the small messages of this module, or text that the runtime defines.
//!
//! ```text
//! dials ── Hello ──────────────► answers         then, either way:
//!       ◄── Welcome or Refuse ──                 Job Ready Input Target Activation Gradient Output Command …
//! ```
//!
//! Nothing here reads a socket: functions take bytes and give values, so that hostile bytes can be tried by the
//! million. They never panic and never allocate more than [`Limits`] allows (law 4).
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`frame`] | the header and its checksum |
//! | [`tensor`] | the header's description of a tensor: number type, memory order, shape |
//! | [`limits`] | how much a peer may make us hold |
//! | [`handshake`] | who calls, for which run, with which secret |
//! | [`abort`] | who failed first, and why |
//! | [`message`] | the bounded fields that the last two are made of |

/// An enum whose variants are numbers on the wire. One macro, so that the number, the name and the list of all
/// members cannot drift apart.
macro_rules! numbered {
    ($(#[$doc:meta])* pub enum $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $number:literal,)+ }) => {
        $(#[$doc])*
        #[repr(u8)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant = $number,)+ }

        impl $name {
            /// Every member, in the order of the numbers.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The largest number in use.
            pub(crate) const NUMBER_MAX: u8 = Self::ALL[Self::ALL.len() - 1] as u8;

            /// The member with this number on the wire, if there is one. Numbers are never reused.
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

            /// The name, for messages.
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
pub mod frame;
pub mod handshake;
pub mod limits;
pub mod message;
pub mod tensor;

pub use abort::AbortNotice;
pub use frame::{BodyHasher, Header, Kind, WireError, HEADER_BYTES, MAGIC, VERSION};
pub use handshake::{HandshakeError, Hello, Refuse, Role, Welcome};
pub use limits::Limits;
pub use message::MessageError;
pub use tensor::{DType, Layout, Shape, ShapeError, TensorMeta, DIMS_MAX, ELEMENTS_MAX};
