//! The first frames of a connection.
//!
//! ```text
//! dialing end    Hello (token, run, role, version) ──►
//! listening end                                    ◄── Welcome, or Refuse with the reason
//! ```
//!
//! Until the hello has shown the token, nothing else is read from the peer, and the whole hello must arrive in time.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::link_codecs::Decoder;
use crate::comm::transport::tcp::{limits, read_frame, write_frame, Deadline, Frame};
use crate::failure::Fault;
use distgpipe_core::wire::{Header, Hello, Kind, MessageError, Refuse, Role, Welcome};
use std::fmt;
use std::io::Read;
use std::net::{TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

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
        let text = text.trim();
        if text.len() != 64 || !text.is_ascii() {
            return Err(TokenError);
        }
        let mut token = [0; 32];
        for (i, byte) in token.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| TokenError)?;
        }
        Ok(Token(token))
    }
}

/// `N` bytes from the operating system's random source.
pub fn random<const N: usize>() -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    let source = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes));
    source.map_err(|e| Fault::io("reading /dev/urandom", e))?;
    Ok(bytes)
}

/// Both ends must be of the same version.
const BUILD: &str = env!("CARGO_PKG_VERSION");

/// What a peer must show to join a run.
#[derive(Clone, Copy, Debug)]
pub struct Credentials {
    /// The run's random identifier, so that a late connection of an earlier run is refused.
    pub run: [u8; 16],
    /// The secret of the workers.
    pub token: Token,
}

/// Sends one frame without a tensor, outside of a [`Connection`](crate::comm::transport::tcp::Connection).
pub fn send_text(stream: &mut TcpStream, kind: Kind, body: &[u8], limit: Duration) -> Result<(), Fault> {
    let abort = AbortFlag::default();
    let mut header = Header::new(kind);
    header.seal(body);
    header.check(&limits())?;
    write_frame(stream, &header, body, &Deadline::new(&abort, limit))
}

/// Reads one frame of one of these kinds. `limit` bounds the whole read, progress or not, because the peer may not have
/// shown the token yet.
pub fn receive(stream: &mut TcpStream, kinds: &[Kind], limit: Duration) -> Result<Frame, Fault> {
    let abort = AbortFlag::default();
    let deadline = Deadline::new(&abort, limit).with_total(limit);
    read_frame(stream, &limits(), &deadline, &mut Decoder::raw(), |header| match kinds.contains(&header.kind) {
        true => Ok(()),
        false => {
            let names: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
            Err(Fault::protocol(format!("a frame of kind {}", names.join(" or ")), format!("{:?}", header.kind)))
        }
    })
}

/// Makes a socket blocking, with the short time-outs that all reads and writes of this crate expect.
pub fn prepare(stream: &TcpStream) -> Result<(), Fault> {
    let set = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(POLL)))
        .and_then(|()| stream.set_write_timeout(Some(POLL)))
        .and_then(|()| stream.set_nodelay(true));
    set.map_err(|e| Fault::io("setting up a socket", e))
}

/// Connects to a worker and shows the credentials. Fails with [`Fault::Refused`] if the worker does not accept them.
pub fn dial(address: &str, role: Role, credentials: &Credentials, limit: Duration) -> Result<TcpStream, Fault> {
    let doing = || format!("connecting to {address}");
    let mut failed = Fault::invalid_job("a worker's address", format!("`{address}` resolves to no address"));
    let mut connected = None;
    // A host name may resolve to several addresses, of which the worker listens on some.
    for resolved in address.to_socket_addrs().map_err(|e| Fault::io(doing(), e))? {
        match TcpStream::connect_timeout(&resolved, limit) {
            Ok(stream) => {
                connected = Some(stream);
                break;
            }
            Err(e) => failed = Fault::io(doing(), e),
        }
    }
    let mut stream = connected.ok_or(failed)?;
    prepare(&stream)?;
    let hello = Hello { run: credentials.run, token: credentials.token.0, role, build: BUILD.to_owned() };
    send_text(&mut stream, Kind::Hello, &hello.encode(), limit)?;
    let answer = receive(&mut stream, &[Kind::Welcome, Kind::Refuse], limit)?;
    let malformed = |e: MessageError| Fault::malformed("the answer to the hello", e);
    match answer.header.kind {
        Kind::Refuse => Err(Fault::Refused { reason: Refuse::decode(&answer.body).map_err(malformed)?.reason }),
        _ => Welcome::decode(&answer.body).map(|_| stream).map_err(malformed),
    }
}

/// Answers a peer that has connected: accepts it if it shows the token, the run (unless `run` is `None`) and the version of
/// this end. A peer that is refused gets the reason, which is also in the [`Fault::Refused`] returned here.
pub fn answer(stream: &mut TcpStream, token: &Token, run: Option<[u8; 16]>, limit: Duration) -> Result<Hello, Fault> {
    prepare(stream)?;
    let first = receive(stream, &[Kind::Hello], limit)?;
    let hello = Hello::decode(&first.body).map_err(|e| Fault::malformed("a hello", e))?;
    let mut verdict = hello.check(&run.unwrap_or(hello.run), &token.0).map_err(|e| e.to_string());
    if verdict.is_ok() && hello.build != BUILD {
        verdict =
            Err(format!("this end runs distgpipe {BUILD}, the peer {}: install the same version on both", hello.build));
    }
    match verdict {
        Ok(()) => {
            let welcome = Welcome { worker: None, build: BUILD.to_owned() };
            send_text(stream, Kind::Welcome, &welcome.encode(), limit)?;
            Ok(hello)
        }
        Err(reason) => {
            send_text(stream, Kind::Refuse, &Refuse { reason: reason.clone() }.encode(), limit)?;
            Err(Fault::Refused { reason })
        }
    }
}
