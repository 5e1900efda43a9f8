//! From flags to a run that can start: everything that can be judged without starting a worker is judged here, and
//! every error names its flag and what to do.

use crate::args::{DecayName, OptimizerName, TrainFlags};
use crate::balancing::{no_cut, Judging, JudgingFlags};
use crate::checkpoint::Saving;
use crate::cmd::worker::given_token;
use crate::datasets::loaders;
use crate::exit::usage;
use crate::files::read_text;
use crate::report::log;
use crate::weights::{Fitted, Missing};
use anyhow::Context;
use distgpipe::codecs::Codecs;
use distgpipe::core::cut::placement;
use distgpipe::core::microbatch::MicroBatches;
use distgpipe::core::partition::Balance;
use distgpipe::core::placement::Placement;
use distgpipe::core::schedule::{check, Plan};
use distgpipe::data::{Loader, Pass};
use distgpipe::engine::Devices;
use distgpipe::job::{REPLICAS_MAX, THREADS_MAX};
use distgpipe::model::Recipe;
use distgpipe::models;
use distgpipe::pipeline::{BuildError, Builder};
use distgpipe::rate::{Decay, RateSchedule};
use distgpipe::trainer::{Capture, TrainOptions};
use distgpipe::transport::Timeouts;
use distgpipe::{AutoBalance, Loss, Model, Optim, Pipeline, WorkerProgram, Workers};
use std::path::{Path, PathBuf};

/// The most bytes of a plan file: the largest plan takes less.
const PLAN_BYTES_MAX: u64 = 64 << 20;
/// The most bytes of a model's config.json; a list of a million labels takes less.
const MODEL_CONFIG_BYTES_MAX: u64 = 32 << 20;

enum Cut {
    Given(Balance),
    /// Into so many partitions, by measurement.
    Measured(usize),
}

/// A run that can start.
pub struct RunConfig {
    /// With every default filled in: what the run's log keeps.
    pub flags: TrainFlags,
    /// Without the defaults; with the flags of the checkpoint that it goes on from.
    pub given: TrainFlags,
    /// The model.
    pub model: Model,
    /// To learn from.
    pub train: Loader,
    /// To test with.
    pub test: Option<Loader>,
    /// How to train.
    pub options: TrainOptions,
    /// Tensors to start from.
    pub weights: Option<Fitted>,
    /// Where to save the run, and what it goes on from.
    pub saving: Option<Saving>,
    /// Where to save what crosses the links.
    pub capture: Option<PathBuf>,
    /// Where to write what happens.
    pub log: Option<PathBuf>,
    /// Whether single events are wanted.
    pub trace: bool,
    /// Whether the result is wanted as JSON.
    pub json: bool,
    /// What `--auto-balance` judges cuts by.
    pub judging: Judging,
    cut: Cut,
    plan: Option<Plan>,
    workers: Workers,
    /// How parameters are stepped.
    pub optim: Optim,
    loss: Loss,
    codecs: Codecs,
    timeouts: Timeouts,
}

impl RunConfig {
    /// Judges the flags.
    pub fn new(given: &TrainFlags) -> anyhow::Result<Self> {
        Self::resuming(given, given)
    }

    /// Judges the flags that the given ones change in the checkpoint that they say to go on from; or, if there is none,
    /// `otherwise`.
    pub fn resuming(given: &TrainFlags, otherwise: &TrainFlags) -> anyhow::Result<Self> {
        let (saving, given) = Saving::open(given, otherwise)?;
        Self::judge(saving, given)
    }

