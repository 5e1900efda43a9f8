//! A worker in a process of its own. It needs no configuration: a driver that shows the right token sends the job. For
//! models of your own layers, it needs the function that builds them; [`worker_mode`](crate::worker_mode) takes it.

mod busy;
mod events;

pub(super) use events::run_name;
pub use events::{JobInfo, ServeEvent};

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::acceptor::{Acceptor, Arrival, ArrivedPeer, HANDSHAKE_LIMIT};
use crate::comm::admission::Peer;
use crate::comm::handshake;
use crate::comm::handshake::{Credentials, Terms, Token};
use crate::comm::listener::Listener;
use crate::comm::notice::{Notice, Notify};
use crate::comm::probe::bandwidth::{Durations, LinkTest};
use crate::comm::probe::{self, bandwidth};
use crate::comm::protocol::Job;
use crate::comm::topology::Topology;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::tcp::{join_until, Connection, Dial, Reconnect, Resume};
use crate::driver::job_limits::JobLimits;
use crate::driver::wiring::{Links, LocalWorker};
use crate::engine;
use crate::failure::{printable, Failure, Fault};
use crate::model::zoo::{self, ModelError};
use crate::model::{Model, ModelSpec};
use crate::sync::lock;
use busy::{rejected, BusyListener};
use distgpipe_core::wire::{Hello, Kind, Role};
use distgpipe_core::WorkerId;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a driver may take from the handshake to the job: it connects to all workers first.
const JOB_LIMIT: Duration = Duration::from_secs(60);

/// How long the connections may take to end after a run.
pub(super) const SHUTDOWN_LIMIT: Duration = Duration::from_secs(3);

/// How long the worker's thread may take to end after a run, by default. An action of a large model takes a while, and nobody can
/// end it.
const STUCK_AFTER: Duration = Duration::from_secs(120);

/// How long the worker's thread may run on after the driver's goodbye.
pub(super) const GOODBYE_LIMIT: Duration = Duration::from_secs(5);

/// A driver whose connection is broken for so long loses its worker to another driver that wants it: it may have been killed. Until
/// then, and if no other driver comes, the worker waits for [`Timeouts::reconnect_s`](crate::Timeouts::reconnect_s).
const SUCCESSION_AFTER: Duration = Duration::from_secs(2);

/// How a worker process serves.
///
/// Fields may be added in later versions: end a literal with `..ServeOptions::new(listen, token)`.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The address to listen on, unless there are `limits`. One that other machines can reach needs `expose`.
    pub listen: SocketAddr,
    /// Whether to listen on an address that other machines can reach. Traffic is not encrypted.
    pub expose: bool,
    /// Whoever shows this token may send jobs.
    pub token: Token,
    /// Whether to return after the first job.
    pub once: bool,
    /// Builds the model of a job. [`zoo::build`] knows the built-in ones.
    pub models: fn(&ModelSpec) -> Result<Model, ModelError>,
    /// The limits of a stranger's job, in a process that a [`Gateway`](crate::driver::gateway::Gateway) starts and connects its
    /// peers to: it listens for processes of this host alone. `None`: whoever has the token is trusted.
    pub limits: Option<JobLimits>,
    /// How long the worker's thread may take to end after its run. Others are told that the server is busy meanwhile.
    pub stuck_after: Duration,
    /// What to do when a run is over and the worker's thread does not end.
    pub on_stuck: StuckPolicy,
}

impl ServeOptions {
    /// Serves the built-in models until stopped, on a loopback address, and never ends the process.
    pub fn new(listen: SocketAddr, token: Token) -> Self {
        ServeOptions {
            listen,
            expose: false,
            token,
            once: false,
            models: zoo::build,
            limits: None,
            stuck_after: STUCK_AFTER,
            on_stuck: StuckPolicy::ReturnError,
        }
    }
}

/// What a server does with a worker thread that does not end within [`ServeOptions::stuck_after`] after its run, because a layer of it
/// computes or waits forever. A thread cannot be killed, and it would compete with the next job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StuckPolicy {
    /// [`Server::run`] returns the run's failure, whatever [`ServeOptions::once`] says. The thread keeps running.
    #[default]
    ReturnError,
    /// Ends the process with status 1, without destructors: libtorch's would crash the thread. For a program that is
    /// nothing but a worker.
    ExitProcess,
}

/// A worker process that listens.
pub struct Server {
    arrivals: Mutex<Arrivals>,
    address: Option<SocketAddr>,
    /// What those who connect are told.
    listening: String,
    options: ServeOptions,
}

/// Those who connect. They survive the end of a job: the next driver may be among them.
struct Arrivals {
    acceptor: Acceptor,
    /// A driver that has been welcomed in the place of one that is gone.
    successor: Option<ArrivedPeer>,
}

/// Where a driver is, and the result of its handshake.
type ArrivedDriver = (SocketAddr, Result<(ByteStream, Hello), Fault>);

/// What a driver sends first.
enum Work {
    Train(Box<LocalWorker>),
    Measure(LinkTest),
}

/// How a job ended.
enum JobEnd {
    Done,
    Failed(Failure),
    /// The worker's thread does not end.
    Stuck(Failure),
}

