//! One node of a graph, ready to be called: its operator is found, its arguments have their positions, and its values have
//! slots in the memory of a pass.

use crate::engine::{self, Argument, Layout, Operator};
use crate::failure::Fault;
use crate::model::layer::Context;
use crate::runtime::deferred_batch_norm::NormTensors;
use distgpipe_core::pt2::graph::{Format, Number};
use distgpipe_core::pt2::operators;
use distgpipe_core::pt2::{Arg, Graph, Node, Size, ValueId};
use distgpipe_core::weights::TensorType;
use std::collections::HashMap;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// The values of a pass, by slot.
pub(super) type Memory = Vec<Option<Tensor>>;

/// The slot of each value that a layer uses.
#[derive(Default)]
pub(super) struct Slots(HashMap<ValueId, usize>);

impl Slots {
    /// The slot of a value, a new one if it has none.
    pub(super) fn of(&mut self, value: ValueId) -> usize {
        let next = self.0.len();
        *self.0.entry(value).or_insert(next)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// An argument whose values have slots.
enum Template {
    Value(usize),
    Values(Vec<Option<usize>>),
    Int(Size),
    Ints(Vec<Size>),
    Floats(Vec<f64>),
    Given(Arg),
}

/// How a node is computed.
enum Method {
    /// By its operator.
    Call,
    /// By its operator, at a seed of its own.
    Seeded,
    /// By its operator, with zeros in place of whatever the allocated memory holds.
    Zeroed,
    /// By its operator, whose result may be a view although the graph takes it for a new tensor.
    Cloned(Arc<Operator>),
    /// Dropout of elements or of channels, with a mask of the run's random streams.
    Dropout {
        channels: bool,
        in_place: bool,
        p: f64,
    },
    /// Random zeros and ones; their mean in evaluation.
    Bernoulli {
        p: f64,
    },
    /// A batch norm whose statistics are committed once per batch.
    BatchNorm(Box<BatchNorm>),
    Conv2d,
    AdaptivePool,
}

/// The slots and constants of a batch norm.
struct BatchNorm {
    input: usize,
    weight: Option<usize>,
    bias: Option<usize>,
    running_mean: usize,
    running_var: usize,
    batches: Option<usize>,
    eps: f64,
    momentum: f64,
}

/// A node, ready to be called.
pub(super) struct Step {
    /// The node's number in the graph, which names its random numbers.
    node: u64,
    /// The operator and its place in the user's module, for errors.
    place: String,
    method: Method,
    operator: Arc<Operator>,
    arguments: Vec<(usize, Template)>,
    /// What replaces arguments in evaluation.
    evaluation: Vec<(usize, Arg)>,
    /// The slots of its results.
    results: Vec<usize>,
    /// The slots that nothing uses after it.
    pub(super) last_uses: Vec<usize>,
    no_grad: bool,
    /// Whether the operator is an LSTM or alike, which has another kernel for passes without a backward pass.
    recurrent: bool,
}

impl Step {
    /// Prepares the node with this number, whose results are values from `first_result` on.
    pub(super) fn new(graph: &Graph, index: usize, first_result: ValueId, slots: &mut Slots) -> Result<Self, String> {
        let node = &graph.nodes[index];
        let place = format!("`aten.{}` in {}", node.op, graph.place(node));
        // A view needs matching strides, which a tensor in another memory layout does not have.
        let (op, renamed) = match &node.op[..] {
            "view.default" => ("reshape.default", Some(("size", "shape"))),
            op => (op, None),
        };
        let operator = Operator::find(op).map_err(|why| format!("{place}: {why}"))?;
        let method = method(node, slots).map_err(|why| format!("{place}: {why}"))?;
        let mut arguments = Vec::new();
        for (name, argument) in &node.args {
            let name = renamed.filter(|(old, _)| old == name).map_or(&name[..], |(_, new)| new);
            match operator.position(name) {
                Some(position) => arguments.push((position, template(argument, slots))),
                // The counter of a batch norm is no argument of the operator.
                None if matches!(method, Method::BatchNorm(_)) => {}
                None => return Err(format!("{place}: libtorch's operator has no argument `{name}`")),
            }
        }
        let evaluation = evaluation(node).into_iter();
        let evaluation = evaluation.filter_map(|(name, arg)| Some((operator.position(name)?, arg))).collect();
        let results = (0..node.results).map(|result| slots.of(first_result + result)).collect();
        Ok(Step {
            node: index as u64,
            place,
            method,
            operator,
            arguments,
            evaluation,
            results,
            last_uses: Vec::new(),
            no_grad: node.no_grad,
            recurrent: is_recurrent(&node.op),
        })
    }

    /// Every slot that the step reads or writes.
    pub(super) fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        let read = self.arguments.iter().flat_map(|(_, argument)| match argument {
            Template::Value(slot) => vec![*slot],
            Template::Values(all) => all.iter().flatten().copied().collect(),
            _ => Vec::new(),
        });
        read.chain(self.results.iter().copied())
    }

    /// Computes the node. `rows` is the number of rows of the micro-batch.
    pub(super) fn run(&self, memory: &mut Memory, rows: i64, context: &mut Context<'_>) -> Result<(), Fault> {
        let results = match self.no_grad {
            true => tch::no_grad(|| self.compute(memory, rows, context)),
            false => self.compute(memory, rows, context),
        };
        let results = results.map_err(|fault| match fault {
            Fault::Engine(error) => {
                Fault::layer(context.layer_name, format!("{}: {}", self.place, Fault::Engine(error)))
            }
            other => other,
        })?;
        for (slot, result) in self.results.iter().zip(results) {
            memory[*slot] = Some(result);
        }
        for slot in &self.last_uses {
            memory[*slot] = None;
        }
        Ok(())
    }

    fn compute(&self, memory: &Memory, rows: i64, context: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
        match &self.method {
            Method::Dropout { channels, in_place, p } => {
                let x = self.first(memory)?;
                let mask = context.dropout_mask(self.node, x, *p, *channels)?;
                Ok(vec![match mask {
                    None => x.shallow_clone(),
                    Some(mask) if *in_place => x.shallow_clone().f_mul_(&mask)?,
                    Some(mask) => x.f_mul(&mask)?,
                }])
            }
            Method::Bernoulli { p } => {
                let mut x = self.first(memory)?.shallow_clone();
                match context.training() {
                    true => context.stream_of(self.node).bernoulli(&mut x, *p)?,
                    false => drop(x.f_fill_(*p)?),
                }
                Ok(vec![x])
            }
            Method::BatchNorm(norm) => Ok(vec![norm.run(self, memory, context)?]),
            Method::Zeroed => {
                let arguments = self.arguments(memory, rows, context.training())?;
                let allocated = self.call(&arguments, memory)?;
                Ok(allocated.into_iter().map(|mut tensor| tensor.f_zero_()).collect::<Result<_, _>>()?)
            }
            Method::Cloned(clone) => {
                let arguments = self.arguments(memory, rows, context.training())?;
                let mut results = self.call(&arguments, memory)?;
                for result in &mut results {
                    let copies = clone.call(&[(0, Argument::Tensor(result))], device_of(memory), 1);
                    *result = copies.map_err(Fault::engine)?.remove(0);
                }
                Ok(results)
            }
            Method::Seeded => {
                if self.recurrent && context.training() {
                    refuse_unseeded_dropout(device_of(memory))
                        .map_err(|why| Fault::layer(context.layer_name, format!("{}: {why}", self.place)))?;
                }
                let arguments = self.arguments(memory, rows, context.training())?;
                let (device, seed) = (device_of(memory), context.stream_of(self.node).seed());
                let call = || self.call_for(&arguments, memory, context.training());
                engine::seeded(device, seed, call).map_err(Fault::engine)
            }
            Method::Call => {
                let arguments = self.arguments(memory, rows, context.training())?;
                self.call_for(&arguments, memory, context.training()).map_err(Fault::engine)
            }
            Method::Conv2d => self.convolve(memory, rows, context),
            Method::AdaptivePool => self.pool(memory, rows, context),
        }
    }

    fn call(&self, arguments: &[(usize, Argument<'_>)], memory: &Memory) -> Result<Vec<Tensor>, Fault> {
        self.operator.call(arguments, device_of(memory), self.results.len()).map_err(Fault::engine)
    }

    /// Calls the operator in a pass of this kind. A recomputation must repeat the bits of the pass before, which recorded
    /// nothing for a backward pass.
    fn call_for(
        &self,
        arguments: &[(usize, Argument<'_>)],
        memory: &Memory,
        training: bool,
    ) -> Result<Vec<Tensor>, String> {
        let call = || self.operator.call(arguments, device_of(memory), self.results.len());
        if self.recurrent && training && !self.no_grad {
            engine::as_with_grad(call)
        } else {
            call()
        }
    }

    /// The value of the first argument.
    fn first<'a>(&self, memory: &'a Memory) -> Result<&'a Tensor, Fault> {
        match self.arguments.first() {
            Some((_, Template::Value(slot))) => self.value(memory, *slot),
            _ => Err(Fault::internal("a tensor as first argument", self.place.clone())),
        }
    }

    fn value<'a>(&self, memory: &'a Memory, slot: usize) -> Result<&'a Tensor, Fault> {
        let value = memory.get(slot).and_then(Option::as_ref);
        value.ok_or_else(|| Fault::internal("a value before its use", self.place.clone()))
    }

    fn arguments<'a>(
        &'a self,
        memory: &'a Memory,
        rows: i64,
        training: bool,
    ) -> Result<Vec<(usize, Argument<'a>)>, Fault> {
        let size = |size: &Size| {
            size.at(rows).ok_or_else(|| Fault::internal("a size of 64 bits", format!("{}: {size:?}", self.place)))
        };
        let mut all = Vec::with_capacity(self.arguments.len());
        for (position, template) in &self.arguments {
            let replaced = self.evaluation.iter().filter(|_| !training).find(|(other, _)| other == position);
            let argument = match (replaced, template) {
                (Some((_, arg)), _) | (None, Template::Given(arg)) => given(arg),
                (None, Template::Value(slot)) => Argument::Tensor(self.value(memory, *slot)?),
                (None, Template::Values(slots)) => {
                    let one = |slot: &Option<usize>| slot.map(|slot| self.value(memory, slot)).transpose();
                    Argument::Tensors(slots.iter().map(one).collect::<Result<_, _>>()?)
                }
                (None, Template::Int(number)) => Argument::Int(size(number)?),
                (None, Template::Ints(all)) => Argument::Ints(all.iter().map(size).collect::<Result<_, _>>()?),
                (None, Template::Floats(all)) => Argument::Floats(all),
            };
            all.push((*position, argument));
        }
        Ok(all)
    }

