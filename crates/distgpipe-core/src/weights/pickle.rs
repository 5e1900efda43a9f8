//! The tensors that a pickle lists, without running it.
//!
//! A pickle is a program for a small stack machine that may call anything Python can import. This machine knows the
//! instructions that `torch.save` writes for a dictionary of tensors (protocol 2), and a fixed list of names: anything
//! else is an error that says what was asked for. Calling `_rebuild_tensor_v2` here writes down where a tensor's elements
//! are; nothing is ever executed.
//!
//! ```text
//! GLOBAL collections OrderedDict, EMPTY_TUPLE, REDUCE      a dictionary
//! MARK, BINUNICODE "0.weight"                              a key
//!   GLOBAL torch._utils _rebuild_tensor_v2
//!   MARK, (…, FloatStorage, "0", "cpu", 6) BINPERSID       the storage in data/0
//!         0, (3, 2), (2, 1), …  TUPLE, REDUCE              offset, dimensions and strides in it
//! …  SETITEMS, STOP
//! ```
//!
//! All values live in lists of the machine and refer to each other by number: a pickle that contains itself, or is nested
//! a million deep, costs what its bytes cost.

use super::{Dtype, FormatError};
use crate::wire::DIMS_MAX;
use std::collections::{HashMap, HashSet};

/// The longest pickle that is worth reading.
pub const PICKLE_BYTES_MAX: u64 = 64 << 20;

/// The most values that are made of a pickle, those that it keeps for later counted twice: some 130,000 tensors. A value
/// takes up to 200 bytes and may come from a single one, so that this and not the pickle's length bounds memory.
const VALUES_MAX: usize = 1 << 22;

/// The longest name of a storage; they are numbers.
const KEY_BYTES_MAX: usize = 20;

/// The keys under which training scripts keep the tensors, beside numbers of epochs and the like.
const KEYS: [&str; 2] = ["state_dict", "model"];

/// For what only running the pickle would make. Whoever wrote it decides what else that does.
const NOT_RUN: &str = "only if you trust the file: load it with PyTorch and save its state_dict()";
const UNDER_A_KEY: &str =
    "save that one alone: python -c \"import torch; torch.save(torch.load('OLD', weights_only=True)['KEY'], 'NEW')\"";
const AMONG_OTHERS: &str =
    "save the tensors alone: python -c \"import torch; d = torch.load('OLD', weights_only=True); \
     torch.save({str(k): v for k, v in d.items() if torch.is_tensor(v)}, 'NEW')\"";
const DICTIONARY: &str = "save a dictionary from names to tensors, as state_dict() gives it";
const NO_PICKLE: &str = "is this a file of torch.save?";
const CONTIGUOUS: &str = "save its .contiguous() instead";

/// A tensor that a pickle lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickledTensor {
    /// Its key in the dictionary.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The storage that holds them: `data/KEY` in the archive.
    pub storage: String,
    /// Elements of the whole storage.
    pub storage_elements: u64,
    /// The tensor's first element in it.
    pub offset: u64,
    /// Its dimensions. They multiply to no more than the storage has.
    pub dims: Vec<u64>,
    /// How far apart in the storage two elements are that are neighbours in a dimension.
    pub strides: Vec<u64>,
}

impl PickledTensor {
    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Elements of the storage from the tensor's first to its last, which are inside the storage.
    pub fn span(&self) -> u64 {
        match self.elements() {
            0 => 0,
            _ => 1 + self.dims.iter().zip(&self.strides).map(|(dim, stride)| (dim - 1) * stride).sum::<u64>(),
        }
    }

    /// Whether the elements lie one behind the other, the last dimension's first.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(&dim, &stride)| {
            let fits = dim == 1 || stride == expected;
            expected *= dim.max(1);
            fits
        })
    }
}

/// The tensors of a dictionary, or of the dictionary in it under `state_dict` or `model`; what else there is beside that
/// one does not matter, and beside the tensors nothing else may be.
pub fn tensors(pickle: &[u8]) -> Result<Vec<PickledTensor>, FormatError> {
    let mut machine = Machine { input: pickle, ..Machine::default() };
    let top = machine.run()?;
    machine.listed(top)
}

