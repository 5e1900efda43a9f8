//! Waits for the workers, and detects that none of them makes progress.

use super::Pipeline;
use crate::comm::message::{Message, Tag};
use crate::comm::protocol::StepReport;
use crate::comm::status::WorkerStatus;
use crate::comm::suspension::IdleTimer;
use crate::comm::watchdog::{blame, Believed, Moved, Progress, CLAIMED_STALLS_MAX};
use crate::driver::launch::Workers;
use crate::failure::{printable, Failure, Fault};
use crate::runtime::all_reduce::shares_max;
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use std::time::Duration;

impl Pipeline {
    /// Waits for a message from a worker. Fails when the run fails, or when no worker's state has changed for
    /// `Timeouts::stall_s`; the failure then names the worker or link that the other workers wait for. What workers of other
    /// processes say about themselves counts for [`CLAIMED_STALLS_MAX`] times as long. A link that is being reconnected is no
    /// stall: `Timeouts::reconnect_s` bounds it.
    pub(super) fn wait(&self, tag: &Tag) -> Result<Message, Failure> {
        let mut progress = Progress::new(self.believed());
        let (mut idle, mut claimed) = (IdleTimer::new(), IdleTimer::new());
        // Links that break again and again do not prolong the wait for ever.
        let (claimed_max, reconnect) =
            (self.timeouts.stall().saturating_mul(CLAIMED_STALLS_MAX), self.timeouts.reconnect());
        let mut granted = Duration::ZERO;
        let watch = || {
            let statuses: Vec<WorkerStatus> = self.workers.statuses.iter().map(|s| s.read()).collect();
            let moved = progress.moved(&statuses);
            let reconnecting = statuses.iter().any(|status| status.reconnecting.is_some());
            if moved == Some(Moved::Here) {
                claimed.progress();
                granted = Duration::ZERO;
            }
            if reconnecting {
                granted = reconnect;
            }
            // Asked every time: a timer that nobody asks takes the time in between for a suspension.
            let claimed_for = claimed.elapsed();
            if (moved.is_some() || reconnecting) && claimed_for < claimed_max + granted {
                idle.progress();
            } else if idle.elapsed() >= self.timeouts.stall() {
                let plan = self.forward_plan.as_ref().unwrap_or(self.plan());
                let (worker, phase) = blame(&self.topology, plan, &statuses);
                let fault = Fault::Stalled { limit_s: self.timeouts.stall_s };
                return Err(Fault::Reported(Failure::new(worker, phase, fault)));
            }
            Ok(())
        };
        let waited = self.workers.mailbox.take_while(tag, watch);
        // If this process was suspended, the message may be there before anything else notices.
        idle.progress();
        waited.map_err(|fault| self.fail("waiting for the workers", fault))
    }

    /// What one wait believes of each worker: twice the changes of status that the commands need that one wait can be for.
    fn believed(&self) -> Vec<Believed> {
        let plans = [Some(self.plan()), self.forward_plan.as_ref()];
        let shares = match self.topology.replicas() {
            1 => 0,
            replicas => shares_max(self.model.parameters(), replicas),
        };
        let of_role = |role| plans.iter().flatten().map(|plan| plan.actions(role).len()).max().unwrap_or(0);
        // An action and a share each begin with a wait; a command begins and ends with a change.
        let of_member = |member| Believed {
            changes_max: 2 * (2 * of_role(self.topology.role_of(member)) + 2 * shares + 8),
            is_here: member == WorkerId(0) || matches!(self.placed, Workers::Threads),
        };
        self.topology.members().map(of_member).collect()
    }

    /// Waits for a worker's report on a command.
    pub(super) fn wait_report(&self, number: u64, worker: WorkerId) -> Result<StepReport, Failure> {
        let message = self.wait(&Tag::control(Kind::Report, number, worker))?;
        let mut report: StepReport = serde_json::from_slice(&message.text)
            .map_err(|e| self.fail_at(worker, "reporting a step", Fault::malformed("a step report", e)))?;
        if let Some(graphs) = &mut report.graphs {
            graphs.refused.retain(|partition, _| *partition < self.topology.plan().partitions() as u32);
            graphs.refused.values_mut().for_each(|why| *why = printable(why));
        }
        Ok(report)
    }

    /// Waits until every worker has built its partitions.
    pub(super) fn wait_ready(&self) -> Result<(), Failure> {
        for worker in self.topology.members() {
            self.wait(&Tag::control(Kind::Ready, 0, worker))?;
        }
        Ok(())
    }

    /// Fails the run because of the driver; returns the run's first failure, which may be another.
    pub(super) fn fail(&self, phase: &str, fault: Fault) -> Failure {
        self.workers.abort.fail(Failure::new("the driver", phase, fault))
    }

    /// Fails the run because of a worker; returns the run's first failure, which may be another.
    pub(super) fn fail_at(&self, worker: WorkerId, phase: &str, fault: Fault) -> Failure {
        self.workers.abort.fail(Failure::new(self.topology.name(worker), phase, fault))
    }
}

#[cfg(test)]
mod tests {
    use crate::comm::suspension;
    use crate::data::LoadPass;
    use crate::model::layer::{Context, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes};
    use crate::prelude::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};
    use tch::Tensor;

    const SLOW: Duration = Duration::from_millis(1500);

    /// Takes a long time for each micro-batch.
    struct Slow;

    impl Layer for Slow {
        fn name(&self) -> &str {
            "slow"
        }

        fn shapes(&self, inputs: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
            Ok(inputs)
        }

        fn forward(
            &self,
            _: &mut LayerTensors<'_>,
            inputs: Vec<Tensor>,
            _: &mut Context<'_>,
        ) -> Result<Vec<Tensor>, Fault> {
            std::thread::sleep(SLOW);
            Ok(inputs)
        }
    }

    /// The timer of what workers claim was asked only when a status had changed, and took the time in between for a suspension.
    #[test]
    fn a_layer_that_takes_long_is_no_suspension_of_the_process() {
        let digits = Digits::new(Split::Train, Default::default()).unwrap();
        let model = Mlp::default().model().unwrap();
        let (mut layers, input) = (model.layers.clone(), model.input.clone());
        layers.insert(0, Arc::new(Slow));
        let mut pipeline = Pipeline::builder(Model::new(layers, input)).place("a,b").micro_batches(2).build().unwrap();
        let batch = digits.batch(&[0, 1, 2, 3], LoadPass::new(0, 0)).unwrap();
        let start = Instant::now();
        pipeline.train_step(&batch).unwrap();
        let noticed =
            suspension::last().filter(|last| last.ended > start && last.duration >= SLOW - Duration::from_millis(300));
        assert!(noticed.is_none(), "{noticed:?}");
    }
}
