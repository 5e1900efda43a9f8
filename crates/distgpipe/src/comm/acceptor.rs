//! The listening end of a process: accepts connections and drives all their handshakes at once, so that nobody can keep
//! others waiting.
//!
//! ```text
//!            TLS                            plain
//!  accept ─► ClientHello ─► claim ─► hello  accept ─► hello ─► a peer, for the caller to welcome or refuse
//! ```
//!
//! One thread calls [`Acceptor::next`] again and again; no read or write of a handshake blocks it. What a connection may cost
//! before it has shown that it knows a secret is bounded: [`HANDSHAKE_LIMIT`] of time, [`HANDSHAKE_BYTES_MAX`] of input, one of
//! [`PENDING_MAX`] places. When all places are taken, the one that got least far gives way, of the address that has most.

mod rates;

use crate::comm::handshake::Token;
use crate::comm::listener::{Accepted, Listener};
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::limits;
use crate::comm::transport::tls::{self, TlsStream, CLAIM_BYTES};
use crate::engine;
use crate::failure::Fault;
use distgpipe_core::wire::{Header, Hello, Kind, Refuse, WireError, HEADER_BYTES};
use rates::Rates;
use rustls::ServerConfig;
use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most handshakes at a time.
pub const PENDING_MAX: usize = 64;

/// How long a handshake may take.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// How many bytes a handshake may have.
pub const HANDSHAKE_BYTES_MAX: u64 = 16 << 10;

/// How long a peer that was refused may take to read why, and close.
const CLOSING_LIMIT: Duration = Duration::from_millis(500);

/// The most connections that are accepted before those that exist get their turn.
const ACCEPTED_AT_ONCE: usize = 16;

/// What a server protects its connections with.
#[derive(Clone, Debug)]
pub struct TlsServer {
    /// The server's end of TLS.
    pub config: Arc<ServerConfig>,
    /// What clients prove to know.
    pub secret: Token,
}

/// What a peer has proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proved {
    /// Nothing: the connection is plain TCP, and the token in the hello has not been compared with any.
    Nothing,
    /// That it knows the server's secret.
    Secret,
    /// That it knows the key of this run.
    Run([u8; 16]),
}

/// What comes of a connection.
#[derive(Debug)]
pub enum Arrival {
    /// A peer has introduced itself and waits for an answer.
    Peer(Box<ArrivedPeer>),
    /// A connection was closed.
    Rejected {
        /// Where it came from.
        from: SocketAddr,
        /// Why it was closed.
        fault: Fault,
    },
}

/// A peer that has introduced itself.
#[derive(Debug)]
pub struct ArrivedPeer {
    /// The connection; it blocks, with short time-outs.
    pub stream: ByteStream,
    /// Where it comes from.
    pub from: SocketAddr,
    /// What it says.
    pub hello: Hello,
    /// What it has proved.
    pub proved: Proved,
}

/// The key of a run that this process is in.
pub type RunKeys<'a> = dyn Fn(&[u8; 16]) -> Option<Token> + 'a;

/// A listener and the handshakes in progress.
#[derive(Debug)]
pub struct Acceptor {
    listener: Listener,
    tls: Option<TlsServer>,
    pending: Vec<Pending>,
    pending_max: usize,
    rates: Rates,
    arrived: VecDeque<Arrival>,
}

#[derive(Debug)]
struct Pending {
    stage: Stage,
    from: SocketAddr,
    since: Instant,
    /// Dropped when the handshake is over.
    held: Option<Arc<()>>,
}

/// How far a handshake has come.
enum Stage {
    ClientHello {
        acceptor: Box<rustls::server::Acceptor>,
        socket: TcpStream,
        bytes: u64,
    },
    Claim {
        stream: TlsStream,
        claim: Vec<u8>,
    },
    Hello {
        stream: ByteStream,
        frame: Vec<u8>,
        proved: Proved,
    },
    /// Refused; stays open until the peer has read why.
    Closing {
        stream: ByteStream,
    },
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stage({})", self.rank())
    }
}

