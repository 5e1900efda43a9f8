//! Where a graph can be cut, and the layers between the cuts.
//!
//! A boundary is legal if every value that crosses it has one row per sample, nothing that crosses it is changed in place
//! later, and no parameter or buffer is used on both sides. Values that depend on nothing but the number of rows do not
//! cross: every layer that needs one computes it. Nor do tied parameters, those with several names in the module: every layer
//! that uses one has it, and the runtime keeps such layers on one worker.
//!
//! ```text
//!   node    0    1    2    3    4    5      x is used in the next layer and two layers later:
//!   layer   └─ a ─┘└─ b ─┘└── c ──┘         it goes from a to b as activation, and from b to c likewise;
//!   x       ●━━━━━━━○━━━━━━━━━━○            if b did not use it, it would go from a to c as a skip
//! ```

use super::aliases::{first_tensors, free_classes, Aliases};
use super::graph::{Arg, Graph, GraphParts, Node, Size, ValueId};
use super::operators::{self, Effect};
use super::Pt2Error;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// How much all layers together may repeat: nodes, their results and the elements of their arguments. Real models repeat
/// some tens of nodes in each of some hundreds of layers.
const REPEATED_MAX: usize = 1 << 18;
/// The most bytes of constants that all layers together hold: as many as 256 layers that use every constant.
const LAYER_CONSTANT_BYTES_MAX: u64 = 1 << 30;
/// How often boundaries are removed because nothing crosses them from one layer to the next. Real models need one or two.
const ROUNDS_MAX: usize = 64;

/// Which of the legal boundaries separate layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Boundaries {
    /// Those where the call of a module ends and that carry no more activations than the end of any module around.
    #[default]
    Modules,
    /// All.
    All,
}

/// Consecutive nodes that run together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layer {
    /// The module whose call ends with the layer, unique in the model.
    pub name: String,
    /// Other modules whose calls end there.
    pub also: Vec<String>,
    /// The nodes in the order in which they run, with those that the layer repeats.
    pub nodes: Vec<usize>,
    /// The parameters and buffers that it uses, and those that no layer uses, in the first layer. Tied parameters may be in
    /// several layers.
    pub states: Vec<usize>,
    /// The values that come from the layer before.
    pub inputs: Vec<ValueId>,
    /// The values that go to the next layer; the output of the model in the last one.
    pub outputs: Vec<ValueId>,
    /// The values that come from earlier layers, with the names of the skips.
    pub pops: Vec<(String, ValueId)>,
    /// The values that go to later layers, with the names of the skips.
    pub stashes: Vec<(String, ValueId)>,
    /// Multiply-adds for one sample, of the operators whose cost they describe.
    pub multiply_adds: u64,
}

impl Graph {
    /// The layers of the graph, at least one.
    pub fn layers(&self, boundaries: Boundaries) -> Result<Vec<Layer>, Pt2Error> {
        let analysis = Analysis::new(self);
        if analysis.is_free(self.output) {
            let remedy = "return a tensor that is computed from the input";
            return Err(Pt2Error::model("the model", "an output that depends on the input", "a constant", remedy));
        }
        let mut cuts = analysis.cuts(boundaries);
        for _ in 0..ROUNDS_MAX {
            let mut layers = analysis.connected(&cuts);
            // A layer that gives nothing to the next one, but only to later ones, cannot end a partition.
            let ends = cuts.iter().zip(&layers);
            let gives: Vec<usize> = ends.filter(|(_, layer)| !layer.outputs.is_empty()).map(|(&cut, _)| cut).collect();
            if gives.len() == cuts.len() {
                analysis.fill(&mut layers, &cuts)?;
                return Ok(named(&analysis, layers, &cuts));
            }
            cuts = gives;
        }
        let (expected, got) = ("layers that give a tensor to the next one", "tensors that all skip the next layer");
        Err(Pt2Error::model("the model", expected, got, "use the result of a module in the next one"))
    }

