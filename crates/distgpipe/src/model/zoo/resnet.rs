//! ResNet (He et al. 2015), with torchvision's layers and names: the stem, one entry per block, the head.
//!
//! Depth 18 and 34 are made of basic blocks (two 3×3 convolutions), 50, 101 and 152 of bottlenecks (1×1, 3×3, 1×1); the
//! stride is the 3×3 convolution's, as in torchvision.

use super::classifier::Classifier;
use super::{model_spec, require, single, ModelError};
use crate::failure::Fault;
use crate::model::blocks::{chain, Activation, Conv2d, ConvNorm, Linear};
use crate::model::layer::{Context, Init, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::Tensor;

/// The settings of ResNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResNet {
    /// The number of layers: 18, 34, 50, 101 or 152.
    pub depth: usize,
    /// The number of classes.
    pub classes: i64,
    /// Height and width of the image.
    pub image: i64,
    /// Channels of the stem. The channels of the blocks scale with it.
    pub width: i64,
}

impl Default for ResNet {
    fn default() -> Self {
        ResNet { depth: 101, classes: 1000, image: 224, width: 64 }
    }
}

/// Depth, blocks in the four groups, and whether they are bottlenecks (table 1 of the paper).
const DEPTHS: [(usize, [usize; 4], bool); 5] = [
    (18, [2, 2, 2, 2], false),
    (34, [3, 4, 6, 3], false),
    (50, [3, 4, 6, 3], true),
    (101, [3, 4, 23, 3], true),
    (152, [3, 8, 36, 3], true),
];

/// The ratio of a bottleneck's output channels to its inner channels.
const EXPANSION: i64 = 4;

impl ResNet {
    /// Builds the list of layers.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn model(&self) -> Result<Model, ModelError> {
        let name = "resnet";
        let known = DEPTHS.iter().find(|(depth, ..)| *depth == self.depth);
        let (_, groups, bottleneck) =
            known.ok_or_else(|| ModelError::settings(name, "depth must be 18, 34, 50, 101 or 152"))?;
        require((1..=1 << 20).contains(&self.classes), name, "classes must be 1 to 2^20")?;
        require((1..=1 << 16).contains(&self.image), name, "image must be 1 to 2^16")?;
        require((1..=1 << 12).contains(&self.width), name, "width must be 1 to 4096")?;
        let stem = Conv2d { stride: [2; 2], ..Conv2d::square(3, self.width, 7) };
        let mut layers: Vec<Arc<dyn Layer>> =
            vec![Arc::new(ResNetStem { block: ConvNorm { conv: stem, activation: Activation::Relu } })];
        let mut from = self.width;
        for (group, &blocks) in groups.iter().enumerate() {
            let inner = self.width << group;
            let to = if *bottleneck { inner * EXPANSION } else { inner };
            for block in 0..blocks {
                let stride = if block == 0 && group > 0 { 2 } else { 1 };
                let name = format!("layer{}.{block}", group + 1);
                let convs = if *bottleneck {
                    vec![
                        Conv2d::square(from, inner, 1),
                        Conv2d { stride: [stride; 2], ..Conv2d::square(inner, inner, 3) },
                        Conv2d::square(inner, to, 1),
                    ]
                } else {
                    vec![Conv2d { stride: [stride; 2], ..Conv2d::square(from, to, 3) }, Conv2d::square(to, to, 3)]
                };
                let fit = Conv2d { stride: [stride; 2], ..Conv2d::square(from, to, 1) };
                layers.push(Arc::new(Residual::new(name, convs, fit)));
                from = to;
            }
        }
        let init = [Init::fan_in(from); 2];
        let linear = Linear { from, to: self.classes };
        layers.push(Arc::new(Classifier { name: "fc", prefix: "fc", dropout: 0.0, linear, init }));
        let input = vec![SampleShape::float(&[3, self.image, self.image])];
        Ok(Model::new(layers, input).with_spec(model_spec(name, self)))
    }
}

/// 7×7 convolution with stride 2, batch norm, ReLU, 3×3 max pool with stride 2.
struct ResNetStem {
    block: ConvNorm,
}

