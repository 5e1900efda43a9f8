//! Kernels of our own for NVIDIA GPUs, compiled at run time from the sources in `kernels/`, for the GPU that is there. To build
//! the project takes neither CUDA's headers nor its compiler.
//!
//! A kernel of a codec, of a mask or of images computes what a function of the CPU computes, bit for bit. A C++ compiler for the CPU
//! understands the kernels too, so that tests compare the two without a GPU.

pub mod codecs;
mod driver;
mod images;
mod instance_norm;
mod library;
mod nvrtc;

use super::cuda;
use crate::failure::Fault;
use crate::sync::lock;
use driver::{Driver, Extent, Function};
pub use images::{can_resize_images, resize_images, ImageForm, ImageResizing};
pub use instance_norm::{instance_norm, NORM_EPSILON};
use libc::{c_int, c_void};
pub(super) use library::Library;
pub(super) use nvrtc::Nvrtc;
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};
use tch::{Kind, Tensor};

/// A source file with kernels.
pub(super) struct Program {
    name: &'static str,
    source: &'static str,
    /// The files that the source includes, by name.
    headers: &'static [(&'static str, &'static str)],
    kernels: &'static [&'static CStr],
}

const PORTABLE: (&str, &str) = ("portable.cuh", include_str!("kernels/portable.cuh"));

static RANDOM: Program = Program {
    name: "random.cu",
    source: include_str!("kernels/random.cu"),
    headers: &[PORTABLE, ("random.cuh", include_str!("kernels/random.cuh"))],
    kernels: &[c"bernoulli_16", c"bernoulli_32", c"bernoulli_64"],
};

/// All programs.
static PROGRAMS: [&Program; 4] = [&RANDOM, &codecs::PROGRAM, &images::PROGRAM, &instance_norm::PROGRAM];

/// A program that has been compiled for a device and loaded.
struct Module {
    functions: HashMap<&'static CStr, Function>,
}