    /// The parameters and buffers with one name that are used on both sides of a boundary, such as those of a module that is
    /// called again, with the number of boundaries that would be legal but for them.
    pub fn used_again(&self) -> Vec<(String, usize)> {
        let analysis = Analysis::new(self);
        let mut hindered: BTreeMap<usize, usize> = BTreeMap::new();
        // The sum of the numbers of the states across a cut: the number of the state where there is only one.
        let mut changes = vec![0_i64; analysis.kept.len() + 2];
        for (state, uses) in analysis.state_uses.iter().enumerate().filter(|(state, _)| !analysis.is_tied(*state)) {
            if let Some((first, last)) = *uses {
                changes[first + 1] += state as i64;
                changes[last + 1] -= state as i64;
            }
        }
        let mut across = 0;
        for (cut, change) in changes.into_iter().enumerate().take(analysis.kept.len()) {
            across += change;
            if analysis.is_legal_but_for_states(cut) && analysis.states_across[cut] == 1 {
                *hindered.entry(across as usize).or_default() += 1;
            }
        }
        hindered.into_iter().map(|(state, cuts)| (self.states[state].name.clone(), cuts)).collect()
    }
}

/// Where each value is made and used. Positions count the nodes that are kept: those that the output depends on and that
/// are not free. A cut at position `p` lies before the kept node `p`.
struct Analysis<'a> {
    parts: &'a GraphParts,
    results: Vec<std::ops::Range<ValueId>>,
    classes: Vec<ValueId>,
    free: Vec<bool>,
    kept: Vec<usize>,
    /// The position after which a value exists: 0 for the model's inputs.
    made: Vec<usize>,
    /// The positions that use a value, ascending. The output is used after the last node.
    uses: Vec<Vec<usize>>,
    /// The last position that writes to a class.
    written: BTreeMap<ValueId, usize>,
    /// The first and last position that use a state.
    state_uses: Vec<Option<(usize, usize)>>,
    /// For each position, how many activations of floats cross the cut before it.
    floats: Vec<usize>,
    /// For each position, whether a value crosses that cannot.
    blocked: Vec<bool>,
    /// For each position, how many states are used on both sides, other than tied parameters.
    states_across: Vec<usize>,
}

impl<'a> Analysis<'a> {
    fn new(graph: &'a Graph) -> Self {
        let parts: &GraphParts = graph;
        let classes = Aliases::new(parts).classes();
        let free = free_classes(parts, &classes);
        let results = parts.results();
        let needed = needed(parts, &classes, &results);
        let is_free = |node: usize| {
            let node_results = results[node].clone();
            node_results.chain(first_tensors(&parts.nodes[node])).all(|v| free[classes[v as usize] as usize])
                && !operators::is_random(&parts.nodes[node].op)
        };
        let kept: Vec<usize> = (0..parts.nodes.len()).filter(|&node| needed[node] && !is_free(node)).collect();
        let mut analysis = Analysis {
            made: vec![0; parts.values.len()],
            uses: vec![Vec::new(); parts.values.len()],
            written: BTreeMap::new(),
            state_uses: vec![None; parts.states.len()],
            floats: vec![0; kept.len() + 1],
            blocked: vec![false; kept.len() + 1],
            states_across: vec![0; kept.len() + 1],
            parts,
            results,
            classes,
            free,
            kept,
        };
        analysis.find_uses();
        analysis.find_crossings();
        analysis
    }

    fn is_free(&self, value: ValueId) -> bool {
        self.free[self.classes[value as usize] as usize]
    }

    /// Whether several layers may use a state.
    fn is_tied(&self, state: usize) -> bool {
        let state = &self.parts.states[state];
        state.trained && !state.tied.is_empty()
    }

