//! A loss function and an optimizer that the library does not know: they train as built-in ones do, over every transport that can
//! carry a model of one's own, and checkpoints restore their state.

mod soundness;

use distgpipe::prelude::*;
use distgpipe::tch::{Device, Kind, Reduction, Tensor};
use distgpipe::{BuildError, StepError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Cross entropy, written as a user would.
struct OwnCrossEntropy;

impl LossFunction for OwnCrossEntropy {
    fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        Ok(output.f_cross_entropy_loss(target, None::<&Tensor>, Reduction::Mean, -100, 0.0)?)
    }
}

/// SGD with momentum, in the operations and the order of the built-in one.
struct OwnMomentum {
    momentum: f64,
}

impl UpdateRule for OwnMomentum {
    fn name(&self) -> String {
        format!("own momentum {}", self.momentum)
    }

    fn slots(&self) -> &[Slot] {
        &[Slot::Steps, Slot::First]
    }

    fn update(&self, p: &mut Tensor, gradient: &Tensor, state: &mut ParameterState, rate: f64) -> Result<(), Fault> {
        let buffer = match state.first.take() {
            Some(mut buffer) => buffer.f_mul_scalar_(self.momentum)?.f_add_(gradient)?,
            None => gradient.f_add_scalar(0.0)?,
        };
        let _ = p.f_add_(&buffer.f_mul_scalar(-rate)?)?;
        state.first = Some(buffer);
        Ok(())
    }
}

fn mlp() -> Model {
    Mlp::default().model().unwrap()
}

fn own() -> Model {
    mlp().with_loss(OwnCrossEntropy).with_optimizer(OwnMomentum { momentum: 0.9 })
}

fn builder(model: Model, sizes: &[usize]) -> Builder {
    Pipeline::builder(model)
        .balance(sizes)
        .micro_batches(4)
        .learning_rate(0.1)
        .threads(1)
        .device(distgpipe::Device::Cpu)
}

fn loader() -> Loader {
    Loader::new(Arc::new(Digits::new(Split::Train, Default::default()).unwrap()), LoaderOptions::training(64, 3))
        .unwrap()
}

fn losses(pipeline: &mut Pipeline, steps: usize) -> Vec<u64> {
    loader().epoch(0).take(steps).map(|batch| pipeline.train_step(&batch.unwrap()).unwrap().loss.to_bits()).collect()
}

#[test]
fn own_ones_train_bit_for_bit_as_the_built_in_ones() {
    let mut built_in = builder(mlp(), &[2, 2]).optimizer(Optim::sgd(0.9)).loss(Loss::CrossEntropy).build().unwrap();
    let mut ours = builder(own(), &[1, 2, 1]).build().unwrap();
    let (expected, got) = (losses(&mut built_in, 22), losses(&mut ours, 22));
    assert_eq!(got, expected);
    let losses: Vec<f64> = got.into_iter().map(f64::from_bits).collect();
    let (expected, got) = (built_in.state().unwrap(), ours.state().unwrap());
    soundness::assert_sound("own loss and optimizer", &losses, &got);
    for (name, tensor) in expected {
        assert!(tensor.equal(&got[&name]), "{name}");
    }
}

/// The loss of this test is its own derivative's check: mean absolute error, whose gradient is ±1/n.
#[test]
fn the_gradient_is_that_of_the_own_loss() {
    struct MeanAbsolute;
    impl LossFunction for MeanAbsolute {
        fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
            Ok(output.f_sub(target)?.f_abs()?.f_mean(Kind::Float)?)
        }
    }
    let model = Mlp { input: vec![4], hidden: vec![], classes: 2, dropout: 0.0 }.model().unwrap();
    let mut pipeline = builder(model.with_loss(MeanAbsolute), &[1]).build().unwrap();
    let rows = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
    // A target far above every output: each output's gradient is -1/16 in the mean over 8 rows of 2.
    let batch = Batch::new(rows, Tensor::full([8, 2], 100.0, (Kind::Float, Device::Cpu)));
    let (outcome, gradients) = pipeline.gradients(&batch).unwrap();
    let bias = Vec::<f32>::try_from(&gradients["layers.0.bias"]).unwrap();
    assert_eq!(bias, [-0.5, -0.5]);
    assert!(outcome.correct.is_none(), "the loss is not about classes");
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("distgpipe-own-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn train(model: Model, sizes: &[usize], folder: &Path, until: u64) -> Result<Vec<u64>, String> {
    let mut pipeline = builder(model, sizes).build().unwrap();
    let checkpoints = Checkpoints::open(folder, 2).unwrap();
    let options = TrainOptions { steps_max: Some(until), ..TrainOptions::default() };
    let mut trainer = Trainer::new(&mut pipeline, loader(), None, options).unwrap().save_to(
        &checkpoints,
        SaveEvery::Steps(5),
        serde_json::Value::Null,
    );
    if let (Some(newest), _) = checkpoints.newest().unwrap() {
        trainer = trainer.resume(&newest).map_err(|e| e.to_string())?;
    }
    let mut losses = Vec::new();
    let run = trainer.run(|event, _| {
        if let Event::StepDone(done) = event {
            losses.push(done.outcome.loss.to_bits());
        }
        Ok(())
    });
    run.map(|_| losses).map_err(|e| e.to_string())
}

#[test]
fn a_checkpoint_restores_the_state_of_an_own_optimizer_and_refuses_another() {
    let (stopped, whole) = (Folder::new("stopped"), Folder::new("whole"));
    train(own(), &[2, 2], &stopped.0, 5).unwrap();
    let refused = train(own().with_optimizer(OwnMomentum { momentum: 0.5 }), &[2, 2], &stopped.0, 10).unwrap_err();
    assert!(refused.contains("own momentum 0.9") && refused.contains("own momentum 0.5"), "{refused}");
    let refused = train(mlp(), &[2, 2], &stopped.0, 10).unwrap_err();
    assert!(refused.contains("optimizer"), "{refused}");
    let resumed = train(own(), &[1, 3], &stopped.0, 10).unwrap();
    let expected = train(own(), &[2, 2], &whole.0, 10).unwrap();
    assert_eq!(resumed, expected[5..]);
}

#[test]
fn a_loss_or_optimizer_that_is_set_twice_is_refused() {
    let twice = builder(own(), &[2, 2]).optimizer(Optim::adam()).build().err().unwrap();
    assert!(matches!(twice, BuildError::SetTwice { what: "optimizer", .. }), "{twice}");
    let twice = builder(own(), &[2, 2]).loss(Loss::MeanSquared).build().err().unwrap();
    assert!(matches!(twice, BuildError::SetTwice { what: "loss", .. }), "{twice}");
}

/// An error of the loss names the worker that has the last partition.
#[test]
fn an_error_of_an_own_loss_fails_the_run() {
    struct Broken;
    impl LossFunction for Broken {
        fn compute(&self, _: &Tensor, _: &Tensor) -> Result<Tensor, Fault> {
            Err(Fault::layer("loss", "this loss is broken"))
        }
    }
    let mut pipeline = builder(mlp().with_loss(Broken), &[2, 2]).place("a,b").build().unwrap();
    let batch = loader().epoch(0).next().unwrap().unwrap();
    let Err(StepError::Failed(failure)) = pipeline.train_step(&batch) else { panic!("the step must fail") };
    assert!(failure.worker == "b" && failure.message.contains("this loss is broken"), "{failure}");
}
