//! What a long computation is doing, on standard error.

use super::note;
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How often the line changes on a terminal.
const REDRAW: Duration = Duration::from_millis(100);
/// How often a line is printed elsewhere. Computations that take less print nothing.
const REPRINT: Duration = Duration::from_secs(10);

/// A line that is redrawn on a terminal, and printed every ten seconds elsewhere.
pub struct Activity {
    bar: Option<ProgressBar>,
    shown: Instant,
}

impl Activity {
    pub fn new() -> Self {
        let bar =
            std::io::stderr().is_terminal().then(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()));
        Activity { bar, shown: Instant::now() }
    }

    /// Shows the text, unless the last one was shown a moment ago.
    pub fn show(&mut self, text: impl FnOnce() -> String) {
        let every = if self.bar.is_some() { REDRAW } else { REPRINT };
        if self.shown.elapsed() < every {
            return;
        }
        self.shown = Instant::now();
        match &self.bar {
            Some(bar) => {
                bar.set_style(indicatif::ProgressStyle::default_spinner());
                bar.set_message(text());
                bar.tick();
            }
            None => note(&text()),
        }
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        // A result or an error may follow, and must not be drawn over.
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
