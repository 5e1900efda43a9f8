//! Optimizer, loss and the options of the trainer.

use crate::args::{DecayName, OptimizerName, TrainFlags};
use crate::exit::usage;
use distgpipe::train::learning_rate::{Decay, RateSchedule};
use distgpipe::train::{Capture, TrainOptions};
use distgpipe::{Loss, Optim};

/// The options of the trainer, for a pipeline of so many workers in each replica.
pub(super) fn options(flags: &TrainFlags, workers: usize) -> anyhow::Result<TrainOptions> {
    let epochs = flags.epochs.filter(|&epochs| epochs > 0);
    Ok(TrainOptions {
        epochs: epochs.ok_or_else(|| usage("--epochs 0: use 1 or more; --steps sets a lower limit"))?,
        steps_max: flags.steps,
        rate_schedule: rate(flags)?,
        accumulate: accumulate(flags)?,
        capture: capture(flags, workers)?,
        ..TrainOptions::default()
    })
}

/// The optimizer and its learning rate.
pub(super) fn optimizer(flags: &TrainFlags) -> anyhow::Result<(Optim, f64)> {
    let name = flags.optimizer.unwrap_or(OptimizerName::Sgd);
    // Every optimizer has a default. Were it missing, a rate of 0 would train nothing without an error.
    let learning_rate = flags.lr.ok_or_else(|| usage("--lr: expected a learning rate, got none"))?;
    let learning_rate = within("--lr", Some(learning_rate), 1e3)?;
    let weight_decay = within("--weight-decay", flags.weight_decay, 1.0)?;
    let momentum = within("--momentum", flags.momentum, 1.0)?;
    if flags.momentum.is_some() && matches!(name, OptimizerName::Adam | OptimizerName::Adamw) {
        let name = name.name();
        return Err(usage(format!("--momentum: {name} has no momentum: remove it, or use --optimizer sgd or rmsprop")));
    }
    let nesterov = flags.nesterov == Some(true);
    if nesterov && (name != OptimizerName::Sgd || momentum == 0.0) {
        return Err(usage("--nesterov: it needs sgd with momentum: use --optimizer sgd and --momentum above 0"));
    }
    let optim = match name {
        OptimizerName::Sgd => Optim::Sgd { momentum, weight_decay, nesterov },
        OptimizerName::Adam => Optim::adam().with_weight_decay(weight_decay),
        OptimizerName::Adamw => Optim::adamw().with_weight_decay(weight_decay),
        OptimizerName::Rmsprop => Optim::rms_prop(momentum).with_weight_decay(weight_decay),
    };
    Ok((optim, learning_rate))
}

fn rate(flags: &TrainFlags) -> anyhow::Result<RateSchedule> {
    let decay = match (flags.lr_decay.unwrap_or(DecayName::Constant), flags.lr_power) {
        (DecayName::Polynomial, power) => {
            let power = power.unwrap_or(2.0);
            if !(power.is_finite() && power > 0.0) {
                return Err(usage(format!("--lr-power {power}: expected a number above 0")));
            }
            Decay::Polynomial { power }
        }
        (_, Some(_)) => {
            return Err(usage(
                "--lr-power: it applies to the polynomial decay only: remove it, or use --lr-decay polynomial",
            ));
        }
        (DecayName::Constant, None) => Decay::Constant,
        (DecayName::Cosine, None) => Decay::Cosine,
        (DecayName::Linear, None) => Decay::Linear,
    };
    Ok(RateSchedule { decay, warm_up: flags.lr_warm_up.unwrap_or_default() })
}

/// The loss, with `--label-smoothing`.
pub(super) fn smoothed(loss: Loss, flags: &TrainFlags) -> anyhow::Result<Loss> {
    match (loss, flags.label_smoothing) {
        (loss, None) => Ok(loss),
        (Loss::CrossEntropy, Some(0.0)) => Ok(Loss::CrossEntropy),
        (Loss::CrossEntropy, Some(share)) if share > 0.0 && share < 1.0 => {
            Ok(Loss::SmoothedCrossEntropy { label_smoothing: share })
        }
        (Loss::CrossEntropy, Some(share)) => {
            Err(usage(format!("--label-smoothing {share}: expected a number from 0 to below 1")))
        }
        (_, Some(_)) => Err(usage("--label-smoothing: this model predicts no classes: remove it")),
    }
}

fn accumulate(flags: &TrainFlags) -> anyhow::Result<u64> {
    match flags.accumulate.unwrap_or(1) {
        0 => Err(usage("--accumulate 0: use 1 to update the parameters after each batch")),
        batches => Ok(batches),
    }
}

pub(super) fn clip_norm(flags: &TrainFlags) -> anyhow::Result<Option<f64>> {
    match flags.clip_norm {
        Some(norm) if !(norm.is_finite() && norm > 0.0) => {
            Err(usage(format!("--clip-norm {norm}: expected a number above 0; leave it out to turn clipping off")))
        }
        norm => Ok(norm),
    }
}

/// The number of a flag, which must be from 0 to `max`.
fn within(flag: &str, value: Option<f64>, max: f64) -> anyhow::Result<f64> {
    let value = value.unwrap_or_default();
    if value.is_finite() && (0.0..=max).contains(&value) {
        Ok(value)
    } else {
        Err(usage(format!("{flag} {value}: expected a number from 0 to {max}")))
    }
}

fn capture(flags: &TrainFlags, workers: usize) -> anyhow::Result<Capture> {
    if flags.capture.is_some() && workers == 1 {
        return Err(usage("--capture: with one worker, nothing crosses between partitions: cut the model with --partitions or --balance"));
    }
    match (&flags.capture, flags.capture_step) {
        (None, None) => Ok(Capture::Nothing),
        (None, Some(_)) => Err(usage("--capture-step: add --capture DIR, the directory to save the step to")),
        (Some(_), None) => Ok(Capture::LastStep),
        (Some(_), Some(0)) => Err(usage("--capture-step 0: steps are counted from 1")),
        (Some(_), Some(step)) => Ok(Capture::Step(step - 1)),
    }
}
