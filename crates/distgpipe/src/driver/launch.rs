//! Starts a run's workers, as threads, as processes, or on machines where one is waiting, and ends them.

use crate::coding::{Coding, Decoder, Encoder};
use crate::engine;
use crate::failure::{Failure, Fate, Fault, POLL};
use crate::job::Job;
use crate::link::{self, Credentials, Delivery, Peer, Token};
use crate::mailbox::Mailbox;
use crate::model::Model;
use crate::roster::Roster;
use crate::status::Status;
use crate::transport::faulty::Scenario;
use crate::transport::memory::Memory;
use crate::transport::recoded::{self, Recoded};
use crate::transport::tcp::{join_until, Connection, Options};
use crate::transport::{Counters, Outgoing};
use crate::worker::{meter, Worker};
use distgpipe_core::wire::{Kind, Role};
use distgpipe_core::WorkerId;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long ending may take before what is left is killed.
const GRACE: Duration = Duration::from_secs(3);

/// What the workers are. Worker 0 is always a thread of this process: it is the client, next to the data.
#[derive(Clone, Debug, Default)]
pub enum Workers {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes on this host, started and ended with the run.
    Processes(WorkerProgram),
    /// Workers that already listen, here or elsewhere: the addresses of workers 1, 2, ….
    Remote {
        /// Such as `10.0.0.2:7000`.
        addresses: Vec<String>,
        /// What they were started with.
        token: Token,
    },
}

/// The command that starts a worker process: it must listen on a loopback port, say `listening ADDRESS` on its
/// standard output, and read the token from its standard input, as `distgpipe worker --child` does.
#[derive(Clone, Debug)]
pub struct WorkerProgram {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

static IN_WORKER_PROCESS: AtomicBool = AtomicBool::new(false);

/// Says that this process is a worker's, so that a fault scenario may kill it.
pub fn this_is_a_worker_process() {
    IN_WORKER_PROCESS.store(true, Ordering::Relaxed);
}

/// Dies as by SIGKILL; a thread of the driver's process panics instead.
pub(crate) fn kill_self() -> ! {
    if IN_WORKER_PROCESS.load(Ordering::Relaxed) {
        engine::die_at_once();
    }
    panic!("injected kill of a worker that is a thread");
}

/// A run's workers, and the driver's ways to them.
pub struct Team {
    /// Where reports arrive.
    pub mailbox: Arc<Mailbox>,
    /// The ways to the workers.
    pub ports: BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The run's fate in this process.
    pub fate: Fate,
    /// What each worker does.
    pub statuses: Vec<Arc<Status>>,
    threads: Vec<JoinHandle<()>>,
    connections: BTreeMap<WorkerId, Connection>,
    children: Vec<Child>,
}

/// Starts the workers of a job.
pub fn start(job: &Job, roster: &Arc<Roster>, model: &Model, workers: &Workers) -> Result<Team, Failure> {
    engine::start();
    let fate = Fate::default();
    let outputs = roster.replicas() * roster.plan().micro_batches();
    let mailbox = Mailbox::new(fate.clone(), roster.size() * 4 + outputs + 64);
    let statuses = roster.members().map(|_| Arc::new(Status::default())).collect();
    let mut team = Team {
        mailbox,
        ports: BTreeMap::new(),
        fate,
        statuses,
        threads: vec![],
        connections: BTreeMap::new(),
        children: vec![],
    };
    // On failure the team is dropped, which ends whatever has started.
    match team.assemble(job, roster, model, workers) {
        Ok(()) => Ok(team),
        Err(failure) => Err(team.fate.fail(failure)),
    }
}

/// What all steps of starting share.
struct Assembly<'a> {
    job: Job,
    roster: &'a Arc<Roster>,
    model: &'a Model,
    /// The workers that are threads of this process.
    locals: BTreeMap<WorkerId, Local>,
    scenario: Scenario,
}

/// A worker that is a thread of this process.
struct Local {
    mailbox: Arc<Mailbox>,
    coding: Coding,
    /// Of its links to the other workers of this process.
    counters: BTreeMap<WorkerId, Counters>,
}

