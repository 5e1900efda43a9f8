//! The model zoo, one file per model:
//!
//! - [`mobilenet_v2`]: torchvision's layout and names
//! - [`resnet`]: 18 to 152 layers deep, torchvision's layout and names
//! - [`vgg`]: VGG-13, torchvision's layout and names
//! - [`amoebanet_d`]: two tensors cross every cut between cells
//! - [`unet`]: long skip connections, every operation a layer of its own
//! - [`roberta`]: text encoder with a classifier, any size, Hugging Face's layout and names
//! - [`mlp`]: a multi-layer perceptron
//! - [`Exported`]: a model of your own from PyTorch, with its graph as setting
//!
//! To add a model, write its file with a settings type that has `fn model(&self) -> Result<Model, ModelError>`, and add a
//! line to the `models!` table below. The tests in this file then cover it; `CONTRIBUTING.md` lists the others.

pub mod amoebanet_d;
mod classifier;
pub mod mlp;
pub mod mobilenet_v2;
pub mod resnet;
pub mod roberta;
pub mod unet;
pub mod vgg;

pub use crate::model::exported::{allow_operators, Exported, ExportedOptions};
pub use amoebanet_d::AmoebaNetD;
pub use mlp::Mlp;
pub use mobilenet_v2::MobileNetV2;
pub use resnet::ResNet;
pub use roberta::Roberta;
pub use unet::UNet;
pub use vgg::Vgg13;

use crate::model::exported;
use crate::model::layer::{SampleShape, ShapeError};
use crate::model::{Model, ModelSpec};
use distgpipe_core::cut::{CutError, CutRule};
use distgpipe_core::partition::Balance;
use serde::Serialize;

/// Declares the models that can be built by name.
macro_rules! models {
    ($($name:literal => $settings:ty,)*) => {
        /// The names of the models in the zoo.
        pub const NAMES: &[&str] = &[$($name),*];

        /// Builds a model of the zoo from its spec. The inverse of [`Model::spec`].
        ///
        /// # Errors
        /// If the zoo has no such model, or the settings do not fit it.
        pub fn build(spec: &ModelSpec) -> Result<Model, ModelError> {
            match spec.name.as_str() {
                $($name => spec.settings::<$settings>()?.model(),)*
                exported::NAME => spec.settings::<Exported>()?.model(),
                other => Err(ModelError::Unknown { got: other.to_owned() }),
            }
        }

        /// The default settings of a model of the zoo.
        ///
        /// # Errors
        /// If the zoo has no such model.
        pub fn default_settings(name: &str) -> Result<serde_json::Value, ModelError> {
            match name {
                $($name => Ok(json(&<$settings>::default())),)*
                other => Err(ModelError::Unknown { got: other.to_owned() }),
            }
        }
    };
}

models! {
    "mobilenet_v2" => MobileNetV2,
    "resnet" => ResNet,
    "vgg13" => Vgg13,
    "amoebanet_d" => AmoebaNetD,
    "unet" => UNet,
    "roberta" => Roberta,
    "mlp" => Mlp,
}

/// Named cuts between client and server, as (model, name, cut). RoBERTa's client keeps the embeddings with the whole first
/// layer or only its attention, and the classifier with or without the last layer.
pub const NAMED_CUTS: [(&str, &str, &str); 3] = [
    ("roberta", "roberta-1", "first=3,last=3"),
    ("roberta", "roberta-2", "first=2,last=3"),
    ("roberta", "roberta-3", "first=2,last=1"),
];

/// The model cannot be cut as requested.
#[derive(Debug, thiserror::Error)]
#[error("{why}{}", also(.named))]
pub struct ModelCutError {
    /// What is wrong with the cut.
    pub why: Box<CutError>,
    /// The named cuts that the model has.
    pub named: Vec<&'static str>,
}

fn also(named: &[&str]) -> String {
    if named.is_empty() {
        return String::new();
    }
    format!("; this model also has {}", named.join(", "))
}

