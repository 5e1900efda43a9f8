//! `delta(C)`, `delta:MIB(C)`: codec `C` on what has changed of a sample since both ends saw it last.
//!
//! Both ends keep `m`, the receiver's copy of every row of every tensor, by sample. The first time a sample comes by, its
//! row is sent as it is. From then on the row is `C(x − m)`, and both ends add what that decodes to, so that `m` is the
//! same at both. Training changes activations little from one visit to the next: the differences are small, and so is what
//! `C` loses of them. Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Compression with
//! Guarantees" (AQ-SGD, 2022).
//!
//! ```text
//! alone   0 u8 | C's body of the tensor                                               nothing is kept
//! rows    1 u8 | number u64 | check u64 | place u16 | samples × u64 | ⌈rows/8⌉ bits: which are known
//!              | unknown rows, f32 | C's body of all differences, [known rows, …]     if there are known rows
//! ```
//!
//! A tensor goes alone where the link does not know its samples, or the model does not learn from it. A row is known if
//! the memory holds one as long of this sample at this place of a message (a sample may change its micro-batch).
//!
//! **In step.** The memory changes in `Memory::remember` only, which both ends call with equal arguments: for every
//! body that was encoded without an error, and for every body that was decoded without one. What it forgets, least
//! recently sent first when `MIB` MiB (1024 unless given) are full, depends on nothing but the calls before. Each body
//! says what it builds on: its `number`, and a `check` over all bodies before and the rows that it adds to. If a body was
//! lost, decoded twice or made with other parameters, the decoder finds another number or check, and says
//! [`CodecError::OutOfStep`] instead of giving a wrong tensor. Number 0 builds on nothing: a decoder that gets it forgets
//! everything first. So a new encoder, or one that was reset, is understood by any decoder.

use super::inner::Inner;
use super::raw::to_or_from_little_endian;
use super::store::Store;
use super::{check_f32, check_meta, floats, magnitude_max, number};
use super::{Arguments, Codec, CodecError, CodecId, Context, Crew, Member, TensorView};
use crate::wire::{DType, Shape, TensorMeta, DIMS_MAX};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub(super) const MEMBER: Member = Member {
    name: "delta",
    id: CodecId::Delta,
    lossless: false,
    examples: &["delta(tile:4)", "delta:1(uniform:8)", "delta:64(sort:4)", "delta(bf16)", "delta(topk:0.1)", "delta(svd:2)"],
    about: "delta(C) or delta:MIB(C), codec C on each sample's change since its last visit, MIB (1024) MiB kept at both ends",
    parse: |arguments| parse(arguments).map(|codec| Box::new(codec) as _),
};

const EXPECTED: &str =
    "delta(C) or delta:MIB(C) with C the codec for differences and MIB from 1 to 1048576 MiB to keep at \
                        each end (1024 unless given), such as delta(tile:4) or delta:64(tile:4)";
const MIB_DEFAULT: u32 = 1024;
const MIB_MAX: u32 = 1 << 20;

/// The first byte: the whole tensor through the inner codec.
const ALONE: u8 = 0;
/// The first byte: rows that both ends remember.
const ROWS: u8 = 1;
/// Everything before the samples.
const HEAD_BYTES: usize = 1 + 8 + 8 + 2;

fn parse(arguments: Arguments<'_>) -> Result<Delta, CodecError> {
    let mib = match arguments.parameter {
        None => Some(MIB_DEFAULT),
        Some(text) => number(text).filter(|mib| (1..=MIB_MAX).contains(mib)),
    };
    let wrong = || CodecError::parameter("delta", EXPECTED, arguments.parameter.unwrap_or(""));
    let bytes_max = usize::try_from(u64::from(mib.ok_or_else(wrong)?) << 20).unwrap_or(usize::MAX);
    Ok(Delta::new(Inner::parse("delta", EXPECTED, arguments)?, bytes_max))
}

/// Where the two ends of a link are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// How many bodies came before.
    pub number: u64,
    /// What they and the rows in use add up to.
    pub check: u64,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "body {} with check {:016x}", self.number, self.check)
    }
}

/// The codec around another one.
pub struct Delta {
    inner: Inner,
    /// Of an encoder: what the other end has.
    sent: Memory,
    /// Of a decoder.
    received: Memory,
    bases: Vec<u8>,
    differences: Vec<u8>,
    decoded: Vec<u8>,
}

