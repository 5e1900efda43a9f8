//! Lists of tensors, and operations on all tensors of a list at once. On a GPU, such an operation launches a kernel per few dozen
//! tensors; on a CPU, libtorch takes the tensors one after another. The values have the bits of the operations on single
//! tensors on both.

use super::ffi::{layout, outcome};
use crate::failure::Fault;
use libc::{c_char, c_int};
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

extern "C" {
    fn dg_tensor_list(
        operation: c_int,
        this: *const *const C_tensor,
        other: *const *const C_tensor,
        third: *const *const C_tensor,
        scalar: f64,
        count: usize,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn dg_fused_sgd(
        parameters: *const *const C_tensor,
        gradients: *const *const C_tensor,
        buffers: *const *const C_tensor,
        count: usize,
        weight_decay: f64,
        momentum: f64,
        learning_rate: f64,
        nesterov: bool,
        first_step: bool,
    ) -> *mut c_char;
    fn dg_fused_adam(
        parameters: *const *const C_tensor,
        gradients: *const *const C_tensor,
        first: *const *const C_tensor,
        second: *const *const C_tensor,
        count: usize,
        steps: f64,
        learning_rate: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
        decoupled: bool,
    ) -> *mut c_char;
}

/// The constants of an update by libtorch's fused SGD.
pub(crate) struct FusedSgd {
    pub learning_rate: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    pub nesterov: bool,
    /// Whether the momentum buffers have no values yet.
    pub first_step: bool,
}

/// The constants of an update by libtorch's fused Adam.
pub(crate) struct FusedAdam {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// AdamW: the weight decay does not pass through the moments.
    pub decoupled: bool,
    /// How many updates there were, this one included.
    pub steps: i32,
}

/// The operations of `tensor_list.cpp`, with its numbers.
#[derive(Clone, Copy)]
enum Operation {
    MulScalar = 0,
    MulScalarInPlace = 1,
    MulInPlace = 2,
    Add = 3,
    AddInPlace = 4,
    AddScalarInPlace = 5,
    AddcmulInPlace = 6,
    LerpInPlace = 7,
    Sqrt = 8,
    Div = 9,
    DivScalarInPlace = 10,
    CopyInPlace = 11,
    MaxNorm = 12,
    ZeroInPlace = 13,
}

/// Tensors that an operation changes or reads together. All lists of an operation have as many tensors.
#[derive(Default)]
pub(crate) struct TensorList(Vec<Tensor>);

impl FromIterator<Tensor> for TensorList {
    fn from_iter<I: IntoIterator<Item = Tensor>>(tensors: I) -> Self {
        TensorList(tensors.into_iter().collect())
    }
}

impl<'a> Extend<&'a Tensor> for TensorList {
    fn extend<I: IntoIterator<Item = &'a Tensor>>(&mut self, tensors: I) {
        self.0.extend(tensors.into_iter().map(Tensor::shallow_clone));
    }
}

impl<'a> FromIterator<&'a Tensor> for TensorList {
    fn from_iter<I: IntoIterator<Item = &'a Tensor>>(tensors: I) -> Self {
        tensors.into_iter().map(Tensor::shallow_clone).collect()
    }
}

impl TensorList {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Tensor> {
        self.0.iter()
    }

    pub fn into_tensors(self) -> Vec<Tensor> {
        self.0
    }

