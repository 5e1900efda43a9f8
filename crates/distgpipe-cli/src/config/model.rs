//! The model that flags describe.

use crate::exit::usage;
use crate::files::read_text;
use distgpipe::model::{zoo, ModelSpec};
use distgpipe::Model;
use std::path::Path;

/// The largest Hugging Face config.json that is read; one with a million labels is smaller.
const MODEL_CONFIG_BYTES_MAX: u64 = 32 << 20;

/// Builds the model `name`, with settings of the form `key=value`. Errors about the name start with `flag`.
pub fn model(flag: &str, name: &str, set: &[String]) -> anyhow::Result<Model> {
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
                let known: Vec<String> =
                    settings.as_object().into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
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
