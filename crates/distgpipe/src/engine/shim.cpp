// libtorch functions that tch does not expose. Errors are reported as guarded.h describes.

#include "guarded.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

// One generator per thread and device. It is seeded at every use, so that other threads' draws do not matter.
at::Generator generator_for(const at::Device &device, uint64_t seed) {
  struct Slot {
    at::Device device;
    at::Generator generator;
  };
  thread_local std::vector<Slot> slots;
  at::Device at = device;
  for (auto &slot : slots) {
    if (slot.device == at) {
      slot.generator.set_current_seed(seed);
      return slot.generator;
    }
  }
  at::Generator fresh = at::globalContext().defaultGenerator(at).clone();
  fresh.set_current_seed(seed);
  slots.push_back(Slot{at, fresh});
  return fresh;
}

// Counts the bytes of CPU tensors, now and at the peak. The tensors of a worker are those that its thread allocated,
// whichever thread frees them.
struct Meter {
  std::atomic<int64_t> now{0};
  std::atomic<int64_t> peak{0};
  void add(int64_t bytes) {
    int64_t total = now.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t seen = peak.load(std::memory_order_relaxed);
    while (total > seen && !peak.compare_exchange_weak(seen, total, std::memory_order_relaxed)) {
    }
  }
};

constexpr int kMeters = 1024; // METERS in memory.rs
Meter meters[kMeters];
thread_local int meter_of_thread = 0;

// The header of each block. It takes one cache line, so that the data stays aligned. The data pointer is its own context,
// as libtorch requires of an allocator for raw allocation.
struct Header {
  int64_t bytes;
  int meter;
};
constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(Header) <= kHeaderBytes, "a header fits into its cache line");

// libtorch's own CPU allocator, which allocates all blocks.
c10::Allocator *base_allocator = nullptr;

void release(void *data) {
  if (!data)
    return;
  void *block = static_cast<char *>(data) - kHeaderBytes;
  auto *header = static_cast<Header *>(block);
  meters[header->meter].add(-header->bytes);
  base_allocator->raw_deallocate(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0)
      return c10::DataPtr(nullptr, nullptr, &release, cpu);
    void *block = base_allocator->raw_allocate(bytes + kHeaderBytes);
    new (block) Header{static_cast<int64_t>(bytes), meter_of_thread};
    meters[meter_of_thread].add(static_cast<int64_t>(bytes));
    void *data = static_cast<char *>(block) + kHeaderBytes;
    return c10::DataPtr(data, data, &release, cpu);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *dest, const void *src, std::size_t count) const override { std::memcpy(dest, src, count); }
};

// Tells the Rust side that a backward pass has finished the gradient of a parameter.
struct GradientHook final : torch::autograd::PostAccumulateGradHook {
  void (*ready)(void *, size_t);
  void *context;
  size_t index;
  GradientHook(void (*ready)(void *, size_t), void *context, size_t index)
      : ready(ready), context(context), index(index) {}
  void operator()(const torch::autograd::Variable &) override { ready(context, index); }
};

// Watches parameters for the time of one backward pass.
class WatchedParameters {
  at::Tensor **parameters_;
  size_t count_;

public:
  WatchedParameters(at::Tensor **parameters, size_t count, void (*ready)(void *, size_t), void *context)
      : parameters_(parameters), count_(count) {
    for (size_t i = 0; i < count; ++i)
      torch::autograd::impl::set_post_acc_grad_hooks(*parameters[i],
                                                     std::make_unique<GradientHook>(ready, context, i));
  }
  ~WatchedParameters() {
    for (size_t i = 0; i < count_; ++i)
      torch::autograd::impl::set_post_acc_grad_hooks(*parameters_[i], nullptr);
  }
  WatchedParameters(const WatchedParameters &) = delete;
  WatchedParameters &operator=(const WatchedParameters &) = delete;
};

} // namespace