/// Cuts a model by a rule: the syntax of [`CutRule`], or one of [`NAMED_CUTS`].
pub fn cut(model: &Model, text: &str) -> Result<Balance, ModelCutError> {
    let name = model.spec.as_ref().map(|spec| spec.name.as_str());
    let of_model = || NAMED_CUTS.iter().filter(|(model, ..)| Some(*model) == name);
    let text = of_model().find(|(_, named, _)| *named == text).map_or(text, |(.., cut)| cut);
    let layers: Vec<&str> = model.layers.iter().map(|layer| layer.name()).collect();
    let balance = text.parse::<CutRule>().and_then(|cut| by_layer_names(model, cut).balance(&layers));
    balance.map_err(|why| ModelCutError { why: Box::new(why), named: of_model().map(|(_, named, _)| *named).collect() })
}

/// Replaces the other names that layers have by those that a [`CutRule`] knows.
fn by_layer_names(model: &Model, cut: CutRule) -> CutRule {
    let CutRule::After(names) = cut else { return cut };
    let known = |name: &String| model.layers.iter().any(|layer| layer.name() == name);
    let also = |name: &String| model.layers.iter().find(|layer| layer.also_named().contains(name));
    let resolve = |name: String| match also(&name) {
        Some(layer) if !known(&name) => layer.name().to_owned(),
        _ => name,
    };
    CutRule::After(names.into_iter().map(resolve).collect())
}

/// The model cannot be built as requested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A model from PyTorch cannot be read, or not be trained in a pipeline.
    #[error("{why}")]
    Exported {
        /// What is wrong, where, and what to do.
        why: String,
    },
    /// The zoo has no model of this name.
    #[error("unknown model `{got}`: expected one of {}", NAMES.join(", "))]
    Unknown {
        /// The requested name.
        got: String,
    },
    /// The settings do not fit the model.
    #[error("settings of model `{model}`: {why}")]
    Settings {
        /// The model's name.
        model: String,
        /// What is wrong with the settings.
        why: String,
    },
}

impl ModelError {
    /// A model from PyTorch that is not used.
    pub(crate) fn exported(why: impl Into<String>) -> Self {
        ModelError::Exported { why: why.into() }
    }

    /// Settings that do not fit the model.
    pub fn settings(model: &str, why: impl Into<String>) -> Self {
        ModelError::Settings { model: model.to_owned(), why: why.into() }
    }
}

fn json(settings: &impl Serialize) -> serde_json::Value {
    serde_json::to_value(settings).expect("settings are plain numbers and lists")
}

fn model_spec(name: &str, settings: &impl Serialize) -> ModelSpec {
    ModelSpec { name: name.to_owned(), settings: json(settings) }
}

fn require(holds: bool, model: &str, why: &str) -> Result<(), ModelError> {
    if holds {
        Ok(())
    } else {
        Err(ModelError::settings(model, why))
    }
}

