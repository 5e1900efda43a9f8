//! A server that strangers can reach: it protects its connections, and runs each job in a process of its own.
//!
//! ```text
//!  client ══ TLS ══► acceptor ─► hello ─► a process per job: `worker --child`, with limits
//!                    (one thread)         ▲
//!         ◄═ TLS ══► relay (two threads per connection) ◄── Unix socket ──┘
//! ```
//!
//! The gateway never decodes what a job sends or receives. The server's key and secret are in this process alone. A job that
//! crashes, hangs or runs out of memory takes only its own process along.

mod dialer;
mod events;
mod relay;
mod runs;

pub use events::GatewayEvent;

use crate::comm::abort::POLL;
use crate::comm::acceptor::{Acceptor, Arrival, ArrivedPeer, Proved, TlsServer, HANDSHAKE_LIMIT};
use crate::comm::handshake::{self, Terms, Token};
use crate::comm::probe;
use crate::comm::server_identity::ServerIdentity;
use crate::comm::transport::tls;
use crate::driver::job_limits::JobLimits;
use crate::driver::launch::WorkerProgram;
use crate::driver::worker_mode::LIMITS;
use crate::engine;
use crate::failure::{Failure, Fault};
use crate::sync::lock;
use distgpipe_core::wire::Role;
use runs::{Admission, Runs};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How a server runs.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// The server's key and secret.
    pub identity: ServerIdentity,
    /// The most jobs at a time.
    pub jobs: usize,
    /// What starts the process of a job; the limits are added to its arguments.
    pub program: WorkerProgram,
    /// The limits of each job.
    pub limits: JobLimits,
    /// The servers that jobs may be connected to, as `HOST:PORT` or `HOST`.
    pub allow: Vec<String>,
    /// Clients that cannot reach this server, and that it connects to instead, as `HOST:PORT`.
    pub dial: Vec<String>,
    /// Whether connections are plain TCP, and the secret crosses the network readable. For measurements on one host.
    pub insecure: bool,
}

/// What a member hears whose run has as many connections as it may have.
const FULL: &str = "too many connections of this run: try again";

/// A connection to a client, and what the acceptor holds until its handshake is over.
type Dialed = (TcpStream, SocketAddr, Arc<()>);

/// The most clients that measure their links at a time. Each takes 32 MB for what it is sent.
const PROBES_MAX: usize = 4;

/// The most drivers that wait for a place, and how often they ask for it.
const WAITING_MAX: usize = 64;
const WAITING_PAUSE: Duration = Duration::from_millis(10);

/// How long connecting to a client may take, and the pause before the next attempt.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
const DIAL_PAUSE: Duration = Duration::from_millis(500);

/// A server that listens.
pub struct Gateway {
    acceptor: Mutex<Acceptor>,
    address: SocketAddr,
    /// Where the processes of jobs ask to be connected to other servers.
    dialer: Mutex<Option<Acceptor>>,
    shared: Arc<Shared>,
}

/// A peer that is to be given to the process of its run.
struct RoutedPeer {
    peer: ArrivedPeer,
    /// When it arrived.
    since: Instant,
    /// Whether it may wait for a place.
    patient: bool,
}

/// What the threads of a gateway share.
struct Shared {
    options: GatewayOptions,
    /// The program of a job's process, with its limits.
    program: WorkerProgram,
    runs: Runs,
    /// Clients that measure their links now.
    probes: AtomicUsize,
    report: Box<dyn Fn(&GatewayEvent) + Send + Sync>,
}

