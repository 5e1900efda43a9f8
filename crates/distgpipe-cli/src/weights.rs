//! Weights from and to files. Files are untrusted: a file is opened and compared with the model, and an error lists whatever does
//! not fit. Its tensors are read one by one when the workers that hold them run.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`fit`] | the comparison of a file with the model |
//! | [`names`] | what tensors are called in files |

mod fit;
mod names;

pub use fit::fit;

use crate::exit::usage;
use crate::report;
use anyhow::Context;
use distgpipe::tch::{Kind, TchError, Tensor};
use distgpipe::train::weights::{Entry, SafetensorsWriter, TensorSource};
use distgpipe::{Model, Pipeline};
use names::public_name;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What to do about tensors of the model that the file does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Report them as an error.
    Refuse,
    /// Let them keep their initial values, and also those of the last layer that have another shape: a new classifier on a
    /// trained body.
    Initialize,
}

/// A file that fits the model.
pub struct Fitted {
    path: PathBuf,
    source: Mutex<Box<dyn TensorSource>>,
    /// By the model's name: the tensor's number in the file, and its type in the model.
    found: BTreeMap<String, (usize, Kind)>,
    /// Lines for the user about tensors that are not loaded.
    pub notes: Vec<String>,
}

impl Fitted {
    /// Loads the tensors into the workers that hold them. Fails on values that are not finite.
    pub fn load(&self, pipeline: &mut Pipeline) -> anyhow::Result<()> {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<String> = self.found.keys().cloned().collect();
        // In the order of the file, so that each worker's tensors are read from front to back.
        names.sort_by_key(|name| self.found[name].0);
        let loaded = pipeline.load_from(&names, |name| {
            let (index, kind) = self.found[name];
            let tensor = source.read(index)?.f_to_kind(kind)?;
            // Reported here, before the loss becomes NaN.
            if !is_finite(&tensor)? {
                anyhow::bail!("expected finite values in `{name}`, got one that is not finite: the file may come from a run that diverged");
            }
            Ok(tensor)
        });
        loaded.with_context(|| format!("--weights {}", self.path.display()))
    }
}

/// Whether all values are finite. Checked piece by piece, because libtorch's temporary results are larger than the tensor.
fn is_finite(tensor: &Tensor) -> Result<bool, TchError> {
    const PIECE: i64 = 1 << 18;
    for piece in tensor.f_flatten(0, -1)?.f_split(PIECE, 0)? {
        if i64::try_from(piece.f_isfinite()?.f_all()?)? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
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

/// Writes the current model, tensor by tensor.
pub fn save(path: &Path, model: &Model, pipeline: &mut Pipeline) -> anyhow::Result<()> {
    let specs = pipeline.state_specs();
    // `state_each` yields the tensors in this order.
    let entries = specs.iter().map(|spec| Entry::new(public_name(model, &spec.name), spec.kind, &spec.dims)).collect();
    let write = || -> anyhow::Result<()> {
        let mut writer = SafetensorsWriter::create(path, entries, &BTreeMap::new())?;
        pipeline.state_each(|name, tensor| {
            if !is_finite(&tensor)? {
                anyhow::bail!("`{name}` has values that are not finite, so nothing was saved: the last update diverged; lower --lr, or clip gradients with --clip-norm");
            }
            anyhow::Ok(writer.write(&tensor)?)
        })?;
        Ok(writer.finish()?)
    };
    write().context("--save")?;
    report::note(&format!("saved {} tensors to {}", specs.len(), path.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::tch::Device;
    use distgpipe::zoo::Mlp;

    /// The last update of a run may diverge after the last loss was finite. `--weights` would refuse such a file.
    #[test]
    fn a_model_that_is_not_finite_is_not_saved() {
        let model = Mlp::default().model().unwrap();
        let mut pipeline = Pipeline::builder(model.clone()).device(distgpipe::Device::Cpu).threads(1).build().unwrap();
        let path = std::env::temp_dir().join(format!("distgpipe-not-finite-{}.safetensors", std::process::id()));
        save(&path, &model, &mut pipeline).unwrap();
        std::fs::remove_file(&path).unwrap();
        let bias = Tensor::full([128], f64::NAN, (Kind::Float, Device::Cpu));
        pipeline.load(&BTreeMap::from([("layers.0.bias".to_owned(), bias)])).unwrap();
        let refused = format!("{:#}", save(&path, &model, &mut pipeline).unwrap_err());
        assert!(refused.contains("layers.0.bias") && refused.contains("--lr"), "{refused}");
        assert!(!path.exists());
    }
}
