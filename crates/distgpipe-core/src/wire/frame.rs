//! The frame: what a transport carries.
//!
//! ```text
//! offset  bytes  field             (little-endian; the first six bytes keep their meaning in every version)
//!      0      4  magic             89 'D' 'G' 'P'
//!      4      2  version
//!      6      1  kind
//!      7      1  zero
//!      8      8  step
//!     16      4  micro-batch
//!     20      4  from partition
//!     24      4  to partition
//!     28      2  slot              which tensor of the message …
//!     30      2  slots             … of how many
//!     32      1  dtype             0 when the body is not a tensor; the next 3 bytes and all dimensions then too
//!     33      1  layout
//!     34      1  codec
//!     35      1  rank
//!     36      4  zero
//!     40     64  dimensions        8 of 8 bytes, zero beyond the rank
//!    104      8  body bytes
//!    112      8  checksum
//! ```
//!
//! The header has a fixed size, so that a receiver reads it without knowing anything and knows from it what to read
//! next. It has one encoding: every byte without meaning is zero, and checked to be. So the checksum
//! can be taken over the decoded value: `xxh3_64(body, seed = xxh3_64(header with checksum 0))`, which covers both
//! without needing them in one buffer. It finds accidents; against forgery there is TLS.

use super::{DType, Layout, Limits, Shape, ShapeError, TensorMeta, DIMS_MAX};
use crate::codec::CodecId;
use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed, Xxh3};

/// The first bytes of every frame. The first one is no ASCII, so that no text protocol is taken for ours.
pub const MAGIC: [u8; 4] = *b"\x89DGP";

/// The version of the header's layout and of the handshake. Both ends must have the same.
pub const VERSION: u16 = 1;

/// The size of an encoded header.
pub const HEADER_BYTES: usize = 120;

const CHECKSUM_AT: usize = 112;

numbered! {
    /// What a frame is for.
    pub enum Kind {
        /// Who dials says who it is: [`Hello`](super::Hello).
        Hello = 1,
        /// Who answers lets it in: [`Welcome`](super::Welcome).
        Welcome = 2,
        /// Who answers does not, and says why: [`Refuse`](super::Refuse).
        Refuse = 3,
        /// What a worker is to run.
        Job = 4,
        /// A worker has built its partitions.
        Ready = 5,
        /// Rows of a micro-batch, to the first partition.
        Input = 6,
        /// Labels of a micro-batch, to the last partition.
        Target = 7,
        /// A partition's output, to a later partition.
        Activation = 8,
        /// The gradient of an activation, back to where the activation came from.
        Gradient = 9,
        /// The last partition's output, to the driver.
        Output = 10,
        /// What a worker is to do next.
        Command = 11,
        /// What came of it: losses, counters, trace events.
        Report = 12,
        /// Parameters, buffers and optimizer state; tensors, or a body that the runtime defines.
        State = 13,
        /// Somebody failed; end: [`AbortNotice`](super::AbortNotice).
        Abort = 14,
        /// Still here.
        Ping = 15,
        /// The run is over and nothing more comes.
        Goodbye = 16,
        /// Part of the gradients of a replica, to the next replica.
        Share = 17,
    }
}

impl Kind {
    /// Whether frames of this kind describe tensors. The others are one frame with a body of another sort.
    pub const fn carries_tensors(self) -> bool {
        matches!(
            self,
            Kind::Input | Kind::Target | Kind::Activation | Kind::Gradient | Kind::Output | Kind::State | Kind::Share
        )
    }
}

/// What stands before a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is for.
    pub kind: Kind,
    /// The training step it belongs to.
    pub step: u64,
    /// The micro-batch it belongs to, or the number of a state tensor or share.
    pub micro_batch: u32,
    /// The partition it comes from, or the worker where it is not between partitions.
    pub from: u32,
    /// The partition it goes to, or the worker that a share goes to.
    pub to: u32,
    /// Which tensor of the message this is.
    pub slot: u16,
    /// How many tensors the message has; 1 for a body that is no tensor.
    pub slots: u16,
    /// What the body decodes to. `None`: the body is no tensor, or this tensor of the message is absent.
    pub tensor: Option<TensorMeta>,
    /// The length of the body. Set by [`Header::seal`].
    pub body_bytes: u64,
    /// The checksum of header and body. Set by [`Header::seal`].
    pub checksum: u64,
}

