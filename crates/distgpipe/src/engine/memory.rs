//! CPU memory of this process: malloc settings, and counting what tensors hold.
//!
//! Two things here affect the whole process and not only a pipeline. [`start`] installs a counting allocator in front
//! of libtorch's CPU allocator; every pipeline does so. [`tune_allocator`] changes glibc's malloc; only the binary
//! decides on that, and counting does not depend on it.

use super::ffi;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Once;

static TUNED: AtomicBool = AtomicBool::new(false);

/// Installs the counting allocator, by which workers report their peak memory. Building a pipeline, serving as a worker
/// and profiling call it; calling it again has no effect.
///
/// It affects every CPU tensor that this process creates afterwards: the tensor is allocated by libtorch's own
/// allocator with 64 more bytes, which hold its size and the meter that counts it. Tensors that exist already keep
/// their deallocator. There is no way to remove it.
pub fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(ffi::meter_install);
}

/// Tunes malloc for training: freed memory stays in this process instead of going back to the kernel, so that the
/// activations of the next step need no new pages. On the CPU this makes steps with large activations faster. The
/// price is that the process keeps its peak memory until it ends.
///
/// This is a choice of the binary, because it affects every allocation of the process. Call it first in `main`, before
/// other threads exist; the library never calls it. It makes these `mallopt` settings, and does nothing on systems
/// without glibc:
///
/// | setting | value | reason |
/// | --- | --- | --- |
/// | `M_ARENA_MAX` | 1 | heaps of the other arenas are limited to 64 MiB, so larger tensors would be mapped and unmapped at each use |
/// | `M_MMAP_MAX` | 0 | a block from `mmap` returns to the kernel when it is freed |
/// | `M_TRIM_THRESHOLD` | the largest | `free` never shrinks the heap |
/// | `M_TOP_PAD` | 64 MiB | the heap grows in few large steps |
pub fn tune_allocator() {
    ffi::tune_allocator();
    TUNED.store(true, Ordering::Relaxed);
}

/// Gives free memory back to the kernel, after work whose allocations were unlike those that follow. Without
/// [`tune_allocator`], `free` does so itself and this does nothing.
pub fn release_memory() {
    if TUNED.load(Ordering::Relaxed) {
        ffi::release_memory();
    }
}

/// Sets the number of libtorch threads of the calling thread, and the meter that counts its CPU tensors. Meter 0 counts
/// the tensors of all threads that were never attached.
pub fn attach_thread(threads: usize, meter: usize) {
    // At its first parallel operation, a thread takes over the number that any thread of the process set last. Asking for
    // the number makes it do so now, before its own is set.
    tch::get_num_threads();
    tch::set_num_threads(i32::try_from(threads).unwrap_or(1).max(1));
    ffi::meter_attach(meter);
}

/// The peak memory of tensors in bytes. On the CPU, that of this meter since the last call. On a GPU, that of the whole
/// device since the process started, because its allocator does not distinguish workers.
pub fn peak_bytes(device: tch::Device, meter: usize) -> u64 {
    match device {
        tch::Device::Cuda(index) => ffi::cuda_peak(index, false),
        _ => ffi::meter_take_peak(meter),
    }
}

/// The most bytes that libtorch's allocator has reserved on a GPU since the process started: tensors and the gaps
/// between them. `None` on the CPU.
pub fn reserved_bytes(device: tch::Device) -> Option<u64> {
    match device {
        tch::Device::Cuda(index) => Some(ffi::cuda_peak(index, true)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    /// No other test or worker attaches a thread to it.
    const METER: usize = 200;

    #[test]
    fn a_thread_keeps_its_number_of_threads_whatever_others_set() {
        let (attached, others_attached) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        let threads = std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                attach_thread(3, METER);
                attached.wait();
                others_attached.wait();
                tch::get_num_threads()
            });
            attached.wait();
            scope.spawn(|| attach_thread(1, METER)).join().unwrap();
            others_attached.wait();
            worker.join().unwrap()
        });
        assert_eq!(threads, 3);
    }

    #[test]
    fn peak_memory_is_counted_without_tuning_malloc() {
        start();
        let peak = std::thread::spawn(|| {
            attach_thread(1, METER);
            drop(Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu)));
            let kept = Tensor::zeros([1 << 10], (Kind::Float, Device::Cpu));
            let first = peak_bytes(Device::Cpu, METER);
            let second = peak_bytes(Device::Cpu, METER);
            drop(kept);
            (first, second)
        });
        assert_eq!(peak.join().unwrap(), (4 << 20, 4 << 10), "the peak, then what is still held");
        assert!(!TUNED.load(Ordering::Relaxed), "the library does not tune malloc by itself");
    }
}
