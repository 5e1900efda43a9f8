//! CUDA streams, events and graphs: each function here is a safe wrapper of one in `cuda.cpp`.
//!
//! A worker on a GPU has a stream of its own, and so has each thread of its links; where there are more threads than streams, links
//! share some. What one thread hands to another carries an [`Event`]: the receiver's stream waits for it, and the CPU does not.

use super::ffi::outcome;
use crate::failure::Fault;
use crate::sync::lock;
use libc::{c_char, c_int, c_void};
use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use tch::Tensor;
use torch_sys::C_tensor;

extern "C" {
    fn dg_stream_new(device: c_int, id: *mut i64) -> *mut c_char;
    fn dg_stream_current(device: c_int, id: *mut i64) -> *mut c_char;
    fn dg_stream_enter(device: c_int, id: i64) -> *mut c_char;
    fn dg_stream_native(device: c_int, id: i64, handle: *mut *mut c_void) -> *mut c_char;
    fn dg_stream_synchronize(device: c_int, id: i64) -> *mut c_char;
    fn dg_event_record(device: c_int, event: *mut *mut c_void) -> *mut c_char;
    fn dg_event_block(event: *const c_void, device: c_int) -> *mut c_char;
    fn dg_event_free(event: *mut c_void);
    fn dg_keep_for_stream(tensor: *const C_tensor) -> *mut c_char;
    fn dg_is_pinned(tensor: *const C_tensor) -> bool;
    fn dg_backward_on_this_thread();
    fn dg_capture_begin(device: c_int, pool: u64) -> *mut c_char;
    fn dg_capture_end(device: c_int, pool: u64, keep: bool, graph: *mut *mut c_void) -> *mut c_char;
    fn dg_graph_launch(graph: *mut c_void, device: c_int) -> *mut c_char;
    fn dg_graph_free(graph: *mut c_void, device: c_int, pool: u64);
    fn dg_empty_cache() -> *mut c_char;
    fn dg_gradients_in_parts(
        outputs: *const *const C_tensor,
        upstream: *const *const C_tensor,
        outputs_count: usize,
        parameters: *const *const C_tensor,
        parameters_count: usize,
        inputs: *const *const C_tensor,
        gradients: *mut *mut C_tensor,
        inputs_count: usize,
        part_bytes: usize,
        take: extern "C" fn(*mut c_void, bool, *const usize, *const *mut C_tensor, usize) -> bool,
        context: *mut c_void,
    ) -> *mut c_char;
    fn dg_only_cast(
        outputs: *const *const C_tensor,
        outputs_count: usize,
        leaves: *const *const C_tensor,
        only_cast: *mut bool,
        leaves_count: usize,
    ) -> *mut c_char;
    fn dg_set_grad(tensor: *const C_tensor, gradient: *const C_tensor) -> *mut c_char;
    fn dg_copy(to: *const C_tensor, from: *const C_tensor) -> *mut c_char;
}

/// The number of a CUDA device; `None` for any other device.
pub fn index(device: tch::Device) -> Option<usize> {
    match device {
        tch::Device::Cuda(index) => Some(index),
        _ => None,
    }
}

fn number(device: usize) -> c_int {
    c_int::try_from(device).unwrap_or(c_int::MAX)
}

/// A stream of a CUDA device. What is given to one stream runs in order; streams run beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaStream {
    device: usize,
    id: i64,
}

impl CudaStream {
    /// The calling thread's current stream of a device.
    pub fn current(device: usize) -> Result<Self, Fault> {
        let mut id = 0;
        // SAFETY: the shim writes the id of a stream that libtorch owns.
        outcome(unsafe { dg_stream_current(number(device), &mut id) }).map_err(Fault::engine)?;
        Ok(CudaStream { device, id })
    }

    /// Makes this the calling thread's current stream, and its device the current device.
    pub fn enter(self) -> Result<(), Fault> {
        // SAFETY: sets thread-locals of libtorch and CUDA; the stream is one that libtorch has given.
        outcome(unsafe { dg_stream_enter(number(self.device), self.id) }).map_err(Fault::engine)
    }

