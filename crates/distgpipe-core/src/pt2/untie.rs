//! Tied parameters made independent, so that a graph can be cut between their uses.

use super::graph::{Arg, Graph, GraphParts, Node, State, ValueId};
use super::Pt2Error;
use std::collections::{BTreeMap, HashMap, HashSet};

impl Graph {
    /// The graph in which every parameter with several names has a tensor of its own under each of them. A node uses the
    /// name that belongs to its module; nodes whose module has none of the names take the others in their order. All start
    /// from the same values, and training changes each by its own gradient.
    pub fn untied(&self) -> Result<Graph, Pt2Error> {
        let mut parts: GraphParts = self.clone().into();
        let mut users: HashMap<ValueId, Vec<usize>> = HashMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            for value in node.tensors() {
                let tied = self.state_of(value).is_some_and(|state| !self.states[state].tied.is_empty());
                if tied && users.get(&value).is_none_or(|nodes| nodes.last() != Some(&index)) {
                    users.entry(value).or_default().push(index);
                }
            }
        }
        // The new states, each with the old one that it is a copy of.
        let mut added: Vec<(State, usize)> = Vec::new();
        // For each node, the new state in place of an old value.
        let mut replaced: BTreeMap<(usize, ValueId), usize> = BTreeMap::new();
        for (index, state) in self.states.iter().enumerate() {
            let value = self.state_value(index);
            let Some(users) = users.get(&value) else { continue };
            let names: Vec<&String> = std::iter::once(&state.name).chain(&state.tied).collect();
            let chosen = self.names_of_uses(&names, users);
            // The tensor keeps its name if a node uses that, else it has the first name that one uses.
            let kept = if chosen.contains(&0) { 0 } else { chosen[0] };
            let mut copies: BTreeMap<usize, usize> = BTreeMap::new();
            for (&node, &name) in users.iter().zip(&chosen).filter(|(_, &name)| name != kept) {
                let copy = *copies.entry(name).or_insert_with(|| {
                    added.push((State { name: names[name].clone(), trained: state.trained, tied: Vec::new() }, index));
                    added.len() - 1
                });
                replaced.insert((node, value), copy);
            }
            let unused = (0..names.len()).filter(|name| *name != kept && !copies.contains_key(name));
            parts.states[index].tied = unused.map(|name| names[name].clone()).collect();
            parts.states[index].name = names[kept].clone();
        }
        let first_after = self.state_value(self.states.len());
        let shift = added.len() as ValueId;
        let renumber = |node: usize, value: ValueId| match replaced.get(&(node, value)) {
            Some(&copy) => first_after + copy as ValueId,
            None if value >= first_after => value + shift,
            None => value,
        };
        for (index, node) in parts.nodes.iter_mut().enumerate() {
            for (_, arg) in &mut node.args {
                match arg {
                    Arg::Tensor(value) => *value = renumber(index, *value),
                    Arg::Tensors(all) => all.iter_mut().flatten().for_each(|value| *value = renumber(index, *value)),
                    _ => {}
                }
            }
        }
        parts.output += shift;
        let copies: Vec<_> = added.iter().map(|(_, of)| self.values[self.state_value(*of) as usize].clone()).collect();
        parts.values.splice(first_after as usize..first_after as usize, copies);
        parts.states.extend(added.into_iter().map(|(state, _)| state));
        Graph::try_from(parts)
    }

    /// For each node that uses a tied parameter, the index of the name that it uses.
    fn names_of_uses(&self, names: &[&String], users: &[usize]) -> Vec<usize> {
        let modules: HashMap<&str, usize> = (0..names.len())
            .rev()
            .map(|name| (names[name].rsplit_once('.').map_or("", |(module, _)| module), name))
            .collect();
        let own: Vec<Option<usize>> =
            users.iter().map(|&node| modules.get(self.module_of(&self.nodes[node])?).copied()).collect();
        let taken: HashSet<usize> = own.iter().flatten().copied().collect();
        let mut left = (0..names.len()).filter(|name| !taken.contains(name));
        let mut last = None;
        let in_order = |own: &Option<usize>| {
            own.unwrap_or_else(|| {
                // More uses than names: the last name stands for the rest.
                last = left.next().or(last);
                last.unwrap_or(0)
            })
        };
        own.iter().map(in_order).collect()
    }

    /// The path of the innermost module that a node is part of, whichever call of the module it is.
    fn module_of(&self, node: &Node) -> Option<&str> {
        let path = self.modules.get(*node.modules.last()? as usize)?;
        Some(path.split('@').next().unwrap_or(path))
    }
}
