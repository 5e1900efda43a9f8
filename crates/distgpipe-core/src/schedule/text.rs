//! Plans as text: for files, for diffs, and for plans written by hand.
//!
//! ```text
//! distgpipe plan 1
//! mode train
//! partitions 3
//! micro_batches 1
//! placement client server client
//! skips 0>2
//! client: 0F0 0F0>1 2F0<1 2F0 2B0 2B0>1 0B0<1 0B0
//! server: 1F0<0 1F0 1F0>2 1B0<2 1B0 1B0>0
//! ```
//!
//! After the first line the header lines may come in any order; `skips` is optional. A line `frozen N` says that the
//! first N partitions have no backward. `#` starts a comment. The actions of a worker may be spread over several lines. A line `workers a b` numbers the workers if that is not the order of
//! their first appearance in `placement`. Parsing does not check that the plan is sound; [`check`](super::check())
//! does. Allocations are bounded by the length of the text and by the limits on the size of plans.

use super::plan::{ACTIONS_MAX, PARTITIONS_MAX};
use super::{Action, ActionParseError, Mode, Plan, ScheduleError};
use crate::placement::{Placement, PlacementError};
use crate::PartitionId;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// The first line of every plan. The number is the version of the format.
const FIRST_LINE: &str = "distgpipe plan 1";

/// Why a text is not a plan. Lines are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanParseError {
    /// The first line is not that of a plan in a version that this release reads.
    #[error("line 1: expected `{FIRST_LINE}`, got `{got}`: the text is not a plan, or a plan of another version")]
    FirstLine {
        /// The first line, truncated.
        got: String,
    },
    /// A line is neither a header line nor the line of a worker.
    #[error("line {line}: expected {expected}, got `{got}`")]
    Line {
        /// The number of the line.
        line: usize,
        /// What the line may be.
        expected: String,
        /// What the line is, truncated.
        got: String,
    },
    /// A header line occurs twice.
    #[error("line {line}: expected `{key}` once, got it again: remove one of the two lines")]
    Repeated {
        /// The number of the second line.
        line: usize,
        /// The first word of the header line.
        key: &'static str,
    },
    /// A header line is missing.
    #[error("expected a line `{key} …` before the workers' lines, got none")]
    Missing {
        /// The first word of the header line.
        key: &'static str,
    },
    /// A word in a worker's line is not an action.
    #[error("line {line}: {source}")]
    Action {
        /// The number of the line.
        line: usize,
        /// The error in that line.
        source: ActionParseError,
    },
    /// The placement line is not a placement.
    #[error("line {line}: {source}")]
    Placement {
        /// The number of the line.
        line: usize,
        /// The error in that line.
        source: PlacementError,
    },
    /// The header does not describe a plan, or describes one that is too large.
    #[error("in the header: {source}")]
    Header {
        /// What is wrong with the header.
        source: ScheduleError,
    },
    /// The plan has more actions than the limit.
    #[error("line {line}: expected at most {ACTIONS_MAX} actions, got more: use fewer micro-batches")]
    TooManyActions {
        /// The line where the limit is exceeded.
        line: usize,
    },
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placement = self.placement();
        writeln!(f, "{FIRST_LINE}")?;
        writeln!(f, "mode {}", self.mode())?;
        writeln!(f, "partitions {}", self.partitions())?;
        writeln!(f, "micro_batches {}", self.micro_batches())?;
        // Worker numbers are ranks: they must survive even if the placement mentions the workers in another order.
        let workers: Vec<&str> = placement.worker_ids().map(|worker| placement.name(worker)).collect();
        if placement.to_string().parse::<Placement>().as_ref() != Ok(placement) {
            writeln!(f, "workers {}", workers.join(" "))?;
        }
        writeln!(f, "placement {}", placement.to_string().replace(',', " "))?;
        if !self.skips().is_empty() {
            write!(f, "skips")?;
            self.skips().iter().try_for_each(|(from, to)| write!(f, " {from}>{to}"))?;
            writeln!(f)?;
        }
        if self.frozen() > 0 {
            writeln!(f, "frozen {}", self.frozen())?;
        }
        for worker in placement.worker_ids() {
            write!(f, "{}:", placement.name(worker))?;
            self.actions(worker).iter().try_for_each(|action| write!(f, " {action}"))?;
            writeln!(f)?;
        }
        Ok(())
    }
}

