//! Both ends of a TLS connection prove that they know the secret.
//!
//! ```text
//! claim    8 bytes "dgpproof"   u16 version   u8 kind   u8 0   16 bytes run   32 bytes proof   24 bytes build, 0-padded
//! answer   u8 status   u16 length   body: the server's proof (status 0), or a reason in UTF-8
//! ```
//!
//! A proof is HMAC-SHA256 with the secret as its key, over the name of the end that proves, the kind of the secret, the run,
//! and the exporter of the connection. Numbers are little-endian.

use super::{Expected, TlsStream};
use crate::comm::handshake::Token;
use crate::comm::transport::tcp::{read_exact, write_all, Deadline};
use crate::failure::{printable, Fault};
use ring::hmac;

/// Which exporter both ends use (RFC 8446, section 7.5).
pub(super) const EXPORTER_LABEL: &[u8] = b"EXPORTER-distgpipe-proof";

const MAGIC: [u8; 8] = *b"dgpproof";
const VERSION: u16 = 1;
const BUILD: &str = env!("CARGO_PKG_VERSION");
const BUILD_BYTES: usize = 24;

/// The length of a claim.
pub const CLAIM_BYTES: usize = 8 + 2 + 1 + 1 + 16 + 32 + BUILD_BYTES;

/// The longest reason of a refusal.
const REASON_BYTES_MAX: usize = 512;

const ACCEPTED: u8 = 0;
const WRONG_SECRET: u8 = 1;
const OTHER_VERSION: u8 = 2;

/// Who proves. The two ends' proofs differ, so that none can return the other's.
#[derive(Clone, Copy)]
enum End {
    Client,
    Server,
}

fn message(end: End, run: Option<&[u8; 16]>, exporter: &[u8; 32]) -> Vec<u8> {
    let name: &[u8] = match end {
        End::Client => b"client",
        End::Server => b"server",
    };
    [name, &[u8::from(run.is_some())], run.unwrap_or(&[0; 16]), exporter].concat()
}

fn prove(secret: &Token, end: End, run: Option<&[u8; 16]>, exporter: &[u8; 32]) -> [u8; 32] {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &secret.0), &message(end, run, exporter));
    let mut proof = [0; 32];
    proof.copy_from_slice(tag.as_ref());
    proof
}

/// Compares in constant time.
fn proves(secret: &Token, end: End, run: Option<&[u8; 16]>, exporter: &[u8; 32], proof: &[u8]) -> bool {
    hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, &secret.0), &message(end, run, exporter), proof).is_ok()
}

/// What a client claims to be. Its proof has not been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The run whose key it says it has; `None` for the secret of the join string.
    pub run: Option<[u8; 16]>,
    proof: [u8; 32],
}

/// How a server answers a claim.
#[derive(Debug)]
pub struct ProofAnswer {
    /// The bytes of the answer.
    pub bytes: Vec<u8>,
    /// Who is accepted, or why nobody is.
    pub result: Result<Claim, Fault>,
}

fn refusal(status: u8, fault: Fault) -> ProofAnswer {
    let mut reason = fault.to_string().into_bytes();
    reason.truncate(REASON_BYTES_MAX);
    let mut bytes = vec![status];
    bytes.extend((reason.len() as u16).to_le_bytes());
    bytes.extend(reason);
    ProofAnswer { bytes, result: Err(fault) }
}

/// Checks a claim that has arrived on this stream. `secret_of` knows the secret of the server, for `None`, and the keys of its
/// runs.
pub fn answer(
    stream: &TlsStream,
    claim: &[u8; CLAIM_BYTES],
    secret_of: impl FnOnce(Option<&[u8; 16]>) -> Option<Token>,
) -> Result<ProofAnswer, Fault> {
    let (magic, rest) = claim.split_at(8);
    if magic != MAGIC {
        return Err(Fault::protocol("the claim of a distgpipe client", "other bytes"));
    }
    let version = u16::from_le_bytes([rest[0], rest[1]]);
    if version != VERSION {
        let theirs = printable(String::from_utf8_lossy(&rest[52..]).trim_end_matches('\0'));
        let reason = format!(
            "the server runs distgpipe {BUILD} (proof {VERSION}), the client {theirs} (proof {version}): install the same version on both"
        );
        return Ok(refusal(OTHER_VERSION, Fault::Refused { reason }));
    }
    let mut run = [0; 16];
    run.copy_from_slice(&rest[4..20]);
    let run = (rest[2] != 0).then_some(run);
    let mut proof = [0; 32];
    proof.copy_from_slice(&rest[20..52]);
    let exporter = stream.exporter()?;
    let known = secret_of(run.as_ref());
    // The same work for a run that is not known.
    let right = proves(&known.unwrap_or(Token([0; 32])), End::Client, run.as_ref(), &exporter, &proof);
    let Some(secret) = known.filter(|_| right) else {
        let what = match run {
            None => "the client does not know the server's secret: ask the server's owner for its join string, and join again",
            Some(_) => "the peer does not know the key of a run that this server is in",
        };
        return Ok(refusal(WRONG_SECRET, Fault::WrongSecret(what.to_owned())));
    };
    Ok(ProofAnswer { bytes: acceptance(&secret, run.as_ref(), &exporter), result: Ok(Claim { run, proof }) })
}

/// The bytes of a claim of a client of this software version, on a connection with this exporter.
pub fn claim(secret: &Token, run: Option<&[u8; 16]>, exporter: &[u8; 32], build: &str) -> Vec<u8> {
    let mut claim = Vec::with_capacity(CLAIM_BYTES);
    claim.extend(MAGIC);
    claim.extend(VERSION.to_le_bytes());
    claim.extend([u8::from(run.is_some()), 0]);
    claim.extend(run.unwrap_or(&[0; 16]));
    claim.extend(prove(secret, End::Client, run, exporter));
    claim.extend(build.bytes().take(BUILD_BYTES));
    claim.resize(CLAIM_BYTES, 0);
    claim
}

/// The bytes of the answer to the claim of a client that knows the secret.
pub fn acceptance(secret: &Token, run: Option<&[u8; 16]>, exporter: &[u8; 32]) -> Vec<u8> {
    [&[ACCEPTED][..], &32u16.to_le_bytes(), &prove(secret, End::Server, run, exporter)].concat()
}

/// Proves the secret to the server, and has it do the same.
pub(super) fn show(
    mut stream: TlsStream,
    expected: &Expected<'_>,
    deadline: &Deadline<'_>,
) -> Result<TlsStream, Fault> {
    let exporter = stream.exporter()?;
    let run = expected.run.as_ref();
    write_all(&mut stream, &claim(expected.secret, run, &exporter, BUILD), deadline)?;
    let mut head = [0; 3];
    read_exact(&mut stream, &mut head, deadline)?;
    let length = usize::from(u16::from_le_bytes([head[1], head[2]]));
    if length > REASON_BYTES_MAX {
        return Err(Fault::protocol(format!("an answer of at most {REASON_BYTES_MAX} bytes"), length.to_string()));
    }
    let mut body = vec![0; length];
    read_exact(&mut stream, &mut body, deadline)?;
    let reason = || printable(&String::from_utf8_lossy(&body));
    match head[0] {
        ACCEPTED if proves(expected.secret, End::Server, run, &exporter, &body) => Ok(stream),
        ACCEPTED => Err(Fault::WrongSecret(
            "the server has the right key, but does not know the secret of the join string: do not trust it; ask its owner"
                .to_owned(),
        )),
        WRONG_SECRET => Err(Fault::WrongSecret(reason())),
        _ => Err(Fault::Refused { reason: reason() }),
    }
}
