//! Compares a file with the model, and lists whatever does not fit. Files are untrusted: everything is checked before a
//! tensor is read. The tensors are read one by one when the workers that hold them run.

use super::names::{spellings, BODY, COUNTER, IGNORED, PARALLEL};
use super::{is_finite, open, Entry, TensorSource, WeightsError};
use crate::driver::pipeline::{Pipeline, StepError};
use crate::model::layer::TensorSpec;
use crate::model::Model;
use crate::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tch::{Kind, Tensor};

/// How many names a note lists before "and N more".
const NOTED_MAX: usize = 8;

/// How many names an error lists of each kind of mismatch.
const LISTED_MAX: usize = 50;

/// What to do about tensors of the model that the file does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingTensors {
    /// Report them as an error.
    Refuse,
    /// Let them keep their initial values, and also those of the last layer that have another shape: a new classifier on a
    /// trained body.
    Initialize,
}

/// A file that fits the model.
pub struct FittedWeights {
    path: PathBuf,
    source: Mutex<Box<dyn TensorSource>>,
    /// By the model's name: the tensor's number in the file, and its type in the model.
    found: BTreeMap<String, (usize, Kind)>,
    /// Lines for the user about tensors that are not loaded.
    pub notes: Vec<String>,
}

impl FittedWeights {
    /// Loads the tensors into the workers that hold them. Fails on values that are not finite.
    pub fn load(&self, pipeline: &mut Pipeline) -> Result<(), StepError> {
        let mut source = lock(&self.source);
        let mut names: Vec<String> = self.found.keys().cloned().collect();
        // In the order of the file, so that each worker's tensors are read from front to back.
        names.sort_by_key(|name| self.found[name].0);
        let engine =
            |error: tch::TchError| WeightsError::Engine { file: self.path.clone(), source: Box::new(error.into()) };
        pipeline.load_from(&names, |name| {
            let (index, kind) = self.found[name];
            let tensor: Tensor = source.read(index)?.f_to_kind(kind).map_err(engine)?;
            // Reported here, before the loss becomes NaN.
            if !is_finite(&tensor).map_err(engine)? {
                return Err(WeightsError::NotFiniteInFile { file: self.path.clone(), name: name.to_owned() }.into());
            }
            Ok::<_, StepError>(tensor)
        })
    }
}

/// Opens a file whose tensors fit the model. It must have all of the model's tensors, or some of them with
/// [`MissingTensors::Initialize`], and no unknown ones.
pub fn fit(path: &Path, model: &Model, allow: MissingTensors) -> Result<FittedWeights, WeightsError> {
    fit_opened(path, open(path)?, model, allow)
}

/// The same for a file that is open, and may have been removed since.
pub fn fit_opened(
    path: &Path,
    source: Box<dyn TensorSource>,
    model: &Model,
    allow: MissingTensors,
) -> Result<FittedWeights, WeightsError> {
    let mut matches = Matches::new(source.entries(), model, allow);
    let mut notes = Vec::new();
    let mut note = |names: &[String], what: &str| {
        if !names.is_empty() {
            notes.push(format!("{} {what}: {}", names.len(), listed(names, NOTED_MAX)));
        }
    };
    note(&matches.ignored, "unused, because the model has no such part");
    if allow == MissingTensors::Initialize && !matches.found.is_empty() {
        note(&matches.missing, "missing: these tensors keep their initial values");
        note(&matches.reinitialized, "with another shape in the last layer: these tensors keep their initial values");
        matches.missing.clear();
    } else {
        matches.misshaped.append(&mut matches.reinitialized);
    }
    let mismatches = matches.mismatches();
    if mismatches.is_empty() {
        return Ok(FittedWeights { path: path.to_owned(), source: Mutex::new(source), found: matches.found, notes });
    }
    Err(WeightsError::Mismatch { file: path.to_owned(), mismatches: mismatches.join("\n") })
}

/// `a, b, c`, and how many more if there are more than `most`.
fn listed(names: &[String], most: usize) -> String {
    let more = names.len().saturating_sub(most);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names[..names.len().min(most)].join(", "))
}

/// The tensors of a file, sorted by whether they fit the model.
#[derive(Default)]
struct Matches {
    /// By the model's name: the tensor's number in the file, and its type in the model.
    found: BTreeMap<String, (usize, Kind)>,
    /// Known to be no part of the models here.
    ignored: Vec<String>,
    unknown: Vec<String>,
    misshaped: Vec<String>,
    /// Of another shape, in the last layer, where that is allowed.
    reinitialized: Vec<String>,
    duplicated: Vec<String>,
    missing: Vec<String>,
}

