//! A layer: the smallest thing that can be placed.
//!
//! A layer is a *spec*. It knows its name, the names, shapes and first values of its tensors, and what it makes of
//! shapes, all without holding a single number. Its tensors are made by the worker that runs it and are lent to
//! [`Layer::forward`], so a model of fifteen billion parameters is a few kilobytes until somebody builds his part.

use crate::deferred_batch_norm::{DeferredBatchNorm, NormTensors};
use crate::engine::{self, Layout, Stream};
use crate::failure::Fault;
use distgpipe_core::skip::SkipUse;
use distgpipe_core::MicroBatchId;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// The shape and type of one tensor of one sample: the batch dimension is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleShape {
    /// Dimensions after the batch dimension.
    pub dims: Vec<i64>,
    /// The type of its elements.
    pub kind: Kind,
}

impl SampleShape {
    /// A shape of 32-bit floats.
    pub fn float(dims: &[i64]) -> Self {
        SampleShape { dims: dims.to_vec(), kind: Kind::Float }
    }

    /// A shape of 64-bit integers.
    pub fn int(dims: &[i64]) -> Self {
        SampleShape { dims: dims.to_vec(), kind: Kind::Int64 }
    }

    /// Bytes that one sample takes.
    pub fn bytes(&self) -> u64 {
        let elements: i64 = self.dims.iter().product();
        u64::try_from(elements).unwrap_or(0) * self.kind.elt_size_in_bytes() as u64
    }
}

/// The shapes of the skips that are on their way, by name.
pub type SkipShapes = BTreeMap<String, SampleShape>;

/// A layer was given something it cannot work on.
#[derive(Clone, Debug, thiserror::Error)]
#[error("layer `{layer}` expects {expected}, got {got:?}")]
pub struct ShapeError {
    /// The layer's name.
    pub layer: String,
    /// What it wants, in words.
    pub expected: String,
    /// What it got.
    pub got: Vec<SampleShape>,
}

/// What a tensor of a layer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Learned: has a gradient and an optimizer state.
    Parameter,
    /// Kept along, such as running statistics.
    Buffer,
}

/// The value a tensor starts from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Normally distributed around 0.
    Normal {
        /// The standard deviation.
        deviation: f64,
    },
    /// Evenly distributed between −bound and bound.
    Uniform {
        /// The largest value.
        bound: f64,
    },
}

impl Init {
    /// PyTorch's default for linear layers and their biases: ±1/√fan_in.
    pub fn fan_in(fan_in: i64) -> Self {
        Init::Uniform { bound: 1.0 / (fan_in.max(1) as f64).sqrt() }
    }
}

/// One tensor of a layer, not yet made.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// The full name, as in the public weight files.
    pub name: String,
    /// Its dimensions.
    pub dims: Vec<i64>,
    /// Its element type.
    pub kind: Kind,
    /// Learned or kept along.
    pub role: Role,
    /// What it starts from.
    pub init: Init,
}

impl TensorSpec {
    /// A learned tensor of 32-bit floats.
    pub fn parameter(name: impl Into<String>, dims: &[i64], init: Init) -> Self {
        TensorSpec { name: name.into(), dims: dims.to_vec(), kind: Kind::Float, role: Role::Parameter, init }
    }

    /// A tensor of 32-bit floats that is kept along.
    pub fn buffer(name: impl Into<String>, dims: &[i64], init: Init) -> Self {
        TensorSpec { role: Role::Buffer, ..Self::parameter(name, dims, init) }
    }

    /// How many numbers it holds.
    pub fn elements(&self) -> u64 {
        self.dims.iter().map(|&d| u64::try_from(d).unwrap_or(0)).product()
    }

    /// Makes it. The values depend on the seed and the name alone, never on the cut or the placement.
    pub fn build(&self, seed: Stream, device: tch::Device) -> Result<Tensor, Fault> {
        // Drawn on the CPU whatever the device, so that a run starts from the same weights everywhere.
        let mut tensor = engine::empty(&self.dims, self.kind, Layout::Contiguous)?;
        let stream = seed.named(&self.name);
        match self.init {
            Init::Constant(value) => drop(tensor.f_fill_(value)?),
            Init::Normal { deviation } => stream.normal(&mut tensor, 0.0, deviation)?,
            Init::Uniform { bound } => stream.uniform(&mut tensor, -bound, bound)?,
        }
        let tensor = tensor.f_to_device(device)?;
        Ok(if self.role == Role::Parameter { tensor.f_set_requires_grad(true)? } else { tensor })
    }
}

/// A layer's tensors, handed out in the order of [`Layer::tensors`].
pub struct Own<'a> {
    layer: &'a str,
    tensors: std::slice::Iter<'a, Tensor>,
}

impl<'a> Own<'a> {
    /// The tensors of the layer with this name.
    pub fn new(layer: &'a str, tensors: &'a [Tensor]) -> Self {
        Own { layer, tensors: tensors.iter() }
    }

