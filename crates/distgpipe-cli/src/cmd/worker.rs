//! `distgpipe worker`: a process that runs partitions for whoever knows its token.

use crate::exit::usage;
use crate::files::read_text;
use crate::report;
use anyhow::Context;
use distgpipe::engine::exit_at_once;
use distgpipe::launch::this_is_a_worker_process;
use distgpipe::link::Token;
use distgpipe::models;
use distgpipe::serve::{ServeOptions, Server};
use std::io::{BufRead, Read};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

/// The variable that holds a token, for driver and worker.
pub const TOKEN_VARIABLE: &str = "DISTGPIPE_TOKEN";

/// The most bytes that are read of a token file: more is no token.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Flags of `distgpipe worker`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  On the machine with the big processor:
      distgpipe worker --listen 0.0.0.0:7000 --expose --token-file token.txt
  On the machine with the data:
      distgpipe train --place client,server,client --workers 10.0.0.2:7000 --token-file token.txt

The worker needs no configuration: model, layers and plan come from the driver.
It prints `listening ADDRESS` on standard output once it can be reached.
A token is 64 hexadecimal digits; `openssl rand -hex 32` makes one.")]
pub struct WorkerArgs {
    /// Where to listen; port 0 lets the system choose
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    listen: String,
    /// Allow addresses that other machines can reach. What crosses the network is not encrypted
    #[arg(long)]
    expose: bool,
    /// File whose first line is the token [default: the variable DISTGPIPE_TOKEN, else a new one, printed]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// End after the first job
    #[arg(long)]
    once: bool,
    /// Started by a driver on this host: the token is the first line of standard input, whose end is ours too
    #[arg(long, hide = true)]
    child: bool,
}

/// Serves until killed, or until the first job is done with `--once`.
pub fn run(args: &WorkerArgs) -> anyhow::Result<()> {
    this_is_a_worker_process();
    let given = if args.child { Some(token_from_parent()?) } else { given_token(args.token_file.as_deref())? };
    let token = given.map_or_else(Token::random, Ok)?;
    let options = ServeOptions {
        listen: address(&args.listen)?,
        expose: args.expose,
        token,
        once: args.once || args.child,
        models: models::build,
    };
    if !options.listen.ip().is_loopback() && !options.expose {
        return Err(usage(format!(
            "--listen {}: other machines can reach this address, and what crosses the network is not encrypted; add \
             --expose if that is meant, or listen on 127.0.0.1",
            args.listen
        )));
    }
    let server = Server::bind(options).with_context(|| format!("--listen {}", args.listen))?;
    let address = server.address()?;
    if given.is_none() {
        report::note(&format!("use it with: {TOKEN_VARIABLE}={token} distgpipe train --workers {address} …"));
    }
    report::print(&format!("listening {address}\n"))?;
    let tell = |failure: &distgpipe::Failure| report::note(&format!("{failure}; waiting for the next job"));
    Ok(server.run(|| false, tell)?)
}

/// The token of the file, or else of the environment.
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

/// Reads the token from standard input, whose end then ends this process: nobody outlives the driver.
fn token_from_parent() -> anyhow::Result<Token> {
    let mut line = String::new();
    let mut input = std::io::stdin().lock();
    let mut first = (&mut input).take(TOKEN_BYTES_MAX);
    first.read_line(&mut line).context("--child: reading the token from standard input")?;
    drop(input);
    let token = line.parse().map_err(|e| usage(format!("--child: first line of standard input: {e}")))?;
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        exit_at_once(1);
    });
    Ok(token)
}

fn address(listen: &str) -> anyhow::Result<SocketAddr> {
    let found = listen.to_socket_addrs().ok().and_then(|mut all| all.next());
    found.ok_or_else(|| usage(format!("--listen {listen}: expected an address and a port, such as 127.0.0.1:7000")))
}
