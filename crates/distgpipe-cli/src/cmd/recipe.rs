//! `distgpipe recipe`: lists, shows and runs published experiments and whole tables of them, and compares the figures.

use crate::args::{quoted, DataName, TrainFlags};
use crate::cmd::train::{self, Outcome};
use crate::config::RunConfig;
use crate::exit::usage;
use crate::files::{read_text, NewFile};
use crate::recipe::comparison::{self, FinishedRun};
use crate::recipe::deviations::{deviations, weights};
use crate::recipe::measured::Measured;
use crate::recipe::readme;
use crate::recipe::table_run::TableRun;
use crate::recipe::table_view::{Coverage, TableView};
use crate::recipe::tables::{self, PublishedTable};
use crate::recipe::{all, find, Recipe};
use crate::report;
use crate::report::table::{Side, Table};
use crate::signals;
use clap::Subcommand;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where figures are kept in a checkout of the project.
const RUNS: &str = "runs/recipes";
/// The largest Markdown file that is read.
const MARKDOWN_BYTES_MAX: u64 = 1 << 24;

/// Flags of `distgpipe recipe`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A recipe reproduces one row of a published table.

Examples:
  distgpipe recipe tables
  distgpipe recipe table unet-memory
  distgpipe recipe list cifar10 sort
  distgpipe recipe show cifar10-sort8
  distgpipe recipe run cifar10-sort8 --weights mobilenet_v2.safetensors --epochs 2 --limit 2000
  distgpipe recipe run unet-speed-pipeline-2 --batch 8 --chunks 4 --steps 5
  distgpipe recipe run --table time-mobilenet --device cpu --steps 12 --no-evaluate --out mine
  distgpipe recipe run --table unet-speed --simulate --steps 12 --row-limit 60 --out mine
  distgpipe recipe table time-mobilenet --runs mine")]
pub struct RecipeArgs {
    #[command(subcommand)]
    what: RecipeCommand,
}

