//! Tensors of a quarter of a gigabyte: sizes of bodies, and the error of some values.

use distgpipe_core::codec::{self, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};

const ELEMENTS: usize = 1 << 26;

/// Values with a triangular distribution from −1 to 1, computed from the index.
fn value(at: usize) -> f32 {
    let mixed = (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 48) as f32 + (mixed >> 32 & 0xffff) as f32) / 65536.0 - 1.0
}

#[test]
fn two_to_the_26_values() {
    let mut bytes = vec![0; 4 * ELEMENTS];
    bytes.chunks_exact_mut(4).enumerate().for_each(|(at, to)| to.copy_from_slice(&value(at).to_ne_bytes()));
    let mut out = vec![0; bytes.len()];
    let mut body = Vec::new();
    // The largest error: relative for halves, half the widest step for grids, a whole step for the ends of a sample.
    for (text, body_bytes, most) in [
        ("raw", 4 * ELEMENTS, 0.0),
        ("f16", 2 * ELEMENTS, 1.0 / 2048.0),
        ("bf16", 2 * ELEMENTS, 1.0 / 256.0),
        ("uniform:8", 8 + ELEMENTS, 1.001 / 255.0),
        ("sort:8", 32 + ELEMENTS, 0.5 / 63.0),
        ("fast:8", 32 + ELEMENTS, 0.06),
        ("tile:4", 4 + ELEMENTS / 16 + ELEMENTS / 2, 1.01 / 15.0),
    ] {
        let mut codec = codec::parse(text).unwrap();
        body.clear();
        let view = TensorView { dtype: DType::F32, dims: &[ELEMENTS], layout: Layout::Contiguous, bytes: &bytes };
        codec.encode(view, &CodecContext::default(), &mut body).unwrap();
        assert_eq!(body.len(), body_bytes, "{text}");
        let shape = Shape::new(&[ELEMENTS]).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: codec.id() };
        codec.decode(&meta, &body, &mut out).unwrap();
        for at in (0..ELEMENTS).step_by(4099).chain([ELEMENTS - 1]) {
            let decoded = f32::from_ne_bytes(out[4 * at..4 * at + 4].try_into().unwrap());
            let error = (decoded - value(at)).abs();
            assert!(error <= most, "{text}: {} at {at} became {decoded}", value(at));
        }
    }
}
