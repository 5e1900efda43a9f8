//! Where connections come from: a TCP port, or a socket that only processes of this host can reach.
//!
//! A server and the processes of its jobs use the latter, because it moves bytes with less work than TCP over loopback. Its
//! address is `local:NAME`, with a random name in Linux's abstract namespace, so there is no file to protect or to remove. Like a
//! loopback port, every user of the host can connect to it: whoever connects must show a token.

use crate::comm::handshake;
use crate::comm::transport::byte_stream::ByteStream;
use crate::engine;
use crate::failure::Fault;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddress, UnixListener, UnixStream};
use std::time::Duration;

/// The first word of the address of a local listener.
const SCHEME: &str = "local:";

/// What the ends of a local connection may have written before the other has read it: several pieces as a relay passes them on.
const SEND_BUFFER_BYTES: i32 = 512 << 10;

/// How long connecting may take: a process that is stopped accepts nobody.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Listens for connections.
#[derive(Debug)]
pub enum Listener {
    /// On a TCP port.
    Tcp(TcpListener),
    /// On this host alone.
    Local {
        /// The socket.
        listener: UnixListener,
        /// Its name.
        name: String,
    },
}

/// A connection that a listener has accepted.
pub(super) enum Accepted {
    Tcp(TcpStream),
    Local(UnixStream),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Listener::Tcp(listener)
    }
}

impl Listener {
    /// A local listener with a new name.
    pub fn local() -> Result<Self, Fault> {
        let random: [u8; 16] = handshake::random()?;
        let name = random.iter().fold("distgpipe-".to_owned(), |name, byte| format!("{name}{byte:02x}"));
        let listener = LocalAddress::from_abstract_name(&name).and_then(|address| UnixListener::bind_addr(&address));
        let listener = listener.map_err(|e| Fault::io("listening on this host", e))?;
        Ok(Listener::Local { listener, name })
    }

    /// The address that others connect to.
    pub fn address(&self) -> Result<String, Fault> {
        match self {
            Listener::Tcp(_) => self.tcp_address().map(|address| address.to_string()),
            Listener::Local { name, .. } => Ok(format!("{SCHEME}{name}")),
        }
    }

    /// The address of a TCP port.
    pub fn tcp_address(&self) -> Result<SocketAddr, Fault> {
        match self {
            Listener::Tcp(listener) => {
                listener.local_addr().map_err(|e| Fault::io("reading the listener's address", e))
            }
            Listener::Local { name, .. } => Err(Fault::internal("a TCP port", format!("{SCHEME}{name}"))),
        }
    }

    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => listener.set_nonblocking(true),
            Listener::Local { listener, .. } => listener.set_nonblocking(true),
        }
    }

    /// A connection, which does not block. A local one comes from loopback, and from no port.
    pub(super) fn accept(&self) -> io::Result<(Accepted, SocketAddr)> {
        match self {
            Listener::Tcp(listener) => {
                let (socket, from) = listener.accept()?;
                socket.set_nonblocking(true)?;
                socket.set_nodelay(true)?;
                Ok((Accepted::Tcp(socket), from))
            }
            Listener::Local { listener, .. } => {
                let (socket, _) = listener.accept()?;
                engine::set_send_buffer(socket.as_raw_fd(), SEND_BUFFER_BYTES)?;
                socket.set_nonblocking(true)?;
                Ok((Accepted::Local(socket), SocketAddr::from((Ipv4Addr::LOCALHOST, 0))))
            }
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Listener::Tcp(listener) => listener.as_raw_fd(),
            Listener::Local { listener, .. } => listener.as_raw_fd(),
        }
    }
}

/// Connects to a local listener. Waits up to five seconds while too many connections wait to be accepted there.
pub fn connect_local(address: &str) -> Result<ByteStream, Fault> {
    let name = address.strip_prefix(SCHEME);
    let name = name.ok_or_else(|| Fault::protocol(format!("an address `{SCHEME}NAME`"), format!("`{address}`")))?;
    let set_up = engine::connect_abstract(name.as_bytes(), CONNECT_LIMIT).and_then(|socket| {
        engine::set_send_buffer(socket.as_raw_fd(), SEND_BUFFER_BYTES)?;
        Ok(socket)
    });
    set_up.map(ByteStream::from).map_err(|e| Fault::io("connecting to a process of this host", e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::abort::POLL;
    use crate::comm::acceptor::{Acceptor, Arrival};
    use crate::comm::handshake::{introduce, welcome, Credentials, Token};
    use crate::comm::transport::tcp::Resume;
    use distgpipe_core::wire::Role;
    use std::time::Duration;

    #[test]
    fn a_process_of_this_host_is_introduced_over_a_local_socket() {
        let limit = Duration::from_secs(60);
        let mut acceptor = Acceptor::new(Listener::local().unwrap(), None).unwrap();
        let address = acceptor.listener().address().unwrap();
        let credentials = Credentials { run: [3; 16], token: Token([4; 32]) };
        let dialing = std::thread::spawn(move || {
            introduce(connect_local(&address)?, Role::Driver, &credentials, Resume::first(limit)).map(drop)
        });
        let mut peer = loop {
            match acceptor.next(POLL, &|_| None) {
                Some(Arrival::Peer(peer)) => break peer,
                Some(Arrival::Rejected { fault, .. }) => panic!("{fault}"),
                None => {}
            }
        };
        assert_eq!((peer.hello.run, peer.hello.token), ([3; 16], [4; 32]));
        assert!(peer.from.ip().is_loopback());
        welcome(&mut peer.stream, 1, limit).unwrap();
        dialing.join().unwrap().unwrap();
    }

    #[test]
    fn an_address_of_another_kind_and_one_where_nobody_listens_are_errors() {
        let refused = connect_local("127.0.0.1:7000").err().unwrap().to_string();
        assert!(refused.contains("expected an address `local:NAME`"), "{refused}");
        assert!(matches!(connect_local("local:distgpipe-nobody"), Err(Fault::Io { .. })));
        let two = [Listener::local().unwrap(), Listener::local().unwrap()].map(|one| one.address().unwrap());
        assert_ne!(two[0], two[1]);
    }
}
