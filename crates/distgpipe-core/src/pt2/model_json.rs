//! PyTorch's JSON form of an exported program, turned into a [`Graph`].
//!
//! The conversion resolves names to numbers and sizes to [`Size`]s, drops nodes that only compute sizes or assert
//! something, inlines subgraphs that switch gradients off, and removes the batch counters of batch norms, which the
//! runtime keeps itself.

use super::archive::{Contents, StoredTensor, GRAPH};
use super::expression;
use super::graph::{Arg, Constant, Format, GraphParts, Node, Number, Size, State, ValueId, ValueInfo};
use super::{operators, Graph, Pt2Error, EXPORT_AGAIN, TORCH_VERSION};
use crate::weights::TensorType;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The version of the format that is read.
const SCHEMA_MAJOR: u32 = 8;
/// How deep subgraphs may be nested.
const NESTING_MAX: usize = 8;
/// A subgraph that runs with or without gradients.
const SET_GRAD: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";

const LOGITS: &str = "wrap the model in a module whose forward takes tensors and returns one tensor";
const BATCH: &str = "export with the first dimension of every input dynamic, and no other";
const MUTATION: &str = "compute the new value outside of forward; only batch norms may change buffers";

#[derive(Deserialize)]
struct Program {
    graph_module: GraphModule,
    schema_version: SchemaVersion,
    torch_version: String,
}

#[derive(Deserialize)]
struct SchemaVersion {
    major: u32,
}

#[derive(Deserialize)]
struct GraphModule {
    graph: JsonGraph,
    signature: Signature,
}

#[derive(Deserialize)]
struct JsonGraph {
    inputs: Vec<Argument>,
    outputs: Vec<Argument>,
    nodes: Vec<JsonNode>,
    tensor_values: HashMap<String, TensorMeta>,
    sym_int_values: HashMap<String, SymInt>,
}

