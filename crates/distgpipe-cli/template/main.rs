//! Trains a model of your own layers on your own data, cut into three partitions on two workers, `client` and `server`.
//!
//! ```text
//! cargo run                    `server` is a thread of this process
//! cargo run -- processes       `server` is a process of its own on this machine
//! cargo run -- HOST:PORT       `server` is `cargo run -- worker --listen HOST:PORT --expose` on another machine; it prints a
//!                              token, which the variable DISTGPIPE_TOKEN must hold here
//! ```

use distgpipe::prelude::*;
use distgpipe::tch::Tensor;
use distgpipe::zoo::{self, ModelError};
use std::{error::Error, f64::consts::TAU, sync::Arc};

/// A layer: y = W sin(x) + b.
struct Sine {
    name: &'static str,
    inputs: i64,
    outputs: i64,
}

impl Layer for Sine {
    fn name(&self) -> &str {
        self.name
    }

    /// The names are those of the state dict that PyTorch loads.
    fn tensors(&self) -> Vec<TensorSpec> {
        let &Sine { name, inputs, outputs } = self;
        let init = Init::fan_in(inputs);
        let weight = TensorSpec::parameter(format!("{name}.weight"), &[outputs, inputs], init);
        vec![weight, TensorSpec::parameter(format!("{name}.bias"), &[outputs], init)]
    }

    fn shapes(&self, _: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(vec![SampleShape::float(&[self.outputs])])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: Vec<Tensor>,
        _: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let (weight, bias) = (tensors.next(), tensors.next());
        Ok(vec![x[0].f_sin()?.f_linear(weight, Some(bias))?])
    }
}

/// Builds a model by its name. Workers in other processes call this too.
fn models(spec: &ModelSpec) -> Result<Model, ModelError> {
    let sine = |name, inputs, outputs| Arc::new(Sine { name, inputs, outputs }) as Arc<dyn Layer>;
    match spec.name.as_str() {
        "sines" => {
            let layers = vec![sine("first", 2, 64), sine("middle", 64, 64), sine("last", 64, 3)];
            Ok(Model::new(layers, vec![SampleShape::float(&[2])]).with_spec(spec.clone()))
        }
        _ => zoo::build(spec),
    }
}

/// Points in the plane, and the arm of the spiral that each is on. For data that does not fit into memory, implement `Dataset`.
fn spiral(rows: usize) -> Result<TensorDataset, Box<dyn Error>> {
    let (mut points, mut arms) = (Vec::new(), Vec::new());
    for row in 0..rows {
        let (arm, along) = (row % 3, row as f64 / rows as f64);
        let angle = TAU * (arm as f64 / 3.0 + 0.6 * along);
        points.extend([(3.0 * along * angle.cos()) as f32, (3.0 * along * angle.sin()) as f32]);
        arms.push(arm as i64);
    }
    Ok(TensorDataset::new(Tensor::from_slice(&points).view([-1, 2]), Tensor::from_slice(&arms))?)
}

fn main() -> Result<(), Box<dyn Error>> {
    // First: a process that was started as a worker serves, and ends here.
    distgpipe::worker_mode(models);
    distgpipe::tune_allocator();
    let workers = match std::env::args().nth(1).as_deref() {
        None => Workers::Threads,
        Some("processes") => Workers::processes(),
        Some(address) => {
            let token =
                std::env::var("DISTGPIPE_TOKEN").map_err(|_| "DISTGPIPE_TOKEN: set it to the worker's token")?;
            Workers::Remote { addresses: vec![address.to_owned()], token: token.parse()? }
        }
    };
    let mut pipeline = Pipeline::builder(models(&ModelSpec::new("sines"))?)
        .balance([1, 1, 1])
        .place("client,server,client")
        .workers(workers)
        .micro_batches(4)
        .optimizer(Optim::adam())
        .learning_rate(0.01)
        .build()?;
    let train = Loader::new(spiral(3000)?, LoaderOptions::training(100, 0))?;
    let test = Loader::new(spiral(1000)?, LoaderOptions::testing(200))?;
    for epoch in 1..=8 {
        for batch in train.epoch(epoch) {
            pipeline.train_step(&batch?)?;
        }
        let tested = pipeline.evaluate_all(&test)?;
        println!("epoch {epoch}: loss {:.4}, accuracy {:.3}", tested.loss, tested.accuracy.unwrap_or(0.0));
    }
    pipeline.save("model.safetensors")?;
    println!("saved model.safetensors");
    Ok(())
}
