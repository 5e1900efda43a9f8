//! Errors of a running pipeline.
//!
//! A [`Fault`] is an error at one place, with its source. A [`Failure`] is what the user reads: which worker or link had
//! the fault, and what it was doing. It is text, because it travels to the other processes of the run. The first failure
//! of a run ends it; see [`AbortFlag`](crate::comm::abort::AbortFlag).

use crate::engine::ThreadError;
use distgpipe_core::codec::CodecError;
use distgpipe_core::schedule::Action;
use distgpipe_core::wire::{AbortNotice, WireError};
use std::fmt;
use std::time::Duration;

/// The error behind a fault. Text converts into one.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error at one place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// libtorch returned an error.
    #[error("libtorch: {}", first_line(.0))]
    Engine(#[source] tch::TchError),
    /// A thread would record a CUDA graph in a stream that others use.
    #[error(
        "{device} has no stream left for CUDA graphs of this worker: the threads of this process hold all that they may. Put fewer workers on \
         it, run them in several processes, let each compute fewer micro-batches at a time, or let graphs be optional (`auto`)"
    )]
    NoStream {
        /// The GPU.
        device: String,
    },
    /// Kernels of this crate cannot be compiled or launched on a GPU.
    #[error("{0}")]
    Kernels(String),
    /// A layer failed, or broke its contract.
    #[error("layer `{layer}`: {source}")]
    Layer {
        /// The name of the layer, as in the model.
        layer: String,
        /// What went wrong in it.
        source: BoxError,
    },
    /// A device cannot be used.
    #[error("cannot open device {device}: {source}")]
    Device {
        /// The device as it was named.
        device: String,
        /// Why the device does not open.
        source: BoxError,
    },
    /// The model cannot be built, or its layers do not fit together.
    #[error("the model is not valid: {}", printable_lines(.0))]
    InvalidModel(#[source] BoxError),
    /// A remote worker cannot build the model of its job, because it does not know its name.
    #[error(
        "expected a model that this worker knows, got `{name}`: layers of your own need a worker of your own program: call \
         `distgpipe::worker_mode(models)` first in its `main`, with a function that builds `{name}`, and start `PROGRAM worker` here",
        name = printable(.got)
    )]
    UnknownModel {
        /// The name of the model.
        got: String,
    },
    /// The settings of the run contradict each other, or are out of range. A remote worker checks those it receives.
    #[error("{setting} is not valid: {}", printable_lines(.source))]
    InvalidJob {
        /// The setting, such as `the plan` or `replicas`.
        setting: &'static str,
        /// What is wrong with it.
        source: BoxError,
    },
    /// A codec could not encode or decode a tensor.
    #[error("codec error in {tensor}: {source}")]
    Codec {
        /// The message the tensor belongs to.
        tensor: String,
        /// What the codec found.
        source: CodecError,
    },
    /// A thread of the run panicked.
    #[error("panicked: {0}")]
    Panic(String),
    /// No worker finished an action for too long, and this one is the cause.
    #[error("made no progress for {limit_s:.1} s; if the work is merely slow, raise `Timeouts::stall_s`")]
    Stalled {
        /// The time-out in seconds.
        limit_s: f64,
    },
    /// A job on a server made no progress for too long.
    #[error("made no progress for {limit_s:.0} s, which is the limit of this server: its owner can raise it")]
    Idle {
        /// The limit in seconds.
        limit_s: f64,
    },
    /// Nothing arrived from a peer for too long.
    #[error("nothing arrived for {limit_s:.1} s, not even a heartbeat: the process is suspended or overloaded, or the network is down; to wait longer, raise `Timeouts::silence_s`")]
    Silent {
        /// The time-out in seconds.
        limit_s: f64,
    },
    /// A peer did not read what was sent for too long.
    #[error("it read nothing of what was sent for {limit_s:.1} s: the process is suspended or overloaded, or the network is down; to wait longer, raise `Timeouts::silence_s`")]
    NotReading {
        /// The time-out in seconds.
        limit_s: f64,
    },
    /// A peer did not answer in time.
    #[error("{what} took longer than {limit_s:.1} s: the peer is suspended or overloaded, or the network is down")]
    TimedOut {
        /// The operation that timed out.
        what: String,
        /// The time-out in seconds.
        limit_s: f64,
    },
    /// A worker did not accept a run in time.
    #[error(
        "no answer within {limit_s:.1} s (`Timeouts::connect_s`): the worker is suspended or overloaded, the network is down, or \
         another program listens there"
    )]
    NoAnswer {
        /// The time-out in seconds.
        limit_s: f64,
    },
    /// No process listens at a worker's address.
    #[error("no worker listens at {address}: start `distgpipe worker` or your own program's worker there, or check the address")]
    NobodyListens {
        /// The address of the worker.
        address: String,
    },
    /// A worker is in another run.
    #[error("{text}: wait until that run is over, or start another worker")]
    Busy {
        /// Since when, and for whom.
        text: String,
    },
    /// A worker refused the connection or the run.
    #[error("the connection was refused: {reason}")]
    Refused {
        /// The reason that the peer gave, or that this end gave to the peer.
        reason: String,
    },
    /// The server at an address is not the one of the join string.
    #[error(
        "the server has another key than the join string says: another machine answers in its place, or it was set up anew; ask \
         its owner for its join string, and do not go on without"
    )]
    WrongKey,
    /// One end of a connection to a server does not know the secret of the join string.
    #[error("{0}")]
    WrongSecret(String),
    /// TLS failed.
    #[error("TLS: {0}: the peer must be a server that `distgpipe serve` runs, of the same version as this end")]
    Tls(#[source] rustls::Error),
    /// A peer sent bytes that are not a frame.
    #[error("invalid frame: {0}")]
    Wire(#[from] WireError),
    /// A peer sent a valid frame whose content cannot be decoded.
    #[error("cannot decode {what}: {}", printable(&.source.to_string()))]
    Malformed {
        /// The content, such as `a report`.
        what: &'static str,
        /// The error of the decoder.
        source: BoxError,
    },
    /// A peer sent a well-formed message that has no place here.
    #[error("expected {}, got {}", printable(.expected), printable(.got))]
    Protocol {
        /// The messages that would be valid here.
        expected: String,
        /// What the peer sent.
        got: String,
    },
    /// An invariant of this crate does not hold.
    #[error("internal error: expected {expected}, got {got}; this is a bug in distgpipe, please report it")]
    Internal {
        /// The invariant of this crate.
        expected: String,
        /// What does not hold.
        got: String,
    },
    /// Something needs more memory than there is. It was not allocated.
    #[error("{what} takes {} of memory, and this host has {} left: {remedy}", decimal(*needs_bytes), decimal(*available_bytes))]
    Memory {
        /// What needs the memory.
        what: String,
        /// How much it needs.
        needs_bytes: u64,
        /// How much this process can still get.
        available_bytes: u64,
        /// How to need less.
        remedy: String,
    },
    /// The connection ended unexpectedly.
    #[error("the connection closed unexpectedly: the process ended or was killed, or the network is down")]
    Lost,
    /// The operating system did not start a thread.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// The operating system returned an error.
    #[error("{doing}: {source}")]
    Io {
        /// The operation, such as `connecting to 127.0.0.1:7000`.
        doing: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The MPI library returned an error.
    #[cfg(feature = "mpi")]
    #[error("{doing}: MPI: {text}")]
    Mpi {
        /// The operation, such as `sending`.
        doing: &'static str,
        /// The library's error.
        text: String,
    },
    /// Another worker or thread failed first, and reported this.
    #[error("{0}")]
    Reported(Failure),
    /// A fault that a test injected.
    #[error("injected fault: {0}")]
    Injected(String),
}

impl Fault {
    /// An error of the operating system during an operation, such as `reading from the peer`.
    pub fn io(doing: impl Into<String>, source: std::io::Error) -> Self {
        Fault::Io { doing: doing.into(), source }
    }

    pub(crate) fn no_stream(device: usize) -> Self {
        Fault::NoStream { device: format!("cuda:{device}") }
    }

    /// An error that the C++ shim returned as text.
    pub(crate) fn engine(message: String) -> Self {
        Fault::Engine(tch::TchError::Torch(message))
    }

    /// An error in a layer. Layers of your own return this, or use `?` on libtorch's errors.
    pub fn layer(layer: impl Into<String>, source: impl Into<BoxError>) -> Self {
        Fault::Layer { layer: layer.into(), source: source.into() }
    }

    /// A model that cannot be built, or whose layers do not fit together.
    pub fn invalid_model(source: impl Into<BoxError>) -> Self {
        Fault::InvalidModel(source.into())
    }

    /// A setting of the run that is not valid.
    pub fn invalid_job(setting: &'static str, source: impl Into<BoxError>) -> Self {
        Fault::InvalidJob { setting, source: source.into() }
    }

    /// Content from a peer that cannot be decoded.
    pub fn malformed(what: &'static str, source: impl Into<BoxError>) -> Self {
        Fault::Malformed { what, source: source.into() }
    }

    /// A well-formed message from a peer that has no place here.
    pub fn protocol(expected: impl Into<String>, got: impl Into<String>) -> Self {
        Fault::Protocol { expected: expected.into(), got: got.into() }
    }

    /// A broken invariant of this crate, which no peer and no user can cause.
    pub fn internal(expected: impl Into<String>, got: impl Into<String>) -> Self {
        Fault::Internal { expected: expected.into(), got: got.into() }
    }
}

impl From<tch::TchError> for Fault {
    fn from(error: tch::TchError) -> Self {
        Fault::Engine(error)
    }
}

/// A number of bytes for people, in powers of 1000.
fn decimal(bytes: u64) -> String {
    let bytes = bytes as f64;
    let units = [(1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")];
    match units.iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{:.1} {unit}", bytes / size),
        None => format!("{bytes} bytes"),
    }
}

/// libtorch's message without the C++ stack trace that follows it.
fn first_line(error: &tch::TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// The phase of a failure that ended the connection to a worker.
const LOST_CONNECTION: &str = "lost connection";

/// The phase of a failure that a worker's message caused.
const REJECTED_MESSAGE: &str = "rejected message";

/// The phase of a failure to join a worker that is in another run.
const BUSY: &str = "busy";

/// The phase of a failure of a process that did not run for too long.
const SUSPENDED: &str = "suspended";

/// The first fault of a run: which worker or link had it, and what that worker was doing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Failure {
    /// The name of the worker at fault, or the link, such as `the link client → server`.
    pub worker: String,
    /// What it was doing: an action such as `1F3`, or a phrase that follows "while", such as `building its partitions`.
    pub phase: String,
    /// What went wrong and what to do about it.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { worker, phase, message } = self;
        match phase.as_str() {
            LOST_CONNECTION => write!(f, "lost the connection to {worker}: {message}"),
            REJECTED_MESSAGE => write!(f, "rejected a message from {worker}: {message}"),
            BUSY => write!(f, "{worker} has been {message}"),
            SUSPENDED => write!(f, "{worker} was suspended: {message}"),
            action if action.parse::<Action>().is_ok() => {
                write!(f, "{worker} failed while running {action}: {message}")
            }
            phrase => write!(f, "{worker} failed while {phrase}: {message}"),
        }
    }
}

impl Failure {
    /// The failure of a worker in a phase; see [`Failure::phase`]. A fault that only passes on a failure of another thread
    /// or worker keeps that failure.
    pub fn new(worker: impl Into<String>, phase: impl Into<String>, fault: Fault) -> Self {
        match fault {
            Fault::Reported(first) => first,
            Fault::Busy { .. } => Failure { worker: worker.into(), phase: BUSY.to_owned(), message: fault.to_string() },
            fault => Failure { worker: worker.into(), phase: phase.into(), message: fault.to_string() },
        }
    }

    /// The failure of a worker whose process did not run for so long that the others gave it up.
    pub(crate) fn suspended(worker: impl Into<String>, missed: Duration, silence: Duration) -> Self {
        let (missed, silence) = (missed.as_secs_f64(), silence.as_secs_f64());
        let message = format!(
            "this process did not run for {missed:.1} s (it was stopped, or its machine slept or was overloaded), and the other \
             workers wait for {silence:.1} s; to have them wait longer, raise `Timeouts::silence_s` or `Timeouts::reconnect_s`"
        );
        Failure { worker: worker.into(), phase: SUSPENDED.to_owned(), message }
    }

    /// Whether a worker could not be joined because it is in another run, so that a later try may succeed.
    pub fn is_busy(&self) -> bool {
        self.phase == BUSY
    }

    /// Whether the connection to a worker ended.
    pub(crate) fn is_lost_connection(&self) -> bool {
        self.phase == LOST_CONNECTION
    }

    /// The failure of the connection to a worker: the connection broke, or the worker sent something invalid.
    pub(crate) fn connection(worker: impl Into<String>, fault: Fault) -> Self {
        match fault {
            Fault::Lost => Failure {
                worker: worker.into(),
                phase: LOST_CONNECTION.to_owned(),
                message: "the process ended or was killed, or the network is down".to_owned(),
            },
            Fault::Io { .. } | Fault::Silent { .. } | Fault::NotReading { .. } | Fault::Refused { .. } => {
                Failure::new(worker, LOST_CONNECTION, fault)
            }
            Fault::Busy { text } => {
                let reason = format!("it is {text}");
                Failure::new(worker, LOST_CONNECTION, Fault::Refused { reason })
            }
            fault => Failure::new(worker, REJECTED_MESSAGE, fault),
        }
    }

    /// The failure of a connection that broke because of `fault` and was not restored in time.
    pub(crate) fn not_back(worker: impl Into<String>, fault: &Fault, limit: Duration) -> Self {
        let broke = match fault {
            Fault::Lost => "the process ended or was killed, or the network is down".to_owned(),
            fault => fault.to_string(),
        };
        let message = format!(
            "{broke}; it was not restored within {:.1} s; to wait longer, raise `Timeouts::reconnect_s`",
            limit.as_secs_f64()
        );
        Failure { worker: worker.into(), phase: LOST_CONNECTION.to_owned(), message }
    }

    /// The notice that is sent to the other processes of the run.
    pub fn notice(&self) -> AbortNotice {
        AbortNotice { worker: self.worker.clone(), phase: self.phase.clone(), message: self.message.clone() }
    }
}

impl From<AbortNotice> for Failure {
    fn from(notice: AbortNotice) -> Self {
        let AbortNotice { worker, phase, message } = notice;
        Failure { worker: printable(&worker), phase: printable(&phase), message: printable(&message) }
    }
}

/// Whether a character is invisible, or makes a terminal show the text after it in another order.
fn changes_direction(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Text from another process with its control characters escaped: they could move the cursor of a terminal, or hide text.
pub(crate) fn printable(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut escaped, c| {
        match c.is_control() || changes_direction(c) {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
        escaped
    })
}

/// As [`printable`], for an error of several lines, such as that of a plan.
fn printable_lines(error: &BoxError) -> String {
    error.to_string().lines().map(printable).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A decoder repeats what it could not decode: the log of a worker once had it as it was.
    #[test]
    fn text_of_a_peer_in_an_error_has_its_control_characters_escaped() {
        let text = "\u{1b}[2J\u{202e}";
        let unknown = serde_json::from_str::<crate::model::loss::Loss>("\"\\u001b[2J\"").unwrap_err();
        assert!(unknown.to_string().contains('\u{1b}'), "{unknown}");
        for fault in [
            Fault::malformed("the job", unknown),
            Fault::protocol(text, text),
            Fault::invalid_job("the plan", text),
            Fault::invalid_model(text),
            Fault::UnknownModel { got: text.to_owned() },
        ] {
            let said = fault.to_string();
            assert!(!said.contains(['\u{1b}', '\u{202e}']) && said.contains("\\u{1b}[2J"), "{said}");
        }
        assert_eq!(Fault::invalid_job("the plan", "a\n  b").to_string(), "the plan is not valid: a\n  b");
    }

    #[test]
    fn a_failure_reads_as_a_sentence() {
        let panic = || Fault::Panic("oh".to_owned());
        for (failure, expected) in [
            (Failure::new("server", "1F3", panic()), "server failed while running 1F3: panicked: oh"),
            (Failure::new("server", "1F3<0", panic()), "server failed while running 1F3<0: panicked: oh"),
            (
                Failure::new("server", "building its partitions", panic()),
                "server failed while building its partitions: panicked: oh",
            ),
            (
                Failure::connection("server", Fault::Lost),
                "lost the connection to server: the process ended or was killed, or the network is down",
            ),
            (
                Failure::new("server", "joining the run", Fault::Busy { text: "busy since noon".to_owned() }),
                "server has been busy since noon: wait until that run is over, or start another worker",
            ),
            (
                Failure::connection("server", Fault::protocol("a report", "a job")),
                "rejected a message from server: expected a report, got a job",
            ),
        ] {
            assert_eq!(failure.to_string(), expected);
            assert_eq!(Failure::from(failure.notice()).to_string(), expected, "after a journey over the network");
        }
    }

    /// A worker that receives an abort notice passes it on under the name of the worker that failed.
    #[test]
    fn a_failure_of_another_worker_keeps_its_name() {
        let first = Failure::new("server", "1F3", Fault::Panic("oh".to_owned()));
        assert_eq!(Failure::new("client", "2F3", Fault::Reported(first.clone())), first);
        assert_eq!(Failure::connection("client", Fault::Reported(first.clone())), first);
    }

    /// An abort notice is printed on the terminals of all workers.
    #[test]
    fn control_characters_of_a_peer_are_escaped() {
        let notice =
            AbortNotice {
                worker: "server\r".into(), phase: "1F0".into(), message: "\u{1b}[2J\nall is well, é".into()
            };
        let said = Failure::from(notice).to_string();
        assert_eq!(said, "server\\r failed while running 1F0: \\u{1b}[2J\\nall is well, é");
    }
}
