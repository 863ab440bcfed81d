// GPUs: whether they can be used, their memory, copies, streams and events.
#include "strobe/kernels/device.h"

#include <memory>
#include <mutex>
#include <vector>

#include "strobe/kernels/cuda/cuda.h"
#include "strobe/kernels/cuda/indices.h"

namespace strobe::cuda {
namespace {

__global__ void probe() {}

std::string version_name(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

struct Found {
  int count = 0;
  std::string problem;  // why there is none
};

Found find_devices() {
  Found found;
  const cudaError_t status = cudaGetDeviceCount(&found.count);
  if (status == cudaSuccess && found.count > 0) return found;
  cudaGetLastError();
  found.count = 0;
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) {
    found.problem = "no NVIDIA driver is loaded: install one, or use the CPU";
  } else if (status == cudaErrorInsufficientDriver || driver < runtime) {
    found.problem = "the driver is for CUDA " + version_name(driver) + ", this build for " + version_name(runtime) +
                    ": update the driver, or use the CPU";
  } else {
    found.problem = std::string("the driver offers no GPU (") + cudaGetErrorString(status) +
                    "): see nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU";
  }
  return found;
}

const Found& found_devices() {
  static const Found found = find_devices();
  return found;
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, index), "device_properties");
  return value;
}

DeviceProperties look_up(int index) {
  const int capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, index) + attribute(cudaDevAttrComputeCapabilityMinor, index);
  int previous = 0;
  check_cuda(cudaGetDevice(&previous), "device_properties");
  check_cuda(cudaSetDevice(index), "device_properties");
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe);
  cudaSetDevice(previous);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    fail("cuda:", index, ": a GPU of compute capability ", capability / 10, ".", capability % 10,
         ", for which this build has no code: configure with -DCMAKE_CUDA_ARCHITECTURES=", capability,
         ", or use the CPU");
  }
  check_cuda(status, "device_properties");
  return {.compute_capability = capability,
          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index),
          .shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
          .shared_bytes_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index),
          .l2_bytes = attribute(cudaDevAttrL2CacheSize, index)};
}

// A remedy where there is one.
const char* advice(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return "; free memory of the GPU or make the batch smaller";
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorInvalidPc:
      return "; this program cannot use the GPU any more: restart it (compute-sanitizer finds the cause)";
    case cudaErrorNoKernelImageForDevice:
      return "; configure with -DCMAKE_CUDA_ARCHITECTURES=native";
    case cudaErrorInvalidResourceHandle:
      return "; the stream belongs to another GPU or was destroyed";
    default:
      return "";
  }
}

}  // namespace

void fail_cuda(cudaError_t status, const char* operation) {
  cudaGetLastError();
  int index = -1;
  cudaGetDevice(&index);
  cudaGetLastError();
  fail(operation, ": CUDA reports on cuda:", index, ": ", cudaGetErrorName(status), " (", cudaGetErrorString(status),
       ")", advice(status));
}

const DeviceProperties& device_properties(Device device) {
  STROBE_CHECK(device.type == DeviceType::cuda, "device_properties: ", device, " given, expected a GPU");
  const Found& found = found_devices();
  STROBE_CHECK(found.count > 0, device, ": ", found.problem);
  STROBE_CHECK(device.index >= 0 && device.index < found.count, device,
               ": no such GPU, expected cuda:0 to cuda:", found.count - 1);
  struct Entry {
    std::once_flag once;
    DeviceProperties properties;
  };
  static const std::unique_ptr<Entry[]> entries(new Entry[static_cast<size_t>(found.count)]);
  Entry& entry = entries[static_cast<size_t>(device.index)];
  std::call_once(entry.once, [&] { entry.properties = look_up(device.index); });
  return entry.properties;
}

ActiveDevice::ActiveDevice(Device device) : previous_(0), current_(device.index) {
  device_properties(device);
  check_cuda(cudaGetDevice(&previous_), "device");
  if (previous_ != current_) check_cuda(cudaSetDevice(current_), "device");
}

ActiveDevice::~ActiveDevice() {
  if (previous_ != current_) cudaSetDevice(previous_);
}

