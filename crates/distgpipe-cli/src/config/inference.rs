//! Validates the flags of `evaluate` and `predict`: weights, the model they belong to, and the pipeline that runs it.

use super::links::{choose_codec, codecs, timeouts};
use super::model::{spec_name, ExportedFlags};
use super::partitioning::{implied_placement, partitioning, placement, Partitioning};
use super::workers::workers;
use super::{build, common_builder, model, model_of, name_servers};
use crate::args::TrainFlags;
use crate::compute::Compute;
use crate::datasets;
use crate::exit::usage;
use crate::mpi;
use crate::saved_model::{self, Normalisation, SavedModel};
use crate::weights::{fit_trained, FittedWeights};
use anyhow::Context;
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::protocol::REPLICAS_MAX;
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::model::exported;
use distgpipe::{Loss, Model, Pipeline, Workers};
use distgpipe_core::placement::Placement;

/// The default of `--batch` where the file does not say it.
const BATCH: usize = 64;
/// The default of `--chunks` with several workers.
const CHUNKS: usize = 4;

/// A trained model, and the pipeline to run it in.
pub struct InferenceConfig {
    /// The given flags on top of those that the file has, with all defaults.
    pub flags: TrainFlags,
    pub model: Model,
    /// What the file says about the model.
    pub about: Option<SavedModel>,
    /// Devices and threads of the workers.
    pub compute: Compute,
    weights: FittedWeights,
    partitioning: Partitioning,
    workers: Workers,
    codecs: CodecPolicy,
    timeouts: Timeouts,
}

impl InferenceConfig {
    /// Validates the flags of a command.
    pub fn new(given: &TrainFlags) -> anyhow::Result<Self> {
        mpi::check_flags(given)?;
        let path = given.weights.as_deref();
        let path =
            path.ok_or_else(|| usage("add --weights FILE, the trained model: what `train --save FILE` wrote"))?;
        let saved_model::Opened { file, source, about } = saved_model::open(path)?;
        let model = model_for(given, about.as_ref())?;
        let mut flags = match &about {
            Some(about) => about.flags.clone().overlaid(given)?,
            None => given.clone(),
        };
        flags.place = implied_placement(&flags, &model, None)?;
        let placement = placement(&flags, None)?;
        let partitioning = partitioning(&flags, &model, placement.as_ref(), false)?;
        let replicas = flags.replicas.unwrap_or(1);
        if !(1..=REPLICAS_MAX).contains(&replicas) {
            return Err(usage(format!("--replicas {replicas}: expected 1 to {REPLICAS_MAX}")));
        }
        let worker_count = placement.as_ref().map_or(partitioning.partitions(), Placement::workers) * replicas;
        flags.chunks = Some(flags.chunks.unwrap_or(if worker_count == 1 { 1 } else { CHUNKS }));
        flags.batch = Some(flags.batch.unwrap_or(BATCH));
        if flags.chunks == Some(0) || flags.batch == Some(0) {
            return Err(usage("--batch and --chunks: use 1 or more"));
        }
        let workers = workers(&flags, worker_count)?;
        let compute = Compute::new(&flags, &workers, worker_count)?;
        flags.threads = Some(compute.threads);
        let weights = fit_trained(&file, source, &model)?;
        choose_codec(&mut flags, &workers)?;
        Ok(InferenceConfig {
            weights,
            codecs: codecs(&flags)?,
            timeouts: timeouts(&flags)?,
            flags,
            model,
            about,
            compute,
            partitioning,
            workers,
        })
    }

    /// Rows per batch.
    pub fn batch_rows(&self) -> usize {
        self.flags.batch.unwrap_or(BATCH)
    }

