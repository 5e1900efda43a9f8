//! MPI as the transport uses it. No call blocks but those that start and end MPI, which every rank makes.
//!
//! What MPI reads from or writes to stays borrowed until MPI is done with it: a rank that has stopped in the middle of a
//! transfer keeps the thread that takes part in it, and nothing else. It may be the memory of a GPU if the library is CUDA-aware.

use super::cuda::{self, CudaStream};
use super::{attach_to_gpu, exit_at_once, Layout};
use crate::failure::Fault;
use crate::sync::lock;
use mpi::collective::SystemOperation;
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::{Color, Communicator};
use mpi::traits::CommunicatorCollectives;
use mpi::Threading;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void, CStr};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tch::{Kind, Tensor};

/// A pause is this part of the time that was waited before it.
const PAUSE_PART: u32 = 64;

/// The same of a [long](Backoff::long) one.
const LONG_PAUSE_PART: u32 = 4;

/// The shortest and the longest pause.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(500)];

/// If it is 1, threads call MPI one at a time, also where the library would let them do so at once.
const SERIALIZED: &str = "DISTGPIPE_MPI_SERIALIZED";

/// If it is 0, tensors of GPUs go through host memory, also where the library says that it is CUDA-aware; 1 has the same effect as the
/// library's word.
const CUDA_AWARE: &str = "DISTGPIPE_MPI_CUDA";

/// No GPU has this number.
const NO_GPU: usize = usize::MAX;

thread_local! {
    /// The GPU that MPI uses on this thread.
    static ATTACHED_TO: Cell<usize> = const { Cell::new(NO_GPU) };
}

/// Before this, a wait only yields the processor.
const YIELD: Duration = Duration::from_micros(50);

/// The library of this process, with a communicator of its own.
pub struct Mpi {
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    ranks_here: usize,
    most_on_one_host: usize,
    reaches_gpus: bool,
    /// The GPU whose memory is sent and received, or [`NO_GPU`].
    gpu: AtomicUsize,
    /// Held during each call, if the library allows one at a time.
    one_at_a_time: Option<Mutex<()>>,
    posted: Mutex<Vec<Posted>>,
    /// For each number of workers in a replica that divides the number of ranks: the ranks that have this rank's role.
    roles: Vec<(usize, ffi::MPI_Comm)>,
    /// Whether a sum over the ranks of a role did not end.
    broken_sum: AtomicBool,
}

// SAFETY: a communicator's handle may be used by every thread. `call` makes one call at a time where the library demands it.
unsafe impl Send for Mpi {}
// SAFETY: as above; the requests in `posted` are behind a lock.
unsafe impl Sync for Mpi {}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

/// A message that nobody waits for.
struct Posted {
    request: ffi::MPI_Request,
    /// MPI reads from it until the request is complete.
    _bytes: Vec<u8>,
}

/// Empty messages to a rank, at most one of which is on its way.
pub struct Beat {
    to: usize,
    tag: i32,
    request: Option<ffi::MPI_Request>,
}

// SAFETY: a request may be tested by any thread, one at a time.
unsafe impl Send for Beat {}

impl Beat {
    /// To this rank, with this tag.
    pub fn new(to: usize, tag: i32) -> Self {
        Beat { to, tag, request: None }
    }
}

static STARTED: OnceLock<Mpi> = OnceLock::new();