/// Why bytes are no frame, or a frame may not be sent.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first bytes are somebody else's.
    #[error("expected a frame to begin with {MAGIC:02x?}, got {got:02x?}: not a distgpipe peer? Check the host and the port, and that both ends use TLS or neither does")]
    Magic {
        /// The first bytes that came.
        got: [u8; 4],
    },
    /// The peer's release is older or newer than ours.
    #[error("the peer speaks version {theirs} of the wire format and this end version {ours}: upgrade distgpipe on {}", if theirs < ours { "the peer" } else { "this end" })]
    Version {
        /// The version of this program.
        ours: u16,
        /// The version in the frame.
        theirs: u16,
    },
    /// A number that names nothing.
    #[error("expected {field} to be 1 to {expected_max}, got {got}: the frame is damaged, or the peer is a newer release and this end has to be upgraded")]
    Unknown {
        /// The field of the header.
        field: &'static str,
        /// The largest number in use.
        expected_max: u8,
        /// The number that came.
        got: u8,
    },
    /// Bytes without meaning that are not zero.
    #[error("expected the unused bytes of the header ({field}) to be zero: the frame is damaged, or the peer is no distgpipe of this version")]
    NotZero {
        /// Which bytes.
        field: &'static str,
    },
    /// A tensor's number in its message is not below their count.
    #[error("expected a slot below slots = {slots}, got {slot}: a fault in the sender")]
    Slot {
        /// The number.
        slot: u16,
        /// The count.
        slots: u16,
    },
    /// Several frames for a message that is always one.
    #[error("expected a {kind} message to be one frame, got one of {slots}: only tensors are sent in several slots")]
    Slots {
        /// The frame's kind.
        kind: Kind,
        /// The count of frames.
        slots: u16,
    },
    /// More than we are willing to hold.
    #[error("a {kind} frame has {what} = {got}, and the limit {limit} is {allowed}: {remedy}, or raise Limits::{limit} on every worker", remedy = remedy(limit))]
    Limit {
        /// The frame's kind.
        kind: Kind,
        /// What is too large.
        what: &'static str,
        /// How large it is.
        got: u64,
        /// The field of [`Limits`].
        limit: &'static str,
        /// The value of that field.
        allowed: u64,
    },
    /// Dimensions that no tensor has.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Channels-last memory order for a tensor that is not N C H W.
    #[error("expected 4 dimensions for the ChannelsLast layout, got {got}: send the tensor as Contiguous")]
    ChannelsLast {
        /// How many dimensions there are.
        got: usize,
    },
    /// A tensor where none belongs.
    #[error("expected no tensor in a {kind} frame, got one: send tensors as Input, Target, Activation, Gradient, Output, State or Share")]
    TensorUnexpected {
        /// The frame's kind.
        kind: Kind,
    },
    /// An absent tensor that has a body.
    #[error("expected an absent tensor of a {kind} message to have no body, got {got} bytes: set `tensor`, or send an empty body")]
    AbsentBody {
        /// The frame's kind.
        kind: Kind,
        /// The length of the body.
        got: u64,
    },
    /// The header's length is not the length of the tensor it describes.
    #[error("expected a raw body of {expected} bytes for {dtype} {shape}, got {got}: the header is damaged, or the sender used another codec than it says")]
    RawLength {
        /// The tensor's number type.
        dtype: DType,
        /// The tensor's shape.
        shape: Shape,
        /// The tensor's size in bytes.
        expected: u64,
        /// The length that the header gives.
        got: u64,
    },
    /// The body is not as long as the header says.
    #[error("expected a body of {expected} bytes, as its header says, got {got}: the connection broke inside a frame, or the header was not sealed with this body")]
    BodyLength {
        /// The length that the header gives.
        expected: u64,
        /// The length of what came.
        got: u64,
    },
    /// Header or body changed on the way.
    #[error("expected checksum {expected:016x}, got {got:016x}: the frame was damaged on the way. If it happens again, check memory and network card of both machines, or turn on TLS")]
    Checksum {
        /// The checksum in the header.
        expected: u64,
        /// The checksum of what came.
        got: u64,
    },
}

/// What to do, other than raising it, about a limit that was hit.
fn remedy(limit: &str) -> &'static str {
    match limit {
        "body_bytes_max" => "use more micro-batches, or cut the model where less crosses",
        "tensors_per_message_max" => "cut the model where fewer tensors cross",
        "state_tensors_max" => "use more partitions",
        "handshake_bytes_max" => "check that the peer is a distgpipe",
        _ => "send less in one message",
    }
}

impl Header {
    /// A header of this kind with everything else 0, one slot and no tensor. Change what the frame needs, then
    /// [`seal`](Header::seal) it.
    pub const fn new(kind: Kind) -> Self {
        Self {
            kind,
            step: 0,
            micro_batch: 0,
            from: 0,
            to: 0,
            slot: 0,
            slots: 1,
            tensor: None,
            body_bytes: 0,
            checksum: 0,
        }
    }

