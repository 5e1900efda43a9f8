//! Element types on the wire and in libtorch.

use crate::failure::Fault;
use distgpipe_core::wire::DType;

/// Maps the types on the wire to those of libtorch, and back.
const KINDS: [(DType, tch::Kind); 10] = [
    (DType::F32, tch::Kind::Float),
    (DType::F64, tch::Kind::Double),
    (DType::F16, tch::Kind::Half),
    (DType::BF16, tch::Kind::BFloat16),
    (DType::I64, tch::Kind::Int64),
    (DType::I32, tch::Kind::Int),
    (DType::U8, tch::Kind::Uint8),
    (DType::Bool, tch::Kind::Bool),
    (DType::I16, tch::Kind::Int16),
    (DType::I8, tch::Kind::Int8),
];

/// The type on the wire. Fails for types that cannot be sent, such as complex numbers.
pub(crate) fn dtype_of(kind: tch::Kind) -> Result<DType, Fault> {
    let found = KINDS.iter().find(|(_, k)| *k == kind);
    found
        .map(|(d, _)| *d)
        .ok_or_else(|| Fault::invalid_model(format!("tensors of type {kind:?} cannot be sent between workers")))
}

pub(super) fn kind_of(dtype: DType) -> tch::Kind {
    KINDS.iter().find(|(d, _)| *d == dtype).map_or(tch::Kind::Float, |(_, k)| *k)
}