    fn find_uses(&mut self) {
        for (position, &node) in self.kept.iter().enumerate() {
            let call = &self.parts.nodes[node];
            for value in call.tensors() {
                match self.parts.state_of(value) {
                    Some(state) => {
                        let (first, _) = self.state_uses[state].unwrap_or((position, position));
                        self.state_uses[state] = Some((first, position));
                    }
                    None if !self.free[self.classes[value as usize] as usize] => {
                        let uses = &mut self.uses[value as usize];
                        if uses.last() != Some(&position) {
                            uses.push(position);
                        }
                    }
                    None => {}
                }
            }
            for value in self.results[node].clone() {
                self.made[value as usize] = position + 1;
            }
            if operators::effect(&call.op) == Some(Effect::InPlace) {
                for value in first_tensors(call) {
                    self.written.insert(self.classes[value as usize], position);
                }
            }
        }
        self.uses[self.parts.output as usize].push(self.kept.len());
    }

    fn find_crossings(&mut self) {
        let positions = self.kept.len() + 1;
        let (mut floats, mut blocked) = (vec![0_i64; positions + 1], vec![0_i64; positions + 1]);
        let mut states = vec![0_i64; positions + 1];
        let add = |counts: &mut Vec<i64>, from: usize, to: usize| {
            // Cuts from..=to.
            if from <= to && to < positions {
                counts[from] += 1;
                counts[to + 1] -= 1;
            }
        };
        for (value, uses) in self.uses.iter().enumerate() {
            let Some(&last) = uses.last() else { continue };
            let (made, info) = (self.made[value], &self.parts.values[value]);
            // A state's uses are not in this list.
            let (from, to) = (made, last);
            if info.is_float() {
                add(&mut floats, from, to);
            }
            if info.sample_dims().is_none() {
                add(&mut blocked, from, to);
            } else if let Some(&written) = self.written.get(&self.classes[value]) {
                add(&mut blocked, from, to.min(written));
            }
        }
        for (state, uses) in self.state_uses.iter().enumerate() {
            if let Some((first, last)) = uses.filter(|_| !self.is_tied(state)) {
                add(&mut states, first + 1, last);
            }
        }
        let sums = |counts: Vec<i64>| {
            counts.into_iter().scan(0, |sum, change| {
                *sum += change;
                Some(*sum as usize)
            })
        };
        self.floats = sums(floats).take(positions).collect();
        self.blocked = sums(blocked).take(positions).map(|count| count > 0).collect();
        self.states_across = sums(states).take(positions).collect();
    }

    fn is_legal_but_for_states(&self, cut: usize) -> bool {
        cut > 0 && cut < self.kept.len() && !self.blocked[cut]
    }

    fn is_legal(&self, cut: usize) -> bool {
        self.is_legal_but_for_states(cut) && self.states_across[cut] == 0
    }

    fn modules(&self, position: usize) -> &[u32] {
        self.kept.get(position).map_or(&[], |&node| &self.parts.nodes[node].modules)
    }

    /// The modules, from the outermost, whose calls end at a cut.
    fn ending(&self, cut: usize) -> &[u32] {
        let before = self.modules(cut - 1);
        &before[self.shared(cut)..]
    }

    /// How many modules are open on both sides of a cut.
    fn shared(&self, cut: usize) -> usize {
        let (before, after) = (self.modules(cut - 1), self.modules(cut));
        before.iter().zip(after).take_while(|(a, b)| a == b).count()
    }

    fn cuts(&self, boundaries: Boundaries) -> Vec<usize> {
        let legal = (1..self.kept.len()).filter(|&cut| self.is_legal(cut));
        match boundaries {
            Boundaries::All => legal.collect(),
            Boundaries::Modules => {
                let ends = self.module_ends();
                let few = |&cut: &usize| {
                    // The outermost module is the model.
                    let open = self.modules(cut).iter().take(self.shared(cut)).skip(1);
                    let carried = |module: &u32| ends.get(module).map_or(usize::MAX, |&end| self.floats[end]);
                    open.map(carried).all(|carried| self.floats[cut] <= carried)
                };
                legal.filter(|&cut| !self.ending(cut).is_empty()).filter(few).collect()
            }
        }
    }