impl Stage {
    /// The first stage of a connection without TLS.
    fn plain(stream: ByteStream) -> Self {
        Stage::Hello { stream, frame: Vec::new(), proved: Proved::Nothing }
    }

    /// Those with a lower rank give way first.
    fn rank(&self) -> u8 {
        match self {
            Stage::Closing { .. } => 0,
            Stage::ClientHello { .. } => 1,
            Stage::Hello { proved: Proved::Nothing, .. } => 2,
            Stage::Claim { .. } => 3,
            Stage::Hello { .. } => 4,
        }
    }

    /// Whether the peer has shown that it knows a secret.
    fn has_proved(&self) -> bool {
        matches!(self, Stage::Hello { proved: Proved::Secret | Proved::Run(_), .. })
    }

    fn socket(&self) -> RawFd {
        match self {
            Stage::ClientHello { socket, .. } => socket.as_raw_fd(),
            Stage::Claim { stream, .. } => stream.socket().as_raw_fd(),
            Stage::Hello { stream, .. } | Stage::Closing { stream } => stream.as_raw_fd(),
        }
    }
}

/// What one look at a connection comes to.
enum Step {
    /// There is more to come.
    Wait(Stage),
    /// The next stage can be looked at.
    Next(Stage),
    Arrived(ByteStream, Box<Hello>, Proved),
    /// Closed, and the caller should know.
    Rejected(Fault),
    /// Refused with an answer that the peer may still read.
    Refused(ByteStream, Fault),
    /// Closed; nobody needs to know.
    Closed,
}

impl Acceptor {
    /// Takes over a listener.
    pub fn new(listener: impl Into<Listener>, tls: Option<TlsServer>) -> Result<Self, Fault> {
        let listener = listener.into();
        listener.set_nonblocking().map_err(|e| Fault::io("setting up the listener", e))?;
        // Strangers must leave descriptors for those who are accepted.
        let descriptors = usize::try_from(engine::open_files_max()).unwrap_or(usize::MAX);
        let pending_max = (descriptors.saturating_sub(8) / 4).clamp(1, PENDING_MAX);
        Ok(Acceptor {
            listener,
            tls,
            pending: Vec::new(),
            pending_max,
            rates: Rates::default(),
            arrived: VecDeque::new(),
        })
    }

