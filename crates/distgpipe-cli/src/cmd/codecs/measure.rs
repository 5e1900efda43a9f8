//! Measures a codec on tensors: bytes, errors and times. As on a link, one codec instance encodes and another one decodes.

use super::sample::Sample;
use anyhow::Context as _;
use distgpipe_core::codec::half::{f32_from_bf16, f32_from_f16};
use distgpipe_core::codec::{Codec, CodecContext, CodecError, CodecSpec, SerialExecutor, TensorView};
use distgpipe_core::weights::TensorType;
use distgpipe_core::wire::{DType, Shape, TensorMeta, HEADER_BYTES};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most rounds; the fastest one counts.
pub const ROUNDS_MAX: u32 = 7;

/// No further round starts after this time.
const ROUNDS_TIME: Duration = Duration::from_millis(600);

/// The figures of a codec.
pub struct Measured {
    pub spec: CodecSpec,
    /// The figures of each tensor, in the order of the samples.
    pub tensors: Vec<Sent>,
    /// The speed, over the tensors that were encoded.
    pub speed: Speed,
    /// How many times the tensors were encoded and decoded.
    pub rounds: u32,
}

/// The figures of one tensor.
pub struct Sent {
    /// Bytes of the tensor.
    pub raw_bytes: u64,
    /// Bytes on the wire: frame header and body.
    pub wire_bytes: u64,
    /// The errors of the decoded values.
    pub errors: Errors,
    /// Why the codec refused the tensor, which is then sent raw.
    pub refused: Option<String>,
}

/// Differences between `F32`, `F16` or `BF16` values and their decoded values. Tensors of other types are never changed and do not
/// count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors {
    values: u64,
    /// The sum of the squares of the finite values.
    squares: f64,
    error_squares: f64,
    /// The largest absolute error.
    pub max: f64,
}

/// Speeds in gigabytes of input per second; none where nothing was encoded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Speed {
    pub encode_gb_per_s: Option<f64>,
    pub decode_gb_per_s: Option<f64>,
}

impl Errors {
    /// Compares the values of a tensor with the decoded ones. Values with equal bits have no error, NaN included.
    fn between(dtype: DType, values: &[u8], decoded: &[u8]) -> Self {
        let mut errors = Errors { values: (values.len() / dtype.size_bytes()) as u64, ..Errors::default() };
        for (value, decoded) in floats(dtype, values).zip(floats(dtype, decoded)) {
            if value.is_finite() {
                errors.squares += f64::from(value) * f64::from(value);
            }
            if value.to_bits() != decoded.to_bits() {
                let error = (f64::from(value) - f64::from(decoded)).abs();
                // A number that became NaN, or NaN that became a number, is an infinite error.
                let error = if error.is_nan() { f64::INFINITY } else { error };
                errors.error_squares += error * error;
                errors.max = errors.max.max(error);
            }
        }
        errors
    }

    /// The errors of several tensors together.
    pub fn sum<'a>(all: impl Iterator<Item = &'a Errors>) -> Self {
        all.fold(Errors::default(), |sum, one| Errors {
            values: sum.values + one.values,
            squares: sum.squares + one.squares,
            error_squares: sum.error_squares + one.error_squares,
            max: sum.max.max(one.max),
        })
    }

    /// The mean squared error.
    pub fn mse(&self) -> f64 {
        self.error_squares / self.values.max(1) as f64
    }

    /// The mean squared error divided by the mean square of the values.
    pub fn relative_mse(&self) -> f64 {
        if self.error_squares == 0.0 {
            0.0
        } else {
            self.error_squares / self.squares
        }
    }
}

impl Measured {
    /// Bytes of all tensors.
    pub fn raw_bytes(&self) -> u64 {
        self.tensors.iter().map(|sent| sent.raw_bytes).sum()
    }

    /// Bytes of all tensors on the wire, headers included.
    pub fn wire_bytes(&self) -> u64 {
        self.tensors.iter().map(|sent| sent.wire_bytes).sum()
    }

    /// Raw bytes divided by wire bytes.
    pub fn ratio(&self) -> f64 {
        self.raw_bytes() as f64 / self.wire_bytes().max(1) as f64
    }

    /// The errors of all tensors together.
    pub fn errors(&self) -> Errors {
        Errors::sum(self.tensors.iter().map(|sent| &sent.errors))
    }

    /// How many tensors the codec refused.
    pub fn refused(&self) -> usize {
        self.tensors.iter().filter(|sent| sent.refused.is_some()).count()
    }
}