/// Starts MPI once. Every rank must call it.
pub fn start_mpi() -> Result<&'static Mpi, Fault> {
    if let Some(started) = STARTED.get() {
        return Ok(started);
    }
    let failed = |text: &str| Fault::Mpi { doing: "starting MPI", text: text.to_owned() };
    let wanted = match std::env::var(SERIALIZED).as_deref() {
        Ok("1") => Threading::Serialized,
        _ => Threading::Multiple,
    };
    let (universe, threading) =
        mpi::initialize_with_threading(wanted).ok_or_else(|| failed("the program has started MPI before"))?;
    let one_at_a_time = match threading {
        Threading::Multiple => None,
        Threading::Serialized => Some(Mutex::new(())),
        _ => return Err(failed("the library supports no threads (MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE)")),
    };
    let world = universe.world();
    let (own, host) = (world.duplicate(), world.split_shared(world.rank()));
    let (ranks_here, mut most_on_one_host) = (host.size(), 0);
    world.all_reduce_into(&ranks_here, &mut most_on_one_host, SystemOperation::max());
    let count = |n: c_int| usize::try_from(n).unwrap_or(0);
    let (rank, size) = (count(own.rank()), count(own.size()));
    // The only time at which a communicator can be made: all ranks take part, and the call blocks. Which of these a run will use is
    // not known yet.
    let mut roles = Vec::new();
    for workers in (1..=size / 2).filter(|workers| size % workers == 0) {
        let split = own.split_by_color(Color::with_value(rank_number(rank % workers)));
        let split = split.ok_or_else(|| failed("no communicator for the ranks of a role"))?;
        roles.push((workers, split.as_raw()));
        std::mem::forget(split);
    }
    let started = Mpi {
        comm: own.as_raw(),
        rank,
        size,
        ranks_here: count(ranks_here),
        most_on_one_host: count(most_on_one_host),
        reaches_gpus: is_cuda_aware(),
        gpu: AtomicUsize::new(NO_GPU),
        one_at_a_time,
        posted: Mutex::default(),
        roles,
        broken_sum: AtomicBool::new(false),
    };
    for &comm in started.roles.iter().map(|(_, comm)| comm).chain([&started.comm]) {
        // SAFETY: the communicator is valid, and errors are returned from now on.
        started.call("starting MPI", || unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) })?;
    }
    // Both would call MPI when they are dropped; `end_mpi` ends it.
    std::mem::forget((own, universe));
    Ok(STARTED.get_or_init(|| started))
}

/// Whether the library says that it sends from and receives into the memory of GPUs. Open MPI and MPICH have a function for that.
fn is_cuda_aware() -> bool {
    match std::env::var(CUDA_AWARE).as_deref() {
        Ok("0") => return false,
        Ok("1") => return true,
        _ => {}
    }
    // SAFETY: looks a name up in the libraries that this process has loaded.
    let query = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"MPIX_Query_cuda_support".as_ptr()) };
    // SAFETY: by this name, both libraries have a function that takes nothing and returns an int.
    let query =
        (!query.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(query) });
    query.is_some_and(|query| query() == 1)
}

/// The library, if this process has [started](start_mpi) it.
pub fn started_mpi() -> Option<&'static Mpi> {
    STARTED.get()
}

/// A message that has been matched, and is this process's to receive.
#[must_use = "a message that is not received stays in memory"]
pub struct MpiMessage<'a> {
    mpi: &'a Mpi,
    message: ffi::MPI_Message,
    /// The rank that has sent it.
    pub from: usize,
    /// Its length.
    pub bytes: usize,
}

impl Mpi {
    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The number of ranks on this host.
    pub fn ranks_here(&self) -> usize {
        self.ranks_here
    }

    /// The number of ranks on the host that has most.
    pub fn most_on_one_host(&self) -> usize {
        self.most_on_one_host
    }

    /// Whether the library is CUDA-aware: it sends from and receives into the memory of GPUs.
    pub fn reaches_gpus(&self) -> bool {
        self.reaches_gpus
    }

    /// From now on, memory of this GPU may be sent and received, if the library reaches it.
    pub fn use_gpu(&self, device: usize) {
        if self.reaches_gpus {
            self.gpu.store(device, Ordering::Release);
        }
    }

