//! Validates flags and turns them into a run that can start. Everything that can be checked without starting a worker is checked
//! here. Every error names its flag and the remedy.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`inference`] | the same for `evaluate` and `predict`, which have a trained model instead of a run |
//! | [`model`] | the model and its settings |
//! | [`plan`] | plan files, micro-batches |
//! | [`partitioning`] | the cut and the placement |
//! | [`workers`] | where the workers run |
//! | [`training`] | optimizer, loss, trainer options |
//! | [`links`] | codecs and timeouts |

mod inference;
mod links;
mod model;
mod partitioning;
mod plan;
mod training;
mod workers;

pub use inference::InferenceConfig;
pub use model::{is_exported, listed, model, model_of, ExportedFlags};
pub use plan::read_plan;

use crate::args::TrainFlags;
use crate::balance_options::{no_cut, BalanceOptions};
use crate::checkpoint::CheckpointConfig;
use crate::cmd::models::SampleArgs;
use crate::compute::Compute;
use crate::datasets::loaders;
use crate::exit::usage;
use crate::files::check_directory;
use crate::mpi;
use crate::report::{self, log};
use crate::saved_model::SavedModel;
use crate::weights::{FittedWeights, MissingTensors};
use anyhow::Context;
use distgpipe::comm::codec_policy::{CodecPolicy, CodecPolicyError};
use distgpipe::comm::protocol::REPLICAS_MAX;
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::data::Loader;
use distgpipe::driver::builder::{BuildError, Builder};
use distgpipe::driver::profile::LayerProfile;
use distgpipe::train::TrainOptions;
use distgpipe::{AutoBalance, Loss, Model, Optim, ParameterGroup, Pipeline, Workers};
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::Plan;
use distgpipe_core::WorkerId;
use links::{choose_codec, codecs, timeouts};
use partitioning::{balance_options, implied_placement, partitioning, placement, Partitioning};
use std::path::PathBuf;
use std::time::Duration;
use training::{clip_norm, frozen, groups, optimizer, smoothed};
use workers::workers;

/// A validated run.
pub struct RunConfig {
    /// The flags with all defaults, as written to the run's log.
    pub flags: TrainFlags,
    /// The flags without defaults; for a resumed run, including those of the checkpoint.
    pub given: TrainFlags,
    /// The model to train.
    pub model: Model,
    pub train: Loader,
    /// Test data, unless evaluation is off.
    pub test: Option<Loader>,
    /// Options of the trainer.
    pub options: TrainOptions,
    /// Initial weights from a file.
    pub weights: Option<FittedWeights>,
    /// Where to save checkpoints, and which one to resume from.
    pub saving: Option<CheckpointConfig>,
    /// Directory for the tensors that `--capture` saves.
    pub capture: Option<PathBuf>,
    /// Directory of the log.
    pub log: Option<PathBuf>,
    /// Whether the log includes a trace.
    pub trace: bool,
    /// Whether to print the result as JSON.
    pub json: bool,
    pub balance_options: BalanceOptions,
    partitioning: Partitioning,
    plan: Option<Plan>,
    workers: Workers,
    /// Devices and threads of the workers.
    pub compute: Compute,
    pub optim: Optim,
    groups: Vec<ParameterGroup>,
    learning_rate: f64,
    clip_norm: Option<f64>,
    loss: Loss,
    codecs: CodecPolicy,
    timeouts: Timeouts,
}

impl RunConfig {
    pub fn new(given: &TrainFlags) -> anyhow::Result<Self> {
        Self::resuming(given, given)
    }

    /// Validates the flags of the checkpoint that `given` says to resume from, overridden by `given`; or `otherwise`, if there is
    /// no checkpoint.
    pub fn resuming(given: &TrainFlags, otherwise: &TrainFlags) -> anyhow::Result<Self> {
        mpi::check_flags(given)?;
        check_directories(given)?;
        let (saving, given) = CheckpointConfig::open(given, otherwise)?;
        // Those that come from the checkpoint.
        check_directories(&given)?;
        Self::validated(saving, given)
    }

