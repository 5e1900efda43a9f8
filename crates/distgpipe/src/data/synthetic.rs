//! Generated data for any model's input. A row depends on the seed and its number alone.
//!
//! A row of numbers is noise from a small bank, so that making a batch costs no more than a copy: the loader shares its
//! cores with what is being measured. To make the data learnable, each class adds a short pattern of its own, repeated over
//! the whole tensor. Tokens are drawn one by one; to make them learnable, half of them depend on the class. Rows of tokens
//! have different lengths, which the mask shows.

use super::{check, DataError, Dataset, LoadPass};
use crate::driver::pipeline::Batch;
use crate::engine::{self, Layout, Stream};
use crate::model::layer::SampleShape;
use tch::{Kind, Tensor};

/// The number of different rows of noise.
const BANK: usize = 64;
/// The number of values in a class's pattern.
const PATTERN: usize = 256;
/// RoBERTa's padding token. Token 0 starts a text.
const PADDING: i64 = 1;
/// The first token without a special meaning.
const WORDS: i64 = 4;

/// The target of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// One of this many classes.
    Class(usize),
    /// A tensor of this shape.
    Tensor(SampleShape),
    /// A tensor of this shape that is all zeros or all ones.
    Binary(SampleShape),
}

/// Whether the target depends on the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// The input determines the target.
    Learnable,
    /// Input and target are independent.
    Random,
}

/// Options of generated data.
#[derive(Clone, Debug)]
pub struct SyntheticOptions {
    /// The model's input: one tensor of floats, or token ids and their mask.
    pub input: Vec<SampleShape>,
    /// The kind of target.
    pub target: Target,
    /// The number of rows.
    pub rows: usize,
    /// The number of the first row. Data sets with disjoint row numbers share the class patterns but no row.
    pub first_row: usize,
    /// The size of the vocabulary, if the input is tokens.
    pub vocabulary: i64,
    /// Whether the target depends on the input.
    pub pattern: Pattern,
    /// The seed of all randomness.
    pub seed: u64,
}

/// A generated data set.
#[derive(Debug)]
pub struct Synthetic {
    options: SyntheticOptions,
    stream: Stream,
    source: RowSource,
}

#[derive(Debug)]
enum RowSource {
    /// [`BANK`] rows of noise, and [`PATTERN`] values for each class.
    Numbers {
        noise: Vec<f32>,
        patterns: Vec<f32>,
    },
    Tokens,
}

impl Synthetic {
    /// Generates the bank of noise and the patterns.
    ///
    /// # Errors
    /// If the input is neither one tensor of floats nor token ids and a mask.
    pub fn new(options: SyntheticOptions) -> Result<Self, DataError> {
        let stream = Stream::new(options.seed).named("synthetic data");
        let unsuitable = |expected: &str, got: String| DataError::Unsuitable {
            set: "synthetic",
            expected: expected.to_owned(),
            got,
        };
        let classes = match options.target {
            Target::Class(0) => return Err(unsuitable("at least 1 class", "0".to_owned())),
            Target::Class(classes) => classes,
            Target::Tensor(_) | Target::Binary(_) => 1,
        };
        let source = match &options.input[..] {
            [SampleShape { dims, kind: Kind::Float }] => {
                let count = |dim: &i64| u128::try_from(*dim).unwrap_or(0);
                let values = dims.iter().map(count).fold(1, u128::saturating_mul);
                let floats = values.saturating_mul(BANK as u128) + classes as u128 * PATTERN as u128;
                // Once as a tensor, once as a vector.
                let what = format!("generating samples of {values} values in {classes} classes");
                engine::require_memory(
                    &what,
                    floats.saturating_mul(8),
                    "use a model with a smaller input or fewer classes",
                )?;
                let values = i64::try_from(values).unwrap_or(i64::MAX);
                let noise = normal(stream.named("noise"), BANK as i64 * values)?;
                let patterns = normal(stream.named("patterns"), (classes * PATTERN) as i64)?;
                RowSource::Numbers { noise, patterns }
            }
            [SampleShape { dims, kind: Kind::Int64 }, mask]
                if dims.len() == 1 && mask.kind == Kind::Int64 && mask.dims == *dims =>
            {
                if options.vocabulary < WORDS + classes as i64 || dims[0] < 2 {
                    let expected = format!("at least 2 tokens and a vocabulary of at least {}", WORDS + classes as i64);
                    return Err(unsuitable(&expected, format!("{} and {}", dims[0], options.vocabulary)));
                }
                RowSource::Tokens
            }
            other => {
                let expected = "a model that takes one tensor of floats, or token ids and a mask";
                return Err(unsuitable(expected, format!("{other:?}")));
            }
        };
        Ok(Synthetic { options, stream, source })
    }

