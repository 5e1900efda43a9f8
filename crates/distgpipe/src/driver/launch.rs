//! Starts a run's workers, as threads, as processes, or on hosts where one is listening, and ends them.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::admission::Peer;
use crate::comm::handshake;
use crate::comm::handshake::Token;
use crate::comm::link_codecs::{Decoder, Encoder};
use crate::comm::mailbox::Mailbox;
use crate::comm::notice::{Notice, Notify};
use crate::comm::protocol::Job;
use crate::comm::server_identity::JoinString;
use crate::comm::status::SharedStatus;
use crate::comm::tensor_bounds::TensorBounds;
use crate::comm::topology::Topology;
use crate::comm::traffic::Counters;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::loopback::{Loopback, LoopbackOptions};
use crate::comm::transport::memory::Memory;
#[cfg(feature = "mpi")]
use crate::comm::transport::mpi::MpiLinks;
use crate::comm::transport::tcp::{join_until, Connection, Reconnect, Resume};
use crate::comm::transport::{Outgoing, Queue};
use crate::driver::endpoint::{keep_data_here, Endpoint};
use crate::driver::wiring::{Links, LocalWorker, Remote};
use crate::driver::worker_mode::{ALLOW_OP, CHILD, SERVER_VARIABLE, TOKEN_VARIABLE, WORKER};
use crate::engine;
use crate::failure::{printable, Failure, Fault};
use crate::model::exported::allowed_operators;
use crate::model::Model;
use distgpipe_core::wire::{Kind, Role};
use distgpipe_core::WorkerId;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long threads, connections and processes may take to end before processes are killed.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(3);

/// Set in the environment of worker processes. A program that was started as a worker and starts workers itself does not
/// call `worker_mode`, and its copies would start copies without end.
const WORKER_PROCESS_VARIABLE: &str = "DISTGPIPE_WORKER_PROCESS";

/// What a program that starts copies of itself must do.
const CALL_WORKER_MODE: &str =
    "a program that starts copies of itself must call `distgpipe::worker_mode` first in its `main`";

/// Where the workers of a run are. Worker 0, which has the first partition, is always a thread of this process.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Workers {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes on this host, which start and end with the run; [`Workers::processes`] starts copies of this program.
    Processes(WorkerProgram),
    /// Workers that already listen, on this host or others: `PROGRAM worker` of a program in
    /// [`worker_mode`](crate::worker_mode), `distgpipe worker` for the models of the zoo, or a
    /// [`Server`](crate::driver::serve::Server) each.
    Remote {
        /// The addresses of workers 1, 2, …, such as `10.0.0.2:7000`.
        addresses: Vec<String>,
        /// The token that these workers were started with.
        token: Token,
    },
    /// Servers on other machines, which `distgpipe serve` runs, over TLS.
    Servers {
        /// The servers of workers 1, 2, …
        servers: Vec<JoinString>,
        /// Whether a placement may send labels or inputs to a server. If not, it is refused.
        labels_leave: bool,
        /// An address to listen on for servers that cannot be reached, and connect to this driver instead. The roles are
        /// unchanged: the server shows its key, and this end proves the secret.
        listen: Option<String>,
    },
    /// Ranks of the MPI program that this process is rank 0 of; see [`MpiProgram`](crate::MpiProgram).
    #[cfg(feature = "mpi")]
    Mpi(crate::driver::mpi::MpiRanks),
}

impl Workers {
    /// Processes that are copies of this program, on this host. Its `main` must call [`worker_mode`](crate::worker_mode)
    /// first: a copy is started with the arguments `worker --child`.
    pub fn processes() -> Self {
        // The path of a program that was replaced meanwhile does not lead to this program any more.
        let path = std::env::current_exe().ok().filter(|path| path.exists());
        Workers::Processes(WorkerProgram {
            program: path.unwrap_or_else(|| PathBuf::from("/proc/self/exe")),
            arguments: vec![WORKER.to_owned(), CHILD.to_owned()],
        })
    }

    /// The largest number of a run's workers on one host. Remote hosts are distinguished by their addresses; a loopback
    /// address is the driver's host, where worker 0 is.
    pub fn most_on_one_host(&self, members: usize) -> usize {
        self.by_host(members).into_values().max().unwrap_or(1)
    }

