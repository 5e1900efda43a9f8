//! How precisely a worker computes: in 32-bit floats, or under libtorch's autocast to bfloat16.
//!
//! Under autocast matrix products and convolutions take and give bfloat16, what needs the digits (losses, statistics of
//! norms) stays at 32 bits, and the rest goes on in what it gets. Parameters, their gradients and the optimizer are of
//! 32 bits throughout: a parameter is cast where it is used, and the cast is part of the graph. The backward pass runs
//! outside; it follows the types of the forward pass by itself.
//!
//! PyTorch keeps such casts for as long as its context lasts. Here they are not kept, for three reasons:
//!
//! - It keeps them for every leaf, and at a partition's border an activation is one. Gradients of its uses would be added
//!   as bfloat16 where there is a border and as 32-bit floats where there is none, so they would depend on the cut.
//! - All threads of a process share what is kept, so one worker leaving its pass would drop what another is using.
//! - A parameter is used by one layer, mostly once a pass, and no pass shares a graph with another.

use super::ffi;
use crate::failure::Fault;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

/// What a pipeline computes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    Fp32,
    /// bfloat16 where autocast takes it; parameters and their gradients stay 32-bit floats.
    Bf16,
}

impl Precision {
    /// Whether a layer that promises `promised` may make `made`.
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

/// While it lives, this thread computes in the precision it was made with; then as before, whether all went well or not.
#[must_use = "the thread computes as before once this is dropped"]
pub struct Autocast {
    before: Option<ffi::Casting>,
    // What it changes and puts back is this thread's.
    here: PhantomData<*const ()>,
}

impl Autocast {
    /// On this thread, for what is computed on `device`.
    pub fn enter(precision: Precision, device: tch::Device) -> Result<Self, Fault> {
        let before = match precision {
            Precision::Fp32 => None,
            Precision::Bf16 => Some(ffi::autocast_enter(device.is_cuda()).map_err(Fault::Engine)?),
        };
        Ok(Autocast { before, here: PhantomData })
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
