//! A simulation as text: one row per worker, time from left to right.
//!
//! ```text
//! w0  F0 F1 F2 ......B2 B1 B0
//! w1  ...F0 F1 F2 B2 B1 B0 ...
//! ```
//!
//! The width of a computation is proportional to its duration. A step that is too long for the width at a readable
//! scale continues in another panel below.

use super::{Event, Op, Simulation};
use std::fmt::Write;

/// The largest number of panels for a step. Beyond it, cells become narrower than their labels.
const PANELS_MAX: usize = 12;
/// The smallest width of a chart, in columns.
const WIDTH_MIN: usize = 40;

impl Simulation {
    /// The computations as a chart of at most `width` columns (at least 40), with a legend. A cell shows the operation
    /// (F forward, R recomputation, B backward) and the micro-batch, preceded by the partition if any worker has
    /// several.
    pub fn to_text(&self, width: usize) -> String {
        let width = width.max(WIDTH_MIN);
        let several = self.labels_need_partition();
        // Names from a peer or a file may be long. They take at most a third of the width.
        let name_width = self.workers.iter().map(|worker| worker.name.len()).max().unwrap_or(0).min(width / 3);
        let columns = width - name_width - 2;
        let cells: Vec<&Event> =
            self.events.iter().filter(|event| event.action.is_compute() && event.end > event.start).collect();
        let label_width = cells.iter().map(|event| label(event, several).len()).max().unwrap_or(0);
        let shortest = cells.iter().map(|event| event.end - event.start).fold(f64::INFINITY, f64::min);
        let mut text = String::new();
        if !cells.is_empty() {
            // Columns per unit of time. The shortest cell has room for its label and a space, if there are enough
            // panels.
            let scale = ((label_width + 1) as f64 / shortest).min((columns * PANELS_MAX) as f64 / self.makespan);
            let column = |time: f64| (time * scale).round() as usize;
            let rows: Vec<Vec<char>> = (0..self.workers.len())
                .map(|worker| {
                    let mut row = vec!['.'; column(self.makespan)];
                    for event in cells.iter().filter(|event| event.worker.index() == worker) {
                        draw(&mut row, column(event.start), column(event.end), &label(event, several));
                    }
                    row
                })
                .collect();
            // The width of a panel is a multiple of the shortest cell, so that charts of equal costs break between
            // cells.
            let step = (shortest * scale).round().max(1.0) as usize;
            let panel = if step < columns { columns - columns % step } else { columns };
            for start in (0..column(self.makespan)).step_by(panel) {
                if start > 0 {
                    text.push('\n');
                }
                for (worker, row) in self.workers.iter().zip(&rows) {
                    let name: String = worker.name.chars().take(name_width).collect();
                    let cells: String = row[start..row.len().min(start + panel)].iter().collect();
                    let _ = writeln!(text, "{name:name_width$}  {}", cells.trim_end());
                }
            }
        }
        let partition = if several { "2F0: partition 2, " } else { "F0: " };
        let _ = writeln!(
            text,
            "\n{partition}forward of micro-batch 0; R recomputation, B backward, . idle\n\
             makespan {}, bubble {:.1} %",
            short(self.makespan),
            100.0 * self.bubble
        );
        text
    }

    /// Whether labels need the partition, because a worker has several.
    pub(super) fn labels_need_partition(&self) -> bool {
        self.workers.iter().any(|worker| worker.partitions.len() > 1)
    }
}

/// The label of an event: `F0`, or `2F0` with the partition.
pub(super) fn label(event: &Event, partition: bool) -> String {
    let full = event.action.to_string();
    let digits = full.bytes().take_while(u8::is_ascii_digit).count();
    if partition {
        full
    } else {
        full[digits..].to_string()
    }
}

/// A number with at most three decimals.
pub(super) fn short(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// Draws a cell: the label, then dashes, and a space before the next cell if there is room.
fn draw(row: &mut [char], start: usize, end: usize, label: &str) {
    let end = end.min(row.len());
    let Some(cell) = row.get_mut(start..end) else {
        return;
    };
    let space = usize::from(cell.len() > label.len());
    let body = cell.len() - space;
    cell.fill('-');
    if space == 1 {
        cell[body] = ' ';
    }
    if label.len() <= body {
        cell.iter_mut().zip(label.chars()).for_each(|(slot, char)| *slot = char);
    } else if let Some(kind) = label.chars().find(char::is_ascii_alphabetic) {
        // Too narrow for the label: show the operation alone.
        cell.fill(kind);
    }
}

/// The kind of a computation, which determines its colour; `None` for messages, which have no cell.
pub(super) fn kind(op: Op) -> Option<ComputeKind> {
    match op {
        Op::Forward => Some(ComputeKind::Forward),
        Op::Recompute => Some(ComputeKind::Recompute),
        Op::Backward => Some(ComputeKind::Backward),
        Op::Send { .. } | Op::Receive { .. } => None,
    }
}

/// The three kinds of computation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ComputeKind {
    Forward,
    Recompute,
    Backward,
}

#[cfg(test)]
mod tests {
    use super::super::{simulate, Costs, Recompute, Request, Schedule};
    use super::*;
    use crate::placement::Placement;
    use proptest::prelude::*;

    fn simulation(schedule: Schedule, placement: &str, micro_batches: usize, costs: &Costs) -> Simulation {
        let request = Request::new(placement.parse().unwrap(), micro_batches);
        simulate(&schedule.plan(&request).unwrap(), costs).unwrap()
    }

    #[test]
    fn gpipe_looks_as_in_the_paper() {
        let text = simulation(Schedule::GPipe, "w0,w1", 3, &Costs::equal(2)).to_text(100);
        let expected = "\
w0  F0 F1 F2 ......B2 B1 B0
w1  ...F0 F1 F2 B2 B1 B0 ...

F0: forward of micro-batch 0; R recomputation, B backward, . idle
makespan 8, bubble 25.0 %
";
        assert_eq!(text, expected);
    }

    #[test]
    fn labels_show_the_partition_and_long_steps_continue_in_a_panel_below() {
        let mut costs = Costs::equal(3);
        costs.backward = vec![2.0; 3];
        let text = simulation(Schedule::OneFOneB, "client,server,client", 2, &costs).to_text(40);
        let expected = "\
client  0F0 0F1 2F0 2B0---- 2F1 2B1----
server  ....1F0 1F1 ........1B0---- ....

client  0B0---- 0B1----
server  1B1---- ........

2F0: partition 2, forward of micro-batch 0; R recomputation, B backward, . idle
makespan 12, bubble 25.0 %
";
        assert_eq!(text, expected);
    }

    proptest! {
        #[test]
        fn any_simulation_draws_within_its_width(
            partitions in 1usize..6,
            micro_batches in 1usize..20,
            width in 0usize..200,
            costs in prop::collection::vec(prop_oneof![Just(0.0), 0.0..1e6, 0.0..1e-6], 15),
        ) {
            let recompute = Recompute::ExceptLast;
            let request = Request { recompute, ..Request::new(Placement::one_worker_each(partitions), micro_batches) };
            let plan = Schedule::OneFOneB.plan(&request).unwrap();
            let mut all = Costs::new(costs[..partitions].to_vec(), costs[5..5 + partitions].to_vec());
            all.recompute = costs[10..10 + partitions].to_vec();
            let simulation = simulate(&plan, &all).unwrap();
            for line in simulation.to_text(width).lines().take_while(|line| !line.is_empty()) {
                prop_assert!(line.chars().count() <= width.max(WIDTH_MIN));
            }
            prop_assert!(simulation.to_svg().ends_with("</svg>\n"));
        }
    }
}
