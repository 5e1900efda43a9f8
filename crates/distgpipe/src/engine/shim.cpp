// What libtorch has, we need, and tch does not show. Every function that can throw returns null on
// success or a malloc'ed message that the Rust side frees; no exception crosses the border.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

char *message(const char *text) {
  const char *end = std::strchr(text, '\n');
  // libtorch appends a C++ stack trace after the first line.
  size_t length = end ? static_cast<size_t>(end - text) : std::strlen(text);
  char *copy = static_cast<char *>(std::malloc(length + 1));
  if (copy) {
    std::memcpy(copy, text, length);
    copy[length] = 0;
  }
  return copy;
}

template <typename F> char *guarded(F &&body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception &e) {
    return message(e.what());
  } catch (...) {
    return message("an exception that is not a std::exception");
  }
}

// One generator per thread and device: re-seeded at every use, so what other threads draw is of no account.
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

// Counts what CPU tensors hold, in total and at the most, and otherwise leaves allocation to libtorch's own
// allocator. A worker's share is what its stage thread allocated, whoever frees it.
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

constexpr int kMeters = 256;
Meter meters[kMeters];
thread_local int meter_of_thread = 0;

// Stands before each block, in the room of one cache line, so that the data stays aligned and the pointer is its own
// context, as libtorch wants of an allocator that is used raw.
struct Label {
  int64_t bytes;
  int meter;
};
constexpr size_t kLabel = 64;
static_assert(sizeof(Label) <= kLabel, "a label fits its room");

c10::Allocator *inner = nullptr;

void release(void *data) {
  if (!data)
    return;
  void *block = static_cast<char *>(data) - kLabel;
  auto *label = static_cast<Label *>(block);
  meters[label->meter].add(-label->bytes);
  inner->raw_deallocate(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0)
      return c10::DataPtr(nullptr, nullptr, &release, cpu);
    void *block = inner->raw_allocate(bytes + kLabel);
    new (block) Label{static_cast<int64_t>(bytes), meter_of_thread};
    meters[meter_of_thread].add(static_cast<int64_t>(bytes));
    void *data = static_cast<char *>(block) + kLabel;
    return c10::DataPtr(data, data, &release, cpu);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *dest, const void *src, std::size_t count) const override { std::memcpy(dest, src, count); }
};

} // namespace

extern "C" {

char *dg_backward(at::Tensor **outputs, at::Tensor **gradients, size_t count) {
  return guarded([&] {
    torch::autograd::variable_list outs, grads;
    for (size_t i = 0; i < count; ++i) {
      outs.push_back(*outputs[i]);
      grads.push_back(gradients[i] ? *gradients[i] : at::Tensor());
    }
    torch::autograd::backward(outs, grads);
  });
}

// How a thread casts: what `dg_autocast_enter` found, for `dg_autocast_leave` to put back.
struct dg_casting {
  bool cuda;
  bool enabled;
  int dtype;
  bool cache;
};

// From here on this thread computes as under torch.autocast(…, bfloat16, cache_enabled=False).
char *dg_autocast_enter(bool cuda, dg_casting *before) {
  return guarded([&] {
    auto type = cuda ? at::kCUDA : at::kCPU;
    *before = dg_casting{cuda, at::autocast::is_autocast_enabled(type),
                         static_cast<int>(at::autocast::get_autocast_dtype(type)),
                         at::autocast::is_autocast_cache_enabled()};
    at::autocast::set_autocast_dtype(type, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(false);
    at::autocast::set_autocast_enabled(type, true);
  });
}

void dg_autocast_leave(const dg_casting *before) {
  guarded([&] {
    auto type = before->cuda ? at::kCUDA : at::kCPU;
    at::autocast::set_autocast_enabled(type, before->enabled);
    at::autocast::set_autocast_cache_enabled(before->cache);
    at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(before->dtype));
  });
}

// A new reference to the gradient, or null where there is none.
at::Tensor *dg_grad(at::Tensor *tensor) {
  try {
    const at::Tensor &grad = tensor->grad();
    return grad.defined() ? new at::Tensor(grad) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

void dg_clear_grad(at::Tensor *tensor) {
  guarded([&] { tensor->mutable_grad() = at::Tensor(); });
}

// How often the tensor's values were changed in place, or -1 where libtorch does not count.
int64_t dg_version(at::Tensor *tensor) {
  try {
    return static_cast<int64_t>(tensor->_version());
  } catch (...) {
    return -1;
  }
}

char *dg_bernoulli(at::Tensor *tensor, double p, uint64_t seed) {
  return guarded([&] { tensor->bernoulli_(p, generator_for(tensor->device(), seed)); });
}

char *dg_normal(at::Tensor *tensor, double mean, double deviation, uint64_t seed) {
  return guarded([&] { tensor->normal_(mean, deviation, generator_for(tensor->device(), seed)); });
}

char *dg_uniform(at::Tensor *tensor, double low, double high, uint64_t seed) {
  return guarded([&] { tensor->uniform_(low, high, generator_for(tensor->device(), seed)); });
}

// 1: row-major, 2: channels-last, 0: neither. A tensor that is both (one channel, or 1x1) counts as row-major
// unless its strides say channels-last, so that a copy of it is laid out as it was.
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
      // `contiguous` leaves a tensor alone that is both; strides matter to the kernels that come after.
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

// Freed activations stay in the process instead of going back to the kernel and being faulted in again.
// One arena, because the others are capped at 64 MiB a heap and would map and unmap larger tensors all the same.
void dg_keep_memory() {
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, INT32_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

// Gives kept memory back to the kernel after all.
void dg_release_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void dg_meter_install() {
  static std::once_flag once;
  std::call_once(once, [] {
    inner = c10::GetCPUAllocator();
    static CountingAllocator counting;
    c10::SetCPUAllocator(&counting, 255);
  });
}

void dg_meter_attach(int meter) { meter_of_thread = meter >= 0 && meter < kMeters ? meter : 0; }

// The most bytes since the last call; the peak then starts again from what is held now.
int64_t dg_meter_take_peak(int meter) {
  if (meter < 0 || meter >= kMeters)
    return 0;
  int64_t now = meters[meter].now.load(std::memory_order_relaxed);
  return meters[meter].peak.exchange(now, std::memory_order_relaxed);
}

// The most bytes that tensors held on a CUDA device since the process began, or 0 where that is unknown.
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

void dg_free_message(char *text) { std::free(text); }

} // extern "C"
