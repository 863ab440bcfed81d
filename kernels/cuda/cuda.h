// What every CUDA kernel file needs: checked launches, the properties of a GPU, reductions in warps and blocks, and
// packed loads.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <type_traits>

#include "strobe/kernels/kernel.h"

namespace strobe::cuda {

inline constexpr int warp_size = 32;

// Throws an Error that names the operation, the GPU, CUDA's reason and a remedy, and clears the error in CUDA.
[[noreturn]] void fail_cuda(cudaError_t status, const char* operation);

inline void check_cuda(cudaError_t status, const char* operation) {
  if (status != cudaSuccess) fail_cuda(status, operation);
}

// The CUDA stream of a Stream; throws when it is not a GPU's.
inline cudaStream_t cuda_stream(const Stream& stream) {
  STROBE_CHECK(stream.device.type == DeviceType::cuda, "stream: one of ", stream.device, " given, expected a GPU's");
  return static_cast<cudaStream_t>(stream.handle);
}

// Makes a GPU the current one of this thread until the end of the scope. Throws when it is absent or unusable.
class ActiveDevice {
 public:
  explicit ActiveDevice(Device device);
  ~ActiveDevice();
  ActiveDevice(const ActiveDevice&) = delete;
  ActiveDevice& operator=(const ActiveDevice&) = delete;

 private:
  int previous_;
  int current_;
};

struct DeviceProperties {
  int compute_capability;  // 10 * major + minor: 80, 90, ...
  int multiprocessors;
  int shared_bytes_per_block;  // the most dynamic shared memory a block can ask for
  int shared_bytes_per_multiprocessor;
  int l2_bytes;
};

// Looked up once. Throws as ActiveDevice does.
const DeviceProperties& device_properties(Device device);

namespace detail {

template <class... Params>
void launch(const char* operation, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            const Stream& stream, bool early, Params&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const ActiveDevice active(stream.device);
  constexpr size_t always_allowed = 40 * 1024;  // beside what a kernel declares, 48 KiB together
  if (shared_bytes > always_allowed) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        operation);
  }
  void* pointers[] = {&args..., nullptr};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = cuda_stream(stream), config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  // Unlike <<<>>> and cudaGetLastError, this reports no error that the caller left behind.
  check_cuda(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), operation);
}

}  // namespace detail

// Queues kernel(args...) on the stream. An empty grid launches nothing.
template <class... Params>
void launch(const char* operation, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            const Stream& stream, std::type_identity_t<Params>... args) {
  detail::launch(operation, kernel, grid, block, shared_bytes, stream, false, args...);
}
// The same for a kernel whose blocks may start before the kernel that was queued last is over, from compute capability
// 9.0 on: threads call wait_for_earlier_kernels before they need what it wrote, or others for which it had not waited
// when it let this one start. At least one does before it ends, as who waits for this kernel takes the earlier ones to
// be over. Its code must be for 9.0 or newer: older code does not wait.
template <class... Params>
void launch_early(const char* operation, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                  const Stream& stream, std::type_identity_t<Params>... args) {
  detail::launch(operation, kernel, grid, block, shared_bytes, stream, true, args...);
}

// Returns when the kernels queued earlier are over and what they wrote is visible.
__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From here on, this block does not keep blocks of a kernel launched early from starting.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for `items` at `items_per_block`, at most 2^31 - 1: kernels loop with the grid's stride over what is beyond.
inline unsigned grid_size(int64_t items, int64_t items_per_block) {
  const int64_t blocks = ceil_div(items, items_per_block);
  return static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff);
}

// `count` values that are loaded and stored by one instruction; the address is a multiple of sizeof(Pack), at most 16.
template <class T, int count>
struct alignas(sizeof(T) * count) Pack {
  T values[count];
  __host__ __device__ T& operator[](int i) { return values[i]; }
  __host__ __device__ const T& operator[](int i) const { return values[i]; }
};

template <class T, int count>
__device__ inline Pack<T, count> load_pack(const T* address) {
  return *reinterpret_cast<const Pack<T, count>*>(address);
}
template <class T, int count>
__device__ inline void store_pack(T* address, const Pack<T, count>& pack) {
  *reinterpret_cast<Pack<T, count>*>(address) = pack;
}
// store_pack to global memory, of 16 bytes in one instruction for sure: nvcc often takes the store of a struct apart.
template <class T, int count>
__device__ inline void store_pack_global(T* address, const Pack<T, count>& pack) {
  if constexpr (sizeof(pack) == 16) {
    __stwb(reinterpret_cast<uint4*>(address), std::bit_cast<uint4>(pack));
  } else {
    store_pack(address, pack);
  }
}

// True when every pointer is a multiple of `alignment`; null is.
template <class... Pointers>
bool aligned_to(size_t alignment, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % alignment == 0) && ...);
}

struct Plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// The larger of two values; NaN when either is.
struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};

// The values of `width` consecutive lanes combined, in every lane. All lanes of the warp must call it. The order is
// fixed, so the bits are, too. width: a power of two, at most 32.
template <int width = warp_size, class T, class Combine>
__device__ inline T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

template <int width = warp_size, class T>
__device__ inline T warp_sum(T value) {
  return warp_reduce<width>(value, Plus());
}
template <int width = warp_size, class T>
__device__ inline T warp_max(T value) {
  return warp_reduce<width>(value, Larger());
}

// The values of all threads of a one-dimensional block combined, in every thread; blockDim.x is a multiple of 32. Ends
// with no barrier pending: calls may follow each other. `identity` is combined without effect.
template <class T, class Combine>
__device__ inline T block_reduce(T value, T identity, Combine combine) {
  __shared__ T partial[warp_size];
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const int warp = static_cast<int>(threadIdx.x) / warp_size;
  value = warp_reduce(value, combine);
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  value = warp_reduce(lane < static_cast<int>(blockDim.x) / warp_size ? partial[lane] : identity, combine);
  __syncthreads();
  return value;
}

template <class T>
__device__ inline T block_sum(T value) {
  return block_reduce(value, T(0), Plus());
}
template <class T>
__device__ inline T block_max(T value) {
  return block_reduce(value, -static_cast<T>(INFINITY), Larger());
}

}  // namespace strobe::cuda