/// A value, mostly by its number in one of the machine's lists.
#[derive(Clone, Copy, Debug)]
enum Value {
    Mark,
    None,
    Bool,
    Int(i64),
    /// A number that nobody asks for: a float, or an integer of more than 64 bits.
    Number,
    Text(usize),
    Tuple(usize),
    List,
    Dict(usize),
    Global(Global),
    Storage(usize),
    Tensor(usize),
}

/// The names that a pickle may import.
#[derive(Clone, Copy, Debug)]
enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Size,
    Storage(Dtype),
}

impl Global {
    fn named(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
            ("torch", "Size") => Global::Size,
            ("torch", "DoubleStorage") => Global::Storage(Dtype::F64),
            ("torch", "FloatStorage") => Global::Storage(Dtype::F32),
            ("torch", "HalfStorage") => Global::Storage(Dtype::F16),
            ("torch", "BFloat16Storage") => Global::Storage(Dtype::BF16),
            ("torch", "LongStorage") => Global::Storage(Dtype::I64),
            ("torch", "IntStorage") => Global::Storage(Dtype::I32),
            ("torch", "ShortStorage") => Global::Storage(Dtype::I16),
            ("torch", "CharStorage") => Global::Storage(Dtype::I8),
            ("torch", "ByteStorage") => Global::Storage(Dtype::U8),
            ("torch", "BoolStorage") => Global::Storage(Dtype::Bool),
            _ => return None,
        })
    }
}

#[derive(Debug)]
struct Storage {
    dtype: Dtype,
    key: usize,
    elements: u64,
}

/// A tensor before it has a name.
#[derive(Debug)]
struct Rebuilt {
    storage: usize,
    offset: u64,
    dims: Vec<u64>,
    strides: Vec<u64>,
}

#[derive(Default)]
struct Machine<'a> {
    input: &'a [u8],
    /// The next byte.
    at: usize,
    /// Where the instruction that runs began.
    began: usize,
    /// How many values there have been.
    made: usize,
    stack: Vec<Value>,
    memo: HashMap<u32, Value>,
    texts: Vec<&'a str>,
    tuples: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    storages: Vec<Storage>,
    tensors: Vec<Rebuilt>,
}

