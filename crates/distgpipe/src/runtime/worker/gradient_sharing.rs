//! What replicas exchange: their gradients before each update, and the first replica's parameters when a run starts.

use super::BuiltWorker;
use crate::comm::protocol::{Purpose, StepCommand};
use crate::engine;
use crate::failure::Fault;
use crate::model::layer::Role;
use crate::runtime::partition::Partition;
use tch::Tensor;

impl BuiltWorker {
    /// Replaces the gradients of each replica by their sum over all replicas. Each replica's gradient covers its part
    /// of the batch, so the sum is the gradient of the batch. A training step also copies the first replica's buffers
    /// to the others, because the batch norms of each replica saw other rows. Does nothing without replicas.
    pub(super) fn all_reduce_gradients(&mut self, step: &StepCommand) -> Result<(), Fault> {
        let Some(ring) = &self.ring else { return Ok(()) };
        let parameters: Vec<Tensor> = self.parameters().map(Tensor::shallow_clone).collect();
        let (mut gradients, mut has_gradient) = (Vec::new(), Vec::new());
        for parameter in &parameters {
            let gradient = engine::grad(parameter);
            has_gradient.push(if gradient.is_some() { 1.0_f32 } else { 0.0 });
            // A layer may use a parameter for some rows only, so that one replica has a gradient and another has none.
            gradients.push(gradient.map_or_else(|| parameter.f_detach()?.f_zeros_like(), Ok)?);
        }
        // Summed along with the gradients: the number of replicas that have a gradient for each parameter.
        let users = Tensor::f_from_slice(&has_gradient)?.f_to_device(self.stage.device)?;
        let buffers = self.float_tensors(|role| role == Role::Buffer && step.purpose == Purpose::Train);
        let all: Vec<Tensor> = gradients.iter().chain([&users]).chain(&buffers).map(Tensor::shallow_clone).collect();
        tch::no_grad(|| {
            ring.zero_unless_first(&buffers)?;
            ring.all_reduce(&mut self.stage, step.number, &all)
        })?;
        if has_gradient.contains(&0.0) {
            let users = Vec::<f32>::try_from(users.f_to_device(tch::Device::Cpu)?)?;
            for i in (0..parameters.len()).filter(|&i| has_gradient[i] == 0.0 && users[i] > 0.0) {
                set_gradient(&parameters[i], &gradients[i])?;
            }
        }
        Ok(())
    }

    /// Overwrites the parameters and buffers of all replicas with those of the first. Initial values that another kind
    /// of machine drew may differ in their last bits.
    pub(super) fn broadcast_parameters(&mut self) -> Result<(), Fault> {
        let Some(ring) = &self.ring else { return Ok(()) };
        let all = self.float_tensors(|_| true);
        tch::no_grad(|| ring.broadcast(&mut self.stage, &all))?;
        // The time this took belongs to no step.
        self.stage.recorder.take();
        Ok(())
    }

    /// The floating-point tensors of some roles. Integer tensors, such as counters, are the same in all replicas.
    fn float_tensors(&self, wanted: impl Fn(Role) -> bool) -> Vec<Tensor> {
        let tensors = self.stage.partitions.values().flat_map(Partition::tensors);
        let floats = tensors.filter(|(spec, tensor)| wanted(spec.role) && engine::is_float(tensor));
        floats.map(|(_, tensor)| tensor.shallow_clone()).collect()
    }
}

/// Gives a parameter that has no gradient this one.
fn set_gradient(parameter: &Tensor, value: &Tensor) -> Result<(), Fault> {
    // A backward pass over zeros makes libtorch allocate the gradient.
    engine::backward(&[(parameter.f_zeros_like()?.f_mul(parameter)?.f_sum(parameter.kind())?, None)])?;
    let mut gradient = engine::grad(parameter)
        .ok_or_else(|| Fault::internal("a gradient after the backward pass over a parameter", "none"))?;
    tch::no_grad(|| gradient.f_copy_(value))?;
    Ok(())
}