    fn validated(mut saving: Option<CheckpointConfig>, mut given: TrainFlags) -> anyhow::Result<Self> {
        let plan = given.plan.as_deref().map(|path| plan::given(path, &given)).transpose()?;
        let mut flags = given.or_defaults()?;
        let mut model =
            model("--model", flags.model.as_deref().unwrap_or_default(), &flags.set, ExportedFlags::of(&flags))?;
        let resumes = saving.as_ref().is_some_and(|saving| saving.from.is_some());
        if resumes || (flags.weights.is_some() && flags.init_missing != Some(true)) {
            // Other weights replace all of them.
            model.weights = None;
        }
        flags.place = implied_placement(&flags, &model, plan.as_ref())?;
        let replicas = flags.replicas.unwrap_or(1);
        if !(1..=REPLICAS_MAX).contains(&replicas) {
            return Err(usage(format!("--replicas {replicas}: expected 1 to {REPLICAS_MAX}")));
        }
        let placement = placement(&flags, plan.as_ref())?;
        let partitioning = partitioning(&flags, &model, placement.as_ref(), plan.is_some())?;
        let replica_workers = placement.as_ref().map_or(partitioning.partitions(), Placement::workers);
        let worker_count = replica_workers.saturating_mul(replicas);
        let workers = workers(&flags, worker_count)?;
        let compute = Compute::new(&flags, &workers, worker_count)?;
        flags.threads = Some(compute.threads);
        let (train, test, loss) = loaders(&flags, &model)?;
        plan::check_batch(&flags, plan.as_ref())?;
        check_log(&flags, saving.as_ref())?;
        let (optim, learning_rate) = optimizer(&flags)?;
        let groups = groups(&flags)?;
        if let Some(saving) = &saving {
            let frozen: Vec<&str> = frozen(&flags).collect();
            saving.check_same(&model, flags.seed.unwrap_or_default(), optim, &groups, &frozen)?;
        }
        let weights = initial_weights(&flags, &model, saving.as_ref())?;
        choose_codec(&mut flags, &workers)?;
        given.codec = given.codec.and(flags.codec.clone());
        if let Some(saving) = &mut saving {
            saving.keep_codec(given.codec.as_ref());
        }
        let codecs = codecs(&flags)?;
        let options = training::options(&flags, replica_workers, &workers, &codecs)?;
        Ok(RunConfig {
            train,
            test,
            options,
            weights,
            saving,
            given,
            capture: flags.capture.clone(),
            log: flags.log.clone(),
            trace: flags.trace == Some(true),
            json: flags.json == Some(true),
            balance_options: balance_options(&flags)?,
            partitioning,
            plan,
            workers,
            compute,
            optim,
            groups,
            learning_rate,
            clip_norm: clip_norm(&flags)?,
            loss: smoothed(loss, &flags)?,
            codecs,
            timeouts: timeouts(&flags)?,
            model,
            flags,
        })
    }

    /// What `--save` writes about the model.
    pub fn about_model(&self) -> anyhow::Result<SavedModel> {
        SavedModel::of(self)
    }

    /// Whether all workers are threads of this process, so that links are nearly free.
    pub fn links_are_memory(&self) -> bool {
        matches!(self.workers, Workers::Threads)
    }

    /// Whether a codec other than `raw` applies to all links.
    pub fn encodes(&self) -> bool {
        !(self.codecs.forward.is_raw() && self.codecs.backward.is_raw())
    }

    /// What `--auto-balance` measures the layers with; `None` without it.
    pub fn balance_sample(&self) -> Option<SampleArgs> {
        let measures = matches!(self.partitioning, Partitioning::AutoBalance { .. });
        measures.then(|| SampleArgs::of_run(&self.flags, self.compute.threads, self.micro_batch_rows()))
    }

    fn micro_batch_rows(&self) -> usize {
        let micro_batches = plan::micro_batches(&self.flags, self.plan.as_ref());
        let all = micro_batches.saturating_mul(self.flags.replicas.unwrap_or(1)).max(1);
        (self.flags.batch.unwrap_or(1) / all).max(1)
    }

    /// Builds the pipeline, which starts the workers, and loads initial weights. `measured` are the costs of the layers and the
    /// time to search, for `--auto-balance`.
    pub fn start(&self, measured: Option<(Vec<LayerProfile>, Duration)>) -> anyhow::Result<Pipeline> {
        name_servers(&self.flags, self.plan.as_ref(), &self.partitioning)?;
        let mut pipeline = build(self.builder(measured)?)?;
        if let Some(weights) = &self.weights {
            weights.notes.iter().for_each(|note| report::note(note));
            weights.load(&mut pipeline).context("--weights")?;
        }
        Ok(pipeline)
    }

    fn builder(&self, measured: Option<(Vec<LayerProfile>, Duration)>) -> anyhow::Result<Builder> {
        let flags = &self.flags;
        let mut builder = common_builder(&self.model, flags, &self.compute)
            .schedule(flags.schedule.unwrap_or_default())
            .recompute(flags.recompute.unwrap_or_default())
            .workers(self.workers.clone())
            .optimizer(self.optim)
            .fused_optimizer(flags.fused_optimizer == Some(true))
            .learning_rate(self.learning_rate)
            .loss(self.loss)
            .codecs(self.codecs.clone())
            .reduce(flags.reduce.unwrap_or_default())
            .trace(self.trace)
            .timeouts(self.timeouts);
        builder = self.groups.iter().fold(builder, |builder, group| builder.parameter_group(group.clone()));
        builder = frozen(flags).fold(builder, |builder, pattern| builder.freeze(pattern));
        if let Some(norm_max) = self.clip_norm {
            builder = builder.clip_norm(norm_max);
        }
        if let Some(plan) = &self.plan {
            builder = builder.plan(plan.clone());
        }
        Ok(match &self.partitioning {
            Partitioning::Balance(balance) => builder.balance(balance.sizes()),
            Partitioning::AutoBalance { partitions } => {
                let BalanceOptions { by, memory_limit_bytes, link } = self.balance_options;
                let (profile, search_limit) = measured.unzip();
                builder.auto_balance_with(AutoBalance {
                    objective: by,
                    link,
                    memory_limit_bytes,
                    profile,
                    search_limit,
                    ..AutoBalance::new(*partitions, self.train.sample(self.micro_batch_rows())?)
                })
            }
        })
    }
}