    /// The cut where each module ends for the last time.
    fn module_ends(&self) -> BTreeMap<u32, usize> {
        let each = |position: usize| self.modules(position).iter().map(move |&module| (module, position + 1));
        (0..self.kept.len()).flat_map(each).collect()
    }

    /// The layers between cuts, with what they give to each other and nothing else.
    fn connected(&self, cuts: &[usize]) -> Vec<Layer> {
        let mut layers: Vec<Layer> = vec![Layer::default(); cuts.len() + 1];
        self.connect(&mut layers, |position| layer_at(cuts, position));
        layers
    }

    /// Adds nodes and states to the layers between cuts.
    fn fill(&self, layers: &mut [Layer], cuts: &[usize]) -> Result<(), Pt2Error> {
        for (position, &node) in self.kept.iter().enumerate() {
            let layer = &mut layers[layer_at(cuts, position)];
            layer.nodes.push(node);
            layer.multiply_adds = layer.multiply_adds.saturating_add(multiply_adds(self.parts, node, &self.results));
        }
        let free = self.free_nodes();
        let (mut repeated, mut constant_bytes) = (0, 0);
        for layer in layers.iter_mut() {
            self.repeat_free_nodes(layer, &free, &mut repeated)?;
            constant_bytes += self.constant_bytes(layer);
            if constant_bytes > LAYER_CONSTANT_BYTES_MAX {
                return Err(too_much("at most 2^30 bytes of constants in all layers"));
            }
        }
        for (state, uses) in self.state_uses.iter().enumerate() {
            layers[uses.map_or(0, |(first, _)| layer_at(cuts, first))].states.push(state);
        }
        self.add_tied_states(layers);
        Ok(())
    }

    /// Adds tied parameters to the layers that use them again.
    fn add_tied_states(&self, layers: &mut [Layer]) {
        for layer in layers {
            let values = layer.nodes.iter().flat_map(|&node| self.parts.nodes[node].tensors());
            let states = values.filter_map(|value| self.parts.state_of(value)).filter(|&state| self.is_tied(state));
            let used: BTreeSet<usize> = states.chain(layer.states.iter().copied()).collect();
            layer.states = used.into_iter().collect();
        }
    }

    /// For each class, the free nodes that make or write values of it, ascending.
    fn free_nodes(&self) -> BTreeMap<ValueId, Vec<usize>> {
        let mut nodes: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
        for node in (0..self.parts.nodes.len()).filter(|node| self.kept.binary_search(node).is_err()) {
            let call = &self.parts.nodes[node];
            let writes = operators::effect(&call.op) == Some(Effect::InPlace);
            let written = first_tensors(call).into_iter().filter(|_| writes);
            for value in self.results[node].clone().chain(written).filter(|&value| self.is_free(value)) {
                let list = nodes.entry(self.classes[value as usize]).or_default();
                if list.last() != Some(&node) {
                    list.push(node);
                }
            }
        }
        nodes
    }

    /// Adds the nodes that compute the free values of a layer, in their order. `repeated` counts what all layers repeat.
    fn repeat_free_nodes(
        &self,
        layer: &mut Layer,
        free: &BTreeMap<ValueId, Vec<usize>>,
        repeated: &mut usize,
    ) -> Result<(), Pt2Error> {
        let end = layer.nodes.last().copied().unwrap_or(0);
        // Classes to compute, each up to the node before the one that needs it; and the nodes to visit, the last first.
        let (mut classes, mut pending) = (HashSet::new(), BTreeSet::new());
        let mut want = |pending: &mut BTreeSet<usize>, node: usize, before: usize| {
            for value in self.parts.nodes[node].tensors().filter(|&value| self.is_free(value)) {
                let class = self.classes[value as usize];
                if classes.insert(class) {
                    let nodes = free.get(&class).map_or(&[][..], |nodes| nodes);
                    pending.extend(&nodes[..nodes.partition_point(|&node| node < before)]);
                }
            }
        };
        layer.nodes.iter().for_each(|&node| want(&mut pending, node, end));
        let mut wanted: Vec<usize> = Vec::new();
        while let Some(node) = pending.pop_last() {
            *repeated += size(&self.parts.nodes[node]);
            if *repeated > REPEATED_MAX {
                return Err(too_much("at most 2^18 repeated computations of values that do not depend on the input"));
            }
            wanted.push(node);
            want(&mut pending, node, node);
        }
        if !wanted.is_empty() {
            layer.nodes.extend(wanted);
            layer.nodes.sort_unstable();
        }
        Ok(())
    }

