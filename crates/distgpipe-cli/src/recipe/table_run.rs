//! Runs the rows of a published table one after the other.

use super::comparison::Metric;
use super::measured::{MeasuredRow, MeasuredRun, Measurements, Origin, Outcome};
use super::requirements::{devices, gpus};
use super::row_process::{self, Ended};
use super::simulated::{predict, Predicted};
use super::tables::PublishedTable;
use super::{find, Recipe};
use crate::args::TrainFlags;
use crate::compute::cores;
use crate::exit::usage;
use crate::files::{check_directory, NewFile};
use crate::report;
use anyhow::Context;
use distgpipe::engine::Device;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

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
    /// After how long a row is given up.
    pub row_limit: Option<Duration>,
    /// Whether rows that need more devices than there are get a simulated figure.
    pub simulate: bool,
    /// Whether an earlier file is kept, and gets the rows that it lacks.
    pub add: bool,
    /// The command, for the file.
    pub command: String,
}

impl TableRun<'_> {
    /// Runs the rows. The file is written after each of them.
    pub fn run(&self) -> anyhow::Result<(PathBuf, Measurements)> {
        self.check()?;
        let path = self.out.join(format!("{}.json", self.table.name));
        let earlier = Measurements::existing("--out", &path, &self.table.name)?;
        if earlier.is_some() && !self.add {
            return Err(usage(format!(
                "--out {}: it has {}.json of an earlier run: add --add to run the rows that it lacks, move it, or name another directory",
                self.out.display(),
                self.table.name
            )));
        }
        let recipes = self.recipes()?;
        std::fs::create_dir_all(self.out).with_context(|| format!("--out {}", self.out.display()))?;
        let file = NewFile::at("--out", &path)?;
        let gpus = (0..).take_while(|&index| Device::Cuda(index).open().is_ok()).count();
        let origin =
            Origin { machine: machine(), version: env!("CARGO_PKG_VERSION").to_owned(), command: self.command.clone() };
        // What is added to a file says itself where it is from.
        let (mut measured, added) = match earlier {
            Some(earlier) => (earlier, Some(origin)),
            None => {
                let (table, Origin { machine, version, command }) = (self.table.name.clone(), origin);
                (Measurements { table, machine, version, command, rows: Vec::new() }, None)
            }
        };
        for recipe in &recipes {
            if measured.rows_of(&recipe.name).count() > 1 {
                let what = "the file has several rows of it, and --add would replace one: name another --out";
                return Err(usage(format!("--add: {}: {what}", recipe.name)));
            }
            let Some(seeds) = self.seeds_to_run(&measured, recipe) else {
                report::note(&format!("{}: the file has it", recipe.name));
                continue;
            };
            let row = self.row(recipe, gpus, &seeds)?;
            if let Some(why) = &row.skipped {
                report::note(&format!("{}: skipped: {why}", recipe.name));
            }
            // A reason is worth less than figures.
            let without_figures = row.skipped.is_some() || row.is_out_of_memory();
            if without_figures && measured.row(&recipe.name).is_some_and(|row| !row.is_out_of_memory()) {
                report::note(&format!("{}: the file keeps its figures", recipe.name));
                continue;
            }
            measured.put(MeasuredRow { added: added.clone(), ..row });
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

    /// The seeds to run a row with; none if the file has all of them, or knows that the row does not fit into the memory of this
    /// machine. A row is one run of all its seeds, so one that lacks a seed is run again with those that it has.
    fn seeds_to_run(&self, measured: &Measurements, recipe: &Recipe) -> Option<Vec<u64>> {
        let Some(row) = measured.row(&recipe.name) else { return Some(self.seeds.to_vec()) };
        let mut seeds: Vec<u64> = row.runs.iter().map(|run| run.seed).collect();
        let lacks: Vec<u64> = self.seeds.iter().copied().filter(|seed| !seeds.contains(seed)).collect();
        let does_not_fit = row.is_out_of_memory() && measured.origin(row).0 == machine();
        if does_not_fit || lacks.is_empty() && !row.is_out_of_memory() {
            return None;
        }
        seeds.extend(lacks);
        Some(seeds)
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
        // A speed-up needs the row that it is relative to in the same file, also where the table does not have it.
        for name in self.table.baselines(&recipes) {
            recipes.push(find(&name)?);
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
    fn row(&self, recipe: &Recipe, gpus_here: usize, seeds: &[u64]) -> anyhow::Result<MeasuredRow> {
        let mut flags = TrainFlags { json: None, config: None, ..self.flags.clone() };
        let wanted = devices(recipe);
        let available = flags.device.as_ref().map_or(gpus_here, |devices| devices.iter().count());
        let simulated = self.simulate && available < wanted && available > 0;
        if flags.device.is_none() {
            if gpus_here < wanted && !simulated {
                let why = format!(
                    "it needs {}, and this machine has {}; --device cpu, or --device cuda:0, has all workers share one device",
                    gpus(wanted),
                    gpus_here
                );
                return Ok(MeasuredRow { skipped: Some(why), ..MeasuredRow::of(recipe) });
            }
            let all: Vec<String> = (0..wanted.min(gpus_here)).map(|index| format!("cuda:{index}")).collect();
            flags.device = Some(all.join(",").parse()?);
        }
        if simulated {
            // Partitions take turns on one device.
            flags.device = flags.devices().iter().next().map(Into::into);
        }
        seeded(recipe, seeds, |seed| {
            let flags = TrainFlags { seed: Some(seed), ..flags.clone() };
            Ok(match simulated {
                true => match predict(recipe, &flags, self.row_limit)? {
                    Ok(predicted) => Ended::Complete(of_simulation(seed, predicted)),
                    Err(why) => Ended::Failed(why),
                },
                false => match row_process::run(recipe, &flags, self.row_limit)? {
                    Ended::Complete(output) => {
                        let (figures, memory) = (output.figures(), output.memory());
                        let run = MeasuredRun::new(seed, Some(output.run.command), figures);
                        Ended::Complete((MeasuredRun { memory, ..run }, output.deviations))
                    }
                    Ended::OutOfMemory => Ended::OutOfMemory,
                    Ended::Failed(why) => Ended::Failed(why),
                },
            })
        })
    }
}

/// The row of a recipe, made with every seed.
fn seeded(
    recipe: &Recipe,
    seeds: &[u64],
    mut run: impl FnMut(u64) -> anyhow::Result<Ended<(MeasuredRun, Vec<String>)>>,
) -> anyhow::Result<MeasuredRow> {
    let mut row = MeasuredRow::of(recipe);
    for &seed in seeds {
        report::note(&format!("{}, seed {seed}:", recipe.name));
        match run(seed)? {
            Ended::Complete((run, deviations)) => {
                row.runs.push(run);
                row.deviations = deviations;
            }
            Ended::OutOfMemory => {
                report::note(&format!("{}, seed {seed}: out of memory", recipe.name));
                let outcome = Outcome::OutOfMemory;
                row.runs.push(MeasuredRun { outcome, ..MeasuredRun::new(seed, None, BTreeMap::new()) });
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

/// A simulated figure and what differs.
fn of_simulation(seed: u64, predicted: Predicted) -> (MeasuredRun, Vec<String>) {
    let figures = BTreeMap::from([(Metric::Throughput, predicted.throughput_per_s)]);
    let run = MeasuredRun {
        outcome: Outcome::Simulated,
        costs: Some(predicted.costs),
        ..MeasuredRun::new(seed, Some(predicted.command), figures)
    };
    (run, predicted.deviations)
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
