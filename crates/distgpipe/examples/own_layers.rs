//! Layers of your own: say what they hold, what shapes they make, and how they compute.

use distgpipe::data::{digits::Part, Digits, Loader, LoaderOptions};
use distgpipe::{failure::Fault, tch::Tensor};
use distgpipe::{Context, Init, Layer, Model, Own, Pipeline, TensorSpec};
use distgpipe::{SampleShape as Shape, ShapeError, SkipShapes};
use std::{error::Error, sync::Arc};

/// y = tanh(W x), with dropout in training: name, numbers in, numbers out.
struct Tanh(&'static str, i64, i64);

impl Layer for Tanh {
    fn name(&self) -> &str {
        self.0
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let &Tanh(name, from, to) = self;
        let init = Init::fan_in(from);
        vec![TensorSpec::parameter(format!("{name}.weight"), &[to, from], init)]
    }

    fn shapes(&self, input: Vec<Shape>, _: &mut SkipShapes) -> Result<Vec<Shape>, ShapeError> {
        match &input[..] {
            [x] if x.dims.iter().product::<i64>() == self.1 => Ok(vec![Shape::float(&[self.2])]),
            _ => Err(ShapeError { layer: self.0.to_owned(), expected: format!("{} numbers", self.1), got: input }),
        }
    }

    fn forward(&self, own: &mut Own<'_>, x: Vec<Tensor>, context: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
        let y = x[0].f_flatten(1, -1)?.f_linear(own.next(), None::<&Tensor>)?;
        Ok(vec![context.dropout(y.f_tanh()?, 0.1)?])
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let layers = [Tanh("in", 64, 96), Tanh("mid", 96, 96), Tanh("out", 96, 10)];
    let layers = layers.map(|layer| Arc::new(layer) as Arc<dyn Layer>);
    let model = Model::new(layers.to_vec(), vec![Shape::float(&[1, 8, 8])]);
    let pipeline = Pipeline::builder(model).balance([1, 1, 1]);
    let mut pipeline = pipeline.place("a,b,a").micro_batches(4).build()?;
    pipeline.set_learning_rate(0.1);
    let digits = |part| Digits::new(part, Default::default()).map(Arc::new);
    let train = Loader::new(digits(Part::Train)?, LoaderOptions::training(64, 0))?;
    let test = Loader::new(digits(Part::Test)?, LoaderOptions::testing(360))?;
    for epoch in 0..8 {
        for batch in train.epoch(epoch) {
            pipeline.train_step(&batch?)?;
        }
        let whole = test.epoch(0).next().ok_or("no test data")??;
        let tested = pipeline.evaluate(&whole)?;
        println!("epoch {epoch}: {:.3} right", tested.accuracy().unwrap_or(0.0));
    }
    Ok(())
}
