//! The trial of several codecs on the same tensors, and its table, picture and JSON.

use super::measure::{copy, measure, Measured, Speed, ROUNDS_MAX};
use super::sample::{written, Sample};
use super::{CodecsArgs, Outputs};
use crate::exit::usage;
use crate::report;
use crate::report::plot;
use crate::report::table::{Side, Table};
use crate::report::units;
use distgpipe_core::codec::{CodecId, CodecSpec, Member, ALL};
use distgpipe_core::wire::{Layout, HEADER_BYTES};
use serde_json::json;
use std::cmp::Reverse;
use std::path::Path;

/// How many variants of each codec are measured by default.
const EXAMPLES_MAX: usize = 4;

/// The tensors and the figures of each codec.
pub(super) struct Trial<'a> {
    samples: Vec<Sample<'a>>,
    codecs: Vec<Measured>,
    copy: Speed,
}

impl<'a> Trial<'a> {
    /// Measures the codecs of `args` on `samples`. `keep` receives the index, the tensor and the decoded elements of each tensor that
    /// a codec encoded.
    pub(super) fn new(
        args: &CodecsArgs,
        mut samples: Vec<Sample<'a>>,
        mut keep: impl FnMut(usize, &Sample<'a>, &[u8]),
    ) -> anyhow::Result<Self> {
        if args.channels_last {
            samples = samples.into_iter().map(Sample::channels_last).collect();
            if samples.iter().all(|sample| sample.layout != Layout::ChannelsLast) {
                return Err(usage(
                    "--channels-last: expected a float tensor of four dimensions, got none: remove the flag",
                ));
            }
        }
        let chosen = distinct(&args.codec);
        let specs = if chosen.is_empty() { examples() } else { chosen };
        let copy = copy(&samples)?;
        let keep = &mut |slot: usize, elements: &[u8]| keep(slot, &samples[slot], elements);
        let mut codecs =
            specs.iter().map(|spec| measure(spec, &samples, &mut *keep)).collect::<anyhow::Result<Vec<_>>>()?;
        if args.codec.is_empty() {
            codecs.sort_by_key(|measured| (family(&measured.spec), Reverse(measured.wire_bytes())));
        }
        Ok(Trial { samples, codecs, copy })
    }

    pub(super) fn show(&self, args: &CodecsArgs, outputs: &Outputs) -> anyhow::Result<()> {
        if let Some(output) = &outputs.plot {
            output.write(self.plot(args).as_bytes())?;
        }
        if args.json {
            return report::print_json(&self.json(args));
        }
        let mut text = format!("{}\n{}\n", self.table(), self.source(args));
        text.push_str(&self.refusals());
        text.push_str(&format!(
            "bits and ratio count the bytes on the wire, including a frame header of {HEADER_BYTES} bytes per tensor\n\
             mse is the mean squared error; relative is mse divided by the mean square of the values\n\
             GB/s are gigabytes of input per second on one thread, the fastest of up to {ROUNDS_MAX} rounds; `copy` copies the input\n"
        ));
        if cfg!(debug_assertions) {
            text.push_str("these are the speeds of a debug build; a release build is faster\n");
        }
        report::print(&text)
    }

    fn table(&self) -> String {
        let mut columns = vec![
            ("codec", Side::Left),
            ("bits per value", Side::Right),
            ("ratio", Side::Right),
            ("mse", Side::Right),
            ("relative", Side::Right),
            ("largest error", Side::Right),
            ("encode GB/s", Side::Right),
            ("decode GB/s", Side::Right),
        ];
        if self.codecs.iter().any(|measured| measured.refused() > 0) {
            columns.push(("sent raw", Side::Right));
        }
        let mut table = Table::new(&columns);
        for measured in &self.codecs {
            let errors = measured.errors();
            let refused = measured.refused();
            table.row(vec![
                measured.spec.to_string(),
                format!("{:.2}", self.bits_per_value(measured)),
                format!("{:.2}", measured.ratio()),
                error(errors.mse()),
                error(errors.relative_mse()),
                error(errors.max),
                speed(measured.speed.encode_gb_per_s),
                speed(measured.speed.decode_gb_per_s),
                if refused > 0 { refused.to_string() } else { String::new() },
            ]);
        }
        let mut cells = vec![String::new(); 6];
        cells[0] = "copy".to_owned();
        cells.extend([speed(self.copy.encode_gb_per_s), speed(self.copy.decode_gb_per_s)]);
        table.row(cells);
        table.render()
    }

    fn bits_per_value(&self, measured: &Measured) -> f64 {
        let values: usize = self.samples.iter().map(Sample::elements).sum();
        8.0 * measured.wire_bytes() as f64 / values.max(1) as f64
    }

    /// A line that describes the tensors.
    fn source(&self, args: &CodecsArgs) -> String {
        let bytes: usize = self.samples.iter().map(|sample| sample.bytes.len()).sum();
        let bytes = units::bytes(bytes as f64);
        let order = if args.channels_last { ", channels last" } else { "" };
        match (&args.input, &self.samples[..]) {
            (Some(path), [one]) => format!("{} of {}, {bytes}{order}", one.name, file_name(path)),
            (Some(path), all) => format!("{} tensors of {}, {bytes}{order}", all.len(), file_name(path)),
            (None, _) => {
                format!("{}, {} values, seed {}, {bytes}{order}", written(&args.shape, "×"), args.values, args.seed)
            }
        }
    }

    /// The tensors that a codec refused, with the reasons; empty if there are none.
    fn refusals(&self) -> String {
        let lossy: Vec<&Measured> = self.codecs.iter().filter(|measured| !measured.spec.is_raw()).collect();
        let mut refusals = Vec::new();
        for (slot, sample) in self.samples.iter().enumerate() {
            let by: Vec<(&CodecSpec, &String)> = lossy
                .iter()
                .filter_map(|measured| Some((&measured.spec, measured.tensors[slot].refused.as_ref()?)))
                .collect();
            let Some((_, why)) = by.first() else {
                continue;
            };
            let name = if sample.name.is_empty() { "the tensor" } else { sample.name };
            let specs: Vec<String> = by.iter().map(|(spec, _)| spec.to_string()).collect();
            let only = if by.len() < lossy.len() { format!(", with {}", specs.join(" and ")) } else { String::new() };
            refusals.push(format!("{name} ({why}{only})"));
        }
        match refusals.len() {
            0 => String::new(),
            1 => format!("1 tensor sent raw: {}\n", refusals[0]),
            count => format!("{count} tensors sent raw: {}\n", report::listed(&refusals, report::NAMES_LISTED_MAX)),
        }
    }

    /// Error over compression ratio.
    fn plot(&self, args: &CodecsArgs) -> String {
        let text = plot::Text {
            title: "relative mean squared error over compression ratio",
            source: &self.source(args),
            better: "right and down",
            x: "ratio: bytes of the tensor / bytes on the wire",
            y: "mean squared error / mean square",
            x_tick: ratio,
            y_tick: |power| format!("1e{power}"),
            joins_best: true,
        };
        plot::draw(&self.points(), &text)
    }

    fn points(&self) -> Vec<plot::Point> {
        let point = |measured: &Measured| plot::Point {
            label: measured.spec.to_string(),
            family: family(&measured.spec),
            x: measured.ratio(),
            y: measured.errors().relative_mse(),
        };
        self.codecs.iter().map(point).collect()
    }

    fn json(&self, args: &CodecsArgs) -> serde_json::Value {
        let mut value = json!({
            "channels_last": args.channels_last,
            "header_bytes": HEADER_BYTES,
            "copy_gb_per_s": self.copy.encode_gb_per_s,
            "codecs": self.codecs.iter().map(|measured| self.codec_json(measured, args.input.is_some())).collect::<Vec<_>>(),
        });
        let source = match &args.input {
            Some(path) => json!({ "input": path, "write_decoded": args.write_decoded }),
            None => json!({ "shape": args.shape, "values": args.values.to_string(), "seed": args.seed }),
        };
        if let (Some(value), serde_json::Value::Object(source)) = (value.as_object_mut(), source) {
            value.extend(source);
        }
        value
    }

    fn codec_json(&self, measured: &Measured, every_tensor: bool) -> serde_json::Value {
        let errors = measured.errors();
        let mut value = json!({
            "codec": measured.spec,
            "raw_bytes": measured.raw_bytes(),
            "wire_bytes": measured.wire_bytes(),
            "ratio": measured.ratio(),
            "bits_per_value": self.bits_per_value(measured),
            "mse": errors.mse(),
            "relative_mse": errors.relative_mse(),
            "max_error": errors.max,
            "encode_gb_per_s": measured.speed.encode_gb_per_s,
            "decode_gb_per_s": measured.speed.decode_gb_per_s,
            "rounds": measured.rounds,
            "tensors_sent_raw": measured.refused(),
        });
        if every_tensor {
            let tensors = self.samples.iter().zip(&measured.tensors).map(|(sample, sent)| {
                let used = if sent.refused.is_some() { "raw" } else { measured.spec.as_str() };
                json!({
                    "name": sample.name,
                    "shape": sample.dims,
                    "dtype": sample.dtype.name(),
                    "codec": used,
                    "raw_bytes": sent.raw_bytes,
                    "wire_bytes": sent.wire_bytes,
                    "mse": sent.errors.mse(),
                    "relative_mse": sent.errors.relative_mse(),
                    "max_error": sent.errors.max,
                    "sent_raw": sent.refused,
                })
            });
            value["tensors"] = tensors.collect();
        }
        value
    }
}

/// The first variants of every codec. Of `feedback` and `delta`, one: they differ from the wrapped codec only over several
/// steps.
fn examples() -> Vec<CodecSpec> {
    let shown = |member: &'static Member| {
        let needs_steps = matches!(member.id, CodecId::Feedback | CodecId::Delta);
        member.examples.iter().take(if needs_steps { 1 } else { EXAMPLES_MAX })
    };
    ALL.iter().flat_map(shown).filter_map(|example| example.parse().ok()).collect()
}

