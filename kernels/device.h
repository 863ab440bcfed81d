// Raw memory, copies, streams and threads of a device: what the caching allocator and the tensors stand on.
//
// Every function that is given a GPU throws an Error when this build has no CUDA backend, or the GPU is absent or
// cannot run it; the message says what to do. Those that free something do not throw.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe {

// Bytes aligned to 64, or nullptr when the device has no more.
void* raw_malloc(size_t bytes, Device device);
// On a GPU it waits for the work of all streams.
void raw_free(void* pointer, Device device);

// Copies bytes between any two devices, in order with `stream`, which is one of a GPU that takes part. Host memory that
// takes part may be used as soon as the call returns: a copy to the host waits for the stream, all others are queued.
void raw_copy(void* destination, Device destination_device, const void* source, Device source_device, size_t bytes,
              const Stream& stream);

// Sets bytes to zero, in order with `stream`.
void raw_zero(void* pointer, size_t bytes, const Stream& stream);

// Waits until all work queued on the stream is done; the CPU stream always is.
void synchronize(const Stream& stream);

// A new stream of a GPU, whose work may overlap that of all others. The CPU has only the one without a handle.
Stream create_stream(Device device);
// Waits for the stream's work first.
void destroy_stream(const Stream& stream);

// A mark behind the work queued on a stream so far; null on the CPU, or when the GPU has failed.
void* record_event(const Stream& stream);
// Queues on `stream` a wait for the mark, which is used up; null: nothing to wait for.
void wait_event(void* event, const Stream& stream);
void destroy_event(void* event, Device device);

// The same as record_event for a mark that also keeps the time, of a GPU; throws where record_event returns null.
void* record_timed_event(const Stream& stream);
// Seconds between two such marks of one GPU by its clock. Waits for both.
double seconds_between(void* first, void* last, Device device);

struct DeviceMemory {
  size_t total;
  size_t available;  // what no program holds now; on the CPU the same as total
};
DeviceMemory device_memory(Device device);

// GPUs that the CUDA driver offers to this build, usable or not: 0 without a driver or without the CUDA backend.
int cuda_device_count();
// Throws, saying why, unless work can run on the device. The CPU always can.
void require_device(const char* operation, Device device);
// True when require_device accepts Device::cuda().
bool cuda_available();

// Whether kernels of the device can read what the pointer points to. The CPU is taken to read everything.
bool is_accessible(const void* pointer, Device device);

// Threads the CPU kernels use: by default every core the process may run on. Within a parallel region it is 1.
int num_threads();
// Throws when count is below 1.
void set_num_threads(int count);

// The part of the functions above that a GPU does, in kernels/cuda.
namespace cuda {
void* raw_malloc(size_t bytes, Device device);
void raw_free(void* pointer);
void raw_copy(void* destination, Device destination_device, const void* source, Device source_device, size_t bytes,
              const Stream& stream);
void raw_zero(void* pointer, size_t bytes, const Stream& stream);
void synchronize(const Stream& stream);
Stream create_stream(Device device);
void destroy_stream(const Stream& stream);
void* record_event(const Stream& stream);
void wait_event(void* event, const Stream& stream);
void destroy_event(void* event);
void* record_timed_event(const Stream& stream);
double seconds_between(void* first, void* last, Device device);
DeviceMemory device_memory(Device device);
int device_count();
void require_device(const char* operation, Device device);
bool is_accessible(const void* pointer, Device device);
}  // namespace cuda

}  // namespace strobe
