//! The flags of a training run as they are written: on the command line, in a TOML file, or in a preset.
//!
//! One list of fields serves all three, and what it lacks is filled in by [`TrainFlags::or_defaults`]. Nothing is
//! judged here; that is [`crate::config`]'s.

use crate::exit::usage;
use crate::files::read_text;
use clap::{Args as _, ValueEnum};
use distgpipe::core::balance::Objective;
use distgpipe::core::codec::Spec;
use distgpipe::core::schedule::{Recompute, Schedule};
use distgpipe::engine::Devices;
use distgpipe::rate::WarmUp;
use distgpipe::Precision;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The most bytes of a configuration file.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Flags that take the place of others: where one of the first is given, none of the second is taken from below, be that a file,
/// a recipe or a checkpoint. So nobody is told to remove what he did not say.
const DISPLACED: [(&[&str], &[&str]); 6] = [
    (&["partitions", "balance", "cut", "auto-balance"], &CUTS),
    (&["plan"], &["place", "chunks", "schedule", "recompute"]),
    (&["chunks", "schedule", "recompute"], &["plan"]),
    (&["codec"], &["sortquant", "quant", "split"]),
    (&["sortquant"], &["codec"]),
    (&["lr-decay"], &["lr-power"]),
];

/// Everything that belongs to one cut of the model.
const CUTS: [&str; 11] = [
    "partitions",
    "balance",
    "cut",
    "auto-balance",
    "plan",
    "place",
    "balance-by",
    "memory-limit",
    "link-rate",
    "link-latency",
    "codec-link",
];

/// The same for flags whose value has to be another one for that.
const DISPLACED_BY_ANOTHER: [(&str, &[&str]); 2] =
    [("optimizer", &["momentum", "nesterov", "lr", "weight-decay"]), ("data", &["data-dir", "samples"])];

/// The data sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataName {
    /// 1,797 handwritten digits, built in
    Digits,
    /// Made up for the model's input; learnable
    Synthetic,
    /// CIFAR-10: 60,000 images of 10 classes
    Cifar10,
    /// CIFAR-100: 60,000 images of 100 classes
    Cifar100,
    /// Food-101: 101,000 photographs of 101 dishes
    Food101,
    /// Your own: DIR/train/CLASS/… and DIR/test/CLASS/… with JPEG and PNG files
    ImageFolder,
    /// GLUE's RTE: whether a sentence follows from another
    Rte,
    /// GLUE's CoLA: whether a sentence is English
    Cola,
}

impl DataName {
    /// As the flag has it.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// The optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerName {
    /// Stochastic gradient descent with momentum
    Sgd,
    /// Adam
    Adam,
    /// Adam with weight decay apart from the gradient
    Adamw,
    /// RMSprop, not centred
    Rmsprop,
}

impl OptimizerName {
    /// As the flag has it.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// How the learning rate falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecayName {
    /// It stays
    Constant,
    /// Down to 0 along half a cosine
    Cosine,
    /// Straight down to 0
    Linear,
    /// Down to 0 as a power of what is left
    Polynomial,
}

/// What to go on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResumeName {
    /// From the newest checkpoint, which must be there
    Newest,
    /// From the newest checkpoint, or from the start if there is none: for a command that is run again until it is done
    IfAny,
}