    /// What it listens on.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// The next peer that has introduced itself, or connection that was closed. `None` if there is none within about `wait`.
    pub fn next(&mut self, wait: Duration, run_keys: &RunKeys<'_>) -> Option<Arrival> {
        let deadline = Instant::now() + wait;
        loop {
            // What has arrived is taken first, so that it is no more than one turn brings.
            if let Some(arrival) = self.arrived.pop_front() {
                return Some(arrival);
            }
            self.accept();
            self.advance_all(run_keys);
            self.report_unreported();
            if !self.arrived.is_empty() {
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            self.wait(left);
        }
    }

    /// Gives a peer that has introduced itself another turn: [`next`](Self::next) returns it again.
    pub fn put_back(&mut self, peer: Box<ArrivedPeer>) {
        self.arrived.push_front(Arrival::Peer(peer));
    }

    /// Takes over a connection that this process has opened to a client that it cannot be reached by. The roles are those of
    /// any other connection.
    pub fn adopt(&mut self, socket: TcpStream, to: SocketAddr, held: Arc<()>) {
        if socket.set_nonblocking(true).and_then(|()| socket.set_nodelay(true)).is_ok() {
            let stage = self.first_stage(socket);
            self.add(stage, to);
            if let Some(pending) = self.pending.last_mut() {
                pending.held = Some(held);
            }
        }
    }

    /// Refuses a peer with a reason. Does not block.
    pub fn refuse(&mut self, peer: ArrivedPeer, reason: &str) {
        let from = peer.from;
        if let Some(stream) = refused(peer.stream, reason) {
            self.add(Stage::Closing { stream }, from);
        }
    }

    /// Waits until there is something to do.
    fn wait(&self, limit: Duration) {
        // A handshake that waits for its turn at the rate of its address has input already.
        let now = Instant::now();
        let sockets = self.pending.iter().filter(|pending| !self.rates.waits(pending.from.ip(), now));
        let mut sockets: Vec<_> = sockets.map(|pending| pending.stage.socket()).collect();
        sockets.push(self.listener.as_raw_fd());
        // Time-outs are looked at meanwhile.
        engine::wait_readable(&sockets, limit.min(Duration::from_millis(50)));
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            // An error of one connection, or a lack of descriptors, must not end the listening.
            let (socket, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    self.make_room();
                    return;
                }
                Err(_) => return,
            };
            let stage = match socket {
                Accepted::Tcp(socket) => self.first_stage(socket),
                Accepted::Local(socket) => Stage::plain(socket.into()),
            };
            self.add(stage, from);
        }
    }

    fn first_stage(&self, socket: TcpStream) -> Stage {
        match self.tls {
            Some(_) => Stage::ClientHello { acceptor: Box::default(), socket, bytes: 0 },
            None => Stage::plain(socket.into()),
        }
    }

    fn add(&mut self, stage: Stage, from: SocketAddr) {
        if self.pending.len() >= self.pending_max {
            self.make_room();
        }
        self.pending.push(Pending { stage, from, since: Instant::now(), held: None });
    }

    /// Drops the handshake that got least far, of the address that has most of them.
    fn make_room(&mut self) {
        let mut by_address = HashMap::new();
        for pending in &self.pending {
            *by_address.entry(rates::group(pending.from.ip())).or_insert(0) += 1;
        }
        let crowd = |pending: &Pending| by_address.get(&rates::group(pending.from.ip())).copied().unwrap_or(0);
        let order = |pending: &Pending| (std::cmp::Reverse(crowd(pending)), pending.stage.rank(), pending.since);
        if let Some(at) = (0..self.pending.len()).min_by_key(|&at| order(&self.pending[at])) {
            self.pending.remove(at);
        }
    }

    fn advance_all(&mut self, run_keys: &RunKeys<'_>) {
        let mut handshakes = std::mem::take(&mut self.pending);
        // The newest first: strangers that wait for the rate of their address do not keep back those who come after them.
        while let Some(Pending { mut stage, from, since, held }) = handshakes.pop() {
            let limit = if matches!(stage, Stage::Closing { .. }) { CLOSING_LIMIT } else { HANDSHAKE_LIMIT };
            loop {
                let has_proved = stage.has_proved();
                match self.advance(stage, from, run_keys) {
                    Step::Next(next) => stage = next,
                    Step::Wait(waiting) if since.elapsed() < limit => {
                        self.pending.push(Pending { stage: waiting, from, since, held });
                        break;
                    }
                    // Those who never said a word, port scanners for instance, are not worth a line in a log.
                    Step::Wait(_) | Step::Closed => break,
                    Step::Arrived(stream, hello, proved) => {
                        if stream.set_up().is_ok() {
                            let peer = ArrivedPeer { stream, from, hello: *hello, proved };
                            self.arrived.push_back(Arrival::Peer(Box::new(peer)));
                        }
                        break;
                    }
                    Step::Rejected(fault) => {
                        self.report(from, fault, has_proved);
                        break;
                    }
                    Step::Refused(stream, fault) => {
                        self.report(from, fault, has_proved);
                        self.add(Stage::Closing { stream }, from);
                        break;
                    }
                }
            }
        }
        self.pending.sort_by_key(|pending| pending.since);
    }

    /// Reports why a connection was closed. Those who have proved nothing are reported a few times only, so that they fill no
    /// log.
    fn report(&mut self, from: SocketAddr, fault: Fault, has_proved: bool) {
        if has_proved || self.rates.count_failure(from, Instant::now()) {
            self.arrived.push_back(Arrival::Rejected { from, fault });
        }
    }

    /// Reports how many connections were closed without a report, once per period.
    fn report_unreported(&mut self) {
        if let Some((count, from)) = self.rates.unreported(Instant::now()) {
            let others = if count == 1 { "1 more connection".to_owned() } else { format!("{count} more connections") };
            let limit_s = rates::FAILURES_PERIOD.as_secs();
            let reason = format!("{others} failed within {limit_s} s before they proved anything, this one last");
            self.arrived.push_back(Arrival::Rejected { from, fault: Fault::Refused { reason } });
        }
    }

    fn advance(&mut self, stage: Stage, from: SocketAddr, run_keys: &RunKeys<'_>) -> Step {
        match (stage, self.tls.clone()) {
            (Stage::ClientHello { acceptor, socket, bytes }, Some(tls)) => {
                self.read_client_hello(acceptor, socket, bytes, from, &tls)
            }
            (Stage::Claim { stream, claim }, Some(tls)) => read_claim(stream, claim, &tls, run_keys),
            (Stage::Hello { stream, frame, proved }, _) => read_hello(stream, frame, proved),
            (Stage::Closing { mut stream }, _) => match stream.read(&mut [0; 4096]) {
                Err(e) if waits(&e) => Step::Wait(Stage::Closing { stream }),
                Ok(read) if read > 0 => Step::Wait(Stage::Closing { stream }),
                _ => Step::Closed,
            },
            (Stage::ClientHello { .. } | Stage::Claim { .. }, None) => Step::Closed,
        }
    }

    /// Reads the first message of TLS. The work for it begins when it is complete, at the rate of its address.
    fn read_client_hello(
        &mut self,
        mut acceptor: Box<rustls::server::Acceptor>,
        mut socket: TcpStream,
        mut bytes: u64,
        from: SocketAddr,
        tls: &TlsServer,
    ) -> Step {
        loop {
            if !self.rates.may_begin(from.ip(), Instant::now()) {
                return Step::Wait(Stage::ClientHello { acceptor, socket, bytes });
            }
            match acceptor.accept() {
                Ok(Some(accepted)) => {
                    self.rates.begin(from.ip(), Instant::now());
                    return match accepted.into_connection(tls.config.clone()) {
                        Ok(connection) => {
                            let stream = TlsStream::new(socket, connection.into());
                            stream.limit_input(Some(HANDSHAKE_BYTES_MAX));
                            Step::Next(Stage::Claim { stream, claim: Vec::new() })
                        }
                        Err((error, mut alert)) => {
                            let _ = alert.write_all(&mut socket);
                            Step::Rejected(Fault::Tls(error))
                        }
                    };
                }
                Ok(None) => {}
                Err((error, mut alert)) => {
                    self.rates.begin(from.ip(), Instant::now());
                    let _ = alert.write_all(&mut socket);
                    return Step::Rejected(Fault::Tls(error));
                }
            }
            match acceptor.read_tls(&mut socket) {
                Ok(0) => return Step::Closed,
                Ok(read) => bytes += read as u64,
                Err(e) if waits(&e) => return Step::Wait(Stage::ClientHello { acceptor, socket, bytes }),
                Err(_) => return Step::Closed,
            }
            if bytes > HANDSHAKE_BYTES_MAX {
                return Step::Rejected(too_long(bytes));
            }
        }
    }
}

