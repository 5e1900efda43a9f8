//! A worker in a process of its own. It needs no configuration: who connects with the right token sends the job.

use crate::coding::Coding;
use crate::engine;
use crate::failure::{Failure, Fate, Fault, POLL};
use crate::job::Job;
use crate::link::{self, Credentials, Delivery, Peer, Token};
use crate::mailbox::Mailbox;
use crate::model::{Model, Recipe};
use crate::models::ModelError;
use crate::roster::Roster;
use crate::status::Status;
use crate::transport::faulty::Scenario;
use crate::transport::tcp::{join_until, Connection, Options};
use crate::transport::Outgoing;
use crate::worker::{meter, Worker};
use distgpipe_core::wire::{Kind, Role};
use distgpipe_core::WorkerId;
use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a first frame may take to come.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long a driver with the right token may take to send the job: it dials all workers first.
const JOB: Duration = Duration::from_secs(60);

/// How long threads may take to end after a run.
const GRACE: Duration = Duration::from_secs(3);

/// How a worker process serves.
pub struct ServeOptions {
    /// Where it listens. Other addresses than loopback need `expose`.
    pub listen: SocketAddr,
    /// Whether it may be reached from other machines. There is no encryption yet.
    pub expose: bool,
    /// Who knows this may send jobs.
    pub token: Token,
    /// Whether it ends after the first job.
    pub once: bool,
    /// Makes models; [`crate::models::build`] knows the built-in ones.
    pub models: fn(&Recipe) -> Result<Model, ModelError>,
}

/// A worker process that listens.
pub struct Server {
    listener: TcpListener,
    options: ServeOptions,
}

impl Server {
    /// Opens the port.
    pub fn bind(options: ServeOptions) -> Result<Self, Fault> {
        if !options.listen.ip().is_loopback() && !options.expose {
            return Err(Fault::protocol(
                "a loopback address such as 127.0.0.1:7000",
                format!(
                    "{}: to let other machines in, say so (--expose); what crosses the network is not encrypted",
                    options.listen
                ),
            ));
        }
        let listener =
            TcpListener::bind(options.listen).map_err(|e| Fault::io(format!("listening on {}", options.listen), e))?;
        listener.set_nonblocking(true).map_err(|e| Fault::io("setting up the listener", e))?;
        Ok(Server { listener, options })
    }

    /// Where it listens, with the port that the system chose.
    pub fn address(&self) -> Result<SocketAddr, Fault> {
        self.listener.local_addr().map_err(|e| Fault::io("asking for the port", e))
    }

