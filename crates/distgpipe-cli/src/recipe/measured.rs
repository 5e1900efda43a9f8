//! Our figures: files that `distgpipe recipe run --table` writes, one for each table that was run.
//!
//! The files in `runs/recipes` are built into the binary. Nothing that `recipe table` and `recipe readme` print as ours comes from
//! anywhere else, except parameters, which are counted.

use super::comparison::Metric;
use super::simulated::PartitionCosts;
use super::Recipe;
use crate::exit::usage;
use crate::files::read_text;
use crate::report::units;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name and text of every committed file, sorted by name.
const TEXTS: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/measured.rs"));
/// The largest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 24;

/// One run of a table on one machine.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Measurements {
    /// The name of the table.
    pub table: String,
    /// The machine that computed.
    pub machine: String,
    /// The version of distgpipe.
    pub version: String,
    /// The command that wrote the file, or what was run instead.
    pub command: String,
    /// A recipe may have several rows, of runs with different flags. A cell of a table shows the first that has its figure.
    pub rows: Vec<MeasuredRow>,
}

/// What came of one row.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRow {
    /// The recipe that was run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
    /// What was run, in a row of ours that the published table does not have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// One for each seed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<MeasuredRun>,
    /// How the runs deviate from the published experiment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deviations: Vec<String>,
    /// Why there are no runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// What ran this row, if not the command of the file: it was added later, or is that of another table's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added: Option<Origin>,
}

/// Where figures are from.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The machine that computed.
    pub machine: String,
    /// The version of distgpipe.
    pub version: String,
    /// The command.
    pub command: String,
}

/// One run of a row.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRun {
    pub seed: u64,
    pub outcome: Outcome,
    /// The command that repeats it, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// In the units of [`Metric`]; memory is in bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub figures: BTreeMap<Metric, f64>,
    /// The share of each worker in the memory, where workers were measured apart.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub memory: BTreeMap<String, f64>,
    /// The committed report that the figures come from, from the root of the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<PathBuf>,
    /// What a simulated figure was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub costs: Option<PartitionCosts>,
}

impl MeasuredRun {
    /// A run that completed.
    pub fn new(seed: u64, command: Option<String>, figures: BTreeMap<Metric, f64>) -> Self {
        MeasuredRun {
            seed,
            outcome: Outcome::Complete,
            command,
            figures,
            memory: BTreeMap::new(),
            source: None,
            costs: None,
        }
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Complete,
    OutOfMemory,
    /// It did not run: its throughput was computed from measured costs.
    Simulated,
}

/// A figure over all seeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    pub mean: f64,
    /// The sample deviation; `None` for one seed.
    pub deviation: Option<f64>,
    /// Whether a simulation is behind it.
    pub simulated: bool,
}

impl Figure {
    /// The mean and the deviation of some values; `None` of none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        match values.len() {
            0 => None,
            1 => Some(Figure { mean, deviation: None, simulated: false }),
            _ => Some(Figure { mean, deviation: Some((squares / (count - 1.0)).sqrt()), simulated: false }),
        }
    }

    /// The figure as tables print it, in the unit of the metric.
    pub fn text(&self, metric: Metric) -> String {
        let plain = |value: f64| match metric {
            Metric::Accuracy | Metric::Error | Metric::Matthews | Metric::Throughput => format!("{value:.2}"),
            Metric::SpeedUp | Metric::Compression => format!("{value:.3}"),
            Metric::BatchTime | Metric::TransferTime | Metric::BackwardTime => format!("{value:.3}"),
            Metric::Parameters => units::count(value.round() as u64),
            Metric::Memory | Metric::ModelMemory | Metric::ActivationMemory => gibibytes(value),
            Metric::Bandwidth => format!("{}/s", units::bytes(value)),
        };
        let unit = match metric {
            Metric::Accuracy | Metric::Error => " %",
            Metric::Throughput => "/s",
            Metric::SpeedUp => "×",
            Metric::BatchTime | Metric::TransferTime | Metric::BackwardTime => " s",
            _ => "",
        };
        // What is counted hardly depends on the seed.
        let deviation = self.deviation.map(plain).filter(|text| metric.is_a_score() || *text != plain(0.0));
        let mark = if self.simulated { " (simulated)" } else { "" };
        match deviation {
            Some(deviation) => format!("{} ± {deviation}{unit}{mark}", plain(self.mean)),
            None => format!("{}{unit}{mark}", plain(self.mean)),
        }
    }
}

