//! `distgpipe predict`: the classes of images or sentences, by a trained model.

mod inputs;

use crate::args::TrainFlags;
use crate::config::InferenceConfig;
use crate::datasets;
use crate::exit::usage;
use crate::report;
use distgpipe::data::{DataError, Dataset, LoadPass};
use distgpipe::tch::{Kind, Tensor};
use distgpipe::{Loss, Pipeline};
use inputs::{FailedInput, Inputs};
use serde::Serialize;
use std::ffi::OsString;

/// Flags of `distgpipe predict`.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "distgpipe predict --weights FILE [OPTIONS] <IMAGE|FOLDER|TEXT>...",
    after_help = "\
Examples:
  The five most probable classes of two photographs, and of all in a folder:
      distgpipe predict --weights mine.safetensors cat.jpg dog.png photos/
  The most probable class only, for a program:
      distgpipe predict --weights mine.safetensors --top 1 --json photos/
  Is a sentence grammatical (trained on CoLA)?
      distgpipe predict --weights cola.safetensors 'They drank the pub dry.' 'They drank the pub.'
  Does the second sentence follow from the first (trained on RTE)?
      distgpipe predict --weights rte.safetensors 'It rains in Spain. ||| It rains.'
  Weights of another program:
      distgpipe predict --weights resnet50.pth --model resnet --set depth=50 cat.jpg

An input that cannot be read is reported, the others are classified, and the exit status is 1."
)]
pub struct PredictArgs {
    /// Images (.jpg, .png), folders of images, or sentences; the two sentences of a pair are separated by `|||`
    #[arg(value_name = "IMAGE|FOLDER|TEXT")]
    inputs: Vec<OsString>,
    /// How many classes to print for each input, the most probable first
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,
    #[command(flatten)]
    flags: TrainFlags,
}

/// The result for one input; the content of `--json`.
#[derive(Serialize)]
#[serde(untagged)]
enum Outcome {
    Classified { input: String, classes: Vec<ClassScore> },
    Failed { input: String, error: String },
}

/// A class and how probable it is, from 0 to 1.
#[derive(Serialize)]
struct ClassScore {
    class: String,
    number: usize,
    probability: f32,
}

/// Classifies the inputs, and prints a line for each.
pub fn run(args: &PredictArgs) -> anyhow::Result<()> {
    let given = &args.flags;
    given.check_inference("predict")?;
    if args.inputs.is_empty() {
        return Err(usage("name an image, a folder of images, or a sentence to classify; see --help for examples"));
    }
    if args.top == 0 {
        return Err(usage("--top 0: use 1 or more"));
    }
    let config = InferenceConfig::new(given)?;
    let names = class_names(&config)?;
    let Inputs { named, data, failed } = inputs::open(&config, &args.inputs)?;
    let json = given.json == Some(true);
    let mut outcomes: Vec<Outcome> = Vec::new();
    let mut tell = |outcome: Outcome| -> anyhow::Result<()> {
        if let Outcome::Failed { error, .. } = &outcome {
            report::note(&format!("error: {error}"));
        }
        match (&outcome, json) {
            (_, true) => outcomes.push(outcome),
            (Outcome::Classified { input, classes }, false) => report::print(&line(input, classes))?,
            (Outcome::Failed { .. }, false) => {}
        }
        Ok(())
    };
    let total = named.len() + failed.len();
    let mut failures = failed.len();
    // Outcomes come in the order of the inputs.
    let mut failed = failed.into_iter().peekable();
    let mut failed_before = |row: usize| {
        failed
            .next_if(|failed| failed.rows_before <= row)
            .map(|FailedInput { input, error, .. }| Outcome::Failed { input, error })
    };
    if !named.is_empty() {
        let mut pipeline = config.start(Loss::CrossEntropy)?;
        report::note(&config.compute.to_string());
        let rows: Vec<usize> = (0..named.len()).collect();
        for rows in rows.chunks(config.batch_rows()) {
            for (row, scores) in predicted(&mut pipeline, data.as_ref(), rows)? {
                while let Some(outcome) = failed_before(row) {
                    tell(outcome)?;
                }
                let input = named[row].clone();
                failures += usize::from(scores.is_err());
                tell(match scores {
                    Ok(scores) => Outcome::Classified { input, classes: ranked(&scores, &names, args.top) },
                    Err(error) => Outcome::Failed { input, error: error.to_string() },
                })?;
            }
        }
    }
    while let Some(outcome) = failed_before(named.len()) {
        tell(outcome)?;
    }
    if json {
        report::print_json(&outcomes)?;
    }
    match failures {
        0 => Ok(()),
        _ => Err(anyhow::anyhow!("{failures} of {total} inputs could not be classified")),
    }
}

