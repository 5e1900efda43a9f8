//! libtorch, as the rest of the crate sees it: devices, kept memory, threads, random streams, and the calls
//! that `tch` does not show. All `unsafe` of the crate is in here.

mod autocast;
mod device;
mod ffi;
mod random;

pub use autocast::{Autocast, Precision};
pub use device::{Device, DeviceError, Devices};
pub use ffi::bytes;
pub use ffi::Layout;
pub(crate) use ffi::{bytes_mut, floats_mut};
pub use random::{Draws, Stream};

use crate::failure::Fault;
use tch::Tensor;

/// Prepares libtorch for this process: freed memory stays in the process, and CPU tensors are counted.
///
/// Called by whoever starts workers; calling it again does no harm.
pub fn start() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        ffi::keep_memory();
        ffi::meter_install();
    });
}

/// Gives memory that was freed and kept back to the system: after work that is over and was unlike what comes.
pub fn release_memory() {
    ffi::release_memory();
}

/// Gives the calling thread its number of libtorch threads and its memory meter.
///
/// Meter 0 counts what no worker asked for.
pub fn attach_thread(threads: usize, meter: usize) {
    tch::set_num_threads(i32::try_from(threads).unwrap_or(1).max(1));
    ffi::meter_attach(meter);
}

/// The most bytes that tensors held: those of this meter since the last call on the CPU; all of the device's since
/// the process began on a GPU, whose allocator does not tell workers apart.
pub fn peak_bytes(device: tch::Device, meter: usize) -> u64 {
    match device {
        tch::Device::Cuda(index) => ffi::cuda_peak(index, false),
        _ => ffi::meter_take_peak(meter),
    }
}

/// The most bytes that a GPU's allocator had taken from the device since the process began: what tensors held, and what lay
/// between them. `None` on the CPU.
pub fn reserved_bytes(device: tch::Device) -> Option<u64> {
    match device {
        tch::Device::Cuda(index) => Some(ffi::cuda_peak(index, true)),
        _ => None,
    }
}

/// Runs the backward pass from `outputs` with their upstream gradients; gradients accumulate in the leaves.
///
/// An output without an upstream gradient must be a scalar, as in PyTorch.
pub fn backward(outputs: &[(Tensor, Option<Tensor>)]) -> Result<(), Fault> {
    ffi::backward(outputs).map_err(Fault::Engine)
}

/// The gradient that has gathered in a leaf, if any.
pub fn grad(tensor: &Tensor) -> Option<Tensor> {
    ffi::grad(tensor)
}

/// Forgets a leaf's gradient and its memory; the next backward pass starts a new one.
pub fn clear_grad(tensor: &Tensor) {
    ffi::clear_grad(tensor)
}

/// Changes whenever the tensor's values are changed in place.
pub fn version(tensor: &Tensor) -> i64 {
    ffi::version(tensor)
}

/// How a dense tensor lies in memory, or `None` if it has gaps or other strides.
pub fn layout(tensor: &Tensor) -> Option<Layout> {
    ffi::layout(tensor)
}

/// The tensor in the wanted layout; the same tensor if it has it already.
pub fn with_layout(tensor: &Tensor, layout: Layout) -> Result<Tensor, Fault> {
    ffi::with_layout(tensor, layout).map_err(Fault::Engine)
}

/// A CPU tensor of unset values.
pub fn empty(dims: &[i64], kind: tch::Kind, layout: Layout) -> Result<Tensor, Fault> {
    ffi::empty(dims, kind, layout, false).map_err(Fault::Engine)
}

/// A CPU tensor of unset values that is copied from or to a device: in memory that the device can reach by itself, which
/// makes the copy several times as fast.
pub fn empty_near(device: tch::Device, dims: &[i64], kind: tch::Kind, layout: Layout) -> Result<Tensor, Fault> {
    ffi::empty(dims, kind, layout, device.is_cuda()).map_err(Fault::Engine)
}

/// The tensor on the CPU, without gaps, in the layout it has.
pub fn on_host(tensor: &Tensor) -> Result<Tensor, Fault> {
    let dense = match layout(tensor) {
        Some(_) => tensor.shallow_clone(),
        None => tensor.f_contiguous()?,
    };
    if dense.device() == tch::Device::Cpu {
        return Ok(dense);
    }
    tch::no_grad(|| {
        let layout = layout(&dense).unwrap_or(Layout::Contiguous);
        let mut host = empty_near(dense.device(), &dense.size(), dense.kind(), layout)?;
        host.f_copy_(&dense)?;
        Ok(host)
    })
}

/// A copy with values and strides of its own, outside any graph.
pub fn copy(tensor: &Tensor) -> Result<Tensor, Fault> {
    tch::no_grad(|| {
        let mut copy = tensor.f_detach()?.f_empty_like()?;
        copy.f_copy_(tensor)?;
        Ok(copy)
    })
}

/// Whether a tensor can have a gradient.
pub fn is_float(tensor: &Tensor) -> bool {
    matches!(tensor.kind(), tch::Kind::Float | tch::Kind::Double | tch::Kind::Half | tch::Kind::BFloat16)
}

/// Ends this process as SIGKILL does: no destructor, no goodbye.
pub(crate) fn die_at_once() -> ! {
    ffi::die_at_once()
}

/// Ends this process with a status and nothing else. `exit` would run libtorch's destructors, which crash a stage that
/// is still computing.
pub fn exit_at_once(status: i32) -> ! {
    ffi::exit_at_once(status)
}
