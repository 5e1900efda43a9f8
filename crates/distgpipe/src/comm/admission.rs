//! Who may send what to whom: the way of a message into the right mailbox, and the first words of a connection.

use crate::coding::Decoder;
use crate::failure::{Fate, Fault, POLL};
use crate::mailbox::{Mailbox, Message, Tag};
use crate::ring::SHARE_BYTES_MAX;
use crate::roster::Roster;
use crate::transport::tcp::{limits, read_frame, write_frame, Frame, Patience};
use distgpipe_core::wire::{Header, Hello, Kind, Refuse, Role, Welcome};
use distgpipe_core::{PartitionId, WorkerId};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::net::{TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

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
    /// The members, and the plan, which says who sends what.
    pub roster: Arc<Roster>,
    /// Who is at the other end.
    pub peer: Peer,
    /// The workers of this process.
    pub workers: BTreeMap<WorkerId, Arc<Mailbox>>,
    /// The driver, if it is in this process.
    pub driver: Option<Arc<Mailbox>>,
}

impl Delivery {
    /// Whether a frame with this header may come from this peer: asked before its body is read.
    pub fn admit(&self, header: &Header) -> Result<(), Fault> {
        match header.kind {
            Kind::Ping | Kind::Abort | Kind::Goodbye => Ok(()),
            Kind::Share if header.body_bytes > SHARE_BYTES_MAX => {
                let expected = format!("a share of gradients of at most {SHARE_BYTES_MAX} bytes");
                Err(Fault::protocol(expected, header.body_bytes.to_string()))
            }
            kind => self.mailbox_of(kind, header.micro_batch, header.from, header.to).map(drop),
        }
    }

    /// Delivers, or says what is wrong with it.
    pub fn deliver(&self, message: Message) -> Result<(), Fault> {
        let Tag { kind, micro_batch, from, to, .. } = message.tag;
        self.mailbox_of(kind, micro_batch, from, to)?.put(message)
    }

    /// The mailbox that a message of this name is for, if the plan has such a message from this peer.
    fn mailbox_of(&self, kind: Kind, micro_batch: u32, from: u32, to: u32) -> Result<&Mailbox, Fault> {
        let (roster, plan) = (&self.roster, self.roster.plan());
        let partition = |p: u32| Some(PartitionId(p)).filter(|p| p.index() < plan.partitions());
        let worker_of = |p: PartitionId| plan.placement().worker_of(p);
        let last = PartitionId::new(plan.partitions() - 1);
        let timely = (micro_batch as usize) < plan.micro_batches();
        let peer = match self.peer {
            Peer::Driver => WorkerId(0),
            Peer::Worker(peer) => peer,
        };
        let mailbox = match (kind, self.peer) {
            (Kind::Activation | Kind::Gradient, _) => partition(from).zip(partition(to)).and_then(|(from, to)| {
                let edges = if kind == Kind::Activation { plan.out_edges(from) } else { plan.in_edges(from) };
                let planned = timely && edges.contains(&to) && worker_of(from) == roster.role_of(peer);
                let receiver = roster.member(roster.replica_of(peer), worker_of(to));
                self.workers.get(&receiver).filter(|_| planned)
            }),
            (Kind::Share, _) if from == peer.0 && to == roster.next(peer).0 => self.workers.get(&WorkerId(to)),
            // A process other than the driver's has one worker.
            (Kind::Input, Peer::Driver) if timely && to == 0 => self.worker_with(PartitionId(0)),
            (Kind::Target, Peer::Driver) if timely && to == last.0 => self.worker_with(last),
            (Kind::Command | Kind::State, Peer::Driver) => self.workers.get(&WorkerId(from)),
            (Kind::Ready | Kind::Report | Kind::State, Peer::Worker(peer)) if from == peer.0 => self.driver.as_ref(),
            (Kind::Output, Peer::Worker(peer)) if from == last.0 && worker_of(last) == roster.role_of(peer) => {
                // Numbered over all replicas; each has at least one, and as many as the others.
                let replica = roster.replica_of(peer);
                let own = replica..(replica + 1) * plan.micro_batches();
                self.driver.as_ref().filter(|_| own.contains(&(micro_batch as usize)))
            }
            _ => None,
        };
        mailbox.map(Arc::as_ref).ok_or_else(|| {
            let got = format!("{kind:?} of micro-batch {micro_batch} from {from} to {to}");
            Fault::protocol("a message that the plan has this peer send to this process", got)
        })
    }