impl FromStr for Plan {
    type Err = PlanParseError;

    fn from_str(text: &str) -> Result<Self, PlanParseError> {
        let mut lines = text.lines().enumerate().map(|(index, line)| {
            let without_comment = line.split('#').next().unwrap_or_default();
            (index + 1, without_comment.trim())
        });
        let first = lines.next().map_or("", |(_, line)| line);
        if first != FIRST_LINE {
            return Err(PlanParseError::FirstLine { got: shorten(first) });
        }
        let mut header = PlanHeader::default();
        let mut workers: Vec<(usize, &str, &str)> = Vec::new();
        for (line, content) in lines.filter(|(_, content)| !content.is_empty()) {
            match content.split_once(':') {
                Some((name, actions)) => workers.push((line, name.trim(), actions)),
                None => header.read(line, content)?,
            }
        }
        let empty = header.plan()?;
        let actions = read_actions(empty.placement(), workers)?;
        Ok(empty.with_actions(actions))
    }
}

fn read_actions(placement: &Placement, lines: Vec<(usize, &str, &str)>) -> Result<Vec<Vec<Action>>, PlanParseError> {
    let numbers: HashMap<&str, usize> =
        placement.worker_ids().map(|worker| (placement.name(worker), worker.index())).collect();
    let mut actions = vec![Vec::new(); placement.workers()];
    let mut count = 0;
    for (line, name, text) in lines {
        let &worker = numbers.get(name).ok_or_else(|| PlanParseError::Line {
            line,
            expected: "the name of a worker in `placement` before the colon".to_string(),
            got: shorten(name),
        })?;
        for piece in text.split_whitespace() {
            let action = piece.parse().map_err(|source| PlanParseError::Action { line, source })?;
            count += 1;
            if count > ACTIONS_MAX {
                return Err(PlanParseError::TooManyActions { line });
            }
            actions[worker].push(action);
        }
    }
    Ok(actions)
}

/// The header lines read so far.
#[derive(Default)]
struct PlanHeader<'a> {
    mode: Option<Mode>,
    partitions: Option<usize>,
    micro_batches: Option<usize>,
    workers: Option<Vec<&'a str>>,
    placement: Option<(usize, Vec<&'a str>)>,
    skips: Option<Vec<(PartitionId, PartitionId)>>,
    frozen: Option<usize>,
}

impl<'a> PlanHeader<'a> {
    fn read(&mut self, line: usize, content: &'a str) -> Result<(), PlanParseError> {
        let (key, value) = content.split_once(char::is_whitespace).unwrap_or((content, ""));
        let value = value.trim();
        let bad = |expected: &str, got: &str| PlanParseError::Line {
            line,
            expected: expected.to_string(),
            got: shorten(got),
        };
        let number = || value.parse::<usize>().map_err(|_| bad("a number", value));
        let names = || value.split_whitespace().collect::<Vec<_>>();
        match key {
            "mode" => {
                let mode = value.parse().map_err(|_| bad("`train` or `evaluate`", value))?;
                set(&mut self.mode, mode, line, "mode")
            }
            "partitions" => set(&mut self.partitions, number()?, line, "partitions"),
            "micro_batches" => set(&mut self.micro_batches, number()?, line, "micro_batches"),
            "workers" => set(&mut self.workers, names(), line, "workers"),
            "placement" => set(&mut self.placement, (line, names()), line, "placement"),
            "skips" => {
                let edge = |piece: &str| {
                    let (from, to) = piece.split_once('>')?;
                    Some((PartitionId(from.parse().ok()?), PartitionId(to.parse().ok()?)))
                };
                let edges = value
                    .split_whitespace()
                    .map(|piece| edge(piece).ok_or_else(|| bad("an edge such as `0>2`", piece)));
                set(&mut self.skips, edges.collect::<Result<_, _>>()?, line, "skips")
            }
            "frozen" => set(&mut self.frozen, number()?, line, "frozen"),
            _ => {
                let expected = "`mode`, `partitions`, `micro_batches`, `workers`, `placement`, `skips`, `frozen` or a worker's line `name: 0F0 …`";
                Err(bad(expected, content))
            }
        }
    }

