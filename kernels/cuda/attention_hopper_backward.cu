// Attention backward on Hopper: the kernel around the roles of attention_hopper_backward.cuh, and which cases it and
// the two kernels for head_dim over 128 or a softcap take.
#include <algorithm>

#include "strobe/kernels/cuda/attention_hopper.h"
#include "strobe/kernels/cuda/attention_hopper_backward_dquery.cuh"
#include "strobe/kernels/cuda/attention_hopper_backward_rounds.cuh"
#include "strobe/kernels/cuda/attention_hopper_backward_sum.cuh"
#include "strobe/kernels/cuda/tensor_map.h"

namespace strobe::kernels::cuda {
namespace {

using namespace hopper;

template <class T, class Shape, int head_dim>
__global__ void __launch_bounds__(Shape::all_threads, 1) attention_backward(const __grid_constant__ GradParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<GradMemory<Shape>*>(shared);
  if (threadIdx.x == 0) {
    const auto init = [](auto& barriers, int arrivals) {
      for (uint64_t& barrier : barriers) barrier_init(&barrier, arrivals);
    };
    init(memory.query_full, 1);
    init(memory.query_empty, Shape::warps);
    init(memory.dout_full, 1);
    init(memory.dout_empty, Shape::warps);
    init(memory.scores_full, Shape::warps);
    init(memory.scores_empty, 4);
    init(memory.key_full, 1);
    init(memory.key_empty, Shape::warps + 4);
    for (uint64_t* one : {&memory.number_full, &memory.value_full}) barrier_init(one, 1);
    barrier_init(&memory.value_empty, Shape::warps);
    barrier_init(&memory.turn_used, 4);
    barrier_init(&memory.number_empty, 32 * (Shape::warps + 4) + 3);
    barrier_init(&memory.turn_open, 2);
    barrier_init_fence();
  }
  write_picks(memory);
  __syncthreads();
  strobe::cuda::wait_for_earlier_kernels();
  const int group = uniform(static_cast<int>(threadIdx.x) / 128);
  if (group < Shape::groups) {
    take_registers<Shape::group_registers>();
    multiply_blocks<T, Shape, head_dim>(params, memory, group);
  } else if (group == Shape::groups) {
    give_registers<Shape::sum_registers>();
    sum_dquery<T, Shape, head_dim>(params, memory);
  } else {
    give_registers<Shape::loader_registers>();
    const int role = static_cast<int>(threadIdx.x) - Shape::threads - 128;
    if (role == 0) load_queries<Shape>(params, memory);
    if (role == 32) load_keys<Shape>(params, memory);
    if (role == 64) open_turns<Shape>(params, memory);
    if (role == 96) close_turns<Shape>(params, memory);
  }
#endif
}

// Calls f<T, Shape, head_dim>() with the least instance that holds head_dim. With a softcap 96 columns are 128: scores
// take longer than their products.
template <class F>
auto dispatch_hopper(const AttentionArgs& args, F&& f) {
  const auto with_type = [&]<class T>() {
    if (args.softcap != 0) {
      if (args.head_dim > 192) return f.template operator()<T, WideGradShape<256, 2, 8, 4, true>, 256>();
      if (args.head_dim > 128) return f.template operator()<T, WideGradShape<192, 3, 12, 0, true>, 192>();
      if (args.head_dim > 64) return f.template operator()<T, WideGradShape<128, 3, 8, 0, true>, 128>();
      return f.template operator()<T, WideGradShape<64, 3, 4, 0, true>, 64>();
    }
    if (args.head_dim > 192) return f.template operator()<T, WideGradShape<256, 2, 8, 4, false>, 256>();
    if (args.head_dim > 128) return f.template operator()<T, WideGradShape<192, 3, 12, 0, false>, 192>();
    if (args.head_dim > 96) return f.template operator()<T, GradShape<128>, 128>();
    if (args.head_dim > 64) return f.template operator()<T, GradShape<128>, 96>();
    return f.template operator()<T, GradShape<64>, 64>();
  };
  if (args.dtype == DType::bf16) return with_type.template operator()<bfloat16>();
  return with_type.template operator()<float16>();
}

// How many heads of a group follow one another at each query tile. With all of them a block that sees few tiles is done
// soon, where it would wait for its turns at each head, and blocks of a kv head are at the same tiles. head_bytes: of
// the queries, dout and sums for dquery of a kv head.
int heads_at_a_tile(const BackwardParams& params, int64_t head_bytes, const strobe::cuda::DeviceProperties& gpu) {
  const AttentionArgs& args = params.grad.forward;
  const bool leaves_cache = args.causal && 8 * head_bytes > gpu.l2_bytes;
  return params.deterministic || leaves_cache ? static_cast<int>(args.num_heads / args.num_kv_heads) : 1;
}

// How many heads' key blocks alternate. A power of two, so that few of the last ones remain.
int64_t heads_of_sums(const BackwardParams& params, int inner_heads, int64_t head_bytes,
                      const strobe::cuda::DeviceProperties& gpu) {
  const AttentionArgs& args = params.grad.forward;
  const auto fits = [&](int64_t count) {
    // Blocks of a head are at the same few tiles then, and long ones of many heads come before short ones.
    if (args.causal && inner_heads > 1) return count * params.key_blocks <= 2 * gpu.multiprocessors;
    // In turns, blocks of one head wait for each other: more heads are worth leaving the L2 cache. Measured on an H200.
    if (params.deterministic) return count * count * head_bytes <= int64_t{20} * gpu.l2_bytes;
    const bool cached = count * head_bytes <= gpu.l2_bytes * 2 / 3;
    // Where blocks differ, long ones begin beside short ones.
    if (args.causal) return cached || count * params.key_blocks <= gpu.multiprocessors;
    return cached && count * std::min<int64_t>(params.key_blocks, 16) <= gpu.multiprocessors;
  };
  int64_t count = 1;
  while (2 * count <= args.batch * args.num_kv_heads && fits(2 * count)) count *= 2;
  return count;
}

// The map of an operand in which each sequence ends with the axis of rows. Packed, that axis has as many rows as the
// longest sequence may, and place n on the axis of batches has it end before row n of the tensor. So the map begins
// before the tensor, where there may be no memory: TMA leaves it alone as long as each box begins in a sequence, but
// faults where all of a box is outside of the axes.
CUtensorMap sequence_map(const char* operation, const AttentionTensor& tensor, const AttentionArgs& args, int64_t rows,
                         int64_t map_rows, int64_t num_heads, int box_rows) {
  if (args.cu_seqlens_q == nullptr) {
    return tensor_map(operation, tensor, args.dtype, args.batch, map_rows, num_heads, args.head_dim, box_rows);
  }
  const int64_t row_stride = rows == 1 ? 8 : tensor.seq_stride;  // that of one row may be anything
  const int64_t bytes = map_rows * row_stride * 2;
  const AttentionTensor moved{static_cast<char*>(tensor.data) - bytes, row_stride, row_stride, tensor.head_stride};
  return tensor_map(operation, moved, args.dtype, rows + 1, map_rows, num_heads, args.head_dim, box_rows);
}

// Why it cannot begin so far before a tensor; empty if it can.
std::string sequence_map_refusal(const char* name, const AttentionTensor& tensor, const AttentionArgs& args,
                                 int64_t rows, int64_t longest) {
  if (args.cu_seqlens_q == nullptr || rows <= 1 || tensor.seq_stride <= 0 || tensor.data == nullptr) return {};
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  if (std::min(rows, longest) <= static_cast<int64_t>(address / 2) / tensor.seq_stride) return {};
  return concat_message("the longest sequence has up to ", longest, " rows, with seq_stride ", tensor.seq_stride,
                        " more than there are addresses before ", name);
}

// How many blocks of keys come in two pieces, where all blocks are equally long, and so long that it is worth the way
// of their sums through memory. Twice as many end more evenly but gain no more on an H200. Each has a query tile's
// counter. Kernels count the steps of 64 pieces in 32 bits.
template <class Shape>
int64_t count_cut_blocks(const BackwardParams& params) {
  const AttentionArgs& args = params.grad.forward;
  const bool unequal = args.causal || args.window_left >= 0 || args.window_right >= 0 || args.cu_seqlens_q != nullptr;
  const int64_t steps = params.table.query_tiles * (args.num_heads / args.num_kv_heads);
  if (Shape::sums_dquery || unequal || steps < 32 || steps > int64_t{1} << 24) return 0;
  return std::min<int64_t>({params.blocks / 8, params.all_query_tiles, 64});
}

// With room for the sums of cut blocks behind the other arrays of the workspace.
template <class Shape>
BackwardParams hopper_params(const AttentionGradArgs& grad, void* base, size_t& bytes) {
  BackwardParams params = backward_params<Shape>(grad, base, bytes);
  params.cut_blocks = count_cut_blocks<Shape>(params);
  params.cut_sums = reinterpret_cast<float*>(static_cast<char*>(base) + bytes);
  bytes += static_cast<size_t>(params.cut_blocks * 2 * Shape::keys * Shape::columns) * sizeof(float);
  return params;
}

// Whether TMA can store a gradient that is shaped as the keys.
bool can_send(const char* name, const AttentionTensor& tensor, const AttentionArgs& args, const HopperRows& rows) {
  return tensor_map_refusal(name, tensor, rows.batch, rows.keys, args.num_kv_heads).empty() &&
         sequence_map_refusal(name, tensor, args, rows.keys, args.seq_len_k).empty();
}

template <class Shape>
GradParams grad_params(const char* operation, const AttentionGradArgs& grad,
                       const strobe::cuda::DeviceProperties& gpu) {
  const AttentionArgs& args = grad.forward;
  size_t bytes;
  BackwardParams base = hopper_params<Shape>(grad, grad.workspace, bytes);
  STROBE_CHECK(grad.workspace_bytes >= bytes, operation, ": workspace of ", grad.workspace_bytes,
               " bytes given, expected ", bytes);
  const int64_t group_heads = args.num_heads / args.num_kv_heads;
  const HopperRows rows(args);
  const int64_t map_q = std::min(args.seq_len_q, rows.queries), map_k = std::min(args.seq_len_k, rows.keys);
  const int64_t mean_queries = rows.batch * rows.queries / args.batch;
  const int64_t queries = std::max<int64_t>(mean_queries, 1) * group_heads;
  int inner_heads = 1;
  if constexpr (Shape::sums_dquery) {
    const int64_t head_bytes = queries * Shape::columns * (2 + 2 + 4);
    inner_heads = heads_at_a_tile(base, head_bytes, gpu);
    base.heads_together = heads_of_sums(base, inner_heads, head_bytes, gpu);
  } else {
    // Nobody waits for a turn. Where blocks differ, those of some heads come in descending order of their work: of as
    // many as leave queries and dout room in the L2 cache.
    const int64_t head_bytes = queries * args.head_dim * (2 + 2);
    base.heads_together =
        std::clamp<int64_t>(args.causal ? (16 << 20) / head_bytes : 1, 1, args.batch * args.num_kv_heads);
  }
  base.stores_first = true;
  const auto query_map = [&](const AttentionTensor& tensor) {
    return sequence_map(operation, tensor, args, rows.queries, map_q, args.num_heads, Shape::queries);
  };
  const auto key_map = [&](const AttentionTensor& tensor) {
    return sequence_map(operation, tensor, args, rows.keys, map_k, args.num_kv_heads, Shape::keys);
  };
  bool sends_sums = false;
  if constexpr (Shape::sums_dquery) {
    sends_sums =
        Shape::sends_sums && can_send("dkey", grad.dkey, args, rows) && can_send("dvalue", grad.dvalue, args, rows);
  }
  const auto sum_map = [&](const AttentionTensor& tensor) {
    return sends_sums ? sequence_map(operation, tensor, args, rows.keys, map_k, args.num_kv_heads, 16) : CUtensorMap{};
  };
  return {.query = query_map(args.query),
          .key = key_map(args.key),
          .value = key_map(args.value),
          .dout = query_map(grad.dout),
          .dkey = sum_map(grad.dkey),
          .dvalue = sum_map(grad.dvalue),
          .base = base,
          .group_heads = static_cast<int>(group_heads),
          .inner_heads = inner_heads,
          .map_q = static_cast<int>(map_q),
          .map_k = static_cast<int>(map_k),
          .sends_sums = sends_sums};
}

template <class T, class Shape, int head_dim>
void launch_backward(const char* operation, const GradParams& params, const strobe::cuda::DeviceProperties& gpu,
                     const Stream& stream) {
  const BackwardParams& base = params.base;
  const AttentionArgs& args = base.grad.forward;
  const int64_t tiles = base.table.query_tiles * args.batch * args.num_heads;
  strobe::cuda::launch(operation, prepare_backward<T, Shape>, grid_of(std::max<int64_t>(tiles, 1)), dim3(128),
                       2 * Shape::query_bytes, stream, base);
  if (args.softcap == 0) mma_attention_split_lse(args, base.table, stream);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(base.blocks, gpu.multiprocessors));
  if constexpr (Shape::sums_dquery) {
    strobe::cuda::launch_early(operation, attention_backward<T, Shape, head_dim>, grid, Shape::all_threads,
                               grad_shared_bytes<Shape>, stream, params);
    strobe::cuda::launch_early(operation, finish_backward<T, Shape>, grid_of(tiles), dim3(Shape::threads),
                               Shape::query_bytes, stream, base);
  } else {
    const int64_t blocks = strobe::cuda::ceil_div(args.seq_len_q, Shape::block_queries) * args.batch * args.num_heads;
    strobe::cuda::launch_early(operation, attention_backward_dquery<T, Shape, head_dim>, static_cast<unsigned>(blocks),
                               Shape::all_threads, static_cast<int>(sizeof(DqueryMemory<Shape>)), stream, params);
    strobe::cuda::launch_early(operation, attention_backward_keys<T, Shape, head_dim>, grid, Shape::all_threads,
                               grad_shared_bytes<Shape>, stream, params);
  }
}

}  // namespace

