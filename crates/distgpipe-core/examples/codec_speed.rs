//! Measures the speed of every codec on one thread, next to a copy of the same tensor.
//!
//! ```text
//! cargo run --release -p distgpipe-core --example codec_speed -- [--json] [--repeat 9] [--only CODEC] [--tensor TENSOR]
//! ```
//!
//! There are two tensors: Gaussian values after a ReLU, [8, 32, 112, 112], and Gaussian values, [8, 128, 768]. The
//! figures are gigabytes of `f32` values per second; for packing, gigabytes of codes as 16-bit numbers. The best of all
//! repetitions counts. The codecs take turns, so that a disturbance affects all of them alike.

use distgpipe_core::codec::{self, bits, Codec, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use std::hint::black_box;
use std::time::Instant;

const CODECS: &[&str] = &[
    "f16",
    "bf16",
    "uniform:4",
    "uniform:8",
    "uniform:12",
    "sort:16",
    "sort:12",
    "sort:8",
    "sort:4",
    "fast:16",
    "fast:12",
    "fast:8",
    "fast:4",
    "tile:8",
    "tile:4",
    "tile:3",
    "tile:2",
    "tile:3~",
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| arguments.iter().position(|text| text == flag).and_then(|at| arguments.get(at + 1));
    let repeat = after("--repeat").map_or(9, |text| text.parse().expect("--repeat takes a number"));
    let only = after("--only").map_or("", |text| text.as_str());
    let tensor = after("--tensor").map_or("", |text| text.as_str());
    let json = arguments.iter().any(|text| text == "--json");

    let tensors = [
        Tensor::new("relu", &[8, 32, 112, 112], Layout::Contiguous),
        Tensor::new("relu", &[8, 32, 112, 112], Layout::ChannelsLast),
        Tensor::new("relu", &[8, 1280, 7, 7], Layout::ChannelsLast),
        Tensor::new("gaussian", &[8, 128, 768], Layout::Contiguous),
    ];
    let wanted = tensors.iter().filter(|made| made.title().contains(tensor));
    let mut figures: Vec<Figure> = wanted.flat_map(|tensor| measure_codecs(tensor, repeat, only)).collect();
    if "pack".contains(only) && tensor.is_empty() {
        figures.extend(measure_packing(repeat));
    }
    figures.iter().for_each(|figure| figure.print(json));
}

struct Tensor {
    name: &'static str,
    dims: &'static [usize],
    layout: Layout,
    bytes: Vec<u8>,
}

impl Tensor {
    fn new(name: &'static str, dims: &'static [usize], layout: Layout) -> Tensor {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 40) as f64 + 0.5) / (1u64 << 24) as f64
        };
        // The Box–Muller transform.
        let mut gaussian = || ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32;
        let mut value = || if name == "relu" { gaussian().max(0.0) } else { gaussian() };
        let bytes = (0..dims.iter().product()).flat_map(|_: usize| value().to_ne_bytes()).collect();
        Tensor { name, dims, layout, bytes }
    }

    fn title(&self) -> String {
        let layout = if self.layout == Layout::ChannelsLast { " channels-last" } else { "" };
        format!("{} {:?}{layout}", self.name, self.dims)
    }

    fn view(&self) -> TensorView<'_> {
        TensorView { dtype: DType::F32, dims: self.dims, layout: self.layout, bytes: &self.bytes }
    }
}

/// The best speeds of a codec and of a copy, in gigabytes per second.
struct Figure {
    codec: String,
    tensor: String,
    encode: f64,
    decode: f64,
    copy: f64,
}

impl Figure {
    fn print(&self, json: bool) {
        let Figure { codec, tensor, encode, decode, copy } = self;
        if json {
            println!(
                "{{\"codec\": \"{codec}\", \"tensor\": \"{tensor}\", \"encode_gb_s\": {encode:.3}, \
                 \"decode_gb_s\": {decode:.3}, \"copy_gb_s\": {copy:.3}}}"
            );
        } else {
            let (slower_encode, slower_decode) = (copy / encode, copy / decode);
            println!(
                "{codec:12} {tensor:40} encode {encode:6.2}  decode {decode:6.2}  copy {copy:6.2} GB/s  \
                 (copy is {slower_encode:4.2} × and {slower_decode:4.2} × as fast)"
            );
        }
    }
}

/// The speed of a function that processes this many bytes, in gigabytes per second.
fn speed(bytes: usize, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn measure_codecs(tensor: &Tensor, repeat: usize, only: &str) -> Vec<Figure> {
    let texts = CODECS.iter().filter(|text| text.contains(only)).filter(|text| codec::parse(text).is_ok());
    // The memory layout matters only to `tile`.
    let texts = texts.filter(|text| tensor.layout == Layout::Contiguous || text.starts_with("tile"));
    let mut codecs: Vec<(Box<dyn Codec>, Figure)> = texts
        .map(|text| {
            let figure =
                Figure { codec: text.to_string(), tensor: tensor.title(), encode: 0.0, decode: 0.0, copy: 0.0 };
            (codec::parse(text).expect("filtered by that"), figure)
        })
        .collect();
    let mut body = Vec::new();
    let mut out = vec![0; tensor.bytes.len()];
    let mut copied = vec![0; tensor.bytes.len()];
    let mut copy = 0.0;
    // The first round is a warm-up.
    for round in 0..=repeat {
        for (codec, figure) in &mut codecs {
            body.clear();
            let encode = speed(tensor.bytes.len(), || {
                codec.encode(tensor.view(), &CodecContext::default(), &mut body).expect("the values are finite");
            });
            let shape = Shape::new(tensor.dims).expect("four dimensions at most");
            let meta = TensorMeta { dtype: DType::F32, layout: tensor.layout, shape, codec: codec.id() };
            let decode = speed(out.len(), || codec.decode(&meta, &body, &mut out).expect("just encoded"));
            black_box(&out);
            let now = speed(copied.len(), || copied.copy_from_slice(black_box(&tensor.bytes)));
            black_box(&copied);
            if round > 0 {
                figure.encode = figure.encode.max(encode);
                figure.decode = figure.decode.max(decode);
                copy = f64::max(copy, now);
            }
        }
    }
    codecs.into_iter().map(|(_, figure)| Figure { copy, ..figure }).collect()
}

fn measure_packing(repeat: usize) -> Vec<Figure> {
    let count = 8 * 32 * 112 * 112;
    let codes: Vec<u16> = (0..count as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 16) as u16).collect();
    let mut back = vec![0; count];
    let mut copied = vec![0; count];
    let mut packed = Vec::new();
    let mut speeds = [(0.0, 0.0); 17];
    let mut copy = 0.0;
    for round in 0..=repeat {
        for width in 1..=16 {
            packed.resize(bits::packed_bytes(count, width), 0);
            let pack = speed(2 * count, || bits::pack(black_box(&codes), width, &mut packed));
            let unpack = speed(2 * count, || bits::unpack(black_box(&packed), width, &mut back));
            black_box(&back);
            let now = speed(2 * count, || copied.copy_from_slice(black_box(&codes)));
            black_box(&copied);
            if round > 0 {
                let best = &mut speeds[width as usize];
                *best = (f64::max(best.0, pack), f64::max(best.1, unpack));
                copy = f64::max(copy, now);
            }
        }
    }
    let figure = |width: usize| {
        let (encode, decode) = speeds[width];
        Figure { codec: format!("pack {width}"), tensor: format!("{count} codes"), encode, decode, copy }
    };
    (1..=16).map(figure).collect()
}
