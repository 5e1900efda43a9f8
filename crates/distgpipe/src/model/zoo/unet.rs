//! U-Net (B, C) as the GPipe papers measure it: depth 5, B convolutions per cell, C base channels.
//!
//! Every convolution, dropout, norm, activation, pool, stash and pop is a layer of its own, so a cut may fall anywhere
//! and the long skips cross it.

use super::{model_spec, require, single, ModelError};
use crate::engine;
use crate::failure::Fault;
use crate::model::blocks::Conv2d;
use crate::model::layer::{Context, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::Model;
use distgpipe_core::skip::SkipUse;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::Tensor;

/// The settings of U-Net.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UNet {
    /// Convolutions per cell (B).
    pub convolutions: usize,
    /// Base channels (C), even.
    pub channels: i64,
    /// How many times the image is halved.
    pub depth: usize,
    /// Height and width of the image.
    pub image: i64,
    /// Channel dropout probability after each convolution.
    pub dropout: f64,
}

impl Default for UNet {
    fn default() -> Self {
        UNet { convolutions: 5, channels: 64, depth: 5, image: 192, dropout: 0.1 }
    }
}

impl UNet {
    /// Builds the list of layers.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn model(&self) -> Result<Model, ModelError> {
        let name = "unet";
        require((1..=1000).contains(&self.convolutions), name, "convolutions must be 1 to 1000")?;
        require(
            self.channels > 0 && self.channels % 2 == 0 && self.channels <= 4096,
            name,
            "channels must be even, 2 to 4096",
        )?;
        require((1..=8).contains(&self.depth), name, "depth must be 1 to 8")?;
        require((0.0..1.0).contains(&self.dropout), name, "dropout must be at least 0 and below 1")?;
        require(
            self.image >> self.depth >= 2,
            name,
            "the image must keep at least 2 pixels a side at the deepest level",
        )?;
        let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
        let c = self.channels;
        let mut from = 3;
        for i in 0..self.depth {
            let to = c << i;
            self.cell(&mut layers, &format!("encoder.{i}"), [from, to, to]);
            layers.push(step(format!("encoder.{i}.stash"), UNetOperation::Stash(skip(i))));
            layers.push(step(format!("encoder.{i}.pool"), UNetOperation::Pool));
            from = to;
        }
        self.cell(&mut layers, "bottleneck", [from, from * 2, from]);
        for i in (0..self.depth).rev() {
            let to = (c << i) / 2;
            layers.push(step(format!("decoder.{i}.upsample"), UNetOperation::Upsample));
            layers.push(step(format!("decoder.{i}.pop"), UNetOperation::Pop(skip(i))));
            self.cell(&mut layers, &format!("decoder.{i}"), [c << (i + 1), to, to]);
        }
        layers.push(step("output".to_owned(), UNetOperation::Conv(Conv2d::square(c / 2, 1, 1))));
        Ok(Model::new(layers, vec![SampleShape::float(&[3, self.image, self.image])]).with_spec(model_spec(name, self)))
    }

    fn cell(&self, layers: &mut Vec<Arc<dyn Layer>>, name: &str, [from, middle, to]: [i64; 3]) {
        for b in 0..self.convolutions {
            let from = if b == 0 { from } else { middle };
            let to = if b + 1 == self.convolutions { to } else { middle };
            layers.push(step(format!("{name}.{b}.conv"), UNetOperation::Conv(Conv2d::square(from, to, 3))));
            layers.push(step(format!("{name}.{b}.dropout"), UNetOperation::Dropout(self.dropout)));
            layers.push(step(format!("{name}.{b}.norm"), UNetOperation::InstanceNorm));
            layers.push(step(format!("{name}.{b}.relu"), UNetOperation::LeakyRelu));
        }
    }
}

fn skip(level: usize) -> String {
    format!("skip.{level}")
}

enum UNetOperation {
    Conv(Conv2d),
    Dropout(f64),
    InstanceNorm,
    LeakyRelu,
    Pool,
    Upsample,
    Stash(String),
    Pop(String),
}

struct UNetLayer {
    name: String,
    operation: UNetOperation,
}

