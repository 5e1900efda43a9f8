//! AmoebaNet-D (L, D) (Real et al. 2018), as the GPipe papers measure it: L normal cells in three groups, D filters.
//!
//! A cell takes two states and returns two: its output, and its own first input as the next cell's second state. Two
//! tensors therefore cross every cut between cells.
//!
//! ```text
//!   s1 ─┬─ 1×1 ──► state 0 ─┐
//!       │                   ├─► five sums of two operations each: states 2 to 6 ─► concatenate ─► next s1
//!   s2 ─│─ fit ──► state 1 ─┘
//!       └──────────────────────────────────────────────────────────────────────────────────────► next s2
//! ```
//!
//! Two details follow the reference implementation rather than the paper: a normal cell concatenates states 0, 3, 4 and
//! 6, and the paper's 3×3 max pool is an average pool.

use super::classifier::Classifier;
use super::{model_spec, require, ModelError};
use crate::failure::Fault;
use crate::model::blocks::{chain, Activation, BatchNorm2d, Conv2d, ConvNorm, Linear};
use crate::model::layer::{Context, Init, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::Tensor;

/// The settings of AmoebaNet-D.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AmoebaNetD {
    /// Normal cells (L), a multiple of 3.
    pub layers: usize,
    /// Filters (D), a multiple of 8.
    pub filters: i64,
    /// The number of classes.
    pub classes: i64,
    /// Height and width of the image, a multiple of 32.
    pub image: i64,
}

impl Default for AmoebaNetD {
    fn default() -> Self {
        AmoebaNetD { layers: 18, filters: 208, classes: 1000, image: 224 }
    }
}

impl AmoebaNetD {
    /// Builds the list of layers.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn model(&self) -> Result<Model, ModelError> {
        let name = "amoebanet_d";
        let (layers, filters) = (self.layers, self.filters);
        require((3..=3000).contains(&layers) && layers % 3 == 0, name, "layers must be a multiple of 3, 3 to 3000")?;
        require((8..=1 << 14).contains(&filters) && filters % 8 == 0, name, "filters must be a multiple of 8 to 2^14")?;
        require((1..=1 << 20).contains(&self.classes), name, "classes must be 1 to 2^20")?;
        // The image is halved five times. A 2×2 and a 3×3 pool give the same size for even sides only.
        require(
            (32..=1 << 16).contains(&self.image) && self.image % 32 == 0,
            name,
            "image must be a multiple of 32, up to 2^16",
        )?;
        let mut cells = CellList::new(filters / 4);
        cells.list.push(Arc::new(AmoebaStem { conv: stem(filters / 4) }));
        cells.reduction("stem2");
        cells.reduction("stem3");
        for group in [1, 3, 5] {
            for i in 1..=layers / 3 {
                cells.normal(&format!("cell{group}_normal{i}"));
            }
            if group < 5 {
                cells.reduction(&format!("cell{}_reduction", group + 1));
            }
        }
        let linear = Linear { from: cells.channels_before[0], to: self.classes };
        let init = [Init::fan_in(linear.from); 2];
        cells.list.push(Arc::new(Classifier { name: "classify", prefix: "classify.fc", dropout: 0.0, linear, init }));
        let input = vec![SampleShape::float(&[3, self.image, self.image])];
        Ok(Model::new(cells.list, input).with_spec(model_spec(name, self)))
    }
}

/// An operation of a cell, before its channels and its stride are known.
#[derive(Clone, Copy)]
enum CellOperation {
    Same,
    AveragePool3x3,
    MaxPool2x2,
    Conv1x1,
    Conv3x3,
    Conv1x7And7x1,
}

use CellOperation::{AveragePool3x3, Conv1x1, Conv1x7And7x1, Conv3x3, MaxPool2x2, Same};

/// The operations of a kind of cell, as pairs of (state, operation) whose results are added, and the states that it
/// concatenates.
struct Genotype {
    sums: [[(usize, CellOperation); 2]; 5],
    concatenated: &'static [usize],
    /// The stride of operations on states 0 and 1. Operations on later states have stride 1.
    stride: i64,
}

const NORMAL: Genotype = Genotype {
    sums: [
        [(1, Conv1x1), (1, AveragePool3x3)],
        [(1, Same), (0, Conv1x7And7x1)],
        [(0, Conv1x1), (0, Conv1x7And7x1)],
        [(2, AveragePool3x3), (2, Same)],
        [(1, AveragePool3x3), (5, Conv1x1)],
    ],
    concatenated: &[0, 3, 4, 6],
    stride: 1,
};