#[derive(Deserialize)]
struct Signature {
    input_specs: Vec<InputSpec>,
    output_specs: Vec<OutputSpec>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum InputSpec {
    UserInput {
        arg: Argument,
    },
    Parameter {
        arg: Named,
        parameter_name: String,
    },
    Buffer {
        arg: Named,
        buffer_name: String,
        persistent: Option<bool>,
    },
    TensorConstant {
        arg: Named,
        tensor_constant_name: String,
    },
    #[serde(untagged)]
    Other(BTreeMap<String, IgnoredAny>),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum OutputSpec {
    UserOutput {
        arg: Argument,
    },
    #[serde(untagged)]
    Other(BTreeMap<String, IgnoredAny>),
}

#[derive(Deserialize)]
struct JsonNode {
    target: String,
    inputs: Vec<NamedArgument>,
    outputs: Vec<Argument>,
    #[serde(default)]
    metadata: Option<HashMap<String, String>>,
}

#[derive(Deserialize)]
struct NamedArgument {
    name: String,
    arg: Argument,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Argument {
    AsNone(IgnoredAny),
    AsTensor(Named),
    AsTensors(Vec<Named>),
    AsInt(i64),
    AsInts(Vec<i64>),
    AsFloat(Number),
    AsFloats(Vec<Number>),
    AsString(String),
    AsBool(bool),
    AsBools(Vec<bool>),
    AsSymInt(SymIntArgument),
    AsSymInts(Vec<SymIntArgument>),
    AsScalarType(u32),
    AsMemoryFormat(u32),
    AsLayout(u32),
    AsDevice(IgnoredAny),
    AsOptionalTensor(OptionalTensor),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsGraph(Box<NamedGraph>),
    #[serde(untagged)]
    Other(BTreeMap<String, IgnoredAny>),
}

#[derive(Deserialize)]
struct NamedGraph {
    graph: JsonGraph,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum OptionalTensor {
    AsTensor(Named),
    AsNone(IgnoredAny),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum SymIntArgument {
    AsName(String),
    AsInt(i64),
}

/// A size: a number, or an expression.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SymInt {
    AsInt(i64),
    AsExpr { expr_str: String },
}

/// The description of a tensor.
#[derive(Deserialize)]
pub(super) struct TensorMeta {
    dtype: u32,
    pub(super) sizes: Vec<SymInt>,
    #[serde(default)]
    pub(super) requires_grad: bool,
    layout: u32,
    #[serde(default)]
    pub(super) strides: Vec<SymInt>,
    #[serde(default = "zero")]
    pub(super) storage_offset: SymInt,
}

fn zero() -> SymInt {
    SymInt::AsInt(0)
}

/// PyTorch's number of the strided layout.
const STRIDED: u32 = 7;

impl TensorMeta {
    pub(super) fn tensor_type(&self, place: &str) -> Result<TensorType, Pt2Error> {
        if self.layout != STRIDED {
            let got = format!("layout {}", self.layout);
            return Err(Pt2Error::model(place, "a dense tensor", got, "use dense tensors"));
        }
        tensor_type(self.dtype, place)
    }
}

/// The element type of PyTorch's number for it in archives.
fn tensor_type(number: u32, place: &str) -> Result<TensorType, Pt2Error> {
    Ok(match number {
        1 => TensorType::U8,
        2 => TensorType::I8,
        3 => TensorType::I16,
        4 => TensorType::I32,
        5 => TensorType::I64,
        6 => TensorType::F16,
        7 => TensorType::F32,
        8 => TensorType::F64,
        12 => TensorType::Bool,
        13 => TensorType::BF16,
        _ => {
            let got = format!("PyTorch's element type {number}");
            return Err(Pt2Error::model(place, "floats, integers or booleans", got, "convert it to one of those"));
        }
    })
}

/// The fixed size, if it is one.
pub(super) fn size_of(size: &SymInt) -> Option<i64> {
    match size {
        SymInt::AsInt(size) => Some(*size),
        SymInt::AsExpr { .. } => None,
    }
}

/// Parses a part of the archive.
pub(super) fn parse<T: DeserializeOwned>(part: &str, bytes: &[u8]) -> Result<T, Pt2Error> {
    serde_json::from_slice(bytes)
        .map_err(|e| Pt2Error::part(part, "JSON as PyTorch 2.11 writes it", e.to_string(), EXPORT_AGAIN))
}

/// Reads and checks the graph.
pub(super) fn read(contents: &Contents, extra: &[String]) -> Result<Graph, Pt2Error> {
    let program: Program = parse(GRAPH, &contents.graph)?;
    if program.schema_version.major != SCHEMA_MAJOR || !program.torch_version.starts_with(TORCH_VERSION) {
        let got = format!("PyTorch {}, format {}", program.torch_version, program.schema_version.major);
        let expected = format!("PyTorch {TORCH_VERSION}x, format {SCHEMA_MAJOR}");
        let remedy = "export the model with PyTorch 2.11, whose operators this program calls";
        return Err(Pt2Error::part(GRAPH, expected, got, remedy));
    }
    let GraphModule { graph, signature } = program.graph_module;
    let batch = batch_symbol(&graph, &signature)?;
    let mut conversion = Conversion { batch, ..Conversion::default() };
    let mut names = HashMap::new();
    conversion.add_inputs(contents, &graph, &signature, &mut names)?;
    conversion.add_nodes(&graph, &mut names, false, 0)?;
    conversion.parts.output = conversion.output(&graph, &signature, &names)?;
    conversion.take_over_counters()?;
    let used: HashSet<&String> = conversion.parts.nodes.iter().map(|node| &node.op).collect();
    let extra = extra.iter().filter(|&op| used.contains(op) && operators::effect(op).is_none());
    conversion.parts.extra = extra.cloned().collect();
    Graph::try_from(conversion.parts)
}

fn user_inputs(signature: &Signature) -> impl Iterator<Item = Result<&str, Pt2Error>> {
    signature.input_specs.iter().filter_map(|spec| match spec {
        InputSpec::UserInput { arg: Argument::AsTensor(Named { name }) } => Some(Ok(&name[..])),
        InputSpec::UserInput { .. } => {
            Some(Err(Pt2Error::model("the model", "tensors as inputs", "another kind of input", LOGITS)))
        }
        _ => None,
    })
}

/// The symbol of the first dimension of the inputs.
fn batch_symbol(graph: &JsonGraph, signature: &Signature) -> Result<String, Pt2Error> {
    let first = user_inputs(signature).next().transpose()?;
    let size = first.and_then(|name| graph.tensor_values.get(name)).and_then(|meta| meta.sizes.first());
    let expression = match size {
        Some(SymInt::AsExpr { expr_str }) => expression::parse(expr_str),
        _ => None,
    };
    match expression {
        Some(found) if (found.factor, found.plus) == (1, 0) => Ok(found.symbol),
        _ => Err(Pt2Error::model("the model", "a dynamic batch as first dimension", "a fixed size", BATCH)),
    }
}

/// What two names of one tensor have in common: file, offset, dimensions, strides and element type.
type Place<'a> = (&'a str, u64, &'a [u64], &'a [u64], TensorType);

fn place_of(tensor: &StoredTensor) -> Place<'_> {
    (&tensor.path, tensor.offset, &tensor.dims, &tensor.strides, tensor.dtype)
}

/// The values that names stand for in one graph.
type Names = HashMap<String, ValueId>;

#[derive(Default)]
struct Conversion {
    parts: GraphParts,
    batch: String,
    /// The number of each module, by PyTorch's key.
    modules: HashMap<String, u32>,
    /// The modules of the node before.
    stack: Vec<u32>,
}

impl Conversion {
    fn info(&self, name: &str, meta: &TensorMeta) -> Result<ValueInfo, Pt2Error> {
        let place = format!("`{name}`");
        let dtype = meta.tensor_type(&place)?;
        let dims = meta.sizes.iter().map(|size| self.size(&place, size)).collect::<Result<_, _>>()?;
        Ok(ValueInfo { dtype, dims })
    }

    fn size(&self, place: &str, size: &SymInt) -> Result<Size, Pt2Error> {
        match size {
            SymInt::AsInt(size) => Ok(Size::Fixed(*size)),
            SymInt::AsExpr { expr_str } => {
                let size = expression::parse(expr_str).and_then(|expression| expression.size(&self.batch));
                size.ok_or_else(|| {
                    let expected = "sizes that are fixed or a multiple of the batch";
                    Pt2Error::model(place, expected, expr_str.clone(), BATCH)
                })
            }
        }
    }

    fn add_inputs(
        &mut self,
        contents: &Contents,
        graph: &JsonGraph,
        signature: &Signature,
        names: &mut Names,
    ) -> Result<(), Pt2Error> {
        for name in user_inputs(signature) {
            let name = name?;
            let meta = graph.tensor_values.get(name).ok_or_else(|| undescribed(name))?;
            let info = self.info(name, meta)?;
            self.define(names, name, info)?;
            self.parts.inputs += 1;
        }
        self.add_states(contents, signature, names)?;
        self.add_constants(contents, signature, names)
    }

    fn add_states(&mut self, contents: &Contents, signature: &Signature, names: &mut Names) -> Result<(), Pt2Error> {
        let stored: HashMap<&str, _> = contents.weights.iter().map(|tensor| (&tensor.name[..], tensor)).collect();
        // Tied parameters share the file and the place in it.
        let mut names_at: HashMap<Place<'_>, Vec<&str>> = HashMap::new();
        for tensor in &contents.weights {
            names_at.entry(place_of(tensor)).or_default().push(&tensor.name);
        }
        let mut known: HashMap<Place<'_>, ValueId> = HashMap::new();
        for spec in &signature.input_specs {
            let (arg, name) = match spec {
                InputSpec::Parameter { arg, parameter_name } => (arg, parameter_name),
                InputSpec::Buffer { arg, buffer_name, persistent } if *persistent != Some(false) => (arg, buffer_name),
                _ => continue,
            };
            let tensor = *stored.get(&name[..]).ok_or_else(|| undescribed(name))?;
            let place = place_of(tensor);
            if let Some(&value) = known.get(&place) {
                names.insert(arg.name.clone(), value);
                continue;
            }
            let dims = tensor.dims.iter().map(|&dim| Size::Fixed(i64::try_from(dim).unwrap_or(i64::MAX))).collect();
            let value = self.define(names, &arg.name, ValueInfo { dtype: tensor.dtype, dims })?;
            known.insert(place, value);
            let tied = names_at[&place].iter().filter(|&other| other != name).map(|&other| other.to_owned()).collect();
            self.parts.states.push(State { name: name.clone(), trained: tensor.trained, tied });
        }
        Ok(())
    }

    fn add_constants(&mut self, contents: &Contents, signature: &Signature, names: &mut Names) -> Result<(), Pt2Error> {
        let stored: HashMap<&str, _> = contents.constants.iter().map(|pair| (&pair.0.name[..], pair)).collect();
        for spec in &signature.input_specs {
            let (arg, name) = match spec {
                InputSpec::TensorConstant { arg, tensor_constant_name } => (arg, tensor_constant_name),
                InputSpec::Buffer { arg, buffer_name, persistent: Some(false) } => (arg, buffer_name),
                InputSpec::Other(other) => {
                    let got = other.keys().next().cloned().unwrap_or_default();
                    return Err(Pt2Error::model("the model", "tensors as inputs", got, LOGITS));
                }
                _ => continue,
            };
            let (tensor, bytes) = *stored.get(&name[..]).ok_or_else(|| undescribed(name))?;
            let dims = tensor.dims.iter().map(|&dim| Size::Fixed(i64::try_from(dim).unwrap_or(i64::MAX))).collect();
            self.define(names, &arg.name, ValueInfo { dtype: tensor.dtype, dims })?;
            self.parts.constants.push(Constant { hex: bytes.iter().map(|byte| format!("{byte:02x}")).collect() });
        }
        Ok(())
    }

    fn define(&mut self, names: &mut Names, name: &str, info: ValueInfo) -> Result<ValueId, Pt2Error> {
        let value = ValueId::try_from(self.parts.values.len())
            .map_err(|_| Pt2Error::part(GRAPH, "fewer than 2^32 values", "more", EXPORT_AGAIN))?;
        self.parts.values.push(info);
        if names.insert(name.to_owned(), value).is_some() {
            return Err(Pt2Error::part(GRAPH, "each name once", format!("`{name}` twice"), EXPORT_AGAIN));
        }
        Ok(value)
    }

    fn add_nodes(&mut self, graph: &JsonGraph, names: &mut Names, no_grad: bool, depth: usize) -> Result<(), Pt2Error> {
        for node in &graph.nodes {
            self.enter_modules(node);
            if node.target == SET_GRAD {
                self.inline(node, names, depth)?;
                continue;
            }
            if is_about_sizes(node) {
                continue;
            }
            let place = self.place();
            let Some(op) = node.target.strip_prefix("torch.ops.aten.") else {
                return Err(Pt2Error::Operators {
                    refused: vec![format!("{} in {place}", super::short(&node.target))],
                });
            };
            let scope = Scope { conversion: self, graph, names, place: &place };
            let args = node.inputs.iter().map(|arg| Ok((arg.name.clone(), scope.argument(op, &arg.arg)?)));
            let args = args.collect::<Result<Vec<_>, Pt2Error>>()?;
            let before = self.parts.values.len();
            for output in &node.outputs {
                for name in result_names(output, &place)? {
                    let meta = graph.tensor_values.get(name).ok_or_else(|| undescribed(name))?;
                    let info = self.info(name, meta)?;
                    self.define(names, name, info)?;
                }
            }
            let results = (self.parts.values.len() - before) as u32;
            let modules = self.stack.clone();
            self.parts.nodes.push(Node { op: op.to_owned(), args, results, modules, no_grad });
        }
        Ok(())
    }

    /// Adds the nodes of a subgraph that runs with or without gradients.
    fn inline(&mut self, node: &JsonNode, names: &mut Names, depth: usize) -> Result<(), Pt2Error> {
        let place = self.place();
        let wrong = |got: &str| Pt2Error::model(&place[..], "a subgraph that switches gradients", got, EXPORT_AGAIN);
        let [enabled, graph, given @ ..] = &node.inputs[..] else { return Err(wrong("too few arguments")) };
        let (Argument::AsBool(enabled), Argument::AsGraph(sub)) = (&enabled.arg, &graph.arg) else {
            return Err(wrong("other arguments"));
        };
        if depth >= NESTING_MAX {
            return Err(wrong("one nested too deeply"));
        }
        let sub = &sub.graph;
        if sub.inputs.len() != given.len() || sub.outputs.len() != node.outputs.len() {
            return Err(wrong("another number of inputs or outputs"));
        }
        let mut inner = Names::new();
        for (input, given) in sub.inputs.iter().zip(given) {
            match (input, &given.arg) {
                (Argument::AsTensor(Named { name }), Argument::AsTensor(Named { name: outer })) => {
                    let value = *names.get(outer).ok_or_else(|| undefined(outer))?;
                    inner.insert(name.clone(), value);
                }
                // Sizes are known by their expressions.
                (Argument::AsSymInt(_), Argument::AsSymInt(_)) => {}
                _ => return Err(wrong("an input that is no tensor")),
            }
        }
        self.add_nodes(sub, &mut inner, !*enabled, depth + 1)?;
        for (output, outer) in sub.outputs.iter().zip(&node.outputs) {
            let (Argument::AsTensor(Named { name }), Argument::AsTensor(Named { name: outer })) = (output, outer)
            else {
                return Err(wrong("an output that is no tensor"));
            };
            let value = *inner.get(name).ok_or_else(|| undefined(name))?;
            names.insert(outer.clone(), value);
        }
        Ok(())
    }

    /// Notes the modules that a node is part of. A node that has none is part of those of the node before.
    fn enter_modules(&mut self, node: &JsonNode) {
        let text = node.metadata.as_ref().and_then(|metadata| metadata.get("nn_module_stack"));
        let Some(text) = text.filter(|text| !text.starts_with("_empty_nn_module_stack")) else { return };
        self.stack.clear();
        for module in text.split(';') {
            let mut fields = module.split(',');
            let (key, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
            let next = self.modules.len() as u32;
            let number = *self.modules.entry(key.to_owned()).or_insert_with(|| {
                // A module that is called again has a key of its own.
                let again = key.rsplit_once('@').filter(|_| !path.contains('@'));
                let path = again.map_or_else(|| path.to_owned(), |(_, call)| format!("{path}@{call}"));
                self.parts.modules.push(path);
                next
            });
            self.stack.push(number);
        }
    }

    /// Where the current node stands in the user's module.
    fn place(&self) -> String {
        let path = self.stack.last().and_then(|&module| self.parts.modules.get(module as usize));
        path.filter(|path| !path.is_empty()).map_or_else(|| "the model itself".to_owned(), |path| format!("`{path}`"))
    }

    fn output(&self, graph: &JsonGraph, signature: &Signature, names: &Names) -> Result<ValueId, Pt2Error> {
        let wrong = |got: &str| Pt2Error::model("the model", "one tensor as output", got, LOGITS);
        if let Some(OutputSpec::Other(other)) =
            signature.output_specs.iter().find(|spec| matches!(spec, OutputSpec::Other(_)))
        {
            let got = other.keys().next().cloned().unwrap_or_default();
            return Err(Pt2Error::model("the model", "no change of buffers or inputs", got, MUTATION));
        }
        match (&signature.output_specs[..], &graph.outputs[..]) {
            ([OutputSpec::UserOutput { arg: Argument::AsTensor(Named { name }) }], [_]) => {
                names.get(name).copied().ok_or_else(|| undefined(name))
            }
            (outputs, _) if outputs.len() != 1 => Err(wrong(&format!("{} outputs", outputs.len()))),
            _ => Err(wrong("another kind of output")),
        }
    }

    /// Removes the nodes that count the batches of batch norms, and tells each batch norm its counter.
    fn take_over_counters(&mut self) -> Result<(), Pt2Error> {
        let parts = &mut self.parts;
        let state_named: HashMap<String, usize> =
            parts.states.iter().enumerate().map(|(i, state)| (state.name.clone(), i)).collect();
        let counts = |parts: &GraphParts, node: &Node| {
            let state = node.tensor("self").and_then(|value| parts.state_of(value));
            let counter = state.is_some_and(|state| parts.states[state].name.ends_with(".num_batches_tracked"));
            counter && node.op == "add_.Tensor" && node.arg("other") == Some(&Arg::Int(Size::Fixed(1)))
        };
        // Values after a removed node get smaller numbers.
        let mut renumbered: Vec<Option<ValueId>> = (0..parts.first_result()).map(Some).collect();
        let (mut kept, mut values) = (Vec::new(), parts.values[..renumbered.len()].to_vec());
        let results = parts.results();
        for (node, results) in std::mem::take(&mut parts.nodes).into_iter().zip(results) {
            let counter = counts(parts, &node);
            for value in results {
                renumbered.push((!counter).then_some(values.len() as ValueId));
                if !counter {
                    values.push(parts.values[value as usize].clone());
                }
            }
            if !counter {
                kept.push(node);
            }
        }
        let renumber = |value: &mut ValueId| match renumbered.get(*value as usize) {
            Some(Some(new)) => {
                *value = *new;
                Ok(())
            }
            _ => Err(Pt2Error::model("a batch norm", "a counter that nothing reads", "a use of it", MUTATION)),
        };
        for node in &mut kept {
            for (_, arg) in &mut node.args {
                match arg {
                    Arg::Tensor(value) => renumber(value)?,
                    Arg::Tensors(values) => values.iter_mut().flatten().try_for_each(renumber)?,
                    _ => {}
                }
            }
            if node.op == "batch_norm.default" && node.flag("training") {
                let mean = node.tensor("running_mean").and_then(|value| parts.state_of(value));
                let prefix = mean.and_then(|state| parts.states[state].name.strip_suffix("running_mean"));
                let counter = prefix.and_then(|prefix| state_named.get(&format!("{prefix}num_batches_tracked")));
                if let Some(&counter) = counter {
                    node.args.push((super::check::COUNTER.to_owned(), Arg::Tensor(parts.state_value(counter))));
                }
            }
        }
        renumber(&mut parts.output)?;
        (parts.nodes, parts.values) = (kept, values);
        Ok(())
    }
}

fn undescribed(name: &str) -> Pt2Error {
    Pt2Error::part(GRAPH, format!("a description of `{}`", super::short(name)), "none", EXPORT_AGAIN)
}

fn undefined(name: &str) -> Pt2Error {
    Pt2Error::part(GRAPH, "a value before its use", format!("`{name}`"), EXPORT_AGAIN)
}

/// Whether a node only computes sizes, which the graph has as expressions, or asserts something.
fn is_about_sizes(node: &JsonNode) -> bool {
    let no_tensor = |output: &Argument| matches!(output, Argument::AsSymInt(_) | Argument::Other(_));
    let asserts = node.target.starts_with("torch.ops.aten._assert_") || node.target.contains("sym_constrain_range");
    asserts || (!node.outputs.is_empty() && node.outputs.iter().all(no_tensor))
}

/// The names of the tensors that an output has.
fn result_names<'a>(output: &'a Argument, place: &str) -> Result<Vec<&'a str>, Pt2Error> {
    match output {
        Argument::AsTensor(Named { name }) => Ok(vec![name]),
        Argument::AsTensors(all) => Ok(all.iter().map(|named| &named.name[..]).collect()),
        _ => Err(Pt2Error::model(
            place,
            "tensors as results",
            "a number that depends on data",
            "use shapes and branches that do not depend on the values of tensors",
        )),
    }
}

/// Where the names of arguments are looked up.
struct Scope<'a> {
    conversion: &'a Conversion,
    graph: &'a JsonGraph,
    names: &'a Names,
    place: &'a str,
}

