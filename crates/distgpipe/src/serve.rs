//! A worker in a process of its own. It needs no configuration: who connects with the right token sends the job.

use crate::engine;
use crate::failure::{Failure, Fate, Fault, POLL};
use crate::job::Job;
use crate::link::{self, Credentials, Delivery, Peer, Token};
use crate::mailbox::Mailbox;
use crate::model::{Model, Recipe};
use crate::models::ModelError;
use crate::status::Status;
use crate::transport::faulty::Scenario;
use crate::transport::tcp::{join_until, Connection, Options};
use crate::transport::Outgoing;
use crate::worker::{meter, Worker};
use distgpipe_core::schedule::{check, Plan};
use distgpipe_core::wire::{Kind, Role};
use distgpipe_core::WorkerId;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a first frame may take to come.
const HANDSHAKE: Duration = Duration::from_secs(5);

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
        while let Some((mut stream, from)) = self.accept(&stop, None)? {
            // Whoever cannot introduce himself is no reason to stop serving others.
            let hello = match link::answer(&mut stream, &self.options.token, None, HANDSHAKE) {
                Ok(hello) if hello.role == Role::Driver => hello,
                Ok(hello) => {
                    tell(&failure(
                        "a hello of a driver",
                        Fault::protocol("a driver first", format!("{:?}", hello.role)),
                    ));
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

    fn accept(
        &self,
        stop: &impl Fn() -> bool,
        deadline: Option<Instant>,
    ) -> Result<Option<(TcpStream, SocketAddr)>, Failure> {
        loop {
            match self.listener.accept() {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(failure("accepting a connection", Fault::io("accepting a connection", e))),
            }
            if stop() || deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }

    fn session(&self, mut driver: TcpStream, run: [u8; 16]) -> Result<(), Failure> {
        let (job, plan) = read_job(&mut driver).map_err(|fault| failure("reading the job", fault))?;
        let name = plan.placement().name(job.worker).to_owned();
        let failed = |phase: &'static str| {
            let name = name.clone();
            move |fault| Failure::new(name, phase, fault)
        };
        let result = self.connect_peers(&job, &plan, run).and_then(|peers| {
            let model = job.recipe.as_ref().ok_or_else(|| Fault::protocol("a model's recipe", "none"))?;
            let model = (self.options.models)(model)
                .map_err(|e| Fault::protocol("a model this worker knows", e.to_string()))?;
            Ok((peers, model))
        });
        let (peers, model) = match result {
            Ok(ready) => ready,
            Err(fault) => {
                // No connection runs yet, so the driver is told by hand.
                let failure = failed("joining the run")(fault);
                let _ = link::send_text(&mut driver, Kind::Abort, &failure.notice().encode(), HANDSHAKE);
                return Err(failure);
            }
        };
        let session = Session::start(job, plan, model, driver, peers).map_err(failed("starting"))?;
        session.finish(&name)
    }

    /// Dials the workers after this one and waits for those before it, except those that live with the driver.
    fn connect_peers(&self, job: &Job, plan: &Plan, run: [u8; 16]) -> Result<BTreeMap<WorkerId, TcpStream>, Fault> {
        let me = job.worker;
        let credentials = Credentials { run, token: self.options.token };
        let limit = job.timeouts.connect();
        let mut peers = BTreeMap::new();
        let address = |w: WorkerId| job.addresses.get(w.index()).and_then(Option::as_deref);
        let mut awaited = Vec::new();
        for peer in plan.placement().worker_ids().filter(|&w| w != me && link::linked(plan, me, w)) {
            match address(peer) {
                Some(address) if peer > me => {
                    peers.insert(peer, link::dial(address, Role::Worker(me), &credentials, limit)?);
                }
                Some(_) => awaited.push(peer),
                None => {}
            }
        }
        let deadline = Instant::now() + limit;
        while !awaited.is_empty() {
            let accepted = self.accept(&|| false, Some(deadline)).map_err(Fault::Elsewhere)?;
            let Some((mut stream, _)) = accepted else {
                let names: Vec<&str> = awaited.iter().map(|&w| plan.placement().name(w)).collect();
                return Err(Fault::TimedOut {
                    what: format!("waiting for {} to connect", names.join(", ")),
                    limit_s: limit.as_secs_f64(),
                });
            };
            match link::answer(&mut stream, &self.options.token, Some(run), HANDSHAKE) {
                Ok(hello) => match hello.role {
                    Role::Worker(worker) if awaited.contains(&worker) => {
                        awaited.retain(|&w| w != worker);
                        peers.insert(worker, stream);
                    }
                    // A second driver, or somebody twice: the connection is dropped, and they learn it from that.
                    _ => {}
                },
                Err(Fault::Elsewhere(failure)) => return Err(Fault::Elsewhere(failure)),
                Err(_) => {}
            }
        }
        Ok(peers)
    }
}

fn failure(phase: &str, fault: Fault) -> Failure {
    Failure::new("a worker", phase, fault)
}

fn read_job(driver: &mut TcpStream) -> Result<(Job, Plan), Fault> {
    let frame = link::receive(driver, HANDSHAKE)?;
    if frame.header.kind != Kind::Job {
        return Err(Fault::protocol("a job", format!("{:?}", frame.header.kind)));
    }
    let job: Job = serde_json::from_slice(&frame.body).map_err(|e| Fault::protocol("a job", e.to_string()))?;
    let plan: Plan = job.plan.parse().map_err(|e| Fault::protocol("a plan", format!("{e}")))?;
    check(&plan).map_err(|e| Fault::protocol("a sound plan", e.to_string()))?;
    let workers = plan.placement().workers();
    if job.worker.index() == 0 || job.worker.index() >= workers || job.addresses.len() != workers {
        return Err(Fault::protocol(format!("a worker number from 1 to {}", workers - 1), job.worker.to_string()));
    }
    Ok((job, plan))
}

/// A job under way.
struct Session {
    fate: Fate,
    stage: std::thread::JoinHandle<()>,
    connections: Vec<Connection>,
}

impl Session {
    fn start(
        job: Job,
        plan: Plan,
        model: Model,
        driver: TcpStream,
        peers: BTreeMap<WorkerId, TcpStream>,
    ) -> Result<Self, Fault> {
        let fate = Fate::default();
        let status = Arc::new(Status::default());
        let me = job.worker;
        let mailbox = Mailbox::new(fate.clone(), link::mailbox_capacity(&plan, me));
        let scenario: Scenario = job.faults.parse().map_err(|e| Fault::protocol("a fault scenario", format!("{e}")))?;
        let name = |w: WorkerId| plan.placement().name(w).to_owned();
        let connect = |stream: TcpStream, peer: Peer| {
            let other = match peer {
                Peer::Driver => WorkerId(0),
                Peer::Worker(worker) => worker,
            };
            let delivery =
                Delivery { plan: plan.clone(), peer, workers: BTreeMap::from([(me, mailbox.clone())]), driver: None };
            let (status, scenario, fate_of_link) = (status.clone(), scenario.clone(), fate.clone());
            let (here, there) = (name(me), name(other));
            Connection::start(
                stream,
                Options {
                    here: here.clone(),
                    peer: there.clone(),
                    fate: fate.clone(),
                    timeouts: job.timeouts,
                    queue: link::queue_capacity(&plan, me, other),
                    meter: meter(me),
                    heartbeat: Box::new(move || status.read().to_string()),
                    wrap: Box::new(move |socket| scenario.wrap(&here, &there, &fate_of_link, socket)),
                    deliver: Box::new(move |message| delivery.deliver(message)),
                    alive: Box::new(|_| {}),
                },
            )
        };
        let to_driver = connect(driver, Peer::Driver)?;
        let mut ports: BTreeMap<WorkerId, Box<dyn Outgoing>> = BTreeMap::new();
        let mut links = vec![(WorkerId(0), to_driver.counters().clone())];
        let port = |connection: &Connection| connection.port().ok_or(Fault::Lost);
        ports.insert(WorkerId(0), Box::new(port(&to_driver)?));
        let driver_port = Box::new(port(&to_driver)?);
        let mut connections = vec![to_driver];
        for (worker, stream) in peers {
            let connection = connect(stream, Peer::Worker(worker))?;
            links.push((worker, connection.counters().clone()));
            ports.insert(worker, Box::new(port(&connection)?));
            connections.push(connection);
        }
        let worker = Worker { job, model, mailbox, ports, driver: driver_port, links, fate: fate.clone(), status };
        let stage = std::thread::Builder::new()
            .name("stage".to_owned())
            // The failure, if any, is in the run's fate.
            .spawn(move || drop(worker.run()))
            .map_err(|e| Fault::io("starting the stage thread", e))?;
        Ok(Session { fate, stage, connections })
    }

    fn finish(self, name: &str) -> Result<(), Failure> {
        while !self.stage.is_finished() && self.fate.failure().is_none() {
            std::thread::sleep(POLL);
        }
        let deadline = Instant::now() + GRACE;
        let stage_ended = join_until(self.stage, deadline);
        for connection in self.connections {
            connection.close(deadline.saturating_duration_since(Instant::now()).max(POLL));
        }
        match self.fate.failure() {
            Some(failure) => Err(failure),
            None if stage_ended => Ok(()),
            None => Err(Failure::new(
                name,
                "ending",
                Fault::TimedOut { what: "the stage".to_owned(), limit_s: GRACE.as_secs_f64() },
            )),
        }
    }
}
