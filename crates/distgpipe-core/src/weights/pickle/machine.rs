//! The stack machine that reads a pickle.

use super::{short, CONTIGUOUS, NOT_RUN, NO_PICKLE};
use crate::weights::{FormatError, TensorType};
use crate::wire::DIMS_MAX;
use std::collections::HashMap;

/// The most values that the machine makes from a pickle, counting those in the memo twice: enough for some 130,000
/// tensors. A value takes up to 200 bytes and may come from a single byte of input, so this bounds the memory, and the
/// length of the pickle does not.
const VALUES_MAX: usize = 1 << 22;

/// The longest key of a storage in bytes. `torch.save` writes decimal numbers.
const KEY_BYTES_MAX: usize = 20;

/// A value on the stack. Most are indices into one of the machine's lists.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Mark,
    None,
    Bool,
    Int(i64),
    /// A number that no tensor needs: a float, or an integer of more than 64 bits.
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
pub(super) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Size,
    Storage(TensorType),
}

impl Global {
    fn named(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
            ("torch", "Size") => Global::Size,
            ("torch", "DoubleStorage") => Global::Storage(TensorType::F64),
            ("torch", "FloatStorage") => Global::Storage(TensorType::F32),
            ("torch", "HalfStorage") => Global::Storage(TensorType::F16),
            ("torch", "BFloat16Storage") => Global::Storage(TensorType::BF16),
            ("torch", "LongStorage") => Global::Storage(TensorType::I64),
            ("torch", "IntStorage") => Global::Storage(TensorType::I32),
            ("torch", "ShortStorage") => Global::Storage(TensorType::I16),
            ("torch", "CharStorage") => Global::Storage(TensorType::I8),
            ("torch", "ByteStorage") => Global::Storage(TensorType::U8),
            ("torch", "BoolStorage") => Global::Storage(TensorType::Bool),
            _ => return None,
        })
    }
}

/// A storage: an array of elements in the archive, which tensors are views of.
#[derive(Debug)]
pub(super) struct Storage {
    pub dtype: TensorType,
    /// The index of its key among the texts.
    pub key: usize,
    pub elements: u64,
}

/// A tensor that has no name yet: a view of a storage.
#[derive(Debug)]
pub(super) struct Rebuilt {
    pub storage: usize,
    pub offset: u64,
    pub dims: Vec<u64>,
    pub strides: Vec<u64>,
}

#[derive(Default)]
pub(super) struct Machine<'a> {
    input: &'a [u8],
    /// The offset of the next byte.
    at: usize,
    /// The offset of the current instruction, for error messages.
    began: usize,
    /// The number of values made so far.
    made: usize,
    stack: Vec<Value>,
    memo: HashMap<u32, Value>,
    pub texts: Vec<&'a str>,
    tuples: Vec<Vec<Value>>,
    pub dicts: Vec<Vec<(Value, Value)>>,
    pub storages: Vec<Storage>,
    pub tensors: Vec<Rebuilt>,
}

impl<'a> Machine<'a> {
    pub fn new(input: &'a [u8]) -> Self {
        Machine { input, ..Machine::default() }
    }

    /// Executes instructions up to STOP and returns the value that is then on top of the stack.
    pub fn run(&mut self) -> Result<Value, FormatError> {
        loop {
            self.began = self.at;
            let [code] = *self.take::<1>()?;
            match code {
                b'.' => return self.pop(),
                // PROTO
                0x80 => match *self.take::<1>()? {
                    [2] => {}
                    [other] => return Err(self.wrong("protocol 2", format!("protocol {other}"), NO_PICKLE)),
                },
                b'c' => self.global()?,
                b'R' => self.reduce()?,
                b'b' => self.build()?,
                b'Q' => self.storage()?,
                _ => {
                    if !(self.scalar(code)? || self.memo_access(code)? || self.collection(code)?) {
                        return Err(self.wrong("tensors only", format!("instruction {code:#04x}"), NOT_RUN));
                    }
                }
            }
        }
    }

