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
  kZeroInPlace = 13,
};

std::vector<at::Tensor> apply(int operation, const std::vector<at::Tensor> &self, const std::vector<at::Tensor> &other,
                              const std::vector<at::Tensor> &third, double scalar) {
  switch (operation) {
  case kZeroInPlace:
    at::_foreach_zero_(self);
    return {};
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

// libtorch's SGD in one kernel. `buffers` is null without momentum; at the first step their values are not read.
char *dg_fused_sgd(at::Tensor **parameters, at::Tensor **gradients, at::Tensor **buffers, size_t count, double weight_decay,
                   double momentum, double learning_rate, bool nesterov, bool first_step) {
  return guarded([&] {
    at::_fused_sgd_(list(parameters, count), list(gradients, count), list(buffers, count), weight_decay, momentum,
                    learning_rate, /*dampening=*/0.0, nesterov, /*maximize=*/false, first_step);
  });
}

// libtorch's Adam, or AdamW if `decoupled`, in one kernel. `steps` counts this update.
char *dg_fused_adam(at::Tensor **parameters, at::Tensor **gradients, at::Tensor **first, at::Tensor **second, size_t count,
                    double steps, double learning_rate, double beta1, double beta2, double weight_decay, double eps,
                    bool decoupled) {
  return guarded([&] {
    auto step = at::full({}, steps, parameters[0]->options().dtype(at::kFloat).requires_grad(false));
    std::vector<at::Tensor> state_steps(count, step);
    auto update = [&](auto fused) {
      fused(list(parameters, count), list(gradients, count), list(first, count), list(second, count), at::TensorList(),
            state_steps, learning_rate, beta1, beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false,
            std::nullopt, std::nullopt);
    };
    using Tensors = at::TensorList;
    using MaybeTensor = const std::optional<at::Tensor> &;
    using Fused = void (*)(Tensors, Tensors, Tensors, Tensors, Tensors, Tensors, double, double, double, double, double, bool,
                           bool, MaybeTensor, MaybeTensor);
    update(decoupled ? static_cast<Fused>(at::_fused_adamw_) : static_cast<Fused>(at::_fused_adam_));
  });
}

} // extern "C"
