//! Optimizers: each worker steps the parameters it holds. The formulas are PyTorch's.

use crate::engine;
use crate::failure::Fault;
use crate::layer::{Init, Role, TensorSpec};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

/// Which optimizer, with its constants. The learning rate comes with each step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Optim {
    /// Stochastic gradient descent.
    Sgd {
        /// How much of the last direction is kept.
        momentum: f64,
        /// Pulls parameters towards 0, through the gradient.
        weight_decay: f64,
        /// Looks one step of momentum ahead.
        nesterov: bool,
    },
    /// Adam, its weight decay through the gradient.
    Adam {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Keeps the division safe.
        eps: f64,
        /// Pulls parameters towards 0, through the gradient.
        weight_decay: f64,
    },
    /// Adam with weight decay apart from the gradient.
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Keeps the division safe.
        eps: f64,
        /// Pulls parameters towards 0, directly.
        weight_decay: f64,
    },
    /// RMSprop, not centred.
    RmsProp {
        /// Decay of the mean square.
        alpha: f64,
        /// Keeps the division safe.
        eps: f64,
        /// How much of the last direction is kept.
        momentum: f64,
        /// Pulls parameters towards 0, through the gradient.
        weight_decay: f64,
    },
}

impl Optim {
    /// Plain SGD with this momentum.
    pub fn sgd(momentum: f64) -> Self {
        Optim::Sgd { momentum, weight_decay: 0.0, nesterov: false }
    }

    /// Adam with PyTorch's constants.
    pub fn adam() -> Self {
        Optim::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }

    /// AdamW with PyTorch's constants.
    pub fn adamw() -> Self {
        Optim::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }

    /// RMSprop with PyTorch's constants and this momentum.
    pub fn rms_prop(momentum: f64) -> Self {
        Optim::RmsProp { alpha: 0.99, eps: 1e-8, momentum, weight_decay: 0.0 }
    }

    /// The same with another weight decay.
    pub fn with_weight_decay(mut self, decay: f64) -> Self {
        match &mut self {
            Optim::Sgd { weight_decay, .. }
            | Optim::Adam { weight_decay, .. }
            | Optim::AdamW { weight_decay, .. }
            | Optim::RmsProp { weight_decay, .. } => *weight_decay = decay,
        }
        self
    }

    /// What it remembers of each parameter.
    pub fn slots(self) -> &'static [Slot] {
        match self {
            Optim::Sgd { momentum: 0.0, .. } => &[Slot::Steps],
            Optim::Sgd { .. } => &[Slot::Steps, Slot::First],
            Optim::RmsProp { momentum: 0.0, .. } => &[Slot::Steps, Slot::Second],
            Optim::RmsProp { .. } | Optim::Adam { .. } | Optim::AdamW { .. } => {
                &[Slot::Steps, Slot::First, Slot::Second]
            }
        }
    }

    /// How many numbers it remembers for each that is learned.
    pub fn remembers(self) -> usize {
        self.slots().iter().filter(|slot| **slot != Slot::Steps).count()
    }
}

impl Default for Optim {
    fn default() -> Self {
        Optim::sgd(0.9)
    }
}

/// One thing that an optimizer remembers of a parameter; a checkpoint has each as a tensor of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// How often it was stepped.
    Steps,
    /// The direction that is kept.
    First,
    /// The mean square of gradients.
    Second,
}

impl Slot {
    /// The tensor that has it, for a parameter.
    pub fn spec(self, parameter: &TensorSpec) -> TensorSpec {
        let (prefix, dims, kind) = match self {
            Slot::Steps => ("steps", Vec::new(), Kind::Int64),
            Slot::First => ("first", parameter.dims.clone(), parameter.kind),
            Slot::Second => ("second", parameter.dims.clone(), parameter.kind),
        };
        let name = format!("{prefix}.{}", parameter.name);
        TensorSpec { name, dims, kind, role: Role::Buffer, init: Init::Constant(0.0) }
    }
}

/// An optimizer's memory of one parameter. All optimizers make do with these, so that it is saved and loaded alike.
#[derive(Default)]
struct Memory {
    steps: i32,
    /// The direction that is kept: a momentum buffer, or Adam's first moment.
    first: Option<Tensor>,
    /// The mean square of gradients.
    second: Option<Tensor>,
}

/// An optimizer and what it remembers of each parameter, in the order they are given.
pub struct Optimizer {
    optim: Optim,
    memory: Vec<Memory>,
}

impl Optimizer {
    /// For so many parameters.
    pub fn new(optim: Optim, parameters: usize) -> Self {
        Optimizer { optim, memory: std::iter::repeat_with(Memory::default).take(parameters).collect() }
    }

