use super::chunk::{CodedChunk, CHUNK_BYTES};
use super::*;
use crate::codec::parse as parse_any;
use crate::wire::{Layout, Shape};

fn meta(dtype: DType, dims: &[usize]) -> TensorMeta {
    TensorMeta { dtype, layout: Layout::Contiguous, shape: Shape::new(dims).unwrap(), codec: CodecId::Zstd }
}

fn encode(text: &str, dtype: DType, dims: &[usize], bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    let view = TensorView { dtype, dims, layout: Layout::Contiguous, bytes };
    parse_any(text).unwrap().encode(view, &CodecContext::default(), &mut body).unwrap();
    body
}

fn decode(text: &str, dtype: DType, dims: &[usize], body: &[u8]) -> Result<Vec<u8>, CodecError> {
    let meta = meta(dtype, dims);
    let mut out = vec![0xcc; meta.decoded_bytes() as usize];
    parse_any(text).unwrap().decode(&meta, body, &mut out).map(|()| out)
}

/// Values as after a ReLU: half of them 0, the others of similar magnitudes.
fn activation(elements: usize) -> Vec<u8> {
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..elements).flat_map(|_| (next() + next() - 1.0).max(0.0).to_ne_bytes()).collect()
}

/// A body of one chunk with one stream, of form 0.
fn body_of(bytes: u32, stream: &[u8], is_frame: bool) -> Vec<u8> {
    let length = stream.len() as u32 | u32::from(is_frame) << 31;
    let head = [&[1, 0][..], &bytes.to_le_bytes(), &(4 + stream.len() as u32).to_le_bytes(), &length.to_le_bytes()];
    [&head.concat(), stream].concat()
}

fn frame_of(bytes: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; zstd_safe::compress_bound(bytes.len())];
    let length = zstd_safe::compress(&mut frame[..], bytes, 1).unwrap();
    frame.truncate(length);
    frame
}

#[track_caller]
fn assert_refused(dims: &[usize], body: &[u8], expected: &str) {
    let error = decode("zstd(raw)", DType::U8, dims, body).unwrap_err();
    assert!(!error.refuses_tensor());
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn a_frame_must_be_the_one_that_an_encoder_would_send() {
    let content = [7; 1000];
    let frame = frame_of(&content);
    assert_eq!(decode("zstd(raw)", DType::U8, &[1000], &body_of(1000, &frame, true)).unwrap(), content);
    let refused = |stream: &[u8], expected: &str| assert_refused(&[1000], &body_of(1000, stream, true), expected);

    // Bombs: more content than the tensor has, whatever the head of the chunk says.
    let bomb = frame_of(&vec![0; 1 << 24]);
    assert!(bomb.len() < 1000);
    refused(&bomb, "of the length of its values");
    assert_refused(&[1000], &body_of(1001, &frame_of(&[7; 1001]), true), "expected 1000 bytes");
    assert_refused(&[1000], &body_of(1 << 24, &bomb, true), "a chunk of 1 to 196608 bytes");
    assert_refused(&[1 << 20], &body_of(1000, &frame, true), "expected 1048576 bytes");
    refused(&frame_of(&[7; 999]), "of the length of its values");

    // A frame that is truncated, corrupt, followed by bytes, by another frame, or by a skippable one.
    for length in 0..frame.len() {
        refused(&frame[..length], "zstd frame");
    }
    refused(&[&frame[..], &[0]].concat(), "nothing else");
    refused(&[&frame[..], &frame_of(&[])].concat(), "nothing else");
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 1, 2];
    refused(&[&frame[..], &skippable].concat(), "nothing else");
    refused(&[&skippable[..], &frame].concat(), "without dictionary");
    // The content size, read from a frame whose block has less.
    let mut longer = frame_of(&[7; 999]);
    let at = longer.windows(2).position(|pair| pair == (999u16 - 256).to_le_bytes()).unwrap();
    longer[at..at + 2].copy_from_slice(&(1000u16 - 256).to_le_bytes());
    refused(&longer, "a valid zstd frame");

    // A dictionary, a checksum, a window of its own instead of a single segment, the reserved bit, another format.
    for bits in [0b01, 0b10, 0b11, 0b100, 0b1000, 0b1_0000] {
        let mut other = frame.clone();
        other[4] |= bits;
        refused(&other, "without dictionary");
    }
    let mut windowed = frame.clone();
    windowed[4] &= !0x20;
    refused(&windowed, "without dictionary");
    let mut legacy = frame.clone();
    legacy[0] = 0x27;
    refused(&legacy, "without dictionary");
    // Without a content size, as programs write that do not know it beforehand.
    let mut compressor = zstd_safe::CCtx::create();
    compressor.set_parameter(zstd_safe::CParameter::ContentSizeFlag(false)).unwrap();
    let mut unsized_frame = vec![0; 1000];
    let length = compressor.compress2(&mut unsized_frame[..], &content).unwrap();
    refused(&unsized_frame[..length], "without dictionary");
}

