//! Moves tensors between the driver and the workers that own them, in groups of bounded size: the driver never needs
//! memory for the whole model.

use super::{Pipeline, StepError};
use crate::comm::message::{Message, Tag};
use crate::comm::protocol::{Command, TensorSet};
use crate::failure::Fault;
use crate::model::layer::{Role, TensorSpec};
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use std::collections::{BTreeMap, HashSet};
use tch::Tensor;

/// The most bytes in one transfer to or from a worker. A larger tensor is transferred alone.
const TRANSFER_BYTES_MAX: usize = 64 << 20;

/// The most tensors in one transfer, so that their names fit a command.
const TRANSFER_TENSORS_MAX: usize = 256;

/// The phase that a failure names.
const COLLECTING: &str = "sending its tensors";

impl Pipeline {
    /// The model's parameters and buffers, worker by worker: in the order of [`state_each`](Self::state_each).
    pub fn state_specs(&self) -> Vec<TensorSpec> {
        self.owned(TensorSet::State).into_iter().map(|(_, spec)| spec).collect()
    }

    /// The optimizer's state tensors, in the order of [`optimizer_each`](Self::optimizer_each).
    pub fn optimizer_specs(&self) -> Vec<TensorSpec> {
        self.owned(TensorSet::Optimizer).into_iter().map(|(_, spec)| spec).collect()
    }

    /// Calls `take` with a copy of each parameter and buffer and its name, in the order of
    /// [`state_specs`](Self::state_specs). After an error of `take` it is not called again; the pipeline stays usable.
    pub fn state_each<E: From<StepError>>(&mut self, take: impl FnMut(&str, Tensor) -> Result<(), E>) -> Result<(), E> {
        self.each(TensorSet::State, take)
    }