    /// A random integer below `bound`, determined by a row and a purpose.
    fn draw(&self, row: usize, purpose: &str, number: u64, bound: u64) -> u64 {
        let seed = self.stream.named(purpose).at((self.options.first_row + row) as u64).at(number).seed();
        // The high half of the product: uniform enough for bounds far below 2^64.
        ((u128::from(seed) * u128::from(bound)) >> 64) as u64
    }

    fn class(&self, row: usize) -> i64 {
        match self.options.target {
            Target::Class(classes) => self.draw(row, "class", 0, classes as u64) as i64,
            Target::Tensor(_) | Target::Binary(_) => 0,
        }
    }

    fn numbers(
        &self,
        rows: &[usize],
        pass: LoadPass<'_>,
        noise: &[f32],
        patterns: &[f32],
    ) -> Result<Tensor, DataError> {
        let width = noise.len() / BANK;
        let mut dims = vec![rows.len() as i64];
        dims.extend(&self.options.input[0].dims);
        let mut tensor = engine::empty(&dims, Kind::Float, Layout::Contiguous)?;
        let values = engine::floats_mut(&mut tensor).unwrap_or_default();
        // A GPU consumes large images faster than one core generates them.
        pass.fill(values, rows, |row, into, ()| {
            let bank = self.draw(row, "bank", 0, BANK as u64) as usize;
            into.copy_from_slice(&noise[bank * width..][..width]);
            if self.options.pattern == Pattern::Learnable {
                add_repeated(into, &patterns[self.class(row) as usize * PATTERN..][..PATTERN]);
            }
            Ok(())
        })?;
        Ok(tensor)
    }

    fn tokens(&self, rows: &[usize]) -> Result<Vec<Tensor>, DataError> {
        let length_max = self.options.input[0].dims[0];
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for &row in rows {
            let shortest = (length_max / 2).max(2);
            let length = shortest + self.draw(row, "length", 0, (length_max - shortest + 1) as u64) as i64;
            for position in 0..length_max {
                let word =
                    || WORDS + self.draw(row, "word", position as u64, (self.options.vocabulary - WORDS) as u64) as i64;
                let tells =
                    || self.options.pattern == Pattern::Learnable && self.draw(row, "tells", position as u64, 2) == 0;
                ids.push(match position {
                    _ if position >= length => PADDING,
                    0 => 0,
                    _ if tells() => WORDS + self.class(row),
                    _ => word(),
                });
                mask.push(i64::from(position < length));
            }
        }
        let shape = [rows.len() as i64, length_max];
        Ok(vec![Tensor::f_from_slice(&ids)?.f_view(shape)?, Tensor::f_from_slice(&mask)?.f_view(shape)?])
    }

    /// The targets: classes, the mean of a row's input as a constant tensor, or whether the number of its noise is odd.
    fn target(&self, rows: &[usize], inputs: &[Tensor]) -> Result<Tensor, DataError> {
        match &self.options.target {
            Target::Class(_) => Ok(Tensor::f_from_slice(&rows.iter().map(|&row| self.class(row)).collect::<Vec<_>>())?),
            Target::Binary(shape) => {
                let purpose = if self.options.pattern == Pattern::Learnable { "bank" } else { "target" };
                let odd = rows.iter().map(|&row| (self.draw(row, purpose, 0, BANK as u64) % 2) as f32);
                let mut dims = vec![rows.len() as i64];
                dims.extend(shape.dims.iter().map(|_| 1));
                let target = Tensor::f_from_slice(&odd.collect::<Vec<_>>())?.f_view(&dims[..])?;
                dims.truncate(1);
                dims.extend(&shape.dims);
                Ok(target.f_expand(&dims[..], false)?.f_contiguous()?)
            }
            Target::Tensor(shape) => {
                let mut dims = vec![rows.len() as i64];
                dims.extend(&shape.dims);
                let target = engine::empty(&dims, Kind::Float, Layout::Contiguous)?;
                for (i, &row) in rows.iter().enumerate() {
                    let mut one = target.f_get(i as i64)?;
                    match self.options.pattern {
                        Pattern::Random => {
                            let row = (self.options.first_row + row) as u64;
                            self.stream.named("target").at(row).normal(&mut one, 0.0, 1.0)?;
                        }
                        Pattern::Learnable => {
                            let mean = inputs[0].f_get(i as i64)?.f_to_kind(Kind::Float)?.f_mean(Kind::Float)?;
                            let _ = one.f_fill_tensor_(&mean)?;
                        }
                    }
                }
                Ok(target)
            }
        }
    }
}

impl Dataset for Synthetic {
    fn len(&self) -> usize {
        self.options.rows
    }

    fn classes(&self) -> Option<usize> {
        match self.options.target {
            Target::Class(classes) => Some(classes),
            Target::Tensor(_) | Target::Binary(_) => None,
        }
    }

