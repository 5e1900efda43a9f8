//! Runs one row of a table in a process of its own: memory is that of one row, and a row that does not fit ends itself and nothing
//! else.

use super::comparison::Metric;
use super::Recipe;
use crate::args::TrainFlags;
use crate::report::units;
use anyhow::Context;
use serde::de::DeserializeOwned;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The exit status of wrong usage: the data or the tokenizer is missing.
const WRONG_USAGE: i32 = 2;
/// From here on, a status is 128 and the number of a signal.
const SIGNALS: i32 = 128;
/// A process that the kernel kills for its memory gets this signal.
const SIGKILL: i32 = 9;
/// How often a process with a time limit is looked at.
const POLL: Duration = Duration::from_millis(50);

/// The variable that has the number of the process that started a row.
const PARENT: &str = "DISTGPIPE_ROW_PARENT";

/// Has the kernel stop this process, if it runs a row, when the process that started it ends. Otherwise the row would hold the cores or
/// the GPU after Ctrl-C, or after a kill of that process alone.
pub fn end_with_parent() {
    let parent = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().to_string());
    // The workers of a row have the variable too, and another parent.
    if parent.is_some() && parent == std::env::var(PARENT).ok() {
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM));
    }
}

/// How the process of a row ended.
pub enum Ended<T> {
    Complete(T),
    OutOfMemory,
    Failed(String),
}

/// What is taken from the output of `recipe run --json`.
#[derive(Deserialize)]
pub struct RecipeOutput {
    comparison: Vec<ComparedFigure>,
    pub deviations: Vec<String>,
    pub run: RunOutput,
}

#[derive(Deserialize)]
struct ComparedFigure {
    metric: Metric,
    value: Option<f64>,
    #[serde(default)]
    workers: BTreeMap<String, f64>,
}

/// The report of the run itself.
#[derive(Deserialize)]
pub struct RunOutput {
    pub command: String,
    pub balance: Vec<usize>,
    pub steps: u64,
    pub warm_up_steps: u64,
    pub workers: Vec<WorkerOutput>,
}

#[derive(Deserialize)]
pub struct WorkerOutput {
    pub phases_s: BTreeMap<String, f64>,
}

impl RecipeOutput {
    /// The figures that were measured.
    pub fn figures(&self) -> BTreeMap<Metric, f64> {
        self.comparison.iter().filter_map(|figure| Some((figure.metric, figure.value?))).collect()
    }

    /// The memory of each worker, where workers were measured apart.
    pub fn memory(&self) -> BTreeMap<String, f64> {
        let memory = self.comparison.iter().find(|figure| figure.metric == Metric::Memory);
        memory.map(|figure| figure.workers.clone()).unwrap_or_default()
    }
}

/// Runs a recipe with these flags, for at most so long.
pub fn run(recipe: &Recipe, flags: &TrainFlags, limit: Option<Duration>) -> anyhow::Result<Ended<RecipeOutput>> {
    let arguments = ["recipe", "run", &recipe.name, "--json"].map(str::to_owned);
    call(arguments.into_iter().chain(flags.to_arguments()?).collect(), limit)
}

/// Calls this program, and parses what it prints. Its messages go to standard error.
pub fn call<T: DeserializeOwned>(arguments: Vec<String>, limit: Option<Duration>) -> anyhow::Result<Ended<T>> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut process = Command::new(program)
        .args(arguments)
        .env(PARENT, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting a process for the row")?;
    let messages = process.stderr.take().context("the standard error of the row")?;
    let mut report = process.stdout.take().context("the standard output of the row")?;
    // Both are read while the process runs, so that neither pipe fills up.
    let errors = std::thread::spawn(move || {
        let mut errors = String::new();
        for line in BufReader::new(messages).lines().map_while(Result::ok) {
            let _ = writeln!(std::io::stderr(), "  {line}");
            if let Some(error) = line.strip_prefix("error: ") {
                errors = error.to_owned();
            }
        }
        errors
    });
    let output = std::thread::spawn(move || {
        let mut output = Vec::new();
        report.read_to_end(&mut output).map(|_| output)
    });
    let Some(status) = wait(&mut process, limit)? else {
        let limit = limit.unwrap_or_default().as_secs_f64();
        return Ok(Ended::Failed(format!("it took longer than {}, the limit of a row", units::seconds(limit))));
    };
    let error = errors.join().unwrap_or_default();
    if status.success() {
        let output = output.join().unwrap_or_else(|_| Ok(Vec::new())).context("the report of the row")?;
        return Ok(Ended::Complete(serde_json::from_slice(&output).context("the report of the row")?));
    }
    ended(status, error)
}

/// Waits for the end of a process; `None` if it had to be killed after the limit. Worker processes end with it.
fn wait(process: &mut Child, limit: Option<Duration>) -> anyhow::Result<Option<ExitStatus>> {
    let waiting = "waiting for the row";
    let Some(limit) = limit else { return Ok(Some(process.wait().context(waiting)?)) };
    let start = Instant::now();
    loop {
        if let Some(status) = process.try_wait().context(waiting)? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            process.kill().context("ending the row")?;
            process.wait().context(waiting)?;
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

/// What became of a process that failed with this error.
fn ended<T>(status: ExitStatus, error: String) -> anyhow::Result<Ended<T>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_is_an_outcome_and_a_signal_ends_the_table() {
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        let of = |status, error: &str| ended::<()>(status, error.to_owned());
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

    #[test]
    fn a_process_is_killed_after_its_limit() {
        let mut slow = Command::new("sleep").arg("60").spawn().unwrap();
        let start = Instant::now();
        assert!(wait(&mut slow, Some(Duration::from_millis(100))).unwrap().is_none());
        assert!(start.elapsed() < Duration::from_secs(30));
        let mut quick = Command::new("true").spawn().unwrap();
        assert!(wait(&mut quick, Some(Duration::from_secs(60))).unwrap().unwrap().success());
    }
}
