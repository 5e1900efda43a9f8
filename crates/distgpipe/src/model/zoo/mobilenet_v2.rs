//! MobileNetV2 (Sandler et al. 2018), with torchvision's layers and names: 19 feature blocks and the classifier.

use super::classifier::Classifier;
use super::{model_spec, require, single, ModelError};
use crate::failure::Fault;
use crate::model::blocks::{chain, Activation, Conv2d, ConvNorm, Linear};
use crate::model::layer::{Context, Init, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::Tensor;

/// The settings of MobileNetV2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MobileNetV2 {
    /// The number of classes.
    pub classes: i64,
    /// Width multiplier for the channels.
    pub width: f64,
    /// Dropout probability before the classifier.
    pub dropout: f64,
    /// Height and width of the image.
    pub image: i64,
    /// Channels of the image.
    pub channels: i64,
    /// Strides of the first convolution and of the first block of each of the seven groups. Small images need smaller
    /// strides.
    pub strides: [i64; 8],
}

impl Default for MobileNetV2 {
    fn default() -> Self {
        MobileNetV2 {
            classes: 10,
            width: 1.0,
            dropout: 0.2,
            image: 224,
            channels: 3,
            strides: [2, 1, 2, 2, 2, 1, 2, 1],
        }
    }
}

/// Expansion, channels and blocks of the seven groups (table 2 of the paper).
const GROUPS: [(i64, i64, usize); 7] =
    [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)];

/// The nearest multiple of 8, but at most 10 % below.
fn divisible(channels: f64) -> i64 {
    let nearest = (((channels + 4.0) / 8.0).floor() as i64 * 8).max(8);
    if (nearest as f64) < 0.9 * channels {
        nearest + 8
    } else {
        nearest
    }
}

impl MobileNetV2 {
    /// Builds the list of layers.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn model(&self) -> Result<Model, ModelError> {
        let name = "mobilenet_v2";
        require(
            [self.classes, self.channels, self.image].iter().all(|n| (1..=1 << 20).contains(n)),
            name,
            "classes, channels and image must be 1 to 2^20",
        )?;
        require(self.width > 0.0 && self.width <= 16.0, name, "width must be above 0 and at most 16")?;
        require((0.0..1.0).contains(&self.dropout), name, "dropout must be at least 0 and below 1")?;
        require(self.strides.iter().all(|s| (1..=4).contains(s)), name, "strides must be 1 to 4")?;
        let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
        let mut from = divisible(32.0 * self.width);
        let conv = Conv2d { stride: [self.strides[0]; 2], ..Conv2d::square(self.channels, from, 3) };
        layers.push(Arc::new(ConvLayer::new(0, conv)));
        for ((expand, channels, blocks), stride) in GROUPS.into_iter().zip(&self.strides[1..]) {
            let to = divisible(channels as f64 * self.width);
            for block in 0..blocks {
                let stride = if block == 0 { *stride } else { 1 };
                layers.push(Arc::new(InvertedResidual::new(layers.len(), from, to, stride, expand)));
                from = to;
            }
        }
        let last = divisible(1280.0 * self.width.max(1.0));
        layers.push(Arc::new(ConvLayer::new(layers.len(), Conv2d::square(from, last, 1))));
        layers.push(Arc::new(Classifier {
            name: "classifier",
            prefix: "classifier.1",
            dropout: self.dropout,
            linear: Linear { from: last, to: self.classes },
            init: [Init::Normal { deviation: 0.01 }, Init::Constant(0.0)],
        }));
        let input = vec![SampleShape::float(&[self.channels, self.image, self.image])];
        Ok(Model::new(layers, input).with_spec(model_spec(name, self)))
    }
}

/// The first or last convolution, with batch norm and ReLU6.
struct ConvLayer {
    name: String,
    block: ConvNorm,
}

impl ConvLayer {
    fn new(index: usize, conv: Conv2d) -> Self {
        ConvLayer { name: format!("features.{index}"), block: ConvNorm { conv, activation: Activation::Relu6 } }
    }
}

impl Layer for ConvLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.block.tensors(&format!("{}.0", self.name), &format!("{}.1", self.name))
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        let input = single(&self.name, "one image tensor", input)?;
        Ok(vec![self.block.conv.shape(&self.name, &input)?])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        Ok(vec![self.block.forward(tensors, &input[0], context)?])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        input.first().and_then(|x| chain(&self.name, x, [&self.block.conv]).ok()).map_or(0, |(_, sum)| sum)
    }
}

/// Expand by a 1×1 convolution, filter each channel, project back; add the input where shapes allow.
struct InvertedResidual {
    name: String,
    /// Each block with the names of its convolution and its norm, relative to the layer's.
    blocks: Vec<(ConvNorm, String, String)>,
    residual: bool,
}

impl InvertedResidual {
    fn new(index: usize, from: i64, to: i64, stride: i64, expand: i64) -> Self {
        let hidden = from * expand;
        let mut convs = Vec::new();
        if expand != 1 {
            convs.push(Conv2d::square(from, hidden, 1));
        }
        convs.push(Conv2d { stride: [stride; 2], groups: hidden, ..Conv2d::square(hidden, hidden, 3) });
        let mut blocks: Vec<_> = convs
            .into_iter()
            .enumerate()
            .map(|(i, conv)| (i, ConvNorm { conv, activation: Activation::Relu6 }))
            .map(|(i, block)| (block, format!("conv.{i}.0"), format!("conv.{i}.1")))
            .collect();
        let i = blocks.len();
        let project = ConvNorm { conv: Conv2d::square(hidden, to, 1), activation: Activation::None };
        blocks.push((project, format!("conv.{i}"), format!("conv.{}", i + 1)));
        InvertedResidual { name: format!("features.{index}"), blocks, residual: stride == 1 && from == to }
    }

    fn chained(&self, input: &SampleShape) -> Result<(SampleShape, u64), ShapeError> {
        chain(&self.name, input, self.blocks.iter().map(|(block, ..)| &block.conv))
    }
}

impl Layer for InvertedResidual {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let name = &self.name;
        self.blocks
            .iter()
            .flat_map(|(block, conv, norm)| block.tensors(&format!("{name}.{conv}"), &format!("{name}.{norm}")))
            .collect()
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        let input = single(&self.name, "one image tensor", input)?;
        Ok(vec![self.chained(&input)?.0])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        mut input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let x = input.swap_remove(0);
        let mut y = x.shallow_clone();
        for (block, ..) in &self.blocks {
            y = block.forward(tensors, &y, context)?;
        }
        Ok(vec![if self.residual { y.f_add_(&x)? } else { y }])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        input.first().and_then(|x| self.chained(x).ok()).map_or(0, |(_, sum)| sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let count = |classes| MobileNetV2 { classes, ..MobileNetV2::default() }.model().unwrap().parameters();
        assert_eq!(count(1000), 3_504_872);
        assert_eq!(count(10), 2_236_682);
    }

    #[test]
    fn the_links_of_the_seeds_carry_the_shapes_they_print() {
        let summary = MobileNetV2::default().model().unwrap().summary().unwrap();
        assert_eq!(summary.len(), 20);
        assert_eq!(summary[0].output[0].dims, [32, 112, 112]);
        assert_eq!(summary[18].output[0].dims, [1280, 7, 7]);
        // Published: about 300 million multiply-adds at 224 × 224.
        let total: u64 = summary.iter().map(|l| l.multiply_adds).sum();
        assert!((295_000_000..305_000_000).contains(&total), "{total}");
    }
}
