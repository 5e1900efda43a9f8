//! What holds for every graph, whether it comes from an archive or from another process.

use super::aliases::{first_tensors, Aliases};
use super::archive::CONSTANT_BYTES_MAX;
use super::graph::{Arg, GraphParts, Node, Size, ValueId, ValueInfo};
use super::operators::{self, Effect};
use super::{Pt2Error, EXPORT_AGAIN};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The argument of a batch norm that names its counter of batches. libtorch's operator has no such argument.
pub(super) const COUNTER: &str = "batches";

const NODES_MAX: usize = 1 << 16;
const VALUES_MAX: usize = 1 << 20;
const RANK_MAX: usize = 16;
const EXTRA_MAX: usize = 64;
const ELEMENTS_MAX: i64 = 1 << 40;
/// The longest name of a state or path of a module.
const NAME_BYTES_MAX: usize = 1024;

const MUTATION: &str = "compute a new tensor instead; only batch norms may change buffers, and they in training alone";
const BATCH: &str =
    "export with the first dimension of every input dynamic, and return one tensor with a row per sample";

/// Checks everything that a [`Graph`](super::Graph) promises.
pub(super) fn check(parts: &GraphParts) -> Result<(), Pt2Error> {
    let wrong = |expected: &str, got: String| Pt2Error::model("the graph", expected, got, EXPORT_AGAIN);
    if parts.nodes.len() > NODES_MAX || parts.values.len() > VALUES_MAX {
        let got = format!("{} and {}", parts.nodes.len(), parts.values.len());
        return Err(wrong("at most 2^16 nodes and 2^20 values", got));
    }
    let results = parts.nodes.iter().map(|node| node.results as usize);
    let defined = results.fold(parts.states.len() + parts.constants.len(), usize::saturating_add);
    if defined.saturating_add(parts.inputs as usize) != parts.values.len() {
        return Err(wrong("a description of every value", format!("{} of {defined}", parts.values.len())));
    }
    if let Some(path) = parts.modules.iter().find(|path| path.len() > NAME_BYTES_MAX) {
        return Err(wrong("paths of modules of at most 1024 bytes", format!("{} bytes", path.len())));
    }
    parts.values.iter().try_for_each(check_info)?;
    check_ends(parts)?;
    check_states(parts)?;
    check_constants(parts)?;
    check_operators(parts)?;
    let results = parts.results();
    for (node, results) in parts.nodes.iter().zip(&results) {
        check_node(parts, node, results.start)?;
    }
    check_writes(parts)
}

fn check_info(info: &ValueInfo) -> Result<(), Pt2Error> {
    let sensible = |size: &Size| match *size {
        Size::Fixed(size) => (0..=ELEMENTS_MAX).contains(&size),
        Size::Rows(factor, plus) => (1..=ELEMENTS_MAX).contains(&factor) && plus.abs() <= ELEMENTS_MAX,
    };
    let elements = info.dims.iter().try_fold(1_i64, |product, size| product.checked_mul(size.at(1)?));
    let few = elements.is_some_and(|elements| elements <= ELEMENTS_MAX);
    if info.dims.len() <= RANK_MAX && info.dims.iter().all(sensible) && few {
        return Ok(());
    }
    let got = format!("{:?}", info.dims);
    Err(Pt2Error::model("the graph", "tensors of at most 16 dimensions and 2^40 elements", got, EXPORT_AGAIN))
}

/// Inputs and output have one row per sample.
fn check_ends(parts: &GraphParts) -> Result<(), Pt2Error> {
    if parts.inputs == 0 {
        return Err(Pt2Error::model("the model", "an input", "none", BATCH));
    }
    let ends = (0..parts.inputs).map(|value| ("an input", value)).chain([("the output", parts.output)]);
    for (what, value) in ends {
        let info = parts.values.get(value as usize);
        if info.and_then(ValueInfo::sample_dims).is_none() {
            let got = info.map_or("no such value".to_owned(), |info| format!("dimensions {:?}", info.dims));
            let expected = format!("{what} whose first dimension, and no other, is the batch");
            return Err(Pt2Error::model("the model", expected, got, BATCH));
        }
    }
    let computed = parts.output >= parts.first_result();
    if !computed || !parts.values[parts.output as usize].is_float() {
        let got = "integers, or a tensor that no operator computes";
        return Err(Pt2Error::model("the model", "an output of floats that is computed", got, BATCH));
    }
    Ok(())
}

