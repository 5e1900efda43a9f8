//! State transfer: the worker sends tensors to the driver ([`Command::Collect`]) or overwrites its own with tensors
//! that the driver sends ([`Command::Load`]), one message per tensor.
//!
//! [`Command::Collect`]: crate::comm::protocol::Command::Collect
//! [`Command::Load`]: crate::comm::protocol::Command::Load

use super::BuiltWorker;
use crate::comm::message::{Message, Tag};
use crate::comm::protocol::TensorSet;
use crate::engine;
use crate::failure::Fault;
use crate::model::layer::{Role, TensorSpec};
use crate::runtime::optimizer::Slot;
use crate::runtime::partition::Partition;
use distgpipe_core::wire::Kind;
use std::collections::{BTreeMap, BTreeSet};
use tch::Tensor;

/// One tensor of the optimizer's state.
struct OptimizerTensor<'a> {
    /// The parameter's index among the parameters of this worker.
    index: usize,
    slot: Slot,
    parameter: &'a Tensor,
    /// The name and shape it has in a checkpoint.
    spec: TensorSpec,
}

impl BuiltWorker {
    /// Reports the names of the tensors of a set, then sends them in that order. `wanted` limits them to some names.
    pub(super) fn collect(&mut self, number: u64, set: TensorSet, wanted: Option<Vec<String>>) -> Result<(), Fault> {
        let wanted: Option<BTreeSet<String>> = wanted.map(|names| names.into_iter().collect());
        let wants = |name: &str| wanted.as_ref().is_none_or(|wanted| wanted.contains(name));
        let (names, tensors): (Vec<_>, Vec<_>) = match set {
            // The driver always asks for all of them.
            TensorSet::Captured => std::mem::take(&mut self.stage.captured),
            TensorSet::State | TensorSet::Gradients => self.model_tensors(set, wants)?,
            TensorSet::Optimizer => self.optimizer_tensors(wants)?,
        }
        .into_iter()
        .unzip();
        let text = serde_json::to_vec(&names)
            .map_err(|e| Fault::internal("tensor names that can be written as JSON", e.to_string()))?;
        let worker = self.stage.id;
        self.stage.driver.send(Message::text(Tag::control(Kind::Report, number, worker), text))?;
        for (i, tensor) in tensors.into_iter().enumerate() {
            // A copy, because the next step changes the tensor and the memory transport does not copy. It is made
            // only when it is sent, so that no more copies exist than the queue to the driver holds.
            let copy = engine::copy(&tensor.f_to_device(tch::Device::Cpu)?)?;
            self.stage.driver.send(Message::tensors(Tag::part(Kind::State, number, worker, i), vec![Some(copy)]))?;
        }
        Ok(())
    }

    /// Parameters and buffers, or the gradients of the parameters that have one.
    fn model_tensors(&self, set: TensorSet, wants: impl Fn(&str) -> bool) -> Result<Vec<(String, Tensor)>, Fault> {
        let mut found = Vec::new();
        for (spec, tensor) in self.stage.partitions.values().flat_map(Partition::tensors) {
            if !wants(&spec.name) {
                continue;
            }
            let tensor = match set {
                TensorSet::Gradients if spec.role == Role::Parameter => engine::grad(tensor),
                TensorSet::Gradients => None,
                _ => Some(tensor.f_detach()?),
            };
            found.extend(tensor.map(|tensor| (spec.name.clone(), tensor)));
        }
        Ok(found)
    }

    fn optimizer_tensors(&self, wants: impl Fn(&str) -> bool) -> Result<Vec<(String, Tensor)>, Fault> {
        self.optimizer_slots()
            .filter(|entry| wants(&entry.spec.name))
            .map(|entry| {
                let tensor = self.optimizer.state(entry.index, entry.slot, entry.parameter)?;
                Ok((entry.spec.name, tensor))
            })
            .collect()
    }

    /// Everything that the optimizer keeps for the parameters of this worker.
    fn optimizer_slots(&self) -> impl Iterator<Item = OptimizerTensor<'_>> {
        let parameters = self.stage.partitions.values().flat_map(Partition::trained);
        let slots = self.optimizer.slots().iter();
        parameters.enumerate().flat_map(move |(index, (spec, parameter))| {
            slots.clone().map(move |&slot| OptimizerTensor { index, slot, parameter, spec: slot.spec(spec) })
        })
    }

    /// Takes over the named tensors, which follow in messages of their own, and acknowledges.
    pub(super) fn load(&mut self, number: u64, set: TensorSet, names: &[String]) -> Result<(), Fault> {
        match set {
            TensorSet::Optimizer => self.load_optimizer(number, names)?,
            TensorSet::State => self.load_state(number, names)?,
            TensorSet::Gradients | TensorSet::Captured => {
                return Err(Fault::protocol("parameters, buffers or optimizer state to load", format!("{set:?}")));
            }
        }
        self.acknowledge(number)
    }

    fn load_state(&mut self, number: u64, names: &[String]) -> Result<(), Fault> {
        let tensors = self.stage.partitions.values().flat_map(Partition::tensors);
        let tensors: BTreeMap<&str, &Tensor> = tensors.map(|(spec, tensor)| (spec.name.as_str(), tensor)).collect();
        for (i, name) in names.iter().enumerate() {
            let value = self.receive_tensor(number, i)?;
            let tensor = tensors.get(name.as_str()).ok_or_else(|| unknown_tensor("the layers", name))?;
            check_size(name, &value, &tensor.size())?;
            tch::no_grad(|| tensor.shallow_clone().f_copy_(&value))?;
        }
        Ok(())
    }

    fn load_optimizer(&mut self, number: u64, names: &[String]) -> Result<(), Fault> {
        // Handles of the parameters, so that the optimizer can be written to.
        let slots = self.optimizer_slots().map(|entry| {
            let OptimizerTensor { index, slot, parameter, spec } = entry;
            (spec.name, (index, slot, parameter.shallow_clone(), spec.dims))
        });
        let slots: BTreeMap<String, (usize, Slot, Tensor, Vec<i64>)> = slots.collect();
        for (i, name) in names.iter().enumerate() {
            let value = self.receive_tensor(number, i)?;
            let (index, slot, parameter, dims) =
                slots.get(name).ok_or_else(|| unknown_tensor("the optimizer", name))?;
            check_size(name, &value, dims)?;
            self.optimizer.set_state(*index, *slot, parameter, &value)?;
        }
        Ok(())
    }

    /// Waits for the `i`-th tensor of a command to load.
    fn receive_tensor(&self, number: u64, i: usize) -> Result<Tensor, Fault> {
        let mut message = self.stage.mailbox.take(&Tag::part(Kind::State, number, self.stage.id, i))?;
        message.tensors.pop().flatten().ok_or_else(|| Fault::protocol("a tensor to load", "a message without one"))
    }
}

fn unknown_tensor(owner: &str, name: &str) -> Fault {
    Fault::protocol(format!("a tensor of {owner} on this worker"), format!("`{name}`"))
}

fn check_size(name: &str, value: &Tensor, expected: &[i64]) -> Result<(), Fault> {
    if value.size() == expected {
        return Ok(());
    }
    Err(Fault::protocol(format!("`{name}` with dimensions {expected:?}"), format!("{:?}", value.size())))
}
