//! Weights from a file, by name, and to a file. A file may be anybody's: it is opened, compared with the model, and whatever
//! does not fit is listed. Its tensors are read when the workers that hold them are there, one by one.
//!
//! Names are those of torchvision and Hugging Face, and so are the files, except for what follows.
//!
//! - `torch.nn.DataParallel` puts `module.` before every name.
//! - Hugging Face puts `roberta.` before the body's names in models with a head. Files are written so: that is what
//!   `RobertaForSequenceClassification` takes.
//! - Layer norms once had `gamma` and `beta`.
//! - Some tensors are no part of our models: see [`IGNORED`].

use crate::exit::usage;
use crate::report::{self, listed, FEW};
use anyhow::Context;
use distgpipe::tch::{Kind, TchError, Tensor};
use distgpipe::weights::{self, Entry, SafetensorsWriter, Source};
use distgpipe::{Model, Pipeline, TensorSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// torch.nn.BatchNorm2d counts its batches, which files from before 2018 do not have; nothing depends on the count.
const COUNTER: &str = ".num_batches_tracked";

/// Beginnings of names that files have and our models do not: the body's pooler and the head of the language model that
/// a classifier is trained from, and the numbers 0, 1, 2, … that older versions kept.
const IGNORED: [&str; 3] = ["pooler.dense.", "lm_head.", "embeddings.position_ids"];

/// Before every name of a model that was trained with torch.nn.DataParallel.
const PARALLEL: &str = "module.";

/// Before the names of the body in Hugging Face's models with a head.
const BODY: &str = "roberta.";

/// How many names are listed of each kind of misfit.
const COMPLAINTS_MAX: usize = 50;

/// What becomes of tensors of the model that the file does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// They are an error.
    Refuse,
    /// They keep their first values, and so do those of the last layer that have another shape: a new classifier on a
    /// trained body.
    Initialize,
}

