//! The models, one file each:
//!
//! - [`mobilenet_v2`]: torchvision's layout and names
//! - [`resnet`]: 18 to 152 layers deep, torchvision's layout and names
//! - [`vgg`]: VGG-13, torchvision's layout and names
//! - [`amoebanet_d`]: cells that pass two tensors on
//! - [`unet`]: long skips, every operation a layer of its own
//! - [`roberta`]: an encoder for text with a classifier, Hugging Face's layout and names, any size
//! - [`mlp`]: the smallest thing that learns

#[path = "zoo/amoebanet_d.rs"]
pub mod amoebanet_d;
#[path = "zoo/classifier.rs"]
mod classifier;
#[path = "zoo/mlp.rs"]
pub mod mlp;
#[path = "zoo/mobilenet_v2.rs"]
pub mod mobilenet_v2;
#[path = "zoo/resnet.rs"]
pub mod resnet;
#[path = "zoo/roberta.rs"]
pub mod roberta;
#[path = "zoo/unet.rs"]
pub mod unet;
#[path = "zoo/vgg.rs"]
pub mod vgg;

pub use amoebanet_d::AmoebaNetD;
pub use mlp::Mlp;
pub use mobilenet_v2::MobileNetV2;
pub use resnet::ResNet;
pub use roberta::Roberta;
pub use unet::UNet;
pub use vgg::Vgg13;

use crate::layer::{SampleShape, ShapeError};
use crate::model::{Model, Recipe};
use distgpipe_core::cut::{Cut, CutError};
use distgpipe_core::partition::Balance;
use serde::de::DeserializeOwned;
use serde::Serialize;

/// The names of the models.
pub const NAMES: [&str; 7] = ["mobilenet_v2", "resnet", "vgg13", "amoebanet_d", "unet", "roberta", "mlp"];

/// Cuts between client and server that have a name: model, name, cut. RoBERTa's client has the embeddings and the whole
/// first layer or only its attention, and of the end the last layer with the classifier or only that.
pub const NAMED_CUTS: [(&str, &str, &str); 3] = [
    ("roberta", "roberta-1", "first=3,last=3"),
    ("roberta", "roberta-2", "first=2,last=3"),
    ("roberta", "roberta-3", "first=2,last=1"),
];

/// A model cannot be cut as asked.
#[derive(Debug, thiserror::Error)]
#[error("{why}{}", also(.named))]
pub struct ModelCutError {
    /// What is wrong.
    pub why: Box<CutError>,
    /// The named cuts of the model.
    pub named: Vec<&'static str>,
}

fn also(named: &[&str]) -> String {
    if named.is_empty() {
        return String::new();
    }
    format!("; this model also has {}", named.join(", "))
}

/// Cuts a model as `text` says: [`Cut`]'s words, or the name of one of [`NAMED_CUTS`].
pub fn cut(model: &Model, text: &str) -> Result<Balance, ModelCutError> {
    let name = model.recipe.as_ref().map(|recipe| recipe.name.as_str());
    let of_model = || NAMED_CUTS.iter().filter(|(model, ..)| Some(*model) == name);
    let text = of_model().find(|(_, named, _)| *named == text).map_or(text, |(.., cut)| cut);
    let layers: Vec<&str> = model.layers.iter().map(|layer| layer.name()).collect();
    let balance = text.parse::<Cut>().and_then(|cut| cut.balance(&layers));
    balance.map_err(|why| ModelCutError { why: Box::new(why), named: of_model().map(|(_, named, _)| *named).collect() })
}

/// A model cannot be made as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No model has that name.
    #[error("unknown model `{got}`: expected one of {}", NAMES.join(", "))]
    Unknown {
        /// The name asked for.
        got: String,
    },
    /// The settings are not those of the model.
    #[error("settings of model `{model}`: {why}")]
    Settings {
        /// The model.
        model: String,
        /// What is wrong.
        why: String,
    },
}

impl ModelError {
    fn settings(model: &str, why: impl Into<String>) -> Self {
        ModelError::Settings { model: model.to_owned(), why: why.into() }
    }
}

