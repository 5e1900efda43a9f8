use super::*;
use rustls::ServerConnection;
use std::net::{SocketAddr, TcpListener};
use std::thread::JoinHandle;

const LIMIT: Duration = Duration::from_secs(30);
const SECRET: Token = Token([7; 32]);

/// Answers one connection with these settings, as a server that has this secret.
fn serve(config: Arc<ServerConfig>, secret: Token) -> (SocketAddr, JoinHandle<Result<TlsStream, Fault>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (address, std::thread::spawn(move || accept(&listener, config, secret)))
}

fn accept(listener: &TcpListener, config: Arc<ServerConfig>, secret: Token) -> Result<TlsStream, Fault> {
    let connection = ServerConnection::new(config).unwrap();
    let mut stream = TlsStream::new(listener.accept().unwrap().0, connection.into());
    ByteStream::from(stream.clone()).set_up()?;
    let abort = AbortFlag::default();
    let deadline = Deadline::new(&abort, LIMIT).with_total(LIMIT);
    let mut claim = [0; CLAIM_BYTES];
    crate::comm::transport::tcp::read_exact(&mut stream, &mut claim, &deadline)?;
    let answer = answer(&stream, &claim, |run| run.is_none().then_some(secret))?;
    crate::comm::transport::tcp::write_all(&mut stream, &answer.bytes, &deadline)?;
    answer.result.map(|_| stream)
}

fn dial(address: SocketAddr, key: &PublicKey, secret: &Token) -> Result<TlsStream, Fault> {
    let expected = Expected { key, secret, run: None };
    connect(TcpStream::connect(address).unwrap(), &expected, LIMIT, &AbortFlag::default())
}

fn identity() -> ServerIdentity {
    ServerIdentity::generate().unwrap()
}

/// The ClientHello of a client that expects this key, in records, with its extensions as `edit` leaves them.
pub(crate) fn client_hello(key: &PublicKey, edit: impl FnOnce(&mut Vec<(u16, Vec<u8>)>)) -> Vec<u8> {
    let name = ServerName::try_from("distgpipe.invalid").unwrap();
    let mut connection = ClientConnection::new(client_config(key).unwrap(), name).unwrap();
    let mut record = Vec::new();
    connection.write_tls(&mut record).unwrap();
    // Behind the heads of the record and of the message: a version, 32 random bytes, a session id, ciphers, compressions.
    let hello = &record[5 + 4..];
    let number = |bytes: &[u8]| usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
    let mut at = 2 + 32;
    at += 1 + usize::from(hello[at]);
    at += 2 + number(&hello[at..]);
    at += 1 + usize::from(hello[at]);
    let (head, mut rest) = (&hello[..at], &hello[at + 2..]);
    let mut extensions = Vec::new();
    while !rest.is_empty() {
        let end = 4 + number(&rest[2..]);
        extensions.push((number(rest) as u16, rest[4..end].to_vec()));
        rest = &rest[end..];
    }
    edit(&mut extensions);
    let length = |bytes: &[u8]| u16::try_from(bytes.len()).unwrap().to_be_bytes();
    let body = extensions.iter().flat_map(|(kind, data)| [&kind.to_be_bytes()[..], &length(data), data].concat());
    let body: Vec<u8> = body.collect();
    let hello = [head, &length(&body), &body].concat();
    let message = [&[1][..], &(hello.len() as u32).to_be_bytes()[1..], &hello].concat();
    message.chunks(16 << 10).flat_map(|piece| [&[0x16, 3, 1][..], &length(piece), piece].concat()).collect()
}

/// A client that offers TLS 1.2 gets the alert `protocol_version`, and no answer that it could use.
#[test]
fn a_client_that_offers_an_older_version_is_refused() {
    const SUPPORTED_VERSIONS: u16 = 43;
    let identity = identity();
    for older in [true, false] {
        let (address, served) = serve(server_config(&identity).unwrap(), SECRET);
        let mut client = TcpStream::connect(address).unwrap();
        // Without this extension, a ClientHello is that of TLS 1.2.
        let hello = client_hello(&identity.key, |extensions| {
            extensions.retain(|(kind, _)| !older || *kind != SUPPORTED_VERSIONS);
        });
        client.write_all(&hello).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        let mut answer = [0; 7];
        client.read_exact(&mut answer).unwrap();
        match older {
            true => assert_eq!(answer, [0x15, 3, 3, 0, 2, 2, 70], "an alert, fatal, protocol_version"),
            false => assert_eq!((answer[0], answer[5]), (0x16, 2), "a ServerHello"),
        }
        drop(client);
        assert!(served.join().unwrap().is_err());
    }
}

