//! Tensors in files as a data set: a safetensors file, or a directory of NumPy files.
//!
//! | tensor | contents |
//! | --- | --- |
//! | `input`, or `input.0`, `input.1`, … | a row per sample, for each input of the model |
//! | `target` | class numbers, of a row or of each of its tokens or pixels, or what the model should return |
//! | `test_input`, `test_target` | rows for testing, named likewise; without them, the last tenth of the rows |

use super::{DataError, Dataset, LoadPass, Split, TensorDataset};
use crate::driver::pipeline::Batch;
use crate::engine;
use crate::failure::Fault;
use crate::model::layer::SampleShape;
use crate::model::loss::{Loss, IGNORED};
use crate::sync::lock;
use crate::train::weights::{self, TensorSource, WeightsError};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tch::{Kind, Tensor};

/// One row in so many is for testing.
const TEST_SHARE: i64 = 10;
const SET: &str = "tensors";

/// Where named tensors are read from.
enum Files {
    Safetensors(Box<dyn TensorSource>),
    Numpy(PathBuf),
}

impl Files {
    fn open(path: &Path) -> Result<Self, WeightsError> {
        Ok(if path.is_dir() { Files::Numpy(path.to_owned()) } else { Files::Safetensors(weights::open(path)?) })
    }

    /// The tensor of this name, if there is one.
    fn read(&mut self, name: &str) -> Result<Option<Tensor>, WeightsError> {
        match self {
            Files::Safetensors(source) => {
                let index = source.entries().iter().position(|entry| entry.name == name);
                index.map(|index| source.read(index)).transpose()
            }
            Files::Numpy(folder) => {
                let file = folder.join(format!("{name}.npy"));
                if !file.exists() {
                    return Ok(None);
                }
                weights::read_npy(&file).map(Some)
            }
        }
    }
}

/// Tensors that were read from files. Threads take turns.
#[derive(Debug)]
pub struct TensorFiles {
    tensors: Mutex<TensorDataset>,
    input: Vec<SampleShape>,
    rows: usize,
    classes: Option<usize>,
}

impl Dataset for TensorFiles {
    fn len(&self) -> usize {
        self.rows
    }

    fn classes(&self) -> Option<usize> {
        self.classes
    }

    fn input(&self) -> &[SampleShape] {
        &self.input
    }

    fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
        lock(&self.tensors).batch(rows, pass)
    }
}

impl From<TensorDataset> for TensorFiles {
    fn from(tensors: TensorDataset) -> Self {
        let (input, rows, classes) = (tensors.input().to_vec(), tensors.len(), tensors.classes());
        TensorFiles { tensors: Mutex::new(tensors), input, rows, classes }
    }
}

impl TensorFiles {
    /// Opens a safetensors file, or a directory of `.npy` files, for a model with this input. The module's documentation lists
    /// the tensors. Numbers of other types become those that the model takes.
    ///
    /// # Errors
    /// If a file cannot be read, a tensor is missing, or one has other dimensions than the model takes.
    pub fn open(path: &Path, input: &[SampleShape], part: Split) -> Result<Self, DataError> {
        let mut files = Files::open(path)?;
        let mut read = |name: String| Ok::<_, DataError>(files.read(&name)?.ok_or(name));
        let own_test = read("test_target".to_owned())?;
        // Misspelt, or forgotten: the test rows would be ignored, and training rows taken instead.
        if own_test.is_err() {
            for name in ["test_input", "test_input.0"] {
                if read(name.to_owned())?.is_ok() {
                    let expected = format!("test_target beside {name} in {}", path.display());
                    return Err(DataError::Unsuitable { set: SET, expected, got: "no test_target".to_owned() });
                }
            }
        }
        let prefix = if own_test.is_ok() && part == Split::Test { "test_" } else { "" };
        let missing = |name: String| DataError::Unsuitable {
            set: SET,
            expected: format!("tensors input (or input.0, input.1, …) and target in {}", path.display()),
            got: format!("no {name}"),
        };
        let mut inputs = Vec::new();
        for (index, shape) in input.iter().enumerate() {
            let tensor = match read(format!("{prefix}input.{index}"))? {
                Err(_) if input.len() == 1 => read(format!("{prefix}input"))?,
                found => found,
            };
            inputs.push(as_input(tensor.map_err(missing)?, shape)?);
        }
        let target = as_target(read(format!("{prefix}target"))?.map_err(missing)?)?;
        let whole = TensorDataset::with_inputs(inputs, target)?;
        Ok(if own_test.is_ok() { whole } else { share(&whole, part)? }.into())
    }

