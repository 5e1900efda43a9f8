//! Bindings to `shim.cpp`: each function here is a safe wrapper of one there.

use libc::{c_char, c_int, c_void};
use std::ffi::CStr;
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

extern "C" {
    fn dg_backward(
        outputs: *const *const C_tensor,
        gradients: *const *const C_tensor,
        count: usize,
        watched: *const *const C_tensor,
        watched_count: usize,
        ready: extern "C" fn(*mut c_void, usize),
        context: *mut c_void,
    ) -> *mut c_char;
    fn dg_autocast_enter(cuda: bool, before: *mut AutocastState) -> *mut c_char;
    fn dg_autocast_leave(before: *const AutocastState);
    fn dg_grad(tensor: *const C_tensor) -> *mut C_tensor;
    fn dg_shares_memory(tensor: *const C_tensor) -> bool;
    fn dg_clear_grad(tensor: *const C_tensor);
    fn dg_version(tensor: *const C_tensor) -> i64;
    fn dg_bump_version(tensor: *mut C_tensor);
    fn dg_normal(tensor: *mut C_tensor, mean: f64, deviation: f64, seed: u64) -> *mut c_char;
    fn dg_uniform(tensor: *mut C_tensor, low: f64, high: f64, seed: u64) -> *mut c_char;
    fn dg_layout(tensor: *const C_tensor) -> c_int;
    fn dg_with_layout(tensor: *const C_tensor, layout: c_int, result: *mut *mut C_tensor) -> *mut c_char;
    fn dg_empty(
        sizes: *const i64,
        dims: usize,
        dtype: c_int,
        layout: c_int,
        pinned: bool,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn dg_tune_allocator();
    fn dg_release_memory();
    fn dg_meter_install();
    fn dg_meter_attach(meter: c_int);
    fn dg_meter_take_peak(meter: c_int) -> i64;
    fn dg_cuda_peak(device: c_int, reserved: bool) -> i64;
    fn dg_cpu_capability() -> *mut c_char;
    fn dg_free_message(text: *mut c_char);
}

/// The order of a dense tensor's values in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row-major: the last dimension varies fastest.
    Contiguous,
    /// A tensor [N, C, H, W] whose dimension C varies fastest. Convolutions are fastest in this layout.
    ChannelsLast,
}

impl Layout {
    fn code(self) -> c_int {
        match self {
            Layout::Contiguous => 1,
            Layout::ChannelsLast => 2,
        }
    }
}

/// Turns the shim's error message, or null, into a result.
pub(super) fn outcome(message: *mut c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a NUL-terminated string that it allocated, which is freed here once.
    unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        dg_free_message(message);
        Err(text)
    }
}

/// Parameters whose gradients a backward pass finishes.
pub struct WatchedParameters<'a> {
    /// The parameters: leaves, each at most once.
    pub parameters: &'a [Tensor],
    /// Called with the index of a parameter when its gradient is complete, on any thread; never for one that the pass does not
    /// reach.
    pub ready: &'a (dyn Fn(usize) + Sync),
}

