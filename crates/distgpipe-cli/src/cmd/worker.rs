//! `distgpipe worker`: a process that runs partitions for drivers that have its token.

use crate::exit::usage;
use crate::files::warn_if_others_read;
use crate::report;
use crate::signals;
use distgpipe::driver::worker_mode::{self, WorkerFlags, WorkerModeError, TOKEN_VARIABLE};
use distgpipe::engine::exit_at_once;
use distgpipe::{zoo, Token};
use std::path::{Path, PathBuf};

/// Flags of `distgpipe worker`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  On the server:
      distgpipe worker --listen 0.0.0.0:7000 --expose --token-file token.txt
  On the client, which has the data:
      distgpipe train --place client,server,client --workers 10.0.0.2:7000 --token-file token.txt

Connections are not encrypted: between machines, use `distgpipe serve` unless you trust the network.
The worker needs no configuration: the driver sends the model and the plan.
A program with layers of its own is its own worker: `PROGRAM worker`, with the same flags (docs/library.md).
It prints `listening ADDRESS` on standard output once it accepts connections.
A token is 64 hexadecimal digits; `openssl rand -hex 32` creates one.")]
pub struct WorkerArgs {
    /// Address to listen on; with port 0, the system chooses a port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    listen: String,
    /// Allow an address that other machines can reach; network traffic is not encrypted
    #[arg(long)]
    expose: bool,
    /// File whose first line is the token [default: the environment variable DISTGPIPE_TOKEN, or a new token, which is printed]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Exit after the first job
    #[arg(long)]
    once: bool,
    /// Started by a driver on this host: read the token from standard input, and exit when it closes
    #[arg(long, hide = true)]
    child: bool,
    /// Started by `distgpipe serve`: the limits of the job, as JSON
    #[arg(long, hide = true, value_name = "JSON")]
    limits: Option<String>,
}

/// Serves until killed, or until the first job is done with `--once`.
pub fn run(args: WorkerArgs) -> anyhow::Result<()> {
    let WorkerArgs { listen, expose, token_file, once, child, limits } = args;
    let limits = limits.as_deref().map(worker_mode::limits_of).transpose().map_err(cli_error)?;
    if child {
        signals::leave_first_to_driver()?;
    }
    let worker =
        WorkerFlags { listen, expose, token_file, once, child, limits, ..WorkerFlags::default() }.start(zoo::build);
    let worker = worker.map_err(cli_error)?;
    if let Some(token) = worker.new_token() {
        let address = worker.address().map_err(cli_error)?;
        report::note(&format!("connect with: {TOKEN_VARIABLE}={token} distgpipe train --workers {address} …"));
    }
    if !child {
        let current = worker.current_run();
        signals::end_worker(move |signal| current.ended_by(signal))?;
    }
    match worker.serve(report::note) {
        // The driver, whose terminal this is, says how the run failed.
        Err(error) if child && error.is_of_run() => exit_at_once(1),
        served => served.map_err(cli_error),
    }
}

/// The token from the file, or else from the environment.
pub fn given_token(file: Option<&Path>) -> anyhow::Result<Option<Token>> {
    if let Some(file) = file {
        warn_if_others_read("--token-file", file);
    }
    worker_mode::given_token(file).map_err(cli_error)
}

fn cli_error(error: WorkerModeError) -> anyhow::Error {
    match error {
        WorkerModeError::Usage(text) => usage(text),
        other => other.into(),
    }
}