    /// Calls `take` with a copy of each state tensor of the optimizer, as [`state_each`](Self::state_each) does for
    /// parameters.
    pub fn optimizer_each<E: From<StepError>>(
        &mut self,
        take: impl FnMut(&str, Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        self.each(TensorSet::Optimizer, take)
    }

    /// Loads state tensors of the optimizer, as [`load_from`](Self::load_from) does parameters.
    pub fn load_optimizer_from<E: From<StepError>>(
        &mut self,
        names: &[String],
        read: impl FnMut(&str) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        self.load_each(TensorSet::Optimizer, names, read)
    }

    /// Loads the parameters and buffers of these names. Calls `read` for each of them, worker by worker; the tensor it
    /// returns must not be shared with anything else. Each name must be one of the model's and occur once; tensors that are
    /// not named keep their values. After an error the pipeline stays usable, with the tensors loaded so far in place.
    pub fn load_from<E: From<StepError>>(
        &mut self,
        names: &[String],
        read: impl FnMut(&str) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        self.load_each(TensorSet::State, names, read)
    }

    fn load_each<E: From<StepError>>(
        &mut self,
        which: TensorSet,
        names: &[String],
        mut read: impl FnMut(&str) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        let mut owners: BTreeMap<String, (WorkerId, TensorSpec)> = BTreeMap::new();
        owners.extend(self.owned(which).into_iter().map(|(worker, spec)| (spec.name.clone(), (worker, spec))));
        let mut wanted: BTreeMap<WorkerId, Vec<TensorSpec>> = BTreeMap::new();
        for name in names {
            let Some((worker, spec)) = owners.remove(name) else {
                return Err(StepError::Load(format!("the model has no tensor `{name}`, or it is named twice")).into());
            };
            wanted.entry(worker).or_default().push(spec);
        }
        self.loaded = true;
        for (worker, specs) in wanted {
            let mut specs = specs.into_iter().peekable();
            while specs.peek().is_some() {
                let (mut group, mut bytes) = (Vec::new(), 0);
                while let Some(spec) = specs.next_if(|spec| fits(spec, bytes, group.len())) {
                    let tensor = read(&spec.name)?;
                    if tensor.size() != spec.dims {
                        let got = format!("`{}` is {:?}, the model's is {:?}", spec.name, tensor.size(), spec.dims);
                        return Err(StepError::Load(got).into());
                    }
                    bytes += spec_bytes(&spec);
                    group.push((spec.name, tensor));
                }
                self.send_tensors(which, worker, group)?;
            }
        }
        Ok(())
    }

    /// Sends tensors to their owner in each replica and waits until it has loaded them. Every worker receives the command,
    /// because commands are numbered.
    fn send_tensors(
        &mut self,
        which: TensorSet,
        owner: WorkerId,
        tensors: Vec<(String, Tensor)>,
    ) -> Result<(), StepError> {
        let number = self.next_command();
        for worker in self.topology.members() {
            let is_owner = self.topology.role_of(worker) == owner;
            let names = tensors.iter().filter(|_| is_owner).map(|(name, _)| name.clone()).collect();
            self.send_command(number, worker, &Command::Load { set: which, names })?;
        }
        for (i, (_, tensor)) in tensors.into_iter().enumerate() {
            for replica in 0..self.topology.replicas() {
                let (to, tensor) = (self.topology.member(replica, owner), Some(tensor.shallow_clone()));
                self.send(to, Message::tensors(Tag::part(Kind::State, number, to, i), vec![tensor]))?;
            }
        }
        for worker in self.topology.members() {
            self.wait(&Tag::control(Kind::Report, number, worker))?;
        }
        Ok(())
    }

    /// Collects tensors that the driver knows by name, group by group. The next group is requested after `take` has
    /// returned for this one, so a slow `take` never makes messages pile up.
    fn each<E: From<StepError>>(
        &mut self,
        which: TensorSet,
        mut take: impl FnMut(&str, Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut owned = self.owned(which).into_iter().peekable();
        while let Some(&(owner, _)) = owned.peek() {
            let (mut group, mut bytes) = (Vec::new(), 0);
            while let Some((_, spec)) = owned.next_if(|(w, spec)| *w == owner && fits(spec, bytes, group.len())) {
                bytes += spec_bytes(&spec);
                group.push(spec.name);
            }
            let number = self.next_command();
            let mut taken = Ok(());
            let mut expected = group.iter();
            for worker in self.topology.members() {
                let names = Some(if worker == owner { group.clone() } else { Vec::new() });
                self.collect_from(number, worker, &Command::Collect { set: which, names }, &mut |name, tensor| {
                    match expected.next() {
                        Some(next) if next == name => {}
                        Some(next) => return Err(Fault::protocol(format!("tensor `{next}`"), format!("`{name}`"))),
                        None => return Err(Fault::protocol("no more tensors", format!("`{name}`"))),
                    }
                    if taken.is_ok() {
                        taken = take(name, tensor);
                    }
                    Ok(())
                })?;
            }
            taken?;
            if let Some(name) = expected.next() {
                let fault = Fault::protocol(format!("tensor `{name}`"), "no more tensors");
                return Err(StepError::from(self.fail_at(owner, COLLECTING, fault)).into());
            }
        }
        Ok(())
    }

    /// Collects a set of which the driver does not know the names: gradients or captured tensors.
    pub(super) fn collect(&mut self, which: TensorSet) -> Result<BTreeMap<String, Tensor>, StepError> {
        let number = self.next_command();
        let mut all = BTreeMap::new();
        // One worker after the other: together they would overflow the driver's mailbox.
        for worker in self.topology.members() {
            // All replicas have the same gradients, but each has captured what it sent itself.
            let names = (which != TensorSet::Captured && self.topology.replica_of(worker) > 0).then(Vec::new);
            self.collect_from(number, worker, &Command::Collect { set: which, names }, &mut |name, tensor| {
                all.insert(name.to_owned(), tensor);
                Ok(())
            })?;
        }
        Ok(all)
    }

    /// Sends a worker a [`Command::Collect`] and passes what it returns to `take`.
    fn collect_from(
        &mut self,
        number: u64,
        worker: WorkerId,
        command: &Command,
        take: &mut dyn FnMut(&str, Tensor) -> Result<(), Fault>,
    ) -> Result<(), StepError> {
        self.send_command(number, worker, command)?;
        let message = self.wait(&Tag::control(Kind::Report, number, worker))?;
        let failed = |fault: Fault| self.fail_at(worker, COLLECTING, fault);
        let names: Vec<String> =
            serde_json::from_slice(&message.text).map_err(|e| failed(Fault::malformed("names of tensors", e)))?;
        for (i, name) in names.iter().enumerate() {
            let message = self.wait(&Tag::part(Kind::State, number, worker, i))?;
            let tensor = message.tensors.into_iter().flatten().next();
            let tensor = tensor.ok_or_else(|| failed(Fault::protocol(format!("tensor `{name}`"), "no tensor")))?;
            take(name, tensor).map_err(failed)?;
        }
        Ok(())
    }

    /// The tensors of a set with their owners in the first replica, in the order in which the owners send them.
    fn owned(&self, which: TensorSet) -> Vec<(WorkerId, TensorSpec)> {
        let placement = self.plan().placement();
        let partitions =
            placement.worker_ids().flat_map(|w| placement.partitions_of(w).into_iter().map(move |p| (w, p)));
        let layers = partitions.flat_map(|(w, p)| self.balance.range(p).map(move |index| (w, index)));
        let tensors = layers
            .flat_map(|(worker, index)| self.model.layers[index].tensors().into_iter().map(move |spec| (worker, spec)));
        // A tied tensor is on one worker, which has it in the first layer that uses it.
        let mut named = HashSet::new();
        let tensors = tensors.filter(|(_, spec)| named.insert(spec.name.clone()));
        if which != TensorSet::Optimizer {
            return tensors.collect();
        }
        let rule = self.model.update_rule(self.optim);
        let slots = rule.slots();
        let trained = |spec: &TensorSpec| spec.role == Role::Parameter && !self.parsed_groups.freezes(&spec.name);
        let parameters = tensors.filter(|(_, spec)| trained(spec));
        parameters.flat_map(|(worker, spec)| slots.iter().map(move |slot| (worker, slot.spec(&spec)))).collect()
    }
}

fn fits(spec: &TensorSpec, bytes: usize, tensors: usize) -> bool {
    tensors == 0 || tensors < TRANSFER_TENSORS_MAX && bytes + spec_bytes(spec) <= TRANSFER_BYTES_MAX
}

fn spec_bytes(spec: &TensorSpec) -> usize {
    usize::try_from(spec.elements()).unwrap_or(usize::MAX).saturating_mul(spec.kind.elt_size_in_bytes())
}
