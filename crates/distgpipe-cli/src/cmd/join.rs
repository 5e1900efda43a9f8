//! `distgpipe join`: keeps the join string of a server under a name.

use crate::exit::usage;
use crate::report;
use crate::server_store;
use distgpipe::comm::server_identity::JOIN_STRING_BYTES_MAX;
use distgpipe::JoinString;
use std::io::{BufRead, IsTerminal, Read};

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

The join string holds the server's secret: it is read from the terminal or a pipe, never from the command line, and kept in a
file that you alone can read, in $XDG_CONFIG_HOME/distgpipe/servers (~/.config/distgpipe/servers).")]
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
    let input = std::io::stdin();
    if input.is_terminal() {
        report::note("paste the line that `distgpipe serve` printed, and press Enter:");
    }
    let mut line = String::new();
    let read = input.lock().take(JOIN_STRING_BYTES_MAX as u64 + 2).read_line(&mut line);
    read.map_err(|e| usage(format!("join {name}: reading standard input: {e}")))?;
    let server: JoinString = line.parse().map_err(|e| usage(format!("join {name}: {e}")))?;
    server_store::keep(name, &server)?;
    report::note(&format!(
        "joined {name} at {}: use it with `distgpipe train --server {name}`",
        server.addresses.join(", ")
    ));
    Ok(())
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
