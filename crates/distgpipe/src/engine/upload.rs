//! Copies of tensors to a GPU that run beside its computation, on a stream of their own.

use super::cuda::{self, CudaStream, Event, HeldStream};
use super::{empty_near, layout};
use crate::failure::Fault;
use tch::Tensor;

/// A stream of a GPU for copies from the host.
pub(crate) struct Uploads {
    device: usize,
    stream: HeldStream,
}

/// Tensors on their way to a GPU.
pub(crate) struct Uploading {
    tensors: Vec<Tensor>,
    done: Event,
}

impl Uploads {
    pub fn new(device: usize) -> Result<Self, Fault> {
        Ok(Uploads { device, stream: HeldStream::shared(device)? })
    }

    /// Starts to copy tensors of the host. The calling thread waits only for those that are not in [pinned](in_pinned_memory)
    /// memory; libtorch keeps pinned memory until it has been read.
    pub fn start(&self, tensors: &[&Tensor]) -> Result<Uploading, Fault> {
        self.start_and(tensors, Ok)
    }

    /// The same, but what arrives is what `change` makes of the copies, on the stream of the copies.
    pub fn start_and(
        &self,
        tensors: &[&Tensor],
        change: impl FnOnce(Vec<Tensor>) -> Result<Vec<Tensor>, Fault>,
    ) -> Result<Uploading, Fault> {
        let before = CudaStream::current(self.device)?;
        self.stream.enter()?;
        let copy = |tensor: &&Tensor| {
            let copied = tensor.f_to_device_(tch::Device::Cuda(self.device), tensor.kind(), true, false);
            copied.map_err(Fault::from)
        };
        let copies = tensors.iter().map(copy).collect::<Result<Vec<_>, Fault>>().and_then(change);
        let done = Event::record(self.device);
        before.enter()?;
        Ok(Uploading { tensors: copies?, done: done? })
    }
}

impl Uploading {
    /// The tensors on the GPU, for the calling thread's current stream, which waits for the copies. The thread does not wait.
    pub fn finish(self) -> Result<Vec<Tensor>, Fault> {
        self.done.wait()?;
        self.tensors.iter().try_for_each(cuda::keep_for_stream)?;
        Ok(self.tensors)
    }
}

/// Makes a CUDA device the calling thread's current one, so that pinned memory which the thread allocates belongs to it.
pub(crate) fn attach_to_gpu(device: usize) -> Result<(), Fault> {
    CudaStream::current(device)?.enter()
}

/// The same values in pinned memory, from which a GPU copies without the help of the CPU; the tensor itself if it is there.
pub(crate) fn in_pinned_memory(tensor: &Tensor, device: usize) -> Result<Tensor, Fault> {
    let device = tch::Device::Cuda(device);
    if cuda::is_pinned(tensor) {
        return Ok(tensor.shallow_clone());
    }
    let dense = match layout(tensor) {
        Some(_) => tensor.shallow_clone(),
        None => tensor.f_contiguous()?,
    };
    let layout = layout(&dense).unwrap_or(super::Layout::Contiguous);
    let mut pinned = empty_near(device, &dense.size(), dense.kind(), layout)?;
    tch::no_grad(|| pinned.f_copy_(&dense))?;
    Ok(pinned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{self, Device, Layout};
    use tch::Kind;

    /// Needs a GPU, and DISTGPIPE_GPU_TESTS=1 to say that there is one.
    #[test]
    fn tensors_arrive_with_their_values_and_layout_while_the_next_are_copied() {
        if std::env::var_os("DISTGPIPE_GPU_TESTS").is_none() {
            eprintln!("NOT TESTED: set DISTGPIPE_GPU_TESTS=1 on a machine with a GPU");
            return;
        }
        let device = cuda::index(Device::Cuda(0).open().unwrap()).unwrap();
        let uploads = Uploads::new(device).unwrap();
        let images = |seed: i64| {
            let values = (Tensor::arange(1 << 20, (Kind::Float, tch::Device::Cpu)) + seed).view([16, 4, 128, 128]);
            engine::with_layout(&values, Layout::ChannelsLast).unwrap()
        };
        let start = |seed: i64| {
            let pinned = in_pinned_memory(&images(seed), device).unwrap();
            assert!(cuda::is_pinned(&pinned));
            // The pinned memory is given back while it is being read.
            uploads.start(&[&pinned, &Tensor::from_slice(&[seed])]).unwrap()
        };
        let mut next = start(0);
        for seed in 0..50 {
            let arrived = std::mem::replace(&mut next, start(seed + 1)).finish().unwrap();
            assert_eq!(layout(&arrived[0]), Some(Layout::ChannelsLast));
            let twice = &arrived[0] * 2.0;
            assert_eq!(twice.to_device(tch::Device::Cpu), images(seed) * 2.0, "batch {seed}");
            assert_eq!(arrived[1].int64_value(&[0]), seed);
        }
    }
}