/// A builder with what flags say of training and inference alike.
fn common_builder(model: &Model, flags: &TrainFlags, compute: &Compute) -> Builder {
    let builder = Pipeline::builder(model.clone())
        .replicas(flags.replicas.unwrap_or(1))
        .micro_batches(flags.chunks.unwrap_or(1))
        .seed(flags.seed.unwrap_or_default())
        .device(flags.devices())
        .threads(compute.threads)
        .channels_last(flags.no_channels_last != Some(true))
        .precision(flags.precision.unwrap_or_default())
        .tf32(flags.tf32.unwrap_or_default())
        .cudnn_benchmark(flags.cudnn_benchmark == Some(true))
        .cudnn_deterministic(flags.cudnn_deterministic == Some(true))
        .graphs(flags.graph_options())
        .phases(flags.phases.unwrap_or_default())
        .on_notice(report::notice)
        .faults(flags.faults.clone().unwrap_or_default());
    match &flags.place {
        Some(place) => builder.place(place),
        None => builder,
    }
}

/// Has notices name the servers of `--server`, already while they are joined.
fn name_servers(flags: &TrainFlags, plan: Option<&Plan>, partitioning: &Partitioning) -> anyhow::Result<()> {
    let replicas = flags.replicas.unwrap_or(1);
    let placement = placement(flags, plan)?;
    let placement = placement.unwrap_or_else(|| Placement::one_worker_each(partitioning.partitions()));
    let members = (0..replicas).flat_map(|replica| (0..placement.workers()).map(move |worker| (worker, replica)));
    let name = |(worker, replica)| placement.member_name(WorkerId::new(worker), replica, replicas);
    report::name_servers(members.skip(1).map(name).zip(flags.server.iter().cloned()).collect());
    Ok(())
}

/// Builds a pipeline. Errors name the flags.
fn build(builder: Builder) -> anyhow::Result<Pipeline> {
    builder.build().map_err(|error| match error {
        BuildError::Failed(failure) => failure.into(),
        BuildError::Scenario(e) => usage(format!("--faults: {e}")),
        BuildError::Balance(e) => usage(format!("--balance: {e}")),
        BuildError::AutoBalance(e) => no_cut("--auto-balance", *e),
        BuildError::Schedule(e) => usage(format!("--schedule: {e}")),
        BuildError::GraphsOfReplicas { .. } => usage(
            "--graphs on: replicas run without CUDA graphs, because they share gradients while backward passes run: use --graphs \
             auto, or one replica",
        ),
        BuildError::Plan(e) => usage(format!("--plan: {e}")),
        BuildError::CodecPolicy(e @ CodecPolicyError::Replicas { .. }) => usage(e.to_string()),
        BuildError::CodecPolicy(e) => usage(format!("--codec-link: {e}")),
        other => usage(other.to_string()),
    })
}

/// Whether the directories of a run can be written to.
fn check_directories(flags: &TrainFlags) -> anyhow::Result<()> {
    let paths = [("--checkpoint", &flags.checkpoint), ("--log", &flags.log), ("--capture", &flags.capture)];
    paths
        .iter()
        .filter_map(|(flag, path)| Some((flag, path.as_deref()?)))
        .try_for_each(|(f, path)| check_directory(f, path))
}

/// Whether `--log` and `--trace` go together, and the log directory is free. A resumed run continues its log; so does one with
/// `--resume=if-any` that was killed before its first checkpoint.
fn check_log(flags: &TrainFlags, saving: Option<&CheckpointConfig>) -> anyhow::Result<()> {
    if flags.trace == Some(true) && flags.log.is_none() {
        return Err(usage("--trace: add --log DIR, the directory to write the trace to"));
    }
    let resumes = saving.is_some_and(|saving| saving.resumes);
    match flags.log.as_deref().filter(|log| !resumes && log::is_used(log)) {
        Some(log) => Err(usage(format!(
            "--log {}: the directory has the log of another run: choose another one, or remove it",
            log.display()
        ))),
        None => Ok(()),
    }
}

/// The weights of `--weights`, unless the run resumes: the checkpoint has the current ones.
fn initial_weights(
    flags: &TrainFlags,
    model: &Model,
    saving: Option<&CheckpointConfig>,
) -> anyhow::Result<Option<FittedWeights>> {
    let missing = match flags.init_missing {
        Some(true) if flags.weights.is_none() => {
            return Err(usage("--init-missing: add --weights FILE, the weights to start from"));
        }
        Some(true) => MissingTensors::Initialize,
        _ => MissingTensors::Refuse,
    };
    flags.save.as_deref().map(crate::weights::check_save).transpose()?;
    let resumes = saving.is_some_and(|saving| saving.from.is_some());
    let weights = flags.weights.as_deref().filter(|_| !resumes);
    weights.map(|path| crate::weights::fit(path, model, missing)).transpose()
}
