//! The tensors that codecs are measured on: a random one, or those of a file.

use super::measure::encodable;
use crate::exit::usage;
use crate::report::{listed, NAMES_LISTED_MAX};
use crate::tensor_file::{Entry, TensorFile};
use distgpipe::engine::Stream;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe_core::weights::TensorType;
use distgpipe_core::wire::{Layout, Limits, Shape};
use std::borrow::Cow;
use std::fmt;
use std::path::Path;

/// A tensor, as a link would receive it.
pub struct Sample<'a> {
    /// The name; empty for a random tensor.
    pub name: &'a str,
    pub dtype: TensorType,
    /// Dimensions in the logical order (N,C,H,W).
    pub dims: &'a [usize],
    /// The order of the elements in `bytes`.
    pub layout: Layout,
    /// The elements in native byte order.
    pub bytes: Cow<'a, [u8]>,
}

/// The distribution of random values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Values {
    /// Normal, with negative values set to 0
    Relu,
    /// Normal distribution with mean 0 and variance 1
    Gaussian,
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Values::Relu => "relu",
            Values::Gaussian => "gaussian",
        })
    }
}

impl<'a> Sample<'a> {
    /// A random tensor of these dimensions. Its values depend on the seed only.
    pub fn random(dims: &'a [usize], values: Values, seed: u64) -> anyhow::Result<Self> {
        let bytes_max = Limits::default().body_bytes_max;
        let elements = Shape::new(dims).map_err(|e| usage(format!("--shape: {e}")))?.elements();
        if elements == 0 {
            return Err(usage(format!("--shape {}: expected dimensions of 1 or more, got 0", written(dims, ","))));
        }
        if elements > bytes_max / 4 {
            return Err(usage(format!(
                "--shape {}: expected at most {} values, the limit of a frame, got {elements}: use fewer",
                written(dims, ","),
                bytes_max / 4
            )));
        }
        let mut tensor = Tensor::f_empty(elements as i64, (Kind::Float, Device::Cpu))?;
        Stream::new(seed).named("codecs").normal(&mut tensor, 0.0, 1.0)?;
        if values == Values::Relu {
            let _ = tensor.f_relu_()?;
        }
        let mut bytes = vec![0; 4 * elements as usize];
        tensor.f_copy_data_u8(&mut bytes, elements as usize)?;
        Ok(Sample { name: "", dtype: TensorType::F32, dims, layout: Layout::Contiguous, bytes: bytes.into() })
    }

    /// A tensor of a file.
    pub fn of_file(file: &'a TensorFile, entry: &'a Entry) -> Self {
        let bytes = file.data(entry).into();
        Sample { name: &entry.name, dtype: entry.dtype, dims: &entry.dims, layout: Layout::Contiguous, bytes }
    }

    /// Stored channels-last, as convolutions do: N,C,H,W as N,H,W,C. Tensors that codecs do not encode or that do not have four
    /// dimensions stay as they are.
    pub fn channels_last(self) -> Self {
        match *self.dims {
            [n, c, h, w] if encodable(self.dtype).is_some() => {
                let bytes = transposed(&self.bytes, self.element_bytes(), [n, c, h * w]).into();
                Sample { layout: Layout::ChannelsLast, bytes, ..self }
            }
            _ => self,
        }
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size_bytes() as usize
    }

    pub fn elements(&self) -> usize {
        self.bytes.len() / self.element_bytes()
    }

    /// Reorders elements from the layout of this sample to the layout of its file.
    pub fn in_file_order<'b>(&self, decoded: &'b [u8]) -> Cow<'b, [u8]> {
        match (self.layout, self.dims) {
            (Layout::ChannelsLast, &[n, c, h, w]) => transposed(decoded, self.element_bytes(), [n, h * w, c]).into(),
            _ => decoded.into(),
        }
    }
}

/// The tensors of a file whose names contain `pattern`.
pub fn selected<'a>(file: &'a TensorFile, path: &Path, pattern: Option<&str>) -> anyhow::Result<Vec<&'a Entry>> {
    let all = file.entries();
    let flag = format!("--input {}", path.display());
    if all.is_empty() {
        return Err(usage(format!("{flag}: expected tensors, got a file without any: name another file")));
    }
    let pattern = pattern.unwrap_or_default();
    let found: Vec<&Entry> = all.iter().filter(|entry| entry.name.contains(pattern)).collect();
    if found.is_empty() {
        let names: Vec<String> = all.iter().map(|entry| entry.name.clone()).collect();
        return Err(usage(format!(
            "--tensor {pattern}: no name contains this in {flag}, which has: {}",
            listed(&names, NAMES_LISTED_MAX)
        )));
    }
    Ok(found)
}

/// Dimensions as text, such as `8×32` or `8,32`.
pub fn written(dims: &[usize], between: &str) -> String {
    dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

/// Transposes each of `matrices` matrices whose elements have `size` bytes.
fn transposed(bytes: &[u8], size: usize, [matrices, rows, columns]: [usize; 3]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for matrix in 0..matrices {
        for column in 0..columns {
            for row in 0..rows {
                let at = size * ((matrix * rows + row) * columns + column);
                out.extend_from_slice(&bytes[at..at + size]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_last_is_reversible() {
        let values: Vec<u8> = (0..2 * 3 * 2 * 2u32).flat_map(u32::to_ne_bytes).collect();
        let dims = [2, 3, 2, 2];
        let bytes = values.clone().into();
        let sample = Sample { name: "", dtype: TensorType::F32, dims: &dims, layout: Layout::Contiguous, bytes };
        let last = sample.channels_last();
        let found: Vec<u32> =
            last.bytes.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
        assert_eq!(found[..6], [0, 4, 8, 1, 5, 9]);
        assert_eq!(last.layout, Layout::ChannelsLast);
        assert_eq!(last.in_file_order(&last.bytes), values);
    }

    #[test]
    fn half_of_the_random_activations_are_zero_and_the_seed_decides_all() {
        let values = |values, seed| Sample::random(&[100, 100], values, seed).unwrap().bytes.into_owned();
        let zeros = values(Values::Relu, 1).chunks_exact(4).filter(|bytes| *bytes == [0; 4]).count();
        assert!((4_800..5_200).contains(&zeros), "{zeros}");
        assert_eq!(values(Values::Gaussian, 1), values(Values::Gaussian, 1));
        assert_ne!(values(Values::Gaussian, 1), values(Values::Gaussian, 2));
    }
}
