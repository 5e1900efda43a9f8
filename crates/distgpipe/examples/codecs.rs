//! Codecs: compress activations and gradients on the links, and see what each link carried.

use distgpipe::prelude::*;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    for (forward, backward) in [("raw", "raw"), ("tile:4", "tile:4"), ("sort:8", "f16")] {
        let codecs = CodecPolicy { forward: forward.parse()?, backward: backward.parse()?, ..CodecPolicy::default() };
        let mut pipeline = Pipeline::builder(Mlp::default().model()?)
            .balance([1, 2, 1])
            .place("client,server,client")
            .micro_batches(4)
            .codecs(codecs)
            .build()?;
        let digits = Digits::new(Split::Train, Default::default())?;
        let loader = Loader::new(digits, LoaderOptions::training(64, 0))?;
        let mut last = None;
        for epoch in 0..3 {
            for batch in loader.epoch(epoch) {
                last = Some(pipeline.train_step(&batch?)?);
            }
        }
        let outcome = last.ok_or("no batch")?;
        println!("{forward} forward, {backward} backward: loss {:.3}", outcome.loss);
        for (from, to, traffic) in outcome.links() {
            for (edge, sent) in &traffic.sent {
                let (raw, wire) = (sent.raw_bytes, sent.wire_bytes);
                println!("  {from} → {to}, {:?}: {} tensors, {raw} bytes raw, {wire} encoded", edge.pass, sent.tensors);
            }
        }
    }
    Ok(())
}
