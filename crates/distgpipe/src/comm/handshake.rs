//! The first frames of a connection.
//!
//! ```text
//! dialing end    Hello (token, run, role, version) ──►
//! listening end                                    ◄── Welcome, or Refuse with the reason
//! ```
//!
//! Until the hello has shown the token, nothing else is read from the peer, and the whole hello must arrive in time: the
//! [`acceptor`](crate::comm::acceptor) reads it.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::link_codecs::Decoder;
use crate::comm::listener::connect_local;
use crate::comm::server_identity::PublicKey;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::limits;
use crate::comm::transport::tcp::{read_frame, write_frame, Deadline, Frame, Resume};
use crate::comm::transport::tls::{self, Expected};
use crate::engine;
use crate::failure::{printable, Fault};
use crate::sync::lock;
use distgpipe_core::wire::{HandshakeError, Header, Hello, Kind, MessageError, Refuse, Role, Welcome};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The secret that the driver and its workers share; 32 random bytes, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(pub [u8; 32]);

impl Token {
    /// A new token from the operating system's random source.
    pub fn random() -> Result<Self, Fault> {
        random().map(Token)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The text is not a token.
#[derive(Debug, thiserror::Error)]
#[error("expected a token of 64 hexadecimal digits, as the worker prints it when it starts")]
pub struct TokenError;

impl FromStr for Token {
    type Err = TokenError;
    fn from_str(text: &str) -> Result<Self, TokenError> {
        bytes_of_hex(text.trim()).map(Token).ok_or(TokenError)
    }
}

/// The bytes that exactly `2 N` hexadecimal digits stand for.
pub(crate) fn bytes_of_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(bytes)
}

/// `N` bytes from the operating system's random source.
pub fn random<const N: usize>() -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    let source = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes));
    source.map_err(|e| Fault::io("reading /dev/urandom", e))?;
    Ok(bytes)
}

/// Both ends must be of the same version.
pub(crate) const BUILD: &str = env!("CARGO_PKG_VERSION");

/// What a peer must show to join a run.
#[derive(Clone, Copy, Debug)]
pub struct Credentials {
    /// The run's random identifier, so that a late connection of an earlier run is refused.
    pub run: [u8; 16],
    /// The secret of the workers.
    pub token: Token,
}

/// Sends one frame without a tensor, outside of a [`Connection`](crate::comm::transport::tcp::Connection).
pub fn send_text(stream: &mut ByteStream, kind: Kind, body: &[u8], limit: Duration) -> Result<(), Fault> {
    send_frame(stream, Header::new(kind), body, limit)
}

/// Sends one frame without a tensor, whose header it seals.
pub fn send_frame(stream: &mut ByteStream, header: Header, body: &[u8], limit: Duration) -> Result<(), Fault> {
    send_unless(stream, header, body, limit, &AbortFlag::default())
}

/// Sends a text, or gives up when the run fails.
fn send_text_unless(stream: &mut ByteStream, kind: Kind, body: &[u8], resume: &Resume) -> Result<(), Fault> {
    send_unless(stream, Header::new(kind), body, resume.limit, &resume.abort)
}

fn send_unless(
    stream: &mut ByteStream,
    mut header: Header,
    body: &[u8],
    limit: Duration,
    abort: &AbortFlag,
) -> Result<(), Fault> {
    header.seal(body);
    header.check(&limits())?;
    write_frame(stream, &header, body, &Deadline::new(abort, limit)).map_err(|fault| match fault {
        Fault::NotReading { limit_s } => Fault::TimedOut { what: "the handshake".to_owned(), limit_s },
        other => other,
    })
}

/// Reads one frame of one of these kinds. `limit` bounds the whole read, progress or not, because the peer may not have
/// shown the token yet.
pub fn receive(stream: &mut ByteStream, kinds: &[Kind], limit: Duration) -> Result<Frame, Fault> {
    receive_unless(stream, kinds, limit, &AbortFlag::default())
}

/// The same, and gives up when the run fails.
fn receive_unless(stream: &mut ByteStream, kinds: &[Kind], limit: Duration, abort: &AbortFlag) -> Result<Frame, Fault> {
    let deadline = Deadline::new(abort, limit).with_total(limit);
    read_frame(stream, &limits(), &deadline, &mut Decoder::raw(), |header| match kinds.contains(&header.kind) {
        true => Ok(()),
        false => {
            let names: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
            Err(Fault::protocol(format!("a frame of kind {}", names.join(" or ")), format!("{:?}", header.kind)))
        }
    })
}

