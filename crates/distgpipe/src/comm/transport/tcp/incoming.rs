//! The receiving end of a socket, with a watch on what arrives: how fast, and whether anything does at all.

use super::rate::RateMeter;
use super::HEARTBEAT;
use crate::comm::arrivals::Receiving;
use crate::comm::notice::{Notice, Notify};
use crate::comm::suspension::{self, IdleTimer};
use crate::comm::traffic::Counters;
use crate::comm::transport::byte_stream::ByteStream;
use std::io::{self, Read};
use std::time::{Duration, Instant};

/// How long a peer may be silent before it is reported, if it counts as dead after `limit`: five seconds or a quarter of the
/// limit, but longer than a peer with nothing to send pauses between two heartbeats.
fn silence_reported(limit: Duration) -> Duration {
    Duration::from_secs(5).min(limit / 4).max(2 * HEARTBEAT)
}

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
    peer: String,
    /// A peer that is silent for so long counts as dead.
    limit: Duration,
    notify: Notify,
    idle: IdleTimer,
    /// When a silence began that has been reported.
    silent: Option<Instant>,
    /// Whether bytes of the frame have arrived.
    begun: bool,
}

impl Incoming {
    pub fn new(stream: ByteStream, counters: Counters, peer: String, limit: Duration, notify: Notify) -> Self {
        let (meter, idle) = (RateMeter::default(), IdleTimer::new());
        Incoming { stream, counters, meter, peer, limit, notify, idle, silent: None, begun: false }
    }

    /// The next read is the first of a frame.
    pub fn begin_frame(&mut self) {
        self.counters.arrivals().begin(Receiving::Nothing);
        self.meter.wait(Instant::now());
        self.idle.restart();
        self.begun = false;
    }

    fn arrived(&mut self, bytes: usize, room: usize) {
        if !self.begun {
            self.begun = true;
            self.counters.arrivals().begin(Receiving::Frame);
        }
        self.meter.read(Instant::now(), bytes, room);
        self.idle.progress();
        if let Some(since) = self.silent.take() {
            self.notify.send(&Notice::Back { worker: self.peer.clone(), silent_s: since.elapsed().as_secs_f64() });
        }
        self.report_suspension();
    }

    fn nothing_arrived(&mut self) {
        let silence = self.idle.elapsed();
        self.report_suspension();
        if self.silent.is_none() && silence >= silence_reported(self.limit) {
            self.silent = Instant::now().checked_sub(silence);
            let (silent_s, limit_s) = (silence.as_secs_f64(), self.limit.as_secs_f64());
            self.notify.send(&Notice::Silent { worker: self.peer.clone(), silent_s, limit_s });
        }
    }

    fn report_suspension(&self) {
        if let Some(missed) = suspension::news() {
            self.notify.send(&Notice::Suspended { seconds: missed.duration.as_secs_f64() });
        }
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(into);
        match &read {
            // The peer may have closed the connection because this process did not run.
            Ok(0) => {
                self.idle.elapsed();
                self.report_suspension();
            }
            Ok(bytes) => self.arrived(*bytes, into.len()),
            Err(_) => self.nothing_arrived(),
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
    use std::net::{TcpListener, TcpStream};

    /// With `--peer-timeout 1`, every pause between two heartbeats was once reported as a silence, and its end as a return.
    #[test]
    fn a_pause_between_two_heartbeats_is_no_silence() {
        for (limit_s, reported_s) in [(0.05, 0.5), (0.9, 0.5), (2.0, 0.5), (4.0, 1.0), (20.0, 5.0), (1e7, 5.0)] {
            assert_eq!(silence_reported(Duration::from_secs_f64(limit_s)).as_secs_f64(), reported_s, "{limit_s}");
        }
    }

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