    /// The bytes of the constants that the nodes of a layer use.
    fn constant_bytes(&self, layer: &Layer) -> u64 {
        let values = layer.nodes.iter().flat_map(|&node| self.parts.nodes[node].tensors());
        let constants: HashSet<usize> = values.filter_map(|value| self.parts.constant_of(value)).collect();
        constants.into_iter().map(|constant| self.parts.constants[constant].hex.len() as u64 / 2).sum()
    }

    /// Finds which layer gives which values to which.
    fn connect(&self, layers: &mut [Layer], layer_at: impl Fn(usize) -> usize) {
        let last = layers.len() - 1;
        // The model's inputs all arrive in the first layer, in their order.
        layers[0].inputs = (0..self.parts.inputs).collect();
        for (value, uses) in self.uses.iter().enumerate() {
            let id = value as ValueId;
            if uses.is_empty() {
                continue;
            }
            let mut holder = layer_at(self.made[value].saturating_sub(1));
            let mut users: Vec<usize> = uses.iter().map(|&position| layer_at(position).min(last)).collect();
            users.dedup();
            for user in users {
                if user <= holder {
                    continue;
                }
                if user == holder + 1 {
                    layers[holder].outputs.push(id);
                    layers[user].inputs.push(id);
                } else {
                    let name = format!("value {id} to layer {user}");
                    layers[holder].stashes.push((name.clone(), id));
                    layers[user].pops.push((name, id));
                }
                holder = user;
            }
        }
        layers[last].outputs = vec![self.parts.output];
    }
}

/// The layer that a position is in.
fn layer_at(cuts: &[usize], position: usize) -> usize {
    cuts.partition_point(|&cut| cut <= position)
}

/// A node with its results and the elements of its arguments, counted.
fn size(node: &Node) -> usize {
    let elements = |arg: &Arg| match arg {
        Arg::Tensors(all) => all.len(),
        Arg::Ints(all) => all.len(),
        Arg::Floats(all) => all.len(),
        Arg::Bools(all) => all.len(),
        Arg::Text(text) => text.len(),
        _ => 1,
    };
    1 + node.results as usize + node.args.iter().map(|(_, arg)| elements(arg)).sum::<usize>()
}

fn too_much(expected: &str) -> Pt2Error {
    Pt2Error::model("the layers", expected, "more", "use fewer layers, or keep such values in buffers of the module")
}

/// The nodes that the output depends on.
fn needed(parts: &GraphParts, classes: &[ValueId], results: &[std::ops::Range<ValueId>]) -> Vec<bool> {
    let mut needed = vec![false; parts.nodes.len()];
    let mut wanted = vec![false; parts.values.len()];
    wanted[classes[parts.output as usize] as usize] = true;
    for (index, node) in parts.nodes.iter().enumerate().rev() {
        let writes = operators::effect(&node.op) == Some(Effect::InPlace);
        let written = first_tensors(node).into_iter().filter(|_| writes);
        if results[index].clone().chain(written).any(|value| wanted[classes[value as usize] as usize]) {
            needed[index] = true;
            node.tensors().for_each(|value| wanted[classes[value as usize] as usize] = true);
        }
    }
    needed
}

