//! Who may send what to whom: the way of a message into the right mailbox, and the first words of a connection.

use crate::failure::{Fate, Fault, POLL};
use crate::mailbox::{Mailbox, Message};
use crate::transport::tcp::{read_frame, write_frame, Frame, Patience};
use distgpipe_core::schedule::Plan;
use distgpipe_core::wire::{Header, Hello, Kind, Limits, Refuse, Role, Welcome};
use distgpipe_core::{PartitionId, WorkerId};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::net::{TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// How many messages beside those of the plan may be under way: commands, reports, state tensors.
const SLACK: usize = 16;

/// Room for everything a step may send to a worker.
pub fn mailbox_capacity(plan: &Plan, worker: WorkerId) -> usize {
    plan.receives(worker) + 2 * plan.micro_batches() + SLACK
}

/// Room for everything a step may send from one process to another.
pub fn queue_capacity(plan: &Plan, from: WorkerId, to: WorkerId) -> usize {
    plan.messages(from, to) + 3 * plan.micro_batches() + SLACK
}

/// Whether two workers exchange anything.
pub fn linked(plan: &Plan, a: WorkerId, b: WorkerId) -> bool {
    plan.messages(a, b) + plan.messages(b, a) > 0
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The driver's process, which also runs worker 0.
    Driver,
    /// Another worker's process.
    Worker(WorkerId),
}

/// Puts what a peer sends into the mailbox it is for, if that peer may send it.
pub struct Delivery {
    /// The plan, which says who sends what.
    pub plan: Plan,
    /// Who is at the other end.
    pub peer: Peer,
    /// The workers of this process.
    pub workers: BTreeMap<WorkerId, Arc<Mailbox>>,
    /// The driver, if it is in this process.
    pub driver: Option<Arc<Mailbox>>,
}

impl Delivery {
    /// Delivers, or says what is wrong with it.
    pub fn deliver(&self, message: Message) -> Result<(), Fault> {
        let tag = message.tag;
        let refuse = || Fault::protocol("a message this peer may send to this process", tag.to_string());
        let mailbox = match (tag.kind, self.peer) {
            (Kind::Activation | Kind::Gradient, peer) => {
                let from = self.worker_of(tag.from).ok_or_else(refuse)?;
                let right = match peer {
                    Peer::Driver => from.index() == 0,
                    Peer::Worker(worker) => from == worker,
                };
                let to = self.worker_of(tag.to).filter(|_| right).ok_or_else(refuse)?;
                self.workers.get(&to)
            }
            (Kind::Input | Kind::Target, Peer::Driver) => self.worker_of(tag.to).and_then(|to| self.workers.get(&to)),
            (Kind::Command | Kind::State, Peer::Driver) => self.workers.get(&WorkerId(tag.from)),
            (Kind::Ready | Kind::Report | Kind::State, Peer::Worker(worker)) => {
                self.driver.as_ref().filter(|_| tag.from == worker.0)
            }
            (Kind::Output, Peer::Worker(worker)) => {
                self.driver.as_ref().filter(|_| self.worker_of(tag.from) == Some(worker))
            }
            _ => None,
        };
        mailbox.ok_or_else(refuse)?.put(message)
    }

    fn worker_of(&self, partition: u32) -> Option<WorkerId> {
        let partition = PartitionId(partition);
        (partition.index() < self.plan.partitions()).then(|| self.plan.placement().worker_of(partition))
    }
}

/// The secret that driver and workers share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(pub [u8; 32]);

impl Token {
    /// A new one, from the system's randomness.
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

/// A token's text is wrong.
#[derive(Debug, thiserror::Error)]
#[error("a token is 64 hexadecimal digits, as `distgpipe worker` prints it")]
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

/// Random bytes of the system.
pub fn random<const N: usize>() -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    let source = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes));
    source.map_err(|e| Fault::io("reading random bytes of the system", e))?;
    Ok(bytes)
}

