// Embedding on the CPU: gathers rows, and adds gradients up row by row after sorting by index.
#include "strobe/kernels/embedding.h"

#include <algorithm>
#include <utility>

#include "strobe/kernels/cpu/parallel.h"
#include "strobe/kernels/cpu/row.h"

namespace strobe::kernels::cpu {
namespace {

using strobe::cpu::column_block;
using strobe::cpu::parallel_for;

template <class T, class Index>
void gather(const EmbeddingArgs& args) {
  const T* weight = static_cast<const T*>(args.weight);
  const Index* indices = static_cast<const Index*>(args.indices);
  T* out = static_cast<T*>(args.out);
  const int64_t dim = args.dim;
  parallel_for(args.rows, std::max<int64_t>(16384 / std::max<int64_t>(dim, 1), 1), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(weight + static_cast<int64_t>(indices[row]) * dim, dim, out + row * dim);
    }
  });
}

// Lists rows by index with a counting sort: those with index v are order[start[v]], ..., order[start[v + 1] - 1].
template <class Index>
void sort_rows(const Index* indices, int64_t rows, int64_t vocab, int64_t* start, int64_t* order) {
  std::fill(start, start + vocab + 1, 0);
  for (int64_t row = 0; row < rows; ++row) ++start[indices[row]];
  int64_t before = 0;
  for (int64_t v = 0; v <= vocab; ++v) before += std::exchange(start[v], before);
  for (int64_t row = 0; row < rows; ++row) order[start[indices[row]]++] = row;
  std::copy_backward(start, start + vocab, start + vocab + 1);
  start[0] = 0;
}

// Each row of dweight is written once, by one thread, so neither the bits nor the 16-bit sums suffer from collisions.
template <class T, class Index>
void scatter_add(const EmbeddingGradArgs& args) {
  using A = accumulate_t<T>;
  const T* dout = static_cast<const T*>(args.dout);
  T* dweight = static_cast<T*>(args.dweight);
  const int64_t dim = args.dim;
  int64_t* start = static_cast<int64_t*>(args.workspace);
  int64_t* order = start + args.vocab + 1;
  sort_rows(static_cast<const Index*>(args.indices), args.rows, args.vocab, start, order);
  const int64_t grain = std::max<int64_t>(16384 / std::max<int64_t>(dim, 1), 1);
  parallel_for(args.vocab, grain, [=](int64_t begin, int64_t end) {
    double sums[column_block];
    for (int64_t v = begin; v < end; ++v) {
      const int64_t* rows = order + start[v];
      const int64_t count = start[v + 1] - start[v];
      T* target = dweight + v * dim;
      if (count == 0) {
        std::fill(target, target + dim, T(A(0)));
      } else if (count == 1) {
        std::copy_n(dout + rows[0] * dim, dim, target);
      } else {
        for (int64_t first = 0; first < dim; first += column_block) {
          const int64_t width = std::min(column_block, dim - first);
          strobe::cpu::sum_columns<A>(count, width, sums,
                                      [=](int64_t i, int64_t j) { return A(dout[rows[i] * dim + first + j]); });
          for (int64_t j = 0; j < width; ++j) target[first + j] = T(static_cast<A>(sums[j]));
        }
      }
    }
  });
}

}  // namespace

void embedding_forward(const EmbeddingArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "embedding", [&]<class T>() {
    dispatch_index(args.index_dtype, "embedding", [&]<class Index>() { gather<T, Index>(args); });
  });
}

void embedding_backward(const EmbeddingGradArgs& args, const Stream&) {
  dispatch_floating(args.dtype, "embedding", [&]<class T>() {
    dispatch_index(args.index_dtype, "embedding", [&]<class Index>() { scatter_add<T, Index>(args); });
  });
}

}  // namespace strobe::kernels::cpu
