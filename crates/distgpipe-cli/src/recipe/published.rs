//! A row of a published table.

use super::comparison::Metric;
use serde::{Deserialize, Serialize};

/// A published row. Figures with a deviation, a unit or words are kept as text; none is converted.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedRow {
    /// The label of the row.
    pub row: String,
    /// The hardware, as far as it is stated.
    pub hardware: String,
    /// The shapes of the tensors on the links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activations: Option<String>,
    /// Top-1 accuracy in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<String>,
    /// Top-1 error in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Matthews correlation times 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matthews: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throughput_per_s: Option<f64>,
    /// Speed-up over the baseline row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_up: Option<f64>,
    /// The recipe of the baseline row, unless it is this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_up_to: Option<String>,
    /// Bytes sent divided by bytes of the tensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<f64>,
    /// Bandwidth of the links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<String>,
    /// Memory of all devices together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Memory of parameters, gradients and optimizer state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_memory: Option<String>,
    /// The rest of the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation_memory: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_s: Option<f64>,
    /// Seconds per batch spent moving data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_s: Option<f64>,
    /// Seconds per batch spent in the backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward_s: Option<f64>,
    /// Other publications of the row, and the figures of other authors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
}

impl PublishedRow {
    /// The published figure of a metric.
    pub fn figure(&self, metric: Metric) -> Option<String> {
        let percent = |text: &Option<String>| text.clone().map(|text| with_unit(text, " %"));
        match metric {
            Metric::Accuracy => percent(&self.accuracy),
            Metric::Error => percent(&self.error),
            Metric::Matthews => self.matthews.clone(),
            Metric::Throughput => self.throughput_per_s.map(|rate| format!("{rate}/s")),
            Metric::SpeedUp => self.speed_up.map(|factor| format!("{factor}×")),
            Metric::Compression => self.compression.map(|ratio| ratio.to_string()),
            Metric::Bandwidth => self.bandwidth.clone(),
            Metric::Memory => self.memory.clone(),
            Metric::ModelMemory => self.model_memory.clone(),
            Metric::ActivationMemory => self.activation_memory.clone(),
            Metric::Parameters => self.parameters.clone(),
            Metric::BatchTime => self.batch_s.map(|seconds| format!("{seconds} s")),
            Metric::TransferTime => self.transfer_s.map(|seconds| format!("{seconds} s")),
            Metric::BackwardTime => self.backward_s.map(|seconds| format!("{seconds} s")),
        }
    }

    /// All published figures on one line.
    pub fn short(&self) -> String {
        let figures = Metric::ALL.iter().filter_map(|&metric| Some((metric, self.figure(metric)?)));
        let words: Vec<String> = figures
            .map(|(metric, figure)| match metric.short() {
                "" => figure,
                word => format!("{word} {figure}"),
            })
            .collect();
        words.join(", ")
    }
}

/// Adds a unit to a number, such as `95.89±0.07 %`; words stay as they are.
fn with_unit(text: String, unit: &str) -> String {
    if text.ends_with(|c: char| c.is_ascii_digit()) {
        text + unit
    } else {
        text
    }
}
