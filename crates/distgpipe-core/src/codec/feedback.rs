//! `feedback(C)`: codec `C` with error feedback. The error of `C` on a tensor is added to the next tensor of its slot.
//!
//! ```text
//! encode    s = x + e[slot]     body = C(s)     e[slot] = s − decode(body)
//! decode    as C does                                                       the body is C's, byte for byte
//! ```
//!
//! A codec with a systematic error, such as `topk`, which drops small values, has a bias that training does not average
//! out. With feedback every value arrives eventually: the sum of all decoded tensors differs from the sum of all
//! encoded ones by no more than the current residual. Seide et al., "1-Bit Stochastic Gradient Descent" (2014);
//! Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019).
//!
//! A tensor that `C` refuses is sent raw without error, and the residual is kept for the next tensor. A tensor of
//! another shape than the last one of its slot starts with no residual. A tensor that the model is not trained on is
//! encoded by `C` without feedback. The residuals take at most [`BYTES_MAX`]; beyond that, the least recently used slot
//! is evicted, and a tensor that is larger than the limit has no feedback.

use super::lru_cache::LruCache;
use super::wrapped::WrappedCodec;
use super::{check_codec, check_f32, check_meta, floats, magnitude_max};
use super::{Arguments, BodyPart, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, Member, TensorView};
use crate::wire::{DType, Layout, TensorMeta};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "feedback",
    id: CodecId::Feedback,
    examples: &[
        "feedback(tile:4)",
        "feedback(uniform:2)",
        "feedback(sort:4)",
        "feedback(f16)",
        "feedback(topk:0.1)",
        "feedback(svd:1)",
    ],
    about: "feedback(C), codec C with error feedback: its error on a tensor is added to the next one",
    parse: |arguments| parse(arguments).map(|codec| Box::new(codec) as _),
};

const EXPECTED: &str = "feedback(C) with C the codec to correct, such as feedback(tile:4)";

/// The most memory for residuals in one encoder, in bytes.
pub const BYTES_MAX: usize = 1 << 30;

fn parse(arguments: Arguments<'_>) -> Result<Feedback, CodecError> {
    if let Some(got) = arguments.parameter {
        return Err(CodecError::parameter("feedback", EXPECTED, got));
    }
    Ok(Feedback::new(WrappedCodec::parse("feedback", EXPECTED, arguments)?, BYTES_MAX))
}

/// The codec `feedback(C)`: an encoder or a decoder.
pub struct Feedback {
    inner: WrappedCodec,
    /// The residual of each slot. Decoders have none.
    residuals: LruCache<u64, Residual>,
    sum: Vec<u8>,
    decoded: Vec<u8>,
}

/// The error of the last tensor of a slot, which has not been sent yet.
struct Residual {
    dims: Vec<usize>,
    layout: Layout,
    bytes: Vec<u8>,
}

impl Feedback {
    fn new(inner: WrappedCodec, bytes_max: usize) -> Self {
        Feedback { inner, residuals: LruCache::new(bytes_max), sum: Vec::new(), decoded: Vec::new() }
    }

    /// Sets `self.sum` to `x + e[slot]`.
    fn add_residual(&mut self, tensor: &TensorView<'_>, slot: u64) -> Result<(), CodecError> {
        self.sum.clear();
        self.sum.extend_from_slice(tensor.bytes);
        let kept = self.residuals.get(&slot);
        let Some(kept) = kept.filter(|kept| kept.dims == tensor.dims && kept.layout == tensor.layout) else {
            return Ok(());
        };
        for (to, (value, residual)) in self.sum.chunks_exact_mut(4).zip(floats(tensor.bytes).zip(floats(&kept.bytes))) {
            to.copy_from_slice(&(value + residual).to_ne_bytes());
        }
        // Both terms are finite, so a sum that is not has overflowed.
        match magnitude_max(CodecId::Feedback, &self.sum) {
            Err(CodecError::NotFinite { codec, at }) => Err(CodecError::Overflow { codec, at }),
            checked => checked.map(|_| ()),
        }
    }

    /// Stores the difference of `self.sum` and `self.decoded` as the residual.
    fn keep_residual(&mut self, tensor: &TensorView<'_>, slot: u64) {
        for (to, decoded) in self.sum.chunks_exact_mut(4).zip(floats(&self.decoded)) {
            let sum = f32::from_ne_bytes([to[0], to[1], to[2], to[3]]);
            to.copy_from_slice(&(sum - decoded).clamp(f32::MIN, f32::MAX).to_ne_bytes());
        }
        let bytes = std::mem::take(&mut self.sum);
        let (size, dims) = (bytes.len(), tensor.dims.to_vec());
        // The buffer of the former residual is reused for the next sum.
        if let Some(before) = self.residuals.insert(slot, Residual { dims, layout: tensor.layout, bytes }, size) {
            self.sum = before.bytes;
        }
    }
}

