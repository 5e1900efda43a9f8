//! Preprocessing of images: cropped to a square, resized, normalised, and augmented in training.
//!
//! In training, a random box of 8 to 100 % of the image's area, with an aspect ratio of 3:4 to 4:3, is resized to the
//! square, and half of the images are mirrored (torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`). In testing,
//! the shorter side is resized to 256/224 of the square and the centre is cropped (`Resize`, `CenterCrop`). Colours are
//! normalised by ImageNet's means and standard deviations, as pretrained weights expect, or by others.

mod bytes;
pub(super) mod decode;
mod resample;

pub use bytes::ImageBytes;

use super::{check, DataError, Dataset, LoadPass, Split};
use crate::driver::pipeline::Batch;
use crate::engine::kernels::{ImageForm, ImageResizing};
use crate::engine::{self, Draws, Layout};
use crate::model::layer::SampleShape;
use resample::{resample, Axis, Normalisation, ResampleSpec, ResizedInterval, Rows};
use tch::{Kind, Tensor};

const CHANNELS: usize = 3;
/// The mean that is subtracted from red, green and blue, which are from 0 to 1.
pub const MEAN: [f32; CHANNELS] = [0.485, 0.456, 0.406];
/// The standard deviation by which red, green and blue are then divided.
pub const DEVIATION: [f32; CHANNELS] = [0.229, 0.224, 0.225];

/// The range of a random box's share of the image's area.
const AREA: (f64, f64) = (0.08, 1.0);
/// The range of a random box's aspect ratio, width over height.
const RATIO: (f64, f64) = (3.0 / 4.0, 4.0 / 3.0);
/// How many random boxes may fall outside the image before the centre is used.
const TRIES: usize = 10;

/// The shorter side of a test image is resized to this many 224ths of the square's side.
const TEST_SIDE: usize = 256;
const TEST_SQUARE: usize = 224;

/// The largest side accepted. No model takes larger images.
const SIDE_MAX: usize = 4096;

/// An 8-bit RGB image.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// Pixels per row, at least 1.
    pub width: usize,
    /// Rows, at least 1.
    pub height: usize,
    /// The pixels row by row, with red, green and blue interleaved.
    pub pixels: &'a [u8],
}

/// A source of images: what an image data set implements.
pub trait ImageSource: Send + Sync {
    /// The name to use in errors.
    fn name(&self) -> &'static str;

    /// The number of images.
    fn len(&self) -> usize;

    /// Whether there are no images.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of classes.
    fn classes(&self) -> usize;

    /// The names of the classes, by class number; `None` if they are not known.
    fn class_names(&self) -> Option<Vec<String>> {
        None
    }

    /// Width and height, if all images have the same and are in memory. A GPU then gets them as bytes, and resizes them itself;
    /// an image of another size is refused.
    fn size(&self) -> Option<[u32; 2]> {
        None
    }

    /// The class of an image. The caller has checked that the row exists.
    fn label(&self, row: usize) -> i64;

    /// An image. The caller has checked that the row exists. The pixels may be written into `memory`, which is reused for
    /// the next image.
    fn image<'a>(&'a self, row: usize, memory: &'a mut Vec<u8>) -> Result<Image<'a>, DataError>;
}

/// The form of the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageOptions {
    /// Height and width in pixels.
    pub side: usize,
    /// The preprocessing: random crops for training, the centre for testing.
    pub split: Split,
    /// The memory layout of a batch. Convolutions are fastest with channels last.
    pub layout: Layout,
}

/// The images of a source, preprocessed for a model.
#[derive(Debug)]
pub struct ImageSet<S> {
    source: S,
    options: ImageOptions,
    input: [SampleShape; 1],
    normalisation: Normalisation,
}

impl<S: ImageSource> ImageSet<S> {
    /// The images of a source, in the given form.
    pub fn new(source: S, options: ImageOptions) -> Result<Self, DataError> {
        let side = options.side;
        if !(1..=SIDE_MAX).contains(&side) {
            return Err(DataError::Unsuitable {
                set: source.name(),
                expected: format!("images of 1 to {SIDE_MAX} pixels a side"),
                got: side.to_string(),
            });
        }
        let input = [SampleShape::float(&[CHANNELS as i64, side as i64, side as i64])];
        Ok(ImageSet { source, options, input, normalisation: normalisation(MEAN, DEVIATION) })
    }