fn check_states(parts: &GraphParts) -> Result<(), Pt2Error> {
    let mut names = HashSet::new();
    for (index, state) in parts.states.iter().enumerate() {
        for name in std::iter::once(&state.name).chain(&state.tied) {
            if name.is_empty() || name.len() > NAME_BYTES_MAX || !names.insert(name) {
                return Err(Pt2Error::model("the graph", "a name of its own for every state", name, EXPORT_AGAIN));
            }
        }
        let info = &parts.values[parts.state_value(index) as usize];
        if info.fixed_dims().is_none() || (state.trained && !info.is_float()) {
            let got = format!("{:?} of {:?}", info.dims, info.dtype);
            let place = format!("`{}`", state.name);
            return Err(Pt2Error::model(place, "a fixed shape, and floats if it is trained", got, EXPORT_AGAIN));
        }
    }
    Ok(())
}

fn check_constants(parts: &GraphParts) -> Result<(), Pt2Error> {
    let mut all = 0_u64;
    for index in 0..parts.constants.len() {
        let info = &parts.values[parts.inputs as usize + parts.states.len() + index];
        let dims: Option<Vec<u64>> =
            info.fixed_dims().map(|dims| dims.iter().map(|&dim| u64::try_from(dim).unwrap_or(u64::MAX)).collect());
        let expected = dims.and_then(|dims| info.dtype.tensor_bytes(&dims));
        let bytes = parts.constants[index].hex.len() as u64 / 2;
        all = all.saturating_add(bytes);
        let fits = expected == Some(bytes) && all <= CONSTANT_BYTES_MAX && parts.constant_bytes(index).is_some();
        if !fits {
            let got = format!("{bytes} bytes for {:?} of {:?}", info.dims, info.dtype);
            return Err(Pt2Error::model(
                "the graph",
                "constants of their size, at most 4 MiB together",
                got,
                EXPORT_AGAIN,
            ));
        }
    }
    Ok(())
}

/// Names every operator that is not on the list at once.
fn check_operators(parts: &GraphParts) -> Result<(), Pt2Error> {
    let extra: HashSet<&String> = parts.extra.iter().collect();
    let fine = |op: &String| operators::is_name(op) && operators::effect(op).is_none();
    if parts.extra.len() > EXTRA_MAX || extra.len() != parts.extra.len() || !parts.extra.iter().all(fine) {
        let expected = "at most 64 extra operators, each once and not on the list";
        return Err(Pt2Error::model("the graph", expected, parts.extra.join(", "), EXPORT_AGAIN));
    }
    let known = |op: &String| operators::effect(op).is_some() || extra.contains(op);
    let unknown = parts.nodes.iter().filter(|node| !known(&node.op));
    let mut named = BTreeSet::new();
    let mut refused = Vec::new();
    for node in unknown {
        if named.insert(&node.op) {
            refused.push(format!("`aten.{}` in {}", super::short(&node.op), parts.place(node)));
        }
    }
    if refused.is_empty() {
        return Ok(());
    }
    Err(Pt2Error::Operators { refused })
}

fn check_node(parts: &GraphParts, node: &Node, first_result: ValueId) -> Result<(), Pt2Error> {
    let place = || format!("`aten.{}` in {}", node.op, parts.place(node));
    let wrong = |expected: &str, got: String| Err(Pt2Error::model(place(), expected, got, EXPORT_AGAIN));
    if let Some(value) = node.tensors().find(|&value| value >= first_result) {
        return wrong("values before their use", format!("value {value}"));
    }
    if node.modules.iter().any(|&module| module as usize >= parts.modules.len()) || node.modules.len() > 256 {
        return wrong("modules of the list", format!("{:?}", node.modules));
    }
    let names: HashSet<&str> = node.args.iter().map(|(name, _)| &name[..]).collect();
    if names.len() != node.args.len() || node.args.len() > 64 {
        return wrong("each argument once", format!("{} arguments", node.args.len()));
    }
    let effect = operators::effect(&node.op);
    if !matches!(effect, Some(Effect::Fresh | Effect::Seeded) | None) {
        let first = node.args.first().map(|(name, _)| &name[..]);
        if !matches!(first, Some("self" | "input" | "tensors")) || first_tensors(node).is_empty() {
            return wrong("a tensor as first argument", format!("{first:?}"));
        }
    }
    check_switches(node).or_else(|(name, expected)| wrong(expected, format!("`{name}` {:?}", node.arg(name))))?;
    match &node.op[..] {
        "batch_norm.default" if node.flag("training") => check_batch_norm(parts, node),
        "instance_norm.default" if node.flag("use_input_stats") && node.tensor("running_mean").is_some() => {
            Err(Pt2Error::model(place(), "no running statistics", "some", "set track_running_stats=False"))
        }
        _ => Ok(()),
    }
}