/// Everything `distgpipe train` takes.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct TrainFlags {
    /// What to train; `distgpipe models` lists them
    #[arg(long, value_name = "NAME", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A setting of the model, such as classes=10 or strides=[1,1,2,2,1,1,2,1]; may be repeated
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub set: Vec<String>,
    /// Start from these weights, by name: a safetensors file, or a file of torch.save
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
    /// Let tensors that the weights lack, and those of the last layer that have another shape, keep their first values:
    /// a new classifier
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_missing: Option<bool>,
    /// What to learn from
    #[arg(long, value_name = "NAME", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataName>,
    /// Where the data set's files are [default: NAME below $XDG_DATA_HOME/distgpipe, where `distgpipe data get` puts them]
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_dir: Option<PathBuf>,
    /// RoBERTa's tokenizer: its tokenizer.json, or the folder with vocab.json and merges.txt
    #[arg(long, value_name = "PATH", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Learn from N rows only, spread over the data set
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Test with N rows only [default: as --limit]
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_test: Option<usize>,
    /// Threads that read and prepare data ahead of the pipeline; they change no result [default: the cores that --threads
    /// leaves, or all beside a GPU]
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader_threads: Option<usize>,
    /// Rows of made-up training data; a quarter as many more are for testing
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,

    /// Cut the model into N partitions with as many layers each
    #[arg(long, value_name = "N", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitions: Option<usize>,
    /// Cut it into partitions of so many layers, such as 1,18,1
    #[arg(long, value_name = "LAYERS,…", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<String>,
    /// Cut it by name: first=1,last=1 keeps both ends with the client, after=LAYER,… cuts there; roberta has roberta-1,
    /// roberta-2 and roberta-3. Three partitions are client,server,client unless --place says otherwise
    #[arg(long, value_name = "CUT", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<String>,
    /// Cut it into N partitions with which a step is quickest, measured first and shown as a table
    #[arg(long, value_name = "N", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_balance: Option<usize>,
    /// What --auto-balance makes small: time (of a step) or memory (of the worker that holds most) [default: time]
    #[arg(long, value_name = "WHAT", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_by: Option<Objective>,
    /// The most that a worker may hold, such as 2GiB; for --auto-balance
    #[arg(long, value_name = "SIZE", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<String>,
    /// What a link between two workers carries, such as 100mbit, 1gbit or 12.5MB/s; for --auto-balance [default: links
    /// count as free]
    #[arg(long, value_name = "RATE", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_rate: Option<String>,
    /// How long a message takes beyond that, in milliseconds; for --auto-balance [default: 0]
    #[arg(long, value_name = "MS", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_latency: Option<f64>,
    /// The worker of each partition, such as client,server,client; the first named is this process [default: one
    /// worker per partition]
    #[arg(long, value_name = "WORKER,…", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// What the workers are: threads of this process, processes on this host, or the addresses where the second and
    /// further ones wait (`distgpipe worker`)
    #[arg(long, value_name = "threads|processes|HOST:PORT,…", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<String>,
    /// File whose first line is the token of the waiting workers [default: the variable DISTGPIPE_TOKEN]
    #[arg(long, value_name = "FILE", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// Data parallelism: so many replicas of all workers share each batch, and add up their gradients before each update
    #[arg(long, value_name = "N", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<usize>,
    /// Micro-batches per batch, in each replica
    #[arg(long, aliases = ["micro-batches", "chunk"], value_name = "N", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// The order of the work: gpipe, 1f1b or interleaved
    #[arg(long, value_name = "NAME", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// A plan of your own instead, in the form that `distgpipe schedule` prints
    #[arg(long, value_name = "FILE", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PathBuf>,
    /// Which micro-batches' activations are computed again instead of kept: never, except-last or always
    #[arg(long, value_name = "WHICH", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
    /// Give up when no worker makes headway for so many seconds
    #[arg(long, value_name = "SECONDS", help_heading = "Pipeline")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,

    /// How activations are encoded between workers, and gradients too unless --codec-backward says otherwise;
    /// `distgpipe codecs` lists codecs and tries them
    #[arg(long, value_name = "CODEC", help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec: Option<Spec>,
    /// How gradients are encoded between workers [default: as activations]
    #[arg(long, value_name = "CODEC", help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec_backward: Option<Spec>,
    /// Other codecs for one link, named by its partitions or its workers, such as 0-1=tile:4 or client-server=tile:4,raw
    /// for activations and gradients; may be repeated
    #[arg(long, value_name = "LINK=CODEC[,CODEC]", help_heading = "Links")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub codec_link: Vec<String>,
    /// Send the tensors of the first N training steps raw
    #[arg(long, value_name = "N", help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec_warm_up: Option<u64>,
    /// Test with raw tensors instead of the codecs of training
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluate_raw: Option<bool>,
    /// The codec sort:Q+S, with Q and S from --quant and --split
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sortquant: Option<bool>,
    /// Q of --sortquant [default: 6]
    #[arg(long, value_name = "BITS", help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quant: Option<u32>,
    /// S of --sortquant [default: 2]
    #[arg(long, value_name = "BITS", help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<u32>,
    /// Save what crosses the links in one step, before any codec, to DIR/step-N.safetensors
    #[arg(long, value_name = "DIR", help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<PathBuf>,
    /// Which step --capture saves, from 1 [default: the last]
    #[arg(long, value_name = "N", help_heading = "Links")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture_step: Option<u64>,

    /// Where every worker computes: cpu, cuda:N, or auto (the first GPU if there is one); several, such as cuda:0,cuda:1,
    /// are taken in turn
    #[arg(long, value_name = "DEVICE[,...]", help_heading = "Engine")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Devices>,
    /// libtorch threads per worker
    #[arg(long, value_name = "N", help_heading = "Engine")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// What every worker computes in: fp32, or bf16 (matrix products and convolutions in bfloat16, as torch.autocast does;
    /// parameters, their gradients and the optimizer stay fp32)
    #[arg(long, value_name = "fp32|bf16", help_heading = "Engine")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Of weights, dropout, data and their order
    #[arg(long, value_name = "N", help_heading = "Engine")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Let images lie channel by channel, which is slower
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Engine")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_channels_last: Option<bool>,

    /// How parameters are stepped
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerName>,
    /// Learning rate [default: 0.05 for sgd, 0.001 for adam and adamw, 0.01 for rmsprop]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// How the learning rate goes on, update by update
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_decay: Option<DecayName>,
    /// The power of --lr-decay polynomial [default: 2]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_power: Option<f64>,
    /// Let the learning rate rise from 0 for the first N updates, or P% of all, before it falls
    #[arg(long, value_name = "N|P%", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_warm_up: Option<WarmUp>,
    /// How much of its last direction sgd or rmsprop keeps [default: 0.9 for sgd, 0 for rmsprop]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// Let sgd look one step of momentum ahead
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nesterov: Option<bool>,
    /// Pulls parameters towards 0 [default: 0.01 for adamw, 0 for the others]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Learn from labels that leave this share to all classes alike; tests are judged without
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_smoothing: Option<f64>,
    /// Scale gradients down where the norm of all of them together is above X
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Move parameters after every N batches, by the mean of their gradients; an epoch's last update may have fewer
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulate: Option<u64>,
    /// Rows of a batch, all micro-batches together; rows that fill no batch at the end of an epoch are left out, others each
    /// time
    #[arg(long, value_name = "ROWS", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// How often the data is gone through
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// End after N training steps, if that is sooner
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Do not test after each epoch
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_evaluate: Option<bool>,

    /// Save the run there after each epoch and at its end, so that it can go on if it is stopped or killed
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PathBuf>,
    /// Save it every N steps instead
    #[arg(long, value_name = "N", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<u64>,
    /// How many of the newest checkpoints stay [default: 2]
    #[arg(long, value_name = "N", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<usize>,
    /// Go on from the newest checkpoint in --checkpoint DIR, with its flags; those given here change them. The cut, the
    /// workers and the device may be others
    #[arg(long, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "newest", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<ResumeName>,

    /// Write the trained model there, under the names that PyTorch knows
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save: Option<PathBuf>,
    /// Write config.toml, steps.jsonl and summary.json there
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
    /// Write every single event there too: trace.jsonl, and trace.json for Perfetto or chrome://tracing
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<bool>,
    /// Print the result as JSON
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<bool>,
    /// Take flags from this TOML file too (`batch = 64`); the command line wins
    #[arg(long, value_name = "FILE.toml", help_heading = "Output")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// What shall go wrong; for tests of failure
    #[arg(long, value_name = "SCENARIO", hide = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<String>,
}

