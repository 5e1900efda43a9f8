//! `distgpipe codecs`: what each codec would make of a tensor, made up or captured, before a run is risked on it.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`sample`] | the tensors |
//! | [`measure`] | bytes, errors and times of a codec |
//! | [`plot`] | error against ratio, as a picture |

mod measure;
mod plot;
mod sample;

use crate::exit::usage;
use crate::files::NewFile;
use crate::report;
use crate::report::table::{Side, Table};
use crate::report::units;
use crate::tensor_file::TensorFile;
use distgpipe::core::codec::{Spec, ALL};
use distgpipe::core::wire::{Layout, HEADER_BYTES};
use measure::{copy, measure, Measured, Speed, ROUNDS_MAX};
use sample::{selected, written, Sample, Values};
use serde_json::json;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

/// So many examples of a codec are in the table if nobody chose.
const EXAMPLES_MAX: usize = 4;

/// Columns of the list of codecs, which is wrapped here so that its lines hang under each other.
const HELP_WIDTH: usize = 80;

/// Flags of `distgpipe codecs`.
#[derive(Debug, clap::Args)]
#[command(after_help = after_help())]
pub struct CodecsArgs {
    /// Only these codecs; may be repeated [default: some of each kind]
    #[arg(long, value_name = "CODEC,…", value_delimiter = ',')]
    codec: Vec<Spec>,
    /// The dimensions of a made-up tensor
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "8,32,112,112",
        conflicts_with = "input",
        help_heading = "Tensors"
    )]
    shape: Vec<usize>,
    /// Its values: gaussian, or relu, where those below 0 are set to 0
    #[arg(
        long,
        value_name = "NAME",
        default_value = "relu",
        hide_possible_values = true,
        conflicts_with = "input",
        help_heading = "Tensors"
    )]
    values: Values,
    /// Of its values
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "input", help_heading = "Tensors")]
    seed: u64,
    /// The tensors of this file instead
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Tensors")]
    input: Option<PathBuf>,
    /// Of those, the ones with this in their name
    #[arg(long, value_name = "TEXT", requires = "input", help_heading = "Tensors")]
    tensor: Option<String>,
    /// Store tensors of four dimensions N,C,H,W as N,H,W,C, as a run does with images
    #[arg(long, help_heading = "Tensors")]
    channels_last: bool,
    /// Write the file there as it comes out of one codec: same names, types, shapes and metadata
    #[arg(long, value_name = "FILE.safetensors", requires = "input", help_heading = "Output")]
    write_decoded: Option<PathBuf>,
    /// Draw error against ratio there
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    plot: Option<PathBuf>,
    /// Print as JSON; with --input, every tensor too
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Tries codecs on tensors, and shows what came of it.
pub fn run(args: &CodecsArgs) -> anyhow::Result<()> {
    let outputs = Outputs::check(args)?;
    let Some(path) = &args.input else {
        if args.channels_last && args.shape.len() != 4 {
            let shape = written(&args.shape, ",");
            return Err(usage(format!("--channels-last: expected four dimensions N,C,H,W, got --shape {shape}")));
        }
        let sample = Sample::made_up(&args.shape, args.values, args.seed)?;
        return Trial::new(args, vec![sample], |_, _, _| ())?.show(args, &outputs);
    };
    let file = TensorFile::read("--input", path)?;
    let entries = selected(&file, path, args.tensor.as_deref())?;
    let samples = entries.iter().map(|entry| Sample::of_file(&file, entry)).collect();
    let mut decoded = outputs.decoded.as_ref().map(|output| (output, file.clone()));
    let trial = Trial::new(args, samples, |slot, sample, elements| {
        if let Some((_, file)) = &mut decoded {
            file.data_mut(entries[slot]).copy_from_slice(&sample.in_file_order(elements));
        }
    })?;
    if let Some((output, file)) = decoded {
        output.write(file.as_bytes())?;
    }
    trial.show(args, &outputs)
}

/// The files that are asked for.
struct Outputs {
    decoded: Option<NewFile>,
    plot: Option<NewFile>,
}

impl Outputs {
    /// Whether they can be made; asked before anything is computed.
    fn check(args: &CodecsArgs) -> anyhow::Result<Self> {
        let codecs = distinct(&args.codec).len();
        if args.write_decoded.is_some() && codecs != 1 {
            let got = if codecs == 0 { "none".to_owned() } else { codecs.to_string() };
            return Err(usage(format!(
                "--write-decoded: expected one codec, got {got}: use for example --codec tile:4"
            )));
        }
        if args.plot.is_some() && codecs == 1 {
            return Err(usage(
                "--plot: expected several codecs to compare, got one: add more to --codec, or remove it",
            ));
        }
        let output = |flag: &str, path: &Option<PathBuf>| {
            let Some(path) = path else {
                return Ok(None);
            };
            let file = NewFile::at(flag, path)?;
            if args.input.as_deref().is_some_and(|input| file.is(input)) {
                return Err(usage(format!("{flag} {}: this is the file of --input: name another", path.display())));
            }
            Ok(Some(file))
        };
        let decoded = output("--write-decoded", &args.write_decoded)?;
        Ok(Outputs { decoded, plot: output("--plot", &args.plot)? })
    }
}

