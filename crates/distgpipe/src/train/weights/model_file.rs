//! The weights of a pipeline from and to a file, tensor by tensor.

use super::names::public_name;
use super::{fit, is_finite, Entry, MissingTensors, SafetensorsWriter, WeightsError};
use crate::driver::pipeline::{Pipeline, StepError};
use crate::model::layer::TensorSpec;
use std::collections::BTreeMap;
use std::path::Path;

impl Pipeline {
    /// Saves all parameters and buffers as a safetensors file, under the names of the model's tensors. PyTorch reads the
    /// file as a state dict: `model.load_state_dict(safetensors.torch.load_file(path))`.
    ///
    /// The file is complete or absent: it gets its name once all tensors are on the disk.
    ///
    /// # Errors
    /// If the file cannot be written, or a parameter is not finite.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<(), StepError> {
        save(self, path.as_ref(), &BTreeMap::new())
    }

    /// Loads all parameters and buffers from a file that [`save`](Self::save) or PyTorch wrote: safetensors, or the zip
    /// archive of `torch.save`, of which nothing is executed. Every tensor of the model must be in the file, and every
    /// tensor of the file in the model. The optimizer's state is not part of it; see [`Checkpoints`](crate::Checkpoints).
    ///
    /// # Errors
    /// If the file cannot be read, does not fit the model, or has values that are not finite.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<(), StepError> {
        fit(path.as_ref(), self.model(), MissingTensors::Refuse)?.load(self)
    }

    /// Loads the tensors that the file has. Those of the model that are missing keep their values, and so do tensors of the
    /// last layer that have another shape: a new classifier on a trained body. Returns a line for each kind of tensor that
    /// was not loaded.
    ///
    /// # Errors
    /// As [`load`](Self::load), and if the file has no tensor of the model.
    pub fn load_partial(&mut self, path: impl AsRef<Path>) -> Result<Vec<String>, StepError> {
        let fitted = fit(path.as_ref(), self.model(), MissingTensors::Initialize)?;
        fitted.load(self)?;
        Ok(fitted.notes)
    }
}

/// [`Pipeline::save`], with metadata in the file's header.
pub fn save(pipeline: &mut Pipeline, path: &Path, metadata: &BTreeMap<String, String>) -> Result<(), StepError> {
    let (model, specs) = (pipeline.model().clone(), pipeline.state_specs());
    // `state_each` yields the tensors in this order.
    let entry = |name: &str, spec: &TensorSpec| Entry::new(public_name(&model, name), spec.kind, &spec.dims);
    let tied = |name: &str| {
        model.tied.iter().filter(|(_, tied)| tied == name).map(|(other, _)| &other[..]).collect::<Vec<_>>()
    };
    let names = |spec: &TensorSpec| {
        std::iter::once(entry(&spec.name, spec))
            .chain(tied(&spec.name).into_iter().map(|other| entry(other, spec)))
            .collect::<Vec<_>>()
    };
    let mut writer = SafetensorsWriter::create(path, specs.iter().flat_map(names).collect(), metadata)?;
    pipeline.state_each(|name, tensor| {
        let engine =
            |error: tch::TchError| WeightsError::Engine { file: path.to_owned(), source: Box::new(error.into()) };
        if !is_finite(&tensor).map_err(engine)? {
            return Err(WeightsError::NotFiniteInModel { file: path.to_owned(), name: name.to_owned() }.into());
        }
        for _ in 0..=tied(name).len() {
            writer.write(&tensor)?;
        }
        Ok::<_, StepError>(())
    })?;
    Ok(writer.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Device;
    use crate::model::zoo::Mlp;
    use std::path::PathBuf;
    use tch::{Kind, Tensor};

    fn pipeline(hidden: i64, classes: i64, seed: u64) -> Pipeline {
        let model = Mlp { hidden: vec![hidden], classes, ..Mlp::default() }.model().unwrap();
        Pipeline::builder(model).device(Device::Cpu).threads(1).place("a,b").seed(seed).build().unwrap()
    }

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("distgpipe-model-{}-{name}.safetensors", std::process::id()))
    }

    #[test]
    fn what_was_saved_comes_back() {
        let (path, mut from, mut to) = (path("whole"), pipeline(8, 10, 1), pipeline(8, 10, 2));
        from.save(&path).unwrap();
        assert_ne!(from.state().unwrap(), to.state().unwrap());
        to.load(&path).unwrap();
        assert_eq!(from.state().unwrap(), to.state().unwrap());
        // Another number of classes: the body is loaded, the classifier keeps its values.
        let mut other = pipeline(8, 7, 3);
        let before = other.state().unwrap();
        let refused = other.load(&path).unwrap_err().to_string();
        assert!(refused.contains("2 of the wrong shape") && refused.contains("`Pipeline::load_partial`"), "{refused}");
        assert_eq!(other.state().unwrap(), before, "a file that does not fit changes nothing");
        let notes = other.load_partial(&path).unwrap();
        assert!(notes.len() == 1 && notes[0].starts_with("2 with another shape"), "{notes:?}");
        let (after, source) = (other.state().unwrap(), from.state().unwrap());
        assert_eq!(after["layers.0.weight"], source["layers.0.weight"]);
        assert_eq!(after["layers.1.weight"], before["layers.1.weight"]);
        std::fs::remove_file(&path).unwrap();
        let missing = to.load(&path).unwrap_err().to_string();
        assert!(missing.contains(path.to_str().unwrap()), "{missing}");
    }

    /// The last update of a run may diverge after the last loss was finite. `load` would refuse such a file.
    #[test]
    fn a_model_that_is_not_finite_is_not_saved() {
        let (path, mut pipeline) = (path("not-finite"), pipeline(8, 10, 1));
        let bias = Tensor::full([8], f64::NAN, (Kind::Float, tch::Device::Cpu));
        pipeline.load_state(&BTreeMap::from([("layers.0.bias".to_owned(), bias)])).unwrap();
        let refused = pipeline.save(&path).unwrap_err().to_string();
        assert!(refused.contains("layers.0.bias") && refused.contains("`Builder::learning_rate`"), "{refused}");
        assert!(!path.exists());
    }
}
