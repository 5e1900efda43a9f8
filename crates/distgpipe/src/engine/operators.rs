//! libtorch's operators by name: found once, and called with arguments that their schema describes. Arguments that are the same
//! in every call are converted once.

use super::ffi::{outcome, scalar_type};
use crate::sync::lock;
use libc::{c_char, c_int, c_void};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, OnceLock};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

#[repr(C)]
struct RawOperator {
    private: [u8; 0],
}

#[repr(C)]
struct RawCall {
    private: [u8; 0],
}

/// The fields are those of the shim's `dg_argument`.
#[repr(C)]
struct RawArgument {
    position: i32,
    tag: i32,
    integer: i64,
    number: f64,
    data: *const c_void,
    count: usize,
}

/// The tags of the shim.
#[derive(Clone, Copy)]
enum Tag {
    None,
    Tensor,
    Tensors,
    Int,
    Ints,
    Float,
    Floats,
    Bool,
    Bools,
    Text,
    Device,
    ScalarType,
    Layout,
    MemoryFormat,
}

extern "C" {
    fn dg_operator_find(name: *const c_char, overload: *const c_char, result: *mut *mut RawOperator) -> *mut c_char;
    fn dg_operator_free(operator: *mut RawOperator);
    fn dg_operator_position(operator: *const RawOperator, name: *const c_char) -> c_int;
    fn dg_operator_refusal(operator: *const RawOperator) -> *mut c_char;
    #[cfg(test)]
    fn dg_operator_aliases(operator: *const RawOperator) -> c_int;
    fn dg_call_prepare(
        operator: *const RawOperator,
        fixed: *const RawArgument,
        fixed_count: usize,
        given: *const i32,
        given_count: usize,
        result: *mut *mut RawCall,
    ) -> *mut c_char;
    fn dg_call_free(call: *mut RawCall);
    fn dg_call_run(
        call: *const RawCall,
        given: *const RawArgument,
        given_count: usize,
        cuda: c_int,
        results: *mut *mut C_tensor,
        expected: usize,
    ) -> *mut c_char;
    fn dg_grad_enabled() -> bool;
    fn dg_seed_default(cuda: c_int, seed: u64) -> *mut c_char;
}

