//! Local search: improves cuts by moving their borders, for models with too many cuts to try them all.
//!
//! Moving one border at a time is not enough: if two partitions are equally slow, only moving both of their borders
//! helps. So consecutive borders also move together, and two adjacent groups move independently. Borders move by one
//! layer, two, four and so on; between few layers, a border tries every position. With skips, memory jumps from one cut
//! to the next, so some starts are random; they are the same in every search.

use super::search::{cuts_of, Score, Search};
use super::starts::starts;
use super::{Balance, BalanceError};
use std::collections::HashMap;

/// The number of starts that are always followed to a local optimum, the best ones first.
const STARTS_MIN: usize = 8;
/// The others are followed too while the search has executed fewer instructions than this.
const ALL_STARTS_STEPS: u64 = STEPS_MAX / 16;
/// The number of random starts that are rated.
const RANDOM_STARTS: usize = 64;
/// A border with at most this many positions tries every one of them.
const PLACES_MAX: usize = 64;
/// The largest number of borders for which two groups are moved independently.
const PAIRED_MAX: usize = 6;
/// The most instructions of compiled plans that the search executes: less than a second.
const STEPS_MAX: u64 = 1 << 26;

/// Follows every start to a local optimum. `search` keeps the best cut.
pub(super) fn descend(search: &mut Search<'_>) -> Result<(), BalanceError> {
    let mut known = Known { search, scores: HashMap::new() };
    let (layers, borders) = (known.search.layers(), known.search.partitions() - 1);
    // First, so that the result is never worse than the even cut, however little can be tried.
    known.score(&cuts_of(&Balance::even(layers, borders + 1)?))?;
    for starts in [starts(known.search, STEPS_MAX)?, random_starts(layers, borders)] {
        let mut ranked = Vec::new();
        for start in starts {
            // With skips each start may need its own plan.
            if known.must_end() {
                break;
            }
            ranked.push((known.score(&start)?, start));
        }
        ranked.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (i, (score, start)) in ranked.into_iter().enumerate() {
            if i >= STARTS_MIN && known.search.steps() >= ALL_STARTS_STEPS {
                break;
            }
            follow(&mut known, start, score)?;
        }
    }
    Ok(())
}

/// Cuts with borders at random positions, from Knuth's linear congruential generator. They are the same in every
/// search.
fn random_starts(layers: usize, borders: usize) -> Vec<Vec<usize>> {
    let mut state = 1u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let start = |_| {
        // Adding its index to each of the sorted borders makes them distinct.
        let mut cuts: Vec<usize> = (0..borders).map(|_| 1 + draw(layers - borders)).collect();
        cuts.sort_unstable();
        cuts.iter().enumerate().map(|(i, cut)| cut + i).collect()
    };
    (0..RANDOM_STARTS).map(start).collect()
}

/// The scores of all cuts so far, because searches from different starts meet.
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

    fn must_end(&mut self) -> bool {
        self.search.must_end(STEPS_MAX)
    }
}

/// Moves from one cut to better ones until no move improves it.
fn follow(known: &mut Known<'_, '_>, mut cuts: Vec<usize>, mut score: Score) -> Result<(), BalanceError> {
    let layers = known.search.layers();
    loop {
        let mut better = false;
        for moved in moves(cuts.clone(), layers) {
            known.search.count(cuts.len() as u64);
            if known.must_end() {
                return Ok(());
            }
            let Some(next) = moved.apply(&cuts, layers) else { continue };
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

/// A change of some borders of a cut.
enum Move {
    /// Border `.0` goes to position `.1`.
    To(usize, usize),
    /// Borders `.0` to `.1` move by `.2` layers.
    Together(usize, usize, isize),
    /// Of three borders, those from the first up to the second move by one distance, and those from the second to the
    /// third by another.
    Apart([usize; 3], [isize; 2]),
}

impl Move {
    /// The cut after the move; `None` if it has an empty partition.
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

/// All moves of a cut. With many borders there are too many for a list.
fn moves(cuts: Vec<usize>, layers: usize) -> impl Iterator<Item = Move> {
    let steps: Vec<isize> = std::iter::successors(Some(1isize), |step| Some(step * 2))
        .take_while(|&step| step < layers as isize)
        .flat_map(|step| [step, -step])
        .collect();
    let (single_steps, borders) = (steps.clone(), cuts.len());
    let alone = (0..borders).flat_map(move |border| -> Vec<Move> {
        let before = if border == 0 { 0 } else { cuts[border - 1] };
        let after = cuts.get(border + 1).copied().unwrap_or(layers);
        if after - before <= PLACES_MAX {
            (before + 1..after).map(|place| Move::To(border, place)).collect()
        } else {
            single_steps.iter().map(|&by| Move::Together(border, border, by)).collect()
        }
    });
    let pairs = (0..borders).flat_map(move |first| (first + 1..borders).map(move |last| (first, last)));
    let grouped = pairs.flat_map(move |(first, last)| {
        let mut moves: Vec<Move> = steps.iter().map(|&by| Move::Together(first, last, by)).collect();
        if borders <= PAIRED_MAX {
            for middle in first + 1..=last {
                let pairs = steps.iter().flat_map(|&a| steps.iter().map(move |&b| [a, b]));
                moves.extend(pairs.map(|by| Move::Apart([first, middle, last], by)));
            }
        }
        moves
    });
    alone.chain(grouped)
}
