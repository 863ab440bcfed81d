// Attention forward on Hopper: the kernel around the roles of attention_hopper_forward.cuh, and which cases it takes.
#include "strobe/kernels/cuda/attention_hopper_forward_group.cuh"

#include <algorithm>
#include <cstdlib>

#include "strobe/kernels/cuda/attention_hopper.h"
#include "strobe/kernels/cuda/tensor_map.h"

namespace strobe::kernels::cuda {
namespace {

using namespace hopper;

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) attention_forward(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  auto& memory = *reinterpret_cast<ForwardMemory<Shape>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  constexpr int warps = 4 * Shape::groups;
  if (threadIdx.x == 0) {
    for (int group = 0; group < Shape::groups; ++group) {
      barrier_init(&memory.query_full[group], 1);
      barrier_init(&memory.query_empty[group], 4);
    }
    for (int stage = 0; stage < Shape::stages; ++stage) {
      for (uint64_t* full : {&memory.key_full[stage], &memory.value_full[stage]}) barrier_init(full, 1);
      for (uint64_t* empty : {&memory.key_empty[stage], &memory.value_empty[stage]}) barrier_init(empty, warps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    give_registers<Shape::loader_registers>();
    if (threadIdx.x == 0) load_tiles<Shape>(params, memory);
  } else {
    take_registers<Shape::group_registers>();
    multiply_tiles<T, Shape>(params, memory, warpgroup - 1);
  }
#endif
}

// Calls f<T, Shape>().
template <class F>
auto dispatch_hopper(const AttentionArgs& args, F&& f) {
  const auto with_type = [&]<class T>() {
    if (args.head_dim <= 64) return f.template operator()<T, ForwardShape<64, 3, 128, 3, true>>();
    if (args.head_dim <= 96) return f.template operator()<T, ForwardShape<96, 3, 80, 4, false>>();
    if (args.head_dim <= 128) return f.template operator()<T, ForwardShape<128, 3, 80, 3, false>>();
    if (args.head_dim <= 192) return f.template operator()<T, ForwardShape<192, 2, 64, 3, false>>();
    return f.template operator()<T, ForwardShape<256, 2, 64, 2, false>>();
  };
  if (args.dtype == DType::bf16) return with_type.template operator()<bfloat16>();
  return with_type.template operator()<float16>();
}

// Axes of operands in memory: packed tensors have no batch axis.
struct Rows {
  int64_t batch;
  int64_t queries;
  int64_t keys;

  explicit Rows(const AttentionArgs& args) : batch(args.batch), queries(args.seq_len_q), keys(args.seq_len_k) {
    if (args.cu_seqlens_q != nullptr) {
      batch = 1;
      queries = args.total_q;
      keys = args.total_k;
    }
  }
};

// Heads whose tiles take turns: as many as give each four blocks of the grid, or whose keys and values together fill
// two thirds of the L2 cache, in sections of about the same size.
int heads_together(const AttentionArgs& args, const strobe::cuda::DeviceProperties& gpu) {
  const int64_t heads = args.batch * args.num_heads, group = args.num_heads / args.num_kv_heads;
  const int64_t bytes = 4 * args.seq_len_k * args.head_dim;  // of one head's keys and values
  const int64_t most = std::max<int64_t>(gpu.multiprocessors / 4, group * (gpu.l2_bytes * 2 / 3 / bytes));
  const int64_t sections = strobe::cuda::ceil_div(heads, std::max<int64_t>(most, 1));
  return static_cast<int>(strobe::cuda::ceil_div(heads, sections));
}

}  // namespace

std::string hopper_attention_forward_refusal(const AttentionArgs& args, Device device) {
#ifndef STROBE_CUDA_HOPPER
  return "this build has no code for sm_90a (see CMAKE_CUDA_ARCHITECTURES)";
#endif
  const strobe::cuda::DeviceProperties& gpu = strobe::cuda::device_properties(device);
  if (gpu.compute_capability != 90) {
    return concat_message("it needs compute capability 9.0, ", device, " has ", gpu.compute_capability / 10, ".",
                          gpu.compute_capability % 10);
  }
  if (args.dtype != DType::bf16 && args.dtype != DType::f16) {
    return concat_message("it takes bf16 and f16, dtype is ", args.dtype);
  }
  if (args.head_dim % 8 != 0) {
    return concat_message("it takes head_dim in multiples of 8, head_dim is ", args.head_dim);
  }
  if (args.alibi_slopes != nullptr) return "it does not take alibi_slopes";
  if (dropout_of(args).drops()) return "it does not take dropout_p";
  const Rows rows(args);
  if (args.seq_len_k == 0) return "seq_len_k is 0";
  if (rows.keys == 0) return "total_k is 0";
  constexpr int64_t longest = int64_t{1} << 29, most_tiles = int64_t{1} << 30;  // positions and tiles are 32-bit
  if (std::max({args.seq_len_q, args.seq_len_k, rows.queries, rows.keys}) > longest ||
      strobe::cuda::ceil_div(args.seq_len_q, 128) * args.batch * args.num_heads > most_tiles) {
    return concat_message("it takes sequences up to ", longest, " and ", most_tiles, " tiles of 128 queries, batch is ",
                          args.batch, ", seq_len_q ", args.seq_len_q, ", seq_len_k ", args.seq_len_k, ", num_heads ",
                          args.num_heads, ", rows ", rows.queries, " and ", rows.keys);
  }
  std::string refusal;
  for (const auto& [name, tensor] : {std::pair("query", &args.query), {"out", &args.out}}) {
    if (refusal.empty()) refusal = tensor_map_refusal(name, *tensor, rows.batch, rows.queries, args.num_heads);
  }
  for (const auto& [name, tensor] : {std::pair("key", &args.key), {"value", &args.value}}) {
    if (refusal.empty()) refusal = tensor_map_refusal(name, *tensor, rows.batch, rows.keys, args.num_kv_heads);
  }
  return refusal;
}

AttentionTile hopper_attention_forward_tile(const AttentionArgs& args, Device) {
  return dispatch_hopper(args, [&]<class T, class Shape>() { return AttentionTile{Shape::queries, Shape::keys}; });
}

void hopper_attention_forward(const AttentionArgs& args, const Stream& stream) {
  constexpr const char* operation = "flash_attention_forward";
  const Rows rows(args);
  if (args.batch * args.num_heads * args.seq_len_q * rows.queries == 0) return;
  dispatch_hopper(args, [&]<class T, class Shape>() {
    const strobe::cuda::DeviceProperties& gpu = strobe::cuda::device_properties(stream.device);
    const ScoreFunction<float> score(args);
    const bool slow = std::getenv("STROBE_FORCE_SLOW_SOFTMAX") != nullptr;  // for tests: what few inputs bring about
    const int query_tiles = static_cast<int>(strobe::cuda::ceil_div(args.seq_len_q, Shape::queries));
    const auto map = [&](const AttentionTensor& tensor, int64_t seq_len, int64_t num_heads, int box_rows) {
      return tensor_map(operation, tensor, args.dtype, rows.batch, seq_len, num_heads, args.head_dim, box_rows);
    };
    const ForwardParams params{.query = map(args.query, rows.queries, args.num_heads, 64),
                               .key = map(args.key, rows.keys, args.num_kv_heads, Shape::keys),
                               .value = map(args.value, rows.keys, args.num_kv_heads, Shape::keys),
                               .args = args,
                               .sign = score.sign,
                               .scale2 = score.softcap == 0 ? score.magnitude * log2e : 1.0f,
                               .softcap2 = score.softcap * log2e,
                               .softcap_scale = score.softcap == 0 ? 0.0f : score.magnitude / score.softcap,
                               .sum_limit = slow                          ? 0.0f
                                            : std::is_same_v<T, bfloat16> ? 0x1p20f
                                                                          : 0x1p14f,
                               .overflow_limit = slow ? 0.0f : std::numeric_limits<float>::infinity(),
                               .tiles = static_cast<int>(query_tiles * args.batch * args.num_heads),
                               .query_tiles = query_tiles,
                               .longest_first = args.causal || args.cu_seqlens_q != nullptr,
                               .heads_together = heads_together(args, gpu)};
    strobe::cuda::launch(operation, attention_forward<T, Shape>,
                         static_cast<unsigned>(std::min(params.tiles, gpu.multiprocessors)), Shape::threads,
                         forward_shared_bytes<Shape>, stream, params);
  });
}

}  // namespace strobe::kernels::cuda
