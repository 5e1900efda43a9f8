//! The devices of a run. CUDA support is loaded from `libtorch_cuda.so` at run time, so a binary that was built on a
//! machine without CUDA uses a GPU where libtorch has CUDA.

use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::fmt;
use std::str::FromStr;

/// A device as a user names it: `cpu`, `cuda:N` or `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Device {
    /// The CPU of the worker's host.
    #[default]
    Cpu,
    /// The CUDA device with this number.
    Cuda(usize),
    /// The first CUDA device if there is one, else the CPU.
    Auto,
}

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text does not name a device.
    #[error("unknown device `{got}`: expected `cpu`, `cuda:N` or `auto`")]
    Unknown {
        /// The text that was given.
        got: String,
    },
    /// `libtorch_cuda.so` could not be loaded.
    #[error("device `cuda:{index}` needs libtorch_cuda.so, which could not be loaded ({why}): put the lib directory of a CUDA build of libtorch 2.11.0 (for instance torch/lib of the pip package) into LD_LIBRARY_PATH, or use `cpu`")]
    NoCudaLibrary {
        /// The number of the requested device.
        index: usize,
        /// The error of the dynamic linker.
        why: String,
    },
    /// CUDA is available, but has no device of this number.
    #[error("device `cuda:{index}` does not exist: the number of CUDA devices in this machine is {count}")]
    NoSuchCuda {
        /// The number of the requested device.
        index: usize,
        /// How many CUDA devices there are.
        count: i64,
    },
}

impl Device {
    /// The libtorch device. Loads CUDA if needed, and fails if this machine does not have the device.
    pub fn open(self) -> Result<tch::Device, DeviceError> {
        match self {
            Device::Cpu => Ok(tch::Device::Cpu),
            Device::Cuda(index) => {
                load_cuda().map_err(|why| DeviceError::NoCudaLibrary { index, why })?;
                let count = tch::Cuda::device_count();
                if i64::try_from(index).is_ok_and(|i| i < count) {
                    Ok(tch::Device::Cuda(index))
                } else {
                    Err(DeviceError::NoSuchCuda { index, count })
                }
            }
            Device::Auto => self.resolved().open(),
        }
    }

    /// Resolves `auto` to a device of this machine. Any other device is returned as it is.
    pub fn resolved(self) -> Device {
        match self {
            Device::Auto if Device::Cuda(0).open().is_ok() => Device::Cuda(0),
            Device::Auto => Device::Cpu,
            device => device,
        }
    }
}

pub(super) fn load_cuda() -> Result<(), String> {
    static LOADED: std::sync::OnceLock<Result<(), String>> = std::sync::OnceLock::new();
    LOADED
        .get_or_init(|| {
            let name = CString::new("libtorch_cuda.so").expect("no NUL inside");
            // SAFETY: dlopen gets a constant name. The library registers its kernels in its initializers and is never
            // closed. dlerror is read on the same thread right after the failure.
            unsafe {
                if !libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL).is_null() {
                    return Ok(());
                }
                let why = libc::dlerror();
                Err(if why.is_null() {
                    "unknown reason".to_owned()
                } else {
                    std::ffi::CStr::from_ptr(why).to_string_lossy().into_owned()
                })
            }
        })
        .clone()
}

impl FromStr for Device {
    type Err = DeviceError;
    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let unknown = || DeviceError::Unknown { got: text.to_owned() };
        match text {
            "cpu" => Ok(Device::Cpu),
            "auto" => Ok(Device::Auto),
            "cuda" => Ok(Device::Cuda(0)),
            _ => text.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(Device::Cuda).ok_or_else(unknown),
        }
    }
}

/// The devices of a run, which its workers take in turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Devices(Vec<Device>);

impl Devices {
    /// The device of the worker with this number.
    pub fn for_worker(&self, worker: usize) -> Device {
        self.0.get(worker % self.0.len().max(1)).copied().unwrap_or_default()
    }

    /// All devices, in order.
    pub fn iter(&self) -> impl Iterator<Item = Device> + '_ {
        self.0.iter().copied()
    }

    /// How many devices were named; one that is named twice counts twice.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl Default for Devices {
    fn default() -> Self {
        Device::default().into()
    }
}

impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        Devices(vec![device])
    }
}

impl FromStr for Devices {
    type Err = DeviceError;
    fn from_str(text: &str) -> Result<Self, DeviceError> {
        text.split(',').map(|device| device.trim().parse()).collect::<Result<_, _>>().map(Devices)
    }
}

impl TryFrom<String> for Devices {
    type Error = DeviceError;
    fn try_from(text: String) -> Result<Self, DeviceError> {
        text.parse()
    }
}

impl From<Devices> for String {
    fn from(devices: Devices) -> String {
        devices.to_string()
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(Device::to_string).collect();
        f.write_str(&names.join(","))
    }
}

impl TryFrom<String> for Device {
    type Error = DeviceError;
    fn try_from(text: String) -> Result<Self, DeviceError> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> String {
        device.to_string()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(n) => write!(f, "cuda:{n}"),
            Device::Auto => f.write_str("auto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_take_devices_in_turn() {
        let devices: Devices = "cuda:1, cpu,cuda".parse().unwrap();
        let taken: Vec<Device> = (0..5).map(|worker| devices.for_worker(worker)).collect();
        assert_eq!(taken, [Device::Cuda(1), Device::Cpu, Device::Cuda(0), Device::Cuda(1), Device::Cpu]);
        assert_eq!(devices.to_string(), "cuda:1,cpu,cuda:0");
        assert_eq!(Devices::default().for_worker(3), Device::Cpu);
        for wrong in ["", "cpu,", "cuda:0;cuda:1", "tpu"] {
            assert!(wrong.parse::<Devices>().is_err(), "{wrong}");
        }
    }
}
