//! `distgpipe join`: keeps the join string of a server under a name.

use crate::exit::usage;
use crate::report;
use crate::server_store;
use anyhow::Context;
use distgpipe::comm::server_identity::JOIN_STRING_BYTES_MAX;
use distgpipe::JoinString;
use rustix::termios::{tcgetattr, tcsetattr, LocalModes, OptionalActions, Termios};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;
use std::io::{stdin, BufRead, IsTerminal, Read};
use std::thread::{self, JoinHandle};

/// Flags of `distgpipe join`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  On the server:
      distgpipe serve
  On the client; paste the line that the server printed, which starts with `distgpipe:`:
      distgpipe join gpu-box
      distgpipe train --place client,server,client --server gpu-box …
  From a file, or from the server itself over ssh:
      ssh gpu-box distgpipe serve --join-string | distgpipe join gpu-box

The join string contains the server's secret. The command reads it from the terminal, without echo, or from a pipe, never from the \
command line, and stores it in a file that only you can read, in $XDG_CONFIG_HOME/distgpipe/servers \
(~/.config/distgpipe/servers).")]
pub struct JoinArgs {
    /// Name for the server; the join string is read from standard input
    #[arg(value_name = "NAME", required_unless_present = "list")]
    name: Option<String>,
    /// List the servers that you have joined
    #[arg(long, conflicts_with = "name")]
    list: bool,
    /// Forget the server
    #[arg(long, conflicts_with = "list")]
    remove: bool,
}

/// Joins, lists or forgets servers.
pub fn run(args: &JoinArgs) -> anyhow::Result<()> {
    let name = match &args.name {
        Some(name) if !args.list => name,
        _ => return list(),
    };
    if args.remove {
        server_store::remove(name)?;
        report::note(&format!("forgot {name}"));
        return Ok(());
    }
    let hidden = stdin().is_terminal().then(HiddenInput::start).transpose().context("hiding what is typed")?;
    if hidden.is_some() {
        report::note("paste the line that `distgpipe serve` printed, which is not shown, and press Enter:");
    }
    let mut line = String::new();
    let read = stdin().lock().take(JOIN_STRING_BYTES_MAX as u64 + 2).read_line(&mut line);
    drop(hidden);
    read.map_err(|e| usage(format!("join {name}: reading standard input: {e}")))?;
    let server: JoinString = line.parse().map_err(|e| usage(format!("join {name}: {e}")))?;
    server_store::keep(name, &server)?;
    report::note(&format!(
        "joined {name} at {}: use it with `distgpipe train --server {name}`",
        server.addresses.join(", ")
    ));
    Ok(())
}

/// While it exists, the terminal does not show what is typed. A signal that ends or stops this process makes the terminal as it
/// was first.
struct HiddenInput {
    before: Termios,
    signals: Handle,
    thread: Option<JoinHandle<()>>,
}

impl HiddenInput {
    fn start() -> std::io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut hidden = before.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        hidden.local_modes.insert(LocalModes::ECHONL);
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP])?;
        let mut input = HiddenInput { before: before.clone(), signals: signals.handle(), thread: None };
        tcsetattr(stdin(), OptionalActions::Now, &hidden)?;
        let body = move || {
            for signal in signals.forever() {
                restore(&before);
                let _ = emulate_default_handler(signal);
                // It was stopped, and goes on.
                let _ = tcsetattr(stdin(), OptionalActions::Now, &hidden);
            }
        };
        input.thread = Some(thread::Builder::new().name("signals".to_owned()).spawn(body)?);
        Ok(input)
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        self.signals.close();
        self.thread.take().map(JoinHandle::join);
        restore(&self.before);
    }
}

/// What was typed and not read is dropped: the shell would run it.
fn restore(before: &Termios) {
    let _ = tcsetattr(stdin(), OptionalActions::Flush, before);
}

/// Prints names, addresses and public keys; no secrets.
fn list() -> anyhow::Result<()> {
    for name in server_store::names()? {
        match server_store::read(&name) {
            Ok(server) => {
                let key: String = server.key.to_string().chars().take(16).collect();
                report::print(&format!("{name}  {}  key {key}…\n", server.addresses.join(",")))?;
            }
            Err(error) => report::note(&format!("{error:#}")),
        }
    }
    Ok(())
}