impl Gateway {
    /// Opens the port. `report` takes everything that happens, from several threads.
    pub fn bind(
        options: GatewayOptions,
        report: impl Fn(&GatewayEvent) + Send + Sync + 'static,
    ) -> Result<Self, Fault> {
        if options.insecure && !options.listen.ip().is_loopback() {
            let wrong = format!("expected a loopback address without TLS, got {}", options.listen);
            return Err(Fault::invalid_job("`GatewayOptions::listen`", wrong));
        }
        if options.insecure && !options.allow.is_empty() {
            let wrong =
                "expected none without TLS: a run's key is the server's secret then, and would go to other servers";
            return Err(Fault::invalid_job("`GatewayOptions::allow`", wrong));
        }
        let listener =
            TcpListener::bind(options.listen).map_err(|e| Fault::io(format!("listening on {}", options.listen), e))?;
        let tls = match options.insecure {
            true => None,
            false => {
                Some(TlsServer { config: tls::server_config(&options.identity)?, secret: options.identity.secret })
            }
        };
        let acceptor = Acceptor::new(listener, tls)?;
        let dialer = dialer::listen()?;
        let limits = JobLimits { gateway: Some(dialer.listener().address()?), ..options.limits.clone() };
        let limits =
            serde_json::to_string(&limits).map_err(|e| Fault::internal("limits that serialize", e.to_string()))?;
        let mut program = options.program.clone();
        program.arguments.extend([LIMITS.to_owned(), limits]);
        let shared =
            Shared { options, program, runs: Runs::default(), probes: AtomicUsize::new(0), report: Box::new(report) };
        Ok(Gateway {
            address: acceptor.listener().tcp_address()?,
            acceptor: Mutex::new(acceptor),
            dialer: Mutex::new(Some(dialer)),
            shared: Arc::new(shared),
        })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` returns true. Ends all jobs then.
    pub fn run(&self, stop: impl Fn() -> bool) {
        let mut acceptor = lock(&self.acceptor);
        let run_key = |run: &[u8; 16]| self.shared.runs.key_of(run);
        let stopped = Arc::new(AtomicBool::new(false));
        if let Some(dialer) = lock(&self.dialer).take() {
            let (shared, stopped) = (self.shared.clone(), stopped.clone());
            if let Err(error) = engine::spawn("dialer", move || dialer::serve(&shared, dialer, &stopped)) {
                let failure = Failure::new("the server", "starting a thread", error.into());
                (self.shared.report)(&GatewayEvent::Rejected(failure));
            }
        }
        let dialed = self.dial_clients(&stopped);
        let mut waiting = Vec::new();
        while !stop() {
            for (socket, to, held) in dialed.try_iter() {
                acceptor.adopt(socket, to, held);
            }
            for peer in std::mem::take(&mut waiting) {
                waiting.extend(self.route(&mut acceptor, peer));
            }
            let pause = if waiting.is_empty() { POLL } else { WAITING_PAUSE };
            match acceptor.next(pause, &run_key) {
                Some(Arrival::Peer(peer)) => {
                    let (since, patient) = (Instant::now(), waiting.len() < WAITING_MAX);
                    waiting.extend(self.route(&mut acceptor, RoutedPeer { peer: *peer, since, patient }));
                }
                Some(Arrival::Rejected { from, fault }) => {
                    let failure = Failure::new(from.to_string(), "connecting", fault);
                    (self.shared.report)(&GatewayEvent::Rejected(failure));
                }
                None => {}
            }
        }
        stopped.store(true, Ordering::Relaxed);
        self.shared.runs.end_all();
    }

    /// Keeps a connection open to each client that cannot reach this server, until `stopped` is set: a new one as soon as the
    /// handshake of the last one is over.
    fn dial_clients(&self, stopped: &Arc<AtomicBool>) -> Receiver<Dialed> {
        let (sender, dialed) = mpsc::channel();
        for address in self.shared.options.dial.clone() {
            let (sender, stopped) = (sender.clone(), stopped.clone());
            let dialing = move || {
                while !stopped.load(Ordering::Relaxed) {
                    let held = Arc::new(());
                    // A client listens only while it starts a run, so most attempts fail.
                    if let Ok((socket, to)) = handshake::connect_to(&address, DIAL_LIMIT) {
                        if sender.send((socket, to, held.clone())).is_err() {
                            return;
                        }
                    }
                    std::thread::sleep(DIAL_PAUSE);
                    while Arc::strong_count(&held) > 1 && !stopped.load(Ordering::Relaxed) {
                        std::thread::sleep(POLL);
                    }
                }
            };
            if let Err(error) = engine::spawn("dialing a client", dialing) {
                let failure = Failure::new("the server", "starting a thread", error.into());
                (self.shared.report)(&GatewayEvent::Rejected(failure));
            }
        }
        dialed
    }

    /// Answers a client that measures its link, in a thread of its own.
    fn answer_probe(&self, acceptor: &mut Acceptor, mut peer: ArrivedPeer) {
        let shared = self.shared.clone();
        if shared.probes.fetch_add(1, Ordering::Relaxed) >= PROBES_MAX {
            shared.probes.fetch_sub(1, Ordering::Relaxed);
            return acceptor.refuse(peer, "busy with the measurements of other links");
        }
        let answering = move || {
            // What the peer had to show, it has shown; its version is left.
            let shown = Token(peer.hello.token);
            let terms = Terms { token: &shown, run: None, busy: None };
            let answered = handshake::reply(&mut peer.stream, &peer.hello, &terms, HANDSHAKE_LIMIT)
                .and_then(|()| probe::answer(&mut peer.stream));
            shared.probes.fetch_sub(1, Ordering::Relaxed);
            (shared.report)(&match answered {
                Ok(()) => GatewayEvent::Probed(peer.from),
                Err(fault) => GatewayEvent::Rejected(Failure::new(peer.from.to_string(), "measuring the link", fault)),
            });
        };
        if let Err(error) = engine::spawn("probe", answering) {
            self.shared.probes.fetch_sub(1, Ordering::Relaxed);
            let failure = Failure::new("the server", "starting a thread", error.into());
            (self.shared.report)(&GatewayEvent::Rejected(failure));
        }
    }

    /// Gives a peer to the process of its run, or refuses it. Returns a driver that is to wait for a place, and does not wait itself.
    fn route(&self, acceptor: &mut Acceptor, routed: RoutedPeer) -> Option<RoutedPeer> {
        let RoutedPeer { peer, since, patient } = routed;
        let ArrivedPeer { from, ref hello, proved, .. } = peer;
        let secret = &self.shared.options.identity.secret;
        let may = match (proved, hello.role) {
            (Proved::Secret, Role::Driver | Role::Probe) => true,
            (Proved::Run(run), Role::Worker(_)) => run == hello.run,
            // Without TLS, the token of the hello is the secret itself.
            (Proved::Nothing, Role::Driver | Role::Probe) => hello.check(&hello.run, &secret.0).is_ok(),
            _ => false,
        };
        if !may {
            let reason = match proved {
                Proved::Nothing => {
                    "the two ends have different secrets, or one of them uses TLS and the other does not"
                }
                _ => "a driver shows the server's secret, and a worker the key of a run",
            };
            (self.shared.report)(&GatewayEvent::Rejected(Failure::new(
                from.to_string(),
                "connecting",
                Fault::Refused { reason: reason.to_owned() },
            )));
            acceptor.refuse(peer, reason);
            return None;
        }
        if hello.role == Role::Probe {
            self.answer_probe(acceptor, peer);
            return None;
        }
        let admitted = self.shared.runs.admit(hello, from, self.shared.options.jobs);
        let started = match admitted {
            Admission::Busy { patience, .. } if patient && since.elapsed() < patience => {
                return Some(RoutedPeer { peer, since, patient });
            }
            Admission::Busy { reason, .. } => {
                (self.shared.report)(&GatewayEvent::RefusedBusy(from));
                acceptor.refuse(peer, &reason);
                return None;
            }
            Admission::WrongKey => {
                acceptor.refuse(peer, "the peer does not know the key of this run");
                return None;
            }
            Admission::Full => {
                (self.shared.report)(&GatewayEvent::Rejected(Failure::new(
                    from.to_string(),
                    "connecting",
                    Fault::Refused { reason: FULL.to_owned() },
                )));
                // A link that connects again gives up when it is refused, and tries again when the connection just ends.
                if hello.epoch == 0 {
                    acceptor.refuse(peer, FULL);
                }
                return None;
            }
            Admission::NotInRun => {
                acceptor.refuse(peer, handshake::NOT_IN_RUN);
                return None;
            }
            Admission::New(run) => {
                let (shared, admitted) = (self.shared.clone(), run.clone());
                let started = engine::spawn("job", move || runs::run_job(&shared, &admitted, peer));
                // The thread would have given the place back.
                started.inspect_err(|_| self.shared.runs.remove(&run))
            }
            Admission::Known(run) => {
                let shared = self.shared.clone();
                engine::spawn("connection", move || runs::attach(&shared, &run, peer))
            }
        };
        if let Err(error) = started {
            let failure = Failure::new("the server", "starting a thread", error.into());
            (self.shared.report)(&GatewayEvent::Rejected(failure));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::transport::byte_stream::ByteStream;
    use crate::engine::refusal::with_refused;
    use distgpipe_core::wire::{Hello, Kind, Refuse};

    /// What a member of a run hears, with this epoch: `None` if the connection just ends.
    fn answer(gateway: &Gateway, hello: &Hello, epoch: u64) -> Option<String> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let from = listener.local_addr().unwrap();
        let mut member: ByteStream = TcpStream::connect(from).unwrap().into();
        let stream = listener.accept().unwrap().0.into();
        let hello = Hello { epoch, ..hello.clone() };
        let peer = ArrivedPeer { stream, from, hello, proved: Proved::Secret };
        let mut acceptor = Acceptor::new(listener, None).unwrap();
        let routed = RoutedPeer { peer, since: Instant::now(), patient: false };
        assert!(gateway.route(&mut acceptor, routed).is_none());
        let limit = Duration::from_secs(60);
        match handshake::receive(&mut member, &[Kind::Refuse], limit) {
            Ok(answer) => Some(Refuse::decode(&answer.body).unwrap().reason),
            Err(Fault::Lost) => None,
            Err(other) => panic!("{other}"),
        }
    }

    /// It once heard that it did not know the key, and a link that was connecting again gave its run up.
    #[test]
    fn a_member_of_a_run_with_too_many_connections_is_told_so_and_a_link_tries_again() {
        let gateway = Gateway::bind(options(), |_| ()).unwrap();
        let (run, from) = ([1; 16], SocketAddr::from(([127, 0, 0, 1], 1)));
        let hello = Hello { run, token: [2; 32], role: Role::Driver, epoch: 0, next: 1, build: "test".to_owned() };
        assert!(matches!(gateway.shared.runs.admit(&hello, from, 1), Admission::New(_)));
        gateway.shared.runs.set_connections(&run, runs::CONNECTIONS_MAX);
        assert_eq!(answer(&gateway, &hello, 0).as_deref(), Some("too many connections of this run: try again"));
        assert_eq!(answer(&gateway, &hello, 1), None);
        let wrong = Hello { token: [3; 32], ..hello };
        assert!(answer(&gateway, &wrong, 1).unwrap().contains("does not know the key"));
    }

    /// A server without TLS, which starts no process.
    fn options() -> GatewayOptions {
        GatewayOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            identity: ServerIdentity::generate().unwrap(),
            jobs: 1,
            program: WorkerProgram { program: "false".into(), arguments: Vec::new() },
            limits: JobLimits::default(),
            allow: Vec::new(),
            dial: Vec::new(),
            insecure: true,
        }
    }

    /// It once kept its place until the server ended.
    #[test]
    fn a_run_whose_thread_cannot_be_started_gives_its_place_back() {
        let gateway = Gateway::bind(options(), |_| ()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (run, from) = ([1; 16], listener.local_addr().unwrap());
        let hello = Hello { run, token: [2; 32], role: Role::Driver, epoch: 0, next: 1, build: "test".to_owned() };
        let stream = TcpStream::connect(from).unwrap().into();
        let peer = ArrivedPeer { stream, from, hello, proved: Proved::Secret };
        let mut acceptor = Acceptor::new(listener, None).unwrap();
        let routed = RoutedPeer { peer, since: Instant::now(), patient: false };
        assert!(with_refused("job", || gateway.route(&mut acceptor, routed)).is_none());
        assert!(gateway.shared.runs.key_of(&run).is_none());
    }

    /// The key of a run is the server's secret then.
    #[test]
    fn a_server_without_tls_connects_to_no_other_server() {
        let options = GatewayOptions { allow: vec!["gpu-2:7443".to_owned()], ..options() };
        let refused = Gateway::bind(options, |_| ()).err().map(|fault| fault.to_string()).unwrap_or_default();
        assert!(refused.contains("expected none without TLS"), "{refused}");
    }
}