#[derive(Debug, Subcommand)]
enum RecipeCommand {
    /// List the published tables by their titles
    Tables {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a published table with our figures beside its own, and what differs
    Table {
        /// Name of the table, or its title; `distgpipe recipe tables` lists them
        name: String,
        /// Take our figures from the files in this directory, which `recipe run --table` wrote [default: the project's own]
        #[arg(long, value_name = "DIR")]
        runs: Option<PathBuf>,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Regenerate the tables in Markdown files, between `<!-- recipe table NAME -->` and `<!-- end -->`
    Readme {
        /// Files to change
        #[arg(required = true, value_name = "FILE.md")]
        files: Vec<PathBuf>,
        /// Change nothing, and fail if a table is not the one that would be made
        #[arg(long)]
        check: bool,
    },
    /// List recipes with the published figures
    List {
        /// Only those whose name, title, row or table contains all of these words
        words: Vec<String>,
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
    /// Run a recipe, or all rows of a table, and compare the figures with the published ones
    Run(Box<RunArgs>),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Name of the recipe; `distgpipe recipe list` lists them
    #[arg(required_unless_present = "table")]
    name: Option<String>,
    /// Run the rows of this table instead, each in a process of its own. Rows whose machine or data is missing are skipped, with
    /// the reason
    #[arg(long, value_name = "TABLE", conflicts_with = "name", help_heading = "Tables")]
    table: Option<String>,
    /// Only the rows of --table whose name, title or row contains all of these words
    #[arg(long, value_name = "WORD,…", value_delimiter = ',', requires = "table", help_heading = "Tables")]
    rows: Vec<String>,
    /// Seeds to run each row of --table with [default: 0]
    #[arg(long, value_name = "N,…", value_delimiter = ',', requires = "table", help_heading = "Tables")]
    seeds: Vec<u64>,
    /// Directory for the figures of --table, in the file TABLE.json [default: runs/recipes]
    #[arg(long, value_name = "DIR", requires = "table", help_heading = "Tables")]
    out: Option<PathBuf>,
    /// Keep the file of an earlier run of --table, and run the rows and seeds that it lacks. Added rows record where they ran
    #[arg(long, requires = "table", help_heading = "Tables")]
    add: bool,
    /// Give up a row of --table whose run takes longer than this many seconds [default: no limit]
    #[arg(long, value_name = "SECONDS", requires = "table", help_heading = "Tables")]
    row_limit: Option<f64>,
    /// Simulate the rows of --table that need more devices than there are, instead of skipping them: measures each partition alone
    /// on one device, and simulates the schedule with these times. The figures are marked as simulated
    #[arg(long, requires = "table", help_heading = "Tables")]
    simulate: bool,
    /// The flags of `distgpipe train`, which override those of the recipe.
    #[command(flatten)]
    flags: TrainFlags,
}

impl RunArgs {
    /// The parser does not ask for --table where a recipe is named, because the two exclude each other.
    fn check_without_table(&self) -> anyhow::Result<()> {
        let given = [
            ("--rows", !self.rows.is_empty()),
            ("--seeds", !self.seeds.is_empty()),
            ("--out", self.out.is_some()),
            ("--add", self.add),
            ("--row-limit", self.row_limit.is_some()),
            ("--simulate", self.simulate),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(usage(format!("{flag}: it belongs to a table: use --table instead of a recipe"))),
            None => Ok(()),
        }
    }

    /// The seeds of a table. A seed that counted twice would make the deviation too small.
    fn seeds(&self) -> anyhow::Result<Vec<u64>> {
        let twice = self.seeds.iter().enumerate().find(|(i, seed)| self.seeds[..*i].contains(seed));
        match twice {
            Some((_, seed)) => Err(usage(format!("--seeds: expected different seeds, got {seed} twice"))),
            None if self.seeds.is_empty() => Ok(vec![0]),
            None => Ok(self.seeds.clone()),
        }
    }
}

/// Lists, shows or runs recipes.
pub fn run(args: RecipeArgs) -> anyhow::Result<()> {
    match args.what {
        RecipeCommand::Tables { json: true } => report::print_json(&tables::all()?),
        RecipeCommand::Tables { json: false } => report::print(&list_tables(tables::all()?)?),
        RecipeCommand::Table { name, runs, json } => {
            let measured = match runs {
                Some(directory) => Measured::read("--runs", &directory)?,
                None => Measured::committed()?,
            };
            let view = TableView::new(tables::find(&name)?, &measured)?;
            if json {
                report::print_json(&view)
            } else {
                report::print(&view.text())
            }
        }
        RecipeCommand::Readme { files, check } => files.iter().try_for_each(|file| make_readme(file, check)),
        RecipeCommand::List { words, json } => {
            let mut recipes = Vec::new();
            for recipe in all()? {
                if recipe.matches(&words)? {
                    recipes.push(recipe);
                }
            }
            match (recipes.is_empty(), json) {
                (true, _) => Err(usage(format!(
                    "no recipe has all of these words: {}; `distgpipe recipe list` lists all recipes",
                    words.join(" ")
                ))),
                (false, true) => report::print_json(&recipes),
                (false, false) => report::print(&list(&recipes)),
            }
        }
        RecipeCommand::Show { name, json: true } => {
            let recipe = find(&name)?;
            let command = recipe.run.to_command()?;
            report::print_json(&json!({ "recipe": recipe, "command": command }))
        }
        RecipeCommand::Show { name, json: false } => report::print(&show(&find(&name)?)?),
        RecipeCommand::Run(args) => match (&args.table, &args.name) {
            (Some(table), _) => run_table(tables::find(table)?, &args),
            (None, name) => {
                args.check_without_table()?;
                run_one(&find(name.as_deref().unwrap_or_default())?, args.flags)
            }
        },
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

fn list_tables(all: &[PublishedTable]) -> anyhow::Result<String> {
    let measured = Measured::committed()?;
    let mut table = Table::new(&[
        ("table", Side::Left),
        ("rows", Side::Right),
        ("measured", Side::Right),
        ("in part", Side::Right),
        ("simulated", Side::Right),
        ("title", Side::Left),
        ("document", Side::Left),
    ]);
    for one in all {
        let view = TableView::new(one, &measured)?;
        let rows = |coverage| view.rows_with(coverage).to_string();
        table.row(vec![
            one.name.clone(),
            one.rows.len().to_string(),
            rows(Coverage::Complete),
            rows(Coverage::Partial),
            rows(Coverage::Simulated),
            one.title.clone(),
            one.document.clone(),
        ]);
    }
    Ok(table.render())
}

fn make_readme(path: &Path, check: bool) -> anyhow::Result<()> {
    let text = read_text("readme", path, MARKDOWN_BYTES_MAX)?;
    let wrong = |why: String| usage(format!("readme {}: {why}", path.display()));
    let made = readme::updated(&text, &Measured::committed()?).map_err(|e| wrong(e.to_string()))?;
    if made == text {
        return Ok(());
    }
    if check {
        let differs = text.lines().zip(made.lines()).position(|(old, new)| old != new);
        let line = differs.unwrap_or_else(|| text.lines().count().min(made.lines().count())) + 1;
        anyhow::bail!(
            "{}:{line}: the tables are not those of {RUNS}: run `distgpipe recipe readme {}`",
            path.display(),
            path.display()
        );
    }
    NewFile::at("readme", path)?.write(made.as_bytes())
}

fn run_table(table: &PublishedTable, args: &RunArgs) -> anyhow::Result<()> {
    let flags = args.flags.clone().with_config()?;
    let seeds = args.seeds()?;
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(RUNS));
    let row_limit = args.row_limit.map(|seconds| {
        let limit = Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero());
        limit.ok_or_else(|| usage(format!("--row-limit {seconds}: expected seconds above 0 and below 1e19")))
    });
    let command: Vec<String> = std::env::args().skip(1).map(|word| quoted(&word)).collect();
    let run = TableRun {
        table,
        words: &args.rows,
        seeds: &seeds,
        out: &out,
        flags: &flags,
        row_limit: row_limit.transpose()?,
        simulate: args.simulate,
        add: args.add,
        command: format!("distgpipe {}", command.join(" ")),
    };
    let (path, measurements) = run.run()?;
    if flags.json == Some(true) {
        return report::print_json(&measurements);
    }
    report::note(&format!("figures in {}", path.display()));
    report::print(&TableView::new(table, &Measured::of(&out, measurements))?.text())
}

fn show(recipe: &Recipe) -> anyhow::Result<String> {
    let mut row = Table::new(&[("", Side::Left), ("", Side::Left)]);
    let mut put = |name: &str, value: &str| row.row(vec![name.to_owned(), value.to_owned()]);
    for table in tables::with_recipe(&recipe.name)? {
        put("table", &format!("{}, in \"{}\" (`distgpipe recipe table {}`)", table.title, table.document, table.name));
    }
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
            "{}{}: {}\nTables: {}\n{}\n\n{}\nWhat differs:\n{}",
            report.epochs_if_unseen(),
            recipe.name,
            recipe.title,
            recipe.tables.join(", "),
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
    use clap::Parser;

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
    fn flags_of_tables_are_refused_without_one_and_seeds_count_once() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            run: RunArgs,
        }
        let parsed = |words: &[&str]| Line::try_parse_from([&["run"], words].concat()).unwrap().run;
        for flags in [["--seeds", "0,1"], ["--rows", "x"], ["--out", "d"], ["--row-limit", "5"]] {
            let said = parsed(&[&["rte-sort8"], &flags[..]].concat()).check_without_table().unwrap_err().to_string();
            assert_eq!(said, format!("{}: it belongs to a table: use --table instead of a recipe", flags[0]));
        }
        assert!(parsed(&["rte-sort8", "--simulate"]).check_without_table().is_err());
        assert!(parsed(&["rte-sort8", "--add"]).check_without_table().is_err());
        parsed(&["rte-sort8", "--batch", "8"]).check_without_table().unwrap();
        assert_eq!(parsed(&["--table", "rte", "--seeds", "0,2,1"]).seeds().unwrap(), [0, 2, 1]);
        let said = parsed(&["--table", "rte", "--seeds", "0,2,0"]).seeds().unwrap_err().to_string();
        assert_eq!(said, "--seeds: expected different seeds, got 0 twice");
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
            for part in [&recipe.title, &recipe.tables[0], &recipe.published.row, &recipe.run.to_command().unwrap()] {
                assert!(shown.contains(part.as_str()), "{shown}: {part}");
            }
            for sentence in &recipe.deviations {
                assert!(shown.contains(sentence.as_str()), "{shown}: {sentence}");
            }
        }
    }
}
