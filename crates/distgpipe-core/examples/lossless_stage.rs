//! Measures what `zstd(C)` saves on captured tensors, and its speed on one thread.
//!
//! ```text
//! distgpipe train … --capture DIR
//! cargo run --release -p distgpipe-core --example lossless_stage -- DIR/step-N.safetensors [--repeat 9] [CODEC …]
//! ```
//!
//! It prints a Markdown table with a row for each tensor of the first micro-batch and each codec: bits per value on the
//! wire without and with `zstd`, and gigabytes of tensor per second. For `tile`, the limit of its codes is their entropy
//! given the code before, in the same tile: a coder that looks at one neighbour cannot need fewer bits. The table of
//! `tile` comes on top. Images are channels-last, as in a run. Every decoded tensor is compared with what the codec alone
//! decodes to.

use distgpipe_core::codec::{self, Codec, CodecContext, TensorView};
use distgpipe_core::weights::safetensors::{entries, header_bytes};
use distgpipe_core::weights::TensorType;
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use std::time::Instant;

const CODECS: &[&str] = &["raw", "bf16", "sort:8", "tile:8", "tile:4", "tile:3", "tile:2"];

struct Tensor {
    name: String,
    dtype: DType,
    dims: Vec<usize>,
    layout: Layout,
    bytes: Vec<u8>,
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let repeat = match arguments.iter().position(|text| text == "--repeat") {
        Some(at) => {
            arguments.drain(at..at + 2).nth(1).and_then(|text| text.parse().ok()).expect("--repeat takes a number")
        }
        None => 9,
    };
    let (file, codecs) = arguments.split_first().expect("expected a file that --capture wrote");
    let texts: Vec<&str> = match codecs {
        [] => CODECS.to_vec(),
        given => given.iter().map(String::as_str).collect(),
    };
    println!("| tensor | codec | bits per value | limit of its codes | bits per value with zstd | ratio to raw | encode, GB/s | decode, GB/s | with zstd: encode | decode |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for tensor in tensors(file) {
        let texts = texts.iter().filter(|text| **text == "raw" || tensor.dtype == DType::F32);
        texts.for_each(|text| measure(&tensor, text, repeat));
    }
}