    /// How many of a run's workers are on the driver's host.
    pub fn on_this_host(&self, members: usize) -> usize {
        self.by_host(members).get(&None).copied().unwrap_or(1)
    }

    /// Whether the workers are ranks of the driver's MPI program.
    #[cfg(feature = "mpi")]
    pub(super) fn are_ranks(&self) -> bool {
        matches!(self, Workers::Mpi(_))
    }

    #[cfg(not(feature = "mpi"))]
    pub(super) fn are_ranks(&self) -> bool {
        false
    }

    /// Whether other processes than this one open their devices, perhaps on other hosts.
    pub fn open_devices_elsewhere(&self) -> bool {
        matches!(self, Workers::Remote { .. } | Workers::Servers { .. }) || self.are_ranks()
    }

    /// The number of workers by host; `None` is the driver's.
    fn by_host(&self, members: usize) -> BTreeMap<Option<&str>, usize> {
        let addresses: Vec<&str> = match self {
            Workers::Threads | Workers::Processes(_) => return BTreeMap::from([(None, members)]),
            #[cfg(feature = "mpi")]
            Workers::Mpi(ranks) => return ranks.by_host(),
            Workers::Remote { addresses, .. } => addresses.iter().map(String::as_str).collect(),
            Workers::Servers { servers, .. } => {
                servers.iter().filter_map(|server| server.addresses.first()).map(String::as_str).collect()
            }
        };
        let mut counts = BTreeMap::from([(None, 1)]);
        for address in addresses {
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let loopback = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
            *counts.entry((!loopback).then_some(host)).or_insert(0) += 1;
        }
        counts
    }
}

/// The command that starts a worker process. The process must listen on a loopback port, or for a server on a
/// [local socket](crate::comm::listener), print `listening ADDRESS` as the first line of its standard output, and read the token
/// from its standard input, as a program in [`worker_mode`](crate::worker_mode) does.
#[derive(Clone, Debug)]
pub struct WorkerProgram {
    /// The program's path, or a name that is looked up in `PATH`.
    pub program: PathBuf,
    /// The arguments that the program is started with.
    pub arguments: Vec<String>,
}

pub use crate::engine::declare_worker_process;

/// A run's workers, and the driver's links to them. Dropping it ends them.
pub(super) struct WorkerSet {
    /// Receives the workers' reports.
    pub mailbox: Arc<Mailbox>,
    /// The sending end of the driver's link to each worker.
    pub outgoing: BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The run's abort flag in this process.
    pub abort: AbortFlag,
    /// What each worker is doing, by worker number.
    pub statuses: Vec<Arc<SharedStatus>>,
    /// How large the tensors of workers in other processes may be.
    pub bounds: Arc<TensorBounds>,
    notify: Notify,
    threads: Vec<JoinHandle<()>>,
    connections: BTreeMap<WorkerId, Connection>,
    #[cfg(feature = "mpi")]
    ranks: Option<MpiLinks>,
    children: Vec<Child>,
}

/// Where the workers are started, and who receives notices about them.
pub(super) struct LaunchOptions<'a> {
    pub workers: &'a Workers,
    pub notify: Notify,
}

/// Starts the workers of a job. If any cannot be started, all that were are ended.
pub(super) fn start(
    job: &Job,
    topology: &Arc<Topology>,
    model: &Model,
    options: LaunchOptions<'_>,
) -> Result<WorkerSet, Failure> {
    engine::start();
    let abort = AbortFlag::default();
    let outputs = topology.replicas() * topology.plan().micro_batches();
    let mailbox = Mailbox::new(abort.clone(), topology.size() * 4 + outputs + 64);
    let statuses = topology.members().map(|_| Arc::new(SharedStatus::default())).collect();
    let mut set = WorkerSet {
        mailbox,
        outgoing: BTreeMap::new(),
        abort,
        statuses,
        bounds: Arc::new(TensorBounds::of_driver()),
        notify: options.notify,
        threads: vec![],
        connections: BTreeMap::new(),
        #[cfg(feature = "mpi")]
        ranks: None,
        children: vec![],
    };
    match set.start_all(job, topology, model, options.workers) {
        Ok(()) => Ok(set),
        Err(failure) => Err(set.abort.fail(failure)),
    }
}

/// What all steps of starting share.
struct Launch<'a> {
    job: Job,
    topology: &'a Arc<Topology>,
    model: &'a Model,
    /// The workers that are threads of this process, and the counters of their links to each other.
    locals: BTreeMap<WorkerId, LocalThread>,
}