const BUILD: &str = env!("CARGO_PKG_VERSION");

/// A run's name and secret.
#[derive(Clone, Copy, Debug)]
pub struct Credentials {
    /// Tells runs apart.
    pub run: [u8; 16],
    /// Shared by all who may take part.
    pub token: Token,
}

/// Sends one frame that is no tensor.
pub fn send_text(stream: &mut TcpStream, kind: Kind, body: &[u8], limit: Duration) -> Result<(), Fault> {
    let fate = Fate::default();
    let mut header = Header::new(kind);
    header.seal(body);
    header.check(&Limits::default())?;
    write_frame(stream, &header, body, &Patience::new(&fate, limit))
}

/// Reads one frame.
pub fn receive(stream: &mut TcpStream, limit: Duration) -> Result<Frame, Fault> {
    let fate = Fate::default();
    read_frame(stream, &Limits::default(), &Patience::new(&fate, limit))
}

/// Gives a socket the short time-outs that all our reads and writes expect.
pub fn prepare(stream: &TcpStream) -> Result<(), Fault> {
    let set = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(POLL)))
        .and_then(|()| stream.set_write_timeout(Some(POLL)))
        .and_then(|()| stream.set_nodelay(true));
    set.map_err(|e| Fault::io("setting up a socket", e))
}

/// Connects to a worker and introduces itself.
pub fn dial(address: &str, role: Role, credentials: &Credentials, limit: Duration) -> Result<TcpStream, Fault> {
    let doing = || format!("connecting to {address}");
    let resolved = address.to_socket_addrs().map_err(|e| Fault::io(doing(), e))?.next();
    let resolved = resolved.ok_or_else(|| Fault::protocol("an address such as 127.0.0.1:7000", address))?;
    let mut stream = TcpStream::connect_timeout(&resolved, limit).map_err(|e| Fault::io(doing(), e))?;
    prepare(&stream)?;
    let hello = Hello { run: credentials.run, token: credentials.token.0, role, build: BUILD.to_owned() };
    send_text(&mut stream, Kind::Hello, &hello.encode(), limit)?;
    let answer = receive(&mut stream, limit)?;
    let text = |e: distgpipe_core::wire::MessageError| Fault::protocol("an answer to our hello", e.to_string());
    match answer.header.kind {
        Kind::Welcome => Welcome::decode(&answer.body).map(|_| stream).map_err(text),
        Kind::Refuse => Err(Fault::protocol("to be let in", Refuse::decode(&answer.body).map_err(text)?.reason)),
        other => Err(Fault::protocol("an answer to our hello", format!("{other:?}"))),
    }
}

/// Answers somebody who connected: lets them in if they know the token (and the run, if one is under way).
pub fn answer(stream: &mut TcpStream, token: &Token, run: Option<[u8; 16]>, limit: Duration) -> Result<Hello, Fault> {
    prepare(stream)?;
    let first = receive(stream, limit)?;
    if first.header.kind != Kind::Hello {
        return Err(Fault::protocol("a hello", format!("{:?}", first.header.kind)));
    }
    let hello = Hello::decode(&first.body).map_err(|e| Fault::protocol("a hello", e.to_string()))?;
    let mut verdict = hello.check(&run.unwrap_or(hello.run), &token.0).map_err(|e| e.to_string());
    if verdict.is_ok() && hello.build != BUILD {
        verdict =
            Err(format!("this end is distgpipe {BUILD}, the other {}: install the same version on both", hello.build));
    }
    match verdict {
        Ok(()) => {
            let welcome = Welcome { worker: None, build: BUILD.to_owned() };
            send_text(stream, Kind::Welcome, &welcome.encode(), limit)?;
            Ok(hello)
        }
        Err(reason) => {
            send_text(stream, Kind::Refuse, &Refuse { reason: reason.clone() }.encode(), limit)?;
            Err(Fault::protocol("a peer of this run", reason))
        }
    }
}
