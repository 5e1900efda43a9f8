//! Which kernels libtorch chooses on CUDA devices. These settings belong to the process, not to a thread or a stream.

use libc::c_char;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

extern "C" {
    fn dg_cuda_math(
        tf32_products: bool,
        tf32_convolutions: bool,
        cudnn_benchmark: bool,
        cudnn_deterministic: bool,
    ) -> *mut c_char;
}

/// Where NVIDIA GPUs may round the inputs of 32-bit products to TF32, which has 10 bits of mantissa instead of 23 and is several times
/// as fast. Sums stay at 32 bits. It has no effect on a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tf32 {
    /// In convolutions, but not in matrix products. PyTorch's default.
    #[default]
    Convolutions,
    /// In convolutions and matrix products.
    On,
    /// Nowhere.
    Off,
}

impl FromStr for Tf32 {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "convolutions" => Ok(Tf32::Convolutions),
            "on" => Ok(Tf32::On),
            "off" => Ok(Tf32::Off),
            _ => Err("expected `on`, `off` or `convolutions`".to_owned()),
        }
    }
}

impl fmt::Display for Tf32 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Tf32::Convolutions => "convolutions",
            Tf32::On => "on",
            Tf32::Off => "off",
        })
    }
}

/// Sets where TF32 may be used, whether cuDNN measures its algorithms for each new shape, and whether it takes only those that give
/// equal bits in every run, for all of this process.
pub fn set_cuda_math(
    tf32: Tf32,
    cudnn_benchmark: bool,
    cudnn_deterministic: bool,
) -> Result<(), crate::failure::Fault> {
    let (products, convolutions) = (tf32 == Tf32::On, tf32 != Tf32::Off);
    // SAFETY: sets flags of libtorch's global context, which are plain values.
    super::ffi::outcome(unsafe { dg_cuda_math(products, convolutions, cudnn_benchmark, cudnn_deterministic) })
        .map_err(crate::failure::Fault::engine)
}
