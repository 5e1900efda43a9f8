//! Layers of your own, trained through a pipeline: say what they hold, what shapes they make, and how they compute.

use distgpipe::data::{digits::Part, Digits, Loader, LoaderOptions};
use distgpipe::failure::Fault;
use distgpipe::tch::Tensor;
use distgpipe::trainer::{Event, TrainOptions, Trainer};
use distgpipe::{Context, Init, Layer, Model, Own, Pipeline, SampleShape, ShapeError, SkipShapes, TensorSpec};
use std::sync::Arc;

/// y = tanh(W x + b), with dropout in training.
struct Tanh {
    name: String,
    from: i64,
    to: i64,
}

impl Layer for Tanh {
    fn name(&self) -> &str {
        &self.name
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let init = Init::fan_in(self.from);
        let named = |part: &str| format!("{}.{part}", self.name);
        vec![
            TensorSpec::parameter(named("weight"), &[self.to, self.from], init),
            TensorSpec::parameter(named("bias"), &[self.to], init),
        ]
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        match &input[..] {
            [x] if x.dims.iter().product::<i64>() == self.from => Ok(vec![SampleShape::float(&[self.to])]),
            _ => Err(ShapeError { layer: self.name.clone(), expected: format!("{} values", self.from), got: input }),
        }
    }

    fn forward(&self, own: &mut Own<'_>, input: Vec<Tensor>, context: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
        let (weight, bias) = (own.next(), own.next());
        let y = input[0].f_flatten(1, -1)?.f_linear(weight, Some(bias))?.f_tanh()?;
        Ok(vec![context.dropout(y, 0.1)?])
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let layer = |name: &str, from, to| Arc::new(Tanh { name: name.to_owned(), from, to }) as Arc<dyn Layer>;
    let layers = vec![layer("first", 64, 96), layer("second", 96, 96), layer("last", 96, 10)];
    let model = Model::new(layers, vec![SampleShape::float(&[1, 8, 8])]);
    let mut pipeline = Pipeline::builder(model).balance([1, 1, 1]).place("a,b,a").micro_batches(4).build()?;
    let train = Loader::new(Arc::new(Digits::new(Part::Train, Default::default())?), LoaderOptions::training(64, 0))?;
    let test = Loader::new(Arc::new(Digits::new(Part::Test, Default::default())?), LoaderOptions::testing(64))?;
    let options = TrainOptions { epochs: 8, learning_rate: 0.1, ..TrainOptions::default() };
    Trainer::new(&mut pipeline, train, Some(test), options)?.run(&mut |event: &Event<'_>| {
        if let Event::EpochDone(epoch) = event {
            println!("epoch {}: test accuracy {:.1} %", epoch.epoch, 100.0 * epoch.test_accuracy.unwrap_or(0.0));
        }
        Ok(())
    })?;
    Ok(())
}