/// What both ends know of one direction of a link.
#[derive(Debug)]
struct Memory {
    rows: Store<Key, Box<[u8]>>,
    /// How many bodies were remembered.
    number: u64,
    /// The hash of all of them.
    chain: u64,
}

/// Whose row: the sample, and the place of its tensor in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sample: u64,
    place: u16,
}

/// A tensor's rows, as a body describes them.
struct Rows {
    keys: Vec<Key>,
    /// Which of them are differences.
    known: Vec<bool>,
    row_bytes: usize,
}

impl Rows {
    fn known_count(&self) -> usize {
        self.known.iter().filter(|&&known| known).count()
    }

    /// The part of a whole tensor that goes as it is, or as differences.
    fn select<'a>(&'a self, tensor: &'a [u8], known: bool) -> impl Iterator<Item = &'a [u8]> + 'a {
        let rows = tensor.chunks_exact(self.row_bytes).zip(&self.known);
        rows.filter(move |(_, &is)| is == known).map(|(row, _)| row)
    }
}

impl Memory {
    fn new(bytes_max: usize) -> Self {
        Memory { rows: Store::new(bytes_max), number: 0, chain: 0 }
    }

    fn forget(&mut self) {
        self.rows.clear();
        (self.number, self.chain) = (0, 0);
    }

    fn base(&self, key: &Key, row_bytes: usize) -> Option<&[u8]> {
        self.rows.get(key).map(|row| &row[..]).filter(|row| row.len() == row_bytes)
    }

    /// Puts the known rows into `bases`, and says what a body must say that builds on them; `None` if one is not here.
    fn bases(&self, rows: &Rows, bases: &mut Vec<u8>) -> (Step, Option<()>) {
        bases.clear();
        let known = rows.keys.iter().zip(&rows.known).filter(|(_, &known)| known);
        let complete = known.map(|(key, _)| self.base(key, rows.row_bytes).map(|row| bases.extend_from_slice(row)));
        let complete = complete.collect();
        let check = xxh3_64_with_seed(&little_endian(bases), self.chain);
        (Step { number: self.number, check }, complete)
    }

    /// Takes the rows of `decoded`, the whole tensor as the receiver has it, for the next time.
    fn remember(&mut self, rows: &Rows, decoded: &[u8], body: &[u8]) {
        for (key, row) in rows.keys.iter().zip(decoded.chunks_exact(rows.row_bytes)) {
            self.rows.insert(*key, row.into(), row.len());
        }
        self.number += 1;
        self.chain = xxh3_64_with_seed(body, self.chain);
    }
}

impl Delta {
    fn new(inner: Inner, bytes_max: usize) -> Self {
        let (sent, received) = (Memory::new(bytes_max), Memory::new(bytes_max));
        Delta { inner, sent, received, bases: Vec::new(), differences: Vec::new(), decoded: Vec::new() }
    }