/// Makes a model from its recipe: the other end of [`Model::recipe`].
pub fn build(recipe: &Recipe) -> Result<Model, ModelError> {
    let settings = recipe.settings.clone();
    match recipe.name.as_str() {
        "mobilenet_v2" => parse::<MobileNetV2>(&recipe.name, settings)?.model(),
        "resnet" => parse::<ResNet>(&recipe.name, settings)?.model(),
        "vgg13" => parse::<Vgg13>(&recipe.name, settings)?.model(),
        "amoebanet_d" => parse::<AmoebaNetD>(&recipe.name, settings)?.model(),
        "unet" => parse::<UNet>(&recipe.name, settings)?.model(),
        "roberta" => parse::<Roberta>(&recipe.name, settings)?.model(),
        "mlp" => parse::<Mlp>(&recipe.name, settings)?.model(),
        other => Err(ModelError::Unknown { got: other.to_owned() }),
    }
}

/// The settings a model of this name has when none are given.
pub fn default_settings(name: &str) -> Result<serde_json::Value, ModelError> {
    Ok(match name {
        "mobilenet_v2" => json(&MobileNetV2::default()),
        "resnet" => json(&ResNet::default()),
        "vgg13" => json(&Vgg13::default()),
        "amoebanet_d" => json(&AmoebaNetD::default()),
        "unet" => json(&UNet::default()),
        "roberta" => json(&Roberta::default()),
        "mlp" => json(&Mlp::default()),
        other => return Err(ModelError::Unknown { got: other.to_owned() }),
    })
}

fn parse<T: DeserializeOwned>(model: &str, settings: serde_json::Value) -> Result<T, ModelError> {
    serde_json::from_value(settings).map_err(|e| ModelError::settings(model, e.to_string()))
}

fn json(settings: &impl Serialize) -> serde_json::Value {
    serde_json::to_value(settings).expect("settings are plain numbers and lists")
}

fn recipe(name: &str, settings: &impl Serialize) -> Option<Recipe> {
    Some(Recipe { name: name.to_owned(), settings: json(settings) })
}

fn require(holds: bool, model: &str, why: &str) -> Result<(), ModelError> {
    if holds {
        Ok(())
    } else {
        Err(ModelError::settings(model, why))
    }
}

/// The single shape a layer expects, or an error in its name.
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
        let recipe = Recipe { name: name.to_owned(), settings: default_settings(name).unwrap() };
        let model = build(&recipe).unwrap();
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

    /// Nothing is allocated for a weight: all of the published counts together take a moment.
    #[test]
    fn counting_the_largest_models_is_a_matter_of_milliseconds() {
        let begin = std::time::Instant::now();
        let count = |name: &str, settings: serde_json::Value| {
            let model = build(&Recipe { name: name.to_owned(), settings }).unwrap();
            model.summary().unwrap().iter().map(|layer| layer.parameters).sum::<u64>()
        };
        assert_eq!(count("unet", serde_json::json!({ "convolutions": 48, "channels": 160 })), 15_822_206_000);
        assert_eq!(count("amoebanet_d", serde_json::json!({ "layers": 72, "filters": 512 })), 1_844_858_344);
        assert_eq!(count("mobilenet_v2", serde_json::json!({ "classes": 1000 })), 3_504_872);
        assert_eq!(count("resnet", serde_json::json!({ "depth": 101 })), 44_549_160);
        assert_eq!(count("vgg13", serde_json::json!({})), 133_047_848);
        assert_eq!(count("roberta", serde_json::json!({})), 124_647_170);
        assert!(begin.elapsed().as_secs_f64() < 1.0, "{:?}", begin.elapsed());
    }

    /// Every setting has a default, and every model its name in the list and in both tables.
    #[test]
    fn every_model_of_the_list_can_be_made_and_makes_itself_again() {
        for name in NAMES {
            let settings = default_settings(name).unwrap();
            let model = build(&Recipe { name: name.to_owned(), settings }).unwrap();
            let again = build(model.recipe.as_ref().unwrap()).unwrap();
            assert_eq!((again.layers.len(), again.parameters()), (model.layers.len(), model.parameters()), "{name}");
            let names: std::collections::BTreeSet<&str> = model.layers.iter().map(|layer| layer.name()).collect();
            assert_eq!(names.len(), model.layers.len(), "{name}: every layer has its own name");
            let tensors: Vec<String> = model.layers.iter().flat_map(|l| l.tensors()).map(|t| t.name).collect();
            let distinct: std::collections::BTreeSet<&String> = tensors.iter().collect();
            assert_eq!(distinct.len(), tensors.len(), "{name}: every tensor has its own name");
        }
    }
}