    /// Executes an instruction that pushes a mark, a number or a text; false if it is another instruction.
    fn scalar(&mut self, code: u8) -> Result<bool, FormatError> {
        match code {
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
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Executes an instruction that writes or reads the memo; false if it is another instruction.
    fn memo_access(&mut self, code: u8) -> Result<bool, FormatError> {
        match code {
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
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Executes an instruction on tuples, lists or dictionaries; false if it is another instruction.
    fn collection(&mut self, code: u8) -> Result<bool, FormatError> {
        match code {
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
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// An error at the current instruction.
    pub fn wrong(&self, expected: impl Into<String>, got: impl Into<String>, remedy: &'static str) -> FormatError {
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

    /// Reads the text up to the end of the line.
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

    /// Pushes a value. Everything that takes memory comes through here, so this enforces the limit on values.
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

    /// Pops the values above the last mark, and the mark.
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

    /// Pushes a text of this many bytes.
    fn text(&mut self, length: usize) -> Result<(), FormatError> {
        let bytes = self.slice(length)?;
        let text = self.utf8(bytes)?;
        self.texts.push(text);
        self.push(Value::Text(self.texts.len() - 1))
    }

    /// Stores the top of the stack in the memo.
    fn put(&mut self, slot: u32) -> Result<(), FormatError> {
        let value = self.pop()?;
        self.push(value)?;
        self.memo.insert(slot, value);
        Ok(())
    }

    /// Pushes a value from the memo.
    fn get(&mut self, slot: u32) -> Result<(), FormatError> {
        let value = self.memo.get(&slot).copied();
        let value = value.ok_or_else(|| self.wrong("a value that was kept", format!("slot {slot}"), NO_PICKLE))?;
        self.push(value)
    }

    /// Replaces the topmost values by a tuple of them.
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

    /// Checks that a list is on top. Its items are dropped, since no tensor of a state dictionary is in a list.
    fn top_list(&self) -> Result<(), FormatError> {
        match self.stack.last() {
            Some(Value::List) => Ok(()),
            other => Err(self.wrong("a list", self.described(other.copied()), NO_PICKLE)),
        }
    }

    /// Adds keys and values, in turn, to the dictionary on top of the stack.
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

    /// GLOBAL: imports one of the known names.
    fn global(&mut self) -> Result<(), FormatError> {
        let (module, name) = (self.line()?, self.line()?);
        let known = Global::named(module, name);
        let known = known.ok_or_else(|| self.wrong("tensors only", short(&format!("{module}.{name}")), NOT_RUN))?;
        self.push(Value::Global(known))
    }

    /// REDUCE: calls one of the known functions.
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

    /// A view of a storage. It has at most as many elements as the storage, so a caller that allocates the tensor
    /// allocates no more than the file is long.
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
        // libtorch uses signed 64-bit sizes and strides.
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

    /// BUILD: sets the attributes of an object. Those of a dictionary are its metadata, which is ignored.
    fn build(&mut self) -> Result<(), FormatError> {
        self.pop()?;
        match self.stack.last() {
            Some(Value::Dict(_)) => Ok(()),
            other => Err(self.wrong("tensors only", self.described(other.copied()), NOT_RUN)),
        }
    }

    /// BINPERSID: a storage, described by `("storage", type, key, location, elements)`.
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

    /// A value in words, for error messages.
    pub fn described(&self, value: Option<Value>) -> String {
        match value {
            Some(Value::Text(text)) => format!("`{}`", short(self.texts[text])),
            Some(Value::Int(number)) => format!("the number {number}"),
            Some(Value::Number) => "a number".to_owned(),
            Some(Value::Bool) => "a Boolean".to_owned(),
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

/// A signed little-endian integer of any length.
fn long(bytes: &[u8]) -> Value {
    if bytes.len() > 8 {
        return Value::Number;
    }
    let sign = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
    let mut all = [sign; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(all))
}