    /// The loss that compares the targets with an output of this shape: cross entropy for class numbers, or else the mean
    /// squared error.
    ///
    /// # Errors
    /// If the targets do not fit the output, or a class number is not one of its classes.
    pub fn loss_for(&self, output: &SampleShape) -> Result<Loss, DataError> {
        let tensors = lock(&self.tensors);
        let target = tensors.target();
        let wrong = |expected: String, got: String| DataError::Unsuitable { set: SET, expected, got };
        let dims = target.size()[1..].to_vec();
        if target.kind() != Kind::Int64 {
            return match dims == output.dims {
                true => Ok(Loss::MeanSquared),
                false => Err(wrong(
                    format!("targets of {:?} per row, as the model returns", output.dims),
                    format!("{dims:?}"),
                )),
            };
        }
        let (classes, of) = match output.dims[..] {
            [classes] => (classes, Vec::new()),
            [tokens, classes] => (classes, vec![tokens]),
            [classes, ref pixels @ ..] => (classes, pixels.to_vec()),
            [] => (0, Vec::new()),
        };
        if dims != of {
            return Err(wrong(
                format!("class numbers of {of:?} per row for a model that returns {:?}", output.dims),
                format!("{dims:?}"),
            ));
        }
        if target.numel() > 0 {
            let ignored = target.f_eq(IGNORED)?;
            let [least, most] = [target.f_masked_fill(&ignored, 0)?.f_min()?, target.f_max()?];
            let (least, most) = (i64::try_from(least)?, i64::try_from(most)?);
            if least < 0 || most >= classes {
                let expected = format!("class numbers from 0 to {}, or {IGNORED} for none", classes - 1);
                return Err(wrong(expected, format!("some from {least} to {most}")));
            }
        }
        Ok(Loss::CrossEntropy)
    }
}

/// All rows but the last tenth, or the last tenth.
fn share(tensors: &TensorDataset, part: Split) -> Result<TensorDataset, DataError> {
    let rows = tensors.target().size()[0];
    if rows < 2 {
        let got = format!("{rows}");
        return Err(DataError::Unsuitable { set: SET, expected: "at least 2 rows".to_owned(), got });
    }
    let test = (rows + TEST_SHARE - 1) / TEST_SHARE;
    let (start, length) = match part {
        Split::Train => (0, rows - test),
        Split::Test => (rows - test, test),
    };
    let cut = |tensor: &Tensor| {
        let rows = tensor.f_narrow(0, start, length)?;
        // A copy, so that the few rows for testing do not keep all the others in memory.
        match part {
            Split::Train => Ok(rows),
            Split::Test => engine::copy(&rows),
        }
    };
    let inputs = tensors.inputs().iter().map(cut).collect::<Result<_, Fault>>()?;
    TensorDataset::with_inputs(inputs, cut(tensors.target())?)
}

fn as_input(tensor: Tensor, shape: &SampleShape) -> Result<Tensor, DataError> {
    let dims = tensor.size();
    let fits = dims.get(1..) == Some(&shape.dims[..]);
    if !fits || (shape.kind == Kind::Int64 && !is_integer(tensor.kind())) {
        return Err(DataError::Unsuitable {
            set: SET,
            expected: format!(
                "inputs of {:?} per row and of the type {:?}, as the model takes",
                shape.dims, shape.kind
            ),
            got: format!("{dims:?} of {:?}", tensor.kind()),
        });
    }
    Ok(tensor.f_to_kind(shape.kind)?)
}

fn as_target(tensor: Tensor) -> Result<Tensor, DataError> {
    Ok(tensor.f_to_kind(if is_integer(tensor.kind()) { Kind::Int64 } else { Kind::Float })?)
}

