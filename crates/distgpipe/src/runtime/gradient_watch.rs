//! Tells the thread that sums the gradients of replicas which of them are final, while the backward pass still runs.
//!
//! ```text
//!  stage        … 0B2   0B3 (the last backward pass of partition 0) ──────────────┐ all
//!                              └ layer 9 ─► └ layer 8 ─► …    └ layer 0           │
//!  all-reduce                    [bucket 0      ] [bucket 1     ] …    [last bucket] [buffers]
//! ```
//!
//! A parameter's gradient is final when libtorch has added the share of the partition's last micro-batch to it. A layer may
//! leave a parameter out; such a gradient is final at the end of the pass.

use crate::comm::abort::{AbortFlag, POLL};
use crate::failure::Fault;
use distgpipe_core::schedule::{Op, Plan};
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use tch::Tensor;

/// A message of the stage to the thread that sums the gradients.
enum Ready {
    /// The gradient of the parameter with this number is final.
    Parameter(usize),
    /// All gradients are final. The tensors are shared after them.
    All(Vec<Tensor>),
}

/// The stage's end.
pub struct GradientWatch {
    sender: Sender<Ready>,
    partitions: BTreeMap<PartitionId, WatchedPartition>,
}

/// A partition's parameters, and the last micro-batch that adds to their gradients.
pub struct WatchedPartition {
    last: MicroBatchId,
    /// The number of each parameter among all of the worker.
    numbers: Vec<usize>,
    /// The parameters, in the order of `numbers`.
    pub parameters: Vec<Tensor>,
}

/// The end of the thread that sums the gradients.
pub struct ReadyGradients {
    receiver: Receiver<Ready>,
    abort: AbortFlag,
    ready: Vec<bool>,
    rest: Option<Vec<Tensor>>,
}

/// Why a wait for gradients ended without them.
pub enum WaitError {
    /// The stage has failed, and tells of it itself.
    Abandoned,
    /// The run has failed.
    Failed(Fault),
}

impl From<Fault> for WaitError {
    fn from(fault: Fault) -> Self {
        WaitError::Failed(fault)
    }
}

impl From<tch::TchError> for WaitError {
    fn from(error: tch::TchError) -> Self {
        WaitError::Failed(error.into())
    }
}

/// Both ends, for a step of one worker. `parameters` are those of the worker in the order of their numbers, with the partition
/// whose backward passes finish them; `None` for one that is final at the end only.
pub fn watch(
    plan: &Plan,
    role: WorkerId,
    parameters: &[(Option<PartitionId>, Tensor)],
    abort: AbortFlag,
) -> (GradientWatch, ReadyGradients) {
    let mut partitions = BTreeMap::new();
    for action in plan.actions(role).iter().filter(|action| action.op == Op::Backward) {
        let own = parameters.iter().enumerate().filter(|(_, (partition, _))| *partition == Some(action.partition));
        let (numbers, parameters) = own.map(|(number, (_, tensor))| (number, tensor.shallow_clone())).unzip();
        // The last backward pass of a partition replaces those before it.
        partitions.insert(action.partition, WatchedPartition { last: action.micro_batch, numbers, parameters });
    }
    let (sender, receiver) = mpsc::channel();
    let ready = vec![false; parameters.len()];
    (GradientWatch { sender, partitions }, ReadyGradients { receiver, abort, ready, rest: None })
}

impl GradientWatch {
    /// The partition, if this backward pass finishes its gradients.
    pub fn finishes(&self, partition: PartitionId, micro_batch: MicroBatchId) -> Option<&WatchedPartition> {
        self.partitions.get(&partition).filter(|watched| watched.last == micro_batch)
    }

    /// What to call when the gradient of the parameter at an index of the partition is final, on any thread.
    pub fn parameter_is_final<'a>(&'a self, partition: &'a WatchedPartition) -> impl Fn(usize) + Sync + 'a {
        let (sender, numbers) = (&self.sender, &partition.numbers[..]);
        move |index| {
            if let Some(&number) = numbers.get(index) {
                // Nobody listens if the all-reduce has failed, and that has ended the run.
                let _ = sender.send(Ready::Parameter(number));
            }
        }
    }

    /// All gradients of a partition are final.
    pub fn partition_is_final(&self, partition: &WatchedPartition) {
        (0..partition.numbers.len()).for_each(self.parameter_is_final(partition));
    }

    /// All gradients are final; `rest` is to be shared after them.
    pub fn finish(self, rest: Vec<Tensor>) {
        let _ = self.sender.send(Ready::All(rest));
    }
}

impl ReadyGradients {
    /// Waits until the gradients of these parameters are final.
    pub fn wait_for(&mut self, numbers: &[usize]) -> Result<(), WaitError> {
        while !self.all_are_final() && numbers.iter().any(|&number| !self.ready[number]) {
            self.receive()?;
        }
        Ok(())
    }