    /// Whether data that is normalised in this way is what the model was trained on.
    pub fn check_normalisation(&self, got: Option<&Normalisation>) -> anyhow::Result<()> {
        let expected = self.about.as_ref().and_then(|about| about.normalisation.as_ref());
        let near = |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        match (expected, got) {
            (Some(a), Some(b)) if !(near(&a.mean, &b.mean) && near(&a.deviation, &b.deviation)) => {
                let text = |n: &Normalisation| format!("mean {:?} and deviation {:?}", n.mean, n.deviation);
                let name = self.flags.data.map(|data| data.name()).unwrap_or_default();
                Err(usage(format!(
                    "--data {name}: the model was trained on colours with {}, and this data is prepared with {}: use data of the kind it was trained on",
                    text(a),
                    text(b)
                )))
            }
            _ => Ok(()),
        }
    }

    /// The names of the classes: those of the file, otherwise those of the data set that `--data` names; `None` if neither has any.
    pub fn class_names(&self) -> anyhow::Result<Option<Vec<String>>> {
        match &self.about {
            Some(about) => Ok(about.classes.clone()),
            None if self.flags.data.is_some() => datasets::class_names(&self.flags, &self.model),
            None => Ok(None),
        }
    }

    /// Builds the pipeline, which starts the workers, and loads the weights.
    pub fn start(&self, loss: Loss) -> anyhow::Result<Pipeline> {
        let mut builder = common_builder(&self.model, &self.flags, &self.compute)
            .workers(self.workers.clone())
            .loss(loss)
            .codecs(self.codecs.clone())
            .timeouts(self.timeouts);
        if let Partitioning::Balance(balance) = &self.partitioning {
            builder = builder.balance(balance.sizes());
        }
        name_servers(&self.flags, None, &self.partitioning)?;
        let mut pipeline = build(builder)?;
        self.weights.notes.iter().for_each(|note| crate::report::note(note));
        self.weights.load(&mut pipeline).context("--weights")?;
        Ok(pipeline)
    }
}

/// The exported model of a file, with the layers of `--layers`. Its graph is that of the training run, so no flag replaces it.
fn saved_export(given: &TrainFlags, about: &SavedModel, name: Option<&str>) -> anyhow::Result<Model> {
    let refused = |flag: &str| {
        Err(usage(format!(
            "{flag}: the file of --weights has the graph of its model, as it was trained: remove the flag"
        )))
    };
    match (name, given.set.first()) {
        (Some(name), _) => return refused(&format!("--model {name}")),
        (None, Some(setting)) => return refused(&format!("--set {setting}")),
        (None, None) if given.untie == Some(true) => return refused("--untie"),
        (None, None) => {}
    }
    let mut saved: exported::Exported = about.model.settings().map_err(|e| usage(format!("--weights: {e}")))?;
    if given.layers.is_some() {
        saved.layers = ExportedFlags::of(given).options().layers;
    }
    saved.model().map_err(|e| usage(format!("--weights: {e}")))
}

/// The model that the file names, with the settings of `--set`; or that of `--model` and `--set`, if the file names none.
fn model_for(given: &TrainFlags, about: Option<&SavedModel>) -> anyhow::Result<Model> {
    match (about, &given.model) {
        (Some(about), Some(name)) if about.model.name != spec_name(name) => Err(usage(format!(
            "--model {name}: the weights are those of {}: remove the flag, or name other weights",
            about.model.name
        ))),
        (Some(about), name) if about.model.name == exported::NAME => saved_export(given, about, name.as_deref()),
        (Some(about), _) => {
            ExportedFlags::of(given).check_for(&about.model.name)?;
            model_of(&about.model, &given.set)
        }
        (None, Some(name)) => {
            let model = model("--model", name, &given.set, ExportedFlags::of(given))?;
            // The trained weights replace those of an exported model.
            Ok(Model { weights: None, ..model })
        }
        (None, None) => Err(usage(
            "--weights: the file does not say which model it belongs to, because `distgpipe train --save` did not write it: add \
             --model NAME, and --set KEY=VALUE for each setting that is not the default",
        )),
    }
}