/// A ticket would let a connection begin without the key of the server, and early data could be replayed.
#[test]
fn a_client_gets_no_tickets_for_later_sessions() {
    let identity = identity();
    let (address, served) = serve(server_config(&identity).unwrap(), SECRET);
    let mut client = dial(address, &identity.key, &SECRET).unwrap();
    let mut server = served.join().unwrap().unwrap();
    // A server sends tickets before anything else.
    server.write_all(&[7; 1000]).unwrap();
    let abort = AbortFlag::default();
    crate::comm::transport::tcp::read_exact(&mut client, &mut [0; 1000], &Deadline::new(&abort, LIMIT)).unwrap();
    match &mut *lock(&client.0.crypto) {
        Connection::Client(client) => {
            assert_eq!((client.tls13_tickets_received(), client.early_data().is_some()), (0, false));
            assert_eq!(client.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
        }
        Connection::Server(_) => panic!("it is the client"),
    };
}

/// Writes this many bytes that `seed` determines.
fn send(stream: &mut TlsStream, seed: u8, bytes: usize) {
    let block: Vec<u8> = (0..251).map(|i: u8| i.wrapping_mul(seed)).collect();
    let data: Vec<u8> = block.iter().copied().cycle().take(bytes).collect();
    for (i, piece) in data.chunks(100_000).enumerate() {
        if i % 5 == 0 {
            stream.refresh_keys().unwrap();
        }
        let abort = AbortFlag::default();
        crate::comm::transport::tcp::write_all(stream, piece, &Deadline::new(&abort, LIMIT)).unwrap();
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

/// Reads to the end of the stream, and checks that all of it is what `send` writes.
fn receive(stream: &mut TlsStream, seed: u8, bytes: usize) {
    let (mut got, mut buffer) = (0, vec![0; 77_777]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => {
                for (i, byte) in buffer[..read].iter().enumerate() {
                    assert_eq!(*byte, (((got + i) % 251) as u8).wrapping_mul(seed));
                }
                got += read;
            }
            Err(e) if timed_out(&e) => {}
            Err(e) => panic!("after {got} bytes: {e}"),
        }
    }
    assert_eq!(got, bytes);
}

#[test]
fn both_directions_carry_data_at_once_while_keys_change() {
    const BYTES: usize = 6 << 20;
    let identity = identity();
    let (address, served) = serve(server_config(&identity).unwrap(), SECRET);
    let client = dial(address, &identity.key, &SECRET).unwrap();
    let server = served.join().unwrap().unwrap();
    std::thread::scope(|scope| {
        for (stream, sends, receives) in [(&client, 3, 5), (&server, 5, 3)] {
            let (mut writer, mut reader) = (stream.clone(), stream.clone());
            scope.spawn(move || send(&mut writer, sends, BYTES));
            scope.spawn(move || receive(&mut reader, receives, BYTES));
        }
    });
}

#[test]
fn a_server_with_another_key_is_not_trusted() {
    let (address, served) = serve(server_config(&identity()).unwrap(), SECRET);
    let refused = dial(address, &identity().key, &SECRET);
    assert!(matches!(refused, Err(Fault::WrongKey)), "{refused:?}");
    assert!(served.join().unwrap().is_err());
}

/// A server that shows the right key, which is public, must also sign with it.
#[test]
fn a_server_that_signs_with_another_key_than_it_shows_is_not_trusted() {
    let (shown, other) = (identity(), identity());
    let mut forged = ServerConfig::clone(&server_config(&shown).unwrap());
    let private = PrivatePkcs8KeyDer::from(other.pkcs8().to_vec());
    let signing = provider::sign::any_eddsa_type(&private).unwrap();
    let key = CertifiedKey::new(vec![CertificateDer::from(spki(&shown.key))], signing);
    forged.cert_resolver = Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(key)));
    let (address, served) = serve(Arc::new(forged), SECRET);
    let refused = dial(address, &shown.key, &SECRET);
    assert!(
        matches!(&refused, Err(Fault::Tls(rustls::Error::InvalidCertificate(CertificateError::BadSignature)))),
        "{refused:?}"
    );
    assert!(served.join().unwrap().is_err());
}

#[test]
fn either_end_without_the_secret_is_refused_and_named() {
    let identity = identity();
    let (address, served) = serve(server_config(&identity).unwrap(), SECRET);
    let refused = dial(address, &identity.key, &Token([8; 32]));
    assert!(
        matches!(&refused, Err(Fault::WrongSecret(text)) if text.starts_with("the client does not")),
        "{refused:?}"
    );
    assert!(matches!(served.join().unwrap(), Err(Fault::WrongSecret(_))));
    // A server that accepts anybody has not the secret either, so it cannot prove it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, config) = (listener.local_addr().unwrap(), server_config(&identity).unwrap());
    let served = std::thread::spawn(move || {
        let mut stream = TlsStream::new(listener.accept().unwrap().0, ServerConnection::new(config).unwrap().into());
        let abort = AbortFlag::default();
        let deadline = Deadline::new(&abort, LIMIT);
        crate::comm::transport::tcp::read_exact(&mut stream, &mut [0; CLAIM_BYTES], &deadline).unwrap();
        stream.write_all(&[&[0, 32, 0][..], &[1; 32]].concat()).unwrap();
        stream
    });
    let refused = dial(address, &identity.key, &SECRET);
    assert!(matches!(&refused, Err(Fault::WrongSecret(text)) if text.starts_with("the server has")), "{refused:?}");
    drop(served.join().unwrap());
}