fn step(name: String, operation: UNetOperation) -> Arc<dyn Layer> {
    Arc::new(UNetLayer { name, operation })
}

impl Layer for UNetLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        match &self.operation {
            UNetOperation::Conv(conv) => conv.tensors(&self.name),
            _ => Vec::new(),
        }
    }

    fn skips(&self) -> SkipUse {
        match &self.operation {
            UNetOperation::Stash(name) => SkipUse { stash: vec![name.clone()], pop: vec![] },
            UNetOperation::Pop(name) => SkipUse { stash: vec![], pop: vec![name.clone()] },
            _ => SkipUse::default(),
        }
    }

    fn shapes(&self, input: Vec<SampleShape>, skips: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        let mut x = single(&self.name, "one image tensor", input)?;
        let wrong = |expected: &str, got| ShapeError { layer: self.name.clone(), expected: expected.to_owned(), got };
        let [c, h, w] = x.dims[..] else { return Err(wrong("[channels, height, width]", vec![x])) };
        match &self.operation {
            UNetOperation::Conv(conv) => x = conv.shape(&self.name, &x)?,
            UNetOperation::Dropout(_) | UNetOperation::InstanceNorm | UNetOperation::LeakyRelu => {}
            UNetOperation::Pool => x.dims = vec![c, h / 2, w / 2],
            UNetOperation::Upsample => x.dims = vec![c, h * 2, w * 2],
            UNetOperation::Stash(name) => drop(skips.insert(name.clone(), x.clone())),
            UNetOperation::Pop(name) => match skips.remove(name) {
                Some(skip) if skip.dims.len() == 3 => {
                    x.dims = vec![c + skip.dims[0], skip.dims[1], skip.dims[2]];
                }
                _ => return Err(wrong("a skip of three dimensions", vec![x])),
            },
        }
        Ok(vec![x])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        mut input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let mut x = input.swap_remove(0);
        let y = match &self.operation {
            UNetOperation::Conv(conv) => conv.forward(tensors, &x)?,
            UNetOperation::Dropout(p) => context.dropout_channels(x, *p)?,
            UNetOperation::InstanceNorm => engine::instance_norm(&x)?,
            // In place where allowed: the norm's backward pass does not need its output, but a partition's input must not
            // be overwritten.
            UNetOperation::LeakyRelu if x.is_leaf() => x.f_leaky_relu()?,
            UNetOperation::LeakyRelu => x.f_leaky_relu_()?,
            UNetOperation::Pool => x.f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)?,
            UNetOperation::Upsample => {
                let size = x.size();
                x.f_upsample_nearest2d([size[2] * 2, size[3] * 2], None, None)?
            }
            UNetOperation::Stash(name) => {
                context.stash(name, x.shallow_clone());
                x
            }
            UNetOperation::Pop(name) => {
                let skip = context.pop(name)?;
                let (have, want) = (x.size(), skip.size());
                if have[2..] != want[2..] {
                    x = x.f_constant_pad_nd([0, want[3] - have[3], 0, want[2] - have[2]])?;
                }
                Tensor::f_cat(&[x, skip], 1)?
            }
        };
        Ok(vec![y])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        match (&self.operation, input) {
            (UNetOperation::Conv(conv), [x]) => conv.shape(&self.name, x).map_or(0, |y| conv.multiply_adds(&y)),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_and_entries_are_those_of_the_published_table() {
        let table = [
            (5, 64, 232_687_328_u64, 241),
            (6, 72, 362_157_516, 285),
            (11, 128, 2_213_834_176, 505),
            (24, 128, 4_993_859_008, 1077),
            (24, 160, 7_802_903_600, 1077),
            (48, 160, 15_822_206_000, 2133),
        ];
        for (convolutions, channels, parameters, entries) in table {
            let model = UNet { convolutions, channels, ..UNet::default() }.model().unwrap();
            assert_eq!(model.parameters(), parameters, "({convolutions}, {channels})");
            assert_eq!(model.layers.len(), entries, "({convolutions}, {channels})");
            assert_eq!(model.summary().unwrap().last().unwrap().output[0].dims, [1, 192, 192]);
        }
    }
}