impl Server {
    /// Opens the port. Fails if it is taken, or if the address is not loopback and [`ServeOptions::expose`] is off.
    pub fn bind(options: ServeOptions) -> Result<Self, Fault> {
        if !options.listen.ip().is_loopback() && !options.expose {
            let wrong = format!(
                "expected a loopback address such as 127.0.0.1:7000, got {}: set `ServeOptions::expose` to let other \
                 machines connect; traffic is not encrypted",
                options.listen
            );
            return Err(Fault::invalid_job("`ServeOptions::listen`", wrong));
        }
        let listener = match options.limits {
            // The server whose job this is connects its peers to it.
            Some(_) => Listener::local()?,
            None => {
                let bound = TcpListener::bind(options.listen);
                bound.map_err(|e| Fault::io(format!("listening on {}", options.listen), e))?.into()
            }
        };
        let acceptor = Acceptor::new(listener, None)?;
        Ok(Server {
            address: acceptor.listener().tcp_address().ok(),
            listening: acceptor.listener().address()?,
            arrivals: Mutex::new(Arrivals { acceptor, successor: None }),
            options,
        })
    }

    /// The address it listens on, with the port that the system chose. The process of a [server's](ServeOptions::limits) job has
    /// none.
    pub fn address(&self) -> Result<SocketAddr, Fault> {
        self.address.ok_or_else(|| Fault::internal("a TCP port", self.listening.clone()))
    }

    /// What it tells the program that started it.
    pub(super) fn listening(&self) -> &str {
        &self.listening
    }

