// Instance norm with a backward pass of its own, for kernels that libtorch does not have. Errors are reported as guarded.h
// describes.

#include "guarded.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

// Both return an error message from malloc, or null.
typedef char *(*ForwardKernel)(const at::Tensor *x, at::Tensor *statistics, at::Tensor *y);
typedef char *(*BackwardKernel)(const at::Tensor *gradient, const at::Tensor *x, const at::Tensor *statistics, at::Tensor *out);

void check(char *error) {
  if (!error)
    return;
  const std::string text(error);
  std::free(error);
  TORCH_CHECK(false, text);
}

struct InstanceNorm : torch::autograd::Function<InstanceNorm> {
  static at::Tensor forward(torch::autograd::AutogradContext *context, const at::Tensor &x, int64_t forward, int64_t backward) {
    at::Tensor y = at::empty_like(x);
    at::Tensor statistics = at::empty({2, x.size(0) * x.size(1)}, x.options().dtype(at::kFloat));
    check(reinterpret_cast<ForwardKernel>(forward)(&x, &statistics, &y));
    context->save_for_backward({x, statistics});
    context->saved_data["backward"] = backward;
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext *context,
                                                 const torch::autograd::variable_list &gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor gradient = gradients[0].to(saved[0].scalar_type()).contiguous(at::MemoryFormat::ChannelsLast);
    at::Tensor out = at::empty_like(saved[0]);
    const auto backward = reinterpret_cast<BackwardKernel>(context->saved_data["backward"].toInt());
    check(backward(&gradient, &saved[0], &saved[1], &out));
    return {out, at::Tensor(), at::Tensor()};
  }
};

} // namespace

extern "C" {

// A copy of the text, for an error message of a kernel.
char *dg_message(const char *text) { return message(text); }

char *dg_instance_norm(const at::Tensor *x, ForwardKernel forward, BackwardKernel backward, at::Tensor **result) {
  return guarded([&] {
    *result = new at::Tensor(
        InstanceNorm::apply(*x, reinterpret_cast<int64_t>(forward), reinterpret_cast<int64_t>(backward)));
  });
}
}
