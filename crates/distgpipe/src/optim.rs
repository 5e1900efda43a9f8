//! Optimizers: each worker steps the parameters it holds. The formulas are PyTorch's.

use crate::engine;
use crate::failure::Fault;
use serde::{Deserialize, Serialize};
use tch::Tensor;

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
}

impl Optim {
    /// Plain SGD with this momentum.
    pub fn sgd(momentum: f64) -> Self {
        Optim::Sgd { momentum, weight_decay: 0.0, nesterov: false }
    }

    /// AdamW with PyTorch's constants.
    pub fn adamw() -> Self {
        Optim::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }

    /// How many numbers it remembers for each that is learned.
    pub fn remembers(self) -> usize {
        match self {
            Optim::Sgd { momentum: 0.0, .. } => 0,
            Optim::Sgd { .. } => 1,
            Optim::AdamW { .. } => 2,
        }
    }
}

impl Default for Optim {
    fn default() -> Self {
        Optim::sgd(0.9)
    }
}

/// An optimizer's memory of one parameter.
#[derive(Default)]
struct Memory {
    steps: i32,
    first: Option<Tensor>,
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
}

impl Optim {
    fn update(self, p: &mut Tensor, gradient: &Tensor, memory: &mut Memory, lr: f64) -> Result<(), Fault> {
        match self {
            Optim::Sgd { momentum, weight_decay, nesterov } => {
                let gradient = match weight_decay {
                    0.0 => gradient.shallow_clone(),
                    decay => gradient.f_add(&p.f_mul_scalar(decay)?)?,
                };
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
            Optim::AdamW { beta1, beta2, eps, weight_decay } => {
                let _ = p.f_mul_scalar_(1.0 - lr * weight_decay)?;
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
    }
}

/// `p += factor · x`.
fn add_scaled(p: &mut Tensor, x: &Tensor, factor: f64) -> Result<(), Fault> {
    let _ = p.f_add_(&x.f_mul_scalar(factor)?)?;
    Ok(())
}
