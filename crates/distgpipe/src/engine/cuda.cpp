// CUDA streams, events and graphs. Streams and events go through libtorch's device-generic interface, graphs through the CUDA
// runtime, which is looked up at run time: the binary needs no CUDA to be built or to run on a CPU. Errors are reported as
// guarded.h describes.

#include "guarded.h"

#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

c10::Device device_of(int device) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)}; }

c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

cudaStream_t native(const c10::Stream &stream) {
  return static_cast<cudaStream_t>(guard().getStreamNativeHandle(stream));
}

// The functions of the CUDA runtime that record graphs.
struct Runtime {
  cudaError_t (*begin_capture)(cudaStream_t, cudaStreamCaptureMode);
  cudaError_t (*end_capture)(cudaStream_t, cudaGraph_t *);
  cudaError_t (*instantiate)(cudaGraphExec_t *, cudaGraph_t, unsigned long long);
  cudaError_t (*launch)(cudaGraphExec_t, cudaStream_t);
  cudaError_t (*destroy)(cudaGraph_t);
  cudaError_t (*destroy_exec)(cudaGraphExec_t);
  cudaError_t (*last_error)();
  const char *(*text_of)(cudaError_t);

  Runtime() {
    find(begin_capture, "cudaStreamBeginCapture");
    find(end_capture, "cudaStreamEndCapture");
    find(instantiate, "cudaGraphInstantiate");
    find(launch, "cudaGraphLaunch");
    find(destroy, "cudaGraphDestroy");
    find(destroy_exec, "cudaGraphExecDestroy");
    find(last_error, "cudaGetLastError");
    find(text_of, "cudaGetErrorString");
  }

  template <typename F> void find(F &function, const char *name) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
    TORCH_CHECK(function, "the CUDA runtime has no ", name);
  }

  void check(cudaError_t error, const char *what) const {
    if (error == cudaSuccess)
      return;
    last_error(); // A later check must not find this error again.
    TORCH_CHECK(false, what, ": ", text_of(error));
  }
};

const Runtime &runtime() {
  static const Runtime runtime;
  return runtime;
}

// libtorch's CUDA allocator. Its methods are virtual, so calling them needs no symbol of libc10_cuda.
c10::cuda::CUDACachingAllocator::CUDAAllocator &allocator() {
  auto *allocator = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(c10::DeviceType::CUDA));
  TORCH_CHECK(allocator && allocator->initialized(), "libtorch's CUDA allocator is not in use");
  return *static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator *>(allocator);
}

// A pool of memory for graphs. libtorch numbers its own pools from 1; these are far from them.
c10::MempoolId_t pool_of(uint64_t number) { return {0, (uint64_t{1} << 62) + number}; }

// Gets the gradients of parameters with their indices, and owns them; `last` says whether the backward pass is over. False stops it.
using TakeGradients = bool (*)(void *context, bool last, const size_t *indices, at::Tensor **gradients, size_t count);

// Takes the gradients of parameters away while one backward pass computes them, and hands them on in parts. A hook of a leaf runs
// before autograd keeps the leaf's gradient to return it, so what autograd keeps is what the hook puts in its place.
class GradientParts {
  at::Tensor **parameters_;
  std::vector<unsigned> hooks_;
  size_t part_bytes_, pending_bytes_ = 0, missing_bytes_ = 0;
  std::vector<std::pair<size_t, at::Tensor>> pending_;
  std::vector<at::Tensor> stand_ins_;
  TakeGradients take_;
  void *context_;

  // A tensor of the same sizes and type in the memory of one element. Nobody reads its values.
  at::Tensor stand_in(const at::Tensor &gradient) {
    for (const auto &known : stand_ins_)
      if (known.options().type_equal(gradient.options()) && known.device() == gradient.device())
        return known.expand(gradient.sizes());
    stand_ins_.push_back(at::empty({}, gradient.options()));
    return stand_ins_.back().expand(gradient.sizes());
  }

  at::Tensor found(size_t index, const at::Tensor &gradient) {
    if (!gradient.defined())
      return gradient;
    auto rest = stand_in(gradient);
    pending_.emplace_back(index, gradient);
    pending_bytes_ += gradient.nbytes();
    missing_bytes_ -= parameters_[index]->nbytes();
    // What is found after the last parameter can wait for the end.
    if (pending_bytes_ >= part_bytes_ && missing_bytes_ > 0)
      hand_over(false);
    return rest;
  }

public:
  GradientParts(at::Tensor **parameters, size_t count, size_t part_bytes, TakeGradients take, void *context)
      : parameters_(parameters), part_bytes_(part_bytes), take_(take), context_(context) {
    try {
      for (size_t i = 0; i < count; ++i) {
        missing_bytes_ += parameters[i]->nbytes();
        hooks_.push_back(
            parameters[i]->register_hook([this, i](const at::Tensor &gradient) { return found(i, gradient); }));
      }
    } catch (...) {
      remove_hooks();
      throw;
    }
  }
  ~GradientParts() { remove_hooks(); }
  GradientParts(const GradientParts &) = delete;
  GradientParts &operator=(const GradientParts &) = delete;

