//! Which values share memory, and which can be computed anywhere because they depend on nothing but the number of rows.

use super::graph::{Arg, GraphParts, Node, ValueId};
use super::operators::{self, Effect};

/// The tensors that a node's first argument has: those that its results may share memory with.
pub(super) fn first_tensors(node: &Node) -> Vec<ValueId> {
    match node.args.first() {
        Some((_, Arg::Tensor(value))) => vec![*value],
        Some((_, Arg::Tensors(values))) => values.iter().flatten().copied().collect(),
        _ => Vec::new(),
    }
}

/// Classes of values that may share memory.
pub(super) struct Aliases {
    parents: Vec<ValueId>,
}

impl Aliases {
    /// Computes the classes of a graph whose values are defined before their use.
    pub(super) fn new(parts: &GraphParts) -> Self {
        let mut aliases = Aliases { parents: (0..parts.values.len() as ValueId).collect() };
        for (node, results) in parts.nodes.iter().zip(parts.results()) {
            if !matches!(operators::effect(&node.op), Some(Effect::Fresh | Effect::Seeded) | None) {
                let sources = first_tensors(node);
                // Every result may share memory with every source, so all of them are one class.
                let Some((&first, others)) = sources.split_first() else { continue };
                others.iter().copied().chain(results).for_each(|value| aliases.unite(first, value));
            }
        }
        aliases
    }

    fn unite(&mut self, a: ValueId, b: ValueId) {
        let (a, b) = (self.root(a), self.root(b));
        // The smaller number is the root, so parents come before their children.
        let (root, child) = (a.min(b), a.max(b));
        self.parents[child as usize] = root;
    }

    /// The oldest value in the class. Halves the path to it, so that no chain is walked often.
    fn root(&mut self, mut value: ValueId) -> ValueId {
        while self.parents[value as usize] != value {
            let parent = self.parents[value as usize];
            self.parents[value as usize] = self.parents[parent as usize];
            value = parent;
        }
        value
    }

    /// The class of every value: the oldest value in it.
    pub(super) fn classes(&self) -> Vec<ValueId> {
        // Parents come before their children.
        let mut classes: Vec<ValueId> = Vec::with_capacity(self.parents.len());
        for (value, &parent) in self.parents.iter().enumerate() {
            classes.push(if parent as usize == value { parent } else { classes[parent as usize] });
        }
        classes
    }
}

/// Whether each class is free: made of constants and sizes alone, by operators that draw nothing. Free values are
/// computed again in every layer that needs them instead of crossing a boundary.
pub(super) fn free_classes(parts: &GraphParts, classes: &[ValueId]) -> Vec<bool> {
    let class = |value: ValueId| classes[value as usize] as usize;
    let results = parts.results();
    let mut users: Vec<Vec<u32>> = vec![Vec::new(); classes.len()];
    for (index, node) in parts.nodes.iter().enumerate() {
        node.tensors().for_each(|value| users[class(value)].push(index as u32));
    }
    let mut free = vec![true; classes.len()];
    // Classes that are known not to be free, and whose users are still to be visited.
    let mut pending: Vec<usize> = Vec::new();
    let mut bind = |pending: &mut Vec<usize>, class: usize| {
        if std::mem::replace(&mut free[class], false) {
            pending.push(class);
        }
    };
    let touch = |node: usize| {
        let writes = operators::effect(&parts.nodes[node].op) == Some(Effect::InPlace);
        results[node].clone().chain(first_tensors(&parts.nodes[node]).into_iter().filter(move |_| writes))
    };
    (0..parts.inputs as usize + parts.states.len()).for_each(|value| bind(&mut pending, class(value as ValueId)));
    for (index, node) in parts.nodes.iter().enumerate() {
        if operators::is_random(&node.op) {
            touch(index).for_each(|value| bind(&mut pending, class(value)));
        }
    }
    while let Some(bound) = pending.pop() {
        for node in std::mem::take(&mut users[bound]) {
            touch(node as usize).for_each(|value| bind(&mut pending, class(value)));
        }
    }
    free
}
