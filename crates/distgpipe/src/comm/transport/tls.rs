//! TLS 1.3 over a socket, with the server's raw public key instead of certificates (RFC 7250).
//!
//! ```text
//!  client                                        server
//!  ClientHello ────────────────────────────────►
//!                ◄──────── its public key, and a signature of the handshake by that key
//!  compares the key with the join string's, verifies the signature
//!  HMAC(secret, "client", exporter) ───────────►  compares
//!                ◄──────── HMAC(secret, "server", exporter)
//!  compares; the frames begin
//! ```
//!
//! The exporter is a value that both ends derive from the keys of this one connection, so a proof that was recorded is worth
//! nothing on another. There are no session tickets and no early data.
//!
//! The reader and the writer of a connection use one [`TlsStream`] at the same time. One lock guards the cryptography; nobody
//! holds it during a call on the socket.

mod proof;

pub use proof::{acceptance, answer, claim, Claim, ProofAnswer, CLAIM_BYTES};

use crate::comm::abort::AbortFlag;
use crate::comm::handshake::Token;
use crate::comm::server_identity::{PublicKey, ServerIdentity};
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::tcp::Deadline;
use crate::failure::Fault;
use crate::sync::lock;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::Resumption;
use rustls::crypto::{ring as provider, verify_tls13_signature_with_raw_key, CryptoProvider};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig, SignatureScheme,
};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What precedes the 32 bytes of an Ed25519 key in its DER form (RFC 8410).
const ED25519_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

fn spki(key: &PublicKey) -> Vec<u8> {
    [&ED25519_PREFIX[..], &key.0].concat()
}

/// The settings of a server's end.
pub fn server_config(identity: &ServerIdentity) -> Result<Arc<ServerConfig>, Fault> {
    let private = PrivatePkcs8KeyDer::from(identity.pkcs8().to_vec());
    let signing = provider::sign::any_eddsa_type(&private).map_err(Fault::Tls)?;
    let key = CertifiedKey::new(vec![CertificateDer::from(spki(&identity.key))], signing);
    let builder = ServerConfig::builder_with_provider(Arc::new(provider::default_provider()));
    let mut config = builder
        .with_protocol_versions(&[&TLS13])
        .map_err(Fault::Tls)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(key))));
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// The settings of a client's end, for the server that has this key.
pub fn client_config(key: &PublicKey) -> Result<Arc<ClientConfig>, Fault> {
    let provider = Arc::new(provider::default_provider());
    let verifier = PinnedKey { spki: spki(key), provider: provider.clone() };
    let builder = ClientConfig::builder_with_provider(provider);
    let mut config = builder
        .with_protocol_versions(&[&TLS13])
        .map_err(Fault::Tls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    config.enable_sni = false;
    Ok(Arc::new(config))
}

/// Accepts one public key, and the signatures that it verifies.
#[derive(Debug)]
struct PinnedKey {
    spki: Vec<u8>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match end_entity.as_ref() == self.spki {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not offered".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(certificate.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// Whom a client expects at the other end of a socket.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// The server's public key.
    pub key: &'a PublicKey,
    /// What both ends know.
    pub secret: &'a Token,
    /// The run that the secret belongs to, if it is a run's key; `None` for the secret of a join string.
    pub run: Option<[u8; 16]>,
}

/// Makes a connected socket a protected stream to the expected server. `limit` bounds all of it; gives up earlier when the run fails.
pub fn connect(
    socket: TcpStream,
    expected: &Expected<'_>,
    limit: Duration,
    abort: &AbortFlag,
) -> Result<TlsStream, Fault> {
    let name = ServerName::try_from("distgpipe.invalid").map_err(|e| Fault::internal("a valid name", e.to_string()))?;
    let connection = ClientConnection::new(client_config(expected.key)?, name).map_err(Fault::Tls)?;
    let stream = TlsStream::new(socket, connection.into());
    let deadline = Deadline::new(abort, limit).with_total(limit);
    stream.complete_handshake(limit, abort)?;
    proof::show(stream, expected, &deadline)
}

/// A handle on a TLS connection; clones share it. A write that returns [`WouldBlock`](io::ErrorKind::WouldBlock) may have
/// encrypted its bytes already: the same bytes must be written next, as every loop does that writes all of them. A read takes
/// bytes from the socket once, and returns [`WouldBlock`](io::ErrorKind::WouldBlock) if they complete no content.
#[derive(Clone, Debug)]
pub struct TlsStream(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: TcpStream,
    crypto: Mutex<Connection>,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

/// Encrypted bytes that are to be sent.
#[derive(Debug, Default)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// How many bytes of the caller's are in them.
    accepted: usize,
}

/// Encrypted bytes that have arrived.
#[derive(Debug)]
struct Incoming {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    /// All that ever arrived, and how much may arrive.
    total: u64,
    total_max: u64,
}

/// The most bytes that one write encrypts, and that one read of the socket takes.
const CHUNK_BYTES: usize = 128 << 10;

/// How long the end of a stream may take to be sent.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);

fn tls_error(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The fault of a TLS error that a read or a write returned.
fn fault_of(error: io::Error) -> Fault {
    use rustls::Error;
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)) => Fault::WrongKey,
        Some(error) => Fault::Tls(error.clone()),
        None if error.kind() == io::ErrorKind::UnexpectedEof => Fault::Lost,
        None => Fault::io("setting up TLS", error),
    }
}

