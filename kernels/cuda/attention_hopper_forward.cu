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
  extern __shared__ __align__(1024) char raw[];
  auto& memory = *reinterpret_cast<ForwardMemory<Shape>*>(raw);
  if (threadIdx.x == 0) init_barriers(memory);
  __syncthreads();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    give_registers<Shape::loader_registers>();
    if (warp > 0) {
      deal_tiles<Shape>(params, memory, static_cast<int>(threadIdx.x) - 32);
    } else if (threadIdx.x == 0) {
      load_tiles<Shape>(params, memory);
    }
  } else {
    take_registers<Shape::group_registers>();
    multiply_tiles<T, Shape>(params, memory, warp / 4 - 1);
  }
#endif
}

// Calls f<T, Shape>().
template <class F>
auto dispatch_hopper(const AttentionArgs& args, F&& f) {
  const auto with_type = [&]<class T>() {
    if (args.head_dim <= 64) {
      // Worth an instance: + 4 % through a window of 1,024, and in the other one it would cost 4 %.
      if (args.window_left >= 0) return f.template operator()<T, ForwardShape<64, 3, 128, 5, 2, true>>();
      return f.template operator()<T, ForwardShape<64, 3, 128, 5, 2>>();
    }
    if (args.head_dim <= 96) return f.template operator()<T, ForwardShape<96, 3, 64, 4, 2>>();
    if (args.head_dim <= 128) return f.template operator()<T, ForwardShape<128, 3, 64, 4, 2>>();
    if (args.head_dim <= 192) return f.template operator()<T, ForwardShape<192, 2, 80, 2, 2>>();
    return f.template operator()<T, ForwardShape<256, 2, 64, 2, 1>>();
  };
  if (args.dtype == DType::bf16) return with_type.template operator()<bfloat16>();
  return with_type.template operator()<float16>();
}

// How far a query sees from the diagonal through a window, in 32 bits: positions are below 2^29.
int reach(int64_t window) {
  constexpr int64_t everything = int64_t{1} << 30;
  return static_cast<int>(window < 0 ? everything : std::min(window, everything));
}

int reach_right(const AttentionArgs& args) { return args.causal ? 0 : reach(args.window_right); }

// Keys that the queries of a tile see at most.
int64_t keys_of_tile(const AttentionArgs& args, int64_t queries) {
  return std::min(args.seq_len_k, reach(args.window_left) + int64_t{reach_right(args)} + queries);
}

// Heads whose tiles take turns: as many as the keys and values that a tile of each sees fill two thirds of the L2
// cache, in sections of about the same size.
int heads_together(const AttentionArgs& args, int queries, const strobe::cuda::DeviceProperties& gpu) {
  const int64_t heads = args.batch * args.num_heads, group = args.num_heads / args.num_kv_heads;
  const int64_t bytes = 4 * keys_of_tile(args, queries) * args.head_dim;
  const int64_t sections = strobe::cuda::ceil_div(heads, group * std::max<int64_t>(gpu.l2_bytes * 2 / 3 / bytes, 1));
  return static_cast<int>(strobe::cuda::ceil_div(heads, sections));
}

// Tiles are dealt one by one to `blocks` blocks: what moves each block on by one place a round.
int rotation(int query_tiles, int blocks) {
  return query_tiles > blocks ? 0 : (query_tiles + 1 - blocks % query_tiles) % query_tiles;
}

// Whether tiles differ, and no block of the grid gets about as many of each kind by itself.
bool longest_first(const AttentionArgs& args, int query_tiles, int tiles, int blocks) {
  return args.cu_seqlens_q != nullptr || (args.causal && tiles < int64_t{query_tiles} * blocks);
}