    /// Serves jobs, one after the other, until `stop` says so. A job that fails ends the loop only with
    /// [`ServeOptions::once`]; otherwise `tell` is given the failure and the next job is waited for.
    pub fn run(&self, stop: impl Fn() -> bool, tell: impl Fn(&Failure)) -> Result<(), Failure> {
        engine::start();
        let mut lobby = Lobby::default();
        while let Some((mut stream, from)) = lobby.next(&self.listener, &stop) {
            // Whoever cannot introduce himself is no reason to stop serving others.
            let hello = match link::answer(&mut stream, &self.options.token, None, HANDSHAKE) {
                Ok(hello) if hello.role == Role::Driver => hello,
                Ok(hello) => {
                    let fault = Fault::protocol("a driver first", format!("{:?}", hello.role));
                    tell(&Failure::new(from.to_string(), "introducing itself", fault));
                    continue;
                }
                Err(fault) => {
                    tell(&Failure::new(from.to_string(), "introducing itself", fault));
                    continue;
                }
            };
            let result = self.session(stream, hello.run);
            match result {
                Err(failure) if self.options.once => return Err(failure),
                Err(failure) => tell(&failure),
                Ok(()) if self.options.once => return Ok(()),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn session(&self, mut driver: TcpStream, run: [u8; 16]) -> Result<(), Failure> {
        let (job, roster) = match read_job(&mut driver) {
            Ok(read) => read,
            Err(fault) => {
                // No connection runs yet, so the driver is told by hand.
                let failure = Failure::new("a worker", "reading the job", fault);
                let _ = link::send_text(&mut driver, Kind::Abort, &failure.notice().encode(), HANDSHAKE);
                return Err(failure);
            }
        };
        let mut session = Session::new(job, roster);
        // From the first connection on, signs of life are sent and everybody learns of a failure.
        let joined = session.connect(driver, Peer::Driver).and_then(|()| self.join(&mut session, run));
        match joined {
            Ok(stage) => session.wait(stage),
            Err(fault) => {
                drop(session.fate.fail(Failure::new(session.name(session.job.worker), "joining the run", fault)))
            }
        }
        session.close()
    }

    /// Connects to the other workers and starts the stage.
    fn join(&self, session: &mut Session, run: [u8; 16]) -> Result<JoinHandle<()>, Fault> {
        self.connect_peers(session, run)?;
        let recipe = session.job.recipe.clone().ok_or_else(|| Fault::protocol("a model's recipe", "none"))?;
        let model = std::panic::catch_unwind(|| (self.options.models)(&recipe))
            .map_err(|_| Fault::protocol("settings a model can be made from", recipe.settings.to_string()))?
            .map_err(|e| Fault::protocol("a model this worker knows", e.to_string()))?;
        session.start_stage(model)
    }

    /// Dials the workers after this one and waits for those before it, except those that live with the driver.
    fn connect_peers(&self, session: &mut Session, run: [u8; 16]) -> Result<(), Fault> {
        let me = session.job.worker;
        let credentials = Credentials { run, token: self.options.token };
        let limit = session.job.timeouts.connect();
        let roster = session.roster.clone();
        let mut awaited = Vec::new();
        for peer in roster.members().filter(|&w| roster.linked(me, w)) {
            match session.job.addresses.get(peer.index()).and_then(Option::as_deref) {
                Some(address) if peer > me => {
                    let stream = link::dial(address, Role::Worker(me), &credentials, limit)?;
                    session.connect(stream, Peer::Worker(peer))?;
                }
                Some(_) => awaited.push(peer),
                None => {}
            }
        }
        let deadline = Instant::now() + limit;
        let mut lobby = Lobby::default();
        while !awaited.is_empty() {
            let fate = session.fate.clone();
            let stop = || fate.failure().is_some() || Instant::now() >= deadline;
            let Some((mut stream, _)) = lobby.next(&self.listener, stop) else {
                fate.check()?;
                let names: Vec<String> = awaited.iter().map(|&w| roster.name(w)).collect();
                let what = format!("waiting for {} to connect", names.join(", "));
                return Err(Fault::TimedOut { what, limit_s: limit.as_secs_f64() });
            };
            let left = deadline.saturating_duration_since(Instant::now()).min(HANDSHAKE);
            // Strangers, a second driver, or somebody twice: the connection is dropped, and they learn it from that.
            if let Ok(hello) = link::answer(&mut stream, &self.options.token, Some(run), left) {
                if let Role::Worker(worker) = hello.role {
                    if awaited.contains(&worker) {
                        awaited.retain(|&w| w != worker);
                        session.connect(stream, Peer::Worker(worker))?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Connections of which nobody has said anything yet. They do not keep those waiting who have.
#[derive(Default)]
struct Lobby {
    waiting: VecDeque<(TcpStream, SocketAddr, Instant)>,
}

/// So many may wait there; who has waited longest makes room.
const LOBBY_MAX: usize = 64;

impl Lobby {
    /// The next connection that says something, or `None` once it is time to stop.
    fn next(&mut self, listener: &TcpListener, stop: impl Fn() -> bool) -> Option<(TcpStream, SocketAddr)> {
        loop {
            // Whatever goes wrong with one connection, or for want of file handles, is no reason to stop listening.
            // However many come, those who speak have their turn.
            for _ in 0..LOBBY_MAX {
                let Ok((stream, from)) = listener.accept() else { break };
                if stream.set_nonblocking(true).is_ok() {
                    self.waiting.push_back((stream, from, Instant::now()));
                }
                if self.waiting.len() > LOBBY_MAX {
                    self.waiting.pop_front();
                }
            }
            if let Some(at) = self.waiting.iter().position(|(stream, ..)| speaks(stream)) {
                let (stream, from, _) = self.waiting.remove(at)?;
                if stream.set_nonblocking(false).is_ok() {
                    return Some((stream, from));
                }
            }
            self.waiting.retain(|(_, _, since)| since.elapsed() < HANDSHAKE);
            if stop() {
                return None;
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Whether bytes have come, or nothing will come any more.
fn speaks(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(_) => true,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

fn read_job(driver: &mut TcpStream) -> Result<(Job, Roster), Fault> {
    let frame = link::receive(driver, &[Kind::Job], JOB)?;
    let job: Job = serde_json::from_slice(&frame.body).map_err(|e| Fault::protocol("a job", e.to_string()))?;
    let roster = job.roster()?;
    let workers = roster.size();
    if job.worker.index() == 0 || job.worker.index() >= workers || job.addresses.len() != workers {
        return Err(Fault::protocol(format!("a worker number from 1 to {}", workers - 1), job.worker.to_string()));
    }
    Ok((job, roster))
}

/// A job under way.
struct Session {
    job: Job,
    roster: Arc<Roster>,
    fate: Fate,
    status: Arc<Status>,
    mailbox: Arc<Mailbox>,
    coding: Coding,
    connections: BTreeMap<WorkerId, Connection>,
}

impl Session {
    fn new(job: Job, roster: Roster) -> Self {
        let fate = Fate::default();
        let mailbox = Mailbox::new(fate.clone(), roster.mailbox_capacity(job.worker));
        let coding = Coding::new(&job, roster.plan());
        let roster = Arc::new(roster);
        Session { job, roster, fate, status: Arc::default(), mailbox, coding, connections: BTreeMap::new() }
    }

    fn name(&self, worker: WorkerId) -> String {
        self.roster.name(worker)
    }

    fn connect(&mut self, stream: TcpStream, peer: Peer) -> Result<(), Fault> {
        let me = self.job.worker;
        let other = match peer {
            // The driver's process runs worker 0, so one connection serves both.
            Peer::Driver => WorkerId(0),
            Peer::Worker(worker) => worker,
        };
        let scenario: Scenario =
            self.job.faults.parse().map_err(|e| Fault::protocol("a fault scenario", format!("{e}")))?;
        let workers = BTreeMap::from([(me, self.mailbox.clone())]);
        let delivery = Arc::new(Delivery { roster: self.roster.clone(), peer, workers, driver: None });
        let (status, fate, admission) = (self.status.clone(), self.fate.clone(), delivery.clone());
        let (here, there) = (self.name(me), self.name(other));
        let options = Options {
            here: here.clone(),
            peer: there.clone(),
            fate: self.fate.clone(),
            timeouts: self.job.timeouts,
            queue: self.roster.queue_capacity(me, other),
            meter: meter(me),
            coding: self.coding.clone(),
            heartbeat: Box::new(move || status.read().to_string()),
            wrap: Box::new(move |socket| scenario.wrap(&here, &there, &fate, socket)),
            admit: Box::new(move |header| admission.admit(header)),
            deliver: Box::new(move |message| delivery.deliver(message)),
            alive: Box::new(|_| {}),
        };
        self.connections.insert(other, Connection::start(stream, options)?);
        Ok(())
    }

    fn start_stage(&self, model: Model) -> Result<JoinHandle<()>, Fault> {
        let mut ports: BTreeMap<WorkerId, Box<dyn Outgoing>> = BTreeMap::new();
        let mut links = Vec::new();
        for (&worker, connection) in &self.connections {
            links.push((worker, connection.counters().clone()));
            ports.insert(worker, Box::new(connection.port().ok_or(Fault::Lost)?));
        }
        let driver = self.connections.get(&WorkerId(0)).and_then(Connection::port).ok_or(Fault::Lost)?;
        let worker = Worker {
            job: self.job.clone(),
            roster: self.roster.clone(),
            model,
            mailbox: self.mailbox.clone(),
            ports,
            driver: Box::new(driver),
            links,
            coding: self.coding.clone(),
            fate: self.fate.clone(),
            status: self.status.clone(),
        };
        std::thread::Builder::new()
            .name("stage".to_owned())
            // The failure, if any, is in the run's fate.
            .spawn(move || drop(worker.run()))
            .map_err(|e| Fault::io("starting the stage thread", e))
    }

    fn wait(&self, stage: JoinHandle<()>) {
        while !stage.is_finished() && self.fate.failure().is_none() {
            std::thread::sleep(POLL);
        }
        if !join_until(stage, Instant::now() + GRACE) {
            // A stage that does not end would compute on beside the next job.
            let fault = Fault::TimedOut { what: "ending".to_owned(), limit_s: GRACE.as_secs_f64() };
            let first = self.fate.fail(Failure::new(self.name(self.job.worker), "ending", fault));
            eprintln!("error: {first}; its stage does not end, so this process does");
            std::thread::sleep(POLL * 4);
            engine::exit_at_once(1);
        }
    }

    fn close(self) -> Result<(), Failure> {
        let deadline = Instant::now() + GRACE;
        for connection in self.connections.into_values() {
            connection.close(deadline.saturating_duration_since(Instant::now()).max(POLL));
        }
        self.fate.failure().map_or(Ok(()), Err)
    }
}
