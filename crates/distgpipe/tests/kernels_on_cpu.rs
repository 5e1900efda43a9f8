//! The kernels for GPUs, run on the CPU by `kernels_on_cpu/`: their bodies and decoded values are those of the codecs, bit for bit, and
//! so are the masks and the images. Instance norm is that of libtorch, up to rounding. A GPU is not needed, a C++ compiler is.

mod kernel_values;

use distgpipe::data::image::{Image, ImageSource};
use distgpipe::data::{DataError, Dataset, ImageOptions, ImageSet, LoadPass, Split, Subset};
use distgpipe::engine::kernels::{ImageForm, ImageResizing};
use distgpipe::engine::{self, Layout as EngineLayout};
use distgpipe_core::codec::half::HalfFormat;
use distgpipe_core::codec::tile::{key, Rounding};
use distgpipe_core::codec::{parse, BinEnds, BodyForm, CodecContext, TensorView};
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta};
use kernel_values::{bell, mixed, texts};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use tch::{Kind, Tensor};

/// The program with the kernels, compiled at the first call. Without fused multiply-adds, as the kernels are.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernels_on_cpu/main.cpp");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels_on_cpu");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-o"];
        let status = Command::new(&compiler).args(options).arg(&program).arg(source).status();
        assert!(status.is_ok_and(|status| status.success()), "{compiler} could not compile {source}");
        program
    })
}

fn run(command: &str, kind: &str, numbers: [u64; 5], input: &[u8]) -> Vec<u8> {
    let mut child = Command::new(program())
        .args([command, kind])
        .args(numbers.map(|number| number.to_string()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{command} {kind} {numbers:?}: {}", output.status);
    output.stdout
}

/// What the program is told of a codec.
fn arguments(form: BodyForm, count: usize, seed: u64) -> (&'static str, [u64; 5]) {
    let count = count as u64;
    match form {
        BodyForm::Half(format) => ("half", [count, u64::from(format == HalfFormat::BF16), 0, 0, 0]),
        BodyForm::Tile { bits, tile, rounding } => {
            let stochastic = u64::from(rounding == Rounding::Stochastic);
            ("tile", [count, bits.into(), tile.into(), stochastic, key(seed).into()])
        }
        BodyForm::Bins { code_bits, bin_bits, ends } => {
            let ends = match ends {
                BinEnds::Range => 0,
                BinEnds::Quantiles => 1,
                BinEnds::Sample(size) => size.into(),
            };
            ("bins", [count, code_bits.into(), bin_bits.into(), ends, seed])
        }
    }
}

/// Compares body and values of a codec with those of the kernels.
fn compare(text: &str, values: &[f32], seed: u64) {
    let (mut encoder, mut decoder) = (parse(text).unwrap(), parse(text).unwrap());
    let form = encoder.form().unwrap().body;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let dims = [values.len()];
    let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes };
    let mut body = Vec::new();
    let encoded = encoder.encode(view, &CodecContext { seed, ..CodecContext::default() }, &mut body);
    let (kind, numbers) = arguments(form, values.len(), seed);
    let output = run("encode", kind, numbers, &bytes);
    let (status, by_kernel) = output.split_at(4);
    assert_eq!(status != [0; 4], encoded.is_err(), "{text}: {encoded:?} of {values:?}");
    if encoded.is_err() {
        return;
    }
    let differing = body.iter().zip(by_kernel).position(|(a, b)| a != b);
    assert_eq!((body.len(), differing), (by_kernel.len(), None), "{text} of {values:?}");

    let shape = Shape::new(&dims).unwrap();
    let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: decoder.id() };
    let mut decoded = vec![0; bytes.len()];
    decoder.decode(&meta, &body, &mut decoded).unwrap();
    assert_eq!(decoded, run("decode", kind, numbers, &body), "{text} of {values:?}");
}

#[test]
fn ordinary_values() {
    for (number, text) in texts().enumerate() {
        for count in [1, 2, 7, 8, 9, 65, 1000] {
            compare(text, &bell(number as u32 * 7919, count), number as u64);
        }
    }
}

