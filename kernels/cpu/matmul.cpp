// Batched matrix product: blocks of out are independent tasks, each feeding packed operands to gemm_tile.
// The blocking is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008).
#include "strobe/kernels/matmul.h"

#include <algorithm>
#include <type_traits>

#include "strobe/kernels/cpu/gemm_tile.h"
#include "strobe/kernels/cpu/pack.h"
#include "strobe/kernels/cpu/parallel.h"

namespace strobe::kernels {
namespace {

using strobe::cpu::tile_columns;
using strobe::cpu::tile_rows;

constexpr int64_t max_k_block = 384;                            // terms of a partial sum
constexpr int64_t packed_a_rows = 256 / tile_rows * tile_rows;  // times max_k_block: a part of the L2 cache
constexpr int64_t min_block = 64;              // rows or columns of out below which a task is not cut further
constexpr double min_thread_operations = 1e6;  // less work does not repay waking a thread
constexpr int64_t line = 64;                   // bytes of a cache line

int64_t divide_up(int64_t count, int64_t size) { return (count + size - 1) / size; }
int64_t round_up(int64_t count, int64_t unit) { return divide_up(count, unit) * unit; }

// How a call is cut. Everything here may depend on the number of threads except k_block, on which result bits depend.
struct Plan {
  int64_t batches = 1;
  int64_t k_block = 1;
  int64_t block_rows = 0, block_columns = 0;  // of out: one task
  int64_t row_blocks = 0, column_blocks = 0;
  int64_t slots = 1;  // threads, each with its own part of the workspace
  bool pack_a = false, pack_b = false;
  bool stage_out = false;    // sums of 16-bit results wait in f32 until they are complete
  int64_t packed_a_row = 0;  // row stride of packed a
  size_t a_bytes = 0, b_bytes = 0, out_bytes = 0;

  int64_t tasks() const { return batches * row_blocks * column_blocks; }
  size_t slot_bytes() const { return a_bytes + b_bytes + out_bytes; }
  size_t workspace_bytes() const { return static_cast<size_t>(slots) * slot_bytes(); }
};

// The size of nearly equal blocks, multiples of `unit` no longer than about `longest`, that cover `extent`.
int64_t even_block(int64_t extent, int64_t longest, int64_t unit) {
  return round_up(divide_up(extent, divide_up(extent, longest)), unit);
}

template <class T, class Source>
Plan make_plan(const MatmulArgs& args) {
  Plan plan;
  for (const MatmulBatch& batch : args.batch) plan.batches *= batch.size;
  if (plan.batches == 0 || args.m == 0 || args.n == 0) return plan;
  plan.stage_out = args.out_dtype != dtype_of<T>();
  plan.k_block = divide_up(args.k, std::max<int64_t>(1, divide_up(args.k, max_k_block)));

  const double operations = 2.0 * static_cast<double>(plan.batches * args.m) * static_cast<double>(args.n * args.k);
  const double useful_threads = std::max(1.0, operations / min_thread_operations);
  const int64_t threads = useful_threads < num_threads() ? static_cast<int64_t>(useful_threads) : num_threads();
  plan.block_rows = even_block(args.m, plan.stage_out ? 256 : 1024, tile_rows);
  plan.block_columns = even_block(args.n, 512, tile_columns<T>);
  for (;;) {
    plan.row_blocks = divide_up(args.m, plan.block_rows);
    plan.column_blocks = divide_up(args.n, plan.block_columns);
    const int64_t longer = std::max(plan.block_rows, plan.block_columns);
    if (plan.tasks() >= 4 * threads || plan.tasks() % threads == 0 || longer <= min_block) break;
    if (plan.block_rows == longer) {
      plan.block_rows = even_block(args.m, longer / 2, tile_rows);
    } else {
      plan.block_columns = even_block(args.n, longer / 2, tile_columns<T>);
    }
  }
  plan.slots = std::min(threads, plan.tasks());

  // A copy pays when the operand needs a conversion, is scattered over memory, or is read many times.
  constexpr bool convert = !std::is_same_v<T, Source>;
  const bool b_is_near = args.b_row_stride * args.k * static_cast<int64_t>(sizeof(T)) <= 128 * 1024;
  plan.pack_a = convert || args.a_column_stride != 1 || plan.block_columns > 2 * tile_columns<T>;
  plan.pack_b = convert || args.b_column_stride != 1 || (plan.block_rows > 4 * tile_rows && !b_is_near);

  // Rows an odd number of cache lines apart fall into different sets of the cache.
  plan.packed_a_row = round_up(plan.k_block, 2 * line / sizeof(T)) + line / sizeof(T);
  const auto bytes = [](int64_t rows, int64_t columns) {
    return static_cast<size_t>(round_up(rows * columns * static_cast<int64_t>(sizeof(T)), line));
  };
  if (plan.pack_a) plan.a_bytes = bytes(std::min(packed_a_rows, plan.block_rows), plan.packed_a_row);
  if (plan.pack_b) plan.b_bytes = bytes(plan.k_block, plan.block_columns);
  if (plan.stage_out) plan.out_bytes = bytes(plan.block_rows, plan.block_columns);
  return plan;
}

// A block of a matrix in memory, element (i, j) at data[i * row_stride + j * column_stride].
template <class T>
struct Block {
  T* data;
  int64_t row_stride;
  int64_t column_stride;
  Block at(int64_t row, int64_t column) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride};
  }
};