const REDUCTION: Genotype = Genotype {
    sums: [
        [(0, MaxPool2x2), (0, AveragePool3x3)],
        [(2, Same), (1, Conv3x3)],
        [(2, Conv1x7And7x1), (2, AveragePool3x3)],
        [(3, Same), (1, MaxPool2x2)],
        [(2, AveragePool3x3), (3, Conv1x1)],
    ],
    concatenated: &[4, 5, 6],
    stride: 2,
};

/// The cells built so far, and what the next cell needs to know about them.
struct CellList {
    list: Vec<Arc<dyn Layer>>,
    channels: i64,
    /// Channels of the two states that the next cell gets.
    channels_before: [i64; 2],
    /// Whether the second state is twice as high and wide as the first.
    reduced_before: bool,
}

impl CellList {
    fn new(channels: i64) -> Self {
        CellList { list: Vec::new(), channels, channels_before: [channels; 2], reduced_before: false }
    }

    fn normal(&mut self, name: &str) {
        self.push(name, &NORMAL);
    }

    fn reduction(&mut self, name: &str) {
        self.channels *= 2;
        self.push(name, &REDUCTION);
    }

    fn push(&mut self, name: &str, genotype: &Genotype) {
        let c = self.channels;
        let [first, second] = self.channels_before;
        let fit_second = match (self.reduced_before, second == c) {
            (true, _) => Block::halving(second, c),
            (false, false) => Block::Convs(convs([Conv2d::square(second, c, 1)])),
            (false, true) => Block::Same,
        };
        let block = |(state, operation): (usize, CellOperation)| {
            let stride = if state < 2 { genotype.stride } else { 1 };
            (state, Block::new(operation, c, stride))
        };
        self.list.push(Arc::new(Cell {
            name: name.to_owned(),
            fit: [Block::Convs(convs([Conv2d::square(first, c, 1)])), fit_second],
            sums: genotype.sums.map(|pair| pair.map(block)),
            concatenated: genotype.concatenated,
        }));
        self.channels_before = [c * genotype.concatenated.len() as i64, first];
        self.reduced_before = genotype.stride == 2;
    }
}

/// ReLU, 3×3 convolution with stride 2, batch norm.
struct AmoebaStem {
    conv: ConvNorm,
}

fn stem(channels: i64) -> ConvNorm {
    let conv = Conv2d { stride: [2; 2], ..Conv2d::square(3, channels, 3) };
    ConvNorm { conv, activation: Activation::None }
}

impl Layer for AmoebaStem {
    fn name(&self) -> &str {
        "stem1"
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.conv.tensors("stem1.conv", "stem1.bn")
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        let input = super::single("stem1", "one image tensor", input)?;
        Ok(vec![self.conv.conv.shape("stem1", &input)?])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        Ok(vec![self.conv.forward(tensors, &input[0].f_relu()?, context)?])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        input.first().and_then(|x| chain("stem1", x, [&self.conv.conv]).ok()).map_or(0, |(_, sum)| sum)
    }
}

/// An operation with its channels and its stride.
enum Block {
    Same,
    AveragePool {
        stride: i64,
    },
    MaxPool {
        stride: i64,
    },
    /// A sequence of ReLU, convolution and batch norm.
    Convs(Vec<ConvNorm>),
    /// Factorized reduction: after a ReLU, half of the channels come from the pixels at even positions and half from those
    /// at odd positions; then batch norm.
    Halving {
        even: Conv2d,
        odd: Conv2d,
    },
}

/// A ReLU precedes each convolution. Here it is the activation of the block before.
fn convs<const N: usize>(convs: [Conv2d; N]) -> Vec<ConvNorm> {
    let activation = |i| if i + 1 < N { Activation::Relu } else { Activation::None };
    convs.into_iter().enumerate().map(|(i, conv)| ConvNorm { conv, activation: activation(i) }).collect()
}

