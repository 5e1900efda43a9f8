//! What drives a run: the pipeline that a user holds, and the starting of its workers.

pub mod auto_balance;
pub mod bandwidth;
pub mod builder;
mod endpoint;
pub mod gateway;
pub mod job_limits;
pub mod launch;
pub mod log_queue;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod pipeline;
pub mod profile;
pub mod serve;
mod wiring;
pub mod worker_mode;
