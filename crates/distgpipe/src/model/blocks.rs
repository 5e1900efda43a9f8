//! Building blocks for layers: convolution, batch norm, linear map, layer norm. A block declares its tensors under a
//! prefix and takes them from [`LayerTensors`] in the same order.

use crate::failure::Fault;
use crate::model::layer::{Context, Init, LayerTensors, Role, SampleShape, ShapeError, TensorSpec};
use crate::runtime::deferred_batch_norm::NormTensors;
use tch::{Device, Kind, Tensor};

/// A 2-D convolution, padded with zeros so that stride 1 keeps the size.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// Input channels.
    pub from: i64,
    /// Output channels.
    pub to: i64,
    /// Height and width of the kernel, both odd.
    pub kernel: [i64; 2],
    /// Vertical and horizontal stride.
    pub stride: [i64; 2],
    /// Groups; as many as input channels make the convolution depthwise.
    pub groups: i64,
    /// Whether a bias is added.
    pub bias: bool,
}

impl Conv2d {
    /// A square kernel, stride 1, one group, no bias.
    pub fn square(from: i64, to: i64, kernel: i64) -> Self {
        Conv2d { from, to, kernel: [kernel; 2], stride: [1; 2], groups: 1, bias: false }
    }

    fn padding(&self) -> [i64; 2] {
        self.kernel.map(|side| (side - 1) / 2)
    }

    /// `{prefix}.weight`, with He et al.'s fan-out initialization, and `{prefix}.bias` if there is one.
    pub fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        let [height, width] = self.kernel;
        let fan_out = self.to * height * width;
        let deviation = (2.0 / fan_out as f64).sqrt();
        let dims = [self.to, self.from / self.groups, height, width];
        let mut tensors = vec![TensorSpec::parameter(format!("{prefix}.weight"), &dims, Init::Normal { deviation })];
        if self.bias {
            tensors.push(TensorSpec::parameter(format!("{prefix}.bias"), &[self.to], Init::Constant(0.0)));
        }
        tensors
    }

    /// Runs the block on `x`, taking its tensors from `tensors`.
    pub fn forward(&self, tensors: &mut LayerTensors<'_>, x: &Tensor) -> Result<Tensor, Fault> {
        let weight = tensors.next();
        let bias = self.bias.then(|| tensors.next());
        let convolve = |x: &Tensor, stride| x.f_conv2d(weight, bias, stride, self.padding(), [1, 1], self.groups);
        let [down, across] = self.stride;
        // Works around an out-of-bounds write in oneDNN (its issue 6035, open in libtorch 2.11.0): on processors with
        // AVX2 but not AVX-512, the weight gradient of such a convolution overruns its buffer. Subsampling the input
        // first computes the same sums.
        if self.kernel == [1, 1] && down.max(across) > 1 && self.from < 8 && x.device() == Device::Cpu {
            return Ok(convolve(&x.f_slice(2, None, None, down)?.f_slice(3, None, None, across)?, [1, 1])?);
        }
        Ok(convolve(x, self.stride)?)
    }

    /// The output shape for an input `[channels, height, width]`.
    pub fn shape(&self, layer: &str, input: &SampleShape) -> Result<SampleShape, ShapeError> {
        match input.dims[..] {
            [c, h, w] if c == self.from && h > 0 && w > 0 => {
                let side = |axis: usize, size: i64| (size - 1) / self.stride[axis] + 1;
                Ok(SampleShape { dims: vec![self.to, side(0, h), side(1, w)], kind: input.kind })
            }
            _ => Err(ShapeError {
                layer: layer.to_owned(),
                expected: format!("[{}, height, width]", self.from),
                got: vec![input.clone()],
            }),
        }
    }

    /// Multiply-adds for an output of this shape.
    pub fn multiply_adds(&self, output: &SampleShape) -> u64 {
        let each = [self.from / self.groups, self.kernel[0], self.kernel[1]];
        let factors = output.dims.iter().chain(&each);
        factors.fold(1, |product, &n| product.saturating_mul(u64::try_from(n).unwrap_or(0)))
    }
}

/// The output shape of a sequence of convolutions, and their multiply-adds.
pub fn chain<'a>(
    layer: &str,
    input: &SampleShape,
    convs: impl IntoIterator<Item = &'a Conv2d>,
) -> Result<(SampleShape, u64), ShapeError> {
    let mut sum = 0_u64;
    let output = convs.into_iter().try_fold(input.clone(), |x, conv| {
        let y = conv.shape(layer, &x)?;
        sum = sum.saturating_add(conv.multiply_adds(&y));
        Ok(y)
    })?;
    Ok((output, sum))
}

