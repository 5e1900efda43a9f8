//! Output for people and programs: tables, units, progress lines, log files. All of it is derived from the trainer's events.

pub mod activity;
pub mod cut;
pub mod log;
pub mod plot;
pub mod progress;
pub mod run;
pub mod table;
pub mod units;

use crate::mpi;
use crate::option_names::with_flags;
use anyhow::Context;
use distgpipe::sync::lock;
use distgpipe::Notice;
use distgpipe_core::schedule::Pass;
use indicatif::ProgressBar;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Mutex;

/// How many names a note lists before "and N more".
pub const NAMES_LISTED_MAX: usize = 8;

/// `a, b, c`, and how many more if there are more than `most`.
pub fn listed(names: &[String], most: usize) -> String {
    let more = names.len().saturating_sub(most);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names[..names.len().min(most)].join(", "))
}

/// Names below this likeness are not suggested.
const LIKENESS_MIN: f64 = 0.8;

/// The known name that a misspelt one resembles most, if it resembles any.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let rated = known.map(|known| (strsim::jaro_winkler(known, name), known));
    let nearest = rated.max_by(|(a, _), (b, _)| a.total_cmp(b));
    nearest.filter(|(likeness, _)| *likeness >= LIKENESS_MIN).map(|(_, known)| known)
}

/// A sentence about a name that is not known, such as a key or a recipe.
pub fn unknown(what: &str, name: &str, nearest: Option<&str>) -> String {
    match nearest {
        Some(nearest) => format!("unknown {what} `{name}`: did you mean `{nearest}`?"),
        None => format!("unknown {what} `{name}`."),
    }
}

/// The width of the terminal in columns, or 120 where there is none.
pub fn width() -> usize {
    terminal_size::terminal_size().map_or(120, |(width, _)| usize::from(width.0))
}

/// What crosses the links in a pass.
pub fn carried(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => "activations",
        Pass::Backward => "gradients",
    }
}

/// Prints a value as JSON on standard output.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}

/// Prints on standard output. A closed output is an error, not a panic.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("writing to standard output")
}

/// The bar that is on the terminal, if any. Threads of a run print notices while it is there.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Has [`note`] print above this bar from now on, or on a plain terminal.
fn print_above(bar: Option<ProgressBar>) {
    *lock(&BAR) = bar;
}

/// Prints a line on standard error, above the progress bar if there is one, with options of the library named as flags.
/// Failures are ignored.
pub fn note(text: &str) {
    let bar = lock(&BAR).clone();
    let line = with_flags(text);
    match bar {
        Some(bar) => bar.println(line),
        None => drop(writeln!(std::io::stderr(), "{line}")),
    }
}

/// How often a line says that a connection is still being restored, in seconds, where there is no progress bar.
const RECONNECTING_EVERY_S: u64 = 10;

/// The name under which the user has joined the server that runs a worker, by the worker's name.
static SERVERS: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// Has [`notice`] name servers as the user does from now on.
pub fn name_servers(servers: BTreeMap<String, String>) {
    *lock(&SERVERS) = servers;
}

/// Shows a notice of the run. A bar shows every second of a broken connection; lines are printed now and then.
pub fn notice(notice: &Notice) {
    let notice = named(notice, &lock(&SERVERS));
    if let Notice::Reconnecting { seconds, .. } = notice {
        let bar = lock(&BAR).clone();
        match bar {
            Some(bar) => return bar.set_message(progress_text(&notice)),
            None if seconds >= 2.0 && !(seconds as u64).is_multiple_of(RECONNECTING_EVERY_S) => return,
            None => {}
        }
    }
    note(&notice.to_string());
    mpi::take_notice(&notice);
}

/// The notice with the name of the server in place of that of the worker, if the user has joined it by name.
fn named(notice: &Notice, servers: &BTreeMap<String, String>) -> Notice {
    let mut notice = notice.clone();
    if let Some(worker) = notice.worker_mut() {
        if let Some(server) = servers.get(worker) {
            server.clone_into(worker);
        }
    }
    notice
}

/// What a bar says: there is no room for the limit.
fn progress_text(notice: &Notice) -> String {
    let text = notice.to_string();
    text.split_once(';').map_or(text.as_str(), |(first, _)| first).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It once named the worker's role, which is the same for every server.
    #[test]
    fn the_progress_line_names_the_server_that_the_user_has_joined() {
        let servers = BTreeMap::from([("server".to_owned(), "gpu-box".to_owned())]);
        let broken = |worker: &str| {
            let notice = Notice::Reconnecting { worker: worker.to_owned(), seconds: 12.3, limit_s: 120.0 };
            progress_text(&named(&notice, &servers))
        };
        assert_eq!(broken("server"), "reconnecting to gpu-box, 12 s");
        assert_eq!(broken("other"), "reconnecting to other, 12 s");
    }
}