    fn encode_rows(
        &mut self,
        tensor: TensorView<'_>,
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let (start, place) = (out.len(), context.place());
        let row_bytes = tensor.bytes.len() / context.samples.len();
        let keys: Vec<_> = context.samples.iter().map(|&sample| Key { sample, place }).collect();
        let known = keys.iter().map(|key| self.sent.base(key, row_bytes).is_some()).collect();
        let rows = Rows { keys, known, row_bytes };
        let (step, _) = self.sent.bases(&rows, &mut self.bases);
        push_head(out, step, place, &rows);
        let whole = out.len();
        rows.select(tensor.bytes, false).for_each(|row| out.extend_from_slice(row));
        to_or_from_little_endian(DType::F32, &mut out[whole..]);

        let count = rows.known_count();
        if count > 0 {
            self.differences.clear();
            rows.select(tensor.bytes, true).for_each(|row| self.differences.extend_from_slice(row));
            subtract(&mut self.differences, &self.bases);
            // What is not finite is too far from its base; the row is named as it lies in the tensor.
            magnitude_max(CodecId::Delta, &self.differences).map_err(|_| CodecError::Overflow {
                codec: CodecId::Delta,
                at: first_overflow(&rows, &self.differences),
            })?;
            let mut dims = tensor.dims.to_vec();
            dims[0] = count;
            let view = TensorView { dims: &dims, bytes: &self.differences, ..tensor };
            let context = Context { samples: &[], ..*context };
            self.inner.round_trip(view, &context, out, &mut self.decoded)?;
            add(&mut self.bases, &self.decoded);
        }
        // What the other end will have: differences added to their bases, the others as they are.
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
            return Err(CodecError::OutOfStep { expected: Step { number: self.received.number, ..expected }, got });
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

    /// As if all rows were sent both ways: which of them are known is not in the shape.
    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize {
        let rows = if dims.contains(&0) { 0 } else { dims.first().copied().unwrap_or(0) };
        let table = rows.saturating_mul(8).saturating_add(rows.div_ceil(8)).saturating_add(HEAD_BYTES);
        let whole = super::elements_of(dims).saturating_mul(4);
        table.saturating_add(whole).saturating_add(self.inner.encoded_bytes(dtype, dims))
    }

    fn size_varies(&self) -> bool {
        true
    }

    fn encode(&mut self, tensor: TensorView<'_>, context: &Context<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        let start = out.len();
        let of_known_samples = tensor.dims.first() == Some(&context.samples.len());
        let result = if context.learning && elements > 0 && of_known_samples {
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
            // Without elements there are no rows to remember, and every encoder knows it.
            Some((&ROWS, _)) if meta.shape.rank() > 0 && !out.is_empty() => self.decode_rows(meta, body, out),
            Some((&got, _)) => {
                Err(CodecError::FirstByte { codec: self.id(), expected: "0, or 1 for a tensor that has rows,", got })
            }
        }
    }

    fn wants_samples(&self) -> bool {
        true
    }

    fn set_crew(&mut self, crew: Arc<dyn Crew>) {
        self.inner.set_crew(crew);
    }

    fn reset(&mut self) {
        self.sent.forget();
        self.received.forget();
        self.inner.reset();
    }
}

fn push_head(out: &mut Vec<u8>, step: Step, place: u16, rows: &Rows) {
    out.push(ROWS);
    out.extend_from_slice(&step.number.to_le_bytes());
    out.extend_from_slice(&step.check.to_le_bytes());
    out.extend_from_slice(&place.to_le_bytes());
    rows.keys.iter().for_each(|key| out.extend_from_slice(&key.sample.to_le_bytes()));
    let byte = |known: &[bool]| known.iter().enumerate().fold(0, |byte, (at, &known)| byte | u8::from(known) << at);
    out.extend(rows.known.chunks(8).map(byte));
}

/// What [`push_head`] wrote, and all that follows it. The tensor has rows, and they have elements.
fn take_head<'a>(
    meta: &TensorMeta,
    body: &'a [u8],
    decoded_bytes: usize,
) -> Result<(Step, Rows, &'a [u8]), CodecError> {
    let rows = meta.shape.dims()[0] as usize;
    let head_bytes = rows.saturating_mul(8).saturating_add(HEAD_BYTES + rows.div_ceil(8));
    let (head, rest) = body.split_at_checked(head_bytes).ok_or_else(|| too_short(head_bytes, body))?;
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| head[at + byte]));
    let place = u16::from_le_bytes([head[HEAD_BYTES - 2], head[HEAD_BYTES - 1]]);
    let keys = (0..rows).map(|row| Key { sample: u64_at(HEAD_BYTES + 8 * row), place }).collect();
    let bits = &head[HEAD_BYTES + 8 * rows..];
    let known = (0..rows).map(|row| bits[row / 8] >> (row % 8) & 1 == 1).collect();
    let step = Step { number: u64_at(1), check: u64_at(9) };
    Ok((step, Rows { keys, known, row_bytes: decoded_bytes / rows }, rest))
}

fn too_short(expected: usize, body: &[u8]) -> CodecError {
    CodecError::BodyLength { codec: CodecId::Delta, expected: expected as u64, got: body.len() as u64 }
}

/// A tensor's bytes as both ends hash them.
fn little_endian(bytes: &[u8]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        return bytes.into();
    }
    let mut turned = bytes.to_vec();
    to_or_from_little_endian(DType::F32, &mut turned);
    turned.into()
}

fn subtract(values: &mut [u8], bases: &[u8]) {
    for (to, base) in values.chunks_exact_mut(4).zip(floats(bases)) {
        let value = f32::from_ne_bytes([to[0], to[1], to[2], to[3]]);
        to.copy_from_slice(&(value - base).to_ne_bytes());
    }
}

