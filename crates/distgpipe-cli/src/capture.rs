//! What crossed the links in one step, as a safetensors file, so that codecs can be tried on it.

use distgpipe::tch::{Kind, Tensor};
use safetensors::tensor::TensorView;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap};
use std::io::{Error, Result};
use std::path::{Path, PathBuf};

/// Makes the directory, so that what is wrong with it shows before the training.
pub fn prepare(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).map_err(|e| at(directory, e))
}

/// Writes `step-N.safetensors`, N counted from 1, into the directory.
pub fn save(directory: &Path, step: u64, tensors: &BTreeMap<String, Tensor>) -> Result<PathBuf> {
    let at = |e: Error| at(directory, e);
    let path = directory.join(format!("step-{}.safetensors", step + 1));
    let tensors: Vec<(&String, Tensor)> = tensors.iter().map(|(name, tensor)| (name, tensor.contiguous())).collect();
    let views: Vec<(&String, TensorView<'_>)> =
        tensors.iter().map(|(name, tensor)| Ok((*name, view(tensor)?))).collect::<Result<_>>().map_err(at)?;
    let about = HashMap::from([
        ("step".to_owned(), (step + 1).to_string()),
        ("names".to_owned(), "activation|gradient.FROM-TO.MICRO_BATCH.INDEX, partitions from 0".to_owned()),
    ]);
    let bytes = safetensors::serialize(views, &Some(about)).map_err(|e| at(Error::other(e.to_string())))?;
    // Whole or not at all.
    let unfinished = path.with_extension("part");
    std::fs::write(&unfinished, bytes).and_then(|()| std::fs::rename(&unfinished, &path)).map_err(at)?;
    Ok(path)
}

fn at(directory: &Path, error: Error) -> Error {
    Error::new(error.kind(), format!("--capture {}: {error}", directory.display()))
}

fn view(tensor: &Tensor) -> Result<TensorView<'_>> {
    let dtype = match tensor.kind() {
        Kind::Float => Dtype::F32,
        Kind::Double => Dtype::F64,
        Kind::Half => Dtype::F16,
        Kind::BFloat16 => Dtype::BF16,
        Kind::Int64 => Dtype::I64,
        Kind::Int => Dtype::I32,
        Kind::Int16 => Dtype::I16,
        Kind::Int8 => Dtype::I8,
        Kind::Uint8 => Dtype::U8,
        Kind::Bool => Dtype::BOOL,
        other => return Err(Error::other(format!("expected a type that safetensors has, got {other:?}"))),
    };
    let dims = tensor.size().iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
    let bytes = distgpipe::engine::bytes(tensor).ok_or_else(|| Error::other("expected a dense CPU tensor"))?;
    TensorView::new(dtype, dims, bytes).map_err(|e| Error::other(e.to_string()))
}
