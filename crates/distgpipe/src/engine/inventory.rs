//! What this machine has to compute on, and which of the libraries that a GPU needs can be loaded.

use super::kernels::{Library, Nvrtc};
use super::{ffi, Device};
use libc::{c_char, c_int, c_uint};
use serde::Serialize;
use std::ffi::CStr;
use std::path::Path;

/// What [`inventory`] finds.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Inventory {
    /// The processor.
    pub cpu: CpuInfo,
    /// The CUDA devices, in the order of their numbers, as NVIDIA's driver describes them.
    pub cuda: Vec<CudaInfo>,
    /// The libraries that a GPU needs.
    pub libraries: Vec<GpuLibrary>,
    /// The device that [`Device::Auto`] takes.
    pub auto: Device,
}

/// The processor and the memory of this machine.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct CpuInfo {
    /// The processor's name; empty if the kernel does not tell.
    pub name: String,
    /// The cores that this process may use.
    pub cores: usize,
    /// All memory of the machine.
    pub memory_bytes: u64,
    /// The instruction set of libtorch's kernels, such as `AVX512`.
    pub instructions: String,
}

/// A CUDA device.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct CudaInfo {
    /// Its number, as in `cuda:0`.
    pub index: usize,
    /// The product's name.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// The compute capability: major and minor version.
    pub compute_capability: (i32, i32),
}

/// A library that a GPU needs.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct GpuLibrary {
    /// The name that the dynamic linker looks for.
    pub file: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// Its version, if it works and tells.
    pub version: Option<String>,
    /// What is wrong; `None` if it works.
    pub problem: Option<String>,
    /// What to do about the problem.
    pub remedy: Option<&'static str>,
}

const NO_DRIVER: &str = "install NVIDIA's driver, version 580 or later; in a container, start it with access to the GPUs (`docker run --gpus all`)";
const NO_DEVICE: &str = "check that `nvidia-smi` lists a GPU, and that CUDA_VISIBLE_DEVICES is unset or names one";
const NO_KERNELS: &str = "run `pip install torch==2.11.0`, and put the package's folder torch/lib into LD_LIBRARY_PATH; or build after `make setup CUDA=1`, which needs no LD_LIBRARY_PATH";
const NO_COMPILER: &str = "run `pip install torch==2.11.0`, which brings it along; without it, codecs run on the CPU";

/// Looks at the processor, the CUDA devices and the libraries of a GPU. Loads these libraries where they are found.
pub fn inventory() -> Inventory {
    let (driver, cuda) = driver();
    let kernels = GpuLibrary::new("libtorch_cuda.so", "libtorch's kernels", super::device::load_cuda(), NO_KERNELS);
    let compiler =
        GpuLibrary::new("libnvrtc.so.13", "compiler of the codecs' kernels", Nvrtc::get().map(|_| ()), NO_COMPILER);
    Inventory { cpu: cpu(), cuda, libraries: vec![driver, kernels, compiler], auto: Device::Auto.resolved() }
}

impl GpuLibrary {
    fn new(file: &'static str, purpose: &'static str, loaded: Result<(), String>, remedy: &'static str) -> Self {
        let problem = loaded.err();
        GpuLibrary { file, purpose, version: None, remedy: problem.is_some().then_some(remedy), problem }
    }
}

fn cpu() -> CpuInfo {
    let field = |path: &str, name: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.split_once(':'))
            .map(|(_, value)| value.trim().to_owned());
        value.unwrap_or_default()
    };
    let kilobytes = field("/proc/meminfo", "MemTotal");
    CpuInfo {
        name: field("/proc/cpuinfo", "model name"),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: kilobytes.trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10,
        instructions: ffi::cpu_capability(),
    }
}

/// NVIDIA's driver, and the devices that it knows.
fn driver() -> (GpuLibrary, Vec<CudaInfo>) {
    let file =
        |problem: Result<(), String>, remedy| GpuLibrary::new("libcuda.so.1", "NVIDIA's driver", problem, remedy);
    let library = match Library::open(Path::new("libcuda.so.1")) {
        Ok(library) => library,
        Err(why) => return (file(Err(why), NO_DRIVER), Vec::new()),
    };
    match devices(&library) {
        Ok((cuda_version, devices)) if !devices.is_empty() => {
            let kernel_module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
            let version = match module_version(&kernel_module) {
                Some(version) => format!("{version}, CUDA {cuda_version}"),
                None => format!("CUDA {cuda_version}"),
            };
            (GpuLibrary { version: Some(version), ..file(Ok(()), NO_DRIVER) }, devices)
        }
        Ok(_) => (file(Err("it finds no GPU".to_owned()), NO_DEVICE), Vec::new()),
        Err(why) => (file(Err(why), NO_DEVICE), Vec::new()),
    }
}