    fn judge(saving: Option<Saving>, given: TrainFlags) -> anyhow::Result<Self> {
        let given = &given;
        let plan = given.plan.as_deref().map(|path| plan_flag(path, given)).transpose()?;
        let mut flags = given.or_defaults()?;
        let model = model("--model", flags.model.as_deref().unwrap_or_default(), &flags.set)?;
        if let (Some(text), None, None) = (&flags.cut, &flags.place, &plan) {
            let balance = models::cut(&model, text).map_err(|e| usage(format!("--cut: {e}")))?;
            flags.place = placement(balance.partitions()).map(str::to_owned);
        }
        let replicas = flags.replicas.unwrap_or(1);
        if !(1..=REPLICAS_MAX).contains(&replicas) {
            return Err(usage(format!("--replicas {replicas}: expected 1 to {REPLICAS_MAX}")));
        }
        let micro_batches = plan.as_ref().map_or(flags.chunks.unwrap_or(1), Plan::micro_batches);
        let (train, test, loss) = loaders(&flags, &model)?;
        let batch = flags.batch.unwrap_or_default();
        let needed = micro_batches.saturating_mul(replicas);
        if MicroBatches::split(batch, needed).is_err() {
            if micro_batches == 0 {
                return Err(usage("--chunks 0: use 1 to run a batch in one piece"));
            }
            let source = if plan.is_some() { "--plan has" } else { "--chunks asks for" };
            let each = if replicas > 1 { format!(" in each of {replicas} replicas") } else { String::new() };
            let mut remedies = vec![format!("--batch {needed} or more")];
            let most = batch / replicas;
            remedies.extend((most > 0).then(|| format!("at most {most} micro-batches")));
            remedies.extend((replicas > 1).then(|| "fewer --replicas".to_owned()));
            return Err(usage(format!(
                "--batch {batch}: {source} {micro_batches} micro-batches{each}, and each needs a row: use {}",
                remedies.join(", or ")
            )));
        }
        let placement = flags.place.as_deref().map(str::parse::<Placement>).transpose();
        let placement = placement.map_err(|e| usage(format!("--place: {e}")))?;
        let placement = placement.or_else(|| plan.as_ref().map(|plan| plan.placement().clone()));
        let cut = cut(&flags, &model, placement.as_ref(), plan.is_some())?;
        let partitions = match &cut {
            Cut::Given(balance) => balance.partitions(),
            Cut::Measured(partitions) => *partitions,
        };
        let worker_count = placement.as_ref().map_or(partitions, Placement::workers);
        let workers = workers(&flags, worker_count.saturating_mul(replicas))?;
        if let Some(threads) = flags.threads.filter(|threads| !(1..=THREADS_MAX).contains(threads)) {
            return Err(usage(format!("--threads {threads}: use 1 to {THREADS_MAX}")));
        }
        check_devices(&flags.device.clone().unwrap_or_default(), worker_count.saturating_mul(replicas), &workers)?;
        let (optim, learning_rate) = optimizer(&flags)?;
        let trace = flags.trace == Some(true);
        if trace && flags.log.is_none() {
            return Err(usage("--trace: add --log DIR, which says where to write it"));
        }
        // A command that is run again until it is done may have been killed before its first checkpoint.
        let goes_on = saving.as_ref().is_some_and(|saving| saving.resumes);
        if let Some(log) = flags.log.as_deref().filter(|log| !goes_on && log::is_used(log)) {
            let log = log.display();
            return Err(usage(format!(
                "--log {log}: it has the log of another run: name another folder, or remove this one"
            )));
        }
        let options = TrainOptions {
            epochs: flags
                .epochs
                .filter(|&n| n > 0)
                .ok_or_else(|| usage("--epochs 0: use 1 or more; --steps limits further"))?,
            steps_max: flags.steps,
            learning_rate,
            rate: rate(&flags)?,
            accumulate: accumulate(&flags)?,
            clip_norm: clip_norm(&flags)?,
            capture: capture(&flags, worker_count)?,
            ..TrainOptions::default()
        };
        let resumes = saving.as_ref().is_some_and(|saving| saving.from.is_some());
        let missing = match flags.init_missing {
            Some(true) if flags.weights.is_none() => {
                return Err(usage("--init-missing: add --weights FILE, which says what is not missing"));
            }
            Some(true) => Missing::Initialize,
            _ => Missing::Refuse,
        };
        // A checkpoint has what became of them.
        let weights = flags.weights.as_deref().filter(|_| !resumes);
        let weights = weights.map(|path| crate::weights::fit(path, &model, missing)).transpose()?;
        flags.save.as_deref().map(crate::weights::check_save).transpose()?;
        Ok(RunConfig {
            train,
            test,
            options,
            weights,
            saving,
            given: given.clone(),
            capture: flags.capture.clone(),
            log: flags.log.clone(),
            trace,
            json: flags.json == Some(true),
            judging: judging(&flags)?,
            cut,
            plan,
            workers,
            optim,
            loss: smoothed(loss, &flags)?,
            codecs: codecs(&flags)?,
            timeouts: timeouts(&flags)?,
            model,
            flags,
        })
    }

