//! The servers that this user has joined: one file per server, which the user alone can read.

use crate::exit::{self, usage};
use crate::files::{read_text, user_directory, warn_if_others_read};
use anyhow::Context;
use distgpipe::comm::server_identity::{write_private, JOIN_STRING_BYTES_MAX};
use distgpipe::driver::worker_mode::SERVER_VARIABLE;
use distgpipe::JoinString;
use std::path::{Path, PathBuf};

/// Where the commands keep what the user alone may read.
pub fn config_directory() -> anyhow::Result<PathBuf> {
    let home = user_directory("XDG_CONFIG_HOME", ".config")
        .ok_or_else(|| usage("set HOME or XDG_CONFIG_HOME: the keys of servers are kept there"))?;
    Ok(home.join("distgpipe"))
}

/// How every join string begins.
const JOIN_STRING_PREFIX: &str = "distgpipe:1:";

fn join_string_given() -> anyhow::Error {
    usage(
        "a join string is secret and does not belong on the command line, where other users of this host can read it: run \
         `distgpipe join NAME` and paste it there; if others use this host, make a new one on the server",
    )
}

/// Ends the program if an argument has a join string. Any other error would repeat it.
pub fn refuse_secret_arguments() {
    if std::env::args_os().skip(1).any(|argument| argument.to_string_lossy().contains(JOIN_STRING_PREFIX)) {
        exit::end(Err(join_string_given()));
    }
}

/// The file of a server.
fn path_of(name: &str) -> anyhow::Result<PathBuf> {
    if name.contains(JOIN_STRING_PREFIX) {
        return Err(join_string_given());
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(plain) {
        return Err(usage(format!(
            "server {name:?}: expected a name of at most 64 letters, digits, `-`, `_` and `.`, such as gpu-box"
        )));
    }
    Ok(config_directory()?.join("servers").join(name))
}

/// Keeps a server under a name.
pub fn keep(name: &str, server: &JoinString) -> anyhow::Result<()> {
    let path = path_of(name)?;
    let text = format!("{}\n", server.to_text());
    write_private(&path, text.as_bytes()).with_context(|| format!("writing {}", path.display()))
}

/// Forgets a server.
pub fn remove(name: &str) -> anyhow::Result<()> {
    let path = path_of(name)?;
    std::fs::remove_file(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => unknown(name),
        _ => anyhow::Error::from(e).context(format!("removing {}", path.display())),
    })
}

/// The names of all servers.
pub fn names() -> anyhow::Result<Vec<String>> {
    let folder = config_directory()?.join("servers");
    let entries = match std::fs::read_dir(&folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("reading {}", folder.display()))?,
    };
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    Ok(names)
}

/// The server of this name.
pub fn read(name: &str) -> anyhow::Result<JoinString> {
    let path = path_of(name)?;
    if !path.exists() {
        return Err(unknown(name));
    }
    let text = read_text("--server", &path, JOIN_STRING_BYTES_MAX as u64)?;
    text.parse().map_err(|e| usage(format!("--server {name}: {}: {e}", path.display())))
}

fn unknown(name: &str) -> anyhow::Error {
    let known = names().unwrap_or_default();
    let known = if known.is_empty() { "none yet".to_owned() } else { known.join(", ") };
    usage(format!("server {name}: expected one that you have joined ({known}): run `distgpipe join {name}`"))
}

/// The servers whose join strings are in a file, one per line.
pub fn in_file(path: &Path) -> anyhow::Result<Vec<JoinString>> {
    let text = read_text("--server-file", path, 64 << 10)?;
    warn_if_others_read("--server-file", path);
    parse_all(&text).map_err(|why| usage(format!("--server-file {}: {why}", path.display())))
}

/// The servers whose join strings are in the environment, separated by white space.
pub fn in_environment() -> anyhow::Result<Option<Vec<JoinString>>> {
    match std::env::var(SERVER_VARIABLE) {
        Ok(text) => parse_all(&text).map(Some).map_err(|why| usage(format!("the variable {SERVER_VARIABLE}: {why}"))),
        Err(_) => Ok(None),
    }
}

/// Errors name the place and never the text, which is secret.
fn parse_all(text: &str) -> Result<Vec<JoinString>, String> {
    let words = text.split_whitespace().enumerate();
    let parsed = words.map(|(i, word)| word.parse().map_err(|e| format!("join string {}: {e}", i + 1)));
    let all = parsed.collect::<Result<Vec<JoinString>, String>>()?;
    match all.is_empty() {
        true => Err("expected a join string, as `distgpipe serve` prints it".to_owned()),
        false => Ok(all),
    }
}