    /// The next message with this tag, from one rank or from any, if one has arrived.
    pub fn next(&self, from: Option<usize>, tag: i32) -> Result<Option<MpiMessage<'_>>, Fault> {
        let source = from.map_or(
            // SAFETY: a constant of the library.
            unsafe { ffi::RSMPI_ANY_SOURCE },
            rank_number,
        );
        let (mut found, mut bytes) = (0, 0);
        let (mut message, mut status) = (MaybeUninit::uninit(), MaybeUninit::<ffi::MPI_Status>::uninit());
        // SAFETY: all pointers are to variables that outlive the call.
        self.call("looking for messages", || unsafe {
            ffi::MPI_Improbe(source, tag, self.comm, &mut found, message.as_mut_ptr(), status.as_mut_ptr())
        })?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: the call has found a message, so it has set both.
        let (message, status) = unsafe { (message.assume_init(), status.assume_init()) };
        // SAFETY: the status is one that the library has set.
        self.call("looking for messages", || unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut bytes) })?;
        let count = |n: c_int| usize::try_from(n).unwrap_or(0);
        Ok(Some(MpiMessage { mpi: self, message, from: count(status.MPI_SOURCE), bytes: count(bytes) }))
    }

    /// Sends bytes as one message. Returns when MPI does not need them any more.
    pub fn send(&self, to: usize, tag: i32, bytes: &[u8]) -> Result<(), Fault> {
        self.start_send(to, tag, bytes)?.wait()
    }

    /// Sends bytes as one message that nobody waits for.
    pub fn post(&self, to: usize, tag: i32, bytes: Vec<u8>) -> Result<(), Fault> {
        // SAFETY: the bytes are kept with the request until it is complete.
        let request = unsafe { self.isend(to, tag, bytes.as_ptr(), bytes.len())? };
        let mut posted = lock(&self.posted);
        posted.push(Posted { request, _bytes: bytes });
        posted.retain_mut(|posted| !matches!(self.test(&mut posted.request), Ok(true) | Err(_)));
        Ok(())
    }

    /// Whether everything that was [posted](Self::post) has left.
    pub fn all_posted(&self) -> bool {
        let mut posted = lock(&self.posted);
        posted.retain_mut(|posted| !matches!(self.test(&mut posted.request), Ok(true) | Err(_)));
        posted.is_empty()
    }

    /// Sends an empty message to a rank, unless the last one has not been received yet.
    pub fn beat(&self, last: &mut Beat) -> Result<(), Fault> {
        if let Some(mut request) = last.request.take() {
            if !self.test(&mut request)? {
                last.request = Some(request);
                return Ok(());
            }
        }
        let mut request = MaybeUninit::uninit();
        // SAFETY: the message has no bytes, so the pointer is not used.
        self.call("sending", || unsafe {
            let (to, none) = (rank_number(last.to), std::ptr::null());
            ffi::MPI_Issend(none, 0, ffi::RSMPI_UINT8_T, to, last.tag, self.comm, request.as_mut_ptr())
        })?;
        // SAFETY: the call has succeeded, so it has set the request.
        last.request = Some(unsafe { request.assume_init() });
        Ok(())
    }

    /// The sum of a flat tensor of floats over the ranks `rank % workers`, `workers` being the number of workers in a replica: all
    /// ranks of the program take part in the run. Those of a role must call it in the same order. `check` is called while it waits,
    /// and may end the wait with an error; then there can be no other sum in this program.
    pub fn sum(
        &self,
        workers: usize,
        values: &Tensor,
        mut check: impl FnMut() -> Result<(), Fault>,
    ) -> Result<Tensor, Fault> {
        let comm = self.roles.iter().find(|(of, _)| *of == workers).map(|(_, comm)| *comm);
        let comm =
            comm.ok_or_else(|| Fault::internal("a number of workers that divides the ranks", workers.to_string()))?;
        if self.broken_sum.load(Ordering::Acquire) {
            let text = "a run of this program failed while MPI summed gradients: start the program again".to_owned();
            return Err(Fault::Mpi { doing: "summing gradients", text });
        }
        // SAFETY: constants of the library.
        let (kind, add) = unsafe {
            match values.kind() {
                Kind::Float => (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM),
                Kind::Double => (ffi::RSMPI_DOUBLE, ffi::RSMPI_SUM),
                other => return Err(Fault::internal("32-bit or 64-bit floats to sum", format!("{other:?}"))),
            }
        };
        let values = super::on_host(values)?;
        let mut sum = super::empty(&values.size(), values.kind(), Layout::Contiguous)?;
        let (from, to) = (super::bytes(&values), super::bytes_mut(&mut sum));
        let (Some(from), Some(to)) = (from, to) else {
            return Err(Fault::internal("dense tensors in host memory", format!("{values:?}")));
        };
        let (length, mut request) = (message_length(values.numel())?, MaybeUninit::uninit());
        // SAFETY: both tensors have this many elements, and live until the request is complete, or for ever.
        self.call("summing gradients", || unsafe {
            let (from, to) = (from.as_ptr().cast::<c_void>(), to.as_mut_ptr().cast::<c_void>());
            ffi::MPI_Iallreduce(from, to, length, kind, add, comm, request.as_mut_ptr())
        })?;
        // SAFETY: the call has succeeded, so it has set the request.
        let mut request = unsafe { request.assume_init() };
        let wait = Backoff::new();
        loop {
            let ended = self.test(&mut request).and_then(|done| if done { Ok(true) } else { check().map(|()| false) });
            match ended {
                Ok(true) => return Ok(sum),
                Ok(false) => wait.pause(),
                Err(fault) => {
                    // MPI may still read from the one and write to the other.
                    self.broken_sum.store(true, Ordering::Release);
                    std::mem::forget((values, sum));
                    return Err(fault);
                }
            }
        }
    }

    fn start_send<'a>(&'a self, to: usize, tag: i32, bytes: &'a [u8]) -> Result<InFlight<'a>, Fault> {
        // SAFETY: the bytes are borrowed until the request is complete, which `InFlight` sees to.
        let request = unsafe { self.isend(to, tag, bytes.as_ptr(), bytes.len())? };
        Ok(InFlight { mpi: self, request: Some(request), memory: PhantomData })
    }

    /// Starts to send bytes, of a GPU only if the library [reaches](Self::reaches_gpus) it.
    ///
    /// # Safety
    /// The bytes must be readable, and stay so until the request is complete.
    unsafe fn isend(&self, to: usize, tag: i32, from: *const u8, bytes: usize) -> Result<ffi::MPI_Request, Fault> {
        let length = message_length(bytes)?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the caller keeps the bytes until the request is complete.
        self.call("sending", || unsafe {
            let (from, to) = (from.cast::<c_void>(), rank_number(to));
            ffi::MPI_Isend(from, length, ffi::RSMPI_UINT8_T, to, tag, self.comm, request.as_mut_ptr())
        })?;
        // SAFETY: the call has succeeded, so it has set the request.
        Ok(unsafe { request.assume_init() })
    }

    /// Whether a request is complete. It must not be tested again then, or after an error.
    fn test(&self, request: &mut ffi::MPI_Request) -> Result<bool, Fault> {
        let mut done = 0;
        // SAFETY: the request has been started and is not complete.
        self.call("sending or receiving", || unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(done != 0)
    }

    fn call(&self, doing: &'static str, call: impl FnOnce() -> c_int) -> Result<(), Fault> {
        self.attach_thread_to_gpu()?;
        let one = self.one_at_a_time.as_ref().map(lock);
        let code = call();
        drop(one);
        match code {
            0 => Ok(()),
            code => Err(Fault::Mpi { doing, text: error_text(code) }),
        }
    }

    /// Makes the GPU whose memory is sent the calling thread's current one. Any call may go on with the transfers of other threads, and
    /// the library copies on the current GPU of the thread that calls it.
    fn attach_thread_to_gpu(&self) -> Result<(), Fault> {
        let gpu = self.gpu.load(Ordering::Acquire);
        if gpu != NO_GPU && ATTACHED_TO.get() != gpu {
            attach_to_gpu(gpu)?;
            ATTACHED_TO.set(gpu);
        }
        Ok(())
    }

    /// Ends MPI, with all ranks. The library may wait for them.
    pub fn end(&self) {
        // SAFETY: MPI has been started; the caller ends it as the last thing it does with it.
        let _ = self.call("ending MPI", || unsafe { ffi::MPI_Finalize() });
    }

    /// Ends all ranks and this process with a status.
    pub fn abort(&self, status: i32) -> ! {
        // Not under the lock, which a thread in MPI may hold.
        // SAFETY: ends the program.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, status) };
        exit_at_once(status)
    }
}