    /// A 2-D convolution, with the work-around that `model::blocks::Conv2d` explains: oneDNN writes out of bounds in the
    /// weight gradient of a strided 1×1 convolution of few channels on some processors.
    fn convolve(&self, memory: &Memory, rows: i64, context: &Context<'_>) -> Result<Vec<Tensor>, Fault> {
        let mut arguments = self.arguments(memory, rows, context.training())?;
        let find = |name: &str| self.operator.position(name);
        let tensor = |name: &str| match arguments.iter().find(|(position, _)| Some(*position) == find(name)) {
            Some((_, Argument::Tensor(tensor))) => Some(*tensor),
            _ => None,
        };
        let ints = |name: &str| match arguments.iter().find(|(position, _)| Some(*position) == find(name)) {
            Some((_, Argument::Ints(all))) => all.clone(),
            _ => Vec::new(),
        };
        let (Some(input), Some(weight)) = (tensor("input"), tensor("weight")) else {
            return self.call(&arguments, memory);
        };
        let (stride, few) = (ints("stride"), input.dim() == 4 && input.size()[1] < 8);
        let strided = matches!(stride[..], [down, across] if down.max(across) > 1);
        let unpadded = ints("padding").iter().all(|&padding| padding == 0);
        if !(few && strided && unpadded && input.device() == Device::Cpu && weight.size().get(2..) == Some(&[1, 1])) {
            return self.call(&arguments, memory);
        }
        let sampled = input.f_slice(2, None, None, stride[0])?.f_slice(3, None, None, stride[1])?;
        for (position, argument) in &mut arguments {
            if Some(*position) == find("input") {
                *argument = Argument::Tensor(&sampled);
            } else if Some(*position) == find("stride") {
                *argument = Argument::Ints(vec![1, 1]);
            }
        }
        self.call(&arguments, memory)
    }

