//! Channels-last tensors: `tile` gives the same body for both memory layouts, and decodes into both.

use distgpipe_core::codec::{self, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};

/// The values of a tensor in logical order: smooth over pixels, and very different from channel to channel.
fn logical(dims: [usize; 4]) -> Vec<f32> {
    let [samples, channels, height, width] = dims;
    let pixels = height * width;
    (0..samples * channels * pixels)
        .map(|at| {
            let (channel, pixel) = (at / pixels % channels, at % pixels);
            (channel as f32 - 3.0) * 10.0 + (pixel as f32 * 0.37).sin() + (at / pixels) as f32 * 0.01
        })
        .collect()
}

/// The same values in the order N H W C.
fn channels_last(values: &[f32], dims: [usize; 4]) -> Vec<f32> {
    let [samples, channels, height, width] = dims;
    let pixels = height * width;
    let mut memory = vec![0.0; values.len()];
    for (at, &value) in values.iter().enumerate() {
        let (sample, channel, pixel) = (at / pixels / channels, at / pixels % channels, at % pixels);
        memory[(sample * pixels + pixel) * channels + channel] = value;
    }
    assert_eq!(values.len(), samples * channels * pixels);
    memory
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

#[test]
fn tiles_do_not_see_the_order_in_memory() {
    let shapes = [
        [1, 1, 1, 1],
        [2, 3, 1, 1],
        [3, 1, 5, 7],
        [2, 3, 5, 7],
        [1, 16, 8, 8],
        [2, 17, 16, 16],
        [2, 33, 32, 64],
        [1, 40, 7, 7],
        [3, 100, 7, 7],
        [2, 35, 14, 14],
        [2, 5, 112, 112],
        [1, 20, 65, 33],
        [0, 3, 5, 7],
        [2, 0, 5, 7],
    ];
    for text in ["tile:4", "tile:3~", "tile:2/16", "tile:1/100", "tile:12/7", "tile:16/4096", "tile:5/1", "tile:4/128"]
    {
        for dims in shapes {
            let values = logical(dims);
            let [contiguous, last] = [bytes(&values), bytes(&channels_last(&values, dims))];
            let mut codec = codec::parse(text).unwrap();
            let mut encode = |layout, bytes: &[u8]| {
                let mut body = Vec::new();
                let view = TensorView { dtype: DType::F32, dims: &dims, layout, bytes };
                codec.encode(view, &CodecContext { seed: 3, ..CodecContext::default() }, &mut body).unwrap();
                body
            };
            let body = encode(Layout::Contiguous, &contiguous);
            assert_eq!(encode(Layout::ChannelsLast, &last), body, "{text} {dims:?}");

            let mut decode = |layout| {
                let meta =
                    TensorMeta { dtype: DType::F32, layout, shape: Shape::new(&dims).unwrap(), codec: codec.id() };
                let mut out = vec![0; contiguous.len()];
                codec.decode(&meta, &body, &mut out).unwrap();
                out.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect::<Vec<_>>()
            };
            let decoded = decode(Layout::Contiguous);
            assert_eq!(decode(Layout::ChannelsLast), channels_last(&decoded, dims), "{text} {dims:?}");
        }
    }
}

/// A fuzzer's find: the product of two dimensions overflowed, although a tensor with a dimension of 0 has no elements.
#[test]
fn a_tensor_without_elements_may_have_huge_dimensions() {
    let dims = [3, 0, 1 << 61, 1 << 63];
    let mut codec = codec::parse("tile:4").unwrap();
    let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::ChannelsLast, bytes: &[] };
    let mut body = Vec::new();
    codec.encode(view, &CodecContext::default(), &mut body).unwrap();
    if let Ok(shape) = Shape::new(&dims) {
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::ChannelsLast, shape, codec: codec.id() };
        codec.decode(&meta, &body, &mut []).unwrap();
    }
}
