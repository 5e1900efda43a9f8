//! Codecs allocate nothing from the second tensor of a size on.

use distgpipe_core::codec::{self, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;

/// The system allocator, with a count of this thread's allocations.
struct Counting;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that is ending may allocate after its counter is destroyed.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call is forwarded to the system allocator with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract of the allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Memory) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Gaussian-like values after a ReLU.
fn memory(elements: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..elements).flat_map(|_| (uniform() + uniform() + uniform() - 1.5).max(0.0).to_ne_bytes()).collect()
}

/// The upper bytes of every float; the upper two are a bfloat16.
fn upper_bytes(wide: &[u8], size: usize) -> Vec<u8> {
    let value = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().unwrap());
    match size {
        4 => wide.to_vec(),
        _ => wide.chunks_exact(4).flat_map(|bytes| ((value(bytes) >> 16) as u16).to_ne_bytes()).collect(),
    }
}

#[test]
fn the_second_tensor_allocates_nothing() {
    let dims = [2, 20, 64, 63];
    // Two tensors are equal, because the buffers of the order statistics vary a little from tensor to tensor.
    let tensors = [memory(dims.iter().product(), 1), memory(dims.iter().product(), 1)];
    for text in [
        "raw",
        "f16",
        "bf16",
        "uniform:8",
        "sort:16",
        "sort:8",
        "sort:3+9",
        "fast:8",
        "tile:4",
        "tile:3~",
        "tile:2/100",
        "zstd(raw)",
        "zstd(bf16)",
        "zstd(tile:4)",
        "zstd(tile:3)",
    ] {
        let types = [(DType::F32, 4), (DType::BF16, 2)];
        let layouts = [Layout::Contiguous, Layout::ChannelsLast];
        for ((dtype, size), layout) in types.into_iter().flat_map(|of| layouts.map(|layout| (of, layout))) {
            let (mut encoder, mut decoder) = (codec::parse(text).unwrap(), codec::parse(text).unwrap());
            let mut body = Vec::new();
            let tensors = tensors.each_ref().map(|wide| upper_bytes(wide, size));
            let mut out = vec![0; tensors[0].len()];
            let mut calls = [0; 2];
            for (tensor, calls) in tensors.iter().zip(&mut calls) {
                let before = CALLS.get();
                body.clear();
                let view = TensorView { dtype, dims: &dims, layout, bytes: tensor };
                encoder.encode(view, &CodecContext::default(), &mut body).unwrap();
                let shape = Shape::new(&dims).unwrap();
                let meta = TensorMeta { dtype, layout, shape, codec: encoder.id() };
                decoder.decode(&meta, &body, &mut out).unwrap();
                *calls = CALLS.get() - before;
            }
            assert!(calls[0] > 0, "{text}: the body was allocated, and counted");
            assert_eq!(calls[1], 0, "{text} {dtype} {layout:?} allocated again");
        }
    }
}