struct LocalThread {
    worker: LocalWorker,
    counters: BTreeMap<WorkerId, Counters>,
}

impl Launch<'_> {
    /// The link from one worker of this process to another.
    fn link(&self, from: WorkerId, to: WorkerId, abort: &AbortFlag) -> Result<(Box<dyn Outgoing>, Counters), Fault> {
        let (sender, receiver) = (&self.locals[&from], &self.locals[&to]);
        let (counters, received) = (sender.counters[&to].clone(), receiver.counters[&from].clone());
        let mailbox = receiver.worker.mailbox.clone();
        let encodes = |(from, to)| self.job.codecs.encodes_between(self.topology.plan(), from, to);
        let link: Box<dyn Outgoing> = if self.topology.roles_within(from, to).is_some_and(encodes) {
            Box::new(Loopback::start(LoopbackOptions {
                local: sender.worker.name(),
                to: mailbox,
                queue: self.topology.queue_capacity(from, to),
                meter: receiver.worker.meter.clone(),
                encoder: Encoder::new(sender.worker.link_codecs.clone(), counters.clone()),
                decoder: Decoder::new(receiver.worker.link_codecs.clone(), received.clone()),
                counters: counters.clone(),
                received,
                abort: abort.clone(),
            })?)
        } else {
            Box::new(Memory::new(mailbox, counters.clone()))
        };
        let scenario = &sender.worker.scenario;
        Ok((scenario.wrap(&sender.worker.name(), &receiver.worker.name(), abort, link), counters))
    }

    /// Connects to every remote worker, then sends every job: workers connect to each other once they have theirs.
    fn connect_all(
        &self,
        remote: &[WorkerId],
        endpoints: &[Endpoint],
        run: [u8; 16],
        key: &Token,
        notify: &Notify,
    ) -> Result<Vec<ByteStream>, Failure> {
        let limit = self.job.timeouts.connect();
        let at = |worker: WorkerId| {
            let name = self.topology.name(worker);
            move |fault| Failure::new(name, "joining the run", fault)
        };
        let abort = &self.locals[&WorkerId(0)].worker.abort;
        let mut streams = Vec::new();
        for (&worker, endpoint) in remote.iter().zip(endpoints) {
            let _watch = watch_joining(self.topology.name(worker), limit, notify).map_err(at(worker))?;
            let resume = Resume { abort: abort.clone(), ..Resume::first(limit) };
            let dialed = endpoint.dial(Role::Driver, run, key, resume).map_err(|fault| match (fault, endpoint) {
                (Fault::TimedOut { limit_s, .. }, _) => Fault::NoAnswer { limit_s },
                (Fault::Io { source, .. }, _) if source.kind() == io::ErrorKind::TimedOut => {
                    Fault::NoAnswer { limit_s: limit.as_secs_f64() }
                }
                (Fault::Io { source, .. }, Endpoint::Plain { address, .. })
                    if source.kind() == io::ErrorKind::ConnectionRefused =>
                {
                    Fault::NobodyListens { address: address.clone() }
                }
                (other, _) => other,
            });
            streams.push(dialed.map_err(at(worker))?.0);
        }
        for (&worker, stream) in remote.iter().zip(&mut streams) {
            let text = serde_json::to_vec(&Job { worker, ..self.job.clone() })
                .map_err(|e| at(worker)(Fault::internal("a job that serializes", e.to_string())))?;
            handshake::send_text(stream, Kind::Job, &text, limit).map_err(at(worker))?;
        }
        Ok(streams)
    }
}

/// How long a worker may take to answer before the user is told.
const NOT_JOINED: Duration = Duration::from_secs(5);

/// Says that a worker has not joined yet, unless the watch is dropped first.
fn watch_joining(worker: String, limit: Duration, notify: &Notify) -> Result<engine::Watch, Fault> {
    let (after, notify) = (NOT_JOINED.min(limit / 4), notify.clone());
    let watch = engine::Watch::start("joining", move |joined| {
        if joined.recv_timeout(after) == Err(RecvTimeoutError::Timeout) {
            let (waited_s, limit_s) = (after.as_secs_f64(), limit.as_secs_f64());
            notify.send(&Notice::NotJoined { worker, waited_s, limit_s });
        }
    })?;
    Ok(watch)
}