extern "C" {

// Calls `ready` with the index of each watched parameter once its gradient is complete, on any thread.
char *dg_backward(at::Tensor **outputs, at::Tensor **gradients, size_t count, at::Tensor **watched,
                  size_t watched_count, void (*ready)(void *, size_t), void *context) {
  return guarded([&] {
    WatchedParameters watching(watched, watched_count, ready, context);
    torch::autograd::variable_list outs, grads;
    for (size_t i = 0; i < count; ++i) {
      outs.push_back(*outputs[i]);
      grads.push_back(gradients[i] ? *gradients[i] : at::Tensor());
    }
    torch::autograd::backward(outs, grads);
  });
}

// A thread's autocast settings, which `dg_autocast_enter` saves and `dg_autocast_leave` restores.
struct dg_autocast_state {
  bool cuda;
  bool enabled;
  int dtype;
  bool cache;
};

// Makes the calling thread compute as under torch.autocast(…, bfloat16, cache_enabled=False).
char *dg_autocast_enter(bool cuda, dg_autocast_state *before) {
  return guarded([&] {
    auto type = cuda ? at::kCUDA : at::kCPU;
    *before = dg_autocast_state{cuda, at::autocast::is_autocast_enabled(type),
                         static_cast<int>(at::autocast::get_autocast_dtype(type)),
                         at::autocast::is_autocast_cache_enabled()};
    at::autocast::set_autocast_dtype(type, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(false);
    at::autocast::set_autocast_enabled(type, true);
  });
}

void dg_autocast_leave(const dg_autocast_state *before) {
  guarded([&] {
    auto type = before->cuda ? at::kCUDA : at::kCPU;
    at::autocast::set_autocast_enabled(type, before->enabled);
    at::autocast::set_autocast_cache_enabled(before->cache);
    at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(before->dtype));
  });
}

// A new reference to the gradient, or null if there is none.
at::Tensor *dg_grad(at::Tensor *tensor) {
  try {
    const at::Tensor &grad = tensor->grad();
    return grad.defined() ? new at::Tensor(grad) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

// Whether another tensor has memory of this one.
bool dg_shares_memory(at::Tensor *tensor) {
  try {
    return tensor->has_storage() && tensor->storage().use_count() > 1;
  } catch (...) {
    return true;
  }
}

void dg_clear_grad(at::Tensor *tensor) {
  guarded([&] { tensor->mutable_grad() = at::Tensor(); });
}

// How often the tensor was changed in place, or -1 if libtorch does not track it.
int64_t dg_version(at::Tensor *tensor) {
  try {
    return static_cast<int64_t>(tensor->_version());
  } catch (...) {
    return -1;
  }
}

void dg_bump_version(at::Tensor *tensor) {
  std::free(guarded([&] { tensor->unsafeGetTensorImpl()->bump_version(); }));
}

char *dg_normal(at::Tensor *tensor, double mean, double deviation, uint64_t seed) {
  return guarded([&] { tensor->normal_(mean, deviation, generator_for(tensor->device(), seed)); });
}

char *dg_uniform(at::Tensor *tensor, double low, double high, uint64_t seed) {
  return guarded([&] { tensor->uniform_(low, high, generator_for(tensor->device(), seed)); });
}

// 1: row-major, 2: channels-last, 0: neither. A tensor that is both (one channel, or 1x1 images) counts as row-major
// unless its strides say channels-last, so that a copy of it gets the same strides.
int dg_layout(at::Tensor *tensor) try {
  if (tensor->dim() == 4 && tensor->suggest_memory_format() == at::MemoryFormat::ChannelsLast &&
      tensor->is_contiguous(at::MemoryFormat::ChannelsLast))
    return 2;
  return tensor->is_contiguous() ? 1 : 0;
} catch (...) {
  return 0;
}

char *dg_with_layout(at::Tensor *tensor, int layout, at::Tensor **result) {
  return guarded([&] {
    auto format = layout == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    if (layout == 2 && tensor->suggest_memory_format() != at::MemoryFormat::ChannelsLast) {
      // `contiguous` does not change a tensor that is both, but later kernels choose by its strides.
      *result = new at::Tensor(at::empty(tensor->sizes(), tensor->options().memory_format(format)).copy_(*tensor));
      return;
    }
    *result = new at::Tensor(tensor->contiguous(format));
  });
}

char *dg_empty(const int64_t *sizes, size_t dims, int dtype, int layout, bool pinned, at::Tensor **result) {
  return guarded([&] {
    auto format = layout == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)).memory_format(format);
    *result = new at::Tensor(at::empty(at::IntArrayRef(sizes, dims), options.pinned_memory(pinned)));
  });
}

// Keeps freed memory in the process, so that the next step's activations cause no page faults. One arena, because the
// heaps of the others are limited to 64 MiB and larger tensors would still be mapped and unmapped.
void dg_tune_allocator() {
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, INT32_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

// Gives free memory back to the kernel.
void dg_release_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void dg_meter_install() {
  static std::once_flag once;
  std::call_once(once, [] {
    base_allocator = c10::GetCPUAllocator();
    static CountingAllocator counting;
    c10::SetCPUAllocator(&counting, 255);
  });
}

void dg_meter_attach(int meter) { meter_of_thread = meter >= 0 && meter < kMeters ? meter : 0; }

// The peak in bytes since the last call. The next peak starts from the bytes that are held now.
int64_t dg_meter_take_peak(int meter) {
  if (meter < 0 || meter >= kMeters)
    return 0;
  int64_t now = meters[meter].now.load(std::memory_order_relaxed);
  return meters[meter].peak.exchange(now, std::memory_order_relaxed);
}

// The peak in bytes of a CUDA device since the process started: of its tensors, or of all memory that the allocator has
// reserved for them. 0 if that is unknown.
int64_t dg_cuda_peak(int device, bool reserved) {
  try {
    auto *allocator = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(c10::DeviceType::CUDA));
    if (!allocator || !allocator->initialized())
      return 0;
    auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    return (reserved ? stats.reserved_bytes : stats.allocated_bytes)[0].peak;
  } catch (...) {
    return 0;
  }
}

// A copy of the name of the instruction set of libtorch's CPU kernels.
char *dg_cpu_capability() {
  try {
    return message(at::get_cpu_capability().c_str());
  } catch (...) {
    return nullptr;
  }
}

// Where CUDA devices may use TF32, whether cuDNN measures its algorithms, and whether it takes only those that give equal bits in
// every run.
char *dg_cuda_math(bool tf32_products, bool tf32_convolutions, bool cudnn_benchmark, bool cudnn_deterministic) {
  return guarded([&] {
    at::globalContext().setAllowTF32CuBLAS(tf32_products);
    at::globalContext().setAllowTF32CuDNN(tf32_convolutions);
    at::globalContext().setBenchmarkCuDNN(cudnn_benchmark);
    at::globalContext().setDeterministicCuDNN(cudnn_deterministic);
  });
}

void dg_free_message(char *text) { std::free(text); }

} // extern "C"