    /// Serves jobs, one after the other, until `stop` returns true, or until the first job is over with
    /// [`ServeOptions::once`], whose failure it then returns. It passes everything that happens to `report`, and prints nothing.
    /// From the handshake of a driver to the end of its run, it refuses other drivers at once.
    pub fn run(&self, stop: impl Fn() -> bool, report: impl Fn(&ServeEvent<'_>)) -> Result<(), Failure> {
        engine::start();
        let mut arrivals = lock(&self.arrivals);
        while !stop() {
            let Some((from, driver)) = self.next_driver(&mut arrivals, &report) else { continue };
            let end = match driver {
                Ok((stream, hello)) => {
                    let busy = BusyListener::new(self, &mut arrivals, from, hello.run);
                    let end = self.serve_job(stream, from, busy, &report);
                    // The next job may be small, and come hours later. The process of a stranger's job ends with it.
                    if self.options.limits.is_none() {
                        engine::release_memory();
                    }
                    end
                }
                Err(fault) => {
                    rejected(&report, from, fault);
                    continue;
                }
            };
            match end {
                JobEnd::Stuck(failure) => {
                    report(&ServeEvent::Stuck(&failure));
                    if self.options.on_stuck == StuckPolicy::ExitProcess {
                        engine::exit_at_once(1);
                    }
                    return Err(failure);
                }
                JobEnd::Failed(failure) if self.options.once => return Err(failure),
                JobEnd::Done if self.options.once => return Ok(()),
                JobEnd::Failed(_) | JobEnd::Done => {}
            }
        }
        Ok(())
    }

    /// The next driver that connects, if there is one now, with the result of its handshake. Answers those who measure the link.
    fn next_driver(&self, arrivals: &mut Arrivals, report: &Report<'_>) -> Option<ArrivedDriver> {
        if let Some(peer) = arrivals.successor.take() {
            return Some((peer.from, Ok((peer.stream, peer.hello))));
        }
        let ArrivedPeer { mut stream, from, hello, .. } = match arrivals.acceptor.next(POLL, &|_| None)? {
            Arrival::Peer(peer) => *peer,
            Arrival::Rejected { from, fault } => return Some((from, Err(fault))),
        };
        let terms = Terms { token: &self.options.token, run: None, busy: None };
        let answered = handshake::reply(&mut stream, &hello, &terms, HANDSHAKE_LIMIT).and_then(|()| match hello.role {
            _ if hello.epoch > 0 => {
                Err(handshake::refuse(&mut stream, handshake::NOT_IN_RUN.to_owned(), HANDSHAKE_LIMIT))
            }
            Role::Probe => probe::answer(&mut stream),
            Role::Driver => Ok(()),
            role => Err(Fault::protocol("a driver", format!("{role:?}"))),
        });
        if answered.is_ok() && hello.role == Role::Probe {
            report(&ServeEvent::Probed(from));
            return None;
        }
        Some((from, answered.map(|()| (stream, hello))))
    }

    fn serve_job(
        &self,
        mut driver: ByteStream,
        from: SocketAddr,
        mut busy: BusyListener<'_>,
        report: &Report<'_>,
    ) -> JobEnd {
        let worker = match busy.wait_for(&driver, JOB_LIMIT, report).and_then(|()| self.read_work(&mut driver)) {
            Ok(Work::Train(worker)) => *worker,
            Ok(Work::Measure(test)) => return self.measure_link(driver, from, test, busy, report),
            Err(fault) => {
                // There is no connection yet that would send the driver the cause.
                let failure = Failure::new("a worker", "reading the job", fault);
                let _ = handshake::send_text(&mut driver, Kind::Abort, &failure.notice().encode(), HANDSHAKE_LIMIT);
                report(&ServeEvent::Rejected(&failure));
                return JobEnd::Failed(failure);
            }
        };
        let (job, start) = (JobInfo::new(&worker, from, busy.run), Instant::now());
        report(&ServeEvent::JobStarted(&job));
        let end = self.run_job(driver, worker, busy, report);
        let failure = match &end {
            JobEnd::Done => None,
            JobEnd::Failed(failure) | JobEnd::Stuck(failure) => Some(failure),
        };
        report(&ServeEvent::JobEnded { job: &job, duration: start.elapsed(), failure });
        end
    }

    fn run_job(&self, driver: ByteStream, worker: LocalWorker, busy: BusyListener<'_>, report: &Report<'_>) -> JobEnd {
        let mut session = Session::new(worker, busy);
        // From the first connection on, heartbeats are sent and every peer is notified of a failure.
        let joined =
            session.connect(driver, Peer::Driver, Reconnect::Await).and_then(|()| self.join(&mut session, report));
        match joined {
            Ok(stage) => session.finish(stage, self.options.limits.as_ref().map(JobLimits::idle), report),
            Err(fault) => {
                session.abort().fail(Failure::new(session.worker.name(), "joining the run", fault));
                session.close()
            }
        }
    }

    /// Takes the orders of a driver that measures the link, and refuses others meanwhile.
    fn measure_link(
        &self,
        driver: ByteStream,
        from: SocketAddr,
        test: LinkTest,
        mut busy: BusyListener<'_>,
        report: &Report<'_>,
    ) -> JobEnd {
        let timeouts = self.options.limits.as_ref().map(|limits| limits.timeouts).unwrap_or_default();
        let answering =
            engine::spawn("link test", move || bandwidth::answer(driver, &test, timeouts, &Durations::default()));
        let answered = answering.map_err(Fault::from).and_then(|thread| {
            while !thread.is_finished() {
                // The test may be over, and this the driver that waited for its end.
                let over = || {
                    std::thread::sleep(3 * POLL);
                    thread.is_finished()
                };
                let next = busy.answer_next(POLL, over, false, report);
                if let Some((_, mut stream)) = next {
                    handshake::refuse(&mut stream, handshake::NOT_IN_RUN.to_owned(), HANDSHAKE_LIMIT);
                }
            }
            thread.join().unwrap_or_else(|_| Err(Fault::Panic("the panic message is on standard error".to_owned())))
        });
        match answered {
            Ok(()) => {
                report(&ServeEvent::Probed(from));
                JobEnd::Done
            }
            Err(fault) => {
                let failure = Failure::new(from.to_string(), "measuring the link", fault);
                report(&ServeEvent::Rejected(&failure));
                JobEnd::Failed(failure)
            }
        }
    }

    /// Reads what the driver wants, and checks it against the limits of this server.
    fn read_work(&self, driver: &mut ByteStream) -> Result<Work, Fault> {
        let frame = handshake::receive(driver, &[Kind::Job, Kind::Probe], JOB_LIMIT)?;
        if frame.header.kind == Kind::Probe {
            let test: LinkTest = serde_json::from_slice(&frame.body).map_err(|e| Fault::malformed("a link test", e))?;
            test.check()?;
            if let Some(limits) = &self.options.limits {
                limits.check_threads(test.threads)?;
            }
            return Ok(Work::Measure(test));
        }
        let mut job: Job = serde_json::from_slice(&frame.body).map_err(|e| Fault::malformed("the job", e))?;
        job.timeouts = job.timeouts.granted();
        match &self.options.limits {
            Some(limits) => limits.apply(&mut job)?,
            None if !self.options.listen.ip().is_loopback() => check_exposed(&job)?,
            None => {}
        }
        let topology = job.topology()?;
        if let Some(limits) = &self.options.limits {
            limits.check_codecs(&job, &topology)?;
        }
        check_worker(&job, &topology)?;
        let worker = LocalWorker::new(job, Arc::new(topology), AbortFlag::default(), Arc::default());
        worker.map(|worker| Work::Train(Box::new(worker)))
    }

    /// Connects to the other workers and starts the worker's thread.
    fn join(&self, session: &mut Session<'_>, report: &Report<'_>) -> Result<JoinHandle<()>, Fault> {
        self.connect_peers(session, report)?;
        let model = build_model(&session.worker.job, self.options.models)?;
        session.start_stage(model)
    }

    /// Connects to another worker of the run, whenever it is called. For a stranger's job, only to one that the gateway reaches
    /// for it.
    fn peer_dialer(&self, address: &str, role: Role, credentials: Credentials) -> Result<Dial, Fault> {
        let address = address.to_owned();
        match self.options.limits.as_ref().map(|limits| limits.gateway.clone()) {
            None => Ok(Box::new(move |resume| handshake::dial_again(&address, role, &credentials, resume))),
            Some(Some(gateway)) if handshake::parse_server_address(&address).is_some() => {
                Ok(Box::new(move |resume| handshake::dial_through(&gateway, &address, role, &credentials, resume)))
            }
            Some(_) => {
                Err(Fault::protocol("a server of the run that this server reaches over TLS", printable(&address)))
            }
        }
    }

    /// Connects to the workers with higher numbers and waits for those with lower ones, except those in the driver's
    /// process.
    fn connect_peers(&self, session: &mut Session<'_>, report: &Report<'_>) -> Result<(), Fault> {
        let (id, topology) = (session.worker.id(), session.worker.topology.clone());
        let credentials = Credentials { run: session.busy.run, token: self.options.token };
        let limit = session.worker.job.timeouts.connect();
        let (mut dialed, mut awaited) = (Vec::new(), Vec::new());
        for peer in topology.members().filter(|&w| topology.linked(id, w)) {
            match session.worker.job.addresses.get(peer.index()).and_then(Option::as_deref) {
                Some(address) if peer > id => dialed.push((peer, address.to_owned())),
                Some(_) => awaited.push(peer),
                None => {}
            }
        }
        // A worker that is connected expects heartbeats.
        for (worker, stream) in std::mem::take(&mut session.busy.early) {
            session.connect_awaited(&mut awaited, worker, stream)?;
        }
        for (peer, address) in dialed {
            let failed = |fault| Fault::Reported(Failure::new(topology.name(peer), "joining the run", fault));
            let dialer = self.peer_dialer(&address, Role::Worker(id), credentials).map_err(failed)?;
            let (stream, dialer) = session.dial(dialer, limit, &mut awaited, report).map_err(failed)?;
            session.connect(stream, Peer::Worker(peer), Reconnect::Dial(dialer))?;
        }
        let deadline = Instant::now() + limit;
        while !awaited.is_empty() {
            session.abort().check()?;
            let next = session.answer_next(POLL, report);
            let Some((hello, stream)) = next else {
                if Instant::now() < deadline {
                    continue;
                }
                let names: Vec<String> = awaited.iter().map(|&w| topology.name(w)).collect();
                let what = format!("waiting for {} to connect", names.join(", "));
                return Err(Fault::TimedOut { what, limit_s: limit.as_secs_f64() });
            };
            session.join_or_resume(&mut awaited, stream, &hello)?;
        }
        Ok(())
    }
}

/// The most threads of a worker that other machines can reach. Equal bits need equal numbers of threads, so a host with few cores must
/// accept the number of a driver with more.
fn exposed_threads_max() -> usize {
    engine::default_threads(1).max(256)
}

/// Refuses what a job from another machine may not ask of a worker. Those of this host may: tests inject faults into their workers.
fn check_exposed(job: &Job) -> Result<(), Fault> {
    if !job.faults.is_empty() {
        let wrong = "a worker that other machines can reach injects no faults: leave it out";
        return Err(Fault::invalid_job("the fault scenario", wrong));
    }
    let most = exposed_threads_max();
    if job.threads > most {
        let wrong = format!(
            "a worker that other machines can reach uses at most {most} threads, got {}: set it to {most} or less",
            job.threads
        );
        return Err(Fault::invalid_job("`Builder::threads`", wrong));
    }
    Ok(())
}

/// Checks that a job is for a worker of its run that is not in the driver's process.
pub(super) fn check_worker(job: &Job, topology: &Topology) -> Result<(), Fault> {
    let workers = topology.size();
    if job.worker.index() == 0 || job.worker.index() >= workers {
        return Err(Fault::protocol(format!("a worker number from 1 to {}", workers - 1), job.worker.to_string()));
    }
    if job.addresses.len() != workers {
        return Err(Fault::protocol(format!("{workers} worker addresses"), job.addresses.len().to_string()));
    }
    Ok(())
}

/// Builds the model of a job.
pub(super) fn build_model(job: &Job, models: fn(&ModelSpec) -> Result<Model, ModelError>) -> Result<Model, Fault> {
    let spec = job.model.as_ref();
    let spec = spec.ok_or_else(|| Fault::protocol("a job with a model specification", "one without"))?;
    std::panic::catch_unwind(|| models(spec))
        .map_err(|_| Fault::invalid_model(format!("building it panicked, with settings {}", spec.settings)))?
        .map_err(|error| match error {
            ModelError::Unknown { got } => Fault::UnknownModel { got },
            other => Fault::invalid_model(other),
        })
}

/// Whether bytes have arrived, or the connection is closed or broken.
fn has_input(stream: &ByteStream) -> bool {
    engine::wait_readable(&[stream.as_raw_fd()], POLL)
}

/// Receives the events of a server.
type Report<'a> = dyn Fn(&ServeEvent<'_>) + 'a;