/// Passes the bytes of one connection on to `to`, of the client at most `client_max`, of the server at most `server_max`.
/// Returns what the client and the server sent.
fn relay(to: SocketAddr, client_max: usize, server_max: usize) -> (SocketAddr, JoinHandle<[Vec<u8>; 2]>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (near, far) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
        let (mut near_in, mut far_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let upstream = std::thread::spawn(move || copy(&mut near_in, &mut far_out, client_max));
        let answers = copy(&mut far.try_clone().unwrap(), &mut near.try_clone().unwrap(), server_max);
        [upstream.join().unwrap(), answers]
    });
    (address, thread)
}

/// Somebody on the path can cut a connection, but not change what it carries. The first five bytes are the header of a record.
#[test]
fn a_bit_that_changes_on_the_way_ends_the_connection() {
    let identity = identity();
    for flipped in [5, 20, 300] {
        let (server, served) = serve(server_config(&identity).unwrap(), SECRET);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (armed, arm) = std::sync::mpsc::channel::<()>();
        let path = std::thread::spawn(move || {
            let (near, far) = (listener.accept().unwrap().0, TcpStream::connect(server).unwrap());
            let (mut back, mut answers) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || copy(&mut answers, &mut back, usize::MAX));
            let (mut near, mut far) = (near, far);
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = near.read(&mut buffer) {
                if arm.try_recv().is_ok() {
                    buffer[flipped] ^= 1;
                }
                if far.write_all(&buffer[..read]).is_err() {
                    break;
                }
            }
        });
        let mut client = dial(address, &identity.key, &SECRET).unwrap();
        let mut server = served.join().unwrap().unwrap();
        armed.send(()).unwrap();
        client.write_all(&[7; 1000]).unwrap();
        let mut got = [0; 1000];
        let start = Instant::now();
        let error = loop {
            match server.read(&mut got) {
                Err(e) if timed_out(&e) && start.elapsed() < LIMIT => {}
                read => break read,
            }
        };
        drop(client);
        assert!(matches!(&error, Err(e) if e.kind() == io::ErrorKind::InvalidData), "byte {flipped}: {error:?}");
        drop(server);
        path.join().unwrap();
    }
}

