//! The promises of every codec, tested for each member of `codec::ALL`. A new codec is added to that list, and nothing
//! changes here. The promises of a single codec are tested next to it.

use distgpipe_core::codec::{self, Codec, CodecContext, CodecError, CodecId, Member, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use proptest::prelude::*;

/// Every example of every codec.
fn members() -> impl Iterator<Item = (Member, &'static str)> {
    codec::ALL.iter().flat_map(|member| member.examples.iter().map(|text| (*member, *text)))
}

fn lossless(text: &str) -> bool {
    make(text).is_lossless()
}

fn make(text: &str) -> Box<dyn Codec> {
    codec::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn meta(codec: CodecId, dtype: DType, dims: &[usize]) -> TensorMeta {
    TensorMeta { dtype, layout: Layout::Contiguous, shape: Shape::new(dims).unwrap(), codec }
}

/// The element types that a lossy codec takes. Labels and token ids are not among them.
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Whether a codec takes this element type. `zstd` compresses other types than floats as they are.
fn takes(text: &str, dtype: DType) -> bool {
    lossless(text) || text.starts_with("zstd") || FLOATS.contains(&dtype)
}

/// The codec that refuses a tensor: `zstd` leaves that to the codec inside.
fn refusing(text: &str) -> CodecId {
    let inner =
        text.strip_prefix("zstd").and_then(|rest| rest.split_once('(')).and_then(|(_, rest)| rest.strip_suffix(')'));
    make(inner.unwrap_or(text)).id()
}

/// Whether a codec takes this shape: factors need a matrix of at least their rank.
fn suits(text: &str, dims: &[usize]) -> bool {
    let Some((_, rank)) = text.split_once("svd:") else { return true };
    let rank: usize = rank.trim_end_matches(')').parse().unwrap();
    let (rows, columns) = match dims {
        [] | [_] => return false,
        [rows, columns] => (*rows, *columns),
        [_, rows, columns @ ..] => (*rows, columns.iter().product()),
    };
    dims.contains(&0) || rank <= rows.min(columns)
}

/// The memory of a tensor, generated from `seed`: 0 or 1 for `Bool`, moderate magnitudes for floats.
fn memory(dtype: DType, dims: &[usize], seed: u64) -> Vec<u8> {
    let length = dims.iter().product::<usize>() * dtype.size_bytes();
    let mut state = seed | 1;
    let bytes = (0..length).map(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    });
    match dtype {
        DType::Bool => bytes.map(|byte| byte & 1).collect(),
        DType::F32 => {
            let bytes: Vec<u8> = bytes.collect();
            let value =
                |bytes: &[u8]| f32::from(i16::from_ne_bytes([bytes[0], bytes[1]])) / f32::from(1 + u16::from(bytes[2]));
            bytes.chunks_exact(4).flat_map(|bytes| value(bytes).to_ne_bytes()).collect()
        }
        // Any bits, with an exponent between 2^-7 and 2^8.
        DType::F16 | DType::BF16 => {
            let bits = |[low, high]: [u8; 2]| {
                let (bits, fraction) = (u16::from_ne_bytes([low, high]), if dtype == DType::F16 { 10 } else { 7 });
                let exponent = (if dtype == DType::F16 { 8 } else { 120 }) + (bits >> fraction & 15);
                bits & (0x8000 | ((1 << fraction) - 1)) | exponent << fraction
            };
            let bytes: Vec<u8> = bytes.collect();
            bytes.chunks_exact(2).flat_map(|pair| bits([pair[0], pair[1]]).to_ne_bytes()).collect()
        }
        _ => bytes.collect(),
    }
}

fn view<'a>(dtype: DType, dims: &'a [usize], bytes: &'a [u8]) -> TensorView<'a> {
    TensorView { dtype, dims, layout: Layout::Contiguous, bytes }
}

fn encode(codec: &mut dyn Codec, dtype: DType, dims: &[usize], bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    codec.encode(view(dtype, dims, bytes), &CodecContext::default(), &mut out).unwrap();
    out
}

fn decode(codec: &mut dyn Codec, dtype: DType, dims: &[usize], body: &[u8]) -> Vec<u8> {
    let meta = meta(codec.id(), dtype, dims);
    let mut out = vec![0xcc; meta.decoded_bytes() as usize];
    codec.decode(&meta, body, &mut out).unwrap();
    out
}

#[test]
fn the_list_is_complete_and_parses() {
    for (member, text) in members() {
        assert_eq!(make(text).id(), member.id, "{text}");
        assert!(text.starts_with(member.name), "{text}");
    }
    for &id in CodecId::ALL {
        let members: Vec<_> = codec::ALL.iter().filter(|member| member.id == id).collect();
        assert_eq!(members.len(), 1, "{id} is listed once");
        assert!(!members[0].examples.is_empty(), "{id} is tested");
    }
    for text in ["", "RAW", " raw", "raw:1", "nothing"] {
        assert!(codec::parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn empty_and_one_element_come_back() {
    let shapes: [&[usize]; 6] = [&[], &[1], &[0], &[3, 0, 2], &[1, 1, 1, 1, 1, 1, 1, 1], &[5]];
    for (_, text) in members() {
        for &dtype in DType::ALL.iter().filter(|&&dtype| takes(text, dtype)) {
            for dims in shapes.into_iter().filter(|dims| suits(text, dims)) {
                let bytes = memory(dtype, dims, 3);
                let body = encode(&mut *make(text), dtype, dims, &bytes);
                let back = decode(&mut *make(text), dtype, dims, &body);
                assert_eq!(back.len(), bytes.len(), "{text} {dtype} {dims:?}");
                if lossless(text) {
                    assert_eq!(back, bytes, "{text} {dtype} {dims:?}");
                }
            }
        }
    }
}

/// A NaN shows that training has gone wrong, so a codec must not hide it. A codec that cannot carry it returns an
/// error.
#[test]
fn nan_stays_nan() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let values = [1.0f32, special, -3.0, special, 2.0, -0.0];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        for (_, text) in members() {
            // The significant bits of all of these are in the upper half.
            let halves: Vec<u8> =
                values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_ne_bytes()).collect();
            match make(text).encode(view(DType::BF16, &[6], &halves), &CodecContext::default(), &mut Vec::new()) {
                Ok(()) => assert!(lossless(text), "{text}"),
                Err(error) => assert_eq!(error, CodecError::NotFinite { codec: refusing(text), at: 1 }, "{text}"),
            }
            let mut body = Vec::new();
            match make(text).encode(view(DType::F32, &[6], &bytes), &CodecContext::default(), &mut body) {
                Ok(()) => {
                    let back = decode(&mut *make(text), DType::F32, &[6], &body);
                    assert_eq!(back, bytes, "{text}");
                }
                Err(error) => {
                    assert_eq!(error, CodecError::NotFinite { codec: refusing(text), at: 1 }, "{text}");
                    assert!(error.refuses_tensor() && body.is_empty(), "{text}");
                }
            }
        }
    }
}

#[test]
fn other_types_are_refused_so_that_they_can_go_raw() {
    for (member, text) in members() {
        for &dtype in DType::ALL.iter().filter(|&&dtype| !takes(text, dtype)) {
            let bytes = memory(dtype, &[3], 1);
            let mut body = Vec::new();
            let refused =
                make(text).encode(view(dtype, &[3], &bytes), &CodecContext::default(), &mut body).unwrap_err();
            assert_eq!(refused, CodecError::DType { codec: member.id, got: dtype }, "{text}");
            assert!(refused.refuses_tensor() && body.is_empty(), "{text}");
            let refused = make(text).decode(&meta(member.id, dtype, &[3]), &body, &mut vec![0; bytes.len()]);
            assert_eq!(refused, Err(CodecError::DType { codec: member.id, got: dtype }), "{text}");
        }
    }
}

/// The values in a tensor's memory.
fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pair = |bytes: &[u8]| u16::from_ne_bytes([bytes[0], bytes[1]]);
    match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect(),
        DType::BF16 => bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(pair(b)) << 16)).collect(),
        DType::F16 => bytes.chunks_exact(2).map(|b| f16_value(pair(b))).collect(),
        other => panic!("{other} is no float here"),
    }
}