/// The most notices that wait to be reported.
const NOTICES_MAX: usize = 64;

/// A job in progress.
struct Session<'a> {
    worker: LocalWorker,
    connections: BTreeMap<WorkerId, Connection>,
    busy: BusyListener<'a>,
    notify: Notify,
    notices: Receiver<Notice>,
}

impl<'a> Session<'a> {
    fn new(worker: LocalWorker, busy: BusyListener<'a>) -> Self {
        let (sender, notices) = mpsc::sync_channel(NOTICES_MAX);
        // A notice that does not fit is dropped: the thread that sends it must not wait.
        let notify = Notify::new(move |notice| drop(sender.try_send(notice.clone())));
        Session { worker, connections: BTreeMap::new(), busy, notify, notices }
    }

    fn abort(&self) -> &AbortFlag {
        &self.worker.abort
    }

    fn connect(&mut self, stream: ByteStream, peer: Peer, reconnect: Reconnect) -> Result<(), Fault> {
        let remote = self.worker.remote(peer, self.notify.clone());
        self.connections.insert(remote.worker(), self.worker.connect(stream, remote, reconnect)?);
        Ok(())
    }

    /// Connects to another worker, on a thread of its own: those who connect to this one are answered meanwhile, and a driver that is
    /// gone does not keep it.
    fn dial(
        &mut self,
        dialer: Dial,
        limit: Duration,
        awaited: &mut Vec<WorkerId>,
        report: &Report<'_>,
    ) -> Result<(ByteStream, Dial), Fault> {
        let resume = Resume { abort: self.abort().clone(), ..Resume::first(limit) };
        let dialing = engine::spawn("connecting to a worker", move || (dialer(resume), dialer))?;
        // Most peers are reached within milliseconds.
        let mut wait = Duration::from_millis(1);
        while !dialing.is_finished() {
            let next = self.answer_next(wait, report);
            wait = (2 * wait).min(POLL);
            if let Some((hello, stream)) = next {
                self.join_or_resume(awaited, stream, &hello)?;
            }
        }
        let panicked = |_| Fault::Panic("the panic message is on standard error".to_owned());
        let (dialed, dialer) = dialing.join().map_err(panicked)?;
        dialed.map(|(stream, _)| (stream, dialer))
    }

