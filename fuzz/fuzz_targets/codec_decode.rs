//! A body from a peer, for every codec: an error or a tensor, never a panic.
//!
//! The input is: the codec's number, the index of its example (and in the highest bit, whether four dimensions are
//! channels-last), element type, rank, surplus bytes of the output buffer, one byte per dimension, body.
#![no_main]

use distgpipe_core::codec::half::{f32_from_bf16, f32_from_f16};
use distgpipe_core::codec::{parse, CodecContext, CodecId, TensorView, ALL};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[number, example, dtype, rank, room], rest)) = data.split_first_chunk() else {
        return;
    };
    let (Some(id), Some(dtype)) = (CodecId::from_number(number), DType::from_number(dtype)) else {
        return;
    };
    let Some((dims, body)) = rest.split_at_checked(usize::from(rank)) else {
        return;
    };
    // Most dimensions are small; the upper half stands for sizes whose product overflows.
    let dims: Vec<usize> = dims.iter().map(|&dim| if dim < 128 { dim.into() } else { 1 << (dim % 64) }).collect();
    let member = ALL.iter().find(|member| member.id == id).expect("every number is a member's");
    let text = member.examples[usize::from(example & 0x7f) % member.examples.len()];
    let layout = if example & 0x80 != 0 && dims.len() == 4 { Layout::ChannelsLast } else { Layout::Contiguous };
    let (mut encoder, mut decoder) = (parse(text).expect("the examples are valid"), parse(text).expect("as above"));

    let meta = Shape::new(&dims).map(|shape| TensorMeta { dtype, layout, shape, codec: id });
    // The header's limits would have rejected these.
    let mut room_for = meta
        .ok()
        .filter(|meta| meta.decoded_bytes() <= 1 << 20)
        .map(|meta| (meta, vec![0; meta.decoded_bytes() as usize]));

    // Encodes the body as a tensor, twice, because a codec may have state. It may be refused; otherwise its encoding
    // has the predicted size and can be decoded.
    let samples: Vec<u64> = (0..dims.first().map_or(0, |&rows| rows.min(128)) as u64).collect();
    let context = CodecContext { samples: &samples, ..CodecContext::default() };
    let view = TensorView { dtype, dims: &dims, layout, bytes: body };
    let fits = |length: usize, size: usize, varies: bool| length == size || varies && length < size;
    for _ in 0..2 {
        let mut encoded = b"before".to_vec();
        if encoder.encode(view, &context, &mut encoded).is_err() {
            assert_eq!(encoded, b"before", "{text}");
            break;
        }
        let size = encoder.encoded_bytes(dtype, &dims);
        assert!(fits(encoded.len() - 6, size, encoder.size_varies()), "{text}");
        // The receiver of a `raw` body rejects bytes that are not 0 or 1; a sender's `Bool` tensor never has them.
        if let Some((meta, out)) = room_for.as_mut().filter(|_| dtype != DType::Bool) {
            assert_eq!(decoder.decode(meta, &encoded[6..], out), Ok(()), "{text} takes what it made");
        }
    }

    let Some((meta, mut out)) = room_for else {
        return;
    };
    out.resize(out.len() + usize::from(room), 0);
    if decoder.decode(&meta, body, &mut out).is_ok() {
        assert_eq!(room, 0);
        assert!(fits(body.len(), decoder.encoded_bytes(dtype, &dims), decoder.size_varies()), "{text}");
        // Only floats can be infinite; `zstd` carries other types too.
        let is_float = [DType::F32, DType::F16, DType::BF16].contains(&dtype);
        if is_float && !decoder.is_lossless() && !text.contains("f16") {
            let value = |bytes: &[u8]| match (dtype, bytes) {
                (DType::F16, &[a, b]) => f32_from_f16(u16::from_ne_bytes([a, b])),
                (DType::BF16, &[a, b]) => f32_from_bf16(u16::from_ne_bytes([a, b])),
                (_, bytes) => f32::from_ne_bytes(bytes.try_into().expect("four")),
            };
            assert!(out.chunks_exact(dtype.size_bytes()).map(value).all(f32::is_finite), "{text}");
        }
    }
});
