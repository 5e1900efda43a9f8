//! What a file of weights says about its model, so that `evaluate` and `predict` need no flags about it: the model and its settings,
//! the classes, the data set, and how its images or sentences are prepared.
//!
//! `--save` writes it as JSON into the metadata of the safetensors file, under the key [`KEY`]. Other programs ignore it. A
//! checkpoint says the same in its manifest.

use crate::args::TrainFlags;
use crate::config::RunConfig;
use crate::datasets;
use crate::exit::usage;
use crate::report;
use anyhow::Context;
use distgpipe::train::checkpoint::{newest_in, Manifest};
use distgpipe::train::weights::{self, TensorSource};
use distgpipe::{Checkpoint, CheckpointError, ModelSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The key of the metadata.
const KEY: &str = "distgpipe";
/// The version of [`SavedModel`].
const FORMAT: u32 = 1;

/// What a file says about its model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedModel {
    format: u32,
    pub model: ModelSpec,
    /// The names of the classes, in the order of the model's scores, if they are known.
    pub classes: Option<Vec<String>>,
    /// How the images of the data set are normalised; absent for other data.
    pub normalisation: Option<Normalisation>,
    /// The flags of the run that say which data it used and how it prepared them.
    pub flags: TrainFlags,
}

/// How colours, from 0 (black) to 1 (white), are normalised: the mean is subtracted, and the result divided by the deviation. One
/// value per channel, or one for all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Normalisation {
    pub mean: Vec<f64>,
    pub deviation: Vec<f64>,
}

impl SavedModel {
    /// What `--save` writes about the model of a run.
    pub fn of(config: &RunConfig) -> anyhow::Result<Self> {
        let spec = config.model.spec.clone().context("--save: a model without a specification")?;
        let data = config.test.as_ref().unwrap_or(&config.train);
        Self::new(spec, data.class_names(), &config.flags)
    }

    fn new(model: ModelSpec, classes: Option<Vec<String>>, flags: &TrainFlags) -> anyhow::Result<Self> {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let flags = TrainFlags {
            data: flags.data,
            data_dir: flags.data_dir.as_ref().map(absolute),
            tokenizer: flags.tokenizer.as_ref().map(absolute),
            batch: flags.batch.map(datasets::test_rows),
            ..described(flags)
        };
        let normalisation = flags.data.map(|name| datasets::normalisation(name, &flags)).transpose()?.flatten();
        Ok(SavedModel { format: FORMAT, model, classes, normalisation, flags })
    }

    /// The metadata of a safetensors file.
    pub fn metadata(&self) -> anyhow::Result<BTreeMap<String, String>> {
        Ok(BTreeMap::from([(KEY.to_owned(), serde_json::to_string(self)?)]))
    }

    fn from_manifest(manifest: &Manifest, flag: &str) -> anyhow::Result<Self> {
        let spec = manifest.model.clone();
        let spec = spec.ok_or_else(|| usage(format!("{flag}: the checkpoint is not of a model of this program")))?;
        let flags: TrainFlags = serde_json::from_value(manifest.settings.clone())
            .map_err(|e| usage(format!("{flag}: its flags do not belong to this version of distgpipe: {e}")))?;
        // A checkpoint has the data set's place, and the data set has the names.
        let classes = crate::config::model_of(&spec, &[]).and_then(|model| datasets::class_names(&flags, &model));
        let classes = classes.unwrap_or_else(|error| {
            report::note(&format!("warning: classes have numbers instead of names: {error:#}"));
            None
        });
        Self::new(spec, classes, &flags.or_defaults()?)
    }
}

/// The file that `--weights` leads to, and what it says about its model, if it does.
pub struct Opened {
    pub file: PathBuf,
    /// The tensors of the file, which a run may remove meanwhile.
    pub source: Box<dyn TensorSource>,
    pub about: Option<SavedModel>,
}

/// Opens a file of weights, a checkpoint, or a directory of checkpoints, of which the newest that is intact counts.
pub fn open(path: &Path) -> anyhow::Result<Opened> {
    let flag = format!("--weights {}", path.display());
    if path.is_dir() {
        let OpenedCheckpoint { manifest, file, source } = match Checkpoint::is_at(path) {
            true => open_checkpoint(path).map_err(|e| usage(format!("{flag}: {e}")))?,
            false => newest(path, &flag)?,
        };
        let about = Some(SavedModel::from_manifest(&manifest, &flag)?);
        return Ok(Opened { file, source, about });
    }
    let source = weights::open(path).map_err(|e| usage(format!("--weights {e}")))?;
    let about = source.metadata(KEY).map(|text| parse(text, &flag)).transpose()?;
    Ok(Opened { file: path.to_owned(), source, about })
}