#[test]
fn chunks_must_be_those_that_an_encoder_would_send() {
    let stored = |bytes: u32, stream: &[u8]| body_of(bytes, stream, false);
    assert_eq!(decode("zstd(raw)", DType::U8, &[3], &stored(3, &[1, 2, 3])).unwrap(), [1, 2, 3]);
    let two = [&stored(2, &[1, 2])[..], &stored(1, &[3])[1..]].concat();
    assert_eq!(decode("zstd(raw)", DType::U8, &[3], &two).unwrap(), [1, 2, 3]);
    assert_refused(&[3], &[], "expected 1 bytes");
    assert_refused(&[3], &[2, 1, 2, 3], "expected 0 or 1 as the first byte");
    assert_refused(&[3], &[0, 1, 2], "expected 3 bytes");
    assert_refused(&[3], &[1], "expected 3 bytes");
    assert_refused(&[3], &stored(2, &[1, 2]), "expected 3 bytes");
    assert_refused(&[3], &stored(4, &[1, 2, 3, 4]), "expected 3 bytes");
    assert_refused(&[3], &stored(3, &[1, 2]), "a stored stream of the length of its values");
    assert_refused(&[3], &[&stored(3, &[1, 2, 3])[..], &[0]].concat(), "the head of another chunk");
    assert_refused(&[3], &stored(0, &[]), "a chunk of 1 to 196608 bytes");
    assert_refused(&[3], &stored(u32::MAX, &[1, 2, 3]), "a chunk of 1 to 196608 bytes");
    let changed = |at: usize, value: u8| {
        let mut body = stored(3, &[1, 2, 3]);
        body[at] = value;
        body
    };
    assert_refused(&[3], &changed(1, 1), "a form of 0, 2, 3 or 4");
    assert_refused(&[3], &changed(1, 2), "whole values");
    assert_refused(&[3], &changed(6, 200), "the streams of a chunk");
    assert_refused(&[3], &changed(6, 6), "the head of another chunk");
    assert_refused(&[3], &changed(10, 200), "another stream");
    assert_refused(&[3], &changed(13, 0xff), "another stream");
    // A stream that ends before the chunk does.
    let mut surplus = stored(3, &[1, 2, 3, 4]);
    surplus[10] = 3;
    assert_refused(&[3], &surplus, "the end of a chunk");
}

#[test]
fn every_truncation_and_every_changed_byte_is_an_error_or_a_tensor() {
    let dims = [40, 40];
    let bytes = activation(1600);
    for text in ["zstd(raw)", "zstd(tile:4/4)", "zstd(tile:3/4)", "zstd(bf16)", "zstd(topk:0.5)"] {
        let body = encode(text, DType::F32, &dims, &bytes);
        assert_eq!(body[0], CHUNKS, "{text}");
        for length in 0..body.len() {
            assert!(decode(text, DType::F32, &dims, &body[..length]).is_err(), "{text} of {length} bytes");
        }
        for at in 0..body.len() {
            for bit in 0..8 {
                let mut other = body.clone();
                other[at] ^= 1 << bit;
                let _ = decode(text, DType::F32, &dims, &other);
            }
        }
    }
}

#[test]
fn a_body_that_does_not_shrink_costs_one_byte() {
    let mut state = 1u64;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    });
    let noise: Vec<u8> = noise.take(500_000).collect();
    let body = encode("zstd(raw)", DType::U8, &[500_000], &noise);
    assert_eq!((body[0], &body[1..]), (STORED, &noise[..]));
    assert_eq!(decode("zstd(raw)", DType::U8, &[500_000], &body).unwrap(), noise);
}

/// Decoders accept single segments alone, so encoders must send nothing else at any level and size of a chunk.
#[test]
fn every_level_gives_frames_that_a_decoder_takes() {
    let bytes = activation(CHUNK_BYTES / 2);
    let mut lengths = Vec::new();
    for level in 1..=LEVEL_MAX {
        let text = format!("zstd:{level}(tile:3)");
        let plain = &bytes[..4 * 40_000];
        let body = encode(&text, DType::F32, &[40_000], plain);
        let inner = encode("tile:3", DType::F32, &[40_000], plain);
        assert!(body.len() < inner.len(), "{text}");
        lengths.push(body.len());
        let decoded = decode(&text, DType::F32, &[40_000], &body).unwrap();
        assert_eq!(
            decoded,
            decode("zstd(tile:3)", DType::F32, &[40_000], &body).unwrap(),
            "the level is not on the wire"
        );
        // Bytes of other types are compressed as they are, here in a chunk of the largest size and in one of one byte.
        let length = CHUNK_BYTES + 1;
        let body = encode(&text, DType::U8, &[length], &bytes[..length]);
        assert_eq!(body[0], CHUNKS);
        assert_eq!(decode(&text, DType::U8, &[length], &body).unwrap(), &bytes[..length]);
    }
    assert!(lengths[18] < lengths[0], "a higher level compresses more: {lengths:?}");
}

