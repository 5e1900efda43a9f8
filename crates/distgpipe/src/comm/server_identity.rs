//! What a server is known by: its key and its secret, and the join string that hands both to a client.
//!
//! ```text
//! distgpipe:1:KEY:SECRET:CHECK@HOST:PORT[,HOST:PORT…]
//! ```
//!
//! `KEY` is the server's Ed25519 public key, `SECRET` what its clients prove to know, both as 64 hexadecimal digits. `CHECK` is
//! the first 8 digits of the SHA-256 of everything else, so that a string that was not copied whole is noticed. The server is
//! reached at the first of its addresses that answers.

use crate::comm::handshake::{bytes_of_hex, Token};
use crate::failure::Fault;
use crate::files::{create_private_directory, create_private_part};
use ring::digest;
use ring::signature::{Ed25519KeyPair, KeyPair};
use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

/// An Ed25519 public key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey(pub [u8; 32]);

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = JoinStringError;
    fn from_str(text: &str) -> Result<Self, JoinStringError> {
        bytes_of_hex(text).map(PublicKey).ok_or(JoinStringError::Format)
    }
}

/// How a client reaches a server and knows it, and what it proves to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinString {
    /// The server's addresses, such as `gpu-box:7443`.
    pub addresses: Vec<String>,
    /// The server's public key.
    pub key: PublicKey,
    /// The secret that the server shares with its clients.
    pub secret: Token,
}

/// The text is not a join string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinStringError {
    /// It has another form.
    #[error("expected the line that `distgpipe serve` prints, `distgpipe:1:KEY:SECRET:CHECK@HOST:PORT`")]
    Format,
    /// It is of another version.
    #[error("expected a join string of version {VERSION}, got version {got}: install the same version of distgpipe on both ends")]
    Version {
        /// The version in it.
        got: u32,
    },
    /// A character of it is wrong or missing.
    #[error("the join string is damaged: copy the whole line that `distgpipe serve` prints")]
    Checksum,
}

const PREFIX: &str = "distgpipe:";

/// The version of join strings.
const VERSION: u32 = 1;

/// The most addresses of one server.
const ADDRESSES_MAX: usize = 16;

/// The longest join string, in bytes.
pub const JOIN_STRING_BYTES_MAX: usize = 4096;

impl JoinString {
    /// The text form, which contains the secret.
    pub fn to_text(&self) -> String {
        let addresses = self.addresses.join(",");
        let start = format!("{PREFIX}{VERSION}:{}:{}", self.key, self.secret);
        format!("{start}:{}@{addresses}", check(&start, &addresses))
    }
}

impl FromStr for JoinString {
    type Err = JoinStringError;

    fn from_str(text: &str) -> Result<Self, JoinStringError> {
        let text = text.trim();
        if text.len() > JOIN_STRING_BYTES_MAX {
            return Err(JoinStringError::Format);
        }
        let rest = text.strip_prefix(PREFIX).ok_or(JoinStringError::Format)?;
        let (head, addresses) = rest.split_once('@').ok_or(JoinStringError::Format)?;
        let mut fields = head.split(':');
        match fields.next().and_then(|version| version.parse().ok()) {
            Some(VERSION) => {}
            Some(got) => return Err(JoinStringError::Version { got }),
            None => return Err(JoinStringError::Format),
        }
        let (Some(key), Some(secret), Some(given), None) = (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return Err(JoinStringError::Format);
        };
        if check(&format!("{PREFIX}{VERSION}:{key}:{secret}"), addresses) != given {
            return Err(JoinStringError::Checksum);
        }
        let secret = secret.parse().map_err(|_| JoinStringError::Format)?;
        let addresses: Vec<String> = addresses.split(',').map(str::to_owned).collect();
        let valid = |address: &String| {
            let port = address.rsplit_once(':').map(|(host, port)| (!host.is_empty(), port.parse::<u16>().is_ok()));
            port == Some((true, true)) && !address.contains(|c: char| c.is_whitespace() || c.is_control())
        };
        if addresses.len() > ADDRESSES_MAX || !addresses.iter().all(valid) {
            return Err(JoinStringError::Format);
        }
        Ok(JoinString { addresses, key: key.parse()?, secret })
    }
}

fn check(start: &str, addresses: &str) -> String {
    let digest = digest::digest(&digest::SHA256, format!("{start}@{addresses}").as_bytes());
    digest.as_ref().iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

/// A server's private key, and the secret that it shares with its clients.
#[derive(Clone)]
pub struct ServerIdentity {
    pkcs8: Vec<u8>,
    /// Its public key.
    pub key: PublicKey,
    /// What its clients prove to know.
    pub secret: Token,
}

impl fmt::Debug for ServerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerIdentity").field("key", &self.key).finish_non_exhaustive()
    }
}

/// The largest file of an identity that is read.
const IDENTITY_BYTES_MAX: u64 = 4096;

