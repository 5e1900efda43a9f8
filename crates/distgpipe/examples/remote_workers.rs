//! Workers in other processes, with layers of your own: one program is both driver and worker.
//!
//! ```text
//! remote_workers                                              trains with a worker process on this host
//! remote_workers worker --listen 0.0.0.0:7000 --expose        on another machine: prints its token
//! DISTGPIPE_TOKEN=… remote_workers HOST:7000                  trains with that worker
//! ```

use distgpipe::prelude::*;
use distgpipe::tch::Tensor;
use distgpipe::zoo::{self, ModelError};
use std::{error::Error, sync::Arc};

/// y = cos(W x): name, inputs, outputs.
struct Cosine(&'static str, i64, i64);

impl Layer for Cosine {
    fn name(&self) -> &str {
        self.0
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::parameter(format!("{}.weight", self.0), &[self.2, self.1], Init::fan_in(self.1))]
    }

    fn shapes(&self, _: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(vec![SampleShape::float(&[self.2])])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: Vec<Tensor>,
        _: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        Ok(vec![x[0].f_flatten(1, -1)?.f_linear(tensors.next(), None::<&Tensor>)?.f_cos()?])
    }
}

/// Builds a model by its spec. The driver and every worker call this function, so a worker can build your own layers.
fn models(spec: &ModelSpec) -> Result<Model, ModelError> {
    match spec.name.as_str() {
        "cosines" => {
            let layers = [Cosine("in", 64, 96), Cosine("mid", 96, 96), Cosine("out", 96, 10)];
            let layers = layers.map(|layer| Arc::new(layer) as Arc<dyn Layer>).to_vec();
            Ok(Model::new(layers, vec![SampleShape::float(&[1, 8, 8])]).with_spec(spec.clone()))
        }
        _ => zoo::build(spec),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    // Turns a process that was started as a worker into one, and returns here in the driver.
    distgpipe::worker_mode(models);
    let workers = match std::env::args().nth(1) {
        Some(address) => {
            let token = std::env::var("DISTGPIPE_TOKEN").map_err(|_| "set DISTGPIPE_TOKEN to the worker's token")?;
            Workers::Remote { addresses: vec![address], token: token.parse()? }
        }
        None => Workers::processes(),
    };
    let mut pipeline = Pipeline::builder(models(&ModelSpec::new("cosines"))?)
        .balance([1, 1, 1])
        .place("client,server,client")
        .workers(workers)
        .micro_batches(4)
        .optimizer(Optim::adam())
        .build()?;
    let train = Loader::new(Digits::new(Split::Train, Default::default())?, LoaderOptions::training(64, 0))?;
    let test = Loader::new(Digits::new(Split::Test, Default::default())?, LoaderOptions::testing(100))?;
    for epoch in 0..3 {
        for batch in train.epoch(epoch) {
            pipeline.train_step(&batch?)?;
        }
        let tested = pipeline.evaluate_all(&test)?;
        println!("epoch {epoch}: loss {:.3}, accuracy {:.3}", tested.loss, tested.accuracy.unwrap_or(0.0));
    }
    Ok(())
}
