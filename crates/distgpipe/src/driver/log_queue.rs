//! A log that nobody has to read: a full pipe on standard error must not stop a server.

use crate::engine;
use crate::failure::Fault;
use crate::sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most lines that wait to be written.
const LINES_MAX: usize = 256;

/// How long the last lines may take when the log ends.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Writes lines in a thread of its own. Lines that do not fit into its queue are counted and dropped.
pub struct LogQueue {
    lines: Mutex<Option<SyncSender<String>>>,
    dropped: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl LogQueue {
    /// Starts the thread, which calls `write` with each line.
    pub fn start(write: impl Fn(&str) + Send + 'static) -> Result<Self, Fault> {
        let (sender, lines) = mpsc::sync_channel::<String>(LINES_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let lost = dropped.clone();
        let thread = engine::spawn("log", move || {
            for line in lines {
                write(&line);
                let lost = lost.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    write(&format!("{lost} lines of this log were dropped, because nobody read it fast enough"));
                }
            }
        })?;
        Ok(LogQueue { lines: Mutex::new(Some(sender)), dropped, thread: Mutex::new(Some(thread)) })
    }

    /// Queues a line. Never waits.
    pub fn write(&self, line: String) {
        let lines = lock(&self.lines);
        if lines.as_ref().is_some_and(|lines| lines.try_send(line).is_err()) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for LogQueue {
    /// Waits a moment for the lines that are queued.
    fn drop(&mut self) {
        drop(lock(&self.lines).take());
        let thread = lock(&self.thread).take();
        let deadline = Instant::now() + END_LIMIT;
        while thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_nobody_reads_keeps_nobody_waiting_and_counts_what_it_drops() {
        let (blocked, unblock) = mpsc::channel::<()>();
        let (written, lines) = mpsc::channel();
        let unblock = Mutex::new(unblock);
        let log = LogQueue::start(move |line| {
            let _ = unblock.lock().unwrap().recv();
            let _ = written.send(line.to_owned());
        })
        .unwrap();
        for i in 0..2 * LINES_MAX {
            log.write(format!("line {i}"));
        }
        drop(blocked);
        drop(log);
        let lines: Vec<String> = lines.try_iter().collect();
        assert_eq!(lines[0], "line 0");
        assert!(lines.iter().any(|line| line.contains("lines of this log were dropped")), "{}", lines.len());
    }
}