std::string hopper_attention_backward_refusal(const AttentionArgs& args, Device device) {
  const std::string refusal = hopper_attention_refusal(args, device);
  if (!refusal.empty()) return refusal;
  const HopperRows rows(args);
  std::string far = sequence_map_refusal("query", args.query, args, rows.queries, args.seq_len_q);
  if (far.empty()) far = sequence_map_refusal("key", args.key, args, rows.keys, args.seq_len_k);
  if (far.empty()) far = sequence_map_refusal("value", args.value, args, rows.keys, args.seq_len_k);
  return far;
}

std::string hopper_attention_dout_refusal(const AttentionGradArgs& args) {
  if (args.dout_dim_stride != 1) return concat_message("dout has stride ", args.dout_dim_stride, " along head_dim");
  const HopperRows rows(args.forward);
  const std::string refusal = tensor_map_refusal("dout", args.dout, rows.batch, rows.queries, args.forward.num_heads);
  if (!refusal.empty()) return refusal;
  return sequence_map_refusal("dout", args.dout, args.forward, rows.queries, args.forward.seq_len_q);
}

AttentionTile hopper_attention_backward_tile(const AttentionArgs& args, Device) {
  return dispatch_hopper(args, [&]<class T, class Shape, int head_dim>() {
    return AttentionTile{Shape::queries, Shape::keys};
  });
}

size_t hopper_attention_backward_workspace(const AttentionGradArgs& args) {
  size_t bytes = 0;
  dispatch_hopper(args.forward,
                  [&]<class T, class Shape, int head_dim>() { hopper_params<Shape>(args, nullptr, bytes); });
  return bytes;
}

void hopper_attention_backward(const AttentionGradArgs& args, const Stream& stream) {
  constexpr const char* operation = "flash_attention_backward";
  const AttentionArgs& forward = args.forward;
  const int64_t queries = std::min(forward.seq_len_q, HopperRows(forward).queries);
  if (forward.batch * forward.num_heads * queries == 0) return mma_attention_backward(args, stream);
  dispatch_hopper(forward, [&]<class T, class Shape, int head_dim>() {
    const strobe::cuda::DeviceProperties& gpu = strobe::cuda::device_properties(stream.device);
    launch_backward<T, Shape, head_dim>(operation, grad_params<Shape>(operation, args, gpu), gpu, stream);
  });
}

}  // namespace strobe::kernels::cuda
