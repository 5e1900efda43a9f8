//! Runs the rows of a published table one after the other, each in a process of its own: memory is that of one row, and a row that
//! does not fit ends itself and nothing else.

use super::comparison::Metric;
use super::measured::{MeasuredRow, MeasuredRun, Measurements, Outcome};
use super::requirements::{devices, gpus};
use super::tables::PublishedTable;
use super::{find, Recipe};
use crate::args::TrainFlags;
use crate::compute::cores;
use crate::exit::usage;
use crate::files::{check_directory, NewFile};
use crate::report;
use anyhow::Context;
use distgpipe::engine::Device;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// The exit status of wrong usage: the data or the tokenizer is missing.
const WRONG_USAGE: i32 = 2;
/// From here on, a status is 128 and the number of a signal.
const SIGNALS: i32 = 128;
/// A process that the kernel kills for its memory gets this signal.
const SIGKILL: i32 = 9;

/// What to run, and where the figures go.
pub struct TableRun<'a> {
    pub table: &'a PublishedTable,
    /// Only rows that contain all of these words.
    pub words: &'a [String],
    pub seeds: &'a [u64],
    /// The directory of the file to write.
    pub out: &'a Path,
    /// Flags that override those of every recipe.
    pub flags: &'a TrainFlags,
    /// The command, for the file.
    pub command: String,
}

