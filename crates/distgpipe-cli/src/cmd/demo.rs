//! `distgpipe demo`: split learning in half a minute, by the same way as `distgpipe train`.

use crate::args::{DataName, DecayName, TrainFlags};
use crate::cmd::train;
use crate::config::RunConfig;
use crate::report;
use crate::report::run::picture;
use distgpipe::core::schedule::Schedule;

/// Columns of the command that the demo stands for, so that it can be copied.
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

/// Trains, and shows what happened.
pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let flags = preset();
    report::note(&format!(
        "A small MobileNetV2 learns handwritten digits. The client (this process) keeps the images, the labels, and the\n\
         first and the last layer; the server (another process, over TCP) runs the 18 layers between. The same as:\n\n  {}\n",
        continued(&flags.to_words()?, COMMAND_WIDTH)
    ));
    let config = RunConfig::new(&flags)?;
    let (result, plan) = train::execute(&config)?;
    if args.json {
        return report::print_json(&result);
    }
    report::print(&format!(
        "\n{}\nThe plan of one step, with a backward drawn twice as long as a forward:\n\n{}",
        result.short(),
        picture(&plan, report::width())?
    ))
}

/// A command on several lines, as a shell takes it.
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