  // The leaves live on.
  void remove_hooks() noexcept {
    for (size_t i = 0; i < hooks_.size(); ++i)
      parameters_[i]->remove_hook(hooks_[i]);
    hooks_.clear();
  }

  void hand_over(bool last) {
    std::vector<size_t> indices;
    std::vector<at::Tensor *> gradients;
    for (auto &[index, gradient] : pending_) {
      indices.push_back(index);
      gradients.push_back(new at::Tensor(std::move(gradient)));
    }
    pending_.clear();
    pending_bytes_ = 0;
    if (!take_(context_, last, indices.data(), gradients.data(), indices.size()))
      throw std::runtime_error("a part of the gradients was not taken");
  }
};

} // namespace

extern "C" {

char *dg_stream_new(int device, int64_t *id) {
  return guarded([&] { *id = guard().getStreamFromGlobalPool(device_of(device)).id(); });
}

char *dg_stream_current(int device, int64_t *id) {
  return guarded([&] { *id = guard().getStream(device_of(device)).id(); });
}

// Makes the stream and its device those of the calling thread.
char *dg_stream_enter(int device, int64_t id) {
  return guarded([&] {
    guard().setDevice(device_of(device));
    guard().exchangeStream(stream_of(device, id));
  });
}

char *dg_stream_native(int device, int64_t id, void **handle) {
  return guarded([&] { *handle = native(stream_of(device, id)); });
}

char *dg_stream_synchronize(int device, int64_t id) {
  return guarded([&] { guard().synchronizeStream(stream_of(device, id)); });
}

// An event in the calling thread's current stream of the device.
char *dg_event_record(int device, c10::Event **event) {
  return guarded([&] {
    auto recorded = std::make_unique<c10::Event>(c10::DeviceType::CUDA);
    recorded->record(guard().getStream(device_of(device)));
    *event = recorded.release();
  });
}

// The calling thread's current stream of the device waits for the event.
char *dg_event_block(const c10::Event *event, int device) {
  return guarded([&] { event->block(guard().getStream(device_of(device))); });
}

void dg_event_free(c10::Event *event) { delete event; }

// Keeps the tensor's memory until the calling thread's current stream has done what it has been given so far.
char *dg_keep_for_stream(at::Tensor *tensor) {
  return guarded([&] { tensor->record_stream(guard().getStream(tensor->device())); });
}

// Whether the tensor is in memory of the host that a GPU reads directly.
bool dg_is_pinned(at::Tensor *tensor) {
  try {
    return tensor->is_pinned();
  } catch (...) {
    return false;
  }
}

// Backward passes that the calling thread starts run on it, so that those of several workers on one GPU do not queue up for
// the engine thread of that GPU.
void dg_backward_on_this_thread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }

// Records what the calling thread gives its current stream, instead of running it, until `dg_capture_end`. Memory comes from the
// pool, in which each graph counts as one user.
char *dg_capture_begin(int device, uint64_t pool) {
  return guarded([&] {
    cudaStream_t stream = native(guard().getStream(device_of(device)));
    const Runtime &cuda = runtime();
    auto &memory = allocator();
    memory.beginAllocateToPool(static_cast<c10::DeviceIndex>(device), pool_of(pool),
                               [stream](cudaStream_t other) { return other == stream; });
    cudaError_t error = cuda.begin_capture(stream, cudaStreamCaptureModeThreadLocal);
    if (error != cudaSuccess) {
      memory.endAllocateToPool(static_cast<c10::DeviceIndex>(device), pool_of(pool));
      memory.releasePool(static_cast<c10::DeviceIndex>(device), pool_of(pool));
    }
    cuda.check(error, "cannot begin to record a CUDA graph");
  });
}

// Ends the recording. With `keep` it makes a graph of it; otherwise, or after an error, nothing of it is left.
char *dg_capture_end(int device, uint64_t pool, bool keep, cudaGraphExec_t *result) {
  *result = nullptr;
  return guarded([&] {
    cudaStream_t stream = native(guard().getStream(device_of(device)));
    const Runtime &cuda = runtime();
    cudaGraph_t graph = nullptr;
    cudaError_t ended = cuda.end_capture(stream, &graph);
    auto &memory = allocator();
    memory.endAllocateToPool(static_cast<c10::DeviceIndex>(device), pool_of(pool));
    cudaError_t made = cudaSuccess;
    if (ended == cudaSuccess && graph && keep)
      made = cuda.instantiate(result, graph, 0);
    if (graph)
      cuda.destroy(graph);
    if (!*result)
      memory.releasePool(static_cast<c10::DeviceIndex>(device), pool_of(pool));
    if (!keep) {
      cuda.last_error();
      return;
    }
    cuda.check(ended, "recording a CUDA graph failed");
    cuda.check(made, "cannot make a CUDA graph");
    TORCH_CHECK(*result, "recording a CUDA graph gave none");
  });
}