fn failed_in(phase: &'static str) -> impl FnOnce(Fault) -> Failure {
    move |fault| Failure::new("the driver", phase, fault)
}

impl WorkerSet {
    fn start_all(
        &mut self,
        job: &Job,
        topology: &Arc<Topology>,
        model: &Model,
        workers: &Workers,
    ) -> Result<(), Failure> {
        let remote: Vec<WorkerId> = match workers {
            Workers::Threads => Vec::new(),
            _ => topology.members().skip(1).collect(),
        };
        keep_data_here(workers, topology).map_err(failed_in("starting workers"))?;
        let endpoints = self.endpoints(workers, topology, &remote, job.timeouts.connect())?;
        if !workers.are_ranks() && endpoints.len() != remote.len() {
            let wrong = format!(
                "expected {} addresses or servers in `Builder::workers` (worker 0 is this process), got {}",
                remote.len(),
                endpoints.len()
            );
            return Err(failed_in("starting workers")(Fault::invalid_job("the list of workers", wrong)));
        }
        let mut job = job.clone();
        if workers.are_ranks() {
            // There is no other connection to a rank that is not heard any more.
            job.timeouts.reconnect_s = 0.0;
        }
        job.addresses = std::iter::repeat_n(None, topology.size() - endpoints.len())
            .chain(endpoints.iter().map(|endpoint| Some(endpoint.for_peers())))
            .collect();
        let mut locals = BTreeMap::new();
        for worker in topology.members().filter(|w| !remote.contains(w)) {
            let (own, status) = (Job { worker, ..job.clone() }, self.statuses[worker.index()].clone());
            let local = LocalWorker::new(own, topology.clone(), self.abort.clone(), status);
            let counters = topology.members().map(|other| (other, Counters::default())).collect();
            let mut worker = local.map_err(failed_in("starting workers"))?;
            worker.bounds = self.bounds.clone();
            locals.insert(worker.id(), LocalThread { worker, counters });
        }
        if !remote.is_empty() {
            self.bounds.set_model(model, &job.balance).map_err(failed_in("starting workers"))?;
        }
        let launch = Launch { job, topology, model, locals };
        #[cfg(feature = "mpi")]
        if let Workers::Mpi(ranks) = workers {
            let remote = remote.iter().map(|&worker| self.remote(&launch, worker));
            let started = ranks.start(&launch.locals[&WorkerId(0)].worker, remote.collect());
            self.ranks = Some(started.map_err(failed_in("starting workers"))?);
        }
        if !endpoints.is_empty() {
            let identifiers = handshake::random().and_then(|run| Ok((run, Token::random()?)));
            let (run, key) = identifiers.map_err(failed_in("starting workers"))?;
            let streams = launch.connect_all(&remote, &endpoints, run, &key, &self.notify)?;
            for ((&worker, endpoint), stream) in remote.iter().zip(endpoints).zip(streams) {
                let dial = move |resume| endpoint.dial(Role::Driver, run, &key, resume);
                let connection = self.connect(&launch, stream, worker, Reconnect::Dial(Box::new(dial)));
                let connection =
                    connection.map_err(|fault| Failure::new(topology.name(worker), "connecting", fault))?;
                // Inserted at once: from here on the worker is notified of any failure.
                self.connections.insert(worker, connection);
            }
        }
        self.start_threads(&launch)
    }

    /// Where the remote workers are. Starts the processes if there are any to start.
    fn endpoints(
        &mut self,
        workers: &Workers,
        topology: &Topology,
        remote: &[WorkerId],
        limit: Duration,
    ) -> Result<Vec<Endpoint>, Failure> {
        match workers {
            Workers::Threads => Ok(Vec::new()),
            #[cfg(feature = "mpi")]
            Workers::Mpi(_) => Ok(Vec::new()),
            Workers::Processes(program) => {
                if std::env::var_os(WORKER_PROCESS_VARIABLE).is_some() {
                    let wrong = format!("this process was started as a worker itself: {CALL_WORKER_MODE}");
                    return Err(failed_in("starting worker processes")(Fault::invalid_job(
                        "`Builder::workers`",
                        wrong,
                    )));
                }
                let token = Token::random().map_err(failed_in("starting worker processes"))?;
                let mut endpoints = Vec::new();
                for &worker in remote {
                    let address = start_process(program, &token, Stdio::inherit(), limit, &mut self.children);
                    let failed = |fault| Failure::new(topology.name(worker), "starting its process", fault);
                    endpoints.push(Endpoint::Plain { address: address.map_err(failed)?, token });
                }
                Ok(endpoints)
            }
            Workers::Remote { addresses, token } => Ok(Endpoint::plain(addresses, token)),
            Workers::Servers { servers, listen, .. } => {
                Endpoint::servers(servers, listen.as_deref()).map_err(failed_in("listening for servers"))
            }
        }
    }