fn is_integer(kind: Kind) -> bool {
    matches!(kind, Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64 | Kind::Bool)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("distgpipe-tensors-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }

        fn safetensors(&self, tensors: &[(&str, Tensor)]) -> PathBuf {
            let path = self.0.join("data.safetensors");
            Tensor::write_safetensors(tensors, &path).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn counted(dims: &[i64], kind: Kind) -> Tensor {
        Tensor::arange(dims.iter().product::<i64>(), (kind, Device::Cpu)).view(dims)
    }

    #[test]
    fn the_last_tenth_is_for_testing_unless_the_file_has_test_rows() {
        let folder = Folder::new("split");
        let (input, target) = (counted(&[25, 4], Kind::Int), counted(&[25], Kind::Uint8));
        let path = folder.safetensors(&[("input", input.shallow_clone()), ("target", target.shallow_clone())]);
        let shape = [SampleShape::int(&[4])];
        let [train, test] = [Split::Train, Split::Test].map(|part| TensorFiles::open(&path, &shape, part).unwrap());
        assert_eq!((train.len(), test.len(), train.classes()), (22, 3, Some(22)));
        let batch = test.batch(&[0], LoadPass::new(0, 0)).unwrap();
        assert_eq!(Vec::<i64>::try_from(batch.inputs[0].view(-1)).unwrap(), [88, 89, 90, 91]);
        assert_eq!((batch.inputs[0].kind(), i64::try_from(batch.target).unwrap()), (Kind::Int64, 22));
        let own = [("test_input.0", counted(&[2, 4], Kind::Int64)), ("test_target", counted(&[2], Kind::Int64))];
        let all: Vec<(&str, Tensor)> = [("input.0", input), ("target", target)].into_iter().chain(own).collect();
        let path = folder.safetensors(&all);
        let rows = [Split::Train, Split::Test].map(|part| TensorFiles::open(&path, &shape, part).unwrap().len());
        assert_eq!(rows, [25, 2]);
        let path = folder.safetensors(&all[..3]);
        let refused = TensorFiles::open(&path, &shape, Split::Train).unwrap_err().to_string();
        assert!(refused.contains("test_target beside test_input.0"), "{refused}");
    }

    /// The bytes of numpy.save.
    fn npy(descr: &str, shape: &str, elements: &[u8]) -> Vec<u8> {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
        let length = u16::try_from(header.len()).unwrap().to_le_bytes();
        [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), elements].concat()
    }

    #[test]
    fn a_directory_of_numpy_files_is_a_data_set() {
        let folder = Folder::new("numpy");
        let floats: Vec<u8> = (0..20).flat_map(|i| f64::from(i).to_le_bytes()).collect();
        std::fs::write(folder.0.join("input.npy"), npy("<f8", "(10, 2)", &floats)).unwrap();
        std::fs::write(folder.0.join("target.npy"), npy("|i1", "(10,)", &[0; 10])).unwrap();
        let set = TensorFiles::open(&folder.0, &[SampleShape::float(&[2])], Split::Train).unwrap();
        let batch = set.batch(&[8], LoadPass::new(0, 0)).unwrap();
        assert_eq!(Vec::<f32>::try_from(batch.inputs[0].view(-1)).unwrap(), [16.0, 17.0]);
        std::fs::write(folder.0.join("input.npy"), npy("<f8", "(10, 9999999999)", &floats)).unwrap();
        let refused = TensorFiles::open(&folder.0, &[SampleShape::float(&[2])], Split::Train).unwrap_err().to_string();
        assert!(refused.contains("input.npy") && refused.contains("truncated"), "{refused}");
    }

    #[test]
    fn what_does_not_fit_the_model_is_named() {
        let folder = Folder::new("unfit");
        let open = |tensors: &[(&str, Tensor)], shape: SampleShape| {
            TensorFiles::open(&folder.safetensors(tensors), &[shape], Split::Train)
        };
        let said =
            |tensors: &[(&str, Tensor)], shape| open(tensors, shape).err().map(|error| error.to_string()).unwrap();
        let (input, target) = (("input", counted(&[20, 4], Kind::Float)), ("target", counted(&[20], Kind::Int64)));
        let both = || [(input.0, input.1.shallow_clone()), (target.0, target.1.shallow_clone())];
        assert!(said(&both()[..1], SampleShape::float(&[4])).contains("no target"));
        assert!(said(&both()[1..], SampleShape::float(&[4])).contains("no input"));
        assert!(said(&both(), SampleShape::float(&[5])).contains("inputs of [5] per row"));
        assert!(said(&both(), SampleShape::int(&[4])).contains("of the type Int64"));
        let set = open(&both(), SampleShape::float(&[4])).unwrap();
        assert_eq!(set.loss_for(&SampleShape::float(&[20])).unwrap(), Loss::CrossEntropy);
        let few = set.loss_for(&SampleShape::float(&[10])).unwrap_err().to_string();
        assert!(few.contains("class numbers from 0 to 9") && few.contains("from 0 to 17"), "{few}");
        let tokens = set.loss_for(&SampleShape::float(&[4, 20])).unwrap_err().to_string();
        assert!(tokens.contains("class numbers of [4] per row"), "{tokens}");
        let ignored = Tensor::from_slice(&[0_i64, IGNORED, 2, IGNORED]).view([4, 1]);
        let set = TensorFiles::from(TensorDataset::new(counted(&[4, 1], Kind::Int64), ignored).unwrap());
        assert_eq!(set.loss_for(&SampleShape::float(&[1, 3])).unwrap(), Loss::CrossEntropy);
        let floats = TensorDataset::new(counted(&[4, 2], Kind::Float), counted(&[4, 2], Kind::Float)).unwrap();
        let floats = TensorFiles::from(floats);
        assert_eq!(floats.loss_for(&SampleShape::float(&[2])).unwrap(), Loss::MeanSquared);
        assert!(floats.loss_for(&SampleShape::float(&[3])).is_err());
    }
}
