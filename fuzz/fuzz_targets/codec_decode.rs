//! A body from a peer, for every codec: an error or a tensor, never a panic.
//!
//! The input is: codec's number, which of its examples (and in the highest bit, whether four dimensions are channels-last),
//! number type, rank, bytes of room too many, one byte per dimension, body.
#![no_main]

use distgpipe_core::codec::{parse, CodecId, Context, TensorView, ALL};
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
    // Small ones are the rule; the upper half stands for sizes that overflow when multiplied.
    let dims: Vec<usize> = dims.iter().map(|&dim| if dim < 128 { dim.into() } else { 1 << (dim % 64) }).collect();
    let member = ALL.iter().find(|member| member.id == id).expect("every number is a member's");
    let text = member.examples[usize::from(example & 0x7f) % member.examples.len()];
    let layout = if example & 0x80 != 0 && dims.len() == 4 { Layout::ChannelsLast } else { Layout::Contiguous };
    let mut codec = parse(text).expect("the examples are valid");

    // The body as a tensor: taken or refused, and what is taken has the size that was foretold.
    let mut encoded = b"before".to_vec();
    let view = TensorView { dtype, dims: &dims, layout, bytes: body };
    let fits = |length: usize, size: usize, varies: bool| length == size || varies && length < size;
    match codec.encode(view, &Context::default(), &mut encoded) {
        Ok(()) => {
            let size = codec.encoded_bytes(dtype, &dims);
            assert!(fits(encoded.len() - 6, size, codec.size_varies()), "{text}");
        }
        Err(_) => assert_eq!(encoded, b"before", "{text}"),
    }

    let Ok(shape) = Shape::new(&dims) else {
        return;
    };
    let meta = TensorMeta { dtype, layout, shape, codec: id };
    // What the header's limits would have refused by now.
    if meta.decoded_bytes() > 1 << 20 {
        return;
    }
    let mut out = vec![0; meta.decoded_bytes() as usize];
    // Bytes that are no truth values are for the receiver of a `raw` body to find; the sender's memory has none.
    if encoded.len() > 6 && dtype != DType::Bool {
        assert_eq!(codec.decode(&meta, &encoded[6..], &mut out), Ok(()), "{text} takes what it made");
    }
    out.resize(out.len() + usize::from(room), 0);
    if codec.decode(&meta, body, &mut out).is_ok() {
        assert_eq!(room, 0);
        assert!(fits(body.len(), codec.encoded_bytes(dtype, &dims), codec.size_varies()), "{text}");
        if !member.lossless && ![CodecId::F16, CodecId::BF16].contains(&id) {
            let mut values = out.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().expect("four")));
            assert!(values.all(f32::is_finite), "{text}");
        }
    }
});
