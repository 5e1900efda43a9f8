//! The figures of a run: per epoch, per worker, per link. `builder` computes them from the events.

mod builder;

pub(super) use builder::{EpochTotals, SummaryBuilder};

use crate::comm::traffic::PartitionEdge;
use crate::driver::pipeline::StepWait;
use crate::train::best::BestEpoch;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The figures of an epoch.
// The fields are in alphabetical order, as in the manifest of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochSummary {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Training rows per second, loading included and testing excluded.
    pub samples_per_s: f64,
    /// Training steps of the epoch.
    pub steps: u64,
    /// Fraction of test rows classified correctly.
    pub test_accuracy: Option<f64>,
    /// Classes of the test data.
    pub test_classes: Option<usize>,
    /// F1 on the test data: of class 1 where there are two classes, else the mean over the classes.
    pub test_f1: Option<f64>,
    /// Mean loss over the rows of the test data.
    pub test_loss: Option<f64>,
    /// The Matthews correlation of predicted and actual classes on the test data.
    pub test_matthews: Option<f64>,
    /// Seconds spent in the test, loading included.
    pub test_s: f64,
    /// Fraction of training rows classified correctly, computed like `train_loss`.
    pub train_accuracy: Option<f64>,
    /// Mean training loss over the rows, each computed before the update that its row contributed to.
    pub train_loss: f64,
    /// Seconds spent in training steps, loading included.
    pub train_s: f64,
}

/// The figures of an evaluation over all batches of a loader.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Evaluation {
    /// Rows that were evaluated.
    pub rows: usize,
    /// Batches that the rows came in.
    pub batches: u64,
    /// Mean loss over the rows.
    pub loss: f64,
    /// Fraction of rows classified correctly, from 0 to 1; absent if the loss is not about classes.
    pub accuracy: Option<f64>,
    /// Classes of the data.
    pub classes: Option<usize>,
    /// F1: of class 1 where there are two classes, else the mean over the classes.
    pub f1: Option<f64>,
    /// The Matthews correlation of predicted and actual classes.
    pub matthews: Option<f64>,
    /// Seconds, loading included.
    pub seconds: f64,
}

/// A worker's figures over the measured steps.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerSummary {
    /// The worker's name, such as `server` or `server/1`.
    pub name: String,
    /// Seconds spent in each phase.
    pub phases_s: BTreeMap<&'static str, f64>,
    /// Seconds spent in steps, waiting included.
    pub steps_s: f64,
    /// The most bytes that the worker's tensors held at once. On a GPU, those of all workers on it.
    pub peak_bytes: u64,
    /// The most bytes that the GPU's allocator had reserved on the device. Absent on a CPU.
    pub reserved_bytes: Option<u64>,
}

/// The seconds that the trainer and the first worker spent on an average batch, as published tables count them. On a GPU, those of the
/// worker are those of launches unless [`PhaseTiming::Exact`](crate::PhaseTiming::Exact) is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct BatchTimes {
    /// The trainer's wait for the loader, and the worker's wait for its rows and their copy to the device.
    pub transfer_s: f64,
    /// Forward passes.
    pub forward_s: f64,
    /// Backward passes with recomputation, the exchange of gradients between replicas, and the update.
    pub backward_s: f64,
}

/// One direction of a link: its traffic over the whole run, and what its receiver waited for in the measured steps.
#[derive(Clone, Debug, Serialize)]
pub struct LinkSummary {
    /// The name of the sending worker.
    pub from: String,
    /// The name of the receiving worker.
    pub to: String,
    /// Messages that carried tensors.
    pub messages: u64,
    /// Bytes of the tensors as they lie in memory.
    pub payload_bytes: u64,
    /// Bytes that the socket carried, headers included; 0 between threads.
    pub wire_bytes: u64,
    /// Bytes of the tensors of an average training step: on the wire with their headers, or in memory between threads. Tests and
    /// checkpoints are not part of it.
    pub bytes_per_step: f64,
    /// The rate at which the link delivers, as the receiver timed it, in bytes per second. Absent between threads, and where the
    /// link never had enough to deliver in one go to measure it.
    pub delivered_bytes_per_s: Option<f64>,
    /// How long the receiver waited for messages of this link, by what it waited for.
    pub receiver_waited: StepWait,
    /// What the receiver waited for most; absent if it waited for less than a twentieth of its steps.
    pub limited_by: Option<LinkLimit>,
    /// The same traffic by pair of partitions.
    #[serde(rename = "cuts")]
    pub edges: Vec<EdgeSummary>,
    /// The gradients that the sender shared with the next replica, if they have a codec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<CodecSummary>,
}

