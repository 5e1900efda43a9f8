//! The frame: the unit that a transport carries.
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
//!     28      2  slot              the index of the tensor in its message …
//!     30      2  slots             … and the number of tensors in it
//!     32      1  dtype             0 if the body is not a tensor; then the next 3 bytes and all dimensions are 0 too
//!     33      1  layout
//!     34      1  codec
//!     35      1  rank
//!     36      4  zero
//!     40     64  dimensions        8 of 8 bytes, zero beyond the rank
//!    104      8  sequence          the number of the frame on its link, from 1; 0 for a frame that is never sent again
//!    112      8  acknowledged      every frame with this sequence number or a lower one has arrived at the sender of this one
//!    120      8  body bytes
//!    128      8  checksum
//! ```
//!
//! [`durable`](super::durable) defines what the two ends do with the sequence numbers.
//!
//! The header has a fixed size, so a receiver can read it without further knowledge and learns from it what to read
//! next. Every header has exactly one encoding: reserved bytes are zero, and the receiver checks that. So the checksum
//! can be computed from the decoded header: `xxh3_64(body, seed = xxh3_64(header with checksum 0))` covers header and
//! body without both being in one buffer. It detects accidental corruption, not forgery.

use super::{DType, Layout, Limits, Shape, TensorMeta, WireError, DIMS_MAX};
use crate::codec::CodecId;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed, Xxh3};

/// The first bytes of every frame. The first one is not ASCII, so that no text protocol is mistaken for ours.
pub const MAGIC: [u8; 4] = *b"\x89DGP";

/// The version of everything that the two ends of a connection exchange: the header's layout, the handshake, jobs, commands and
/// reports. Both ends must have the same version. Increase it with every change to any of these.
///
/// 2: jobs name frozen parameters and groups of parameters; reports time what links deliver.
/// 3: probes measure a link; frames have a sequence number and an acknowledgement, and a peer that connects again says which
/// frame it expects.
pub const VERSION: u16 = 3;

/// The size of an encoded header in bytes.
pub const HEADER_BYTES: usize = 136;

const CHECKSUM_AT: usize = 128;

numbered! {
    /// What a frame is for.
    pub enum Kind {
        /// The dialling peer introduces itself: [`Hello`](super::Hello).
        Hello = 1,
        /// The answering peer accepts it: [`Welcome`](super::Welcome).
        Welcome = 2,
        /// The answering peer rejects it, with the reason: [`Refuse`](super::Refuse).
        Refuse = 3,
        /// What a worker has to run: model, partitions, plan, options.
        Job = 4,
        /// A worker reports that it has built its partitions.
        Ready = 5,
        /// The rows of a micro-batch, for the first partition.
        Input = 6,
        /// The labels of a micro-batch, for the last partition.
        Target = 7,
        /// The output of a partition, for a later partition.
        Activation = 8,
        /// The gradient of an activation, for the partition that sent the activation.
        Gradient = 9,
        /// The output of the last partition, for the driver.
        Output = 10,
        /// What a worker has to do next.
        Command = 11,
        /// The result of a command: losses, counters, trace events.
        Report = 12,
        /// Parameters, buffers and optimizer state: tensors, or a body that the runtime defines.
        State = 13,
        /// A worker failed, and everyone has to stop: [`AbortNotice`](super::AbortNotice).
        Abort = 14,
        /// A sign of life.
        Ping = 15,
        /// The run is over, and this is the last frame.
        Goodbye = 16,
        /// A part of a replica's gradients, for the next replica.
        Share = 17,
        /// Bytes that measure a link; `step` is the number of bytes that the peer answers with. From a driver, instead of a job: what
        /// it measures on the connection.
        Probe = 18,
    }
}