/// The codecs without duplicates, in their order.
pub(super) fn distinct(specs: &[CodecSpec]) -> Vec<CodecSpec> {
    let mut distinct = Vec::new();
    for spec in specs {
        if !distinct.contains(spec) {
            distinct.push(spec.clone());
        }
    }
    distinct
}

/// The index of a codec in [`ALL`].
fn family(spec: &CodecSpec) -> usize {
    let name = spec.as_str().split([':', '(']).next();
    ALL.iter().position(|member| Some(member.name) == name).unwrap_or(ALL.len())
}

/// A power of 2 as a ratio.
fn ratio(power: i32) -> String {
    match power {
        0..=20 => (1u32 << power).to_string(),
        -20..=-1 => format!("1/{}", 1u32 << -power),
        _ => format!("2^{power}"),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn error(error: f64) -> String {
    if error == 0.0 {
        "0".to_owned()
    } else {
        format!("{error:.2e}")
    }
}

fn speed(speed: Option<f64>) -> String {
    speed.map_or_else(|| "–".to_owned(), |speed| format!("{speed:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_is_measured_by_default_and_no_example_has_a_comma() {
        let examples = examples();
        for (place, member) in ALL.iter().enumerate() {
            assert!(examples.iter().any(|spec| family(spec) == place), "{}", member.name);
            assert!(member.examples.iter().all(|example| !example.contains(',')), "{}", member.name);
        }
        assert_eq!(distinct(&[&examples[..], &examples[..]].concat()), examples);
    }
}