    /// Starts the threads of the connection to a remote worker, which serves the driver and worker 0.
    fn connect(
        &self,
        launch: &Launch<'_>,
        stream: ByteStream,
        worker: WorkerId,
        reconnect: Reconnect,
    ) -> Result<Connection, Fault> {
        launch.locals[&WorkerId(0)].worker.connect(stream, self.remote(launch, worker), reconnect)
    }

    /// What the driver and worker 0 hear from and tell a remote worker.
    fn remote(&self, launch: &Launch<'_>, worker: WorkerId) -> Remote {
        let status = self.statuses[worker.index()].clone();
        Remote {
            peer: Peer::Worker(worker),
            mailboxes: launch.locals.iter().map(|(&id, local)| (id, local.worker.mailbox.clone())).collect(),
            driver: Some(self.mailbox.clone()),
            heartbeat: Box::new(String::new),
            on_heartbeat: Box::new(move |text| {
                if let Ok(state) = text.parse() {
                    status.set(state);
                }
            }),
            notify: self.notify.clone(),
        }
    }

    /// The sending end of the link to each remote worker, and its counters.
    fn remote_links(&self) -> BTreeMap<WorkerId, (Queue, Counters)> {
        let connected = self.connections.iter().filter_map(|(&worker, connection)| {
            Some((worker, (connection.outgoing()?, connection.counters().clone())))
        });
        #[cfg(feature = "mpi")]
        let connected = connected.chain(
            self.ranks
                .iter()
                .flat_map(|ranks| ranks.ranks().filter_map(|rank| Some((WorkerId::new(rank), ranks.outgoing(rank)?)))),
        );
        connected.collect()
    }

    /// Starts the workers that are threads, and opens the driver's links to all workers.
    fn start_threads(&mut self, launch: &Launch<'_>) -> Result<(), Failure> {
        for local in launch.locals.values() {
            let links = self.links(launch, local.worker.id());
            let thread = links.and_then(|links| local.worker.spawn(launch.model.clone(), links));
            self.threads.push(thread.map_err(failed_in("starting a worker thread"))?);
        }
        for (&worker, local) in &launch.locals {
            self.outgoing.insert(worker, Box::new(Memory::new(local.worker.mailbox.clone(), Counters::default())));
        }
        for (worker, (outgoing, _)) in self.remote_links() {
            self.outgoing.insert(worker, Box::new(outgoing));
        }
        Ok(())
    }

    /// The outgoing links of a worker of this process.
    fn links(&self, launch: &Launch<'_>, worker: WorkerId) -> Result<Links, Fault> {
        let (topology, mut remote) = (launch.topology, self.remote_links());
        let mut links = Links::new(Box::new(Memory::new(self.mailbox.clone(), Counters::default())));
        for other in topology.members().filter(|&w| topology.linked(worker, w)) {
            if launch.locals.contains_key(&other) {
                let (outgoing, counters) = launch.link(worker, other, &self.abort)?;
                links.add(other, outgoing, counters);
            } else if let Some((outgoing, counters)) = remote.remove(&other) {
                links.add(other, Box::new(outgoing), counters);
            }
        }
        if worker == WorkerId(0) {
            // What the driver sends is counted as sent by worker 0, also to workers that have no link with it.
            links.counters.extend(remote.into_iter().map(|(other, (_, counters))| (other, counters)));
        }
        Ok(links)
    }

