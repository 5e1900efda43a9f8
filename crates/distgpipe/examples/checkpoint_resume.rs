//! Checkpoints: stop a run, then resume it under another cut, with the losses it would have had.

use distgpipe::prelude::*;
use std::{error::Error, path::Path};

/// Trains to step `until`, from the newest checkpoint in the folder if there is one. Returns the loss of the last step.
fn train(folder: &Path, balance: &[usize], until: u64) -> Result<f64, Box<dyn Error>> {
    let mut pipeline =
        Pipeline::builder(Mlp::default().model()?).balance(balance.to_vec()).micro_batches(4).threads(1).build()?;
    let digits = Digits::new(Split::Train, Default::default())?;
    let loader = Loader::new(digits, LoaderOptions::training(64, 0))?;
    let checkpoints = Checkpoints::open(folder, 2)?;
    let options = TrainOptions { epochs: 10, steps_max: Some(until), ..TrainOptions::default() };
    let mut trainer = Trainer::new(&mut pipeline, loader, None, options)?.save_to(
        &checkpoints,
        SaveEvery::Steps(10),
        serde_json::Value::Null,
    );
    if let (Some(newest), _) = checkpoints.newest()? {
        trainer = trainer.resume(&newest)?;
    }
    let mut loss = f64::NAN;
    trainer.run(|event, _| {
        if let Event::StepDone(done) = event {
            loss = done.outcome.loss;
        }
        Ok(())
    })?;
    Ok(loss)
}

fn main() -> Result<(), Box<dyn Error>> {
    let root = std::env::temp_dir().join(format!("distgpipe-example-{}", std::process::id()));
    let stopped = train(&root.join("stopped"), &[2, 2], 20)?;
    println!("step 20, two partitions: loss {stopped:.6}; stopped");
    let resumed = train(&root.join("stopped"), &[1, 2, 1], 40)?;
    println!("step 40, resumed with three partitions: loss {resumed:.6}");
    let whole = train(&root.join("whole"), &[2, 2], 40)?;
    println!("step 40, never stopped: loss {whole:.6}");
    std::fs::remove_dir_all(&root)?;
    if resumed.to_bits() != whole.to_bits() {
        return Err("the resumed run differs from the one that was never stopped".into());
    }
    Ok(())
}
