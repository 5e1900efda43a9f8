//! Gradient accumulation: which batches of an epoch share one parameter update.
//!
//! ```text
//!   steps      0   1   2 │ 3   4   5 │ 6    an epoch of 7 batches, 3 to an update
//!   weight    1/3 1/3 1/3│1/3 1/3 1/3│ 1    so that the gradient is the mean over the batches
//!   update     ·   ·   0 │ ·   ·   1 │ 2
//! ```

/// The position of a batch among the batches of one update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccumulationStep {
    /// The batch's number within the update, starting at 0.
    pub index: u64,
    /// How many batches the update takes.
    pub of: u64,
}

impl AccumulationStep {
    /// The only batch of its update.
    pub const SINGLE: AccumulationStep = AccumulationStep { index: 0, of: 1 };

    /// Whether the gradients of earlier batches are cleared before this one.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether the parameters are updated after this batch.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.of
    }

    /// The position of the next batch, or `None` after the last of the update.
    pub fn next(self) -> Option<AccumulationStep> {
        (!self.is_last()).then_some(AccumulationStep { index: self.index + 1, ..self })
    }
}

/// Which steps of a run form which update. It is a function of the step's number, so a checkpoint needs none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulation {
    /// Batches per update. The last update of an epoch may have fewer.
    pub every: u64,
    /// Steps in a whole epoch.
    pub epoch_steps: u64,
    /// Steps in the run: whole updates.
    pub steps: u64,
}

impl Accumulation {
    fn every(self) -> u64 {
        self.every.max(1)
    }

    /// The position of a step in its update. It does not depend on the length of the run, so a longer run has the same
    /// updates.
    pub fn position_of(self, step: u64) -> AccumulationStep {
        let epoch = step / self.epoch_steps.max(1) * self.epoch_steps;
        let end = epoch.saturating_add(self.epoch_steps);
        let first = epoch + (step - epoch) / self.every() * self.every();
        AccumulationStep { index: step - first, of: (end - first).min(self.every()) }
    }

    /// The number of steps until the update that the last of `steps` steps belongs to is finished.
    pub fn whole_updates(self, steps: u64) -> u64 {
        steps.checked_sub(1).map_or(0, |last| {
            let AccumulationStep { index, of } = self.position_of(last);
            last.saturating_add(of - index)
        })
    }

    /// The number of the update that a step belongs to, starting at 0.
    pub fn update(self, step: u64) -> u64 {
        let (epoch, within) = (step / self.epoch_steps.max(1), step % self.epoch_steps.max(1));
        epoch * self.epoch_updates() + within / self.every()
    }

    /// How many updates a whole epoch has.
    pub fn epoch_updates(self) -> u64 {
        self.epoch_steps.div_ceil(self.every())
    }

    /// How many updates the run has.
    pub fn updates(self) -> u64 {
        self.steps.checked_sub(1).map_or(0, |last| self.update(last) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every batch belongs to one update, and an update consists of consecutive batches of one epoch.
    #[test]
    fn an_update_ends_after_its_batches_or_at_the_end_of_the_epoch() {
        let parts = |every, epoch_steps, steps| {
            let accumulation = Accumulation { every, epoch_steps, steps };
            let of = |step| {
                let AccumulationStep { index, of } = accumulation.position_of(step);
                (accumulation.update(step), index, of)
            };
            ((0..steps).map(of).collect::<Vec<_>>(), accumulation.updates())
        };
        assert_eq!(
            parts(3, 7, 10),
            (
                vec![
                    (0, 0, 3),
                    (0, 1, 3),
                    (0, 2, 3),
                    (1, 0, 3),
                    (1, 1, 3),
                    (1, 2, 3),
                    (2, 0, 1),
                    (3, 0, 3),
                    (3, 1, 3),
                    (3, 2, 3)
                ],
                4
            )
        );
        assert_eq!(parts(1, 2, 4).0, [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]);
        assert_eq!(parts(5, 2, 4), (vec![(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)], 2));
        assert_eq!(parts(4, 7, 0).1, 0);
    }

    #[test]
    fn a_run_that_would_end_inside_an_update_ends_after_it() {
        let accumulation = Accumulation { every: 3, epoch_steps: 7, steps: 0 };
        let ends: Vec<u64> = (0..=11).map(|steps| accumulation.whole_updates(steps)).collect();
        assert_eq!(ends, [0, 3, 3, 3, 6, 6, 6, 7, 10, 10, 10, 13]);
        assert_eq!(accumulation.whole_updates(u64::MAX), u64::MAX);
    }
}