impl TrainFlags {
    /// Has a cut that was found stand in the place of the search for it.
    pub fn keep_cut(&mut self, balance: &[usize]) {
        if self.auto_balance.take().is_some() {
            let sizes: Vec<String> = balance.iter().map(ToString::to_string).collect();
            self.balance = Some(sizes.join(","));
            (self.balance_by, self.memory_limit, self.link_rate, self.link_latency) = (None, None, None, None);
        }
    }

    /// What flags that nobody gave are, except those that depend on others.
    pub fn defaults() -> Self {
        TrainFlags {
            model: Some("mlp".to_owned()),
            data: Some(DataName::Digits),
            workers: Some("threads".to_owned()),
            replicas: Some(1),
            chunks: Some(4),
            schedule: Some(Schedule::OneFOneB),
            recompute: Some(Recompute::Never),
            timeout: Some(300.0),
            codec: Some(Spec::default()),
            device: Some(Devices::default()),
            threads: Some(1),
            precision: Some(Precision::Fp32),
            seed: Some(0),
            optimizer: Some(OptimizerName::Sgd),
            lr_decay: Some(DecayName::Constant),
            accumulate: Some(1),
            batch: Some(64),
            epochs: Some(5),
            ..TrainFlags::default()
        }
    }

    /// With the file of `--config` below the command line.
    pub fn with_config(self) -> anyhow::Result<Self> {
        let Some(path) = self.config.clone() else {
            return Ok(self);
        };
        let text = read_text("--config", &path, CONFIG_BYTES_MAX)?;
        let mut flags = from_toml(&text, &path)?.overlaid(&self)?;
        flags.config = Some(path);
        Ok(flags)
    }

