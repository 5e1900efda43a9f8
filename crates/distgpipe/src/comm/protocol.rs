//! What the driver sends to a worker, and what the worker answers.
//!
//! ```text
//! driver   Job, once ──►  Command 0 ──►          Command 1 ──►          …  Command::Finish ──►
//! worker                            ◄── report 0           ◄── report 1
//! ```
//!
//! A worker in another process gets all of these as JSON. A report has the number of its command.

mod command;
mod job;

pub use command::{Command, Purpose, StepCommand, StepReport, TensorSet};
pub use job::{forward_plan, Job, REPLICAS_MAX};