/// The version in the text of `/proc/driver/nvidia/version`: the first word that consists of numbers and dots.
fn module_version(text: &str) -> Option<&str> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version)
}

/// The CUDA version of the driver, and its devices.
fn devices(library: &Library) -> Result<(String, Vec<CudaInfo>), String> {
    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
    const CAPABILITY: [c_int; 2] = [75, 76];
    const NAME_BYTES: usize = 256;
    let check = |function: &str, status: c_int| match status {
        0 => Ok(()),
        status => Err(format!("{function} failed with CUDA error {status}")),
    };
    // SAFETY: these are the signatures of the driver's functions, which have been stable since CUDA 3.2.
    let (init, version, count, get, name, memory, attribute) = unsafe {
        (
            library.function::<extern "C" fn(c_uint) -> c_int>(c"cuInit")?,
            library.function::<extern "C" fn(*mut c_int) -> c_int>(c"cuDriverGetVersion")?,
            library.function::<extern "C" fn(*mut c_int) -> c_int>(c"cuDeviceGetCount")?,
            library.function::<extern "C" fn(*mut c_int, c_int) -> c_int>(c"cuDeviceGet")?,
            library.function::<extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(c"cuDeviceGetName")?,
            library.function::<extern "C" fn(*mut usize, c_int) -> c_int>(c"cuDeviceTotalMem_v2")?,
            library.function::<extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(c"cuDeviceGetAttribute")?,
        )
    };
    check("cuInit", init(0))?;
    let (mut number, mut devices) = (0, 0);
    check("cuDriverGetVersion", version(&mut number))?;
    check("cuDeviceGetCount", count(&mut devices))?;
    let describe = |index: c_int| {
        let (mut device, mut memory_bytes, mut capability) = (0, 0_usize, [0; 2]);
        let mut text = [0_u8; NAME_BYTES];
        check("cuDeviceGet", get(&mut device, index))?;
        check("cuDeviceGetName", name(text.as_mut_ptr().cast(), NAME_BYTES as c_int, device))?;
        check("cuDeviceTotalMem", memory(&mut memory_bytes, device))?;
        for (value, which) in capability.iter_mut().zip(CAPABILITY) {
            check("cuDeviceGetAttribute", attribute(value, which, device))?;
        }
        let name =
            CStr::from_bytes_until_nul(&text).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        let index = usize::try_from(index).unwrap_or(0);
        Ok(CudaInfo {
            index,
            name,
            memory_bytes: memory_bytes as u64,
            compute_capability: (capability[0], capability[1]),
        })
    };
    let devices = (0..devices).map(describe).collect::<Result<_, String>>()?;
    Ok((format!("{}.{}", number / 1000, number % 1000 / 10), devices))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report about a machine without a GPU must be of use, too.
    #[test]
    fn every_problem_has_a_remedy_and_the_cpu_is_described() {
        let found = inventory();
        assert!(
            found.cpu.cores > 0 && found.cpu.memory_bytes > 1 << 20 && !found.cpu.instructions.is_empty(),
            "{found:?}"
        );
        assert_eq!(found.libraries.len(), 3);
        for library in &found.libraries {
            assert_eq!(library.problem.is_some(), library.remedy.is_some(), "{library:?}");
        }
        assert_eq!(
            found.auto == Device::Cpu,
            found.cuda.is_empty() || found.libraries[1].problem.is_some(),
            "{found:?}"
        );
    }

    #[test]
    fn the_drivers_version_is_the_first_number_with_dots() {
        let text =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Nov  4 11:00:00 UTC 2025\nGCC version:";
        assert_eq!(module_version(text), Some("580.159.04"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build";
        assert_eq!((module_version(open), module_version("")), (Some("570.86.10"), None));
    }
}