    /// Waits until all gradients are final. Returns what is to be shared after them.
    pub fn wait_for_rest(&mut self) -> Result<Vec<Tensor>, WaitError> {
        loop {
            if let Some(rest) = self.rest.take() {
                return Ok(rest);
            }
            self.receive()?;
        }
    }

    /// Whether the backward passes are over.
    pub fn all_are_final(&self) -> bool {
        self.rest.is_some()
    }

    fn receive(&mut self) -> Result<(), WaitError> {
        match self.receiver.recv_timeout(POLL) {
            Ok(Ready::Parameter(number)) => self.ready[number] = true,
            Ok(Ready::All(rest)) => self.rest = Some(rest),
            Err(RecvTimeoutError::Timeout) => self.abort.check()?,
            Err(RecvTimeoutError::Disconnected) => return Err(WaitError::Abandoned),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{self, WatchedParameters};
    use distgpipe_core::schedule::{Request, Schedule};
    use std::sync::Mutex;
    use tch::{Device, Kind};

    fn parameter() -> Tensor {
        Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true)
    }

    /// libtorch tells of each parameter once, in the order of the backward pass, and of none that the pass does not reach.
    #[test]
    fn a_backward_pass_tells_of_gradients_as_it_completes_them() {
        let parameters = [parameter(), parameter(), parameter()];
        // The second is used twice, and its gradient is complete after both uses; the third is not used.
        let output = ((&parameters[0] * &parameters[1]).exp() * &parameters[1]).sum(Kind::Float);
        let (told, handles) = (Mutex::new(Vec::new()), Mutex::new(parameters.each_ref().map(Tensor::shallow_clone)));
        let ready = |index: usize| {
            let gradient = engine::grad(&handles.lock().unwrap()[index]).unwrap();
            told.lock().unwrap().push((index, f64::try_from(gradient.sum(Kind::Double)).unwrap()));
        };
        engine::backward(&[(output, None)], Some(&WatchedParameters { parameters: &parameters, ready: &ready }))
            .unwrap();
        let mut told = told.into_inner().unwrap();
        told.sort_by_key(|(index, _)| *index);
        let e = std::f64::consts::E;
        let expected = [(0, 2.0 * e), (1, 4.0 * e)];
        assert_eq!(told.len(), 2, "{told:?}");
        for ((index, sum), (number, exact)) in told.iter().zip(expected) {
            assert_eq!(*index, number);
            assert!((sum - exact).abs() < 1e-5, "{sum} {exact}");
        }
        // The next pass tells nobody.
        engine::backward(&[(parameters[0].sum(Kind::Float), None)], None).unwrap();
    }

    #[test]
    fn only_the_last_micro_batch_of_a_partition_finishes_its_gradients() {
        let request = Request::new("client,server,client".parse().unwrap(), 3);
        let plan = Schedule::OneFOneB.plan(&request).unwrap();
        let of = |partition| (Some(PartitionId::new(partition)), parameter());
        let parameters = [of(0), of(0), of(2)];
        let (watch, mut ready) = watch(&plan, WorkerId::new(0), &parameters, AbortFlag::default());
        for m in 0..3 {
            for (partition, expected) in [(0, m == 2), (1, false), (2, m == 2)] {
                let finishes = watch.finishes(PartitionId::new(partition), MicroBatchId::new(m));
                assert_eq!(finishes.is_some(), expected, "{partition} {m}");
            }
        }
        let last = watch.finishes(PartitionId::new(2), MicroBatchId::new(2)).unwrap();
        watch.partition_is_final(last);
        assert!(ready.wait_for(&[2]).is_ok());
        assert!(!ready.all_are_final());
        watch.finish(vec![parameter()]);
        assert!(ready.wait_for(&[0, 1]).is_ok());
        assert!(matches!(ready.wait_for_rest(), Ok(rest) if rest.len() == 1));
    }

    /// A stage that fails drops its end. It tells of its failure itself.
    #[test]
    fn a_wait_ends_with_the_stage_and_with_the_run() {
        let request = Request::new("one".parse().unwrap(), 1);
        let plan = Schedule::GPipe.plan(&request).unwrap();
        let parameters = [(Some(PartitionId::new(0)), parameter())];
        let (watching, mut ready) = watch(&plan, WorkerId::new(0), &parameters, AbortFlag::default());
        drop(watching);
        assert!(matches!(ready.wait_for(&[0]), Err(WaitError::Abandoned)));
        let abort = AbortFlag::default();
        let (_watching, mut ready) = watch(&plan, WorkerId::new(0), &parameters, abort.clone());
        abort.fail(crate::failure::Failure::new("a", "testing", Fault::Lost));
        assert!(matches!(ready.wait_for(&[0]), Err(WaitError::Failed(Fault::Reported(_)))));
    }
}