char *dg_graph_launch(cudaGraphExec_t graph, int device) {
  return guarded([&] {
    runtime().check(runtime().launch(graph, native(guard().getStream(device_of(device)))), "cannot run a CUDA graph");
  });
}

// Frees the graph and its use of the pool.
void dg_graph_free(cudaGraphExec_t graph, int device, uint64_t pool) {
  std::free(guarded([&] {
    runtime().destroy_exec(graph);
    allocator().releasePool(static_cast<c10::DeviceIndex>(device), pool_of(pool));
  }));
}

// Returns memory that the allocator keeps for later to the driver.
char *dg_empty_cache() {
  return guarded([&] { allocator().emptyCache({0, 0}); });
}

// The gradients of the outputs with respect to the inputs; null where there is none. Those with respect to the parameters go to `take`
// as soon as this many bytes of them are there, and at the end the rest, on this thread if it has called dg_backward_on_this_thread. Frees
// the autograd graph.
char *dg_gradients_in_parts(at::Tensor **outputs, at::Tensor **upstream, size_t outputs_count, at::Tensor **parameters,
                            size_t parameters_count, at::Tensor **inputs, at::Tensor **gradients, size_t inputs_count,
                            size_t part_bytes, TakeGradients take, void *context) {
  return guarded([&] {
    torch::autograd::variable_list outs, grads, of;
    for (size_t i = 0; i < outputs_count; ++i) {
      outs.push_back(*outputs[i]);
      grads.push_back(upstream[i] ? *upstream[i] : at::Tensor());
    }
    for (size_t i = 0; i < parameters_count; ++i)
      of.push_back(*parameters[i]);
    for (size_t i = 0; i < inputs_count; ++i)
      of.push_back(*inputs[i]);
    GradientParts parts(parameters, parameters_count, part_bytes, take, context);
    auto found = torch::autograd::grad(outs, of, grads, /*retain_graph=*/false, /*create_graph=*/false,
                                       /*allow_unused=*/true);
    parts.hand_over(true);
    for (size_t i = 0; i < inputs_count; ++i) {
      auto &gradient = found[parameters_count + i];
      gradients[i] = gradient.defined() ? new at::Tensor(std::move(gradient)) : nullptr;
    }
  });
}

// Says of each leaf whether the graph of the outputs uses it once, to cast it to bfloat16.
char *dg_only_cast(at::Tensor **outputs, size_t outputs_count, at::Tensor **leaves, bool *only_cast, size_t leaves_count) {
  return guarded([&] {
    struct Uses {
      size_t all = 0, casts = 0;
    };
    std::unordered_map<const c10::TensorImpl *, Uses> uses;
    std::unordered_set<torch::autograd::Node *> seen;
    std::vector<torch::autograd::Node *> waiting;
    const auto add = [&](torch::autograd::Node *node) {
      if (node && seen.insert(node).second)
        waiting.push_back(node);
    };
    for (size_t i = 0; i < outputs_count; ++i)
      add(outputs[i]->grad_fn().get());
    while (!waiting.empty()) {
      auto *node = waiting.back();
      waiting.pop_back();
      for (const auto &edge : node->next_edges()) {
        const auto *leaf = dynamic_cast<torch::autograd::AccumulateGrad *>(edge.function.get());
        if (!leaf) {
          add(edge.function.get());
          continue;
        }
        auto &found = uses[leaf->variable.unsafeGetTensorImpl()];
        ++found.all;
        found.casts += node->name() == "ToCopyBackward0" && node->input_metadata(0).dtype() == at::kBFloat16;
      }
    }
    for (size_t i = 0; i < leaves_count; ++i) {
      const auto found = uses.find(leaves[i]->unsafeGetTensorImpl());
      only_cast[i] = found != uses.end() && found->second.all == 1 && found->second.casts == 1;
    }
  });
}

// Makes a tensor the gradient of a leaf.
char *dg_set_grad(at::Tensor *tensor, at::Tensor *gradient) {
  return guarded([&] { tensor->mutable_grad() = *gradient; });
}

// Copies values without waiting for the copy. Memory of the host must be pinned, and stay as it is until the stream is done.
char *dg_copy(at::Tensor *to, at::Tensor *from) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    to->copy_(*from, /*non_blocking=*/true);
  });
}

} // extern "C"