/// The arguments that the runtime itself reads, to switch training off or to draw masks, have the types that it reads. An
/// integer that libtorch takes as `training` would change buffers unnoticed. The error names the argument and its type.
fn check_switches(node: &Node) -> Result<(), (&'static str, &'static str)> {
    let fixed = |name: &str| node.number(name).is_some_and(f64::is_finite);
    for name in ["train", "training", "use_input_stats"] {
        if !matches!(node.arg(name), None | Some(Arg::Bool(_) | Arg::None)) {
            return Err((name, "a truth value"));
        }
    }
    // Page-locked memory would not count towards a server's limits.
    if !matches!(node.arg("pin_memory"), None | Some(Arg::Bool(false) | Arg::None)) {
        return Err(("pin_memory", "false"));
    }
    let (required, optional): (&[&str], &[&str]) = match &node.op[..] {
        "batch_norm.default" => (&["eps", "momentum"], &[]),
        "dropout.default" | "dropout_.default" | "feature_dropout.default" | "feature_dropout_.default" => {
            (&["p"], &[])
        }
        "alpha_dropout.default" | "feature_alpha_dropout.default" | "native_dropout.default" => (&["p"], &[]),
        "lstm.input" | "gru.input" | "rnn_tanh.input" | "rnn_relu.input" => (&["dropout", "num_layers"], &[]),
        "bernoulli_.float" => (&[], &["p"]),
        "scaled_dot_product_attention.default" => (&[], &["dropout_p"]),
        _ => (&[], &[]),
    };
    let wrong = |name: &&&'static str| !fixed(name) && (required.contains(*name) || node.arg(name).is_some());
    match required.iter().chain(optional).find(wrong) {
        Some(name) => Err((*name, "a fixed number")),
        None => Ok(()),
    }
}

/// A batch norm in training changes its own buffers, which the runtime does once per batch.
fn check_batch_norm(parts: &GraphParts, node: &Node) -> Result<(), Pt2Error> {
    let buffer = |name: &str| match node.arg(name) {
        None | Some(Arg::None) => Some(false),
        Some(Arg::Tensor(value)) => parts.state_of(*value).filter(|&state| !parts.states[state].trained).map(|_| true),
        _ => None,
    };
    let buffers = (buffer("running_mean"), buffer("running_var"), buffer(COUNTER));
    if matches!(buffers, (Some(true), Some(true), Some(_)) | (Some(false), Some(false), Some(false))) {
        return Ok(());
    }
    let place = format!("`aten.{}` in {}", node.op, parts.place(node));
    Err(Pt2Error::model(place, "running mean and variance as buffers, or neither", "others", MUTATION))
}

/// Nothing but memory that the graph has allocated itself is written, and never through a value that is a view on one
/// machine and a copy on another.
fn check_writes(parts: &GraphParts) -> Result<(), Pt2Error> {
    let classes = Aliases::new(parts).classes();
    let mut last_use = vec![0_usize; parts.values.len()];
    for (index, node) in parts.nodes.iter().enumerate() {
        node.tensors().for_each(|value| last_use[value as usize] = index);
    }
    last_use[parts.output as usize] = parts.nodes.len();
    // The first node of each class that may be a view or a copy.
    let mut unclear = vec![usize::MAX; parts.values.len()];
    // The values of each class, the one that is used last first.
    let mut members: HashMap<ValueId, Vec<ValueId>> = HashMap::new();
    for (value, &class) in classes.iter().enumerate() {
        members.entry(class).or_default().push(value as ValueId);
    }
    for values in members.values_mut() {
        values.sort_by_key(|&value| std::cmp::Reverse(last_use[value as usize]));
    }
    for (index, (node, results)) in parts.nodes.iter().zip(parts.results()).enumerate() {
        let Some(&written) = first_tensors(node).first() else { continue };
        let class = classes[written as usize];
        match operators::effect(&node.op) {
            Some(Effect::PerhapsView) => {
                let first = &mut unclear[class as usize];
                *first = (*first).min(index);
            }
            Some(Effect::InPlace) => {
                let place = || format!("`aten.{}` in {}", node.op, parts.place(node));
                if class < parts.first_result() {
                    let what = match parts.state_of(class) {
                        Some(state) => format!("`{}` changed in place", parts.states[state].name),
                        None => "an input or a constant changed in place".to_owned(),
                    };
                    return Err(Pt2Error::model(place(), "no change of inputs, parameters or buffers", what, MUTATION));
                }
                let other = members[&class].iter().find(|&&value| value != written && !results.contains(&value));
                let used_later = other.is_some_and(|&value| last_use[value as usize] > index);
                if unclear[class as usize] < index && used_later {
                    let expected = "no change in place of a tensor that is also used under another view";
                    return Err(Pt2Error::model(place(), expected, "one", "use the out-of-place operator"));
                }
            }
            _ => {}
        }
    }
    Ok(())
}