/// Bytes in the unit of the published tables, unless they are few.
fn gibibytes(bytes: f64) -> String {
    match bytes / (1u64 << 30) as f64 {
        amount if amount >= 0.1 => format!("{amount:.2} GiB"),
        _ => units::bytes(bytes),
    }
}

impl MeasuredRow {
    /// The row of a recipe, without runs.
    pub fn of(recipe: &Recipe) -> Self {
        MeasuredRow { recipe: Some(recipe.name.clone()), ..MeasuredRow::default() }
    }

    /// A figure over all runs that have it.
    pub fn figure(&self, metric: Metric) -> Option<Figure> {
        let values: Vec<f64> = self.runs.iter().filter_map(|run| run.figures.get(&metric).copied()).collect();
        Some(Figure { simulated: self.is_simulated(), ..Figure::of(&values)? })
    }

    /// A figure as tables print it. Of one run, the memory of each worker is printed too.
    pub fn text(&self, metric: Metric) -> Option<String> {
        let figure = self.figure(metric)?.text(metric);
        Some(match &self.runs[..] {
            [run] if metric == Metric::Memory && !run.memory.is_empty() => {
                let each = run.memory.iter().map(|(worker, bytes)| format!("{worker} {}", gibibytes(*bytes)));
                format!("{figure}: {}", each.collect::<Vec<_>>().join(", "))
            }
            _ => figure,
        })
    }

    /// Whether its figures come from a simulation.
    pub fn is_simulated(&self) -> bool {
        self.runs.iter().any(|run| run.outcome == Outcome::Simulated)
    }

    /// Whether the row did not fit into the memory of the machine.
    pub fn is_out_of_memory(&self) -> bool {
        self.runs.iter().any(|run| run.outcome == Outcome::OutOfMemory)
    }
}

impl Measurements {
    /// The rows of a recipe that were run.
    pub fn rows_of<'a, 'b>(&'a self, recipe: &'b str) -> impl Iterator<Item = &'a MeasuredRow> + use<'a, 'b> {
        self.rows.iter().filter(move |row| row.recipe.as_deref() == Some(recipe) && !row.runs.is_empty())
    }

    /// The first of them with a throughput.
    pub fn speed_row(&self, recipe: &str) -> Option<&MeasuredRow> {
        self.rows_of(recipe).find(|row| row.figure(Metric::Throughput).is_some())
    }

    /// The first of them.
    pub fn row(&self, recipe: &str) -> Option<&MeasuredRow> {
        self.rows_of(recipe).next()
    }

    /// The machine and the command of a row.
    pub fn origin<'a>(&'a self, row: &'a MeasuredRow) -> (&'a str, &'a str) {
        row.added.as_ref().map_or((&self.machine, &self.command), |added| (&added.machine, &added.command))
    }

    /// The file of a table, if there is one at this path.
    pub fn existing(flag: &str, path: &Path, table: &str) -> anyhow::Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let text = read_text(flag, path, FILE_BYTES_MAX)?;
        let parsed = Self::parse(table, &text).map_err(|e| usage(format!("{flag} {}: {e:#}", path.display())));
        parsed.map(Some)
    }

    /// Puts a row in the place of that of the same recipe, or behind all others.
    pub fn put(&mut self, row: MeasuredRow) {
        match self.rows.iter_mut().find(|old| old.recipe.is_some() && old.recipe == row.recipe) {
            Some(old) => *old = row,
            None => self.rows.push(row),
        }
    }

    fn parse(name: &str, text: &str) -> anyhow::Result<Self> {
        let parsed: Self = serde_json::from_str(text).with_context(|| format!("{name}.json"))?;
        if parsed.table != name {
            anyhow::bail!("{name}.json: it has the figures of the table {}: rename it", parsed.table);
        }
        Ok(parsed)
    }
}

/// The files of one directory.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Where they are, for people.
    pub place: String,
    files: Vec<Measurements>,
}

impl Measured {
    /// The committed files.
    pub fn committed() -> anyhow::Result<Self> {
        let files = TEXTS.iter().map(|(name, text)| Measurements::parse(name, text));
        Ok(Measured { place: "runs/recipes".to_owned(), files: files.collect::<Result<_, _>>()? })
    }

