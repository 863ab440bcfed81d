// Cross entropy on the GPU: one pass over the logits forward, one backward, at the speed of memory.
#include "strobe/kernels/cuda/row.cuh"
#include "strobe/kernels/online_softmax.h"
#include "strobe/kernels/softmax.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int stream_threads = 256;
constexpr int stream_packs = 4;  // of a row, whose loads a thread has under way
// Blocks of a multiprocessor at a time: while one waits for memory or for its own threads, others keep memory busy.
constexpr int stream_blocks = 4;

// Calls visit(i, values) for runs of n values from i, where n is row_pack<T> or 1: the elements before the first
// address that is a multiple of 16 bytes, those behind the last whole pack, and all unless `packed` come singly. Runs
// cover one part of the row, `begin` and `end` being multiples of a pack or the row's end; a part's packs start and end
// as much later as the row's first pack does.
template <class A, class T, class Visit>
__device__ inline void stream_row(const T* row, int64_t cols, bool packed, int64_t begin, int64_t end, Visit&& visit) {
  constexpr int width = row_pack<T>;
  const int64_t before = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (width - 1);
  const int64_t head = packed && before < cols ? before : cols;
  const int64_t tail = head + (cols - head) / width * width;
  const auto visit_singly = [&](int64_t from, int64_t to) {
    for (int64_t i = from + threadIdx.x; i < to; i += blockDim.x) visit(i, Values<A, 1>{static_cast<A>(row[i])});
  };
  visit_singly(begin, end < head ? end : head);
  const int step = static_cast<int>(blockDim.x) * width;
  const int64_t packs_end = head + end < tail ? head + end : tail;
  int64_t i = head + begin + int64_t(threadIdx.x) * width;
  for (; i + (stream_packs - 1) * step < packs_end; i += stream_packs * step) {
    Packed<T, width> packs[stream_packs];
#pragma unroll
    for (int k = 0; k < stream_packs; ++k) packs[k].load(row + i + k * step);
#pragma unroll
    for (int k = 0; k < stream_packs; ++k) visit(i + k * step, packs[k].template values<A>());
  }
  for (; i < packs_end; i += step) {
    Packed<T, width> pack;
    pack.load(row + i);
    visit(i, pack.template values<A>());
  }
  visit_singly(begin > tail ? begin : tail, end < cols ? end : cols);
}

// Short rows have a warp each, longer ones a block.
template <class T>
dim3 stream_block(int64_t cols) {
  return cols <= warp_size * row_pack<T> * stream_packs ? dim3(warp_size, stream_threads / warp_size)
                                                        : dim3(stream_threads);
}

// The maximum and the sum of exp(x - maximum) of a row, in every one of its threads. The sum is NaN when an element is.
template <class A, class T>
__device__ inline OnlineSoftmax<A> row_statistics(const T* row, int64_t cols) {
  OnlineSoftmax<A> state;
  stream_row<A>(row, cols, true, 0, cols, [&]<int n>(int64_t, const Values<A, n>& x) {
    A largest = state.maximum;
    for (int j = 0; j < n; ++j) largest = fmax(largest, x[j]);  // not NaN
    if (largest > state.maximum) state.raise(largest);
    for (int j = 0; j < n; ++j) state.sum += state.weight(x[j]);
  });
  state.raise(row_max(state.maximum));
  state.sum = row_sum(state.sum);
  return state;
}

// The loss of each row is left in the workspace. A target out of range makes it NaN and reads nothing.
template <class T, class Index>
__global__ void __launch_bounds__(stream_threads, stream_blocks) cross_entropy_rows(const CrossEntropyArgs args) {
  using A = accumulate_t<T>;
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; index < args.rows; index += step) {
    const int64_t target = static_cast<const Index*>(args.targets)[index];
    double lse = 0, loss = 0;
    if (target != args.ignore_index) {
      const T* logits = static_cast<const T*>(args.logits) + index * args.row_stride;
      const OnlineSoftmax<A> statistics = row_statistics<A>(logits, args.vocab);
      const bool in_range = target >= 0 && target < args.vocab;
      // A row that is -inf everywhere has no distribution.
      const double sum = statistics.maximum == -static_cast<A>(INFINITY) ? NAN : static_cast<double>(statistics.sum);
      lse = static_cast<double>(statistics.maximum) + log_(sum);
      loss = in_range ? lse - static_cast<double>(static_cast<A>(logits[target])) : NAN;
    }
    if (threadIdx.x == 0) {
      args.lse[index] = lse;
      static_cast<double*>(args.workspace)[index] = loss;
    }
  }
}

constexpr int mean_threads = 1024;

