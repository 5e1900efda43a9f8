//! A graph of tensor operators: values, nodes and arguments.
//!
//! Values are numbered: the inputs of the model first, then parameters and buffers, then constants, then the results of
//! the nodes in their order. So a value's number says whether it exists when a node runs.

use super::Pt2Error;
use crate::weights::TensorType;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The number of a value.
pub type ValueId = u32;

/// A size, a stride or another integer that may depend on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Size {
    /// Always the same.
    Fixed(i64),
    /// The first number times the rows of the micro-batch, plus the second.
    Rows(i64, i64),
}

impl Size {
    /// The number of rows itself.
    pub const BATCH: Size = Size::Rows(1, 0);

    /// The size for this number of rows; `None` if it does not fit 64 bits.
    pub fn at(self, rows: i64) -> Option<i64> {
        match self {
            Size::Fixed(size) => Some(size),
            Size::Rows(factor, plus) => factor.checked_mul(rows)?.checked_add(plus),
        }
    }
}

/// An argument of an operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arg {
    /// `None`.
    None,
    /// A tensor.
    Tensor(ValueId),
    /// A list of tensors, some of which may be absent.
    Tensors(Vec<Option<ValueId>>),
    /// An integer.
    Int(Size),
    /// A list of integers.
    Ints(Vec<Size>),
    /// A number; one that is not finite is a word.
    Float(Number),
    /// A list of numbers.
    Floats(Vec<Number>),
    /// A truth value.
    Bool(bool),
    /// A list of truth values.
    Bools(Vec<bool>),
    /// A text, such as a rounding mode.
    Text(String),
    /// An element type.
    Type(TensorType),
    /// A memory format.
    Format(Format),
    /// The strided layout, the only one that is supported.
    Strided,
    /// The device of the worker, whatever device the model was exported on.
    Device,
}

/// A floating-point number. JSON has no infinities, so those are words.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Number(pub f64);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Finite(f64),
    Other(NotFinite),
}

#[derive(Serialize, Deserialize)]
enum NotFinite {
    #[serde(rename = "Infinity")]
    Infinity,
    #[serde(rename = "-Infinity")]
    NegativeInfinity,
    #[serde(rename = "NaN")]
    NaN,
}

impl From<Written> for Number {
    fn from(written: Written) -> Self {
        Number(match written {
            Written::Finite(number) => number,
            Written::Other(NotFinite::Infinity) => f64::INFINITY,
            Written::Other(NotFinite::NegativeInfinity) => f64::NEG_INFINITY,
            Written::Other(NotFinite::NaN) => f64::NAN,
        })
    }
}

impl From<Number> for Written {
    fn from(Number(number): Number) -> Self {
        match number {
            number if number.is_finite() => Written::Finite(number),
            number if number.is_nan() => Written::Other(NotFinite::NaN),
            number if number > 0.0 => Written::Other(NotFinite::Infinity),
            _ => Written::Other(NotFinite::NegativeInfinity),
        }
    }
}

/// A memory format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// The last dimension varies fastest.
    Contiguous,
    /// That of the input.
    Preserve,
    /// The channels vary fastest.
    ChannelsLast,
}

/// Type and dimensions of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValueInfo {
    /// The element type.
    #[serde(rename = "type")]
    pub dtype: TensorType,
    /// The size of each dimension.
    pub dims: Vec<Size>,
}

impl ValueInfo {
    /// The dimensions after the first, if the first is the batch and the others do not depend on it.
    pub fn sample_dims(&self) -> Option<Vec<i64>> {
        let (first, rest) = self.dims.split_first()?;
        let fixed = |size: &Size| match size {
            Size::Fixed(size) => Some(*size),
            Size::Rows(..) => None,
        };
        (*first == Size::BATCH).then(|| rest.iter().map(fixed).collect()).flatten()
    }

    /// The dimensions, if none depends on the batch.
    pub fn fixed_dims(&self) -> Option<Vec<i64>> {
        self.dims.iter().map(|size| if let Size::Fixed(size) = size { Some(*size) } else { None }).collect()
    }

    /// Whether the tensor can have a gradient.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, TensorType::F16 | TensorType::BF16 | TensorType::F32 | TensorType::F64)
    }
}

/// A parameter or buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Its name in the module's state dict.
    pub name: String,
    /// Whether it is trained.
    pub trained: bool,
    /// The other names of a tied parameter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tied: Vec<String>,
}

/// A tensor that is part of the program, such as a table of positions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Constant {
    /// Its elements in row-major, little-endian order, in hexadecimal.
    pub hex: String,
}