    /// Waits until the stream has done everything that it has been given.
    pub fn synchronize(self) -> Result<(), Fault> {
        // SAFETY: a stream that libtorch has given.
        outcome(unsafe { dg_stream_synchronize(number(self.device), self.id) }).map_err(Fault::engine)
    }

    /// CUDA's own handle of the stream.
    pub fn native(self) -> Result<*mut c_void, Fault> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim writes a handle that libtorch owns.
        outcome(unsafe { dg_stream_native(number(self.device), self.id, &mut handle) }).map_err(Fault::engine)?;
        Ok(handle)
    }
}

/// Gives the calling thread a stream for as long as it lives, unless it has one: one of its own if there is one left. The stream waits
/// for what the thread has given the default one.
pub fn own_stream(device: usize) -> Result<(), Fault> {
    if HELD.with(|held| held.borrow().iter().any(|held| held.device == device)) {
        return Ok(());
    }
    let before = Event::record(device)?;
    keep_as_current(HeldStream::shared(device)?)?;
    before.wait()
}

/// As [`own_stream`], for a thread that records graphs: no other thread is given its stream, if there is one left.
pub fn unshared_stream(device: usize) -> Result<(), Fault> {
    match HeldStream::unshared(device)? {
        Some(stream) => keep_as_current(stream),
        None => own_stream(device),
    }
}

thread_local! {
    /// The stream of this thread on each device that it uses.
    static HELD: RefCell<Vec<HeldStream>> = const { RefCell::new(Vec::new()) };
}

fn keep_as_current(stream: HeldStream) -> Result<(), Fault> {
    stream.enter()?;
    HELD.with(|held| held.borrow_mut().push(stream));
    Ok(())
}

/// libtorch's number of a device's default stream.
const DEFAULT_STREAM: i64 = 0;

/// How many streams of a device may have one holder only. libtorch has 32; the links of all workers share the others.
const UNSHARED_MAX: usize = 28;

/// Who holds the streams of all devices. libtorch has 32 for each device and hands them out in turn, whether they are in use or not.
static STREAMS: Mutex<BTreeMap<usize, Vec<StreamUse>>> = Mutex::new(BTreeMap::new());

/// How a stream of libtorch's is used.
struct StreamUse {
    id: i64,
    holders: usize,
    /// Whether nobody else may hold it.
    unshared: bool,
}

/// A stream that this process uses for one purpose until it is dropped.
#[derive(Debug)]
pub struct HeldStream(CudaStream);

impl HeldStream {
    /// A stream that nobody else holds or will be given. `None` if all are held, or [`UNSHARED_MAX`] in this way.
    pub fn unshared(device: usize) -> Result<Option<Self>, Fault> {
        let mut all = lock(&STREAMS);
        let id = hold_unshared(all.entry(device).or_default(), || next_of_libtorch(device))?;
        Ok(id.map(|id| HeldStream(CudaStream { device, id })))
    }

    /// A stream that nobody holds, or else the one with the fewest holders among those that may have several.
    pub fn shared(device: usize) -> Result<Self, Fault> {
        let mut all = lock(&STREAMS);
        let id = hold_shared(all.entry(device).or_default(), || next_of_libtorch(device))?;
        Ok(HeldStream(CudaStream { device, id }))
    }
}

impl Deref for HeldStream {
    type Target = CudaStream;

    fn deref(&self) -> &CudaStream {
        &self.0
    }
}

impl Drop for HeldStream {
    fn drop(&mut self) {
        let mut all = lock(&STREAMS);
        let held = all.get_mut(&self.device).and_then(|streams| streams.iter_mut().find(|held| held.id == self.id));
        if let Some(held) = held {
            held.holders = held.holders.saturating_sub(1);
            held.unshared &= held.holders > 0;
        }
    }
}

/// Holds a stream alone: its id, unless there is none left for that.
fn hold_unshared(
    streams: &mut Vec<StreamUse>,
    next: impl FnOnce() -> Result<i64, Fault>,
) -> Result<Option<i64>, Fault> {
    if streams.iter().filter(|held| held.unshared).count() >= UNSHARED_MAX {
        return Ok(None);
    }
    Ok(unused(streams, next)?.map(|free| {
        (free.holders, free.unshared) = (1, true);
        free.id
    }))
}

