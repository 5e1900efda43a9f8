//! A run whose workers are the ranks of an MPI program: rank 0 drives and is worker 0, and rank `n` is worker `n`.
//!
//! ```text
//! mpirun -n 4 my-app        rank 0:       MpiProgram::start ─► Pipeline::builder(…).workers(program.ranks()) … ─► end
//!                           ranks 1 to 3: MpiProgram::start ─► serve(models): one job after the other ─► end
//! ```
//!
//! Rank 0 sends each rank its job over MPI, and every rank knows the others: there are no addresses, ports or tokens.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::admission::Peer;
use crate::comm::handshake::BUILD;
use crate::comm::notice::Notify;
use crate::comm::protocol::Job;
use crate::comm::suspension::IdleTimer;
use crate::comm::transport::mpi::{control_frame, discard, MpiLinks, Tags};
use crate::comm::transport::tcp::join_until;
use crate::driver::serve::{build_model, check_worker, GOODBYE_LIMIT, SHUTDOWN_LIMIT};
use crate::driver::wiring::{Links, LocalWorker, Remote};
use crate::engine;
use crate::engine::is_one_of_several_ranks;
use crate::engine::mpi::{start_mpi, Beat, Mpi};
use crate::failure::{Failure, Fault};
use crate::model::exported::{allow_operators, allowed_operators};
use crate::model::zoo::ModelError;
use crate::model::{Model, ModelSpec};
use crate::sync::lock;
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the end of a program may wait for the other ranks.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How long the worker's thread may take to end after a run that has failed.
const STUCK_AFTER: Duration = Duration::from_secs(20);

/// How long a rank without a job pauses between two looks for one, at most.
const IDLE_PAUSE: Duration = Duration::from_millis(5);

/// How often rank 0 shows the ranks without a job that it is there.
const BEAT: Duration = Duration::from_secs(1);

/// A rank that has had no job yet and has not heard of rank 0 for so long gives up.
const RANK_0_SILENCE: Duration = Duration::from_secs(60);

/// After a job, it is the job's [`Timeouts::silence_s`](crate::Timeouts::silence_s), and at least this.
const RANK_0_SILENCE_MIN: Duration = Duration::from_secs(5);

/// What rank 0 tells another rank between two runs. An empty message says that it is there.
#[derive(Serialize, Deserialize)]
enum Order {
    /// Take part in a run, in which exported models may use further operators.
    Run { build: String, run: u64, job: Box<Job>, allow_ops: Vec<String> },
    /// The program is over.
    End,
}

/// The MPI program that this process is a rank of.
///
/// Every rank calls [`start`](Self::start). Rank 0 then goes on as the driver, with [`ranks`](Self::ranks) as its workers, and calls
/// [`end`](Self::end); the others [`serve`](Self::serve). A rank that cannot go on calls [`abort`](Self::abort), which ends all of
/// them.
#[derive(Clone, Copy, Debug)]
pub struct MpiProgram {
    mpi: &'static Mpi,
}

/// The number of the last run that rank 0 has started, or that this rank has taken part in.
static RUN: AtomicU64 = AtomicU64::new(0);

/// The thread of rank 0 that shows the others that it is there, and what ends it.
static BEATS: Mutex<Option<(Arc<AtomicBool>, JoinHandle<()>)>> = Mutex::new(None);

impl MpiProgram {
    /// Starts MPI, if `mpirun` or `srun` has started this process as one of several ranks. Every rank must call it.
    pub fn start() -> Result<Option<Self>, Fault> {
        if !is_one_of_several_ranks() {
            return Ok(None);
        }
        let program = MpiProgram { mpi: start_mpi()? };
        // Otherwise every rank would be a run of its own.
        if program.size() == 1 {
            let text = "the launcher has started several ranks, but this program's MPI library sees one: build it against the MPI \
                        library of the launcher";
            return Err(Fault::Mpi { doing: "starting MPI", text: text.to_owned() });
        }
        if program.rank() == 0 {
            program.start_beats()?;
        }
        Ok(Some(program))
    }

    fn start_beats(&self) -> Result<(), Fault> {
        let mut beats = lock(&BEATS);
        if beats.is_some() {
            return Ok(());
        }
        let (mpi, over) = (self.mpi, Arc::new(AtomicBool::new(false)));
        let stop = over.clone();
        let thread = engine::spawn("beats", move || {
            let mut ranks: Vec<Beat> = (1..mpi.size()).map(|rank| Beat::new(rank, Tags::ORDERS)).collect();
            while !stop.load(Ordering::Acquire) {
                // An error of MPI shows where it is used for a run.
                ranks.iter_mut().for_each(|rank| drop(mpi.beat(rank)));
                std::thread::park_timeout(BEAT);
            }
        })?;
        *beats = Some((over, thread));
        Ok(())
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.mpi.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.mpi.size()
    }

    /// Whether the MPI library is CUDA-aware. Then it sends tensors on GPUs without a copy in host memory.
    pub fn reaches_gpus(&self) -> bool {
        self.mpi.reaches_gpus()
    }

