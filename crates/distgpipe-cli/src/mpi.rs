//! `mpirun distgpipe train`: rank 0 runs the command, and the others are its workers.

use crate::exit::usage;
use distgpipe::engine::is_one_of_several_ranks;
use std::ffi::OsString;

/// The commands whose workers can be ranks.
const COMMANDS: [&str; 3] = ["train", "evaluate", "predict"];

/// Whether this process is one of several ranks with such a command.
fn is_rank_of_run() -> bool {
    let command = command(std::env::args_os().skip(1));
    let takes_ranks = command.is_some_and(|command| COMMANDS.iter().any(|name| command == *name));
    takes_ranks && is_one_of_several_ranks()
}

/// The command among the arguments. Only --allow-op may stand before it.
fn command(mut arguments: impl Iterator<Item = OsString>) -> Option<OsString> {
    loop {
        match arguments.next()? {
            flag if flag == "--allow-op" => drop(arguments.next()),
            flag if flag.as_encoded_bytes().starts_with(b"--allow-op=") => {}
            command => return Some(command),
        }
    }
}

#[cfg(feature = "mpi")]
mod ranks {
    use super::{is_rank_of_run, usage};
    use crate::args::TrainFlags;
    use crate::{report, signals};
    use distgpipe::engine::exit_at_once;
    use distgpipe::model::zoo;
    use distgpipe::sync::lock;
    use distgpipe::{MpiProgram, Notice, Workers};
    use std::collections::BTreeSet;
    use std::sync::{Mutex, OnceLock};

    static PROGRAM: OnceLock<MpiProgram> = OnceLock::new();

    /// Joins the MPI program, if there is one. On every rank but the first it serves rank 0 and ends the process.
    pub fn enter() {
        if !is_rank_of_run() {
            return;
        }
        // Otherwise UCX takes GPU memory that was allocated before it looked for host memory, and fails to send it.
        if std::env::var_os("UCX_MEMTYPE_CACHE").is_none() {
            std::env::set_var("UCX_MEMTYPE_CACHE", "n");
        }
        let program = match MpiProgram::start() {
            Ok(Some(program)) => program,
            Ok(None) => return,
            Err(fault) => {
                report::note(&format!("error: {fault}"));
                exit_at_once(1);
            }
        };
        if program.rank() == 0 {
            PROGRAM.get_or_init(|| program);
            return;
        }
        let served = signals::leave_to_driver().map_err(|e| e.to_string());
        let served = served.and_then(|()| program.serve(zoo::build).map_err(|failure| failure.to_string()));
        match served {
            Ok(()) => {
                program.end();
                exit_at_once(0)
            }
            Err(text) => {
                report::note(&format!("rank {}: error: {text}", program.rank()));
                program.abort(1)
            }
        }
    }

    /// Refuses flags that name other workers than the ranks.
    pub fn check_flags(given: &TrainFlags) -> anyhow::Result<()> {
        let Some(program) = PROGRAM.get() else { return Ok(()) };
        let named = match &given.workers {
            Some(workers) => format!("--workers {workers}"),
            None if !given.server.is_empty() => "--server".to_owned(),
            None if given.server_file.is_some() => "--server-file".to_owned(),
            None => return Ok(()),
        };
        Err(usage(format!(
            "{named}: MPI has started {} ranks, which are the workers: leave it out, or start this command without mpirun",
            program.size()
        )))
    }

    /// The workers that have not been heard for a while.
    static SILENT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

    /// Notes which workers are silent, and ends the run if it cannot go on.
    pub fn take_notice(notice: &Notice) {
        let mut silent = lock(&SILENT);
        match notice {
            Notice::Silent { worker, .. } => drop(silent.insert(worker.clone())),
            Notice::Back { worker, .. } => drop(silent.remove(worker)),
            _ => return,
        }
        drop(silent);
        end_if_a_worker_is_silent();
    }

    /// Ends a run of ranks that a signal has asked to stop, if a silent worker keeps the step in progress from finishing. A scheduler
    /// kills all ranks soon after the signal, and then nobody would say why.
    pub fn end_if_a_worker_is_silent() {
        let silent = lock(&SILENT).first().cloned();
        if let (Some(_), Some(worker)) = (PROGRAM.get(), silent) {
            signals::end_if_stopping(&format!(", because {worker} does not answer"));
        }
    }

    /// The ranks as workers of a run of so many, if there are any.
    pub fn workers(count: usize) -> anyhow::Result<Option<Workers>> {
        let Some(program) = PROGRAM.get() else { return Ok(None) };
        if program.size() != count {
            return Err(usage(format!(
                "expected {count} MPI rank{}, one for each worker of --place or --partitions in each of --replicas; got {}: start it \
                 with `mpirun -n {count}`",
                if count == 1 { "" } else { "s" },
                program.size()
            )));
        }
        Ok(Some(program.ranks().into()))
    }

    /// Prints which way tensors take between GPUs.
    pub fn note_gpus() {
        let Some(program) = PROGRAM.get() else { return };
        report::note(match program.reaches_gpus() {
            true => "MPI sends tensors from GPU to GPU (DISTGPIPE_MPI_CUDA=0 sends them through host memory)",
            false => {
                "tensors go from GPU to GPU through host memory: the MPI library does not say that it is CUDA-aware"
            }
        });
    }

    /// Ends this process with a status, and the other ranks with it.
    pub fn exit(status: i32) -> ! {
        match PROGRAM.get() {
            Some(program) if status == 0 => program.end(),
            Some(program) => program.abort(status),
            None => {}
        }
        exit_at_once(status)
    }
}

#[cfg(not(feature = "mpi"))]
mod ranks {
    use super::{is_rank_of_run, usage};
    use crate::args::TrainFlags;
    use distgpipe::engine::exit_at_once;
    use distgpipe::{Notice, Workers};

    pub fn enter() {}

    /// Without MPI, every rank would be a run of its own.
    pub fn check_flags(_: &TrainFlags) -> anyhow::Result<()> {
        match is_rank_of_run() {
            true => Err(usage(
                "mpirun or srun has started several ranks, and this binary was built without MPI: build it with `make mpi`",
            )),
            false => Ok(()),
        }
    }

    pub fn take_notice(_: &Notice) {}

    pub fn end_if_a_worker_is_silent() {}

    pub fn note_gpus() {}

    pub fn workers(_: usize) -> anyhow::Result<Option<Workers>> {
        Ok(None)
    }

    pub fn exit(status: i32) -> ! {
        exit_at_once(status)
    }
}

pub use ranks::{check_flags, end_if_a_worker_is_silent, enter, exit, note_gpus, take_notice, workers};