    /// Whether all workers are threads of this process, so that links cost next to nothing.
    pub fn links_are_memory(&self) -> bool {
        matches!(self.workers, Workers::Threads)
    }

    /// Whether codecs were chosen for more than single links.
    pub fn encodes(&self) -> bool {
        !(self.codecs.forward.is_raw() && self.codecs.backward.is_raw())
    }

    /// Starts the workers.
    pub fn start(&self) -> anyhow::Result<Pipeline> {
        let mut pipeline = self.builder()?.build().map_err(|error| match error {
            BuildError::Failed(failure) => failure.into(),
            BuildError::Scenario(e) => usage(format!("--faults: {e}")),
            BuildError::Balance(e) => usage(format!("--balance: {e}")),
            BuildError::AutoBalance(e) => no_cut("--auto-balance", *e),
            BuildError::Schedule(e) => usage(format!("--schedule: {e}")),
            BuildError::Plan(e) => usage(format!("--plan: {e}")),
            BuildError::Codecs(e) => usage(format!("--codec-link: {e}")),
            other => usage(other.to_string()),
        })?;
        if let Some(weights) = &self.weights {
            weights.notes.iter().for_each(|note| crate::report::note(note));
            weights.load(&mut pipeline)?;
        }
        Ok(pipeline)
    }

    fn builder(&self) -> anyhow::Result<Builder> {
        let flags = &self.flags;
        let mut builder = Pipeline::builder(self.model.clone())
            .replicas(flags.replicas.unwrap_or(1))
            .micro_batches(flags.chunks.unwrap_or(1))
            .schedule(flags.schedule.unwrap_or_default())
            .recompute(flags.recompute.unwrap_or_default())
            .workers(self.workers.clone())
            .optimizer(self.optim, self.options.learning_rate)
            .loss(self.loss)
            .codecs(self.codecs.clone())
            .seed(flags.seed.unwrap_or_default())
            .device(flags.device.clone().unwrap_or_default())
            .threads(flags.threads.unwrap_or(1))
            .channels_last(flags.no_channels_last != Some(true))
            .precision(flags.precision.unwrap_or_default())
            .trace(self.trace)
            .timeouts(self.timeouts)
            .faults(flags.faults.clone().unwrap_or_default());
        if let Some(place) = &flags.place {
            builder = builder.place(place);
        }
        if let Some(plan) = &self.plan {
            builder = builder.plan(plan.clone());
        }
        Ok(match &self.cut {
            Cut::Given(balance) => builder.balance(balance.sizes()),
            Cut::Measured(partitions) => {
                // As large as a micro-batch will be.
                let micro_batches = self.plan.as_ref().map_or(flags.chunks.unwrap_or(1), Plan::micro_batches);
                let all = micro_batches.saturating_mul(flags.replicas.unwrap_or(1)).max(1);
                let rows = (flags.batch.unwrap_or(1) / all).max(1);
                let rows: Vec<usize> = (0..rows.min(self.train.data().len())).collect();
                let sample = self.train.data().batch(&rows, Pass::new(flags.seed.unwrap_or_default(), 0))?;
                let Judging { by, memory_limit_bytes, link } = self.judging;
                builder.auto_balance_with(AutoBalance {
                    by,
                    link,
                    memory_limit_bytes,
                    ..AutoBalance::new(*partitions, sample)
                })
            }
        })
    }
}

/// A built-in model, named by a flag, with settings of the form `key=value`.
pub fn model(flag: &str, name: &str, set: &[String]) -> anyhow::Result<Model> {
    let mut settings = models::default_settings(name).map_err(|e| usage(format!("{flag}: {e}")))?;
    for setting in set {
        let Some((key, value)) = setting.split_once('=') else {
            return Err(usage(format!("--set {setting}: expected KEY=VALUE, such as classes=10")));
        };
        if (name, key.trim()) == ("roberta", "config") {
            // All settings at once; later ones change single ones.
            let text = read_text("--set config", Path::new(value), MODEL_CONFIG_BYTES_MAX)?;
            let read = models::Roberta::from_hugging_face(&text).map_err(|e| usage(format!("--set {setting}: {e}")))?;
            settings = serde_json::to_value(read)?;
            continue;
        }
        // What is no JSON is a word.
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        match settings.get_mut(key.trim()) {
            Some(slot) => *slot = value,
            None => {
                let known: Vec<String> =
                    settings.as_object().into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
                return Err(usage(format!(
                    "--set {setting}: {name} has no such setting; it has (with defaults) {}",
                    known.join(", ")
                )));
            }
        }
    }
    let model = models::build(&Recipe { name: name.to_owned(), settings }).map_err(|e| usage(format!("--set: {e}")))?;
    model.summary().map_err(|e| usage(format!("--set: {e}")))?;
    Ok(model)
}

