// The range check of index arrays on CUDA, for which nobody waits: a fault is left in memory of the host.
#include "strobe/kernels/indices.h"

#include <map>
#include <mutex>
#include <utility>

#include "strobe/kernels/cuda/cuda.h"
#include "strobe/kernels/cuda/indices.h"

namespace strobe {
namespace {

using kernels::IndexFault;

// One record for each stream, page-locked and seen by all GPUs. The checks of a stream run one after the other, so
// that the first fault stays until it is thrown.
struct Faults {
  std::mutex mutex;
  std::map<std::pair<int, void*>, IndexFault*> by_stream;
};

// Never destroyed, as kernels may still run at the end of the program.
Faults& faults() {
  static Faults* const instance = new Faults;
  return *instance;
}

IndexFault* fault_of(const Stream& stream) {
  const std::lock_guard lock(faults().mutex);
  const std::pair key{stream.device.index, stream.handle};
  if (const auto found = faults().by_stream.find(key); found != faults().by_stream.end()) return found->second;
  const cuda::ActiveDevice active(stream.device);
  void* memory = nullptr;
  cuda::check_cuda(cudaHostAlloc(&memory, sizeof(IndexFault), cudaHostAllocPortable | cudaHostAllocMapped),
                   "check_indices");
  return faults().by_stream[key] = new (memory) IndexFault;
}

constexpr int threads = 1024;

// One block, so that the first fault is found without a second pass.
template <class Index>
__global__ void __launch_bounds__(threads)
    find_invalid(IndexFault* record, IndexFault fault, const Index* indices, int64_t size, int64_t ignored) {
  __shared__ unsigned long long first;
  if (threadIdx.x == 0) first = ~0ull;
  __syncthreads();
  unsigned long long mine = ~0ull;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < size; i += threads) {
    const int64_t index = indices[i];
    const bool invalid = (index < 0 || index >= fault.limit) && index != ignored;
    if (invalid && mine == ~0ull) mine = static_cast<unsigned long long>(i);
  }
  if (mine != ~0ull) atomicMin(&first, mine);
  __syncthreads();
  if (threadIdx.x != 0 || first == ~0ull || record->position >= 0) return;
  fault.position = static_cast<int64_t>(first);
  fault.value = indices[first];
  *record = fault;
}

}  // namespace

namespace cuda {

void throw_index_fault(const Stream& stream) {
  IndexFault fault;
  {
    const std::lock_guard lock(faults().mutex);
    const auto found = faults().by_stream.find({stream.device.index, stream.handle});
    if (found == faults().by_stream.end() || found->second->position < 0) return;
    fault = std::exchange(*found->second, IndexFault());
  }
  fault.raise();
}

void forget_index_fault(const Stream& stream) {
  const std::lock_guard lock(faults().mutex);
  const auto found = faults().by_stream.find({stream.device.index, stream.handle});
  if (found == faults().by_stream.end()) return;
  cudaFreeHost(found->second);
  faults().by_stream.erase(found);
}

}  // namespace cuda

namespace kernels::cuda {

void check_indices(const CheckIndicesArgs& args, const Stream& stream) {
  int64_t size = 1;
  for (int axis = 0; axis < args.rank; ++axis) size *= args.sizes[axis];
  dispatch_index(args.index_dtype, args.operation, [&]<class Index>() {
    strobe::cuda::launch(args.operation, find_invalid<Index>, dim3(size > 0 ? 1 : 0), dim3(threads), 0, stream,
                         fault_of(stream), IndexFault(args), static_cast<const Index*>(args.indices), size,
                         args.ignore_index);
  });
}

}  // namespace kernels::cuda
}  // namespace strobe