// Whether a round of tiles takes longer than it takes to deal them with regard to their length, about 15,000 clocks.
bool worth_dealing(const AttentionArgs& args, int queries) {
  const bool packed = args.cu_seqlens_q != nullptr;
  const double clocks = static_cast<double>(queries) * static_cast<double>(args.head_dim) / 1024;
  const double filled = packed ? static_cast<double>(args.total_k) / static_cast<double>(args.batch)
                               : static_cast<double>(args.seq_len_k);
  const double seen = std::min(args.causal ? filled / 2 : filled, static_cast<double>(keys_of_tile(args, queries)));
  return clocks * seen >= 15000;
}

}  // namespace

std::string hopper_attention_forward_refusal(const AttentionArgs& args, Device device) {
  const std::string refusal = hopper_attention_refusal(args, device);
  if (!refusal.empty()) return refusal;
  const HopperRows rows(args);
  return tensor_map_refusal("out", args.out, rows.batch, rows.queries, args.num_heads);
}

AttentionTile hopper_attention_forward_tile(const AttentionArgs& args, Device) {
  return dispatch_hopper(args, [&]<class T, class Shape>() { return AttentionTile{Shape::queries, Shape::keys}; });
}

void hopper_attention_forward(const AttentionArgs& args, const Stream& stream) {
  constexpr const char* operation = "flash_attention_forward";
  const HopperRows rows(args);
  if (args.batch * args.num_heads * args.seq_len_q * rows.queries == 0) return;
  dispatch_hopper(args, [&]<class T, class Shape>() {
    const strobe::cuda::DeviceProperties& gpu = strobe::cuda::device_properties(stream.device);
    const ScoreFunction<float> score(args);
    const bool slow = std::getenv("STROBE_FORCE_SLOW_SOFTMAX") != nullptr;  // for tests: what few inputs bring about
    const int query_tiles = static_cast<int>(strobe::cuda::ceil_div(args.seq_len_q, Shape::queries));
    const auto map = [&](const AttentionTensor& tensor, int64_t seq_len, int64_t num_heads, int box_rows) {
      return tensor_map(operation, tensor, args.dtype, rows.batch, seq_len, num_heads, args.head_dim, box_rows);
    };
    const int tiles = static_cast<int>(query_tiles * args.batch * args.num_heads);
    const int blocks = std::min({tiles, gpu.multiprocessors, most_forward_blocks});
    const bool sorted = longest_first(args, query_tiles, tiles, blocks);
    // Not infinity, which times a product of 0 is no number.
    const float softcap_scale = std::min(score.magnitude / score.softcap, std::numeric_limits<float>::max());
    const ForwardParams params{.query = map(args.query, rows.queries, args.num_heads, 64),
                               .key = map(args.key, rows.keys, args.num_kv_heads, Shape::keys),
                               .value = map(args.value, rows.keys, args.num_kv_heads, Shape::keys),
                               .out = map(args.out, rows.queries, args.num_heads, 16),
                               .args = args,
                               .sign = score.sign,
                               .scale2 = score.softcap == 0 ? score.magnitude * log2e : 1.0f,
                               .softcap2 = score.softcap * log2e,
                               .softcap_scale = score.softcap == 0 ? 0.0f : softcap_scale,
                               .sum_limit = slow                          ? 0.0f
                                            : std::is_same_v<T, bfloat16> ? 0x1p8f
                                                                          : 0x1p11f,
                               .overflow_limit = slow ? 0.0f : 0x1p100f,
                               .tiles = tiles,
                               .query_tiles = query_tiles,
                               .longest_first = sorted,
                               .dealt = sorted && worth_dealing(args, Shape::queries),
                               .rotation = rotation(query_tiles, blocks),
                               .group = static_cast<int>(args.num_heads / args.num_kv_heads),
                               .left = reach(args.window_left),
                               .right = reach_right(args),
                               .heads_together = heads_together(args, Shape::queries, gpu)};
    strobe::cuda::launch(operation, attention_forward<T, Shape>, static_cast<unsigned>(blocks), Shape::threads,
                         forward_shared_bytes<Shape>, stream, params);
  });
}

}  // namespace strobe::kernels::cuda
