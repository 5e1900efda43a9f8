//! The flags of a training run as the user writes them: on the command line, in a TOML file, in a recipe, or saved in a
//! checkpoint. One list of fields serves all four. Nothing is validated here; [`crate::config`] does that.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`choices`] | the values of flags that name one of several things |
//! | [`defaults`] | the values of flags that were not given |
//! | [`precedence`] | how the flags of one source override those of another |
//! | [`config_file`] | flags from and to TOML |
//! | [`command_line`] | flags as a command line, and as help |
//! | [`inference`] | the flags that `evaluate` and `predict` have too |

mod choices;
mod command_line;
mod config_file;
mod defaults;
mod inference;
mod precedence;

pub use choices::{
    CodecChoice, DataName, DecayName, LayersName, LossName, MetricName, NormaliseChoice, OptimizerName, ResumeName,
};
pub use command_line::{explain_numbers, quoted, show_defaults, with_value};
pub use config_file::from_toml;
pub use inference::for_inference;

use distgpipe::engine::Devices;
use distgpipe::train::learning_rate::WarmUp;
use distgpipe::{GraphMode, PhaseTiming, Precision, Reduce, Tf32};
use distgpipe_core::balance::Objective;
use distgpipe_core::codec::CodecSpec;
use distgpipe_core::schedule::{Recompute, Schedule};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The flags of `distgpipe train`. A field is `None`, or empty, where the flag was not given.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct TrainFlags {
    /// Model to train: one that `distgpipe models` lists, or a file of `python3 -m distgpipe_export`
    #[arg(long, value_name = "NAME|FILE.pt2", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Model setting, such as classes=10 or strides=[1,1,2,2,1,1,2,1]; repeatable
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Model")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub set: Vec<String>,
    /// Where the layers of an exported model end: at the ends of modules, or at every boundary where it can be cut [default:
    /// modules]
    #[arg(long, value_name = "modules|all", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayersName>,
    /// Train tied parameters of an exported model as independent copies, so that it can be cut between their uses
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub untie: Option<bool>,
    /// Load initial weights from a safetensors or torch.save file, matched by tensor name [default: random weights, or those
    /// of the exported model]
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
    /// Keep the random initial values of tensors that --weights lacks, and of last-layer tensors whose shape differs; use it
    /// to train a new classifier
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_missing: Option<bool>,
    /// Data set to train on
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataName>,
    /// Directory with the data set's files [default: NAME in $XDG_DATA_HOME/distgpipe, where `distgpipe data get` puts them]
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_dir: Option<PathBuf>,
    /// Tokenizer of the text: a tokenizer.json file of Hugging Face, or RoBERTa's directory with vocab.json and merges.txt
    /// [default for --data text: every byte is a token]
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Train on N rows only, spread evenly over the data set [default: all rows]
    #[arg(long, value_name = "N", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Test on N rows only [default: same as --limit]
    #[arg(long, value_name = "N", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_test: Option<usize>,
    /// Threads that load and prepare batches in the background; they do not affect results [default: the cores that
    /// --threads leaves free, or all cores when training on a GPU]
    #[arg(long, value_name = "N", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader_threads: Option<usize>,
    /// Normalisation of colours, which range from 0 to 1: `imagenet`, as pretrained weights expect, or the means and the standard
    /// deviations of red, green and blue, such as 0.49,0.48,0.45/0.25,0.24,0.26 [default: imagenet]
    #[arg(long, value_name = "imagenet|MEANS/DEVIATIONS", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalise: Option<NormaliseChoice>,
    /// Number of training rows of --data synthetic, which also generates a quarter as many test rows [default: 2048]
    #[arg(long, value_name = "N", help_heading = "Data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,

    /// Cut the model into N partitions with equal numbers of layers [default: as many as --place or --plan names, or 1]
    #[arg(long, value_name = "N", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitions: Option<usize>,
    /// Number of layers in each partition, such as 1,18,1
    #[arg(long, value_name = "LAYERS,…", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<String>,
    /// Cut by rule: first=1,last=1 keeps both ends on the client, after=LAYER,… cuts after those layers; roberta also has
    /// roberta-1 (first=3,last=3), roberta-2 (first=2,last=3) and roberta-3 (first=2,last=1). Three partitions are placed
    /// client,server,client unless --place is given
    #[arg(long, value_name = "CUT", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<String>,
    /// Measure the layers, and cut the model into N partitions so that a step is fastest; prints the cut as a table
    #[arg(long, value_name = "N", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_balance: Option<usize>,
    /// What --auto-balance minimizes: time (of a step) or memory (of the worker that uses most) [default: time]
    #[arg(long, value_name = "WHAT", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_by: Option<Objective>,
    /// Memory limit of a worker for --auto-balance, such as 2GiB [default: no limit]
    #[arg(long, value_name = "SIZE", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<String>,
    /// Bandwidth between workers for --auto-balance, such as 100mbit, 1gbit or 12.5MB/s [default: links cost nothing]
    #[arg(long, value_name = "RATE", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_rate: Option<String>,
    /// Latency between workers for --auto-balance, in milliseconds; needs --link-rate [default: 0]
    #[arg(long, value_name = "MS", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_latency: Option<f64>,
    /// Worker of each partition, such as client,server,client; the first one named is this process [default: one worker per
    /// partition]
    #[arg(long, value_name = "WORKER,…", help_heading = "Partitions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// Where workers run: as threads of this process, as processes on this host, or at the addresses of `distgpipe worker`
    /// processes, one for each worker after the first
    #[arg(long, value_name = "threads|processes|HOST:PORT,…", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<String>,
    /// File whose first line is the token of the remote workers [default: the environment variable DISTGPIPE_TOKEN]
    #[arg(long, value_name = "FILE", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// Server to run a worker on, over TLS, by the name given to `distgpipe join`; repeat it for workers 1, 2, … in order
    #[arg(long, value_name = "NAME", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub server: Vec<String>,
    /// File with the join strings of the servers, one per line, instead of --server [default: the environment variable
    /// DISTGPIPE_SERVER]
    #[arg(long, value_name = "FILE", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_file: Option<PathBuf>,
    /// Address to listen on for servers that this machine cannot reach, which connect to it with `serve --dial`
    #[arg(long, value_name = "ADDR", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<String>,
    /// Allow a placement that sends labels or inputs to a server, such as client,server
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels_leave: Option<bool>,
    /// Data parallelism: run N copies of the pipeline, split each batch among them, and sum their gradients before each update
    #[arg(long, value_name = "N", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<usize>,
    /// How replicas sum their gradients: ring, the same bits on every transport, or mpi, which uses MPI_Iallreduce under mpirun
    #[arg(long, value_name = "ring|mpi", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduce: Option<Reduce>,
    /// Micro-batches per batch, in each replica
    #[arg(long, aliases = ["micro-batches", "chunk"], value_name = "N", help_heading = "Schedule")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// Order of forward and backward passes: gpipe, 1f1b or interleaved
    #[arg(long, value_name = "NAME", help_heading = "Schedule")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Run a plan of your own instead of --schedule, in the format that `distgpipe schedule` prints
    #[arg(long, value_name = "FILE", help_heading = "Schedule")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PathBuf>,
    /// Micro-batches whose activations are recomputed in the backward pass instead of kept
    #[arg(long, value_name = "never|except-last|always", help_heading = "Schedule")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
    /// Abort the run when no worker makes progress for this many seconds
    #[arg(long, value_name = "SECONDS", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// Treat a connection as broken when nothing, not even a heartbeat, arrives from a worker for this many seconds; see
    /// --reconnect. A worker must also answer within this time while it joins the run [default: 20, or --timeout if that is less]
    #[arg(long, value_name = "SECONDS", help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_timeout: Option<f64>,
    /// Abort the run when a broken connection to a worker is not restored within this many seconds; 0 aborts it at once
    /// [default: 120]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Workers")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reconnect: Option<f64>,

    /// Codec for activations between workers, and for gradients unless --codec-backward is given; `distgpipe codecs` lists
    /// and measures codecs. `auto` measures the links, and uses raw, zstd(raw) or zstd(tile:4)
    #[arg(long, value_name = "CODEC|auto", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec: Option<CodecChoice>,
    /// Codec for gradients between workers [default: same as --codec]
    #[arg(long, value_name = "CODEC", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec_backward: Option<CodecSpec>,
    /// Codecs for one link, named by its partitions or its workers: 0-1=tile:4, or client-server=tile:4,raw for activations
    /// and gradients; repeatable
    #[arg(long, value_name = "LINK=CODEC[,CODEC]", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub codec_link: Vec<String>,
    /// Codec for the gradients that replicas share, such as bf16, tile:8 or 'feedback(tile:4)'; see --replicas [default: raw]
    #[arg(long, value_name = "CODEC", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec_replicas: Option<CodecSpec>,
    /// Send tensors raw in the first N training steps [default: 0]
    #[arg(long, value_name = "N", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec_warm_up: Option<u64>,
    /// Evaluate with raw tensors instead of the codecs used in training
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluate_raw: Option<bool>,
    /// Use the codec sort:Q+S, with Q from --quant and S from --split
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sortquant: Option<bool>,
    /// Q of --sortquant, in bits [default: 6]
    #[arg(long, value_name = "BITS", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quant: Option<u32>,
    /// S of --sortquant, in bits [default: 2]
    #[arg(long, value_name = "BITS", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<u32>,
    /// Save the tensors that cross the links in one step, before encoding, to DIR/step-N.safetensors
    #[arg(long, value_name = "DIR", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<PathBuf>,
    /// Step that --capture saves, counted from 1 [default: the last]
    #[arg(long, value_name = "N", help_heading = "Codecs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture_step: Option<u64>,

    /// Device of the workers: cpu, cuda:N, or auto (the first GPU, or the CPU if there is none). The devices of a
    /// list, such as cuda:0,cuda:1, are assigned to workers in turn
    #[arg(long, value_name = "DEVICE[,...]", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Devices>,
    /// libtorch threads per worker. Runs are bit-for-bit equal only with the same number of threads [default: the cores of
    /// this host divided by the workers on it]
    #[arg(long, value_name = "N", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Precision of the computation: fp32, or bf16 for matrix products and convolutions in bfloat16 as in torch.autocast, with
    /// parameters, gradients and optimizer state in fp32
    #[arg(long, value_name = "fp32|bf16", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Run the training passes of workers on GPUs as CUDA graphs: auto (where possible), on (fail where it is not possible) or off
    #[arg(long, value_name = "auto|on|off", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graphs: Option<GraphMode>,
    /// Micro-batches of one worker that a GPU may compute at once with --graphs, 1 to 8 [default: 4, or 2 with --recompute,
    /// divided by the workers on the GPU]
    #[arg(long, value_name = "N", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph_streams: Option<usize>,
    /// Operations whose inputs GPUs may round to TF32, which is faster and has 10 bits of mantissa instead of 23: convolutions, on
    /// (matrix products too) or off. No effect on a CPU
    #[arg(long, value_name = "on|off|convolutions", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tf32: Option<Tf32>,
    /// Let cuDNN time its algorithms for each new shape and use the fastest; the choice, and so the rounding, may differ from run to
    /// run. No effect on a CPU
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cudnn_benchmark: Option<bool>,
    /// Restrict cuDNN to deterministic algorithms, which give the same bits in every run on a GPU
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cudnn_deterministic: Option<bool>,
    /// Update the parameters with libtorch's fused kernels, which round differently; only for sgd, adam and adamw
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fused_optimizer: Option<bool>,
    /// How phases are timed on a GPU: launch (kernel launches only), or exact (wait for the GPU after each action; slower steps)
    #[arg(long, value_name = "launch|exact", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phases: Option<PhaseTiming>,
    /// Random seed of the initial weights, dropout, synthetic data and data order
    #[arg(long, value_name = "N", help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Store images channels-first (NCHW), which is slower, instead of channels-last
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Compute")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_channels_last: Option<bool>,

    /// Optimizer that updates the parameters
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerName>,
    /// Learning rate [default: 0.05 for sgd, 0.001 for adam and adamw, 0.01 for rmsprop]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// How the learning rate falls from update to update
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_decay: Option<DecayName>,
    /// Exponent of --lr-decay polynomial [default: 2]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_power: Option<f64>,
    /// Epochs after which --lr-decay steps multiplies the learning rate, such as 30,60,80
    #[arg(long, value_name = "EPOCH,…", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_steps: Option<String>,
    /// Factor by which --lr-decay steps multiplies the learning rate [default: 0.1]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_factor: Option<f64>,
    /// Increase the learning rate from 0 over the first N updates, over P% of all updates, or over N epochs [default: 0]
    #[arg(long, value_name = "N|P%|Nepochs", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_warm_up: Option<WarmUp>,
    /// Momentum of sgd and rmsprop [default: 0.9 for sgd, 0 for rmsprop]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// Use Nesterov momentum; only for sgd with momentum
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nesterov: Option<bool>,
    /// Weight decay [default: 0.01 for adamw, 0 for the other optimizers]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Learning rate and weight decay of the parameters whose names match PATTERN, as in '*.bias:weight-decay=0' or
    /// 'features.*:lr-factor=0.1', which multiplies --lr; repeatable, and later groups take precedence
    #[arg(long, value_name = "PATTERN:SETTING[,SETTING]", help_heading = "Training")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub group: Vec<String>,
    /// Do not train the parameters whose names match PATTERN, such as 'features.*'; repeatable
    #[arg(long, value_name = "PATTERN,…", help_heading = "Training")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<String>,
    /// Loss: cross-entropy for class scores; mean-squared or binary-cross-entropy (of scores before a sigmoid) for other outputs
    /// [default: cross-entropy for class scores, otherwise mean-squared]
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<LossName>,
    /// Label smoothing in training, from 0 to below 1; evaluation uses the plain labels [default: 0]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_smoothing: Option<f64>,
    /// Scale gradients down when their norm over all parameters of all workers exceeds X [default: no clipping]
    #[arg(long, value_name = "X", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// Update the parameters every N batches, with the mean of their gradients; the last update of an epoch may have fewer
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulate: Option<u64>,
    /// Rows per batch, over all micro-batches and replicas. Rows left over at the end of an epoch are dropped; they differ from
    /// epoch to epoch
    #[arg(long, value_name = "ROWS", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// Number of passes over the training data
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// Stop after N training steps, even if --epochs is not reached; with --accumulate, after the update that step N belongs to
    /// [default: no limit]
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Stop when the test metric of --save-best, by default the loss, has not improved for N epochs [default: no limit]
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// Evaluate on the test data after every N epochs, and after the last [default: 1]
    #[arg(long, value_name = "N", help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluate_every: Option<u64>,
    /// Do not evaluate on the test data
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Training")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_evaluate: Option<bool>,

    /// Recover automatically from a lost worker process, up to N times: restart the workers and repeat the steps since the last
    /// checkpoint. Without --checkpoint, the driver keeps the state after each epoch in memory [default: 3 with --checkpoint, or
    /// with workers on other hosts and stateless codecs, otherwise 0]
    #[arg(long, value_name = "N", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u64>,
    /// Save checkpoints to this directory, after each epoch and at the end of the run; see --resume
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PathBuf>,
    /// Save a checkpoint every N steps instead of every epoch
    #[arg(long, value_name = "N", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<u64>,
    /// How many of the newest checkpoints to keep [default: 2]
    #[arg(long, value_name = "N", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<usize>,
    /// Also keep the checkpoint of the epoch with the best test metric; the file `best` in --checkpoint DIR names it
    #[arg(long, value_name = "METRIC", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_best: Option<MetricName>,
    /// Resume from the newest checkpoint in --checkpoint DIR with its flags; flags given here override them. The cut, the
    /// workers and the device may change
    #[arg(long, value_name = "newest|best|if-any", num_args = 0..=1, require_equals = true, default_missing_value = "newest", help_heading = "Checkpoints")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<ResumeName>,

    /// Write the trained model to this file, with PyTorch's tensor names, for `evaluate`, `predict` and other programs
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save: Option<PathBuf>,
    /// Write config.toml, steps.jsonl (every step and test) and summary.json to this directory
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
    /// Also write every event to the --log directory: trace.jsonl, and trace.json for Perfetto or chrome://tracing
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<bool>,
    /// Print the result as JSON
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true, help_heading = "Output")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<bool>,
    /// Read flags from a TOML file, such as `batch = 64`; the command line takes precedence
    #[arg(long, value_name = "FILE.toml", help_heading = "Output")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Fault scenario to inject; for tests
    #[arg(long, value_name = "SCENARIO", hide = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<String>,
}