    /// The next member of the run that connects, if there is one within about `wait`. The run fails if its driver is gone and
    /// another one has come.
    fn answer_next(&mut self, wait: Duration, report: &Report<'_>) -> Option<(Hello, ByteStream)> {
        let abort = self.worker.abort.clone();
        let gone = self.is_abandoned();
        let over = || {
            let over = abort.failure().is_some();
            if over {
                std::thread::sleep(POLL / 5);
            }
            over
        };
        let next = self.busy.answer_next(wait, over, gone, report);
        if self.busy.has_successor() {
            self.fail_for_successor();
        }
        next
    }

    /// Takes a worker that was awaited into the run, or resumes the link of another.
    fn join_or_resume(&mut self, awaited: &mut Vec<WorkerId>, stream: ByteStream, hello: &Hello) -> Result<(), Fault> {
        match hello.role {
            Role::Worker(worker) if awaited.contains(&worker) => self.connect_awaited(awaited, worker, stream),
            _ => {
                self.resume(stream, hello);
                Ok(())
            }
        }
    }

    fn fail_for_successor(&self) {
        let reason = "the driver was gone, and another one has taken its place".to_owned();
        self.abort().fail(Failure::new("the driver", "reconnecting", Fault::Refused { reason }));
    }

    /// Hands the connection of a peer that connects again to its link, or refuses it.
    fn resume(&self, stream: ByteStream, hello: &Hello) {
        let peer = match hello.role {
            Role::Driver => Some(WorkerId(0)),
            Role::Worker(worker) => Some(worker),
            Role::Probe => None,
        };
        let connection = peer.and_then(|peer| self.connections.get(&peer)).filter(|_| hello.epoch > 0);
        let offered = match connection {
            Some(connection) => connection.offer(stream, hello),
            None => Err(stream),
        };
        if let Err(mut stream) = offered {
            handshake::refuse(&mut stream, handshake::NOT_IN_RUN.to_owned(), HANDSHAKE_LIMIT);
        }
    }

    /// Whether the driver has been gone for so long that another may take its place.
    fn is_abandoned(&self) -> bool {
        let driver = self.connections.get(&WorkerId(0)).and_then(Connection::broken_for);
        driver.is_some_and(|broken| broken >= SUCCESSION_AFTER)
    }

    /// Takes a worker that has connected off the list of those to wait for. Any other is disconnected.
    fn connect_awaited(
        &mut self,
        awaited: &mut Vec<WorkerId>,
        worker: WorkerId,
        stream: ByteStream,
    ) -> Result<(), Fault> {
        match awaited.iter().position(|&w| w == worker) {
            Some(at) => {
                awaited.swap_remove(at);
                self.connect(stream, Peer::Worker(worker), Reconnect::Await)
            }
            None => Ok(()),
        }
    }

    fn start_stage(&self, model: Model) -> Result<JoinHandle<()>, Fault> {
        let driver = self.connections.get(&WorkerId(0)).and_then(Connection::outgoing).ok_or(Fault::Lost)?;
        let mut links = Links::new(Box::new(driver));
        for (&worker, connection) in &self.connections {
            links.add_connection(worker, connection)?;
        }
        self.worker.spawn(model, links)
    }