/// Reads and checks the plan that a flag names.
pub fn read_plan(flag: &str, path: &Path) -> anyhow::Result<Plan> {
    let named = || format!("{flag} {}", path.display());
    let plan: Plan = read_text(flag, path, PLAN_BYTES_MAX)?.parse().with_context(named)?;
    check(&plan).with_context(named)?;
    Ok(plan)
}

fn plan_flag(path: &Path, given: &TrainFlags) -> anyhow::Result<Plan> {
    let others = [
        ("--schedule", given.schedule.is_some()),
        ("--chunks", given.chunks.is_some()),
        ("--recompute", given.recompute.is_some()),
        ("--place", given.place.is_some()),
    ];
    if let Some((flag, _)) = others.iter().find(|(_, given)| *given) {
        return Err(usage(format!("--plan: the plan says this itself: remove {flag}")));
    }
    read_plan("--plan", path).map_err(|e| usage(format!("{e:#}")))
}

fn cut(flags: &TrainFlags, model: &Model, placement: Option<&Placement>, from_plan: bool) -> anyhow::Result<Cut> {
    let layers = model.layers.len();
    let given = [
        ("--partitions", flags.partitions.is_some()),
        ("--balance", flags.balance.is_some()),
        ("--cut", flags.cut.is_some()),
        ("--auto-balance", flags.auto_balance.is_some()),
    ];
    let given: Vec<&str> = given.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
    if let [first, second, ..] = given[..] {
        return Err(usage(format!("{first} and {second} both say how to cut the model: keep one")));
    }
    let source = if from_plan { "--plan" } else { "--place" };
    let flag = given.first().copied().unwrap_or(source);
    let placed = placement.map(Placement::partitions);
    let fits = |partitions: usize| match placed {
        Some(placed) if placed != partitions => Err(usage(format!(
            "{flag} makes {partitions} partitions, and {source} names workers for {placed}: give both the same number"
        ))),
        _ => Ok(()),
    };
    if let Some(partitions) = flags.auto_balance {
        Balance::even(layers, partitions).map_err(|e| usage(format!("{flag}: {e}")))?;
        fits(partitions)?;
        return Ok(Cut::Measured(partitions));
    }
    let balance = match (&flags.balance, &flags.cut) {
        (Some(text), _) => text.parse::<Balance>().and_then(|balance| balance.check(layers).map(|()| balance)),
        (None, Some(text)) => Ok(models::cut(model, text).map_err(|e| usage(format!("--cut: {e}")))?),
        (None, None) => Balance::even(layers, flags.partitions.or(placed).unwrap_or(1)),
    };
    let balance = balance.map_err(|e| usage(format!("{flag}: {e}")))?;
    fits(balance.partitions())?;
    Ok(Cut::Given(balance))
}

fn judging(flags: &TrainFlags) -> anyhow::Result<Judging> {
    let judging = JudgingFlags {
        by: flags.balance_by,
        memory_limit: flags.memory_limit.as_deref(),
        link_rate: flags.link_rate.as_deref(),
        link_latency: flags.link_latency,
    };
    match judging.first_given() {
        Some(flag) if flags.auto_balance.is_none() => {
            Err(usage(format!("{flag}: it is for cuts that are measured: add --auto-balance N, or remove it")))
        }
        _ => judging.read(),
    }
}

