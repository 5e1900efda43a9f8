use super::*;
use crate::comm::abort::AbortFlag;
use crate::comm::handshake::{introduce, reply, Credentials, Terms};
use crate::comm::server_identity::{PublicKey, ServerIdentity};
use crate::comm::transport::tcp::Resume;
use crate::comm::transport::tls::Expected;
use distgpipe_core::wire::{Role, MAGIC, VERSION};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

const SECRET: Token = Token([7; 32]);
const LIMIT: Duration = Duration::from_secs(60);

/// An acceptor in a thread that welcomes everybody who introduces itself, until it is dropped.
struct Welcoming {
    address: SocketAddr,
    key: Option<PublicKey>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<String>>>,
}

impl Welcoming {
    fn start(protected: bool) -> Self {
        let identity = protected.then(|| ServerIdentity::generate().unwrap());
        let tls = identity
            .as_ref()
            .map(|identity| TlsServer { config: tls::server_config(identity).unwrap(), secret: SECRET });
        let mut acceptor = Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), tls).unwrap();
        let (address, stop) = (acceptor.listener().tcp_address().unwrap(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut rejected = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                assert!(acceptor.pending.len() <= PENDING_MAX);
                match acceptor.next(Duration::from_millis(20), &|_| None) {
                    Some(Arrival::Peer(mut peer)) => {
                        let terms = Terms { token: &SECRET, run: None, busy: None };
                        reply(&mut peer.stream, &peer.hello, &terms, LIMIT).unwrap();
                    }
                    Some(Arrival::Rejected { fault, .. }) => rejected.push(fault.to_string()),
                    None => {}
                }
            }
            rejected
        });
        Welcoming { address, key: identity.map(|identity| identity.key), stop, thread: Some(thread) }
    }

    /// Joins, as an honest client does.
    fn join(&self) -> Result<(), Fault> {
        let socket = TcpStream::connect(self.address).unwrap();
        let stream: ByteStream = match &self.key {
            Some(key) => {
                let expected = Expected { key, secret: &SECRET, run: None };
                tls::connect(socket, &expected, LIMIT, &AbortFlag::default())?.into()
            }
            None => socket.into(),
        };
        introduce(stream, Role::Driver, &Credentials { run: [1; 16], token: SECRET }, Resume::first(LIMIT)).map(drop)
    }

    /// Ends it; returns why connections were rejected.
    fn end(mut self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

/// The first byte of a handshake, with and without TLS.
fn first_byte(protected: bool) -> [u8; 1] {
    [if protected { 0x16 } else { MAGIC[0] }]
}

/// Each one-byte connection once held the thread that accepts for five seconds.
#[test]
fn connections_that_send_one_byte_delay_nobody() {
    for protected in [false, true] {
        let server = Welcoming::start(protected);
        let mut strangers = VecDeque::new();
        for _ in 0..3 {
            for _ in 0..200 {
                let mut stranger = TcpStream::connect(server.address).unwrap();
                let _ = stranger.write_all(&first_byte(protected));
                strangers.push_back(stranger);
            }
            let start = Instant::now();
            server.join().unwrap();
            // It takes milliseconds; one turn of a stranger would be five seconds.
            assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
            strangers.drain(..100);
        }
        server.end();
    }
}

#[test]
fn a_thousand_slow_hellos_delay_nobody() {
    let server = Welcoming::start(true);
    // A record header that announces a long ClientHello, which then comes byte by byte.
    let mut slow: Vec<TcpStream> = Vec::new();
    for _ in 0..1000 {
        if let Ok(mut stranger) = TcpStream::connect(server.address) {
            let _ = stranger.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]);
            slow.push(stranger);
        }
    }
    for _ in 0..3 {
        slow.iter_mut().for_each(|stranger| drop(stranger.write_all(&[0])));
        let start = Instant::now();
        server.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    }
    server.end();
}

#[test]
fn failed_proofs_are_reported_a_few_times_and_do_not_lock_out_those_who_know_the_secret() {
    let server = Welcoming::start(true);
    let key = server.key.unwrap();
    for _ in 0..20 {
        let socket = TcpStream::connect(server.address).unwrap();
        let wrong = Expected { key: &key, secret: &Token([8; 32]), run: None };
        assert!(tls::connect(socket, &wrong, LIMIT, &AbortFlag::default()).is_err());
    }
    server.join().unwrap();
    let rejected = server.end();
    assert_eq!(
        rejected.iter().filter(|text| text.contains("does not know the server's secret")).count(),
        5,
        "{rejected:?}"
    );
}

