//! Lists the tensors in a pickle without executing it.
//!
//! A pickle is a program for a small stack machine that may call anything Python can import. The machine in
//! `machine.rs` knows the instructions that `torch.save` writes for a dictionary of tensors (protocol 2) and a fixed
//! list of names; everything else is an error that names what the pickle asked for. "Calling" `_rebuild_tensor_v2` here
//! only records where a tensor's elements are. Nothing is ever executed.
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
//! All values live in lists of the machine and refer to each other by index. So a pickle that contains itself, or that
//! is nested a million levels deep, costs no more memory than its length accounts for.

mod machine;
mod state_dict;

use super::{FormatError, TensorType};
use machine::Machine;

/// The longest pickle that is read, in bytes.
pub const PICKLE_BYTES_MAX: u64 = 64 << 20;

/// The remedy for a pickle that would have to be executed. Its author decides what that does.
const NOT_RUN: &str = "only if you trust the file: load it with PyTorch and save its state_dict()";
const UNDER_A_KEY: &str =
    "save that one alone: python -c \"import torch; torch.save(torch.load('OLD', weights_only=True)['KEY'], 'NEW')\"";
const AMONG_OTHERS: &str =
    "save the tensors alone: python -c \"import torch; d = torch.load('OLD', weights_only=True); \
     torch.save({str(k): v for k, v in d.items() if torch.is_tensor(v)}, 'NEW')\"";
const DICTIONARY: &str = "save a dictionary from names to tensors, as state_dict() gives it";
const NO_PICKLE: &str = "check that torch.save wrote this file";
const CONTIGUOUS: &str = "save its .contiguous() instead";

/// A tensor in a pickled dictionary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickledTensor {
    /// The tensor's key in the dictionary.
    pub name: String,
    /// The type of its elements.
    pub dtype: TensorType,
    /// The key of the storage that holds the elements: `data/KEY` in the archive.
    pub storage: String,
    /// The number of elements in the whole storage.
    pub storage_elements: u64,
    /// The index of the tensor's first element in the storage.
    pub offset: u64,
    /// The dimensions. Their product is at most the number of elements in the storage.
    pub dims: Vec<u64>,
    /// For each dimension, the distance in the storage between neighbouring elements.
    pub strides: Vec<u64>,
}

impl PickledTensor {
    /// The number of elements of the tensor.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// The number of elements of the storage from the tensor's first to its last. All of them are inside the storage.
    pub fn span(&self) -> u64 {
        match self.elements() {
            0 => 0,
            _ => 1 + self.dims.iter().zip(&self.strides).map(|(dim, stride)| (dim - 1) * stride).sum::<u64>(),
        }
    }

    /// Whether the elements are contiguous in the storage, with the last dimension varying fastest.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(&dim, &stride)| {
            let fits = dim == 1 || stride == expected;
            expected *= dim.max(1);
            fits
        })
    }
}

/// The tensors of the pickled dictionary, or of the dictionary that it has under `state_dict` or `model`. Next to such
/// an inner dictionary there may be other values, which are ignored; next to the tensors there may be none.
pub fn tensors(pickle: &[u8]) -> Result<Vec<PickledTensor>, FormatError> {
    let mut machine = Machine::new(pickle);
    let top = machine.run()?;
    state_dict::tensors(&machine, top)
}

/// A text from the file, truncated for an error message.
fn short(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What torch.save writes for `{"t": tensor}`: a view of a storage of 6 floats from this offset, with two
    /// dimensions and two strides.
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