/// Encodes and decodes the samples. `keep` receives the index and the decoded elements of each tensor that was encoded.
pub fn measure(
    spec: &CodecSpec,
    samples: &[Sample<'_>],
    mut keep: impl FnMut(usize, &[u8]),
) -> anyhow::Result<Measured> {
    let mut link = Link::new(spec);
    let mut tensors = Vec::with_capacity(samples.len());
    let mut encoded = Vec::new();
    let (mut bytes, mut best) = (0, Times::default());
    for (slot, sample) in samples.iter().enumerate() {
        let raw_bytes = sample.bytes.len() as u64;
        let sent = match link.send(slot, sample).with_context(|| format!("tensor {} in {spec}", sample.name))? {
            Ok(times) => {
                best = best.plus(times);
                bytes += sample.bytes.len();
                encoded.push(slot);
                keep(slot, &link.decoded);
                let errors = match encodable(sample.dtype) {
                    Some(dtype) => Errors::between(dtype, &sample.bytes, &link.decoded),
                    None => Errors::default(),
                };
                Sent { raw_bytes, wire_bytes: (HEADER_BYTES + link.body.len()) as u64, errors, refused: None }
            }
            Err(why) => {
                let errors = match encodable(sample.dtype) {
                    Some(dtype) => Errors::between(dtype, &sample.bytes, &sample.bytes),
                    None => Errors::default(),
                };
                let refused = Some(why).filter(|_| !spec.is_raw());
                Sent { raw_bytes, wire_bytes: HEADER_BYTES as u64 + raw_bytes, errors, refused }
            }
        };
        tensors.push(sent);
    }
    let rounds = rounds(&mut best, || {
        link.encoder.reset();
        let mut times = Times::default();
        for &slot in &encoded {
            if let Ok(sent) = link.send(slot, &samples[slot])? {
                times = times.plus(sent);
            }
        }
        Ok(times)
    })?;
    Ok(Measured { spec: spec.clone(), tensors, speed: best.speed(bytes), rounds })
}

/// The speed of copying the samples, for comparison.
pub fn copy(samples: &[Sample<'_>]) -> anyhow::Result<Speed> {
    let mut out = Vec::new();
    let mut round = || {
        let mut times = Times::default();
        for sample in samples {
            out.clear();
            let start = Instant::now();
            out.extend_from_slice(black_box(&sample.bytes));
            black_box(&mut out);
            times.encode_s += start.elapsed().as_secs_f64();
        }
        times.decode_s = times.encode_s;
        Ok(times)
    };
    let mut best = round()?;
    rounds(&mut best, round)?;
    Ok(best.speed(samples.iter().map(|sample| sample.bytes.len()).sum()))
}

/// Runs further rounds while there is time, and keeps the best time of each direction. Returns the number of rounds, including the
/// first.
fn rounds(best: &mut Times, mut round: impl FnMut() -> anyhow::Result<Times>) -> anyhow::Result<u32> {
    let start = Instant::now();
    let mut rounds = 1;
    while rounds < ROUNDS_MAX && start.elapsed() + best.whole() < ROUNDS_TIME {
        let times = round()?;
        best.encode_s = best.encode_s.min(times.encode_s);
        best.decode_s = best.decode_s.min(times.decode_s);
        rounds += 1;
    }
    Ok(rounds)
}

#[derive(Clone, Copy, Default)]
struct Times {
    encode_s: f64,
    decode_s: f64,
}

impl Times {
    fn plus(self, other: Times) -> Times {
        Times { encode_s: self.encode_s + other.encode_s, decode_s: self.decode_s + other.decode_s }
    }

    fn whole(self) -> Duration {
        Duration::from_secs_f64(self.encode_s + self.decode_s)
    }

    fn speed(self, bytes: usize) -> Speed {
        let speed = |seconds: f64| (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / 1e9 / seconds);
        Speed { encode_gb_per_s: speed(self.encode_s), decode_gb_per_s: speed(self.decode_s) }
    }
}

/// Both ends of a link, without a transport.
struct Link {
    encoder: Box<dyn Codec>,
    decoder: Box<dyn Codec>,
    body: Vec<u8>,
    decoded: Vec<u8>,
}

impl Link {
    fn new(spec: &CodecSpec) -> Self {
        let end = || spec.codec(Arc::new(SerialExecutor));
        Link { encoder: end(), decoder: end(), body: Vec::new(), decoded: Vec::new() }
    }

    /// Encodes into `body` and decodes into `decoded`. The inner error is the reason why the codec refuses the tensor.
    fn send(&mut self, slot: usize, sample: &Sample<'_>) -> Result<Result<Times, String>, CodecError> {
        let refused = || format!("{}, codecs take F32, F16 and BF16", sample.dtype.name());
        let Some(dtype) = wire_type(sample.dtype) else { return Ok(Err(refused())) };
        let shape = match Shape::new(sample.dims) {
            Ok(shape) => shape,
            Err(why) => return Ok(Err(why.to_string())),
        };
        let layout = sample.layout;
        let meta = TensorMeta { dtype, layout, shape, codec: self.encoder.id() };
        let view = TensorView { dtype, dims: sample.dims, layout, bytes: &sample.bytes };
        let context = CodecContext { slot: slot as u64, seed: slot as u64, ..CodecContext::default() };
        self.body.clear();
        self.decoded.resize(sample.bytes.len(), 0);
        let start = Instant::now();
        match self.encoder.encode(view, &context, &mut self.body) {
            Err(CodecError::DType { .. }) => return Ok(Err(refused())),
            Err(error) if error.refuses_tensor() => return Ok(Err(reason(error))),
            encoded => encoded?,
        }
        let encode_s = start.elapsed().as_secs_f64();
        let start = Instant::now();
        self.decoder.decode(&meta, &self.body, &mut self.decoded)?;
        Ok(Ok(Times { encode_s, decode_s: start.elapsed().as_secs_f64() }))
    }
}

/// Why a codec refused a tensor, without the name of the codec and the remedy.
fn reason(error: CodecError) -> String {
    match error {
        CodecError::NotFinite { at, .. } => format!("a NaN or an infinity at {at}"),
        CodecError::Overflow { at, .. } => format!("a value too large at {at}, or too wide a range"),
        other => other.to_string(),
    }
}

/// The element type on the wire, if there is one. `Bool` is sent as bytes, because a file may have others than 0 and 1.
fn wire_type(dtype: TensorType) -> Option<DType> {
    match dtype {
        TensorType::F64 => Some(DType::F64),
        TensorType::I64 => Some(DType::I64),
        TensorType::I32 => Some(DType::I32),
        TensorType::I16 => Some(DType::I16),
        TensorType::I8 => Some(DType::I8),
        TensorType::U8 | TensorType::Bool => Some(DType::U8),
        other => encodable(other),
    }
}

/// The element type for all codecs, if they encode it.
pub fn encodable(dtype: TensorType) -> Option<DType> {
    match dtype {
        TensorType::F32 => Some(DType::F32),
        TensorType::F16 => Some(DType::F16),
        TensorType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

fn floats(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(dtype.size_bytes()).map(move |bytes| match (dtype, bytes) {
        (DType::F16, &[a, b]) => f32_from_f16(u16::from_ne_bytes([a, b])),
        (_, &[a, b]) => f32_from_bf16(u16::from_ne_bytes([a, b])),
        (_, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
        _ => f32::NAN,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn between(values: &[u8], decoded: &[u8]) -> Errors {
        Errors::between(DType::F32, values, decoded)
    }

    #[test]
    fn errors_follow_their_definition() {
        let one = between(&bytes(&[1.0, -2.0, 0.0, 3.0]), &bytes(&[1.5, -2.0, 0.0, 2.0]));
        assert_eq!((one.mse(), one.relative_mse(), one.max), (1.25 / 4.0, 1.25 / 14.0, 1.0));
        let both = Errors::sum([one, between(&bytes(&[4.0]), &bytes(&[2.0]))].iter());
        assert_eq!((both.mse(), both.relative_mse(), both.max), (5.25 / 5.0, 5.25 / 30.0, 2.0));
    }

    #[test]
    fn values_with_equal_bits_have_no_error_even_if_not_finite() {
        let odd = bytes(&[f32::NAN, f32::INFINITY, 1.0]);
        let same = between(&odd, &odd);
        assert_eq!((same.mse(), same.relative_mse(), same.max), (0.0, 0.0, 0.0));
        let sum = Errors::sum([same, between(&bytes(&[2.0]), &bytes(&[1.0]))].iter());
        assert_eq!((sum.mse(), sum.relative_mse()), (0.25, 0.2));
        assert_eq!(between(&odd, &bytes(&[0.0; 3])).max, f64::INFINITY);
        assert_eq!(Errors::default().mse(), 0.0);
    }
}
