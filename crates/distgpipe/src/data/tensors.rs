//! Tensors in memory as a data set, as PyTorch's `TensorDataset`.

use super::{check, DataError, Dataset, LoadPass};
use crate::driver::pipeline::Batch;
use crate::model::layer::SampleShape;
use tch::{Kind, Tensor};

/// Rows of tensors: row `i` of the data set is row `i` of every tensor.
///
/// ```
/// use distgpipe::data::{Loader, LoaderOptions, TensorDataset};
/// use distgpipe::tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let points = Tensor::randn([300, 2], (Kind::Float, Device::Cpu));
/// let labels = points.select(1, 0).gt(0.0).to_kind(Kind::Int64);
/// let loader = Loader::new(TensorDataset::new(points, labels)?, LoaderOptions::training(50, 0))?;
/// assert_eq!((loader.batches(), loader.classes()), (6, Some(2)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TensorDataset {
    inputs: Vec<Tensor>,
    target: Tensor,
    shapes: Vec<SampleShape>,
    rows: usize,
    classes: Option<usize>,
}

impl TensorDataset {
    /// Inputs and targets for a model with one input. The first dimension of both counts rows. Targets are class numbers
    /// (`Int64`, `[rows]`), or whatever the loss takes.
    ///
    /// # Errors
    /// If the tensors have different numbers of rows.
    pub fn new(input: Tensor, target: Tensor) -> Result<Self, DataError> {
        Self::with_inputs(vec![input], target)
    }

    /// The same for a model with several inputs, such as token numbers and their mask.
    ///
    /// # Errors
    /// If there is no input, or the tensors have different numbers of rows.
    pub fn with_inputs(inputs: Vec<Tensor>, target: Tensor) -> Result<Self, DataError> {
        let sizes: Vec<Vec<i64>> = inputs.iter().chain([&target]).map(Tensor::size).collect();
        let rows = sizes[0].first().copied();
        if inputs.is_empty() || rows.is_none() || sizes.iter().any(|size| size.first().copied() != rows) {
            return Err(DataError::Unsuitable {
                set: "tensors",
                expected: "inputs and a target with the same first dimension, which counts rows".to_owned(),
                got: format!("sizes {sizes:?}, the target last"),
            });
        }
        // Rows are data: nothing is computed back through them.
        let inputs: Vec<Tensor> = inputs.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?;
        let target = target.f_detach()?;
        let shape = |tensor: &Tensor| SampleShape { dims: tensor.size()[1..].to_vec(), kind: tensor.kind() };
        let (shapes, classes) = (inputs.iter().map(shape).collect(), class_count(&target)?);
        let rows = rows.and_then(|rows| usize::try_from(rows).ok()).unwrap_or(0);
        Ok(TensorDataset { inputs, target, shapes, rows, classes })
    }
}

impl TensorDataset {
    /// The tensors of the model's inputs.
    pub(super) fn inputs(&self) -> &[Tensor] {
        &self.inputs
    }

    /// The targets of all rows.
    pub(super) fn target(&self) -> &Tensor {
        &self.target
    }
}

/// The number of classes in targets that are class numbers. Negative ones mark rows without a class.
fn class_count(target: &Tensor) -> Result<Option<usize>, DataError> {
    if target.kind() != Kind::Int64 || target.dim() != 1 || target.numel() == 0 {
        return Ok(None);
    }
    let largest = i64::try_from(target.f_max()?)?;
    Ok(usize::try_from(largest).ok().map(|largest| largest + 1))
}

/// The clone shares the tensors' memory.
impl Clone for TensorDataset {
    fn clone(&self) -> Self {
        TensorDataset {
            inputs: self.inputs.iter().map(Tensor::shallow_clone).collect(),
            target: self.target.shallow_clone(),
            shapes: self.shapes.clone(),
            ..*self
        }
    }
}

impl Dataset for TensorDataset {
    fn len(&self) -> usize {
        self.rows
    }