impl Kind {
    /// Whether frames of this kind describe tensors. Messages of the other kinds are one frame each.
    pub const fn carries_tensors(self) -> bool {
        matches!(
            self,
            Kind::Input | Kind::Target | Kind::Activation | Kind::Gradient | Kind::Output | Kind::State | Kind::Share
        )
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is for.
    pub kind: Kind,
    /// The training step it belongs to.
    pub step: u64,
    /// The micro-batch it belongs to, or the number of a state tensor or share.
    pub micro_batch: u32,
    /// The sending partition, or the sending worker of a message that is not between partitions.
    pub from: u32,
    /// The receiving partition, or the worker that receives a share.
    pub to: u32,
    /// The index of this tensor in its message.
    pub slot: u16,
    /// The number of tensors in the message; 1 for a body that is not a tensor.
    pub slots: u16,
    /// The tensor that the body decodes to. `None` if the body is not a tensor, or if this tensor of the message is
    /// absent.
    pub tensor: Option<TensorMeta>,
    /// The number of the frame on its link, from 1; 0 for a frame that is never sent again, such as a heartbeat.
    pub sequence: u64,
    /// The sender of this frame has received the frames of the other direction up to this sequence number.
    pub acknowledged: u64,
    /// The length of the body in bytes. Set by [`Header::seal`].
    pub body_bytes: u64,
    /// The checksum of header and body. Set by [`Header::seal`].
    pub checksum: u64,
}

impl Header {
    /// A header of this kind with one slot, no tensor, and 0 everywhere else. Set what the frame needs, then
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
            sequence: 0,
            acknowledged: 0,
            body_bytes: 0,
            checksum: 0,
        }
    }

    /// Sets `body_bytes` and `checksum` for this body. Must be the last change before [`encode`](Header::encode): the
    /// receiver rejects a header that was changed afterwards.
    pub fn seal(&mut self, body: &[u8]) {
        self.body_bytes = body.len() as u64;
        self.checksum = xxh3_64_with_seed(body, self.seed());
    }

    /// Checks that the header was sealed with this body and that both are intact.
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
        to.put(self.sequence.to_le_bytes());
        to.put(self.acknowledged.to_le_bytes());
        to.put(self.body_bytes.to_le_bytes());
        to.put(self.checksum.to_le_bytes());
        debug_assert!(to.0.is_empty(), "the fields fill the header");
        out
    }

    /// Decodes a header and checks it against the limits, without allocating. The checksum is checked when the body is
    /// there: [`verify`](Header::verify).
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
            sequence: from.u64(),
            acknowledged: from.u64(),
            body_bytes: from.u64(),
            checksum: from.u64(),
        };
        header.check(limits)?;
        Ok(header)
    }

    /// Checks that the fields are consistent and within the limits. [`decode`](Header::decode) calls this. Senders call
    /// it too, so that the error is reported at the end that can fix it.
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
        // The receiver allocates this much, however short the body is.
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

/// The checksum of a body that arrives in pieces, for bodies that are never in one buffer. It is the one that
/// [`Header::seal`] and [`Header::verify`] compute from the whole body.
#[derive(Clone)]
pub struct BodyHasher {
    header: Header,
    hash: Xxh3,
    bytes: u64,
}

impl BodyHasher {
    /// Starts the checksum of a body for this header. `header.body_bytes` must be set, because the checksum covers it.
    pub fn new(header: &Header) -> Self {
        Self { header: *header, hash: Xxh3::with_seed(header.seed()), bytes: 0 }
    }

    /// Adds the next piece of the body.
    pub fn update(&mut self, piece: &[u8]) {
        self.hash.update(piece);
        self.bytes = self.bytes.saturating_add(piece.len() as u64);
    }

    /// The header sealed with the pieces; an error if their total length is not `body_bytes`.
    pub fn seal(self) -> Result<Header, WireError> {
        self.header.verify_length(self.bytes)?;
        Ok(Header { checksum: self.hash.digest(), ..self.header })
    }

    /// Checks that the pieces are the body that the header was sealed with.
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
    // Shape::from_parts rejects a rank beyond the array; there is no padding to check then.
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

/// Writes the fields of the header in order. Their sizes are fixed and add up to its size, so an overrun is a bug here.
struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put<const N: usize>(&mut self, field: [u8; N]) {
        let (to, rest) =
            std::mem::take(&mut self.0).split_first_chunk_mut().expect("the header has room for its fields");
        *to = field;
        self.0 = rest;
    }
}

/// Reads the fields of the header in order; the same holds.
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
