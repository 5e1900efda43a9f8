//! Places the labels of the points so that they are readable: each label takes the best of some positions around its point, and
//! looks again after the other labels moved.

use super::{Line, Point, FONT_SIZE, LEFT, LETTER_WIDTH, POINT_RADIUS, RIGHT, TOP, ZERO};

/// How many times each label looks for a better position.
const ROUNDS: usize = 6;

/// The distances of a label from its point, in pixels.
const DISTANCES: [f64; 4] = [0.0, 12.0, 26.0, 42.0];

/// The rectangle of a label.
#[derive(Clone, Copy, Debug)]
pub struct Label {
    pub left: f64,
    pub top: f64,
    width: f64,
    /// Whether it is so far from its point that a line should connect them.
    pub far: bool,
}

impl Label {
    const HEIGHT: f64 = FONT_SIZE + 2.0;

    /// The position in the rectangle that is nearest to a point.
    pub fn nearest(&self, x: f64, y: f64) -> (f64, f64) {
        (x.clamp(self.left, self.left + self.width), y.clamp(self.top, self.top + Self::HEIGHT))
    }

    fn overlap(&self, other: &Label) -> f64 {
        let reach = |a: f64, a_size: f64, b: f64, b_size: f64| ((a + a_size).min(b + b_size) - a.max(b)).max(0.0);
        reach(self.left, self.width, other.left, other.width) * reach(self.top, Self::HEIGHT, other.top, Self::HEIGHT)
    }

    fn covers(&self, (x, y): (f64, f64)) -> bool {
        let (near_x, near_y) = self.nearest(x, y);
        (near_x - x).hypot(near_y - y) < POINT_RADIUS + 1.0
    }

    /// Whether a line crosses the rectangle.
    fn crosses(&self, line: &Line) -> bool {
        line.places().any(|(x, y)| self.nearest(x, y) == (x, y))
    }
}

impl Line {
    /// Positions on the line, less than half a letter apart.
    fn places(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let (from, to) = (self.from, self.to);
        let steps = ((to.0 - from.0).hypot(to.1 - from.1) / 3.0).ceil().clamp(1.0, 1000.0) as usize;
        (0..=steps)
            .map(move |i| i as f64 / steps as f64)
            .map(move |share| (from.0 + share * (to.0 - from.0), from.1 + share * (to.1 - from.1)))
    }
}

/// Finds a position for the label of each point.
pub fn place(points: &[Point], places: &[(f64, f64)], lines: &[Line]) -> Vec<Label> {
    let mut labels: Vec<Label> =
        points.iter().zip(places).map(|(point, &at)| candidates(&point.label, at)[0]).collect();
    for _ in 0..ROUNDS {
        for (i, point) in points.iter().enumerate() {
            let cost = |label: &Label| {
                let others = labels.iter().enumerate().filter(|&(j, _)| j != i);
                others.map(|(_, other)| label.overlap(other)).sum::<f64>() + own_cost(label, places[i], places, lines)
            };
            // Candidates are in order of preference; the first of equals wins.
            let all = candidates(&point.label, places[i]).into_iter().enumerate();
            let rated = all.map(|(rank, label)| (cost(&label) + rank as f64, label));
            let best = rated.reduce(|best, next| if next.0 < best.0 { next } else { best });
            if let Some((_, best)) = best {
                labels[i] = best;
            }
        }
    }
    labels
}

/// The cost of a position for the label of the point at `own`, apart from other labels: points and lines under it, points under
/// the line that leads to it, and parts outside the chart.
fn own_cost(label: &Label, own: (f64, f64), places: &[(f64, f64)], lines: &[Line]) -> f64 {
    let leader = Line { family: 0, from: own, to: label.nearest(own.0, own.1) };
    let near = |at: (f64, f64)| leader.places().any(|(x, y)| (x - at.0).hypot(y - at.1) < POINT_RADIUS + 1.0);
    let covered = places.iter().filter(|&&at| label.covers(at) || (at != own && label.far && near(at))).count() as f64;
    let crossed = lines.iter().filter(|line| label.crosses(line)).count() as f64;
    let outside = (LEFT + 2.0 - label.left).max(0.0)
        + (label.left + label.width - RIGHT).max(0.0)
        + (TOP - 8.0 - label.top).max(0.0)
        + (label.top + Label::HEIGHT - (ZERO + 2.0)).max(0.0);
    80.0 * covered + 18.0 * crossed + 60.0 * outside
}

/// Positions around a point, in order of preference.
fn candidates(text: &str, (x, y): (f64, f64)) -> Vec<Label> {
    let width = text.chars().count() as f64 * LETTER_WIDTH;
    let gap = POINT_RADIUS + 3.0;
    let mut all = Vec::new();
    for distance in DISTANCES {
        let far = distance > 0.0;
        let (across, up) = (gap + distance, gap + distance);
        let right = x + across;
        let left = x - across - width;
        let middle = x - width / 2.0;
        let level = y - Label::HEIGHT / 2.0;
        let above = y - up - Label::HEIGHT;
        let below = y + up;
        for (left, top) in [
            (right, level),
            (right, above + gap),
            (right, below - gap),
            (middle, above),
            (left, level),
            (left, above + gap),
            (left, below - gap),
            (middle, below),
        ] {
            all.push(Label { left, top, width, far });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_adjacent_points_do_not_overlap() {
        let point = |i: usize| Point { label: format!("codec:{i}"), family: 0, x: 1.0, y: 1.0 };
        let points: Vec<Point> = (0..6).map(point).collect();
        let places: Vec<(f64, f64)> = (0..6).map(|i| (400.0 + 9.0 * f64::from(i), 300.0)).collect();
        let labels = place(&points, &places, &[]);
        for (i, a) in labels.iter().enumerate() {
            assert!(labels[i + 1..].iter().all(|b| a.overlap(b) == 0.0), "{labels:?}");
            assert!(!places.iter().any(|&at| a.covers(at)), "{a:?}");
        }
    }

    #[test]
    fn a_label_at_the_edge_stays_inside() {
        let points = [Point { label: "feedback(tile:4)".to_owned(), family: 0, x: 1.0, y: 1.0 }];
        for at in [(RIGHT - 5.0, 300.0), (LEFT + 5.0, 300.0), (RIGHT - 5.0, ZERO)] {
            let label = place(&points, &[at], &[])[0];
            assert!(label.left >= LEFT && label.left + label.width <= RIGHT, "{label:?}");
        }
    }
}