    /// An adaptive average pool. Over a whole image that lies channels-last it is an average pool, because the gradient of
    /// libtorch's adaptive pool does not have the layout of the image; see `model/zoo/classifier.rs`.
    fn pool(&self, memory: &Memory, rows: i64, context: &Context<'_>) -> Result<Vec<Tensor>, Fault> {
        let arguments = self.arguments(memory, rows, context.training())?;
        let x = self.first(memory)?;
        let whole = arguments.iter().any(|(_, argument)| matches!(argument, Argument::Ints(all) if all[..] == [1, 1]));
        if whole && x.dim() == 4 && engine::layout(x) == Some(Layout::ChannelsLast) {
            let size = [x.size()[2], x.size()[3]];
            return Ok(vec![x.f_avg_pool2d(size, size, [0, 0], false, true, None::<i64>)?]);
        }
        self.call(&arguments, memory)
    }
}

impl BatchNorm {
    /// The batch norm of a node in training that has running statistics.
    fn of(node: &Node, slots: &mut Slots) -> Option<Self> {
        let mut slot = |name: &str| node.tensor(name).map(|value| slots.of(value));
        Some(BatchNorm {
            input: slot("input")?,
            weight: slot("weight"),
            bias: slot("bias"),
            running_mean: slot("running_mean")?,
            running_var: slot("running_var")?,
            batches: slot("batches"),
            eps: node.number("eps")?,
            momentum: node.number("momentum")?,
        })
    }

