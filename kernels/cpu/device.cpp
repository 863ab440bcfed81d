#include "strobe/kernels/device.h"

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace strobe {
namespace {

std::atomic<int> requested_threads{0};

void require_cpu(Device device, const char* operation) {
  STROBE_CHECK(device.type == DeviceType::cpu, operation, ": device ", device,
               " given, but this build has no CUDA backend");
}

}  // namespace

void* raw_malloc(size_t bytes, Device device) {
  require_cpu(device, "raw_malloc");
  constexpr size_t alignment = 64;
  if (bytes > SIZE_MAX - alignment) return nullptr;
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void raw_free(void* pointer, Device) { std::free(pointer); }

void raw_copy(void* destination, Device destination_device, const void* source, Device source_device, size_t bytes,
              const Stream&) {
  require_cpu(destination_device, "raw_copy");
  require_cpu(source_device, "raw_copy");
  if (bytes > 0) std::memcpy(destination, source, bytes);
}

void raw_zero(void* pointer, size_t bytes, const Stream& stream) {
  require_cpu(stream.device, "raw_zero");
  if (bytes > 0) std::memset(pointer, 0, bytes);
}

void synchronize(const Stream& stream) { require_cpu(stream.device, "synchronize"); }

bool cuda_available() { return false; }

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