impl Layer for ResNetStem {
    fn name(&self) -> &str {
        "stem"
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.block.tensors("conv1", "bn1")
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        let input = single("stem", "one image tensor", input)?;
        let mut output = self.block.conv.shape("stem", &input)?;
        for side in &mut output.dims[1..] {
            *side = (*side - 1) / 2 + 1;
        }
        Ok(vec![output])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let y = self.block.forward(tensors, &input[0], context)?;
        Ok(vec![y.f_max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false)?])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        input.first().and_then(|x| chain("stem", x, [&self.block.conv]).ok()).map_or(0, |(_, sum)| sum)
    }
}

/// A residual block. A 1×1 convolution projects the input where the shapes differ.
struct Residual {
    name: String,
    blocks: Vec<ConvNorm>,
    fit: Option<ConvNorm>,
}

impl Residual {
    fn new(name: String, convs: Vec<Conv2d>, fit: Conv2d) -> Self {
        let last = convs.len() - 1;
        let activation = |i| if i < last { Activation::Relu } else { Activation::None };
        let blocks = convs.into_iter().enumerate().map(|(i, conv)| ConvNorm { conv, activation: activation(i) });
        let differs = fit.from != fit.to || fit.stride != [1; 2];
        let fit = differs.then_some(ConvNorm { conv: fit, activation: Activation::None });
        Residual { name, blocks: blocks.collect(), fit }
    }

    fn chained(&self, input: &SampleShape) -> Result<(SampleShape, u64), ShapeError> {
        let (output, sum) = chain(&self.name, input, self.blocks.iter().map(|block| &block.conv))?;
        let (_, fitting) = chain(&self.name, input, self.fit.iter().map(|block| &block.conv))?;
        Ok((output, sum.saturating_add(fitting)))
    }
}

impl Layer for Residual {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let name = &self.name;
        let named = |(i, block): (usize, &ConvNorm)| {
            block.tensors(&format!("{name}.conv{}", i + 1), &format!("{name}.bn{}", i + 1))
        };
        let fit = self.fit.iter();
        let fit = fit.flat_map(|fit| fit.tensors(&format!("{name}.downsample.0"), &format!("{name}.downsample.1")));
        self.blocks.iter().enumerate().flat_map(named).chain(fit).collect()
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
        for block in &self.blocks {
            y = block.forward(tensors, &y, context)?;
        }
        let x = match &self.fit {
            Some(fit) => fit.forward(tensors, &x, context)?,
            None => x,
        };
        // In place: neither the norm's nor the sum's backward pass needs its output.
        Ok(vec![y.f_add_(&x)?.f_relu_()?])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        input.first().and_then(|x| self.chained(x).ok()).map_or(0, |(_, sum)| sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters as torchvision counts them; multiply-adds in millions, as its documentation of the weights says.
    #[test]
    fn parameters_and_multiply_adds_are_torchvisions() {
        let table = [
            (18, 11_689_512_u64, 10, 1814),
            (34, 21_797_672, 18, 3664),
            (50, 25_557_032, 18, 4089),
            (101, 44_549_160, 35, 7801),
            (152, 60_192_808, 52, 11_514),
        ];
        for (depth, parameters, entries, millions) in table {
            let model = ResNet { depth, ..ResNet::default() }.model().unwrap();
            assert_eq!((model.parameters(), model.layers.len()), (parameters, entries), "ResNet-{depth}");
            let summary = model.summary().unwrap();
            let sum: u64 = summary.iter().map(|layer| layer.multiply_adds).sum();
            assert_eq!((sum + 500_000) / 1_000_000, millions, "ResNet-{depth}: {sum}");
            assert_eq!(summary[entries - 2].output[0].dims[1..], [7, 7]);
        }
    }

    #[test]
    fn another_depth_is_refused_with_the_known_ones() {
        let error = ResNet { depth: 20, ..ResNet::default() }.model().err().unwrap().to_string();
        assert!(error.contains("18, 34, 50, 101 or 152"), "{error}");
    }
}
