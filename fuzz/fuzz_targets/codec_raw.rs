//! Bodies that do not match their header.
//!
//! The input is: element type, rank, surplus bytes of the output buffer, one byte per dimension, body.
#![no_main]

use distgpipe_core::codec::{parse, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[dtype, rank, room], rest)) = data.split_first_chunk() else {
        return;
    };
    let Some(dtype) = DType::from_number(dtype) else {
        return;
    };
    let Some((dims, body)) = rest.split_at_checked(usize::from(rank)) else {
        return;
    };
    // Most dimensions are small; the upper half stands for sizes whose product overflows.
    let dims: Vec<usize> = dims.iter().map(|&dim| if dim < 128 { dim.into() } else { 1 << (dim % 64) }).collect();
    let mut codec = parse("raw").expect("it exists");

    let view = TensorView { dtype, dims: &dims, layout: Layout::Contiguous, bytes: body };
    let mut encoded = Vec::new();
    let viewed = codec.encode(view, &CodecContext::default(), &mut encoded).is_ok();

    let Ok(shape) = Shape::new(&dims) else {
        return;
    };
    let meta = TensorMeta { dtype, layout: Layout::Contiguous, shape, codec: codec.id() };
    // The header's limits would have rejected these.
    if meta.decoded_bytes() > 1 << 20 {
        return;
    }
    let mut out = vec![0; meta.decoded_bytes() as usize];
    out.resize(out.len() + usize::from(room), 0);
    let decoded = codec.decode(&meta, body, &mut out).is_ok();
    if decoded {
        assert!(viewed && room == 0);
        assert_eq!(encoded.len(), codec.encoded_bytes(dtype, &dims));
        let mut again = vec![0; encoded.len()];
        assert_eq!(codec.decode(&meta, &encoded, &mut again), Ok(()));
        assert_eq!(again, body, "raw gives every bit back");
    }
});