    /// These flags, with those of `other` above them.
    pub fn overlaid(self, other: &Self) -> anyhow::Result<Self> {
        let key = |setting: &str| setting.split('=').next().unwrap_or_default().trim().to_owned();
        let changed: Vec<String> = other.set.iter().map(|setting| key(setting)).collect();
        let mut set: Vec<String> =
            self.set.iter().filter(|setting| !changed.contains(&key(setting))).cloned().collect();
        set.extend(other.set.iter().cloned());
        let table = |flags: &Self| {
            let large = |e| usage(format!("a number is larger than flags may have, {}: {e}", i64::MAX));
            toml::Table::try_from(flags).map_err(large)
        };
        let (mut table, above) = (table(&self)?, table(other)?);
        for (given, displaced) in DISPLACED {
            if given.iter().any(|name| above.contains_key(*name)) {
                table.retain(|name, _| !displaced.contains(&name));
            }
        }
        for (given, displaced) in DISPLACED_BY_ANOTHER {
            if above.contains_key(given) && above.get(given) != table.get(given) {
                table.retain(|name, _| !displaced.contains(&name));
            }
        }
        table.extend(above);
        let mut flags: TrainFlags = table.try_into()?;
        flags.set = set;
        Ok(flags)
    }

    /// With everything that nobody gave filled in.
    pub fn or_defaults(&self) -> anyhow::Result<Self> {
        let mut defaults = Self::defaults();
        if self.plan.is_some() {
            // The plan brings its own.
            (defaults.chunks, defaults.schedule, defaults.recompute) = (None, None, None);
        }
        if self.sortquant == Some(true) {
            defaults.codec = None;
        }
        // What follows belongs to this one, and is not displaced by it.
        defaults.optimizer = self.optimizer.or(defaults.optimizer);
        match defaults.optimizer {
            Some(OptimizerName::Adam) => (defaults.lr, defaults.weight_decay) = (Some(1e-3), Some(0.0)),
            Some(OptimizerName::Adamw) => {
                (defaults.lr, defaults.weight_decay) = (Some(1e-3), Some(0.01));
            }
            Some(OptimizerName::Rmsprop) => {
                (defaults.lr, defaults.weight_decay) = (Some(0.01), Some(0.0));
                defaults.momentum = Some(0.0);
            }
            Some(OptimizerName::Sgd) | None => {
                (defaults.lr, defaults.weight_decay) = (Some(0.05), Some(0.0));
                defaults.momentum = Some(0.9);
            }
        }
        defaults.overlaid(self)
    }