/// The name of each class of the model.
fn class_names(config: &InferenceConfig) -> anyhow::Result<Vec<String>> {
    let Some(scores) = datasets::scores(&datasets::output(&config.model)?) else {
        return Err(usage(
            "--weights: the output of the model is not a vector of class scores, so there are no classes to predict",
        ));
    };
    let mut names = config.class_names()?.unwrap_or_default();
    names.truncate(scores);
    names.extend((names.len()..scores).map(|number| format!("class {number}")));
    Ok(names)
}

/// What a row gave, or why it could not be loaded.
type Loaded<T> = Result<T, DataError>;

/// The probability of each class, for each of these rows in order; or why a row could not be loaded.
fn predicted(
    pipeline: &mut Pipeline,
    data: &dyn Dataset,
    rows: &[usize],
) -> anyhow::Result<Vec<(usize, Loaded<Vec<f32>>)>> {
    let load = |rows: &[usize]| data.batch(rows, LoadPass::new(0, 0)).map(|batch| batch.inputs);
    let mut failed = Vec::new();
    let (good, inputs) = match load(rows) {
        Ok(inputs) => (rows.to_vec(), inputs),
        // One by one, to find those that cannot be loaded.
        Err(_) => {
            let mut loaded: Vec<(usize, Vec<Tensor>)> = Vec::new();
            for &row in rows {
                match load(&[row]) {
                    Ok(inputs) => loaded.push((row, inputs)),
                    Err(error) => failed.push((row, Err(error))),
                }
            }
            (loaded.iter().map(|(row, _)| *row).collect(), joined(&loaded)?)
        }
    };
    let mut outcomes = failed;
    if !good.is_empty() {
        let classes = pipeline.predict(inputs)?.f_softmax(-1, Kind::Float)?;
        for (i, row) in good.into_iter().enumerate() {
            outcomes.push((row, Ok(Vec::try_from(classes.f_get(i as i64)?)?)));
        }
    }
    outcomes.sort_by_key(|(row, _)| *row);
    Ok(outcomes)
}

/// The inputs of several rows as one batch.
fn joined(rows: &[(usize, Vec<Tensor>)]) -> anyhow::Result<Vec<Tensor>> {
    let count = rows.first().map_or(0, |(_, inputs)| inputs.len());
    let join = |i: usize| Tensor::f_cat(&rows.iter().filter_map(|(_, inputs)| inputs.get(i)).collect::<Vec<_>>(), 0);
    Ok((0..count).map(join).collect::<Result<_, _>>()?)
}

/// The most probable classes, the first one of equals first.
fn ranked(probabilities: &[f32], names: &[String], top: usize) -> Vec<ClassScore> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
    let score = |number: usize| ClassScore {
        class: names.get(number).cloned().unwrap_or_default(),
        number,
        probability: probabilities[number],
    };
    order.into_iter().take(top).map(score).collect()
}

fn line(input: &str, classes: &[ClassScore]) -> String {
    let classes: Vec<String> =
        classes.iter().map(|score| format!("{} {:.2} %", score.class, 100.0 * score.probability)).collect();
    format!("{input}: {}\n", classes.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_ranked_by_probability() {
        let names = ["a", "b", "c"].map(str::to_owned);
        let text = |top| line("x.png", &ranked(&[0.25, 0.5, 0.25], &names, top));
        assert_eq!(text(5), "x.png: b 50.00 %, a 25.00 %, c 25.00 %\n");
        assert_eq!(text(1), "x.png: b 50.00 %\n");
    }
}
