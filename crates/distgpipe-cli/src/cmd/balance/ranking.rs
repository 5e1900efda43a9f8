//! Chooses the best cut from measured rounds, and decides whether the rounds show that it is faster than another one.
//!
//! The first rounds choose two cuts: the best one, and its rival, which is the cut that the user gave or else the second
//! best. Later rounds compare the two, because the rounds that made a cut look best cannot also confirm it.

use super::costs::Round;
use distgpipe_core::balance::{BalanceError, Comparison, Estimate, Found, Objective, Problem, Verdict, EQUAL_WITHIN};
use distgpipe_core::partition::Balance;
use std::time::{Duration, Instant};

/// Rounds before a cut is chosen.
pub const CHOOSING_ROUNDS: usize = 5;
/// Bounds on the number of rounds. The second one keeps files of costs small.
const ROUNDS_MAX: usize = 1000;
const ROUND_LAYERS_MAX: usize = 1 << 20;
/// The part of the time limit that measuring may take. The rest is for searching.
const MEASURING_SHARE: f64 = 0.75;

/// The time that measuring and searching may take.
pub struct Clock {
    start: Instant,
    limit: Duration,
    /// How long the kept measurements took.
    measured_before: Duration,
}

impl Clock {
    pub fn start(limit: Duration) -> Self {
        Clock { start: Instant::now(), limit, measured_before: Duration::ZERO }
    }

    /// Counts measurements of earlier calls, so that a repeated call does not measure for as long again.
    pub fn count_earlier(&mut self, seconds: f64) {
        self.measured_before = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    }

    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub fn may_measure(&self) -> bool {
        self.elapsed().saturating_add(self.measured_before) < self.limit.mul_f64(MEASURING_SHARE)
    }

    pub fn may_search(&self) -> bool {
        self.elapsed() < self.limit
    }
}

/// Two cuts, and the rounds that compare them.
struct Duel {
    best: Balance,
    rival: Balance,
    comparison: Comparison,
}

/// The measured rounds, and what they show so far.
pub struct Ranking<'a> {
    problem: Problem,
    given: Option<&'a Balance>,
    clock: &'a Clock,
    rounds: Vec<Round>,
    duel: Option<Duel>,
    decided: bool,
    /// The result of the last search, and how many rounds it was based on.
    searched: Option<(usize, Found)>,
}

/// The best cut, the given one, and their order.
pub struct Ranked {
    pub found: Found,
    pub given: Option<(Balance, Estimate)>,
    /// How the best cut compares with its rival. `None` if there is no other cut, if costs were not measured in rounds,
    /// or if memory is minimized, whose estimate does not vary.
    pub order: Option<Order>,
}

/// The comparison of the best cut with another one.
pub struct Order {
    pub rival: Balance,
    pub rival_s: f64,
    pub comparison: Comparison,
    pub verdict: Verdict,
    /// Whether the rival stays within the memory limit.
    pub rival_fits: bool,
}

impl<'a> Ranking<'a> {
    /// Ranks the cuts of a problem. Its times count until the first round is added.
    pub fn new(problem: Problem, given: Option<&'a Balance>, clock: &'a Clock) -> Self {
        Ranking { problem, given, clock, rounds: Vec::new(), duel: None, decided: false, searched: None }
    }

    pub fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    /// What is being decided, for people.
    pub fn describe(&self) -> String {
        match &self.duel {
            Some(duel) => format!("comparing {} with {}", duel.best, duel.rival),
            None => "choosing the cuts to compare".to_owned(),
        }
    }

    /// Adds a round. Returns whether another one is needed.
    pub fn add(&mut self, round: Round) -> Result<bool, BalanceError> {
        self.rounds.push(round);
        let rounds_max = ROUNDS_MAX.min(ROUND_LAYERS_MAX / self.problem.layers.len().max(1)).max(2 * CHOOSING_ROUNDS);
        if self.decided || self.rounds.len() >= rounds_max {
            return Ok(false);
        }
        if self.rounds.len() < CHOOSING_ROUNDS {
            return Ok(true);
        }
        self.decided = match self.duel.take() {
            // Estimates of memory are the same in every round.
            None if self.problem.objective == Objective::Memory => true,
            None => !self.choose()?,
            Some(duel) => self.compare(duel)?,
        };
        Ok(!self.decided)
    }

