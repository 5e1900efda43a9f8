//! libtorch as the rest of the crate uses it: devices, memory, random streams, autocast, and the calls that `tch` does not
//! offer; and MPI. All `unsafe` code of the crate is here.

mod autocast;
#[cfg(feature = "mpi")]
mod block_sums;
mod clock;
pub mod cuda;
mod cuda_math;
mod device;
mod ffi;
mod inventory;
pub mod kernels;
mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
mod operators;
mod poll;
mod process;
mod random;
mod recorded_draws;
mod resource_limits;
mod tensor_list;
mod threads;
mod upload;

pub use autocast::{Autocast, Precision};
#[cfg(feature = "mpi")]
pub(crate) use block_sums::{BlockSums, BLOCK_BYTES};
pub use clock::{boot_time, utc_now};
pub(crate) use clock::{cpu_time_of, thread_cpu_time};
pub use cuda_math::{set_cuda_math, Tf32};
pub use device::{Device, DeviceError, Devices};
pub use ffi::bytes;
pub(crate) use ffi::{bytes_mut, floats_mut, TensorBytes};
pub use ffi::{Layout, WatchedParameters};
pub use inventory::{inventory, CpuInfo, CudaInfo, GpuLibrary, Inventory};
pub use memory::{
    attach_thread, available_bytes, peak_bytes, release_memory, require_memory, reserved_bytes, start, tune_allocator,
    Meter,
};
pub(crate) use operators::{as_with_grad, seeded, Argument, Call, Operator};
pub(crate) use poll::{connect_abstract, set_send_buffer, wait_readable};
pub(crate) use process::kill_worker_process;
pub use process::{declare_worker_process, exit_at_once, is_one_of_several_ranks};
pub use random::{Draws, Stream};
pub(crate) use recorded_draws::name as name_stream;
pub use recorded_draws::{DrawSite, SeedTable};
pub(crate) use resource_limits::open_files_max;
pub use resource_limits::{limit_resources, raise_open_files_limit, ResourceLimits};
pub(crate) use tensor_list::{FusedAdam, FusedSgd, TensorList};
#[cfg(test)]
pub(crate) use threads::refusal;
pub(crate) use threads::Watch;
pub use threads::{check_threads, default_threads, spawn, spawn_scoped, ThreadCountError, ThreadError, THREADS_MAX};
pub(crate) use upload::{attach_to_gpu, in_pinned_memory, Uploading, Uploads};

use crate::failure::Fault;
use tch::Tensor;

/// Whether other processes may have mapped memory of this one's GPU: then none of it may be returned to the driver.
pub(crate) fn gpu_memory_is_shared() -> bool {
    #[cfg(feature = "mpi")]
    return mpi::started_mpi().is_some_and(mpi::Mpi::reaches_gpus);
    #[cfg(not(feature = "mpi"))]
    false
}

/// Gives each channel of each image mean 0 and variance 1, from the image's own statistics.
pub fn instance_norm(x: &Tensor) -> Result<Tensor, Fault> {
    if let Some(result) = kernels::instance_norm(x) {
        return result;
    }
    let none = None::<&Tensor>;
    Ok(x.f_instance_norm(none, none, none, none, true, 0.1, kernels::NORM_EPSILON, true)?)
}

/// Runs the backward pass from `outputs` with their upstream gradients. Gradients accumulate in the leaves.
///
/// An output without an upstream gradient must be a scalar, as in PyTorch. `watched` hears of each of its parameters whose
/// gradient is complete.
pub fn backward(outputs: &[(Tensor, Option<Tensor>)], watched: Option<&WatchedParameters<'_>>) -> Result<(), Fault> {
    ffi::backward(outputs, watched).map_err(Fault::engine)
}

/// The gradient that has accumulated in a leaf, if any, in memory of its own. libtorch may give two leaves views of one tensor, and
/// what is added to one of them later would change the other.
pub fn own_grad(tensor: &Tensor) -> Result<Option<Tensor>, Fault> {
    let gradient = ffi::grad(tensor);
    match gradient {
        Some(shared) if ffi::shares_memory(&shared) => copy(&shared).map(Some),
        gradient => Ok(gradient),
    }
}

/// The gradient that has accumulated in a leaf, if any.
pub fn grad(tensor: &Tensor) -> Option<Tensor> {
    ffi::grad(tensor)
}

/// Drops a leaf's gradient and frees its memory. The next backward pass allocates a new one.
pub fn clear_grad(tensor: &Tensor) {
    ffi::clear_grad(tensor)
}

/// libtorch's version counter, which changes whenever the tensor is changed in place.
pub fn version(tensor: &Tensor) -> i64 {
    ffi::version(tensor)
}

/// The memory layout of a dense tensor, or `None` if it has gaps or other strides.
pub fn layout(tensor: &Tensor) -> Option<Layout> {
    ffi::layout(tensor)
}

/// The tensor in another layout, or the same tensor if it has that layout already.
pub fn with_layout(tensor: &Tensor, layout: Layout) -> Result<Tensor, Fault> {
    ffi::with_layout(tensor, layout).map_err(Fault::engine)
}

/// A CPU tensor of uninitialized values.
pub fn empty(dims: &[i64], kind: tch::Kind, layout: Layout) -> Result<Tensor, Fault> {
    ffi::empty(dims, kind, layout, false).map_err(Fault::engine)
}

/// A CPU tensor of uninitialized values for a copy from or to `device`. For a GPU it is in pinned memory, which makes the
/// copy several times as fast.
pub fn empty_near(device: tch::Device, dims: &[i64], kind: tch::Kind, layout: Layout) -> Result<Tensor, Fault> {
    ffi::empty(dims, kind, layout, device.is_cuda()).map_err(Fault::engine)
}

/// A dense copy of the tensor on the CPU, in the same layout; the tensor itself if it is that already.
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

/// A copy with memory of its own, the same strides, and no autograd graph.
pub fn copy(tensor: &Tensor) -> Result<Tensor, Fault> {
    tch::no_grad(|| {
        let mut copy = tensor.f_detach()?.f_empty_like()?;
        copy.f_copy_(tensor)?;
        Ok(copy)
    })
}

/// Whether the tensor has a floating-point type, so that it can have a gradient.
pub fn is_float(tensor: &Tensor) -> bool {
    matches!(tensor.kind(), tch::Kind::Float | tch::Kind::Double | tch::Kind::Half | tch::Kind::BFloat16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    /// A layer that adds a view of a parameter to a view of its input gives both one gradient tensor. A later micro-batch that adds
    /// to the parameter's gradient must not change what was sent back for the input.
    #[test]
    fn a_gradient_to_send_back_has_memory_of_its_own() {
        let leaf = |dims: &[i64]| Tensor::ones(dims, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (x, parameter) = (leaf(&[1, 2, 2]), leaf(&[4]));
        let pass = || [((x.view([1, -1]) + parameter.unsqueeze(0)).sum(Kind::Float), None)];
        backward(&pass(), None).unwrap();
        let sent = own_grad(&x).unwrap().unwrap();
        let before = sent.copy();
        let _ = tch::no_grad(|| grad(&parameter).unwrap().fill_(7.0));
        assert_eq!(sent, before);
        assert_eq!(own_grad(&leaf(&[1])).unwrap(), None);
    }
}
