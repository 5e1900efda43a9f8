//! Decides from repeated measurements which of two cuts is faster.
//!
//! Every round of measurements gives one time for each cut. Rounds are added until the verdict is clear, so the test
//! must stay valid however often it is looked at. A fixed-size test does not: repeated after each round, it calls almost
//! any two cuts different in the end. This one bets against the claim that the two outcomes of a round are equally
//! likely. After k successes in n rounds the stake has grown by the factor 2ⁿ k! (n−k)! / (n+1)!, averaged over all
//! odds one could have bet on. If the claim holds, the factor ever reaches 1/α with a probability of at most α (Ville's
//! inequality; see Robbins 1970 and Ramdas et al. 2023, "Game-theoretic statistics and safe anytime-valid inference").
//!
//! Only the sign of a difference counts, not its size, so a round that another process disturbed does no harm.

/// The probability of a wrong verdict about cuts that are equally fast, however many rounds are measured.
pub const SIGNIFICANCE: f64 = 0.05;
/// Cuts whose times differ by less than this fraction count as equally fast.
pub const EQUAL_WITHIN: f64 = 0.01;

/// Which of two cuts is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first one, significantly.
    FirstFaster,
    /// The second one, significantly.
    SecondFaster,
    /// They differ by less than [`EQUAL_WITHIN`], significantly.
    Equal,
    /// The rounds so far do not show it.
    Undecided,
}

/// The rounds in which the times of two cuts were compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// The first cut was faster.
    order: SignTest,
    /// The second cut was slower by less than [`EQUAL_WITHIN`], or faster.
    below: SignTest,
    /// The second cut was faster by less than [`EQUAL_WITHIN`], or slower.
    above: SignTest,
}

impl Comparison {
    /// Adds the times of one round.
    pub fn add(&mut self, first_s: f64, second_s: f64) {
        let difference = second_s - first_s;
        if difference != 0.0 {
            self.order.add(difference > 0.0);
        }
        self.below.add(difference < EQUAL_WITHIN * first_s);
        self.above.add(difference > -EQUAL_WITHIN * first_s);
    }

    /// What the rounds show.
    pub fn verdict(&self) -> Verdict {
        match (self.order.decided(), self.below.decided(), self.above.decided()) {
            (Some(true), ..) => Verdict::FirstFaster,
            (Some(false), ..) => Verdict::SecondFaster,
            (None, Some(true), Some(true)) => Verdict::Equal,
            _ => Verdict::Undecided,
        }
    }

    /// The number of rounds.
    pub fn rounds(&self) -> u32 {
        self.below.rounds
    }

    /// The number of rounds in which the first cut was faster.
    pub fn first_faster(&self) -> u32 {
        self.order.successes
    }

    /// The same rounds with the cuts in the other order.
    pub fn swapped(&self) -> Self {
        Comparison { order: self.order.negated(), below: self.above, above: self.below }
    }
}

/// Tests the claim that success and failure are equally likely.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SignTest {
    successes: u32,
    rounds: u32,
}

impl SignTest {
    fn add(&mut self, success: bool) {
        self.rounds += 1;
        self.successes += u32::from(success);
    }

    /// Whether success is significantly more likely than failure, or less.
    fn decided(&self) -> Option<bool> {
        (self.log_evidence() >= -SIGNIFICANCE.ln()).then_some(2 * self.successes > self.rounds)
    }

    /// The natural logarithm of 2ⁿ k! (n−k)! / (n+1)!.
    fn log_evidence(&self) -> f64 {
        let (n, k) = (self.rounds, self.successes);
        // k! (n−k)! / n! is the product of i / (n − k + i) for i up to k.
        let binomial: f64 = (1..=k).map(|i| (f64::from(i) / f64::from(n - k + i)).ln()).sum();
        f64::from(n) * std::f64::consts::LN_2 + binomial - f64::from(n + 1).ln()
    }

    fn negated(&self) -> Self {
        SignTest { successes: self.rounds - self.successes, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(times: impl IntoIterator<Item = (f64, f64)>) -> Comparison {
        let mut comparison = Comparison::default();
        times.into_iter().for_each(|(first, second)| comparison.add(first, second));
        comparison
    }

    #[test]
    fn eight_rounds_that_agree_are_enough_and_seven_are_not() {
        // 2⁷/8 = 16 and 2⁸/9 = 28.4; 1/α is 20.
        let verdict = |rounds: usize, times| compared(vec![times; rounds]).verdict();
        assert_eq!(verdict(7, (1.0, 1.1)), Verdict::Undecided);
        assert_eq!(verdict(8, (1.0, 1.1)), Verdict::FirstFaster);
        assert_eq!(verdict(8, (1.1, 1.0)), Verdict::SecondFaster);
        // The same time, exactly.
        assert_eq!(verdict(8, (1.0, 1.0)), Verdict::Equal);
        let rounds = compared(vec![(1.0, 1.1); 8]);
        assert_eq!(rounds.swapped(), compared(vec![(1.1, 1.0); 8]));
        assert_eq!((rounds.rounds(), rounds.first_faster(), rounds.swapped().first_faster()), (8, 8, 0));
    }

    #[test]
    fn small_differences_in_both_directions_are_equal_and_large_ones_undecided() {
        let in_turn = |by: f64| compared((0..40).map(|i| (1.0, if i % 2 == 0 { 1.0 + by } else { 1.0 - by })));
        assert_eq!(in_turn(0.005).verdict(), Verdict::Equal);
        assert_eq!(in_turn(0.02).verdict(), Verdict::Undecided);
    }

    /// The promise of the test: cuts that are equally fast are called different in at most 5 % of all cases, although
    /// the verdict is looked at after every round. Computed exactly, over all sequences of up to 400 fair rounds.
    #[test]
    fn looking_after_every_round_does_not_lead_to_wrong_verdicts() {
        const ROUNDS: usize = 400;
        // The probability of each number of successes, of the sequences without a verdict so far.
        let (mut open, mut wrong) = (vec![1.0], 0.0);
        for rounds in 1..=ROUNDS {
            let mut next = vec![0.0; rounds + 1];
            for (k, probability) in open.iter().enumerate() {
                next[k] += probability / 2.0;
                next[k + 1] += probability / 2.0;
            }
            for (k, probability) in next.iter_mut().enumerate() {
                let test = SignTest { successes: k as u32, rounds: rounds as u32 };
                if *probability > 0.0 && test.decided().is_some() {
                    wrong += std::mem::take(probability);
                }
            }
            open = next;
        }
        assert!(wrong <= SIGNIFICANCE, "{wrong}");
        // And it is not so careful that it never decides.
        assert!(wrong > 0.01, "{wrong}");
    }
}