/// Connects to a worker and [introduces](introduce) this end.
pub fn dial(address: &str, role: Role, credentials: &Credentials, limit: Duration) -> Result<ByteStream, Fault> {
    dial_again(address, role, credentials, Resume::first(limit)).map(|(stream, _)| stream)
}

/// Connects to a worker whose connection broke. Returns the first frame that the worker has not received too.
pub fn dial_again(
    address: &str,
    role: Role,
    credentials: &Credentials,
    resume: Resume,
) -> Result<(ByteStream, u64), Fault> {
    introduce(connect(address, Instant::now() + resume.limit, &resume.abort)?.into(), role, credentials, resume)
}

/// Connects to a server at the first of its addresses that answers, and has both ends prove who they are. `limit` bounds all of it;
/// gives up earlier when the run fails.
pub fn dial_server(
    addresses: &[String],
    expected: &Expected<'_>,
    limit: Duration,
    abort: &AbortFlag,
) -> Result<ByteStream, Fault> {
    let deadline = Instant::now() + limit;
    let mut failed = Fault::invalid_job("a join string", "it has no address");
    let mut wrong_key = None;
    for (i, address) in in_order(addresses, expected).into_iter().enumerate() {
        if i > 0 && Instant::now() >= deadline {
            break;
        }
        let share = share_of(deadline, addresses.len() - i);
        let connected = connect(address, share, abort).and_then(|socket| {
            let left = share.saturating_duration_since(Instant::now());
            tls::connect(socket, expected, left, abort)
        });
        failed = match connected {
            Ok(stream) => {
                lock(&ANSWERED).insert(expected.key.0, address.clone());
                return Ok(stream.into());
            }
            // The server does not let this end in: so it is at every address.
            Err(fault @ (Fault::WrongSecret(_) | Fault::Refused { .. } | Fault::Reported(_))) => return Err(fault),
            // A private address may be that of another server in this network.
            Err(Fault::WrongKey) => {
                wrong_key = Some(Fault::WrongKey);
                continue;
            }
            Err(fault) => fault,
        };
    }
    Err(match wrong_key.unwrap_or(failed) {
        // The time of all addresses, and not that of the last.
        Fault::TimedOut { what, .. } => Fault::TimedOut { what, limit_s: limit.as_secs_f64() },
        other => other,
    })
}

/// The address at which a server has answered last, by its key.
static ANSWERED: Mutex<BTreeMap<[u8; 32], String>> = Mutex::new(BTreeMap::new());

/// The addresses of a server, the one that has answered last before the others.
fn in_order<'a>(addresses: &'a [String], expected: &Expected<'_>) -> Vec<&'a String> {
    let last = lock(&ANSWERED).get(&expected.key.0).cloned();
    let mut ordered: Vec<&String> = addresses.iter().collect();
    ordered.sort_by_key(|address| Some(*address) != last.as_ref());
    ordered
}

/// The least time that one of several attempts gets: a handshake takes three round trips.
const SHARE_MIN: Duration = Duration::from_secs(2);

/// When the next of so many attempts has to end, so that each of them gets an equal share of the time that is left, or at least
/// [`SHARE_MIN`] as long as there is any.
fn share_of(deadline: Instant, attempts: usize) -> Instant {
    let now = Instant::now();
    let left = deadline.saturating_duration_since(now);
    now + (left / u32::try_from(attempts.max(1)).unwrap_or(u32::MAX)).max(SHARE_MIN).min(left)
}

/// The first word of the address of a server in a job.
const SERVER_SCHEME: &str = "tls:";

/// The address of a server as a job names it to the run's other workers: `tls:KEY@ADDRESS,…`.
pub fn server_address(key: &PublicKey, addresses: &[String]) -> String {
    format!("{SERVER_SCHEME}{key}@{}", addresses.join(","))
}

/// The key and the addresses in what [`server_address`] made.
pub fn parse_server_address(text: &str) -> Option<(PublicKey, Vec<String>)> {
    let (key, addresses) = text.strip_prefix(SERVER_SCHEME)?.split_once('@')?;
    Some((key.parse().ok()?, addresses.split(',').map(str::to_owned).collect()))
}

/// Has the gateway of this process's job connect it to a server of the run, because the keys for that are the gateway's, and
/// [introduces](introduce) this end to that server.
pub fn dial_through(
    gateway: &str,
    address: &str,
    role: Role,
    credentials: &Credentials,
    resume: Resume,
) -> Result<(ByteStream, u64), Fault> {
    let mut stream = connect_local(gateway)?;
    stream.set_up()?;
    send_text_unless(&mut stream, Kind::Hello, &hello(role, credentials, &resume).encode(), &resume)?;
    send_text_unless(&mut stream, Kind::Command, address.as_bytes(), &resume)?;
    welcomed(stream, &resume)
}

