//! All actions of all workers, in order.
//!
//! A [`Plan`] is only data: what a schedule generated or somebody wrote by hand. Whether it is sound
//! is [`check`](super::check())'s question. Its size is limited, so that every reader of a plan that
//! came from a file or a peer may build tables over partitions × micro-batches.

use super::{Action, Mode, Op, ScheduleError};
use crate::placement::Placement;
use crate::{MicroBatchId, PartitionId, WorkerId};

/// The most partitions of a plan.
pub const PARTITIONS_MAX: usize = 4096;
/// The most partitions × micro-batches of a plan.
pub const CELLS_MAX: usize = 1 << 18;
/// The most actions of all workers of a plan together.
pub const ACTIONS_MAX: usize = 1 << 21;

/// What every worker does in one step of training or evaluation, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    placement: Placement,
    micro_batches: usize,
    mode: Mode,
    skips: Vec<(PartitionId, PartitionId)>,
    /// By partition: where its forward tensors come from and go to, sorted.
    in_edges: Vec<Vec<PartitionId>>,
    out_edges: Vec<Vec<PartitionId>>,
    /// By worker.
    actions: Vec<Vec<Action>>,
    /// By partition, then micro-batch.
    recomputes: Vec<bool>,
}

impl Plan {
    /// A plan in which nobody does anything yet.
    pub(super) fn empty(
        placement: Placement,
        micro_batches: usize,
        mode: Mode,
        skips: &[(PartitionId, PartitionId)],
    ) -> Result<Self, ScheduleError> {
        if micro_batches == 0 {
            return Err(ScheduleError::NoMicroBatches);
        }
        let partitions = placement.partitions();
        within("partitions", PARTITIONS_MAX, partitions)?;
        within("partitions × micro-batches", CELLS_MAX, partitions.saturating_mul(micro_batches))?;
        let mut beyond = Vec::new();
        for &(from, to) in skips {
            if from >= to || to.index() >= partitions {
                return Err(ScheduleError::BadSkip { from, to, partitions });
            }
            if to.0 - from.0 > 1 {
                beyond.push((from, to));
            }
        }
        beyond.sort();
        beyond.dedup();
        // Per micro-batch: forward, recompute and backward of each partition; per edge, two messages
        // of two actions each.
        let steps = 3 * partitions + 4 * (partitions - 1 + beyond.len());
        within("actions", ACTIONS_MAX, steps.saturating_mul(micro_batches))?;

        let mut in_edges = vec![Vec::new(); partitions];
        let mut out_edges = vec![Vec::new(); partitions];
        let neighbours = (1..partitions).map(|to| (PartitionId::new(to - 1), PartitionId::new(to)));
        for (from, to) in neighbours.chain(beyond.iter().copied()) {
            out_edges[from.index()].push(to);
            in_edges[to.index()].push(from);
        }
        in_edges.iter_mut().chain(&mut out_edges).for_each(|edges| edges.sort());
        Ok(Self {
            actions: vec![Vec::new(); placement.workers()],
            recomputes: vec![false; partitions * micro_batches],
            placement,
            micro_batches,
            mode,
            skips: beyond,
            in_edges,
            out_edges,
        })
    }

    /// The plan with these actions, by worker, in place of its own.
    pub(super) fn with_actions(mut self, actions: Vec<Vec<Action>>) -> Self {
        assert_eq!(actions.len(), self.placement.workers(), "a list of actions per worker");
        self.recomputes.fill(false);
        for action in actions.iter().flatten().filter(|action| action.op == Op::Recompute) {
            if let Some(cell) = self.cell(action.partition, action.micro_batch) {
                self.recomputes[cell] = true;
            }
        }
        self.actions = actions;
        self
    }

    /// Number of partitions; never zero.
    pub fn partitions(&self) -> usize {
        self.placement.partitions()
    }

    /// Number of micro-batches; never zero.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Which worker runs which partition.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Whether the plan trains or evaluates.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The partition pairs, other than neighbours, that forward tensors travel between; sorted.
    pub fn skips(&self) -> &[(PartitionId, PartitionId)] {
        &self.skips
    }

    /// What a worker does, in order.
    ///
    /// # Panics
    /// If there is no such worker.
    pub fn actions(&self, worker: WorkerId) -> &[Action] {
        &self.actions[worker.index()]
    }

    /// Whether the plan computes this forward a second time, so that the first need not keep its
    /// activations.
    pub fn recomputes(&self, partition: PartitionId, micro_batch: MicroBatchId) -> bool {
        self.cell(partition, micro_batch).is_some_and(|cell| self.recomputes[cell])
    }

    /// Messages that one worker sends another per step: a queue with this capacity never fills.
    pub fn messages(&self, from: WorkerId, to: WorkerId) -> usize {
        let goes = |action: &&Action| match action.op {
            Op::Send { to: partition, .. } => self.worker_of(partition) == Some(to),
            _ => false,
        };
        self.actions(from).iter().filter(goes).count()
    }

    /// Messages that a worker receives per step, from all others together.
    pub fn receives(&self, worker: WorkerId) -> usize {
        self.actions(worker).iter().filter(|action| matches!(action.op, Op::Receive { .. })).count()
    }

    /// The partitions whose forward tensors a partition takes: the one before it and where its skips
    /// start; sorted.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn in_edges(&self, partition: PartitionId) -> &[PartitionId] {
        &self.in_edges[partition.index()]
    }

    /// The partitions that take a partition's forward tensors: the one after it and where its skips
    /// end; sorted.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn out_edges(&self, partition: PartitionId) -> &[PartitionId] {
        &self.out_edges[partition.index()]
    }

    /// The worker of a partition that a hand-written plan may have made up.
    pub(super) fn worker_of(&self, partition: PartitionId) -> Option<WorkerId> {
        (partition.index() < self.partitions()).then(|| self.placement.worker_of(partition))
    }

    /// Where a table over partitions × micro-batches keeps this pair, if it is one of the plan's.
    pub(super) fn cell(&self, partition: PartitionId, micro_batch: MicroBatchId) -> Option<usize> {
        let inside = partition.index() < self.partitions() && micro_batch.index() < self.micro_batches;
        inside.then(|| partition.index() * self.micro_batches + micro_batch.index())
    }

    /// Whether two partitions hand over locally.
    pub(super) fn same_worker(&self, a: PartitionId, b: PartitionId) -> bool {
        self.placement.worker_of(a) == self.placement.worker_of(b)
    }
}

fn within(what: &'static str, max: usize, got: usize) -> Result<(), ScheduleError> {
    if got > max {
        return Err(ScheduleError::TooLarge { what, max, got });
    }
    Ok(())
}