impl Matches {
    fn new(entries: &[Entry], model: &Model, allow: MissingTensors) -> Self {
        let last: BTreeSet<String> =
            model.layers.last().iter().flat_map(|layer| layer.tensors()).map(|spec| spec.name).collect();
        let specs: BTreeMap<String, TensorSpec> =
            model.layers.iter().flat_map(|layer| layer.tensors()).map(|spec| (spec.name.clone(), spec)).collect();
        let parallel = entries.iter().all(|entry| entry.name.starts_with(PARALLEL));
        let mut matches = Matches::default();
        let mut named = BTreeMap::new();
        for (index, entry) in entries.iter().enumerate() {
            let name = &entry.name;
            let bare = if parallel { &name[PARALLEL.len()..] } else { name };
            let Some(spec) = spellings(bare).iter().find_map(|spelling| specs.get(spelling)) else {
                let body = bare.strip_prefix(BODY).unwrap_or(bare);
                if model.tied.iter().any(|(other, _)| other == bare) {
                    // The same tensor as one that the file has under the model's name.
                    continue;
                }
                if IGNORED.iter().any(|beginning| body.starts_with(beginning)) {
                    matches.ignored.push(name.clone());
                } else if !name.ends_with(COUNTER) {
                    matches.unknown.push(name.clone());
                }
                continue;
            };
            if let Some(other) = named.insert(spec.name.clone(), name.clone()) {
                matches.duplicated.push(format!("{other} and {name}"));
            } else if entry.dims == spec.dims {
                matches.found.insert(spec.name.clone(), (index, spec.kind));
            } else {
                let shapes = format!("{name} is {:?}, the model expects {:?}", entry.dims, spec.dims);
                let new = allow == MissingTensors::Initialize && last.contains(&spec.name);
                if new { &mut matches.reinitialized } else { &mut matches.misshaped }.push(shapes);
            }
        }
        let absent = |name: &String| !named.contains_key(name) && !name.ends_with(COUNTER);
        matches.missing = specs.into_keys().filter(absent).collect();
        matches
    }

