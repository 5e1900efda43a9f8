//! `Pipeline::evaluate_all`: the figures of a whole loader.

mod soundness;

use distgpipe::data::{Digits, Loader, LoaderOptions, Split, TensorDataset};
use distgpipe::tch::{self, Kind, Tensor};
use distgpipe::zoo::Mlp;
use distgpipe::{Device, Loss, Pipeline};

fn pipeline() -> Pipeline {
    let model = Mlp { hidden: vec![16], ..Mlp::default() }.model().unwrap();
    Pipeline::builder(model).device(Device::Cpu).threads(1).place("a,b").micro_batches(3).build().unwrap()
}

fn digits(options: LoaderOptions) -> Loader {
    Loader::new(Digits::new(Split::Test, Default::default()).unwrap(), options).unwrap()
}

/// 360 rows in batches of 100, the last one of 60: means over batches would be other numbers.
#[test]
fn the_metrics_of_a_loader_are_those_of_all_its_rows_in_one_batch() {
    let mut pipeline = pipeline();
    pipeline.set_learning_rate(0.1);
    let steps = digits(LoaderOptions::training(40, 0)).epoch(0).map(|batch| pipeline.train_step(&batch.unwrap()));
    let losses: Vec<f64> = steps.map(|step| step.unwrap().loss).collect();
    let all = digits(LoaderOptions::testing(360)).epoch(0).next().unwrap().unwrap();
    soundness::assert_pipeline_sound("one epoch", &losses, &mut pipeline, &all);
    let expected = pipeline.evaluate(&all).unwrap();
    let summary = pipeline.evaluate_all(&digits(LoaderOptions::testing(100))).unwrap();
    assert_eq!((summary.rows, summary.batches, summary.classes), (360, 4, Some(10)));
    assert!((summary.loss - expected.loss).abs() < 1e-6, "{} and {}", summary.loss, expected.loss);
    assert_eq!(summary.accuracy, expected.accuracy());
    let counts = expected.classes.unwrap();
    assert_eq!((summary.f1, summary.matthews), (Some(counts.f1(10)), Some(counts.matthews())));
    assert!(summary.accuracy.unwrap() > 0.3, "an untrained model would pass with less: {summary:?}");
}

#[test]
fn a_regression_has_a_loss_and_no_accuracy() {
    let model = Mlp { input: vec![2], hidden: vec![4], classes: 1, dropout: 0.0 }.model().unwrap();
    let builder = Pipeline::builder(model).device(Device::Cpu).threads(1).loss(Loss::MeanSquared);
    let mut pipeline = builder.build().unwrap();
    let rows = |width| Tensor::ones([5, width], (Kind::Float, tch::Device::Cpu));
    let loader = Loader::new(TensorDataset::new(rows(2), rows(1)).unwrap(), LoaderOptions::testing(2)).unwrap();
    let summary = pipeline.evaluate_all(&loader).unwrap();
    assert_eq!((summary.rows, summary.accuracy, summary.f1, summary.matthews), (5, None, None, None));
    assert!(summary.loss.is_finite());
}
