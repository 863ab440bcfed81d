// Raw memory, copies and threads of a device: what the caching allocator and the tensors stand on.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe {

// Bytes aligned to 64, or nullptr when the device has no more.
void* raw_malloc(size_t bytes, Device device);
void raw_free(void* pointer, Device device);

// Copies bytes between any two devices, in order with `stream`.
void raw_copy(void* destination, Device destination_device, const void* source, Device source_device, size_t bytes,
              const Stream& stream);

// Sets bytes to zero, in order with `stream`.
void raw_zero(void* pointer, size_t bytes, const Stream& stream);

// Waits until all work queued on the stream is done; the CPU stream always is.
void synchronize(const Stream& stream);

// True when this build has the CUDA backend and a usable GPU is present.
bool cuda_available();

// Threads the CPU kernels use: by default every core the process may run on. Within a parallel region it is 1.
int num_threads();
// Throws when count is below 1.
void set_num_threads(int count);

}  // namespace strobe
