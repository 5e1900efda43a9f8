//! `delta(C)`, `delta:MIB(C)`: codec `C` applied to the change of each sample since both ends last saw it.
//!
//! Both ends keep `m`, the receiver's copy of every row of every tensor, by sample. The first time a sample is sent,
//! its row goes uncompressed. From then on the body has `C(x − m)`, and both ends add the decoded difference to `m`, so
//! that `m` stays the same at both. Training changes the activations of a sample little from one epoch to the next: the
//! differences are small, and so is the error of `C`. Wang et al., "Fine-tuning Language Models over Slow Networks
//! using Activation Compression with Guarantees" (AQ-SGD, 2022).
//!
//! ```text
//! alone   0 u8 | C's body of the tensor                                               no state
//! rows    1 u8 | number u64 | check u64 | tensor index u16 | samples × u64 | ⌈rows/8⌉ bits: which rows are known
//!              | unknown rows, f32 | C's body of all differences, [known rows, …]     if there are known rows
//! ```
//!
//! A tensor goes alone if the link does not know its samples, or if the model is not trained on it. A row is known if
//! the memory has a row of the same length for this sample and this tensor of a message. The micro-batch does not
//! matter: a sample may change it from epoch to epoch.
//!
//! **Synchronization.** Only `Memory::remember` changes the memory. Both ends call it with equal arguments: the encoder
//! for every body that it encodes without an error, the decoder for every body that it decodes without one. When `MIB`
//! MiB (1024 unless given) are full, the memory evicts the least recently sent rows, which depends on the earlier calls
//! alone. Each body states what it builds on: its `number`, and a `check` over all bodies before it and the rows that
//! it adds to. If a body was lost, decoded twice or made with other parameters, the decoder finds another number or
//! check and returns [`CodecError::OutOfStep`] rather than a wrong tensor. Number 0 builds on nothing: a decoder that
//! receives it clears its memory first. So any decoder understands a new encoder, or one that was reset.

mod body;
mod memory;
#[cfg(test)]
mod tests;

pub use memory::StreamPosition;

use super::raw::to_or_from_little_endian;
use super::wrapped::WrappedCodec;
use super::{check_f32, check_meta, elements_of, floats, magnitude_max, number};
use super::{Arguments, BodyPart, Codec, CodecContext, CodecError, CodecId, Executor, Member, PartForm, TensorView};
use crate::wire::{DType, Shape, TensorMeta, DIMS_MAX};
use body::{push_head, rows_of, take_head, too_short, ALONE, HEAD_BYTES, ROWS};
use memory::{Key, Memory, Rows};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "delta",
    id: CodecId::Delta,
    examples: &["delta(tile:4)", "delta:1(uniform:8)", "delta:64(sort:4)", "delta(bf16)", "delta(topk:0.1)", "delta(svd:2)"],
    about: "delta(C) or delta:MIB(C), codec C on the change of each sample since its last visit; each end keeps MIB (1024) MiB",
    parse: |arguments| parse(arguments).map(|codec| Box::new(codec) as _),
};

const EXPECTED: &str =
    "delta(C) or delta:MIB(C) with C the codec for differences and MIB from 1 to 1048576 MiB to keep at \
                        each end (1024 unless given), such as delta(tile:4) or delta:64(tile:4)";
const MIB_DEFAULT: u32 = 1024;
const MIB_MAX: u32 = 1 << 20;

fn parse(arguments: Arguments<'_>) -> Result<Delta, CodecError> {
    let mib = match arguments.parameter {
        None => Some(MIB_DEFAULT),
        Some(text) => number(text).filter(|mib| (1..=MIB_MAX).contains(mib)),
    };
    let wrong = || CodecError::parameter("delta", EXPECTED, arguments.parameter.unwrap_or(""));
    let bytes_max = usize::try_from(u64::from(mib.ok_or_else(wrong)?) << 20).unwrap_or(usize::MAX);
    Ok(Delta::new(WrappedCodec::parse("delta", EXPECTED, arguments)?, bytes_max))
}

/// The codec `delta(C)`: an encoder or a decoder.
pub struct Delta {
    inner: WrappedCodec,
    /// What the other end has, if this is an encoder.
    sent: Memory,
    /// What this end has, if it is a decoder.
    received: Memory,
    bases: Vec<u8>,
    differences: Vec<u8>,
    decoded: Vec<u8>,
}

