//! Finds the dictionary of tensors in what a pickle describes.

use super::machine::{Machine, Rebuilt, Value};
use super::{short, PickledTensor, AMONG_OTHERS, DICTIONARY, UNDER_A_KEY};
use crate::weights::FormatError;
use std::collections::HashSet;

/// The keys under which training scripts store the dictionary of tensors, next to epoch numbers and the like.
const KEYS: [&str; 2] = ["state_dict", "model"];

/// The tensors of the dictionary on top of the stack, or of the dictionary that it has under one of [`KEYS`].
pub(super) fn tensors(machine: &Machine<'_>, top: Value) -> Result<Vec<PickledTensor>, FormatError> {
    let Value::Dict(top) = top else {
        return Err(machine.wrong("a dictionary of tensors", machine.described(Some(top)), DICTIONARY));
    };
    let outer = &machine.dicts[top];
    let named = |(key, value): &(Value, Value)| match (key, value) {
        (Value::Text(key), Value::Dict(dict)) if KEYS.contains(&machine.texts[*key]) => Some(*dict),
        _ => None,
    };
    let found: Vec<usize> = outer.iter().filter_map(named).collect();
    let has_tensors = outer.iter().any(|(_, value)| matches!(value, Value::Tensor(_)));
    match found[..] {
        [inner] => of_dict(machine, inner, UNDER_A_KEY),
        _ if has_tensors || outer.is_empty() => of_dict(machine, top, AMONG_OTHERS),
        _ => {
            let keys: Vec<String> = outer.iter().take(16).map(|(key, _)| machine.described(Some(*key))).collect();
            let expected = "tensors, or one dictionary of them under `state_dict` or `model`";
            Err(machine.wrong(expected, format!("the keys {}", keys.join(", ")), UNDER_A_KEY))
        }
    }
}

/// The tensors of a dictionary that has nothing else.
fn of_dict(machine: &Machine<'_>, dict: usize, remedy: &'static str) -> Result<Vec<PickledTensor>, FormatError> {
    let pairs = &machine.dicts[dict];
    let mut names = HashSet::new();
    let mut found = Vec::with_capacity(pairs.len());
    for &(key, value) in pairs {
        let Value::Text(name) = key else {
            return Err(machine.wrong("names of tensors", machine.described(Some(key)), remedy));
        };
        let name = machine.texts[name];
        let Value::Tensor(tensor) = value else {
            let got = format!("{} as `{}`", machine.described(Some(value)), short(name));
            return Err(machine.wrong("tensors only", got, remedy));
        };
        if !names.insert(name) {
            return Err(machine.wrong("each name once", format!("`{}` twice", short(name)), remedy));
        }
        found.push((name, &machine.tensors[tensor]));
    }
    // Names and dimensions are copied only after the check for duplicates, so that a small pickle cannot repeat a
    // large tensor many times.
    let whole = |(name, tensor): (&str, &Rebuilt)| {
        let storage = &machine.storages[tensor.storage];
        PickledTensor {
            name: name.to_owned(),
            dtype: storage.dtype,
            storage: machine.texts[storage.key].to_owned(),
            storage_elements: storage.elements,
            offset: tensor.offset,
            dims: tensor.dims.clone(),
            strides: tensor.strides.clone(),
        }
    };
    Ok(found.into_iter().map(whole).collect())
}
