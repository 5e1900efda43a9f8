//! `distgpipe recipe`: the seeds' experiments, listed, shown, and run beside their figures.

use crate::args::{DataName, TrainFlags};
use crate::cmd::train;
use crate::config::RunConfig;
use crate::exit::usage;
use crate::recipe::beside::{self, Ran};
use crate::recipe::differs::{differences, weights};
use crate::recipe::{all, find, Recipe};
use crate::report;
use crate::report::table::{Side, Table};
use clap::Subcommand;
use serde_json::json;

/// Flags of `distgpipe recipe`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A seed is a published table that the project was asked to reproduce, and a recipe is one of its rows.

Examples:
  distgpipe recipe list
  distgpipe recipe show cifar10-sort8
  distgpipe recipe run cifar10-sort8 --weights mobilenet_v2.safetensors --epochs 2 --limit 2000
  distgpipe recipe run unet-speed-pipeline-2 --batch 8 --chunks 4 --steps 5")]
pub struct RecipeArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// All of them, with the seed's figures
    List {
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// The seed's row, what differs here, and the command that it is
    Show {
        /// Which; `distgpipe recipe list` has the names
        name: String,
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// Run one, and print its figures beside the seed's
    Run(Box<RunArgs>),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Which; `distgpipe recipe list` has the names
    name: String,
    /// Every flag of `distgpipe train`; it wins over the recipe's.
    #[command(flatten)]
    flags: TrainFlags,
}

/// Does what is asked.
pub fn run(args: RecipeArgs) -> anyhow::Result<()> {
    match args.what {
        What::List { json: true } => report::print_json(&all()?),
        What::List { json: false } => report::print(&list(&all()?)),
        What::Show { name, json: true } => {
            let recipe = find(&name)?;
            let command = recipe.run.to_command()?;
            report::print_json(&json!({ "recipe": recipe, "command": command }))
        }
        What::Show { name, json: false } => report::print(&show(&find(&name)?)?),
        What::Run(args) => run_one(&find(&args.name)?, args.flags),
    }
}

fn list(recipes: &[Recipe]) -> String {
    let mut table = Table::new(&[
        ("recipe", Side::Left),
        ("model", Side::Left),
        ("data", Side::Left),
        ("method", Side::Left),
        ("the seed's figures", Side::Left),
    ]);
    for recipe in recipes {
        table.row(vec![
            recipe.name.clone(),
            recipe.run.model.clone().unwrap_or_default(),
            recipe.run.data.map(|data| data.name()).unwrap_or_default(),
            recipe.method.name().to_owned(),
            recipe.seed.short(),
        ]);
    }
    table.render()
}

fn show(recipe: &Recipe) -> anyhow::Result<String> {
    let mut row = Table::new(&[("", Side::Left), ("", Side::Left)]);
    let mut put = |name: &str, value: &str| row.row(vec![name.to_owned(), value.to_owned()]);
    put("table", &recipe.table);
    put("row", &recipe.seed.row);
    put("hardware", &recipe.seed.hardware);
    if let Some(activations) = &recipe.seed.activations {
        put("over the links", activations);
    }
    for metric in beside::Metric::ALL {
        if let Some(figure) = recipe.seed.figure(metric) {
            put(metric.name(), &figure);
        }
    }
    for other in &recipe.seed.also {
        put("also", other);
    }
    let mut text = format!("{}\n\n{}\n", recipe.title, row.render().trim_start());
    let mut differs: Vec<String> = weights(recipe, &recipe.run).into_iter().collect();
    differs.extend(recipe.differs.iter().cloned());
    if !differs.is_empty() {
        text.push_str(&format!("What differs here, besides the hardware:\n{}\n", bullets(&differs)));
    }
    let command = recipe.run.to_command()?;
    text.push_str(&format!("`distgpipe recipe run {}` is the same as:\n\n  {command}\n", recipe.name));
    let bring = to_bring(recipe);
    if !bring.is_empty() {
        text.push_str(&format!("\nYou bring:\n{}", bullets(&bring)));
    }
    Ok(text)
}

/// What the command does not have, because it is somewhere else on every machine.
fn to_bring(recipe: &Recipe) -> Vec<String> {
    let mut all = Vec::new();
    match recipe.run.data {
        None | Some(DataName::Digits | DataName::Synthetic) => {}
        Some(DataName::ImageFolder) => all.push("--data-dir DIR: where your images are.".to_owned()),
        Some(data) => all.push(format!("The data: `distgpipe data get {}`.", data.name())),
    }
    if let Some(DataName::Rte | DataName::Cola) = recipe.run.data {
        all.push(
            "--tokenizer PATH: RoBERTa's tokenizer.json, or the folder with vocab.json and merges.txt.".to_owned(),
        );
    }
    if recipe.starts_from.is_some() {
        all.push(
            "--weights FILE --init-missing, to start from weights that you have: tensors that FILE lacks, and a last layer \
             of another shape, are made anew."
                .to_owned(),
        );
    }
    all
}

fn bullets(sentences: &[String]) -> String {
    sentences.iter().map(|sentence| format!("- {sentence}\n")).collect()
}

fn run_one(recipe: &Recipe, given: TrainFlags) -> anyhow::Result<()> {
    let given = given.with_config()?;
    // A run that goes on has the recipe's flags from its checkpoint, with what was changed in them.
    let config = RunConfig::resuming(&given, &recipe.with(&given)?)?;
    if config.given.model != recipe.run.model && given.model.is_none() {
        return Err(usage(format!("--resume: the checkpoint is not of a run of {}: name its own folder", recipe.name)));
    }
    let (report, _) = train::execute(&config)?;
    let ran = Ran { report: &report, flags: &config.flags, optim: config.optim };
    let lines = beside::compare(recipe, &ran)?;
    let differs = differences(recipe, &config.given)?;
    if config.json {
        return report::print_json(&json!({
            "recipe": recipe,
            "beside": lines,
            "differs": differs,
            "run": report,
        }));
    }
    report::print(&format!(
        "{}\n{}: {}\n{}, {}\n\n{}\nWhat differs:\n{}",
        report.epochs(),
        recipe.name,
        recipe.title,
        recipe.table,
        recipe.seed.row,
        beside::table(&lines),
        bullets(&differs)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command alone would be refused, or start from random weights.
    #[test]
    fn what_the_user_brings_is_shown() {
        let shown = |name| show(&find(name).unwrap()).unwrap();
        let rte = shown("rte-sort8");
        for part in ["`distgpipe data get rte`", "--tokenizer PATH", "--weights FILE --init-missing"] {
            assert!(rte.contains(part), "{part} is not in: {rte}");
        }
        let imagenet = shown("imagenet-resnet101-pipeline-256");
        assert!(imagenet.contains("--data-dir DIR") && !imagenet.contains("--weights"), "{imagenet}");
        assert!(!imagenet.contains("data get image-folder"), "{imagenet}");
        let made_up = shown("unet-speed-pipeline-2");
        assert!(!made_up.contains("You bring"), "{made_up}");
    }

    #[test]
    fn every_recipe_can_be_listed_and_shown() {
        let recipes = all().unwrap();
        let listed = list(&recipes);
        for recipe in &recipes {
            let line =
                listed.lines().find(|line| line.split(' ').next() == Some(&recipe.name)).expect("a line of its own");
            let shown = show(recipe).unwrap();
            for metric in beside::Metric::ALL {
                if let Some(figure) = recipe.seed.figure(metric) {
                    assert!(line.contains(&figure), "{line}: {figure}");
                    assert!(shown.contains(&figure), "{shown}: {figure}");
                }
            }
            for part in [&recipe.title, &recipe.table, &recipe.seed.row, &recipe.run.to_command().unwrap()] {
                assert!(shown.contains(part.as_str()), "{shown}: {part}");
            }
            for sentence in &recipe.differs {
                assert!(shown.contains(sentence.as_str()), "{shown}: {sentence}");
            }
        }
    }
}
