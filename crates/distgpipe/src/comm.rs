//! Communication: everything between a stage that sends a tensor and the stage that receives it, and between the driver and
//! its workers.
//!
//! ```text
//!  driver   protocol: Job, Command, StepReport        topology: the members of a run and who is linked to whom
//!
//!  stage ── message ──► transport: memory │ loopback │ tcp ──► admission ──► mailbox ──► stage
//!                       link_codecs: encode by codec_policy      (between processes,
//!                       traffic: count                 tensor_bounds      after a handshake)
//!                       probe: measure the link before        arrivals: time
//!
//!  failures  abort: ends all threads of a run; status, watchdog: find who stalls; timeouts: say when
//!            notice: what the user should know before; suspension: this process itself did not run
//! ```

pub mod abort;
pub mod acceptor;
pub mod admission;
pub mod arrivals;
pub mod codec_policy;
pub mod handshake;
pub mod link_codecs;
pub mod listener;
pub mod mailbox;
pub mod message;
pub mod notice;
pub mod probe;
pub mod protocol;
pub mod server_identity;
pub mod status;
pub mod suspension;
pub mod tensor_bounds;
pub mod timeouts;
pub mod topology;
pub mod traffic;
pub mod transport;
pub mod watchdog;