    fn classes(&self) -> Option<usize> {
        self.classes
    }

    fn input(&self) -> &[SampleShape] {
        &self.shapes
    }

    fn batch(&self, rows: &[usize], _: LoadPass<'_>) -> Result<Batch, DataError> {
        check(rows, self.rows)?;
        let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
        let rows = Tensor::f_from_slice(&rows)?.f_to_device(self.target.device())?;
        let select = |tensor: &Tensor| tensor.f_index_select(0, &rows.f_to_device(tensor.device())?);
        let inputs = self.inputs.iter().map(select).collect::<Result<_, _>>()?;
        Ok(Batch { inputs, target: select(&self.target)?, samples: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Loader, LoaderOptions};
    use tch::Device;

    fn numbers(rows: i64, width: i64) -> Tensor {
        Tensor::arange(rows * width, (Kind::Float, Device::Cpu)).view([rows, width])
    }

    #[test]
    fn a_batch_has_the_rows_asked_for_of_every_tensor() {
        let labels = Tensor::from_slice(&[0_i64, 2, 1, -100, 0]);
        let set = TensorDataset::with_inputs(vec![numbers(5, 3), numbers(5, 2)], labels).unwrap();
        assert_eq!((set.len(), set.classes()), (5, Some(3)));
        assert_eq!(set.input(), [SampleShape::float(&[3]), SampleShape::float(&[2])]);
        let batch = set.batch(&[4, 1], LoadPass::new(0, 0)).unwrap();
        assert_eq!(batch.inputs[0], Tensor::from_slice(&[12.0_f32, 13.0, 14.0, 3.0, 4.0, 5.0]).view([2, 3]));
        assert_eq!(batch.inputs[1], Tensor::from_slice(&[8.0_f32, 9.0, 2.0, 3.0]).view([2, 2]));
        assert_eq!(batch.target, Tensor::from_slice(&[0_i64, 2]));
        assert!(matches!(set.batch(&[5], LoadPass::new(0, 0)), Err(DataError::NoSuchRow { len: 5, got: 5 })));
        // Targets of a regression are no classes.
        assert_eq!(TensorDataset::new(numbers(5, 3), numbers(5, 1)).unwrap().classes(), None);
    }

    #[test]
    fn tensors_that_do_not_fit_together_are_refused() {
        let scalar = || Tensor::from(1.0);
        for (inputs, target) in [
            (vec![numbers(5, 3)], numbers(4, 1)),
            (vec![numbers(5, 3), numbers(4, 3)], numbers(5, 1)),
            (vec![], numbers(5, 1)),
            (vec![scalar()], scalar()),
        ] {
            let refused = TensorDataset::with_inputs(inputs, target).unwrap_err().to_string();
            assert!(refused.contains("first dimension") && refused.contains("sizes ["), "{refused}");
        }
    }

    /// A data set of the user's that holds tensors, as they come: it once needed an `unsafe impl Sync`.
    #[test]
    fn a_data_set_that_holds_tensors_loads_on_the_loaders_threads() {
        struct Own(TensorDataset);
        impl Dataset for Own {
            fn len(&self) -> usize {
                self.0.len()
            }
            fn classes(&self) -> Option<usize> {
                None
            }
            fn input(&self) -> &[SampleShape] {
                self.0.input()
            }
            fn batch(&self, rows: &[usize], pass: LoadPass<'_>) -> Result<Batch, DataError> {
                self.0.batch(rows, pass)
            }
        }
        let set = TensorDataset::new(numbers(6, 2), numbers(6, 1)).unwrap();
        let loader = Loader::new(Own(set.clone()), LoaderOptions::testing(4)).unwrap();
        let targets: Vec<Tensor> = loader.epoch(0).map(|batch| batch.unwrap().target).collect();
        assert_eq!(Tensor::cat(&targets, 0), numbers(6, 1));
        assert_eq!(loader.input(), set.input());
    }
}