/// What the forms of parts gain over bytes of which nothing is known, on values as after a ReLU.
#[test]
fn values_and_codes_compress_better_than_their_bytes() {
    let (elements, bytes) = (200_000, activation(200_000));
    let as_bytes = |bytes: &[u8]| encode("zstd(raw)", DType::U8, &[bytes.len()], bytes).len();
    let of = |text: &str| encode(text, DType::F32, &[elements], &bytes);
    assert!(of("zstd(raw)").len() * 100 < as_bytes(&bytes) * 90);
    for inner in ["tile:3", "bf16", "tile:4/16"] {
        let text = format!("zstd({inner})");
        assert!(of(&text).len() < as_bytes(&of(inner)), "{text}");
    }
}

#[test]
fn integers_masks_and_floats_of_all_types_come_back() {
    let mask: Vec<u8> = (0..8 * 128).flat_map(|at| i64::from(at % 128 < 20).to_ne_bytes()).collect();
    for text in ["zstd(raw)", "zstd(tile:4)", "zstd(feedback(tile:4))"] {
        let body = encode(text, DType::I64, &[8, 128], &mask);
        assert!(body.len() * 50 < mask.len(), "{text}: {} bytes", body.len());
        assert_eq!(decode(text, DType::I64, &[8, 128], &body).unwrap(), mask, "{text}");
    }
    // `Bool` is checked, because another byte would be undefined behaviour in libtorch.
    let body = encode("zstd(tile:4)", DType::U8, &[100], &[2; 100]);
    let refused = decode("zstd(tile:4)", DType::Bool, &[100], &body);
    assert_eq!(refused, Err(CodecError::NotBool { at: 0, got: 2 }));
    for dtype in [DType::F16, DType::BF16] {
        let bytes = &activation(20_000)[..];
        let body = encode("zstd(raw)", dtype, &[40_000], bytes);
        assert_eq!(decode("zstd(raw)", dtype, &[40_000], &body).unwrap(), bytes, "{dtype} bit for bit");
    }
}

/// Rows that a sample sends for the first time are floats, and differences are codes.
#[test]
fn the_parts_of_a_delta_body_are_compressed_as_what_they_are() {
    let (dims, bytes) = ([16, 4000], activation(16 * 4000));
    let samples: Vec<u64> = (0..16).collect();
    let mut encoder = parse_any("zstd(delta(tile:3))").unwrap();
    let mut decoder = parse_any("zstd(delta(tile:3))").unwrap();
    let mut plain = parse_any("delta(tile:3)").unwrap();
    for known in [0, 12, 16] {
        // In the second step, four samples are new.
        let samples: Vec<u64> =
            samples.iter().map(|sample| if *sample < known { *sample } else { sample + 100 * known }).collect();
        let context = CodecContext { samples: &samples, ..CodecContext::default() };
        let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes };
        let (mut body, mut expected) = (Vec::new(), Vec::new());
        encoder.encode(view, &context, &mut body).unwrap();
        plain.encode(view, &context, &mut expected).unwrap();
        let mut forms = Vec::new();
        let (mut at, mut covered) = (1, 0);
        while at < body.len() {
            let chunk = CodedChunk::read(&body, at).unwrap();
            (at, covered) = (chunk.streams.end, covered + chunk.bytes);
            forms.push(chunk.form);
        }
        forms.dedup();
        use PartForm::{Bytes, Codes3, Values32};
        let wanted: &[PartForm] = match known {
            0 => &[Bytes, Values32],
            12 => &[Bytes, Values32, Codes3],
            _ => &[Bytes, Values32, Codes3],
        };
        assert_eq!((&forms[..], covered), (wanted, expected.len()), "{known}");
        let mut out = vec![0; bytes.len()];
        decoder.decode(&meta(DType::F32, &dims), &body, &mut out).unwrap();
    }
}

#[test]
fn zstd_is_the_outermost_codec() {
    let told = |text: &str| parse_any(text).err().unwrap().to_string();
    assert_eq!(
        told("feedback(zstd(tile:4))"),
        "expected zstd outside every other codec and only once, such as zstd(tile:4) or zstd(feedback(tile:4)); \
         got `zstd(tile:4)` inside another codec"
    );
    for text in ["delta(zstd(tile:4))", "zstd(zstd(raw))", "zstd(feedback(zstd(tile:4)))"] {
        assert!(told(text).starts_with("expected zstd outside every other codec"), "{text}");
    }
    assert_eq!(told("zstd"), format!("expected {EXPECTED}; got `zstd`"));
    for text in ["zstd:3", "zstd:0(raw)", "zstd:20(raw)", "zstd:-1(raw)", "zstd:01(raw)", "zstd:(raw)"] {
        assert!(told(text).starts_with(&format!("expected {EXPECTED}; got `zstd:")), "{}", told(text));
    }
    assert!(told("zstd(tile:99)").starts_with("expected tile:Q"));
    assert_eq!(told("zstd()"), format!("expected {EXPECTED}; got `zstd()`"));
}
