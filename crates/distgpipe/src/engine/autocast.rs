//! The precision of a worker: 32-bit floats, or libtorch's autocast to bfloat16.
//!
//! Under autocast, matrix products and convolutions take and return bfloat16, operations that need the digits (losses,
//! statistics of norms) stay at 32 bits, and all others keep the type of their input. Parameters, their gradients and
//! the optimizer's state are always 32-bit floats: a parameter is cast where it is used, and the cast is part of the
//! graph. The backward pass runs outside autocast, because it follows the types of the forward pass.
//!
//! PyTorch caches these casts until its autocast context ends. Here the cache is off, for three reasons:
//!
//! - PyTorch caches the cast of every leaf, and at a partition's border an activation is a leaf. The gradients of its uses
//!   would be added in bfloat16 at a border and in 32 bits elsewhere, so they would depend on the cut.
//! - All threads of a process share the cache, so a worker that leaves its pass would drop casts that another still uses.
//! - One layer uses a parameter, mostly once in a pass, and no two passes share a graph. There is little to cache.
//!
//! Recorded passes on a GPU cast a parameter once per step: `Partition::find_casts` finds those that passes only cast, and recorded
//! passes read the cast.

use super::ffi;
use crate::failure::Fault;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

/// The floating-point precision of forward passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit floats throughout.
    #[default]
    Fp32,
    /// bfloat16 where autocast uses it. Parameters and their gradients stay 32-bit floats.
    Bf16,
}

impl Precision {
    /// Whether a layer that declares output of type `promised` may return `made`.
    pub fn allows(self, promised: tch::Kind, made: tch::Kind) -> bool {
        let cast = self == Precision::Bf16 && promised == tch::Kind::Float && made == tch::Kind::BFloat16;
        made == promised || cast
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fp32" => Ok(Precision::Fp32),
            "bf16" => Ok(Precision::Bf16),
            _ => Err("expected `fp32` or `bf16`".to_owned()),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
        })
    }
}

/// A guard: until it is dropped, the thread computes in the precision that it was entered with. Dropping it restores
/// the thread's previous settings, also after an error or a panic.
#[must_use = "dropping the guard restores the previous precision"]
pub struct Autocast {
    before: Option<ffi::AutocastState>,
    // Not `Send`: it must be dropped on the thread whose settings it restores.
    not_send: PhantomData<*const ()>,
}

impl Autocast {
    /// Sets the precision of this thread's operations on `device`.
    pub fn enter(precision: Precision, device: tch::Device) -> Result<Self, Fault> {
        let before = match precision {
            Precision::Fp32 => None,
            Precision::Bf16 => Some(ffi::autocast_enter(device.is_cuda()).map_err(Fault::engine)?),
        };
        Ok(Autocast { before, not_send: PhantomData })
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            ffi::autocast_leave(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    fn product() -> Kind {
        let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
        x.matmul(&x).kind()
    }

    #[test]
    fn a_thread_casts_inside_and_not_after_whatever_happened() {
        let autocast = || Autocast::enter(Precision::Bf16, Device::Cpu).unwrap();
        {
            let _outer = autocast();
            assert_eq!(product(), Kind::BFloat16);
            drop(autocast());
            assert_eq!(product(), Kind::BFloat16, "the inner one puts back what the outer one set");
            assert_eq!(std::thread::spawn(product).join().unwrap(), Kind::Float, "another thread");
        }
        assert_eq!(product(), Kind::Float);
        let panicked = std::panic::catch_unwind(|| {
            let _inside = autocast();
            panic!("a layer");
        });
        assert!(panicked.is_err());
        assert_eq!(product(), Kind::Float);
        let _plain = Autocast::enter(Precision::Fp32, Device::Cpu).unwrap();
        assert_eq!(product(), Kind::Float);
    }

    #[test]
    fn only_floats_may_arrive_as_bfloat16_and_only_if_the_run_says_so() {
        use Kind::{BFloat16, Float, Half, Int64};
        let made = [Float, BFloat16, Half, Int64];
        let allowed = |precision: Precision, promised| made.map(|made| precision.allows(promised, made));
        assert_eq!(allowed(Precision::Fp32, Float), [true, false, false, false]);
        assert_eq!(allowed(Precision::Bf16, Float), [true, true, false, false]);
        assert_eq!(allowed(Precision::Bf16, Int64), [false, false, false, true]);
    }

    #[test]
    fn a_precision_is_written_as_it_is_read() {
        for precision in [Precision::Fp32, Precision::Bf16] {
            assert_eq!(precision.to_string().parse(), Ok(precision));
            assert_eq!(serde_json::to_string(&precision).unwrap(), format!("\"{precision}\""));
        }
        assert_eq!("fp16".parse::<Precision>(), Err("expected `fp32` or `bf16`".to_owned()));
    }
}
