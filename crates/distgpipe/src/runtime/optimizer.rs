//! Optimizers: the built-in ones, and the trait for your own. Each worker updates the parameters it holds. The built-in
//! formulas are PyTorch's.

use crate::engine;
use crate::failure::Fault;
use crate::model::layer::{Init, Role, TensorSpec};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::{Kind, Tensor};

/// How an optimizer updates one parameter. The learning rate comes with each call, from the run's schedule.
///
/// Implement this for an optimizer of your own and attach it with [`Model::with_optimizer`](crate::Model::with_optimizer);
/// `examples/own_loss_and_optimizer.rs` shows how. Checkpoints save and restore its state.
pub trait UpdateRule: Send + Sync {
    /// Identifies the rule and its constants. A checkpoint of one rule is not resumed under another.
    fn name(&self) -> String;

    /// The state that the rule keeps for each parameter, and that checkpoints therefore contain.
    fn slots(&self) -> &[Slot];

    /// Updates a parameter in place. Runs without autograd; `state.steps` counts this call.
    fn update(
        &self,
        parameter: &mut Tensor,
        gradient: &Tensor,
        state: &mut ParameterState,
        learning_rate: f64,
    ) -> Result<(), Fault>;

    /// How many tensors of the parameter's size the rule keeps for each parameter.
    fn state_tensors(&self) -> usize {
        self.slots().iter().filter(|slot| **slot != Slot::Steps).count()
    }
}

/// The built-in optimizers with their constants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Optim {
    /// Stochastic gradient descent.
    Sgd {
        /// The factor of the momentum buffer; 0 for none.
        momentum: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
        /// Whether to use Nesterov momentum.
        nesterov: bool,
    },
    /// Adam, with weight decay as an L2 penalty.
    Adam {
        /// Decay rate of the first moment.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Added to the denominator, for numerical stability.
        eps: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
    },
    /// Adam with decoupled weight decay.
    AdamW {
        /// Decay rate of the first moment.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Added to the denominator, for numerical stability.
        eps: f64,
        /// Decoupled weight decay, scaled by the learning rate.
        weight_decay: f64,
    },
    /// RMSprop, not centred.
    RmsProp {
        /// Decay rate of the mean square.
        alpha: f64,
        /// Added to the denominator, for numerical stability.
        eps: f64,
        /// The factor of the momentum buffer; 0 for none.
        momentum: f64,
        /// L2 penalty, added to the gradient.
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

    /// The same optimizer with another weight decay.
    pub fn with_weight_decay(mut self, decay: f64) -> Self {
        match &mut self {
            Optim::Sgd { weight_decay, .. }
            | Optim::Adam { weight_decay, .. }
            | Optim::AdamW { weight_decay, .. }
            | Optim::RmsProp { weight_decay, .. } => *weight_decay = decay,
        }
        self
    }
}

impl Default for Optim {
    fn default() -> Self {
        Optim::sgd(0.9)
    }
}

/// One piece of state that an optimizer keeps for a parameter. A checkpoint stores each as a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// [`ParameterState::steps`].
    Steps,
    /// [`ParameterState::first`].
    First,
    /// [`ParameterState::second`].
    Second,
}

impl Slot {
    /// The name and shape of the tensor that stores this slot of a parameter.
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

/// An optimizer's state for one parameter. Every rule uses these three slots, so that all are saved and loaded alike.
#[derive(Default)]
#[non_exhaustive]
pub struct ParameterState {
    /// How many times the parameter was updated, the current update included.
    pub steps: i32,
    /// A tensor of the parameter's shape: the momentum buffer, or Adam's first moment. `None` before the first update;
    /// zeros after a checkpoint of that state was loaded.
    pub first: Option<Tensor>,
    /// A tensor of the parameter's shape: the mean square of the gradients, or Adam's second moment.
    pub second: Option<Tensor>,
}

/// How one parameter is updated, and its state.
struct OptimizedParameter {
    rule: Arc<dyn UpdateRule>,
    rate_factor: f64,
    state: ParameterState,
}

/// An update rule and its state for each parameter that a worker trains, in the worker's order of parameters.
pub struct Optimizer {
    rule: Arc<dyn UpdateRule>,
    parameters: Vec<OptimizedParameter>,
}

impl Optimizer {
    /// An optimizer for this many parameters, without state yet.
    pub fn new(rule: Arc<dyn UpdateRule>, parameters: usize) -> Self {
        let parameter =
            || OptimizedParameter { rule: rule.clone(), rate_factor: 1.0, state: ParameterState::default() };
        Optimizer { parameters: std::iter::repeat_with(parameter).take(parameters).collect(), rule }
    }

    /// Multiplies the learning rate of a parameter, given by its index, and replaces its rule if there is another. The
    /// other rule must have the same slots.
    pub fn set_group(
        &mut self,
        index: usize,
        rate_factor: f64,
        rule: Option<Arc<dyn UpdateRule>>,
    ) -> Result<(), Fault> {
        let parameter = self.parameters.get_mut(index).ok_or_else(|| no_parameter(index))?;
        parameter.rate_factor = rate_factor;
        if let Some(rule) = rule {
            parameter.rule = rule;
        }
        Ok(())
    }

    /// The state that the rule keeps for each parameter.
    pub fn slots(&self) -> &[Slot] {
        self.rule.slots()
    }

    /// Updates each parameter that has a gradient. The parameters must come in the same order every time.
    pub fn step<'a>(&mut self, parameters: impl Iterator<Item = &'a Tensor>, learning_rate: f64) -> Result<(), Fault> {
        tch::no_grad(|| {
            for (parameter, OptimizedParameter { rule, rate_factor, state }) in parameters.zip(&mut self.parameters) {
                if let Some(gradient) = engine::grad(parameter) {
                    state.steps += 1;
                    rule.update(&mut parameter.shallow_clone(), &gradient, state, learning_rate * *rate_factor)?;
                }
            }
            Ok(())
        })
    }

