//! `--capture`: writes the tensors that crossed the links in one step to a safetensors file, for trials of codecs.

use distgpipe::tch::Tensor;
use distgpipe::train::weights::{Entry, SafetensorsWriter, WeightsError};
use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// Creates the directory, so that an error shows before training starts.
pub fn prepare(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)
        .map_err(|e| Error::new(e.kind(), format!("--capture {}: {e}", directory.display())))
}

/// Writes `step-N.safetensors`, N counted from 1, into the directory.
pub fn save(directory: &Path, step: u64, tensors: &BTreeMap<String, Tensor>) -> Result<PathBuf> {
    let path = directory.join(format!("step-{}.safetensors", step + 1));
    written(&path, step, tensors).map_err(|error| {
        let kind = match &error {
            WeightsError::Io { source, .. } => source.kind(),
            _ => ErrorKind::Other,
        };
        Error::new(kind, format!("--capture {error}"))
    })?;
    Ok(path)
}

fn written(path: &Path, step: u64, tensors: &BTreeMap<String, Tensor>) -> std::result::Result<(), WeightsError> {
    let about = BTreeMap::from([
        ("step".to_owned(), (step + 1).to_string()),
        ("names".to_owned(), "activation|gradient.FROM-TO.MICRO_BATCH.INDEX, partitions from 0".to_owned()),
    ]);
    let entries = tensors.iter().map(|(name, tensor)| Entry::new(name, tensor.kind(), &tensor.size()));
    let mut writer = SafetensorsWriter::create(path, entries.collect(), &about)?;
    tensors.values().try_for_each(|tensor| writer.write(tensor))?;
    writer.finish()
}