    /// The worker of this process that runs a partition.
    fn worker_with(&self, partition: PartitionId) -> Option<&Arc<Mailbox>> {
        let role = self.roster.plan().placement().worker_of(partition);
        self.workers.iter().find(|(&member, _)| self.roster.role_of(member) == role).map(|(_, mailbox)| mailbox)
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
    header.check(&limits())?;
    write_frame(stream, &header, body, &Patience::new(&fate, limit))
}

/// Reads one frame of one of these kinds, within so long in all: whoever is at the other end may not have shown a token.
pub fn receive(stream: &mut TcpStream, kinds: &[Kind], limit: Duration) -> Result<Frame, Fault> {
    let fate = Fate::default();
    let patience = Patience::new(&fate, limit).in_all(limit);
    read_frame(stream, &limits(), &patience, &mut Decoder::raw(), |header| match kinds.contains(&header.kind) {
        true => Ok(()),
        false => Err(Fault::protocol(format!("one of {kinds:?}"), format!("{:?}", header.kind))),
    })
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
    let mut refused = Fault::protocol("an address such as 127.0.0.1:7000", address);
    let mut connected = None;
    // A name may stand for several addresses, of which only some are listened on.
    for resolved in address.to_socket_addrs().map_err(|e| Fault::io(doing(), e))? {
        match TcpStream::connect_timeout(&resolved, limit) {
            Ok(stream) => {
                connected = Some(stream);
                break;
            }
            Err(e) => refused = Fault::io(doing(), e),
        }
    }
    let mut stream = connected.ok_or(refused)?;
    prepare(&stream)?;
    let hello = Hello { run: credentials.run, token: credentials.token.0, role, build: BUILD.to_owned() };
    send_text(&mut stream, Kind::Hello, &hello.encode(), limit)?;
    let answer = receive(&mut stream, &[Kind::Welcome, Kind::Refuse], limit)?;
    let text = |e: distgpipe_core::wire::MessageError| Fault::protocol("an answer to our hello", e.to_string());
    match answer.header.kind {
        Kind::Refuse => Err(Fault::protocol("to be let in", Refuse::decode(&answer.body).map_err(text)?.reason)),
        _ => Welcome::decode(&answer.body).map(|_| stream).map_err(text),
    }
}

/// Answers somebody who connected: lets them in if they know the token (and the run, if one is under way).
pub fn answer(stream: &mut TcpStream, token: &Token, run: Option<[u8; 16]>, limit: Duration) -> Result<Hello, Fault> {
    prepare(stream)?;
    let first = receive(stream, &[Kind::Hello], limit)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::schedule::{Request, Schedule};

    /// What a process of one worker, or the driver's, lets in from a peer: kind, micro-batch, from, to.
    fn admits(replicas: usize, here: u32, peer: Peer, message: (Kind, u32, u32, u32)) -> bool {
        let request = Request::new("client,server,client".parse().unwrap(), 2);
        let roster = Arc::new(Roster::new(Schedule::OneFOneB.plan(&request).unwrap(), replicas));
        let mailbox = || Mailbox::new(Fate::default(), 1);
        let workers = BTreeMap::from([(WorkerId(here), mailbox())]);
        let delivery = Delivery { roster, peer, workers, driver: (here == 0).then(mailbox) };
        let (kind, micro_batch, from, to) = message;
        delivery.admit(&Header { micro_batch, from, to, ..Header::new(kind) }).is_ok()
    }

    fn worker(number: u32) -> Peer {
        Peer::Worker(WorkerId(number))
    }

    /// Of three replicas: clients 0, 2, 4 and servers 1, 3, 5.
    #[test]
    fn shares_come_from_the_replica_before_and_from_nobody_else() {
        for (here, peer, from, to, expected) in [
            (3, worker(1), 1, 3, true),
            (1, worker(5), 5, 1, true),
            (2, Peer::Driver, 0, 2, true),
            (0, worker(4), 4, 0, true),
            (0, worker(2), 2, 0, false),
            (1, worker(3), 3, 1, false),
            (3, worker(1), 5, 3, false),
            (3, worker(1), 1, 5, false),
            (3, worker(2), 2, 3, false),
            (3, Peer::Driver, 1, 3, false),
            (3, worker(1), 1, u32::MAX, false),
        ] {
            assert_eq!(admits(3, here, peer, (Kind::Share, 0, from, to)), expected, "{peer:?}: {from} to {to}");
        }
        assert!(!admits(1, 1, Peer::Driver, (Kind::Share, 0, 0, 1)), "without replicas there are none");
    }

    #[test]
    fn the_plans_messages_stay_within_a_replica() {
        assert!(admits(3, 3, worker(2), (Kind::Activation, 1, 0, 1)));
        assert!(!admits(3, 3, Peer::Driver, (Kind::Activation, 1, 0, 1)), "worker 0 is of another replica");
        assert!(admits(3, 2, worker(3), (Kind::Gradient, 0, 1, 0)));
        assert!(!admits(3, 2, worker(3), (Kind::Gradient, 2, 1, 0)), "there are two micro-batches");
        // Outputs are numbered over all replicas.
        for (number, expected) in [(1, false), (2, true), (5, true), (6, false)] {
            assert_eq!(admits(3, 0, worker(4), (Kind::Output, number, 2, 2)), expected, "{number}");
        }
    }

    #[test]
    fn a_share_is_no_larger_than_a_bucket() {
        let request = Request::new("one".parse().unwrap(), 1);
        let roster = Arc::new(Roster::new(Schedule::OneFOneB.plan(&request).unwrap(), 2));
        let workers = BTreeMap::from([(WorkerId(1), Mailbox::new(Fate::default(), 1))]);
        let delivery = Delivery { roster, peer: Peer::Driver, workers, driver: None };
        let header = |body_bytes| Header { to: 1, body_bytes, ..Header::new(Kind::Share) };
        assert!(delivery.admit(&header(SHARE_BYTES_MAX)).is_ok());
        assert!(delivery.admit(&header(SHARE_BYTES_MAX + 1)).is_err());
    }
}