    /// The same images, normalised by other means and standard deviations of red, green and blue, which are from 0 to 1.
    ///
    /// # Errors
    /// If a mean is not finite, or a deviation is not above 0.
    pub fn normalised_by(mut self, mean: [f32; CHANNELS], deviation: [f32; CHANNELS]) -> Result<Self, DataError> {
        if !mean.iter().all(|mean| mean.is_finite()) || !deviation.iter().all(|d| d.is_normal() && *d > 0.0) {
            return Err(DataError::Unsuitable {
                set: self.source.name(),
                expected: "finite means, and standard deviations above 0".to_owned(),
                got: format!("{mean:?} and {deviation:?}"),
            });
        }
        self.normalisation = normalisation(mean, deviation);
        Ok(self)
    }

    /// The images of a source, in the form that a model with this input takes.
    pub fn for_input(source: S, input: &[SampleShape], split: Split, layout: Layout) -> Result<Self, DataError> {
        if let [SampleShape { dims, kind: Kind::Float }] = input {
            if let [3, height, width] = dims[..] {
                if height == width {
                    let side = usize::try_from(height).unwrap_or(0);
                    return Self::new(source, ImageOptions { side, split, layout });
                }
            }
        }
        Err(DataError::Unsuitable {
            set: source.name(),
            expected: "a model that takes one square image of 3 channels".to_owned(),
            got: format!("{:?}", input.iter().map(|shape| &shape.dims).collect::<Vec<_>>()),
        })
    }
}

/// Buffers that a thread reuses from image to image.
#[derive(Default)]
struct Scratch {
    decoded: Vec<u8>,
    rows: Rows,
}

impl<S: ImageSource> Dataset for ImageSet<S> {
    fn len(&self) -> usize {
        self.source.len()
    }

    fn classes(&self) -> Option<usize> {
        Some(self.source.classes())
    }

    fn class_names(&self) -> Option<Vec<String>> {
        self.source.class_names()
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
        check(rows, self.len())?;
        let side = self.options.side as i64;
        let dims = [rows.len() as i64, CHANNELS as i64, side, side];
        let mut images = pass.empty(&dims, Kind::Float, self.options.layout)?;
        let values = engine::floats_mut(&mut images).unwrap_or_default();
        pass.fill(values, rows, |row, into, scratch: &mut Scratch| {
            let image = self.source.image(row, &mut scratch.decoded)?;
            self.view(&image, row, pass).show(&image, self.options, self.normalisation, &mut scratch.rows, into);
            Ok(())
        })?;
        Ok(Batch::new(images, self.labels(rows)?))
    }

    fn image_bytes(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Option<ImageBytes>, DataError> {
        check(rows, self.len())?;
        let Some(form) = self.source.size().and_then(|size| self.form_of_bytes(rows.len(), size)) else {
            return Ok(None);
        };
        let dims = [rows.len() as i64, form.image_bytes() as i64];
        let mut bytes = pass.empty(&dims, Kind::Uint8, Layout::Contiguous)?;
        let values = engine::bytes_mut(&mut bytes).unwrap_or_default();
        pass.fill(values, rows, |row, into, decoded: &mut Vec<u8>| {
            let image = self.source.image(row, decoded)?;
            let (size, pixels) = ([image.width, image.height], image.pixels.len());
            if size != form.size() || pixels != CHANNELS * image.width * image.height {
                let [width, height] = form.size();
                return Err(DataError::Unsuitable {
                    set: self.source.name(),
                    expected: format!("images of {width} × {height} pixels, as its `ImageSource::size` says"),
                    got: format!("{} × {} pixels of {pixels} bytes in row {row}", image.width, image.height),
                });
            }
            Ok(bytes::write(&image, &self.view(&image, row, pass).axes(self.options.side), form, into)?)
        })?;
        Ok(Some(ImageBytes { bytes, form, target: self.labels(rows)? }))
    }
}

impl<S: ImageSource> ImageSet<S> {
    fn labels(&self, rows: &[usize]) -> Result<Tensor, DataError> {
        let labels: Vec<i64> = rows.iter().map(|&row| self.source.label(row)).collect();
        Ok(Tensor::f_from_slice(&labels)?)
    }

    fn view(&self, image: &Image<'_>, row: usize, pass: LoadPass<'_>) -> View {
        match self.options.split {
            Split::Train => View::random(image, self.options.side, &mut pass.row(row).draws()),
            Split::Test => View::middle(image, self.options.side),
        }
    }