/// Tensors, and what became of them.
struct Trial<'a> {
    samples: Vec<Sample<'a>>,
    codecs: Vec<Measured>,
    copy: Speed,
}

impl<'a> Trial<'a> {
    /// `keep` gets the place, the tensor and its decoded elements for each tensor that a codec encoded.
    fn new(
        args: &CodecsArgs,
        mut samples: Vec<Sample<'a>>,
        mut keep: impl FnMut(usize, &Sample<'a>, &[u8]),
    ) -> anyhow::Result<Self> {
        if args.channels_last {
            samples = samples.into_iter().map(Sample::channels_last).collect();
            if samples.iter().all(|sample| sample.layout != Layout::ChannelsLast) {
                return Err(usage(
                    "--channels-last: expected a tensor of floats with four dimensions, got none: remove it",
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

    fn show(&self, args: &CodecsArgs, outputs: &Outputs) -> anyhow::Result<()> {
        if let Some(output) = &outputs.plot {
            output.write(plot::draw(&self.points(), &self.source(args)).as_bytes())?;
        }
        if args.json {
            return report::print_json(&self.json(args));
        }
        let mut text = format!("{}\n{}\n", self.table(), self.source(args));
        text.push_str(&self.refusals());
        text.push_str(&format!(
            "bits and ratio count what a socket carries, the frame's header of {HEADER_BYTES} bytes a tensor included\n\
             mse is the mean squared error, relative is that divided by the mean square of the values\n\
             GB/s are of input, on one thread, the quickest of up to {ROUNDS_MAX} rounds; `copy` only copies it\n"
        ));
        if cfg!(debug_assertions) {
            text.push_str("this is a debug build, which is slower than a release\n");
        }
        report::print(&text)
    }

    fn table(&self) -> String {
        let mut columns = vec![
            ("codec", Side::Left),
            ("bits a value", Side::Right),
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

    /// What the figures are of, in a line.
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

    /// The tensors that not every codec took, with the reasons; empty if there are none.
    fn refusals(&self) -> String {
        let lossy: Vec<&Measured> = self.codecs.iter().filter(|measured| !measured.spec.is_raw()).collect();
        let mut refusals = Vec::new();
        for (slot, sample) in self.samples.iter().enumerate() {
            let by: Vec<(&Spec, &String)> = lossy
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
            count => format!("{count} tensors sent raw: {}\n", report::listed(&refusals, report::FEW)),
        }
    }

    fn points(&self) -> Vec<plot::Point> {
        let point = |measured: &Measured| plot::Point {
            label: measured.spec.to_string(),
            family: family(&measured.spec),
            ratio: measured.ratio(),
            error: measured.errors().relative_mse(),
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

/// The first examples of every codec there is. One that wraps another differs from it only over several steps, so that
/// one example says as much as many.
fn examples() -> Vec<Spec> {
    let shown = |examples: &'static [&'static str]| {
        let wraps = examples.iter().any(|example| example.contains('('));
        examples.iter().take(if wraps { 1 } else { EXAMPLES_MAX })
    };
    ALL.iter().flat_map(|member| shown(member.examples)).filter_map(|example| example.parse().ok()).collect()
}

/// Each of them once, in their order.
fn distinct(specs: &[Spec]) -> Vec<Spec> {
    let mut distinct = Vec::new();
    for spec in specs {
        if !distinct.contains(spec) {
            distinct.push(spec.clone());
        }
    }
    distinct
}

/// A codec's place in [`ALL`].
fn family(spec: &Spec) -> usize {
    let name = spec.as_str().split([':', '(']).next();
    ALL.iter().position(|member| Some(member.name) == name).unwrap_or(ALL.len())
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

/// Written from [`ALL`], so that a new codec need not be mentioned here.
fn after_help() -> String {
    let width = ALL.iter().map(|member| member.name.len()).max().unwrap_or(0);
    let mut codecs = String::new();
    for member in ALL {
        let mut line = format!("  {:<width$} ", member.name);
        for word in member.about.split(' ') {
            if line.chars().count() + word.chars().count() >= HELP_WIDTH {
                codecs.push_str(&line);
                line = format!("\n  {:<width$} ", "");
            }
            line.push(' ');
            line.push_str(word);
        }
        codecs.push_str(&line);
        codecs.push('\n');
    }
    format!(
        "\
Codecs:
{codecs}
Examples:
  All of them on a made-up activation, and a picture:
      distgpipe codecs --plot codecs.svg
  Some of them on tensors of your own:
      distgpipe codecs --input in.safetensors --codec bf16,tile:8,tile:4
  What a model's output is worth after such a link, with a script of your own:
      distgpipe codecs --input in.safetensors --codec tile:4 --write-decoded out.safetensors --json

Codecs take F32, F16 and BF16. Other tensors go raw, and so does one that a codec has no numbers for, such as one with a NaN: a link \
does the same. docs/codecs.md has the formulas."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_is_tried_and_none_is_cut_at_a_comma() {
        let examples = examples();
        for (place, member) in ALL.iter().enumerate() {
            assert!(examples.iter().any(|spec| family(spec) == place), "{}", member.name);
            assert!(member.examples.iter().all(|example| !example.contains(',')), "{}", member.name);
        }
        assert_eq!(distinct(&[&examples[..], &examples[..]].concat()), examples);
    }
}