/// Holds a stream, with others if need be. The default stream, which nobody counts, if libtorch has given all its streams to holders that
/// do not share.
fn hold_shared(streams: &mut Vec<StreamUse>, next: impl FnOnce() -> Result<i64, Fault>) -> Result<i64, Fault> {
    let chosen = match unused(streams, next)?.map(|free| free.id) {
        Some(id) => streams.iter_mut().find(|held| held.id == id),
        None => streams.iter_mut().filter(|held| !held.unshared).min_by_key(|held| held.holders),
    };
    Ok(chosen.map_or(DEFAULT_STREAM, |held| {
        held.holders += 1;
        held.id
    }))
}

/// Whether nobody else holds the calling thread's current stream.
pub fn current_is_unshared(device: usize) -> Result<bool, Fault> {
    let current = CudaStream::current(device)?;
    let all = lock(&STREAMS);
    let held = all.get(&device).and_then(|streams| streams.iter().find(|held| held.id == current.id));
    Ok(held.is_some_and(|held| held.unshared))
}

/// A stream without a holder, new if need be. `None` once libtorch has handed out all and each has a holder.
fn unused(
    streams: &mut Vec<StreamUse>,
    next: impl FnOnce() -> Result<i64, Fault>,
) -> Result<Option<&mut StreamUse>, Fault> {
    if let Some(free) = streams.iter().position(|held| held.holders == 0) {
        return Ok(streams.get_mut(free));
    }
    let id = next()?;
    if streams.iter().any(|held| held.id == id) {
        return Ok(None);
    }
    streams.push(StreamUse { id, holders: 0, unshared: false });
    Ok(streams.last_mut())
}

fn next_of_libtorch(device: usize) -> Result<i64, Fault> {
    let mut id = 0;
    // SAFETY: the shim writes the id of a stream that libtorch owns.
    outcome(unsafe { dg_stream_new(number(device), &mut id) }).map_err(Fault::engine)?;
    Ok(id)
}

/// Checks that no other thread gives work to the calling thread's current stream: it would become a part of what this one records.
fn require_unshared(device: usize) -> Result<(), Fault> {
    match current_is_unshared(device)? {
        true => Ok(()),
        false => Err(Fault::no_stream(device)),
    }
}

/// CUDA's own handle of the calling thread's current stream.
pub fn current_stream(device: usize) -> Result<*mut c_void, Fault> {
    CudaStream::current(device)?.native()
}

/// A point in a stream, for which other streams can wait.
pub struct Event {
    raw: NonNull<c_void>,
    device: usize,
}

// SAFETY: after it was recorded, an event is only waited for and freed, which CUDA allows on any thread.
unsafe impl Send for Event {}
// SAFETY: waiting does not change the event.
unsafe impl Sync for Event {}

impl Event {
    /// The end of what the calling thread has given its current stream.
    pub fn record(device: usize) -> Result<Self, Fault> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: on success the shim stores an event from `new`, which `drop` frees.
        outcome(unsafe { dg_event_record(number(device), &mut raw) }).map_err(Fault::engine)?;
        let raw = NonNull::new(raw).ok_or_else(|| Fault::internal("an event", "none"))?;
        Ok(Event { raw, device })
    }

    /// The calling thread's current stream goes on only after the event. The thread itself does not wait.
    pub fn wait(&self) -> Result<(), Fault> {
        // SAFETY: the event is live and was recorded.
        outcome(unsafe { dg_event_block(self.raw.as_ptr(), number(self.device)) }).map_err(Fault::engine)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: from `record`, freed once.
        unsafe { dg_event_free(self.raw.as_ptr()) }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event(cuda:{})", self.device)
    }
}

/// Keeps the memory of a tensor of another stream until the calling thread's current stream has done what it has been given by the
/// time that the tensor is freed.
pub fn keep_for_stream(tensor: &Tensor) -> Result<(), Fault> {
    // SAFETY: a live tensor; libtorch notes the stream in its allocator.
    outcome(unsafe { dg_keep_for_stream(tensor.as_ptr()) }).map_err(Fault::engine)
}

