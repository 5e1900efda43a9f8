//! How the driver reaches the workers that are not in its process, and what it does not send them.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::acceptor::{HANDSHAKE_LIMIT, PENDING_MAX};
use crate::comm::handshake::{self, Credentials, Token};
use crate::comm::probe::{self, LinkMeasurement};
use crate::comm::server_identity::JoinString;
use crate::comm::topology::Topology;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::tcp::Resume;
use crate::comm::transport::tls::{self, Expected};
use crate::driver::launch::Workers;
use crate::engine;
use crate::failure::Fault;
use crate::sync::lock;
use distgpipe_core::wire::Role;
use distgpipe_core::PartitionId;
use std::cmp::Reverse;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How the driver reaches a worker that is not in its process.
pub(super) enum Endpoint {
    /// A worker that listens on this address, with this token.
    Plain { address: String, token: Token },
    /// A server, which connects to this listener if there is one.
    Server(JoinString, Option<Arc<ServerListener>>),
}

impl Endpoint {
    /// Connects to the worker, for the first time or again. `key` is what the peers of the run prove to the servers of it. Returns
    /// the first frame that the worker has not received too.
    pub fn dial(&self, role: Role, run: [u8; 16], key: &Token, resume: Resume) -> Result<(ByteStream, u64), Fault> {
        let limit = resume.limit;
        match self {
            Endpoint::Plain { address, token } => {
                handshake::dial_again(address, role, &Credentials { run, token: *token }, resume)
            }
            Endpoint::Server(server, listener) => {
                let expected = Expected { key: &server.key, secret: &server.secret, run: None };
                let stream = match listener {
                    Some(listener) => listener.accept(&expected, limit, &resume.abort)?,
                    None => handshake::dial_server(&server.addresses, &expected, limit, &resume.abort)?,
                };
                handshake::introduce(stream, role, &Credentials { run, token: *key }, resume)
            }
        }
    }

    /// Workers that listen on these addresses.
    pub fn plain(addresses: &[String], token: &Token) -> Vec<Self> {
        addresses.iter().map(|address| Endpoint::Plain { address: address.clone(), token: *token }).collect()
    }

    /// Servers, which connect to the address `listen` if there is one.
    pub fn servers(servers: &[JoinString], listen: Option<&str>) -> Result<Vec<Self>, Fault> {
        let listener = listen.map(ServerListener::bind).transpose()?.map(Arc::new);
        Ok(servers.iter().map(|server| Endpoint::Server(server.clone(), listener.clone())).collect())
    }

    /// Its addresses, for people.
    fn name(&self) -> String {
        match self {
            Endpoint::Plain { address, .. } => address.clone(),
            Endpoint::Server(server, _) => server.addresses.join(", "),
        }
    }

    fn measure(&self, limit: Duration) -> Result<LinkMeasurement, Fault> {
        let (run, key) = (handshake::random()?, Token::random()?);
        let (stream, _) = self.dial(Role::Probe, run, &key, Resume::first(limit))?;
        probe::measure(stream, limit)
    }

    /// What the other workers of the run are told about it. Never a secret.
    pub fn for_peers(&self) -> String {
        match self {
            Endpoint::Plain { address, .. } => address.clone(),
            Endpoint::Server(server, _) => handshake::server_address(&server.key, &server.addresses),
        }
    }
}

impl Workers {
    /// Measures the link to each worker on another host, as the iterator reaches it, and names the worker by its address. `limit`
    /// bounds the connection and each transfer. A measurement fails with [`Fault::Busy`] if the worker is in a run.
    pub fn measure_links(
        &self,
        limit: Duration,
    ) -> Result<impl Iterator<Item = (String, Result<LinkMeasurement, Fault>)>, Fault> {
        let endpoints: Vec<Endpoint> = match self {
            Workers::Threads | Workers::Processes(_) => Vec::new(),
            #[cfg(feature = "mpi")]
            Workers::Mpi(_) => Vec::new(),
            Workers::Remote { addresses, token } => Endpoint::plain(addresses, token),
            Workers::Servers { servers, listen, .. } => Endpoint::servers(servers, listen.as_deref())?,
        };
        Ok(endpoints.into_iter().map(move |endpoint| (endpoint.name(), endpoint.measure(limit))))
    }
}

