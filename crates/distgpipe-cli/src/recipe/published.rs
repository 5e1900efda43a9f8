//! A row of the seeds' tables: its figures, as they are written there.

use super::beside::Metric;
use serde::{Deserialize, Serialize};

/// The row. Figures that come with a deviation, a unit or in words are text; none is converted.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// The row in its own words, without its figures.
    pub row: String,
    /// On what, as far as it is said.
    pub hardware: String,
    /// What crosses the links, as it is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activations: Option<String>,
    /// The share of right answers, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<String>,
    /// The share of wrong answers, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Matthews's correlation, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matthews: Option<String>,
    /// Rows a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throughput_per_s: Option<f64>,
    /// Against the row that has 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_up: Option<f64>,
    /// The recipe of the row that has 1, unless it is this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_up_to: Option<String>,
    /// Bytes sent over bytes of the tensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<f64>,
    /// Of the links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<String>,
    /// All of it, all devices together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Parameters, gradients and what the optimizer keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_memory: Option<String>,
    /// What is above that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation_memory: Option<String>,
    /// Numbers that are learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<String>,
    /// Seconds of a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_s: Option<f64>,
    /// Of them, moving data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_s: Option<f64>,
    /// Of them, going backward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward_s: Option<f64>,
    /// Other places that have the row, with their figures where they differ, and what others reached.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
}

impl Seed {
    /// The row's figure, if it has that one.
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

    /// All figures, in a few words.
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

/// `95.89±0.07 %`; but words, such as those of a run without a result, have no unit.
fn with_unit(text: String, unit: &str) -> String {
    if text.ends_with(|c: char| c.is_ascii_digit()) {
        text + unit
    } else {
        text
    }
}