    fn run(&self, step: &Step, memory: &Memory, context: &mut Context<'_>) -> Result<Tensor, Fault> {
        let optional = |slot: Option<usize>| slot.map(|slot| step.value(memory, slot)).transpose();
        let tensors = NormTensors {
            weight: optional(self.weight)?,
            bias: optional(self.bias)?,
            running_mean: step.value(memory, self.running_mean)?,
            running_var: step.value(memory, self.running_var)?,
            batches: optional(self.batches)?,
            eps: self.eps,
            momentum: self.momentum,
        };
        context.batch_norm(step.value(memory, self.input)?, tensors)
    }
}

/// cuDNN draws the dropout between the layers of an LSTM from a generator that does not follow the run's seed, so that a
/// recomputation would draw other masks.
fn refuse_unseeded_dropout(device: Device) -> Result<(), &'static str> {
    match device {
        Device::Cuda(_) => Err("expected dropout=0 on a GPU, where its masks do not follow the seed of the run: put \
             nn.Dropout between modules with num_layers=1, or train on the CPU"),
        _ => Ok(()),
    }
}

fn method(node: &Node, slots: &mut Slots) -> Result<Method, String> {
    let dropout = |channels, in_place| {
        let p = if node.flag("train") { node.number("p").unwrap_or(0.0) } else { 0.0 };
        Method::Dropout { channels, in_place, p }
    };
    let recurrent_dropout =
        node.flag("train") && node.number("dropout").unwrap_or(0.0) > 0.0 && node.number("num_layers") != Some(1.0);
    Ok(match &node.op[..] {
        "dropout.default" => dropout(false, false),
        "dropout_.default" => dropout(false, true),
        "feature_dropout.default" => dropout(true, false),
        "feature_dropout_.default" => dropout(true, true),
        "bernoulli_.float" => Method::Bernoulli { p: node.number("p").unwrap_or(0.5) },
        "batch_norm.default" if node.flag("training") => {
            BatchNorm::of(node, slots).map_or(Method::Call, |norm| Method::BatchNorm(Box::new(norm)))
        }
        "empty.memory_format" | "empty_like.default" | "new_empty.default" => Method::Zeroed,
        // With one operand it may be a permutation of it.
        "einsum.default" if node.tensors().count() < 2 => Method::Cloned(Operator::find("clone.default")?),
        "conv2d.default" => Method::Conv2d,
        "adaptive_avg_pool2d.default" => Method::AdaptivePool,
        "scaled_dot_product_attention.default" if node.number("dropout_p").unwrap_or(0.0) == 0.0 => Method::Call,
        op if is_recurrent(op) && !recurrent_dropout => Method::Call,
        op if operators::is_random(op) => Method::Seeded,
        _ => Method::Call,
    })
}

