//! A layer: the smallest unit that can be placed on a worker.
//!
//! A layer is a *spec*. It knows its name, the names, shapes and initial values of its tensors, and its output shapes,
//! but it holds no tensor data. The worker that runs the layer allocates its tensors and lends them to
//! [`Layer::forward`]. A model of fifteen billion parameters therefore takes a few kilobytes until a worker builds its
//! part of it.

use crate::engine::{self, DrawSite, Layout, Stream};
use crate::failure::Fault;
use crate::runtime::deferred_batch_norm::{DeferredBatchNorm, NormTensors};
use distgpipe_core::skip::SkipUse;
use distgpipe_core::MicroBatchId;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// The shape and element type of a tensor, for one sample: without the batch dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleShape {
    /// The dimensions after the batch dimension.
    pub dims: Vec<i64>,
    /// The element type.
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

    /// The size of one sample in bytes.
    pub fn bytes(&self) -> u64 {
        let elements: i64 = self.dims.iter().product();
        u64::try_from(elements).unwrap_or(0) * self.kind.elt_size_in_bytes() as u64
    }
}

/// The shapes of the skip connections that are open at some layer, by name.
pub type SkipShapes = BTreeMap<String, SampleShape>;

/// A layer does not accept its input.
#[derive(Clone, Debug, thiserror::Error)]
#[error("layer `{layer}` expects {expected}, got {got:?}")]
pub struct ShapeError {
    /// The layer's name.
    pub layer: String,
    /// The shapes the layer accepts, in words.
    pub expected: String,
    /// The shapes it was given.
    pub got: Vec<SampleShape>,
}

/// The role of a layer's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Trained: has a gradient and optimizer state.
    Parameter,
    /// Saved with the model but not trained, such as running statistics.
    Buffer,
}

/// The initial value of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element has this value.
    Constant(f64),
    /// A normal distribution with mean 0.
    Normal {
        /// The standard deviation.
        deviation: f64,
    },
    /// A uniform distribution between −bound and bound.
    Uniform {
        /// The largest magnitude.
        bound: f64,
    },
}

impl Init {
    /// PyTorch's default for linear layers and their biases: ±1/√fan_in.
    pub fn fan_in(fan_in: i64) -> Self {
        Init::Uniform { bound: 1.0 / (fan_in.max(1) as f64).sqrt() }
    }
}

/// The name, shape and initial value of a layer's tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// The full name, unique in the model, as published weight files have it.
    pub name: String,
    /// The dimensions; empty for a scalar.
    pub dims: Vec<i64>,
    /// The element type.
    pub kind: Kind,
    /// Whether the tensor is trained.
    pub role: Role,
    /// The initial value.
    pub init: Init,
}

impl TensorSpec {
    /// A trained tensor of 32-bit floats.
    pub fn parameter(name: impl Into<String>, dims: &[i64], init: Init) -> Self {
        TensorSpec { name: name.into(), dims: dims.to_vec(), kind: Kind::Float, role: Role::Parameter, init }
    }

    /// A buffer of 32-bit floats.
    pub fn buffer(name: impl Into<String>, dims: &[i64], init: Init) -> Self {
        TensorSpec { role: Role::Buffer, ..Self::parameter(name, dims, init) }
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().map(|&d| u64::try_from(d).unwrap_or(0)).product()
    }

    /// Allocates and initializes the tensor. Its values depend on the seed and the name alone, never on the cut or the
    /// placement.
    pub fn build(&self, seed: Stream, device: tch::Device) -> Result<Tensor, Fault> {
        // Drawn on the CPU, so that a run starts from the same weights on every device.
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

/// The tensors of one layer, in the order of [`Layer::tensors`].
pub struct LayerTensors<'a> {
    layer: &'a str,
    tensors: std::slice::Iter<'a, Tensor>,
}

impl<'a> LayerTensors<'a> {
    /// Wraps the tensors of the layer with this name.
    pub fn new(layer: &'a str, tensors: &'a [Tensor]) -> Self {
        LayerTensors { layer, tensors: tensors.iter() }
    }

    /// Returns the next tensor.
    ///
    /// # Panics
    /// If the layer takes more tensors than it declared. The worker reports the panic as a failure of the run.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> &'a Tensor {
        match self.tensors.next() {
            Some(tensor) => tensor,
            None => panic!("layer `{}` uses more tensors than `Layer::tensors` declares", self.layer),
        }
    }
}

/// The smallest unit that can be placed on a worker: a named block with tensors.
///
/// Implement this for layers of your own; `examples/own_layers.rs` shows how.
pub trait Layer: Send + Sync {
    /// The layer's name, unique in the model.
    fn name(&self) -> &str;

    /// Other names by which a cut may call the place after this layer.
    fn also_named(&self) -> &[String] {
        &[]
    }

    /// The layer's tensors, in the order in which [`Layer::forward`] takes them.
    fn tensors(&self) -> Vec<TensorSpec> {
        Vec::new()
    }

    /// The skip connections that the layer stashes and pops.
    fn skips(&self) -> SkipUse {
        SkipUse::default()
    }

