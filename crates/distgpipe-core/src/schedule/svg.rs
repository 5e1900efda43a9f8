//! A simulation as a self-contained SVG picture: one row per worker, time from left to right. The colour shows the kind
//! of computation and is darker for later partitions; idle time is hatched.

use super::render::{kind, label, short, ComputeKind};
use super::{Event, Simulation};
use std::fmt::Write;

const MARGIN: f64 = 16.0;
const CHART_WIDTH: f64 = 1120.0;
const ROW_HEIGHT: f64 = 34.0;
const ROW_GAP: f64 = 8.0;
const LETTER_WIDTH: f64 = 7.3;
/// The number of characters of a worker's name that are shown.
const NAME_CHARS_MAX: usize = 24;

impl Simulation {
    /// The computations as a self-contained SVG picture with a time axis and a legend.
    pub fn to_svg(&self) -> String {
        let names: Vec<String> = self.workers.iter().map(|worker| shown(&worker.name)).collect();
        let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let left = MARGIN + longest as f64 * LETTER_WIDTH + 12.0;
        let right = left + CHART_WIDTH + 86.0;
        let top = MARGIN + 30.0;
        let bottom = top + self.workers.len() as f64 * (ROW_HEIGHT + ROW_GAP);
        let (width, height) = (right + MARGIN, bottom + 74.0);
        let mut svg = String::new();
        let _ = write!(
            svg,
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="12">
<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" height="7" fill="#f6f6f4"/><line x1="0" y1="0" x2="0" y2="7" stroke="#dcdcd6" stroke-width="2"/></pattern></defs>
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="{MARGIN}" y="{:.1}" font-size="13" fill="#222">makespan {} · bubble {:.1} %</text>
"##,
            MARGIN + 10.0,
            short(self.makespan),
            100.0 * self.bubble,
        );
        for (index, (name, worker)) in names.iter().zip(&self.workers).enumerate() {
            let y = top + index as f64 * (ROW_HEIGHT + ROW_GAP);
            let middle = y + ROW_HEIGHT / 2.0 + 4.0;
            let _ = writeln!(
                svg,
                r##"<text x="{:.1}" y="{middle:.1}" text-anchor="end" fill="#222">{name}</text><rect x="{left:.1}" y="{y:.1}" width="{CHART_WIDTH}" height="{ROW_HEIGHT}" fill="url(#idle)"/><text x="{:.1}" y="{middle:.1}" fill="#666">{:.0} % idle</text>"##,
                left - 10.0,
                left + CHART_WIDTH + 10.0,
                100.0 * worker.bubble,
            );
        }
        if self.makespan > 0.0 {
            self.cells(&mut svg, left, top);
            self.axis(&mut svg, left, bottom);
        }
        self.legend(&mut svg, left, bottom + 44.0);
        svg.push_str("</svg>\n");
        svg
    }

    fn cells(&self, svg: &mut String, left: f64, top: f64) {
        let scale = CHART_WIDTH / self.makespan;
        let several = self.labels_need_partition();
        for event in &self.events {
            let Some(kind) = kind(event.action.op) else {
                continue;
            };
            let x = left + event.start * scale;
            let y = top + event.worker.index() as f64 * (ROW_HEIGHT + ROW_GAP);
            let width = (event.end - event.start) * scale;
            let (fill, ink) = self.colour(kind, event.action.partition.index());
            let _ = write!(
                svg,
                r##"<rect x="{x:.2}" y="{y:.1}" width="{width:.2}" height="{ROW_HEIGHT}" fill="{fill}" stroke="#ffffff" stroke-width="{}"/>"##,
                if width > 6.0 { 1.0 } else { 0.0 },
            );
            if let Some((label, size)) = fitting(event, several, width) {
                let _ = write!(
                    svg,
                    r##"<text x="{:.2}" y="{:.1}" text-anchor="middle" font-size="{size}" fill="{ink}">{label}</text>"##,
                    x + width / 2.0,
                    y + ROW_HEIGHT / 2.0 + 4.0,
                );
            }
            svg.push('\n');
        }
    }

    fn axis(&self, svg: &mut String, left: f64, bottom: f64) {
        let scale = CHART_WIDTH / self.makespan;
        let step = tick(self.makespan);
        let ticks = (self.makespan / step + 1e-9).floor() as usize;
        let y = bottom + 2.0;
        let _ = writeln!(
            svg,
            r##"<line x1="{left:.1}" y1="{y:.1}" x2="{:.1}" y2="{y:.1}" stroke="#999"/>"##,
            left + CHART_WIDTH
        );
        for index in 0..=ticks {
            let time = index as f64 * step;
            let x = left + time * scale;
            let _ = writeln!(
                svg,
                r##"<line x1="{x:.1}" y1="{y:.1}" x2="{x:.1}" y2="{:.1}" stroke="#999"/><text x="{x:.1}" y="{:.1}" text-anchor="middle" font-size="11" fill="#666">{}</text>"##,
                y + 5.0,
                y + 18.0,
                significant(time, step),
            );
        }
    }

