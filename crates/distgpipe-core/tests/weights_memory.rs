//! The memory for reading untrusted files is bounded: a pickle of which every byte makes a value, and archives of torch.export
//! with changed bytes. PROPTEST_CASES=100000 changes more of them.

use distgpipe_core::pt2::{archive, Boundaries, Pt2Error};
use distgpipe_core::weights::pickle::tensors;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::Range;

/// The bound that [`distgpipe_core::weights`] documents.
const BYTES_MAX: usize = 1 << 30;

/// The system allocator, with a count of the bytes that this thread has allocated.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

fn count(more: usize, less: usize) {
    // A thread that is ending may allocate after its counters are destroyed, and may free what another thread
    // allocated.
    let _ = HELD.try_with(|held| {
        held.set((held.get() + more).saturating_sub(less));
        MOST.try_with(|most| most.set(most.get().max(held.get())))
    });
}

// SAFETY: every call is forwarded to the system allocator with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller upholds the contract of the allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both allocations exist while one is copied to the other.
        count(size, 0);
        count(0, layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The peak memory of reading a pickle, and the result.
fn most(pickle: &[u8]) -> (usize, String) {
    let (bytes, read) = peak(|| tensors(pickle));
    (bytes, read.map(|found| format!("{} tensors", found.len())).unwrap_or_else(|error| error.to_string()))
}

/// The peak memory of a computation, and its result.
fn peak<T>(compute: impl FnOnce() -> T) -> (usize, T) {
    let before = HELD.get();
    MOST.set(before);
    let result = compute();
    (MOST.get() - before, result)
}

/// Regression: one byte can make a tuple in a tuple, which takes 60 bytes; 64 MiB of them once took 4 GB.
#[test]
fn a_pickle_whose_every_byte_makes_a_value_is_refused_before_memory_is_full() {
    let ways: [(&str, &[u8], &[u8]); 6] = [
        ("nested tuples", b"N", &[0x85]),
        ("values on the stack", b"", b"N"),
        ("dictionaries", b"", b"}"),
        ("items of one dictionary", b"}", b"NNs"),
        ("values that are kept", b"N", &[0x94]),
        ("values behind a mark", b"}(", b"N"),
    ];
    for (way, first, again) in ways {
        let (bytes, said) = most(&[first, &again.repeat((16 << 20) / again.len())].concat());
        println!("{way}: {bytes} bytes");
        assert!(said.contains("at most 4194304 values") && said.contains("split the model"), "{way}: {said}");
        assert!(bytes < BYTES_MAX, "{way}: {bytes} bytes");
    }
}

/// Each name costs a few bytes of the pickle and a whole entry of the result.
#[test]
fn one_tensor_under_many_names_takes_no_more_than_is_promised() {
    let mut pickle = b"\x80\x02}ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n".to_vec();
    pickle.extend(b"X\x01\0\0\x000X\x03\0\0\0cpuK\x01tQK\0");
    // Eight dimensions and strides of 1, and the other arguments of a tensor.
    let ones: &[u8] = b"(K\x01K\x01K\x01K\x01K\x01K\x01K\x01K\x01t";
    pickle.extend([ones, ones, b"\x89}tRq\x00"].concat());
    // The tensor is stored under its first name, and then under others.
    pickle.splice(3..3, *b"X\x01\0\0\0t");
    pickle.push(b's');
    let names = (1u32 << 20) + (1 << 19);
    for name in 0..names {
        let name = format!("{name:07x}");
        pickle.extend([b"X\x07\0\0\0", name.as_bytes(), b"h\0s"].concat());
    }
    pickle.push(b'.');
    let (bytes, said) = most(&pickle);
    println!("{bytes} bytes");
    assert_eq!(said, format!("{} tensors", names + 1));
    assert!(bytes < BYTES_MAX, "{bytes} bytes");
}

const ARCHIVE: &[u8] = include_bytes!("pt2/small.pt2");
/// Forty times the archive. Reading it takes three times its size if nobody has changed it.
const ARCHIVE_BYTES_MAX: usize = 1 << 20;

/// Reads an archive and divides its graph into layers.
fn read_archive(file: &[u8]) -> bool {
    let mut read = |range: Range<u64>| Ok::<_, Pt2Error>(file[range.start as usize..range.end as usize].to_vec());
    let weights = archive::weights(file.len() as u64, &mut read);
    let graph = archive::graph(file.len() as u64, &mut read);
    let layers = graph.and_then(|graph| graph.layers(Boundaries::All));
    weights.is_ok() && layers.is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(1000), ..ProptestConfig::default() })]

    /// Digits turn into others, because they are sizes and offsets; other bytes turn into anything.
    #[test]
    fn mutated_archives_take_no_more_memory_than_is_promised(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), any::<u8>()), 1..8),
    ) {
        let digits: Vec<usize> = (0..ARCHIVE.len()).filter(|&at| ARCHIVE[at].is_ascii_digit()).collect();
        let mut file = ARCHIVE.to_vec();
        for (index, digit, byte) in changes {
            match digit {
                true => file[digits[index.index(digits.len())]] = b'0' + byte % 10,
                false => file[index.index(ARCHIVE.len())] = byte,
            }
        }
        let (bytes, _) = peak(|| read_archive(&file));
        prop_assert!(bytes < ARCHIVE_BYTES_MAX, "{} bytes", bytes);
    }
}

#[test]
fn an_archive_that_nobody_changed_is_read_within_the_same_limit() {
    let (bytes, read) = peak(|| read_archive(ARCHIVE));
    println!("{bytes} bytes");
    assert!(read && bytes < ARCHIVE_BYTES_MAX, "{bytes} bytes");
}
