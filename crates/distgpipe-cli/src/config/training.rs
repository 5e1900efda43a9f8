//! Optimizer, loss and the options of the trainer.

use crate::args::{DecayName, MetricName, OptimizerName, TrainFlags};
use crate::exit::usage;
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::train::learning_rate::{Decay, RateSchedule};
use distgpipe::train::{Capture, TestMetric, TrainOptions};
use distgpipe::{Loss, Optim, ParameterGroup, Workers};

/// The default of `--restarts` in a run with checkpoints, and in one with workers on other hosts.
const RESTARTS: u64 = 3;

/// The options of the trainer, for a pipeline with this number of workers in each replica.
pub(super) fn options(
    flags: &TrainFlags,
    replica_workers: usize,
    workers: &Workers,
    codecs: &CodecPolicy,
) -> anyhow::Result<TrainOptions> {
    // A run without checkpoints collects its state after each epoch, which resets codecs.
    let keeps_state = matches!(workers, Workers::Remote { .. } | Workers::Servers { .. }) && !codecs.remembers();
    let epochs = flags.epochs.filter(|&epochs| epochs > 0);
    Ok(TrainOptions {
        epochs: epochs.ok_or_else(|| usage("--epochs 0: use 1 or more; --steps sets a lower limit"))?,
        steps_max: flags.steps,
        rate_schedule: rate(flags)?,
        accumulate: accumulate(flags)?,
        capture: capture(flags, replica_workers)?,
        test_every: test_every(flags)?,
        best: best(flags)?,
        patience: flags.patience,
        restarts: flags.restarts.unwrap_or(if flags.checkpoint.is_some() || keeps_state { RESTARTS } else { 0 }),
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
    if flags.fused_optimizer == Some(true) && name == OptimizerName::Rmsprop {
        return Err(usage(
            "--fused-optimizer: libtorch has no fused rmsprop: remove it, or use --optimizer sgd, adam or adamw",
        ));
    }
    let optim = match name {
        OptimizerName::Sgd => Optim::Sgd { momentum, weight_decay, nesterov },
        OptimizerName::Adam => Optim::adam().with_weight_decay(weight_decay),
        OptimizerName::Adamw => Optim::adamw().with_weight_decay(weight_decay),
        OptimizerName::Rmsprop => Optim::rms_prop(momentum).with_weight_decay(weight_decay),
    };
    Ok((optim, learning_rate))
}

/// The epochs from one test to the next.
fn test_every(flags: &TrainFlags) -> anyhow::Result<u64> {
    match flags.evaluate_every {
        Some(0) => Err(usage("--evaluate-every 0: use 1 epoch or more, or --no-evaluate")),
        Some(_) if flags.no_evaluate == Some(true) => {
            Err(usage("--evaluate-every: the run does not evaluate: remove --no-evaluate"))
        }
        every => Ok(every.unwrap_or(1)),
    }
}

/// The metric of `--save-best`. `--patience` alone compares the loss.
fn best(flags: &TrainFlags) -> anyhow::Result<Option<TestMetric>> {
    let flag = if flags.save_best.is_some() { "--save-best" } else { "--patience" };
    if flags.save_best.is_none() && flags.patience.is_none() {
        return Ok(None);
    }
    if flags.no_evaluate == Some(true) {
        return Err(usage(format!("{flag}: it compares the tests of the epochs: remove --no-evaluate")));
    }
    if flags.patience == Some(0) {
        return Err(usage("--patience 0: use 1 epoch or more"));
    }
    Ok(Some(match flags.save_best.unwrap_or(MetricName::Loss) {
        MetricName::Loss => TestMetric::Loss,
        MetricName::Accuracy => TestMetric::Accuracy,
        MetricName::F1 => TestMetric::F1,
        MetricName::Matthews => TestMetric::Matthews,
    }))
}

/// The groups of `--group`.
pub(super) fn groups(flags: &TrainFlags) -> anyhow::Result<Vec<ParameterGroup>> {
    flags.group.iter().map(|text| group(text).map_err(|why| usage(format!("--group {text}: {why}")))).collect()
}

fn group(text: &str) -> Result<ParameterGroup, String> {
    let form = "expected PATTERN:SETTING[,SETTING], such as '*.bias:weight-decay=0' or 'features.*:lr-factor=0.1'";
    let (pattern, settings) = text.rsplit_once(':').ok_or(form)?;
    let mut group = ParameterGroup::new(pattern.trim());
    for setting in settings.split(',') {
        let (key, value) = setting.split_once('=').ok_or(form)?;
        let number: f64 = value.trim().parse().map_err(|_| format!("`{setting}`: expected a number of at least 0"))?;
        group = match key.trim() {
            "lr-factor" => group.rate_factor(number),
            "weight-decay" => group.weight_decay(number),
            "lr" => return Err(format!("`{setting}`: use lr-factor, which multiplies the rate of --lr")),
            _ => return Err(format!("`{setting}`: expected lr-factor=X or weight-decay=X")),
        };
    }
    Ok(group)
}

/// The patterns of `--freeze`.
pub(super) fn frozen(flags: &TrainFlags) -> impl Iterator<Item = &str> {
    flags.freeze.iter().flat_map(|list| list.split(',')).map(str::trim)
}

fn rate(flags: &TrainFlags) -> anyhow::Result<RateSchedule> {
    let name = flags.lr_decay.unwrap_or(DecayName::Constant);
    let given = [("--lr-steps", flags.lr_steps.is_some()), ("--lr-factor", flags.lr_factor.is_some())];
    if let Some((flag, _)) = given.iter().find(|(_, given)| *given && name != DecayName::Steps) {
        return Err(usage(format!("{flag}: it applies to --lr-decay steps only: remove it, or use --lr-decay steps")));
    }
    let decay = match (name, flags.lr_power) {
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
        (DecayName::Steps, None) => steps(flags)?,
    };
    Ok(RateSchedule { decay, warm_up: flags.lr_warm_up.unwrap_or_default() })
}

fn steps(flags: &TrainFlags) -> anyhow::Result<Decay> {
    let Some(text) = &flags.lr_steps else {
        return Err(usage("--lr-decay steps: add --lr-steps EPOCH,…, such as --lr-steps 30,60,80"));
    };
    let epochs: Result<Vec<u64>, _> = text.split(',').map(|epoch| epoch.trim().parse()).collect();
    let epochs = epochs.ok().filter(|epochs| epochs.iter().all(|&epoch| epoch > 0));
    let factor = flags.lr_factor.unwrap_or(0.1);
    if !(factor.is_finite() && factor >= 0.0) {
        return Err(usage(format!("--lr-factor {factor}: expected a number of at least 0")));
    }
    match epochs {
        Some(epochs) => Ok(Decay::Steps { epochs, factor }),
        None => Err(usage(format!("--lr-steps {text}: expected epochs from 1 on, such as 30,60,80"))),
    }
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
