//! Measures the link to a worker before a run: its round trip, and how fast bytes cross it in each direction.
//!
//! ```text
//! dialing end     Hello (role Probe) ──►   Probe (n bytes, "answer with k") ──►   …   Goodbye ──►
//! listening end   ◄── Welcome              ◄── Probe (k bytes)
//! ```
//!
//! A transfer counts from its first byte to the peer's answer, less one round trip. Transfers double in size until one takes
//! a quarter of a second, so that a slow link is measured in a second and a fast one after its congestion window has opened.
//! [`bandwidth`] measures a link as runs use it, which takes longer.

pub mod bandwidth;

use crate::comm::handshake;
use crate::comm::transport::byte_stream::ByteStream;
use crate::failure::Fault;
use distgpipe_core::wire::{Header, Kind};
use std::time::{Duration, Instant};

/// The largest number of bytes in one transfer.
pub const TRANSFER_BYTES_MAX: usize = 32 << 20;

/// The number of bytes in the first transfer of each direction: a modem delivers it well within [`ANSWER_LIMIT`].
const TRANSFER_BYTES_MIN: usize = 4 << 10;

/// A transfer that takes this long measures the rate well enough.
const TRANSFER_MIN: Duration = Duration::from_millis(250);

/// How many empty transfers measure the round trip; the shortest counts.
const ROUND_TRIPS: usize = 5;

/// How long a listening end answers one probe. A driver that connects meanwhile waits for its turn.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// What a probe has measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkMeasurement {
    /// The time from sending a frame without a body to the arrival of its answer.
    pub round_trip: Duration,
    /// Bytes per second from this end to the worker.
    pub sent_per_s: f64,
    /// Bytes per second from the worker to this end.
    pub received_per_s: f64,
}

impl LinkMeasurement {
    /// The rate of the slower direction, in bytes per second.
    pub fn slower_per_s(&self) -> f64 {
        self.sent_per_s.min(self.received_per_s)
    }
}

/// Measures the link to a peer that has welcomed this end as [`Role::Probe`](distgpipe_core::wire::Role::Probe). `limit` bounds
/// each transfer.
pub fn measure(mut stream: ByteStream, limit: Duration) -> Result<LinkMeasurement, Fault> {
    let filler = filler();
    let mut exchange = |sent: usize, answered: usize| {
        let start = Instant::now();
        send(&mut stream, &filler[..sent], answered, limit)?;
        let answer = handshake::receive(&mut stream, &[Kind::Probe], limit)?;
        match answer.body.len() == answered {
            true => Ok(start.elapsed()),
            false => {
                Err(Fault::protocol(format!("a probe of {answered} bytes"), format!("{} bytes", answer.body.len())))
            }
        }
    };
    let mut round_trip = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        round_trip = round_trip.min(exchange(0, 0)?);
    }
    let sent_per_s = rate(round_trip, |bytes| exchange(bytes, 0))?;
    let received_per_s = rate(round_trip, |bytes| exchange(0, bytes))?;
    handshake::send_text(&mut stream, Kind::Goodbye, &[], limit)?;
    Ok(LinkMeasurement { round_trip, sent_per_s, received_per_s })
}

/// The rate in bytes per second, by transfers that double in size.
fn rate(round_trip: Duration, mut transfer: impl FnMut(usize) -> Result<Duration, Fault>) -> Result<f64, Fault> {
    let mut bytes = TRANSFER_BYTES_MIN;
    loop {
        // A clock that stands still must not make a rate infinite.
        let duration = transfer(bytes)?.saturating_sub(round_trip).max(Duration::from_micros(1));
        if duration >= TRANSFER_MIN || 2 * bytes > TRANSFER_BYTES_MAX {
            return Ok(bytes as f64 / duration.as_secs_f64());
        }
        bytes *= 2;
    }
}

