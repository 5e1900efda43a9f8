//! Plots points as a self-contained SVG: logarithmic axes, and lines between the points of one family. Points at height 0 have no
//! logarithm and are drawn on a separate line at the bottom.

mod labels;

use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 620.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 936.0;
const TOP: f64 = 64.0;
/// The y coordinate of the lowest point above 0.
const BOTTOM: f64 = 510.0;
/// The y coordinate of height 0.
const ZERO: f64 = 540.0;
const FONT_SIZE: f64 = 12.0;
const LETTER_WIDTH: f64 = 7.3;
const POINT_RADIUS: f64 = 4.5;
/// The most labels on an axis.
const TICKS_MAX: i32 = 12;

/// The color-blind-safe palette of Okabe and Ito, darkened so that text on white is readable, and some more colors.
const COLOURS: [&str; 12] = [
    "#444444", "#0072b2", "#3a9bd6", "#b8860b", "#d55e00", "#00795a", "#a8508a", "#6a4fb3", "#8c2d04", "#4d7c0f",
    "#b0125b", "#0f766e",
];

/// A point of the plot.
pub struct Point {
    /// The label of the point; none if it is empty.
    pub label: String,
    /// Points of one family share a color and are connected.
    pub family: usize,
    /// The position on the axis across, which has powers of 2.
    pub x: f64,
    /// The position on the axis upwards, which has powers of 10.
    pub y: f64,
}

/// What a plot says beside its points.
pub struct Text<'a> {
    pub title: &'a str,
    /// A line that describes what was measured.
    pub source: &'a str,
    /// Where the better points are.
    pub better: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    /// The text of a power of 2 on the axis across, and of a power of 10 on the axis upwards.
    pub x_tick: fn(i32) -> String,
    pub y_tick: fn(i32) -> String,
    /// Whether lines leave out points that another one of the family beats, with a larger x and a smaller y.
    pub joins_best: bool,
}

/// Draws the plot.
pub fn draw(points: &[Point], text: &Text<'_>) -> String {
    let chart = Chart::around(points);
    let places: Vec<(f64, f64)> = points.iter().map(|point| (chart.x(point.x), chart.y(point.y))).collect();
    let (title, better) = (escaped(text.title), escaped(text.better));
    let mut svg = String::new();
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0} {HEIGHT:.0}" width="{WIDTH:.0}" height="{HEIGHT:.0}" font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="{FONT_SIZE}">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="{LEFT}" y="26" font-size="13" fill="#222">{title}</text>
<text x="{LEFT}" y="44" fill="#666">{}</text>
<text x="{RIGHT}" y="26" text-anchor="end" fill="#666">better: {better}</text>
"##,
        escaped(text.source)
    );
    chart.axes(&mut svg, text);
    let lines = joined(points, &places, text.joins_best);
    for Line { family, from, to } in &lines {
        let _ = writeln!(
            svg,
            r##"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" stroke="{}" stroke-width="1.5" stroke-opacity="0.35"/>"##,
            from.0,
            from.1,
            to.0,
            to.1,
            colour(*family)
        );
    }
    let labels = labels::place(points, &places, &lines);
    for ((point, &(x, y)), label) in points.iter().zip(&places).zip(&labels) {
        let colour = colour(point.family);
        if label.far && !point.label.is_empty() {
            let (to_x, to_y) = label.nearest(x, y);
            let _ = writeln!(
                svg,
                r##"<line x1="{x:.1}" y1="{y:.1}" x2="{to_x:.1}" y2="{to_y:.1}" stroke="#bbb" stroke-width="1"/>"##
            );
        }
        let _ =
            write!(svg, r##"<circle cx="{x:.1}" cy="{y:.1}" r="{POINT_RADIUS}" fill="{colour}" stroke="#ffffff"/>"##);
        if !point.label.is_empty() {
            let (left, base, text) = (label.left, label.top + FONT_SIZE - 1.0, escaped(&point.label));
            let _ = write!(svg, r##"<text x="{left:.1}" y="{base:.1}" fill="{colour}">{text}</text>"##);
        }
        svg.push('\n');
    }
    svg.push_str("</svg>\n");
    svg
}

/// The ranges of the axes.
struct Chart {
    x_log2: (i32, i32),
    y_log10: (i32, i32),
    zeros: bool,
}

impl Chart {
    fn around(points: &[Point]) -> Self {
        let across = points.iter().map(|point| log(point.x).log2());
        let upwards = points.iter().filter(|point| point.y > 0.0).map(|point| log(point.y).log10());
        Chart {
            // The frame header makes a ratio of 1 slightly less, which is not worth another power of 2.
            x_log2: range(across, 0.02),
            y_log10: range(upwards, 0.0),
            zeros: points.iter().any(|point| point.y <= 0.0),
        }
    }

    fn x(&self, x: f64) -> f64 {
        let (from, to) = (f64::from(self.x_log2.0), f64::from(self.x_log2.1));
        // Leaves room for half a label at both ends.
        LEFT + 24.0 + (log(x).log2() - from) / (to - from) * (RIGHT - LEFT - 48.0)
    }

    fn y(&self, y: f64) -> f64 {
        if y <= 0.0 {
            return ZERO;
        }
        let (from, to) = (f64::from(self.y_log10.0), f64::from(self.y_log10.1));
        BOTTOM - (log(y).log10() - from) / (to - from) * (BOTTOM - TOP)
    }

    fn axes(&self, svg: &mut String, text: &Text<'_>) {
        let end = if self.zeros { ZERO } else { BOTTOM };
        let (from, to) = self.x_log2;
        for power in (from..=to).step_by(step(from, to)) {
            let x = self.x(2f64.powi(power));
            let _ = writeln!(
                svg,
                r##"<line x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{end}" stroke="#eeeeea"/><text x="{x:.1}" y="{:.1}" text-anchor="middle" font-size="11" fill="#666">{}</text>"##,
                end + 20.0,
                escaped(&(text.x_tick)(power))
            );
        }
        let (from, to) = self.y_log10;
        for power in (from..=to).step_by(step(from, to)) {
            let y = self.y(10f64.powi(power));
            line_across(svg, y, "#eeeeea", &escaped(&(text.y_tick)(power)));
        }
        if self.zeros {
            line_across(svg, ZERO, "#c8c8c2", "0");
        }
        let _ = writeln!(
            svg,
            r##"<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{end}" stroke="#999"/><line x1="{LEFT}" y1="{end}" x2="{RIGHT}" y2="{end}" stroke="#999"/>
<text x="{:.1}" y="{:.1}" text-anchor="middle" fill="#444">{}</text>
<text transform="translate(20 {:.1}) rotate(-90)" text-anchor="middle" fill="#444">{}</text>"##,
            (LEFT + RIGHT) / 2.0,
            end + 46.0,
            escaped(text.x),
            (TOP + BOTTOM) / 2.0,
            escaped(text.y),
        );
    }
}

fn line_across(svg: &mut String, y: f64, stroke: &str, text: &str) {
    let _ = writeln!(
        svg,
        r##"<line x1="{LEFT}" y1="{y:.1}" x2="{RIGHT}" y2="{y:.1}" stroke="{stroke}"/><text x="{:.1}" y="{:.1}" text-anchor="end" font-size="11" fill="#666">{text}</text>"##,
        LEFT - 8.0,
        y + 4.0,
    );
}

/// Clamps a number so that its logarithm can be drawn.
fn log(number: f64) -> f64 {
    number.clamp(1e-300, 1e300)
}

/// The integers around all values, at least one apart; a value may be below the lower one by `slack`.
fn range(values: impl Iterator<Item = f64>, slack: f64) -> (i32, i32) {
    let (min, max) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), v| (min.min(v), max.max(v)));
    if min > max {
        return (0, 1);
    }
    let from = (min + slack).floor() as i32;
    (from, (max.ceil() as i32).max(from + 1))
}