/// TLS allows a ClientHello of 64 KiB, and the limit of a handshake is less.
#[test]
fn a_handshake_that_is_too_long_is_cut_off() {
    const PADDING: u16 = 21;
    let server = Welcoming::start(true);
    let long = tls::tests::client_hello(&server.key.unwrap(), |extensions| extensions.push((PADDING, vec![0; 40_000])));
    let config = tls::server_config(&ServerIdentity::generate().unwrap()).unwrap();
    let mut without_limit = rustls::ServerConnection::new(config).unwrap();
    let mut unread = &long[..];
    while !unread.is_empty() {
        without_limit.read_tls(&mut unread).unwrap();
        without_limit.process_new_packets().unwrap();
    }
    assert!(without_limit.wants_write(), "TLS itself answers it");
    let mut stranger = TcpStream::connect(server.address).unwrap();
    stranger.set_read_timeout(Some(LIMIT)).unwrap();
    let _ = stranger.write_all(&long);
    assert!(!matches!(stranger.read(&mut [0; 64]), Ok(1..)), "no answer");
    server.join().unwrap();
    let rejected = server.end();
    assert!(rejected.len() == 1 && rejected[0].contains("a handshake of at most 16384 bytes"), "{rejected:?}");
}

/// A peer of another release once lost the connection without a word.
#[test]
fn a_peer_of_another_wire_version_learns_this_one() {
    let server = Welcoming::start(false);
    let mut peer = TcpStream::connect(server.address).unwrap();
    let body = vec![0xff; 4000];
    let mut header = Header::new(Kind::Hello);
    header.seal(&body);
    let mut hello = header.encode().to_vec();
    hello[4..6].copy_from_slice(&(VERSION + 1).to_le_bytes());
    hello.extend(body);
    peer.write_all(&hello).unwrap();
    let mut head = [0; HEADER_BYTES];
    peer.read_exact(&mut head).unwrap();
    assert_eq!((&head[..4], &head[4..6]), (&MAGIC[..], &VERSION.to_le_bytes()[..]));
    drop(peer);
    let rejected = server.end();
    let expected = WireError::Version { ours: VERSION, theirs: VERSION + 1 };
    assert_eq!(rejected, [Fault::Wire(expected).to_string()]);
}

/// A turn once accepted and answered more connections than the caller took, and honest peers waited behind all of them.
#[test]
fn no_more_connections_wait_for_the_caller_than_one_turn_accepts() {
    let mut acceptor = Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), None).unwrap();
    let (run, token, build) = ([1; 16], SECRET.0, "test".to_owned());
    let hello = Hello { run, token, role: Role::Driver, epoch: 0, next: 1, build }.encode();
    let mut header = Header::new(Kind::Hello);
    header.seal(&hello);
    let bytes = [&header.encode()[..], &hello].concat();
    let mut peers = Vec::new();
    for _ in 0..100 {
        peers.push(TcpStream::connect(acceptor.listener().tcp_address().unwrap()).unwrap());
        peers.last_mut().unwrap().write_all(&bytes).unwrap();
    }
    for _ in 0..peers.len() {
        assert!(matches!(acceptor.next(LIMIT, &|_| None), Some(Arrival::Peer(_))));
        assert!(acceptor.arrived.len() < ACCEPTED_AT_ONCE, "{}", acceptor.arrived.len());
    }
}

/// Only failed proofs were once counted: other connections that failed filled the log with a line each.
#[test]
fn connections_that_fail_before_a_proof_are_reported_a_few_times_only() {
    for protected in [false, true] {
        let server = Welcoming::start(protected);
        for _ in 0..50 {
            let mut stranger = TcpStream::connect(server.address).unwrap();
            let _ = stranger.write_all(&[b'?'; HEADER_BYTES]);
            stranger.set_read_timeout(Some(LIMIT)).unwrap();
            // Until the server has closed it.
            while matches!(stranger.read(&mut [0; 64]), Ok(1..)) {}
        }
        server.join().unwrap();
        let rejected = server.end();
        assert_eq!(rejected.len(), 5, "{rejected:?}");
    }
}

/// What a stranger is told must not depend on whether a run exists.
#[test]
fn a_stranger_does_not_learn_whether_a_run_exists() {
    let identity = ServerIdentity::generate().unwrap();
    let tls = TlsServer { config: tls::server_config(&identity).unwrap(), secret: SECRET };
    let mut acceptor = Acceptor::new(TcpListener::bind("127.0.0.1:0").unwrap(), Some(tls)).unwrap();
    let address = acceptor.listener().tcp_address().unwrap();
    let strangers = std::thread::spawn(move || {
        [[1; 16], [2; 16]].map(|run| {
            let wrong = Expected { key: &identity.key, secret: &Token([9; 32]), run: Some(run) };
            let socket = TcpStream::connect(address).unwrap();
            tls::connect(socket, &wrong, LIMIT, &AbortFlag::default()).unwrap_err().to_string()
        })
    });
    while !strangers.is_finished() {
        let keys = |run: &[u8; 16]| (run == &[1; 16]).then_some(Token([3; 32]));
        let arrival = acceptor.next(Duration::from_millis(20), &keys);
        assert!(!matches!(arrival, Some(Arrival::Peer(_))));
    }
    let [of_a_run, of_none] = strangers.join().unwrap();
    assert_eq!(of_a_run, of_none);
    assert!(of_a_run.contains("does not know the key of a run"), "{of_a_run}");
}