    /// Waits until the worker's thread has ended, or until it is too late after the run's end. The run fails if the worker makes
    /// no progress for `idle`.
    fn finish(mut self, stage: JoinHandle<()>, idle: Option<Duration>, report: &Report<'_>) -> JobEnd {
        let mut progress = (self.worker.status.read().progress, Instant::now());
        let mut without_driver: Option<Instant> = None;
        while !stage.is_finished() && self.abort().failure().is_none() {
            let now = self.worker.status.read();
            // The wait for a connection has a limit of its own.
            if now.progress != progress.0 || now.reconnecting.is_some() {
                progress = (now.progress, Instant::now());
            }
            // A driver that says goodbye has ended the run before. One that has not leaves the worker waiting for ever.
            let driver_ended = self.connections.get(&WorkerId(0)).is_none_or(Connection::peer_has_ended);
            let since = driver_ended.then(|| *without_driver.get_or_insert_with(Instant::now));
            if since.is_some_and(|since| since.elapsed() >= GOODBYE_LIMIT) {
                self.abort().fail(Failure::new("the driver", "ending the run", Fault::Lost));
                break;
            }
            if let Some(limit) = idle.filter(|&limit| progress.1.elapsed() >= limit) {
                let limit_s = limit.as_secs_f64();
                self.abort().fail(Failure::new(self.worker.name(), "waiting for work", Fault::Idle { limit_s }));
                break;
            }
            let driver = self.connections.get(&WorkerId(0));
            let over = || {
                std::thread::sleep(POLL);
                stage.is_finished() || driver.is_none_or(Connection::peer_has_ended)
            };
            match self.busy.answer_next(POLL, over, self.is_abandoned(), report) {
                Some((hello, stream)) => self.resume(stream, &hello),
                None if self.busy.has_successor() => self.fail_for_successor(),
                None => {}
            }
            self.notices.try_iter().for_each(|notice| report(&ServeEvent::Notice(&notice)));
        }
        let (over, limit) = (Instant::now(), self.busy.stuck_after());
        while !stage.is_finished() && over.elapsed() < limit {
            if let Some((hello, stream)) = self.busy.answer_next(POLL / 5, || stage.is_finished(), false, report) {
                self.resume(stream, &hello);
            }
        }
        if join_until(stage, Instant::now()) {
            return self.close();
        }
        let fault = Fault::TimedOut { what: "ending".to_owned(), limit_s: limit.as_secs_f64() };
        let first = self.abort().fail(Failure::new(self.worker.name(), "ending", fault));
        // The connections' threads notify the peers meanwhile.
        std::thread::sleep(POLL * 4);
        JobEnd::Stuck(first)
    }

    fn close(self) -> JobEnd {
        let deadline = Instant::now() + SHUTDOWN_LIMIT;
        for connection in self.connections.into_values() {
            connection.close(deadline.saturating_duration_since(Instant::now()).max(POLL));
        }
        let end = self.worker.abort.failure().map_or(JobEnd::Done, JobEnd::Failed);
        // Ends every thread that a peer keeps busy after the end of the run.
        self.worker.abort.fail(Failure::new(self.worker.name(), "ending", Fault::Lost));
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::timeouts::Timeouts;
    use crate::driver::builder::{BuildError, Builder};
    use crate::driver::launch::Workers;
    use crate::driver::pipeline::{Batch, Pipeline, StepError};
    use crate::engine::Device;
    use crate::model::layer::{Context, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes};
    use crate::model::loss::Loss;
    use std::net::TcpStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tch::Tensor;

    /// A layer that passes its input on, or that first blocks for so long in its forward pass and notices no failure of the run.
    struct Gate {
        name: &'static str,
        blocks: Duration,
    }

    impl Layer for Gate {
        fn name(&self) -> &str {
            self.name
        }
        fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
            Ok(input)
        }
        fn forward(&self, _: &mut LayerTensors<'_>, x: Vec<Tensor>, _: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
            std::thread::sleep(self.blocks);
            Ok(vec![x[0].f_mul_scalar(2.0)?])
        }
    }

    /// The settings are the seconds for which its last layer blocks.
    fn blocking_model(spec: &ModelSpec) -> Result<Model, ModelError> {
        let gate = |name, blocks| -> Arc<dyn Layer> { Arc::new(Gate { name, blocks }) };
        let blocks = Duration::from_secs(spec.settings.as_u64().unwrap());
        let layers = vec![gate("open", Duration::ZERO), gate("closed", blocks)];
        let mut model = Model::new(layers, vec![SampleShape::float(&[3])]);
        model.spec = Some(spec.clone());
        Ok(model)
    }

    /// A run whose last layer, at the server, blocks for so many seconds, and whose driver waits half a second.
    fn blocking(address: String, seconds: u64) -> Builder {
        let spec = ModelSpec { name: "blocking".to_owned(), settings: seconds.into() };
        Pipeline::builder(blocking_model(&spec).unwrap())
            .place("client,server")
            .device(Device::Cpu)
            .threads(1)
            .loss(Loss::MeanSquared)
            .workers(Workers::Remote { addresses: vec![address], token: TOKEN })
            .timeouts(Timeouts { stall_s: 0.5, ..Timeouts::default() })
    }