    /// One slot of the state of a parameter, given by its index. A slot that was never written reads as 0.
    pub fn state(&self, index: usize, slot: Slot, parameter: &Tensor) -> Result<Tensor, Fault> {
        let state = &self.parameters.get(index).ok_or_else(|| no_parameter(index))?.state;
        let kept = match slot {
            Slot::Steps => return Ok(Tensor::from(i64::from(state.steps))),
            Slot::First => &state.first,
            Slot::Second => &state.second,
        };
        match kept {
            Some(tensor) => Ok(tensor.shallow_clone()),
            None => Ok(parameter.f_detach()?.f_zeros_like()?),
        }
    }

    /// Loads one slot of the state of a parameter, given by its index.
    pub fn set_state(&mut self, index: usize, slot: Slot, parameter: &Tensor, value: &Tensor) -> Result<(), Fault> {
        let state = &mut self.parameters.get_mut(index).ok_or_else(|| no_parameter(index))?.state;
        if slot == Slot::Steps {
            let steps = i64::try_from(value)?;
            state.steps = i32::try_from(steps).map_err(|_| {
                Fault::protocol(format!("an optimizer state of at most {} steps", i32::MAX), steps.to_string())
            })?;
            return Ok(());
        }
        // On the parameter's device and in its layout.
        let mut tensor = parameter.f_detach()?.f_zeros_like()?;
        tensor.f_copy_(value)?;
        match slot {
            Slot::First => state.first = Some(tensor),
            _ => state.second = Some(tensor),
        }
        Ok(())
    }
}

fn no_parameter(index: usize) -> Fault {
    Fault::internal("a parameter of this worker", format!("index {index}"))
}

impl UpdateRule for Optim {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn slots(&self) -> &[Slot] {
        match self {
            Optim::Sgd { momentum: 0.0, .. } => &[Slot::Steps],
            Optim::Sgd { .. } => &[Slot::Steps, Slot::First],
            Optim::RmsProp { momentum: 0.0, .. } => &[Slot::Steps, Slot::Second],
            Optim::RmsProp { .. } | Optim::Adam { .. } | Optim::AdamW { .. } => {
                &[Slot::Steps, Slot::First, Slot::Second]
            }
        }
    }

    fn update(
        &self,
        p: &mut Tensor,
        gradient: &Tensor,
        state: &mut ParameterState,
        learning_rate: f64,
    ) -> Result<(), Fault> {
        match *self {
            Optim::Sgd { momentum, weight_decay, nesterov } => {
                let gradient = decayed(gradient, p, weight_decay)?;
                if momentum == 0.0 {
                    return add_scaled(p, &gradient, -learning_rate);
                }
                let buffer = match state.first.take() {
                    Some(mut buffer) => buffer.f_mul_scalar_(momentum)?.f_add_(&gradient)?,
                    None => engine::copy(&gradient)?,
                };
                let direction =
                    if nesterov { gradient.f_add(&buffer.f_mul_scalar(momentum)?)? } else { buffer.shallow_clone() };
                state.first = Some(buffer);
                add_scaled(p, &direction, -learning_rate)
            }
            Optim::Adam { beta1, beta2, eps, weight_decay } => {
                let gradient = decayed(gradient, p, weight_decay)?;
                Moments { beta1, beta2, eps }.update(p, &gradient, state, learning_rate)
            }
            Optim::AdamW { beta1, beta2, eps, weight_decay } => {
                let _ = p.f_mul_scalar_(1.0 - learning_rate * weight_decay)?;
                Moments { beta1, beta2, eps }.update(p, gradient, state, learning_rate)
            }
            Optim::RmsProp { alpha, eps, momentum, weight_decay } => {
                let gradient = decayed(gradient, p, weight_decay)?;
                let square = state.second.get_or_insert(gradient.f_zeros_like()?);
                let _ = square.f_mul_scalar_(alpha)?.f_addcmul_(&gradient, &gradient.f_mul_scalar(1.0 - alpha)?)?;
                let scaled = gradient.f_div(&square.f_sqrt()?.f_add_scalar_(eps)?)?;
                if momentum == 0.0 {
                    return add_scaled(p, &scaled, -learning_rate);
                }
                let buffer = match state.first.take() {
                    Some(mut buffer) => buffer.f_mul_scalar_(momentum)?.f_add_(&scaled)?,
                    None => scaled,
                };
                let moved = add_scaled(p, &buffer, -learning_rate);
                state.first = Some(buffer);
                moved
            }
        }
    }
}

/// The update that Adam and AdamW share.
struct Moments {
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl Moments {
    fn update(
        self,
        p: &mut Tensor,
        gradient: &Tensor,
        state: &mut ParameterState,
        learning_rate: f64,
    ) -> Result<(), Fault> {
        let Moments { beta1, beta2, eps } = self;
        let first = state.first.get_or_insert(gradient.f_zeros_like()?);
        let _ = first.f_lerp_(gradient, 1.0 - beta1)?;
        let second = state.second.get_or_insert(gradient.f_zeros_like()?);
        let _ = second.f_mul_scalar_(beta2)?.f_addcmul_(gradient, &gradient.f_mul_scalar(1.0 - beta2)?)?;
        let correction1 = 1.0 - beta1.powi(state.steps);
        let correction2 = 1.0 - beta2.powi(state.steps);
        let scale = second.f_sqrt()?.f_div_scalar_(correction2.sqrt())?.f_add_scalar_(eps)?;
        add_scaled(p, &first.f_div(&scale)?, -learning_rate / correction1)
    }
}

/// The gradient with its L2 penalty.
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
