//! VGG-13 (Simonyan and Zisserman 2014), configuration B without batch norm, with torchvision's layers and names.
//!
//! Each convolution with its ReLU, each pool and each linear map is a layer.

use super::{model_spec, require, single, ModelError};
use crate::failure::Fault;
use crate::model::blocks::{chain, Conv2d, Linear};
use crate::model::layer::{Context, Init, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tch::Tensor;

/// The settings of VGG-13.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Vgg13 {
    /// The number of classes.
    pub classes: i64,
    /// Height and width of the image.
    pub image: i64,
    /// Channels of the first convolution. Those of the others scale with it.
    pub width: i64,
    /// Width of the two hidden linear maps.
    pub hidden: i64,
    /// Dropout probability after each of them.
    pub dropout: f64,
}

impl Default for Vgg13 {
    fn default() -> Self {
        Vgg13 { classes: 1000, image: 224, width: 64, hidden: 4096, dropout: 0.5 }
    }
}

/// Channels of the five groups of two convolutions, as multiples of the width.
const GROUPS: [i64; 5] = [1, 2, 4, 8, 8];

/// The height and width that the image is average-pooled to before the linear maps.
const POOLED: i64 = 7;

impl Vgg13 {
    /// Builds the list of layers.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn model(&self) -> Result<Model, ModelError> {
        let name = "vgg13";
        require((1..=1 << 20).contains(&self.classes), name, "classes must be 1 to 2^20")?;
        require((32..=1 << 16).contains(&self.image), name, "image must be 32 to 2^16")?;
        require((1..=1 << 12).contains(&self.width), name, "width must be 1 to 4096")?;
        require((1..=1 << 16).contains(&self.hidden), name, "hidden must be 1 to 2^16")?;
        require((0.0..1.0).contains(&self.dropout), name, "dropout must be at least 0 and below 1")?;
        let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
        // torchvision numbers the ReLUs too.
        let mut place = 0;
        let mut push = |part: VggLayer, places: usize| {
            layers.push(Arc::new(NamedVggLayer { name: format!("features.{place}"), part }));
            place += places;
        };
        let mut from = 3;
        for factor in GROUPS {
            for _ in 0..2 {
                let to = self.width * factor;
                push(VggLayer::Conv(Conv2d { bias: true, ..Conv2d::square(from, to, 3) }), 2);
                from = to;
            }
            push(VggLayer::Pool, 1);
        }
        let sizes = [from * POOLED * POOLED, self.hidden, self.hidden, self.classes];
        for (i, pair) in sizes.windows(2).enumerate() {
            let linear = Linear { from: pair[0], to: pair[1] };
            let dropout = (i < 2).then_some(self.dropout);
            let part = if i == 0 { VggLayer::First(linear, dropout) } else { VggLayer::Linear(linear, dropout) };
            layers.push(Arc::new(NamedVggLayer { name: format!("classifier.{}", 3 * i), part }));
        }
        let input = vec![SampleShape::float(&[3, self.image, self.image])];
        Ok(Model::new(layers, input).with_spec(model_spec(name, self)))
    }
}

/// What a layer computes. ReLU and dropout follow every linear map but the last.
enum VggLayer {
    Conv(Conv2d),
    Pool,
    /// The first linear map, after average pooling to 7×7.
    First(Linear, Option<f64>),
    Linear(Linear, Option<f64>),
}

struct NamedVggLayer {
    name: String,
    part: VggLayer,
}

impl NamedVggLayer {
    fn shaped(&self, input: Vec<SampleShape>) -> Result<(SampleShape, u64), ShapeError> {
        let x = single(&self.name, "one tensor", input)?;
        let wrong =
            |expected: String, x: SampleShape| Err(ShapeError { layer: self.name.clone(), expected, got: vec![x] });
        let mapped =
            |linear: &Linear| (SampleShape::float(&[linear.to]), u64::try_from(linear.from * linear.to).unwrap_or(0));
        match (&self.part, &x.dims[..]) {
            (VggLayer::Conv(conv), _) => chain(&self.name, &x, [conv]),
            (VggLayer::Pool, &[c, h, w]) if h > 1 && w > 1 => Ok((SampleShape::float(&[c, h / 2, w / 2]), 0)),
            (VggLayer::Pool, _) => wrong("[channels, height, width] of at least 2×2".to_owned(), x),
            (VggLayer::First(linear, _), &[c, _, _]) if c * POOLED * POOLED == linear.from => Ok(mapped(linear)),
            (VggLayer::First(linear, _), _) => wrong(format!("[{}, height, width]", linear.from / POOLED / POOLED), x),
            (VggLayer::Linear(linear, _), &[from]) if from == linear.from => Ok(mapped(linear)),
            (VggLayer::Linear(linear, _), _) => wrong(format!("[{}]", linear.from), x),
        }
    }
}

impl Layer for NamedVggLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn reads_parameters_for_gradients_only(&self) -> bool {
        true
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        match &self.part {
            VggLayer::Conv(conv) => conv.tensors(&self.name),
            VggLayer::Pool => Vec::new(),
            VggLayer::First(linear, _) | VggLayer::Linear(linear, _) => {
                linear.tensors_from(&self.name, Init::Normal { deviation: 0.01 }, Init::Constant(0.0))
            }
        }
    }

    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(vec![self.shaped(input)?.0])
    }

    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        mut input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault> {
        let x = input.swap_remove(0);
        let (x, linear, dropout) = match &self.part {
            // In place: a convolution's backward pass does not need its output.
            VggLayer::Conv(conv) => return Ok(vec![conv.forward(tensors, &x)?.f_relu_()?]),
            VggLayer::Pool => return Ok(vec![x.f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)?]),
            VggLayer::First(linear, dropout) => {
                (x.f_adaptive_avg_pool2d([POOLED, POOLED])?.f_flatten(1, -1)?, linear, dropout)
            }
            VggLayer::Linear(linear, dropout) => (x, linear, dropout),
        };
        let mut y = linear.forward(tensors, &x)?;
        Ok(vec![match dropout {
            Some(p) => context.dropout(y.f_relu_()?, *p)?,
            None => y,
        }])
    }

    fn multiply_adds(&self, input: &[SampleShape]) -> u64 {
        self.shaped(input.to_vec()).map_or(0, |(_, sum)| sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_and_multiply_adds_are_torchvisions() {
        let model = Vgg13::default().model().unwrap();
        assert_eq!((model.parameters(), model.layers.len()), (133_047_848, 18));
        let summary = model.summary().unwrap();
        let sum: u64 = summary.iter().map(|layer| layer.multiply_adds).sum();
        // Published: 11.31 billion.
        assert_eq!((sum + 5_000_000) / 10_000_000, 1131, "{sum}");
        assert_eq!(summary[14].output[0].dims, [512, 7, 7]);
        let names: Vec<&str> = summary.iter().map(|layer| &layer.name[..]).collect();
        assert_eq!(names[..4], ["features.0", "features.2", "features.4", "features.5"]);
        assert_eq!(names[13..], ["features.22", "features.24", "classifier.0", "classifier.3", "classifier.6"]);
    }
}