    /// The next tensor.
    ///
    /// # Panics
    /// If the layer asks for more tensors than it declared: an error in the layer, which the stage reports.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> &'a Tensor {
        match self.tensors.next() {
            Some(tensor) => tensor,
            None => panic!("layer `{}` uses more tensors than `Layer::tensors` declares", self.layer),
        }
    }
}

/// The smallest thing that can be placed: a named block with parameters.
pub trait Layer: Send + Sync {
    /// Its name; unique in a model.
    fn name(&self) -> &str;

    /// Its tensors, in the order [`Layer::forward`] takes them.
    fn tensors(&self) -> Vec<TensorSpec> {
        Vec::new()
    }

    /// The skips it stashes and pops.
    fn skips(&self) -> SkipUse {
        SkipUse::default()
    }

    /// The shapes it makes of these. A stashed skip is added to `skips`, a popped one is taken from it.
    fn shapes(&self, input: Vec<SampleShape>, skips: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError>;

    /// Computes. Everything random must come from `context`, so that recomputation replays it. The input must not be
    /// changed in place: it may be needed for another pass, or be another worker's too.
    fn forward(&self, own: &mut Own<'_>, input: Vec<Tensor>, context: &mut Context<'_>) -> Result<Vec<Tensor>, Fault>;

    /// Multiply-adds for one sample of this input, where that says something about its cost.
    fn multiply_adds(&self, _input: &[SampleShape]) -> u64 {
        0
    }
}

/// Whether the pass learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passing {
    /// A forward pass in training.
    Train,
    /// The same pass again, to get back activations that were not kept: statistics are not gathered twice.
    Replay,
    /// Evaluation: no dropout, running statistics.
    Evaluate,
}

/// What a layer may use besides its input and its tensors.
pub struct Context<'a> {
    pub(crate) passing: Passing,
    pub(crate) micro_batch: MicroBatchId,
    pub(crate) layer: usize,
    pub(crate) layer_name: &'a str,
    /// Of this step and micro-batch.
    pub(crate) stream: Stream,
    /// How often this layer has drawn.
    pub(crate) draws: u64,
    /// How many batch norms of this layer have run.
    pub(crate) norms_run: usize,
    pub(crate) norms: &'a mut DeferredBatchNorm,
    pub(crate) skips: &'a mut BTreeMap<String, Tensor>,
}

impl Context<'_> {
    /// Whether this is a training pass.
    pub fn training(&self) -> bool {
        self.passing != Passing::Evaluate
    }

    /// The next random stream of this layer for this micro-batch.
    pub fn stream(&mut self) -> Stream {
        self.draws += 1;
        self.stream.at(self.layer as u64).at(self.draws)
    }

    /// Drops each value with probability `p` and scales the others up; leaves `x` alone in evaluation.
    pub fn dropout(&mut self, x: Tensor, p: f64) -> Result<Tensor, Fault> {
        self.drop_with(x, p, |x| x.f_empty_like())
    }

    /// Drops each channel of each sample with probability `p`.
    pub fn dropout_channels(&mut self, x: Tensor, p: f64) -> Result<Tensor, Fault> {
        self.drop_with(x, p, |x| {
            let mut dims = vec![1; x.dim()];
            dims[..2].copy_from_slice(&x.size()[..2]);
            x.f_new_empty(&dims, (x.kind(), x.device()))
        })
    }

    fn drop_with(
        &mut self,
        x: Tensor,
        p: f64,
        mask: impl Fn(&Tensor) -> Result<Tensor, tch::TchError>,
    ) -> Result<Tensor, Fault> {
        if !self.training() || p == 0.0 {
            return Ok(x);
        }
        let stream = self.stream();
        let mut mask = tch::no_grad(|| mask(&x))?;
        stream.bernoulli(&mut mask, 1.0 - p)?;
        let mask = tch::no_grad(|| mask.f_div_scalar_(1.0 - p))?;
        Ok(x.f_mul(&mask)?)
    }

    /// Batch norm whose running statistics are those of the whole batch; see [`DeferredBatchNorm`].
    pub fn batch_norm(&mut self, x: &Tensor, tensors: NormTensors<'_>) -> Result<Tensor, Fault> {
        let place = (self.layer, self.norms_run);
        self.norms_run += 1;
        self.norms.forward(x, tensors, self.passing, self.micro_batch, place)
    }

    /// Leaves a tensor for a later layer.
    pub fn stash(&mut self, name: &str, tensor: Tensor) {
        self.skips.insert(name.to_owned(), tensor);
    }

    /// Takes what an earlier layer left.
    pub fn pop(&mut self, name: &str) -> Result<Tensor, Fault> {
        self.skips.remove(name).ok_or_else(|| Fault::Layer {
            layer: self.layer_name.to_owned(),
            why: format!("nothing is stashed under `{name}`; declare the skip in `Layer::skips` of both layers"),
        })
    }
}