    /// Starts a step, which fails because the server blocks, and ends the run.
    fn give_up_on(mut pipeline: Pipeline) {
        let x = || Tensor::ones([2, 3], (tch::Kind::Float, tch::Device::Cpu));
        let failed = pipeline.train_step(&Batch::new(x(), x())).unwrap_err();
        assert!(matches!(&failed, StepError::Failed(failure) if failure.worker == "server"), "{failed}");
    }

    /// A library that ends its host process takes everything else in it along.
    #[test]
    fn a_stuck_worker_thread_returns_from_the_server_and_does_not_end_the_process() {
        let listen = "127.0.0.1:0".parse().unwrap();
        let stuck_after = Duration::from_secs(1);
        let options = ServeOptions { models: blocking_model, stuck_after, ..ServeOptions::new(listen, TOKEN) };
        let server = Server::bind(options).unwrap();
        let address = server.address().unwrap().to_string();
        let reported = Arc::new(Mutex::new(Vec::new()));
        let seen = reported.clone();
        let thread = std::thread::spawn(move || {
            server.run(
                || false,
                |event| {
                    seen.lock().unwrap().push(match event {
                        ServeEvent::JobStarted(job) => format!("{} as {}", job.model, job.worker),
                        ServeEvent::JobEnded { failure, .. } => format!("failed: {}", failure.is_some()),
                        ServeEvent::Stuck(_) => "stuck".to_owned(),
                        // That this process did not run for a while, on a busy machine.
                        ServeEvent::Notice(_) => return,
                        other => format!("{other:?}"),
                    });
                },
            )
        });
        give_up_on(blocking(address, 10).build().unwrap());
        let failure = thread.join().unwrap().unwrap_err();
        assert_eq!(failure.worker, "server", "{failure}");
        assert_eq!(*reported.lock().unwrap(), ["blocking as server", "failed: true", "stuck"]);
    }

    /// A server in a thread, until it is dropped.
    struct Serving {
        address: String,
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<Result<(), Failure>>>,
    }

    const TOKEN: Token = Token([7; 32]);

    impl Serving {
        fn start() -> Self {
            Self::of(ServeOptions::new("127.0.0.1:0".parse().unwrap(), TOKEN))
        }

        fn of(options: ServeOptions) -> Self {
            let server = Server::bind(options).unwrap();
            let (address, stop) = (server.address().unwrap().to_string(), Arc::new(AtomicBool::new(false)));
            let stopped = stop.clone();
            let thread = std::thread::spawn(move || server.run(|| stopped.load(Ordering::Relaxed), |_| {}));
            Serving { address, stop, thread: Some(thread) }
        }

        fn connect(&self) -> ByteStream {
            TcpStream::connect(&self.address).unwrap().into()
        }

        /// Joins the server as a driver that has not sent its job yet.
        fn introduce(&self, stream: ByteStream, run: u8) -> Result<ByteStream, Fault> {
            let credentials = Credentials { run: [run; 16], token: TOKEN };
            let first = Resume::first(Duration::from_secs(60));
            handshake::introduce(stream, Role::Driver, &credentials, first).map(|(stream, _)| stream)
        }

        /// A run that a driver has started and not ended.
        fn run(&self) -> Pipeline {
            let workers = Workers::Remote { addresses: vec![self.address.clone()], token: TOKEN };
            let builder = Pipeline::builder(zoo::Mlp::default().model().unwrap()).place("client,server");
            builder.device(Device::Cpu).threads(1).workers(workers).build().unwrap()
        }
    }

    impl Drop for Serving {
        fn drop(&mut self) {
            self.stop.store(true, Ordering::Relaxed);
            let ended = self.thread.take().map(JoinHandle::join);
            assert!(std::thread::panicking() || matches!(ended, Some(Ok(Ok(())))), "{ended:?}");
        }
    }

    /// An action that took 3 s longer than its run once ended the worker: a driver that was stopped in the middle of a step took
    /// it along.
    #[test]
    fn an_action_that_outlasts_its_run_does_not_end_the_worker() {
        let listen = "127.0.0.1:0".parse().unwrap();
        let server = Serving::of(ServeOptions { models: blocking_model, ..ServeOptions::new(listen, TOKEN) });
        give_up_on(blocking(server.address.clone(), 5).build().unwrap());
        let start = Instant::now();
        // The next driver hears that the worker is busy, until the action ends.
        while let Err(error) = blocking(server.address.clone(), 0).build() {
            let busy = matches!(&error, BuildError::Failed(failure) if failure.is_busy());
            assert!(busy && start.elapsed() < Duration::from_secs(60), "{error}");
            std::thread::sleep(POLL);
        }
    }