    /// All ranks, as the workers of a run.
    pub fn ranks(&self) -> MpiRanks {
        self.first(self.size())
    }

    /// The first ranks, as the workers of a run. The others wait.
    pub fn first(&self, count: usize) -> MpiRanks {
        MpiRanks { program: *self, count }
    }

    /// On every rank but the first: takes part in the runs of rank 0, one after the other, until rank 0 [ends](Self::end) the
    /// program. `models` builds the models of jobs. A run that fails is reported to rank 0, which decides whether the program goes
    /// on. Returns a failure if it cannot go on here: rank 0 is not heard any more, or a layer does not end.
    pub fn serve(&self, models: fn(&ModelSpec) -> Result<Model, ModelError>) -> Result<(), Failure> {
        engine::start();
        engine::declare_worker_process();
        let failed = |fault| Failure::new(format!("rank {}", self.rank()), "waiting for a run", fault);
        let mut silence = RANK_0_SILENCE;
        loop {
            match self.next_order(silence).map_err(failed)? {
                Order::End => return Ok(()),
                Order::Run { build, run, job, allow_ops } => {
                    RUN.store(run, Ordering::Relaxed);
                    silence = job.timeouts.silence().max(RANK_0_SILENCE_MIN);
                    self.take_part(&build, run, *job, &allow_ops, models)?;
                }
            }
        }
    }

    /// Waits for what rank 0 says next. Fails if it is not heard for so long.
    fn next_order(&self, silence: Duration) -> Result<Order, Fault> {
        let (mut pause, mut heard) = (Duration::from_micros(100), IdleTimer::new());
        loop {
            if let Some(message) = self.mpi.next(Some(0), Tags::ORDERS)? {
                let order = message.take()?;
                if !order.is_empty() {
                    return serde_json::from_slice(&order).map_err(|e| Fault::malformed("an order of rank 0", e));
                }
                heard.progress();
            }
            if heard.elapsed() >= silence {
                return Err(Fault::TimedOut { what: "hearing of rank 0".to_owned(), limit_s: silence.as_secs_f64() });
            }
            discard(self.mpi, RUN.load(Ordering::Relaxed))?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(IDLE_PAUSE);
        }
    }

    fn take_part(
        &self,
        build: &str,
        run: u64,
        job: Job,
        allow_ops: &[String],
        models: fn(&ModelSpec) -> Result<Model, ModelError>,
    ) -> Result<(), Failure> {
        let worker = match self.read_job(build, job, allow_ops) {
            Ok(worker) => worker,
            Err(fault) => {
                // There is no link yet that would send rank 0 the cause.
                let failure = Failure::new(format!("rank {}", self.rank()), "reading the job", fault);
                let notice = control_frame(Kind::Abort, &failure.notice().encode());
                let sent = self.mpi.post(0, Tags::of(run).control, notice);
                return sent.map_err(|fault| Failure::new(format!("rank {}", self.rank()), "reading the job", fault));
            }
        };
        let abort = worker.abort.clone();
        let name = worker.name();
        let links = self.links(&worker, run);
        let (links, stage) = match links {
            Ok(links) => {
                let stage = build_model(&worker.job, models).and_then(|model| {
                    let model_links = stage_links(&links)?;
                    worker.spawn(model, model_links)
                });
                (links, stage)
            }
            Err(fault) => return Err(Failure::new(name, "joining the run", fault)),
        };
        let stage = match stage {
            Ok(stage) => stage,
            Err(fault) => {
                abort.fail(Failure::new(name, "joining the run", fault));
                links.close(SHUTDOWN_LIMIT);
                return Ok(());
            }
        };
        let mut without_driver: Option<Instant> = None;
        while !stage.is_finished() && abort.failure().is_none() {
            // A driver that says goodbye has ended the run before. One that has not leaves the worker waiting for ever.
            let since = links.has_ended(0).then(|| *without_driver.get_or_insert_with(Instant::now));
            if since.is_some_and(|since| since.elapsed() >= GOODBYE_LIMIT) {
                abort.fail(Failure::new("the driver", "ending the run", Fault::Lost));
            }
            std::thread::sleep(POLL / 10);
        }
        let (ended, silent) = (join_until(stage, Instant::now() + STUCK_AFTER), links.is_silent(0));
        links.close(SHUTDOWN_LIMIT);
        match abort.failure() {
            // Rank 0 cannot tell the user.
            Some(failure) if silent => Err(failure),
            _ if !ended => {
                let fault = Fault::TimedOut { what: "ending".to_owned(), limit_s: STUCK_AFTER.as_secs_f64() };
                Err(Failure::new(name, "ending", fault))
            }
            _ => Ok(()),
        }
    }

    fn read_job(&self, build: &str, job: Job, allow_ops: &[String]) -> Result<LocalWorker, Fault> {
        if build != BUILD {
            return Err(Fault::protocol(format!("rank 0 with distgpipe {BUILD}, as here"), build));
        }
        allow_operators(allow_ops).map_err(Fault::invalid_model)?;
        let topology = job.topology()?;
        check_worker(&job, &topology)?;
        LocalWorker::new(job, Arc::new(topology), AbortFlag::default(), Arc::default())
    }

