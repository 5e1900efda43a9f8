//! The model's tensors on their way between the driver and the workers that hold them, one by one: no process ever has
//! all of a model that does not run in it.

use super::{Pipeline, StepError};
use crate::failure::Fault;
use crate::job::{Command, Which};
use crate::layer::{Role, TensorSpec};
use crate::mailbox::{Message, Tag};
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use std::collections::BTreeMap;
use tch::Tensor;

/// Tensors of a worker that are read before they are sent, and taken over before more are read: this many bytes, or one
/// tensor that is larger.
const SHARE_BYTES_MAX: usize = 64 << 20;

/// The most tensors of such a share; its names fit a command.
const SHARE_TENSORS_MAX: usize = 256;

impl Pipeline {
    /// The model's parameters and buffers in the order of [`state_each`](Self::state_each): worker by worker.
    pub fn state_specs(&self) -> Vec<TensorSpec> {
        self.owned(Which::State).into_iter().map(|(_, spec)| spec).collect()
    }

    /// What the optimizer remembers, in the order of [`optimizer_each`](Self::optimizer_each).
    pub fn optimizer_specs(&self) -> Vec<TensorSpec> {
        self.owned(Which::Optimizer).into_iter().map(|(_, spec)| spec).collect()
    }

    /// Hands over copies of all parameters and buffers one by one, by name, in the order of
    /// [`state_specs`](Self::state_specs). After an error of `take` it is not called again; the pipeline can be used on.
    pub fn state_each<E: From<StepError>>(&mut self, take: impl FnMut(&str, Tensor) -> Result<(), E>) -> Result<(), E> {
        self.each(Which::State, take)
    }

