//! What the owner of a server lets a stranger's job do there.

use crate::comm::protocol::Job;
use crate::comm::timeouts::Timeouts;
use crate::comm::topology::Topology;
use crate::engine::{self, Devices, ResourceLimits};
use crate::failure::Fault;
use crate::model::exported;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The limits of one job. The process of the job sets them on itself before it reads anything of the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobLimits {
    /// Bytes of memory that the job's process may allocate. `None`: as much as the host has.
    pub memory_bytes: Option<u64>,
    /// libtorch threads that the job may ask for.
    pub threads: usize,
    /// Files and sockets that the job's process may have open.
    pub files: u64,
    /// How long the job may go without progress, in seconds: without a command to work on, or in one action.
    pub idle_s: f64,
    /// The time-outs of the connections. Those that the job asks for do not count, except that it may ask for a shorter
    /// [`reconnect_s`](Timeouts::reconnect_s).
    pub timeouts: Timeouts,
    /// Where the process of a job has its gateway connect it to the run's other servers, on this host. `None`: nowhere.
    pub gateway: Option<String>,
    /// The devices that jobs run on. Those that the job asks for do not count.
    pub devices: Devices,
    /// Which models jobs may have.
    pub models: AllowedModels,
}

/// Which models a server runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllowedModels {
    /// Those of the zoo, and graphs of operators that the server allows.
    #[default]
    All,
    /// Those of the zoo.
    BuiltIn,
    /// Graphs of operators that the server allows.
    Exported,
}

impl AllowedModels {
    /// Refuses a model of the other kind.
    fn check(self, name: &str) -> Result<(), Fault> {
        let exported = name == exported::NAME;
        let wrong = match self {
            AllowedModels::BuiltIn if exported => {
                "this server runs built-in models only, got an exported one: use one of its \
                 models, or a server that allows exported ones"
            }
            AllowedModels::Exported if !exported => {
                "this server runs exported models only, got a built-in one: export the \
                 model with PyTorch, or use a server that allows built-in ones"
            }
            _ => return Ok(()),
        };
        Err(Fault::invalid_job("the model", wrong))
    }
}

impl Default for JobLimits {
    /// The host's cores as threads, half an hour without progress, and the first GPU if there is one.
    fn default() -> Self {
        JobLimits {
            memory_bytes: None,
            threads: engine::default_threads(1),
            files: 256,
            idle_s: 1800.0,
            timeouts: Timeouts::default(),
            gateway: None,
            devices: Devices::default(),
            models: AllowedModels::default(),
        }
    }
}

impl JobLimits {
    /// Sets the limits of this process.
    pub(super) fn enter(&self) -> Result<(), Fault> {
        let limits = ResourceLimits { memory_bytes: self.memory_bytes, files: self.files };
        engine::limit_resources(&limits).map_err(|e| Fault::io("limiting this process", e))
    }

    /// [`Self::idle_s`] as a duration.
    pub(super) fn idle(&self) -> Duration {
        Duration::try_from_secs_f64(self.idle_s.clamp(1.0, 1e7)).unwrap_or(Duration::from_secs(1800))
    }

    /// Puts the owner's settings into a job, and refuses one that asks for what a server does not give.
    pub(super) fn apply(&self, job: &mut Job) -> Result<(), Fault> {
        if !job.faults.is_empty() {
            return Err(Fault::invalid_job("the fault scenario", "a server injects no faults: leave it out"));
        }
        self.check_threads(job.threads)?;
        self.models.check(job.model.as_ref().map_or("", |spec| &spec.name))?;
        // A client that waits for a shorter time leaves no process waiting for it.
        let reconnect_s = self.timeouts.reconnect_s.min(job.timeouts.reconnect_s);
        job.timeouts = Timeouts { reconnect_s, ..self.timeouts };
        job.devices = self.devices.clone();
        Ok(())
    }

    pub(super) fn check_threads(&self, threads: usize) -> Result<(), Fault> {
        if threads <= self.threads {
            return Ok(());
        }
        let wrong = format!("this server gives a job at most {}, got {threads}", self.threads);
        Err(Fault::invalid_job("`Builder::threads`", wrong))
    }

