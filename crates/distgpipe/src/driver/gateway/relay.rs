//! Passes the bytes of a connection on, in both directions, between a client and the process of its job.

use crate::comm::transport::byte_stream::ByteStream;
use crate::engine;
use crate::failure::Fault;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The bytes that each direction holds at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// How long the other direction may take to end after one has.
const HALF_CLOSED_LIMIT: Duration = Duration::from_secs(5);

/// When a relay ends besides the end of both directions.
#[derive(Clone, Debug)]
pub(super) struct RelayLimits {
    /// Set when the process of the job has ended, or must.
    pub stop: Arc<AtomicBool>,
    /// How long a direction may be silent. Both ends send heartbeats, except for a while at the beginning.
    pub silence: Duration,
}

/// How a client's connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientEnd {
    /// The client ended it: the run is over.
    Cleanly,
    /// The client's host closed or reset it without a word of the client: the client was killed, or something on the way cut it.
    Broken,
    /// Nothing came any more: the network is down, or the client or its host is suspended.
    Silent,
}

/// Returns when both directions have ended. Calls `client_ended` as soon as the client's has.
pub(super) fn relay(
    client: ByteStream,
    worker: ByteStream,
    limits: &RelayLimits,
    client_ended: impl FnOnce(ClientEnd) + Send + 'static,
) -> Result<(), Fault> {
    let cloned = |stream: &ByteStream| stream.try_clone().map_err(|e| Fault::io("duplicating a socket", e));
    client.set_up()?;
    worker.set_up()?;
    let (from_client, to_worker) = (cloned(&client)?, cloned(&worker)?);
    let (from_worker, to_client) = (cloned(&worker)?, cloned(&client)?);
    let (upstream_limits, downstream_limits) = (limits.clone(), limits.clone());
    // Set before this function closes the client's connection, because the process has given it up.
    let given_up = Arc::new(AtomicBool::new(false));
    let is_given_up = Arc::clone(&given_up);
    let upstream = engine::spawn("from a client", move || {
        let end = pump(from_client, to_worker, &upstream_limits);
        client_ended(if is_given_up.load(Ordering::Acquire) { ClientEnd::Silent } else { end });
    })?;
    let downstream = engine::spawn("to a client", move || pump(from_worker, to_client, &downstream_limits))?;
    let mut one_ended: Option<Instant> = None;
    while !(upstream.is_finished() && downstream.is_finished()) {
        if upstream.is_finished() || downstream.is_finished() {
            let since = *one_ended.get_or_insert_with(Instant::now);
            let stopped = limits.stop.load(Ordering::Relaxed);
            // The last bytes of a process that has ended may take long on a slow link. `pump` bounds the time without progress.
            let over = match downstream.is_finished() {
                true => stopped || since.elapsed() >= HALF_CLOSED_LIMIT,
                false => !stopped && since.elapsed() >= HALF_CLOSED_LIMIT,
            };
            if over {
                given_up.store(downstream.is_finished() && !stopped, Ordering::Release);
                let _ = client.shutdown(Shutdown::Both);
                let _ = worker.shutdown(Shutdown::Both);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Passes bytes on until the end of the stream, and then ends the other one. Returns how the stream ended.
fn pump(mut from: ByteStream, mut to: ByteStream, limits: &RelayLimits) -> ClientEnd {
    let copied = copy(&mut from, &mut to, limits);
    let _ = to.shutdown(Shutdown::Write);
    match copied {
        Ok(()) => ClientEnd::Cleanly,
        Err(e) if waits(&e) => ClientEnd::Silent,
        Err(_) => ClientEnd::Broken,
    }
}

/// Whether a call on a socket has found nothing to do yet.
fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

fn copy(from: &mut ByteStream, to: &mut ByteStream, limits: &RelayLimits) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut last = Instant::now();
    let waits = |e: &io::Error, last: Instant| waits(e) && last.elapsed() < limits.silence;
    loop {
        let mut rest = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => &buffer[..read],
            // What has been read is passed on; nothing more comes.
            Err(e) if waits(&e, last) && !limits.stop.load(Ordering::Relaxed) => continue,
            Err(e) => return Err(e),
        };
        last = Instant::now();
        while !rest.is_empty() {
            match to.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => (rest, last) = (&rest[written..], Instant::now()),
                Err(e) if waits(&e, last) => {}
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// A client with a slow link once lost the last bytes of a job, because the end of the process ended the relay.
    #[test]
    fn what_a_process_has_written_reaches_the_client_after_its_end() {
        let (mut client, client_end) = pair();
        let (mut process, process_end) = pair();
        let limits = RelayLimits { stop: Arc::default(), silence: Duration::from_secs(60) };
        let of_relay = limits.clone();
        let relaying = std::thread::spawn(move || relay(client_end.into(), process_end.into(), &of_relay, drop));
        // As much as all buffers on the way hold, because the client reads nothing yet.
        process.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut written = 0;
        while let Ok(taken) = process.write(&[7; 1 << 16]) {
            written += taken as u64;
        }
        drop(process);
        limits.stop.store(true, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(io::copy(&mut client, &mut io::sink()).unwrap(), written);
        drop(client);
        relaying.join().unwrap().unwrap();
    }
}