fn copy(from: &mut TcpStream, to: &mut TcpStream, max: usize) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(read) = from.read(&mut buffer) {
        let taken = read.min(max - all.len());
        if to.write_all(&buffer[..taken]).is_err() || read == 0 {
            break;
        }
        all.extend(&buffer[..taken]);
        if all.len() == max {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
    all
}

#[test]
fn a_recorded_session_cannot_be_read_and_is_worth_nothing_when_it_is_replayed() {
    const TEXT: &[u8] = b"what nobody else may read";
    let identity = identity();
    let config = server_config(&identity).unwrap();
    let (server, served) = serve(config.clone(), SECRET);
    let (address, recording) = relay(server, usize::MAX, usize::MAX);
    let mut client = dial(address, &identity.key, &SECRET).unwrap();
    let mut server = served.join().unwrap().unwrap();
    client.write_all(TEXT).unwrap();
    let (abort, mut got) = (AbortFlag::default(), [0; TEXT.len()]);
    crate::comm::transport::tcp::read_exact(&mut server, &mut got, &Deadline::new(&abort, LIMIT)).unwrap();
    assert_eq!(got, TEXT);
    drop((client, server));
    let [recorded, answers] = recording.join().unwrap();
    for secret in [TEXT, &SECRET.0, b"dgpproof"] {
        let has = |bytes: &[u8]| bytes.windows(secret.len()).any(|window| window == secret);
        assert!(!has(&recorded) && !has(&answers), "{secret:?}");
    }
    let (server, served) = serve(config, SECRET);
    let mut replayed = TcpStream::connect(server).unwrap();
    replayed.write_all(&recorded).unwrap();
    let refused = served.join().unwrap();
    assert!(matches!(&refused, Err(Fault::Io { source, .. }) if source.to_string().contains("decrypt")), "{refused:?}");
}

#[test]
fn a_handshake_that_ends_at_any_byte_is_an_error_at_both_ends() {
    let identity = identity();
    let config = server_config(&identity).unwrap();
    let attempt = |client_max, server_max| {
        let (server, served) = serve(config.clone(), SECRET);
        let (address, relay) = relay(server, client_max, server_max);
        let client = dial(address, &identity.key, &SECRET);
        let ended = (client.is_ok(), served.join().unwrap().is_ok());
        drop(client);
        (ended, relay.join().unwrap().map(|sent| sent.len()))
    };
    let (ended, [client_bytes, server_bytes]) = attempt(usize::MAX, usize::MAX);
    assert_eq!(ended, (true, true));
    // The last byte of the client is the end of its claim.
    for bytes in 1..client_bytes {
        assert_eq!(attempt(bytes, usize::MAX).0, (false, false), "the client's first {bytes} bytes");
    }
    // The server has sent its answer, a proof after three bytes in a record with 22 bytes of its own, when it accepts a client.
    let before_answer = server_bytes - (22 + 3 + 32);
    for bytes in 1..server_bytes {
        let (client, server) = attempt(usize::MAX, bytes).0;
        assert!(!client && (!server || bytes >= before_answer), "the server's first {bytes} bytes");
    }
}

/// A peer of another release hears both versions.
#[test]
fn a_client_with_another_version_of_the_proof_is_told_both() {
    let identity = identity();
    let (address, served) = serve(server_config(&identity).unwrap(), SECRET);
    let name = ServerName::try_from("distgpipe.invalid").unwrap();
    let connection = ClientConnection::new(client_config(&identity.key).unwrap(), name).unwrap();
    let mut client = TlsStream::new(TcpStream::connect(address).unwrap(), connection.into());
    client.complete_handshake(LIMIT, &AbortFlag::default()).unwrap();
    let mut claim = [0; CLAIM_BYTES];
    claim[..10].copy_from_slice(b"dgpproof\x02\x00");
    claim[CLAIM_BYTES - 24..][..5].copy_from_slice(b"9.9\x1b[");
    client.write_all(&claim).unwrap();
    let refused = served.join().unwrap().unwrap_err().to_string();
    let ours = env!("CARGO_PKG_VERSION");
    assert!(refused.contains(&format!("the server runs distgpipe {ours} (proof 1)")), "{refused}");
    assert!(refused.contains("the client 9.9") && refused.contains("(proof 2)"), "{refused}");
    assert!(!refused.contains('\x1b'), "{refused}");
}

/// A read once went on until there was content, which a stranger could withhold: it held the thread that accepts.
#[test]
fn a_read_takes_bytes_from_the_socket_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let connection = ServerConnection::new(server_config(&identity()).unwrap()).unwrap();
    let mut stream = TlsStream::new(listener.accept().unwrap().0, connection.into());
    // The beginning of a record; the rest never comes.
    stranger.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]).unwrap();
    let (sender, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(stream.read(&mut [0; 100])));
    let read = done.recv_timeout(LIMIT).expect("it returns");
    assert!(matches!(&read, Err(e) if e.kind() == io::ErrorKind::WouldBlock), "{read:?}");
}

/// All that a peer sent was once taken in, in pieces of 128 KiB, before anybody looked at how much it was.
#[test]
fn input_over_its_limit_is_an_error_and_takes_no_memory() {
    const MAX: u64 = 16 << 10;
    let identity = identity();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let connection = ServerConnection::new(server_config(&identity).unwrap()).unwrap();
    let mut server = TlsStream::new(listener.accept().unwrap().0, connection.into());
    server.limit_input(Some(MAX));
    ByteStream::from(server.clone()).set_up().unwrap();
    let name = ServerName::try_from("distgpipe.invalid").unwrap();
    let connection = ClientConnection::new(client_config(&identity.key).unwrap(), name).unwrap();
    let client = TlsStream::new(socket, connection.into());
    let sending = std::thread::spawn(move || {
        client.complete_handshake(LIMIT, &AbortFlag::default())?;
        let abort = AbortFlag::default();
        let deadline = Deadline::new(&abort, LIMIT);
        crate::comm::transport::tcp::write_all(&mut client.clone(), &vec![7; 1 << 20], &deadline)
    });
    let (mut got, start) = (0, Instant::now());
    let error = loop {
        match server.read(&mut [0; 1000]) {
            Ok(read) => got += read as u64,
            Err(e) if timed_out(&e) => assert!(start.elapsed() < LIMIT),
            Err(e) => break e,
        }
    };
    assert!(error.to_string().contains("expected at most"), "{error}");
    assert!(got <= MAX, "{got}");
    assert!(lock(&server.0.incoming).bytes.len() as u64 <= MAX);
    drop(server);
    let _ = sending.join().unwrap();
}