impl<'a> Machine<'a> {
    /// Obeys one instruction after the other, to the one that ends it.
    fn run(&mut self) -> Result<Value, FormatError> {
        loop {
            self.began = self.at;
            let [code] = *self.take::<1>()?;
            match code {
                // PROTO
                0x80 => match *self.take::<1>()? {
                    [2] => {}
                    [other] => return Err(self.wrong("protocol 2", format!("protocol {other}"), NO_PICKLE)),
                },
                b'.' => return self.pop(),
                b'(' => self.push(Value::Mark)?,
                b'N' => self.push(Value::None)?,
                // NEWTRUE, NEWFALSE
                0x88 | 0x89 => self.push(Value::Bool)?,
                // BININT, BININT1, BININT2
                b'J' => self.push_int(|m| Ok(i64::from(i32::from_le_bytes(*m.take()?))))?,
                b'K' => self.push_int(|m| Ok(i64::from(u8::from_le_bytes(*m.take()?))))?,
                b'M' => self.push_int(|m| Ok(i64::from(u16::from_le_bytes(*m.take()?))))?,
                // LONG1
                0x8a => {
                    let [length] = *self.take::<1>()?;
                    let bytes = self.slice(usize::from(length))?;
                    self.push(long(bytes))?;
                }
                // BINFLOAT
                b'G' => {
                    self.take::<8>()?;
                    self.push(Value::Number)?;
                }
                // BINUNICODE, SHORT_BINUNICODE
                b'X' => {
                    let length = u32::from_le_bytes(*self.take()?);
                    self.text(usize::try_from(length).unwrap_or(usize::MAX))?;
                }
                0x8c => {
                    let [length] = *self.take::<1>()?;
                    self.text(usize::from(length))?;
                }
                // BINPUT, LONG_BINPUT, MEMOIZE
                b'q' => {
                    let [slot] = *self.take::<1>()?;
                    self.put(u32::from(slot))?;
                }
                b'r' => {
                    let slot = u32::from_le_bytes(*self.take()?);
                    self.put(slot)?;
                }
                0x94 => self.put(u32::try_from(self.memo.len()).unwrap_or(u32::MAX))?,
                // BINGET, LONG_BINGET
                b'h' => {
                    let [slot] = *self.take::<1>()?;
                    self.get(u32::from(slot))?;
                }
                b'j' => {
                    let slot = u32::from_le_bytes(*self.take()?);
                    self.get(slot)?;
                }
                // EMPTY_TUPLE, TUPLE1 to TUPLE3, TUPLE
                b')' => self.tuple(0)?,
                0x85..=0x87 => self.tuple(usize::from(code - 0x84))?,
                b't' => {
                    let items = self.pop_marked()?;
                    self.push_tuple(items)?;
                }
                // EMPTY_LIST, APPEND, APPENDS
                b']' => self.push(Value::List)?,
                b'a' => {
                    self.pop()?;
                    self.top_list()?;
                }
                b'e' => {
                    self.pop_marked()?;
                    self.top_list()?;
                }
                // EMPTY_DICT, SETITEM, SETITEMS
                b'}' => self.push_dict()?,
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_marked()?;
                    self.set(&items)?;
                }
                b'c' => self.global()?,
                b'R' => self.reduce()?,
                b'b' => self.build()?,
                b'Q' => self.storage()?,
                other => {
                    let got = format!("instruction {other:#04x}");
                    return Err(self.wrong("tensors only", got, NOT_RUN));
                }
            }
        }
    }

    fn wrong(&self, expected: impl Into<String>, got: impl Into<String>, remedy: &'static str) -> FormatError {
        FormatError::new(self.began, expected, got, remedy)
    }

    fn slice(&mut self, length: usize) -> Result<&'a [u8], FormatError> {
        let end = self.at.checked_add(length);
        let bytes = end.and_then(|end| self.input.get(self.at..end));
        let bytes = bytes.ok_or_else(|| self.wrong("a whole instruction", "the pickle's end", NO_PICKLE))?;
        self.at += length;
        Ok(bytes)
    }

    fn take<const N: usize>(&mut self) -> Result<&'a [u8; N], FormatError> {
        let bytes = self.slice(N)?;
        bytes.first_chunk().ok_or_else(|| self.wrong("a whole instruction", "the pickle's end", NO_PICKLE))
    }

    /// The bytes up to the end of the line, as text.
    fn line(&mut self) -> Result<&'a str, FormatError> {
        let rest = self.input.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
        let bytes = self.slice(length)?;
        self.take::<1>()?;
        self.utf8(bytes)
    }

    fn utf8(&self, bytes: &'a [u8]) -> Result<&'a str, FormatError> {
        std::str::from_utf8(bytes).map_err(|_| self.wrong("text in UTF-8", "other bytes", NO_PICKLE))
    }

    /// All that takes memory comes through here.
    fn push(&mut self, value: Value) -> Result<(), FormatError> {
        if self.made == VALUES_MAX {
            return Err(self.wrong(format!("at most {VALUES_MAX} values"), "more", "split the model"));
        }
        self.made += 1;
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, FormatError> {
        match self.stack.pop() {
            Some(Value::Mark) | None => Err(self.wrong("a value on the stack", "none", NO_PICKLE)),
            Some(value) => Ok(value),
        }
    }

    /// The values above the last mark.
    fn pop_marked(&mut self) -> Result<Vec<Value>, FormatError> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark));
        let mark = mark.ok_or_else(|| self.wrong("a mark on the stack", "none", NO_PICKLE))?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn push_int(&mut self, read: impl FnOnce(&mut Self) -> Result<i64, FormatError>) -> Result<(), FormatError> {
        let value = read(self)?;
        self.push(Value::Int(value))
    }

    fn text(&mut self, length: usize) -> Result<(), FormatError> {
        let bytes = self.slice(length)?;
        let text = self.utf8(bytes)?;
        self.texts.push(text);
        self.push(Value::Text(self.texts.len() - 1))
    }

    fn put(&mut self, slot: u32) -> Result<(), FormatError> {
        let value = self.pop()?;
        self.push(value)?;
        self.memo.insert(slot, value);
        Ok(())
    }

    fn get(&mut self, slot: u32) -> Result<(), FormatError> {
        let value = self.memo.get(&slot).copied();
        let value = value.ok_or_else(|| self.wrong("a value that was kept", format!("slot {slot}"), NO_PICKLE))?;
        self.push(value)
    }

    fn tuple(&mut self, length: usize) -> Result<(), FormatError> {
        let mut items = Vec::with_capacity(length);
        for _ in 0..length {
            items.push(self.pop()?);
        }
        items.reverse();
        self.push_tuple(items)
    }

    fn push_tuple(&mut self, items: Vec<Value>) -> Result<(), FormatError> {
        self.tuples.push(items);
        self.push(Value::Tuple(self.tuples.len() - 1))
    }

    fn push_dict(&mut self) -> Result<(), FormatError> {
        self.dicts.push(Vec::new());
        self.push(Value::Dict(self.dicts.len() - 1))
    }

    /// What is appended to lists is forgotten: no tensor that counts is in one.
    fn top_list(&self) -> Result<(), FormatError> {
        match self.stack.last() {
            Some(Value::List) => Ok(()),
            other => Err(self.wrong("a list", self.described(other.copied()), NO_PICKLE)),
        }
    }

    fn set(&mut self, items: &[Value]) -> Result<(), FormatError> {
        let dict = match self.stack.last() {
            Some(&Value::Dict(dict)) => dict,
            other => return Err(self.wrong("a dictionary", self.described(other.copied()), NO_PICKLE)),
        };
        let (pairs, []) = items.as_chunks::<2>() else {
            return Err(self.wrong("keys with values", "a key without one", NO_PICKLE));
        };
        self.dicts[dict].extend(pairs.iter().map(|&[key, value]| (key, value)));
        Ok(())
    }

    fn global(&mut self) -> Result<(), FormatError> {
        let (module, name) = (self.line()?, self.line()?);
        let known = Global::named(module, name);
        let known = known.ok_or_else(|| self.wrong("tensors only", short(&format!("{module}.{name}")), NOT_RUN))?;
        self.push(Value::Global(known))
    }

    /// A call, of one of the few functions that there are.
    fn reduce(&mut self) -> Result<(), FormatError> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let (Value::Tuple(tuple), Value::Global(function)) = (arguments, function) else {
            let got = format!("{} of {}", self.described(Some(function)), self.described(Some(arguments)));
            return Err(self.wrong("a call", got, NOT_RUN));
        };
        match (function, &self.tuples[tuple][..]) {
            (Global::OrderedDict, []) => self.push_dict()?,
            (Global::Size, &[Value::Tuple(dims)]) => self.push(Value::Tuple(dims))?,
            (Global::RebuildParameter, &[Value::Tensor(tensor), Value::Bool, Value::Dict(_)]) => {
                self.push(Value::Tensor(tensor))?;
            }
            (
                Global::RebuildTensor,
                &[Value::Storage(storage), Value::Int(offset), Value::Tuple(dims), Value::Tuple(strides), Value::Bool, Value::Dict(_)],
            ) => {
                let rebuilt = self.rebuilt(storage, offset, dims, strides)?;
                self.tensors.push(rebuilt);
                self.push(Value::Tensor(self.tensors.len() - 1))?;
            }
            (function, _) => {
                let got = format!("{function:?} with other arguments");
                return Err(self.wrong("tensors as torch.save writes them", got, NOT_RUN));
            }
        }
        Ok(())
    }

    /// A view of a storage. It has at most as many elements as the storage, so whoever makes room for it makes no more
    /// than the file is long.
    fn rebuilt(&self, storage: usize, offset: i64, dims: usize, strides: usize) -> Result<Rebuilt, FormatError> {
        let numbers = |tuple: usize| -> Option<Vec<u64>> {
            let values = &self.tuples[tuple];
            let number = |value: &Value| match value {
                Value::Int(number) => u64::try_from(*number).ok(),
                _ => None,
            };
            (values.len() <= DIMS_MAX).then(|| values.iter().map(number).collect())?
        };
        let parts = u64::try_from(offset).ok().zip(numbers(dims).zip(numbers(strides)));
        let Some((offset, (dims, strides))) = parts.filter(|(_, (dims, strides))| dims.len() == strides.len()) else {
            let expected = format!("up to {DIMS_MAX} dimensions with as many strides");
            return Err(self.wrong(expected, "something else", NO_PICKLE));
        };
        let available = self.storages[storage].elements;
        let elements = dims.iter().filter(|&&dim| dim > 0).try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let empty = dims.contains(&0);
        let last = dims.iter().zip(&strides).try_fold(offset, |last, (&dim, &stride)| {
            dim.saturating_sub(1).checked_mul(stride).and_then(|step| last.checked_add(step))
        });
        let inside = empty && offset <= available || last.is_some_and(|last| last < available);
        // libtorch counts in signed numbers.
        let countable = elements.is_some_and(|elements| i64::try_from(elements).is_ok());
        if !inside || !countable || !strides.iter().all(|&stride| i64::try_from(stride).is_ok()) {
            let expected = format!("a view inside its storage of {available} elements");
            return Err(self.wrong(expected, format!("{dims:?} with strides {strides:?} from {offset}"), NO_PICKLE));
        }
        if !empty && elements.is_none_or(|elements| elements > available) {
            let expected = format!("a view of each element of its storage of {available} once");
            return Err(self.wrong(expected, format!("{dims:?} with strides {strides:?}"), CONTIGUOUS));
        }
        Ok(Rebuilt { storage, offset, dims, strides })
    }

    /// What is given to an object beside its items; of dictionaries it is their versions, which nobody needs.
    fn build(&mut self) -> Result<(), FormatError> {
        self.pop()?;
        match self.stack.last() {
            Some(Value::Dict(_)) => Ok(()),
            other => Err(self.wrong("tensors only", self.described(other.copied()), NOT_RUN)),
        }
    }

    /// A storage, named by `("storage", type, key, location, elements)`.
    fn storage(&mut self) -> Result<(), FormatError> {
        let named = self.pop()?;
        let items = match named {
            Value::Tuple(tuple) => &self.tuples[tuple][..],
            _ => &[],
        };
        let &[Value::Text(kind), Value::Global(Global::Storage(dtype)), Value::Text(key), Value::Text(_), Value::Int(elements)] =
            items
        else {
            return Err(self.wrong("a storage", "something else", NO_PICKLE));
        };
        let elements = u64::try_from(elements).ok();
        let Some(elements) = elements.filter(|elements| {
            self.texts[kind] == "storage"
                && self.texts[key].len() <= KEY_BYTES_MAX
                && elements.checked_mul(dtype.size_bytes()).is_some()
        }) else {
            return Err(self.wrong("a storage", "something else", NO_PICKLE));
        };
        self.storages.push(Storage { dtype, key, elements });
        self.push(Value::Storage(self.storages.len() - 1))
    }

    /// The tensors of the dictionary that the pickle is, or of the one in it.
    fn listed(&self, top: Value) -> Result<Vec<PickledTensor>, FormatError> {
        let Value::Dict(top) = top else {
            return Err(self.wrong("a dictionary of tensors", self.described(Some(top)), DICTIONARY));
        };
        let outer = &self.dicts[top];
        let named = |(key, value): &(Value, Value)| match (key, value) {
            (Value::Text(key), Value::Dict(dict)) if KEYS.contains(&self.texts[*key]) => Some(*dict),
            _ => None,
        };
        let found: Vec<usize> = outer.iter().filter_map(named).collect();
        let has_tensors = outer.iter().any(|(_, value)| matches!(value, Value::Tensor(_)));
        match found[..] {
            [inner] => self.of_dict(inner, UNDER_A_KEY),
            _ if has_tensors || outer.is_empty() => self.of_dict(top, AMONG_OTHERS),
            _ => {
                let keys: Vec<String> = outer.iter().take(16).map(|(key, _)| self.described(Some(*key))).collect();
                let expected = "tensors, or one dictionary of them under `state_dict` or `model`";
                Err(self.wrong(expected, format!("the keys {}", keys.join(", ")), UNDER_A_KEY))
            }
        }
    }

    fn of_dict(&self, dict: usize, remedy: &'static str) -> Result<Vec<PickledTensor>, FormatError> {
        let pairs = &self.dicts[dict];
        let mut names = HashSet::new();
        let mut found = Vec::with_capacity(pairs.len());
        for &(key, value) in pairs {
            let Value::Text(name) = key else {
                return Err(self.wrong("names of tensors", self.described(Some(key)), remedy));
            };
            let name = self.texts[name];
            let Value::Tensor(tensor) = value else {
                let got = format!("{} as `{}`", self.described(Some(value)), short(name));
                return Err(self.wrong("tensors only", got, remedy));
            };
            if !names.insert(name) {
                return Err(self.wrong("each name once", format!("`{}` twice", short(name)), remedy));
            }
            found.push((name, &self.tensors[tensor]));
        }
        // Names and dimensions are copied only now, when none can come twice.
        let whole = |(name, tensor): (&str, &Rebuilt)| {
            let storage = &self.storages[tensor.storage];
            PickledTensor {
                name: name.to_owned(),
                dtype: storage.dtype,
                storage: self.texts[storage.key].to_owned(),
                storage_elements: storage.elements,
                offset: tensor.offset,
                dims: tensor.dims.clone(),
                strides: tensor.strides.clone(),
            }
        };
        Ok(found.into_iter().map(whole).collect())
    }

    fn described(&self, value: Option<Value>) -> String {
        match value {
            Some(Value::Text(text)) => format!("`{}`", short(self.texts[text])),
            Some(Value::Int(number)) => format!("the number {number}"),
            Some(Value::Number) => "a number".to_owned(),
            Some(Value::Bool) => "a truth value".to_owned(),
            Some(Value::None) => "None".to_owned(),
            Some(Value::Tuple(_)) => "a tuple".to_owned(),
            Some(Value::List) => "a list".to_owned(),
            Some(Value::Dict(_)) => "a dictionary".to_owned(),
            Some(Value::Tensor(_)) => "a tensor".to_owned(),
            Some(Value::Storage(_)) => "a storage".to_owned(),
            Some(Value::Global(global)) => format!("{global:?}"),
            Some(Value::Mark) | None => "nothing".to_owned(),
        }
    }
}