/// The tensors of the first micro-batch.
fn tensors(file: &str) -> Vec<Tensor> {
    let data = std::fs::read(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let length = header_bytes(&data, data.len() as u64).expect("a safetensors file") as usize;
    let entries = entries(&data[8..8 + length], data.len() as u64).expect("a safetensors file");
    let first = entries.into_iter().filter(|entry| entry.name.split('.').nth(2) == Some("0"));
    let mut tensors: Vec<Tensor> = first
        .map(|entry| {
            let dtype = match entry.dtype {
                TensorType::F32 => DType::F32,
                TensorType::BF16 => DType::BF16,
                TensorType::I64 => DType::I64,
                TensorType::Bool => DType::Bool,
                other => panic!("no codec for {}", other.name()),
            };
            let dims: Vec<usize> = entry.dims.iter().map(|&dim| dim as usize).collect();
            let bytes = data[entry.range.start as usize..entry.range.end as usize].to_vec();
            let (layout, bytes) = match dims[..] {
                [n, c, h, w] => (Layout::ChannelsLast, channels_last(&bytes, dtype.size_bytes(), [n, c, h * w])),
                _ => (Layout::Contiguous, bytes),
            };
            Tensor { name: entry.name, dtype, dims, layout, bytes }
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

fn channels_last(bytes: &[u8], size: usize, [samples, channels, pixels]: [usize; 3]) -> Vec<u8> {
    let of = |sample: usize, pixel: usize, channel: usize| ((sample * channels + channel) * pixels + pixel) * size;
    let places = (0..samples).flat_map(|s| (0..pixels).flat_map(move |p| (0..channels).map(move |c| (s, p, c))));
    places.flat_map(|(s, p, c)| bytes[of(s, p, c)..][..size].iter().copied()).collect()
}

/// The figures of one codec: the body, the decoded tensor, and the best speeds.
struct Figures {
    body: Vec<u8>,
    decoded: Vec<u8>,
    encode: f64,
    decode: f64,
}

fn run(codecs: &mut [Box<dyn Codec>; 2], tensor: &Tensor, figures: &mut Figures) {
    let Tensor { dtype, dims, layout, bytes, .. } = tensor;
    let gigabytes = bytes.len() as f64 / 1e9;
    let view = TensorView { dtype: *dtype, dims, layout: *layout, bytes };
    let [encoder, decoder] = codecs;
    figures.body.clear();
    let start = Instant::now();
    encoder.encode(view, &CodecContext::default(), &mut figures.body).expect("finite values");
    figures.encode = figures.encode.max(gigabytes / start.elapsed().as_secs_f64());
    let shape = Shape::new(dims).expect("a tensor of a run");
    let meta = TensorMeta { dtype: *dtype, layout: *layout, shape, codec: encoder.id() };
    let start = Instant::now();
    decoder.decode(&meta, &figures.body, &mut figures.decoded).expect("just encoded");
    figures.decode = figures.decode.max(gigabytes / start.elapsed().as_secs_f64());
}

fn measure(tensor: &Tensor, text: &str, repeat: usize) {
    let compressed = format!("zstd({text})");
    let make = |text: &str| [0; 2].map(|_| codec::parse(text).unwrap_or_else(|error| panic!("{error}")));
    let mut codecs = [make(text), make(&compressed)];
    let mut figures =
        [0; 2].map(|_| Figures { body: Vec::new(), decoded: vec![0; tensor.bytes.len()], encode: 0.0, decode: 0.0 });
    // Both take turns, so that a disturbance affects both alike.
    for _ in 0..=repeat {
        codecs.iter_mut().zip(&mut figures).for_each(|(codecs, figures)| run(codecs, tensor, figures));
    }
    let [without, with] = figures;
    assert!(without.decoded == with.decoded, "{compressed} lost something");
    let values = tensor.bytes.len() / tensor.dtype.size_bytes();
    let bits = |figures: &Figures| figures.body.len() as f64 * 8.0 / values as f64;
    let limit = match text.strip_prefix("tile:").and_then(|bits| bits.parse().ok()) {
        Some(width) => format!("{:.2}", entropy(&without.body, values, width)),
        None => "–".to_owned(),
    };
    let Figures { encode, decode, .. } = without;
    println!(
        "| {} {:?} {} | {text} | {:.2} | {limit} | **{:.2}** | {:.2} | {encode:.1} | {decode:.1} | **{:.1}** | **{:.1}** |",
        tensor.name,
        tensor.dims,
        tensor.dtype,
        bits(&without),
        bits(&with),
        tensor.bytes.len() as f64 / with.body.len() as f64,
        with.encode,
        with.decode,
    );
}

/// The entropy of a code of `tile:WIDTH` given the code before it, in bits.
fn entropy(body: &[u8], values: usize, width: usize) -> f64 {
    let packed = &body[body.len() - (values * width).div_ceil(8)..];
    let bit = |at: usize| usize::from(packed[at / 8] >> (at % 8) & 1);
    let code = |at: usize| (0..width).fold(0, |code, place| code | bit(at * width + place) << place);
    let mut pairs = vec![0u64; 1 << (2 * width)];
    let mut before = 0;
    for at in 0..values {
        let code = code(at);
        if at % 64 != 0 {
            pairs[before << width | code] += 1;
        }
        before = code;
    }
    let total: u64 = pairs.iter().sum();
    let of_row = |row: &[u64]| {
        let sum: u64 = row.iter().sum();
        row.iter()
            .filter(|&&count| count > 0)
            .map(|&count| count as f64 * (sum as f64 / count as f64).log2())
            .sum::<f64>()
    };
    pairs.chunks(1 << width).map(of_row).sum::<f64>() / total.max(1) as f64
}