/// Refuses a placement that sends labels or inputs to a server, unless the user has allowed it.
pub(super) fn keep_data_here(workers: &Workers, topology: &Topology) -> Result<(), Fault> {
    let Workers::Servers { labels_leave: false, .. } = workers else { return Ok(()) };
    let placement = topology.plan().placement();
    let last = PartitionId::new(topology.plan().partitions() - 1);
    for (partition, what) in [(PartitionId(0), "inputs"), (last, "labels")] {
        let worker = placement.worker_of(partition);
        let away = topology.members().skip(1).find(|&member| topology.role_of(member) == worker);
        if let Some(member) = away {
            let wrong = format!(
                "partition {partition} runs on `{}`, a server, so the {what} would leave this machine: place it on the first \
                 worker, as in `client,server,client`, or allow it with `Workers::Servers::labels_leave`",
                topology.name(member)
            );
            return Err(Fault::invalid_job("`Builder::place`", wrong));
        }
    }
    Ok(())
}

/// Where servers connect that the driver cannot reach. The port is open only while the driver waits for a server.
pub(super) struct ServerListener {
    address: SocketAddr,
    /// What those who wait at the same time share.
    bound: Mutex<Weak<TcpListener>>,
    /// How many connections there have been.
    connections: AtomicU64,
    pending: Arc<Mutex<Vec<PendingServer>>>,
}

/// A handshake in progress.
struct PendingServer {
    number: u64,
    from: IpAddr,
    socket: TcpStream,
}

impl ServerListener {
    pub fn bind(address: &str) -> Result<Self, Fault> {
        let doing = |e| Fault::io(format!("listening on {address}"), e);
        let address = TcpListener::bind(address).and_then(|listener| listener.local_addr()).map_err(doing)?;
        Ok(ServerListener { address, bound: Mutex::default(), connections: AtomicU64::new(0), pending: Arc::default() })
    }

    fn listener(&self) -> Result<Arc<TcpListener>, Fault> {
        let mut bound = lock(&self.bound);
        if let Some(listener) = bound.upgrade() {
            return Ok(listener);
        }
        let doing = |e| Fault::io(format!("listening on {}", self.address), e);
        let listener = TcpListener::bind(self.address).map_err(doing)?;
        listener.set_nonblocking(true).map_err(doing)?;
        let listener = Arc::new(listener);
        *bound = Arc::downgrade(&listener);
        Ok(listener)
    }

    /// Waits for the expected server. Whoever else connects is sent away, and delays nobody: each handshake has a thread, and
    /// when there are too many, the oldest gives way, of the address that has most.
    pub fn accept(&self, expected: &Expected<'_>, limit: Duration, abort: &AbortFlag) -> Result<ByteStream, Fault> {
        let (key, secret, run) = (*expected.key, *expected.secret, expected.run);
        let listener = self.listener()?;
        let (sender, handshakes) = mpsc::channel();
        let start = Instant::now();
        let mut last =
            Fault::TimedOut { what: "waiting for the server to connect".to_owned(), limit_s: limit.as_secs_f64() };
        while start.elapsed() < limit {
            abort.check()?;
            let accepted = listener.accept();
            let pause = if accepted.is_ok() { Duration::ZERO } else { POLL };
            // A connection that cannot be served, for lack of threads or descriptors, is dropped: the server tries again.
            if let Ok((socket, from)) = accepted {
                let Some(pending) = self.enter(&socket, from.ip()) else { continue };
                let (sender, abort) = (sender.clone(), abort.clone());
                drop(engine::spawn("handshake with a server", move || {
                    let expected = Expected { key: &key, secret: &secret, run };
                    let connected = tls::connect(socket, &expected, HANDSHAKE_LIMIT, &abort);
                    // From here on it gives way to nobody.
                    drop(pending);
                    let _ = sender.send(connected);
                }));
            }
            match handshakes.recv_timeout(pause) {
                Ok(Ok(stream)) => return Ok(stream.into()),
                // Those who say nothing are not the server.
                Ok(Err(Fault::Lost | Fault::TimedOut { .. })) | Err(_) => {}
                Ok(Err(fault)) => last = fault,
            }
        }
        Err(last)
    }

