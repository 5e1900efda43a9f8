//! Layers of your own: declare their tensors, the shapes they make, and how they compute.

use distgpipe::prelude::*;
use distgpipe::tch::Tensor;
use std::{error::Error, sync::Arc};

/// y = tanh(W x), with dropout in training: name, inputs, outputs.
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

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        match &input[..] {
            [x] if x.dims.iter().product::<i64>() == self.1 => Ok(vec![SampleShape::float(&[self.2])]),
            _ => Err(ShapeError { layer: self.0.to_owned(), expected: format!("{} values", self.1), got: input }),
        }
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let y = x[0].f_flatten(1, -1)?.f_linear(tensors.next(), None::<&Tensor>)?;
        Ok(vec![context.dropout(y.f_tanh()?, 0.1)?])
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let layers = [Tanh("in", 64, 96), Tanh("mid", 96, 96), Tanh("out", 96, 10)];
    let layers = layers.map(|layer| Arc::new(layer) as Arc<dyn Layer>);
    let model = Model::new(layers.to_vec(), vec![SampleShape::float(&[1, 8, 8])]);
    let pipeline = Pipeline::builder(model).balance([1, 1, 1]).place("a,b,a");
    let mut pipeline = pipeline.micro_batches(4).learning_rate(0.1).build()?;
    let digits = |split| Digits::new(split, Default::default());
    let train = Loader::new(digits(Split::Train)?, LoaderOptions::training(64, 0))?;
    let test = Loader::new(digits(Split::Test)?, LoaderOptions::testing(100))?;
    for epoch in 0..8 {
        for batch in train.epoch(epoch) {
            pipeline.train_step(&batch?)?;
        }
        let tested = pipeline.evaluate_all(&test)?;
        println!("epoch {epoch}: accuracy {:.3}", tested.accuracy.unwrap_or(0.0));
    }
    Ok(())
}