/// Opens a plain connection to an address.
pub fn connect_to(address: &str, limit: Duration) -> Result<(TcpStream, SocketAddr), Fault> {
    let socket = connect(address, Instant::now() + limit, &AbortFlag::default())?;
    let to = socket.peer_addr().map_err(|e| Fault::io(format!("connecting to {address}"), e))?;
    Ok((socket, to))
}

/// Connects to an address, and to the next one that its name resolves to if that fails. The deadline is that of the lookup and of all
/// of them together; gives up earlier when the run fails. Neither the system's resolver nor a connection attempt can be ended from
/// outside, so they get a thread, which is left alone if it takes too long.
fn connect(address: &str, deadline: Instant, abort: &AbortFlag) -> Result<TcpStream, Fault> {
    let (sender, connected) = mpsc::sync_channel(1);
    let (to, limit_s) = (address.to_owned(), deadline.saturating_duration_since(Instant::now()).as_secs_f64());
    engine::spawn("connecting", move || {
        let _ = sender.send(resolve_and_connect(&to, deadline));
    })?;
    loop {
        abort.check()?;
        match connected.recv_timeout(POLL) {
            Ok(connected) => return connected,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Fault::Panic("the panic message is on standard error".to_owned()));
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
            Err(RecvTimeoutError::Timeout) => {
                return Err(Fault::TimedOut { what: format!("connecting to {address}"), limit_s });
            }
        }
    }
}

fn resolve_and_connect(address: &str, deadline: Instant) -> Result<TcpStream, Fault> {
    let resolved: Vec<SocketAddr> = match address.parse() {
        Ok(known) => vec![known],
        Err(_) => {
            let found = address.to_socket_addrs().map_err(|e| Fault::io(format!("looking up {address}"), e))?;
            found.take(ADDRESSES_MAX).collect()
        }
    };
    let none = || Fault::invalid_job("a worker's address", format!("`{address}` resolves to no address"));
    let Some(connected) = connect_to_first(&resolved, deadline) else { return Err(none()) };
    connected.map_err(|e| Fault::io(format!("connecting to {address}"), e))
}

/// Connects to the first of these addresses that answers. A host name may resolve to several, of which the worker listens on some;
/// one that never answers, such as that of an IPv6 network that is down, uses its share of the time.
fn connect_to_first(addresses: &[SocketAddr], deadline: Instant) -> Option<io::Result<TcpStream>> {
    let mut last = None;
    for (i, address) in addresses.iter().enumerate() {
        let left = share_of(deadline, addresses.len() - i).saturating_duration_since(Instant::now());
        if left.is_zero() {
            return last.or(Some(Err(io::ErrorKind::TimedOut.into())));
        }
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => return Some(Ok(stream)),
            Err(e) => last = Some(Err(e)),
        }
    }
    last
}

/// The most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 16;

/// Shows the credentials to a worker. Fails with [`Fault::Busy`] if the worker is in another run, and with
/// [`Fault::Refused`] if it does not accept them.
pub fn introduce(
    mut stream: ByteStream,
    role: Role,
    credentials: &Credentials,
    resume: Resume,
) -> Result<(ByteStream, u64), Fault> {
    stream.set_up()?;
    send_text_unless(&mut stream, Kind::Hello, &hello(role, credentials, &resume).encode(), &resume)?;
    welcomed(stream, &resume)
}

fn hello(role: Role, credentials: &Credentials, resume: &Resume) -> Hello {
    Hello {
        run: credentials.run,
        token: credentials.token.0,
        role,
        epoch: resume.epoch,
        next: resume.next,
        build: BUILD.to_owned(),
    }
}

/// Waits for the answer to a hello. Returns the first frame that the peer has not received too.
fn welcomed(mut stream: ByteStream, resume: &Resume) -> Result<(ByteStream, u64), Fault> {
    let answer = receive_unless(&mut stream, &[Kind::Welcome, Kind::Refuse], resume.limit, &resume.abort)?;
    let malformed = |e: MessageError| Fault::malformed("the answer to the hello", e);
    match answer.header.kind {
        Kind::Refuse => {
            let reason = printable(&Refuse::decode(&answer.body).map_err(malformed)?.reason);
            Err(refusal(reason))
        }
        _ => Welcome::decode(&answer.body).map(|welcome| (stream, welcome.next)).map_err(malformed),
    }
}