    fn input(&self) -> &[SampleShape] {
        &self.options.input
    }

    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
        check(rows, self.options.rows)?;
        let inputs = match &self.source {
            RowSource::Numbers { noise, patterns } => vec![self.numbers(rows, pass, noise, patterns)?],
            RowSource::Tokens => self.tokens(rows)?,
        };
        let target = self.target(rows, &inputs)?;
        Ok(Batch { inputs, target, samples: Vec::new() })
    }
}

/// Adds the pattern to the values, repeatedly.
fn add_repeated(values: &mut [f32], pattern: &[f32]) {
    for piece in values.chunks_mut(pattern.len()) {
        piece.iter_mut().zip(pattern).for_each(|(value, add)| *value += add);
    }
}

fn normal(stream: Stream, count: i64) -> Result<Vec<f32>, DataError> {
    let mut tensor = engine::empty(&[count], Kind::Float, Layout::Contiguous)?;
    stream.normal(&mut tensor, 0.0, 1.0)?;
    Ok(Vec::try_from(&tensor)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(input: Vec<SampleShape>) -> SyntheticOptions {
        SyntheticOptions {
            input,
            target: Target::Class(3),
            rows: 50,
            first_row: 0,
            vocabulary: 20,
            pattern: Pattern::Learnable,
            seed: 7,
        }
    }

    #[test]
    fn a_row_is_the_same_in_every_batch_and_in_every_part() {
        for input in [vec![SampleShape::float(&[3, 5, 7])], vec![SampleShape::int(&[9]), SampleShape::int(&[9])]] {
            let whole = Synthetic::new(options(input.clone())).unwrap();
            let later = Synthetic::new(SyntheticOptions { first_row: 20, rows: 30, ..options(input.clone()) }).unwrap();
            let (a, b) = (
                whole.batch(&[3, 22, 40], LoadPass::new(0, 0)).unwrap(),
                later.batch(&[20, 2], LoadPass::new(0, 0)).unwrap(),
            );
            for (a, b) in a.inputs.iter().zip(&b.inputs) {
                assert_eq!((a.get(1), a.get(2)), (b.get(1), b.get(0)));
            }
            assert_eq!(
                a.inputs.iter().map(|t| t.size()[1..].to_vec()).collect::<Vec<_>>(),
                input.iter().map(|s| s.dims.clone()).collect::<Vec<_>>()
            );
            assert!(matches!(whole.batch(&[50], LoadPass::new(0, 0)), Err(DataError::NoSuchRow { .. })));
        }
    }

    #[test]
    fn padding_and_mask_agree_and_lengths_differ() {
        let data = Synthetic::new(options(vec![SampleShape::int(&[12]), SampleShape::int(&[12])])).unwrap();
        let batch = data.batch(&(0..50).collect::<Vec<_>>(), LoadPass::new(0, 0)).unwrap();
        let [ids, mask] = &batch.inputs[..] else { panic!("two inputs") };
        assert_eq!(ids.ne(PADDING).to_kind(Kind::Int64), *mask);
        assert!(ids.max().int64_value(&[]) < 20 && ids.min().int64_value(&[]) == 0);
        let lengths = mask.sum_dim_intlist(1, false, Kind::Int64);
        assert_eq!((lengths.min().int64_value(&[]), lengths.max().int64_value(&[])), (6, 12));
    }

    #[test]
    fn targets_have_the_shape_asked_for() {
        let target = Target::Tensor(SampleShape::float(&[1, 4, 4]));
        let data =
            Synthetic::new(SyntheticOptions { target, ..options(vec![SampleShape::float(&[3, 4, 4])]) }).unwrap();
        assert_eq!(data.batch(&[1, 2], LoadPass::new(0, 0)).unwrap().target.size(), [2, 1, 4, 4]);
        assert_eq!(data.classes(), None);
        let target = Target::Binary(SampleShape::float(&[1, 4, 4]));
        let data =
            Synthetic::new(SyntheticOptions { target, ..options(vec![SampleShape::float(&[3, 4, 4])]) }).unwrap();
        let rows = data.batch(&(0..50).collect::<Vec<_>>(), LoadPass::new(0, 0)).unwrap().target;
        assert_eq!((rows.size(), data.classes()), (vec![50, 1, 4, 4], None));
        // Every row is all zeros or all ones, and both occur.
        let sums: Vec<f64> = Vec::try_from(rows.sum_dim_intlist([1, 2, 3].as_slice(), false, Kind::Double)).unwrap();
        assert!(sums.iter().all(|&sum| sum == 0.0 || sum == 16.0), "{sums:?}");
        assert!(sums.contains(&0.0) && sums.contains(&16.0), "{sums:?}");
        let classes = Synthetic::new(options(vec![SampleShape::float(&[4])])).unwrap();
        let targets = classes.batch(&(0..50).collect::<Vec<_>>(), LoadPass::new(0, 0)).unwrap().target;
        assert_eq!((targets.min().int64_value(&[]), targets.max().int64_value(&[])), (0, 2));
    }
}