/// Batch norm over the channels. Its running statistics are updated once per batch.
#[derive(Clone, Debug)]
pub struct BatchNorm2d {
    /// The number of channels.
    pub channels: i64,
}

impl BatchNorm2d {
    /// The five tensors of PyTorch's `BatchNorm2d`.
    pub fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        let c = [self.channels];
        vec![
            TensorSpec::parameter(format!("{prefix}.weight"), &c, Init::Constant(1.0)),
            TensorSpec::parameter(format!("{prefix}.bias"), &c, Init::Constant(0.0)),
            TensorSpec::buffer(format!("{prefix}.running_mean"), &c, Init::Constant(0.0)),
            TensorSpec::buffer(format!("{prefix}.running_var"), &c, Init::Constant(1.0)),
            TensorSpec {
                name: format!("{prefix}.num_batches_tracked"),
                dims: vec![],
                kind: Kind::Int64,
                role: Role::Buffer,
                init: Init::Constant(0.0),
            },
        ]
    }

    /// Runs the block on `x`, taking its tensors from `tensors`.
    pub fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: &Tensor,
        context: &mut Context<'_>,
    ) -> Result<Tensor, Fault> {
        let norm = NormTensors {
            weight: Some(tensors.next()),
            bias: Some(tensors.next()),
            running_mean: tensors.next(),
            running_var: tensors.next(),
            batches: Some(tensors.next()),
            eps: 1e-5,
            momentum: 0.1,
        };
        context.batch_norm(x, norm)
    }
}

/// The activation after a batch norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The identity.
    None,
    /// max(x, 0).
    Relu,
    /// min(max(x, 0), 6).
    Relu6,
}

/// Convolution, batch norm and activation.
#[derive(Clone, Debug)]
pub struct ConvNorm {
    /// The convolution.
    pub conv: Conv2d,
    /// The activation after the norm.
    pub activation: Activation,
}

impl ConvNorm {
    /// The tensors, under the prefixes of the convolution and of the norm.
    pub fn tensors(&self, conv: &str, norm: &str) -> Vec<TensorSpec> {
        let mut tensors = self.conv.tensors(conv);
        tensors.extend(BatchNorm2d { channels: self.conv.to }.tensors(norm));
        tensors
    }

    /// Runs the block on `x`, taking its tensors from `tensors`.
    pub fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        x: &Tensor,
        context: &mut Context<'_>,
    ) -> Result<Tensor, Fault> {
        let y = self.conv.forward(tensors, x)?;
        let mut y = BatchNorm2d { channels: self.conv.to }.forward(tensors, &y, context)?;
        // In place: batch norm's backward pass needs its input, not its output.
        Ok(match self.activation {
            Activation::None => y,
            Activation::Relu => y.f_relu_()?,
            Activation::Relu6 => y.f_relu6_()?,
        })
    }
}

/// A linear map with bias on the last dimension.
#[derive(Clone, Debug)]
pub struct Linear {
    /// Input features.
    pub from: i64,
    /// Output features.
    pub to: i64,
}

impl Linear {
    /// Weight and bias, with PyTorch's default initialization.
    pub fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        self.tensors_from(prefix, Init::fan_in(self.from), Init::fan_in(self.from))
    }

    /// Weight and bias, with the given initialization.
    pub fn tensors_from(&self, prefix: &str, weight: Init, bias: Init) -> Vec<TensorSpec> {
        vec![
            TensorSpec::parameter(format!("{prefix}.weight"), &[self.to, self.from], weight),
            TensorSpec::parameter(format!("{prefix}.bias"), &[self.to], bias),
        ]
    }

    /// Runs the block on `x`, taking its tensors from `tensors`.
    pub fn forward(&self, tensors: &mut LayerTensors<'_>, x: &Tensor) -> Result<Tensor, Fault> {
        let (weight, bias) = (tensors.next(), tensors.next());
        Ok(x.f_linear(weight, Some(bias))?)
    }
}

/// Layer norm over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// The size of the last dimension.
    pub features: i64,
    /// Added to the variance, for numerical stability.
    pub eps: f64,
}

impl LayerNorm {
    /// `{prefix}.weight` and `{prefix}.bias`.
    pub fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        vec![
            TensorSpec::parameter(format!("{prefix}.weight"), &[self.features], Init::Constant(1.0)),
            TensorSpec::parameter(format!("{prefix}.bias"), &[self.features], Init::Constant(0.0)),
        ]
    }

    /// Runs the block on `x`, taking its tensors from `tensors`.
    pub fn forward(&self, tensors: &mut LayerTensors<'_>, x: &Tensor) -> Result<Tensor, Fault> {
        let (weight, bias) = (tensors.next(), tensors.next());
        Ok(x.f_layer_norm([self.features], Some(weight), Some(bias), self.eps, true)?)
    }
}