    /// A worker that welcomes its driver, and is silent from then on, to whoever else connects too.
    fn silent_worker() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let mut held: Vec<ByteStream> = Vec::new();
            for stream in listener.incoming().flatten() {
                let mut stream = ByteStream::from(stream);
                if held.is_empty() {
                    handshake::receive(&mut stream, &[Kind::Hello], JOB_LIMIT).unwrap();
                    handshake::welcome(&mut stream, 1, JOB_LIMIT).unwrap();
                }
                held.push(stream);
            }
        });
        address
    }

    /// The time-outs of a job were once the driver's, and the worker waited for the other's answer without looking at its run: for
    /// months, if the driver said so.
    #[test]
    fn a_worker_that_connects_to_another_is_free_again_when_its_driver_is_gone() {
        let server = Serving::start();
        let addresses = vec![server.address.clone(), silent_worker()];
        let endless = Timeouts { stall_s: 0.5, connect_s: 1e7, reconnect_s: 1e7, ..Timeouts::default() };
        let builder = Pipeline::builder(zoo::Mlp::default().model().unwrap()).place("client,one,two");
        let workers = Workers::Remote { addresses, token: TOKEN };
        let failed = builder.device(Device::Cpu).threads(1).workers(workers).timeouts(endless).build();
        assert!(failed.is_err());
        let start = Instant::now();
        while let Err(refused) = server.introduce(server.connect(), 3) {
            let busy = matches!(refused, Fault::Busy { .. });
            assert!(busy && start.elapsed() < Duration::from_secs(60), "{refused}");
            std::thread::sleep(POLL);
        }
    }

    /// Whatever the driver says, others get a worker back whose run cannot begin.
    #[test]
    fn a_worker_grants_a_job_limited_time_outs() {
        let asked = Timeouts { connect_s: 1e7, reconnect_s: f64::INFINITY, stall_s: 1e7, silence_s: 1e7 };
        let granted = Timeouts { connect_s: 600.0, reconnect_s: 600.0, stall_s: 86_400.0, silence_s: 600.0 };
        assert_eq!(asked.granted(), granted);
        let less = Timeouts { connect_s: 1.0, reconnect_s: 0.0, stall_s: 2.0, silence_s: 3.0 };
        assert_eq!(less.granted(), less);
        assert_eq!(Timeouts::default().granted(), Timeouts::default());
    }

    /// Whoever had the token could make a worker of another machine kill itself, or start a thousand threads.
    #[test]
    fn a_worker_that_other_machines_reach_injects_no_faults_and_starts_no_thousand_threads() {
        let most = exposed_threads_max();
        let refused = |listen: &str, faults: &str, threads: usize| {
            let listen = format!("{listen}:0").parse().unwrap();
            let server = Serving::of(ServeOptions { expose: true, ..ServeOptions::new(listen, TOKEN) });
            let port = server.address.rsplit_once(':').unwrap().1.to_owned();
            let workers = Workers::Remote { addresses: vec![format!("127.0.0.1:{port}")], token: TOKEN };
            let builder = Pipeline::builder(zoo::Mlp::default().model().unwrap()).place("client,server");
            let builder = builder.device(Device::Cpu).threads(threads).workers(workers).faults(faults);
            builder.build().err().map(|error| error.to_string()).unwrap_or_default()
        };
        let faults = refused("0.0.0.0", "server:panic@1F0", 1);
        assert!(faults.contains("injects no faults"), "{faults}");
        let threads = refused("0.0.0.0", "", most + 1);
        assert!(threads.contains(&format!("at most {most} threads, got {}", most + 1)), "{threads}");
        assert_eq!(refused("0.0.0.0", "", most), "");
        assert_eq!(refused("127.0.0.1", "server:panic@1F0", most + 1), "");
    }

    /// It once waited until the first driver had sent its job, which may take a minute, and often gave up before.
    #[test]
    fn a_second_driver_hears_that_the_worker_is_busy_before_the_first_has_sent_its_job() {
        let server = Serving::start();
        let first = server.introduce(server.connect(), 1).unwrap();
        let refused = server.introduce(server.connect(), 2);
        assert!(matches!(&refused, Err(Fault::Busy { text }) if text.contains("another run since 20")), "{refused:?}");
        drop(first);
        drop(server.run());
    }

    /// The next driver of a sequence connects while the run before it is ending, and then says hello.
    #[test]
    fn a_connection_that_is_older_than_the_end_of_a_job_is_not_lost() {
        let server = Serving::start();
        // Those who say nothing for too long are disconnected, so a try that takes too long shows nothing.
        for attempt in 0.. {
            let run = server.run();
            let (waiting, start) = (server.connect(), Instant::now());
            // Connections are accepted in their order: once this one has its answer, the other one has been accepted.
            assert!(matches!(server.introduce(server.connect(), 2), Err(Fault::Busy { .. })));
            drop(run);
            let answered = server.introduce(waiting, 3);
            if answered.is_ok() || start.elapsed() < HANDSHAKE_LIMIT || attempt == 20 {
                drop(answered.expect("the hello is answered"));
                break;
            }
        }
    }

    #[test]
    fn an_address_that_others_can_reach_needs_expose() {
        let options = ServeOptions::new("0.0.0.0:0".parse().unwrap(), Token([7; 32]));
        let refused = Server::bind(options).err().unwrap().to_string();
        assert!(refused.contains("0.0.0.0:0") && refused.contains("`ServeOptions::expose`"), "{refused}");
    }
}