extern "C" fn gradient_ready(context: *mut c_void, index: usize) {
    // SAFETY: `backward` passes a pointer to a `WatchedParameters` that it borrows until libtorch has returned.
    let watched = unsafe { &*context.cast_const().cast::<WatchedParameters<'_>>() };
    (watched.ready)(index);
}

/// Runs a backward pass from these tensors with their upstream gradients.
pub fn backward(outputs: &[(Tensor, Option<Tensor>)], watched: Option<&WatchedParameters<'_>>) -> Result<(), String> {
    let nothing = WatchedParameters { parameters: &[], ready: &|_| () };
    let watched = watched.unwrap_or(&nothing);
    let parameters: Vec<*const C_tensor> = watched.parameters.iter().map(Tensor::as_ptr).collect();
    let context = std::ptr::from_ref(watched).cast_mut().cast::<c_void>();
    let outs: Vec<*const C_tensor> = outputs.iter().map(|(o, _)| o.as_ptr()).collect();
    let grads: Vec<*const C_tensor> =
        outputs.iter().map(|(_, g)| g.as_ref().map_or(std::ptr::null(), Tensor::as_ptr)).collect();
    // SAFETY: both arrays hold `outputs.len()` pointers to tensors that outlive the call, `parameters` as many as it says; the
    // shim only copies handles, and calls `gradient_ready` with `context` only before it returns.
    outcome(unsafe {
        dg_backward(
            outs.as_ptr(),
            grads.as_ptr(),
            outputs.len(),
            parameters.as_ptr(),
            parameters.len(),
            gradient_ready,
            context,
        )
    })
}

/// The thread's autocast settings before `autocast_enter`. The fields are those of the shim's `dg_autocast_state`.
#[repr(C)]
#[derive(Default)]
pub struct AutocastState {
    cuda: bool,
    enabled: bool,
    dtype: c_int,
    cache: bool,
}

pub fn autocast_enter(cuda: bool) -> Result<AutocastState, String> {
    let mut before = AutocastState::default();
    // SAFETY: the shim sets thread-locals of libtorch and writes to a struct of the same layout.
    outcome(unsafe { dg_autocast_enter(cuda, &mut before) })?;
    Ok(before)
}

pub fn autocast_leave(before: &AutocastState) {
    // SAFETY: sets thread-locals; `autocast_enter` has filled the struct.
    unsafe { dg_autocast_leave(before) }
}

pub fn grad(tensor: &Tensor) -> Option<Tensor> {
    // SAFETY: the shim returns null or a tensor handle from `new`, which tch's Tensor then owns and deletes.
    unsafe {
        let grad = dg_grad(tensor.as_ptr());
        (!grad.is_null()).then(|| Tensor::from_ptr(grad))
    }
}

/// Whether another tensor has memory of this one. Handles of the same tensor do not count.
pub fn shares_memory(tensor: &Tensor) -> bool {
    // SAFETY: a live tensor, only read.
    unsafe { dg_shares_memory(tensor.as_ptr()) }
}

pub fn clear_grad(tensor: &Tensor) {
    // SAFETY: the handle is live; libtorch allows changing the gradient of a tensor behind a shared handle.
    unsafe { dg_clear_grad(tensor.as_ptr()) }
}

pub fn version(tensor: &Tensor) -> i64 {
    // SAFETY: a live tensor, only read.
    unsafe { dg_version(tensor.as_ptr()) }
}

/// Counts a change of the tensor's memory in libtorch's version counter.
pub fn bump_version(tensor: &mut Tensor) {
    // SAFETY: a live tensor, borrowed for the call.
    unsafe { dg_bump_version(tensor.as_mut_ptr()) }
}

/// Fills the tensor from a normal distribution.
pub fn normal(tensor: &mut Tensor, mean: f64, deviation: f64, seed: u64) -> Result<(), String> {
    // SAFETY: a live tensor, borrowed for the call.
    outcome(unsafe { dg_normal(tensor.as_mut_ptr(), mean, deviation, seed) })
}

/// Fills the tensor from the uniform distribution on [low, high).
pub fn uniform(tensor: &mut Tensor, low: f64, high: f64, seed: u64) -> Result<(), String> {
    // SAFETY: a live tensor, borrowed for the call.
    outcome(unsafe { dg_uniform(tensor.as_mut_ptr(), low, high, seed) })
}

pub fn layout(tensor: &Tensor) -> Option<Layout> {
    // SAFETY: a live tensor, only read.
    match unsafe { dg_layout(tensor.as_ptr()) } {
        1 => Some(Layout::Contiguous),
        2 => Some(Layout::ChannelsLast),
        _ => None,
    }
}

pub fn with_layout(tensor: &Tensor, layout: Layout) -> Result<Tensor, String> {
    let mut result = std::ptr::null_mut();
    // SAFETY: on success the shim stores a handle from `new`, which tch's Tensor then owns.
    unsafe {
        outcome(dg_with_layout(tensor.as_ptr(), layout.code(), &mut result))?;
        Ok(Tensor::from_ptr(result))
    }
}

pub fn empty(dims: &[i64], kind: Kind, layout: Layout, pinned: bool) -> Result<Tensor, String> {
    let mut result = std::ptr::null_mut();
    // SAFETY: the shim reads `dims.len()` numbers; on success it stores a handle from `new`.
    unsafe {
        outcome(dg_empty(dims.as_ptr(), dims.len(), scalar_type(kind)?, layout.code(), pinned, &mut result))?;
        Ok(Tensor::from_ptr(result))
    }
}

/// The number of a kind in libtorch's `ScalarType`, which tch does not expose.
pub(super) fn scalar_type(kind: Kind) -> Result<c_int, String> {
    Ok(match kind {
        Kind::Uint8 => 0,
        Kind::Int8 => 1,
        Kind::Int16 => 2,
        Kind::Int => 3,
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::Bool => 11,
        Kind::BFloat16 => 15,
        other => return Err(format!("tensors of {other:?} are not supported")),
    })
}

pub fn tune_allocator() {
    // SAFETY: calls mallopt only, which is thread-safe.
    unsafe { dg_tune_allocator() }
}

pub fn release_memory() {
    // SAFETY: calls malloc_trim only, which is thread-safe.
    unsafe { dg_release_memory() }
}

pub fn meter_install() {
    // SAFETY: guarded by a once-flag; blocks of the previous allocator keep their own deleter.
    unsafe { dg_meter_install() }
}

pub fn meter_attach(meter: usize) {
    // SAFETY: sets a thread-local; the shim checks the range.
    unsafe { dg_meter_attach(c_int::try_from(meter).unwrap_or(0)) }
}

pub fn meter_take_peak(meter: usize) -> u64 {
    // SAFETY: reads atomics; the shim checks the range.
    let peak = unsafe { dg_meter_take_peak(c_int::try_from(meter).unwrap_or(-1)) };
    u64::try_from(peak).unwrap_or(0)
}

pub fn cuda_peak(device: usize, reserved: bool) -> u64 {
    // SAFETY: reads statistics of libtorch's allocator; the shim returns 0 if there is none.
    let peak = unsafe { dg_cuda_peak(c_int::try_from(device).unwrap_or(0), reserved) };
    u64::try_from(peak).unwrap_or(0)
}

/// The instruction set of libtorch's CPU kernels.
pub fn cpu_capability() -> String {
    // SAFETY: the shim returns a string that it allocated, or null; `outcome` frees it.
    outcome(unsafe { dg_cpu_capability() }).err().unwrap_or_default()
}

/// The bytes of a dense CPU tensor in memory order, or `None` for any other tensor.
pub fn bytes(tensor: &Tensor) -> Option<&[u8]> {
    let length = dense_bytes(tensor)?;
    // SAFETY: a dense CPU tensor owns `numel * element size` bytes from its data pointer, alive while it is borrowed.
    (length > 0).then(|| unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), length) }).or(Some(&[]))
}