    /// Chooses the two cuts to compare. Returns whether there are two.
    fn choose(&mut self) -> Result<bool, BalanceError> {
        let found = self.search()?;
        let rival = self.rival_of(&found);
        self.duel = rival.map(|rival| Duel { best: found.balance, rival, comparison: Comparison::default() });
        Ok(self.duel.is_some())
    }

    fn rival_of(&self, found: &Found) -> Option<Balance> {
        let given = self.given.filter(|given| **given != found.balance);
        given.cloned().or_else(|| found.runner_up.clone())
    }

    /// Compares the cuts in the newest round. Returns whether that decides their order.
    fn compare(&mut self, mut duel: Duel) -> Result<bool, BalanceError> {
        let newest = self.rounds.last().cloned().unwrap_or_default();
        self.set_times(&newest);
        let [best, rival] = [&duel.best, &duel.rival].map(|cut| self.problem.estimate(cut));
        let (best, rival) = (best?, rival?);
        duel.comparison.add(best.step_s, rival.step_s);
        let verdict = duel.comparison.verdict();
        if verdict == Verdict::SecondFaster && self.fits(&rival) {
            let comparison = duel.comparison.swapped();
            duel = Duel { best: duel.rival, rival: duel.best, comparison };
        }
        let best = duel.best.clone();
        self.duel = Some(duel);
        if verdict == Verdict::Undecided {
            return Ok(false);
        }
        // With more rounds, a third cut may have turned out to be the best.
        let found = self.search()?;
        if found.estimate.step_s < (1.0 - EQUAL_WITHIN) * self.problem.estimate(&best)?.step_s {
            return Ok(!self.choose()?);
        }
        Ok(true)
    }

    fn fits(&self, estimate: &Estimate) -> bool {
        self.problem.memory_limit_bytes.is_none_or(|limit| estimate.memory_bytes() <= limit)
    }

    /// Searches with the shortest times of all rounds, and leaves these times in the problem.
    fn search(&mut self) -> Result<Found, BalanceError> {
        if !self.rounds.is_empty() {
            self.set_times(&Round::fastest(&self.rounds));
        }
        if let Some((_, found)) = self.searched.as_ref().filter(|(rounds, _)| *rounds == self.rounds.len()) {
            return Ok(found.clone());
        }
        let found = self.problem.search_while(&mut |_| self.clock.may_search())?;
        self.searched = Some((self.rounds.len(), found.clone()));
        Ok(found)
    }

    fn set_times(&mut self, times: &Round) {
        for (layer, (forward_s, backward_s)) in self.problem.layers.iter_mut().zip(times.seconds()) {
            (layer.forward_s, layer.backward_s) = (forward_s, backward_s);
        }
    }

    /// The result of all rounds.
    pub fn finish(mut self) -> Result<Ranked, BalanceError> {
        let mut found = self.search()?;
        let given = self.given.map(|given| Ok::<_, BalanceError>((given.clone(), self.problem.estimate(given)?)));
        let given = given.transpose()?;
        // A search that cannot try every cut may have missed the given one.
        let beats = |(_, estimate): &&(Balance, Estimate)| self.cost(estimate) < self.cost(&found.estimate);
        if let Some((cut, estimate)) = given.as_ref().filter(beats) {
            found.runner_up = Some(std::mem::replace(&mut found.balance, cut.clone()));
            found.estimate = estimate.clone();
        }
        let measured = !self.rounds.is_empty() && self.problem.objective == Objective::Time;
        let mut order = None;
        if let Some(duel) = self.duel.take() {
            let estimate = self.problem.estimate(&duel.best)?;
            // What the rounds compared is preferred to a cut that is only slightly faster, unless the user sees the latter.
            let shown = given.iter().map(|(_, estimate)| estimate).chain([&found.even_estimate]);
            let best_shown = shown.into_iter().all(|other| self.cost(&estimate) <= self.cost(other));
            if best_shown && found.estimate.step_s >= (1.0 - EQUAL_WITHIN) * estimate.step_s {
                (found.balance, found.estimate) = (duel.best, estimate);
                order = Some((duel.rival, duel.comparison));
            } else if found.balance == duel.rival {
                order = Some((duel.best, duel.comparison.swapped()));
            }
        }
        if measured && order.is_none() {
            order = self.rival_of(&found).map(|rival| (rival, Comparison::default()));
        }
        let order = order.map(|(rival, comparison)| {
            let estimate = self.problem.estimate(&rival)?;
            let verdict = if self.decided { comparison.verdict() } else { Verdict::Undecided };
            let (rival_s, rival_fits) = (estimate.step_s, self.fits(&estimate));
            Ok::<_, BalanceError>(Order { rival, rival_s, comparison, verdict, rival_fits })
        });
        Ok(Ranked { found, given, order: order.transpose()? })
    }

