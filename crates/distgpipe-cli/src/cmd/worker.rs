//! `distgpipe worker`: a process that runs partitions for drivers that have its token.

use crate::compute::cores;
use crate::exit::usage;
use crate::files::read_text;
use crate::report;
use crate::report::units::{self, plural};
use crate::signals;
use anyhow::Context;
use distgpipe::comm::handshake::Token;
use distgpipe::driver::launch::declare_worker_process;
use distgpipe::driver::serve::{JobInfo, ServeEvent, ServeOptions, Server, StuckPolicy};
use distgpipe::engine::{exit_at_once, spawn, utc_now};
use distgpipe::model::zoo;
use std::io::{BufRead, Read};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

/// The environment variable that holds the token, for driver and worker.
pub const TOKEN_VARIABLE: &str = "DISTGPIPE_TOKEN";

/// The largest token file that is read; a token is much shorter.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Flags of `distgpipe worker`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  On the server:
      distgpipe worker --listen 0.0.0.0:7000 --expose --token-file token.txt
  On the client, which has the data:
      distgpipe train --place client,server,client --workers 10.0.0.2:7000 --token-file token.txt

The worker needs no configuration: the driver sends the model and the plan.
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
}

/// Serves until killed, or until the first job is done with `--once`.
pub fn run(args: &WorkerArgs) -> anyhow::Result<()> {
    declare_worker_process();
    if args.child {
        signals::leave_first_to_driver()?;
    }
    let given = if args.child { Some(token_from_parent()?) } else { given_token(args.token_file.as_deref())? };
    let token = given.map_or_else(Token::random, Ok)?;
    let options = ServeOptions {
        expose: args.expose,
        once: args.once || args.child,
        models: zoo::build,
        on_stuck: StuckPolicy::ExitProcess,
        ..ServeOptions::new(address(&args.listen)?, token)
    };
    if !options.listen.ip().is_loopback() && !options.expose {
        return Err(usage(format!(
            "--listen {}: other machines can reach this address, and network traffic is not encrypted: add --expose to allow \
             it, or listen on 127.0.0.1",
            args.listen
        )));
    }
    let server = Server::bind(options).with_context(|| format!("--listen {}", args.listen))?;
    let address = server.address()?;
    if given.is_none() {
        report::note(&format!("connect with: {TOKEN_VARIABLE}={token} distgpipe train --workers {address} …"));
    }
    report::print(&format!("listening {address}\n"))?;
    // A child's standard error is its driver's terminal, which shows the run.
    let quiet = args.child;
    let report_event = |event: &ServeEvent<'_>| match event {
        ServeEvent::Stuck(failure) => {
            report::note(&format!("error: {failure}; its thread does not end, so this process exits"));
        }
        event if !quiet => log(event),
        _ => {}
    };
    Ok(server.run(|| false, report_event)?)
}

/// Prints a line of the worker's log on standard error.
fn log(event: &ServeEvent<'_>) {
    let line = match event {
        ServeEvent::Rejected(failure) => failure.to_string(),
        ServeEvent::JobStarted(job) => started(job),
        ServeEvent::JobEnded { job, duration, failure } => {
            let took = units::seconds(duration.as_secs_f64());
            match failure {
                None => format!("run {} is done after {took}", job.run),
                Some(failure) => format!("run {} failed after {took}: {failure}", job.run),
            }
        }
        ServeEvent::RefusedBusy(driver) => format!("refused {driver}: busy with a run"),
        ServeEvent::Notice(notice) => notice.to_string(),
        _ => return,
    };
    report::note(&format!("{} {line}", utc_now()));
}

fn started(job: &JobInfo) -> String {
    let partitions: Vec<String> = job.partitions.iter().map(ToString::to_string).collect();
    let mut line = format!(
        "run {} from {}: {} as `{}`, partition{} {} of {}, {}",
        job.run,
        job.driver,
        job.model,
        job.worker,
        if partitions.len() == 1 { "" } else { "s" },
        partitions.join(","),
        job.partitions_in_all,
        plural(job.threads, "thread"),
    );
    if job.threads > cores() {
        line.push_str(&format!(
            "; warning: this host has {}, so the threads get into each other's way: give the driver a smaller --threads",
            plural(cores(), "core")
        ));
    }
    line
}

/// The token from the file, or else from the environment.
pub fn given_token(file: Option<&Path>) -> anyhow::Result<Option<Token>> {
    if let Some(path) = file {
        let text = read_text("--token-file", path, TOKEN_BYTES_MAX)?;
        let line = text.lines().next().unwrap_or_default();
        return match line.parse() {
            Ok(token) => Ok(Some(token)),
            Err(e) => Err(usage(format!("--token-file {}: {e}", path.display()))),
        };
    }
    match std::env::var(TOKEN_VARIABLE) {
        Ok(text) => match text.parse() {
            Ok(token) => Ok(Some(token)),
            Err(e) => Err(usage(format!("the variable {TOKEN_VARIABLE}: {e}"))),
        },
        Err(_) => Ok(None),
    }
}

/// Reads the token from standard input, and ends this process when standard input closes, so that it does not outlive the driver.
fn token_from_parent() -> anyhow::Result<Token> {
    let mut line = String::new();
    let mut input = std::io::stdin().lock();
    let mut first = (&mut input).take(TOKEN_BYTES_MAX);
    first.read_line(&mut line).context("--child: reading the token from standard input")?;
    drop(input);
    let token = line.parse().map_err(|e| usage(format!("--child: first line of standard input: {e}")))?;
    spawn("end of the driver", || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        exit_at_once(1);
    })?;
    Ok(token)
}

fn address(listen: &str) -> anyhow::Result<SocketAddr> {
    let found = listen.to_socket_addrs().ok().and_then(|mut all| all.next());
    found.ok_or_else(|| usage(format!("--listen {listen}: expected an address and a port, such as 127.0.0.1:7000")))
}
