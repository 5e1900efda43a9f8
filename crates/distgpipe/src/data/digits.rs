//! The UCI set of handwritten digits: 1,797 images of 8 × 8 pixels, embedded in the
//! library. `data/README.md` has their origin and licence.

use super::folder::ImageFiles;
use super::image::ImageSource;
use super::{check, DataError, Dataset, FilePosition, LoadPass, Split};
use crate::driver::pipeline::Batch;
use crate::model::layer::SampleShape;
use std::path::PathBuf;
use tch::{Kind, TchError, Tensor};

/// Each record has 64 pixels from 0 to 16, row by row, then the label.
const FILE: &[u8] = include_bytes!("../../data/digits.bin");
const RECORDS: usize = 1797;
const SIDE: usize = 8;
const PIXELS: usize = SIDE * SIDE;
const PIXEL_MAX: u8 = 16;
const CLASSES: usize = 10;
/// Every fifth record is in the test set.
const TEST_EVERY: usize = 5;
/// Larger images add no detail to 8 × 8 pixels.
const SIDE_MAX: usize = 1024;

/// The form of the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigitsOptions {
    /// Height and width, a multiple of 8. Larger images are interpolated.
    pub side: usize,
    /// 1, or 3 channels with the same values.
    pub channels: usize,
}

impl Default for DigitsOptions {
    fn default() -> Self {
        DigitsOptions { side: SIDE, channels: 1 }
    }
}

/// Handwritten digits, normalised so that the training set has mean 0 and standard deviation 1.
#[derive(Debug)]
pub struct Digits {
    /// [`PIXELS`] normalised values per image.
    pixels: Vec<f32>,
    labels: Vec<i64>,
    options: DigitsOptions,
    input: Vec<SampleShape>,
}

impl Digits {
    /// One split of the data set: 1,437 records for training or 360 for testing.
    ///
    /// # Errors
    /// If the options are out of range.
    pub fn new(split: Split, options: DigitsOptions) -> Result<Self, DataError> {
        let options = options.checked()?;
        let records = records(FILE)?;
        let (mean, deviation) = Self::normalisation()?;
        let mine = || records.iter().enumerate().filter(|(i, _)| is_test(*i) == (split == Split::Test)).map(|(_, r)| r);
        let pixels: Vec<f32> =
            mine().flat_map(|(pixels, _)| *pixels).map(|&p| ((f64::from(p) - mean) / deviation) as f32).collect();
        let labels: Vec<i64> = mine().map(|(_, label)| i64::from(*label)).collect();
        Ok(Digits { pixels, labels, options, input: options.input() })
    }

    /// The mean and the standard deviation of the training set, whose pixels are from 0 to 16.
    ///
    /// # Errors
    /// If the library was built from a corrupt file.
    pub fn normalisation() -> Result<(f64, f64), DataError> {
        let records = records(FILE)?;
        Ok(statistics(records.iter().enumerate().filter(|(i, _)| !is_test(*i)).map(|(_, record)| record.0)))
    }

    /// One split of the data set, in the form that a model with this input takes.
    ///
    /// # Errors
    /// If the model does not take one square image with 1 or 3 channels and a side that is a multiple of 8.
    pub fn for_input(split: Split, input: &[SampleShape]) -> Result<Self, DataError> {
        Self::new(split, DigitsOptions::of_input(input)?)
    }
}

impl Dataset for Digits {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn classes(&self) -> Option<usize> {
        Some(CLASSES)
    }