impl Block {
    fn new(operation: CellOperation, c: i64, stride: i64) -> Self {
        let few = c / 4;
        match operation {
            Same if stride == 1 => Block::Same,
            Same => Block::halving(c, c),
            AveragePool3x3 => Block::AveragePool { stride },
            MaxPool2x2 => Block::MaxPool { stride },
            Conv1x1 => Block::Convs(convs([Conv2d { stride: [stride; 2], ..Conv2d::square(c, c, 1) }])),
            Conv3x3 => Block::Convs(convs([
                Conv2d::square(c, few, 1),
                Conv2d { stride: [stride; 2], ..Conv2d::square(few, few, 3) },
                Conv2d::square(few, c, 1),
            ])),
            Conv1x7And7x1 => Block::Convs(convs([
                Conv2d::square(c, few, 1),
                Conv2d { kernel: [1, 7], stride: [1, stride], ..Conv2d::square(few, few, 1) },
                Conv2d { kernel: [7, 1], stride: [stride, 1], ..Conv2d::square(few, few, 1) },
                Conv2d::square(few, c, 1),
            ])),
        }
    }

    fn halving(from: i64, to: i64) -> Self {
        let even = Conv2d { stride: [2; 2], ..Conv2d::square(from, to / 2, 1) };
        // The input is subsampled before the convolution.
        let odd = Conv2d::square(from, to / 2, 1);
        Block::Halving { even, odd }
    }

    fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        match self {
            Block::Same | Block::AveragePool { .. } | Block::MaxPool { .. } => Vec::new(),
            Block::Convs(blocks) => {
                let named = |(i, block): (usize, &ConvNorm)| {
                    block.tensors(&format!("{prefix}.{i}.conv"), &format!("{prefix}.{i}.bn"))
                };
                blocks.iter().enumerate().flat_map(named).collect()
            }
            Block::Halving { even, odd } => {
                let mut tensors = even.tensors(&format!("{prefix}.conv1"));
                tensors.extend(odd.tensors(&format!("{prefix}.conv2")));
                tensors.extend(BatchNorm2d { channels: even.to + odd.to }.tensors(&format!("{prefix}.bn")));
                tensors
            }
        }
    }

    /// The output shape for a state, and the multiply-adds.
    fn shape(&self, layer: &str, x: &SampleShape) -> Result<(SampleShape, u64), ShapeError> {
        let [c, h, w] = x.dims[..] else {
            let expected = "states of [channels, height, width]".to_owned();
            return Err(ShapeError { layer: layer.to_owned(), expected, got: vec![x.clone()] });
        };
        let sized = |h, w| SampleShape { dims: vec![c, h, w], kind: x.kind };
        Ok(match self {
            Block::Same => (x.clone(), 0),
            Block::AveragePool { stride } => (sized((h - 1) / stride + 1, (w - 1) / stride + 1), 0),
            Block::MaxPool { stride } => (sized((h - 2) / stride + 1, (w - 2) / stride + 1), 0),
            Block::Convs(blocks) => chain(layer, x, blocks.iter().map(|block| &block.conv))?,
            Block::Halving { even, odd } => {
                let (mut y, sum) = chain(layer, x, [even])?;
                y.dims[0] += odd.to;
                (y, sum.saturating_mul(2))
            }
        })
    }

    /// Whether the block starts with a ReLU.
    fn rectifies(&self) -> bool {
        matches!(self, Block::Convs(_) | Block::Halving { .. })
    }

    /// Runs the block. The caller has applied the leading ReLU, if there is one.
    fn forward(&self, tensors: &mut LayerTensors<'_>, x: Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        Ok(match self {
            Block::Same => x,
            // Padding is not part of the average.
            Block::AveragePool { stride } => x.f_avg_pool2d([3, 3], [*stride; 2], [1, 1], false, false, None::<i64>)?,
            Block::MaxPool { stride } => x.f_max_pool2d([2, 2], [*stride; 2], [0, 0], [1, 1], false)?,
            Block::Convs(blocks) => blocks.iter().try_fold(x, |x, block| block.forward(tensors, &x, context))?,
            Block::Halving { even, odd } => {
                let at_even = even.forward(tensors, &x)?;
                let picked = x.f_slice(2, 1, None, 2)?.f_slice(3, 1, None, 2)?;
                let both = Tensor::f_cat(&[at_even, odd.forward(tensors, &picked)?], 1)?;
                BatchNorm2d { channels: even.to + odd.to }.forward(tensors, &both, context)?
            }
        })
    }
}

/// The states of a cell. The ReLU of a state is computed once and shared by all operations on it.
#[derive(Default)]
struct States {
    plain: Vec<Tensor>,
    positive: Vec<Option<Tensor>>,
}

impl States {
    fn push(&mut self, state: Tensor) {
        self.plain.push(state);
        self.positive.push(None);
    }