    fn legend(&self, svg: &mut String, left: f64, y: f64) {
        let partitions = self.partitions();
        let mut x = left;
        let words = [
            (ComputeKind::Forward, "forward"),
            (ComputeKind::Recompute, "recomputation"),
            (ComputeKind::Backward, "backward"),
        ];
        let occurs = |wanted: ComputeKind| self.events.iter().any(|event| kind(event.action.op) == Some(wanted));
        for (kind, word) in words.into_iter().filter(|&(kind, _)| occurs(kind)) {
            // One swatch per partition, from the input on; if there are many, only the first and the last.
            let shown = if partitions <= 8 { (0..partitions).collect() } else { vec![0, partitions - 1] };
            for partition in shown {
                let (fill, _) = self.colour(kind, partition);
                let _ = write!(svg, r##"<rect x="{x:.1}" y="{y:.1}" width="12" height="12" fill="{fill}"/>"##);
                x += 13.0;
            }
            let _ = writeln!(svg, r##"<text x="{:.1}" y="{:.1}" fill="#444">{word}</text>"##, x + 5.0, y + 10.5);
            x += word.len() as f64 * LETTER_WIDTH + 28.0;
        }
        let _ =
            write!(svg, r##"<rect x="{x:.1}" y="{y:.1}" width="24" height="12" fill="url(#idle)" stroke="#dcdcd6"/>"##);
        let note = if partitions > 1 { "idle    darker: later partition" } else { "idle" };
        let _ = writeln!(
            svg,
            r##"<text x="{:.1}" y="{:.1}" fill="#444" xml:space="preserve">{note}</text>"##,
            x + 30.0,
            y + 10.5
        );
    }

    fn partitions(&self) -> usize {
        self.workers.iter().map(|worker| worker.partitions.len()).sum()
    }

    /// The colour of a cell, and a text colour that is readable on it.
    fn colour(&self, kind: ComputeKind, partition: usize) -> (String, &'static str) {
        let depth = match self.partitions() {
            0 | 1 => 0.5,
            partitions => partition as f64 / (partitions - 1) as f64,
        };
        // Blue and orange are distinguishable with colour blindness too.
        let (hue, saturation, light, dark) = match kind {
            ComputeKind::Forward => (212.0, 0.72, 0.78, 0.42),
            ComputeKind::Recompute => (265.0, 0.34, 0.84, 0.56),
            ComputeKind::Backward => (28.0, 0.85, 0.74, 0.40),
        };
        let lightness = light + (dark - light) * depth;
        let channels = rgb(hue, saturation, lightness);
        let [red, green, blue] = channels.map(f64::from);
        let ink = if 0.299 * red + 0.587 * green + 0.114 * blue > 135.0 { "#1a1a1a" } else { "#ffffff" };
        (hex(channels), ink)
    }
}

/// The CSS colour `hsl()` as hexadecimal RGB, since not every viewer supports `hsl()`. Hue in degrees, saturation and
/// lightness in 0..=1.
fn rgb(hue: f64, saturation: f64, lightness: f64) -> [u8; 3] {
    let chroma = saturation * lightness.min(1.0 - lightness);
    let channel = |offset: f64| {
        let k = (offset + hue / 30.0) % 12.0;
        let value = lightness - chroma * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0);
        (value * 255.0).round() as u8
    };
    [channel(0.0), channel(8.0), channel(4.0)]
}

fn hex([red, green, blue]: [u8; 3]) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// The most detailed label that fits, and its font size.
fn fitting(event: &Event, partition: bool, width: f64) -> Option<(String, u32)> {
    let full = label(event, partition);
    let micro_batch = event.action.micro_batch.to_string();
    let room = |text: &str, size: u32| text.len() as f64 * f64::from(size) * 0.62 + 2.0 <= width;
    [(full.clone(), 12), (full, 10), (micro_batch, 10)].into_iter().find(|(text, size)| room(text, *size))
}

/// The distance of ticks: 1, 2 or 5 times a power of ten, for about ten ticks.
fn tick(makespan: f64) -> f64 {
    let rough = makespan / 10.0;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&step| step >= rough * 0.999).unwrap_or(rough)
}

/// The time at a tick, with as many decimals as the distance of ticks needs.
fn significant(time: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 12.0) as usize;
    if (1e-12..1e7).contains(&step) {
        format!("{time:.digits$}")
    } else {
        format!("{time:.1e}")
    }
}

/// A name as the text of an SVG element: truncated and escaped.
fn shown(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars().take(NAME_CHARS_MAX) {
        match letter {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            '"' => text.push_str("&quot;"),
            '\'' => text.push_str("&#39;"),
            letter if letter.is_control() => text.push('\u{fffd}'),
            letter => text.push(letter),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::{simulate, Costs, Recompute, Request, Schedule};
    use super::*;

    #[test]
    fn every_computation_is_drawn_and_names_are_escaped() {
        let request =
            Request { recompute: Recompute::Always, ..Request::new("client,server,client".parse().unwrap(), 4) };
        let plan = Schedule::OneFOneB.plan(&request).unwrap();
        let mut simulation = simulate(&plan, &Costs::equal(3)).unwrap();
        // Placements reject such a name, but the picture must not rely on that.
        simulation.workers[0].name = "<b>&\"'\u{1}".to_string();
        let svg = simulation.to_svg();
        assert!(svg.contains("&lt;b&gt;&amp;&quot;&#39;\u{fffd}") && !svg.contains("<b>"));
        for label in ["2R3", "1B0", "0F3"] {
            assert!(svg.contains(&format!(">{label}</text>")), "{label}");
        }
        // 3 partitions × 4 micro-batches × F, R, B; the legend has no stroke of this kind.
        assert_eq!(svg.matches(r##"stroke="#ffffff""##).count(), 36);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn colours_are_the_ones_css_would_compute() {
        assert_eq!(hex(rgb(0.0, 1.0, 0.5)), "#ff0000");
        assert_eq!(hex(rgb(120.0, 1.0, 0.25)), "#008000");
        assert_eq!(hex(rgb(212.0, 0.0, 1.0)), "#ffffff");
    }
}
