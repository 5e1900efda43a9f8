//! Why a frame is rejected.

use super::frame::{Kind, MAGIC};
use super::{DType, Shape, ShapeError};
use thiserror::Error;

/// Why received bytes are not a valid frame, or why a frame must not be sent.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first bytes are not those of a frame.
    #[error("expected a frame to begin with {MAGIC:02x?}, got {got:02x?}: the peer is not distgpipe; check the host and the port")]
    Magic {
        /// The first bytes that were received.
        got: [u8; 4],
    },
    /// The peer runs an older or a newer release.
    #[error("expected version {ours} of the wire format, got version {theirs} from the peer: upgrade distgpipe on {}", if theirs < ours { "the peer" } else { "this end" })]
    Version {
        /// The version of this end.
        ours: u16,
        /// The version in the frame.
        theirs: u16,
    },
    /// A field has a number without meaning.
    #[error("expected {field} to be 1 to {expected_max}, got {got}: the frame is corrupt, or the peer runs a newer release and this end must be upgraded")]
    Unknown {
        /// The name of the field in the header.
        field: &'static str,
        /// The largest valid number.
        expected_max: u8,
        /// The number that was received.
        got: u8,
    },
    /// Reserved bytes are not zero.
    #[error("expected the reserved bytes of the header ({field}) to be zero: the frame is corrupt, or the peer runs another version of distgpipe")]
    NotZero {
        /// The position of the bytes.
        field: &'static str,
    },
    /// The index of a tensor in its message is not below the number of tensors.
    #[error("expected a slot below slots = {slots}, got {slot}: the frame is corrupt, or the sender is faulty")]
    Slot {
        /// The index in the header.
        slot: u16,
        /// The number of tensors in the header.
        slots: u16,
    },
    /// A message of several frames has a kind that is always one frame.
    #[error("expected a {kind} message to be one frame, got one of {slots}: only tensors are sent in several slots")]
    Slots {
        /// The kind of the frame.
        kind: Kind,
        /// The number of frames in the header.
        slots: u16,
    },
    /// The frame exceeds one of the [`Limits`](super::Limits).
    #[error("expected {what} of at most {allowed} in a {kind} frame (limit {limit}), got {got}: {remedy}", remedy = remedy(limit))]
    Limit {
        /// The kind of the frame.
        kind: Kind,
        /// The quantity that is too large.
        what: &'static str,
        /// The value of that quantity.
        got: u64,
        /// The name of the field of [`Limits`](super::Limits).
        limit: &'static str,
        /// The value of that field.
        allowed: u64,
    },
    /// The dimensions are not those of a tensor.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The layout is channels-last, but the tensor is not N C H W.
    #[error("expected 4 dimensions for the ChannelsLast layout, got {got}: send the tensor as Contiguous")]
    ChannelsLast {
        /// The number of dimensions.
        got: usize,
    },
    /// A frame of a kind without tensors describes a tensor.
    #[error("expected no tensor in a {kind} frame, got one: send tensors as Input, Target, Activation, Gradient, Output, State or Share")]
    TensorUnexpected {
        /// The kind of the frame.
        kind: Kind,
    },
    /// A frame describes no tensor but has a body.
    #[error("expected an absent tensor of a {kind} message to have no body, got {got} bytes: set `tensor`, or send an empty body")]
    AbsentBody {
        /// The kind of the frame.
        kind: Kind,
        /// The length of the body.
        got: u64,
    },
    /// The length of a raw body is not that of the tensor.
    #[error("expected a raw body of {expected} bytes for {dtype} {shape}, got {got}: the header is corrupt, or the sender used another codec than the header names")]
    RawLength {
        /// The element type of the tensor.
        dtype: DType,
        /// The shape of the tensor.
        shape: Shape,
        /// The size of the tensor in bytes.
        expected: u64,
        /// The length in the header.
        got: u64,
    },
    /// The length of the body is not the one in the header.
    #[error("expected a body of {expected} bytes, as in its header, got {got}: the connection was lost within a frame, or the header was not sealed with this body")]
    BodyLength {
        /// The length in the header.
        expected: u64,
        /// The length of the body that was received.
        got: u64,
    },
    /// The header or the body changed in transit.
    #[error("expected checksum {expected:016x}, got {got:016x}: the frame was corrupted in transit; if it happens again, check the memory and the network cards of both machines")]
    Checksum {
        /// The checksum in the header.
        expected: u64,
        /// The checksum of the frame that was received.
        got: u64,
    },
}

/// What the user can do about a limit that was hit. The limits themselves are fixed.
fn remedy(limit: &str) -> &'static str {
    match limit {
        "body_bytes_max" => "use more micro-batches, or cut the model where smaller tensors cross",
        "tensors_per_message_max" => "cut the model where fewer tensors cross",
        "handshake_bytes_max" => "check that the peer is distgpipe",
        "job_bytes_max" => {
            "use fewer micro-batches or partitions, so that the plan becomes smaller; the graph of an exported model counts too: \
             keep its large constants in persistent buffers"
        }
        _ => "use fewer micro-batches, or record no trace",
    }
}