    /// Hands over copies of what the optimizer remembers, as [`state_each`](Self::state_each) does parameters.
    pub fn optimizer_each<E: From<StepError>>(
        &mut self,
        take: impl FnMut(&str, Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        self.each(Which::Optimizer, take)
    }

    /// Has the optimizer remember tensors of these names, as [`load_from`](Self::load_from) takes over parameters.
    pub fn load_optimizer_from<E: From<StepError>>(
        &mut self,
        names: &[String],
        read: impl FnMut(&str) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        self.load_each(Which::Optimizer, names, read)
    }

    /// Takes over parameters and buffers of these names, which `read` is asked for one by one, worker by worker; it gives
    /// away what it returns. Names must be the model's, each once; what is not named stays as it is. After an error the
    /// pipeline can be used on, with the tensors that came before in place.
    pub fn load_from<E: From<StepError>>(
        &mut self,
        names: &[String],
        read: impl FnMut(&str) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        self.load_each(Which::State, names, read)
    }

    fn load_each<E: From<StepError>>(
        &mut self,
        which: Which,
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
        for (worker, specs) in wanted {
            let mut specs = specs.into_iter().peekable();
            while specs.peek().is_some() {
                let (mut share, mut bytes) = (Vec::new(), 0);
                while let Some(spec) = specs.next_if(|spec| fits(spec, bytes, share.len())) {
                    let tensor = read(&spec.name)?;
                    if tensor.size() != spec.dims {
                        let got = format!("`{}` is {:?}, the model's is {:?}", spec.name, tensor.size(), spec.dims);
                        return Err(StepError::Load(got).into());
                    }
                    bytes += spec_bytes(&spec);
                    share.push((spec.name, tensor));
                }
                self.hand_over(which, worker, share)?;
            }
        }
        Ok(())
    }

    /// Gives one worker of each replica tensors and waits until they have taken them over. Every worker gets a command,
    /// because they count.
    fn hand_over(&mut self, which: Which, to: WorkerId, share: Vec<(String, Tensor)>) -> Result<(), StepError> {
        let number = self.next_command();
        for worker in self.roster.members() {
            let takes = self.roster.role_of(worker) == to;
            let names = share.iter().filter(|_| takes).map(|(name, _)| name.clone()).collect();
            self.command(number, worker, &Command::Load { which, names })?;
        }
        for (i, (_, tensor)) in share.into_iter().enumerate() {
            for replica in 0..self.roster.replicas() {
                let (to, tensor) = (self.roster.member(replica, to), Some(tensor.shallow_clone()));
                self.send(to, Message::tensors(Tag::part(Kind::State, number, to, i), vec![tensor]))?;
            }
        }
        for worker in self.roster.members() {
            self.wait(&Tag::control(Kind::Report, number, worker))?;
        }
        Ok(())
    }

    /// Tensors that the driver knows by name, a share of one worker after the other: one is taken before the next is asked
    /// for, so that a slow `take` holds no more than that up.
    fn each<E: From<StepError>>(
        &mut self,
        which: Which,
        mut take: impl FnMut(&str, Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut owned = self.owned(which).into_iter().peekable();
        while let Some(&(worker, _)) = owned.peek() {
            let (mut share, mut bytes) = (Vec::new(), 0);
            while let Some((_, spec)) = owned.next_if(|(w, spec)| *w == worker && fits(spec, bytes, share.len())) {
                bytes += spec_bytes(&spec);
                share.push(spec.name);
            }
            let number = self.next_command();
            let mut taken = Ok(());
            let mut order = share.iter();
            for one in self.roster.members() {
                let names = Some(if one == worker { share.clone() } else { Vec::new() });
                self.collect_from(number, one, &Command::Collect { which, names }, &mut |name, tensor| {
                    if order.next().map(String::as_str) != Some(name) {
                        return Err(Fault::protocol("the tensors that were asked for", name));
                    }
                    if taken.is_ok() {
                        taken = take(name, tensor);
                    }
                    Ok(())
                })?;
            }
            taken?;
            if let Some(name) = order.next() {
                let fault = Fault::protocol(format!("{name} too"), "nothing more");
                return Err(StepError::from(self.failed("collecting tensors", fault)).into());
            }
        }
        Ok(())
    }

    /// All that workers have of something, by name: gradients, or what they captured.
    pub(super) fn collect(&mut self, which: Which) -> Result<BTreeMap<String, Tensor>, StepError> {
        let number = self.next_command();
        let mut all = BTreeMap::new();
        // One worker after the other: together they would fill the driver's mailbox with what it does not take yet.
        for worker in self.roster.members() {
            // Replicas have the same gradients, and captured what they sent themselves.
            let names = (which != Which::Captured && self.roster.replica_of(worker) > 0).then(Vec::new);
            self.collect_from(number, worker, &Command::Collect { which, names }, &mut |name, tensor| {
                all.insert(name.to_owned(), tensor);
                Ok(())
            })?;
        }
        Ok(all)
    }

    /// Gives a worker a command to collect, and hands over what it sends.
    fn collect_from(
        &mut self,
        number: u64,
        worker: WorkerId,
        command: &Command,
        take: &mut dyn FnMut(&str, Tensor) -> Result<(), Fault>,
    ) -> Result<(), StepError> {
        self.command(number, worker, command)?;
        let message = self.wait(&Tag::control(Kind::Report, number, worker))?;
        let wrong = |fault: Fault| self.failed("collecting tensors", fault);
        let names: Vec<String> =
            serde_json::from_slice(&message.text).map_err(|e| wrong(Fault::protocol("names", e.to_string())))?;
        for (i, name) in names.iter().enumerate() {
            let message = self.wait(&Tag::part(Kind::State, number, worker, i))?;
            let tensor = message.tensors.into_iter().flatten().next();
            let tensor = tensor.ok_or_else(|| wrong(Fault::protocol(format!("the tensor {name}"), "none")))?;
            take(name, tensor).map_err(wrong)?;
        }
        Ok(())
    }

    /// Tensors with their workers in the first replica, in the order in which those send them.
    fn owned(&self, which: Which) -> Vec<(WorkerId, TensorSpec)> {
        let placement = self.plan().placement();
        let partitions =
            placement.worker_ids().flat_map(|w| placement.partitions_of(w).into_iter().map(move |p| (w, p)));
        let layers = partitions.flat_map(|(w, p)| self.balance.range(p).map(move |index| (w, index)));
        let tensors = layers
            .flat_map(|(worker, index)| self.model.layers[index].tensors().into_iter().map(move |spec| (worker, spec)));
        if which != Which::Optimizer {
            return tensors.collect();
        }
        let slots = self.optim.slots();
        let parameters = tensors.filter(|(_, spec)| spec.role == Role::Parameter);
        parameters.flat_map(|(worker, spec)| slots.iter().map(move |slot| (worker, slot.spec(&spec)))).collect()
    }
}

fn fits(spec: &TensorSpec, bytes: usize, tensors: usize) -> bool {
    tensors == 0 || tensors < SHARE_TENSORS_MAX && bytes + spec_bytes(spec) <= SHARE_BYTES_MAX
}

fn spec_bytes(spec: &TensorSpec) -> usize {
    usize::try_from(spec.elements()).unwrap_or(usize::MAX).saturating_mul(spec.kind.elt_size_in_bytes())
}
