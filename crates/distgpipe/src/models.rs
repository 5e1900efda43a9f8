//! The models, one file each:
//!
//! - [`mobilenet_v2`]: torchvision's layout and names
//! - [`resnet`]: 18 to 152 layers deep, torchvision's layout and names
//! - [`vgg`]: VGG-13, torchvision's layout and names
//! - [`amoebanet_d`]: cells that pass two tensors on
//! - [`unet`]: long skips, every operation a layer of its own
//! - [`roberta`]: an encoder for text with a classifier, Hugging Face's layout and names, any size
//! - [`mlp`]: the smallest thing that learns

pub mod amoebanet_d;
mod classifier;
pub mod mlp;
pub mod mobilenet_v2;
pub mod resnet;
pub mod roberta;
pub mod unet;
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
use serde::de::DeserializeOwned;
use serde::Serialize;

/// The names of the models.
pub const NAMES: [&str; 7] = ["mobilenet_v2", "resnet", "vgg13", "amoebanet_d", "unet", "roberta", "mlp"];

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
