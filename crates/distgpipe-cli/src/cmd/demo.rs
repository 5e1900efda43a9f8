//! `distgpipe demo`: split learning in half a minute, through the same code as `distgpipe train`.

use crate::args::{DataName, DecayName, TrainFlags};
use crate::cmd::train::{self, Outcome};
use crate::config::RunConfig;
use crate::report;
use crate::report::run::picture;
use crate::signals;
use distgpipe_core::schedule::Schedule;

/// The width to which the equivalent command is wrapped.
const COMMAND_WIDTH: usize = 100;

/// Flags of `distgpipe demo`.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// The demo as flags of `distgpipe train`.
fn preset() -> TrainFlags {
    TrainFlags {
        model: Some("mobilenet_v2".to_owned()),
        set: vec!["image=8".to_owned(), "width=0.35".to_owned(), "strides=[1,1,1,2,1,1,2,1]".to_owned()],
        data: Some(DataName::Digits),
        balance: Some("1,18,1".to_owned()),
        place: Some("client,server,client".to_owned()),
        workers: Some("processes".to_owned()),
        chunks: Some(4),
        schedule: Some(Schedule::OneFOneB),
        threads: Some(1),
        batch: Some(96),
        epochs: Some(8),
        lr: Some(0.05),
        lr_decay: Some(DecayName::Cosine),
        ..TrainFlags::default()
    }
}

/// Trains, and prints a summary and the plan.
pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    signals::watch()?;
    let flags = preset();
    report::note(&format!(
        "Training a small MobileNetV2 on handwritten digits. The client (this process) keeps the images, the labels, and the\n\
         first and the last layer; the server (another process, over TCP) runs the 18 layers between. Equivalent command:\n\n  {}\n",
        continued(&flags.to_words()?, COMMAND_WIDTH)
    ));
    let config = RunConfig::new(&flags)?;
    let Outcome::Ran(result, plan) = train::execute(&config, "distgpipe train")? else { return Ok(()) };
    if args.json {
        report::print_json(&result)?;
    } else {
        report::print(&format!(
            "\n{}\nThe plan of one step, drawn with backward passes that take twice as long as forward passes:\n\n{}",
            result.short(),
            picture(&plan, report::width())?
        ))?;
    }
    result.into_result()
}

/// A command wrapped to several lines, with a backslash at the end of each but the last.
fn continued(words: &[String], width: usize) -> String {
    let mut text = String::new();
    let mut column = 0;
    for word in words {
        if column > 0 && column + word.len() + 3 > width {
            text.push_str(" \\\n     ");
            column = 5;
        }
        if column > 0 {
            text.push(' ');
        }
        text.push_str(word);
        column += word.len() + 1;
    }
    text
}