    /// The files of a directory that a user gives.
    pub fn read(flag: &str, directory: &Path) -> anyhow::Result<Self> {
        let wrong = |why: String| usage(format!("{flag} {}: {why}", directory.display()));
        let entries = std::fs::read_dir(directory).map_err(|e| wrong(e.to_string()))?;
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(|e| wrong(e.to_string()))?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                paths.push(path);
            }
        }
        paths.sort();
        let mut files = Vec::new();
        for path in paths {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let text = read_text(flag, &path, FILE_BYTES_MAX)?;
            files.push(Measurements::parse(&name, &text).map_err(|e| wrong(format!("{e:#}")))?);
        }
        if files.is_empty() {
            return Err(wrong(
                "it has no .json file: `distgpipe recipe run --table NAME --out DIR` writes one".to_owned(),
            ));
        }
        Ok(Measured { place: directory.display().to_string(), files })
    }

    /// The figures of one run.
    pub fn of(place: &Path, measurements: Measurements) -> Self {
        Measured { place: place.display().to_string(), files: vec![measurements] }
    }

    /// The file of a table.
    pub fn table(&self, table: &str) -> Option<&Measurements> {
        self.files.iter().find(|file| file.table == table)
    }

    /// The runs of a recipe, those of the table itself first.
    pub fn rows<'a>(
        &'a self,
        table: &'a str,
        recipe: &'a str,
    ) -> impl Iterator<Item = (&'a Measurements, &'a MeasuredRow)> {
        let own = self.files.iter().filter(move |file| file.table == table);
        let others = self.files.iter().filter(move |file| file.table != table);
        own.chain(others).flat_map(move |file| file.rows_of(recipe).map(move |row| (file, row)))
    }

    /// The file with the speeds of a table's rows: the table's own, or else the one that has most of them; among equals, the one with
    /// more measured speeds. The speeds of two files are those of two machines, or of two runs of a shared one, and their ratio would
    /// say nothing.
    pub fn speeds(&self, table: &str, recipes: &[&str]) -> Option<&Measurements> {
        let speed = |file: &Measurements, recipe: &str| file.speed_row(recipe)?.figure(Metric::Throughput);
        let rows = |file: &Measurements| recipes.iter().filter_map(|recipe| speed(file, recipe)).count();
        let measured = |file: &Measurements| {
            recipes.iter().filter_map(|recipe| speed(file, recipe)).filter(|speed| !speed.simulated).count()
        };
        let own = self.table(table).filter(|own| rows(own) > 0);
        let others = self.files.iter().filter(|file| rows(file) > 0);
        own.or_else(|| others.max_by_key(|file| (rows(file), measured(file), Reverse(&file.table))))
    }

    /// Why a row of a table has no runs, if it was tried.
    pub fn skipped(&self, table: &str, recipe: &str) -> Option<&str> {
        let rows = self.table(table)?.rows.iter();
        rows.filter(|row| row.recipe.as_deref() == Some(recipe)).find_map(|row| row.skipped.as_deref())
    }
}

