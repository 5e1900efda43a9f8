//! Optimizers: the built-in ones, and the trait for your own. Each worker updates the parameters it holds. The built-in
//! formulas are PyTorch's.

use crate::engine::{self, FusedAdam, FusedSgd, TensorList};
use crate::failure::Fault;
use crate::model::layer::{Init, Role, TensorSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
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

    /// Updates several parameters in place, all at the same `state.steps`. Each slot is present in all their states or in none.
    ///
    /// The default updates one after another. The built-in rules apply each operation to all of them, which takes far fewer
    /// kernel launches on a GPU and gives the same bits.
    fn update_all(&self, updates: &mut [ParameterUpdate<'_>], learning_rate: f64) -> Result<(), Fault> {
        updates.iter_mut().try_for_each(|ParameterUpdate { parameter, gradient, state }| {
            self.update(parameter, gradient, state, learning_rate)
        })
    }

    /// How many tensors of the parameter's size the rule keeps for each parameter.
    fn state_tensors(&self) -> usize {
        self.slots().iter().filter(|slot| **slot != Slot::Steps).count()
    }
}

/// The built-in optimizers with their constants.
// The fields of each are in alphabetical order, as in the manifest of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Optim {
    /// Stochastic gradient descent.
    Sgd {
        /// The factor of the momentum buffer; 0 for none.
        momentum: f64,
        /// Whether to use Nesterov momentum.
        nesterov: bool,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
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

/// One of the parameters that [`UpdateRule::update_all`] updates.
#[non_exhaustive]
pub struct ParameterUpdate<'a> {
    /// The parameter, which the rule changes in place.
    pub parameter: Tensor,
    /// Its gradient.
    pub gradient: Tensor,
    /// The rule's state for it.
    pub state: &'a mut ParameterState,
}

/// How one parameter is updated, and its state.
#[derive(Default)]
struct OptimizedParameter {
    /// The index of its rule.
    rule: usize,
    rate_factor: f64,
    state: ParameterState,
}

/// What parameters that are updated together have in common.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct UpdateGroup {
    rule: usize,
    rate_factor_bits: u64,
    steps: i32,
    has_first: bool,
    has_second: bool,
}

/// How many bytes of parameters are updated together. An update needs a few temporary tensors of their size. Those of a CPU
/// should stay in its cache from one operation to the next; a GPU should spend more time on an operation than on its launch.
fn group_bytes_max(device: tch::Device) -> usize {
    match device {
        tch::Device::Cpu => 64 << 10,
        _ => 128 << 20,
    }
}

/// The update rules of a worker's parameters and their state, in the worker's order of parameters.
pub struct Optimizer {
    /// The rule of the run, and those of parameter groups, each with its name.
    rules: Vec<(String, Arc<dyn UpdateRule>)>,
    parameters: Vec<OptimizedParameter>,
}