    /// Sets `body_bytes` and `checksum` for this body. The last thing to do before [`encode`](Header::encode): a
    /// field changed afterwards is an error at the receiver.
    pub fn seal(&mut self, body: &[u8]) {
        self.body_bytes = body.len() as u64;
        self.checksum = xxh3_64_with_seed(body, self.seed());
    }

    /// Whether this body is the one the header was sealed with, and both are undamaged.
    pub fn verify(&self, body: &[u8]) -> Result<(), WireError> {
        self.verify_length(body.len() as u64)?;
        self.verify_checksum(xxh3_64_with_seed(body, self.seed()))
    }

    /// The header as bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut to = Writer(&mut out);
        to.put(MAGIC);
        to.put(VERSION.to_le_bytes());
        to.put([self.kind.number(), 0]);
        to.put(self.step.to_le_bytes());
        to.put(self.micro_batch.to_le_bytes());
        to.put(self.from.to_le_bytes());
        to.put(self.to.to_le_bytes());
        to.put(self.slot.to_le_bytes());
        to.put(self.slots.to_le_bytes());
        let mut dims = [0; DIMS_MAX];
        match &self.tensor {
            Some(tensor) => {
                to.put([
                    tensor.dtype.number(),
                    tensor.layout.number(),
                    tensor.codec.number(),
                    tensor.shape.rank() as u8,
                ]);
                dims = *tensor.shape.padded_dims();
            }
            None => to.put([0; 4]),
        }
        to.put([0; 4]);
        for dim in dims {
            to.put(dim.to_le_bytes());
        }
        to.put(self.body_bytes.to_le_bytes());
        to.put(self.checksum.to_le_bytes());
        debug_assert!(to.0.is_empty(), "the fields fill the header");
        out
    }

    /// The header in these bytes, if it is one and keeps within the limits. Nothing is allocated. What the checksum
    /// says is known only with the body: [`verify`](Header::verify).
    pub fn decode(bytes: &[u8; HEADER_BYTES], limits: &Limits) -> Result<Self, WireError> {
        let mut from = Reader(bytes);
        let magic = from.take();
        if magic != MAGIC {
            return Err(WireError::Magic { got: magic });
        }
        let theirs = from.u16();
        if theirs != VERSION {
            return Err(WireError::Version { ours: VERSION, theirs });
        }
        let [kind, reserved] = from.take();
        let kind = known("kind", kind, Kind::from_number, Kind::NUMBER_MAX)?;
        zero("byte 7", &[reserved])?;
        let header = Self {
            kind,
            step: from.u64(),
            micro_batch: from.u32(),
            from: from.u32(),
            to: from.u32(),
            slot: from.u16(),
            slots: from.u16(),
            tensor: read_tensor(&mut from)?,
            body_bytes: from.u64(),
            checksum: from.u64(),
        };
        header.check(limits)?;
        Ok(header)
    }

    /// Whether the fields fit each other and the limits. [`decode`](Header::decode) does this; a sender does it
    /// before sending, to fail on the side where the cause is.
    pub fn check(&self, limits: &Limits) -> Result<(), WireError> {
        self.check_slots(limits)?;
        self.check_limit("body_bytes", self.body_bytes, limits.body_bytes_of(self.kind))?;
        match &self.tensor {
            Some(_) if !self.kind.carries_tensors() => Err(WireError::TensorUnexpected { kind: self.kind }),
            Some(tensor) => self.check_tensor(tensor, limits),
            None if self.kind.carries_tensors() && self.kind != Kind::State && self.body_bytes != 0 => {
                Err(WireError::AbsentBody { kind: self.kind, got: self.body_bytes })
            }
            None => Ok(()),
        }
    }

    fn check_slots(&self, limits: &Limits) -> Result<(), WireError> {
        if self.slot >= self.slots {
            return Err(WireError::Slot { slot: self.slot, slots: self.slots });
        }
        match limits.slots_of(self.kind) {
            Some((allowed, limit)) => self.check_limit("slots", self.slots.into(), (allowed.into(), limit)),
            None if self.slots != 1 => Err(WireError::Slots { kind: self.kind, slots: self.slots }),
            None => Ok(()),
        }
    }

    fn check_tensor(&self, tensor: &TensorMeta, limits: &Limits) -> Result<(), WireError> {
        if tensor.layout == Layout::ChannelsLast && tensor.shape.rank() != 4 {
            return Err(WireError::ChannelsLast { got: tensor.shape.rank() });
        }
        // The receiver allocates this much, however little was sent.
        let decoded = tensor.decoded_bytes();
        self.check_limit("decoded bytes", decoded, limits.body_bytes_of(self.kind))?;
        if tensor.codec == CodecId::Raw && self.body_bytes != decoded {
            return Err(WireError::RawLength {
                dtype: tensor.dtype,
                shape: tensor.shape,
                expected: decoded,
                got: self.body_bytes,
            });
        }
        Ok(())
    }

    fn check_limit(
        &self,
        what: &'static str,
        got: u64,
        (allowed, limit): (u64, &'static str),
    ) -> Result<(), WireError> {
        if got <= allowed {
            return Ok(());
        }
        Err(WireError::Limit { kind: self.kind, what, got, limit, allowed })
    }

    /// The seed of the body's hash: the hash of the header with checksum 0.
    fn seed(&self) -> u64 {
        let mut bytes = self.encode();
        bytes[CHECKSUM_AT..].fill(0);
        xxh3_64(&bytes)
    }

    fn verify_length(&self, got: u64) -> Result<(), WireError> {
        if got == self.body_bytes {
            return Ok(());
        }
        Err(WireError::BodyLength { expected: self.body_bytes, got })
    }

    fn verify_checksum(&self, got: u64) -> Result<(), WireError> {
        if got == self.checksum {
            return Ok(());
        }
        Err(WireError::Checksum { expected: self.checksum, got })
    }
}