    /// Moves each parameter that has a gradient. The parameters must come in the same order every time.
    pub fn step<'a>(&mut self, parameters: impl Iterator<Item = &'a Tensor>, learning_rate: f64) -> Result<(), Fault> {
        tch::no_grad(|| {
            for (parameter, memory) in parameters.zip(&mut self.memory) {
                if let Some(gradient) = engine::grad(parameter) {
                    memory.steps += 1;
                    self.optim.update(&mut parameter.shallow_clone(), &gradient, memory, learning_rate)?;
                }
            }
            Ok(())
        })
    }

    /// What is remembered of the parameter of this number. What was never written counts as 0, which is what every
    /// optimizer makes of it.
    pub fn remembered(&self, index: usize, slot: Slot, parameter: &Tensor) -> Result<Tensor, Fault> {
        let memory = self.memory.get(index).ok_or_else(|| no_parameter(index))?;
        let kept = match slot {
            Slot::Steps => return Ok(Tensor::from(i64::from(memory.steps))),
            Slot::First => &memory.first,
            Slot::Second => &memory.second,
        };
        match kept {
            Some(tensor) => Ok(tensor.shallow_clone()),
            None => Ok(parameter.f_detach()?.f_zeros_like()?),
        }
    }

    /// Takes over what was remembered of the parameter of this number.
    pub fn remember(&mut self, index: usize, slot: Slot, parameter: &Tensor, value: &Tensor) -> Result<(), Fault> {
        let memory = self.memory.get_mut(index).ok_or_else(|| no_parameter(index))?;
        if slot == Slot::Steps {
            let steps = i64::try_from(value)?;
            memory.steps = i32::try_from(steps)
                .map_err(|_| Fault::protocol(format!("at most {} steps", i32::MAX), steps.to_string()))?;
            return Ok(());
        }
        // On the parameter's device and laid out as it is.
        let mut tensor = parameter.f_detach()?.f_zeros_like()?;
        tensor.f_copy_(value)?;
        match slot {
            Slot::First => memory.first = Some(tensor),
            _ => memory.second = Some(tensor),
        }
        Ok(())
    }
}

fn no_parameter(index: usize) -> Fault {
    Fault::protocol("a parameter of this worker", format!("number {index}"))
}

impl Optim {
    fn update(self, p: &mut Tensor, gradient: &Tensor, memory: &mut Memory, lr: f64) -> Result<(), Fault> {
        match self {
            Optim::Sgd { momentum, weight_decay, nesterov } => {
                let gradient = decayed(gradient, p, weight_decay)?;
                if momentum == 0.0 {
                    return add_scaled(p, &gradient, -lr);
                }
                let buffer = match memory.first.take() {
                    Some(mut buffer) => buffer.f_mul_scalar_(momentum)?.f_add_(&gradient)?,
                    None => engine::copy(&gradient)?,
                };
                let direction =
                    if nesterov { gradient.f_add(&buffer.f_mul_scalar(momentum)?)? } else { buffer.shallow_clone() };
                memory.first = Some(buffer);
                add_scaled(p, &direction, -lr)
            }
            Optim::Adam { beta1, beta2, eps, weight_decay } => {
                let gradient = decayed(gradient, p, weight_decay)?;
                Moments { beta1, beta2, eps }.update(p, &gradient, memory, lr)
            }
            Optim::AdamW { beta1, beta2, eps, weight_decay } => {
                let _ = p.f_mul_scalar_(1.0 - lr * weight_decay)?;
                Moments { beta1, beta2, eps }.update(p, gradient, memory, lr)
            }
            Optim::RmsProp { alpha, eps, momentum, weight_decay } => {
                let gradient = decayed(gradient, p, weight_decay)?;
                let square = memory.second.get_or_insert(gradient.f_zeros_like()?);
                let _ = square.f_mul_scalar_(alpha)?.f_addcmul_(&gradient, &gradient.f_mul_scalar(1.0 - alpha)?)?;
                let scaled = gradient.f_div(&square.f_sqrt()?.f_add_scalar_(eps)?)?;
                if momentum == 0.0 {
                    return add_scaled(p, &scaled, -lr);
                }
                let buffer = match memory.first.take() {
                    Some(mut buffer) => buffer.f_mul_scalar_(momentum)?.f_add_(&scaled)?,
                    None => scaled,
                };
                let moved = add_scaled(p, &buffer, -lr);
                memory.first = Some(buffer);
                moved
            }
        }
    }
}

/// What Adam and AdamW have in common.
struct Moments {
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl Moments {
    fn update(self, p: &mut Tensor, gradient: &Tensor, memory: &mut Memory, lr: f64) -> Result<(), Fault> {
        let Moments { beta1, beta2, eps } = self;
        let first = memory.first.get_or_insert(gradient.f_zeros_like()?);
        let _ = first.f_lerp_(gradient, 1.0 - beta1)?;
        let second = memory.second.get_or_insert(gradient.f_zeros_like()?);
        let _ = second.f_mul_scalar_(beta2)?.f_addcmul_(gradient, &gradient.f_mul_scalar(1.0 - beta2)?)?;
        let correction1 = 1.0 - beta1.powi(memory.steps);
        let correction2 = 1.0 - beta2.powi(memory.steps);
        let scale = second.f_sqrt()?.f_div_scalar_(correction2.sqrt())?.f_add_scalar_(eps)?;
        add_scaled(p, &first.f_div(&scale)?, -lr / correction1)
    }
}

/// The gradient, with the pull of the parameter towards 0.
fn decayed(gradient: &Tensor, p: &Tensor, weight_decay: f64) -> Result<Tensor, Fault> {
    Ok(match weight_decay {
        0.0 => gradient.shallow_clone(),
        decay => gradient.f_add(&p.f_mul_scalar(decay)?)?,
    })
}

/// `p += factor · x`.
fn add_scaled(p: &mut Tensor, x: &Tensor, factor: f64) -> Result<(), Fault> {
    let _ = p.f_add_(&x.f_mul_scalar(factor)?)?;
    Ok(())
}