void* raw_malloc(size_t bytes, Device device) {
  const ActiveDevice active(device);
  void* pointer = nullptr;
  const cudaError_t status = cudaMalloc(&pointer, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check_cuda(status, "raw_malloc");
  return pointer;
}

// An error could not be acted on, and at the end of the program the driver may be gone.
void raw_free(void* pointer) {
  cudaFree(pointer);
  cudaGetLastError();
}

void raw_copy(void* destination, Device destination_device, const void* source, Device source_device, size_t bytes,
              const Stream& stream) {
  if (bytes == 0) return;
  const ActiveDevice active(stream.device);
  const cudaStream_t queue = cuda_stream(stream);
  if (destination_device.type == DeviceType::cpu) {
    check_cuda(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToHost, queue), "raw_copy");
    check_cuda(cudaStreamSynchronize(queue), "raw_copy");
    throw_index_fault(stream);
  } else if (source_device.type == DeviceType::cpu) {
    check_cuda(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyHostToDevice, queue), "raw_copy");
    // Pageable memory has been copied into the driver's buffer by now; page-locked memory is read later.
    cudaPointerAttributes attributes;
    check_cuda(cudaPointerGetAttributes(&attributes, source), "raw_copy");
    if (attributes.type != cudaMemoryTypeUnregistered) check_cuda(cudaStreamSynchronize(queue), "raw_copy");
  } else if (destination_device == source_device) {
    check_cuda(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToDevice, queue), "raw_copy");
  } else {
    check_cuda(cudaMemcpyPeerAsync(destination, destination_device.index, source, source_device.index, bytes, queue),
               "raw_copy");
  }
}

void raw_zero(void* pointer, size_t bytes, const Stream& stream) {
  if (bytes == 0) return;
  const ActiveDevice active(stream.device);
  check_cuda(cudaMemsetAsync(pointer, 0, bytes, cuda_stream(stream)), "raw_zero");
}

void synchronize(const Stream& stream) {
  const ActiveDevice active(stream.device);
  check_cuda(cudaStreamSynchronize(cuda_stream(stream)), "synchronize");
  throw_index_fault(stream);
}

Stream create_stream(Device device) {
  const ActiveDevice active(device);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create_stream");
  return {device, stream};
}

void destroy_stream(const Stream& stream) {
  cudaStreamSynchronize(cuda_stream(stream));
  forget_index_fault(stream);
  cudaStreamDestroy(cuda_stream(stream));
  cudaGetLastError();
}

void* record_event(const Stream& stream) {
  int previous = 0;
  cudaEvent_t event = nullptr;
  bool recorded = cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(stream.device.index) == cudaSuccess;
  recorded = recorded && cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess;
  recorded = recorded && cudaEventRecord(event, cuda_stream(stream)) == cudaSuccess;
  cudaSetDevice(previous);
  cudaGetLastError();
  return recorded ? event : nullptr;
}

void wait_event(void* event, const Stream& stream) {
  const ActiveDevice active(stream.device);
  check_cuda(cudaStreamWaitEvent(cuda_stream(stream), static_cast<cudaEvent_t>(event), 0), "wait_event");
  destroy_event(event);
}

// CUDA frees it when the waits for it are over.
void destroy_event(void* event) {
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
  cudaGetLastError();
}

void* record_timed_event(const Stream& stream) {
  const ActiveDevice active(stream.device);
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreate(&event), "record_timed_event");
  const cudaError_t status = cudaEventRecord(event, cuda_stream(stream));
  if (status != cudaSuccess) {
    destroy_event(event);
    fail_cuda(status, "record_timed_event");
  }
  return event;
}

double seconds_between(void* first, void* last, Device device) {
  const ActiveDevice active(device);
  check_cuda(cudaEventSynchronize(static_cast<cudaEvent_t>(first)), "seconds_between");
  check_cuda(cudaEventSynchronize(static_cast<cudaEvent_t>(last)), "seconds_between");
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(first), static_cast<cudaEvent_t>(last)),
             "seconds_between");
  return 1e-3 * static_cast<double>(milliseconds);
}

DeviceMemory device_memory(Device device) {
  const ActiveDevice active(device);
  DeviceMemory memory;
  check_cuda(cudaMemGetInfo(&memory.available, &memory.total), "device_memory");
  return memory;
}

int device_count() { return found_devices().count; }

void require_device(const char* operation, Device device) {
  try {
    device_properties(device);
  } catch (const Error& error) {
    fail(operation, ": ", error.what());
  }
}

bool is_accessible(const void* pointer, Device device) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    cudaGetLastError();  // forgotten: it says no more than the answer
    return false;
  }
  if (attributes.type == cudaMemoryTypeDevice) return attributes.device == device.index;
  return attributes.devicePointer != nullptr;
}

}  // namespace strobe::cuda