/// Half of the values are 0 of either sign, as after a ReLU, or few values are repeated.
#[test]
fn repeated_values_and_zeros() {
    let relu = |seed| bell(seed, 700).into_iter().map(|x: f32| if x < -1.0 { -0.0 } else { x.max(0.0) });
    for text in texts() {
        compare(text, &relu(3).collect::<Vec<_>>(), 3);
        compare(text, &relu(4).map(|x| (x * 4.0).round()).collect::<Vec<_>>(), 4);
        compare(text, &[2.5; 300], 5);
        compare(text, &[-0.0; 70], 6);
        compare(text, &[0.0, -0.0, 0.0].repeat(30), 7);
    }
}

/// Values of every magnitude, denormal numbers, and the ends of the range of floats.
#[test]
fn all_magnitudes() {
    let finite = |seed| mixed(seed).map(f32::from_bits).filter(|value| value.is_finite());
    for text in texts() {
        compare(text, &finite(1).take(300).collect::<Vec<_>>(), 8);
        compare(text, &finite(9).map(|x| x % 60000.0).take(300).collect::<Vec<_>>(), 9);
        let denormal: Vec<f32> = mixed(5).map(|bits| f32::from_bits(bits & 0x8000_0fff)).take(200).collect();
        compare(text, &denormal, 10);
        compare(text, &[f32::MIN, f32::MAX, 1.0, -1.0, 0.0], 11);
        compare(text, &[1e30, 1.000_000_1e30, 1.1e30], 12);
    }
}

/// Exactly between two codes, where a fused multiply-add rounds to the other one.
#[test]
fn midpoints() {
    for (number, text) in texts().enumerate() {
        let lo = -1.7f32 * 1.13f32.powi(number as i32);
        for steps in [15.0f32, 63.0, 255.0, 4095.0] {
            let step = 0.013_37f32 * 0.97f32.powi(number as i32);
            let between = |code: f32| (f64::from(lo) + (f64::from(code) + 0.5) * f64::from(step)) as f32;
            let mut values: Vec<f32> = (0..400).map(|at| between((at as f32 * 1.618) % steps)).collect();
            values[0] = lo;
            values[399] = (f64::from(lo) + f64::from(steps) * f64::from(step)) as f32;
            compare(text, &values, number as u64);
        }
    }
}

#[test]
fn values_that_are_not_finite_are_refused() {
    for text in texts() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 31, 99] {
                let mut values = bell(1, 100);
                values[at] = wrong;
                compare(text, &values, 1);
            }
        }
        compare(text, &[65519.0, 1.0], 1);
        compare(text, &[65520.0, 1.0], 1);
    }
}

/// The masks of `Stream::bernoulli`, whose own tests have the same first values.
#[test]
fn masks() {
    let threshold = (0.3 * 2f64.powi(32)).round() as u64;
    let expected = [1., 0., 0., 1., 1., 1., 1., 0., 1., 1., 1., 0., 1., 1., 0., 0., 1., 0., 1., 0., 0.];
    let one = u64::from(1f32.to_bits());
    let values = run("bernoulli", "4", [21, threshold, one, 42, 0], &[]);
    let values: Vec<f32> = values.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(values, expected);
    for (bytes, one) in [("2", 0x3c00), ("8", 1f64.to_bits())] {
        let values = run("bernoulli", bytes, [21, threshold, one, 42, 0], &[]);
        let size = values.len() / 21;
        let ones: Vec<f32> =
            values.chunks_exact(size).map(|value| f32::from(value == &one.to_ne_bytes()[..size])).collect();
        assert_eq!(ones, expected);
    }
}

/// Images of one size in memory, the pixels of which are any bytes.
struct Pixels {
    size: [u32; 2],
    bytes: Vec<u8>,
}

impl Pixels {
    fn new(width: u32, height: u32) -> Self {
        let bytes =
            mixed(width * 100 + height).map(|word| (word >> 13) as u8).take((IMAGES * 3 * width * height) as usize);
        Pixels { size: [width, height], bytes: bytes.collect() }
    }
}