fn workers(flags: &TrainFlags, count: usize) -> anyhow::Result<Workers> {
    let addresses: Vec<String> = match flags.workers.as_deref().unwrap_or("threads") {
        "threads" => return Ok(Workers::Threads),
        "processes" => {
            let program = std::env::current_exe().context("--workers processes: asking where this program is")?;
            return Ok(Workers::Processes(WorkerProgram {
                program,
                arguments: vec!["worker".to_owned(), "--child".to_owned()],
            }));
        }
        addresses => addresses.split(',').map(|address| address.trim().to_owned()).collect(),
    };
    if let Some(wrong) = addresses.iter().find(|address| !address.contains(':')) {
        return Err(usage(format!(
            "--workers {wrong}: expected `threads`, `processes`, or addresses such as 10.0.0.2:7000"
        )));
    }
    if let Some(twice) = addresses.iter().enumerate().find(|(i, address)| addresses[..*i].contains(address)) {
        return Err(usage(format!(
            "--workers: {} is named twice, and a waiting worker takes one part: start another `distgpipe worker`",
            twice.1
        )));
    }
    if count == 1 {
        return Err(usage(
            "--workers: there is one partition, and it is this process's: cut the model with --partitions or --balance, or \
             have --replicas of it",
        ));
    }
    if addresses.len() + 1 != count {
        return Err(usage(format!(
            "--workers: expected {} address(es) for {count} workers, since the first is this process; got {}: see --place and --replicas",
            count.saturating_sub(1),
            addresses.len()
        )));
    }
    let token = given_token(flags.token_file.as_deref())?.ok_or_else(|| {
        usage("--workers: the waiting workers have a token: give it with --token-file FILE or the variable DISTGPIPE_TOKEN")
    })?;
    Ok(Workers::Remote { addresses, token })
}

fn optimizer(flags: &TrainFlags) -> anyhow::Result<(Optim, f64)> {
    let name = flags.optimizer.unwrap_or(OptimizerName::Sgd);
    // Every optimizer has a default; without one, nothing would be learned and nobody told.
    let learning_rate = flags.lr.ok_or_else(|| usage("--lr: expected a learning rate, got none"))?;
    let learning_rate = within("--lr", Some(learning_rate), 1e3)?;
    let weight_decay = within("--weight-decay", flags.weight_decay, 1.0)?;
    let momentum = within("--momentum", flags.momentum, 1.0)?;
    if flags.momentum.is_some() && matches!(name, OptimizerName::Adam | OptimizerName::Adamw) {
        let name = name.name();
        return Err(usage(format!("--momentum: {name} has none: remove it, or use --optimizer sgd or rmsprop")));
    }
    let nesterov = flags.nesterov == Some(true);
    if nesterov && (name != OptimizerName::Sgd || momentum == 0.0) {
        return Err(usage("--nesterov: it looks ahead by sgd's momentum: use --optimizer sgd and --momentum above 0"));
    }
    let optim = match name {
        OptimizerName::Sgd => Optim::Sgd { momentum, weight_decay, nesterov },
        OptimizerName::Adam => Optim::adam().with_weight_decay(weight_decay),
        OptimizerName::Adamw => Optim::adamw().with_weight_decay(weight_decay),
        OptimizerName::Rmsprop => Optim::rms_prop(momentum).with_weight_decay(weight_decay),
    };
    Ok((optim, learning_rate))
}

fn rate(flags: &TrainFlags) -> anyhow::Result<RateSchedule> {
    let decay = match (flags.lr_decay.unwrap_or(DecayName::Constant), flags.lr_power) {
        (DecayName::Polynomial, power) => {
            let power = power.unwrap_or(2.0);
            if !(power.is_finite() && power > 0.0) {
                return Err(usage(format!("--lr-power {power}: expected a number above 0")));
            }
            Decay::Polynomial { power }
        }
        (_, Some(_)) => {
            return Err(usage("--lr-power: only a polynomial has one: remove it, or use --lr-decay polynomial"));
        }
        (DecayName::Constant, None) => Decay::Constant,
        (DecayName::Cosine, None) => Decay::Cosine,
        (DecayName::Linear, None) => Decay::Linear,
    };
    Ok(RateSchedule { decay, warm_up: flags.lr_warm_up.unwrap_or_default() })
}

fn smoothed(loss: Loss, flags: &TrainFlags) -> anyhow::Result<Loss> {
    match (loss, flags.label_smoothing) {
        (loss, None) => Ok(loss),
        (Loss::CrossEntropy, Some(0.0)) => Ok(Loss::CrossEntropy),
        (Loss::CrossEntropy, Some(share)) if share > 0.0 && share < 1.0 => {
            Ok(Loss::SmoothedCrossEntropy { label_smoothing: share })
        }
        (Loss::CrossEntropy, Some(share)) => {
            Err(usage(format!("--label-smoothing {share}: expected a number from 0 to below 1")))
        }
        (_, Some(_)) => Err(usage("--label-smoothing: this model's targets are no classes: remove it")),
    }
}