/// The value according to the standard.
fn f16_value(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2f32.powi(-24),
        31 => return f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if bits & 0x8000 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Tensors of two-byte floats have the body of the same values in `F32`, also with codecs that keep state, and decode
/// to the nearest values of their type.
#[test]
fn halves_are_carried_as_the_floats_that_they_are() {
    for (member, text) in members().filter(|(_, text)| !lossless(text)) {
        for dtype in [DType::BF16, DType::F16] {
            let (mut encoder, mut decoder) = (make(text), make(text));
            let (mut encoder_f32, mut decoder_f32) = (make(text), make(text));
            training(|context, dims, _| {
                let bytes = memory(dtype, dims, context.seed);
                let wide: Vec<u8> = floats(dtype, &bytes).iter().flat_map(|value| value.to_ne_bytes()).collect();
                let (mut body, mut expected) = (Vec::new(), Vec::new());
                let result = encoder.encode(view(dtype, dims, &bytes), context, &mut body);
                assert_eq!(result, encoder_f32.encode(view(DType::F32, dims, &wide), context, &mut expected), "{text}");
                assert_eq!(body, expected, "{text} {dtype}");
                // The low-rank codec refuses the few rows that changed.
                if result.is_err_and(|error| error.refuses_tensor()) {
                    assert!(text.contains("delta") && text.contains("svd"), "{text} {dtype}");
                    return;
                }
                let most = encoder.encoded_bytes(dtype, dims);
                assert!(body.len() == most || encoder.size_varies() && body.len() < most, "{text} {dtype}");
                let back = floats(dtype, &decode(&mut *decoder, dtype, dims, &body));
                let exact = floats(DType::F32, &decode(&mut *decoder_f32, DType::F32, dims, &body));
                // Half a unit in the last place, which is at least 2^-24 for F16.
                let unit = if dtype == DType::F16 { 2f32.powi(-11) } else { 2f32.powi(-8) };
                for (back, exact) in back.iter().zip(&exact) {
                    let most = (exact.abs() * unit).max(2f32.powi(-25));
                    assert!((back - exact).abs() <= most, "{text} {dtype}: {back} for {exact}");
                }
                if member.id == CodecId::F16 && dtype == DType::F16
                    || member.id == CodecId::BF16 && dtype == DType::BF16
                {
                    assert_eq!(back, floats(dtype, &bytes), "{text} has a number for every {dtype}");
                }
            });
        }
    }
}

#[test]
fn encode_appends_and_leaves_out_alone_on_error() {
    for (_, text) in members() {
        let bytes = memory(DType::F32, &[2, 3], 1);
        let mut out = b"before".to_vec();
        for (dims, bytes) in [(&[2, 2][..], &bytes[..]), (&[2, 3], &bytes[1..]), (&[usize::MAX, 8], &[])] {
            let view = view(DType::F32, dims, bytes);
            assert!(make(text).encode(view, &CodecContext::default(), &mut out).is_err(), "{text} {dims:?}");
            assert_eq!(out, b"before", "{text}");
        }
        let view = view(DType::F32, &[2, 3], &bytes);
        make(text).encode(view, &CodecContext::default(), &mut out).unwrap();
        assert_eq!(&out[..6], b"before", "{text}");
        assert_eq!(out[6..], encode(&mut *make(text), DType::F32, &[2, 3], &bytes), "{text}");
    }
}

#[test]
fn room_of_another_size_is_an_error() {
    for (_, text) in members() {
        let bytes = memory(DType::F32, &[2, 2], 1);
        let mut codec = make(text);
        let body = encode(&mut *codec, DType::F32, &[2, 2], &bytes);
        let meta = meta(codec.id(), DType::F32, &[2, 2]);
        for length in [0, 15, 17] {
            assert!(codec.decode(&meta, &body, &mut vec![0; length]).is_err(), "{text} {length}");
        }
    }
}

#[test]
fn the_size_of_an_impossible_tensor_does_not_wrap() {
    for (_, text) in members() {
        let most = make(text).encoded_bytes(DType::F64, &[usize::MAX, 2]);
        assert!(most >= make(text).encoded_bytes(DType::F64, &[1 << 40]), "{text}");
    }
}

/// A few training steps as a link sees them: two micro-batches of two tensors each, the samples in a new order every
/// time, and now and then a tensor that no lossy codec takes.
fn training(mut each: impl FnMut(&CodecContext<'_>, &[usize], &[u8])) {
    for step in 0..6u64 {
        for slot in [0, 1, 1 << 16, 1 << 16 | 1] {
            let samples: Vec<u64> = (0..3).map(|row| (step * 5 + (slot >> 16) * 3 + row * 2) % 7).collect();
            let dims: &[usize] = if slot & 1 == 0 { &[3, 4, 5] } else { &[3, 8] };
            let mut bytes = memory(DType::F32, dims, slot + 1);
            bytes[4 * 7..4 * 8].copy_from_slice(&(step as f32).to_ne_bytes());
            if step == 3 && slot == 1 {
                bytes[..4].copy_from_slice(&f32::NAN.to_ne_bytes());
            }
            each(&CodecContext { slot, seed: step << 32 | slot, samples: &samples, training: true }, dims, &bytes);
        }
    }
}

/// The body of every tensor; `None` for one that goes raw.
fn try_encode(codec: &mut dyn Codec, context: &CodecContext<'_>, dims: &[usize], bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    match codec.encode(view(DType::F32, dims, bytes), context, &mut body) {
        Ok(()) => Some(body),
        Err(error) => {
            assert!(error.refuses_tensor() && body.is_empty(), "{error}");
            None
        }
    }
}

/// The decoder stays synchronized with the encoder's state, through tensors that go raw and through a reset of the
/// encoder.
#[test]
fn both_ends_of_a_training_stay_in_step() {
    for (_, text) in members() {
        let (mut encoder, mut twin, mut decoder) = (make(text), make(text), make(text));
        for _ in 0..2 {
            training(|context, dims, bytes| {
                let body = try_encode(&mut *encoder, context, dims, bytes);
                assert_eq!(body, try_encode(&mut *twin, context, dims, bytes), "{text} is deterministic");
                let Some(body) = body else { return };
                let most = encoder.encoded_bytes(DType::F32, dims);
                assert!(body.len() == most || encoder.size_varies() && body.len() < most, "{text}");
                let back = decode(&mut *decoder, DType::F32, dims, &body);
                assert!(!lossless(text) || back == bytes, "{text}");
            });
            // After the reset the second round repeats the first; the decoder is not told.
            encoder.reset();
            twin = make(text);
        }
    }
}

/// An evaluation between steps, with the same slots and samples, does not change a byte of what training sends, and the
/// other end decodes both.
#[test]
fn an_evaluation_leaves_no_trace() {
    for (_, text) in members() {
        let (mut encoder, mut disturbed, mut decoder) = (make(text), make(text), make(text));
        let mut evaluations = 0;
        training(|context, dims, bytes| {
            for seed in 0..2 {
                let evaluation = CodecContext { training: false, seed, ..*context };
                let other = memory(DType::F32, dims, 1000 + seed);
                let body = try_encode(&mut *disturbed, &evaluation, dims, &other).unwrap();
                let fresh = try_encode(&mut *make(text), &evaluation, dims, &other).unwrap();
                assert_eq!(body, fresh, "{text}: what an evaluation sends does not depend on the training");
                decode(&mut *decoder, DType::F32, dims, &body);
                evaluations += 1;
            }
            let body = try_encode(&mut *disturbed, context, dims, bytes);
            assert_eq!(body, try_encode(&mut *encoder, context, dims, bytes), "{text}");
            if let Some(body) = body {
                decode(&mut *decoder, DType::F32, dims, &body);
            }
        });
        assert_eq!(evaluations, 2 * 4 * 6);
    }
}

fn dims() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0usize..6, 0..=4)
}

