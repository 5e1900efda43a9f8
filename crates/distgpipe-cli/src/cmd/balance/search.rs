//! Searches the best cut, with costs from a file, from earlier calls, or measured now.

use super::cache::{Cache, Kept};
use super::costs::{LayerCosts, Round};
use super::ranking::{Clock, Ranked, Ranking, CHOOSING_ROUNDS};
use super::{BalanceArgs, TIME_LIMIT_S};
use crate::balance_options::{no_cut, BalanceOptions};
use crate::cmd::models::SampleArgs;
use crate::exit::usage;
use crate::report;
use crate::report::activity::Activity;
use crate::report::units;
use distgpipe::driver::auto_balance::{problem, RunShape};
use distgpipe::driver::profile::{keep_fastest, LayerProfile, ProfileProgress};
use distgpipe::{BuildError, Model};
use distgpipe_core::balance::{BalanceError, Objective, Problem};
use distgpipe_core::partition::Balance;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the costs of the layers come from.
pub enum CostSource {
    /// The file that `--costs` names.
    File,
    /// An earlier call, so many seconds ago if that is known.
    Kept(PathBuf, Option<f64>),
    /// Measured now, and kept in this file for the next call.
    Measured(Option<PathBuf>),
}

/// The ranked cuts, and the costs that they are ranked by.
pub struct Outcome {
    pub ranked: Ranked,
    pub costs: LayerCosts,
    pub source: CostSource,
}

/// Everything that the search depends on, except the costs.
pub struct CutSearch<'a> {
    pub args: &'a BalanceArgs,
    pub model: &'a Model,
    /// The cut to compare with the best one.
    pub given: Option<&'a Balance>,
    pub run: RunShape<'a>,
    pub options: BalanceOptions,
}

impl<'a> CutSearch<'a> {
    /// Ranks the cuts by the costs in a file.
    pub fn with_costs(&self, path: &Path, clock: Clock) -> anyhow::Result<Outcome> {
        let costs = LayerCosts::read(path, self.model, &self.args.sample)?;
        let needs_memory = self.options.by == Objective::Memory || self.options.memory_limit_bytes.is_some();
        if !costs.memory_known && needs_memory {
            return Err(usage(
                "--costs: the file has no memory figures, which --balance-by memory and --memory-limit need: use the output of \
                 `distgpipe models NAME --profile --json`, or measure",
            ));
        }
        let (ranking, _) = self.ranking(&costs, &clock)?;
        Ok(Outcome { ranked: ranking.finish().map_err(no_cut_found)?, costs, source: CostSource::File })
    }

    /// Ranks the cuts by measurements: those of earlier calls, and new ones as long as they do not show the order of the two cuts
    /// that matter.
    pub fn with_measurements(&self, mut clock: Clock) -> anyhow::Result<Outcome> {
        let (sample, workers) = (&self.args.sample, self.run.placement.workers());
        let cache = Cache::new(self.model, sample, workers)?;
        let kept = match &cache {
            Some(cache) if !self.args.measure_again => cache.read(self.model, sample),
            _ => None,
        };
        let earlier_s = kept.as_ref().map_or(0.0, |kept| kept.measured_s);
        let age_s = kept.as_ref().and_then(|kept| kept.age_s);
        clock.count_earlier(earlier_s);
        let (mut layers, mut ranking, measures) = match kept {
            Some(Kept { costs, .. }) => {
                let (ranking, needs_more) = self.ranking(&costs, &clock)?;
                (costs.layers, Some(ranking), needs_more && clock.may_measure())
            }
            None => (Vec::new(), None, true),
        };
        if measures {
            self.measure(&mut layers, &mut ranking, &clock)?;
        }
        let Some(ranking) = ranking else {
            return Err(usage(format!(
                "--time-limit {}: the {} layers were not all measured once within three quarters of it: raise the limit, or use \
                 fewer --rows",
                self.args.time_limit,
                self.model.layers.len()
            )));
        };
        for (layer, (forward_s, backward_s)) in layers.iter_mut().zip(Round::fastest(ranking.rounds()).seconds()) {
            (layer.forward_s, layer.backward_s) = (forward_s, backward_s);
        }
        let rounds = ranking.rounds().to_vec();
        let (rows, precision) = (sample.rows, sample.precision);
        let mut costs = LayerCosts { layers, rounds, rows, precision, memory_known: true };
        let source = match cache {
            Some(cache) if measures => {
                let kept = Kept { costs, measured_s: earlier_s + clock.elapsed().as_secs_f64(), age_s: None };
                let written = cache.write(&kept);
                costs = kept.costs;
                CostSource::Measured(written.then(|| cache.path().to_owned()))
            }
            Some(cache) => CostSource::Kept(cache.path().to_owned(), age_s),
            None => CostSource::Measured(None),
        };
        Ok(Outcome { ranked: ranking.finish().map_err(no_cut_found)?, costs, source })
    }