/// One call of an operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// The operator and its overload in the namespace `aten`, such as `conv2d.default`.
    pub op: String,
    /// The arguments by name. Those that are missing have the operator's default.
    pub args: Vec<(String, Arg)>,
    /// How many values it results in; lists count each element.
    pub results: u32,
    /// The modules whose calls the node is part of, from the outermost to the innermost.
    pub modules: Vec<u32>,
    /// Whether the user's module computes this without gradients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_grad: bool,
}

impl Node {
    /// The argument of this name.
    pub fn arg(&self, name: &str) -> Option<&Arg> {
        self.args.iter().find(|(known, _)| known == name).map(|(_, arg)| arg)
    }

    /// The tensor under this name.
    pub fn tensor(&self, name: &str) -> Option<ValueId> {
        match self.arg(name) {
            Some(Arg::Tensor(value)) => Some(*value),
            _ => None,
        }
    }

    /// Whether a flag of this name is set.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.arg(name), Some(Arg::Bool(true)))
    }

    /// The number under this name.
    pub fn number(&self, name: &str) -> Option<f64> {
        match self.arg(name) {
            Some(Arg::Float(number)) => Some(number.0),
            Some(Arg::Int(Size::Fixed(number))) => Some(*number as f64),
            _ => None,
        }
    }

    /// Every tensor among the arguments, in order.
    pub fn tensors(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.args
            .iter()
            .flat_map(|(_, arg)| match arg {
                Arg::Tensor(value) => std::slice::from_ref(value).iter().copied().map(Some).collect(),
                Arg::Tensors(values) => values.clone(),
                _ => Vec::new(),
            })
            .flatten()
    }
}

/// The fields of a [`Graph`], unchecked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphParts {
    /// The number of input tensors.
    pub inputs: u32,
    /// Parameters and buffers.
    pub states: Vec<State>,
    /// Tensors that are part of the program.
    pub constants: Vec<Constant>,
    /// The paths of the modules. A module that is called again has `@1`, `@2`, … after its path.
    pub modules: Vec<String>,
    /// The nodes, in the order in which they run.
    pub nodes: Vec<Node>,
    /// Types and dimensions of all values.
    pub values: Vec<ValueInfo>,
    /// The operators outside of [the list](super::operators) that the nodes use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra: Vec<String>,
    /// The output of the model.
    pub output: ValueId,
}

/// A graph that has been checked: every value is defined before its use, every operator is on the list or named as an extra one,
/// and nothing is written that must not be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "GraphParts", into = "GraphParts")]
pub struct Graph {
    parts: GraphParts,
}

impl TryFrom<GraphParts> for Graph {
    type Error = Pt2Error;

    fn try_from(parts: GraphParts) -> Result<Self, Pt2Error> {
        super::check::check(&parts)?;
        Ok(Graph { parts })
    }
}

impl From<Graph> for GraphParts {
    fn from(graph: Graph) -> Self {
        graph.parts
    }
}

impl std::ops::Deref for Graph {
    type Target = GraphParts;

    fn deref(&self) -> &GraphParts {
        &self.parts
    }
}

impl GraphParts {
    /// The value of a parameter or buffer.
    pub fn state_value(&self, state: usize) -> ValueId {
        self.inputs + state as u32
    }

    /// The parameter or buffer that a value is.
    pub fn state_of(&self, value: ValueId) -> Option<usize> {
        let index = value.checked_sub(self.inputs)? as usize;
        (index < self.states.len()).then_some(index)
    }

    /// The constant that a value is.
    pub fn constant_of(&self, value: ValueId) -> Option<usize> {
        let index = (value.checked_sub(self.inputs)? as usize).checked_sub(self.states.len())?;
        (index < self.constants.len()).then_some(index)
    }

    /// The first value that is a result of a node.
    pub fn first_result(&self) -> ValueId {
        self.inputs + (self.states.len() + self.constants.len()) as u32
    }

    /// The results of every node, in order.
    pub fn results(&self) -> Vec<Range<ValueId>> {
        let mut next = self.first_result();
        let each = |node: &Node| {
            let start = next;
            next = next.saturating_add(node.results);
            start..next
        };
        self.nodes.iter().map(each).collect()
    }

    /// Where a node stands in the user's module, for people.
    pub fn place(&self, node: &Node) -> String {
        match node.modules.last().and_then(|&module| self.modules.get(module as usize)) {
            Some(path) if !path.is_empty() => format!("`{path}`"),
            _ => "the model itself".to_owned(),
        }
    }

    /// The bytes of a constant; `None` if they are not hexadecimal.
    pub fn constant_bytes(&self, constant: usize) -> Option<Vec<u8>> {
        let hex = self.constants.get(constant)?.hex.as_bytes();
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let pair = |pair: &[u8]| match pair {
            [high, low] => Some((digit(*high)? * 16 + digit(*low)?) as u8),
            _ => None,
        };
        hex.chunks(2).map(pair).collect()
    }
}