/// Whether a tensor is in memory of the host that a GPU reads directly.
pub fn is_pinned(tensor: &Tensor) -> bool {
    // SAFETY: a live tensor, only read.
    unsafe { dg_is_pinned(tensor.as_ptr()) }
}

/// Makes the backward passes of the calling thread run on it. By default those of all threads queue up for one thread per GPU.
pub fn backward_on_this_thread() {
    // SAFETY: sets a thread-local of libtorch.
    unsafe { dg_backward_on_this_thread() }
}

/// Memory that several graphs share. It is safe only if they run in the order in which they were recorded, one after another,
/// because a graph may use memory that an earlier one no longer needs.
#[derive(Clone, Debug)]
pub struct GraphPool {
    device: usize,
    number: u64,
}

impl GraphPool {
    /// A pool of its own.
    pub fn new(device: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        GraphPool { device, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Records what `body` gives the calling thread's current stream as a graph. Nothing runs: the tensors that `body` returns have
    /// values once the graph has run. If `body` fails, or does something that cannot be recorded, nothing is left of it.
    pub fn record<T>(&self, body: impl FnOnce() -> Result<T, Fault>) -> Result<(Graph, T), Fault> {
        let (mut graphs, made) = self.record_parts(|_| body())?;
        match graphs.pop() {
            Some(graph) => Ok((graph, made)),
            None => Err(Fault::internal("a CUDA graph", "none")),
        }
    }

    /// As [`record`](Self::record), but `body` may [cut](Recording::cut) the recording into several graphs, to be run in this order.
    pub fn record_parts<T>(
        &self,
        body: impl FnOnce(&mut Recording<'_>) -> Result<T, Fault>,
    ) -> Result<(Vec<Graph>, T), Fault> {
        require_unshared(self.device)?;
        let stream = CudaStream::current(self.device)?;
        let mut recording = Recording { pool: self, stream, open: false, failed: false, graphs: Vec::new() };
        recording.begin()?;
        let made = body(&mut recording);
        let ended = if recording.open { recording.end(made.is_ok() && !recording.failed) } else { Ok(()) };
        let made = made?;
        ended?;
        // `body` may have hidden it.
        if recording.failed {
            return Err(Fault::internal("a recording", "one with a cut that has failed"));
        }
        Ok((std::mem::take(&mut recording.graphs), made))
    }
}

/// A recording of a thread.
pub struct Recording<'a> {
    pool: &'a GraphPool,
    stream: CudaStream,
    /// Whether it has begun and not ended.
    open: bool,
    /// Whether a cut has failed.
    failed: bool,
    graphs: Vec<Graph>,
}

impl Recording<'_> {
    /// Ends the graph, runs `between`, which may record graphs of its own, and goes on with the next graph. After an error the
    /// recording fails.
    pub fn cut<T>(&mut self, between: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        let failed = std::mem::replace(&mut self.failed, true);
        let current = CudaStream::current(self.pool.device)?;
        // In another stream, CUDA would leave the recording open.
        if current != self.stream {
            return Err(Fault::internal(format!("{:?}", self.stream), format!("{current:?}")));
        }
        if !self.open {
            return Err(Fault::internal("a recording", "one that has ended"));
        }
        self.end(true)?;
        let made = between()?;
        self.begin()?;
        self.failed = failed;
        Ok(made)
    }

    fn begin(&mut self) -> Result<(), Fault> {
        // SAFETY: `end` ends the recording, also after a panic.
        outcome(unsafe { dg_capture_begin(number(self.pool.device), self.pool.number) }).map_err(Fault::engine)?;
        self.open = true;
        Ok(())
    }

    fn end(&mut self, keep: bool) -> Result<(), Fault> {
        self.open = false;
        let mut raw = std::ptr::null_mut();
        // SAFETY: ends the recording of this thread; on success the shim stores a graph, which `Graph` frees.
        let ended = outcome(unsafe { dg_capture_end(number(self.pool.device), self.pool.number, keep, &mut raw) });
        let graph = NonNull::new(raw).map(|raw| Graph { raw, pool: self.pool.clone() });
        ended.map_err(Fault::engine)?;
        self.graphs.extend(graph);
        Ok(())
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.open {
            let _ = self.end(false);
        }
    }
}

/// A recorded sequence of kernels and copies, which one call starts.
pub struct Graph {
    raw: NonNull<c_void>,
    pool: GraphPool,
}

// SAFETY: CUDA allows calls on a graph from any thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Gives the graph to the calling thread's current stream.
    pub fn launch(&self) -> Result<(), Fault> {
        // SAFETY: a live graph.
        outcome(unsafe { dg_graph_launch(self.raw.as_ptr(), number(self.pool.device)) }).map_err(Fault::engine)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: freed once; CUDA keeps what a launch that still runs needs.
        unsafe { dg_graph_free(self.raw.as_ptr(), number(self.pool.device), self.pool.number) }
    }
}

