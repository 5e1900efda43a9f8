//! Codecs and masks on a GPU: bytes, values and masks are those of the CPU, bit for bit. And how fast the codecs are there.
//!
//! CI has no GPU: without `DISTGPIPE_GPU_TESTS=1` these tests do nothing, and say so. `scripts/gpu-tests.sh` runs them.

mod kernel_values;

use distgpipe::engine::cuda::{self, CudaStream};
use distgpipe::engine::kernels::codecs::{decode, encode, HEAD_BYTES};
use distgpipe::engine::{self, Stream};
use distgpipe_core::codec::{parse, BodyForm, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use kernel_values::{bell, mixed, texts};
use std::time::Instant;
use tch::{Device, Kind, Tensor};

/// The GPU; `None` if the tests are not asked for.
fn gpu() -> Option<Device> {
    if std::env::var("DISTGPIPE_GPU_TESTS").as_deref() != Ok("1") {
        eprintln!("NOT TESTED: this test needs a GPU and DISTGPIPE_GPU_TESTS=1");
        return None;
    }
    Some(engine::Device::Cuda(0).open().unwrap())
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    engine::bytes(&tensor.to_device(Device::Cpu)).unwrap().to_vec()
}

/// The body of the values on the GPU; `None` if they are refused.
fn body_on(device: Device, form: BodyForm, values: &Tensor, seed: u64, length: usize) -> Option<Vec<u8>> {
    let room = bytes(&encode(&values.to_device(device), form, seed, length).unwrap());
    (room[..4] == [0; 4]).then(|| room[HEAD_BYTES..].to_vec())
}

/// Compares body and values of a codec with those of the GPU.
fn compare(device: Device, text: &str, values: &[f32], seed: u64) {
    let (mut encoder, mut decoder) = (parse(text).unwrap(), parse(text).unwrap());
    let form = encoder.form().unwrap().body;
    let memory: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let dims = [values.len()];
    let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &memory };
    let mut body = Vec::new();
    let encoded = encoder.encode(view, &CodecContext { seed, ..CodecContext::default() }, &mut body);
    let length = encoder.encoded_bytes(DType::F32, &dims);
    let on_gpu = body_on(device, form, &Tensor::from_slice(values), seed, length);
    let name = format!("{text} of {} values from {:?}", values.len(), &values[..values.len().min(4)]);
    assert_eq!(on_gpu.is_none(), encoded.is_err(), "{name}: {encoded:?}");
    let Some(on_gpu) = on_gpu else { return };
    let differing = body.iter().zip(&on_gpu).position(|(a, b)| a != b);
    assert_eq!((on_gpu.len(), differing), (body.len(), None), "{name}");

    let shape = Shape::new(&dims).unwrap();
    let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: decoder.id() };
    let mut decoded = vec![0; memory.len()];
    decoder.decode(&meta, &body, &mut decoded).unwrap();
    let mut out = Tensor::empty([values.len() as i64], (Kind::Float, device));
    decode(&Tensor::from_slice(&body).to_device(device), form, &mut out).unwrap();
    let differing = decoded.iter().zip(bytes(&out)).position(|(a, b)| *a != b);
    assert_eq!(differing, None, "{name}, decoded");
}