/// The checksum of a body that comes in pieces: the same as [`Header::seal`] and [`Header::verify`] take of the
/// whole, for a body that is never in one buffer.
#[derive(Clone)]
pub struct BodyHasher {
    header: Header,
    hash: Xxh3,
    bytes: u64,
}

impl BodyHasher {
    /// For a body of this header. `header.body_bytes` must already be right, because the checksum covers it.
    pub fn new(header: &Header) -> Self {
        Self { header: *header, hash: Xxh3::with_seed(header.seed()), bytes: 0 }
    }

    /// Takes the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.hash.update(piece);
        self.bytes = self.bytes.saturating_add(piece.len() as u64);
    }

    /// The header sealed with the pieces, or an error if they are not `body_bytes` long together.
    pub fn seal(self) -> Result<Header, WireError> {
        self.header.verify_length(self.bytes)?;
        Ok(Header { checksum: self.hash.digest(), ..self.header })
    }

    /// Whether the pieces are the body that the header was sealed with.
    pub fn verify(self) -> Result<(), WireError> {
        self.header.verify_length(self.bytes)?;
        self.header.verify_checksum(self.hash.digest())
    }
}

impl std::fmt::Debug for BodyHasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BodyHasher").field("header", &self.header).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

fn read_tensor(from: &mut Reader<'_>) -> Result<Option<TensorMeta>, WireError> {
    let [dtype, layout, codec, rank] = from.take();
    zero("bytes 36 to 39", &from.take::<4>())?;
    let mut dims = [0; DIMS_MAX];
    for dim in &mut dims {
        *dim = from.u64();
    }
    if dtype == 0 {
        zero("layout, codec and rank without a tensor", &[layout, codec, rank])?;
        zero("dimensions without a tensor", &dims)?;
        return Ok(None);
    }
    let rank = usize::from(rank);
    // Shape::from_parts refuses a rank beyond the array; there is no padding to look at then.
    zero("dimensions beyond the rank", dims.get(rank..).unwrap_or(&[]))?;
    Ok(Some(TensorMeta {
        dtype: known("dtype", dtype, DType::from_number, DType::NUMBER_MAX)?,
        layout: known("layout", layout, Layout::from_number, Layout::NUMBER_MAX)?,
        codec: known("codec", codec, CodecId::from_number, CodecId::NUMBER_MAX)?,
        shape: Shape::from_parts(rank, dims)?,
    }))
}

fn known<T>(
    field: &'static str,
    got: u8,
    from_number: impl Fn(u8) -> Option<T>,
    expected_max: u8,
) -> Result<T, WireError> {
    from_number(got).ok_or(WireError::Unknown { field, expected_max, got })
}

fn zero<T: Default + PartialEq>(field: &'static str, values: &[T]) -> Result<(), WireError> {
    if values.iter().all(|value| *value == T::default()) {
        return Ok(());
    }
    Err(WireError::NotZero { field })
}

/// Fills the header from the front. Its fields have fixed sizes that add up to it, so running over is a bug here.
struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put<const N: usize>(&mut self, field: [u8; N]) {
        let (to, rest) =
            std::mem::take(&mut self.0).split_first_chunk_mut().expect("the header has room for its fields");
        *to = field;
        self.0 = rest;
    }
}

/// Reads the header from the front; the same holds.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().expect("the header has all its fields");
        self.0 = rest;
        *field
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