    /// Counts a handshake, until the value that it returns is dropped. Makes room for it if there are too many.
    fn enter(&self, socket: &TcpStream, from: IpAddr) -> Option<Entered> {
        let socket = socket.try_clone().ok()?;
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        let mut pending = lock(&self.pending);
        if pending.len() >= PENDING_MAX {
            let crowd = |from: IpAddr| pending.iter().filter(|other| other.from == from).count();
            let at = (0..pending.len()).min_by_key(|&at| Reverse(crowd(pending[at].from)));
            // Its thread notices that the connection has ended.
            at.map(|at| pending.remove(at)).iter().for_each(|oldest| drop(oldest.socket.shutdown(Shutdown::Both)));
        }
        pending.push(PendingServer { number, from, socket });
        Some(Entered { number, pending: self.pending.clone() })
    }
}

/// A handshake that is counted.
struct Entered {
    number: u64,
    pending: Arc<Mutex<Vec<PendingServer>>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        lock(&self.pending).retain(|pending| pending.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::acceptor::{Acceptor, Arrival, TlsServer};
    use crate::comm::server_identity::ServerIdentity;
    use crate::engine::refusal::with_refused;
    use std::sync::atomic::AtomicBool;

    /// A server sees the hello and the job of its own client. Neither has a secret of a join string, its own or another's.
    #[test]
    fn no_server_is_told_the_secret_of_another() {
        let identity = ServerIdentity::generate().unwrap();
        let tls = TlsServer { config: tls::server_config(&identity).unwrap(), secret: identity.secret };
        let mut server = Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), Some(tls)).unwrap();
        let addresses = vec![server.listener().address().unwrap()];
        let (key, secret) = (identity.key, identity.secret);
        let endpoint = Endpoint::Server(JoinString { addresses, key, secret }, None);
        let named = endpoint.for_peers();
        assert!(named.contains(&key.to_string()) && !named.contains(&secret.to_string()), "{named}");
        let (run, of_run) = ([5; 16], Token([6; 32]));
        let driver = std::thread::spawn(move || {
            let limit = Duration::from_secs(60);
            drop(endpoint.dial(Role::Driver, run, &of_run, Resume::first(limit)));
        });
        let hello = loop {
            match server.next(POLL, &|_| None) {
                Some(Arrival::Peer(peer)) => break peer.hello,
                Some(Arrival::Rejected { fault, .. }) => panic!("{fault}"),
                None => {}
            }
        };
        assert_eq!((hello.run, hello.token), (run, of_run.0));
        driver.join().unwrap();
    }

    /// 64 connections that said nothing once kept the server out.
    #[test]
    fn silent_connections_do_not_keep_the_server_out() {
        let identity = ServerIdentity::generate().unwrap();
        let listener = ServerListener::bind("127.0.0.1:0").unwrap();
        // Open from now on.
        let open = listener.listener().unwrap();
        let address = open.local_addr().unwrap();
        let silent: Vec<TcpStream> = (0..PENDING_MAX + 16).map(|_| TcpStream::connect(address).unwrap()).collect();
        let tls = TlsServer { config: tls::server_config(&identity).unwrap(), secret: identity.secret };
        let mut server = Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), Some(tls)).unwrap();
        server.adopt(TcpStream::connect(address).unwrap(), address, Arc::new(()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    server.next(POLL, &|_| None);
                }
            });
            let expected = Expected { key: &identity.key, secret: &identity.secret, run: None };
            let accepted = listener.accept(&expected, Duration::from_secs(20), &AbortFlag::default());
            stop.store(true, Ordering::Relaxed);
            assert!(accepted.is_ok(), "{accepted:?}");
            assert!(lock(&listener.pending).len() <= PENDING_MAX);
        });
        drop(silent);
    }

    /// The error of the thread once ended the run, although the server tries again.
    #[test]
    fn a_lack_of_threads_does_not_end_the_wait_for_the_server() {
        let identity = ServerIdentity::generate().unwrap();
        let listener = ServerListener::bind("127.0.0.1:0").unwrap();
        let open = listener.listener().unwrap();
        let _server = TcpStream::connect(open.local_addr().unwrap()).unwrap();
        let expected = Expected { key: &identity.key, secret: &identity.secret, run: None };
        let limit = Duration::from_millis(300);
        let ended =
            with_refused("handshake with a server", || listener.accept(&expected, limit, &AbortFlag::default()));
        assert!(matches!(ended, Err(Fault::TimedOut { .. })), "{ended:?}");
        assert!(lock(&listener.pending).is_empty());
    }
}
