//! One node of a graph, ready to be called: its operator is found, its arguments have their positions, and its values have
//! slots in the memory of a pass.

use crate::engine::{self, Argument, Call, Layout, Operator};
use crate::failure::Fault;
use crate::model::layer::Context;
use crate::runtime::deferred_batch_norm::NormTensors;
use distgpipe_core::pt2::graph::{Format, Number};
use distgpipe_core::pt2::operators;
use distgpipe_core::pt2::{Arg, Graph, Node, Size, ValueId};
use distgpipe_core::weights::TensorType;
use std::collections::HashMap;
use tch::{Device, Kind, Tensor};

/// A value of a pass. A layer lends its parameters, because handles of their own would cost as much as small operators.
pub(super) enum Value<'a> {
    Owned(Tensor),
    Lent(&'a Tensor),
}

impl std::ops::Deref for Value<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Value::Owned(tensor) => tensor,
            Value::Lent(tensor) => tensor,
        }
    }
}

/// The values of a pass, by slot.
pub(super) type Memory<'a> = Vec<Option<Value<'a>>>;

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

/// What is the same for all nodes of a pass.
#[derive(Clone, Copy)]
pub(super) struct Pass {
    /// The number of rows of the micro-batch.
    pub(super) rows: i64,
    pub(super) device: Device,
}

/// An argument that depends on the pass. Values have slots.
enum Template {
    Value(usize),
    Values(Vec<Option<usize>>),
    Int(Size),
    Ints(Vec<Size>),
    Device,
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
    Cloned(Call),
    /// Dropout of elements or of channels, with a mask of the run's random streams.
    Dropout { channels: bool, in_place: bool, p: f64 },
    /// Random zeros and ones; their mean in evaluation.
    Bernoulli { p: f64 },
    /// A batch norm whose statistics are committed once per batch.
    BatchNorm(Box<BatchNorm>),
    /// A 2-D convolution.
    Conv2d(Box<Conv2d>),
    /// An average over the whole image.
    GlobalPool,
}

