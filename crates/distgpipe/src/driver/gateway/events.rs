//! What a gateway reports to its caller.

use crate::failure::Failure;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

/// Something that a [`Gateway`](super::Gateway) reports. Its text has the control characters of peers escaped.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum GatewayEvent {
    /// A connection was dropped because its handshake failed.
    Rejected(Failure),
    /// A driver was refused, because as many jobs run as the server runs at a time.
    RefusedBusy(SocketAddr),
    /// A client has measured the link to this server.
    Probed(SocketAddr),
    /// A process was started for a run.
    RunStarted {
        /// The first digits of the run's number.
        run: String,
        /// Where its driver is.
        from: SocketAddr,
        /// The number of the process.
        process: u32,
    },
    /// The process of a run wrote a line.
    RunSaid {
        /// The first digits of the run's number.
        run: String,
        /// The line.
        line: String,
    },
    /// The process of a run has ended.
    RunEnded {
        /// The first digits of the run's number.
        run: String,
        /// How long it ran.
        duration: Duration,
        /// How it ended.
        end: String,
    },
}

impl fmt::Display for GatewayEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GatewayEvent::Rejected(failure) => write!(f, "{failure}"),
            GatewayEvent::RefusedBusy(from) => write!(f, "refused {from}: busy"),
            GatewayEvent::Probed(from) => write!(f, "{from} has measured the link"),
            GatewayEvent::RunStarted { run, from, process } => write!(f, "run {run} from {from}: process {process}"),
            GatewayEvent::RunSaid { run, line } => write!(f, "run {run}: {line}"),
            GatewayEvent::RunEnded { run, duration, end } => {
                write!(f, "run {run} ended after {:.1} s: {end}", duration.as_secs_f64())
            }
        }
    }
}