    fn run(
        &self,
        operation: Operation,
        others: [Option<&TensorList>; 2],
        scalar: f64,
        makes: bool,
    ) -> Result<Self, Fault> {
        let count = self.0.len();
        self.check_lengths(&others.iter().flatten().copied().collect::<Vec<_>>())?;
        if count == 0 {
            return Ok(TensorList(Vec::new()));
        }
        let this = self.pointers();
        let others = others.map(|other| other.map(TensorList::pointers));
        let [other, third] = others.each_ref().map(|list| list.as_ref().map_or(std::ptr::null(), Vec::as_ptr));
        let mut results = vec![std::ptr::null_mut(); if makes { count } else { 0 }];
        let results_ptr = if makes { results.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: the arrays hold `count` handles of tensors that outlive the call, or are null; libtorch allows changing a tensor
        // behind a shared handle. On success the shim has stored `count` handles from `new`, which tch's Tensors then own.
        unsafe {
            outcome(dg_tensor_list(operation as c_int, this.as_ptr(), other, third, scalar, count, results_ptr))
                .map_err(Fault::engine)?;
            Ok(results.into_iter().map(|result| Tensor::from_ptr(result)).collect())
        }
    }

    fn make(&self, operation: Operation, other: Option<&TensorList>, scalar: f64) -> Result<TensorList, Fault> {
        self.run(operation, [other, None], scalar, true)
    }

    fn change(&self, operation: Operation, others: [Option<&TensorList>; 2], scalar: f64) -> Result<&Self, Fault> {
        self.run(operation, others, scalar, false).map(|_| self)
    }

    pub fn mul_scalar(&self, factor: f64) -> Result<TensorList, Fault> {
        self.make(Operation::MulScalar, None, factor)
    }

    pub fn mul_scalar_(&self, factor: f64) -> Result<&Self, Fault> {
        self.change(Operation::MulScalarInPlace, [None, None], factor)
    }

    pub fn mul_(&self, other: &TensorList) -> Result<&Self, Fault> {
        self.change(Operation::MulInPlace, [Some(other), None], 0.0)
    }

    pub fn add(&self, other: &TensorList) -> Result<TensorList, Fault> {
        self.make(Operation::Add, Some(other), 0.0)
    }

    pub fn add_(&self, other: &TensorList) -> Result<&Self, Fault> {
        self.change(Operation::AddInPlace, [Some(other), None], 0.0)
    }

    pub fn add_scalar_(&self, summand: f64) -> Result<&Self, Fault> {
        self.change(Operation::AddScalarInPlace, [None, None], summand)
    }

    /// Adds the products of two lists.
    pub fn addcmul_(&self, a: &TensorList, b: &TensorList) -> Result<&Self, Fault> {
        self.change(Operation::AddcmulInPlace, [Some(a), Some(b)], 0.0)
    }

    /// Moves towards `end` by this part of the way.
    pub fn lerp_(&self, end: &TensorList, weight: f64) -> Result<&Self, Fault> {
        self.change(Operation::LerpInPlace, [Some(end), None], weight)
    }

    pub fn sqrt(&self) -> Result<TensorList, Fault> {
        self.make(Operation::Sqrt, None, 0.0)
    }

    pub fn div(&self, divisor: &TensorList) -> Result<TensorList, Fault> {
        self.make(Operation::Div, Some(divisor), 0.0)
    }

    pub fn div_scalar_(&self, divisor: f64) -> Result<&Self, Fault> {
        self.change(Operation::DivScalarInPlace, [None, None], divisor)
    }

    /// Sets all values to 0.
    pub fn zero_(&self) -> Result<&Self, Fault> {
        self.change(Operation::ZeroInPlace, [None, None], 0.0)
    }

    /// Copies the values of tensors of the same shapes.
    pub fn copy_(&self, source: &TensorList) -> Result<&Self, Fault> {
        self.change(Operation::CopyInPlace, [Some(source), None], 0.0)
    }

    /// The largest magnitude in each tensor, which must not be empty; NaN if one of its values is.
    pub fn max_norm(&self) -> Result<TensorList, Fault> {
        self.make(Operation::MaxNorm, None, 0.0)
    }

    fn pointers(&self) -> Vec<*const C_tensor> {
        self.0.iter().map(Tensor::as_ptr).collect()
    }

    /// Fails unless the other lists have as many tensors as this one.
    fn check_lengths(&self, others: &[&TensorList]) -> Result<(), Fault> {
        match others.iter().find(|other| other.0.len() != self.0.len()) {
            Some(other) => {
                Err(Fault::internal(format!("a list of {} tensors", self.0.len()), other.0.len().to_string()))
            }
            None => Ok(()),
        }
    }

    /// Updates these parameters; `buffers` are those of the momentum, if there is one.
    pub fn fused_sgd(
        &self,
        gradients: &TensorList,
        buffers: Option<&TensorList>,
        with: &FusedSgd,
    ) -> Result<(), Fault> {
        self.check_lengths(&[&[gradients][..], &buffers.into_iter().collect::<Vec<_>>()].concat())?;
        let (parameters, gradients, buffers) =
            (self.pointers(), gradients.pointers(), buffers.map(TensorList::pointers));
        // SAFETY: the arrays hold as many handles of tensors that outlive the call, or are null.
        outcome(unsafe {
            dg_fused_sgd(
                parameters.as_ptr(),
                gradients.as_ptr(),
                buffers.as_ref().map_or(std::ptr::null(), Vec::as_ptr),
                parameters.len(),
                with.weight_decay,
                with.momentum,
                with.learning_rate,
                with.nesterov,
                with.first_step,
            )
        })
        .map_err(Fault::engine)
    }

    /// Updates these parameters and their moments.
    pub fn fused_adam(
        &self,
        gradients: &TensorList,
        [first, second]: [&TensorList; 2],
        with: &FusedAdam,
    ) -> Result<(), Fault> {
        self.check_lengths(&[gradients, first, second])?;
        if self.is_empty() {
            return Ok(());
        }
        let lists = [self, gradients, first, second].map(TensorList::pointers);
        let [parameters, gradients, first, second] = lists.each_ref().map(|list| list.as_ptr());
        // SAFETY: the arrays hold as many handles, at least one, of tensors that outlive the call.
        outcome(unsafe {
            dg_fused_adam(
                parameters,
                gradients,
                first,
                second,
                self.0.len(),
                f64::from(with.steps),
                with.learning_rate,
                with.beta1,
                with.beta2,
                with.weight_decay,
                with.eps,
                with.decoupled,
            )
        })
        .map_err(Fault::engine)
    }

    /// Zeros of the same shapes, types and layouts.
    pub fn zeros_like(&self) -> Result<TensorList, Fault> {
        Ok(TensorList(self.0.iter().map(Tensor::f_zeros_like).collect::<Result<_, _>>()?))
    }

    /// The same values in memory of their own.
    pub fn copied(&self) -> Result<TensorList, Fault> {
        let copies = TensorList(self.0.iter().map(Tensor::f_empty_like).collect::<Result<_, _>>()?);
        copies.copy_(self)?;
        Ok(copies)
    }

    /// The same values as doubles, in the same layouts and in memory of their own.
    pub fn in_double(&self) -> Result<TensorList, Fault> {
        let empty = |tensor: &Tensor| match layout(tensor) {
            Some(_) => Tensor::f_empty_strided(tensor.size(), tensor.stride(), (Kind::Double, tensor.device())),
            None => tensor.f_empty_like()?.f_to_kind(Kind::Double),
        };
        let doubles = TensorList(self.0.iter().map(empty).collect::<Result<_, _>>()?);
        doubles.copy_(self)?;
        Ok(doubles)
    }
}