impl MpiMessage<'_> {
    /// Receives the message into a buffer of its length.
    pub fn receive(self, into: &mut [u8]) -> Result<(), Fault> {
        if into.len() != self.bytes {
            return Err(Fault::internal(format!("a buffer of {} bytes", self.bytes), into.len().to_string()));
        }
        // SAFETY: the buffer has the length of the message, and is borrowed during the call.
        unsafe { self.receive_at(into.as_mut_ptr()) }
    }

    /// Receives the message into a part of a tensor on a GPU, which a library that [reaches](Mpi::reaches_gpus) it does. The caller has
    /// seen to it that the GPU does not use the memory.
    pub fn receive_on_gpu(self, into: &mut GpuMemory, at: usize) -> Result<(), Fault> {
        let (start, bytes) = into.memory();
        if !self.mpi.reaches_gpus || bytes.checked_sub(at).is_none_or(|left| left < self.bytes) {
            return Err(Fault::internal(format!("{} bytes on a GPU", self.bytes), format!("{bytes} from {at} on")));
        }
        // SAFETY: the part is within the tensor's memory, which is borrowed during the call.
        unsafe { self.receive_at(start.cast_mut().wrapping_add(at)) }
    }

    /// # Safety
    /// As many bytes as the message has must be writable there during the call.
    unsafe fn receive_at(mut self, to: *mut u8) -> Result<(), Fault> {
        let length = message_length(self.bytes)?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the memory is the caller's until the request is complete, for which `InFlight` waits.
        self.mpi.call("receiving", || unsafe {
            let to = to.cast::<c_void>();
            ffi::MPI_Imrecv(to, length, ffi::RSMPI_UINT8_T, &mut self.message, request.as_mut_ptr())
        })?;
        // SAFETY: the call has succeeded, so it has set the request.
        let request = Some(unsafe { request.assume_init() });
        InFlight { mpi: self.mpi, request, memory: PhantomData }.wait()
    }

    /// Receives the message into memory of its own. Its sender has been trusted so far.
    pub fn take(self) -> Result<Vec<u8>, Fault> {
        let mut bytes = vec![0; self.bytes];
        self.receive(&mut bytes)?;
        Ok(bytes)
    }
}