/// The first word of a refusal by a worker that is in another run.
const BUSY: &str = "busy";

/// Whom a listening end accepts.
#[derive(Clone, Debug)]
pub struct Terms<'a> {
    /// What the peer must show.
    pub token: &'a Token,
    /// The run that the peer must belong to; `None` for any.
    pub run: Option<[u8; 16]>,
    /// The run that this end is in, such as `another run since noon`. A driver of another run is refused with this reason.
    pub busy: Option<&'a str>,
}

impl Terms<'_> {
    /// Why a peer is refused. The token comes first: a stranger learns nothing else.
    fn check(&self, hello: &Hello) -> Result<(), String> {
        let checked = hello.check(&self.run.unwrap_or(hello.run), &self.token.0);
        match (checked, self.busy) {
            (Err(HandshakeError::Run { .. }), Some(busy)) if !matches!(hello.role, Role::Worker(_)) => {
                Err(format!("{BUSY} with {busy}"))
            }
            (Err(other), _) => Err(other.to_string()),
            (Ok(()), _) if hello.build != BUILD => {
                let theirs = printable(&hello.build);
                Err(format!("this end runs distgpipe {BUILD}, the peer {theirs}: install the same version on both"))
            }
            (Ok(()), _) => Ok(()),
        }
    }
}

/// Answers a peer that has introduced itself: accepts it if it meets the terms and has the version of this end. A peer that is
/// refused gets the reason, which is also in the [`Fault::Busy`] or [`Fault::Refused`] returned here. A peer that connects
/// again, with an epoch above 0, has no answer yet: the link that it belongs to [welcomes](welcome) it, or it is
/// [refused](refuse).
pub fn reply(stream: &mut ByteStream, hello: &Hello, terms: &Terms<'_>, limit: Duration) -> Result<(), Fault> {
    match terms.check(hello) {
        Ok(()) if hello.epoch > 0 => Ok(()),
        Ok(()) => welcome(stream, 1, limit),
        Err(reason) => Err(refuse(stream, reason, limit)),
    }
}

/// Accepts a peer, and says which frame this end expects next.
pub fn welcome(stream: &mut ByteStream, next: u64, limit: Duration) -> Result<(), Fault> {
    let welcome = Welcome { worker: None, next, build: BUILD.to_owned() };
    send_text(stream, Kind::Welcome, &welcome.encode(), limit)
}

/// Tells a peer why it is refused. Returns the fault for it.
pub fn refuse(stream: &mut ByteStream, reason: String, limit: Duration) -> Fault {
    match send_text(stream, Kind::Refuse, &Refuse { reason: reason.clone() }.encode(), limit) {
        Ok(()) => refusal(reason),
        Err(fault) => fault,
    }
}

/// Why a peer that connects again is refused by a worker that does not expect it.
pub const NOT_IN_RUN: &str =
    "this worker is not in that run any more: it was restarted, it has given the run up, or the connection was replaced";

