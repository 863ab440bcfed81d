// Threads of the CPU kernels: one OpenMP pool, whose size an embedding program sets with set_num_threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>

#include "strobe/kernels/device.h"

namespace strobe::cpu {

// Splits [0, count) into at most num_threads() contiguous chunks of about `grain` or more and runs f(begin, end) on
// each. Chunks begin at multiples of min(grain, 64): which elements of a loop fall into vectors, and with it their last
// bits, does not depend on the number of threads. Runs on the calling thread alone when one chunk is enough or when
// already inside a parallel region. The first exception thrown by f is rethrown on the calling thread.
template <class F>
void parallel_for(int64_t count, int64_t grain, F&& f) {
  if (count <= 0) return;
  const int64_t chunks = std::min<int64_t>(num_threads(), (count + grain - 1) / std::max<int64_t>(grain, 1));
  const int64_t unit = std::clamp<int64_t>(grain, 1, 64);
  const int64_t units = (count + unit - 1) / unit;
  if (chunks <= 1) return f(int64_t{0}, count);
  std::exception_ptr error;
#pragma omp parallel for schedule(static, 1) num_threads(static_cast <int>(chunks))
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    try {
      f(units * chunk / chunks * unit, std::min(units * (chunk + 1) / chunks * unit, count));
    } catch (...) {
#pragma omp critical(strobe_parallel_for)
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

// Calls f(row) for each of `rows` rows of `row_size` elements, in parallel where there is enough to do.
template <class F>
void for_each_row(int64_t rows, int64_t row_size, F&& f) {
  parallel_for(rows, std::max<int64_t>(8192 / std::max<int64_t>(row_size, 1), 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

}  // namespace strobe::cpu