    /// Measures rounds until no more are needed or the time is over. The first one of all creates `layers` and `ranking`.
    fn measure<'c>(
        &self,
        layers: &mut Vec<LayerProfile>,
        ranking: &mut Option<Ranking<'c>>,
        clock: &'c Clock,
    ) -> anyhow::Result<()>
    where
        'a: 'c,
    {
        let (mut activity, mut failed) = (Activity::new(), None);
        let count = self.model.layers.len();
        self.args.sample.measure_while(self.model, self.run.placement.workers(), &mut |progress| match progress {
            ProfileProgress::Layer { round, layer } => {
                activity.show(|| {
                    let doing = ranking.as_ref().map(|ranking| format!("; {}", ranking.describe())).unwrap_or_default();
                    format!("measuring layer {} of {count}, round {round}{doing}", layer + 1)
                });
                clock.may_measure()
            }
            ProfileProgress::Round(costs) => {
                if ranking.is_none() {
                    *layers = costs.to_vec();
                }
                match self.add(ranking, costs, clock) {
                    Ok(needs_more) => needs_more && clock.may_measure(),
                    Err(error) => {
                        failed = Some(error);
                        false
                    }
                }
            }
        })?;
        failed.map_or(Ok(()), Err)
    }

    fn add<'c>(
        &self,
        ranking: &mut Option<Ranking<'c>>,
        costs: &[LayerProfile],
        clock: &'c Clock,
    ) -> anyhow::Result<bool>
    where
        'a: 'c,
    {
        let ranking = match ranking {
            Some(ranking) => ranking,
            None => ranking.insert(Ranking::new(self.problem(costs, self.args.sample.rows)?, self.given, clock)),
        };
        ranking.add(Round::new(costs)).map_err(no_cut_found)
    }

    /// The ranking by the rounds of a file, and whether more are needed.
    fn ranking<'c>(&self, costs: &LayerCosts, clock: &'c Clock) -> anyhow::Result<(Ranking<'c>, bool)>
    where
        'a: 'c,
    {
        let mut ranking = Ranking::new(self.problem(&costs.layers, costs.rows)?, self.given, clock);
        let mut needs_more = true;
        for round in &costs.rounds {
            needs_more = ranking.add(round.clone()).map_err(no_cut_found)?;
        }
        Ok((ranking, needs_more))
    }

    fn problem(&self, layers: &[LayerProfile], rows: usize) -> anyhow::Result<Problem> {
        let problem = problem(self.model, layers, rows, self.run.clone()).map_err(|e| match e {
            BuildError::Schedule(e) => usage(format!("--chunks or --schedule: {e}")),
            BuildError::CutTensor(e) => usage(format!("--rows or --costs: {e}")),
            other => other.into(),
        })?;
        let BalanceOptions { by, link, memory_limit_bytes } = self.options;
        Ok(Problem { objective: by, link, memory_limit_bytes, ..problem })
    }
}

/// The costs of the layers for a run that chooses its cut without comparing it with another: those that an earlier call kept, or
/// else measured now and kept. Also returns the time that is left to search. Says which it was.
pub fn kept_or_measured(model: &Model, sample: &SampleArgs) -> anyhow::Result<(Vec<LayerProfile>, Duration)> {
    let limit = Duration::from_secs_f64(TIME_LIMIT_S);
    let (clock, cache) = (Clock::start(limit), Cache::new(model, sample, 1)?);
    let kept = cache.as_ref().and_then(|cache| cache.read(model, sample));
    if let (Some(kept), Some(cache)) = (kept.filter(|kept| kept.costs.rounds.len() >= CHOOSING_ROUNDS), &cache) {
        let described = format!("layer costs with {} read from {}", sample.describe(1)?, cache.path().display());
        report::note(&format!(
            "{described}{}; to measure again, delete this file",
            age_and_spread(kept.age_s, &kept.costs)
        ));
        return Ok((kept.costs.layers, limit));
    }
    let (mut activity, mut layers, mut rounds) = (Activity::new(), Vec::new(), Vec::new());
    sample.measure_while(model, 1, &mut |progress| {
        match progress {
            ProfileProgress::Layer { round, layer } => activity.show(|| {
                format!("measuring layer {} of {}, round {round} of {CHOOSING_ROUNDS}", layer + 1, model.layers.len())
            }),
            ProfileProgress::Round(costs) => {
                keep_fastest(&mut layers, costs);
                rounds.push(Round::new(costs));
            }
        }
        // Without any costs, there is no run.
        rounds.is_empty() || (rounds.len() < CHOOSING_ROUNDS && clock.may_measure())
    })?;
    drop(activity);
    let counted = units::plural(rounds.len(), "round");
    let costs = LayerCosts { layers, rounds, rows: sample.rows, precision: sample.precision, memory_known: true };
    let spread = costs.spread().map(|spread| format!("; {spread}")).unwrap_or_default();
    let kept = Kept { costs, measured_s: clock.elapsed().as_secs_f64(), age_s: None };
    let written = cache.filter(|cache| cache.write(&kept)).map(|cache| format!(", kept in {}", cache.path().display()));
    report::note(&format!(
        "layers measured with {} in {counted}{}{spread}",
        sample.describe(1)?,
        written.unwrap_or_default()
    ));
    // The rest of the time is for searching, as in `distgpipe balance`.
    Ok((kept.costs.layers, limit.saturating_sub(clock.elapsed()).max(limit / 4)))
}

/// How old kept costs are, and how much they vary: those of a busy machine, or of long ago, may be wrong.
pub fn age_and_spread(age_s: Option<f64>, costs: &LayerCosts) -> String {
    let age = age_s.map(|age_s| format!(", measured {} ago", units::duration(age_s))).unwrap_or_default();
    let spread = costs.spread().map(|spread| format!("; {spread}")).unwrap_or_default();
    age + &spread
}

fn no_cut_found(error: BalanceError) -> anyhow::Error {
    no_cut("--costs, --chunks or --schedule", error)
}