fn read_claim(mut stream: TlsStream, mut claim: Vec<u8>, tls: &TlsServer, run_keys: &RunKeys<'_>) -> Step {
    match fill(&mut stream, &mut claim, CLAIM_BYTES) {
        Ok(true) => {}
        Ok(false) => return Step::Wait(Stage::Claim { stream, claim }),
        Err(fault) => return Step::Rejected(fault),
    }
    let Ok(claim) = <[u8; CLAIM_BYTES]>::try_from(claim) else { return Step::Closed };
    let answer = tls::answer(&stream, &claim, |run| match run {
        None => Some(tls.secret),
        Some(run) => run_keys(run),
    });
    let answer = match answer {
        Ok(answer) => answer,
        Err(fault) => return Step::Rejected(fault),
    };
    // The answer is much smaller than the socket's buffer, so this does not wait.
    let sent = stream.write_all(&answer.bytes).is_ok();
    match answer.result {
        Ok(claim) if sent => {
            stream.limit_input(None);
            let proved = claim.run.map_or(Proved::Secret, Proved::Run);
            Step::Next(Stage::Hello { stream: stream.into(), frame: Vec::new(), proved })
        }
        Err(fault) if sent => {
            let _ = stream.shutdown(Shutdown::Write);
            Step::Refused(stream.into(), fault)
        }
        Ok(_) => Step::Closed,
        Err(fault) => Step::Rejected(fault),
    }
}

