//! NumPy files: one array each.

use super::{OpenFile, WeightsError};
use distgpipe_core::weights::npy;
use std::path::Path;
use tch::Tensor;

/// Reads the array of a `.npy` file.
///
/// # Errors
/// If the file cannot be read, or is no array of numbers.
pub fn read_npy(path: &Path) -> Result<Tensor, WeightsError> {
    let mut file = OpenFile::open(path)?;
    let head = file.bytes_at(0, file.bytes.min(npy::HEAD_BYTES_MAX))?;
    let array = npy::array(&head, file.bytes).map_err(file.format(None))?;
    let entry = file.entry("the array", array.dtype, &array.dims)?;
    file.tensor_at(array.range.start, entry.kind, &entry.dims)
}