fn is_recurrent(op: &str) -> bool {
    matches!(op, "lstm.input" | "gru.input" | "rnn_tanh.input" | "rnn_relu.input")
}

/// The arguments that differ in evaluation.
fn evaluation(node: &Node) -> Vec<(&'static str, Arg)> {
    let off = |name| vec![(name, Arg::Bool(false))];
    match &node.op[..] {
        "scaled_dot_product_attention.default" => vec![("dropout_p", Arg::Float(Number(0.0)))],
        "alpha_dropout.default" | "feature_alpha_dropout.default" | "native_dropout.default" => off("train"),
        op if is_recurrent(op) => off("train"),
        "rrelu.default" => off("training"),
        _ => Vec::new(),
    }
}

fn template(argument: &Arg, slots: &mut Slots) -> Template {
    match argument {
        Arg::Tensor(value) => Template::Value(slots.of(*value)),
        Arg::Tensors(all) => Template::Values(all.iter().map(|value| value.map(|value| slots.of(value))).collect()),
        Arg::Int(size) => Template::Int(*size),
        Arg::Ints(all) => Template::Ints(all.clone()),
        Arg::Floats(all) => Template::Floats(all.iter().map(|number| number.0).collect()),
        other => Template::Given(other.clone()),
    }
}

/// An argument that does not depend on the pass.
fn given(argument: &Arg) -> Argument<'_> {
    match argument {
        Arg::Float(number) => Argument::Float(number.0),
        Arg::Bool(flag) => Argument::Bool(*flag),
        Arg::Bools(all) => Argument::Bools(all),
        Arg::Text(text) => Argument::Text(text),
        Arg::Type(dtype) => Argument::Type(kind(*dtype)),
        Arg::Strided => Argument::Strided,
        // libtorch's numbers of its memory formats.
        Arg::Format(Format::Contiguous) => Argument::MemoryFormat(0),
        Arg::Format(Format::Preserve) => Argument::MemoryFormat(1),
        Arg::Format(Format::ChannelsLast) => Argument::MemoryFormat(2),
        Arg::Device => Argument::Device,
        _ => Argument::None,
    }
}

/// The device of a pass: that of any of its values.
fn device_of(memory: &Memory) -> Device {
    memory.iter().flatten().next().map_or(Device::Cpu, Tensor::device)
}

/// tch's name of an element type. Graphs have no others.
pub(super) fn kind(dtype: TensorType) -> Kind {
    match dtype {
        TensorType::Bool => Kind::Bool,
        TensorType::U8 => Kind::Uint8,
        TensorType::I8 => Kind::Int8,
        TensorType::I16 | TensorType::U16 => Kind::Int16,
        TensorType::F16 => Kind::Half,
        TensorType::BF16 => Kind::BFloat16,
        TensorType::I32 | TensorType::U32 => Kind::Int,
        TensorType::F32 => Kind::Float,
        TensorType::F64 => Kind::Double,
        TensorType::I64 | TensorType::U64 => Kind::Int64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropout_inside_recurrent_operators_is_refused_on_a_gpu_only() {
        let node = |dropout: f64, layers: i64| {
            let (dropout, layers) = (Arg::Float(Number(dropout)), Arg::Int(Size::Fixed(layers)));
            let args = [("dropout", dropout), ("num_layers", layers), ("train", Arg::Bool(true))];
            let args = args.map(|(name, arg)| (name.to_owned(), arg)).to_vec();
            Node { op: "lstm.input".to_owned(), args, results: 3, modules: Vec::new(), no_grad: false }
        };
        let draws = |node: Node| matches!(method(&node, &mut Slots::default()), Ok(Method::Seeded));
        assert!(draws(node(0.1, 2)));
        assert!(!draws(node(0.0, 2)) && !draws(node(0.1, 1)), "no dropout, or no layer after it");
        assert!(refuse_unseeded_dropout(Device::Cuda(0)).unwrap_err().contains("expected dropout=0"));
        assert!(refuse_unseeded_dropout(Device::Cpu).is_ok());
    }
}