// One block: the mean over the counted rows.
template <class A, class Index>
__global__ void __launch_bounds__(mean_threads) cross_entropy_mean(const CrossEntropyArgs args) {
  const double* losses = static_cast<const double*>(args.workspace);
  const Index* targets = static_cast<const Index*>(args.targets);
  double total = 0;
  int64_t counted = 0;
#pragma unroll 8
  for (int64_t row = threadIdx.x; row < args.rows; row += blockDim.x) {
    total += losses[row];
    counted += targets[row] != args.ignore_index;
  }
  total = block_sum(total);
  counted = block_sum(counted);
  if (threadIdx.x == 0) {
    *args.counted = counted;
    *static_cast<A*>(args.loss) = counted > 0 ? static_cast<A>(total / static_cast<double>(counted)) : A(0);
  }
}

// Neighbouring blocks take neighbouring parts of a row: where memory is read and written, a block for each row is a
// fifth slower.
template <class T, class Index>
__global__ void __launch_bounds__(stream_threads, stream_blocks)
    cross_entropy_rows_backward(const CrossEntropyGradArgs args) {
  using A = accumulate_t<T>;
  const int64_t length = int64_t(blockDim.x) * row_pack<T> * stream_packs;
  const int64_t begin = blockIdx.x * length;
  const int64_t end = begin + length;
  const A dloss = *static_cast<const A*>(args.dloss);
  const int64_t counted = *args.counted;
  const A scale = static_cast<A>(static_cast<double>(dloss) / static_cast<double>(counted > 0 ? counted : 1));
  const int64_t step = int64_t(gridDim.y) * blockDim.y;
  for (int64_t index = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; index < args.rows; index += step) {
    const T* const logits = static_cast<const T*>(args.logits) + index * args.logits_row_stride;
    T* const dlogits = static_cast<T*>(args.dlogits) + index * args.dlogits_row_stride;
    const int64_t target = static_cast<const Index*>(args.targets)[index];
    const bool counts = target != args.ignore_index;
    // lse in two parts: logit - lse_high is exact where it matters, whatever the size of the logits.
    const A lse_high = static_cast<A>(args.lse[index]);
    const A lse_low = static_cast<A>(args.lse[index] - static_cast<double>(lse_high));
    const bool packed = reinterpret_cast<uintptr_t>(logits) % 16 == reinterpret_cast<uintptr_t>(dlogits) % 16;
    stream_row<A>(logits, args.vocab, packed, begin, end, [&]<int n>(int64_t i, const Values<A, n>& x) {
      Values<A, n> result;
      for (int j = 0; j < n; ++j) {
        const A probability = exp2_(((x[j] - lse_high) - lse_low) * std::numbers::log2e_v<A>);
        result[j] = counts ? scale * probability : A(0);
      }
      if (counts && target >= i && target < i + n) {
        for (int j = 0; j < n; ++j) result[j] -= target == i + j ? scale : A(0);
      }
      store_values(dlogits + i, result);
    });
  }
}

}  // namespace

size_t cross_entropy_forward_workspace(const CrossEntropyArgs& args, Device) {
  return static_cast<size_t>(args.rows) * sizeof(double);
}

void cross_entropy_forward(const CrossEntropyArgs& args, const Stream& stream) {
  const size_t needed = cuda::cross_entropy_forward_workspace(args, stream.device);
  STROBE_CHECK(args.workspace_bytes >= needed, "cross_entropy: workspace of ", args.workspace_bytes,
               " bytes given, expected ", needed);
  dispatch_floating(args.dtype, "cross_entropy", [&]<class T>() {
    dispatch_index(args.index_dtype, "cross_entropy", [&]<class Index>() {
      launch_rows("cross_entropy", cross_entropy_rows<T, Index>, args.rows, stream_block<T>(args.vocab), stream, args);
      launch("cross_entropy", cross_entropy_mean<accumulate_t<T>, Index>, dim3(1), dim3(mean_threads), 0, stream, args);
    });
  });
}

void cross_entropy_backward(const CrossEntropyGradArgs& args, const Stream& stream) {
  dispatch_floating(args.dtype, "cross_entropy", [&]<class T>() {
    dispatch_index(args.index_dtype, "cross_entropy", [&]<class Index>() {
      const dim3 block = stream_block<T>(args.vocab);
      const int64_t parts = ceil_div(args.vocab, int64_t{block.x} * row_pack<T> * stream_packs);
      const int64_t rows = std::min<int64_t>(ceil_div(args.rows, block.y), 65535);
      launch("cross_entropy", cross_entropy_rows_backward<T, Index>,
             dim3(static_cast<unsigned>(parts), static_cast<unsigned>(rows)), block, 0, stream, args);
    });
  });
}

}  // namespace strobe::kernels::cuda
