//! The model that flags describe.

use crate::args::{LayersName, TrainFlags};
use crate::exit::usage;
use crate::files::read_text;
use crate::report;
use distgpipe::model::{exported, zoo, ModelSpec};
use distgpipe::train::weights;
use distgpipe::Model;
use distgpipe_core::pt2::Boundaries;
use std::path::Path;

/// The largest Hugging Face config.json that is read; one with a million labels is smaller.
const MODEL_CONFIG_BYTES_MAX: u64 = 32 << 20;

/// What the name of an exported model ends in.
const EXPORTED: &str = ".pt2";

/// Whether `--model` names a file of an exported model.
pub fn is_exported(name: &str) -> bool {
    name.ends_with(EXPORTED)
}

/// The name that the model of `--model` has in its spec: files have that of exported models.
pub fn spec_name(name: &str) -> &str {
    if is_exported(name) {
        exported::NAME
    } else {
        name
    }
}

/// The flags of exported models.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportedFlags {
    pub layers: Option<LayersName>,
    pub untie: Option<bool>,
}

impl ExportedFlags {
    pub fn of(flags: &TrainFlags) -> Self {
        ExportedFlags { layers: flags.layers, untie: flags.untie }
    }

    /// How these flags divide a model.
    pub fn options(self) -> zoo::ExportedOptions {
        let layers = match self.layers.unwrap_or_default() {
            LayersName::Modules => Boundaries::Modules,
            LayersName::All => Boundaries::All,
        };
        zoo::ExportedOptions { layers, untie: self.untie == Some(true) }
    }

    /// Checks that none is given for a model that is not exported.
    pub fn check_for(self, name: &str) -> anyhow::Result<()> {
        let flags = [("--layers", self.layers.is_some()), ("--untie", self.untie == Some(true))];
        match flags.iter().find(|(_, given)| *given) {
            Some((flag, _)) => {
                Err(usage(format!("{flag}: it applies to exported models only, and {name} is none: remove it")))
            }
            None => Ok(()),
        }
    }
}

/// Builds the model `name`, with settings of the form `key=value`, or opens it if it is a file. Errors about the name start
/// with `flag`.
pub fn model(flag: &str, name: &str, set: &[String], given: ExportedFlags) -> anyhow::Result<Model> {
    if is_exported(name) {
        if let Some(setting) = set.first() {
            return Err(usage(format!("--set {setting}: an exported model has no settings: change it in Python")));
        }
        let model = zoo::Exported::open_with(name, given.options()).map_err(|e| usage(format!("{flag} {e}")))?;
        if !weights::is_compared(Path::new(name)).map_err(|e| usage(format!("{flag} {e}")))? {
            report::note(&format!(
                "warning: {name}: it was not compared with the module that it was exported from; `python3 -m distgpipe_export` does so"
            ));
        }
        return Ok(model);
    }
    given.check_for(name)?;
    let settings = zoo::default_settings(name).map_err(|e| usage(format!("{flag}: {e}{}", depth_setting(name))))?;
    model_of(&ModelSpec { name: name.to_owned(), settings }, set)
}

/// How to choose the depth that a name such as `resnet50` has in it, or nothing.
fn depth_setting(name: &str) -> String {
    let family = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let depth = &name[family.len()..];
    let family = family.trim_end_matches(['-', '_']).to_ascii_lowercase();
    let settings = zoo::default_settings(&family).unwrap_or_default();
    match settings.get("depth") {
        Some(_) if !depth.is_empty() => format!("; for {name}, use {family} and --set depth={depth}"),
        _ => String::new(),
    }
}

/// Builds the model of a specification, with settings of the form `key=value` that change it.
pub fn model_of(spec: &ModelSpec, set: &[String]) -> anyhow::Result<Model> {
    let ModelSpec { name, mut settings } = spec.clone();
    for setting in set {
        let Some((key, value)) = setting.split_once('=') else {
            return Err(usage(format!("--set {setting}: expected KEY=VALUE, such as classes=10")));
        };
        if (&name[..], key.trim()) == ("roberta", "config") {
            // Replaces all settings; later flags change single ones.
            let text = read_text("--set config", Path::new(value), MODEL_CONFIG_BYTES_MAX)?;
            let read = zoo::Roberta::from_hugging_face(&text).map_err(|e| usage(format!("--set {setting}: {e}")))?;
            settings = serde_json::to_value(read)?;
            continue;
        }
        // A value that is not JSON is a string.
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        match settings.get_mut(key.trim()) {
            Some(slot) => *slot = value,
            None => {
                let known: Vec<String> = listed(&settings).map(|(key, value)| format!("{key}={value}")).collect();
                return Err(usage(format!(
                    "--set {setting}: {name} has no such setting; its settings are (with defaults) {}",
                    known.join(", ")
                )));
            }
        }
    }
    let model = zoo::build(&ModelSpec { name, settings }).map_err(|e| usage(format!("--set: {e}")))?;
    model.summary().map_err(|e| usage(format!("--set: {e}")))?;
    Ok(model)
}

/// The settings that a person would set: not the graph of an exported model.
pub fn listed(settings: &serde_json::Value) -> impl Iterator<Item = (&String, &serde_json::Value)> {
    settings.as_object().into_iter().flatten().filter(|(_, value)| !value.is_object())
}
