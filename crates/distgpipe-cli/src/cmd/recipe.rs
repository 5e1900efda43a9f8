//! `distgpipe recipe`: lists, shows and runs published experiments, and compares the figures.

use crate::args::{DataName, TrainFlags};
use crate::cmd::train::{self, Outcome};
use crate::config::RunConfig;
use crate::exit::usage;
use crate::recipe::comparison::{self, FinishedRun};
use crate::recipe::deviations::{deviations, weights};
use crate::recipe::{all, find, Recipe};
use crate::report;
use crate::report::table::{Side, Table};
use crate::signals;
use clap::Subcommand;
use serde_json::json;

/// Flags of `distgpipe recipe`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A recipe reproduces one row of a published table.

Examples:
  distgpipe recipe list
  distgpipe recipe show cifar10-sort8
  distgpipe recipe run cifar10-sort8 --weights mobilenet_v2.safetensors --epochs 2 --limit 2000
  distgpipe recipe run unet-speed-pipeline-2 --batch 8 --chunks 4 --steps 5")]
pub struct RecipeArgs {
    #[command(subcommand)]
    what: RecipeCommand,
}

#[derive(Debug, Subcommand)]
enum RecipeCommand {
    /// List all recipes with the published figures
    List {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the published row, the deviations from it, and the equivalent `distgpipe train` command
    Show {
        /// Name of the recipe; `distgpipe recipe list` lists them
        name: String,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Run a recipe, and compare the figures with the published ones
    Run(Box<RunArgs>),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Name of the recipe; `distgpipe recipe list` lists them
    name: String,
    /// The flags of `distgpipe train`, which override those of the recipe.
    #[command(flatten)]
    flags: TrainFlags,
}

/// Lists, shows or runs recipes.
pub fn run(args: RecipeArgs) -> anyhow::Result<()> {
    match args.what {
        RecipeCommand::List { json: true } => report::print_json(&all()?),
        RecipeCommand::List { json: false } => report::print(&list(&all()?)),
        RecipeCommand::Show { name, json: true } => {
            let recipe = find(&name)?;
            let command = recipe.run.to_command()?;
            report::print_json(&json!({ "recipe": recipe, "command": command }))
        }
        RecipeCommand::Show { name, json: false } => report::print(&show(&find(&name)?)?),
        RecipeCommand::Run(args) => run_one(&find(&args.name)?, args.flags),
    }
}

fn list(recipes: &[Recipe]) -> String {
    let mut table = Table::new(&[
        ("recipe", Side::Left),
        ("model", Side::Left),
        ("data", Side::Left),
        ("method", Side::Left),
        ("published figures", Side::Left),
    ]);
    for recipe in recipes {
        table.row(vec![
            recipe.name.clone(),
            recipe.run.model.clone().unwrap_or_default(),
            recipe.run.data.map(|data| data.name()).unwrap_or_default(),
            recipe.method.name().to_owned(),
            recipe.published.short(),
        ]);
    }
    table.render()
}

fn show(recipe: &Recipe) -> anyhow::Result<String> {
    let mut row = Table::new(&[("", Side::Left), ("", Side::Left)]);
    let mut put = |name: &str, value: &str| row.row(vec![name.to_owned(), value.to_owned()]);
    put("table", &recipe.table);
    put("row", &recipe.published.row);
    put("hardware", &recipe.published.hardware);
    if let Some(activations) = &recipe.published.activations {
        put("on the links", activations);
    }
    for metric in comparison::Metric::ALL {
        if let Some(figure) = recipe.published.figure(metric) {
            put(metric.name(), &figure);
        }
    }
    for other in &recipe.published.also {
        put("also", other);
    }
    let mut text = format!("{}\n\n{}\n", recipe.title, row.render().trim_start());
    let mut deviations: Vec<String> = weights(recipe, &recipe.run).into_iter().collect();
    deviations.extend(recipe.deviations.iter().cloned());
    if !deviations.is_empty() {
        text.push_str(&format!("What differs, besides the hardware:\n{}\n", bullets(&deviations)));
    }
    let command = recipe.run.to_command()?;
    text.push_str(&format!("`distgpipe recipe run {}` is equivalent to:\n\n  {command}\n", recipe.name));
    let provide = to_provide(recipe);
    if !provide.is_empty() {
        text.push_str(&format!("\nYou provide:\n{}", bullets(&provide)));
    }
    Ok(text)
}

/// What the user has to provide: files whose paths depend on the machine.
fn to_provide(recipe: &Recipe) -> Vec<String> {
    let mut all = Vec::new();
    match recipe.run.data {
        Some(DataName::ImageFolder) => all.push("--data-dir DIR: the directory of your images.".to_owned()),
        Some(data) if data.has_files() => all.push(format!("The data set: `distgpipe data get {}`.", data.name())),
        _ => {}
    }
    if let Some(DataName::Rte | DataName::Cola) = recipe.run.data {
        all.push(
            "--tokenizer PATH: RoBERTa's tokenizer.json, or the directory with vocab.json and merges.txt.".to_owned(),
        );
    }
    if recipe.starts_from.is_some() {
        all.push(
            "--weights FILE --init-missing, to start from pretrained weights: tensors that FILE lacks, and a last layer of \
             another shape, keep their random initial values."
                .to_owned(),
        );
    }
    all
}

fn bullets(sentences: &[String]) -> String {
    sentences.iter().map(|sentence| format!("- {sentence}\n")).collect()
}

fn run_one(recipe: &Recipe, given: TrainFlags) -> anyhow::Result<()> {
    signals::watch()?;
    let given = given.with_config()?;
    // A resumed run takes the recipe's flags from its checkpoint, including the changes made to them.
    let config = RunConfig::resuming(&given, &recipe.with(&given)?)?;
    if config.given.model != recipe.run.model && given.model.is_none() {
        return Err(usage(format!(
            "--resume: the checkpoint is not of a run of {}: name the directory of that run",
            recipe.name
        )));
    }
    let report = match train::execute(&config, &format!("distgpipe recipe run {}", recipe.name))? {
        Outcome::Ran(report, _) => report,
        Outcome::NothingLeft(ended) if config.json => {
            return report::print_json(&json!({ "recipe": recipe, "run": ended }));
        }
        Outcome::NothingLeft(_) => return Ok(()),
    };
    if report.interrupted.is_some() {
        // Published figures are those of whole runs.
        if config.json {
            report::print_json(&json!({ "recipe": recipe, "run": report }))?;
        } else {
            report::print(&report.epochs_if_unseen())?;
        }
        return report.into_result();
    }
    let ran = FinishedRun { report: &report, flags: &config.flags, optim: config.optim };
    let lines = comparison::compare(recipe, &ran)?;
    let run = TrainFlags { threads: config.flags.threads, ..config.given.clone() };
    let deviations = deviations(recipe, &run)?;
    if config.json {
        report::print_json(&json!({
            "recipe": recipe,
            "comparison": lines,
            "deviations": deviations,
            "run": report,
        }))?;
    } else {
        report::print(&format!(
            "{}{}: {}\n{}, {}\n\n{}\nWhat differs:\n{}",
            report.epochs_if_unseen(),
            recipe.name,
            recipe.title,
            recipe.table,
            recipe.published.row,
            comparison::table(&lines),
            bullets(&deviations)
        ))?;
    }
    report.into_result()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without these, the command would be rejected or start from random weights.
    #[test]
    fn show_lists_what_the_user_provides() {
        let shown = |name| show(&find(name).unwrap()).unwrap();
        let rte = shown("rte-sort8");
        for part in ["`distgpipe data get rte`", "--tokenizer PATH", "--weights FILE --init-missing"] {
            assert!(rte.contains(part), "{part} is not in: {rte}");
        }
        let imagenet = shown("imagenet-resnet101-pipeline-256");
        assert!(imagenet.contains("--data-dir DIR") && !imagenet.contains("--weights"), "{imagenet}");
        assert!(!imagenet.contains("data get image-folder"), "{imagenet}");
        let made_up = shown("unet-speed-pipeline-2");
        assert!(!made_up.contains("You provide"), "{made_up}");
    }

    #[test]
    fn every_recipe_can_be_listed_and_shown() {
        let recipes = all().unwrap();
        let listed = list(&recipes);
        for recipe in &recipes {
            let line =
                listed.lines().find(|line| line.split(' ').next() == Some(&recipe.name)).expect("a line of its own");
            let shown = show(recipe).unwrap();
            for metric in comparison::Metric::ALL {
                if let Some(figure) = recipe.published.figure(metric) {
                    assert!(line.contains(&figure), "{line}: {figure}");
                    assert!(shown.contains(&figure), "{shown}: {figure}");
                }
            }
            for part in [&recipe.title, &recipe.table, &recipe.published.row, &recipe.run.to_command().unwrap()] {
                assert!(shown.contains(part.as_str()), "{shown}: {part}");
            }
            for sentence in &recipe.deviations {
                assert!(shown.contains(sentence.as_str()), "{shown}: {sentence}");
            }
        }
    }
}