    /// As TOML, for `--config`.
    pub fn to_toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(self)?)
    }

    /// As a command line, for a shell: one piece per flag, with its value.
    pub fn to_words(&self) -> anyhow::Result<Vec<String>> {
        let table = toml::Table::try_from(self)?;
        let mut words = vec!["distgpipe train".to_owned()];
        let mut push = |name: &str, value: &toml::Value| match value {
            toml::Value::Boolean(true) => words.push(format!("--{name}")),
            toml::Value::Boolean(false) => words.push(format!("--{name}=false")),
            toml::Value::String(text) => words.push(format!("--{name} {}", quoted(text))),
            other => words.push(format!("--{name} {other}")),
        };
        for name in names() {
            match table.get(&name) {
                Some(toml::Value::Array(values)) => values.iter().for_each(|v| push(&name, v)),
                Some(value) => push(&name, value),
                None => {}
            }
        }
        Ok(words)
    }

    /// As a command line, in one line.
    pub fn to_command(&self) -> anyhow::Result<String> {
        Ok(self.to_words()?.join(" "))
    }
}

/// As a shell takes it.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// The long flags, in the order of the help.
fn names() -> Vec<String> {
    let command = TrainFlags::augment_args(clap::Command::new("train"));
    command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned)).collect()
}

/// Adds to every flag's help what it is when nobody gives it.
pub fn show_defaults(arg: clap::Arg) -> clap::Arg {
    let table = toml::Table::try_from(TrainFlags::defaults()).unwrap_or_default();
    let default = arg.get_long().and_then(|name| table.get(name)).map(|value| match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    });
    match (default, arg.get_help().map(ToString::to_string)) {
        (Some(default), Some(help)) => arg.help(format!("{help} [default: {default}]")),
        _ => arg,
    }
}

/// The flags in the text of a TOML file; errors name `path` and the key.
pub fn from_toml(text: &str, path: &Path) -> anyhow::Result<TrainFlags> {
    let wrong = |why: String| usage(format!("--config {}: {why}", path.display()));
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| wrong(e.to_string()))?;
    let mut known = names();
    known.retain(|name| name != "config");
    let mut flags = toml::Table::new();
    for (written, value) in table {
        let mut key = written.replace('_', "-");
        if key == "micro-batches" || key == "chunk" {
            key = "chunks".to_owned();
        }
        if !known.contains(&key) {
            let nearest =
                known.iter().max_by(|a, b| strsim::jaro_winkler(a, &key).total_cmp(&strsim::jaro_winkler(b, &key)));
            let nearest = nearest.map(String::as_str).unwrap_or_default();
            return Err(wrong(format!(
                "unknown key `{written}`: the nearest is `{nearest}`; every flag of `distgpipe train` is a key"
            )));
        }
        let value = plain(&key, value).map_err(|why| wrong(format!("`{written}`: {why}")))?;
        // Each alone, so that the error names its key.
        let alone = toml::Table::from_iter([(key.clone(), value.clone())]);
        alone.try_into::<TrainFlags>().map_err(|e| wrong(format!("`{written}`: {}", e.message())))?;
        flags.insert(key, value);
    }
    flags.try_into().map_err(|e: toml::de::Error| wrong(e.message().to_owned()))
}