/// Answers the probes of a peer whose handshake is done, until it says goodbye, or for [`ANSWER_LIMIT`].
pub(crate) fn answer(stream: &mut ByteStream) -> Result<(), Fault> {
    let start = Instant::now();
    let filler = filler();
    loop {
        let limit = ANSWER_LIMIT.saturating_sub(start.elapsed());
        if limit.is_zero() {
            return Err(Fault::TimedOut { what: "measuring the link".to_owned(), limit_s: ANSWER_LIMIT.as_secs_f64() });
        }
        let probe = handshake::receive(stream, &[Kind::Probe, Kind::Goodbye], limit)?;
        if probe.header.kind == Kind::Goodbye {
            return Ok(());
        }
        let wanted = usize::try_from(probe.header.step).ok().and_then(|bytes| filler.get(..bytes));
        let wanted = wanted.ok_or_else(|| {
            Fault::protocol(format!("a wish for at most {TRANSFER_BYTES_MAX} bytes"), probe.header.step.to_string())
        })?;
        send(stream, wanted, 0, limit)?;
    }
}

/// Sends a probe that asks for `answered` bytes.
fn send(stream: &mut ByteStream, body: &[u8], answered: usize, limit: Duration) -> Result<(), Fault> {
    let header = Header { step: answered as u64, ..Header::new(Kind::Probe) };
    handshake::send_frame(stream, header, body, limit)
}

/// Bytes that a link which compresses cannot shorten.
fn filler() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(TRANSFER_BYTES_MAX);
    while bytes.len() < TRANSFER_BYTES_MAX {
        state = xorshift(state);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// The next state of the generator xorshift64.
fn xorshift(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ state << 17
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::handshake::{Credentials, Token};
    use crate::driver::serve::{ServeOptions, Server};
    use distgpipe_core::wire::Role;
    use std::sync::atomic::{AtomicBool, Ordering};

    const LIMIT: Duration = Duration::from_secs(60);

    /// A link whose transfers take a round trip and the bytes at this rate.
    fn simulated(per_s: f64, round_trip: Duration) -> impl FnMut(usize) -> Result<Duration, Fault> {
        move |bytes| Ok(round_trip + Duration::from_secs_f64(bytes as f64 / per_s))
    }

    #[test]
    fn the_rate_does_not_depend_on_the_round_trip() {
        for per_s in [2e3, 1e5, 2.5e6, 12.5e6, 1.2e9] {
            for round_trip in [Duration::ZERO, Duration::from_millis(300)] {
                let measured = rate(round_trip, simulated(per_s, round_trip)).unwrap();
                assert!((measured / per_s - 1.0).abs() < 1e-3, "{per_s} per second, {round_trip:?}: {measured}");
            }
        }
    }

    #[test]
    fn a_worker_answers_probes_and_takes_the_next_peer() {
        let token = Token([3; 32]);
        let server = Server::bind(ServeOptions::new("127.0.0.1:0".parse().unwrap(), token)).unwrap();
        let address = server.address().unwrap().to_string();
        let over = AtomicBool::new(false);
        let dial = |token| {
            let credentials = Credentials { run: [0; 16], token };
            handshake::dial(&address, Role::Probe, &credentials, LIMIT)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| server.run(|| over.load(Ordering::Relaxed), |_| {}).unwrap());
            for _ in 0..2 {
                let link = measure(dial(token).unwrap(), LIMIT).unwrap();
                assert!(link.slower_per_s() > 0.0 && link.round_trip > Duration::ZERO, "{link:?}");
            }
            assert!(matches!(dial(Token([4; 32])), Err(Fault::Refused { .. })));
            // A wish for more bytes than a probe may ask for ends the connection, and the worker goes on.
            let mut stream = dial(token).unwrap();
            send(&mut stream, &[], TRANSFER_BYTES_MAX + 1, LIMIT).unwrap();
            assert!(handshake::receive(&mut stream, &[Kind::Probe], LIMIT).is_err());
            measure(dial(token).unwrap(), LIMIT).unwrap();
            over.store(true, Ordering::Relaxed);
        });
    }
}