/// Both are finite, and so is the sum: a value beyond the largest is nearest to that.
fn add(bases: &mut [u8], differences: &[u8]) {
    for (to, difference) in bases.chunks_exact_mut(4).zip(floats(differences)) {
        let base = f32::from_ne_bytes([to[0], to[1], to[2], to[3]]);
        to.copy_from_slice(&(base + difference).clamp(f32::MIN, f32::MAX).to_ne_bytes());
    }
}

/// Where in the tensor the first difference lies that is not finite.
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

#[cfg(test)]
mod tests {
    use super::super::parse as parse_any;
    use super::super::store::ENTRY_BYTES;
    use super::*;
    use crate::wire::Layout;
    use proptest::prelude::*;

    fn delta(inner: &str, bytes_max: usize) -> Delta {
        Delta::new(
            Inner::parse("delta", EXPECTED, Arguments { parameter: None, inner: Some(inner) }).unwrap(),
            bytes_max,
        )
    }

    fn pair(inner: &str) -> (Delta, Delta) {
        (delta(inner, 1 << 20), delta(inner, 1 << 20))
    }

    /// A tensor of rows that depend on the sample and a little on the time.
    fn tensor(samples: &[u64], row: usize, time: u64) -> Vec<u8> {
        let value = |sample: u64, at: usize| {
            let base = (sample * 71 + at as u64 * 37) % 101;
            base as f32 / 25.0 - 2.0 + ((time * 13 + at as u64 * 7) % 11) as f32 * 0.01
        };
        let rows = samples.iter().flat_map(|&sample| (0..row).map(move |at| value(sample, at)));
        rows.flat_map(f32::to_ne_bytes).collect()
    }