fn too_long(bytes: u64) -> Fault {
    Fault::protocol(format!("a handshake of at most {HANDSHAKE_BYTES_MAX} bytes"), format!("{bytes} bytes"))
}

fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// Reads until `bytes` has this length. `false` if there is no more input now.
fn fill(stream: &mut impl Read, bytes: &mut Vec<u8>, length: usize) -> Result<bool, Fault> {
    while bytes.len() < length {
        let have = bytes.len();
        bytes.resize(length, 0);
        let read = stream.read(&mut bytes[have..]);
        bytes.truncate(have + read.as_ref().map_or(0, |&read| read));
        match read {
            Ok(0) => return Err(Fault::Lost),
            Ok(_) => {}
            Err(e) if waits(&e) => return Ok(false),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(Fault::Lost),
            Err(e) => return Err(Fault::io("reading from the socket", e)),
        }
    }
    Ok(true)
}

/// Reads the first frame: a hello of at most 4 KiB.
fn read_hello(mut stream: ByteStream, mut frame: Vec<u8>, proved: Proved) -> Step {
    match fill(&mut stream, &mut frame, HEADER_BYTES) {
        Ok(true) => {}
        Ok(false) => return Step::Wait(Stage::Hello { stream, frame, proved }),
        Err(_) if frame.is_empty() => return Step::Closed,
        Err(fault) => return Step::Rejected(fault),
    }
    let Some(head) = frame.first_chunk::<HEADER_BYTES>() else { return Step::Closed };
    let header = match Header::decode(head, &limits()) {
        Ok(header) if header.kind == Kind::Hello => header,
        Ok(header) => return Step::Rejected(Fault::protocol("a frame of kind Hello", format!("{:?}", header.kind))),
        Err(error @ WireError::Version { .. }) => {
            // All that the peer understands of an answer is the version in its header, which it reports.
            let fault = Fault::Wire(error);
            return match refused(stream, &fault.to_string()) {
                Some(stream) => Step::Refused(stream, fault),
                None => Step::Rejected(fault),
            };
        }
        Err(error) => return Step::Rejected(error.into()),
    };
    // The header's limits bound it.
    let length = HEADER_BYTES + usize::try_from(header.body_bytes).unwrap_or(0);
    match fill(&mut stream, &mut frame, length) {
        Ok(true) => {}
        Ok(false) => return Step::Wait(Stage::Hello { stream, frame, proved }),
        Err(fault) => return Step::Rejected(fault),
    }
    let body = &frame[HEADER_BYTES..];
    let hello = header.verify(body).map_err(Fault::from);
    let hello = hello.and_then(|()| Hello::decode(body).map_err(|e| Fault::malformed("a hello", e)));
    match hello {
        Ok(hello) => Step::Arrived(stream, Box::new(hello), proved),
        Err(fault) => Step::Rejected(fault),
    }
}

/// Sends a refusal and ends this direction. `None` if the peer cannot be told.
fn refused(mut stream: ByteStream, reason: &str) -> Option<ByteStream> {
    let body = Refuse { reason: reason.to_owned() }.encode();
    let mut header = Header::new(Kind::Refuse);
    header.seal(&body);
    stream.set_nonblocking(true).ok()?;
    // Much smaller than the socket's buffer, so this does not wait.
    stream.write_all(&[&header.encode()[..], &body].concat()).ok()?;
    stream.shutdown(Shutdown::Write).ok()?;
    Some(stream)
}

#[cfg(test)]
mod tests;
