//! The `distgpipe` command: flags → validated configuration → plan → run.

mod args;
mod balance_options;
mod capture;
mod checkpoint;
mod cmd;
mod compute;
mod config;
mod datasets;
mod exit;
mod fetch;
mod files;
mod mpi;
mod option_names;
mod recipe;
mod report;
mod saved_model;
mod server_store;
mod signals;
mod tensor_file;
mod weights;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Pipeline-parallel training across threads, processes and machines
///
/// distgpipe cuts a model into partitions, places them on workers, and streams micro-batches through them. The gradients are those
/// of a single device that runs the same micro-batches.
#[derive(Debug, Parser)]
#[command(
    name = "distgpipe",
    version,
    max_term_width = 120,
    after_help = "\
Start here:
  distgpipe demo                            split learning in two processes, in half a minute
  distgpipe train --partitions 2            train a small network on two threads
  distgpipe schedule --partitions 4 --draw  draw a schedule
  distgpipe new my-app                      a Rust project with layers and data of its own
  distgpipe train --help                    all flags of a training run

Exit status: 0 success, 1 the run failed, 2 wrong usage, 3 a worker is in another run, 130 stopped by Ctrl-C, 143 stopped by SIGTERM."
)]
struct Args {
    /// Also allow exported models to use this libtorch operator on this machine, such as erfinv.default; repeatable
    #[arg(long, global = true, value_name = "NAME", help_heading = "Exported models")]
    allow_op: Vec<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a small network in two processes, as a demonstration
    Demo(cmd::demo::DemoArgs),
    /// Train a model in a pipeline
    #[command(after_help = cmd::train::EXAMPLES)]
    Train(Box<args::TrainFlags>),
    /// Evaluate a trained model on test data
    Evaluate(Box<cmd::evaluate::EvaluateArgs>),
    /// Classify images or sentences with a trained model
    Predict(Box<cmd::predict::PredictArgs>),
    /// Download data sets, and measure how fast they load
    Data(cmd::data::DataArgs),
    /// Print, check, simulate and draw a schedule without running it
    Schedule(cmd::schedule::ScheduleArgs),
    /// List the models, or the layers of one: shapes, parameters, times and memory
    Models(cmd::models::ModelsArgs),
    /// List the devices of this machine, and what is missing to use its GPUs
    Devices(cmd::devices::DevicesArgs),
    /// Find the cut of a model with the fastest step or the lowest memory use
    Balance(cmd::balance::BalanceArgs),
    /// Measure codecs on a tensor: bytes on the wire, errors and speeds
    Codecs(cmd::codecs::CodecsArgs),
    /// Measure the link to a server, or to a process on this host: round trip and throughput, per codec and size
    Bandwidth(cmd::bandwidth::BandwidthArgs),
    /// Reproduce published experiments, and compare the results with the published figures
    Recipe(cmd::recipe::RecipeArgs),
    /// Create a Rust project that trains with the library
    New(cmd::new::NewArgs),
    /// Accept jobs from clients on other machines over TLS, and run each in a process with resource limits
    Serve(cmd::serve::ServeArgs),
    /// Store the join string of a server under a name, for `train --server NAME`
    Join(cmd::join::JoinArgs),
    /// Wait for a driver that has the token, and run the partitions it assigns
    Worker(cmd::worker::WorkerArgs),
}

fn main() {
    recipe::end_with_parent();
    distgpipe::tune_allocator();
    mpi::enter();
    server_store::refuse_secret_arguments();
    let command = Args::command()
        .mut_subcommand("train", |train| train.mut_args(args::show_defaults))
        .mut_subcommand("evaluate", |evaluate| evaluate.mut_args(args::for_inference("evaluate")))
        .mut_subcommand("predict", |predict| predict.mut_args(args::for_inference("predict")));
    let command = args::explain_numbers(command);
    let parsed = command.try_get_matches().and_then(|matches| Args::from_arg_matches(&matches));
    let Args { allow_op, command } = parsed.unwrap_or_else(|error| {
        let _ = error.print();
        mpi::exit(error.exit_code())
    });
    if let Err(error) = distgpipe::zoo::allow_operators(&allow_op) {
        exit::end(Err(exit::usage(format!("--allow-op: {error}"))));
    }
    exit::end(match command {
        Command::Demo(args) => cmd::demo::run(&args),
        Command::Train(flags) => cmd::train::run(*flags),
        Command::Evaluate(args) => cmd::evaluate::run(&args),
        Command::Predict(args) => cmd::predict::run(&args),
        Command::Data(args) => cmd::data::run(&args),
        Command::Schedule(args) => cmd::schedule::run(&args),
        Command::Models(args) => cmd::models::run(&args),
        Command::Devices(args) => cmd::devices::run(&args),
        Command::Balance(args) => cmd::balance::run(&args),
        Command::Codecs(args) => cmd::codecs::run(&args),
        Command::Bandwidth(args) => cmd::bandwidth::run(&args),
        Command::Recipe(args) => cmd::recipe::run(args),
        Command::New(args) => cmd::new::run(&args),
        Command::Serve(args) => cmd::serve::run(&args),
        Command::Join(args) => cmd::join::run(&args),
        Command::Worker(args) => cmd::worker::run(args),
    })
}