impl Scope<'_> {
    fn value(&self, named: &Named) -> Result<ValueId, Pt2Error> {
        self.names.get(&named.name).copied().ok_or_else(|| undefined(&named.name))
    }

    fn int(&self, argument: &SymIntArgument) -> Result<Size, Pt2Error> {
        match argument {
            SymIntArgument::AsInt(number) => Ok(Size::Fixed(*number)),
            SymIntArgument::AsName(name) => {
                let size = self.graph.sym_int_values.get(name).ok_or_else(|| undefined(name))?;
                self.conversion.size(self.place, size)
            }
        }
    }

    fn argument(&self, op: &str, argument: &Argument) -> Result<Arg, Pt2Error> {
        let unsupported = |got: String| {
            let place = format!("`{op}` in {}", self.place);
            Pt2Error::model(place, "tensors and numbers as arguments", got, "use another operator")
        };
        Ok(match argument {
            Argument::AsNone(_) => Arg::None,
            Argument::AsTensor(named) => Arg::Tensor(self.value(named)?),
            Argument::AsTensors(all) => {
                Arg::Tensors(all.iter().map(|named| self.value(named).map(Some)).collect::<Result<_, _>>()?)
            }
            Argument::AsInt(number) => Arg::Int(Size::Fixed(*number)),
            Argument::AsInts(all) => Arg::Ints(all.iter().map(|&number| Size::Fixed(number)).collect()),
            Argument::AsFloat(number) => Arg::Float(*number),
            Argument::AsFloats(all) => Arg::Floats(all.clone()),
            Argument::AsString(text) => Arg::Text(text.clone()),
            Argument::AsBool(flag) => Arg::Bool(*flag),
            Argument::AsBools(all) => Arg::Bools(all.clone()),
            Argument::AsSymInt(number) => Arg::Int(self.int(number)?),
            Argument::AsSymInts(all) => Arg::Ints(all.iter().map(|n| self.int(n)).collect::<Result<_, _>>()?),
            Argument::AsScalarType(number) => Arg::Type(tensor_type(*number, self.place)?),
            Argument::AsMemoryFormat(1) => Arg::Format(Format::Contiguous),
            Argument::AsMemoryFormat(2) => Arg::Format(Format::ChannelsLast),
            Argument::AsMemoryFormat(4) => Arg::Format(Format::Preserve),
            Argument::AsMemoryFormat(other) => return Err(unsupported(format!("memory format {other}"))),
            Argument::AsLayout(STRIDED) => Arg::Strided,
            Argument::AsLayout(other) => return Err(unsupported(format!("layout {other}"))),
            Argument::AsDevice(_) => Arg::Device,
            Argument::AsOptionalTensor(OptionalTensor::AsNone(_)) => Arg::None,
            Argument::AsOptionalTensor(OptionalTensor::AsTensor(named)) => Arg::Tensor(self.value(named)?),
            Argument::AsOptionalTensors(all) => {
                let one = |tensor: &OptionalTensor| match tensor {
                    OptionalTensor::AsTensor(named) => self.value(named).map(Some),
                    OptionalTensor::AsNone(_) => Ok(None),
                };
                Arg::Tensors(all.iter().map(one).collect::<Result<_, _>>()?)
            }
            Argument::AsGraph(_) => return Err(unsupported("a subgraph".to_owned())),
            Argument::Other(other) => {
                return Err(unsupported(other.keys().next().cloned().unwrap_or_default()));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    fn tensor(name: &str) -> Value {
        json!({ "as_tensor": { "name": name } })
    }

    fn call(target: &str, inputs: Vec<Value>, output: &str) -> Value {
        let named = |arg: Value| json!({ "name": "self", "arg": arg });
        let inputs: Vec<Value> = inputs.into_iter().map(named).collect();
        json!({ "target": target, "inputs": inputs, "outputs": [tensor(output)] })
    }

    fn graph(nodes: Vec<Value>, inputs: &[&str], output: &str) -> Value {
        let symbol = json!({ "as_expr": { "expr_str": "Symbol('s0', positive=True, integer=True)" } });
        let meta = json!({ "dtype": 7, "sizes": [symbol, { "as_int": 3 }], "layout": 7 });
        let values: HashMap<&str, &Value> = ["x", "a", "b", "c", "d"].into_iter().map(|name| (name, &meta)).collect();
        let inputs: Vec<Value> = inputs.iter().map(|name| tensor(name)).collect();
        json!({ "inputs": inputs, "outputs": [tensor(output)], "nodes": nodes, "tensor_values": values, "sym_int_values": {} })
    }

    fn switched(enabled: bool, sub: Value, input: &str, output: &str) -> Value {
        let inputs = vec![json!({ "as_bool": enabled }), json!({ "as_graph": { "graph": sub } }), tensor(input)];
        call(SET_GRAD, inputs, output)
    }

    fn contents(graph: Value, signature: Value, weights: Vec<StoredTensor>) -> Contents {
        let program = json!({
            "graph_module": { "graph": graph, "signature": signature },
            "schema_version": { "major": SCHEMA_MAJOR },
            "torch_version": "2.11.0",
        });
        Contents { graph: program.to_string().into_bytes(), weights, constants: Vec::new() }
    }

    /// Gradients were once off in everything inside a no_grad, whatever was switched on again there.
    #[test]
    fn gradients_switched_on_inside_no_grad_are_on() {
        const RELU: &str = "torch.ops.aten.relu.default";
        let inner = graph(vec![call(RELU, vec![tensor("b")], "c")], &["b"], "c");
        let outer = vec![call(RELU, vec![tensor("a")], "b"), switched(true, inner, "b", "c")];
        let outer = graph(outer, &["a"], "c");
        let nodes = vec![switched(false, outer, "x", "c"), call(RELU, vec![tensor("c")], "d")];
        let signature = json!({
            "input_specs": [{ "user_input": { "arg": tensor("x") } }],
            "output_specs": [{ "user_output": { "arg": tensor("d") } }],
        });
        let read = read(&contents(graph(nodes, &["x"], "d"), signature, Vec::new()), &[]).unwrap();
        assert_eq!(read.nodes.iter().map(|node| node.no_grad).collect::<Vec<_>>(), [true, false, false]);
    }

    /// As PyTorch writes them: a sequence of any length, a selection by values, and `torch.cond`.
    #[test]
    fn other_dynamic_sizes_and_higher_order_operators_are_refused_in_words() {
        const RELU: &str = "torch.ops.aten.relu.default";
        let refused = |size: Option<&str>, target: &str| {
            let mut graph = graph(vec![call(target, vec![tensor("x")], "a")], &["x"], "a");
            if let Some(size) = size {
                graph["tensor_values"]["a"]["sizes"][1] = json!({ "as_expr": { "expr_str": size } });
            }
            let signature = json!({
                "input_specs": [{ "user_input": { "arg": tensor("x") } }],
                "output_specs": [{ "user_output": { "arg": tensor("a") } }],
            });
            read(&contents(graph, signature, Vec::new()), &[]).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refused(None, RELU), "");
        for size in ["Symbol('s27', positive=True, integer=True)", "Symbol('u0', integer=True)"] {
            let said = refused(Some(size), RELU);
            assert!(said.contains("expected sizes that are fixed or a multiple of the batch"), "{said}");
            assert!(said.contains("first dimension of every input dynamic, and no other"), "{said}");
        }
        let said = refused(None, "torch.ops.higher_order.cond");
        assert!(said.contains("torch.ops.higher_order.cond in the model itself: use others there"), "{said}");
    }

    /// A square matrix and its transpose share their place in the file, and are no names of one tensor.
    #[test]
    fn tied_tensors_have_the_same_strides_and_element_type() {
        let stored = |name: &str, strides: [u64; 2], dtype| StoredTensor {
            name: name.to_owned(),
            dtype,
            dims: vec![3, 3],
            strides: strides.to_vec(),
            offset: 0,
            path: "data/weights/weight_0".to_owned(),
            trained: true,
        };
        let weights = vec![
            stored("w", [3, 1], TensorType::F32),
            stored("same", [3, 1], TensorType::F32),
            stored("turned", [1, 3], TensorType::F32),
            stored("bits", [3, 1], TensorType::F64),
        ];
        let parameter =
            |name: &str| json!({ "parameter": { "arg": { "name": format!("p_{name}") }, "parameter_name": name } });
        let signature = json!({
            "input_specs": [parameter("w"), parameter("same"), parameter("turned"), parameter("bits"),
                { "user_input": { "arg": tensor("x") } }],
            "output_specs": [{ "user_output": { "arg": tensor("a") } }],
        });
        let nodes = vec![call("torch.ops.aten.relu.default", vec![tensor("x")], "a")];
        let read = read(&contents(graph(nodes, &["x"], "a"), signature, weights), &[]).unwrap();
        let states: Vec<(&str, &[String])> = read.states.iter().map(|s| (&s.name[..], &s.tied[..])).collect();
        assert_eq!(states, [("w", &["same".to_owned()][..]), ("turned", &[]), ("bits", &[])]);
    }
}