    /// The output shapes for these input shapes. The layer adds the skips it stashes to `skips` and removes those it pops.
    fn shapes(&self, input: Vec<SampleShape>, skips: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError>;

    /// Computes the output. Take all randomness from `context`, so that recomputation repeats it exactly. Do not modify
    /// the input in place: another pass or another worker may still need it.
    fn forward(
        &self,
        tensors: &mut LayerTensors<'_>,
        input: Vec<Tensor>,
        context: &mut Context<'_>,
    ) -> Result<Vec<Tensor>, Fault>;

    /// Whether [`Layer::forward`] reads the values of a parameter only in operations that the parameter gets a gradient from: not of a
    /// detached one, for example, and not to compare them. Only then do recorded passes in bfloat16 give it a parameter that is
    /// cast already.
    fn reads_parameters_for_gradients_only(&self) -> bool {
        false
    }

    /// Multiply-adds for one sample of this input; 0 if they do not describe the layer's cost.
    fn multiply_adds(&self, _input: &[SampleShape]) -> u64 {
        0
    }
}

/// Fills a mask with 0 at probability `p`, else with the factor that keeps the mean. All are 0 if `p` is 1.
fn draw_mask(stream: Stream, mut mask: Tensor, p: f64) -> Result<Tensor, Fault> {
    stream.bernoulli(&mut mask, 1.0 - p)?;
    if p >= 1.0 {
        return Ok(mask);
    }
    Ok(tch::no_grad(|| mask.f_div_scalar_(1.0 - p))?)
}

/// An empty tensor with one element per channel.
fn empty_channels(x: &Tensor) -> Result<Tensor, tch::TchError> {
    let size = x.size();
    let dims: Vec<i64> = size.iter().enumerate().map(|(axis, &size)| if axis < 2 { size } else { 1 }).collect();
    x.f_new_empty(&dims, (x.kind(), x.device()))
}

/// The kind of forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassMode {
    /// A forward pass in training.
    Train,
    /// A recomputation of a training pass, which must not collect batch statistics a second time.
    Recompute,
    /// A forward pass in evaluation: no dropout, and batch norm uses the running statistics.
    Evaluate,
}

/// What a forward pass offers a layer: randomness, dropout, batch norm and skip connections.
pub struct Context<'a> {
    pub(crate) mode: PassMode,
    pub(crate) micro_batch: MicroBatchId,
    pub(crate) layer: usize,
    pub(crate) layer_name: &'a str,
    /// The random stream of this step and micro-batch.
    pub(crate) stream: Stream,
    /// How many streams this layer has taken.
    pub(crate) draws: u64,
    /// How many batch norms this layer has run.
    pub(crate) norms_run: usize,
    pub(crate) norms: &'a mut DeferredBatchNorm,
    pub(crate) skips: &'a mut BTreeMap<String, Tensor>,
}

impl Context<'_> {
    /// Whether this is a training pass, recomputation included.
    pub fn training(&self) -> bool {
        self.mode != PassMode::Evaluate
    }

    /// The next random stream of this layer for this micro-batch. A recomputation gets the same ones.
    pub fn stream(&mut self) -> Stream {
        self.draws += 1;
        let site = DrawSite::Layer { layer: self.layer as u64, draw: self.draws };
        engine::name_stream(site.stream(self.stream), site)
    }

    /// Dropout with probability `p`; the identity in evaluation.
    pub fn dropout(&mut self, x: Tensor, p: f64) -> Result<Tensor, Fault> {
        self.drop_with(x, p, |x| x.f_empty_like())
    }

    /// Dropout of whole channels with probability `p`; the identity in evaluation.
    pub fn dropout_channels(&mut self, x: Tensor, p: f64) -> Result<Tensor, Fault> {
        self.drop_with(x, p, empty_channels)
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
        let mask = draw_mask(self.stream(), tch::no_grad(|| mask(&x))?, p)?;
        Ok(x.f_mul(&mask)?)
    }

    /// The random stream of a place in the model that does not depend on how the model is divided into layers, such as a
    /// node of an exported graph.
    pub(crate) fn stream_of(&self, place: u64) -> Stream {
        let site = DrawSite::Place(place);
        engine::name_stream(site.stream(self.stream), site)
    }

    /// The factors of a dropout with probability `p` at such a place, for every element or for whole channels; `None` where
    /// dropout is the identity.
    pub(crate) fn dropout_mask(&self, place: u64, x: &Tensor, p: f64, channels: bool) -> Result<Option<Tensor>, Fault> {
        if !self.training() || p == 0.0 {
            return Ok(None);
        }
        let dense = engine::layout(x).is_some();
        let mask = tch::no_grad(|| match channels {
            true => empty_channels(x),
            false if dense => x.f_empty_like(),
            // A link would make the tensor contiguous, and the mask of an element must not depend on that.
            false => x.f_new_empty(x.size(), (x.kind(), x.device())),
        })?;
        draw_mask(self.stream_of(place), mask, p).map(Some)
    }

    /// Batch norm whose running statistics are updated once per batch; see [`DeferredBatchNorm`].
    pub fn batch_norm(&mut self, x: &Tensor, tensors: NormTensors<'_>) -> Result<Tensor, Fault> {
        let place = (self.layer, self.norms_run);
        self.norms_run += 1;
        self.norms.forward(x, tensors, self.mode, self.micro_batch, place)
    }

    /// Stashes a tensor for a later layer, which [pops](Self::pop) it.
    pub fn stash(&mut self, name: &str, tensor: Tensor) {
        self.skips.insert(name.to_owned(), tensor);
    }

    /// Takes the tensor that an earlier layer [stashed](Self::stash) under this name.
    pub fn pop(&mut self, name: &str) -> Result<Tensor, Fault> {
        self.skips.remove(name).ok_or_else(|| {
            let why = format!("nothing is stashed under `{name}`; declare the skip in `Layer::skips` of both layers");
            Fault::layer(self.layer_name, why)
        })
    }
}
