//! The values of flags that were not given.

use super::{CodecChoice, DataName, DecayName, OptimizerName, TrainFlags};
use distgpipe::engine::{Device, Devices};
use distgpipe::{GraphMode, GraphOptions, PhaseTiming, Precision, Reduce, Tf32};
use distgpipe_core::schedule::{Recompute, Schedule};

impl TrainFlags {
    /// The defaults that do not depend on other flags or on the machine: those of the optimizer are added by
    /// [`or_defaults`](Self::or_defaults), the number of threads by [`crate::compute`].
    pub fn defaults() -> Self {
        TrainFlags {
            model: Some("mlp".to_owned()),
            data: Some(DataName::Digits),
            workers: Some("threads".to_owned()),
            replicas: Some(1),
            reduce: Some(Reduce::Ring),
            chunks: Some(4),
            schedule: Some(Schedule::OneFOneB),
            recompute: Some(Recompute::Never),
            timeout: Some(300.0),
            codec: Some(CodecChoice::default()),
            device: Some(Device::Auto.into()),
            precision: Some(Precision::Fp32),
            tf32: Some(Tf32::Convolutions),
            graphs: Some(GraphMode::Auto),
            phases: Some(PhaseTiming::Launch),
            seed: Some(0),
            optimizer: Some(OptimizerName::Sgd),
            lr_decay: Some(DecayName::Constant),
            accumulate: Some(1),
            batch: Some(64),
            epochs: Some(5),
            ..TrainFlags::default()
        }
    }

    /// The devices of the workers, by default `auto`.
    pub fn devices(&self) -> Devices {
        self.device.clone().unwrap_or_else(|| Device::Auto.into())
    }

    /// How workers on GPUs use CUDA graphs.
    pub fn graph_options(&self) -> GraphOptions {
        GraphOptions { mode: self.graphs.unwrap_or_default(), streams: self.graph_streams }
    }

    /// These flags, with the defaults of those that were not given.
    pub fn or_defaults(&self) -> anyhow::Result<Self> {
        let mut defaults = Self::defaults();
        if self.plan.is_some() {
            // The plan contains its own schedule.
            (defaults.chunks, defaults.schedule, defaults.recompute) = (None, None, None);
        }
        if self.sortquant == Some(true) {
            defaults.codec = None;
        }
        // Set before overlaying: an optimizer that the user chose would drop these defaults as another's.
        defaults.optimizer = self.optimizer.or(defaults.optimizer);
        match defaults.optimizer {
            Some(OptimizerName::Adam) => (defaults.lr, defaults.weight_decay) = (Some(1e-3), Some(0.0)),
            Some(OptimizerName::Adamw) => {
                (defaults.lr, defaults.weight_decay) = (Some(1e-3), Some(0.01));
            }
            Some(OptimizerName::Rmsprop) => {
                (defaults.lr, defaults.weight_decay) = (Some(0.01), Some(0.0));
                defaults.momentum = Some(0.0);
            }
            Some(OptimizerName::Sgd) | None => {
                (defaults.lr, defaults.weight_decay) = (Some(0.05), Some(0.0));
                defaults.momentum = Some(0.9);
            }
        }
        defaults.overlaid(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in docs/training.md. A bug once replaced these learning rates by 0.
    #[test]
    fn every_optimizer_has_its_own_defaults() {
        let of = |flags: &TrainFlags| {
            let flags = flags.or_defaults().unwrap();
            (flags.lr, flags.weight_decay, flags.momentum)
        };
        for (optimizer, expected) in [
            (None, (Some(0.05), Some(0.0), Some(0.9))),
            (Some(OptimizerName::Sgd), (Some(0.05), Some(0.0), Some(0.9))),
            (Some(OptimizerName::Adam), (Some(1e-3), Some(0.0), None)),
            (Some(OptimizerName::Adamw), (Some(1e-3), Some(0.01), None)),
            (Some(OptimizerName::Rmsprop), (Some(0.01), Some(0.0), Some(0.0))),
        ] {
            assert_eq!(of(&TrainFlags { optimizer, ..TrainFlags::default() }), expected, "{optimizer:?}");
            // The learning rate of an overridden optimizer is dropped with it.
            let below = TrainFlags {
                optimizer: Some(OptimizerName::Sgd),
                lr: Some(0.3),
                momentum: Some(0.5),
                ..TrainFlags::default()
            };
            let flags = below.overlaid(&TrainFlags { optimizer, ..TrainFlags::default() }).unwrap();
            let expected = match optimizer {
                None | Some(OptimizerName::Sgd) => (Some(0.3), Some(0.0), Some(0.5)),
                _ => expected,
            };
            assert_eq!(of(&flags), expected, "{optimizer:?} over sgd");
        }
    }
}