impl ServerIdentity {
    /// A new key and a new secret.
    pub fn generate() -> Result<Self, Fault> {
        let unavailable = |_| Fault::io("generating a key", io::Error::other("the system's random source failed"));
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).map_err(unavailable)?;
        Self::new(pkcs8.as_ref().to_vec(), Token::random()?)
            .ok_or_else(|| Fault::internal("a valid key", "one that cannot be read back"))
    }

    fn new(pkcs8: Vec<u8>, secret: Token) -> Option<Self> {
        let pair = Ed25519KeyPair::from_pkcs8(&pkcs8).ok()?;
        let key = PublicKey(pair.public_key().as_ref().try_into().ok()?);
        Some(ServerIdentity { pkcs8, key, secret })
    }

    /// The private key in PKCS #8.
    pub(crate) fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    /// Reads the identity in this file. Makes a new one if there is no such file, which its owner alone can read. Of several
    /// processes that do so at once, one makes it, and the others read it.
    pub fn load_or_create(path: &Path) -> Result<Self, Fault> {
        match fs::File::open(path) {
            Ok(file) => return Self::read(path, file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(Fault::io(format!("opening {}", path.display()), e)),
        }
        let identity = Self::generate()?;
        let digits: String = identity.pkcs8.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = format!("key {digits}\nsecret {}\n", identity.secret);
        match store(path, text.as_bytes(), |part| fs::hard_link(part, path).and_then(|()| fs::remove_file(part))) {
            Ok(()) => Ok(identity),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let file = fs::File::open(path).map_err(|e| Fault::io(format!("opening {}", path.display()), e))?;
                Self::read(path, file)
            }
            Err(e) => Err(Fault::io(format!("writing {}", path.display()), e)),
        }
    }

    fn read(path: &Path, file: fs::File) -> Result<Self, Fault> {
        let doing = |e| Fault::io(format!("reading {}", path.display()), e);
        let mode = file.metadata().map_err(doing)?.mode() & 0o777;
        if mode & 0o077 != 0 {
            let wrong = format!("expected a file that its owner alone can read, got mode {mode:o}: run chmod 600");
            return Err(doing(io::Error::other(wrong)));
        }
        let mut text = String::new();
        file.take(IDENTITY_BYTES_MAX).read_to_string(&mut text).map_err(doing)?;
        let mut lines = text.lines();
        let mut field = |name: &str| lines.next().and_then(|line| line.strip_prefix(name)).map(str::trim);
        let pkcs8 = field("key ").and_then(|digits| {
            let bytes = digits.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
            bytes.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect::<Option<Vec<u8>>>()
        });
        let secret = field("secret ").and_then(|digits| digits.parse().ok());
        pkcs8.zip(secret).and_then(|(pkcs8, secret)| Self::new(pkcs8, secret)).ok_or_else(|| {
            doing(io::Error::other(
                "expected the key and the secret of a server: remove the file to make new ones; clients must join again then",
            ))
        })
    }
}

/// Creates the directory of a file, readable by its owner alone, and writes the file whole or not at all: through a new file
/// of mode 0600 whose name nobody can predict.
pub fn write_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    store(path, contents, |part| fs::rename(part, path))
}

/// Writes a new file next to `path`, and has `name_it` give it that name.
fn store(path: &Path, contents: &[u8], name_it: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    create_private_directory(folder)?;
    let (part, mut file) = create_private_part(path)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    let written = written.and_then(|()| name_it(&part));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Barrier;

    /// Two first starts at once each made an identity, and one of them served with keys that were in no file.
    #[test]
    fn several_first_starts_at_once_have_one_identity() {
        let folder = std::env::temp_dir().join(format!("distgpipe-identities-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        for round in 0..10 {
            let (path, barrier) = (folder.join(format!("identity-{round}")), Barrier::new(8));
            let start = || {
                barrier.wait();
                ServerIdentity::load_or_create(&path).unwrap().key
            };
            let keys = std::thread::scope(|scope| {
                let starts: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
                starts.into_iter().map(|start| start.join().unwrap()).collect::<Vec<_>>()
            });
            let kept = ServerIdentity::load_or_create(&path).unwrap().key;
            assert!(keys.iter().all(|&key| key == kept), "{keys:?}, kept {kept}");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 10, "no part file stays");
        fs::remove_dir_all(&folder).unwrap();
    }

    fn join_string() -> JoinString {
        let addresses = vec!["gpu-box:7443".to_owned(), "[2001:db8::1]:7443".to_owned()];
        JoinString { addresses, key: PublicKey([0xab; 32]), secret: Token([0x5e; 32]) }
    }

    #[test]
    fn a_join_string_survives_its_text_form_and_hides_its_secret_from_debug_output() {
        let text = join_string().to_text();
        assert_eq!(text.parse(), Ok(join_string()), "{text}");
        assert_eq!(format!(" {text}\n").parse(), Ok(join_string()));
        assert!(!format!("{:?}", join_string()).contains("5e5e"));
    }

    #[test]
    fn a_join_string_with_any_character_changed_or_missing_is_refused() {
        let text = join_string().to_text();
        for at in 0..text.len() {
            let mut missing = text.clone();
            missing.remove(at);
            assert!(missing.parse::<JoinString>().is_err(), "{missing}");
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'0' { b'1' } else { b'0' };
            let changed = String::from_utf8(changed).unwrap();
            assert!(changed.parse::<JoinString>().is_err(), "{changed}");
        }
        let other = text.replacen(":1:", ":23:", 1).parse::<JoinString>();
        assert_eq!(other, Err(JoinStringError::Version { got: 23 }));
        let said = JoinStringError::Version { got: 23 }.to_string();
        assert!(said.contains("version 1, got version 23"), "{said}");
    }

    #[test]
    fn an_identity_is_made_once_and_only_its_owner_can_read_it() {
        let folder = std::env::temp_dir().join(format!("distgpipe-identity-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let path = folder.join("inner").join("identity");
        let first = ServerIdentity::load_or_create(&path).unwrap();
        let again = ServerIdentity::load_or_create(&path).unwrap();
        assert_eq!((first.key, first.secret), (again.key, again.secret));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no part file stays");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let refused = ServerIdentity::load_or_create(&path).unwrap_err().to_string();
        assert!(refused.contains("mode 644") && refused.contains("chmod 600"), "{refused}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