#[test]
fn bodies_and_values_are_those_of_the_cpu() {
    let Some(device) = gpu() else { return };
    for (number, text) in texts().enumerate() {
        let seed = number as u64;
        for count in [1, 2, 7, 8, 9, 63, 65, 1000, 4097, 100_003, 1 << 20] {
            compare(device, text, &bell(number as u32 * 7919, count), seed);
        }
        // After a ReLU, few values, constants, and zeros of both signs.
        let relu = |count| bell(3, count).into_iter().map(|x: f32| if x < -1.0 { -0.0 } else { x.max(0.0) });
        compare(device, text, &relu(200_000).collect::<Vec<_>>(), seed);
        compare(device, text, &relu(50_000).map(|x| (x * 4.0).round()).collect::<Vec<_>>(), seed);
        compare(device, text, &[2.5; 3000], seed);
        compare(device, text, &[-0.0; 70], seed);
        compare(device, text, &[0.0, -0.0, 0.0].repeat(30), seed);
        // All magnitudes, denormal numbers, the ends of the range.
        let finite = |seed| mixed(seed).map(f32::from_bits).filter(|value| value.is_finite());
        compare(device, text, &finite(1).take(30_000).collect::<Vec<_>>(), seed);
        compare(device, text, &finite(9).map(|x| x % 60000.0).take(30_000).collect::<Vec<_>>(), seed);
        let denormal: Vec<f32> = mixed(5).map(|bits| f32::from_bits(bits & 0x8000_0fff)).take(2000).collect();
        compare(device, text, &denormal, seed);
        compare(device, text, &[f32::MIN, f32::MAX, 1.0, -1.0, 0.0], seed);
        compare(device, text, &[1e30, 1.000_000_1e30, 1.1e30], seed);
        // Midpoints between two codes, where a fused multiply-add rounds to the other one.
        let lo = -1.7f32 * 1.13f32.powi(number as i32);
        for steps in [15.0f32, 63.0, 255.0, 4095.0] {
            let step = 0.013_37f32 * 0.97f32.powi(number as i32);
            let value = |code: f32| (f64::from(lo) + f64::from(code) * f64::from(step)) as f32;
            let mut values: Vec<f32> = (0..4000).map(|at| value((at as f32 * 1.618).floor() % steps + 0.5)).collect();
            (values[0], values[3999]) = (lo, value(steps));
            compare(device, text, &values, seed);
        }
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 31, 9999] {
                let mut values = bell(1, 10_000);
                values[at] = wrong;
                compare(device, text, &values, seed);
            }
        }
    }
}

#[test]
fn masks_are_those_of_the_cpu() {
    let Some(device) = gpu() else { return };
    for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64] {
        for dims in [vec![0], vec![1], vec![3], vec![100_001], vec![4, 6, 9, 11]] {
            for p in [0.0, 0.1, 0.5, 1.0] {
                let stream = Stream::new(7).at(dims.len() as u64);
                let [mut here, mut there] =
                    [Device::Cpu, device].map(|device| Tensor::full(&dims, 7.0, (kind, device)));
                stream.bernoulli(&mut here, p).unwrap();
                stream.bernoulli(&mut there, p).unwrap();
                assert_eq!(bytes(&there), bytes(&here), "{kind:?} {dims:?} {p}");
            }
        }
    }
    // A view that begins at an odd place, and one with gaps.
    let [here, there] = [Device::Cpu, device].map(|device| Tensor::zeros([101, 7], (Kind::Half, device)));
    for base in [&here, &there] {
        Stream::new(1).bernoulli(&mut base.view([-1]).narrow(0, 1, 501), 0.5).unwrap();
        Stream::new(2).bernoulli(&mut base.narrow(0, 80, 20).narrow(1, 2, 3), 0.5).unwrap();
    }
    assert_eq!(bytes(&there), bytes(&here));
}

/// Prints the speed of encoding and decoding on the GPU, in bytes of the tensor.
#[test]
fn speeds() {
    let Some(device) = gpu() else { return };
    cuda::own_stream(0).unwrap();
    let dims = [256, 32, 112, 112];
    let values = Tensor::randn(dims, (Kind::Float, device));
    let relu = values.relu();
    let done = || CudaStream::current(0).unwrap().synchronize().unwrap();
    for (data, tensor) in [("normal", &values), ("ReLU of normal", &relu)] {
        for text in ["f16", "uniform:8", "tile:4", "tile:3~", "sort:4", "sort:8", "sort:16", "fast:8"] {
            let codec = parse(text).unwrap();
            let form = codec.form().unwrap().body;
            let length = codec.encoded_bytes(DType::F32, &dims.map(|dim| dim as usize));
            let mut out = Tensor::empty_like(tensor);
            let mut room = encode(tensor, form, 1, length).unwrap();
            done();
            const TIMES: u32 = 20;
            let start = Instant::now();
            for _ in 0..TIMES {
                room = encode(tensor, form, 1, length).unwrap();
            }
            done();
            let encoded = start.elapsed() / TIMES;
            let body = room.narrow(0, HEAD_BYTES as i64, length as i64);
            let start = Instant::now();
            for _ in 0..TIMES {
                decode(&body, form, &mut out).unwrap();
            }
            done();
            let decoded = start.elapsed() / TIMES;
            let speed = |time: std::time::Duration| 4e-9 * tensor.numel() as f64 / time.as_secs_f64();
            println!(
                "{text:10} of {dims:?}, {data}: encode {:.0} GB/s ({:.3} ms), decode {:.0} GB/s ({:.3} ms)",
                speed(encoded),
                1e3 * encoded.as_secs_f64(),
                speed(decoded),
                1e3 * decoded.as_secs_f64()
            );
        }
    }
}
