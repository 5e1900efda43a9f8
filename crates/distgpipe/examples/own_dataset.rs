//! A data set of your own: points in the plane, labelled by the arm of the spiral they are on.

use distgpipe::prelude::*;
use distgpipe::tch::Tensor;
use std::{error::Error, f64::consts::TAU};

const ARMS: usize = 3;

struct Spiral {
    rows: usize,
    input: Vec<SampleShape>,
}

impl Spiral {
    fn new(rows: usize) -> Self {
        Spiral { rows, input: vec![SampleShape::float(&[2])] }
    }

    /// A point and its arm. A row must look the same whenever it is asked for.
    fn point(&self, row: usize) -> ([f32; 2], i64) {
        let (arm, along) = (row % ARMS, row as f64 / self.rows as f64);
        let angle = TAU * (arm as f64 / ARMS as f64 + 0.6 * along);
        ([(along * angle.cos()) as f32, (along * angle.sin()) as f32], arm as i64)
    }
}

impl Dataset for Spiral {
    fn len(&self) -> usize {
        self.rows
    }

    fn classes(&self) -> Option<usize> {
        Some(ARMS)
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    /// The loader chooses the rows and calls this ahead of time on a background thread.
    fn batch(&self, rows: &[usize], _: LoadPass<'_>) -> Result<Batch, DataError> {
        let (points, arms): (Vec<[f32; 2]>, Vec<i64>) = rows.iter().map(|&row| self.point(row)).unzip();
        let input = Tensor::f_from_slice(&points.concat())?.f_view([rows.len() as i64, 2])?;
        Ok(Batch::new(input, Tensor::f_from_slice(&arms)?))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = Mlp { input: vec![2], hidden: vec![64, 64], classes: ARMS as i64, dropout: 0.0 }.model()?;
    let mut pipeline = Pipeline::builder(model)
        .balance([1, 1, 1])
        .micro_batches(4)
        .optimizer(Optim::adam())
        .learning_rate(0.01)
        .build()?;
    let train = Loader::new(Spiral::new(3000), LoaderOptions::training(100, 0))?;
    let test = Loader::new(Spiral::new(1000), LoaderOptions::testing(300))?;
    for epoch in 0..5 {
        for batch in train.epoch(epoch) {
            pipeline.train_step(&batch?)?;
        }
        println!("epoch {epoch}: accuracy {:.3}", pipeline.evaluate_all(&test)?.accuracy.unwrap_or(0.0));
    }
    Ok(())
}
