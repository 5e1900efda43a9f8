//! The `distgpipe` command: flags → validated configuration → plan → run.

mod args;
#[path = "balance_options.rs"]
mod balancing;
mod capture;
mod checkpoint;
mod cmd;
mod config;
mod datasets;
mod exit;
mod fetch;
mod files;
mod recipe;
mod report;
mod tensor_file;
mod weights;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Pipeline-parallel training across threads, processes and machines
///
/// A model is cut into partitions, which are placed on workers; micro-batches stream through them by a plan. The
/// gradients are those of one device running the same micro-batches.
#[derive(Debug, Parser)]
#[command(
    name = "distgpipe",
    version,
    max_term_width = 120,
    after_help = "\
Start here:
  distgpipe demo                            half a minute of split learning on two processes
  distgpipe train --partitions 2            train a small network on two threads
  distgpipe schedule --partitions 4 --draw  see a plan
  distgpipe train --help                    everything a run can be told

Exit status: 0 fine, 1 the run failed, 2 called wrongly."
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a small network in two processes, now
    Demo(cmd::demo::DemoArgs),
    /// Train a model in a pipeline
    #[command(after_help = cmd::train::EXAMPLES)]
    Train(Box<args::TrainFlags>),
    /// Get data sets, and measure how fast they load
    Data(cmd::data::DataArgs),
    /// Print, check, simulate and draw the order of the work; nothing is run
    Schedule(cmd::schedule::ScheduleArgs),
    /// List the models, or one's layers with shapes, parameters, times and memory
    Models(cmd::models::ModelsArgs),
    /// Find the cut of a model with the quickest step or the least memory, links and limits counted
    Balance(cmd::balance::BalanceArgs),
    /// Try codecs on a tensor: bytes on the wire, errors and speeds
    Codecs(cmd::codecs::CodecsArgs),
    /// Run the experiments that the project was asked for, each beside the figures it had there
    Recipe(cmd::recipe::RecipeArgs),
    /// Wait for somebody who has the token, and run the partitions he sends
    Worker(cmd::worker::WorkerArgs),
}

fn main() {
    let command = Args::command().mut_subcommand("train", |train| train.mut_args(args::show_defaults));
    let parsed = Args::from_arg_matches(&command.get_matches());
    exit::end(match parsed.unwrap_or_else(|error| error.exit()).command {
        Command::Demo(args) => cmd::demo::run(&args),
        Command::Train(flags) => cmd::train::run(*flags),
        Command::Data(args) => cmd::data::run(&args),
        Command::Schedule(args) => cmd::schedule::run(&args),
        Command::Models(args) => cmd::models::run(&args),
        Command::Balance(args) => cmd::balance::run(&args),
        Command::Codecs(args) => cmd::codecs::run(&args),
        Command::Recipe(args) => cmd::recipe::run(args),
        Command::Worker(args) => cmd::worker::run(&args),
    })
}