    fn input_of(&mut self, block: &Block, state: usize) -> Result<Tensor, Fault> {
        if !block.rectifies() {
            return Ok(self.plain[state].shallow_clone());
        }
        if self.positive[state].is_none() {
            self.positive[state] = Some(self.plain[state].f_relu()?);
        }
        Ok(self.positive[state].as_ref().map_or_else(Tensor::new, Tensor::shallow_clone))
    }
}

struct Cell {
    name: String,
    /// Projects the two states to the cell's channels and size.
    fit: [Block; 2],
    sums: [[(usize, Block); 2]; 5],
    concatenated: &'static [usize],
}

impl Cell {
    /// The first cell gets one tensor for both of its states.
    fn two<T>(&self, mut input: Vec<T>, copy: impl Fn(&T) -> T) -> Option<[T; 2]> {
        if input.len() == 1 {
            input.push(copy(&input[0]));
        }
        input.try_into().ok()
    }

    fn shaped(&self, input: Vec<SampleShape>) -> Result<(Vec<SampleShape>, u64), ShapeError> {
        let wrong = |expected: &str, got| ShapeError { layer: self.name.clone(), expected: expected.to_owned(), got };
        let Some([first, second]) = self.two(input, SampleShape::clone) else {
            return Err(wrong("one or two image tensors", Vec::new()));
        };
        let (mut states, mut sum) = (Vec::new(), 0_u64);
        for (block, state) in self.fit.iter().zip([&first, &second]) {
            let (shape, adds) = block.shape(&self.name, state)?;
            states.push(shape);
            sum = sum.saturating_add(adds);
        }
        for pair in &self.sums {
            let [(a, left), (b, right)] = pair;
            let (left, left_adds) = left.shape(&self.name, &states[*a])?;
            let (right, right_adds) = right.shape(&self.name, &states[*b])?;
            if left != right {
                return Err(wrong("states whose sides halve evenly", vec![first, second]));
            }
            states.push(left);
            sum = sum.saturating_add(left_adds).saturating_add(right_adds);
        }
        let mut output = states.swap_remove(self.concatenated[0]);
        output.dims[0] *= self.concatenated.len() as i64;
        Ok((vec![output, first], sum))
    }
}

impl Layer for Cell {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let name = &self.name;
        let fit = self.fit.iter().enumerate().flat_map(|(i, block)| block.tensors(&format!("{name}.reduce{}", i + 1)));
        let blocks = self.sums.iter().flatten().enumerate();
        let operations = blocks.flat_map(|(i, (_, block))| block.tensors(&format!("{name}.operations.{i}")));
        fit.chain(operations).collect()
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(self.shaped(input)?.0)
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let Some([first, second]) = self.two(input, Tensor::shallow_clone) else {
            return Err(Fault::layer(&self.name, "expected one or two tensors"));
        };
        let mut states = States::default();
        for (block, state) in self.fit.iter().zip([&first, &second]) {
            let x = if block.rectifies() { state.f_relu()? } else { state.shallow_clone() };
            states.push(block.forward(tensors, x, context)?);
        }
        for pair in &self.sums {
            let [(a, left), (b, right)] = pair;
            let x = states.input_of(left, *a)?;
            let left = left.forward(tensors, x, context)?;
            let x = states.input_of(right, *b)?;
            states.push(left.f_add(&right.forward(tensors, x, context)?)?);
        }
        let outputs: Vec<&Tensor> = self.concatenated.iter().map(|&i| &states.plain[i]).collect();
        Ok(vec![Tensor::f_cat(&outputs, 1)?, first])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        self.shaped(input.to_vec()).map_or(0, |(_, sum)| sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_and_entries_are_those_of_the_published_table() {
        let table = [
            (18, 208, 81_505_540_u64, 24),
            (18, 256, 122_470_120, 24),
            (18, 416, 319_024_120, 24),
            (18, 544, 542_734_840, 24),
            (36, 544, 1_055_832_376, 42),
            (72, 512, 1_844_858_344, 78),
        ];
        for (layers, filters, parameters, entries) in table {
            let model = AmoebaNetD { layers, filters, ..AmoebaNetD::default() }.model().unwrap();
            assert_eq!(model.parameters(), parameters, "({layers}, {filters})");
            assert_eq!(model.layers.len(), entries, "({layers}, {filters})");
            let summary = model.summary().unwrap();
            // What the classifier averages: four states of 7 × 7.
            assert_eq!(summary[entries - 2].output[0].dims, [16 * filters, 7, 7]);
            assert_eq!(summary[entries - 1].output[0].dims, [1000]);
        }
    }
}
