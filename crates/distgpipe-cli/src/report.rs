//! What people and programs read: tables, units, progress, log files. All of it reads the trainer's events.

pub mod cut;
pub mod log;
pub mod progress;
pub mod run;
pub mod table;
pub mod units;

use distgpipe::core::schedule::Pass;
use serde::Serialize;
use std::io::Write;

/// Names listed before "and N more" where they are mentioned in passing.
pub const FEW: usize = 8;

/// `a, b, c`; of more than `most`, how many more.
pub fn listed(names: &[String], most: usize) -> String {
    let more = names.len().saturating_sub(most);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names[..names.len().min(most)].join(", "))
}

/// Columns of the terminal, or of a page where there is none.
pub fn width() -> usize {
    terminal_size::terminal_size().map_or(120, |(width, _)| usize::from(width.0))
}

/// What a pass carries.
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

/// Prints on standard output. An output that is closed is an error and no panic.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Says something on standard error, if anybody can hear it.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