/// Returns the memory that libtorch's allocator keeps for later to the driver.
pub fn empty_cache() -> Result<(), Fault> {
    // SAFETY: frees blocks that no tensor uses.
    outcome(unsafe { dg_empty_cache() }).map_err(Fault::engine)
}

/// Gradients of parameters, with the indices of the parameters.
pub type IndexedGradients = Vec<(usize, Tensor)>;

/// What a backward pass in parts has left to its end.
pub struct LastGradients {
    /// The gradients of parameters that no earlier part has.
    pub of_parameters: IndexedGradients,
    /// The gradient of each input, if there is one.
    pub of_inputs: Vec<Option<Tensor>>,
}

/// The callback for parts, the last of them, and the callback's first failure.
struct PartCallback<'a> {
    take: &'a mut dyn FnMut(IndexedGradients) -> Result<(), Fault>,
    last: IndexedGradients,
    fault: Option<Fault>,
    panic: Option<Box<dyn Any + Send>>,
}

extern "C" fn take_gradients(
    context: *mut c_void,
    last: bool,
    indices: *const usize,
    gradients: *const *mut C_tensor,
    count: usize,
) -> bool {
    // SAFETY: `gradients_in_parts` passes a pointer to a `PartCallback` that nothing else uses until the shim has returned. The arrays have
    // `count` elements, the second of handles from `new`, which tch's Tensors own from here on.
    let (callback, found): (_, IndexedGradients) = unsafe {
        let of = |i| (*indices.add(i), Tensor::from_ptr(*gradients.add(i)));
        (&mut *context.cast::<PartCallback<'_>>(), (0..count).map(of).collect())
    };
    if last {
        callback.last = found;
        return true;
    }
    // A panic must not unwind into C++.
    match catch_unwind(AssertUnwindSafe(|| (callback.take)(found))) {
        Ok(taken) => callback.fault = taken.err(),
        Err(panic) => callback.panic = Some(panic),
    }
    callback.fault.is_none() && callback.panic.is_none()
}

/// Runs the backward pass from `outputs` with their upstream gradients, and leaves gradients that are kept in leaves as they are. Frees
/// the autograd graph.
///
/// The parameters are leaves, each at most once. `take` is given their gradients in the order in which they are found, as soon as there
/// are `part_bytes` of them: the backward pass holds them no longer. It is called on this thread, and an error ends the backward
/// pass. The last of them are returned.
/// Later backward passes of this thread run on it, too.
pub fn gradients_in_parts(
    outputs: &[(Tensor, Option<Tensor>)],
    parameters: &[Tensor],
    inputs: &[&Tensor],
    part_bytes: usize,
    take: &mut dyn FnMut(IndexedGradients) -> Result<(), Fault>,
) -> Result<LastGradients, Fault> {
    let outs: Vec<*const C_tensor> = outputs.iter().map(|(output, _)| output.as_ptr()).collect();
    let upstream: Vec<*const C_tensor> =
        outputs.iter().map(|(_, gradient)| gradient.as_ref().map_or(std::ptr::null(), Tensor::as_ptr)).collect();
    let parameters: Vec<*const C_tensor> = parameters.iter().map(Tensor::as_ptr).collect();
    let inputs: Vec<*const C_tensor> = inputs.iter().map(|input| input.as_ptr()).collect();
    let mut found = vec![std::ptr::null_mut::<C_tensor>(); inputs.len()];
    backward_on_this_thread();
    let mut callback = PartCallback { take, last: Vec::new(), fault: None, panic: None };
    let context = std::ptr::from_mut(&mut callback).cast::<c_void>();
    // SAFETY: each array has as many elements as the count passed with it, of tensors that outlive the call. The shim stores null or
    // a handle from `new` for each input, which tch's Tensor then owns, also if it fails later. It calls `take_gradients` with
    // `context` on this thread and only before it returns.
    let done = outcome(unsafe {
        dg_gradients_in_parts(
            outs.as_ptr(),
            upstream.as_ptr(),
            outs.len(),
            parameters.as_ptr(),
            parameters.len(),
            inputs.as_ptr(),
            found.as_mut_ptr(),
            inputs.len(),
            part_bytes,
            take_gradients,
            context,
        )
    });
    // SAFETY: see above.
    let inputs = found.into_iter().map(|raw| (!raw.is_null()).then(|| unsafe { Tensor::from_ptr(raw) })).collect();
    if let Some(panic) = callback.panic {
        resume_unwind(panic);
    }
    match (callback.fault, done) {
        (Some(fault), _) => Err(fault),
        (None, done) => {
            done.map_err(Fault::engine)?;
            Ok(LastGradients { of_parameters: callback.last, of_inputs: inputs })
        }
    }
}

/// Says of each leaf whether the autograd graph of the outputs uses it once, to cast it to bfloat16.
pub fn only_cast(outputs: &[&Tensor], leaves: &[&Tensor]) -> Result<Vec<bool>, Fault> {
    let outputs: Vec<*const C_tensor> = outputs.iter().map(|output| output.as_ptr()).collect();
    let leaves: Vec<*const C_tensor> = leaves.iter().map(|leaf| leaf.as_ptr()).collect();
    let mut found = vec![false; leaves.len()];
    // SAFETY: each array has as many elements as the count passed with it, of tensors that outlive the call.
    outcome(unsafe {
        dg_only_cast(outputs.as_ptr(), outputs.len(), leaves.as_ptr(), found.as_mut_ptr(), leaves.len())
    })
    .map_err(Fault::engine)?;
    Ok(found)
}

/// Makes a tensor of the same shape the gradient of a leaf, so that backward passes add to it.
pub fn set_grad(leaf: &Tensor, gradient: &Tensor) -> Result<(), Fault> {
    // SAFETY: live tensors; libtorch allows changing the gradient of a tensor behind a shared handle.
    outcome(unsafe { dg_set_grad(leaf.as_ptr(), gradient.as_ptr()) }).map_err(Fault::engine)
}

/// Copies the values of a tensor, in stream order: the thread does not wait. If `from` is in pinned memory of the host, it must not
/// change before the stream is done.
pub fn copy(to: &Tensor, from: &Tensor) -> Result<(), Fault> {
    // SAFETY: live tensors; nothing else holds a Rust reference to their memory.
    outcome(unsafe { dg_copy(to.as_ptr(), from.as_ptr()) }).map_err(Fault::engine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{self, Autocast, Precision};
    use tch::{Device, Kind};

    /// More holders than libtorch has streams: what it hands out again is given to nobody who must be alone.
    #[test]
    fn streams_are_given_again_only_when_they_are_free() {
        let mut handed_out = 0..;
        let mut streams = Vec::new();
        let mut take = |streams: &mut Vec<StreamUse>| {
            let next = || Ok(handed_out.next().unwrap_or(0) % 3 + 1);
            unused(streams, next).unwrap().map(|free| {
                free.holders += 1;
                free.id
            })
        };
        let taken: Vec<_> = (0..4).map(|_| take(&mut streams)).collect();
        assert_eq!(taken, [Some(1), Some(2), Some(3), None]);
        streams[1].holders = 0;
        assert_eq!([take(&mut streams), take(&mut streams)], [Some(2), None]);
    }

    /// Links find a stream that they may share, however many graphs ask for streams of their own first.
    #[test]
    fn some_streams_are_left_to_share() {
        let (mut handed_out, mut streams) = (0..32, Vec::new());
        let mut next = || Ok(1 + handed_out.next().unwrap_or(0));
        let alone: Vec<_> = (0..40).map_while(|_| hold_unshared(&mut streams, &mut next).unwrap()).collect();
        assert_eq!(alone, (1..=UNSHARED_MAX as i64).collect::<Vec<_>>());
        let shared: Vec<_> = (0..8).map(|_| hold_shared(&mut streams, &mut next).unwrap()).collect();
        assert_eq!(shared, [29, 30, 31, 32, 29, 30, 31, 32]);
    }

    /// Two casts of one leaf are two gradients, which are added in 32 bits; a leaf that is read as it is must stay as it is.
    #[test]
    fn leaves_that_are_only_cast_are_found() {
        let leaf = || Tensor::ones([4, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let [once, twice, both, plain, unused] = [(); 5].map(|()| leaf());
        let _autocast = Autocast::enter(Precision::Bf16, Device::Cpu).unwrap();
        let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
        let y = x.linear::<&Tensor>(&once, None).linear::<&Tensor>(&twice, None).linear::<&Tensor>(&twice, None);
        let y = y.linear::<&Tensor>(&both, None) + both.sum(Kind::Float) + plain.sum(Kind::Float);
        let leaves = [&once, &twice, &both, &plain, &unused];
        assert_eq!(only_cast(&[&y], &leaves).unwrap(), [true, false, false, false, false]);
    }

    const WIDTH: i64 = 128;
    const MATRIX_BYTES: usize = (WIDTH * WIDTH * 4) as usize;

    /// A network of several layers, one of which is used twice, and one parameter that nothing uses; its input.
    fn network() -> (Vec<Tensor>, Tensor) {
        tch::manual_seed(1);
        let leaf = |dims: &[i64]| Tensor::randn(dims, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut parameters: Vec<Tensor> = (0..8).flat_map(|_| [leaf(&[WIDTH, WIDTH]), leaf(&[WIDTH])]).collect();
        parameters.push(leaf(&[3]));
        (parameters, leaf(&[4, WIDTH]))
    }

    fn loss((parameters, x): &(Vec<Tensor>, Tensor)) -> [(Tensor, Option<Tensor>); 1] {
        let mut y = x.shallow_clone();
        for pair in parameters.chunks_exact(2).chain(parameters[..2].chunks_exact(2)) {
            y = y.linear(&pair[0], Some(&pair[1])).tanh();
        }
        [(y.sum(Kind::Float), None)]
    }

    /// The gradients of all parameters and of the input at once.
    fn gradients(network: &(Vec<Tensor>, Tensor)) -> Vec<Option<Tensor>> {
        let of: Vec<&Tensor> = network.0.iter().chain([&network.1]).collect();
        let nothing: &mut dyn FnMut(_) -> _ = &mut |_| unreachable!();
        gradients_in_parts(&loss(network), &[], &of, 0, nothing).unwrap().of_inputs
    }

    /// Runs the backward pass in parts that are added to zeros. Returns the parameters of each part, the sums, and the gradient of the
    /// input.
    fn added_in_parts(
        network: &(Vec<Tensor>, Tensor),
        part_bytes: usize,
    ) -> (Vec<Vec<usize>>, Vec<Tensor>, Option<Tensor>) {
        let (parameters, x) = network;
        let sums: Vec<Tensor> = parameters.iter().map(|p| p.detach().zeros_like()).collect();
        let mut parts = Vec::new();
        let mut add = |gradients: IndexedGradients| {
            parts.push(gradients.iter().map(|(index, _)| *index).collect());
            for (index, gradient) in gradients {
                let _ = tch::no_grad(|| sums[index].shallow_clone().g_add_(&gradient));
            }
            Ok(())
        };
        let LastGradients { of_parameters: last, of_inputs: mut inputs } =
            gradients_in_parts(&loss(network), parameters, &[x], part_bytes, &mut add).unwrap();
        if !last.is_empty() {
            add(last).unwrap();
        }
        (parts, sums, inputs.pop().unwrap())
    }

    /// Twice each, because the first run must leave no hook.
    #[test]
    fn gradients_in_parts_are_those_of_one_backward_pass() {
        let network = network();
        let unused = network.0.len() - 1;
        let mut whole = gradients(&network);
        let of_input = whole.pop().unwrap();
        assert_eq!(whole.pop().unwrap(), None);
        for (part_bytes, expected) in [(1, 16), (2 * MATRIX_BYTES, 4), (usize::MAX, 1)].repeat(2) {
            let (parts, sums, input) = added_in_parts(&network, part_bytes);
            assert_eq!(parts.len(), expected, "{part_bytes}: {parts:?}");
            let mut taken = parts.concat();
            taken.sort_unstable();
            assert_eq!(taken, (0..unused).collect::<Vec<_>>());
            assert_eq!(sums[unused], Tensor::zeros([3], (Kind::Float, Device::Cpu)));
            assert!(sums.iter().zip(&whole).all(|(sum, gradient)| Some(sum) == gradient.as_ref()));
            assert_eq!(input, of_input);
            assert!(gradients(&network)[..unused] == whole[..]);
        }
    }

    /// What was taken is free for the rest of the backward pass.
    #[test]
    fn gradients_that_were_taken_are_not_held() {
        engine::start();
        std::thread::spawn(|| {
            let meter = engine::Meter::new();
            engine::attach_thread(1, meter.number());
            let network = network();
            let peak = |part_bytes| {
                let loss = loss(&network);
                engine::peak_bytes(Device::Cpu, meter.number());
                let before = engine::peak_bytes(Device::Cpu, meter.number());
                let found = gradients_in_parts(&loss, &network.0, &[], part_bytes, &mut |_| Ok(())).unwrap();
                drop(found);
                engine::peak_bytes(Device::Cpu, meter.number()) - before
            };
            let (whole, parts) = (peak(usize::MAX), peak(1));
            let matrices = |bytes: u64| bytes as f64 / MATRIX_BYTES as f64;
            assert!(matrices(whole) > 8.0, "{whole}");
            // The gradients of the layer that is used twice, and those of the layer in progress.
            assert!(matrices(parts) < 3.5, "{parts}");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn whoever_takes_gradients_can_fail() {
        let network = network();
        let whole = gradients(&network);
        let run = |take: &mut dyn FnMut(IndexedGradients) -> Result<(), Fault>| {
            gradients_in_parts(&loss(&network), &network.0, &[&network.1], 1, take).map(drop)
        };
        let mut calls = 0;
        let failed = run(&mut |_| {
            calls += 1;
            if calls == 3 {
                return Err(Fault::internal("the third part", "nothing"));
            }
            Ok(())
        });
        assert!(failed.unwrap_err().to_string().contains("the third part"));
        assert_eq!(calls, 3);
        let panicked = catch_unwind(AssertUnwindSafe(|| run(&mut |_| panic!("the first part"))));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"the first part"));
        assert!(gradients(&network) == whole);
        let (parts, ..) = added_in_parts(&network, 1);
        assert_eq!(parts.len(), 16);
    }

    #[test]
    fn gradients_of_casts_are_taken_in_their_type() {
        let cast = Tensor::ones([2, 3], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
        let scalar = Tensor::ones([], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let outputs = [((cast.sum(Kind::Float) * &scalar), None)];
        let mut taken = Vec::new();
        let last = gradients_in_parts(&outputs, &[cast, scalar], &[], 1, &mut |gradients| {
            taken.extend(gradients);
            Ok(())
        });
        taken.extend(last.unwrap().of_parameters);
        taken.sort_by_key(|(index, _)| *index);
        let kinds: Vec<_> = taken.iter().map(|(_, gradient)| (gradient.kind(), gradient.size())).collect();
        assert_eq!(kinds, [(Kind::BFloat16, vec![2, 3]), (Kind::Float, vec![])]);
    }
}
