//! Sends commands and messages to the workers. Commands are numbered; every worker receives every number.

use super::Pipeline;
use crate::comm::message::{Message, Tag};
use crate::comm::protocol::Command;
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;

impl Pipeline {
    pub(super) fn next_command(&mut self) -> u64 {
        self.next_command += 1;
        self.next_command - 1
    }

    pub(super) fn send_command(&mut self, number: u64, worker: WorkerId, command: &Command) -> Result<(), Failure> {
        let text = serde_json::to_vec(command)
            .map_err(|e| self.fail("writing a command", Fault::internal("a command that serializes", e.to_string())))?;
        self.send(worker, Message::text(Tag::control(Kind::Command, number, worker), text))
    }

    pub(super) fn send(&mut self, worker: WorkerId, message: Message) -> Result<(), Failure> {
        let sent = match self.workers.outgoing.get_mut(&worker) {
            Some(outgoing) => outgoing.send(message),
            None => Err(Fault::Lost),
        };
        sent.map_err(|fault| self.fail_at(worker, "receiving from the driver", fault))
    }

    /// Sends every worker a command that has no result, and waits until all have executed it.
    pub(super) fn broadcast(&mut self, command: &Command) -> Result<(), Failure> {
        let number = self.next_command();
        for worker in self.topology.members() {
            self.send_command(number, worker, command)?;
        }
        for worker in self.topology.members() {
            self.wait(&Tag::control(Kind::Report, number, worker))?;
        }
        Ok(())
    }

    /// Copies the first replica's parameters to the others. A layer that initializes them without the run's seed would
    /// otherwise start replicas from different values.
    pub(super) fn synchronize_replicas(&mut self) -> Result<(), Failure> {
        if self.topology.replicas() == 1 {
            return Ok(());
        }
        self.broadcast(&Command::SyncReplicas)
    }

    /// Tells every worker that the run is over.
    pub(super) fn finish(&mut self) {
        let number = self.next_command();
        for worker in self.topology.members() {
            // A worker that cannot be reached any more is ended when the worker set is dropped.
            let _ = self.send_command(number, worker, &Command::Finish);
        }
    }
}
