//! `distgpipe evaluate`: the loss and the scores of a trained model on test data.

use crate::args::{DataName, TrainFlags};
use crate::config::InferenceConfig;
use crate::datasets;
use crate::exit::usage;
use crate::report::progress::{bar, Pace, RunningClock};
use crate::report::table::{Side, Table};
use crate::report::{self, listed, units, NAMES_LISTED_MAX};
use distgpipe::{Evaluation, Loader, Pipeline};
use serde::Serialize;
use std::io::IsTerminal;

/// Flags of `distgpipe evaluate`.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "distgpipe evaluate --weights FILE [OPTIONS]",
    after_help = "\
Examples:
  The test data of the run that wrote the file:
      distgpipe evaluate --weights mine.safetensors
  Other data of the same kind:
      distgpipe evaluate --weights mine.safetensors --data-dir photos2
  The newest checkpoint of a run, also while it goes on:
      distgpipe evaluate --weights run1/saved
  In a pipeline of two processes:
      distgpipe evaluate --weights mine.safetensors --partitions 2 --workers processes
  Weights of another program:
      distgpipe evaluate --weights resnet50.pth --model resnet --set depth=50 --data image-folder --data-dir imagenet"
)]
pub struct EvaluateArgs {
    #[command(flatten)]
    flags: TrainFlags,
}

/// What `--json` prints.
#[derive(Serialize)]
struct EvaluationReport {
    weights: String,
    model: String,
    data: String,
    /// Of language models: e to the power of the loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    #[serde(flatten)]
    scores: Evaluation,
    samples_per_s: f64,
}

/// Evaluates, and prints the scores.
pub fn run(args: &EvaluateArgs) -> anyhow::Result<()> {
    let given = &args.flags;
    given.check_inference("evaluate")?;
    let config = InferenceConfig::new(given)?;
    let Some(data) = config.flags.data else {
        return Err(usage("--data: the file does not say which data the model was trained on: add --data NAME"));
    };
    let classes = config.about.as_ref().and_then(|about| about.classes.as_deref());
    let (loader, loss) = datasets::test_loader(&config.flags, &config.model, classes)?;
    config.check_normalisation(datasets::normalisation(data, &config.flags)?.as_ref())?;
    check_names(&config, &loader)?;
    let mut pipeline = config.start(loss)?;
    report::note(&config.compute.to_string());
    let scores = evaluate(&mut pipeline, &loader)?;
    drop(pipeline);
    let report = EvaluationReport {
        weights: given.weights.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        model: config.model.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default(),
        data: data.name(),
        perplexity: (config.flags.data == Some(DataName::Text)).then(|| scores.loss.exp()),
        samples_per_s: scores.rows as f64 / scores.seconds.max(1e-9),
        scores,
    };
    match given.json == Some(true) {
        true => report::print_json(&report),
        false => report::print(&report.table()),
    }
}

/// Whether the classes of the data are those of the model. Numbers alone would not show that they are others.
fn check_names(config: &InferenceConfig, loader: &Loader) -> anyhow::Result<()> {
    let expected = config.about.as_ref().and_then(|about| about.classes.as_ref());
    match (expected, loader.class_names()) {
        (Some(expected), Some(got)) if *expected != got => Err(usage(format!(
            "--data: expected the classes of the model, {}; got {}: use data with the classes that the model was trained on",
            listed(expected, NAMES_LISTED_MAX),
            listed(&got, NAMES_LISTED_MAX)
        ))),
        _ => Ok(()),
    }
}

/// The scores of a model on all rows of a loader. Shows the progress.
fn evaluate(pipeline: &mut Pipeline, loader: &Loader) -> anyhow::Result<Evaluation> {
    let batches = loader.batches() as u64;
    let shown = std::io::stderr().is_terminal().then(|| bar(batches, "batches"));
    let mut clock = RunningClock::start();
    let mut pace = Pace::new(batches, 0, clock.now());
    let mut number = 0;
    let scores = pipeline.evaluate_all_with(loader, |outcome| {
        number += 1;
        match &shown {
            Some(bar) => bar.set_position(number),
            None if pace.is_due(number, clock.now()) && number < batches => {
                report::note(&format!("batch {number}/{batches}: loss {:.4}", outcome.loss));
            }
            None => {}
        }
    })?;
    if let Some(bar) = shown {
        bar.finish_and_clear();
    }
    Ok(scores)
}

impl EvaluationReport {
    fn table(&self) -> String {
        let scores = &self.scores;
        let mut table = Table::new(&[("", Side::Left), ("", Side::Left)]);
        let mut row = |name: &str, value: String| table.row(vec![name.to_owned(), value]);
        row("rows", format!("{} of {}", units::count(scores.rows as u64), self.data));
        row("loss", format!("{:.4}", scores.loss));
        if let Some(perplexity) = self.perplexity {
            row("perplexity", units::significant(perplexity));
        }
        if let Some(accuracy) = scores.accuracy {
            row("accuracy", units::percent(accuracy));
        }
        if let (Some(f1), Some(matthews), Some(2)) = (scores.f1, scores.matthews, scores.classes) {
            row("F1", format!("{f1:.3}"));
            row("Matthews", format!("{matthews:.3}"));
        }
        row("samples/s", units::rate(self.samples_per_s));
        row("time", units::seconds(scores.seconds));
        table.render().trim_start().to_owned()
    }
}
