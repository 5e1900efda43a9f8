//! Weights from a safetensors file, by name. The file may be anybody's: it is read, compared with the model, and
//! whatever does not fit is listed.

use crate::exit::usage;
use crate::report::listed;
use crate::tensor_file::TensorFile;
use anyhow::Context;
use distgpipe::tch::{Kind, Tensor};
use distgpipe::{Model, TensorSpec};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// torch.nn.BatchNorm2d counts its batches; nothing here needs the count.
const IGNORED_SUFFIX: &str = ".num_batches_tracked";

/// What becomes of tensors of the model that the file does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// They are an error.
    Refuse,
    /// They keep their first values: a new classifier on a trained body.
    Initialize,
}

/// The tensors of a file: all of the model's, or with [`Missing::Initialize`] some, and no others.
pub fn read(path: &Path, model: &Model, allow: Missing) -> anyhow::Result<BTreeMap<String, Tensor>> {
    let flag = || format!("--weights {}", path.display());
    let file = TensorFile::read("--weights", path)?;
    let specs: BTreeMap<String, TensorSpec> =
        model.layers.iter().flat_map(|layer| layer.tensors()).map(|spec| (spec.name.clone(), spec)).collect();
    let mut tensors = BTreeMap::new();
    let (mut extra, mut misshaped) = (Vec::new(), Vec::new());
    for entry in file.entries() {
        let name = &entry.name;
        let Some(spec) = specs.get(name) else {
            if !name.ends_with(IGNORED_SUFFIX) {
                extra.push(name.clone());
            }
            continue;
        };
        let dims: Vec<i64> = entry.dims.iter().map(|&d| i64::try_from(d).unwrap_or(i64::MAX)).collect();
        if dims != spec.dims {
            misshaped.push(format!("{name} is {dims:?}, the model's is {:?}", spec.dims));
            continue;
        }
        let Some(kind) = kind(entry.dtype) else {
            misshaped.push(format!("{name} holds {:?}", entry.dtype));
            continue;
        };
        let tensor = Tensor::f_from_data_size(file.data(entry), &dims, kind).and_then(|t| t.f_to_kind(spec.kind));
        tensors.insert(name.clone(), tensor.with_context(flag)?);
    }
    let seen: BTreeSet<&str> = file.entries().iter().map(|entry| &entry.name[..]).collect();
    let missing: Vec<String> = specs.into_keys().filter(|name| !seen.contains(&name[..])).collect();
    let missing = match allow {
        Missing::Initialize if !tensors.is_empty() => Vec::new(),
        _ => missing,
    };
    let complaints: Vec<String> = [("missing", missing), ("not the model's", extra), ("of the wrong shape", misshaped)]
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("  {} {what}: {}", names.len(), listed(&names)))
        .collect();
    if complaints.is_empty() {
        return Ok(tensors);
    }
    Err(usage(format!(
        "{} does not fit the model (check --model and --set, or rename the tensors; --init-missing gives those that are missing \
         their first values):\n{}",
        flag(),
        complaints.join("\n")
    )))
}

fn kind(dtype: Dtype) -> Option<Kind> {
    Some(match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::F64 => Kind::Double,
        Dtype::F16 => Kind::Half,
        Dtype::BF16 => Kind::BFloat16,
        Dtype::I64 => Kind::Int64,
        Dtype::I32 => Kind::Int,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::models::Mlp;

    fn model() -> Model {
        Mlp { hidden: vec![4], ..Mlp::default() }.model().unwrap()
    }

    /// A file that is gone with this value.
    struct Written(std::path::PathBuf);

    impl std::ops::Deref for Written {
        type Target = Path;
        fn deref(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Written {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn write(name: &str, bytes: &[u8]) -> Written {
        let path = std::env::temp_dir().join(format!("distgpipe-weights-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Written(path)
    }

    fn file(tensors: &[(&str, &[usize])]) -> Vec<u8> {
        let data: Vec<Vec<u8>> = tensors.iter().map(|(_, dims)| vec![0; 4 * dims.iter().product::<usize>()]).collect();
        let views = tensors.iter().zip(&data).map(|((name, dims), data)| {
            (*name, safetensors::tensor::TensorView::new(Dtype::F32, dims.to_vec(), data).unwrap())
        });
        safetensors::serialize(views, &None).unwrap()
    }

    #[test]
    fn what_does_not_fit_is_listed() {
        let whole: [(&str, &[usize]); 4] = [
            ("layers.0.weight", &[4, 64]),
            ("layers.0.bias", &[4]),
            ("layers.1.weight", &[10, 4]),
            ("layers.1.bias", &[10]),
        ];
        let path = write("whole", &file(&whole));
        assert_eq!(read(&path, &model(), Missing::Refuse).unwrap().len(), 4);
        let body = write("body", &file(&whole[..2]));
        let refused = read(&body, &model(), Missing::Refuse).unwrap_err().to_string();
        assert!(refused.contains("2 missing") && refused.contains("--init-missing"), "{refused}");
        assert_eq!(read(&body, &model(), Missing::Initialize).unwrap().len(), 2);
        let strange = write("strange", &file(&[("other", &[1])]));
        assert!(read(&strange, &model(), Missing::Initialize).is_err(), "nothing of the model is there");
        let broken: [(&str, &[usize]); 4] =
            [("layers.0.weight", &[4, 65]), ("layers.0.bias", &[4]), ("other", &[1]), ("x.num_batches_tracked", &[1])];
        let text = read(&write("broken", &file(&broken)), &model(), Missing::Refuse).unwrap_err().to_string();
        assert!(text.contains("2 missing: layers.1.bias, layers.1.weight"), "{text}");
        assert!(text.contains("1 not the model's: other"), "{text}");
        assert!(text.contains("layers.0.weight is [4, 65], the model's is [4, 64]"), "{text}");
    }

    #[test]
    fn bytes_of_any_kind_are_an_error_and_no_panic() {
        let good = file(&[("layers.0.bias", &[4])]);
        let mut cases = vec![vec![], vec![0xff; 7], vec![0xff; 64], good[..good.len() - 1].to_vec()];
        for i in 0..good.len() {
            let mut bytes = good.clone();
            bytes[i] ^= 0x55;
            cases.push(bytes);
        }
        let path = write("any", &[]);
        for bytes in cases {
            std::fs::write(&*path, bytes).unwrap();
            assert!(read(&path, &model(), Missing::Refuse).is_err());
        }
    }
}
