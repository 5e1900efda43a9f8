//! The receiving end of a socket, with a watch on what arrives: how fast, and whether anything does at all.

use super::rate::RateMeter;
use crate::comm::arrivals::Receiving;
use crate::comm::notice::Notify;
use crate::comm::traffic::Counters;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::silence::SilenceWatch;
use std::io::{self, Read};
use std::time::{Duration, Instant};

/// A stream that frames are read from.
pub trait FrameSource: Read {
    /// Called when the last byte of a frame has been read, before it is decoded.
    fn end_frame(&mut self) {}
}

/// During the handshake nothing is timed.
impl FrameSource for ByteStream {}

/// The receiving end of a connection.
pub(super) struct Incoming {
    stream: ByteStream,
    counters: Counters,
    meter: RateMeter,
    watch: SilenceWatch,
    /// Whether bytes of the frame have arrived.
    begun: bool,
}

impl Incoming {
    pub fn new(stream: ByteStream, counters: Counters, peer: String, limit: Duration, notify: Notify) -> Self {
        let (meter, watch) = (RateMeter::default(), SilenceWatch::new(peer, limit, notify));
        Incoming { stream, counters, meter, watch, begun: false }
    }

    /// The next read is the first of a frame.
    pub fn begin_frame(&mut self) {
        self.counters.arrivals().begin(Receiving::Nothing);
        self.meter.wait(Instant::now());
        self.watch.restart();
        self.begun = false;
    }

    fn arrived(&mut self, bytes: usize, room: usize) {
        if !self.begun {
            self.begun = true;
            self.counters.arrivals().begin(Receiving::Frame);
        }
        self.meter.read(Instant::now(), bytes, room);
        self.watch.heard();
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(into);
        match &read {
            // The peer may have closed the connection because this process did not run.
            Ok(0) => self.watch.ended(),
            Ok(bytes) => self.arrived(*bytes, into.len()),
            Err(_) => drop(self.watch.nothing_heard()),
        }
        read
    }
}

impl FrameSource for Incoming {
    fn end_frame(&mut self) {
        self.counters.arrivals().begin(Receiving::Decoding);
        if let Some(timed) = self.meter.end_frame() {
            self.counters.arrivals().count(timed.bytes, Duration::from_nanos(timed.ns));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::suspension;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_that_ended_while_this_process_was_suspended_shows_the_suspension() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        drop(listener.accept().unwrap());
        let limit = Duration::from_secs(60);
        let start = Instant::now();
        let mut incoming =
            Incoming::new(stream.into(), Counters::default(), "server".to_owned(), limit, Notify::default());
        std::thread::sleep(suspension::tests::NOTICED);
        assert_eq!(incoming.read(&mut [0; 8]).unwrap(), 0);
        assert!(suspension::last().is_some_and(|last| last.ended > start));
    }
}
