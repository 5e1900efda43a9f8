//! `distgpipe codecs`: measures codecs on random or captured tensors, before a run uses them.
//!
//! | file | what it holds |
//! | --- | --- |
//! | [`sample`] | the tensors to encode |
//! | [`measure`] | bytes, errors and times of a codec |
//! | [`trial`] | several codecs on the same tensors: table, picture and JSON |

mod measure;
mod sample;
mod trial;

use crate::exit::usage;
use crate::files::NewFile;
use crate::tensor_file::TensorFile;
use distgpipe_core::codec::{CodecSpec, ALL};
use sample::{selected, written, Sample, Values};
use std::path::PathBuf;
use trial::{distinct, Trial};

/// The width of the list of codecs in the help, which is wrapped here with a hanging indent.
const HELP_WIDTH: usize = 80;

/// Flags of `distgpipe codecs`.
#[derive(Debug, clap::Args)]
#[command(after_help = after_help())]
pub struct CodecsArgs {
    /// Codecs to measure; repeatable [default: examples of every codec]
    #[arg(long, value_name = "CODEC,…", value_delimiter = ',')]
    codec: Vec<CodecSpec>,
    /// Dimensions of the random tensor
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "8,32,112,112",
        conflicts_with = "input",
        help_heading = "Tensors"
    )]
    shape: Vec<usize>,
    /// Distribution of the random values: gaussian, or relu (gaussian, with negative values set to 0)
    #[arg(
        long,
        value_name = "NAME",
        default_value = "relu",
        hide_possible_values = true,
        conflicts_with = "input",
        help_heading = "Tensors"
    )]
    values: Values,
    /// Seed of the random values
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "input", help_heading = "Tensors")]
    seed: u64,
    /// Measure on the tensors of this file instead of a random one
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Tensors")]
    input: Option<PathBuf>,
    /// Only the tensors of --input whose name contains this text
    #[arg(long, value_name = "TEXT", requires = "input", help_heading = "Tensors")]
    tensor: Option<String>,
    /// Store tensors of four dimensions channels-last (N,H,W,C), as a run stores images
    #[arg(long, help_heading = "Tensors")]
    channels_last: bool,
    /// Write the tensors of --input, encoded and decoded with one codec, to this file; names, types, shapes and metadata stay
    #[arg(long, value_name = "FILE.safetensors", requires = "input", help_heading = "Output")]
    write_decoded: Option<PathBuf>,
    /// Plot error over compression ratio to this file
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    plot: Option<PathBuf>,
    /// Print the result as JSON; with --input, it includes every tensor
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Measures codecs on tensors, and prints the result.
pub fn run(args: &CodecsArgs) -> anyhow::Result<()> {
    let outputs = Outputs::check(args)?;
    let Some(path) = &args.input else {
        if args.channels_last && args.shape.len() != 4 {
            let shape = written(&args.shape, ",");
            return Err(usage(format!("--channels-last: expected four dimensions N,C,H,W, got --shape {shape}")));
        }
        let sample = Sample::random(&args.shape, args.values, args.seed)?;
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

/// The output files.
struct Outputs {
    decoded: Option<NewFile>,
    plot: Option<NewFile>,
}

impl Outputs {
    /// Checks the paths before anything is computed.
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
                "--plot: expected several codecs to compare, got one: add more to --codec, or remove --plot",
            ));
        }
        let output = |flag: &str, path: &Option<PathBuf>| {
            let Some(path) = path else {
                return Ok(None);
            };
            let file = NewFile::at(flag, path)?;
            if args.input.as_deref().is_some_and(|input| file.is(input)) {
                return Err(usage(format!("{flag} {}: this is the file of --input: name another one", path.display())));
            }
            Ok(Some(file))
        };
        let decoded = output("--write-decoded", &args.write_decoded)?;
        Ok(Outputs { decoded, plot: output("--plot", &args.plot)? })
    }
}

/// The list of codecs is generated from [`ALL`], so that new codecs appear in it.
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
  Measure all codecs on a random activation, and plot them:
      distgpipe codecs --plot codecs.svg
  Measure some codecs on your own tensors:
      distgpipe codecs --input in.safetensors --codec bf16,tile:8,tile:4
  Write decoded tensors, to evaluate them with your own script:
      distgpipe codecs --input in.safetensors --codec tile:4 --write-decoded out.safetensors --json

Codecs encode F32, F16 and BF16 tensors. Other tensors are sent raw, and so are tensors that a codec cannot represent, such as one \
with a NaN. Links of a run do the same. docs/codecs.md has the formulas."
    )
}