// Copies rows x columns of `source` into `target`, whose columns are contiguous.
template <class T, class Source>
void pack(const Block<T>& target, const Block<const Source>& source, int64_t rows, int64_t columns) {
  if (source.row_stride == 1 && source.column_stride != 1) {
    strobe::cpu::transpose_block(target.data, target.row_stride, source.data, source.column_stride, columns, rows);
  } else {
    strobe::cpu::copy_block(target.data, target.row_stride, source.data, source.row_stride, source.column_stride, rows,
                            columns);
  }
}

// out = a b, or += when `accumulate`, for at most tile_columns columns.
template <class T>
void multiply(int64_t rows, int64_t columns, int64_t depth, const Block<const T>& a, const Block<const T>& b,
              const Block<T>& out, bool accumulate) {
  for (int64_t i = 0; i < rows; i += tile_rows) {
    const int64_t count = std::min<int64_t>(tile_rows, rows - i);
    T* const target = out.data + i * out.row_stride;
    // out is touched only after the sums over depth: fetching it now hides the memory latency.
    for (int64_t r = 0; r < count; ++r) {
      __builtin_prefetch(target + r * out.row_stride, 1);
      __builtin_prefetch(target + r * out.row_stride + columns - 1, 1);
    }
    strobe::cpu::gemm_tile(count, columns, depth, a.data + i * a.row_stride, a.row_stride, a.column_stride, b.data,
                           b.row_stride, target, out.row_stride, accumulate);
  }
}

// out += a b over the band that row i of the block sees, i + lower <= p <= i + upper. What all rows of a register block
// see is one product; the ragged ends before and after it are taken row by row, so that nothing else is ever read.
template <class T>
void multiply_band(int64_t rows, int64_t columns, int64_t depth, const Block<const T>& a, const Block<const T>& b,
                   const Block<T>& out, int64_t lower, int64_t upper) {
  const auto add = [&](int64_t row, int64_t count, int64_t begin, int64_t end) {
    if (begin >= end) return;
    multiply(count, columns, end - begin, a.at(row, begin), b.at(begin, 0), out.at(row, 0), true);
  };
  for (int64_t first = 0; first < rows; first += tile_rows) {
    const int64_t count = std::min<int64_t>(tile_rows, rows - first);
    const int64_t begin = std::clamp<int64_t>(first + count - 1 + lower, 0, depth);
    const int64_t end = std::clamp<int64_t>(first + upper + 1, begin, depth);
    const auto add_rows = [&](int64_t from, int64_t to) {
      for (int64_t i = first; i < first + count; ++i) add(i, 1, std::max(from, i + lower), std::min(to, i + upper + 1));
    };
    add_rows(0, begin);
    add(first, count, begin, end);
    add_rows(end, depth);
  }
}

// What the sums start from: bias, what out holds, or zero.
template <class T, class Source, class Out>
void start_rows(const Block<T>& sums, const Block<Out>& out, const Source* bias, bool accumulate, int64_t rows,
                int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    T* const sum = sums.at(i, 0).data;
    const Out* const old = out.at(i, 0).data;
    if (bias != nullptr && accumulate) {
      for (int64_t j = 0; j < columns; ++j) sum[j] = static_cast<T>(old[j]) + static_cast<T>(bias[j]);
    } else if (bias != nullptr) {
      for (int64_t j = 0; j < columns; ++j) sum[j] = static_cast<T>(bias[j]);
    } else if (accumulate) {
      for (int64_t j = 0; j < columns; ++j) sum[j] = static_cast<T>(old[j]);
    } else {
      std::fill_n(sum, columns, T(0));
    }
  }
}

// One block of out and what it is computed from.
template <class Source, class Out>
struct Task {
  int64_t row;  // of out, where the block starts
  int64_t rows, columns;
  Block<const Source> a;  // rows x k
  Block<const Source> b;  // k x columns
  Block<Out> out;
  const Source* bias;

  Task(const MatmulArgs& args, const Plan& plan, int64_t index)
      : row(index / plan.column_blocks % plan.row_blocks * plan.block_rows),
        a{static_cast<const Source*>(args.a), args.a_row_stride, args.a_column_stride},
        b{static_cast<const Source*>(args.b), args.b_row_stride, args.b_column_stride},
        out{static_cast<Out*>(args.out), args.out_row_stride, 1},
        bias(static_cast<const Source*>(args.bias)) {
    const int64_t column = index % plan.column_blocks * plan.block_columns;
    rows = std::min(plan.block_rows, args.m - row);
    columns = std::min(plan.block_columns, args.n - column);
    index /= plan.column_blocks * plan.row_blocks;
    for (const MatmulBatch& batch : args.batch) {
      a.data += index % batch.size * batch.a_stride;
      b.data += index % batch.size * batch.b_stride;
      out.data += index % batch.size * batch.out_stride;
      index /= batch.size;
    }
    a = a.at(row, 0);
    b = b.at(0, column);
    out = out.at(row, column);
    if (bias != nullptr) bias += column;
  }
};

