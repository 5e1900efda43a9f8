//! Runs the tasks of a codec in parallel.

use crate::engine;
use distgpipe_core::codec::Executor;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs the tasks of one tensor on `size` threads. The threads are started for each tensor: one that is worth splitting
/// takes far longer to encode than threads take to start.
pub(super) struct Threads {
    pub size: usize,
}

impl Executor for Threads {
    fn size(&self) -> usize {
        self.size
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = || loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= tasks {
                return;
            }
            task(number);
        };
        std::thread::scope(|scope| {
            for _ in 1..self.size.min(tasks) {
                // Without more threads, those that run do all tasks: the bytes are the same.
                if engine::spawn_scoped(scope, "codec task", work).is_err() {
                    break;
                }
            }
            work();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_every_task_runs_once(size: usize) {
        let done: Vec<AtomicUsize> = (0..37).map(|_| AtomicUsize::new(0)).collect();
        Threads { size }.run(done.len(), &|task| {
            done[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn every_task_runs_once() {
        for size in [1, 2, 5] {
            assert_every_task_runs_once(size);
            engine::refusal::with_refused("codec", || assert_every_task_runs_once(size));
        }
    }
}