impl Codec for Feedback {
    fn id(&self) -> CodecId {
        CodecId::Feedback
    }

    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize {
        self.inner.encoded_bytes(dtype, dims)
    }

    fn refuses_shape(&self, dims: &[usize]) -> bool {
        self.inner.refuses_shape(dims)
    }

    fn size_varies(&self) -> bool {
        self.inner.size_varies()
    }

    fn body_parts(&self, dtype: DType, dims: &[usize], body: &[u8], each: &mut dyn FnMut(BodyPart)) {
        self.inner.body_parts(dtype, dims, body, each);
    }

    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        if !context.training {
            return self.inner.encode(tensor, context, out);
        }
        self.add_residual(&tensor, context.slot)?;
        let sum = TensorView { bytes: &self.sum, ..tensor };
        self.inner.round_trip(sum, context, out, &mut self.decoded)?;
        self.keep_residual(&tensor, context.slot);
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_meta(self.id(), meta, out)?;
        self.inner.decode(meta, body, out)
    }

    fn form(&self) -> Option<CodecForm> {
        self.inner.form().map(|form| CodecForm { feedback: true, ..form })
    }

    fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        check_codec(self.id(), meta)?;
        self.inner.check(meta, body)
    }

    fn remembers(&self) -> bool {
        true
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.inner.set_executor(executor);
    }

    fn reset(&mut self) {
        self.residuals.clear();
        self.inner.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::super::half::{Half, HalfFormat};
    use super::super::lru_cache::ENTRY_BYTES;
    use super::super::parse as parse_any;
    use super::*;
    use crate::wire::Shape;

    fn feedback(inner: &str, bytes_max: usize) -> Feedback {
        let arguments = Arguments { parameter: None, inner: Some(inner) };
        Feedback::new(WrappedCodec::parse("feedback", EXPECTED, arguments).unwrap(), bytes_max)
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    /// Encodes and decodes; returns the body and the decoded values.
    fn send(
        codec: &mut dyn Codec,
        values: &[f32],
        context: CodecContext<'_>,
    ) -> Result<(Vec<u8>, Vec<f32>), CodecError> {
        let (dims, bytes) = ([values.len()], bytes(values));
        let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes };
        let mut body = Vec::new();
        codec.encode(view, &context, &mut body)?;
        let shape = Shape::new(&dims).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: codec.id() };
        let mut out = vec![0; bytes.len()];
        codec.decode(&meta, &body, &mut out)?;
        Ok((body, floats(&out).collect()))
    }

    fn slot(slot: u64) -> CodecContext<'static> {
        CodecContext { slot, ..CodecContext::default() }
    }

    fn wave(length: usize, seed: usize) -> Vec<f32> {
        (0..length).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 25.0 - 2.0).collect()
    }

    #[test]
    fn what_was_decoded_sums_to_what_was_encoded_but_for_one_residual() {
        for inner in ["uniform:2", "tile:2", "sort:3+1", "bf16", "topk:0.2"] {
            let (mut codec, values) = (feedback(inner, BYTES_MAX), wave(100, 0));
            let mut sums = vec![0.0; values.len()];
            let mut alone = vec![0.0; values.len()];
            for repeat in 1..=64 {
                let (_, decoded) = send(&mut codec, &values, slot(7)).unwrap();
                let (_, without) = send(&mut *parse_any(inner).unwrap(), &values, slot(7)).unwrap();
                sums.iter_mut().zip(&decoded).for_each(|(sum, &value)| *sum += f64::from(value));
                alone.iter_mut().zip(&without).for_each(|(sum, &value)| *sum += f64::from(value));
                let residual = &codec.residuals.get(&7).unwrap().bytes;
                for ((sum, &value), kept) in sums.iter().zip(&values).zip(floats(residual)) {
                    let missing = f64::from(repeat) * f64::from(value) - sum;
                    assert!((missing - f64::from(kept)).abs() <= 1e-6 * f64::from(repeat), "{inner}: {missing} {kept}");
                }
            }
            let error = |sums: &[f64]| {
                let errors = sums.iter().zip(&values).map(|(sum, &value)| (sum / 64.0 - f64::from(value)).abs());
                errors.fold(0.0, f64::max)
            };
            assert!(error(&sums) < error(&alone) / 10.0, "{inner}: {} {}", error(&sums), error(&alone));
        }
    }

    #[test]
    fn the_first_body_is_the_inner_codecs_and_slots_do_not_mix() {
        let mut codec = feedback("tile:2", BYTES_MAX);
        let (first, second) = (wave(70, 1), wave(70, 2));
        let alone = |values: &[f32]| send(&mut *parse_any("tile:2").unwrap(), values, slot(0)).unwrap();
        assert_eq!(send(&mut codec, &first, slot(1)).unwrap(), alone(&first));
        assert_eq!(send(&mut codec, &second, slot(2)).unwrap(), alone(&second));
        assert_ne!(send(&mut codec, &first, slot(1)).unwrap(), alone(&first));
        // Another shape starts without a residual, and so does the first shape after it.
        assert_eq!(send(&mut codec, &first[..64], slot(1)).unwrap(), alone(&first[..64]));
        assert_eq!(send(&mut codec, &first, slot(1)).unwrap(), alone(&first));
        codec.reset();
        assert_eq!(send(&mut codec, &second, slot(2)).unwrap(), alone(&second));
    }

    #[test]
    fn a_refused_tensor_and_an_evaluation_leave_no_trace() {
        let (mut codec, mut twin) = (feedback("f16", BYTES_MAX), feedback("f16", BYTES_MAX));
        let values: Vec<f32> = wave(30, 3).iter().map(|value| value * 1000.1).collect();
        for _ in 0..3 {
            let mut refused = values.clone();
            refused[4] = 70000.0;
            let error = send(&mut codec, &refused, slot(1)).unwrap_err();
            assert!(error.refuses_tensor(), "{error}");
            refused[4] = f32::NAN;
            let error = send(&mut codec, &refused, slot(1)).unwrap_err();
            assert_eq!(error, CodecError::NotFinite { codec: CodecId::Feedback, at: 4 });
            let watching = CodecContext { training: false, ..slot(1) };
            let (body, _) = send(&mut codec, &values, watching).unwrap();
            assert_eq!(body, send(&mut Half::new(HalfFormat::F16), &values, slot(1)).unwrap().0);
            assert_eq!(send(&mut codec, &values, slot(1)), send(&mut twin, &values, slot(1)));
        }
    }

    #[test]
    fn a_sum_that_overflows_goes_raw_and_loses_nothing() {
        let mut codec = feedback("uniform:2", BYTES_MAX);
        // The grid is -3e38, -1e38, 1e38, 3e38: 2e38 becomes 1e38 or 3e38, which leaves a residual of 1e38 or -1e38.
        send(&mut codec, &[-3e38, 3e38, 1.9e38], slot(0)).unwrap();
        let kept = codec.residuals.get(&0).unwrap().bytes.clone();
        assert!(floats(&kept).nth(2).unwrap() > 8e37);
        let error = send(&mut codec, &[0.0, 0.0, 3e38], slot(0)).unwrap_err();
        assert_eq!(error, CodecError::Overflow { codec: CodecId::Feedback, at: 2 });
        assert_eq!(codec.residuals.get(&0).unwrap().bytes, kept);
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let values = wave(100, 4);
        let mut codec = feedback("uniform:2", 2 * (400 + ENTRY_BYTES));
        for number in [1, 2, 1, 3] {
            send(&mut codec, &values, slot(number)).unwrap();
        }
        assert_eq!(codec.residuals.iter().map(|(&slot, _)| slot).collect::<Vec<_>>(), [1, 3]);
        // A tensor that is too large has no feedback and evicts nothing.
        send(&mut codec, &wave(1000, 5), slot(4)).unwrap();
        assert_eq!(codec.residuals.iter().map(|(&slot, _)| slot).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn only_a_codec_that_loses_something_is_corrected() {
        let told = |text: &str| parse_any(text).err().unwrap().to_string();
        assert_eq!(
            told("feedback(raw)"),
            "expected feedback(C) with C a lossy codec that wraps no other, such as feedback(tile:4); \
             got `feedback(raw)`"
        );
        assert!(told("feedback(feedback(tile:4))").ends_with("got `feedback(feedback(tile:4))`"));
        assert_eq!(told("feedback"), format!("expected {EXPECTED}; got `feedback`"));
        assert_eq!(told("feedback:2(tile:4)"), format!("expected {EXPECTED}; got `feedback:2(tile:4)`"));
        assert!(told("feedback(tile:99)").starts_with("expected tile:Q"));
        for text in ["feedback()", "feedback(tile:4", "feedback(tile:4))", "feedback tile:4"] {
            assert!(told(text).starts_with("expected "), "{text}");
        }
    }
}
