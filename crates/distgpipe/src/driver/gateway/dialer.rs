//! Connects the processes of jobs to the other servers of their runs.
//!
//! A job's process has no keys, so it asks its gateway, on this host and with the token of the process: a hello, and then the
//! address of a server of the run. The gateway dials only addresses that its owner has allowed, and proves to that server the
//! key of the run, which both have from the driver.

use super::relay::relay;
use super::runs::Run;
use super::{GatewayEvent, Shared};
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::acceptor::{Acceptor, Arrival, ArrivedPeer, HANDSHAKE_LIMIT};
use crate::comm::handshake::{self, parse_server_address};
use crate::comm::listener::Listener;
use crate::comm::transport::byte_stream::ByteStream;
use crate::comm::transport::tcp::proves_gone;
use crate::comm::transport::tls::Expected;
use crate::engine;
use crate::failure::{printable, Failure, Fault};
use distgpipe_core::wire::{Hello, Kind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// Whether the owner's list contains an address: as `HOST:PORT`, or as `HOST` for all ports.
fn allows(list: &[String], address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    list.iter().any(|allowed| allowed == address || allowed == host)
}

/// Serves the processes of this gateway's jobs until `stop` is set.
pub(super) fn serve(shared: &Arc<Shared>, mut acceptor: Acceptor, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let Some(Arrival::Peer(peer)) = acceptor.next(POLL, &|_| None) else { continue };
        let Some(run) = shared.runs.of_process(&peer.hello) else {
            acceptor.refuse(*peer, "expected the process of a job");
            continue;
        };
        let shared = shared.clone();
        drop(engine::spawn("connection to a server", move || connect(&shared, &run, *peer)));
    }
}

fn connect(shared: &Shared, run: &Arc<Run>, mut peer: ArrivedPeer) {
    let from = peer.from;
    let connected = dial(shared, run, &mut peer).and_then(|server| {
        let process = peer.stream.try_clone().map_err(|e| Fault::io("duplicating a socket", e))?;
        relay(process, server, &run.limits(shared), drop)
    });
    if let Err(fault) = connected {
        // A process that connects again gives up when it is refused, and tries again when the connection just ends.
        if peer.hello.epoch == 0 || proves_gone(&fault) {
            handshake::refuse(&mut peer.stream, fault.to_string(), Duration::from_secs(1));
        }
        let failure = Failure::new(from.to_string(), "connecting a job to another server", fault);
        (shared.report)(&GatewayEvent::Rejected(failure));
    }
}

/// Connects to the server that the process names, and introduces the process to it.
fn dial(shared: &Shared, run: &Run, peer: &mut ArrivedPeer) -> Result<ByteStream, Fault> {
    let target = handshake::receive(&mut peer.stream, &[Kind::Command], HANDSHAKE_LIMIT)?;
    let named = target.text()?;
    let (key, addresses) =
        parse_server_address(named).ok_or_else(|| Fault::protocol("the address of a server", printable(named)))?;
    let allowed: Vec<String> =
        addresses.iter().filter(|address| allows(&shared.options.allow, address)).cloned().collect();
    if allowed.is_empty() {
        let reason = format!(
            "the owner of this server has not allowed it to connect to {}: `distgpipe serve --allow` does",
            printable(&addresses.join(", "))
        );
        return Err(Fault::Refused { reason });
    }
    let expected = Expected { key: &key, secret: run.key(), run: Some(run.number()) };
    let limit = shared.options.limits.timeouts.connect();
    // The process ends its own connection when the run fails.
    let mut server = handshake::dial_server(&allowed, &expected, limit, &AbortFlag::default())?;
    let hello = Hello { token: run.key().0, ..peer.hello.clone() };
    handshake::send_text(&mut server, Kind::Hello, &hello.encode(), limit)?;
    Ok(server)
}

/// Listens for the processes of jobs.
pub(super) fn listen() -> Result<Acceptor, Fault> {
    Acceptor::new(Listener::local()?, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_allowed_whole_or_by_its_host() {
        let list = ["gpu-2:7443".to_owned(), "10.0.0.3".to_owned()];
        for (address, expected) in [
            ("gpu-2:7443", true),
            ("gpu-2:22", false),
            ("10.0.0.3:9000", true),
            ("10.0.0.33:9000", false),
            ("127.0.0.1:22", false),
        ] {
            assert_eq!(allows(&list, address), expected, "{address}");
        }
        assert!(!allows(&[], "gpu-2:7443"));
    }
}