/// The only input shape of a layer, or an error in the layer's name.
fn single(layer: &str, expected: &str, mut input: Vec<SampleShape>) -> Result<SampleShape, ShapeError> {
    match input.len() {
        1 => Ok(input.remove(0)),
        _ => Err(ShapeError { layer: layer.to_owned(), expected: expected.to_owned(), got: input }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sets of layers in each partition, for `distgpipe train --cut`.
    fn cut_of(name: &str, text: &str) -> Result<Vec<Vec<String>>, String> {
        let spec = ModelSpec { name: name.to_owned(), settings: default_settings(name).unwrap() };
        let model = build(&spec).unwrap();
        let balance = cut(&model, text).map_err(|e| e.to_string())?;
        let mut names = model.layers.iter().map(|layer| layer.name().to_owned());
        Ok(balance.sizes().iter().map(|&size| names.by_ref().take(size).collect()).collect())
    }

    #[test]
    fn the_three_conditions_of_roberta_keep_what_they_say_with_the_client() {
        let ends = |text: &str| {
            let parts = cut_of("roberta", text).unwrap();
            assert_eq!(parts.len(), 3);
            (parts[0].join(" "), parts[2].join(" "))
        };
        let (attention, layer) =
            ("embeddings encoder.layer.0.attention", "encoder.layer.11.attention encoder.layer.11");
        let whole = format!("{attention} encoder.layer.0");
        assert_eq!(ends("roberta-1"), (whole, format!("{layer} classifier")));
        assert_eq!(ends("roberta-2"), (attention.to_owned(), format!("{layer} classifier")));
        assert_eq!(ends("roberta-3"), (attention.to_owned(), "classifier".to_owned()));
        assert_eq!(ends("after=embeddings,encoder.layer.11"), ("embeddings".to_owned(), "classifier".to_owned()));
    }

    #[test]
    fn a_cut_that_is_none_lists_the_named_ones_of_the_model() {
        assert!(cut_of("roberta", "roberta-4").unwrap_err().ends_with("also has roberta-1, roberta-2, roberta-3"));
        assert!(cut_of("resnet", "roberta-1").unwrap_err().ends_with("got `roberta-1`"));
        let error = cut_of("roberta", "after=encoder.layer.12").unwrap_err();
        assert!(error.contains("the model has embeddings, encoder.layer.0.attention, encoder.layer.0, "), "{error}");
    }

    /// A model is a list of specs: however many parameters it has, counting them builds no tensor.
    #[test]
    fn counting_the_largest_models_allocates_no_tensor() {
        let meter = crate::engine::Meter::new();
        crate::engine::start();
        crate::engine::attach_thread(1, meter.number());
        let count = |name: &str, settings: serde_json::Value| {
            let model = build(&ModelSpec { name: name.to_owned(), settings }).unwrap();
            model.summary().unwrap().iter().map(|layer| layer.parameters).sum::<u64>()
        };
        assert_eq!(count("unet", serde_json::json!({ "convolutions": 48, "channels": 160 })), 15_822_206_000);
        assert_eq!(count("amoebanet_d", serde_json::json!({ "layers": 72, "filters": 512 })), 1_844_858_344);
        assert_eq!(count("mobilenet_v2", serde_json::json!({ "classes": 1000 })), 3_504_872);
        assert_eq!(count("resnet", serde_json::json!({ "depth": 101 })), 44_549_160);
        assert_eq!(count("vgg13", serde_json::json!({})), 133_047_848);
        assert_eq!(count("roberta", serde_json::json!({})), 124_647_170);
        let tensor_bytes = || crate::engine::peak_bytes(tch::Device::Cpu, meter.number());
        assert_eq!(tensor_bytes(), 0);
        // The meter counts this thread's tensors.
        drop(tch::Tensor::zeros([1000], (tch::Kind::Float, tch::Device::Cpu)));
        assert!(tensor_bytes() >= 4000);
        crate::engine::attach_thread(1, 0);
    }

    /// Every setting has a default, and every model its name in the list and in both tables.
    #[test]
    fn every_model_of_the_list_can_be_made_and_makes_itself_again() {
        for &name in NAMES {
            let settings = default_settings(name).unwrap();
            let model = build(&ModelSpec { name: name.to_owned(), settings }).unwrap();
            let again = build(model.spec.as_ref().unwrap()).unwrap();
            assert_eq!((again.layers.len(), again.parameters()), (model.layers.len(), model.parameters()), "{name}");
            let names: std::collections::BTreeSet<&str> = model.layers.iter().map(|layer| layer.name()).collect();
            assert_eq!(names.len(), model.layers.len(), "{name}: every layer has its own name");
            let tensors: Vec<String> = model.layers.iter().flat_map(|l| l.tensors()).map(|t| t.name).collect();
            let distinct: std::collections::BTreeSet<&String> = tensors.iter().collect();
            assert_eq!(distinct.len(), tensors.len(), "{name}: every tensor has its own name");
        }
    }
}