impl Delta {
    fn new(inner: WrappedCodec, bytes_max: usize) -> Self {
        let (sent, received) = (Memory::new(bytes_max), Memory::new(bytes_max));
        Delta { inner, sent, received, bases: Vec::new(), differences: Vec::new(), decoded: Vec::new() }
    }

    fn encode_rows(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let (start, tensor_index) = (out.len(), context.tensor_index());
        let row_bytes = tensor.bytes.len() / context.samples.len();
        let keys: Vec<_> = context.samples.iter().map(|&sample| Key { sample, tensor_index }).collect();
        let known = keys.iter().map(|key| self.sent.base(key, row_bytes).is_some()).collect();
        let rows = Rows { keys, known, row_bytes };
        let (position, _) = self.sent.bases(&rows, &mut self.bases);
        push_head(out, position, tensor_index, &rows);
        let whole = out.len();
        rows.select(tensor.bytes, false).for_each(|row| out.extend_from_slice(row));
        to_or_from_little_endian(DType::F32, &mut out[whole..]);

        let count = rows.known_count();
        if count > 0 {
            self.differences.clear();
            rows.select(tensor.bytes, true).for_each(|row| self.differences.extend_from_slice(row));
            subtract(&mut self.differences, &self.bases);
            // A difference of two finite values that is not finite has overflowed.
            magnitude_max(CodecId::Delta, &self.differences).map_err(|_| CodecError::Overflow {
                codec: CodecId::Delta,
                at: first_overflow(&rows, &self.differences),
            })?;
            let mut dims = tensor.dims.to_vec();
            dims[0] = count;
            let view = TensorView { dims: &dims, bytes: &self.differences, ..tensor };
            let context = CodecContext { samples: &[], ..*context };
            self.inner.round_trip(view, &context, out, &mut self.decoded)?;
            add(&mut self.bases, &self.decoded);
        }
        // The tensor as the other end will have it: sums for the known rows, the values themselves for the others.
        let mut sums = self.bases.chunks_exact(row_bytes);
        self.decoded.clear();
        for (row, &known) in tensor.bytes.chunks_exact(row_bytes).zip(&rows.known) {
            self.decoded.extend_from_slice(if known { sums.next().expect("one for each known row") } else { row });
        }
        self.sent.remember(&rows, &self.decoded, &out[start..]);
        Ok(())
    }

    fn decode_rows(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let (got, rows, rest) = take_head(meta, body, out.len())?;
        let count = rows.known_count();
        let whole_bytes = (rows.keys.len() - count) * rows.row_bytes;
        let Some((whole, inner_body)) =
            rest.split_at_checked(whole_bytes).filter(|(_, inner)| count > 0 || inner.is_empty())
        else {
            return Err(too_short(body.len() - rest.len() + whole_bytes, body));
        };
        let fresh = Memory::new(0);
        let memory = if got.number == 0 { &fresh } else { &self.received };
        let (expected, complete) = memory.bases(&rows, &mut self.bases);
        if complete.is_none() || expected != got {
            return Err(CodecError::OutOfStep {
                expected: StreamPosition { number: self.received.number, ..expected },
                got,
            });
        }
        if count > 0 {
            let mut dims = [0; DIMS_MAX];
            dims.iter_mut().zip(meta.shape.dims()).for_each(|(to, &dim)| *to = dim as usize);
            dims[0] = count;
            let shape = Shape::new(&dims[..meta.shape.rank()]).expect("no more rows than the whole tensor has");
            self.decoded.resize(count * rows.row_bytes, 0);
            self.inner.decode(&TensorMeta { shape, ..*meta }, inner_body, &mut self.decoded)?;
            check_values(&self.decoded)?;
            add(&mut self.bases, &self.decoded);
        }
        let (mut sums, mut whole) = (self.bases.chunks_exact(rows.row_bytes), whole.chunks_exact(rows.row_bytes));
        for (to, &known) in out.chunks_exact_mut(rows.row_bytes).zip(&rows.known) {
            to.copy_from_slice(if known { sums.next() } else { whole.next() }.expect("counted"));
            if !known {
                to_or_from_little_endian(DType::F32, to);
            }
        }
        check_values(out)?;
        if got.number == 0 {
            self.received.forget();
        }
        self.received.remember(&rows, out, body);
        Ok(())
    }
}

impl Codec for Delta {
    fn id(&self) -> CodecId {
        CodecId::Delta
    }

