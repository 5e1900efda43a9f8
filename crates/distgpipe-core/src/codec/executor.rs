//! Threads that a codec may split a large tensor over. This crate starts none: whoever runs a link brings them.

/// Some threads that wait for work.
pub trait Crew: Send + Sync {
    /// How many tasks run at the same time.
    fn size(&self) -> usize;

    /// Calls `task` once for every number below `tasks`, in any order and perhaps at the same time, and comes back when
    /// all calls have.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

/// Nobody but the caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Crew for Alone {
    fn size(&self) -> usize {
        1
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }
}
