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
use distgpipe_core::wire::{HandshakeError, Header, Hello, Kind, MessageError, Refuse, Role, Welcome};
use std::fmt;
use std::io::Read;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::mpsc::{self, RecvTimeoutError};
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

/// Connects to a server at the first of its addresses that answers, and has both ends prove who they are.
pub fn dial_server(addresses: &[String], expected: &Expected<'_>, limit: Duration) -> Result<ByteStream, Fault> {
    let deadline = Instant::now() + limit;
    let mut failed = Fault::invalid_job("a join string", "it has no address");
    for address in addresses {
        let socket = match connect(address, deadline, &AbortFlag::default()) {
            Ok(socket) => socket,
            Err(fault) => {
                failed = fault;
                continue;
            }
        };
        let left = deadline.saturating_duration_since(Instant::now());
        return tls::connect(socket, expected, left).map(ByteStream::from);
    }
    Err(failed)
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

/// Connects to an address, and to the next one that its name resolves to if that fails. The deadline is that of all of them
/// together; gives up earlier when the run fails. Neither the system's resolver nor a connection attempt can be ended from
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
    let mut failed = Fault::invalid_job("a worker's address", format!("`{address}` resolves to no address"));
    // A host name may resolve to several addresses, of which the worker listens on some.
    for resolved in resolved {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&resolved, left) {
            Ok(stream) => return Ok(stream),
            Err(e) => failed = Fault::io(format!("connecting to {address}"), e),
        }
    }
    Err(failed)
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