/// The bytes of a dense CPU tensor, which several threads may read. It keeps the tensor's memory.
pub(crate) struct TensorBytes(Tensor);

impl TensorBytes {
    /// `None` for a tensor that is not dense, or not in host memory.
    pub fn new(tensor: &Tensor) -> Option<Self> {
        bytes(tensor)?;
        Some(TensorBytes(tensor.shallow_clone()))
    }

    pub fn as_slice(&self) -> &[u8] {
        bytes(&self.0).unwrap_or_default()
    }
}

// SAFETY: through a shared reference, threads only read the tensor's description and its bytes. Handles on one tensor may be in
// several threads, because libtorch counts them atomically.
unsafe impl Sync for TensorBytes {}

/// The bytes of a dense CPU tensor, to write to.
pub fn bytes_mut(tensor: &mut Tensor) -> Option<&mut [u8]> {
    let length = dense_bytes(tensor)?;
    if length == 0 {
        return Some(&mut []);
    }
    // SAFETY: as in `bytes`; callers write only to tensors that they have just made with `empty` and do not share.
    Some(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), length) })
}

/// The values of a dense CPU tensor of 32-bit floats, to write to; `None` for any other tensor.
pub fn floats_mut(tensor: &mut Tensor) -> Option<&mut [f32]> {
    if tensor.kind() != Kind::Float {
        return None;
    }
    // SAFETY: any bits are a valid `f32`. libtorch aligns float tensors for floats, and a slice with an unaligned start
    // or end is rejected.
    match unsafe { bytes_mut(tensor)?.align_to_mut::<f32>() } {
        ([], values, []) => Some(values),
        _ => None,
    }
}

fn dense_bytes(tensor: &Tensor) -> Option<usize> {
    let dense = tensor.device() == tch::Device::Cpu && layout(tensor).is_some();
    dense.then(|| tensor.numel() * tensor.kind().elt_size_in_bytes())
}