impl TableRun<'_> {
    /// Runs the rows. The file is written after each of them.
    pub fn run(&self) -> anyhow::Result<(PathBuf, Measurements)> {
        self.check()?;
        let path = self.out.join(format!("{}.json", self.table.name));
        if path.exists() {
            return Err(usage(format!(
                "--out {}: it has {}.json of an earlier run: move it, or name another directory",
                self.out.display(),
                self.table.name
            )));
        }
        let recipes = self.recipes()?;
        std::fs::create_dir_all(self.out).with_context(|| format!("--out {}", self.out.display()))?;
        let file = NewFile::at("--out", &path)?;
        let gpus = (0..).take_while(|&index| Device::Cuda(index).open().is_ok()).count();
        let mut measured = Measurements {
            table: self.table.name.clone(),
            machine: machine(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command: self.command.clone(),
            rows: Vec::new(),
        };
        for recipe in &recipes {
            let row = self.row(recipe, gpus)?;
            if let Some(why) = &row.skipped {
                report::note(&format!("{}: skipped: {why}", recipe.name));
            }
            measured.rows.push(row);
            // A table of skipped rows is not worth a file.
            if measured.rows.iter().any(|row| !row.runs.is_empty()) {
                file.write((serde_json::to_string_pretty(&measured)? + "\n").as_bytes())?;
            }
        }
        if measured.rows.iter().all(|row| row.runs.is_empty()) {
            let why = measured.rows.iter().find_map(|row| row.skipped.as_deref()).unwrap_or_default();
            return Err(usage(format!("--table {}: no row can run here; the first: {why}", self.table.name)));
        }
        Ok((path, measured))
    }

    /// Flags whose files the rows would overwrite, and the seed.
    fn check(&self) -> anyhow::Result<()> {
        let flags = self.flags;
        let given = [
            ("--seed", flags.seed.is_some()),
            ("--save", flags.save.is_some()),
            ("--log", flags.log.is_some()),
            ("--checkpoint", flags.checkpoint.is_some()),
            ("--resume", flags.resume.is_some()),
            ("--capture", flags.capture.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some(("--seed", _)) => Err(usage("--seed: a table takes --seeds, such as --seeds 0,1,2")),
            Some((flag, _)) => Err(usage(format!("{flag}: it belongs to one run: name a recipe instead of --table"))),
            None => check_directory("--out", self.out),
        }
    }

    fn recipes(&self) -> anyhow::Result<Vec<Recipe>> {
        let mut recipes = Vec::new();
        for name in self.table.recipes() {
            let recipe = find(name)?;
            if recipe.matches(self.words)? {
                recipes.push(recipe);
            }
        }
        match recipes.is_empty() {
            true if self.words.is_empty() => {
                Err(usage(format!("--table {}: none of its rows has a recipe to run", self.table.name)))
            }
            true => Err(usage(format!("--rows {}: no row has these words", self.words.join(" ")))),
            false => Ok(recipes),
        }
    }

    /// Runs a row with every seed, unless the machine lacks something.
    fn row(&self, recipe: &Recipe, gpus_here: usize) -> anyhow::Result<MeasuredRow> {
        let mut row = MeasuredRow { recipe: Some(recipe.name.clone()), ..MeasuredRow::default() };
        let mut flags = TrainFlags { json: None, config: None, ..self.flags.clone() };
        let wanted = devices(recipe);
        if flags.device.is_none() {
            if gpus_here < wanted {
                row.skipped = Some(format!(
                    "it needs {}, and this machine has {}; --device cpu, or --device cuda:0, has all workers share one device",
                    gpus(wanted),
                    gpus_here
                ));
                return Ok(row);
            }
            let all: Vec<String> = (0..wanted).map(|index| format!("cuda:{index}")).collect();
            flags.device = Some(all.join(",").parse()?);
        }
        for &seed in self.seeds {
            report::note(&format!("{}, seed {seed}:", recipe.name));
            flags.seed = Some(seed);
            match one(recipe, &flags)? {
                Ended::Complete { run, deviations } => {
                    row.runs.push(run.measured(seed));
                    row.deviations = deviations;
                }
                Ended::OutOfMemory => {
                    report::note(&format!("{}, seed {seed}: out of memory", recipe.name));
                    let outcome = Outcome::OutOfMemory;
                    row.runs.push(MeasuredRun { seed, outcome, command: None, figures: BTreeMap::new(), source: None });
                    // Another seed needs as much.
                    break;
                }
                // Partial figures would look like those of all seeds.
                Ended::Failed(why) => {
                    row.runs.clear();
                    row.skipped = Some(why);
                    break;
                }
            }
        }
        Ok(row)
    }
}

/// How the process of a row ended.
enum Ended {
    Complete { run: RecipeRun, deviations: Vec<String> },
    OutOfMemory,
    Failed(String),
}

/// What is taken from the output of `recipe run --json`.
#[derive(Deserialize)]
struct RecipeOutput {
    comparison: Vec<ComparedFigure>,
    deviations: Vec<String>,
    run: RunOutput,
}

#[derive(Deserialize)]
struct ComparedFigure {
    metric: Metric,
    value: Option<f64>,
}

#[derive(Deserialize)]
struct RunOutput {
    command: String,
}

/// The figures of a run that completed.
struct RecipeRun {
    command: String,
    figures: BTreeMap<Metric, f64>,
}

impl RecipeRun {
    fn measured(self, seed: u64) -> MeasuredRun {
        let RecipeRun { command, figures } = self;
        MeasuredRun { seed, outcome: Outcome::Complete, command: Some(command), figures, source: None }
    }
}

/// Runs a recipe in another process. Its messages go to standard error.
fn one(recipe: &Recipe, flags: &TrainFlags) -> anyhow::Result<Ended> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut process = Command::new(program)
        .args(["recipe", "run", &recipe.name, "--json"])
        .args(flags.to_arguments()?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting a process for the row")?;
    let messages = process.stderr.take().context("the standard error of the row")?;
    // Standard output has one report, which fits into memory; both are read at once, so that neither pipe fills up.
    let reader = std::thread::spawn(move || {
        let mut errors = String::new();
        for line in BufReader::new(messages).lines().map_while(Result::ok) {
            let _ = writeln!(std::io::stderr(), "  {line}");
            if let Some(error) = line.strip_prefix("error: ") {
                errors = error.to_owned();
            }
        }
        errors
    });
    let output = process.wait_with_output().context("waiting for the row")?;
    let error = reader.join().unwrap_or_default();
    if output.status.success() {
        let output: RecipeOutput = serde_json::from_slice(&output.stdout).context("the report of the row")?;
        let figures = output.comparison.iter().filter_map(|figure| Some((figure.metric, figure.value?))).collect();
        let run = RecipeRun { command: output.run.command, figures };
        return Ok(Ended::Complete { run, deviations: output.deviations });
    }
    ended(output.status, error)
}

/// What became of a process that failed with this error.
fn ended(status: ExitStatus, error: String) -> anyhow::Result<Ended> {
    let lower = error.to_lowercase();
    // Of a GPU, of libtorch's allocator for the CPU, and of our own check.
    let memory = ["out of memory", "can't allocate memory", "cannot allocate memory", " of memory, and this host has "];
    if memory.iter().any(|text| lower.contains(text)) || status.signal() == Some(SIGKILL) {
        return Ok(Ended::OutOfMemory);
    }
    match status.code() {
        Some(code) if code < SIGNALS => {
            let what = if code == WRONG_USAGE { "" } else { "it failed: " };
            Ok(Ended::Failed(format!("{what}{error}")))
        }
        // The user stopped the row, and so all of them.
        _ => anyhow::bail!("the row was stopped: {status}"),
    }
}

/// The processor and the GPUs of this machine.
fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("processor not known", |(_, model)| model.trim());
    let query = Command::new("nvidia-smi").args(["--query-gpu=name,driver_version", "--format=csv,noheader"]).output();
    let listed = query.ok().filter(|output| output.status.success());
    let listed = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let mut parts: Vec<String> =
        listed.lines().map(|gpu| gpu.trim().replace(", ", ", driver ")).filter(|gpu| !gpu.is_empty()).collect();
    parts.push(format!("{} of {model}", report::units::plural(cores(), "core")));
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_is_an_outcome_and_a_signal_ends_the_table() {
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        let of = |status, error: &str| ended(status, error.to_owned());
        for error in [
            "worker w0: libtorch: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "libtorch: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
            "worker w0 takes 12.0 TB of memory, and this host has 8.0 GB left: use a smaller model",
        ] {
            assert!(matches!(of(exit(1), error), Ok(Ended::OutOfMemory)), "{error}");
        }
        assert!(matches!(of(ExitStatus::from_raw(SIGKILL), ""), Ok(Ended::OutOfMemory)));
        let said = |status, error: &str| match of(status, error) {
            Ok(Ended::Failed(why)) => why,
            _ => panic!("expected a failure"),
        };
        assert_eq!(said(exit(2), "--data cifar10: not there"), "--data cifar10: not there");
        assert_eq!(said(exit(1), "worker w1 stalled"), "it failed: worker w1 stalled");
        assert!(of(exit(130), "").is_err() && of(ExitStatus::from_raw(15), "").is_err());
    }
}