    /// Ends threads, connections and processes. Kills processes that do not end in time.
    pub fn end(&mut self) {
        self.outgoing.clear();
        let deadline = Instant::now() + SHUTDOWN_LIMIT;
        for thread in self.threads.drain(..) {
            join_until(thread, deadline);
        }
        for connection in std::mem::take(&mut self.connections).into_values() {
            connection.close(deadline.saturating_duration_since(Instant::now()).max(POLL));
        }
        #[cfg(feature = "mpi")]
        if let Some(ranks) = self.ranks.take() {
            ranks.close(deadline.saturating_duration_since(Instant::now()).max(POLL));
        }
        for mut child in self.children.drain(..) {
            drop(child.stdin.take());
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Both do nothing to a child that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts a worker process and reads the address that it listens on. The process is the last of `children` as soon as it
/// exists, whatever follows.
pub(super) fn start_process(
    program: &WorkerProgram,
    token: &Token,
    errors: Stdio,
    limit: Duration,
    children: &mut Vec<Child>,
) -> Result<String, Fault> {
    let allowed = allowed_operators().into_iter().flat_map(|operator| [ALLOW_OP.to_owned(), operator]);
    let mut child = Command::new(&program.program)
        .args(&program.arguments)
        .args(allowed)
        .env(WORKER_PROCESS_VARIABLE, "1")
        // A worker has no use for the secrets of whoever starts it.
        .env_remove(TOKEN_VARIABLE)
        .env_remove(SERVER_VARIABLE)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()
        .map_err(|e| Fault::io(format!("starting {}", program.program.display()), e))?;
    let output = child.stdout.take();
    // The pipe stays open with the child's handle: its end signals that this process has ended.
    if let Some(pipe) = child.stdin.as_mut() {
        // Ignored, because the end of the output says more about a child that has ended than a broken pipe.
        let _ = writeln!(pipe, "{token}").and_then(|()| pipe.flush());
    }
    children.push(child);
    let output = output.ok_or_else(|| Fault::internal("a pipe from the child", "none"))?;
    let (sender, first_line) = mpsc::sync_channel(1);
    engine::spawn("output of a worker process", move || {
        let mut lines = BufReader::new(output).lines();
        let _ = sender.send(lines.next());
        // Reads on, so that the child never blocks on a full pipe.
        lines.for_each(drop);
    })?;
    let silent = |got: String| Fault::protocol("`listening ADDRESS` on its standard output", got);
    match first_line.recv_timeout(limit) {
        Ok(Some(Ok(line))) => match line.strip_prefix("listening ") {
            Some(address) => Ok(address.to_owned()),
            None => Err(silent(format!("`{}`: {CALL_WORKER_MODE}", printable(&line)))),
        },
        Ok(_) => {
            Err(silent(format!("the end of the output; see what it wrote to its standard error; {CALL_WORKER_MODE}")))
        }
        Err(_) => Err(Fault::TimedOut { what: "waiting for it to listen".to_owned(), limit_s: limit.as_secs_f64() }),
    }
}

impl Drop for WorkerSet {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_counted_by_host() {
        let remote = |addresses: &[&str]| Workers::Remote {
            addresses: addresses.iter().map(|&address| address.to_owned()).collect(),
            token: Token([0; 32]),
        };
        for (addresses, expected) in [
            (&["10.0.0.2:7000"][..], 1),
            (&["10.0.0.2:7000", "10.0.0.2:7001", "10.0.0.3:7000"], 2),
            (&["127.0.0.1:7000", "localhost:7001", "[::1]:7002"], 4),
            (&["server:7000", "other:7000"], 1),
        ] {
            assert_eq!(remote(addresses).most_on_one_host(9), expected, "{addresses:?}");
        }
        assert_eq!(Workers::Threads.most_on_one_host(6), 6);
    }

    /// Under a limit on processes, `std::thread::spawn` panics.
    #[test]
    fn a_worker_thread_that_cannot_be_started_is_an_error_that_names_the_limit() {
        use crate::comm::codec_policy::CodecPolicy;
        use crate::driver::pipeline::Pipeline;
        for thread in ["stage b", "codec"] {
            let model = crate::zoo::Mlp::default().model().unwrap();
            let codecs = CodecPolicy { forward: "tile:4".parse().unwrap(), ..CodecPolicy::default() };
            let builder = Pipeline::builder(model).place("a,b").codecs(codecs).device(engine::Device::Cpu).threads(1);
            let refused = engine::refusal::with_refused(thread, || builder.build());
            let said = refused.err().unwrap().to_string();
            assert!(
                said.contains(&format!("cannot start the thread `{thread}`")) && said.contains("`ulimit -u`"),
                "{said}"
            );
        }
    }
}
