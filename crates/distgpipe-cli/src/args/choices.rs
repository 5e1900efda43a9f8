//! The values of flags that name one of several things.

use clap::ValueEnum;
use distgpipe_core::codec::{CodecError, CodecSpec};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Data sets: `--data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataName {
    /// 1,797 handwritten digits, built in
    Digits,
    /// Generated for the model's input shape, with a pattern that a model can learn
    Synthetic,
    /// CIFAR-10: 60,000 images in 10 classes
    Cifar10,
    /// CIFAR-100: 60,000 images in 100 classes
    Cifar100,
    /// Food-101: 101,000 photographs in 101 classes
    Food101,
    /// Your own JPEG and PNG files in DIR/train/CLASS/ and DIR/test/CLASS/
    ImageFolder,
    /// GLUE RTE: does one sentence follow from another?
    Rte,
    /// GLUE CoLA: is a sentence grammatical English?
    Cola,
    /// Your own text for a language model: --data-dir names a file, or a directory of .txt files
    Text,
    /// Your own tensors: --data-dir names a safetensors file, or a directory of .npy files, with `input` and `target`
    Tensors,
}

impl DataName {
    /// Whether the data set is read from files.
    pub fn has_files(self) -> bool {
        !matches!(self, DataName::Digits | DataName::Synthetic)
    }

    /// The name that the flag takes.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Optimizers: `--optimizer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerName {
    /// Stochastic gradient descent, with momentum by default
    Sgd,
    /// Adam
    Adam,
    /// Adam with decoupled weight decay
    Adamw,
    /// RMSprop, not centered
    Rmsprop,
}

impl OptimizerName {
    /// The name that the flag takes.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Learning rate schedules: `--lr-decay`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecayName {
    /// No decay
    Constant,
    /// To 0 along a half cosine
    Cosine,
    /// To 0 linearly
    Linear,
    /// To 0, in proportion to the remaining fraction of updates raised to --lr-power
    Polynomial,
    /// Multiplied by --lr-factor after each epoch of --lr-steps
    Steps,
}

/// Losses: `--loss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossName {
    /// Cross entropy of class scores
    CrossEntropy,
    /// Mean squared error
    MeanSquared,
    /// Binary cross entropy of scores before a sigmoid, with targets from 0 to 1
    BinaryCrossEntropy,
}

/// How colours are normalised: `--normalise`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum NormaliseChoice {
    /// By the mean and the deviation of ImageNet.
    #[default]
    ImageNet,
    /// By these, of red, green and blue.
    Colours {
        /// The means that are subtracted.
        mean: [f32; 3],
        /// The standard deviations that the result is divided by.
        deviation: [f32; 3],
    },
}

impl FromStr for NormaliseChoice {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "expected `imagenet`, or three means and three deviations above 0 such as 0.49,0.48,0.45/0.25,0.24,0.26; got `{text}`"
            )
        };
        let three = |list: &str| -> Option<[f32; 3]> {
            let numbers: Option<Vec<f32>> = list.split(',').map(|number| number.trim().parse().ok()).collect();
            numbers?.try_into().ok()
        };
        if text == "imagenet" {
            return Ok(NormaliseChoice::ImageNet);
        }
        let (mean, deviation) = text.split_once('/').ok_or_else(wrong)?;
        let (mean, deviation) = three(mean).zip(three(deviation)).ok_or_else(wrong)?;
        let sound = mean.iter().all(|mean| mean.is_finite()) && deviation.iter().all(|d| d.is_normal() && *d > 0.0);
        sound.then_some(NormaliseChoice::Colours { mean, deviation }).ok_or_else(wrong)
    }
}

impl TryFrom<String> for NormaliseChoice {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<NormaliseChoice> for String {
    fn from(choice: NormaliseChoice) -> String {
        choice.to_string()
    }
}

impl fmt::Display for NormaliseChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |values: &[f32; 3]| values.map(|value| value.to_string()).join(",");
        match self {
            NormaliseChoice::ImageNet => f.write_str("imagenet"),
            NormaliseChoice::Colours { mean, deviation } => write!(f, "{}/{}", list(mean), list(deviation)),
        }
    }
}

/// Where the layers of an exported model end: `--layers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayersName {
    /// Where a module's call ends, if no more tensors cross there than where the enclosing modules end
    #[default]
    Modules,
    /// At all places where the model can be cut
    All,
}

/// What to resume from: `--resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResumeName {
    /// The newest checkpoint; it is an error if there is none
    Newest,
    /// The newest checkpoint, or a new run if there is none; for commands that are retried until they succeed
    IfAny,
    /// The best checkpoint, which --save-best has kept; later ones are renamed to unused-step-N
    Best,
}

/// Metrics of the test after an epoch: `--save-best`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetricName {
    /// Mean loss
    Loss,
    /// Share of rows classified correctly
    Accuracy,
    /// F1: of class 1 if there are two classes, otherwise the mean over the classes
    F1,
    /// Matthews correlation of predicted and true classes
    Matthews,
}

/// Codecs: `--codec`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CodecChoice {
    /// The one that suits the measured links.
    Auto,
    /// This one.
    Codec(CodecSpec),
}

impl Default for CodecChoice {
    fn default() -> Self {
        CodecChoice::Codec(CodecSpec::default())
    }
}

impl FromStr for CodecChoice {
    type Err = CodecError;
    fn from_str(text: &str) -> Result<Self, CodecError> {
        match text {
            "auto" => Ok(CodecChoice::Auto),
            codec => codec.parse().map(CodecChoice::Codec),
        }
    }
}

impl TryFrom<String> for CodecChoice {
    type Error = CodecError;
    fn try_from(text: String) -> Result<Self, CodecError> {
        text.parse()
    }
}

impl From<CodecChoice> for String {
    fn from(choice: CodecChoice) -> String {
        choice.to_string()
    }
}

impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecChoice::Auto => f.write_str("auto"),
            CodecChoice::Codec(codec) => codec.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_normalisation_is_written_as_it_is_read() {
        for text in ["imagenet", "0.4914,0.4822,0.4465/0.2023,0.1994,0.201"] {
            assert_eq!(text.parse::<NormaliseChoice>().unwrap().to_string(), text);
        }
        for text in ["", "cifar", "1,2,3", "1,2/1,2", "0,0,0/1,1,0", "0,0,0/1,1,-1", "0,0,nan/1,1,1", "0,0,0/1,1,inf"] {
            assert!(text.parse::<NormaliseChoice>().unwrap_err().contains("expected `imagenet`"), "{text}");
        }
    }
}