const IMAGES: u32 = 5;

impl ImageSource for Pixels {
    fn name(&self) -> &'static str {
        "pixels"
    }
    fn len(&self) -> usize {
        IMAGES as usize
    }
    fn classes(&self) -> usize {
        IMAGES as usize
    }
    fn size(&self) -> Option<[u32; 2]> {
        Some(self.size)
    }
    fn label(&self, row: usize) -> i64 {
        row as i64
    }
    fn image<'a>(&'a self, row: usize, _: &'a mut Vec<u8>) -> Result<Image<'a>, DataError> {
        let [width, height] = self.size.map(|side| side as usize);
        Ok(Image { width, height, pixels: &self.bytes[row * 3 * width * height..][..3 * width * height] })
    }
}

/// The images that a GPU makes of bytes are those of the CPU, bit for bit: enlarged and reduced, mirrored or not, in both layouts.
#[test]
fn images_of_bytes() {
    for (width, height) in [(32, 32), (17, 32), (40, 9), (1, 1)] {
        for side in [1, 24, 33, 64] {
            for (split, layout) in [
                (Split::Train, EngineLayout::ChannelsLast),
                (Split::Train, EngineLayout::Contiguous),
                (Split::Test, EngineLayout::ChannelsLast),
            ] {
                let set = ImageSet::new(Pixels::new(width, height), ImageOptions { side, split, layout }).unwrap();
                // The even rows, in the order 4, 0, 2.
                let set = Subset::new(Arc::new(set), 3);
                let rows = [2, 0, 1];
                let pass = LoadPass::new(7, 3);
                let (batch, images) = (set.batch(&rows, pass).unwrap(), set.image_bytes(&rows, pass).unwrap());
                let values = engine::bytes(&batch.inputs[0]).unwrap();
                // One pixel is smaller than what makes it.
                assert_eq!(images.is_none(), side == 1, "{width} × {height} to {side}");
                let Some(images) = images else { continue };
                let bytes = engine::bytes(images.bytes()).unwrap();
                assert!(bytes.len() < values.len());
                assert_eq!(images.target(), &batch.target);
                let form = images.form().words().into_iter().flat_map(u32::to_ne_bytes);
                let input: Vec<u8> = form.chain(bytes.iter().copied()).collect();
                let resized = run("images", "0", [values.len() as u64 / 4, 0, 0, 0, 0], &input);
                assert!(resized == values, "{width} × {height} to {side}, {split:?}, {layout:?}");
            }
        }
    }
}

/// Tables that name pixels outside the image, which no view makes. What lies behind the image does not change the result.
#[test]
fn no_bytes_make_the_kernel_of_images_read_elsewhere() {
    let layout = EngineLayout::Contiguous;
    let set = ImageSet::new(Pixels::new(8, 8), ImageOptions { side: 32, split: Split::Test, layout }).unwrap();
    let form = set.image_bytes(&[0], LoadPass::new(0, 0)).unwrap().unwrap().form();
    let tables = [vec![u32::MAX; 2 + 2 * 32], vec![1f32.to_bits(); 2 * 32 * 2]].concat();
    let resized = |behind: u8| {
        let words = form.words().into_iter().chain(tables.iter().copied()).flat_map(u32::to_ne_bytes);
        let pixels = (0..3 * 8 * 8).map(|at| at as u8);
        let input: Vec<u8> = words.chain(pixels).chain(std::iter::repeat_n(behind, 4096)).collect();
        run("images", "0", [3 * 32 * 32, 0, 0, 0, 0], &input)
    };
    assert!(resized(0) == resized(255));
}

