//! The bytes of a connection in both directions: plain TCP, what protects it, or a socket of this host.
//!
//! Frames and the handshake use a [`ByteStream`] and do not know what is under it. One connection has several handles on one
//! stream, as with [`TcpStream::try_clone`]: its reader and its writer use it at the same time.

use crate::comm::abort::POLL;
use crate::comm::transport::tls::TlsStream;
use crate::failure::Fault;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// A handle on a connected stream of bytes. Reads and writes return within about [`POLL`] with
/// [`WouldBlock`](io::ErrorKind::WouldBlock) or [`TimedOut`](io::ErrorKind::TimedOut) if nothing can be read or written, once
/// [`set_up`](Self::set_up) has been called.
#[derive(Debug)]
pub struct ByteStream {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Plain(TcpStream),
    Local(UnixStream),
    Tls(TlsStream),
}

impl From<TcpStream> for ByteStream {
    fn from(socket: TcpStream) -> Self {
        ByteStream { kind: Kind::Plain(socket) }
    }
}

impl From<UnixStream> for ByteStream {
    fn from(socket: UnixStream) -> Self {
        ByteStream { kind: Kind::Local(socket) }
    }
}

impl From<TlsStream> for ByteStream {
    fn from(stream: TlsStream) -> Self {
        ByteStream { kind: Kind::Tls(stream) }
    }
}

impl ByteStream {
    /// Makes the socket blocking, with the short time-outs that all reads and writes of this crate expect.
    pub fn set_up(&self) -> Result<(), Fault> {
        let timed = match &self.kind {
            Kind::Local(socket) => {
                socket.set_read_timeout(Some(POLL)).and_then(|()| socket.set_write_timeout(Some(POLL)))
            }
            Kind::Plain(socket) => set_up_tcp(socket),
            Kind::Tls(stream) => set_up_tcp(stream.socket()),
        };
        timed.and_then(|()| self.set_nonblocking(false)).map_err(|e| Fault::io("setting up a socket", e))
    }

    /// Whether reads and writes return at once if nothing can be read or written.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match &self.kind {
            Kind::Plain(socket) => socket.set_nonblocking(nonblocking),
            Kind::Local(socket) => socket.set_nonblocking(nonblocking),
            Kind::Tls(stream) => stream.socket().set_nonblocking(nonblocking),
        }
    }

    /// Another handle on the same stream.
    pub fn try_clone(&self) -> io::Result<Self> {
        match &self.kind {
            Kind::Plain(socket) => Ok(socket.try_clone()?.into()),
            Kind::Local(socket) => Ok(socket.try_clone()?.into()),
            Kind::Tls(stream) => Ok(stream.clone().into()),
        }
    }

    /// Ends one direction of the stream, or both, for all handles. The peer reads what was written before.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match &self.kind {
            Kind::Plain(socket) => socket.shutdown(how),
            Kind::Local(socket) => socket.shutdown(how),
            Kind::Tls(stream) => stream.shutdown(how),
        }
    }
}

fn set_up_tcp(socket: &TcpStream) -> io::Result<()> {
    socket.set_read_timeout(Some(POLL))?;
    socket.set_write_timeout(Some(POLL))?;
    socket.set_nodelay(true)
}

/// The socket under the stream, to wait for it.
impl AsRawFd for ByteStream {
    fn as_raw_fd(&self) -> RawFd {
        match &self.kind {
            Kind::Plain(socket) => socket.as_raw_fd(),
            Kind::Local(socket) => socket.as_raw_fd(),
            Kind::Tls(stream) => stream.socket().as_raw_fd(),
        }
    }
}

impl Read for ByteStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.kind {
            Kind::Plain(socket) => socket.read(into),
            Kind::Local(socket) => socket.read(into),
            Kind::Tls(stream) => stream.read(into),
        }
    }
}

impl Write for ByteStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.kind {
            Kind::Plain(socket) => socket.write(from),
            Kind::Local(socket) => socket.write(from),
            Kind::Tls(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.kind {
            Kind::Plain(socket) => socket.flush(),
            Kind::Local(socket) => socket.flush(),
            Kind::Tls(stream) => stream.flush(),
        }
    }
}