/// A file that fits the model.
pub struct Fitted {
    path: PathBuf,
    source: Mutex<Box<dyn Source>>,
    /// By the model's names: the number in the file, and the type that the model has.
    found: BTreeMap<String, (usize, Kind)>,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl Fitted {
    /// Hands the tensors to the workers that hold them.
    pub fn load(&self, pipeline: &mut Pipeline) -> anyhow::Result<()> {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<String> = self.found.keys().cloned().collect();
        // As they are in the file, which is then read from front to back for each worker.
        names.sort_by_key(|name| self.found[name].0);
        let loaded = pipeline.load_from(&names, |name| {
            let (index, kind) = self.found[name];
            let tensor = source.read(index)?.f_to_kind(kind)?;
            // Told here, and not by a loss that is no number.
            if !is_finite(&tensor)? {
                anyhow::bail!("expected numbers in `{name}`, got one that is not finite: was the training of this file broken off?");
            }
            Ok(tensor)
        });
        loaded.with_context(|| format!("--weights {}", self.path.display()))
    }
}

/// Opens a file that has all of the model's tensors, or with [`Missing::Initialize`] some, and no others.
pub fn fit(path: &Path, model: &Model, allow: Missing) -> anyhow::Result<Fitted> {
    let flag = || format!("--weights {}", path.display());
    let source = weights::open(path).map_err(|e| usage(format!("--weights {e}")))?;
    let last: BTreeSet<String> =
        model.layers.last().iter().flat_map(|layer| layer.tensors()).map(|spec| spec.name).collect();
    let specs: BTreeMap<String, TensorSpec> =
        model.layers.iter().flat_map(|layer| layer.tensors()).map(|spec| (spec.name.clone(), spec)).collect();
    let (mut found, mut named) = (BTreeMap::new(), BTreeMap::new());
    let (mut extra, mut ignored, mut misshaped, mut twice, mut anew) = (vec![], vec![], vec![], vec![], vec![]);
    let parallel = source.entries().iter().all(|entry| entry.name.starts_with(PARALLEL));
    for (index, entry) in source.entries().iter().enumerate() {
        let name = &entry.name;
        let bare = if parallel { &name[PARALLEL.len()..] } else { name };
        let Some(spec) = spellings(bare).iter().find_map(|spelling| specs.get(spelling)) else {
            let body = bare.strip_prefix(BODY).unwrap_or(bare);
            if IGNORED.iter().any(|beginning| body.starts_with(beginning)) {
                ignored.push(name.clone());
            } else if !name.ends_with(COUNTER) {
                extra.push(name.clone());
            }
            continue;
        };
        if let Some(other) = named.insert(spec.name.clone(), name.clone()) {
            twice.push(format!("{other} and {name}"));
        } else if entry.dims == spec.dims {
            found.insert(spec.name.clone(), (index, spec.kind));
        } else {
            let shapes = format!("{name} is {:?}, the model's is {:?}", entry.dims, spec.dims);
            let new = allow == Missing::Initialize && last.contains(&spec.name);
            if new { &mut anew } else { &mut misshaped }.push(shapes);
        }
    }
    let mut missing: Vec<String> =
        specs.into_keys().filter(|name| !named.contains_key(name) && !name.ends_with(COUNTER)).collect();
    let mut notes = Vec::new();
    let mut note = |names: &[String], what: &str| {
        if !names.is_empty() {
            notes.push(format!("{}: {} {what}: {}", flag(), names.len(), listed(names, FEW)));
        }
    };
    note(&ignored, "not used, as the model has no such part");
    if allow == Missing::Initialize && !found.is_empty() {
        note(&missing, "missing, which keep their first values");
        note(&anew, "of another shape in the last layer, which keep their first values");
        missing.clear();
    } else {
        misshaped.append(&mut anew);
    }
    let complaints: Vec<String> = [
        ("missing", missing),
        ("not the model's", extra),
        ("of the wrong shape", misshaped),
        ("names for one tensor", twice),
    ]
    .into_iter()
    .filter(|(_, names)| !names.is_empty())
    .map(|(what, names)| format!("  {} {what}: {}", names.len(), listed(&names, COMPLAINTS_MAX)))
    .collect();
    if complaints.is_empty() {
        return Ok(Fitted { path: path.to_owned(), source: Mutex::new(source), found, notes });
    }
    Err(usage(format!(
        "{} does not fit the model (check --model and --set, or rename the tensors; --init-missing gives those that are missing, \
         and those of the last layer that have another shape, their first values):\n{}",
        flag(),
        complaints.join("\n")
    )))
}

/// Whether all values are numbers. Looked at piece by piece: what libtorch makes of a tensor for that is larger than it.
fn is_finite(tensor: &Tensor) -> Result<bool, TchError> {
    const PIECE: i64 = 1 << 18;
    for piece in tensor.f_flatten(0, -1)?.f_split(PIECE, 0)? {
        if i64::try_from(piece.f_isfinite()?.f_all()?)? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What the model may call a tensor of this name in a file.
fn spellings(name: &str) -> Vec<String> {
    let body = name.strip_prefix(BODY).unwrap_or(name);
    let mut all = vec![name.to_owned(), body.to_owned()];
    for (old, new) in [(".gamma", ".weight"), (".beta", ".bias")] {
        all.extend(body.strip_suffix(old).map(|stem| format!("{stem}{new}")));
    }
    all
}

/// What a tensor of the model is called in a file.
fn public_name(model: &Model, name: &str) -> String {
    let roberta = model.recipe.as_ref().is_some_and(|recipe| recipe.name == "roberta");
    if roberta && !name.starts_with("classifier.") {
        format!("{BODY}{name}")
    } else {
        name.to_owned()
    }
}

/// Whether a file of weights can be written there: asked before the training.
pub fn check_save(path: &Path) -> anyhow::Result<()> {
    crate::files::NewFile::at("--save", path)?;
    if path.extension().is_none_or(|extension| extension != "safetensors") {
        let got = path.display();
        return Err(usage(format!(
            "--save {got}: expected a name that ends in .safetensors, which is what is written"
        )));
    }
    // The name that it is written under until it is whole; see `SafetensorsWriter`.
    SafetensorsWriter::create(path, Vec::new(), &BTreeMap::new())
        .map(drop)
        .map_err(|e| usage(format!("--save: {e}: name a place that can be written to")))
}

/// Writes the model as it is now, tensor by tensor.
pub fn save(path: &Path, model: &Model, pipeline: &mut Pipeline) -> anyhow::Result<()> {
    let specs = pipeline.state_specs();
    // `state_each` vouches for the order.
    let entries = specs.iter().map(|spec| Entry::new(public_name(model, &spec.name), spec.kind, &spec.dims)).collect();
    let write = || -> anyhow::Result<()> {
        let mut writer = SafetensorsWriter::create(path, entries, &BTreeMap::new())?;
        pipeline.state_each(|_, tensor| anyhow::Ok(writer.write(&tensor)?))?;
        Ok(writer.finish()?)
    };
    write().context("--save")?;
    report::note(&format!("saved {} tensors to {}", specs.len(), path.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::models::{Mlp, Roberta};
    use safetensors::Dtype;

    fn model() -> Model {
        Mlp { hidden: vec![4], ..Mlp::default() }.model().unwrap()
    }

    /// A file that is gone with this value.
    struct Written(PathBuf);

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
        assert_eq!(fit(&path, &model(), Missing::Refuse).unwrap().found.len(), 4);
        let body = write("body", &file(&whole[..2]));
        let refused = fit(&body, &model(), Missing::Refuse).err().unwrap().to_string();
        assert!(refused.contains("2 missing") && refused.contains("--init-missing"), "{refused}");
        assert_eq!(fit(&body, &model(), Missing::Initialize).unwrap().found.len(), 2);
        let strange = write("strange", &file(&[("other", &[1])]));
        assert!(fit(&strange, &model(), Missing::Initialize).is_err(), "nothing of the model is there");
        let broken: [(&str, &[usize]); 4] =
            [("layers.0.weight", &[4, 65]), ("layers.0.bias", &[4]), ("other", &[1]), ("x.num_batches_tracked", &[1])];
        let text = fit(&write("broken", &file(&broken)), &model(), Missing::Refuse).err().unwrap().to_string();
        assert!(text.contains("2 missing: layers.1.bias, layers.1.weight"), "{text}");
        assert!(text.contains("1 not the model's: other"), "{text}");
        assert!(text.contains("layers.0.weight is [4, 65], the model's is [4, 64]"), "{text}");
    }

    fn names(model: &Model) -> Vec<(String, Vec<usize>)> {
        let specs = model.layers.iter().flat_map(|layer| layer.tensors());
        specs.map(|spec| (spec.name, spec.dims.iter().map(|&d| d as usize).collect())).collect()
    }

    fn written(name: &str, tensors: &[(String, Vec<usize>)]) -> Written {
        let tensors: Vec<(&str, &[usize])> = tensors.iter().map(|(name, dims)| (&name[..], &dims[..])).collect();
        write(name, &file(&tensors))
    }

    /// The names are those of `RobertaForSequenceClassification`, `RobertaModel` and `RobertaForMaskedLM`, the last as files
    /// of 2019 have them.
    #[test]
    fn the_names_of_hugging_face_and_of_data_parallel_are_the_models() {
        let settings = Roberta { layers: 1, hidden: 4, heads: 1, feed_forward: 8, vocabulary: 9, ..Roberta::default() };
        let model = settings.model().unwrap();
        let ours = names(&model);
        let head = |name: &str| name.starts_with("classifier.");
        let renamed = |rename: &dyn Fn(&str) -> String| -> Vec<(String, Vec<usize>)> {
            ours.iter().map(|(name, dims)| (rename(name), dims.clone())).collect()
        };
        let classifier = renamed(&|name| public_name(&model, name));
        assert!(classifier.iter().any(|(name, _)| name == "roberta.encoder.layer.0.attention.self.query.weight"));
        assert!(classifier.iter().any(|(name, _)| name == "classifier.out_proj.weight"));
        let parallel = renamed(&|name| format!("module.{}", public_name(&model, name)));
        for (label, tensors) in [("ours", &ours), ("classifier", &classifier), ("parallel", &parallel)] {
            let fitted = fit(&written(label, tensors), &model, Missing::Refuse).unwrap();
            assert_eq!((fitted.found.len(), fitted.notes.len()), (ours.len(), 0), "{label}");
        }
        let mut base: Vec<_> = ours.iter().filter(|(name, _)| !head(name)).cloned().collect();
        let body = base.len();
        base.extend(
            ["pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"].map(|n| (n.to_owned(), vec![1])),
        );
        let mut masked = renamed(&|name| format!("roberta.{name}"));
        masked.retain(|(name, _)| !head(&name["roberta.".len()..]));
        for (name, _) in &mut masked {
            let old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
            *name = old;
        }
        assert!(masked.iter().any(|(name, _)| name.ends_with("LayerNorm.gamma")));
        masked.extend(
            ["lm_head.bias", "lm_head.dense.weight", "lm_head.layer_norm.weight"].map(|n| (n.to_owned(), vec![1])),
        );
        for (label, tensors) in [("base", &base), ("masked", &masked)] {
            let path = written(label, tensors);
            let text = fit(&path, &model, Missing::Refuse).err().unwrap().to_string();
            assert!(text.contains("4 missing: classifier.dense.bias") && !text.contains("not the model's"), "{text}");
            let fitted = fit(&path, &model, Missing::Initialize).unwrap();
            assert_eq!(fitted.found.len(), body, "{label}");
            assert!(fitted.notes[0].contains("3 not used"), "{:?}", fitted.notes);
            assert!(fitted.notes[1].contains("4 missing, which keep"), "{:?}", fitted.notes);
        }
        let mut both = classifier.clone();
        both.push(ours[0].clone());
        let text = fit(&written("both", &both), &model, Missing::Initialize).err().unwrap().to_string();
        assert!(text.contains("1 names for one tensor: "), "{text}");
    }

    #[test]
    fn a_classifier_of_other_classes_is_new_and_a_body_of_other_sizes_is_an_error() {
        let path = written("classes", &names(&Mlp { hidden: vec![4], classes: 7, ..Mlp::default() }.model().unwrap()));
        let text = fit(&path, &model(), Missing::Refuse).err().unwrap().to_string();
        assert!(text.contains("2 of the wrong shape") && text.contains("--init-missing"), "{text}");
        let fitted = fit(&path, &model(), Missing::Initialize).unwrap();
        assert_eq!(fitted.found.keys().collect::<Vec<_>>(), ["layers.0.bias", "layers.0.weight"]);
        assert!(fitted.notes[0].contains("layers.1.weight is [7, 4], the model's is [10, 4]"), "{:?}", fitted.notes);
        let path = written("body", &names(&Mlp { hidden: vec![5], ..Mlp::default() }.model().unwrap()));
        assert!(fit(&path, &model(), Missing::Initialize).is_err());
    }

    /// ResNet's files of 2017 have no counters.
    #[test]
    fn counters_of_batches_may_be_missing() {
        let recipe =
            distgpipe::model::Recipe { name: "resnet".to_owned(), settings: serde_json::json!({ "depth": 18 }) };
        let model = distgpipe::models::build(&recipe).unwrap();
        let mut tensors = names(&model);
        tensors.retain(|(name, _)| !name.ends_with(COUNTER));
        let path = written("counters", &tensors);
        assert_eq!(fit(&path, &model, Missing::Refuse).unwrap().found.len(), tensors.len());
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
            assert!(fit(&path, &model(), Missing::Refuse).is_err());
        }
    }
}