/// The modules of this process, by the name of the program and the number of the device. A failure is kept too.
static MODULES: Mutex<Modules> = Mutex::new(None);
type Modules = Option<HashMap<(&'static str, usize), Result<Arc<Module>, String>>>;

impl Program {
    /// The program on a device, compiled at the first call.
    fn on(&self, device: usize) -> Result<Arc<Module>, Fault> {
        let mut modules = lock(&MODULES);
        let module = modules.get_or_insert_default().entry((self.name, device)).or_insert_with(|| self.load(device));
        module.clone().map_err(Fault::Kernels)
    }

    fn load(&self, device: usize) -> Result<Arc<Module>, String> {
        let driver = Driver::get()?;
        let index = c_int::try_from(device).map_err(|_| format!("expected the number of a GPU, got {device}"))?;
        let context = driver.open(index)?;
        let code = Nvrtc::get()?.compile(self, context.architecture)?;
        let functions = driver.functions(context, &code, self.kernels)?;
        Ok(Arc::new(Module { functions: self.kernels.iter().copied().zip(functions).collect() }))
    }
}

impl Module {
    /// Enqueues a kernel on the thread's current stream of a device.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn launch(
        &self,
        device: usize,
        kernel: &CStr,
        extent: Extent,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Fault> {
        let function = self.functions.get(kernel);
        let function = function.ok_or_else(|| Fault::internal("a kernel of the program", kernel.to_string_lossy()))?;
        let stream = cuda::current_stream(device)?;
        // SAFETY: as the caller promises; the stream is one of this device.
        let launched = unsafe { Driver::get().and_then(|driver| driver.launch(*function, extent, stream, arguments)) };
        launched.map_err(Fault::Kernels)
    }
}

/// A pointer to an argument of a kernel.
fn argument<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

/// The blocks of `threads` threads for this many pieces of work, at most as many as fill any GPU several times; the kernels go on
/// with the next piece in a loop.
fn extent(work: usize, threads: u32) -> Extent {
    let blocks = work.div_ceil(threads as usize).clamp(1, 1 << 14);
    Extent { blocks: blocks as u32, threads }
}

/// The number of a CUDA device.
fn cuda_index(tensor: &Tensor) -> Result<usize, Fault> {
    match tensor.device() {
        tch::Device::Cuda(index) => Ok(index),
        other => Err(Fault::internal("a tensor on a CUDA device", format!("one on {other:?}"))),
    }
}

/// Whether kernels can be compiled and launched on this device; otherwise why not.
pub fn check(device: usize) -> Result<(), Fault> {
    PROGRAMS.into_iter().try_for_each(|program| program.on(device).map(drop))
}

/// Fills a dense tensor on a CUDA device as [`Stream::bernoulli`](super::Stream::bernoulli) does, with the seed in `seed`, an `Int64`
/// tensor of one element on the same device. The kernel reads the seed when it runs, so a captured launch can be replayed with
/// another one.
pub fn bernoulli(tensor: &mut Tensor, p: f64, seed: &Tensor) -> Result<(), Fault> {
    let device = cuda_index(tensor)?;
    let (kernel, mut one) = match tensor.kind() {
        Kind::Float => (c"bernoulli_32", u64::from(1f32.to_bits())),
        Kind::Double => (c"bernoulli_64", 1f64.to_bits()),
        Kind::Half => (c"bernoulli_16", 0x3c00),
        Kind::BFloat16 => (c"bernoulli_16", 0x3f80),
        other => return Err(Fault::internal("a tensor of floats", format!("one of {other:?}"))),
    };
    let one_seed = seed.kind() == Kind::Int64 && seed.numel() == 1 && seed.device() == tensor.device();
    if !one_seed || super::layout(tensor).is_none() {
        let got = format!("a seed {seed:?} and a tensor with strides {:?}", tensor.stride());
        return Err(Fault::internal("a seed on the tensor's device, and a dense tensor", got));
    }
    let (mut count, mut threshold) = (tensor.numel() as u64, super::random::threshold(p));
    if count == 0 {
        return Ok(());
    }
    let module = RANDOM.on(device)?;
    let (mut out, mut seed_at) = (tensor.data_ptr(), seed.data_ptr());
    let arguments = &mut [
        argument(&mut out),
        argument(&mut count),
        argument(&mut seed_at),
        argument(&mut threshold),
        argument(&mut one),
    ];
    // SAFETY: the arguments are those of the kernel. A dense tensor has `count` elements of the kernel's size from its data pointer, and
    // the seed has eight bytes. libtorch reuses the memory of tensors only for work behind this one on the same stream.
    unsafe { module.launch(device, kernel, extent(tensor.numel().div_ceil(2), 256), arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVRTC, if it is on this machine. `make test-kernels` installs it for these tests, and they must find it then.
    fn nvrtc() -> Option<&'static Nvrtc> {
        match Nvrtc::get() {
            Ok(nvrtc) => Some(nvrtc),
            Err(why) if std::env::var_os("DISTGPIPE_KERNEL_TESTS").is_some() => panic!("{why}"),
            Err(why) => {
                eprintln!("NOT TESTED, `make test-kernels` does: {why}");
                None
            }
        }
    }

    /// A fused multiply-add rounds once instead of twice, so codes at midpoints would differ from those of the CPU.
    #[test]
    fn every_kernel_compiles_and_has_no_fused_multiply_add() {
        let Some(nvrtc) = nvrtc() else { return };
        for program in PROGRAMS {
            for architecture in nvrtc.architectures().unwrap() {
                let code = nvrtc.ptx(program, architecture).unwrap();
                let text = String::from_utf8_lossy(code.bytes());
                for kernel in program.kernels {
                    let entry = format!(".entry {}(", kernel.to_string_lossy());
                    assert!(text.contains(&entry), "{} has no {entry}", program.name);
                }
                assert!(!text.contains("fma."), "{} for {architecture}", program.name);
            }
        }
    }

    #[test]
    fn code_is_for_the_gpu_that_is_there_or_for_one_before_it() {
        let Some(nvrtc) = nvrtc() else { return };
        assert!(matches!(nvrtc.compile(&RANDOM, 90), Ok(nvrtc::Code::Cubin(_))));
        assert!(matches!(nvrtc.compile(&RANDOM, 990), Ok(nvrtc::Code::Ptx(_))));
        let refused = nvrtc.compile(&RANDOM, 35).unwrap_err();
        assert!(refused.contains("and the GPU has 3.5"), "{refused}");
        let wrong =
            Program { name: "wrong.cu", source: "__global__ void f() { nothing(); }", headers: &[], kernels: &[] };
        let refused = nvrtc.compile(&wrong, 90).unwrap_err();
        assert!(refused.contains("compiling the kernels of wrong.cu") && refused.contains("nothing"), "{refused}");
    }
}