impl Assembly<'_> {
    fn name(&self, worker: WorkerId) -> String {
        self.roster.name(worker)
    }

    /// The way from one worker of this process to another.
    fn link(&self, from: WorkerId, to: WorkerId, fate: &Fate) -> Result<(Box<dyn Outgoing>, Counters), Fault> {
        let (sender, receiver) = (&self.locals[&from], &self.locals[&to]);
        let (counters, received) = (sender.counters[&to].clone(), receiver.counters[&from].clone());
        let mailbox = receiver.mailbox.clone();
        let encodes = |(from, to)| self.job.codecs.encode_between(self.roster.plan(), from, to);
        let link: Box<dyn Outgoing> = if self.roster.roles_within(from, to).is_some_and(encodes) {
            Box::new(Recoded::start(recoded::Options {
                here: self.name(from),
                to: mailbox,
                queue: self.roster.queue_capacity(from, to),
                meter: meter(to),
                encoder: Encoder::new(sender.coding.clone(), counters.clone()),
                decoder: Decoder::new(receiver.coding.clone(), received),
                counters: counters.clone(),
                fate: fate.clone(),
            })?)
        } else {
            Box::new(Memory::new(mailbox, counters.clone()))
        };
        Ok((self.scenario.wrap(&self.name(from), &self.name(to), fate, link), counters))
    }

    /// Dials every remote worker, then sends every job: peers find each other only once all have theirs.
    fn dial_all(
        &self,
        remote: &[WorkerId],
        addresses: &[String],
        credentials: &Credentials,
    ) -> Result<Vec<std::net::TcpStream>, Failure> {
        let limit = self.job.timeouts.connect();
        let at = |worker: WorkerId| {
            let name = self.name(worker);
            move |fault| Failure::new(name, "joining the run", fault)
        };
        let mut streams = Vec::new();
        for (&worker, address) in remote.iter().zip(addresses) {
            // A worker that has a run lets the next one wait, and does not answer meanwhile.
            let dialed = link::dial(address, Role::Driver, credentials, limit).map_err(|fault| match fault {
                Fault::TimedOut { limit_s, .. } => Fault::NoAnswer { limit_s },
                other => other,
            });
            streams.push(dialed.map_err(at(worker))?);
        }
        for (&worker, stream) in remote.iter().zip(&mut streams) {
            let text = serde_json::to_vec(&Job { worker, ..self.job.clone() })
                .map_err(|e| at(worker)(Fault::protocol("a job that can be sent", e.to_string())))?;
            link::send_text(stream, Kind::Job, &text, limit).map_err(at(worker))?;
        }
        Ok(streams)
    }
}

impl Team {
    fn assemble(&mut self, job: &Job, roster: &Arc<Roster>, model: &Model, workers: &Workers) -> Result<(), Failure> {
        let driver = |phase: &'static str| move |fault| Failure::new("the driver", phase, fault);
        let remote: Vec<WorkerId> = match workers {
            Workers::Threads => Vec::new(),
            _ => roster.members().skip(1).collect(),
        };
        let mut job = job.clone();
        let (addresses, token) = match workers {
            Workers::Threads => (Vec::new(), None),
            Workers::Processes(program) => {
                let token = Token::random().map_err(driver("starting worker processes"))?;
                let mut addresses = Vec::new();
                for &worker in &remote {
                    let name = roster.name(worker);
                    let address = self.spawn(program, &token, job.timeouts.connect());
                    addresses.push(address.map_err(|fault| Failure::new(name, "starting its process", fault))?);
                }
                (addresses, Some(token))
            }
            Workers::Remote { addresses, token } => (addresses.clone(), Some(*token)),
        };
        if addresses.len() != remote.len() {
            let expected = format!("{} worker addresses (worker 0 is this process)", remote.len());
            return Err(driver("starting workers")(Fault::protocol(expected, addresses.len().to_string())));
        }
        job.addresses = std::iter::repeat_n(None, roster.size() - remote.len())
            .chain(addresses.iter().cloned().map(Some))
            .collect();

        let local = |worker: WorkerId| Local {
            mailbox: Mailbox::new(self.fate.clone(), roster.mailbox_capacity(worker)),
            coding: Coding::new(&Job { worker, ..job.clone() }, roster.plan()),
            counters: roster.members().map(|other| (other, Counters::default())).collect(),
        };
        let locals: BTreeMap<WorkerId, Local> =
            roster.members().filter(|w| !remote.contains(w)).map(|w| (w, local(w))).collect();
        let scenario: Scenario = job
            .faults
            .parse()
            .map_err(|e| driver("reading the fault scenario")(Fault::protocol("a scenario", format!("{e}"))))?;

        let assembly = Assembly { job, roster, model, locals, scenario };
        if let Some(token) = token {
            let run = link::random().map_err(driver("starting"))?;
            let streams = assembly.dial_all(&remote, &addresses, &Credentials { run, token })?;
            for (&worker, stream) in remote.iter().zip(streams) {
                let name = roster.name(worker);
                let connection = self.connect(&assembly, stream, worker);
                let connection = connection.map_err(|fault| Failure::new(name, "connecting", fault))?;
                // Kept at once, so that whatever fails after this is told to the worker.
                self.connections.insert(worker, connection);
            }
        }
        for (&worker, local) in &assembly.locals {
            let thread = self.start_thread(&assembly, worker, local);
            self.threads.push(thread.map_err(driver("starting a worker thread"))?);
        }
        for (&worker, local) in &assembly.locals {
            self.ports.insert(worker, Box::new(Memory::new(local.mailbox.clone(), Counters::default())));
        }
        for (&worker, connection) in &self.connections {
            if let Some(port) = connection.port() {
                self.ports.insert(worker, Box::new(port));
            }
        }
        Ok(())
    }

