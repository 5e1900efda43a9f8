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
use crate::failure::{printable, Fault};
use distgpipe_core::wire::{HandshakeError, Header, Hello, Kind, MessageError, Refuse, Role, Welcome, WireError};
use std::fmt;
use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::str::FromStr;
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
    send_frame(stream, Header::new(kind), body, limit)
}

/// Sends one frame without a tensor, whose header it seals.
pub fn send_frame(stream: &mut TcpStream, mut header: Header, body: &[u8], limit: Duration) -> Result<(), Fault> {
    let abort = AbortFlag::default();
    header.seal(body);
    header.check(&limits())?;
    write_frame(stream, &header, body, &Deadline::new(&abort, limit)).map_err(|fault| match fault {
        Fault::NotReading { limit_s } => Fault::TimedOut { what: "the handshake".to_owned(), limit_s },
        other => other,
    })
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

/// Connects to a worker and [introduces](introduce) this end.
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
    introduce(connected.ok_or(failed)?, role, credentials, limit)
}

/// Shows the credentials to a worker. Fails with [`Fault::Busy`] if the worker is in another run, and with
/// [`Fault::Refused`] if it does not accept them.
pub fn introduce(
    mut stream: TcpStream,
    role: Role,
    credentials: &Credentials,
    limit: Duration,
) -> Result<TcpStream, Fault> {
    prepare(&stream)?;
    let hello = Hello { run: credentials.run, token: credentials.token.0, role, build: BUILD.to_owned() };
    send_text(&mut stream, Kind::Hello, &hello.encode(), limit)?;
    let answer = receive(&mut stream, &[Kind::Welcome, Kind::Refuse], limit)?;
    let malformed = |e: MessageError| Fault::malformed("the answer to the hello", e);
    match answer.header.kind {
        Kind::Refuse => {
            let reason = printable(&Refuse::decode(&answer.body).map_err(malformed)?.reason);
            Err(refusal(reason))
        }
        _ => Welcome::decode(&answer.body).map(|_| stream).map_err(malformed),
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
    /// The run that this end is in, such as `another run since noon`. A driver of another run is refused with this reason, and
    /// anybody if `run` is `None`.
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
            (Ok(()), Some(busy)) if self.run.is_none() => Err(format!("{BUSY} with {busy}")),
            (Ok(()), _) if hello.build != BUILD => {
                let theirs = printable(&hello.build);
                Err(format!("this end runs distgpipe {BUILD}, the peer {theirs}: install the same version on both"))
            }
            (Ok(()), _) => Ok(()),
        }
    }
}

/// Answers a peer that has connected: accepts it if it meets the terms and has the version of this end. A peer that is refused
/// gets the reason, which is also in the [`Fault::Busy`] or [`Fault::Refused`] returned here.
pub fn answer(stream: &mut TcpStream, terms: &Terms<'_>, limit: Duration) -> Result<Hello, Fault> {
    prepare(stream)?;
    let first = match receive(stream, &[Kind::Hello], limit) {
        Err(fault @ Fault::Wire(WireError::Version { .. })) => {
            // All that the peer understands of an answer is the version in its header, which it reports.
            send_text(stream, Kind::Refuse, &Refuse { reason: fault.to_string() }.encode(), limit)?;
            discard_input(stream, limit.min(DISCARD_LIMIT));
            return Err(fault);
        }
        first => first?,
    };
    let hello = Hello::decode(&first.body).map_err(|e| Fault::malformed("a hello", e))?;
    match terms.check(&hello) {
        Ok(()) => {
            let welcome = Welcome { worker: None, build: BUILD.to_owned() };
            send_text(stream, Kind::Welcome, &welcome.encode(), limit)?;
            Ok(hello)
        }
        Err(reason) => {
            send_text(stream, Kind::Refuse, &Refuse { reason: reason.clone() }.encode(), limit)?;
            Err(refusal(reason))
        }
    }
}

/// How long a peer of another version may take to read the answer and close.
const DISCARD_LIMIT: Duration = Duration::from_millis(500);

/// Reads until the peer closes: closing a socket with unread input discards what it has sent.
fn discard_input(stream: &mut TcpStream, limit: Duration) {
    let _ = stream.shutdown(Shutdown::Write);
    let (start, mut rest) = (Instant::now(), [0; 4096]);
    while start.elapsed() < limit {
        match stream.read(&mut rest) {
            Ok(0) => return,
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(_) => return,
        }
    }
}

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
    use distgpipe_core::wire::{HEADER_BYTES, MAGIC, VERSION};
    use std::io::Write;
    use std::net::TcpListener;

    /// A peer of another release once lost the connection without a word.
    #[test]
    fn a_peer_of_another_wire_version_learns_this_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let body = vec![0xff; 4000];
        let mut header = Header::new(Kind::Hello);
        header.seal(&body);
        let mut hello = header.encode().to_vec();
        hello[4..6].copy_from_slice(&(VERSION + 1).to_le_bytes());
        hello.extend(body);
        peer.write_all(&hello).unwrap();
        let answering = std::thread::spawn(move || {
            let terms = Terms { token: &Token([7; 32]), run: None, busy: None };
            answer(&mut listener.accept().unwrap().0, &terms, Duration::from_secs(60)).unwrap_err()
        });
        let mut head = [0; HEADER_BYTES];
        peer.read_exact(&mut head).unwrap();
        assert_eq!((&head[..4], &head[4..6]), (&MAGIC[..], &VERSION.to_le_bytes()[..]));
        drop(peer);
        let expected = WireError::Version { ours: VERSION, theirs: VERSION + 1 };
        assert!(matches!(answering.join().unwrap(), Fault::Wire(wire) if wire == expected));
    }
}
