//! CPU memory of this process: malloc settings, and counting what tensors hold.
//!
//! Two things here affect the whole process and not only a pipeline. [`start`] installs a counting allocator in front
//! of libtorch's CPU allocator; every pipeline does so. [`tune_allocator`] changes glibc's malloc; only the binary
//! decides on that, and counting does not depend on it.

use super::ffi;
use super::resource_limits::memory_limit_bytes;
use crate::failure::Fault;
use crate::sync::lock;
use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once};

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

/// The number of meters, as in the shim.
const METERS: usize = 1024;

/// The meters in use, and the number after the one that was taken last. Meter 0 is shared and always in use.
static TAKEN: Mutex<([bool; METERS], usize)> = Mutex::new(([false; METERS], 1));

/// A meter of CPU memory: it counts the tensors that threads [attached](attach_thread) to it allocate. Each worker of a
/// pipeline has its own, so that several pipelines of one process do not count into each other's. Clones are the same
/// meter, which becomes free when the last one is dropped.
#[derive(Clone, Debug)]
pub struct Meter(Arc<MeterNumber>);

#[derive(Debug)]
struct MeterNumber(usize);

impl Meter {
    /// A meter that nobody else uses; the shared meter 0 if more than a thousand are in use.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let mut taken = lock(&TAKEN);
        let (used, next) = &mut *taken;
        // Tensors may outlive the worker that made them. The meter that has been free for longest has the fewest.
        let free = (0..METERS - 1).map(|i| 1 + (*next - 1 + i) % (METERS - 1)).find(|&number| !used[number]);
        if let Some(number) = free {
            used[number] = true;
            *next = 1 + number % (METERS - 1);
        }
        Meter(Arc::new(MeterNumber(free.unwrap_or(0))))
    }

    /// The meter's number.
    pub fn number(&self) -> usize {
        self.0 .0
    }
}

impl Drop for MeterNumber {
    fn drop(&mut self) {
        lock(&TAKEN).0[self.0] = false;
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

/// The memory in bytes that this process can still get, swap included; `None` if the system does not say.
///
/// The kernel promises more memory than it has, and kills the process that uses it. So large allocations are compared
/// with this figure first.
pub fn available_bytes() -> Option<u64> {
    [available_on_host(), left_of_limit()].into_iter().flatten().min()
}

fn available_on_host() -> Option<u64> {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let kib = |name: &str| field(&text, name);
        Some(kib("MemAvailable:")?.saturating_add(kib("SwapFree:").unwrap_or(0)).saturating_mul(1024))
    });
    let group = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok();
    let number = |name: &str| group(name)?.trim().parse::<u64>().ok();
    // A container has its own limit. Cached files count as used, but make room.
    let container = number("max").map(|max| {
        let cached = group("stat").and_then(|text| field(&text, "inactive_file")).unwrap_or(0);
        max.saturating_sub(number("current").unwrap_or(0).saturating_sub(cached))
    });
    [host, container].into_iter().flatten().min()
}

/// What is left of the limit that a process has which runs a stranger's job. Memory that was freed counts as used, because malloc
/// keeps it.
fn left_of_limit() -> Option<u64> {
    let limit = Some(memory_limit_bytes()).filter(|&limit| limit < u64::MAX)?;
    let status = fs::read_to_string("/proc/self/status").ok()?;
    Some(limit.saturating_sub(field(&status, "VmData:")?.saturating_mul(1024)))
}

/// Whether malloc has so much memory in one piece, or gets it within the limit of this process. Does not touch it.
fn can_allocate(bytes: u128) -> bool {
    let bytes = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_add(ALIGNMENT_BYTES_MAX));
    bytes.is_some_and(|bytes| {
        let mut memory: Vec<u8> = Vec::new();
        // Otherwise the compiler would leave the allocation out.
        memory.try_reserve_exact(bytes).is_ok() && !black_box(memory.as_ptr()).is_null()
    })
}

/// More than an aligned allocation takes besides its size.
const ALIGNMENT_BYTES_MAX: usize = 4096;

/// The number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
}