/// A signed little-endian number of any length.
fn long(bytes: &[u8]) -> Value {
    if bytes.len() > 8 {
        return Value::Number;
    }
    let sign = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
    let mut all = [sign; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(all))
}

/// Text for a message: as much as anybody reads.
fn short(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What torch.save writes for `{"t": tensor}`: a view of a storage of 6 floats from this offset, with two dimensions and
    /// two strides.
    fn pickle(offset: u8, dims: [u8; 2], strides: [u8; 2]) -> Vec<u8> {
        let text = |text: &str| [&[b'X', text.len() as u8, 0, 0, 0], text.as_bytes()].concat();
        let pair = |[a, b]: [u8; 2]| vec![b'K', a, b'K', b, 0x86];
        [
            b"\x80\x02}".to_vec(),
            text("t"),
            b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
            text("storage"),
            b"ctorch\nFloatStorage\n".to_vec(),
            text("0"),
            text("cpu"),
            b"K\x06tQ".to_vec(),
            vec![b'K', offset],
            pair(dims),
            pair(strides),
            b"\x89ccollections\nOrderedDict\n)RtRs.".to_vec(),
        ]
        .concat()
    }

    #[test]
    fn a_view_that_leaves_its_storage_is_refused() {
        for (offset, dims, strides) in
            [(0, [2, 3], [3, 1]), (0, [3, 2], [1, 3]), (5, [1, 1], [9, 9]), (2, [2, 2], [2, 1])]
        {
            let tensors = tensors(&pickle(offset, dims, strides)).unwrap();
            assert_eq!((tensors.len(), tensors[0].elements()), (1, u64::from(dims[0]) * u64::from(dims[1])));
        }
        for (offset, dims, strides) in
            [(1, [2, 3], [3, 1]), (0, [2, 3], [4, 1]), (6, [1, 1], [1, 1]), (3, [2, 2], [2, 2])]
        {
            let error = tensors(&pickle(offset, dims, strides)).unwrap_err().to_string();
            assert!(error.contains("with strides"), "{error}");
        }
    }
}