    fn connect(
        &self,
        assembly: &Assembly<'_>,
        stream: std::net::TcpStream,
        worker: WorkerId,
    ) -> Result<Connection, Fault> {
        let Assembly { job, roster, locals, scenario, .. } = assembly;
        let delivery = Arc::new(Delivery {
            roster: (*roster).clone(),
            peer: Peer::Worker(worker),
            workers: locals.iter().map(|(&worker, local)| (worker, local.mailbox.clone())).collect(),
            driver: Some(self.mailbox.clone()),
        });
        let admission = delivery.clone();
        let (here, there) = (roster.name(WorkerId(0)), roster.name(worker));
        let (scenario, fate, status) = (scenario.clone(), self.fate.clone(), self.statuses[worker.index()].clone());
        let options = Options {
            here: here.clone(),
            peer: there.clone(),
            fate: self.fate.clone(),
            timeouts: job.timeouts,
            queue: roster.queue_capacity(WorkerId(0), worker),
            meter: meter(WorkerId(0)),
            coding: locals[&WorkerId(0)].coding.clone(),
            heartbeat: Box::new(String::new),
            wrap: Box::new(move |socket| scenario.wrap(&here, &there, &fate, socket)),
            admit: Box::new(move |header| admission.admit(header)),
            deliver: Box::new(move |message| delivery.deliver(message)),
            alive: Box::new(move |text| {
                if let Ok(state) = text.parse() {
                    status.set(state);
                }
            }),
        };
        Connection::start(stream, options)
    }

    fn start_thread(&self, assembly: &Assembly<'_>, worker: WorkerId, local: &Local) -> Result<JoinHandle<()>, Fault> {
        let Assembly { job, roster, model, locals, .. } = assembly;
        let mut ports: BTreeMap<WorkerId, Box<dyn Outgoing>> = BTreeMap::new();
        let mut links = Vec::new();
        for other in roster.members().filter(|&w| roster.linked(worker, w)) {
            if locals.contains_key(&other) {
                let (port, counters) = assembly.link(worker, other, &self.fate)?;
                ports.insert(other, port);
                links.push((other, counters));
            } else if let Some(connection) = self.connections.get(&other) {
                ports.insert(other, Box::new(connection.port().ok_or(Fault::Lost)?));
                links.push((other, connection.counters().clone()));
            }
        }
        if worker == WorkerId(0) {
            // What the driver hands out goes with what this worker sends, also to those whom it has nothing to say.
            let others = self.connections.iter().filter(|(other, _)| !roster.linked(worker, **other));
            links.extend(others.map(|(other, connection)| (*other, connection.counters().clone())));
        }
        let thread = Worker {
            job: Job { worker, ..job.clone() },
            roster: (*roster).clone(),
            model: (*model).clone(),
            mailbox: local.mailbox.clone(),
            ports,
            driver: Box::new(Memory::new(self.mailbox.clone(), Counters::default())),
            links,
            coding: local.coding.clone(),
            fate: self.fate.clone(),
            status: self.statuses[worker.index()].clone(),
        };
        std::thread::Builder::new()
            .name(format!("stage {}", assembly.name(worker)))
            // The failure, if any, is in the run's fate.
            .spawn(move || drop(thread.run()))
            .map_err(|e| Fault::io("starting a thread", e))
    }

    /// Starts a worker process and learns its address.
    fn spawn(&mut self, program: &WorkerProgram, token: &Token, limit: Duration) -> Result<String, Fault> {
        let mut child = Command::new(&program.program)
            .args(&program.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Fault::io(format!("starting {}", program.program.display()), e))?;
        let output = child.stdout.take();
        // Its end of input tells the child that this process is gone, so the pipe stays open with the child's handle.
        if let Some(pipe) = child.stdin.as_mut() {
            // A child that is gone already says more by the end of its output than by a broken pipe.
            let _ = writeln!(pipe, "{token}").and_then(|()| pipe.flush());
        }
        self.children.push(child);
        let output = output.ok_or_else(|| Fault::protocol("a standard output", "none"))?;
        let (tell, told) = mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output).lines();
            let _ = tell.send(lines.next());
            // Read on, so that the child never blocks on a full pipe.
            lines.for_each(drop);
        });
        match told.recv_timeout(limit) {
            Ok(Some(Ok(line))) => match line.strip_prefix("listening ") {
                Some(address) => Ok(address.to_owned()),
                None => Err(Fault::protocol("`listening ADDRESS`", line)),
            },
            Ok(_) => Err(Fault::protocol("`listening ADDRESS`", "the end of its output: see what it said above")),
            Err(_) => {
                Err(Fault::TimedOut { what: "waiting for it to listen".to_owned(), limit_s: limit.as_secs_f64() })
            }
        }
    }

    /// Ends everything, by force what does not end by itself.
    fn end(&mut self) {
        self.ports.clear();
        let deadline = Instant::now() + GRACE;
        for thread in self.threads.drain(..) {
            join_until(thread, deadline);
        }
        for connection in std::mem::take(&mut self.connections).into_values() {
            connection.close(deadline.saturating_duration_since(Instant::now()).max(POLL));
        }
        for mut child in self.children.drain(..) {
            drop(child.stdin.take());
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            // No-ops on a child that has ended; otherwise nobody outlives the run.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.end();
    }
}