impl TrainFlags {
    /// The flags that name files and directories.
    fn paths_mut(&mut self) -> [(&'static str, &mut Option<PathBuf>); 10] {
        [
            ("--weights", &mut self.weights),
            ("--data-dir", &mut self.data_dir),
            ("--tokenizer", &mut self.tokenizer),
            ("--token-file", &mut self.token_file),
            ("--server-file", &mut self.server_file),
            ("--plan", &mut self.plan),
            ("--capture", &mut self.capture),
            ("--checkpoint", &mut self.checkpoint),
            ("--save", &mut self.save),
            ("--log", &mut self.log),
        ]
    }

    /// These flags with paths that mean the same in every working directory.
    pub fn with_absolute_paths(mut self) -> Self {
        for path in self.paths_mut().into_iter().filter_map(|(_, path)| path.as_mut()) {
            // Fails for an empty path, which is refused later.
            *path = std::path::absolute(&*path).unwrap_or_else(|_| path.clone());
        }
        if let Some(model) = self.model.as_mut().filter(|model| model.ends_with(".pt2")) {
            let absolute = std::path::absolute(&*model).ok().and_then(|path| path.to_str().map(str::to_owned));
            *model = absolute.unwrap_or_else(|| model.clone());
        }
        self
    }

    /// Replaces `--auto-balance` and its options by the cut that the search found.
    pub fn keep_cut(&mut self, balance: &[usize]) {
        if self.auto_balance.take().is_some() {
            let sizes: Vec<String> = balance.iter().map(ToString::to_string).collect();
            self.balance = Some(sizes.join(","));
            (self.balance_by, self.memory_limit, self.link_rate, self.link_latency) = (None, None, None, None);
        }
    }
}

/// A number of seconds, with or without the unit: `120` or `120s`.
fn seconds(text: &str) -> Result<f64, String> {
    text.strip_suffix('s').unwrap_or(text).parse().map_err(|_| "expected seconds, such as 120 or 120s".to_owned())
}
