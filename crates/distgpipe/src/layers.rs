//! The blocks that models are built from. A block is part of a layer: it names its tensors under a prefix and takes
//! them from [`Own`] in the same order.

use crate::deferred_batch_norm::NormTensors;
use crate::failure::Fault;
use crate::layer::{Context, Init, Own, Role, SampleShape, ShapeError, TensorSpec};
use tch::{Kind, Tensor};

/// A 2-D convolution without bias.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// Channels in.
    pub from: i64,
    /// Channels out.
    pub to: i64,
    /// Side of the kernel.
    pub kernel: i64,
    /// Step.
    pub stride: i64,
    /// Groups; `from` of them make it depthwise.
    pub groups: i64,
}

impl Conv2d {
    /// Zero padding that keeps the size at stride 1.
    fn padding(&self) -> i64 {
        (self.kernel - 1) / 2
    }

    /// Its weight, as `{prefix}.weight`, drawn as He et al. do for the number of outputs.
    pub fn tensors(&self, prefix: &str) -> Vec<TensorSpec> {
        let fan_out = self.to * self.kernel * self.kernel;
        let deviation = (2.0 / fan_out as f64).sqrt();
        let dims = [self.to, self.from / self.groups, self.kernel, self.kernel];
        vec![TensorSpec::parameter(format!("{prefix}.weight"), &dims, Init::Normal { deviation })]
    }

    /// Computes.
    pub fn forward(&self, own: &mut Own<'_>, x: &Tensor) -> Result<Tensor, Fault> {
        let (stride, padding) = ([self.stride; 2], [self.padding(); 2]);
        Ok(x.f_conv2d(own.next(), None::<&Tensor>, stride, padding, [1, 1], self.groups)?)
    }

    /// The shape it makes of `[channels, height, width]`.
    pub fn shape(&self, layer: &str, input: &SampleShape) -> Result<SampleShape, ShapeError> {
        match input.dims[..] {
            [c, h, w] if c == self.from => {
                let side = |n: i64| (n + 2 * self.padding() - self.kernel) / self.stride + 1;
                if side(h) > 0 && side(w) > 0 {
                    return Ok(SampleShape { dims: vec![self.to, side(h), side(w)], kind: input.kind });
                }
            }
            _ => {}
        }
        let expected = format!("[{}, height, width] at least {} wide", self.from, self.kernel - 2 * self.padding());
        Err(ShapeError { layer: layer.to_owned(), expected, got: vec![input.clone()] })
    }

    /// Multiply-adds for an output of this shape.
    pub fn multiply_adds(&self, output: &SampleShape) -> u64 {
        let places: i64 = output.dims.iter().product();
        u64::try_from(places * (self.from / self.groups) * self.kernel * self.kernel).unwrap_or(0)
    }
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

/// Convolution, batch norm and, if wanted, ReLU6.
#[derive(Clone, Debug)]
pub struct ConvNorm {
    /// The convolution.
    pub conv: Conv2d,
    /// Whether ReLU6 follows.
    pub relu6: bool,
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
        Ok(if self.relu6 { y.f_relu6_()? } else { y })
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