    /// The byte form of images of this size; `None` if it is no smaller than the values.
    fn form_of_bytes(&self, images: usize, size: [u32; 2]) -> Option<ImageForm> {
        let side = self.options.side;
        // No view shows more of an image than all of it on one side of the square.
        let taps_max = size.map(|length| Axis::taps_of(length as usize, side) as u32);
        let Normalisation { scale, shift } = self.normalisation;
        let layout = self.options.layout;
        let form = ImageForm::new(images, ImageResizing { size, side: side as u32, taps_max, scale, shift, layout })?;
        (form.image_bytes() < CHANNELS * side * side * size_of::<f32>()).then_some(form)
    }
}

/// The part of an image that is used, and whether it is mirrored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct View {
    x: ResizedInterval,
    y: ResizedInterval,
    mirrored: bool,
}

impl View {
    /// A random box, resized to the square.
    fn random(image: &Image<'_>, side: usize, draws: &mut Draws) -> Self {
        let (x, y, width, height) = random_box(image.width, image.height, draws);
        let whole = |from, length| ResizedInterval { from, length, resized: side, first: 0 };
        View { x: whole(x, width), y: whole(y, height), mirrored: draws.bits() >> 63 == 1 }
    }

    /// The centre of the image.
    fn middle(image: &Image<'_>, side: usize) -> Self {
        let short = ((side * TEST_SIDE) as f64 / TEST_SQUARE as f64).round() as usize;
        let shorter = image.width.min(image.height);
        let axis = |length: usize| {
            // Integer division, as torchvision truncates.
            let resized = short * length / shorter;
            let first = ((resized - side) as f64 / 2.0).round_ties_even() as usize;
            ResizedInterval { from: 0, length, resized, first }
        };
        View { x: axis(image.width), y: axis(image.height), mirrored: false }
    }

    /// The columns and the lines of a square of this side.
    fn axes(&self, side: usize) -> [Axis; 2] {
        let columns = Axis::new(self.x, side);
        [if self.mirrored { columns.mirrored() } else { columns }, Axis::new(self.y, side)]
    }

    fn show(
        &self,
        image: &Image<'_>,
        options: ImageOptions,
        normalisation: Normalisation,
        rows: &mut Rows,
        into: &mut [f32],
    ) {
        let [columns, lines] = self.axes(options.side);
        let wanted = ResampleSpec { columns: &columns, lines: &lines, normalisation, layout: options.layout };
        resample(image, &wanted, rows, into);
    }
}

/// x, y, width and height of torchvision's `RandomResizedCrop`.
fn random_box(width: usize, height: usize, draws: &mut Draws) -> (usize, usize, usize, usize) {
    let area = (width * height) as f64;
    for _ in 0..TRIES {
        let target = area * draws.uniform(AREA.0, AREA.1);
        let ratio = draws.uniform(RATIO.0.ln(), RATIO.1.ln()).exp();
        let (w, h) = ((target * ratio).sqrt().round_ties_even(), (target / ratio).sqrt().round_ties_even());
        let (w, h) = (w as usize, h as usize);
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            return (draws.below(width - w + 1), draws.below(height - h + 1), w, h);
        }
    }
    let ratio = width as f64 / height as f64;
    let (w, h) = if ratio < RATIO.0 {
        (width, ((width as f64 / RATIO.0).round_ties_even() as usize).clamp(1, height))
    } else if ratio > RATIO.1 {
        (((height as f64 * RATIO.1).round_ties_even() as usize).clamp(1, width), height)
    } else {
        (width, height)
    };
    ((width - w) / 2, (height - h) / 2, w, h)
}

