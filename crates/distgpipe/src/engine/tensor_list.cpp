// libtorch's operations on lists of tensors, which launch one kernel for many tensors on a GPU.

#include "guarded.h"

#include <ATen/ATen.h>

#include <limits>
#include <vector>

namespace {

std::vector<at::Tensor> list(at::Tensor **tensors, size_t count) {
  std::vector<at::Tensor> list;
  if (tensors) {
    list.reserve(count);
    for (size_t i = 0; i < count; ++i)
      list.push_back(*tensors[i]);
  }
  return list;
}

// The operations, numbered as in `Operation` of tensor_list.rs.
enum Operation {
  kMulScalar = 0,
  kMulScalarInPlace = 1,
  kMulInPlace = 2,
  kAdd = 3,
  kAddInPlace = 4,
  kAddScalarInPlace = 5,
  kAddcmulInPlace = 6,
  kLerpInPlace = 7,
  kSqrt = 8,
  kDiv = 9,
  kDivScalarInPlace = 10,
  kCopyInPlace = 11,
  kMaxNorm = 12,
};

std::vector<at::Tensor> apply(int operation, const std::vector<at::Tensor> &self, const std::vector<at::Tensor> &other,
                              const std::vector<at::Tensor> &third, double scalar) {
  switch (operation) {
  case kMulScalar:
    return at::_foreach_mul(self, scalar);
  case kMulScalarInPlace:
    at::_foreach_mul_(self, scalar);
    return {};
  case kMulInPlace:
    at::_foreach_mul_(self, other);
    return {};
  case kAdd:
    return at::_foreach_add(self, other);
  case kAddInPlace:
    at::_foreach_add_(self, other);
    return {};
  case kAddScalarInPlace:
    // A floating-point number cannot be added to integers.
    at::_foreach_add_(self, at::isIntegralType(self[0].scalar_type(), false) ? at::Scalar(static_cast<int64_t>(scalar))
                                                                             : at::Scalar(scalar));
    return {};
  case kAddcmulInPlace:
    at::_foreach_addcmul_(self, other, third);
    return {};
  case kLerpInPlace:
    at::_foreach_lerp_(self, other, scalar);
    return {};
  case kSqrt:
    return at::_foreach_sqrt(self);
  case kDiv:
    return at::_foreach_div(self, other);
  case kDivScalarInPlace:
    at::_foreach_div_(self, scalar);
    return {};
  case kCopyInPlace:
    at::_foreach_copy_(self, other);
    return {};
  case kMaxNorm:
    return at::_foreach_norm(self, std::numeric_limits<double>::infinity());
  }
  TORCH_CHECK(false, "operation ", operation, " on tensor lists does not exist");
}

} // namespace

extern "C" {

// Applies an operation to lists of `count` tensors. `other` and `third` are null where the operation has no such list. An operation
// that makes tensors stores `count` handles in `results`.
char *dg_tensor_list(int operation, at::Tensor **self, at::Tensor **other, at::Tensor **third, double scalar, size_t count,
                     at::Tensor **results) {
  return guarded([&] {
    auto made = apply(operation, list(self, count), list(other, count), list(third, count), scalar);
    if (results) {
      TORCH_CHECK(made.size() == count, "operation ", operation, " made ", made.size(), " tensors of ", count);
      for (size_t i = 0; i < count; ++i)
        results[i] = new at::Tensor(std::move(made[i]));
    }
  });
}

} // extern "C"