impl Optimizer {
    /// An optimizer for this many parameters, without state yet.
    pub fn new(rule: Arc<dyn UpdateRule>, parameters: usize) -> Self {
        let parameter = || OptimizedParameter { rate_factor: 1.0, ..OptimizedParameter::default() };
        let parameters = std::iter::repeat_with(parameter).take(parameters).collect();
        Optimizer { rules: vec![(rule.name(), rule)], parameters }
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
            let name = rule.name();
            parameter.rule = self.rules.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
                self.rules.push((name, rule));
                self.rules.len() - 1
            });
        }
        Ok(())
    }

    /// The state that the rule keeps for each parameter.
    pub fn slots(&self) -> &[Slot] {
        self.rules[0].1.slots()
    }

    /// Updates each parameter that has a gradient. The parameters must come in the same order every time.
    pub fn step<'a>(&mut self, parameters: impl Iterator<Item = &'a Tensor>, learning_rate: f64) -> Result<(), Fault> {
        let mut groups: BTreeMap<UpdateGroup, Vec<ParameterUpdate<'_>>> = BTreeMap::new();
        for (parameter, OptimizedParameter { rule, rate_factor, state }) in parameters.zip(&mut self.parameters) {
            if let Some(gradient) = engine::grad(parameter) {
                state.steps += 1;
                let group = UpdateGroup {
                    rule: *rule,
                    rate_factor_bits: rate_factor.to_bits(),
                    steps: state.steps,
                    has_first: state.first.is_some(),
                    has_second: state.second.is_some(),
                };
                let update = ParameterUpdate { parameter: parameter.shallow_clone(), gradient, state };
                groups.entry(group).or_default().push(update);
            }
        }
        tch::no_grad(|| {
            groups.iter_mut().try_for_each(|(group, updates)| {
                let rate_factor = f64::from_bits(group.rate_factor_bits);
                let (_, rule) = &self.rules[group.rule];
                let mut rest = &mut updates[..];
                while !rest.is_empty() {
                    let (together, later) = rest.split_at_mut(updated_together(rest));
                    rule.update_all(together, learning_rate * rate_factor)?;
                    rest = later;
                }
                Ok(())
            })
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
        parameter: &mut Tensor,
        gradient: &Tensor,
        state: &mut ParameterState,
        learning_rate: f64,
    ) -> Result<(), Fault> {
        let (parameter, gradient) = (parameter.shallow_clone(), gradient.shallow_clone());
        self.update_all(&mut [ParameterUpdate { parameter, gradient, state }], learning_rate)
    }

    fn update_all(&self, updates: &mut [ParameterUpdate<'_>], learning_rate: f64) -> Result<(), Fault> {
        let p: TensorList = updates.iter().map(|update| &update.parameter).collect();
        let gradients: TensorList = updates.iter().map(|update| &update.gradient).collect();
        match *self {
            Optim::Sgd { momentum, weight_decay, nesterov } => {
                let gradients = decayed(gradients, &p, weight_decay)?;
                if momentum == 0.0 {
                    return add_scaled(&p, &gradients, -learning_rate);
                }
                let buffers = match slot_of(updates, |state| &mut state.first) {
                    Some(buffers) => {
                        buffers.mul_scalar_(momentum)?.add_(&gradients)?;
                        buffers
                    }
                    None => fill_slot(updates, |state| &mut state.first, gradients.copied()?),
                };
                if nesterov {
                    return add_scaled(&p, &gradients.add(&buffers.mul_scalar(momentum)?)?, -learning_rate);
                }
                add_scaled(&p, &buffers, -learning_rate)
            }
            Optim::Adam { beta1, beta2, eps, weight_decay } => {
                let gradients = decayed(gradients, &p, weight_decay)?;
                Moments { beta1, beta2, eps }.update(&p, &gradients, updates, learning_rate)
            }
            Optim::AdamW { beta1, beta2, eps, weight_decay } => {
                p.mul_scalar_(1.0 - learning_rate * weight_decay)?;
                Moments { beta1, beta2, eps }.update(&p, &gradients, updates, learning_rate)
            }
            Optim::RmsProp { alpha, eps, momentum, weight_decay } => {
                let gradients = decayed(gradients, &p, weight_decay)?;
                let squares = slot_or_zeros(updates, |state| &mut state.second, &gradients)?;
                squares.mul_scalar_(alpha)?.addcmul_(&gradients, &gradients.mul_scalar(1.0 - alpha)?)?;
                let roots = squares.sqrt()?;
                let scaled = gradients.div(roots.add_scalar_(eps)?)?;
                if momentum == 0.0 {
                    return add_scaled(&p, &scaled, -learning_rate);
                }
                let buffers = match slot_of(updates, |state| &mut state.first) {
                    Some(buffers) => {
                        buffers.mul_scalar_(momentum)?.add_(&scaled)?;
                        buffers
                    }
                    None => fill_slot(updates, |state| &mut state.first, scaled),
                };
                add_scaled(&p, &buffers, -learning_rate)
            }
        }
    }
}

/// A built-in optimizer whose update is one of libtorch's fused kernels. It has the state of the optimizer, and its results to rounding.
pub(crate) struct FusedOptim(Optim);

/// libtorch has no fused kernel for an optimizer.
#[derive(Debug, thiserror::Error)]
#[error("expected SGD, Adam or AdamW, for which libtorch has a fused update, got {got}: choose one of them, or leave the option out")]
pub struct NotFused {
    /// The optimizer.
    got: String,
}

impl FusedOptim {
    pub fn new(optim: Optim) -> Result<Self, NotFused> {
        match optim {
            Optim::Sgd { .. } | Optim::Adam { .. } | Optim::AdamW { .. } => Ok(FusedOptim(optim)),
            Optim::RmsProp { .. } => Err(NotFused { got: "RMSprop".to_owned() }),
        }
    }
}

impl NotFused {
    /// The model has an optimizer of its own.
    pub(crate) fn own_rule(name: &str) -> Self {
        NotFused { got: format!("the model's own optimizer `{name}`") }
    }
}

impl UpdateRule for FusedOptim {
    fn name(&self) -> String {
        self.0.name()
    }

    fn slots(&self) -> &[Slot] {
        self.0.slots()
    }

    fn update(
        &self,
        parameter: &mut Tensor,
        gradient: &Tensor,
        state: &mut ParameterState,
        learning_rate: f64,
    ) -> Result<(), Fault> {
        let (parameter, gradient) = (parameter.shallow_clone(), gradient.shallow_clone());
        self.update_all(&mut [ParameterUpdate { parameter, gradient, state }], learning_rate)
    }

    fn update_all(&self, updates: &mut [ParameterUpdate<'_>], learning_rate: f64) -> Result<(), Fault> {
        let p: TensorList = updates.iter().map(|update| &update.parameter).collect();
        let gradients: TensorList = updates.iter().map(|update| &update.gradient).collect();
        match self.0 {
            Optim::Sgd { momentum, weight_decay, nesterov } => {
                let known = slot_of(updates, |state| &mut state.first);
                let first_step = known.is_none();
                let buffers = match (momentum, known) {
                    (0.0, _) => None,
                    (_, Some(buffers)) => Some(buffers),
                    (_, None) => Some(fill_slot(updates, |state| &mut state.first, gradients.zeros_like()?)),
                };
                let with = FusedSgd { learning_rate, momentum, weight_decay, nesterov, first_step };
                p.fused_sgd(&gradients, buffers.as_ref(), &with)
            }
            Optim::Adam { beta1, beta2, eps, weight_decay } | Optim::AdamW { beta1, beta2, eps, weight_decay } => {
                let first = slot_or_zeros(updates, |state| &mut state.first, &gradients)?;
                let second = slot_or_zeros(updates, |state| &mut state.second, &gradients)?;
                let decoupled = matches!(self.0, Optim::AdamW { .. });
                let steps = updates.first().map_or(0, |update| update.state.steps);
                let with = FusedAdam { learning_rate, beta1, beta2, eps, weight_decay, decoupled, steps };
                p.fused_adam(&gradients, [&first, &second], &with)
            }
            Optim::RmsProp { .. } => Err(Fault::internal("an optimizer with a fused update", "RMSprop")),
        }
    }
}

/// How many of these updates, at least one, are made together.
fn updated_together(updates: &[ParameterUpdate<'_>]) -> usize {
    let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
    let mut bytes_left = updates.first().map_or(0, |update| group_bytes_max(update.parameter.device()));
    let fits = |update: &&ParameterUpdate<'_>| {
        let left = bytes_left.checked_sub(bytes(&update.parameter));
        bytes_left = left.unwrap_or(0);
        left.is_some()
    };
    updates.iter().take_while(fits).count().max(1)
}

/// The tensors of one slot, or `None` before the first update.
fn slot_of(
    updates: &mut [ParameterUpdate<'_>],
    slot: impl Fn(&mut ParameterState) -> &mut Option<Tensor>,
) -> Option<TensorList> {
    let kept = |update: &mut ParameterUpdate<'_>| slot(update.state).as_ref().map(Tensor::shallow_clone);
    updates.iter_mut().map(kept).collect::<Option<Vec<Tensor>>>().map(TensorList::from_iter)
}

/// Stores the first tensors of a slot.
fn fill_slot(
    updates: &mut [ParameterUpdate<'_>],
    slot: impl Fn(&mut ParameterState) -> &mut Option<Tensor>,
    tensors: TensorList,
) -> TensorList {
    for (update, tensor) in updates.iter_mut().zip(tensors.iter()) {
        *slot(update.state) = Some(tensor.shallow_clone());
    }
    tensors
}

/// The tensors of one slot, which are zeros before the first update.
fn slot_or_zeros(
    updates: &mut [ParameterUpdate<'_>],
    slot: impl Fn(&mut ParameterState) -> &mut Option<Tensor>,
    like: &TensorList,
) -> Result<TensorList, Fault> {
    match slot_of(updates, &slot) {
        Some(tensors) => Ok(tensors),
        None => Ok(fill_slot(updates, slot, like.zeros_like()?)),
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
        p: &TensorList,
        gradients: &TensorList,
        updates: &mut [ParameterUpdate<'_>],
        learning_rate: f64,
    ) -> Result<(), Fault> {
        let Moments { beta1, beta2, eps } = self;
        let steps = updates.first().map_or(0, |update| update.state.steps);
        let first = slot_or_zeros(updates, |state| &mut state.first, gradients)?;
        first.lerp_(gradients, 1.0 - beta1)?;
        let second = slot_or_zeros(updates, |state| &mut state.second, gradients)?;
        second.mul_scalar_(beta2)?.addcmul_(gradients, &gradients.mul_scalar(1.0 - beta2)?)?;
        let correction1 = 1.0 - beta1.powi(steps);
        let correction2 = 1.0 - beta2.powi(steps);
        let scale = second.sqrt()?;
        scale.div_scalar_(correction2.sqrt())?.add_scalar_(eps)?;
        add_scaled(p, &first.div(&scale)?, -learning_rate / correction1)
    }
}

/// The gradients with their L2 penalty.
fn decayed(gradients: TensorList, p: &TensorList, weight_decay: f64) -> Result<TensorList, Fault> {
    match weight_decay {
        0.0 => Ok(gradients),
        decay => gradients.add(&p.mul_scalar(decay)?),
    }
}

/// `p += factor · x`.
fn add_scaled(p: &TensorList, x: &TensorList, factor: f64) -> Result<(), Fault> {
    p.add_(&x.mul_scalar(factor)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Device, Layout};

    /// The formulas of the built-in rules, written for one tensor with libtorch's operations on single tensors.
    struct OneByOne(Optim);

    impl OneByOne {
        fn moments(
            p: &mut Tensor,
            g: &Tensor,
            state: &mut ParameterState,
            learning_rate: f64,
            (beta1, beta2, eps): (f64, f64, f64),
        ) -> Result<(), Fault> {
            let first = state.first.get_or_insert(g.zeros_like());
            let _ = first.lerp_(g, 1.0 - beta1);
            let second = state.second.get_or_insert(g.zeros_like());
            let _ = second.f_mul_scalar_(beta2)?.f_addcmul_(g, &g.f_mul_scalar(1.0 - beta2)?)?;
            let (correction1, correction2) = (1.0 - beta1.powi(state.steps), 1.0 - beta2.powi(state.steps));
            let scale = second.f_sqrt()?.f_div_scalar_(correction2.sqrt())?.f_add_scalar_(eps)?;
            let _ = p.f_add_(&first.f_div(&scale)?.f_mul_scalar(-learning_rate / correction1)?)?;
            Ok(())
        }
    }

    impl UpdateRule for OneByOne {
        fn name(&self) -> String {
            self.0.name()
        }
        fn slots(&self) -> &[Slot] {
            self.0.slots()
        }
        fn update(
            &self,
            p: &mut Tensor,
            gradient: &Tensor,
            state: &mut ParameterState,
            learning_rate: f64,
        ) -> Result<(), Fault> {
            let decayed = |decay: f64, p: &Tensor| match decay {
                0.0 => gradient.shallow_clone(),
                decay => gradient + p.f_mul_scalar(decay).unwrap(),
            };
            let with_momentum = |state: &mut ParameterState, momentum: f64, x: &Tensor| {
                let buffer = match state.first.take() {
                    Some(mut buffer) => buffer.f_mul_scalar_(momentum)?.f_add_(x)?,
                    None => engine::copy(x)?,
                };
                state.first = Some(buffer.shallow_clone());
                Ok::<_, Fault>(buffer)
            };
            let moved = match self.0 {
                Optim::Sgd { momentum: 0.0, weight_decay, .. } => decayed(weight_decay, p),
                Optim::Sgd { momentum, weight_decay, nesterov } => {
                    let g = decayed(weight_decay, p);
                    let buffer = with_momentum(state, momentum, &g)?;
                    if nesterov {
                        g.f_add(&buffer.f_mul_scalar(momentum)?)?
                    } else {
                        buffer
                    }
                }
                Optim::Adam { beta1, beta2, eps, weight_decay } => {
                    let g = decayed(weight_decay, p);
                    return Self::moments(p, &g, state, learning_rate, (beta1, beta2, eps));
                }
                Optim::AdamW { beta1, beta2, eps, weight_decay } => {
                    let _ = p.f_mul_scalar_(1.0 - learning_rate * weight_decay)?;
                    return Self::moments(p, gradient, state, learning_rate, (beta1, beta2, eps));
                }
                Optim::RmsProp { alpha, eps, momentum, weight_decay } => {
                    let g = decayed(weight_decay, p);
                    let square = state.second.get_or_insert(g.zeros_like());
                    let _ = square.f_mul_scalar_(alpha)?.f_addcmul_(&g, &g.f_mul_scalar(1.0 - alpha)?)?;
                    let scaled = g.f_div(&square.f_sqrt()?.f_add_scalar_(eps)?)?;
                    if momentum == 0.0 {
                        scaled
                    } else {
                        with_momentum(state, momentum, &scaled)?
                    }
                }
            };
            let _ = p.f_add_(&moved.f_mul_scalar(-learning_rate)?)?;
            Ok(())
        }
    }

    /// Parameters of several shapes, one of them channels-last; the last is larger than what is updated together on a CPU.
    fn parameters(device: tch::Device) -> Vec<Tensor> {
        let shapes: [&[i64]; 6] = [&[7], &[3, 5], &[8, 3, 3, 3], &[1], &[16, 8, 1, 1], &[200, 300]];
        let parameter = |(seed, dims): (i64, &[i64])| {
            let count: i64 = dims.iter().product();
            let values =
                (Tensor::arange(count, (Kind::Float, tch::Device::Cpu)) * (0.37 + seed as f64)).sin().view(dims);
            let values =
                if dims.len() == 4 { engine::with_layout(&values, Layout::ChannelsLast).unwrap() } else { values };
            values.to_device(device).set_requires_grad(true)
        };
        (0..).zip(shapes).map(parameter).collect()
    }

    /// Makes this many updates and gives all values: parameters and state. One parameter has no gradient in the second step, and one
    /// has a learning rate and a weight decay of its own.
    fn train(
        device: tch::Device,
        updates: usize,
        optim: Optim,
        rule: impl Fn(Optim) -> Arc<dyn UpdateRule>,
    ) -> Vec<Vec<f32>> {
        let parameters = parameters(device);
        let mut optimizer = Optimizer::new(rule(optim), parameters.len());
        for index in [1, 4] {
            optimizer.set_group(index, 0.5, Some(rule(optim.with_weight_decay(0.1)))).unwrap();
        }
        for step in 0..updates {
            for (i, parameter) in parameters.iter().enumerate() {
                engine::clear_grad(parameter);
                if (step, i) != (1, 2) {
                    ((parameter * (1.3 + step as f64)).sin() * (0.7 + i as f64)).sum(Kind::Float).backward();
                }
            }
            optimizer.step(parameters.iter(), 0.03 / (1.0 + step as f64)).unwrap();
        }
        let slots: Vec<Slot> = optimizer.slots().iter().copied().filter(|slot| *slot != Slot::Steps).collect();
        let state = |(i, parameter): (usize, &Tensor)| {
            let kept = slots.iter().map(|slot| optimizer.state(i, *slot, parameter).unwrap()).collect::<Vec<_>>();
            kept.into_iter().chain([parameter.detach()]).collect::<Vec<_>>()
        };
        let flat = |tensor: Tensor| Vec::try_from(tensor.to_device(tch::Device::Cpu).contiguous().view(-1)).unwrap();
        parameters.iter().enumerate().flat_map(state).map(flat).collect()
    }

    /// On the CPU, and on a GPU where there is one.
    #[test]
    fn parameters_that_are_updated_together_have_the_bits_of_single_updates() {
        let rules = [
            Optim::sgd(0.0),
            Optim::sgd(0.9).with_weight_decay(1e-2),
            Optim::Sgd { momentum: 0.9, weight_decay: 1e-2, nesterov: true },
            Optim::adam(),
            Optim::adam().with_weight_decay(1e-2),
            Optim::adamw(),
            Optim::rms_prop(0.0),
            Optim::rms_prop(0.9).with_weight_decay(1e-2),
        ];
        let bits = |values: Vec<Vec<f32>>| values.into_iter().flatten().map(f32::to_bits).collect::<Vec<_>>();
        for device in [Device::Cpu, Device::Cuda(0)].iter().filter_map(|device| device.open().ok()) {
            for optim in rules {
                let together = bits(train(device, 5, optim, |optim| Arc::new(optim)));
                let single = bits(train(device, 5, optim, |optim| Arc::new(OneByOne(optim))));
                let different = together.iter().zip(&single).filter(|(a, b)| a != b).count();
                assert_eq!((different, together.len()), (0, single.len()), "{device:?}, {optim:?}");
            }
        }
    }

    /// On the CPU, and on a GPU where there is one. Two updates only: more of them amplify the difference.
    #[test]
    fn a_fused_update_is_the_update_to_rounding() {
        let sgd = Optim::Sgd { momentum: 0.9, weight_decay: 1e-2, nesterov: true };
        for device in [Device::Cpu, Device::Cuda(0)].iter().filter_map(|device| device.open().ok()) {
            for optim in [Optim::sgd(0.0), Optim::sgd(0.9), sgd, Optim::adam().with_weight_decay(1e-2), Optim::adamw()]
            {
                let fused = train(device, 2, optim, |optim| Arc::new(FusedOptim::new(optim).unwrap()));
                let expected = train(device, 2, optim, |optim| Arc::new(optim));
                let off = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs().max(1.0);
                let gap = fused.iter().flatten().zip(expected.iter().flatten()).map(off).fold(0.0, f32::max);
                assert!(gap < 1e-5, "{device:?}, {optim:?}: off by {gap:e}");
            }
        }
        let refused = FusedOptim::new(Optim::rms_prop(0.9)).err().unwrap().to_string();
        assert!(refused.contains("SGD, Adam or AdamW") && refused.contains("got RMSprop"), "{refused}");
    }

    #[test]
    fn a_group_has_at_most_its_bytes_and_at_least_one_parameter() {
        let parameters = [1 << 10, 8 << 10, 8 << 10, 100 << 10, 1]
            .map(|count: i64| Tensor::zeros([count], (Kind::Float, tch::Device::Cpu)));
        let mut states: Vec<ParameterState> = parameters.iter().map(|_| ParameterState::default()).collect();
        let update = |(parameter, state)| {
            let parameter: &Tensor = parameter;
            ParameterUpdate { parameter: parameter.shallow_clone(), gradient: parameter.shallow_clone(), state }
        };
        let updates: Vec<_> = parameters.iter().zip(&mut states).map(update).collect();
        let sizes: Vec<usize> = (0..parameters.len()).map(|from| updated_together(&updates[from..])).collect();
        assert_eq!(sizes, [2, 2, 1, 1, 1]);
    }
}
