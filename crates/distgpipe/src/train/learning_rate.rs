//! Learning rate schedules: linear warm-up, then decay.
//!
//! ```text
//!   1 ┤    ╭──╮           decay: constant stays at 1, linear falls in a straight line, cosine along half a cosine,
//!     │   ╱    ╲          polynomial as (fraction left)^power; steps multiply it after some epochs
//!     │  ╱      ╲
//!   0 ┤ ╱        ╲
//!     └─┴───┴─────┴──► updates
//!       warm-up   all
//! ```
//!
//! The factor depends only on the number of the update, on the number of all updates and on the updates of an epoch. So
//! there is nothing to save, and a resumed run has the rates that it would have had without the interruption. The formulas
//! are those of Hugging Face's `get_*_schedule_with_warmup`, with 0 as the end of the polynomial, and of PyTorch's
//! `MultiStepLR`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// How the learning rate changes after the warm-up.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Decay {
    /// The rate stays constant.
    #[default]
    Constant,
    /// The rate falls to 0 along half a cosine.
    Cosine,
    /// The rate falls to 0 in a straight line.
    Linear,
    /// The rate falls to 0 as a power of the fraction of updates left.
    Polynomial {
        /// The exponent: 1 is linear, larger ones fall sooner.
        power: f64,
    },
    /// The rate is multiplied by `factor` when each of these epochs ends. Epochs count from the start of the run, with the
    /// warm-up, and may be in any order.
    Steps {
        /// How many epochs are over at each step.
        epochs: Vec<u64>,
        /// What the rate is multiplied by.
        factor: f64,
    },
    /// A function of your own; see [`RateSchedule::custom`].
    Custom(RateFunction),
}

/// A function from the number of an update, counted from 0, and the number of all updates to the factor of the learning
/// rate.
#[derive(Clone)]
pub struct RateFunction(Arc<dyn Fn(u64, u64) -> f64 + Send + Sync>);

impl fmt::Debug for RateFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// Equal if they are the same function.
impl PartialEq for RateFunction {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// How long the learning rate rises from 0 in a straight line. Written as `500`, `6%` or `4epochs`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "Written")]
pub enum WarmUp {
    /// The rate rises for this many updates.
    Updates(u64),
    /// The rate rises for this fraction of all updates, from 0 to 1, rounded up to whole ones.
    Share(f64),
    /// The rate rises for this many epochs.
    Epochs(u64),
}

impl Default for WarmUp {
    fn default() -> Self {
        WarmUp::Updates(0)
    }
}

impl WarmUp {
    /// The length of the warm-up in a run of `all` updates, with this many in each epoch.
    pub fn updates(self, all: u64, per_epoch: u64) -> u64 {
        match self {
            WarmUp::Updates(updates) => updates,
            WarmUp::Epochs(epochs) => epochs.saturating_mul(per_epoch),
            // Percentages are rarely exact in binary: 7 % of 100 must be 7, not 8.
            WarmUp::Share(share) => ((share * all as f64 - 1e-9).ceil().max(0.0) as u64).min(all),
        }
    }
}

/// A number of updates may also be written as a number.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number of updates such as 500, a percentage of all such as \"6%\", or epochs such as \"4epochs\""
)]
enum Written {
    Updates(u64),
    Text(String),
}

impl TryFrom<Written> for WarmUp {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Updates(updates) => Ok(WarmUp::Updates(updates)),
            Written::Text(text) => text.parse(),
        }
    }
}

impl From<WarmUp> for String {
    fn from(warm_up: WarmUp) -> Self {
        warm_up.to_string()
    }
}

impl fmt::Display for WarmUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WarmUp::Updates(updates) => write!(f, "{updates}"),
            WarmUp::Share(share) => write!(f, "{}%", (share * 1e8).round() / 1e6),
            WarmUp::Epochs(1) => write!(f, "1epoch"),
            WarmUp::Epochs(epochs) => write!(f, "{epochs}epochs"),
        }
    }
}

impl FromStr for WarmUp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "expected a number of updates such as 500, a percentage of all from 0% to 100% such as 6%, or epochs such as \
                 4epochs; got `{text}`"
            )
        };
        if let Some(epochs) = text.strip_suffix("epochs").or_else(|| text.strip_suffix("epoch")) {
            return epochs.trim().parse().map(WarmUp::Epochs).map_err(|_| wrong());
        }
        match text.strip_suffix('%') {
            Some(percent) => match percent.trim().parse::<f64>() {
                Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(WarmUp::Share(percent / 100.0)),
                _ => Err(wrong()),
            },
            None => text.parse().map(WarmUp::Updates).map_err(|_| wrong()),
        }
    }
}

/// A learning rate schedule: warm-up, then decay; or [a function of your own](Self::custom).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateSchedule {
    /// How the rate falls after the warm-up.
    pub decay: Decay,
    /// How long the rate rises first.
    pub warm_up: WarmUp,
}