/// Names each layer after the outermost module that ends with it and that is one of a numbered list, or that starts in it;
/// else after the innermost that ends with it.
fn named(analysis: &Analysis<'_>, mut layers: Vec<Layer>, cuts: &[usize]) -> Vec<Layer> {
    let all = analysis.kept.len();
    let ends = cuts.iter().copied().chain([all]);
    let starts = std::iter::once(0).chain(cuts.iter().copied());
    let mut first_seen: BTreeMap<u32, usize> = BTreeMap::new();
    for position in (0..all).rev() {
        first_seen.extend(analysis.modules(position).iter().map(|&module| (module, position)));
    }
    let module_ends = analysis.module_ends();
    let path = |module: u32| analysis.parts.modules.get(module as usize).cloned().unwrap_or_default();
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for ((layer, start), end) in layers.iter_mut().zip(starts).zip(ends) {
        // The outermost module is the model itself, which has no name.
        let ending: Vec<u32> = match end {
            _ if end == 0 => Vec::new(),
            end if end == all => analysis.modules(end - 1).iter().skip(1).copied().collect(),
            end => analysis.ending(end).to_vec(),
        };
        let whole = ending.iter().find(|&&module| {
            let starts_here = first_seen.get(&module).is_some_and(|&seen| seen >= start);
            starts_here || is_numbered(&path(module))
        });
        let main = whole.or(ending.last()).copied();
        let base = main.map(path).filter(|path| !path.is_empty()).unwrap_or_else(|| {
            let node = &analysis.parts.nodes[analysis.kept[end.max(1) - 1]];
            node.op.split('.').next().unwrap_or_default().to_owned()
        });
        // A module that is entered again later ends there.
        let others = ending.iter().filter(|&&module| Some(module) != main && module_ends.get(&module) == Some(&end));
        layer.also = others.map(|&module| path(module)).collect();
        layer.also.retain(|name| !name.is_empty());
        let times = taken.entry(base.clone()).or_default();
        *times += 1;
        layer.name = if *times == 1 { base } else { format!("{base}#{times}") };
    }
    layers
}

/// Whether a module is one of a list, such as `encoder.layer.3`.
fn is_numbered(path: &str) -> bool {
    let number = path.split('@').next().and_then(|path| path.rsplit('.').next());
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Multiply-adds of a node for one sample; 0 for operators whose cost they do not describe.
fn multiply_adds(parts: &GraphParts, node: usize, results: &[std::ops::Range<ValueId>]) -> u64 {
    let per_sample = |value: ValueId| {
        let sizes = parts.values[value as usize].dims.iter().map(|size| match *size {
            Size::Fixed(size) => u64::try_from(size).unwrap_or(0),
            Size::Rows(factor, _) => u64::try_from(factor).unwrap_or(0),
        });
        sizes.fold(1, u64::saturating_mul)
    };
    let last_dim = |value: ValueId| match parts.values[value as usize].dims.last() {
        Some(Size::Fixed(size)) => u64::try_from(*size).unwrap_or(0),
        _ => 1,
    };
    let call: &Node = &parts.nodes[node];
    let Some(output) = results[node].clone().next().map(per_sample) else { return 0 };
    let inner = match call.op.split('.').next().unwrap_or_default() {
        "conv1d" | "conv2d" | "conv3d" => call.tensor("weight").map(|weight| {
            let filters = match parts.values[weight as usize].dims.first() {
                Some(Size::Fixed(filters)) => u64::try_from(*filters).unwrap_or(1).max(1),
                _ => 1,
            };
            per_sample(weight) / filters
        }),
        "linear" => call.tensor("input").map(last_dim),
        "matmul" | "mm" | "bmm" => call.tensor("self").map(last_dim),
        "addmm" | "baddbmm" => call.tensor("mat1").or_else(|| call.tensor("batch1")).map(last_dim),
        _ => None,
    };
    inner.map_or(0, |inner| output.saturating_mul(inner))
}
