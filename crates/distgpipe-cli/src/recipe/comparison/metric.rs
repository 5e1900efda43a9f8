//! The figures that are compared.

use serde::{Deserialize, Serialize};

/// A figure of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Share of rows classified correctly.
    Accuracy,
    /// Share of rows classified wrongly.
    Error,
    Matthews,
    Throughput,
    /// Throughput divided by that of the baseline row.
    SpeedUp,
    /// Bytes sent divided by bytes of the tensors.
    Compression,
    /// Bandwidth of each link.
    Bandwidth,
    /// Peak memory of all workers together.
    Memory,
    /// Memory of parameters, gradients and optimizer state.
    ModelMemory,
    /// The rest of the memory.
    ActivationMemory,
    Parameters,
    /// Time per data-parallel batch.
    BatchTime,
    /// Time per batch spent moving data.
    TransferTime,
    /// Time per batch spent in the backward pass.
    BackwardTime,
}

impl Metric {
    /// All metrics, in the order of tables.
    pub const ALL: [Metric; 14] = [
        Metric::Accuracy,
        Metric::Error,
        Metric::Matthews,
        Metric::Throughput,
        Metric::SpeedUp,
        Metric::Compression,
        Metric::Bandwidth,
        Metric::Memory,
        Metric::ModelMemory,
        Metric::ActivationMemory,
        Metric::Parameters,
        Metric::BatchTime,
        Metric::TransferTime,
        Metric::BackwardTime,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Accuracy => "top-1 accuracy",
            Metric::Error => "top-1 error",
            Metric::Matthews => "Matthews correlation × 100",
            Metric::Throughput => "throughput",
            Metric::SpeedUp => "speed-up",
            Metric::Compression => "bytes sent / raw bytes",
            Metric::Bandwidth => "link bandwidth",
            Metric::Memory => "peak memory, all workers",
            Metric::ModelMemory => "model memory",
            Metric::ActivationMemory => "activation memory",
            Metric::Parameters => "parameters",
            Metric::BatchTime => "time per batch",
            Metric::TransferTime => "time moving data",
            Metric::BackwardTime => "time in backward",
        }
    }

    /// Whether a run without steps has it: it is counted, or part of the checkpoint.
    pub(super) fn is_known_without_steps(self) -> bool {
        use Metric::{Accuracy, Error, Matthews, ModelMemory, Parameters};
        matches!(self, Accuracy | Error | Matthews | ModelMemory | Parameters)
    }

    /// Whether it is a score of a trained model, which depends on the seed.
    pub fn is_a_score(self) -> bool {
        matches!(self, Metric::Accuracy | Metric::Error | Metric::Matthews)
    }

    /// A short label for lists; empty where the figure explains itself.
    pub fn short(self) -> &'static str {
        match self {
            Metric::Error => "error",
            Metric::Matthews => "Matthews",
            Metric::Compression => "ratio",
            Metric::Memory => "memory",
            Metric::ModelMemory => "model",
            Metric::ActivationMemory => "activations",
            Metric::Parameters => "parameters",
            Metric::BatchTime => "batch",
            Metric::TransferTime => "moving",
            Metric::BackwardTime => "backward",
            _ => "",
        }
    }
}
