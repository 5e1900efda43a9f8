//! Output for people and programs: tables, units, progress lines, log files. All of it is derived from the trainer's events.

pub mod cut;
pub mod log;
pub mod progress;
pub mod run;
pub mod table;
pub mod units;

use crate::option_names::with_flags;
use distgpipe_core::schedule::Pass;
use serde::Serialize;
use std::io::Write;

/// How many names a note lists before "and N more".
pub const FEW: usize = 8;

/// `a, b, c`, and how many more if there are more than `most`.
pub fn listed(names: &[String], most: usize) -> String {
    let more = names.len().saturating_sub(most);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names[..names.len().min(most)].join(", "))
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
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Prints a line on standard error, with options of the library named as flags. Failures are ignored.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", with_flags(text));
}