fn accumulate(flags: &TrainFlags) -> anyhow::Result<u64> {
    match flags.accumulate.unwrap_or(1) {
        0 => Err(usage("--accumulate 0: an update needs a batch: use 1 to move parameters after each")),
        batches => Ok(batches),
    }
}

fn clip_norm(flags: &TrainFlags) -> anyhow::Result<Option<f64>> {
    match flags.clip_norm {
        Some(norm) if !(norm.is_finite() && norm > 0.0) => {
            Err(usage(format!("--clip-norm {norm}: expected a number above 0; leave it out to clip nothing")))
        }
        norm => Ok(norm),
    }
}

/// A flag's number, if it is from 0 to so much.
fn within(flag: &str, value: Option<f64>, max: f64) -> anyhow::Result<f64> {
    let value = value.unwrap_or_default();
    if value.is_finite() && (0.0..=max).contains(&value) {
        Ok(value)
    } else {
        Err(usage(format!("{flag} {value}: expected a number from 0 to {max}")))
    }
}

/// Whether the devices of the workers on this machine are there, and each has a worker.
fn check_devices(devices: &Devices, worker_count: usize, workers: &Workers) -> anyhow::Result<()> {
    if devices.count() > worker_count {
        return Err(usage(format!(
            "--device {devices}: there are {} devices and {worker_count} worker(s): name fewer, or cut the model further",
            devices.count()
        )));
    }
    let here = match workers {
        Workers::Remote { .. } => 1,
        _ => devices.count(),
    };
    for device in devices.iter().take(here) {
        device.open().map_err(|e| usage(format!("--device: {e}")))?;
    }
    Ok(())
}

fn codecs(flags: &TrainFlags) -> anyhow::Result<Codecs> {
    let parameters = [("--quant", flags.quant.is_some()), ("--split", flags.split.is_some())];
    let forward = match (flags.sortquant == Some(true), &flags.codec) {
        (true, Some(codec)) => {
            return Err(usage(format!("--sortquant and --codec {codec} both say how to encode: keep one")));
        }
        (true, None) => {
            let text = format!("sort:{}+{}", flags.quant.unwrap_or(6), flags.split.unwrap_or(2));
            text.parse().map_err(|e| usage(format!("--sortquant with --quant and --split: {e}")))?
        }
        (false, codec) => {
            if let Some((flag, _)) = parameters.iter().find(|(_, given)| *given) {
                return Err(usage(format!(
                    "{flag}: it is a parameter of --sortquant: add that, or use --codec sort:Q+S"
                )));
            }
            codec.clone().unwrap_or_default()
        }
    };
    let link = |text: &String| text.parse().map_err(|e| usage(format!("--codec-link: {e}")));
    Ok(Codecs {
        backward: flags.codec_backward.clone().unwrap_or_else(|| forward.clone()),
        forward,
        links: flags.codec_link.iter().map(link).collect::<Result<_, _>>()?,
        warm_up_steps: flags.codec_warm_up.unwrap_or(0),
        evaluate: flags.evaluate_raw != Some(true),
    })
}

fn capture(flags: &TrainFlags, workers: usize) -> anyhow::Result<Capture> {
    if flags.capture.is_some() && workers == 1 {
        return Err(usage("--capture: with one worker nothing crosses between partitions: cut the model with --partitions or --balance"));
    }
    match (&flags.capture, flags.capture_step) {
        (None, None) => Ok(Capture::Nothing),
        (None, Some(_)) => Err(usage("--capture-step: add --capture DIR, which says where to save it")),
        (Some(_), None) => Ok(Capture::LastStep),
        (Some(_), Some(0)) => Err(usage("--capture-step 0: steps are counted from 1")),
        (Some(_), Some(step)) => Ok(Capture::Step(step - 1)),
    }
}

fn timeouts(flags: &TrainFlags) -> anyhow::Result<Timeouts> {
    let standard = Timeouts::default();
    let stall_s = flags.timeout.unwrap_or(standard.stall_s);
    if !(stall_s.is_finite() && stall_s > 0.0) {
        return Err(usage(format!("--timeout {stall_s}: expected seconds above 0")));
    }
    Ok(Timeouts { stall_s, silence_s: standard.silence_s.min(stall_s), ..standard })
}