/// The flags that a description may have: those that say what the model was trained on.
fn described(flags: &TrainFlags) -> TrainFlags {
    TrainFlags {
        data: flags.data,
        data_dir: flags.data_dir.clone(),
        tokenizer: flags.tokenizer.clone(),
        normalise: flags.normalise,
        loss: flags.loss,
        samples: flags.samples,
        seed: flags.seed,
        batch: flags.batch,
        precision: flags.precision,
        tf32: flags.tf32,
        no_channels_last: flags.no_channels_last,
        ..TrainFlags::default()
    }
}

fn parse(text: &str, flag: &str) -> anyhow::Result<SavedModel> {
    let wrong = |got: String| {
        usage(format!(
            "{flag}: expected a description of the model in format {FORMAT}, got {got}: use the version of distgpipe that wrote the file"
        ))
    };
    #[derive(Deserialize)]
    struct Version {
        format: u32,
    }
    // Checked first, because another format may have other fields.
    match serde_json::from_str(text).map(|Version { format }| format) {
        Ok(FORMAT) => {
            let about: SavedModel = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
            // The file may come from anybody: it must not choose workers to connect to, or files of tokens.
            Ok(SavedModel { flags: described(&about.flags), ..about })
        }
        Ok(other) => Err(wrong(format!("format {other}"))),
        Err(error) => Err(wrong(error.to_string())),
    }
}

/// A checkpoint without the optimizer's state, which training alone needs.
struct OpenedCheckpoint {
    manifest: Manifest,
    file: PathBuf,
    source: Box<dyn TensorSource>,
}

/// Opens a checkpoint and its file of tensors, so that both stay readable when the checkpoint is removed.
fn open_checkpoint(folder: &Path) -> Result<OpenedCheckpoint, CheckpointError> {
    let (manifest, file) = Checkpoint::model_at(folder)?;
    let source = weights::open(&file)?;
    Ok(OpenedCheckpoint { manifest, file, source })
}

/// The newest intact checkpoint of a directory. The directory is not locked: the run that writes there may go on.
fn newest(directory: &Path, flag: &str) -> anyhow::Result<OpenedCheckpoint> {
    let (found, damaged) = newest_in(directory, open_checkpoint).map_err(|e| usage(format!("{flag}: {e}")))?;
    for error in &damaged {
        report::note(&format!("warning: skipping a damaged checkpoint: {error}"));
    }
    found.ok_or_else(|| match damaged.is_empty() {
        true => usage(format!(
            "{flag}: expected a file of weights, a checkpoint or a directory of checkpoints, got a directory without checkpoints"
        )),
        false => usage(format!("{flag}: none of its checkpoints can be used, for the reasons above: name another one")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::DataName;

    #[test]
    fn a_description_survives_its_file_and_anything_else_is_an_error() {
        let spec = ModelSpec { name: "mlp".to_owned(), settings: serde_json::json!({"classes": 10}) };
        let flags = TrainFlags { data: Some(DataName::Digits), batch: Some(8), lr: Some(0.1), ..TrainFlags::default() };
        let saved = SavedModel::new(spec, Some(vec!["a\"b".to_owned()]), &flags).unwrap();
        assert_eq!((saved.flags.lr, saved.flags.batch), (None, Some(16)), "only what describes the data");
        let text = saved.metadata().unwrap()[KEY].clone();
        assert_eq!(parse(&text, "--weights x").unwrap(), saved);
        let text_of = |text: &str| parse(text, "--weights x").unwrap_err().to_string();
        assert!(text_of(&text.replace("\"format\":1", "\"format\":2")).contains("got format 2"));
        for cut in 0..text.len() {
            assert!(
                text.is_char_boundary(cut) && text_of(&text[..cut]).contains("--weights x: expected a description")
            );
        }
        assert!(text_of(&text.replace("\"data\":\"digits\"", "\"data\":\"mnist\"")).contains("mnist"));
    }

    /// A file from somebody else once could make `predict` connect to a worker and show it the token.
    #[test]
    fn a_description_cannot_choose_workers() {
        let spec = ModelSpec { name: "mlp".to_owned(), settings: serde_json::json!({}) };
        let mut hostile = SavedModel::new(spec, None, &TrainFlags::default()).unwrap();
        let honest = hostile.clone();
        hostile.flags.partitions = Some(2);
        hostile.flags.workers = Some("203.0.113.1:7000".to_owned());
        hostile.flags.token_file = Some("/etc/hostname".into());
        assert_eq!(parse(&hostile.metadata().unwrap()[KEY], "--weights x").unwrap(), honest);
    }
}