template <class T, class Source, class Out>
void run_task(const MatmulArgs& args, const Plan& plan, const Task<Source, Out>& task, std::byte* workspace) {
  constexpr bool computed_as_stored = std::is_same_v<T, Source>;
  T* const a_buffer = reinterpret_cast<T*>(workspace);
  T* const b_buffer = reinterpret_cast<T*>(workspace + plan.a_bytes);
  Block<T> sums{reinterpret_cast<T*>(workspace + plan.a_bytes + plan.b_bytes), plan.block_columns, 1};
  if constexpr (std::is_same_v<T, Out>) sums = task.out;

  const bool banded = args.band_lower > 1 - args.m || args.band_upper < args.k - 1;
  const bool start = banded || task.bias != nullptr || (args.accumulate && plan.stage_out);
  int64_t p = 0;
  do {  // also once when k is 0: the result is what the sums start from
    const int64_t depth = std::min(plan.k_block, args.k - p);
    // The band as rows of this task and columns of this block of k count: row i sees i + lower <= q <= i + upper.
    const int64_t lower = task.row - p + args.band_lower, upper = task.row - p + args.band_upper;
    const auto sees_nothing = [&](int64_t first, int64_t count) {
      return banded && (first + lower >= depth || first + count - 1 + upper < 0);
    };
    if (plan.pack_b && !sees_nothing(0, task.rows)) {
      for (int64_t j = 0; j < task.columns; j += tile_columns<T>) {
        pack(Block<T>{b_buffer + j * depth, tile_columns<T>, 1}, task.b.at(p, j), depth,
             std::min<int64_t>(tile_columns<T>, task.columns - j));
      }
    }
    for (int64_t i = 0; i < task.rows; i += packed_a_rows) {
      const int64_t count = std::min(packed_a_rows, task.rows - i);
      if (start && p == 0) {
        start_rows(sums.at(i, 0), task.out.at(i, 0), task.bias, args.accumulate, count, task.columns);
      }
      if (sees_nothing(i, count)) continue;
      Block<const T> a{a_buffer, plan.packed_a_row, 1};
      if (plan.pack_a) {
        pack(Block<T>{a_buffer, plan.packed_a_row, 1}, task.a.at(i, p), count, depth);
      } else if constexpr (computed_as_stored) {
        a = task.a.at(i, p);
      }
      for (int64_t j = 0; j < task.columns; j += tile_columns<T>) {
        const int64_t width = std::min<int64_t>(tile_columns<T>, task.columns - j);
        Block<const T> b{b_buffer + j * depth, tile_columns<T>, 1};
        if constexpr (computed_as_stored) {
          if (!plan.pack_b) b = task.b.at(p, j);
        }
        if (banded) {
          multiply_band(count, width, depth, a, b, sums.at(i, j), i + lower, i + upper);
        } else {
          multiply(count, width, depth, a, b, sums.at(i, j), start || args.accumulate || p > 0);
        }
      }
    }
    p += depth;
  } while (p < args.k);
  if constexpr (!std::is_same_v<T, Out>) {
    strobe::cpu::copy_block(task.out.data, task.out.row_stride, sums.data, sums.row_stride, 1, task.rows, task.columns);
  }
}

template <class T, class Source, class Out>
void run(const MatmulArgs& args) {
  const Plan plan = make_plan<T, Source>(args);
  const int64_t tasks = plan.tasks();
  STROBE_CHECK(args.workspace_bytes >= plan.workspace_bytes(), "matmul: workspace of ", args.workspace_bytes,
               " bytes given, expected ", plan.workspace_bytes());
  strobe::cpu::parallel_for(plan.slots, 1, [&](int64_t begin, int64_t end) {
    std::byte* workspace = static_cast<std::byte*>(args.workspace) + static_cast<size_t>(begin) * plan.slot_bytes();
    for (int64_t index = tasks * begin / plan.slots; index < tasks * end / plan.slots; ++index) {
      run_task<T>(args, plan, Task<Source, Out>(args, plan, index), workspace);
    }
  });
}

}  // namespace

namespace cpu {

size_t matmul_workspace(const MatmulArgs& args, Device) {
  return dispatch_floating(args.dtype, "matmul", [&]<class Source>() {
    return make_plan<accumulate_t<Source>, Source>(args).workspace_bytes();
  });
}

void matmul(const MatmulArgs& args, const Stream& stream) {
  const MatmulArgs product = without_epilogue(args);
  dispatch_floating(args.dtype, "matmul", [&]<class Source>() {
    using T = accumulate_t<Source>;
    if (args.out_dtype == dtype_of<Source>()) return run<T, Source, Source>(product);
    STROBE_CHECK(args.out_dtype == dtype_of<T>(), "matmul: out_dtype ", args.out_dtype, " given, expected ", args.dtype,
                 " or ", dtype_of<T>());
    run<T, Source, T>(product);
  });
  apply_epilogue(args, stream);
}

}  // namespace cpu
}  // namespace strobe::kernels
