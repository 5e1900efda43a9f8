//! A loss function and an optimizer of your own: implement two traits and attach them to the model.

use distgpipe::prelude::*;
use distgpipe::tch::{Kind, Tensor};
use std::error::Error;

/// Focal loss: cross entropy that gives less weight to rows which are already classified well.
struct FocalLoss {
    gamma: f64,
}

impl LossFunction for FocalLoss {
    fn compute(&self, output: &Tensor, target: &Tensor) -> Result<Tensor, Fault> {
        let log_p = output.f_log_softmax(-1, Kind::Float)?.f_gather(1, &target.f_unsqueeze(1)?, false)?;
        let weight = log_p.f_exp()?.f_neg()?.f_add_scalar(1.0)?.f_pow_tensor_scalar(self.gamma)?;
        Ok(weight.f_mul(&log_p)?.f_mean(Kind::Float)?.f_neg()?)
    }

    fn correct(&self, output: &Tensor, target: &Tensor) -> Result<Option<Tensor>, Fault> {
        Ok(Some(output.f_argmax(-1, false)?.f_eq_tensor(target)?.f_sum(Kind::Int64)?))
    }
}

/// Lion (Chen et al. 2023): moves each parameter by the sign of an interpolated momentum.
struct Lion {
    beta1: f64,
    beta2: f64,
}

impl UpdateRule for Lion {
    fn name(&self) -> String {
        format!("lion {} {}", self.beta1, self.beta2)
    }

    fn slots(&self) -> &[Slot] {
        &[Slot::Steps, Slot::First]
    }

    fn update(&self, p: &mut Tensor, gradient: &Tensor, state: &mut ParameterState, rate: f64) -> Result<(), Fault> {
        let momentum = state.first.get_or_insert(gradient.f_zeros_like()?);
        let direction = momentum.f_lerp(gradient, 1.0 - self.beta1)?.f_sign()?;
        let _ = p.f_sub_(&direction.f_mul_scalar(rate)?)?;
        let _ = momentum.f_lerp_(gradient, 1.0 - self.beta2)?;
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = Mlp::default().model()?;
    let model = model.with_loss(FocalLoss { gamma: 2.0 }).with_optimizer(Lion { beta1: 0.9, beta2: 0.99 });
    let mut pipeline = Pipeline::builder(model).balance([2, 2]).micro_batches(4).learning_rate(3e-4).build()?;
    let digits = |split| Digits::new(split, Default::default());
    let train = Loader::new(digits(Split::Train)?, LoaderOptions::training(64, 0))?;
    let test = Loader::new(digits(Split::Test)?, LoaderOptions::testing(100))?;
    for epoch in 0..5 {
        for batch in train.epoch(epoch) {
            pipeline.train_step(&batch?)?;
        }
        let tested = pipeline.evaluate_all(&test)?;
        println!("epoch {epoch}: loss {:.3}, accuracy {:.3}", tested.loss, tested.accuracy.unwrap_or(0.0));
    }
    Ok(())
}