    /// An upper bound, as if every row were sent both uncompressed and as a difference: the shape does not tell which
    /// rows are known.
    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize {
        let rows = if dims.contains(&0) { 0 } else { dims.first().copied().unwrap_or(0) };
        let table = rows.saturating_mul(8).saturating_add(rows.div_ceil(8)).saturating_add(HEAD_BYTES);
        let whole = elements_of(dims).saturating_mul(4);
        table.saturating_add(whole).saturating_add(self.inner.encoded_bytes(dtype, dims))
    }

    fn size_varies(&self) -> bool {
        true
    }

    fn body_parts(&self, dtype: DType, dims: &[usize], body: &[u8], each: &mut dyn FnMut(BodyPart)) {
        let Some((whole_rows, rows, head)) = rows_of(dims, body) else {
            // Alone: the first byte, then the inner codec's body.
            each(BodyPart { form: PartForm::Bytes, bytes: 1 });
            return self.inner.body_parts(dtype, dims, &body[1..], each);
        };
        let whole = whole_rows * (elements_of(dims) / rows) * 4;
        each(BodyPart { form: PartForm::Bytes, bytes: head });
        each(BodyPart { form: PartForm::Values32, bytes: whole });
        if whole_rows < rows {
            let mut known = [0; DIMS_MAX];
            known.iter_mut().zip(dims).for_each(|(to, &dim)| *to = dim);
            known[0] = rows - whole_rows;
            self.inner.body_parts(dtype, &known[..dims.len().min(DIMS_MAX)], &body[head + whole..], each);
        }
    }

    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        let start = out.len();
        let of_known_samples = tensor.dims.first() == Some(&context.samples.len());
        let result = if context.training && elements > 0 && of_known_samples {
            self.encode_rows(tensor, context, out)
        } else {
            out.push(ALONE);
            self.inner.encode(tensor, context, out)
        };
        result.inspect_err(|_| out.truncate(start))
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_meta(self.id(), meta, out)?;
        match body.split_first() {
            None => Err(too_short(1, body)),
            Some((&ALONE, body)) => self.inner.decode(meta, body, out),
            // A tensor without elements has no rows to remember; encoders send it alone.
            Some((&ROWS, _)) if meta.shape.rank() > 0 && !out.is_empty() => self.decode_rows(meta, body, out),
            Some((&got, _)) => {
                Err(CodecError::FirstByte { codec: self.id(), expected: "0, or 1 for a tensor that has rows,", got })
            }
        }
    }

    fn wants_samples(&self) -> bool {
        true
    }

    fn kept_bytes_max(&self) -> u64 {
        self.sent.rows.bytes_max() as u64
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.inner.set_executor(executor);
    }

    fn remembers(&self) -> bool {
        true
    }

    fn reset(&mut self) {
        self.sent.forget();
        self.received.forget();
        self.inner.reset();
    }
}

fn subtract(values: &mut [u8], bases: &[u8]) {
    for (to, base) in values.chunks_exact_mut(4).zip(floats(bases)) {
        let value = f32::from_ne_bytes([to[0], to[1], to[2], to[3]]);
        to.copy_from_slice(&(value - base).to_ne_bytes());
    }
}

/// Adds differences to their bases. Sums beyond the largest finite value are clamped to it.
fn add(bases: &mut [u8], differences: &[u8]) {
    for (to, difference) in bases.chunks_exact_mut(4).zip(floats(differences)) {
        let base = f32::from_ne_bytes([to[0], to[1], to[2], to[3]]);
        to.copy_from_slice(&(base + difference).clamp(f32::MIN, f32::MAX).to_ne_bytes());
    }
}

/// The index in the tensor of the first difference that is not finite.
fn first_overflow(rows: &Rows, differences: &[u8]) -> usize {
    let row_values = rows.row_bytes / 4;
    let at = floats(differences).position(|value| !value.is_finite()).unwrap_or(0);
    let known = rows.known.iter().enumerate().filter(|(_, &known)| known).map(|(row, _)| row);
    known.clone().nth(at / row_values).unwrap_or(0) * row_values + at % row_values
}

fn check_values(bytes: &[u8]) -> Result<(), CodecError> {
    match magnitude_max(CodecId::Delta, bytes) {
        Err(CodecError::NotFinite { codec, at }) => Err(CodecError::Value { codec, at }),
        checked => checked.map(|_| ()),
    }
}