/// Gives rustls as many bytes as it takes, and returns their number: a record, and the beginning of the next. rustls takes 4 KiB at
/// a time into a buffer that it grows for each record, but all at once into one that still has the beginning of a record in it.
fn feed(crypto: &mut Connection, mut bytes: &[u8]) -> io::Result<usize> {
    let mut taken = 0;
    while !bytes.is_empty() {
        match crypto.read_tls(&mut bytes) {
            // The peer has ended the stream.
            Ok(0) => break,
            Ok(read) => taken += read,
            // Its buffer is full.
            Err(_) if taken > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(taken)
}

fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

impl TlsStream {
    /// A stream over a socket. The first read drives what is left of the handshake.
    pub fn new(socket: TcpStream, mut connection: Connection) -> Self {
        // Writes bound what is encrypted at a time.
        connection.set_buffer_limit(None);
        let incoming = Incoming { bytes: Vec::new(), from: 0, to: 0, total: 0, total_max: u64::MAX };
        TlsStream(Arc::new(Shared {
            socket,
            crypto: Mutex::new(connection),
            outgoing: Mutex::default(),
            incoming: Mutex::new(incoming),
        }))
    }

    /// The socket under the stream.
    pub fn socket(&self) -> &TcpStream {
        &self.0.socket
    }

    /// Bounds the encrypted bytes that may arrive in all, and with them the memory for those that arrive at a time. A read that
    /// would need more of them is an error. `None`: no bound, as in a new stream.
    pub fn limit_input(&self, bytes_max: Option<u64>) {
        lock(&self.0.incoming).total_max = bytes_max.unwrap_or(u64::MAX);
    }

    /// A value that both ends of this connection know, and nobody else.
    fn exporter(&self) -> Result<[u8; 32], Fault> {
        lock(&self.0.crypto).export_keying_material([0; 32], proof::EXPORTER_LABEL, None).map_err(Fault::Tls)
    }

    /// Has both directions use new keys from here on. rustls does so by itself before a key has encrypted too much.
    pub fn refresh_keys(&self) -> Result<(), Fault> {
        lock(&self.0.crypto).refresh_traffic_keys().map_err(Fault::Tls)
    }

    fn complete_handshake(&self, limit: Duration, abort: &AbortFlag) -> Result<(), Fault> {
        ByteStream::from(self.clone()).set_up()?;
        let start = Instant::now();
        loop {
            abort.check()?;
            self.flush_pending().map_err(fault_of)?;
            if !lock(&self.0.crypto).is_handshaking() {
                return Ok(());
            }
            match self.receive() {
                Ok(0) => return Err(Fault::Lost),
                Ok(_) => {}
                Err(e) if timed_out(&e) => {}
                Err(e) => return Err(fault_of(e)),
            }
            if start.elapsed() >= limit {
                return Err(Fault::TimedOut { what: "the handshake".to_owned(), limit_s: limit.as_secs_f64() });
            }
        }
    }

    /// Takes from the socket what is there, and processes it. Returns how many bytes arrived; 0 at the end of the stream.
    fn receive(&self) -> io::Result<usize> {
        let incoming = &mut *lock(&self.0.incoming);
        self.receive_into(incoming)
    }

    fn receive_into(&self, incoming: &mut Incoming) -> io::Result<usize> {
        if incoming.from == incoming.to {
            // The peer may wait for the rest of the handshake.
            let answers = lock(&self.0.crypto).wants_write();
            self.flush_if(answers)?;
            let room = incoming.total_max.saturating_sub(incoming.total);
            if room == 0 {
                let max = incoming.total_max;
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("expected at most {max} bytes, got more"),
                ));
            }
            incoming.bytes.resize(usize::try_from(room).map_or(CHUNK_BYTES, |room| room.min(CHUNK_BYTES)), 0);
            let read = (&self.0.socket).read(&mut incoming.bytes)?;
            (incoming.from, incoming.to) = (0, read);
            incoming.total += read as u64;
            if read == 0 {
                return Ok(0);
            }
        }
        let (processed, answers) = {
            let mut crypto = lock(&self.0.crypto);
            let taken = feed(&mut crypto, &incoming.bytes[incoming.from..incoming.to]);
            let processed = taken.and_then(|taken| crypto.process_new_packets().map(|_| taken).map_err(tls_error));
            (processed, crypto.wants_write())
        };
        self.flush_if(answers)?;
        let taken = processed?;
        incoming.from += taken;
        Ok(taken)
    }

    /// Sends an answer of TLS itself, such as an alert or a new key, as far as the socket takes it.
    fn flush_if(&self, answers: bool) -> io::Result<()> {
        match if answers { self.flush_pending() } else { Ok(()) } {
            Err(e) if timed_out(&e) => Ok(()),
            sent => sent,
        }
    }

    /// Sends what is encrypted, unless another handle is at it: a writer at work sends this with what it sends.
    fn flush_pending(&self) -> io::Result<()> {
        match self.0.outgoing.try_lock() {
            Ok(mut outgoing) => self.send(&mut outgoing),
            Err(_) => Ok(()),
        }
    }

    /// Sends everything that is encrypted.
    fn send(&self, outgoing: &mut Outgoing) -> io::Result<()> {
        loop {
            while outgoing.sent < outgoing.bytes.len() {
                match (&self.0.socket).write(&outgoing.bytes[outgoing.sent..])? {
                    0 => return Err(io::ErrorKind::WriteZero.into()),
                    sent => outgoing.sent += sent,
                }
            }
            outgoing.bytes.clear();
            outgoing.sent = 0;
            let mut crypto = lock(&self.0.crypto);
            if !crypto.wants_write() {
                return Ok(());
            }
            while crypto.wants_write() {
                crypto.write_tls(&mut outgoing.bytes)?;
            }
        }
    }

    /// Ends one direction of the stream, or both. The end of what is written is part of the stream, so that the peer can tell
    /// it from a connection that was cut.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if how == Shutdown::Write {
            lock(&self.0.crypto).send_close_notify();
            let start = Instant::now();
            while start.elapsed() < CLOSE_LIMIT {
                match self.send(&mut lock(&self.0.outgoing)) {
                    Err(e) if timed_out(&e) => {}
                    _ => break,
                }
            }
        }
        self.0.socket.shutdown(how)
    }
}

