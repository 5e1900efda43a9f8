//! Waits for the workers, and detects that none of them makes progress.

use super::Pipeline;
use crate::comm::message::{Message, Tag};
use crate::comm::protocol::StepReport;
use crate::comm::status::WorkerStatus;
use crate::comm::suspension::IdleTimer;
use crate::comm::watchdog::blame;
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;

impl Pipeline {
    /// Waits for a message from a worker. Fails when the run fails, or when no worker's state has changed for
    /// `Timeouts::stall_s`; the failure then names the worker or link that the other workers wait for.
    pub(super) fn wait(&self, tag: &Tag) -> Result<Message, Failure> {
        let mut seen: Vec<WorkerStatus> = Vec::new();
        let mut idle = IdleTimer::new();
        let watch = || {
            let now: Vec<WorkerStatus> = self.workers.statuses.iter().map(|s| s.read()).collect();
            if now != seen {
                seen = now;
                idle.progress();
            } else if idle.elapsed() >= self.timeouts.stall() {
                let plan = self.forward_plan.as_ref().unwrap_or(self.plan());
                let (worker, phase) = blame(&self.topology, plan, &seen);
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

    /// Waits for a worker's report on a command.
    pub(super) fn wait_report(&self, number: u64, worker: WorkerId) -> Result<StepReport, Failure> {
        let message = self.wait(&Tag::control(Kind::Report, number, worker))?;
        serde_json::from_slice(&message.text)
            .map_err(|e| self.fail_at(worker, "reporting a step", Fault::malformed("a step report", e)))
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