/// The constants of a 2-D convolution, which is not called by name: converting its lists would take libtorch longer than all that a
/// hand-written layer does around the call.
struct Conv2d {
    stride: [i64; 2],
    padding: [i64; 2],
    dilation: [i64; 2],
    groups: i64,
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
    call: Call,
    /// The same in evaluation, where that differs.
    evaluation: Option<Call>,
    /// The arguments that depend on the pass, with their positions.
    arguments: Vec<(usize, Template)>,
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
        let (mut fixed, mut arguments) = (Vec::new(), Vec::new());
        let norm = BatchNorm::of(node, slots);
        for (name, argument) in &node.args {
            let name = renamed.filter(|(old, _)| old == name).map_or(&name[..], |(_, new)| new);
            match (operator.position(name), template(argument, slots)) {
                (Some(position), Some(template)) => arguments.push((position, template)),
                (Some(position), None) => fixed.push((position, constant(argument))),
                // The counter of a batch norm is no argument of the operator.
                (None, _) if norm.is_some() => {}
                (None, _) => return Err(format!("{place}: libtorch's operator has no argument `{name}`")),
            }
        }
        let given: Vec<usize> = arguments.iter().map(|(position, _)| *position).collect();
        // A call with other arguments of these names.
        let prepare = |replaced: &[(&str, Arg)]| {
            let mut fixed = fixed.clone();
            for (name, argument) in replaced {
                if let Some(position) = operator.position(name) {
                    fixed.retain(|(other, _)| *other != position);
                    fixed.push((position, constant(argument)));
                }
            }
            operator.prepare(&fixed, &given).map_err(|why| format!("{place}: {why}"))
        };
        let evaluation = match &evaluation(node)[..] {
            [] => None,
            replaced => Some(prepare(replaced)?),
        };
        let call = prepare(&[])?;
        let method = norm.map_or_else(|| method(node), |norm| Ok(Method::BatchNorm(Box::new(norm))));
        let method = method.map_err(|why| format!("{place}: {why}"))?;
        let results = (0..node.results).map(|result| slots.of(first_result + result)).collect();
        Ok(Step {
            node: index as u64,
            place,
            method,
            call,
            evaluation,
            arguments,
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

    /// Computes the node.
    pub(super) fn run(&self, memory: &mut Memory<'_>, pass: Pass, context: &mut Context<'_>) -> Result<(), Fault> {
        let results = match self.no_grad {
            true => tch::no_grad(|| self.compute(memory, pass, context)),
            false => self.compute(memory, pass, context),
        };
        let results = results.map_err(|fault| match fault {
            Fault::Engine(error) => {
                Fault::layer(context.layer_name, format!("{}: {}", self.place, Fault::Engine(error)))
            }
            other => other,
        })?;
        for (slot, result) in self.results.iter().zip(results) {
            memory[*slot] = Some(Value::Owned(result));
        }
        for slot in &self.last_uses {
            memory[*slot] = None;
        }
        Ok(())
    }

    fn compute(&self, memory: &Memory<'_>, pass: Pass, context: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
        match &self.method {
            Method::Dropout { channels, in_place, p } => {
                let x = self.argument(memory, 0)?;
                let mask = context.dropout_mask(self.node, x, *p, *channels)?;
                Ok(vec![match mask {
                    None => x.shallow_clone(),
                    Some(mask) if *in_place => x.shallow_clone().f_mul_(&mask)?,
                    Some(mask) => x.f_mul(&mask)?,
                }])
            }
            Method::Bernoulli { p } => {
                let mut x = self.argument(memory, 0)?.shallow_clone();
                match context.training() {
                    true => context.stream_of(self.node).bernoulli(&mut x, *p)?,
                    false => drop(x.f_fill_(*p)?),
                }
                Ok(vec![x])
            }
            Method::BatchNorm(norm) => Ok(vec![norm.run(self, memory, context)?]),
            Method::Zeroed => {
                let allocated = self.call(memory, pass, context)?;
                Ok(allocated.into_iter().map(|mut tensor| tensor.f_zero_()).collect::<Result<_, _>>()?)
            }
            Method::Cloned(clone) => {
                let mut results = self.call(memory, pass, context)?;
                for result in &mut results {
                    let copies = clone.run(&[(0, Argument::Tensor(result))], pass.device, 1);
                    *result = copies.map_err(Fault::engine)?.remove(0);
                }
                Ok(results)
            }
            Method::Seeded => {
                if self.recurrent && context.training() {
                    refuse_unseeded_dropout(pass.device)
                        .map_err(|why| Fault::layer(context.layer_name, format!("{}: {why}", self.place)))?;
                }
                let (arguments, seed) = (self.arguments(memory, pass)?, context.stream_of(self.node).seed());
                engine::seeded(pass.device, seed, || self.run_operator(&arguments, pass, context))
                    .map_err(Fault::engine)
            }
            Method::Call => self.call(memory, pass, context),
            Method::Conv2d(conv) => {
                let has_bias = self.arguments.iter().any(|(position, _)| *position == 2);
                let bias = has_bias.then(|| self.argument(memory, 2)).transpose()?;
                Ok(vec![conv.run(self.argument(memory, 0)?, self.argument(memory, 1)?, bias)?])
            }
            Method::GlobalPool => {
                let x = self.argument(memory, 0)?;
                if x.dim() == 4 && engine::layout(x) == Some(Layout::ChannelsLast) {
                    let size = [x.size()[2], x.size()[3]];
                    return Ok(vec![x.f_avg_pool2d(size, size, [0, 0], false, true, None::<i64>)?]);
                }
                self.call(memory, pass, context)
            }
        }
    }

    fn call(&self, memory: &Memory<'_>, pass: Pass, context: &Context<'_>) -> Result<Vec<Tensor>, Fault> {
        self.run_operator(&self.arguments(memory, pass)?, pass, context).map_err(Fault::engine)
    }

    /// Calls the operator as passes of this kind do. A recomputation must repeat the bits of the pass before, which recorded nothing
    /// for a backward pass.
    fn run_operator(
        &self,
        arguments: &[(usize, Argument<'_>)],
        pass: Pass,
        context: &Context<'_>,
    ) -> Result<Vec<Tensor>, String> {
        let training = context.training();
        let call = self.evaluation.as_ref().filter(|_| !training).unwrap_or(&self.call);
        let run = || call.run(arguments, pass.device, self.results.len());
        if self.recurrent && training && !self.no_grad {
            engine::as_with_grad(run)
        } else {
            run()
        }
    }

    /// The tensor at a position of the operator's arguments.
    fn argument<'a>(&self, memory: &'a Memory<'_>, position: usize) -> Result<&'a Tensor, Fault> {
        match self.arguments.iter().find(|(other, _)| *other == position) {
            Some((_, Template::Value(slot))) => self.value(memory, *slot),
            _ => Err(Fault::internal(format!("a tensor as argument {position}"), self.place.clone())),
        }
    }

    fn value<'a>(&self, memory: &'a Memory<'_>, slot: usize) -> Result<&'a Tensor, Fault> {
        let value = memory.get(slot).and_then(Option::as_deref);
        value.ok_or_else(|| Fault::internal("a value before its use", self.place.clone()))
    }

    /// The arguments that depend on the pass.
    fn arguments<'a>(&self, memory: &'a Memory<'_>, pass: Pass) -> Result<Vec<(usize, Argument<'a>)>, Fault> {
        let size = |size: &Size| {
            size.at(pass.rows).ok_or_else(|| Fault::internal("a size of 64 bits", format!("{}: {size:?}", self.place)))
        };
        let mut all = Vec::with_capacity(self.arguments.len());
        for (position, template) in &self.arguments {
            let argument = match template {
                Template::Value(slot) => Argument::Tensor(self.value(memory, *slot)?),
                Template::Values(slots) => {
                    let one = |slot: &Option<usize>| slot.map(|slot| self.value(memory, slot)).transpose();
                    Argument::Tensors(slots.iter().map(one).collect::<Result<_, _>>()?)
                }
                Template::Int(number) => Argument::Int(size(number)?),
                Template::Ints(all) => Argument::Ints(all.iter().map(size).collect::<Result<_, _>>()?),
                Template::Device => Argument::Device,
            };
            all.push((*position, argument));
        }
        Ok(all)
    }
}

impl Conv2d {
    fn of(node: &Node) -> Result<Self, String> {
        let pair = |name: &str, default: i64| match node.arg(name) {
            None => Ok([default; 2]),
            Some(Arg::Int(Size::Fixed(both))) => Ok([*both; 2]),
            Some(Arg::Ints(all)) => match all[..] {
                [Size::Fixed(both)] => Ok([both; 2]),
                [Size::Fixed(down), Size::Fixed(across)] => Ok([down, across]),
                _ => Err(format!("expected one or two integers as `{name}`, got {all:?}")),
            },
            Some(other) => Err(format!("expected one or two integers as `{name}`, got {other:?}")),
        };
        if !matches!(node.arg("bias"), None | Some(Arg::None | Arg::Tensor(_))) {
            return Err("expected a tensor or none as `bias`, got another argument".to_owned());
        }
        let groups = match node.arg("groups") {
            None => 1,
            Some(Arg::Int(Size::Fixed(groups))) => *groups,
            Some(other) => return Err(format!("expected an integer as `groups`, got {other:?}")),
        };
        Ok(Conv2d { stride: pair("stride", 1)?, padding: pair("padding", 0)?, dilation: pair("dilation", 1)?, groups })
    }

    fn run(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, Fault> {
        let convolve = |x: &Tensor, stride| x.f_conv2d(weight, bias, stride, self.padding, self.dilation, self.groups);
        // The work-around that `model::blocks::Conv2d` explains: oneDNN writes out of bounds in the weight gradient of a strided
        // 1×1 convolution of few channels on some processors.
        let [down, across] = self.stride;
        let at_risk = down.max(across) > 1 && self.padding == [0, 0] && x.device() == Device::Cpu;
        if at_risk && x.dim() == 4 && x.size()[1] < 8 && weight.size().get(2..) == Some(&[1, 1]) {
            return Ok(convolve(&x.f_slice(2, None, None, down)?.f_slice(3, None, None, across)?, [1, 1])?);
        }
        Ok(convolve(x, self.stride)?)
    }
}

impl BatchNorm {
    /// The batch norm that a node is, if it is one in training that has running statistics.
    fn of(node: &Node, slots: &mut Slots) -> Option<Self> {
        if node.op != "batch_norm.default" || !node.flag("training") {
            return None;
        }
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

    fn run(&self, step: &Step, memory: &Memory<'_>, context: &mut Context<'_>) -> Result<Tensor, Fault> {
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

/// How a node is computed that is no batch norm.
fn method(node: &Node) -> Result<Method, String> {
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
        "empty.memory_format" | "empty_like.default" | "new_empty.default" => Method::Zeroed,
        // With one operand it may be a permutation of it.
        "einsum.default" if node.tensors().count() < 2 => {
            Method::Cloned(Operator::find("clone.default")?.prepare(&[], &[0])?)
        }
        "conv2d.default" => Method::Conv2d(Box::new(Conv2d::of(node)?)),
        // libtorch's adaptive pool has gradients in another layout than a channels-last image; see `model/zoo/classifier.rs`.
        "adaptive_avg_pool2d.default" if node.arg("output_size") == Some(&Arg::Ints(vec![Size::Fixed(1); 2])) => {
            Method::GlobalPool
        }
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

/// An argument that depends on the pass; `None` for one that is always the same.
fn template(argument: &Arg, slots: &mut Slots) -> Option<Template> {
    let varies = |size: &Size| matches!(size, Size::Rows(..));
    Some(match argument {
        Arg::Tensor(value) => Template::Value(slots.of(*value)),
        Arg::Tensors(all) => Template::Values(all.iter().map(|value| value.map(|value| slots.of(value))).collect()),
        Arg::Int(size) if varies(size) => Template::Int(*size),
        Arg::Ints(all) if all.iter().any(varies) => Template::Ints(all.clone()),
        Arg::Device => Template::Device,
        _ => return None,
    })
}

/// An argument that has no [`template`].
fn constant(argument: &Arg) -> Argument<'_> {
    let fixed = |size: &Size| size.at(0).unwrap_or_default();
    match argument {
        Arg::Int(size) => Argument::Int(fixed(size)),
        Arg::Ints(all) => Argument::Ints(all.iter().map(fixed).collect()),
        Arg::Float(number) => Argument::Float(number.0),
        Arg::Floats(all) => Argument::Floats(all.iter().map(|number| number.0).collect()),
        Arg::Bool(flag) => Argument::Bool(*flag),
        Arg::Bools(all) => Argument::Bools(all),
        Arg::Text(text) => Argument::Text(text),
        Arg::Type(dtype) => Argument::Type(kind(*dtype)),
        Arg::Strided => Argument::Strided,
        // libtorch's numbers of its memory formats.
        Arg::Format(Format::Contiguous) => Argument::MemoryFormat(0),
        Arg::Format(Format::Preserve) => Argument::MemoryFormat(1),
        Arg::Format(Format::ChannelsLast) => Argument::MemoryFormat(2),
        Arg::None | Arg::Tensor(_) | Arg::Tensors(_) | Arg::Device => Argument::None,
    }
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
        let draws = |node: Node| matches!(method(&node), Ok(Method::Seeded));
        assert!(draws(node(0.1, 2)));
        assert!(!draws(node(0.0, 2)) && !draws(node(0.1, 1)), "no dropout, or no layer after it");
        assert!(refuse_unseeded_dropout(Device::Cuda(0)).unwrap_err().contains("expected dropout=0"));
        assert!(refuse_unseeded_dropout(Device::Cpu).is_ok());
    }
}