    /// What the search minimizes: first the bytes above the memory limit, then the objective.
    fn cost(&self, estimate: &Estimate) -> (u64, f64) {
        let memory = estimate.memory_bytes();
        let over = self.problem.memory_limit_bytes.map_or(0, |limit| memory.saturating_sub(limit));
        match self.problem.objective {
            Objective::Time => (over, estimate.step_s),
            Objective::Memory => (over, memory as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::balance::{LayerCost, Sent, Sizes};
    use distgpipe_core::schedule::{Recompute, Schedule};

    fn problem(layers: usize, place: &str) -> Problem {
        let sizes = Sizes { outputs: vec![0; layers], skips: Vec::new() };
        Problem {
            layers: vec![LayerCost::default(); layers],
            together: Vec::new(),
            skips: Vec::new(),
            input_bytes: 0,
            in_memory: sizes.clone(),
            sent: Sent { forward: sizes.clone(), backward: sizes, ..Sent::default() },
            state_factor: 0.0,
            placement: place.parse().unwrap(),
            schedule: Schedule::OneFOneB,
            micro_batches: 4,
            recompute: Recompute::Never,
            link: None,
            objective: Objective::Time,
            memory_limit_bytes: None,
        }
    }

    fn round(ms: &[u64]) -> Round {
        Round { forward_ns: ms.iter().map(|ms| ms * 1_000_000).collect(), backward_ns: vec![0; ms.len()] }
    }

    fn an_hour() -> Clock {
        Clock::start(Duration::from_secs(3600))
    }

    /// How many rounds it takes until no more are needed, and the result.
    fn ranked(given: Option<&Balance>, rounds: impl Iterator<Item = Round>) -> (usize, Ranked) {
        let clock = an_hour();
        let mut ranking = Ranking::new(problem(4, "a,b"), given, &clock);
        let mut count = 0;
        for round in rounds {
            count += 1;
            if !ranking.add(round).unwrap() {
                break;
            }
        }
        (count, ranking.finish().unwrap())
    }

    #[test]
    fn a_clear_order_takes_eight_rounds_after_the_choice() {
        // Cut in the middle, a step has 4 × 2 ms on each worker; cut elsewhere, 4 × 3 ms on one of them.
        let (rounds, Ranked { found, order, .. }) = ranked(None, (0..100).map(|_| round(&[10, 10, 10, 10])));
        assert_eq!((rounds, found.balance.to_string()), (CHOOSING_ROUNDS + 8, "2,2".to_owned()));
        let order = order.unwrap();
        assert_eq!((order.verdict, order.comparison.rounds()), (Verdict::FirstFaster, 8));
        assert!(order.rival_s > 1.2 * found.estimate.step_s, "{}", order.rival_s);
    }

    #[test]
    fn a_given_cut_is_compared_instead_of_the_second_best() {
        let given: Balance = "1,3".parse().unwrap();
        let costs = [10, 10, 5, 10];
        let (_, Ranked { found, order, .. }) = ranked(None, (0..100).map(|_| round(&costs)));
        assert_eq!((found.balance.to_string(), order.unwrap().rival.to_string()), ("2,2".into(), "1,3".into()));
        let worse: Balance = "3,1".parse().unwrap();
        let (_, ranked) = ranked(Some(&worse), (0..100).map(|_| round(&costs)));
        assert_eq!(ranked.order.unwrap().rival, worse);
        let (cut, estimate) = ranked.given.unwrap();
        assert!(cut == worse && estimate.step_s > ranked.found.estimate.step_s);
        assert_ne!(cut, given);
    }

    #[test]
    fn rounds_that_contradict_each_other_stay_undecided() {
        let noisy = |i: usize| if i.is_multiple_of(2) { round(&[10, 10, 12, 10]) } else { round(&[10, 12, 10, 10]) };
        // 2,2 is always best; what comes next changes from round to round, and with it nothing that matters.
        let (_, Ranked { found, .. }) = ranked(None, (0..40).map(noisy));
        assert_eq!(found.balance.to_string(), "2,2");
        // Three layers: each of the two cuts is better in every second round.
        let clock = an_hour();
        let mut ranking = Ranking::new(problem(3, "a,b"), None, &clock);
        for i in 0..60 {
            let times = if i % 2 == 0 { [10, 10, 12] } else { [12, 10, 10] };
            assert!(ranking.add(round(&times)).unwrap(), "decided after {i}");
        }
        let order = ranking.finish().unwrap().order.unwrap();
        assert_eq!((order.verdict, order.comparison.rounds()), (Verdict::Undecided, 55));
    }

    /// The rounds that chose a cut may have been disturbed. Later ones then show that the other is faster.
    #[test]
    fn later_rounds_can_reverse_the_choice() {
        let times = |i: usize| if i < CHOOSING_ROUNDS { [10, 10, 20] } else { [20, 10, 10] };
        let clock = an_hour();
        let mut ranking = Ranking::new(problem(3, "a,b"), None, &clock);
        let rounds = (0..100).take_while(|&i| ranking.add(round(&times(i))).unwrap()).count();
        assert!(rounds < 100);
        let Ranked { found, order, .. } = ranking.finish().unwrap();
        let order = order.unwrap();
        assert_eq!((found.balance.to_string(), order.rival.to_string()), ("1,2".into(), "2,1".into()));
        assert_eq!(order.verdict, Verdict::FirstFaster);
    }

    /// The estimate of the best cut was once up to 1 % longer than that of the even cut, which is printed below it.
    #[test]
    fn the_best_cut_is_not_slower_than_the_even_or_the_given_one() {
        for given in [None, Some("4,4".parse::<Balance>().unwrap())] {
            let clock = an_hour();
            let mut ranking = Ranking::new(problem(8, "a,b"), given.as_ref(), &clock);
            // The first rounds choose 5,3. With the later ones, 4,4 is the faster by a quarter of a percent.
            for i in 0..CHOOSING_ROUNDS + 3 {
                let last = if i < CHOOSING_ROUNDS { 1337 } else { 1330 };
                ranking.add(round(&[1000, 1000, 1000, 1000, 20, last, last, last])).unwrap();
            }
            let Ranked { found, given, .. } = ranking.finish().unwrap();
            assert!(found.estimate.step_s <= found.even_estimate.step_s, "{}", found.balance);
            assert!(given.is_none_or(|(_, estimate)| found.estimate.step_s <= estimate.step_s));
        }
    }

    #[test]
    fn a_spent_time_limit_still_gives_a_cut_and_says_that_it_is_unfinished() {
        let clock = Clock::start(Duration::ZERO);
        assert!(!clock.may_measure() && !clock.may_search());
        let mut ranking = Ranking::new(problem(400, "a,b,c,d,e,f"), None, &clock);
        ranking.add(round(&[10; 400])).unwrap();
        let Ranked { found, order, .. } = ranking.finish().unwrap();
        assert!(!found.complete && found.estimate.step_s <= found.even_estimate.step_s);
        assert_eq!(order.map(|order| order.verdict), Some(Verdict::Undecided));
    }
}
