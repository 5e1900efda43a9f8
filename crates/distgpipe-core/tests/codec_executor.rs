//! Executors of any size give the same bytes as the calling thread alone, and only large tensors are split over
//! threads.

use distgpipe_core::codec::{self, Codec, CodecContext, Executor, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// An executor that starts its threads for every call.
struct Threads {
    size: usize,
    calls: AtomicUsize,
}

impl Executor for Threads {
    fn size(&self) -> usize {
        self.size
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            (0..tasks).for_each(|number| {
                scope.spawn(move || task(number));
            });
        });
    }
}

/// Gaussian-like values after a ReLU.
fn memory(elements: usize) -> Vec<u8> {
    let mut state = 7u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..elements).flat_map(|_| (uniform() + uniform() + uniform() - 1.5).max(0.0).to_ne_bytes()).collect()
}

fn round_trip(codec: &mut dyn Codec, layout: Layout, dims: &[usize], bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut body = b"before".to_vec();
    let view = TensorView { dtype: DType::F32, dims, layout, bytes };
    codec.encode(view, &CodecContext { seed: 11, ..CodecContext::default() }, &mut body).unwrap();
    let meta = TensorMeta { dtype: DType::F32, layout, shape: Shape::new(dims).unwrap(), codec: codec.id() };
    let mut out = vec![0; bytes.len()];
    codec.decode(&meta, &body[6..], &mut out).unwrap();
    (body, out)
}

#[test]
fn the_bytes_do_not_depend_on_the_threads() {
    let texts = [
        "f16",
        "bf16",
        "uniform:5",
        "sort:16",
        "sort:8",
        "sort:4",
        "fast:8",
        "tile:4",
        "tile:3~",
        "tile:2/100",
        "tile:4/4095",
        "zstd(raw)",
        "zstd(bf16)",
        "zstd(tile:4)",
        "zstd(tile:3)",
    ];
    for dims in [[3, 35, 51, 53], [4, 16, 64, 65], [1, 20, 120, 120]] {
        let bytes = memory(dims.iter().product());
        for (text, layout) in texts.iter().flat_map(|text| [(text, Layout::Contiguous), (text, Layout::ChannelsLast)]) {
            let alone = round_trip(&mut *codec::parse(text).unwrap(), layout, &dims, &bytes);
            for size in [2, 3, 7, 100] {
                let executor = Arc::new(Threads { size, calls: AtomicUsize::new(0) });
                let mut codec = codec::parse(text).unwrap();
                codec.set_executor(executor.clone());
                assert!(
                    round_trip(&mut *codec, layout, &dims, &bytes) == alone,
                    "{text} {layout:?} {dims:?} by {size}"
                );
                assert!(executor.calls.load(Ordering::Relaxed) >= 2, "{text} {layout:?} {dims:?} by {size} is split");
            }
        }
    }
}

#[test]
fn small_tensors_stay_on_the_calling_thread() {
    let bytes = memory(10_000);
    for text in ["f16", "uniform:5", "sort:16", "fast:8", "tile:4", "zstd(raw)"] {
        let executor = Arc::new(Threads { size: 4, calls: AtomicUsize::new(0) });
        let mut codec = codec::parse(text).unwrap();
        codec.set_executor(executor.clone());
        round_trip(&mut *codec, Layout::Contiguous, &[10_000], &bytes);
        assert_eq!(executor.calls.load(Ordering::Relaxed), 0, "{text}");
    }
}

/// A value that is not finite is found in any piece, with its index.
#[test]
fn several_threads_find_what_is_not_finite() {
    for at in [0, 150_000, 299_999] {
        let mut bytes = memory(300_000);
        bytes[4 * at..4 * at + 4].copy_from_slice(&f32::NAN.to_ne_bytes());
        for text in ["f16", "uniform:5", "sort:16", "fast:8", "tile:4"] {
            let mut codec = codec::parse(text).unwrap();
            codec.set_executor(Arc::new(Threads { size: 3, calls: AtomicUsize::new(0) }));
            let mut out = Vec::new();
            let view = TensorView { dtype: DType::F32, dims: &[300_000], layout: Layout::Contiguous, bytes: &bytes };
            let error = codec.encode(view, &CodecContext::default(), &mut out).unwrap_err();
            assert_eq!(error, codec::CodecError::NotFinite { codec: codec.id(), at }, "{text}");
            assert!(out.is_empty(), "{text}");
        }
    }
}