/// An argument of a call.
#[derive(Clone, Debug)]
pub enum Argument<'a> {
    None,
    Tensor(&'a Tensor),
    Tensors(Vec<Option<&'a Tensor>>),
    Int(i64),
    Ints(Vec<i64>),
    Float(f64),
    Floats(Vec<f64>),
    Bool(bool),
    Bools(&'a [bool]),
    Text(&'a str),
    /// An element type.
    Type(Kind),
    /// The strided layout.
    Strided,
    /// A number of libtorch's enumeration of memory formats.
    MemoryFormat(i64),
    /// The device of the call.
    Device,
}

/// An operator of libtorch.
#[derive(Debug)]
pub struct Operator {
    raw: *mut RawOperator,
}

// SAFETY: the shim's operator is a handle to an entry of libtorch's dispatcher, which any thread may read and call.
unsafe impl Send for Operator {}
// SAFETY: as above; no function of the shim changes the handle.
unsafe impl Sync for Operator {}

impl Drop for Operator {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `dg_operator_find` and is freed once.
        unsafe { dg_operator_free(self.raw) }
    }
}

impl Operator {
    /// The operator `aten::NAME` with this overload, as PyTorch writes it: `conv2d.default`. Each is looked up once.
    pub fn find(operator: &str) -> Result<Arc<Self>, String> {
        static FOUND: OnceLock<Mutex<HashMap<String, Arc<Operator>>>> = OnceLock::new();
        let mut found = lock(FOUND.get_or_init(Mutex::default));
        if let Some(known) = found.get(operator) {
            return Ok(known.clone());
        }
        let fresh = Arc::new(Self::look_up(operator)?);
        found.insert(operator.to_owned(), fresh.clone());
        Ok(fresh)
    }

    fn look_up(operator: &str) -> Result<Self, String> {
        let (name, overload) = operator.split_once('.').ok_or("expected NAME.OVERLOAD")?;
        let overload = if overload == "default" { "" } else { overload };
        let text = |text: String| CString::new(text).map_err(|_| "expected a name without NUL".to_owned());
        let (name, overload) = (text(format!("aten::{name}"))?, text(overload.to_owned())?);
        let mut raw = std::ptr::null_mut();
        // SAFETY: both texts end with NUL; on success the shim stores a pointer from `new`, which `drop` frees.
        outcome(unsafe { dg_operator_find(name.as_ptr(), overload.as_ptr(), &mut raw) })?;
        Ok(Operator { raw })
    }

    /// Fails, with the reason, if the operator does anything but compute new tensors from tensors and numbers, as far as its
    /// schema says. One that takes a text, such as the name of a file, always does.
    pub fn check_computes(&self) -> Result<(), String> {
        // SAFETY: a live operator, only read; the shim returns null or a message from malloc.
        outcome(unsafe { dg_operator_refusal(self.raw) })
    }

    /// The position of a parameter.
    pub fn position(&self, parameter: &str) -> Option<usize> {
        let name = CString::new(parameter).ok()?;
        // SAFETY: a live operator, only read, and a text that ends with NUL.
        usize::try_from(unsafe { dg_operator_position(self.raw, name.as_ptr()) }).ok()
    }

    /// Prepares calls with the arguments in `fixed`, at their positions. Each call gives those at the positions in `given`:
    /// tensors, the device, and numbers that are not always the same. The others have the schema's default. Fails if an argument
    /// is missing, or of another type than the schema's.
    pub fn prepare(self: &Arc<Self>, fixed: &[(usize, Argument<'_>)], given: &[usize]) -> Result<Call, String> {
        let pointers = pointers(fixed);
        let fixed = raw_arguments(fixed, &pointers)?;
        let given = given.iter().map(|&position| position_of(position)).collect::<Result<Vec<i32>, String>>()?;
        let mut call = std::ptr::null_mut();
        // SAFETY: every pointer comes with the count beside it, and the shim keeps none but that of the operator, which the call
        // keeps alive. On success it stores a pointer from `new`, which `drop` frees.
        outcome(unsafe {
            dg_call_prepare(self.raw, fixed.as_ptr(), fixed.len(), given.as_ptr(), given.len(), &mut call)
        })?;
        Ok(Call { raw: call, _operator: self.clone() })
    }
}

/// An operator with the arguments that are the same in every call.
#[derive(Debug)]
pub struct Call {
    raw: *mut RawCall,
    _operator: Arc<Operator>,
}

// SAFETY: the shim only reads the call after it is made; it copies the values in it, whose counts of references are atomic.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Sync for Call {}

impl Drop for Call {
    fn drop(&mut self) {
        // SAFETY: the pointer comes from `dg_call_prepare` and is freed once.
        unsafe { dg_call_free(self.raw) }
    }
}

impl Call {
    /// Calls the operator with the remaining arguments, at their positions. It must return `results` tensors.
    pub fn run(&self, given: &[(usize, Argument<'_>)], device: Device, results: usize) -> Result<Vec<Tensor>, String> {
        let pointers = pointers(given);
        let arguments = raw_arguments(given, &pointers)?;
        let mut tensors: Vec<*mut C_tensor> = vec![std::ptr::null_mut(); results];
        // SAFETY: every pointer among the arguments refers to data of `given` or `pointers` that outlives the call, with the
        // count beside it. The shim writes at most `results` handles from `new`, all of them on success and none on failure.
        unsafe {
            outcome(dg_call_run(
                self.raw,
                arguments.as_ptr(),
                arguments.len(),
                cuda(device),
                tensors.as_mut_ptr(),
                results,
            ))?;
            Ok(tensors.into_iter().map(|tensor| Tensor::from_ptr(tensor)).collect())
        }
    }
}

/// The tensors of all lists among the arguments, one list after another.
fn pointers(arguments: &[(usize, Argument<'_>)]) -> Vec<*const C_tensor> {
    let lists = arguments.iter().filter_map(|(_, argument)| match argument {
        Argument::Tensors(list) => Some(list),
        _ => None,
    });
    lists.flatten().map(|tensor| tensor.map_or(std::ptr::null(), Tensor::as_ptr)).collect()
}

/// The arguments for the shim. They refer to `given` and to its [`pointers`].
fn raw_arguments(given: &[(usize, Argument<'_>)], pointers: &[*const C_tensor]) -> Result<Vec<RawArgument>, String> {
    let mut rest = pointers;
    let mut all = Vec::with_capacity(given.len());
    for (position, argument) in given {
        let length = if let Argument::Tensors(list) = argument { list.len() } else { 0 };
        let (list, after) = rest.split_at(length);
        rest = after;
        all.push(raw(*position, argument, list)?);
    }
    Ok(all)
}

fn position_of(position: usize) -> Result<i32, String> {
    i32::try_from(position).map_err(|_| "a position beyond 31 bits".to_owned())
}

fn raw(position: usize, argument: &Argument<'_>, list: &[*const C_tensor]) -> Result<RawArgument, String> {
    let position = position_of(position)?;
    let plain =
        |tag: Tag| RawArgument { position, tag: tag as i32, integer: 0, number: 0.0, data: std::ptr::null(), count: 0 };
    let slice = |tag: Tag, data: *const c_void, count: usize| RawArgument { data, count, ..plain(tag) };
    let int = |tag: Tag, integer: i64| RawArgument { integer, ..plain(tag) };
    Ok(match argument {
        Argument::None => plain(Tag::None),
        Argument::Tensor(tensor) => slice(Tag::Tensor, tensor.as_ptr().cast(), 1),
        Argument::Tensors(_) => slice(Tag::Tensors, list.as_ptr().cast(), list.len()),
        Argument::Int(integer) => int(Tag::Int, *integer),
        Argument::Ints(all) => slice(Tag::Ints, all.as_ptr().cast(), all.len()),
        Argument::Float(number) => RawArgument { number: *number, ..plain(Tag::Float) },
        Argument::Floats(all) => slice(Tag::Floats, all.as_ptr().cast(), all.len()),
        Argument::Bool(flag) => int(Tag::Bool, i64::from(*flag)),
        Argument::Bools(all) => slice(Tag::Bools, all.as_ptr().cast(), all.len()),
        Argument::Text(text) => slice(Tag::Text, text.as_ptr().cast(), text.len()),
        Argument::Type(kind) => int(Tag::ScalarType, i64::from(scalar_type(*kind)?)),
        Argument::Strided => int(Tag::Layout, 0),
        Argument::MemoryFormat(number) => int(Tag::MemoryFormat, *number),
        Argument::Device => plain(Tag::Device),
    })
}

fn cuda(device: Device) -> c_int {
    match device {
        Device::Cuda(index) => c_int::try_from(index).unwrap_or(c_int::MAX),
        _ => -1,
    }
}

/// Runs `call` as if its results were needed by a backward pass, and drops their graph if none is recorded. Some operators
/// choose another kernel without a backward pass, with other last bits.
pub fn as_with_grad(call: impl FnOnce() -> Result<Vec<Tensor>, String>) -> Result<Vec<Tensor>, String> {
    // SAFETY: reads a thread-local of libtorch.
    if unsafe { dg_grad_enabled() } {
        return call();
    }
    let results = tch::with_grad(call)?;
    results.iter().map(|result| result.f_detach().map_err(|error| error.to_string())).collect()
}

/// Runs `draw` with libtorch's own generator of the device at this seed. Operators that draw without a generator as
/// argument are called in it, one at a time in the process.
pub fn seeded<T>(device: Device, seed: u64, draw: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static DRAWING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = lock(&DRAWING);
    // SAFETY: takes no pointer; the shim locks the generator.
    outcome(unsafe { dg_seed_default(cuda(device), seed) })?;
    draw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::pt2::operators::{all, effect, Effect};

    /// Calls an operator twice: with numbers that are prepared, and with numbers that the call gives. Both do the same.
    fn call(name: &str, arguments: Vec<(&str, Argument<'_>)>, results: usize) -> Result<Vec<Tensor>, String> {
        let operator = Operator::find(name).unwrap();
        let placed = arguments.into_iter().map(|(name, argument)| (operator.position(name).unwrap(), argument));
        let placed: Vec<_> = placed.collect();
        let varies = |(_, argument): &(usize, Argument<'_>)| matches!(argument, Argument::Tensor(_) | Argument::Device);
        let (given, fixed): (Vec<_>, Vec<_>) = placed.clone().into_iter().partition(varies);
        let run = |fixed: &[(usize, Argument<'_>)], given: &[(usize, Argument<'_>)]| {
            let positions: Vec<usize> = given.iter().map(|(position, _)| *position).collect();
            operator.prepare(fixed, &positions)?.run(given, Device::Cpu, results)
        };
        let (prepared, at_once) = (run(&fixed, &given), run(&[], &placed));
        assert_eq!(prepared, at_once, "{name}");
        prepared
    }

    /// The list of the core says what operators do to memory; libtorch's schemas say the same.
    #[test]
    fn every_operator_of_the_list_exists_and_does_to_memory_what_the_list_says() {
        for name in all() {
            let operator = Operator::find(name).unwrap();
            // SAFETY: a live operator, only read.
            let aliases = unsafe { dg_operator_aliases(operator.raw) };
            let expected = match effect(name).unwrap() {
                Effect::Fresh | Effect::Seeded => 0,
                Effect::View => 1,
                // Such an operator has no annotation, or that of a view.
                Effect::PerhapsView => aliases & 1,
                Effect::InPlace => 3,
            };
            assert_eq!(aliases, expected, "{name}");
        }
        assert!(Operator::find("no_such_operator.default").unwrap_err().contains("no_such_operator"));
        assert!(Operator::find("conv2d").is_err());
    }

    #[test]
    fn operators_that_do_more_than_compute_are_told_from_others() {
        for (name, said) in [
            ("from_file.default", "its argument `filename`"),
            ("relu_.default", "it changes `self`"),
            ("set_.source_Storage", "it changes `self`"),
            ("transpose.int", "a view"),
            ("native_batch_norm.default", "running statistics"),
            ("normal.Tensor_float", "its argument `generator`"),
            ("pad.default", "its argument `mode`"),
            ("item.default", "no tensor"),
            ("equal.default", "no tensor"),
            ("atleast_1d.default", "made of other operators"),
            ("matmul.default", "made of other operators"),
            ("_sparse_coo_tensor_unsafe.default", "does not check its arguments"),
        ] {
            let refused = Operator::find(name).unwrap().check_computes().unwrap_err();
            assert!(refused.contains(said), "{name}: {refused}");
        }
        for name in ["erfinv.default", "renorm.default", "logcumsumexp.default", "histc.default"] {
            Operator::find(name).unwrap().check_computes().unwrap();
        }
    }

    #[test]
    fn arguments_have_the_types_that_the_schema_wants() {
        let x = Tensor::from_slice(&[1.0_f32, 2.0, 3.0]);
        // A number where a tensor is expected, and an integer where a float is.
        let sum = call("add.Tensor", vec![("self", Argument::Tensor(&x)), ("other", Argument::Int(2))], 1).unwrap();
        assert_eq!(Vec::<f32>::try_from(&sum[0]).unwrap(), [3.0, 4.0, 5.0]);
        assert_eq!(sum[0].kind(), Kind::Float);
        let parts = vec![("self", Argument::Tensor(&x)), ("split_size", Argument::Int(2))];
        let parts = call("split.Tensor", parts, 2).unwrap();
        assert_eq!(parts.iter().map(Tensor::size).collect::<Vec<_>>(), [[2], [1]]);
        let wrong = call("split.Tensor", vec![("self", Argument::Tensor(&x)), ("split_size", Argument::Int(2))], 3);
        assert!(wrong.unwrap_err().contains("it returned 2 tensors, and the graph has 3"));
        let missing = call("add.Tensor", vec![("self", Argument::Tensor(&x))], 1).unwrap_err();
        assert!(missing.contains("the argument `other` is missing"), "{missing}");
    }

    /// libtorch casts the numbers of its enumerations unchecked, and reads tables beyond their end at those that are none.
    #[test]
    fn enumerations_take_nothing_but_their_own_values() {
        let x = Tensor::from_slice(&[1.0_f32, 2.0]);
        let call =
            |name: &str, argument: (&str, Argument<'_>)| call(name, vec![("self", Argument::Tensor(&x)), argument], 1);
        let each =
            |argument: fn() -> Argument<'static>| ["dtype", "layout", "memory_format"].map(|name| (name, argument()));
        let wrong = [|| Argument::Int(6), || Argument::Int(99), || Argument::Bool(true), || Argument::Float(0.0)];
        for argument in wrong {
            for (name, argument) in each(argument) {
                let refused = call("_to_copy.default", (name, argument)).unwrap_err();
                assert!(refused.contains("got another argument"), "{name}: {refused}");
            }
        }
        let typed = || Argument::Type(Kind::Double);
        for (name, argument) in [("layout", typed()), ("memory_format", typed()), ("dtype", Argument::Strided)] {
            assert!(call("_to_copy.default", (name, argument)).is_err(), "{name}");
        }
        for number in [-1, 3, 4, 99, 1 << 40] {
            assert!(call("clone.default", ("memory_format", Argument::MemoryFormat(number))).is_err(), "{number}");
        }
        // Nor are they numbers for other parameters.
        let refused = call("sum.dim_IntList", ("dim", Argument::Type(Kind::Float))).unwrap_err();
        assert!(refused.contains("got an element type"), "{refused}");
        assert_eq!(call("_to_copy.default", ("dtype", typed())).unwrap()[0].kind(), Kind::Double);
        assert!(call("_to_copy.default", ("layout", Argument::Strided)).is_ok());
        assert!(call("clone.default", ("memory_format", Argument::MemoryFormat(1))).is_ok());
        assert!(call("_to_copy.default", ("dtype", Argument::None)).is_ok());
    }

    /// A call whose prepared argument changed with the result of an earlier call would compute something else.
    #[test]
    fn what_happens_to_a_result_does_not_change_the_next_call() {
        let operator = Operator::find("expand.default").unwrap();
        let place = |name: &str| operator.position(name).unwrap();
        let fixed = [(place("self"), Argument::Float(2.0)), (place("size"), Argument::Ints(vec![1]))];
        let call = operator.prepare(&fixed, &[]).unwrap();
        let first = || call.run(&[], Device::Cpu, 1).unwrap().remove(0);
        let _ = first().f_fill_(5.0).unwrap();
        assert_eq!(first().double_value(&[0]), 2.0);
    }

    #[test]
    fn a_seeded_draw_is_repeated_bit_for_bit() {
        let draw = |seed| {
            let operator = Operator::find("rand.default").unwrap();
            let size = operator.position("size").unwrap();
            let call = operator.prepare(&[(size, Argument::Ints(vec![8]))], &[]).unwrap();
            let drawn = seeded(Device::Cpu, seed, || call.run(&[], Device::Cpu, 1));
            Vec::<f32>::try_from(&drawn.unwrap()[0]).unwrap()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