/// A transfer of borrowed bytes, which ends before the borrow does.
struct InFlight<'a> {
    mpi: &'a Mpi,
    /// `None` once it is complete.
    request: Option<ffi::MPI_Request>,
    memory: PhantomData<&'a [u8]>,
}

impl InFlight<'_> {
    fn wait(mut self) -> Result<(), Fault> {
        self.complete()
    }

    fn complete(&mut self) -> Result<(), Fault> {
        let pause = Backoff::new();
        while let Some(mut request) = self.request.take() {
            if !self.mpi.test(&mut request)? {
                self.request = Some(request);
                pause.pause();
            }
        }
        Ok(())
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let _ = self.complete();
    }
}

/// What MPI sends. It keeps its memory, and nothing changes that.
pub trait Sendable: Send + Sync {
    /// Where the memory starts, and its length in bytes.
    fn memory(&self) -> (*const u8, usize);
}

impl Sendable for Vec<u8> {
    fn memory(&self) -> (*const u8, usize) {
        (self.as_ptr(), self.len())
    }
}

/// The memory of a dense tensor on a GPU.
pub struct GpuMemory(Tensor);

impl GpuMemory {
    /// That of a tensor, once its GPU has computed it and does not use its memory for anything else any more. `None` for a tensor that is
    /// not dense, or not on a GPU.
    pub fn of(tensor: &Tensor) -> Result<Option<Self>, Fault> {
        let Some(index) = cuda::index(tensor.device()).filter(|_| super::layout(tensor).is_some()) else {
            return Ok(None);
        };
        // MPI knows nothing of streams. The calling thread's has waited for all others that use the memory.
        CudaStream::current(index)?.synchronize()?;
        Ok(Some(GpuMemory(tensor.shallow_clone())))
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.0.numel() * self.0.kind().elt_size_in_bytes()
    }
}

// SAFETY: through a shared reference, threads only read the tensor's description. libtorch counts its handles atomically.
unsafe impl Sync for GpuMemory {}

