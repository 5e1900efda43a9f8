//! Running statistics after a step are those of one pass over the whole batch, whatever the number of micro-batches.

mod soundness;

use distgpipe::model::blocks::BatchNorm2d;
use distgpipe::model::layer::{Context, LayerTensors};
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{
    Batch, Layer, Loss, Model, Optim, Pipeline, Recompute, SampleShape, ShapeError, SkipShapes, TensorSpec,
};
use std::sync::Arc;

struct Norm;

impl Layer for Norm {
    fn name(&self) -> &str {
        "norm"
    }
    fn tensors(&self) -> Vec<TensorSpec> {
        BatchNorm2d { channels: 3 }.tensors("norm")
    }
    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(input)
    }
    fn forward(
        &self,
        own: &mut LayerTensors<'_>,
        x: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, distgpipe::failure::Fault> {
        Ok(vec![BatchNorm2d { channels: 3 }.forward(own, &x[0], context)?])
    }
}

/// Three steps of data around a mean.
fn batches(rows: i64, side: i64, mean: f64) -> Vec<Tensor> {
    (0..3)
        .map(|i| {
            let n = rows * 3 * side * side;
            let wave = (Tensor::arange(n, (Kind::Float, Device::Cpu)) * (1.0 + f64::from(i))).sin();
            wave.view([rows, 3, side, side]) + mean
        })
        .collect()
}

fn run((rows, side, around): (i64, i64, f64), micro_batches: usize, recompute: Recompute) {
    let shape = SampleShape::float(&[3, side, side]);
    let model = Model::new(vec![Arc::new(Norm)], vec![shape]);
    let mut pipeline = Pipeline::builder(model)
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .micro_batches(micro_batches)
        .recompute(recompute)
        .loss(Loss::MeanSquared)
        .optimizer(Optim::sgd(0.0))
        .learning_rate(0.0)
        .build()
        .unwrap();
    let (mean, var) = (Tensor::zeros([3], (Kind::Double, Device::Cpu)), Tensor::ones([3], (Kind::Double, Device::Cpu)));
    let (mut losses, mut last) = (Vec::new(), None);
    for x in batches(rows, side, around) {
        // PyTorch's own rule on the whole batch, in double precision.
        let _ =
            x.to_kind(Kind::Double).batch_norm(None::<&Tensor>, None, Some(&mean), Some(&var), true, 0.1, 1e-5, false);
        let batch = Batch::new(x.shallow_clone(), x.zeros_like());
        losses.push(pipeline.train_step(&batch).unwrap().loss);
        last = Some(batch);
    }
    let what = format!("{rows} rows, {side}², {micro_batches} micro-batches, {recompute}");
    soundness::assert_pipeline_sound(&what, &losses, &mut pipeline, &last.unwrap());
    let state = pipeline.state().unwrap();
    for (name, expected) in [("norm.running_mean", mean), ("norm.running_var", var)] {
        let gap = ((state[name].to_kind(Kind::Double) - &expected) / &expected).abs().max();
        // Float32 inputs and per-micro-batch means allow six digits.
        assert!(f64::try_from(&gap).unwrap() < 2e-6, "{what}: {name} {:?} against {expected:?}", state[name]);
    }
    assert_eq!(i64::try_from(&state["norm.num_batches_tracked"]).unwrap(), 3, "{what}");
}

#[test]
fn running_statistics_do_not_depend_on_the_number_of_micro_batches() {
    for micro_batches in [1, 2, 3, 5, 7, 12] {
        for recompute in [Recompute::Never, Recompute::ExceptLast, Recompute::Always] {
            // A mean far larger than the spread, where E[x²] − mean² would cancel.
            run((12, 4, 1000.0), micro_batches, recompute);
        }
    }
    // More than are gathered before they are merged.
    for micro_batches in [16, 17, 33, 40] {
        run((40, 4, 1000.0), micro_batches, Recompute::Always);
    }
}

/// A single value of a channel is normalised to 0, whatever it is, so that nothing is learned from it: PyTorch refuses it
/// too. It takes one micro-batch of several to have one.
#[test]
fn a_micro_batch_with_one_value_per_channel_is_rejected() {
    for (rows, micro_batches, fine) in [(4, 4, false), (3, 2, false), (4, 2, true)] {
        let model = Model::new(vec![Arc::new(Norm)], vec![SampleShape::float(&[3, 1, 1])]);
        let builder = Pipeline::builder(model)
            .device(distgpipe::engine::Device::Cpu)
            .threads(1)
            .micro_batches(micro_batches)
            .loss(Loss::MeanSquared);
        let mut pipeline = builder.build().unwrap();
        let x = batches(rows, 1, 1.0).remove(0);
        let batch = Batch::new(x.shallow_clone(), x.zeros_like());
        pipeline.evaluate(&batch).unwrap();
        match pipeline.train_step(&batch) {
            Ok(outcome) => {
                assert!(fine, "{rows} rows in {micro_batches}");
                soundness::assert_pipeline_sound("a norm", &[outcome.loss], &mut pipeline, &batch);
            }
            Err(error) => {
                let said = error.to_string();
                assert!(!fine && said.contains("more than one value of each channel") && said.contains("[1, 3, 1, 1]"));
            }
        }
    }
}
