//! What `distgpipe balance` prints.

use super::ranking::{Order, Ranked};
use super::search::{age_and_spread, CostSource, Outcome};
use super::BalanceArgs;
use crate::report::cut::CutReport;
use crate::report::units;
use distgpipe_core::balance::{Verdict, EQUAL_WITHIN, SIGNIFICANCE};
use serde_json::{json, Value};

/// The best cut, its order among the others, the source of the costs, and the given cut.
pub fn text(args: &BalanceArgs, report: &CutReport<'_>, outcome: &Outcome) -> anyhow::Result<String> {
    let Outcome { ranked, costs, source } = outcome;
    let mut text = report.text();
    if let Some(order) = &ranked.order {
        text.push_str(&order_text(args, order, ranked));
    }
    let rounds = units::plural(costs.rounds.len(), "round");
    let sample = || args.sample.describe(report.placement.workers());
    match source {
        CostSource::File => {}
        CostSource::Kept(path, age_s) => text.push_str(&format!(
            "layer costs of {rounds} with {} read from {}{}; --measure-again measures them again\n",
            sample()?,
            path.display(),
            age_and_spread(*age_s, costs)
        )),
        CostSource::Measured(path) => {
            let kept = path.as_ref().map(|path| format!(", kept in {}", path.display())).unwrap_or_default();
            let spread = costs.spread().map(|spread| format!("; {spread}")).unwrap_or_default();
            text.push_str(&format!("layers measured with {} in {rounds}{kept}{spread}\n", sample()?));
        }
    }
    if let Some((given, estimate)) = &ranked.given {
        text.push_str(&format!("\ngiven cut {given}:\n{}", report.cut_text(given, estimate)));
        let best_s = ranked.found.estimate.step_s;
        if *given == ranked.found.balance {
            text.push_str("this is the best cut\n");
        } else if best_s > 0.0 {
            let share = estimate.step_s / best_s - 1.0;
            let slower = if share < 0.0 { "shorter" } else { "longer" };
            text.push_str(&format!("a step is {} {slower} than with the best cut\n", units::percent(share.abs())));
        }
        let over = report.memory_limit_bytes.filter(|limit| estimate.memory_bytes() > *limit);
        if let Some(limit) = over {
            text.push_str(&format!("a worker needs more than {}\n", units::bytes(limit as f64)));
        }
    }
    Ok(format!("{text}\nto use the best cut: --balance {}\n", ranked.found.balance))
}

/// Whether the measurements show that the best cut is faster than its rival.
fn order_text(args: &BalanceArgs, order: &Order, ranked: &Ranked) -> String {
    let Order { rival, comparison, .. } = order;
    let given = ranked.given.as_ref().is_some_and(|(given, _)| given == rival);
    let other = if given { format!("the given cut ({rival})") } else { format!("the next best cut ({rival})") };
    let (rounds, faster) = (comparison.rounds(), comparison.first_faster());
    let level = units::percent(SIGNIFICANCE);
    match order.verdict {
        Verdict::FirstFaster => {
            format!("faster than {other} in {faster} of {rounds} rounds after the choice, significant at {level}\n")
        }
        Verdict::SecondFaster => format!(
            "slower than {other} in {} of {rounds} rounds after the choice, significant at {level}; {}\n",
            rounds - faster,
            match order.rival_fits {
                true => "faster by the shortest times of each layer",
                false => "that cut exceeds the memory limit",
            }
        ),
        Verdict::Equal => format!(
            "as fast as {other}: they differ by less than {} in {rounds} rounds after the choice, significant at {level}\n",
            units::percent(EQUAL_WITHIN)
        ),
        Verdict::Undecided => {
            let remedy = match args.costs {
                Some(_) => "",
                None => "; raise --time-limit to measure longer",
            };
            match rounds {
                0 => format!("not compared with {other} in rounds of their own{remedy}\n"),
                _ => format!(
                    "not shown to be faster than {other}: it was in {faster} of {rounds} rounds after the choice{remedy}\n"
                ),
            }
        }
    }
}

/// The same as JSON.
pub fn json(args: &BalanceArgs, report: &CutReport<'_>, outcome: &Outcome) -> anyhow::Result<Value> {
    let Outcome { ranked, costs, source } = outcome;
    let mut value = report.json();
    value["model"] = args.model.clone().into();
    value["rows"] = costs.rows.into();
    value["precision"] = serde_json::to_value(costs.precision)?;
    value["given"] = ranked.given.as_ref().map(|(cut, estimate)| report.cut_json(cut, estimate)).into();
    value["order"] = ranked.order.as_ref().map(order_json).into();
    let (name, path, age_s) = match source {
        CostSource::File => ("file", args.costs.clone(), None),
        CostSource::Kept(path, age_s) => ("kept", Some(path.clone()), *age_s),
        CostSource::Measured(path) => ("measured", path.clone(), None),
    };
    let (rounds, spread) = (costs.rounds.len(), costs.spread());
    value["costs"] = json!({ "source": name, "path": path, "rounds": rounds, "age_s": age_s, "round": spread });
    Ok(value)
}

fn order_json(order: &Order) -> Value {
    let verdict = match order.verdict {
        Verdict::FirstFaster => "faster",
        Verdict::SecondFaster => "slower",
        Verdict::Equal => "equal",
        Verdict::Undecided => "undecided",
    };
    json!({
        "rival": order.rival.sizes(),
        "rival_step_s": order.rival_s,
        "verdict": verdict,
        "rounds": order.comparison.rounds(),
        "faster_in": order.comparison.first_faster(),
        "significance": SIGNIFICANCE,
    })
}
