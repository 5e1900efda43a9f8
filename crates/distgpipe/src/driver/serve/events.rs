//! What a server reports to its caller.

use crate::comm::notice::Notice;
use crate::driver::wiring::LocalWorker;
use crate::engine;
use crate::failure::{printable, Failure};
use distgpipe_core::PartitionId;
use std::net::SocketAddr;
use std::time::Duration;

/// Something that [`Server::run`](super::Server::run) reports to its caller.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeEvent<'a> {
    /// A connection was dropped because its handshake failed. The server keeps listening.
    Rejected(&'a Failure),
    /// A driver has sent a job, which starts now.
    JobStarted(&'a JobInfo),
    /// A job is over. Unless [`ServeOptions::once`](super::ServeOptions::once) is set, the server waits for the next one.
    JobEnded {
        /// The job.
        job: &'a JobInfo,
        /// How long it took.
        duration: Duration,
        /// Why it failed; `None` if the driver ended it.
        failure: Option<&'a Failure>,
    },
    /// A second driver was refused, because the server is in a run.
    RefusedBusy(SocketAddr),
    /// A peer has measured the link.
    Probed(SocketAddr),
    /// Something to know about a job that goes on.
    Notice(&'a Notice),
    /// A job is over but its thread does not end; [`ServeOptions::on_stuck`](super::ServeOptions::on_stuck) decides what happens next.
    Stuck(&'a Failure),
}

/// A job as a log shows it. Text from the driver has its control characters escaped.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobInfo {
    /// The address that the driver connected from.
    pub driver: SocketAddr,
    /// The first digits of the run's random number, in hexadecimal. All workers of a run have the same.
    pub run: String,
    /// The name of this worker in the run.
    pub worker: String,
    /// The name of the model.
    pub model: String,
    /// The partitions that this worker runs.
    pub partitions: Vec<PartitionId>,
    /// Partitions of the whole model.
    pub partitions_in_all: usize,
    /// libtorch threads that this worker was asked to use.
    pub threads: usize,
    /// When the job started, such as `2026-11-16 09:14:02 UTC`.
    pub started: String,
}

impl JobInfo {
    pub(super) fn new(worker: &LocalWorker, driver: SocketAddr, run: [u8; 16]) -> Self {
        let (job, plan) = (&worker.job, worker.topology.plan());
        let role = worker.topology.role_of(worker.id());
        JobInfo {
            driver,
            run: run_name(run),
            worker: printable(&worker.name()),
            model: job.model.as_ref().map(|spec| printable(&spec.name)).unwrap_or_default(),
            partitions: plan.placement().partitions_of(role),
            partitions_in_all: plan.partitions(),
            threads: job.threads,
            started: engine::utc_now(),
        }
    }
}

/// The first digits of a run's random number.
pub(in crate::driver) fn run_name(run: [u8; 16]) -> String {
    run.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}