fn normalisation(mean: [f32; CHANNELS], deviation: [f32; CHANNELS]) -> Normalisation {
    let scale = deviation.map(|deviation| 1.0 / (255.0 * deviation));
    Normalisation { scale, shift: std::array::from_fn(|c| -mean[c] / deviation[c]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Stream;
    use serde_json::Value;

    const GOLDEN: &str = include_str!("../../tests/golden/images.json");

    /// The formula of scripts/golden_images.py.
    fn pixels(width: usize, height: usize) -> Vec<u8> {
        let value = |i: usize| {
            let (x, y, c) = (i / 3 % width, i / 3 / width, i % 3);
            ((37 * x + 91 * y + 53 * c + 7 * x * y) % 256) as u8
        };
        (0..3 * width * height).map(value).collect()
    }

    fn numbers(value: &Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
    }

    fn whole(value: &Value) -> Vec<usize> {
        numbers(value).into_iter().map(|v| v as usize).collect()
    }

    fn seen(view: View, image: &Image<'_>, side: usize, layout: Layout) -> Vec<f32> {
        seen_with(view, image, ImageOptions { side, split: Split::Test, layout }, (MEAN, DEVIATION))
    }

    fn seen_with(view: View, image: &Image<'_>, options: ImageOptions, by: ([f32; 3], [f32; 3])) -> Vec<f32> {
        let side = options.side;
        let mut into = vec![f32::NAN; 3 * side * side];
        view.show(image, options, normalisation(by.0, by.1), &mut Rows::default(), &mut into);
        into
    }

    /// Scales back to 0 to 255.
    fn plain(values: &[f32]) -> Vec<f64> {
        plain_of(values, (MEAN, DEVIATION))
    }

    fn plain_of(values: &[f32], (mean, deviation): ([f32; 3], [f32; 3])) -> Vec<f64> {
        let colour = |(i, v): (usize, &f32)| 255.0 * f64::from(v * deviation[i % 3] + mean[i % 3]);
        values.iter().enumerate().map(colour).collect()
    }

    #[test]
    fn views_are_those_of_torchvision() {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        let cases = ["crops", "middles"].iter().flat_map(|kind| golden[kind].as_array().unwrap());
        for case in cases {
            let (size, side) = (whole(&case["size"]), case["side"].as_u64().unwrap() as usize);
            let pixels = pixels(size[0], size[1]);
            let image = Image { width: size[0], height: size[1], pixels: &pixels };
            let view = match case["box"].as_array() {
                None => View::middle(&image, side),
                Some(_) => {
                    let cut = whole(&case["box"]);
                    let stretch =
                        |i: usize| ResizedInterval { from: cut[i], length: cut[i + 2], resized: side, first: 0 };
                    View { x: stretch(0), y: stretch(1), mirrored: case["mirrored"].as_bool().unwrap() }
                }
            };
            let got = seen(view, &image, side, Layout::ChannelsLast);
            let away = |expected: &[f64]| {
                assert_eq!(expected.len(), got.len());
                plain(&got).iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
            };
            let named = format!("{size:?} {} to {side}", case["box"]);
            assert!(away(&numbers(&case["exact"])) < 1e-3, "{named}: {}", away(&numbers(&case["exact"])));
            assert!(away(&numbers(&case["pillow"])) <= 1.0, "{named}: {}", away(&numbers(&case["pillow"])));
            let planar = seen(view, &image, side, Layout::Contiguous);
            for (i, value) in got.iter().enumerate() {
                assert_eq!(*value, planar[i % 3 * side * side + i / 3], "{named}");
            }
            let other = ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.201]);
            let options = ImageOptions { side, split: Split::Test, layout: Layout::ChannelsLast };
            let colours = plain_of(&seen_with(view, &image, options, other), other);
            let exact = numbers(&case["exact"]);
            assert!(colours.iter().zip(&exact).all(|(a, b)| (a - b).abs() < 1e-3), "{named}, normalised by {other:?}");
        }
    }

    #[test]
    fn random_boxes_are_within_the_image_and_as_torchvision_draws_them() {
        let mut draws = Stream::new(1).draws();
        let (mut areas, mut ratios, mut count) = (0.0, 0.0, 0);
        for round in 0..20_000 {
            let (width, height) = [(32, 32), (400, 300), (1, 1), (1, 500), (500, 1), (7, 3)][round % 6];
            let (x, y, w, h) = random_box(width, height, &mut draws);
            assert!(w > 0 && h > 0 && x + w <= width && y + h <= height, "{:?} of {width}×{height}", (x, y, w, h));
            if (width, height) == (400, 300) {
                let (area, ratio) = ((w * h) as f64 / 120_000.0, w as f64 / h as f64);
                assert!((0.078..=1.0).contains(&area) && (0.73..=1.36).contains(&ratio), "{area} {ratio}");
                (areas, ratios, count) = (areas + area, ratios + ratio.ln(), count + 1);
            }
        }
        // torchvision's means over 200,000 draws for 400×300: area 0.434, log ratio 0.031.
        let (area, ratio) = (areas / f64::from(count), ratios / f64::from(count));
        assert!((area - 0.434).abs() < 0.015, "{area}");
        assert!((ratio - 0.031).abs() < 0.015, "{ratio}");
    }

    /// Four images of different sizes, one of which cannot be decoded.
    struct Few;

    impl ImageSource for Few {
        fn name(&self) -> &'static str {
            "few"
        }
        fn len(&self) -> usize {
            4
        }
        fn classes(&self) -> usize {
            4
        }
        fn label(&self, row: usize) -> i64 {
            row as i64
        }
        fn image<'a>(&'a self, row: usize, memory: &'a mut Vec<u8>) -> Result<Image<'a>, DataError> {
            if row == 3 {
                return Err(DataError::NoSuchRow { len: 3, got: 3 });
            }
            let (width, height) = (9 + 20 * row, 30 - row);
            *memory = pixels(width, height);
            Ok(Image { width, height, pixels: memory })
        }
    }

    fn few(split: Split, layout: Layout) -> ImageSet<Few> {
        ImageSet::new(Few, ImageOptions { side: 12, split, layout }).unwrap()
    }

    #[test]
    fn a_row_looks_the_same_in_every_batch_of_an_epoch_and_otherwise_in_the_next() {
        let train = few(Split::Train, Layout::ChannelsLast);
        let never = std::sync::atomic::AtomicBool::new(false);
        let a = train.batch(&[0, 1, 2, 1], LoadPass::new(5, 0)).unwrap();
        let b = train.batch(&[1, 0], LoadPass::new(5, 0).shared(3, &never)).unwrap();
        assert_eq!((a.inputs[0].get(1), a.inputs[0].get(0)), (b.inputs[0].get(0), b.inputs[0].get(1)));
        assert_eq!(a.inputs[0].get(1), a.inputs[0].get(3));
        for other in [LoadPass::new(5, 1), LoadPass::new(6, 0)] {
            assert_ne!(train.batch(&[1], other).unwrap().inputs[0].get(0), b.inputs[0].get(0));
        }
        let test = few(Split::Test, Layout::Contiguous);
        let (a, b) = (test.batch(&[2], LoadPass::new(5, 0)).unwrap(), test.batch(&[2], LoadPass::new(6, 1)).unwrap());
        assert_eq!(a.inputs, b.inputs);
        assert_eq!(Vec::<i64>::try_from(&a.target).unwrap(), [2]);
        assert!(test.batch(&[0, 3], LoadPass::new(0, 0)).is_err());
    }

    #[test]
    fn the_same_images_come_in_the_same_order_whatever_the_threads_and_after_a_resume() {
        use crate::data::{Loader, LoaderOptions, Subset};
        use std::sync::Arc;
        // Without the image that cannot be decoded.
        let data = Arc::new(few(Split::Train, Layout::ChannelsLast));
        let loader = |threads| {
            let data = Subset::new(data.clone(), 3);
            Loader::new(data, LoaderOptions { threads, ..LoaderOptions::training(1, 9) }).unwrap()
        };
        let images =
            |epoch: crate::data::Epoch| -> Vec<Tensor> { epoch.map(|b| b.unwrap().inputs.remove(0)).collect() };
        let alone = images(loader(1).epoch(4));
        assert_eq!(alone.len(), 3);
        assert_eq!(alone, images(loader(5).epoch(4)));
        assert_eq!(alone[2..], images(loader(2).epoch_from(4, 2))[..]);
        assert_ne!(alone, images(loader(1).epoch(5)));
    }

    #[test]
    fn layouts_hold_the_same_images_and_micro_batches_keep_them() {
        let (last, first) = (few(Split::Train, Layout::ChannelsLast), few(Split::Train, Layout::Contiguous));
        let pass = LoadPass::new(0, 0);
        let (last, first) = (last.batch(&[0, 1, 2], pass).unwrap(), first.batch(&[0, 1, 2], pass).unwrap());
        assert_eq!(last.inputs, first.inputs);
        assert_eq!(engine::layout(&last.inputs[0].narrow(0, 1, 2)), Some(Layout::ChannelsLast));
        assert_eq!(engine::layout(&first.inputs[0]), Some(Layout::Contiguous));
    }

    #[test]
    fn models_that_take_no_square_colour_image_are_refused() {
        for dims in [&[1, 8, 8][..], &[3, 8, 9], &[3, 8], &[3, 0, 0], &[3, 1 << 40, 1 << 40]] {
            let input = [SampleShape::float(dims)];
            assert!(ImageSet::for_input(Few, &input, Split::Test, Layout::Contiguous).is_err(), "{dims:?}");
        }
        assert!(ImageSet::for_input(Few, &[SampleShape::int(&[3, 8, 8])], Split::Test, Layout::Contiguous).is_err());
    }
}