/// Lists that the command line writes with commas may be lists, and settings may be a table.
fn plain(key: &str, value: toml::Value) -> Result<toml::Value, String> {
    let word = |value: &toml::Value| match value {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Ok(match (key, value) {
        ("balance" | "place" | "workers", toml::Value::Array(values)) => {
            toml::Value::String(values.iter().map(word).collect::<Vec<_>>().join(","))
        }
        ("set", toml::Value::Table(settings)) => {
            let setting = |(key, value): (String, toml::Value)| {
                let value = serde_json::to_string(&value).map_err(|e| e.to_string())?;
                Ok(toml::Value::String(format!("{key}={value}")))
            };
            toml::Value::Array(settings.into_iter().map(setting).collect::<Result<_, String>>()?)
        }
        (_, value) => value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> anyhow::Result<TrainFlags> {
        from_toml(text, Path::new("run.toml"))
    }

    /// Those of docs/training.md. A rate of 0 once took their place.
    #[test]
    fn every_optimizer_has_its_own_defaults() {
        let of = |flags: &TrainFlags| {
            let flags = flags.or_defaults().unwrap();
            (flags.lr, flags.weight_decay, flags.momentum)
        };
        for (optimizer, expected) in [
            (None, (Some(0.05), Some(0.0), Some(0.9))),
            (Some(OptimizerName::Sgd), (Some(0.05), Some(0.0), Some(0.9))),
            (Some(OptimizerName::Adam), (Some(1e-3), Some(0.0), None)),
            (Some(OptimizerName::Adamw), (Some(1e-3), Some(0.01), None)),
            (Some(OptimizerName::Rmsprop), (Some(0.01), Some(0.0), Some(0.0))),
        ] {
            assert_eq!(of(&TrainFlags { optimizer, ..TrainFlags::default() }), expected, "{optimizer:?}");
            // Another one below does not leave its rate behind.
            let below = TrainFlags {
                optimizer: Some(OptimizerName::Sgd),
                lr: Some(0.3),
                momentum: Some(0.5),
                ..TrainFlags::default()
            };
            let above = below.overlaid(&TrainFlags { optimizer, ..TrainFlags::default() }).unwrap();
            let expected = match optimizer {
                None | Some(OptimizerName::Sgd) => (Some(0.3), Some(0.0), Some(0.5)),
                _ => expected,
            };
            assert_eq!(of(&above), expected, "{optimizer:?} over sgd");
        }
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file = parse(
            "batch = 32\nmicro_batches = 2\nbalance = [1, 2]\nschedule = 'gpipe'\n[set]\nclasses = 5\nhidden = [8, 8]",
        )
        .unwrap();
        assert_eq!(parse("lr = 1").unwrap().lr, Some(1.0));
        let line = TrainFlags { batch: Some(16), set: vec!["classes=7".to_owned()], ..TrainFlags::default() };
        let flags = file.overlaid(&line).unwrap();
        assert_eq!((flags.batch, flags.chunks, flags.balance.as_deref()), (Some(16), Some(2), Some("1,2")));
        assert_eq!(flags.set, ["hidden=[8,8]", "classes=7"]);
        assert_eq!(flags.schedule, Some(Schedule::GPipe));
    }

    #[test]
    fn errors_of_the_file_name_the_key_and_the_nearest() {
        let error = |text| parse(text).unwrap_err().to_string();
        assert!(error("shedule = 'gpipe'").contains("unknown key `shedule`: the nearest is `schedule`"));
        assert!(error("batch = 'many'").contains("`batch`: invalid type"), "{}", error("batch = 'many'"));
        assert!(error("config = 'other.toml'").contains("unknown key"));
        assert!(error("batch = ").contains("--config run.toml"));
    }

    #[test]
    fn every_default_survives_the_way_through_toml() {
        let flags = TrainFlags { trace: Some(true), set: vec!["a='b c'".to_owned()], ..TrainFlags::defaults() };
        assert_eq!(parse(&flags.to_toml().unwrap()).unwrap(), flags);
        let command = flags.to_command().unwrap();
        assert!(command.starts_with("distgpipe train --model mlp --set 'a='\\''b c'\\''' --data digits"), "{command}");
        assert!(command.contains("--trace"), "{command}");
    }
}