/// Checks that this process can get this much memory, before something of that size is allocated. `what` takes it, and
/// `remedy` says how to need less.
pub fn require_memory(what: &str, needs_bytes: u128, remedy: &str) -> Result<(), Fault> {
    let (host, limit) = (available_on_host(), left_of_limit());
    let exceeds = |available: Option<u64>| available.is_some_and(|available| needs_bytes > u128::from(available));
    match host.into_iter().chain(limit).min() {
        Some(available_bytes) if exceeds(host) || exceeds(limit) && !can_allocate(needs_bytes) => Err(Fault::Memory {
            what: what.to_owned(),
            needs_bytes: u64::try_from(needs_bytes).unwrap_or(u64::MAX),
            available_bytes,
            remedy: remedy.to_owned(),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{limit_resources, ResourceLimits};
    use tch::{Device, Kind, Tensor};

    #[test]
    fn more_memory_than_there_is_is_refused_with_both_figures() {
        let available = available_bytes().expect("Linux says how much memory there is");
        assert!(available > 1 << 20, "{available}");
        require_memory("a page", 4096, "").unwrap();
        let said = require_memory("the order of the rows", 16_000_000_000_000, "use fewer rows").unwrap_err();
        let said = said.to_string();
        assert!(said.starts_with("the order of the rows takes 16.0 TB of memory, and this host has "), "{said}");
        assert!(said.ends_with(" left: use fewer rows"), "{said}");
        assert!(require_memory("everything", u128::MAX, "use less").is_err());
    }

    /// A job that had once come close to its limit was refused every large tensor afterwards, because memory that it had freed
    /// counted as used. The limit is that of a process, so the test runs in another one.
    #[test]
    fn memory_that_was_freed_is_available_within_the_limit_of_the_process() {
        const NAME: &str = "engine::memory::tests::memory_that_was_freed_is_available_within_the_limit_of_the_process";
        const IN_CHILD: &str = "DISTGPIPE_TEST_OF_MEMORY_LIMIT";
        if std::env::var_os(IN_CHILD).is_none() {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            // The test's thread is there before malloc is tuned.
            let child = child.args(["--exact", NAME]).env(IN_CHILD, "1").env("MALLOC_ARENA_MAX", "1");
            let output = child.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        tune_allocator();
        let tensor = |mib: i64| Tensor::f_ones([mib << 20], (Kind::Uint8, Device::Cpu));
        let first = tensor(256).unwrap();
        drop(first);
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let memory_bytes = Some(1024 * field(&status, "VmData:").unwrap() + (128 << 20));
        limit_resources(&ResourceLimits { memory_bytes, files: 100 }).unwrap();
        assert!(available_bytes() < Some(130 << 20), "freed memory counts as used");
        assert!(require_memory("a tensor", 640 << 20, "").is_err());
        require_memory("a tensor", 255 << 20, "").unwrap();
        drop(tensor(255).unwrap());
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal: 9 kB\nMemAvailable:   12 kB\nSwapFree: 3 kB";
        assert_eq!(
            (field(text, "MemAvailable:"), field(text, "SwapFree:"), field(text, "Mem:")),
            (Some(12), Some(3), None)
        );
    }

    #[test]
    fn no_two_meters_are_the_same_and_a_dropped_one_is_free_again() {
        let meters: Vec<Meter> = (0..50).map(|_| Meter::new()).collect();
        let numbers: std::collections::BTreeSet<usize> = meters.iter().map(Meter::number).collect();
        assert!(numbers.len() == 50 && !numbers.contains(&0));
        let copy = meters[7].clone();
        assert_eq!(copy.number(), meters[7].number());
        drop(meters);
        assert!(TAKEN.lock().unwrap().0[copy.number()], "the copy is still in use");
        // More than there are, one after the other.
        assert!((0..2 * METERS).all(|_| ![0, copy.number()].contains(&Meter::new().number())));
    }

    #[test]
    fn a_thread_keeps_its_number_of_threads_whatever_others_set() {
        let (attached, others_attached) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        let threads = std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                attach_thread(3, 0);
                attached.wait();
                others_attached.wait();
                tch::get_num_threads()
            });
            attached.wait();
            scope.spawn(|| attach_thread(1, 0)).join().unwrap();
            others_attached.wait();
            worker.join().unwrap()
        });
        assert_eq!(threads, 3);
    }

    #[test]
    fn peak_memory_is_counted_without_tuning_malloc() {
        start();
        let meter = Meter::new();
        let number = meter.number();
        let peak = std::thread::spawn(move || {
            attach_thread(1, number);
            drop(Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu)));
            let kept = Tensor::zeros([1 << 10], (Kind::Float, Device::Cpu));
            let first = peak_bytes(Device::Cpu, number);
            let second = peak_bytes(Device::Cpu, number);
            drop(kept);
            (first, second)
        });
        assert_eq!(peak.join().unwrap(), (4 << 20, 4 << 10), "the peak, then what is still held");
        assert!(!TUNED.load(Ordering::Relaxed), "the library does not tune malloc by itself");
    }
}