    fn plan(self) -> Result<Plan, PlanParseError> {
        let missing = |key| PlanParseError::Missing { key };
        let mode = self.mode.ok_or(missing("mode"))?;
        let partitions = self.partitions.ok_or(missing("partitions"))?;
        let micro_batches = self.micro_batches.ok_or(missing("micro_batches"))?;
        let (line, names) = self.placement.ok_or(missing("placement"))?;
        if names.len() != partitions {
            return Err(PlanParseError::Line {
                line,
                expected: format!("one worker for each of {partitions} partitions"),
                got: format!("{} workers", names.len()),
            });
        }
        if partitions > PARTITIONS_MAX {
            let source = ScheduleError::TooLarge { what: "partitions", max: PARTITIONS_MAX, got: partitions };
            return Err(PlanParseError::Header { source });
        }
        let placement = placement(line, &names, self.workers)?;
        Plan::empty(placement, micro_batches, mode, &self.skips.unwrap_or_default())
            .and_then(|plan| plan.with_frozen(self.frozen.unwrap_or(0)))
            .map_err(|source| PlanParseError::Header { source })
    }
}

fn placement(line: usize, names: &[&str], workers: Option<Vec<&str>>) -> Result<Placement, PlanParseError> {
    let wrong = |source| PlanParseError::Placement { line, source };
    let Some(workers) = workers else {
        return names.join(",").parse().map_err(wrong);
    };
    let numbers: HashMap<&str, usize> = workers.iter().enumerate().map(|(number, &name)| (name, number)).collect();
    let placed = names.iter().map(|name| {
        numbers.get(name).copied().ok_or_else(|| PlanParseError::Line {
            line,
            expected: "only names from the `workers` line".to_string(),
            got: shorten(name),
        })
    });
    let placed = placed.collect::<Result<Vec<_>, _>>()?;
    Placement::with_names(workers.iter().map(ToString::to_string).collect(), &placed).map_err(wrong)
}

fn set<T>(slot: &mut Option<T>, value: T, line: usize, key: &'static str) -> Result<(), PlanParseError> {
    if slot.replace(value).is_some() {
        return Err(PlanParseError::Repeated { line, key });
    }
    Ok(())
}

fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::super::action::tests::any_action;
    use super::*;
    use crate::schedule::{Recompute, Request, Schedule};
    use proptest::prelude::*;

    const GOOD: &str = "\
distgpipe plan 1
mode train
partitions 3
micro_batches 1
placement client server client
skips 0>2
client: 0F0 0F0>1 2F0<1 2F0 2B0 2B0>1 0B0<1 0B0
server: 1F0<0 1F0 1F0>2 1B0<2 1B0 1B0>0
";

    #[test]
    fn the_text_is_the_documented_one() {
        let request = Request {
            placement: "client,server,client".parse().unwrap(),
            micro_batches: 1,
            recompute: Recompute::Never,
            skips: vec![(PartitionId(0), PartitionId(2))],
            frozen: 0,
        };
        let plan = Schedule::GPipe.plan(&request).unwrap();
        assert_eq!(plan.to_string(), GOOD);
        assert_eq!(GOOD.parse(), Ok(plan.clone()));
        let frozen = Schedule::GPipe.plan(&Request { frozen: 2, ..request }).unwrap();
        assert!(frozen.to_string().contains("skips 0>2\nfrozen 2\nclient: 0F0 0F0>1 2F0<1 2F0 2B0\n"), "{frozen}");
        assert_eq!(frozen.to_string().parse(), Ok(frozen));
        let by_hand =
            GOOD.replace("server: 1F0<0", "  # the big machine\n\nserver : 1F0<0\nserver:").replace('\n', " \r\n");
        assert_eq!(by_hand.parse(), Ok(plan));
    }

    #[test]
    fn worker_numbers_survive() {
        let placement = Placement::from_workers(&[1, 0]).unwrap();
        let plan = Schedule::OneFOneB.plan(&Request::new(placement, 2)).unwrap();
        assert!(plan.to_string().contains("workers w0 w1\nplacement w1 w0\n"));
        assert_eq!(plan.to_string().parse(), Ok(plan));
    }

    #[test]
    fn errors_give_the_line_and_what_was_expected() {
        let error = |from: &str, to: &str| GOOD.replace(from, to).parse::<Plan>().unwrap_err().to_string();
        let huge = format!("micro_batches {}", usize::MAX);
        for (from, to, expected) in [
            ("plan 1", "plan 2", "line 1: expected `distgpipe plan 1`, got `distgpipe plan 2`"),
            ("mode train", "mode trane", "line 2: expected `train` or `evaluate`, got `trane`"),
            ("mode train\n", "", "expected a line `mode …`"),
            ("partitions 3", "partitions 4", "line 5: expected one worker for each of 4 partitions, got `3 workers`"),
            ("partitions 3", "partitions -3", "line 3: expected a number, got `-3`"),
            ("micro_batches 1", "micro_batches 0", "in the header: expected at least 1 micro-batch"),
            ("micro_batches 1", huge.as_str(), "in the header: expected a plan of at most"),
            ("skips 0>2", "frozen 3", "in the header: expected fewer frozen partitions than the 3"),
            ("skips 0>2", "skips 2>0", "in the header: expected skip edges"),
            ("skips 0>2", "skips 0-2", "line 6: expected an edge such as `0>2`, got `0-2`"),
            ("skips 0>2", "mode train", "line 6: expected `mode` once"),
            ("skips 0>2", "color red", "line 6: expected `mode`, `partitions`"),
            ("skips 0>2", "workers client", "line 5: expected only names from the `workers` line, got `server`"),
            ("client server client", "client s/r client", "line 5: expected a worker name"),
            ("server:", "sever:", "line 8: expected the name of a worker in `placement` before the colon, got `sever`"),
            ("1F0>2 ", "1F0>> ", "line 8: expected an action such as"),
        ] {
            let got = error(from, to);
            assert!(got.contains(expected), "{from} → {to}\n     got: {got}\nexpected: {expected}");
        }
    }

    proptest! {
        #[test]
        fn any_plan_round_trips(
            workers in prop::collection::vec(0usize..3, 1..6),
            micro_batches in 1usize..5,
            actions in prop::collection::vec(prop::collection::vec(any_action(8, 8), 0..20), 3),
            skip in (0u32..4, 2u32..6),
        ) {
            // The plan need not be sound for its text.
            let Ok(placement) = Placement::from_workers(&workers) else { return Ok(()) };
            let skips: Vec<_> = [(PartitionId(skip.0), PartitionId(skip.1))]
                .into_iter().filter(|(from, to)| from < to && to.index() < workers.len()).collect();
            let count = placement.workers();
            let plan = Plan::empty(placement, micro_batches, Mode::Evaluate, &skips).unwrap();
            let plan = plan.with_actions(actions.into_iter().take(count).collect());
            prop_assert_eq!(plan.to_string().parse(), Ok(plan));
        }

        #[test]
        fn arbitrary_text_never_panics(text in "(.|\n)*") {
            let _ = text.parse::<Plan>();
            let _ = format!("{FIRST_LINE}\n{text}").parse::<Plan>();
        }

        #[test]
        fn a_damaged_plan_never_panics(start in 0..GOOD.len(), length in 0usize..12, patch in "[ -~é\n]{0,6}") {
            let end = (start + length).min(GOOD.len());
            let text = format!("{}{patch}{}", &GOOD[..start], &GOOD[end..]);
            if let Ok(plan) = text.parse::<Plan>() {
                // Nor does the checker on what was parsed.
                if super::super::check(&plan).is_ok() {
                    prop_assert_eq!(plan.to_string().parse(), Ok(plan));
                }
            }
        }
    }
}
