//! The threads that a codec may split a large tensor over. This crate starts none; the owner of a link provides them.

/// Runs the tasks of a codec, possibly on several threads.
pub trait Executor: Send + Sync {
    /// The number of tasks that run at the same time.
    fn size(&self) -> usize;

    /// Calls `task` once for every number below `tasks`, in any order and possibly concurrently. Returns when all calls
    /// have returned.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

/// Runs all tasks on the calling thread, one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct SerialExecutor;

impl Executor for SerialExecutor {
    fn size(&self) -> usize {
        1
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }
}
