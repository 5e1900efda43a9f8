//! What started this process, and ending it at once. The library never ends its host: a binary calls [`exit_at_once`] itself, and fault
//! injection kills only a process that has [declared itself](declare_worker_process) a worker's.

use std::sync::atomic::{AtomicBool, Ordering};

static IS_WORKER_PROCESS: AtomicBool = AtomicBool::new(false);

/// Declares that this process only runs workers, so that a fault scenario with `kill` may end it by SIGKILL. A binary that
/// serves workers calls this once. In any other process, an injected kill panics the worker's thread instead.
pub fn declare_worker_process() {
    IS_WORKER_PROCESS.store(true, Ordering::Relaxed);
}

/// Kills this process by SIGKILL for fault injection.
///
/// # Panics
/// If the process has not declared itself a worker's: the panic then ends the worker's thread alone.
pub(crate) fn kill_worker_process() -> ! {
    if !IS_WORKER_PROCESS.load(Ordering::Relaxed) {
        panic!("injected kill of a worker that is a thread");
    }
    // SAFETY: raises a signal for this process, which ends it; `_exit` is never reached.
    unsafe {
        libc::raise(libc::SIGKILL);
        libc::_exit(1)
    }
}

/// Ends this process with a status, without running destructors or exit handlers. `exit` would run libtorch's, which
/// crash while a worker's thread still computes. For binaries only: it takes down everything else in the process.
pub fn exit_at_once(status: i32) -> ! {
    // SAFETY: `_exit` takes any status and runs no code of this process.
    unsafe { libc::_exit(status) }
}

/// The variables with which the common launchers tell a process the number of ranks.
const SIZE_VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// Set by `srun --mpi=pmix`; without it, Slurm's number of tasks is that of a step that is no MPI program.
const PMIX_VARIABLE: &str = "PMIX_RANK";

/// Whether `mpirun` or `srun` started this process as one of several ranks, as far as its environment says.
pub fn is_one_of_several_ranks() -> bool {
    let under_pmix = std::env::var_os(PMIX_VARIABLE).is_some();
    SIZE_VARIABLES.iter().filter(|name| under_pmix || !name.starts_with("SLURM")).any(|name| {
        let size = std::env::var(name).ok().and_then(|value| value.parse::<usize>().ok());
        size.is_some_and(|size| size > 1)
    })
}
