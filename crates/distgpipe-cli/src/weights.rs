//! `--weights` and `--save`: weights from and to files.

use crate::exit::usage;
use crate::report;
use crate::saved_model::SavedModel;
use anyhow::Context;
use distgpipe::train::weights::{self, SafetensorsWriter, TensorSource, WeightsError};
use distgpipe::{Model, Pipeline};
use std::collections::BTreeMap;
use std::path::Path;

pub use distgpipe::train::weights::{FittedWeights, MissingTensors};

/// Opens the file of `--weights`, whose tensors must fit the model.
pub fn fit(path: &Path, model: &Model, allow: MissingTensors) -> anyhow::Result<FittedWeights> {
    let mut fitted = weights::fit(path, model, allow).map_err(|error| match error {
        WeightsError::Mismatch { file, mismatches } => usage(format!(
            "--weights {} does not fit the model: check --model and --set, or rename the tensors; with --init-missing, tensors \
             that are missing and last-layer tensors of another shape keep their initial values:\n{mismatches}",
            file.display()
        )),
        other => usage(format!("--weights {other}")),
    })?;
    for note in &mut fitted.notes {
        *note = format!("--weights {}: {note}", path.display());
    }
    Ok(fitted)
}

/// The same for a model that is not going to be trained: it must have all of its tensors.
pub fn fit_trained(path: &Path, source: Box<dyn TensorSource>, model: &Model) -> anyhow::Result<FittedWeights> {
    weights::fit_opened(path, source, model, MissingTensors::Refuse).map_err(|error| match error {
        WeightsError::Mismatch { file, mismatches } => usage(format!(
            "--weights {} does not fit the model: check --model and --set, or rename the tensors:\n{mismatches}",
            file.display()
        )),
        other => usage(format!("--weights {other}")),
    })
}

/// Checks before training that a file of weights can be written to `path`.
pub fn check_save(path: &Path) -> anyhow::Result<()> {
    crate::files::NewFile::at("--save", path)?;
    if path.extension().is_none_or(|extension| extension != "safetensors") {
        let got = path.display();
        return Err(usage(format!(
            "--save {got}: expected a name that ends in .safetensors, the format that is written"
        )));
    }
    // Creates and removes the temporary file that `SafetensorsWriter` writes to.
    SafetensorsWriter::create(path, Vec::new(), &BTreeMap::new())
        .map(drop)
        .map_err(|e| usage(format!("--save: {e}: choose a path that can be written to")))
}

/// Writes the current model, tensor by tensor, with what `evaluate` and `predict` need to know about it.
pub fn save(path: &Path, about: &SavedModel, pipeline: &mut Pipeline) -> anyhow::Result<()> {
    weights::save(pipeline, path, &about.metadata()?).context("--save")?;
    report::note(&format!("saved {} tensors to {}", pipeline.state_specs().len(), path.display()));
    Ok(())
}