/// The step between labels, so that there are at most `TICKS_MAX`.
fn step(from: i32, to: i32) -> usize {
    ((to - from) / TICKS_MAX + 1) as usize
}

fn colour(family: usize) -> &'static str {
    COLOURS[family % COLOURS.len()]
}

/// A line between two points of a family.
struct Line {
    family: usize,
    from: (f64, f64),
    to: (f64, f64),
}

/// The lines between the points of each family, ordered by x. Points at height 0 are left out, and with `best` those that another
/// one of the family beats in both x and y.
fn joined(points: &[Point], places: &[(f64, f64)], best: bool) -> Vec<Line> {
    let beaten = |point: &Point| {
        let better = |other: &Point| other.x >= point.x && other.y < point.y;
        best && points.iter().any(|other| other.family == point.family && better(other))
    };
    let mut order: Vec<usize> = (0..points.len()).filter(|&i| points[i].y > 0.0 && !beaten(&points[i])).collect();
    order.sort_by(|&a, &b| points[a].family.cmp(&points[b].family).then_with(|| places[a].0.total_cmp(&places[b].0)));
    let pairs = order.windows(2).filter(|pair| points[pair[0]].family == points[pair[1]].family);
    pairs.map(|pair| Line { family: points[pair[0]].family, from: places[pair[0]], to: places[pair[1]] }).collect()
}

/// Escapes text for an SVG element.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            letter if letter.is_control() => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: Text<'_> = Text {
        title: "y over x",
        source: "a & b",
        better: "up",
        x: "x",
        y: "y",
        x_tick: |power| format!("2^{power}"),
        y_tick: |power| format!("1e{power}"),
        joins_best: true,
    };

    fn point(label: &str, family: usize, x: f64, y: f64) -> Point {
        Point { label: label.to_owned(), family, x, y }
    }

    #[test]
    fn every_point_is_drawn_inside_the_plot_whatever_its_figures() {
        let odd = [
            point("raw", 0, 0.99, 0.0),
            point("<a>", 1, 7.1, 1e-3),
            point("b", 1, 1e9, f64::INFINITY),
            point("c", 2, 0.0, 1e-300),
        ];
        for points in [&odd[..], &odd[..1], &odd[1..2], &[]] {
            let svg = draw(points, &TEXT);
            assert_eq!(svg.matches("<circle").count(), points.len());
            assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("<a>"), "{svg}");
            let chart = Chart::around(points);
            for point in points {
                assert!((LEFT..=RIGHT).contains(&chart.x(point.x)), "{}", point.label);
                assert!((TOP..=ZERO).contains(&chart.y(point.y)), "{}", point.label);
            }
        }
    }

    #[test]
    fn a_larger_y_is_higher_and_a_larger_x_further_right() {
        let points = [point("a", 0, 2.0, 1e-8), point("b", 0, 8.0, 1e-2)];
        let chart = Chart::around(&points);
        assert!(chart.x(8.0) > chart.x(2.0) && chart.y(1e-2) < chart.y(1e-8));
        // A decade has the same height everywhere.
        assert!((chart.y(1e-3) - chart.y(1e-2) - (chart.y(1e-7) - chart.y(1e-6))).abs() < 1e-9);
        assert_eq!(joined(&points, &[(0.0, 0.0), (1.0, 1.0)], true).len(), 1);
    }
}