proptest! {
    #[test]
    fn tensors_come_back(dims in dims(), seed in any::<u64>(), dtype in prop::sample::select(DType::ALL)) {
        for (_, text) in members().filter(|(_, text)| takes(text, dtype) && suits(text, &dims)) {
            let bytes = memory(dtype, &dims, seed);
            let mut codec = make(text);
            let body = encode(&mut *codec, dtype, &dims, &bytes);
            let again = encode(&mut *make(text), dtype, &dims, &bytes);
            prop_assert_eq!(&body, &again, "{} is deterministic", text);

            let size = codec.encoded_bytes(dtype, &dims);
            prop_assert!(body.len() == size || codec.size_varies() && body.len() < size, "{}", text);
            let back = decode(&mut *make(text), dtype, &dims, &body);
            prop_assert_eq!(back.len(), bytes.len());
            if lossless(text) {
                prop_assert_eq!(&back, &bytes, "{} is lossless", text);
            }
            if codec.is_identity(dtype) {
                prop_assert_eq!(&body, &bytes, "{} is the identity", text);
            }
        }
    }

    /// Noise may decode to an error or to a tensor, but must not panic. A body has exactly one valid length, so a
    /// truncated or extended one is an error, and so is a table with a NaN or an infinity: lossy codecs decode to
    /// finite values.
    #[test]
    fn hostile_bodies_never_panic(
        dims in dims(),
        noise in prop::collection::vec(any::<u8>(), 0..300),
        dtype in prop::sample::select(DType::ALL),
        cut in 0.0f64..1.0,
    ) {
        for (_, text) in members() {
            let mut codec = make(text);
            let meta = meta(codec.id(), dtype, &dims);
            let mut out = vec![0; meta.decoded_bytes() as usize];
            let _ = codec.decode(&meta, &noise, &mut out);
            if !takes(text, dtype) || !suits(text, &dims) {
                continue;
            }
            let mut body = encode(&mut *make(text), dtype, &dims, &memory(dtype, &dims, 5));
            let short = &body[..(body.len() as f64 * cut) as usize];
            if short.len() < body.len() {
                let result = make(text).decode(&meta, short, &mut out);
                prop_assert!(result.is_err(), "{} from {} of {} bytes", text, short.len(), body.len());
            }
            // Of the right length, so that the content is read.
            body.iter_mut().zip(noise.iter().cycle()).for_each(|(to, from)| *to = *from);
            let result = codec.decode(&meta, &body, &mut out);
            let halves = text.contains("f16");
            if result.is_ok() && !lossless(text) && !halves && FLOATS.contains(&dtype) {
                prop_assert!(floats(dtype, &out).into_iter().all(f32::is_finite), "{} decodes to what is not finite", text);
            }
            body.push(0);
            prop_assert!(codec.decode(&meta, &body, &mut out).is_err(), "{} with a byte too many", text);
        }
    }

    #[test]
    fn parsing_a_name_never_panics(text in "\\PC{0,80}") {
        let _ = codec::parse(&text);
    }
}