/// The fault for a refusal, at either end.
fn refusal(reason: String) -> Fault {
    match reason.split_whitespace().next() {
        Some(BUSY) => Fault::Busy { text: reason },
        _ => Fault::Refused { reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::acceptor::{Acceptor, Arrival, TlsServer};
    use crate::comm::server_identity::ServerIdentity;
    use crate::failure::Failure;
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::Arc;

    /// An address where nobody answers: the queue of its listener is full. The connections keep it so.
    fn black_hole() -> (SocketAddr, TcpListener, Vec<TcpStream>) {
        engine::raise_open_files_limit().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut queued = Vec::new();
        // Two in a row, because a loaded machine may be slow once.
        let mut full = 0;
        while full < 2 {
            match TcpStream::connect_timeout(&address, Duration::from_millis(300)) {
                Ok(stream) => {
                    queued.push(stream);
                    full = 0;
                }
                Err(_) => full += 1,
            }
            assert!(queued.len() < 10_000, "the queue has an end");
        }
        (address, listener, queued)
    }

    /// A server of TLS that answers until it is dropped.
    struct Answering {
        addresses: Vec<String>,
        identity: ServerIdentity,
        stop: Arc<AtomicBool>,
    }

    impl Answering {
        fn start() -> Self {
            let identity = ServerIdentity::generate().unwrap();
            let tls = TlsServer { config: tls::server_config(&identity).unwrap(), secret: identity.secret };
            let mut acceptor = Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), Some(tls)).unwrap();
            let (addresses, stop) = (vec![acceptor.listener().address().unwrap()], Arc::new(AtomicBool::new(false)));
            let stopped = stop.clone();
            std::thread::spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    assert!(!matches!(acceptor.next(POLL, &|_| None), Some(Arrival::Peer(_))));
                }
            });
            Answering { addresses, identity, stop }
        }

        fn dial(&self, addresses: &[String], limit: Duration, abort: &AbortFlag) -> Result<ByteStream, Fault> {
            let expected = Expected { key: &self.identity.key, secret: &self.identity.secret, run: None };
            dial_server(addresses, &expected, limit, abort)
        }
    }

    impl Drop for Answering {
        fn drop(&mut self) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    /// The first address, if nobody answered there, once used all the time, and the others were never tried.
    #[test]
    fn an_address_that_never_answers_leaves_time_for_the_next() {
        let (server, (dead, _listener, _queued)) = (Answering::start(), black_hole());
        // One whose system answers, and whose program does not.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let silent = silent.local_addr().map(|address| (address, silent)).unwrap();
        let addresses = [&[dead.to_string(), silent.0.to_string()], &server.addresses[..]].concat();
        let (start, limit) = (Instant::now(), Duration::from_secs(6));
        server.dial(&addresses, limit, &AbortFlag::default()).unwrap();
        assert!(start.elapsed() < limit, "{:?}", start.elapsed());
        // The addresses of one name.
        let good = server.addresses[0].parse().unwrap();
        let deadline = Instant::now() + Duration::from_secs(3);
        let connected = connect_to_first(&[dead, good], deadline).unwrap().unwrap();
        assert_eq!(connected.peer_addr().unwrap(), good);
        assert!(Instant::now() < deadline);
        // In vain, all of the time is used, and named.
        let limit = Duration::from_secs(3);
        let failed = server.dial(&[dead.to_string(), silent.0.to_string()], limit, &AbortFlag::default());
        assert!(matches!(&failed, Err(Fault::TimedOut { limit_s, .. }) if *limit_s == 3.0), "{failed:?}");
        // Another server of this network has the private address of this one. Later, the address that has answered comes first.
        let other = Answering::start();
        let addresses = [&other.addresses[..], &server.addresses[..]].concat();
        server.dial(&addresses, Duration::from_secs(30), &AbortFlag::default()).unwrap();
        let expected = Expected { key: &server.identity.key, secret: &server.identity.secret, run: None };
        assert_eq!(in_order(&addresses, &expected), [&server.addresses[0], &other.addresses[0]]);
        let failed = server.dial(&other.addresses, Duration::from_secs(30), &AbortFlag::default());
        assert!(matches!(failed, Err(Fault::WrongKey)), "{failed:?}");
    }

    /// The dial of a server once had a flag of its own, and went on when its run had failed.
    #[test]
    fn a_run_that_fails_ends_the_dial_of_a_server_at_once() {
        let (server, (dead, _listener, _queued)) = (Answering::start(), black_hole());
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        for address in [dead.to_string(), silent.local_addr().unwrap().to_string()] {
            let (abort, limit) = (AbortFlag::default(), Duration::from_secs(60));
            let failing = abort.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                failing.fail(Failure::new("the driver", "ending the run", Fault::Lost));
            });
            let start = Instant::now();
            let failed = server.dial(&[address], limit, &abort);
            assert!(matches!(&failed, Err(Fault::Reported(_))), "{failed:?}");
            assert!(start.elapsed() < limit / 4, "{:?}", start.elapsed());
        }
    }

    /// What a peer of another release is told: both versions.
    #[test]
    fn a_peer_of_another_software_version_is_refused_with_both() {
        let token = Token([7; 32]);
        let hello = |token: Token, build: &str| Hello {
            build: build.to_owned(),
            ..hello(Role::Driver, &credentials(token), &Resume::first(POLL))
        };
        let refused =
            |hello: &Hello, run| Terms { token: &token, run, busy: None }.check(hello).err().unwrap_or_default();
        for run in [None, Some([1; 16])] {
            assert_eq!(refused(&hello(token, BUILD), run), "");
            let said = refused(&hello(token, "99.0.1\x1b["), run);
            assert!(said.contains(&format!("this end runs distgpipe {BUILD}, the peer 99.0.1")), "{said}");
            assert!(said.contains("install the same version on both") && !said.contains('\x1b'), "{said}");
            // A stranger does not learn the version.
            let said = refused(&hello(Token([8; 32]), "99.0.1"), run);
            assert!(!said.is_empty() && !said.contains(BUILD), "{said}");
        }
    }

    fn credentials(token: Token) -> Credentials {
        Credentials { run: [1; 16], token }
    }
}
