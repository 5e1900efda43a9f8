//! Improves cuts by moving their borders, for models with too many cuts to try them all.
//!
//! One border at a time is not enough: where two partitions are equally slow, only moving both of their borders helps.
//! So neighbouring borders also move together, and two such groups side by side move independently. Steps are of one layer, two, four
//! and so on; where there are few layers, a border tries every place. Skips make memory jump from one cut to the next, so
//! some starts are drawn at random too, always the same.

use super::{cuts_of, starts::starts, Balance, BalanceError, Score, Search};
use std::collections::HashMap;

/// Starts that are followed to the end, the best ones first.
const STARTS_MAX: usize = 8;
/// Random starts that are tried, of which as many are followed as of the others.
const RANDOM_STARTS: usize = 64;
/// Between so many places a border tries every one.
const PLACES_MAX: usize = 64;
/// The most borders of which two groups are moved independently.
const PAIRED_MAX: usize = 6;
/// The most steps of rehearsals: less than a second.
const STEPS_MAX: u64 = 1 << 26;

/// Tries starts and what is near them; the search keeps the best.
pub(super) fn descend(search: &mut Search<'_>) -> Result<(), BalanceError> {
    let mut known = Known { search, scores: HashMap::new() };
    let (layers, borders) = (known.search.layers(), known.search.partitions() - 1);
    // Before all others: however little can be tried, what is found is no worse than this.
    known.score(&cuts_of(&Balance::even(layers, borders + 1)?))?;
    for starts in [starts(known.search)?, random_starts(layers, borders)] {
        let mut ranked = Vec::new();
        for start in starts {
            // With skips each of them may need a plan of its own.
            if known.spent() {
                break;
            }
            ranked.push((known.score(&start)?, start));
        }
        ranked.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (score, start) in ranked.into_iter().take(STARTS_MAX) {
            follow(&mut known, start, score)?;
        }
    }
    Ok(())
}

/// Borders anywhere. The numbers are Knuth's linear congruential ones, the same for every search.
fn random_starts(layers: usize, borders: usize) -> Vec<Vec<usize>> {
    let mut state = 1u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let start = |_| {
        // Any choice out of the places that are left when every border has one more before it.
        let mut cuts: Vec<usize> = (0..borders).map(|_| 1 + draw(layers - borders)).collect();
        cuts.sort_unstable();
        cuts.iter().enumerate().map(|(i, cut)| cut + i).collect()
    };
    (0..RANDOM_STARTS).map(start).collect()
}

/// The scores of all cuts that have been tried: descents from different starts meet.
struct Known<'s, 'p> {
    search: &'s mut Search<'p>,
    scores: HashMap<Vec<usize>, Score>,
}

impl Known<'_, '_> {
    fn score(&mut self, cuts: &[usize]) -> Result<Score, BalanceError> {
        if let Some(score) = self.scores.get(cuts) {
            return Ok(*score);
        }
        let score = self.search.score(cuts)?;
        self.scores.insert(cuts.to_vec(), score);
        Ok(score)
    }

    fn spent(&self) -> bool {
        self.search.steps >= STEPS_MAX
    }
}

/// Goes from one cut to better ones until none of its moves is better.
fn follow(known: &mut Known<'_, '_>, mut cuts: Vec<usize>, mut score: Score) -> Result<(), BalanceError> {
    let layers = known.search.layers();
    loop {
        let mut better = false;
        for moved in moves(&cuts, layers) {
            let next = moved.apply(&cuts, layers);
            let Some(next) = next else { continue };
            if known.spent() {
                return Ok(());
            }
            let next_score = known.score(&next)?;
            if next_score.beats(&score) {
                (cuts, score, better) = (next, next_score, true);
            }
        }
        if !better {
            return Ok(());
        }
    }
}

/// What happens to the borders of a cut.
enum Move {
    /// One goes to a place.
    To(usize, usize),
    /// From the first to the second, all move so far.
    Together(usize, usize, isize),
    /// From the first up to the second all move so far, from there to the third so far.
    Apart([usize; 3], [isize; 2]),
}

impl Move {
    /// The moved cut, if it is one.
    fn apply(&self, cuts: &[usize], layers: usize) -> Option<Vec<usize>> {
        let mut cuts = cuts.to_vec();
        let mut shift = |border: usize, by: isize| -> Option<()> {
            cuts[border] = cuts[border].checked_add_signed(by)?;
            Some(())
        };
        match *self {
            Move::To(border, place) => cuts[border] = place,
            Move::Together(first, last, by) => (first..=last).try_for_each(|border| shift(border, by))?,
            Move::Apart([first, middle, last], [before, after]) => {
                (first..=last).try_for_each(|border| shift(border, if border < middle { before } else { after }))?;
            }
        }
        let inside = cuts.first().is_none_or(|&first| first > 0) && cuts.last().is_none_or(|&last| last < layers);
        (inside && cuts.is_sorted_by(|a, b| a < b)).then_some(cuts)
    }
}

fn moves(cuts: &[usize], layers: usize) -> Vec<Move> {
    let steps: Vec<isize> = std::iter::successors(Some(1isize), |step| Some(step * 2))
        .take_while(|&step| step < layers as isize)
        .flat_map(|step| [step, -step])
        .collect();
    let mut moves = Vec::new();
    for border in 0..cuts.len() {
        let before = if border == 0 { 0 } else { cuts[border - 1] };
        let after = cuts.get(border + 1).copied().unwrap_or(layers);
        if after - before <= PLACES_MAX {
            moves.extend((before + 1..after).map(|place| Move::To(border, place)));
        } else {
            moves.extend(steps.iter().map(|&by| Move::Together(border, border, by)));
        }
    }
    for first in 0..cuts.len() {
        for last in first + 1..cuts.len() {
            moves.extend(steps.iter().map(|&by| Move::Together(first, last, by)));
            if cuts.len() <= PAIRED_MAX {
                for middle in first + 1..=last {
                    let pairs = steps.iter().flat_map(|&a| steps.iter().map(move |&b| [a, b]));
                    moves.extend(pairs.map(|by| Move::Apart([first, middle, last], by)));
                }
            }
        }
    }
    moves
}