    /// The links to the driver and to the workers that this one exchanges messages with.
    fn links(&self, worker: &LocalWorker, run: u64) -> Result<MpiLinks, Fault> {
        let (id, topology) = (worker.id(), &worker.topology);
        let peer = |other: WorkerId| match other {
            WorkerId(0) => Peer::Driver,
            other => Peer::Worker(other),
        };
        let others = topology.members().filter(|&other| other != id && (other.0 == 0 || topology.linked(id, other)));
        let links = others.map(|other| (other.index(), worker.link(worker.remote(peer(other), Notify::default()))));
        MpiLinks::start(self.mpi, run, links.collect(), worker.mailbox.demand().clone())
    }

    /// On rank 0: tells the other ranks that the program is over, and ends MPI. If a rank does not end in time, all are
    /// [aborted](Self::abort) with status 1.
    pub fn end(&self) {
        let mpi = self.mpi;
        let (ended, waiting) = mpsc::channel::<()>();
        let watched = engine::spawn("end of MPI", move || {
            if waiting.recv_timeout(END_LIMIT) == Err(RecvTimeoutError::Timeout) {
                mpi.abort(1)
            }
        });
        let beats = lock(&BEATS).take();
        if let Some((over, thread)) = beats {
            over.store(true, Ordering::Release);
            thread.thread().unpark();
            let _ = thread.join();
        }
        if self.rank() == 0 {
            for rank in 1..self.size() {
                let order = serde_json::to_vec(&Order::End).unwrap_or_default();
                if mpi.post(rank, Tags::ORDERS, order).is_err() {
                    mpi.abort(1);
                }
            }
        }
        while !mpi.all_posted() {
            std::thread::sleep(Duration::from_millis(1));
        }
        mpi.end();
        drop(ended);
        if let Ok(watching) = watched {
            let _ = watching.join();
        }
    }

    /// Ends all ranks with this status, and this process with them.
    pub fn abort(&self, status: i32) -> ! {
        self.mpi.abort(status)
    }
}

/// The links of a stage: its own process has no other worker.
fn stage_links(links: &MpiLinks) -> Result<Links, Fault> {
    let (driver, _) = links.outgoing(0).ok_or(Fault::Lost)?;
    let mut of_stage = Links::new(Box::new(driver));
    for rank in links.ranks() {
        let (outgoing, counters) = links.outgoing(rank).ok_or(Fault::Lost)?;
        of_stage.add(WorkerId::new(rank), Box::new(outgoing), counters);
    }
    Ok(of_stage)
}

/// The ranks that are the workers of a run: rank 0, which is this process, and those that follow it.
#[derive(Clone, Copy, Debug)]
pub struct MpiRanks {
    program: MpiProgram,
    count: usize,
}

impl From<MpiRanks> for crate::Workers {
    fn from(ranks: MpiRanks) -> Self {
        crate::Workers::Mpi(ranks)
    }
}

impl MpiRanks {
    /// The number of ranks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether no rank of the program is left out.
    pub(super) fn are_all(&self) -> bool {
        self.count == self.program.size()
    }

    /// How many of the ranks there are on this host, and on the one that has most. The names do not matter.
    pub(super) fn by_host(&self) -> BTreeMap<Option<&str>, usize> {
        let (here, most) = (self.program.mpi.ranks_here(), self.program.mpi.most_on_one_host());
        BTreeMap::from([(None, here.min(self.count)), (Some("another host"), most.min(self.count))])
    }

    /// Sends each rank its job and starts the links to it. `remote` has an entry for each rank but this one.
    pub(super) fn start(&self, local: &LocalWorker, remote: Vec<Remote>) -> Result<MpiLinks, Fault> {
        let members = local.topology.size();
        if members != self.count {
            let wrong = format!(
                "expected {members} ranks, one for each worker ({} in each of {} replicas), got {}: start the program with \
                 `mpirun -n {members}`",
                members / local.topology.replicas(),
                local.topology.replicas(),
                self.count
            );
            return Err(Fault::invalid_job("the number of MPI ranks", wrong));
        }
        let mpi = self.program.mpi;
        let last = RUN.fetch_add(1, Ordering::Relaxed);
        discard(mpi, last)?;
        let run = last + 1;
        let links = remote.into_iter().map(|remote| (remote.worker().index(), local.link(remote)));
        let links = MpiLinks::start(mpi, run, links.collect(), local.mailbox.demand().clone())?;
        for rank in 1..members {
            let job = Box::new(Job { worker: WorkerId::new(rank), ..local.job.clone() });
            let order = Order::Run { build: BUILD.to_owned(), run, job, allow_ops: allowed_operators() };
            let order = serde_json::to_vec(&order);
            let order = order.map_err(|e| Fault::internal("a job that serializes", e.to_string()))?;
            mpi.post(rank, Tags::ORDERS, order)?;
        }
        Ok(links)
    }
}