    /// Refuses a job whose codecs keep more than the job may have.
    pub(super) fn check_codecs(&self, job: &Job, topology: &Topology) -> Result<(), Fault> {
        let kept = job.codecs.kept_bytes_max(topology, job.worker);
        match self.memory_bytes {
            Some(limit) if kept > limit => Err(Fault::invalid_job(
                "`Builder::codecs`",
                format!(
                    "the codecs may keep {} MiB at this worker, and this server gives a job {} MiB: use a smaller \
                     `delta:MIB`",
                    kept >> 20,
                    limit >> 20
                ),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::codec_policy::CodecPolicy;
    use crate::engine::{Device, Precision, Tf32};
    use crate::model::loss::Loss;
    use crate::runtime::graphs::GraphOptions;
    use crate::runtime::optimizer::Optim;
    use crate::runtime::trace::PhaseTiming;
    use distgpipe_core::partition::Balance;
    use distgpipe_core::schedule::{Request, Schedule};
    use distgpipe_core::WorkerId;

    #[test]
    fn a_server_may_run_one_kind_of_models_only() {
        let refused = |allowed: AllowedModels, name: &str| allowed.check(name).err().map(|fault| fault.to_string());
        assert_eq!(refused(AllowedModels::All, "mlp").or(refused(AllowedModels::All, exported::NAME)), None);
        assert_eq!(refused(AllowedModels::BuiltIn, "mlp").or(refused(AllowedModels::Exported, exported::NAME)), None);
        assert!(refused(AllowedModels::BuiltIn, exported::NAME).unwrap().contains("built-in models only"));
        assert!(refused(AllowedModels::Exported, "mlp").unwrap().contains("exported models only"));
    }

    /// What `feedback` keeps is as large as tensors that the worker computes itself, for which its process has the limit.
    #[test]
    fn what_codecs_keep_counts_on_all_links() {
        let limits = JobLimits { memory_bytes: Some(3 << 30), ..JobLimits::default() };
        let refused = |links: &str, replicas: &str, members: usize| {
            let request = Request::new("client,server,client".parse().unwrap(), 2);
            let topology = Topology::new(Schedule::OneFOneB.plan(&request).unwrap(), members);
            let replicas = replicas.parse().unwrap();
            let codecs = CodecPolicy { replicas, ..CodecPolicy::all(links.parse().unwrap()) };
            let job = Job { codecs, replicas: members, ..job() };
            limits.check_codecs(&job, &topology).err().map(|fault| fault.to_string()).unwrap_or_default()
        };
        assert_eq!(refused("feedback(tile:4)", "feedback(tile:4)", 2), "");
        assert!(refused("delta:900(tile:4)", "raw", 1).contains("may keep 3600 MiB"));
    }

    #[test]
    fn the_owner_and_not_the_client_chooses_the_time_outs_and_the_device() {
        let mut job = job();
        let timeouts = Timeouts { stall_s: 30.0, silence_s: 5.0, ..Timeouts::default() };
        let owner = JobLimits { timeouts, devices: Device::Cpu.into(), ..JobLimits::default() };
        owner.apply(&mut job).unwrap();
        assert_eq!((job.timeouts, job.devices), (timeouts, Device::Cpu.into()));
    }

    fn job() -> Job {
        Job {
            worker: WorkerId(1),
            model: None,
            balance: Balance::even(1, 1).unwrap(),
            plan: String::new(),
            replicas: 1,
            seed: 0,
            optim: Optim::default(),
            groups: Vec::new(),
            frozen: Vec::new(),
            loss: Loss::default(),
            codecs: CodecPolicy::default(),
            devices: Device::Cuda(7).into(),
            threads: 1,
            channels_last: true,
            precision: Precision::default(),
            tf32: Tf32::default(),
            cudnn_benchmark: false,
            cudnn_deterministic: false,
            fused_optimizer: false,
            graphs: GraphOptions::default(),
            phases: PhaseTiming::default(),
            reduce: Default::default(),
            trace: false,
            timeouts: Timeouts { stall_s: 1e9, silence_s: 1e9, ..Timeouts::default() },
            faults: String::new(),
            addresses: Vec::new(),
        }
    }
}