impl Measurements {
    /// The throughput of one recipe divided by that of another, if one command measured both: a machine that others use, too, is
    /// not as fast the next time.
    pub fn speed_up(&self, recipe: &str, baseline: &str) -> Option<(Figure, &MeasuredRow)> {
        let (row, base) = (self.speed_row(recipe)?, self.speed_row(baseline)?);
        let (ours, theirs) = (row.figure(Metric::Throughput)?, base.figure(Metric::Throughput)?);
        if self.origin(row) != self.origin(base) {
            return None;
        }
        let simulated = ours.simulated || theirs.simulated;
        Some((Figure { mean: ours.mean / theirs.mean, deviation: None, simulated }, row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{self, tables};
    use serde_json::Value;

    fn repository() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// A row of one run with this throughput.
    fn row(recipe: &str, rate: f64) -> MeasuredRow {
        MeasuredRow {
            recipe: Some(recipe.to_owned()),
            runs: vec![MeasuredRun::new(0, None, BTreeMap::from([(Metric::Throughput, rate)]))],
            ..MeasuredRow::default()
        }
    }

    #[test]
    fn mean_and_deviation_are_those_of_a_sample() {
        // The seeds of raw in runs/2026-11-15-cola, whose README says 15.4 ± 1.4.
        let figure = Figure::of(&[14.821, 17.009, 14.257]).unwrap();
        assert_eq!(figure.text(Metric::Matthews), "15.36 ± 1.45");
        assert_eq!(Figure::of(&[0.5]).unwrap().text(Metric::Accuracy), "0.50 %");
        assert_eq!(Figure::of(&[8.0, 8.0]).unwrap().text(Metric::Parameters), "8");
        // As the table of AmoebaNet-D writes the memory of its smallest model.
        assert_eq!(Figure::of(&[978_066_480.0]).unwrap().text(Metric::ModelMemory), "0.91 GiB");
        assert_eq!(Figure::of(&[]), None);
    }

    fn file(table: &str, rows: Vec<MeasuredRow>) -> Measurements {
        let (machine, version, command) = Default::default();
        Measurements { table: table.to_owned(), machine, version, command, rows }
    }

    #[test]
    fn the_speeds_of_a_table_are_those_of_one_file() {
        let measured = |files| Measured { place: String::new(), files };
        let (x, y, z) = (|| row("x", 30.0), || row("y", 20.0), || row("z", 10.0));
        let speeds = |measured: &Measured| measured.speeds("own", &["x", "y"]).map(|file| file.table.clone());
        assert_eq!(speeds(&measured(vec![file("a", vec![x(), y()]), file("own", vec![x()])])), Some("own".to_owned()));
        assert_eq!(speeds(&measured(vec![file("a", vec![x(), z()]), file("b", vec![x(), y()])])), Some("b".to_owned()));
        assert_eq!(speeds(&measured(vec![file("b", vec![x()]), file("a", vec![y()])])), Some("a".to_owned()));
        let mut simulated = row("x", 40.0);
        simulated.runs[0].outcome = Outcome::Simulated;
        let both = measured(vec![file("a", vec![simulated, y()]), file("b", vec![x(), y()])]);
        assert_eq!(speeds(&both), Some("b".to_owned()));
        let mut score = y();
        score.runs[0].figures = BTreeMap::from([(Metric::Accuracy, 90.0)]);
        let scores = || file("own", vec![score.clone()]);
        assert_eq!(speeds(&measured(vec![scores(), file("a", vec![y()])])), Some("a".to_owned()));
        assert_eq!(speeds(&measured(vec![scores(), file("a", vec![z()])])), None);
    }

    /// Such as a speed with random weights, and a score.
    #[test]
    fn a_recipe_may_have_several_rows_in_a_file() {
        let mut score = row("x", 0.0);
        score.runs[0].figures = BTreeMap::from([(Metric::Accuracy, 90.0)]);
        let files = vec![file("other", vec![row("x", 20.0)]), file("own", vec![row("x", 30.0), row("y", 10.0), score])];
        let measured = Measured { place: String::new(), files };
        let figures = |metric| {
            let rows = measured.rows("own", "x").map(|(_, row)| row.figure(metric).map(|figure| figure.mean));
            rows.collect::<Vec<_>>()
        };
        assert_eq!(figures(Metric::Throughput), [Some(30.0), None, Some(20.0)]);
        assert_eq!(figures(Metric::Accuracy), [None, Some(90.0), None]);
    }

    #[test]
    fn a_speed_up_is_that_of_two_rows_of_a_file() {
        let mut score = row("x", 0.0);
        score.runs[0].figures = BTreeMap::from([(Metric::Accuracy, 90.0)]);
        let both = file("a", vec![score, row("x", 30.0), row("base", 20.0)]);
        let speed_up = |file: &Measurements| file.speed_up("x", "base").map(|(figure, _)| figure.text(Metric::SpeedUp));
        assert_eq!(speed_up(&both), Some("1.500×".to_owned()));
        assert_eq!(speed_up(&file("a", vec![row("x", 30.0)])), None);
        let mut simulated = row("x", 30.0);
        simulated.runs[0].outcome = Outcome::Simulated;
        let mixed = file("a", vec![simulated, row("base", 20.0)]);
        assert_eq!(speed_up(&mixed), Some("1.500× (simulated)".to_owned()));
        let added =
            |machine: &str| Origin { machine: machine.to_owned(), version: String::new(), command: String::new() };
        let later = |machine: &str| {
            let later = MeasuredRow { added: Some(added(machine)), ..row("x", 30.0) };
            file("a", vec![later, row("base", 20.0)])
        };
        assert_eq!(speed_up(&later("another one")), None);
        assert_eq!(speed_up(&later("")), Some("1.500×".to_owned()));
    }

    /// The published memory of a client and a server is interesting because the two differ.
    #[test]
    fn the_memory_of_each_worker_is_printed() {
        let gib = f64::from(1 << 30);
        let mut row = row("x", 3.0 * gib);
        row.runs[0].figures = BTreeMap::from([(Metric::Memory, 3.0 * gib)]);
        assert_eq!(row.text(Metric::Memory).unwrap(), "3.00 GiB");
        row.runs[0].memory = BTreeMap::from([("client".to_owned(), gib), ("server".to_owned(), 2.0 * gib)]);
        assert_eq!(row.text(Metric::Memory).unwrap(), "3.00 GiB: client 1.00 GiB, server 2.00 GiB");
    }

    /// Whoever doubts a simulated figure has its costs.
    #[test]
    fn simulated_figures_follow_from_their_costs() {
        for file in Measured::committed().unwrap().files {
            for row in &file.rows {
                for run in &row.runs {
                    assert_eq!(run.costs.is_some(), run.outcome == Outcome::Simulated, "{}", file.table);
                    let (Some(costs), Some(name)) = (&run.costs, &row.recipe) else { continue };
                    let expected = costs.throughput_per_s(&recipe::find(name).unwrap().run).unwrap();
                    assert!((run.figures[&Metric::Throughput] / expected - 1.0).abs() < 1e-9, "{name}: {expected}");
                }
            }
        }
    }

    #[test]
    fn committed_figures_belong_to_tables_and_recipes() {
        for file in Measured::committed().unwrap().files {
            let table = tables::find(&file.table).unwrap();
            let rows: Vec<Recipe> = table.recipes().iter().map(|name| recipe::find(name).unwrap()).collect();
            let baselines = table.baselines(&rows);
            for row in &file.rows {
                assert!(row.recipe.is_some() != row.label.is_some(), "{}: a recipe or a label", file.table);
                assert!(row.runs.is_empty() == row.skipped.is_some(), "{}: runs or a reason", file.table);
                if let Some(name) = &row.recipe {
                    let belongs = table.recipes().contains(&&name[..]) || baselines.contains(name);
                    assert!(belongs, "{}: {name}", file.table);
                }
            }
        }
    }

    /// Figures that were measured before this command existed were copied from reports, which are committed too.
    #[test]
    fn figures_with_a_source_are_those_of_the_committed_report() {
        let mut compared = 0;
        for file in Measured::committed().unwrap().files {
            for run in file.rows.iter().flat_map(|row| &row.runs) {
                let Some(source) = &run.source else { continue };
                let text = std::fs::read_to_string(repository().join(source)).unwrap();
                let report: Value = serde_json::from_str(&text).unwrap();
                let last = report["epochs"].as_array().unwrap().last().unwrap();
                let sum = |pick: &dyn Fn(&Value) -> f64| {
                    let links = report["links"].as_array().unwrap().iter();
                    links.flat_map(|link| link["cuts"].as_array().unwrap()).map(pick).sum::<f64>()
                };
                let reserved = || {
                    let workers = report["workers"].as_array().unwrap().iter();
                    workers.map(|worker| worker["reserved_bytes"].as_f64().unwrap()).fold(0.0, f64::max)
                };
                let parameters = report["parameters"].as_f64().unwrap();
                for (metric, figure) in &run.figures {
                    let expected = match metric {
                        Metric::Accuracy => 100.0 * last["test_accuracy"].as_f64().unwrap(),
                        Metric::Matthews => 100.0 * last["test_matthews"].as_f64().unwrap(),
                        Metric::Parameters => parameters,
                        Metric::Compression => {
                            sum(&|cut| cut["wire_bytes"].as_f64().unwrap())
                                / sum(&|cut| cut["raw_bytes"].as_f64().unwrap())
                        }
                        Metric::Memory => reserved(),
                        // RMSprop keeps one tensor for each parameter, SGD without momentum none.
                        Metric::ModelMemory => 12.0 * parameters,
                        Metric::ActivationMemory => reserved() - 12.0 * parameters,
                        other => panic!("{}: {other:?} has no source", source.display()),
                    };
                    assert!(
                        (figure / expected - 1.0).abs() < 1e-9 || *figure == expected,
                        "{}: {metric:?} {figure}",
                        source.display()
                    );
                    compared += 1;
                }
                assert_eq!(report["command"].as_str(), run.command.as_deref(), "{}", source.display());
            }
        }
        assert!(compared > 50, "only {compared} figures have a source");
    }
}