    fn context(slot: u64, samples: &[u64]) -> Context<'_> {
        Context { slot, samples, ..Context::default() }
    }

    fn encode(codec: &mut Delta, dims: &[usize], bytes: &[u8], context: Context<'_>) -> Result<Vec<u8>, CodecError> {
        let mut body = Vec::new();
        let view = TensorView { dtype: DType::F32, dims, layout: Layout::Contiguous, bytes };
        codec.encode(view, &context, &mut body).map(|()| body)
    }

    fn decode(codec: &mut Delta, dims: &[usize], body: &[u8]) -> Result<Vec<u8>, CodecError> {
        let shape = Shape::new(dims).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::Delta };
        let mut out = vec![0; meta.decoded_bytes() as usize];
        codec.decode(&meta, body, &mut out).map(|()| out)
    }

    /// Everything that decides how the next body is read.
    #[derive(Debug, PartialEq)]
    struct State {
        number: u64,
        chain: u64,
        oldest_first: Vec<(Key, Box<[u8]>)>,
    }

    fn state(memory: &Memory) -> State {
        let oldest_first = memory.rows.iter().map(|(key, row)| (*key, row.clone())).collect();
        State { number: memory.number, chain: memory.chain, oldest_first }
    }

    fn out_of_step(result: Result<Vec<u8>, CodecError>) -> bool {
        matches!(result, Err(CodecError::OutOfStep { .. }))
    }

    fn error(tensor: &[u8], decoded: &[u8]) -> f32 {
        floats(tensor).zip(floats(decoded)).fold(0.0, |max, (a, b)| max.max((a - b).abs()))
    }

    #[test]
    fn the_first_visit_is_exact_and_a_sample_that_stays_comes_ever_closer() {
        let (mut encoder, mut decoder) = pair("tile:4");
        let (samples, dims) = ([5, 9], [2, 50]);
        let first = tensor(&samples, 50, 0);
        let body = encode(&mut encoder, &dims, &first, context(0, &samples)).unwrap();
        assert_eq!(decode(&mut decoder, &dims, &body).unwrap(), first);
        assert_eq!(body.len(), HEAD_BYTES + 16 + 1 + first.len());

        // Something else, four times: what is lost is a fifteenth of what was lost before, or less.
        let second = tensor(&samples, 50, 3);
        let mut last = error(&first, &second);
        for visit in 0..4 {
            // Another order and another micro-batch: it is the sample that counts.
            let turned = [&second[200..], &second[..200]].concat();
            let body = encode(&mut encoder, &dims, &turned, context(visit << 16, &[9, 5])).unwrap();
            assert!(body.len() < first.len() / 4, "{} bytes", body.len());
            let now = error(&turned, &decode(&mut decoder, &dims, &body).unwrap());
            assert!(now <= last / 15.0 + 1e-6, "{now} after {last}");
            last = now;
        }
        assert!(last < 1e-6);
    }

    #[test]
    fn a_lost_body_is_noticed_and_a_reset_makes_it_good() {
        let (mut encoder, mut decoder) = pair("uniform:8");
        let (samples, dims) = ([1, 2, 3], [3, 4]);
        let send = |encoder: &mut Delta, time| {
            encode(encoder, &dims, &tensor(&samples, 4, time), context(0, &samples)).unwrap()
        };
        for time in 0..3 {
            decode(&mut decoder, &dims, &send(&mut encoder, time)).unwrap();
        }
        let lost = send(&mut encoder, 3);
        let before = state(&decoder.received);
        let next = send(&mut encoder, 4);
        let error = decode(&mut decoder, &dims, &next).unwrap_err();
        assert!(error.to_string().starts_with("expected body 3 with check "), "{error}");
        assert!(error.to_string().contains(" encoder, got body 4 with check "), "{error}");
        assert!(!error.refuses_tensor());
        assert_eq!(state(&decoder.received), before);
        // In time it would have been right; twice it is not.
        decode(&mut decoder, &dims, &lost).unwrap();
        assert!(out_of_step(decode(&mut decoder, &dims, &lost)));

        encoder.reset();
        let body = send(&mut encoder, 5);
        assert_eq!(decode(&mut decoder, &dims, &body).unwrap(), tensor(&samples, 4, 5));
        let body = send(&mut encoder, 6);
        decode(&mut decoder, &dims, &body).unwrap();
        assert_eq!(state(&decoder.received), state(&encoder.sent));
        // A new encoder is understood by an old decoder, but not the other way round.
        let mut encoder = delta("uniform:8", 1 << 20);
        let body = send(&mut encoder, 7);
        assert_eq!(decode(&mut decoder, &dims, &body).unwrap(), tensor(&samples, 4, 7));
        let body = send(&mut encoder, 8);
        assert!(out_of_step(decode(&mut delta("uniform:8", 1 << 20), &dims, &body)));
        decode(&mut decoder, &dims, &body).unwrap();
    }

    /// As many bodies and as many rows, but other ones: only the check can tell.
    #[test]
    fn other_bases_of_the_same_number_are_noticed() {
        let samples = [1, 2];
        let (mut encoder, mut decoder) = pair("uniform:8");
        let (mut other, mut ignored) = pair("uniform:8");
        let send = |encoder: &mut Delta, decoder: &mut Delta, time| {
            let body = encode(encoder, &[2, 4], &tensor(&samples, 4, time), context(0, &samples)).unwrap();
            decode(decoder, &[2, 4], &body)
        };
        send(&mut encoder, &mut decoder, 0).unwrap();
        send(&mut other, &mut ignored, 1).unwrap();
        assert!(out_of_step(send(&mut other, &mut decoder, 2)));
        // The history is another one even where no row is in use.
        let strangers = [7, 8];
        let body =
            |codec: &mut Delta| encode(codec, &[2, 4], &tensor(&strangers, 4, 0), context(0, &strangers)).unwrap();
        assert!(out_of_step(decode(&mut ignored, &[2, 4], &body(&mut encoder))));
    }

    #[test]
    fn ends_of_different_sizes_are_noticed() {
        let (mut encoder, mut decoder) =
            (delta("uniform:8", 10 * (16 + ENTRY_BYTES)), delta("uniform:8", 4 * (16 + ENTRY_BYTES)));
        let samples: Vec<u64> = (0..6).collect();
        let mut send = |time| {
            let body = encode(&mut encoder, &[6, 4], &tensor(&samples, 4, time), context(0, &samples)).unwrap();
            decode(&mut decoder, &[6, 4], &body)
        };
        send(0).unwrap();
        assert!(out_of_step(send(1)));
    }

    #[test]
    fn one_sample_in_two_rows_is_the_last_of_them() {
        let (mut encoder, mut decoder) = pair("uniform:16");
        for time in 0..3 {
            let samples = [4, 4, 6, 4];
            let mut bytes = tensor(&samples, 5, time);
            bytes[60..].copy_from_slice(&tensor(&[8], 5, time));
            let body = encode(&mut encoder, &[4, 5], &bytes, context(2, &samples)).unwrap();
            let back = decode(&mut decoder, &[4, 5], &body).unwrap();
            assert!(error(&bytes, &back) < 1e-3);
            assert_eq!(encoder.sent.base(&Key { sample: 4, place: 2 }, 20), Some(&back[60..]));
            assert_eq!(state(&decoder.received), state(&encoder.sent));
        }
    }

    #[test]
    fn a_difference_that_overflows_goes_raw_and_leaves_no_trace() {
        let (mut encoder, mut decoder) = pair("bf16");
        let bytes = |values: [f32; 4]| values.map(f32::to_ne_bytes).concat();
        let body = encode(&mut encoder, &[2, 2], &bytes([1.0, 2.0, 3.0, -3e38]), context(0, &[1, 2])).unwrap();
        decode(&mut decoder, &[2, 2], &body).unwrap();
        let before = state(&encoder.sent);
        let refused = encode(&mut encoder, &[2, 2], &bytes([0.0, 0.0, 3.0, 3e38]), context(0, &[7, 2]));
        assert_eq!(refused, Err(CodecError::Overflow { codec: CodecId::Delta, at: 3 }));
        assert_eq!(state(&encoder.sent), before);
        let body = encode(&mut encoder, &[2, 2], &bytes([1.5, 2.0, 3.0, -2e38]), context(0, &[1, 2])).unwrap();
        decode(&mut decoder, &[2, 2], &body).unwrap();
    }

    #[test]
    fn without_samples_nothing_is_kept() {
        let (mut encoder, mut decoder) = pair("tile:4");
        let alone = |dims: &[usize], bytes: &[u8]| {
            let mut body = vec![ALONE];
            let view = TensorView { dtype: DType::F32, dims, layout: Layout::Contiguous, bytes };
            parse_any("tile:4").unwrap().encode(view, &Context::default(), &mut body).unwrap();
            body
        };
        let bytes = tensor(&[1, 2], 6, 0);
        for context in [context(0, &[]), context(0, &[1, 2, 3]), Context { learning: false, ..context(0, &[1, 2]) }] {
            let body = encode(&mut encoder, &[2, 6], &bytes, context).unwrap();
            assert_eq!(body, alone(&[2, 6], &bytes));
            decode(&mut decoder, &[2, 6], &body).unwrap();
        }
        for samples in [&[][..], &[1]] {
            let body = encode(&mut encoder, &[], &bytes[..4], context(0, samples)).unwrap();
            assert_eq!(body, alone(&[], &bytes[..4]));
        }
        let body = encode(&mut encoder, &[2, 0], &[], context(0, &[1, 2])).unwrap();
        assert_eq!(body, alone(&[2, 0], &[]));
        assert_eq!((encoder.sent.number, decoder.received.number), (0, 0));
    }

    #[test]
    fn what_is_within_has_to_lose_something() {
        let told = |text: &str| parse_any(text).err().unwrap().to_string();
        for text in ["delta(raw)", "delta(delta(tile:4))", "delta(feedback(tile:4))", "feedback(delta(tile:4))"] {
            assert!(told(text).contains(" that loses something and wraps no other, "), "{}", told(text));
        }
        for text in
            ["delta", "delta:64", "delta:0(tile:4)", "delta:1048577(tile:4)", "delta:x(tile:4)", "delta:(tile:4)"]
        {
            assert!(told(text).starts_with("expected delta(C) or delta:MIB(C) "), "{}", told(text));
        }
        assert!(parse_any("delta:1048576(tile:4)").is_ok());
    }

    /// What may happen between two ends.
    #[derive(Clone, Debug)]
    enum Event {
        Send { slot: u64, samples: Vec<u64>, row: usize },
        Lose { samples: Vec<u64> },
        Refuse { samples: Vec<u64> },
        Evaluate { samples: Vec<u64> },
        Unknown { rows: usize },
        Noise { at: usize, bit: u8 },
        Reset,
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let samples = || prop::collection::vec(0u64..8, 1..5);
        let slot = prop::sample::select(&[0u64, 1, 1 << 16, 1 << 16 | 1][..]);
        let one = prop_oneof![
            12 => (slot, samples(), 1usize..4).prop_map(|(slot, samples, row)| Event::Send { slot, samples, row: 3 * row.max(2) }),
            1 => samples().prop_map(|samples| Event::Lose { samples }),
            2 => samples().prop_map(|samples| Event::Refuse { samples }),
            2 => samples().prop_map(|samples| Event::Evaluate { samples }),
            1 => (1usize..5).prop_map(|rows| Event::Unknown { rows }),
            3 => (any::<usize>(), 0u8..8).prop_map(|(at, bit)| Event::Noise { at, bit }),
            1 => Just(Event::Reset),
        ];
        prop::collection::vec(one, 1..60)
    }

    /// Two ends, and whether they are known to be out of step.
    struct Link {
        encoder: Delta,
        decoder: Delta,
        lost: bool,
        last: Option<(Vec<usize>, Vec<u8>)>,
    }

    impl Link {
        fn send(&mut self, time: u64, slot: u64, samples: &[u64], row: usize) {
            let dims = vec![samples.len(), row];
            let bytes = tensor(samples, row, time);
            let body = encode(&mut self.encoder, &dims, &bytes, context(slot, samples)).unwrap();
            let before = state(&self.decoder.received);
            let result = decode(&mut self.decoder, &dims, &body);
            if self.lost && self.encoder.sent.number > 1 {
                assert!(out_of_step(result));
                assert_eq!(state(&self.decoder.received), before);
                self.encoder.reset();
                return;
            }
            self.lost = false;
            // The encoder's copy is left in `decoded`; the memory may be too small for it.
            assert_eq!(result.unwrap(), self.encoder.decoded);
            assert_eq!(state(&self.decoder.received), state(&self.encoder.sent));
            self.last = Some((dims, body));
        }

        /// A bit turned over in the last body: an error or a tensor, and an error without a trace.
        fn noise(&mut self, at: usize, bit: u8) {
            let Some((dims, mut body)) = self.last.clone() else { return };
            let at = at % body.len();
            body[at] ^= 1 << bit;
            let before = state(&self.decoder.received);
            match decode(&mut self.decoder, &dims, &body) {
                Ok(out) => {
                    assert!(floats(&out).all(f32::is_finite));
                    self.lost |= state(&self.decoder.received) != before;
                }
                Err(_) => assert_eq!(state(&self.decoder.received), before),
            }
        }

        fn stateless(&mut self, time: u64, samples: &[u64], context: Context<'_>) {
            let states = (state(&self.encoder.sent), state(&self.decoder.received));
            let bytes = tensor(samples, 6, time);
            let body = encode(&mut self.encoder, &[samples.len(), 6], &bytes, context).unwrap();
            decode(&mut self.decoder, &[samples.len(), 6], &body).unwrap();
            assert_eq!((state(&self.encoder.sent), state(&self.decoder.received)), states);
        }

        fn apply(&mut self, time: u64, event: Event) {
            match event {
                Event::Send { slot, samples, row } => self.send(time, slot, &samples, row),
                Event::Lose { samples } => {
                    let bytes = tensor(&samples, 6, time);
                    encode(&mut self.encoder, &[samples.len(), 6], &bytes, context(0, &samples)).unwrap();
                    self.lost = true;
                }
                Event::Refuse { samples } => {
                    let before = state(&self.encoder.sent);
                    let mut bytes = tensor(&samples, 6, time);
                    bytes[8..12].copy_from_slice(&f32::INFINITY.to_ne_bytes());
                    let refused = encode(&mut self.encoder, &[samples.len(), 6], &bytes, context(0, &samples));
                    assert_eq!(refused, Err(CodecError::NotFinite { codec: CodecId::Delta, at: 2 }));
                    assert_eq!(state(&self.encoder.sent), before);
                }
                Event::Evaluate { samples } => {
                    self.stateless(time, &samples, Context { learning: false, ..context(0, &samples) });
                }
                Event::Unknown { rows } => self.stateless(time, &vec![0; rows], context(0, &[])),
                Event::Noise { at, bit } => self.noise(at, bit),
                Event::Reset => self.encoder.reset(),
            }
        }
    }

    proptest! {
        #[test]
        fn the_receiver_has_what_the_sender_thinks_it_has(
            events in events(),
            inner in prop::sample::select(&["tile:4", "uniform:3", "sort:8", "bf16", "topk:0.3", "svd:1"][..]),
            rows_kept in 1usize..20,
        ) {
            let bytes_max = rows_kept * (24 + ENTRY_BYTES);
            let (encoder, decoder) = (delta(inner, bytes_max), delta(inner, bytes_max));
            let mut link = Link { encoder, decoder, lost: false, last: None };
            for (time, event) in events.into_iter().enumerate() {
                link.apply(time as u64, event);
            }
        }
    }
}