/// What kept the receiver of a link waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkLimit {
    /// The link, which was delivering.
    Link,
    /// The codec, which was encoding or decoding.
    Encoding,
    /// The worker at the other end, or the latency of the link.
    Worker,
}

/// The traffic from one partition to another over the whole run.
#[derive(Clone, Debug, Serialize)]
pub struct EdgeSummary {
    /// The sending and the receiving partition.
    #[serde(flatten)]
    pub edge: PartitionEdge,
    /// What its codec did.
    #[serde(flatten)]
    pub coded: CodecSummary,
}

/// What the codec of some tensors did over the whole run.
#[derive(Clone, Debug, Serialize)]
pub struct CodecSummary {
    /// The codec that encodes the tensors.
    pub codec: String,
    /// Tensors that were sent.
    pub tensors: u64,
    /// Bytes of the tensors as they lie in memory.
    pub raw_bytes: u64,
    /// Bytes of the tensors as encoded, frame headers included; 0 where they moved between threads unencoded.
    pub wire_bytes: u64,
    /// Raw bytes divided by wire bytes; absent where nothing was encoded.
    pub ratio: Option<f64>,
    /// Milliseconds that the sender spent encoding.
    pub encode_ms: f64,
    /// Milliseconds that the receiver spent decoding.
    pub decode_ms: f64,
    /// Tensors sent raw although a codec is set: refused by it, sent in its warm-up, or in a raw evaluation.
    pub sent_raw: u64,
    /// Why the codec refused tensors: the first message of each kind of reason.
    pub refusals: BTreeMap<String, String>,
}

/// Why a run ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunEnd {
    /// All steps are done.
    Complete,
    /// An observer stopped it; see [`RunControl::stop`](crate::RunControl::stop).
    Stopped,
    /// No epoch was better for as long as [`TrainOptions::patience`](crate::TrainOptions::patience) says.
    OutOfPatience,
}

/// The figures of a run.
#[derive(Clone, Debug, Serialize)]
pub struct RunSummary {
    /// One entry per epoch, including those before the checkpoint that the run resumed from.
    /// An epoch that was stopped, or had no test due, has no figures of a test; see
    /// [`TrainOptions::test_every`](crate::TrainOptions::test_every).
    pub epochs: Vec<EpochSummary>,
    /// Why the run ended.
    pub end: RunEnd,
    /// The best epoch, if [`TrainOptions::best`](crate::TrainOptions::best) asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<BestEpoch>,
    /// Steps done before the checkpoint that the run resumed from. All fields below leave those steps out.
    pub resumed_at: Option<u64>,
    /// Training steps that this run made.
    pub steps: u64,
    /// The first steps, which times and speeds leave out.
    pub warm_up_steps: u64,
    /// Rows per second of the median step; absent if no step was measured.
    pub samples_per_s_median: Option<f64>,
    /// Rows of all measured steps divided by their time.
    pub samples_per_s_mean: Option<f64>,
    /// Seconds of the whole run, testing included.
    pub seconds: f64,
    /// Seconds that the measured steps waited for their batches.
    pub loading_s: f64,
    /// The time per batch; absent if no step was measured.
    pub batch_times: Option<BatchTimes>,
    /// One entry per worker, by worker number.
    pub workers: Vec<WorkerSummary>,
    /// One entry per direction of each link.
    pub links: Vec<LinkSummary>,
}

impl RunSummary {
    /// The test accuracy of the last epoch, if it had a test.
    pub fn test_accuracy(&self) -> Option<f64> {
        self.epochs.last().and_then(|epoch| epoch.test_accuracy)
    }
}
