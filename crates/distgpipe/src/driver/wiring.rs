//! One worker of this process: its mailbox and codecs, its connections, and the thread that runs it. The driver wires its
//! worker threads with this, and a worker process wires its only worker.

use crate::comm::abort::AbortFlag;
use crate::comm::admission::{Delivery, Peer};
use crate::comm::link_codecs::LinkCodecs;
use crate::comm::mailbox::Mailbox;
use crate::comm::notice::Notify;
use crate::comm::protocol::Job;
use crate::comm::status::SharedStatus;
use crate::comm::tensor_bounds::TensorBounds;
use crate::comm::topology::Topology;
use crate::comm::traffic::Counters;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::faulty::Scenario;
use crate::comm::transport::tcp::{Connection, Reconnect, TcpOptions};
use crate::comm::transport::{LinkOptions, Outgoing};
use crate::engine::{self, Meter};
use crate::failure::Fault;
use crate::model::Model;
use crate::runtime::worker::Worker;
use distgpipe_core::WorkerId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A worker of this process before its thread runs.
pub(super) struct LocalWorker {
    /// The run's job; [`Job::worker`] is this worker.
    pub job: Job,
    pub topology: Arc<Topology>,
    pub mailbox: Arc<Mailbox>,
    /// How large the tensors of its peers may be.
    pub bounds: Arc<TensorBounds>,
    pub link_codecs: LinkCodecs,
    pub scenario: Scenario,
    /// Counts the memory of this worker's tensors.
    pub meter: Meter,
    pub abort: AbortFlag,
    pub status: Arc<SharedStatus>,
}

/// The other end of a connection, and where its messages go.
pub(super) struct Remote {
    pub peer: Peer,
    /// The mailboxes of this process's workers.
    pub mailboxes: BTreeMap<WorkerId, Arc<Mailbox>>,
    /// The driver's mailbox, if the driver is in this process.
    pub driver: Option<Arc<Mailbox>>,
    /// What this end's heartbeats say.
    pub heartbeat: Box<dyn Fn() -> String + Send>,
    /// Receives the text of the peer's heartbeats.
    pub on_heartbeat: Box<dyn FnMut(&str) + Send>,
    /// Receives notices about the peer.
    pub notify: Notify,
}

impl Remote {
    /// The worker in the other process.
    pub fn worker(&self) -> WorkerId {
        match self.peer {
            // The driver's process runs worker 0, so one connection serves both.
            Peer::Driver => WorkerId(0),
            Peer::Worker(worker) => worker,
        }
    }
}

/// A worker's outgoing links.
pub(super) struct Links {
    /// The sending end of each link to another worker.
    pub outgoing: BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The counters of each link that the worker reports.
    pub counters: Vec<(WorkerId, Counters)>,
    /// The sending end of the link to the driver.
    pub driver: Box<dyn Outgoing>,
}

impl Links {
    /// No links but the one to the driver.
    pub fn new(driver: Box<dyn Outgoing>) -> Self {
        Links { outgoing: BTreeMap::new(), counters: Vec::new(), driver }
    }

    pub fn add(&mut self, to: WorkerId, outgoing: Box<dyn Outgoing>, counters: Counters) {
        self.outgoing.insert(to, outgoing);
        self.counters.push((to, counters));
    }

    pub fn add_connection(&mut self, to: WorkerId, connection: &Connection) -> Result<(), Fault> {
        self.add(to, Box::new(connection.outgoing().ok_or(Fault::Lost)?), connection.counters().clone());
        Ok(())
    }
}

impl LocalWorker {
    /// A worker without connections. Fails if the job's fault scenario is not valid.
    pub fn new(job: Job, topology: Arc<Topology>, abort: AbortFlag, status: Arc<SharedStatus>) -> Result<Self, Fault> {
        let scenario = job.faults.parse().map_err(|e| Fault::invalid_job("the fault scenario", e))?;
        let mailbox = Mailbox::new(abort.clone(), topology.mailbox_capacity(job.worker));
        let link_codecs = LinkCodecs::new(&job, topology.plan());
        let meter = Meter::new();
        let bounds = Arc::new(match job.worker {
            WorkerId(0) => TensorBounds::of_driver(),
            _ => TensorBounds::of_worker(),
        });
        Ok(LocalWorker { job, topology, mailbox, bounds, link_codecs, scenario, meter, abort, status })
    }

    pub fn id(&self) -> WorkerId {
        self.job.worker
    }

    pub fn name(&self) -> String {
        self.topology.name(self.id())
    }

    /// Starts the threads of a connection whose handshake is done. `reconnect` says where the next socket comes from when this one
    /// breaks.
    pub fn connect(&self, stream: ByteStream, remote: Remote, reconnect: Reconnect) -> Result<Connection, Fault> {
        let (status, peer) = (self.status.clone(), remote.worker());
        let on_reconnecting = Box::new(move |reconnecting| status.set_reconnecting(peer, reconnecting));
        Connection::start(stream, TcpOptions { link: self.link(remote), reconnect, on_reconnecting })
    }

    /// This worker's end of a link to another process. Its codecs and memory meter serve the link.
    pub fn link(&self, remote: Remote) -> LinkOptions {
        let other = remote.worker();
        let delivery = Arc::new(Delivery {
            topology: self.topology.clone(),
            peer: remote.peer,
            workers: remote.mailboxes,
            driver: remote.driver,
            bounds: self.bounds.clone(),
        });
        let (local, peer) = (self.name(), self.topology.name(other));
        let (admission, room) = (delivery.clone(), delivery.clone());
        let wrap = self.scenario.wrap_remote(&local, &peer, &self.abort);
        LinkOptions {
            local,
            peer,
            abort: self.abort.clone(),
            timeouts: self.job.timeouts,
            queue: self.topology.queue_capacity(self.id(), other),
            meter: self.meter.clone(),
            link_codecs: self.link_codecs.clone(),
            counters: Counters::default(),
            heartbeat: remote.heartbeat,
            wrap,
            admit: Box::new(move |header| admission.admit(header)),
            deliver: Box::new(move |message| delivery.deliver(message)),
            has_room: Box::new(move || room.has_room()),
            on_heartbeat: remote.on_heartbeat,
            notify: remote.notify,
        }
    }

    /// What this worker, alone in its process, hears from and tells another process.
    pub fn remote(&self, peer: Peer, notify: Notify) -> Remote {
        let status = self.status.clone();
        Remote {
            peer,
            mailboxes: BTreeMap::from([(self.id(), self.mailbox.clone())]),
            driver: None,
            heartbeat: Box::new(move || status.read().to_string()),
            on_heartbeat: Box::new(|_| {}),
            notify,
        }
    }

    /// Starts the worker's thread. The thread records its failure, if any, in the run's abort flag.
    pub fn spawn(&self, model: Model, links: Links) -> Result<JoinHandle<()>, Fault> {
        let worker = Worker {
            job: self.job.clone(),
            topology: self.topology.clone(),
            model,
            mailbox: self.mailbox.clone(),
            bounds: self.bounds.clone(),
            outgoing: links.outgoing,
            driver: links.driver,
            links: links.counters,
            link_codecs: self.link_codecs.clone(),
            meter: self.meter.clone(),
            abort: self.abort.clone(),
            status: self.status.clone(),
        };
        Ok(engine::spawn(format!("stage {}", self.name()), move || drop(worker.run()))?)
    }
}
