//! What `predict` classifies: images in files and folders, or sentences. They are prepared exactly as the test data of the run that
//! trained the model.

use crate::args::DataName;
use crate::config::InferenceConfig;
use crate::datasets;
use crate::exit::usage;
use crate::report;
use distgpipe::data::folder::images_in;
use distgpipe::data::glue::token_length;
use distgpipe::data::{Dataset, DigitFiles, Glue, ImageFiles, ImageSet, Split};
use distgpipe::engine::Layout;
use distgpipe::SampleShape;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Between the two sentences of a pair.
const SEPARATOR: &str = "|||";

/// What to classify.
pub struct Inputs {
    /// The name of each row.
    pub named: Vec<String>,
    /// The rows.
    pub data: Arc<dyn Dataset>,
    /// Inputs that are no rows, and why, in the order in which they were given.
    pub failed: Vec<FailedInput>,
}

/// An input that is no row.
pub struct FailedInput {
    pub input: String,
    pub error: String,
    /// How many rows come before it.
    pub rows_before: usize,
}

/// Opens what the user named.
pub fn open(config: &InferenceConfig, given: &[OsString]) -> anyhow::Result<Inputs> {
    let name = kind(config)?;
    match name {
        DataName::Rte | DataName::Cola => sentences(config, name, given),
        _ => {
            config.check_normalisation(datasets::normalisation(name, &config.flags)?.as_ref())?;
            images(config, name, given)
        }
    }
}

/// The data set that the inputs are prepared like.
fn kind(config: &InferenceConfig) -> anyhow::Result<DataName> {
    let trained_on = config.about.as_ref().and_then(|about| about.flags.data);
    match (trained_on, config.flags.data) {
        (Some(trained_on), Some(given)) if trained_on != given => Err(usage(format!(
            "--data {}: the model was trained on {}, and inputs are prepared in the same way: remove the flag",
            given.name(),
            trained_on.name()
        ))),
        (_, Some(DataName::Synthetic)) => Err(usage(
            "--data synthetic: the model was trained on generated data, and no image or sentence is like it: use the weights of a \
             model that was trained on real data",
        )),
        (_, Some(name @ (DataName::Text | DataName::Tensors))) => Err(usage(format!(
            "--data {}: predict classifies images and sentences only: measure this model with `distgpipe evaluate`, or load its \
             weights into PyTorch",
            name.name()
        ))),
        (_, Some(name)) => Ok(name),
        (_, None) if token_length(&config.model.input).is_some() => Ok(DataName::Cola),
        (_, None) => Ok(DataName::ImageFolder),
    }
}

fn images(config: &InferenceConfig, name: DataName, given: &[OsString]) -> anyhow::Result<Inputs> {
    let (mut files, mut failed) = (Vec::new(), Vec::new());
    for path in given.iter().map(Path::new) {
        match path.is_dir() {
            false => files.push(path.to_owned()),
            true => match images_in(path) {
                Ok(found) => files.extend(found),
                Err(error) => failed.push(FailedInput {
                    input: path.display().to_string(),
                    error: error.to_string(),
                    rows_before: files.len(),
                }),
            },
        }
    }
    let named = files.iter().map(|path| path.display().to_string()).collect();
    Ok(Inputs { named, data: prepared(config, name, files)?, failed })
}

/// Images, prepared like the test images of a data set.
fn prepared(config: &InferenceConfig, name: DataName, files: Vec<PathBuf>) -> anyhow::Result<Arc<dyn Dataset>> {
    let input: &[SampleShape] = &config.model.input;
    let layout = match config.flags.no_channels_last {
        Some(true) => Layout::Contiguous,
        _ => Layout::ChannelsLast,
    };
    let wrong = |e| usage(format!("--weights: the model does not take images: {e}"));
    Ok(match name {
        DataName::Digits => Arc::new(DigitFiles::for_input(files, input).map_err(wrong)?),
        _ => {
            let files = ImageFiles::unlabelled(files);
            let set = ImageSet::for_input(files, input, Split::Test, layout).map_err(wrong)?;
            Arc::new(datasets::normalised(set, &config.flags).map_err(wrong)?)
        }
    })
}

fn sentences(config: &InferenceConfig, name: DataName, given: &[OsString]) -> anyhow::Result<Inputs> {
    let tokens = datasets::tokens(name, &config.flags, &config.model)?;
    // A file of another program does not say whether it takes pairs.
    let pairs = config.flags.data.map(|name| name == DataName::Rte);
    let (mut named, mut texts, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    for text in given {
        let text = text.to_string_lossy().into_owned();
        if Path::new(&text).exists() {
            report::note(&format!("warning: `{text}` is classified as a sentence; the file of this name is not read"));
        }
        match parts(&text, pairs) {
            Ok(parts) => {
                named.push(text);
                texts.push(parts);
            }
            Err(error) => failed.push(FailedInput { input: text, error, rows_before: named.len() }),
        }
    }
    let data = Glue::unlabelled(texts, &tokens).map_err(|e| usage(e.to_string()))?;
    Ok(Inputs { named, data: Arc::new(data), failed })
}

/// The sentences of an input: two if `pairs` says so, one if it denies it, and otherwise as many as there are.
fn parts(text: &str, pairs: Option<bool>) -> Result<(String, Option<String>), String> {
    let found: Vec<&str> = match pairs {
        Some(false) => vec![text],
        _ => text.split(SEPARATOR).map(str::trim).collect(),
    };
    let wrong = |expected: &str| Err(format!("`{text}`: expected {expected}"));
    match (&found[..], pairs) {
        (found, _) if found.iter().any(|part| part.trim().is_empty()) => wrong("a sentence, got an empty one"),
        (&[one], Some(false) | None) => Ok((one.to_owned(), None)),
        (&[first, second], Some(true) | None) => Ok((first.to_owned(), Some(second.to_owned()))),
        (_, Some(true)) => wrong("two sentences with `|||` between them, as the model was trained on pairs"),
        _ => wrong("one sentence, or two with `|||` between them"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_single_or_pairs_as_the_model_takes_them() {
        let two = Ok(("It rains in Spain.".to_owned(), Some("It rains.".to_owned())));
        for pairs in [Some(true), None] {
            assert_eq!(parts("It rains in Spain. ||| It rains.", pairs), two);
            assert!(parts("a ||| b ||| c", pairs).is_err() && parts("a |||  ", pairs).is_err());
        }
        assert!(parts("It rains.", Some(true)).unwrap_err().contains("two sentences with `|||`"));
        assert_eq!(parts(" a ||| b", Some(false)), Ok((" a ||| b".to_owned(), None)));
        assert_eq!(parts("a", None), Ok(("a".to_owned(), None)));
        assert!(parts("  ", Some(false)).is_err());
    }
}