    /// A line for each kind of tensor that does not fit; empty if all do.
    fn mismatches(&self) -> Vec<String> {
        let kinds = [
            ("missing", &self.missing),
            ("unknown to the model", &self.unknown),
            ("of the wrong shape", &self.misshaped),
            ("names for one tensor", &self.duplicated),
        ];
        let some = kinds.into_iter().filter(|(_, names)| !names.is_empty());
        some.map(|(what, names)| format!("  {} {what}: {}", names.len(), listed(names, LISTED_MAX))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::zoo::{Mlp, Roberta};
    use crate::train::weights::names::public_name;
    use crate::train::weights::SafetensorsWriter;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tch::Device;

    fn model() -> Model {
        Mlp { hidden: vec![4], ..Mlp::default() }.model().unwrap()
    }

    /// A temporary file, removed on drop.
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
        static FILES: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), FILES.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("distgpipe-weights-{process}-{number}-{name}"));
        std::fs::write(&path, bytes).unwrap();
        Written(path)
    }

    fn file(tensors: &[(&str, &[i64])]) -> Vec<u8> {
        let path = write("made", &[]);
        let entries = tensors.iter().map(|(name, dims)| Entry::new(*name, Kind::Float, dims)).collect();
        let mut writer = SafetensorsWriter::create(&path, entries, &BTreeMap::new()).unwrap();
        for (_, dims) in tensors {
            writer.write(&Tensor::zeros(*dims, (Kind::Float, Device::Cpu))).unwrap();
        }
        writer.finish().unwrap();
        std::fs::read(&*path).unwrap()
    }

    #[test]
    fn everything_that_does_not_fit_is_listed() {
        let whole: [(&str, &[i64]); 4] = [
            ("layers.0.weight", &[4, 64]),
            ("layers.0.bias", &[4]),
            ("layers.1.weight", &[10, 4]),
            ("layers.1.bias", &[10]),
        ];
        let path = write("whole", &file(&whole));
        assert_eq!(fit(&path, &model(), MissingTensors::Refuse).unwrap().found.len(), 4);
        let body = write("body", &file(&whole[..2]));
        let refused = fit(&body, &model(), MissingTensors::Refuse).err().unwrap().to_string();
        assert!(refused.contains("2 missing") && refused.contains("`Pipeline::load_partial`"), "{refused}");
        assert_eq!(fit(&body, &model(), MissingTensors::Initialize).unwrap().found.len(), 2);
        let strange = write("strange", &file(&[("other", &[1])]));
        assert!(fit(&strange, &model(), MissingTensors::Initialize).is_err(), "the file has no tensor of the model");
        let broken: [(&str, &[i64]); 4] =
            [("layers.0.weight", &[4, 65]), ("layers.0.bias", &[4]), ("other", &[1]), ("x.num_batches_tracked", &[1])];
        let text = fit(&write("broken", &file(&broken)), &model(), MissingTensors::Refuse).err().unwrap().to_string();
        assert!(text.contains("2 missing: layers.1.bias, layers.1.weight"), "{text}");
        assert!(text.contains("1 unknown to the model: other"), "{text}");
        assert!(text.contains("layers.0.weight is [4, 65], the model expects [4, 64]"), "{text}");
    }

    fn names(model: &Model) -> Vec<(String, Vec<i64>)> {
        let specs = model.layers.iter().flat_map(|layer| layer.tensors());
        specs.map(|spec| (spec.name, spec.dims)).collect()
    }

    fn written(name: &str, tensors: &[(String, Vec<i64>)]) -> Written {
        let tensors: Vec<(&str, &[i64])> = tensors.iter().map(|(name, dims)| (&name[..], &dims[..])).collect();
        write(name, &file(&tensors))
    }

    /// With the names of `RobertaForSequenceClassification`, `RobertaModel` and `RobertaForMaskedLM`, the last as in files from 2019.
    #[test]
    fn names_of_hugging_face_and_data_parallel_files_match_the_model() {
        let settings = Roberta { layers: 1, hidden: 4, heads: 1, feed_forward: 8, vocabulary: 9, ..Roberta::default() };
        let model = settings.model().unwrap();
        let ours = names(&model);
        let head = |name: &str| name.starts_with("classifier.");
        let renamed = |rename: &dyn Fn(&str) -> String| -> Vec<(String, Vec<i64>)> {
            ours.iter().map(|(name, dims)| (rename(name), dims.clone())).collect()
        };
        let classifier = renamed(&|name| public_name(&model, name));
        assert!(classifier.iter().any(|(name, _)| name == "roberta.encoder.layer.0.attention.self.query.weight"));
        assert!(classifier.iter().any(|(name, _)| name == "classifier.out_proj.weight"));
        let parallel = renamed(&|name| format!("module.{}", public_name(&model, name)));
        for (label, tensors) in [("ours", &ours), ("classifier", &classifier), ("parallel", &parallel)] {
            let fitted = fit(&written(label, tensors), &model, MissingTensors::Refuse).unwrap();
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
            let text = fit(&path, &model, MissingTensors::Refuse).err().unwrap().to_string();
            assert!(
                text.contains("4 missing: classifier.dense.bias") && !text.contains("unknown to the model"),
                "{text}"
            );
            let fitted = fit(&path, &model, MissingTensors::Initialize).unwrap();
            assert_eq!(fitted.found.len(), body, "{label}");
            assert!(fitted.notes[0].contains("3 unused"), "{:?}", fitted.notes);
            assert!(fitted.notes[1].contains("4 missing"), "{:?}", fitted.notes);
        }
        let mut both = classifier.clone();
        both.push(ours[0].clone());
        let text = fit(&written("both", &both), &model, MissingTensors::Initialize).err().unwrap().to_string();
        assert!(text.contains("1 names for one tensor: "), "{text}");
    }

    #[test]
    fn another_number_of_classes_gives_a_new_classifier_and_another_body_is_an_error() {
        let path = written("classes", &names(&Mlp { hidden: vec![4], classes: 7, ..Mlp::default() }.model().unwrap()));
        let text = fit(&path, &model(), MissingTensors::Refuse).err().unwrap().to_string();
        assert!(text.contains("2 of the wrong shape") && text.contains("`Pipeline::load_partial`"), "{text}");
        let fitted = fit(&path, &model(), MissingTensors::Initialize).unwrap();
        assert_eq!(fitted.found.keys().collect::<Vec<_>>(), ["layers.0.bias", "layers.0.weight"]);
        assert!(fitted.notes[0].contains("layers.1.weight is [7, 4], the model expects [10, 4]"), "{:?}", fitted.notes);
        let path = written("body", &names(&Mlp { hidden: vec![5], ..Mlp::default() }.model().unwrap()));
        assert!(fit(&path, &model(), MissingTensors::Initialize).is_err());
    }

    /// ResNet files from 2017 have no batch counters.
    #[test]
    fn batch_counters_may_be_missing() {
        let spec = crate::model::ModelSpec { name: "resnet".to_owned(), settings: serde_json::json!({ "depth": 18 }) };
        let model = crate::model::zoo::build(&spec).unwrap();
        let mut tensors = names(&model);
        tensors.retain(|(name, _)| !name.ends_with(COUNTER));
        let path = written("counters", &tensors);
        assert_eq!(fit(&path, &model, MissingTensors::Refuse).unwrap().found.len(), tensors.len());
    }

    #[test]
    fn arbitrary_bytes_are_an_error_and_do_not_panic() {
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
            assert!(fit(&path, &model(), MissingTensors::Refuse).is_err());
        }
    }
}