impl RateSchedule {
    /// A function of your own: it takes the number of an update, counted from 0, and the number of all updates, and returns
    /// the factor of the learning rate. If you add a [`warm_up`](Self::warm_up), both numbers leave it out.
    ///
    /// A run that resumes must be given the same function again, because a checkpoint cannot save it.
    ///
    /// ```
    /// use distgpipe::{RateSchedule, TrainOptions};
    ///
    /// // A tenth of the rate in the last quarter of the run.
    /// let schedule = RateSchedule::custom(|update, updates| if 4 * update < 3 * updates { 1.0 } else { 0.1 });
    /// assert_eq!((schedule.factor(74, 100), schedule.factor(75, 100)), (1.0, 0.1));
    /// let options = TrainOptions { epochs: 20, rate_schedule: schedule, ..TrainOptions::default() };
    /// ```
    pub fn custom(factor: impl Fn(u64, u64) -> f64 + Send + Sync + 'static) -> Self {
        Decay::Custom(RateFunction(Arc::new(factor))).into()
    }

    /// The factor of the learning rate at an update, counted from 0, in a run of one epoch with `updates` updates.
    pub fn factor(&self, update: u64, updates: u64) -> f64 {
        self.factor_in_epochs(update, updates, updates)
    }

    /// The factor of the learning rate at an update, counted from 0, in a run of `updates` updates with `per_epoch` in each
    /// epoch.
    pub fn factor_in_epochs(&self, update: u64, updates: u64, per_epoch: u64) -> f64 {
        let warm_up = self.warm_up.updates(updates, per_epoch);
        if update < warm_up {
            return update as f64 / warm_up as f64;
        }
        let all = updates.saturating_sub(warm_up).max(1);
        let done = (update - warm_up).min(all);
        let left = (all - done) as f64 / all as f64;
        match &self.decay {
            Decay::Custom(RateFunction(factor)) => factor(done, all),
            Decay::Constant => 1.0,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done as f64 / all as f64).cos()),
            Decay::Linear => left,
            Decay::Polynomial { power } => left.powf(*power),
            Decay::Steps { epochs, factor } => {
                let over = epochs.iter().filter(|&&epoch| epoch.saturating_mul(per_epoch) <= update).count();
                factor.powi(i32::try_from(over).unwrap_or(i32::MAX))
            }
        }
    }
}

impl From<Decay> for RateSchedule {
    fn from(decay: Decay) -> Self {
        RateSchedule { decay, ..RateSchedule::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_warm_up_the_first_update_has_the_whole_rate_and_the_last_is_not_lost() {
        for decay in [Decay::Cosine, Decay::Linear, Decay::Polynomial { power: 2.0 }] {
            let schedule = RateSchedule::from(decay.clone());
            assert_eq!(schedule.factor(0, 10), 1.0);
            assert!(schedule.factor(9, 10) > 0.0, "{decay:?}");
            assert!(schedule.factor(10, 10) < 1e-12, "{decay:?}");
        }
        assert_eq!(RateSchedule::from(Decay::Constant).factor(7, 10), 1.0);
    }

    #[test]
    fn a_share_of_the_updates_is_rounded_up_to_whole_ones() {
        let updates = |text: &str, all| text.parse::<WarmUp>().unwrap().updates(all, 3);
        assert_eq!((updates("6%", 100), updates("6%", 101), updates("7%", 100)), (6, 7, 7));
        assert_eq!((updates("0%", 9), updates("100%", 9), updates("12", 9)), (0, 9, 12));
        assert_eq!((updates("2epochs", 9), updates("1 epoch", 9), updates("0epochs", 9)), (6, 3, 0));
        for text in ["6%", "12", "0.5%", "7%", "1epoch", "4epochs"] {
            assert_eq!(text.parse::<WarmUp>().unwrap().to_string(), text);
        }
        let written = |text: &str| serde_json::from_str::<WarmUp>(text).map_err(|e| e.to_string());
        assert_eq!(written("500"), Ok(WarmUp::Updates(500)));
        assert_eq!(written("\"6%\""), Ok(WarmUp::Share(0.06)));
        assert!(written("1.5").unwrap_err().contains("6%"));
        for text in ["", "x", "-1", "101%", "-1%", "nan%", "1.5", "epochs", "1.5epochs", "-1epoch"] {
            assert!(text.parse::<WarmUp>().unwrap_err().contains("6%"), "{text}");
        }
    }

    /// A warm-up as long as the run, or longer, rises all the time and never divides by nothing.
    #[test]
    fn a_warm_up_of_the_whole_run_only_rises() {
        let schedule = |warm_up| RateSchedule { decay: Decay::Cosine, warm_up };
        for warm_up in [WarmUp::Updates(8), WarmUp::Updates(20), WarmUp::Share(1.0), WarmUp::Epochs(u64::MAX)] {
            let factors: Vec<f64> = (0..8).map(|update| schedule(warm_up).factor(update, 8)).collect();
            assert!(factors.windows(2).all(|pair| pair[0] < pair[1]) && factors[0] == 0.0, "{factors:?}");
        }
        assert!(schedule(WarmUp::Updates(0)).factor(0, 0).is_finite());
    }
}