impl Sendable for GpuMemory {
    fn memory(&self) -> (*const u8, usize) {
        (self.0.data_ptr().cast_const().cast::<u8>(), self.bytes())
    }
}

/// Messages to one rank that are on their way, each with the memory that MPI reads it from. They stay in order.
pub struct Outbound {
    mpi: &'static Mpi,
    to: usize,
    on_their_way: VecDeque<(ffi::MPI_Request, usize, Arc<dyn Sendable>)>,
    bytes: usize,
}

// SAFETY: a request may be tested by any thread, one at a time, and the memory may be read by any.
unsafe impl Send for Outbound {}

impl Outbound {
    /// Nothing to this rank yet.
    pub fn new(mpi: &'static Mpi, to: usize) -> Self {
        Outbound { mpi, to, on_their_way: VecDeque::new(), bytes: 0 }
    }

    /// Starts to send a part of some bytes as one message. Nothing may change the bytes until the message has arrived.
    pub fn start(&mut self, tag: i32, bytes: &Arc<dyn Sendable>, part: Range<usize>) -> Result<(), Fault> {
        let (start, all) = bytes.memory();
        if part.end > all {
            return Err(Fault::internal(format!("a part of {all} bytes"), format!("{part:?}")));
        }
        let length = part.len();
        // SAFETY: the part is within the memory, which is kept with the request until it is complete.
        let request = unsafe { self.mpi.isend(self.to, tag, start.wrapping_add(part.start), length)? };
        self.on_their_way.push_back((request, length, bytes.clone()));
        self.bytes += length;
        Ok(())
    }

    /// How many bytes, and how many messages, MPI has not sent yet.
    pub fn waiting(&self) -> (usize, usize) {
        (self.bytes, self.on_their_way.len())
    }

    /// Has MPI go on, and drops what it does not need any more. Returns whether it has sent everything.
    pub fn settle(&mut self) -> Result<bool, Fault> {
        while let Some((mut request, length, bytes)) = self.on_their_way.pop_front() {
            self.bytes -= length;
            if !self.mpi.test(&mut request)? {
                self.bytes += length;
                self.on_their_way.push_front((request, length, bytes));
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// MPI reads from the memory until then.
impl Drop for Outbound {
    fn drop(&mut self) {
        let pause = Backoff::new();
        // A message that fails is the library's no more; those behind it may still be.
        while !self.on_their_way.is_empty() {
            if let Ok(false) = self.settle() {
                pause.pause();
            }
        }
    }
}

/// The pauses of a thread that waits for MPI: the longer it has waited, the longer they are.
#[derive(Debug)]
pub struct Backoff(Instant);

impl Backoff {
    /// For a wait that begins now.
    pub fn new() -> Self {
        Backoff(Instant::now())
    }

    /// The next pause of a thread that something else can wake, or whose peer may take long: a few for each wait.
    pub fn long(&self) -> Duration {
        (self.0.elapsed() / LONG_PAUSE_PART).clamp(PAUSES[0], PAUSES[1])
    }

    /// Pauses.
    pub fn pause(&self) {
        let waited = self.0.elapsed();
        if waited < YIELD {
            std::thread::yield_now();
        } else {
            std::thread::sleep((waited / PAUSE_PART).clamp(PAUSES[0], PAUSES[1]));
        }
    }
}

/// Has the pauses of this thread end when they should: the system may otherwise add 50 µs to each.
pub fn sleep_precisely() {
    // SAFETY: sets a number of this thread, in nanoseconds. Without effect if the system refuses.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000) };
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff::new()
    }
}

fn rank_number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}

fn message_length(bytes: usize) -> Result<c_int, Fault> {
    c_int::try_from(bytes).map_err(|_| Fault::internal("an MPI message of less than 2 GiB", bytes.to_string()))
}

fn error_text(code: c_int) -> String {
    let mut text = [0; 1 << 12];
    let mut length = 0;
    // SAFETY: the buffer is larger than MPI_MAX_ERROR_STRING of any library, and its last byte stays 0.
    unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length);
        CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    }
}