impl Read for TlsStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let incoming = &mut *lock(&self.0.incoming);
        let (mut filled, mut has_received) = (0, false);
        loop {
            let read = lock(&self.0.crypto).reader().read(&mut into[filled..]);
            match read {
                // The end of the stream, as the peer has sent it.
                Ok(0) => return Ok(filled),
                Ok(read) => filled += read,
                Err(e) if timed_out(&e) => {}
                Err(e) => return if filled > 0 { Ok(filled) } else { Err(e) },
            }
            if filled == into.len() || filled > 0 && incoming.from == incoming.to {
                return Ok(filled);
            }
            // A peer can send records without content for ever. The caller, which may have others to serve, decides.
            if incoming.from == incoming.to && std::mem::replace(&mut has_received, true) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            match self.receive_into(incoming) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(_) if filled > 0 => return Ok(filled),
                Err(e) => return Err(e),
            }
        }
    }
}

impl Write for TlsStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let outgoing = &mut *lock(&self.0.outgoing);
        if outgoing.accepted == 0 {
            let mut crypto = lock(&self.0.crypto);
            outgoing.accepted = crypto.writer().write(&from[..from.len().min(CHUNK_BYTES)])?;
        }
        self.send(outgoing)?;
        Ok(std::mem::take(&mut outgoing.accepted).min(from.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send(&mut lock(&self.0.outgoing))
    }
}

#[cfg(test)]
pub(crate) mod tests;