    fn class_names(&self) -> Option<Vec<String>> {
        Some((0..CLASSES).map(|digit| digit.to_string()).collect())
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    fn batch(&self, rows: &[usize], _: LoadPass<'_>) -> Result<Batch, DataError> {
        check(rows, self.len())?;
        let pixels: Vec<f32> = rows.iter().flat_map(|row| &self.pixels[row * PIXELS..][..PIXELS]).copied().collect();
        let labels: Vec<i64> = rows.iter().map(|&row| self.labels[row]).collect();
        Ok(Batch::new(self.options.images(&pixels)?, Tensor::f_from_slice(&labels)?))
    }
}

impl DigitsOptions {
    /// The form that a model with this input takes.
    fn of_input(input: &[SampleShape]) -> Result<Self, DataError> {
        let unsuitable = || DataError::Unsuitable {
            set: "digits",
            expected: "a model that takes one image of 1 or 3 channels whose side is a multiple of 8".to_owned(),
            got: format!("{:?}", input.iter().map(|shape| &shape.dims).collect::<Vec<_>>()),
        };
        let [SampleShape { dims, kind: Kind::Float }] = input else { return Err(unsuitable()) };
        let [channels, height, width] = dims[..] else { return Err(unsuitable()) };
        match (usize::try_from(channels), usize::try_from(height)) {
            (Ok(channels), Ok(side)) if height == width => DigitsOptions { side, channels }.checked(),
            _ => Err(unsuitable()),
        }
    }

    fn checked(self) -> Result<Self, DataError> {
        let sides = self.side >= SIDE && self.side <= SIDE_MAX && self.side.is_multiple_of(SIDE);
        if sides && matches!(self.channels, 1 | 3) {
            return Ok(self);
        }
        Err(DataError::Unsuitable {
            set: "digits",
            expected: format!("1 or 3 channels and a side that is a multiple of {SIDE} up to {SIDE_MAX}"),
            got: format!("{} channels, side {}", self.channels, self.side),
        })
    }

    fn input(self) -> Vec<SampleShape> {
        let (channels, side) = (self.channels as i64, self.side as i64);
        vec![SampleShape::float(&[channels, side, side])]
    }

