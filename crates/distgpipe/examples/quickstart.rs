//! Trains a small network on handwritten digits, cut into three partitions on two workers.

use distgpipe::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut pipeline = Pipeline::builder(Mlp::default().model()?)
        .balance([1, 2, 1])
        .place("client,server,client")
        .micro_batches(4)
        .schedule(Schedule::OneFOneB)
        .recompute(Recompute::Never)
        .build()?;
    let digits = Digits::new(Split::Train, Default::default())?;
    let loader = Loader::new(digits, LoaderOptions::training(64, 0))?;
    for epoch in 0..5 {
        for batch in loader.epoch(epoch) {
            println!("loss {:.3}", pipeline.train_step(&batch?)?.loss);
        }
    }
    Ok(())
}
