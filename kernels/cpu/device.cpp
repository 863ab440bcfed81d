// The CPU as a device; what concerns a GPU is handed to kernels/cuda, where this build has it.
#include "strobe/kernels/device.h"

#include <omp.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace strobe {
namespace {

std::atomic<int> requested_threads{0};

bool on_gpu(Device device) { return device.type == DeviceType::cuda; }

// f(), which calls into kernels/cuda and so exists only in a build with CUDA.
template <class F>
auto gpu(const char* operation, Device device, F&& f) -> decltype(f()) {
  if constexpr (built_with_cuda) {
    return f();
  } else {
    fail(operation, ": device ", device,
         " given, but this build has no CUDA backend: configure with -DSTROBE_CUDA=ON, or use the CPU");
  }
}

}  // namespace

void* raw_malloc(size_t bytes, Device device) {
  if (on_gpu(device)) return gpu("raw_malloc", device, [&] { return cuda::raw_malloc(bytes, device); });
  constexpr size_t alignment = 64;
  if (bytes > SIZE_MAX - alignment) return nullptr;
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void raw_free(void* pointer, Device device) {
  if (on_gpu(device)) return gpu("raw_free", device, [&] { cuda::raw_free(pointer); });
  std::free(pointer);
}

void raw_copy(void* destination, Device destination_device, const void* source, Device source_device, size_t bytes,
              const Stream& stream) {
  if (on_gpu(destination_device) || on_gpu(source_device)) {
    return gpu("raw_copy", on_gpu(source_device) ? source_device : destination_device,
               [&] { cuda::raw_copy(destination, destination_device, source, source_device, bytes, stream); });
  }
  if (bytes > 0) std::memcpy(destination, source, bytes);
}

void raw_zero(void* pointer, size_t bytes, const Stream& stream) {
  if (on_gpu(stream.device)) return gpu("raw_zero", stream.device, [&] { cuda::raw_zero(pointer, bytes, stream); });
  if (bytes > 0) std::memset(pointer, 0, bytes);
}

void synchronize(const Stream& stream) {
  if (on_gpu(stream.device)) gpu("synchronize", stream.device, [&] { cuda::synchronize(stream); });
}

Stream create_stream(Device device) {
  if (on_gpu(device)) return gpu("create_stream", device, [&] { return cuda::create_stream(device); });
  return {device, nullptr};
}

void destroy_stream(const Stream& stream) {
  if (on_gpu(stream.device)) gpu("destroy_stream", stream.device, [&] { cuda::destroy_stream(stream); });
}

void* record_event(const Stream& stream) {
  if (on_gpu(stream.device)) return gpu("record_event", stream.device, [&] { return cuda::record_event(stream); });
  return nullptr;
}

void wait_event(void* event, const Stream& stream) {
  if (event != nullptr) gpu("wait_event", stream.device, [&] { cuda::wait_event(event, stream); });
}

void destroy_event(void* event, Device device) {
  if (event != nullptr) gpu("destroy_event", device, [&] { cuda::destroy_event(event); });
}

void* record_timed_event(const Stream& stream) {
  return gpu("record_timed_event", stream.device, [&] { return cuda::record_timed_event(stream); });
}

double seconds_between(void* first, void* last, Device device) {
  return gpu("seconds_between", device, [&] { return cuda::seconds_between(first, last, device); });
}

DeviceMemory device_memory(Device device) {
  if (on_gpu(device)) return gpu("device_memory", device, [&] { return cuda::device_memory(device); });
  const size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return {.total = bytes, .available = bytes};
}

int cuda_device_count() {
  if constexpr (built_with_cuda) {
    return cuda::device_count();
  } else {
    return 0;
  }
}

void require_device(const char* operation, Device device) {
  if (on_gpu(device)) gpu(operation, device, [&] { cuda::require_device(operation, device); });
}

bool cuda_available() {
  try {
    require_device("cuda_available", Device::cuda());
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool is_accessible(const void* pointer, Device device) {
  if (!on_gpu(device)) return true;
  bool accessible = false;
  gpu("is_accessible", device, [&] { accessible = cuda::is_accessible(pointer, device); });
  return accessible;
}

int num_threads() {
  if (omp_in_parallel()) return 1;
  const int requested = requested_threads.load(std::memory_order_relaxed);
  return requested > 0 ? requested : omp_get_max_threads();
}

void set_num_threads(int count) {
  STROBE_CHECK(count >= 1, "set_num_threads: count ", count, " given, expected at least 1");
  requested_threads.store(count, std::memory_order_relaxed);
}

}  // namespace strobe
