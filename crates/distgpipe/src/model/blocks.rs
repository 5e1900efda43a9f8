//! The blocks that models are built from. A block is part of a layer: it names its tensors under a prefix and takes
//! them from [`Own`] in the same order.

use crate::deferred_batch_norm::NormTensors;
use crate::failure::Fault;
use crate::layer::{Context, Init, Own, Role, SampleShape, ShapeError, TensorSpec};
use tch::{Device, Kind, Tensor};

/// A 2-D convolution, padded with zeros so that stride 1 keeps the size.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// Channels in.
    pub from: i64,
    /// Channels out.
    pub to: i64,
    /// Height and width of the kernel, both odd.
    pub kernel: [i64; 2],
    /// Steps down and across.
    pub stride: [i64; 2],
    /// Groups; `from` of them make it depthwise.
    pub groups: i64,
    /// Whether it adds a bias.
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

    /// Its weight, as `{prefix}.weight`, drawn as He et al. do for the number of outputs; and its bias, if any.
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

    /// Computes.
    pub fn forward(&self, own: &mut Own<'_>, x: &Tensor) -> Result<Tensor, Fault> {
        let weight = own.next();
        let bias = self.bias.then(|| own.next());
        let convolve = |x: &Tensor, stride| x.f_conv2d(weight, bias, stride, self.padding(), [1, 1], self.groups);
        let [down, across] = self.stride;
        // On processors with AVX2 and no AVX-512, the gradient of such a weight is written past its room by oneDNN
        // (its issue 6035, open in libtorch 2.11.0). Picking the pixels first is the same sum.
        if self.kernel == [1, 1] && down.max(across) > 1 && self.from < 8 && x.device() == Device::Cpu {
            return Ok(convolve(&x.f_slice(2, None, None, down)?.f_slice(3, None, None, across)?, [1, 1])?);
        }
        Ok(convolve(x, self.stride)?)
    }

    /// The shape it makes of `[channels, height, width]`.
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

/// The shape that convolutions one after the other make of `input`, and their multiply-adds.
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

/// Batch norm over the channels, deferred under micro-batches.
#[derive(Clone, Debug)]
pub struct BatchNorm2d {
    /// How many channels.
    pub channels: i64,
}

impl BatchNorm2d {
    /// Its five tensors under PyTorch's names.
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

    /// Computes.
    pub fn forward(&self, own: &mut Own<'_>, x: &Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let tensors = NormTensors {
            weight: own.next(),
            bias: own.next(),
            running_mean: own.next(),
            running_var: own.next(),
            batches: own.next(),
            eps: 1e-5,
            momentum: 0.1,
        };
        context.batch_norm(x, tensors)
    }
}

/// What follows a batch norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// The positive part.
    Relu,
    /// The positive part, at most 6.
    Relu6,
}

/// Convolution, batch norm and activation.
#[derive(Clone, Debug)]
pub struct ConvNorm {
    /// The convolution.
    pub conv: Conv2d,
    /// What follows the norm.
    pub activation: Activation,
}

impl ConvNorm {
    /// The tensors, with the names of the convolution and of the norm.
    pub fn tensors(&self, conv: &str, norm: &str) -> Vec<TensorSpec> {
        let mut tensors = self.conv.tensors(conv);
        tensors.extend(BatchNorm2d { channels: self.conv.to }.tensors(norm));
        tensors
    }

    /// Computes.
    pub fn forward(&self, own: &mut Own<'_>, x: &Tensor, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let y = self.conv.forward(own, x)?;
        let mut y = BatchNorm2d { channels: self.conv.to }.forward(own, &y, context)?;
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
    /// Features in.
    pub from: i64,
    /// Features out.
    pub to: i64,
}

impl Linear {
    /// Weight and bias, with PyTorch's default first values.
    pub fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        self.tensors_from(prefix, Init::fan_in(self.from), Init::fan_in(self.from))
    }

    /// Weight and bias with other first values.
    pub fn tensors_from(&self, prefix: &str, weight: Init, bias: Init) -> Vec<TensorSpec> {
        vec![
            TensorSpec::parameter(format!("{prefix}.weight"), &[self.to, self.from], weight),
            TensorSpec::parameter(format!("{prefix}.bias"), &[self.to], bias),
        ]
    }

    /// Computes.
    pub fn forward(&self, own: &mut Own<'_>, x: &Tensor) -> Result<Tensor, Fault> {
        let (weight, bias) = (own.next(), own.next());
        Ok(x.f_linear(weight, Some(bias))?)
    }
}

/// Layer norm over the last dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// Its size.
    pub features: i64,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    /// Scale and shift.
    pub fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        vec![
            TensorSpec::parameter(format!("{prefix}.weight"), &[self.features], Init::Constant(1.0)),
            TensorSpec::parameter(format!("{prefix}.bias"), &[self.features], Init::Constant(0.0)),
        ]
    }

    /// Computes.
    pub fn forward(&self, own: &mut Own<'_>, x: &Tensor) -> Result<Tensor, Fault> {
        let (weight, bias) = (own.next(), own.next());
        Ok(x.f_layer_norm([self.features], Some(weight), Some(bias), self.eps, true)?)
    }
}
