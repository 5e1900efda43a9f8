//! The bytes of a connection in both directions: plain TCP, or what protects it.
//!
//! Frames and the handshake use a [`ByteStream`] and do not know what is under it. One connection has several handles on one
//! stream, as with [`TcpStream::try_clone`]: its reader and its writer use it at the same time.

use crate::comm::abort::POLL;
use crate::comm::transport::tls::TlsStream;
use crate::failure::Fault;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};

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
    Tls(TlsStream),
}

impl From<TcpStream> for ByteStream {
    fn from(socket: TcpStream) -> Self {
        ByteStream { kind: Kind::Plain(socket) }
    }
}

impl From<TlsStream> for ByteStream {
    fn from(stream: TlsStream) -> Self {
        ByteStream { kind: Kind::Tls(stream) }
    }
}

impl ByteStream {
    /// The socket under the stream, for its addresses and options; its bytes are not those of the stream.
    pub fn socket(&self) -> &TcpStream {
        match &self.kind {
            Kind::Plain(socket) => socket,
            Kind::Tls(stream) => stream.socket(),
        }
    }

    /// Makes the socket blocking, with the short time-outs that all reads and writes of this crate expect.
    pub fn set_up(&self) -> Result<(), Fault> {
        let socket = self.socket();
        let set = socket
            .set_nonblocking(false)
            .and_then(|()| socket.set_read_timeout(Some(POLL)))
            .and_then(|()| socket.set_write_timeout(Some(POLL)))
            .and_then(|()| socket.set_nodelay(true));
        set.map_err(|e| Fault::io("setting up a socket", e))
    }

    /// Another handle on the same stream.
    pub fn try_clone(&self) -> io::Result<Self> {
        match &self.kind {
            Kind::Plain(socket) => Ok(socket.try_clone()?.into()),
            Kind::Tls(stream) => Ok(stream.clone().into()),
        }
    }

    /// Ends one direction of the stream, or both, for all handles. The peer reads what was written before.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match &self.kind {
            Kind::Plain(socket) => socket.shutdown(how),
            Kind::Tls(stream) => stream.shutdown(how),
        }
    }
}

impl Read for ByteStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.kind {
            Kind::Plain(socket) => socket.read(into),
            Kind::Tls(stream) => stream.read(into),
        }
    }
}

impl Write for ByteStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.kind {
            Kind::Plain(socket) => socket.write(from),
            Kind::Tls(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.kind {
            Kind::Plain(socket) => socket.flush(),
            Kind::Tls(stream) => stream.flush(),
        }
    }
}