    /// Images in this form, from [`PIXELS`] normalised values each.
    fn images(self, pixels: &[f32]) -> Result<Tensor, TchError> {
        let mut images = Tensor::f_from_slice(pixels)?.f_view([-1, 1, SIDE as i64, SIDE as i64])?;
        if self.side != SIDE {
            let side = self.side as i64;
            images = images.f_upsample_bilinear2d([side, side], false, None, None)?;
        }
        if self.channels != 1 {
            images = images.f_repeat([1, self.channels as i64, 1, 1])?;
        }
        Ok(images)
    }
}

/// Image files of 8 × 8 pixels, prepared like [`Digits`], for prediction. Their brightness, black to white, becomes the ink of
/// the data set, 0 to 16.
#[derive(Debug)]
pub struct DigitFiles {
    files: ImageFiles,
    options: DigitsOptions,
    input: Vec<SampleShape>,
    mean: f64,
    deviation: f64,
}

impl DigitFiles {
    /// These files, in the form that a model with this input takes. No file is checked: loading the row of a bad one fails.
    ///
    /// # Errors
    /// As [`Digits::for_input`].
    pub fn for_input(files: Vec<PathBuf>, input: &[SampleShape]) -> Result<Self, DataError> {
        let options = DigitsOptions::of_input(input)?;
        let (mean, deviation) = Digits::normalisation()?;
        Ok(DigitFiles { files: ImageFiles::unlabelled(files), options, input: options.input(), mean, deviation })
    }
}

impl Dataset for DigitFiles {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn classes(&self) -> Option<usize> {
        None
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
        check(rows, self.len())?;
        let mut pixels = vec![0.0; rows.len() * PIXELS];
        pass.fill(&mut pixels, rows, |row, into, memory: &mut Vec<u8>| {
            let image = self.files.image(row, memory)?;
            if (image.width, image.height) != (SIDE, SIDE) {
                let got = format!("{} × {}", image.width, image.height);
                return Err(self.files.defect(row, "an image of 8 × 8 pixels, as the digits are", got));
            }
            for (value, rgb) in into.iter_mut().zip(image.pixels.chunks_exact(3)) {
                let brightness: u32 = rgb.iter().map(|&colour| u32::from(colour)).sum();
                // Rounded, because the data set has whole numbers.
                let ink = (f64::from(brightness) * f64::from(PIXEL_MAX) / (3.0 * 255.0)).round();
                *value = ((ink - self.mean) / self.deviation) as f32;
            }
            Ok(())
        })?;
        let none = Tensor::f_zeros([rows.len() as i64], (Kind::Int64, tch::Device::Cpu))?;
        Ok(Batch::new(self.options.images(&pixels)?, none))
    }
}

fn is_test(record: usize) -> bool {
    record.is_multiple_of(TEST_EVERY)
}

/// The records of the embedded file, as pixels and label.
fn records(file: &[u8]) -> Result<Vec<(&[u8], u8)>, DataError> {
    let damaged = |expected: String, got: String| DataError::Corrupt {
        file: "digits.bin".into(),
        place: FilePosition::File,
        expected,
        got,
        remedy: "the library was built from a corrupt source file, download its source again".to_owned(),
    };
    if file.len() != RECORDS * (PIXELS + 1) {
        return Err(damaged(format!("{} bytes", RECORDS * (PIXELS + 1)), format!("{} bytes", file.len())));
    }
    file.chunks_exact(PIXELS + 1)
        .enumerate()
        .map(|(i, record)| {
            let (pixels, label) = record.split_at(PIXELS);
            if let Some(pixel) = pixels.iter().find(|&&p| p > PIXEL_MAX) {
                return Err(damaged(format!("pixels of 0 to {PIXEL_MAX} in record {i}"), pixel.to_string()));
            }
            if usize::from(label[0]) >= CLASSES {
                return Err(damaged(format!("a label of 0 to 9 in record {i}"), label[0].to_string()));
            }
            Ok((pixels, label[0]))
        })
        .collect()
}

/// Mean and standard deviation of all pixels.
fn statistics<'a>(images: impl Iterator<Item = &'a [u8]>) -> (f64, f64) {
    // Exact: the sums are integers below 2^53.
    let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
    for &pixel in images.flatten() {
        count += 1.0;
        sum += f64::from(pixel);
        squares += f64::from(pixel) * f64::from(pixel);
    }
    let mean = sum / count;
    (mean, (squares / count - mean * mean).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_file_is_the_published_set() {
        let records = records(FILE).unwrap();
        assert_eq!(records.len(), 1797);
        let mut counts = [0; CLASSES];
        records.iter().for_each(|(_, label)| counts[usize::from(*label)] += 1);
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    }

    #[test]
    fn the_parts_have_the_sizes_they_promise_and_the_training_part_is_normalised() {
        let train = Digits::new(Split::Train, DigitsOptions::default()).unwrap();
        let test = Digits::new(Split::Test, DigitsOptions::default()).unwrap();
        assert_eq!((train.len(), test.len()), (1437, 360));
        let pixels = Tensor::from_slice(&train.pixels);
        assert!(pixels.mean(Kind::Float).double_value(&[]).abs() < 1e-5);
        assert!((pixels.std(false).double_value(&[]) - 1.0).abs() < 1e-5);
    }

    #[test]
    fn batches_have_the_shape_that_the_model_takes() {
        let model = crate::model::zoo::MobileNetV2 { image: 32, ..Default::default() }.model().unwrap();
        let digits = Digits::for_input(Split::Test, &model.input).unwrap();
        assert_eq!(digits.input(), &model.input[..]);
        let batch = digits.batch(&[3, 0, 3], LoadPass::new(0, 0)).unwrap();
        assert_eq!(batch.inputs[0].size(), [3, 3, 32, 32]);
        assert_eq!(batch.inputs[0].get(0), batch.inputs[0].get(2));
        assert!(matches!(digits.batch(&[360], LoadPass::new(0, 0)), Err(DataError::NoSuchRow { len: 360, got: 360 })));
        for dims in [&[1, 12, 12][..], &[2, 8, 8], &[1, 8, 16], &[64], &[1, 1 << 40, 1 << 40]] {
            assert!(Digits::for_input(Split::Test, &[SampleShape::float(dims)]).is_err(), "{dims:?}");
        }
    }

    #[test]
    fn a_damaged_file_is_told_from_a_whole_one() {
        let text = |file: &[u8]| records(file).unwrap_err().to_string();
        assert!(text(&FILE[1..]).contains("expected 116805 bytes, got 116804"));
        let mut file = FILE.to_vec();
        file[70] = 17;
        assert!(text(&file).contains("pixels of 0 to 16 in record 1, got 17"));
        file[70] = 0;
        file[64] = 10;
        assert!(text(&file).contains("a label of 0 to 9 in record 0, got 10"));
    }
}