/// A GPU would have read lines of another length.
#[test]
fn an_image_that_does_not_have_the_size_of_its_source_is_refused() {
    struct Untrue(Pixels, usize);
    impl ImageSource for Untrue {
        fn name(&self) -> &'static str {
            "untrue"
        }
        fn len(&self) -> usize {
            self.0.len()
        }
        fn classes(&self) -> usize {
            self.0.classes()
        }
        fn size(&self) -> Option<[u32; 2]> {
            Some([8, 12])
        }
        fn label(&self, row: usize) -> i64 {
            self.0.label(row)
        }
        fn image<'a>(&'a self, row: usize, memory: &'a mut Vec<u8>) -> Result<Image<'a>, DataError> {
            let image = self.0.image(row, memory)?;
            Ok(Image { pixels: &image.pixels[..self.1], ..image })
        }
    }
    for (width, height, bytes) in [(12, 8, 288), (6, 8, 144), (8, 12, 100)] {
        let options = ImageOptions { side: 32, split: Split::Test, layout: EngineLayout::ChannelsLast };
        let set = ImageSet::new(Untrue(Pixels::new(width, height), bytes), options).unwrap();
        let error = set.image_bytes(&[1], LoadPass::new(0, 0)).err().unwrap().to_string();
        assert!(error.contains("data set `untrue`: expected images of 8 × 12 pixels"), "{error}");
        assert!(error.contains(&format!("got {width} × {height} pixels of {bytes} bytes")), "{error}");
    }
    let layout = EngineLayout::Contiguous;
    let how = |size, taps_max| ImageResizing { size, side: 8, taps_max, scale: [1.0; 3], shift: [0.0; 3], layout };
    for (images, size, taps_max) in [(1, [0, 8], [2, 2]), (1, [8, 8], [u32::MAX, 2]), (1 << 30, [8, 8], [2, 2])] {
        assert_eq!(ImageForm::new(images, how(size, taps_max)), None);
    }
}

/// Channels-last memory of images [images, channels, pixels, 1].
fn channels_last(images: &Tensor) -> Tensor {
    images.permute([0, 2, 3, 1]).contiguous()
}

/// The kernels and libtorch, which computes in double precision from the same inputs. The mean of the values is far from 0, or the first
/// pixel is far from all others: a variance from sums of squares once lost its digits there.
#[test]
fn instance_norms() {
    for (images, pixels, channels, splits) in [(1, 4, 4, 1), (2, 36, 40, 1), (3, 49, 8, 3), (1, 333, 64, 8)] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let dims = [images, channels, pixels, 1];
            let random = |seed| {
                let values = bell(seed, dims.iter().product::<i64>() as usize);
                Tensor::from_slice(&values).reshape(dims).to_kind(kind)
            };
            let (x, upstream) = (random(1) * 0.5 + 3.0, random(2));
            if splits > 1 {
                let _ = x.narrow(2, 0, 1).fill_(1000.0);
            }
            let bytes: Vec<u8> = [&x, &upstream]
                .into_iter()
                .flat_map(|tensor| engine::bytes(&channels_last(tensor)).unwrap().to_vec())
                .collect();
            let size = kind.elt_size_in_bytes();
            let numbers = [images, pixels, channels, splits, 0].map(|number| number as u64);
            let output = run("norm", &size.to_string(), numbers, &bytes);
            let (y, gradient) = output.split_at(bytes.len() / 2);
            let leaf = x.to_kind(Kind::Double).set_requires_grad(true);
            let none = None::<&Tensor>;
            let expected = leaf.instance_norm(none, none, none, none, true, 0.1, 1e-5, false);
            (&expected * upstream.to_kind(Kind::Double)).sum(Kind::Double).backward();
            for (what, got, expected) in [("values", y, expected.detach()), ("gradients", gradient, leaf.grad())] {
                let got = Tensor::f_from_data_size(got, &[images, pixels, 1, channels], kind).unwrap();
                let gap = (got.to_kind(Kind::Double) - channels_last(&expected)).abs().max().double_value(&[]);
                // Values and gradients are below 20.
                let most = if kind == Kind::Float { 1e-5 } else { 0.1 };
                assert!(gap < most, "{what} of {dims:?} in {kind:?}: {gap}");
            }
        }
    }
}
