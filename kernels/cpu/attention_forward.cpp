// Tiled attention, forward: FlashAttention-2 (Dao 2023), algorithm 1, over batch x heads x query blocks.
#include <numeric>

#include "strobe/kernels/cpu/attention_tile.h"

namespace strobe::kernels::cpu {
namespace {

// Queries whose scores are worked on together, few enough that the scores stay in the first-level cache from the
// product that makes them to the one that uses them; whole blocks of gemm_tile in both.
constexpr int64_t strip = std::lcm(strobe::cpu::tile_columns<float>, strobe::cpu::tile_rows);
static_assert(strip % vector_size<float> == 0 && strip % vector_size<double> == 0);

// What one thread keeps in cache. Only the query tile, loaded once, needs transposing.
template <class C>
struct ForwardTiles {
  C* query_transposed;     // (strips, head_dim, queries of a strip), times the sign of softmax_scale
  C* key;                  // (keys, head_dim)
  C* value;                // (keys, head_dim)
  C* scores;               // (keys, queries of a strip); then their weights
  C* out;                  // (queries, head_dim)
  C* factors;              // (queries)
  OnlineSoftmax<C>* rows;  // (queries)

  ForwardTiles(Arena& arena, int64_t head_dim) {
    const int64_t width = whole_vectors<C>(head_dim);
    query_transposed = arena.take<C>(head_dim * attention_block);
    for (C** tile : {&key, &value, &out}) *tile = arena.take<C>(attention_block * width);
    scores = arena.take<C>(attention_block * strip);
    factors = arena.take<C>(attention_block);
    rows = arena.take<OnlineSoftmax<C>>(attention_block);
  }
};

template <class T>
void attend(const AttentionArgs& args, const Sequence& sequence, int64_t head, Interval queries,
            const ForwardTiles<accumulate_t<T>>& tile) {
  using C = accumulate_t<T>;
  const Mask& mask = sequence.mask;
  const Scores<C> score = scores_of<C>(args, sequence, head);
  const AttentionDropout dropout = dropout_of(args);
  const int64_t kv_head = head / (args.num_heads / args.num_kv_heads);
  const HeadRows<T> query = query_rows<T>(args, args.query, sequence, head),
                    out = query_rows<T>(args, args.out, sequence, head),
                    key = key_rows<T>(args, args.key, sequence, kv_head),
                    value = key_rows<T>(args, args.value, sequence, kv_head);
  const int64_t head_dim = args.head_dim;
  const int64_t width = whole_vectors<C>(head_dim);

  load_tile(query, queries, head_dim, tile.key);  // free until the first key block
  for (int64_t i = 0; i < queries.size(); i += strip) {
    const int64_t rows = std::min(strip, queries.size() - i);
    transpose_tile(tile.key + i * width, rows, head_dim, score.sign, tile.query_transposed + i * head_dim,
                   whole_vectors<C>(rows));
  }
  std::fill(tile.out, tile.out + queries.size() * width, C(0));
  std::fill(tile.rows, tile.rows + whole_vectors<C>(queries.size()), OnlineSoftmax<C>{});

  const Interval seen = mask.keys_of(queries);
  for (int64_t begin = seen.begin; begin < seen.end; begin += attention_block) {
    const Interval keys{begin, std::min(begin + attention_block, seen.end)};
    load_tile(key, keys, head_dim, tile.key);
    load_tile(value, keys, head_dim, tile.value);
    for (int64_t i = 0; i < queries.size(); i += strip) {
      for (int64_t next = keys.end + i; next < std::min(keys.end + i + strip, seen.end); ++next) {
        prefetch_row(key, next, head_dim);
        prefetch_row(value, next, head_dim);
      }
      const Interval few{queries.begin + i, std::min(queries.begin + i + strip, queries.end)};
      const Interval visible = mask.keys_of(few).within(keys);
      if (visible.empty()) continue;
      const Interval some{keys.begin + visible.begin, keys.begin + visible.end};
      const int64_t columns = whole_vectors<C>(few.size());
      C* const out_rows = tile.out + i * width;

      // S = Q K^T, then m, l and P = exp(S - m)
      online_softmax_tile(mask, score, few, some, head_dim, tile.key + visible.begin * width,
                          tile.query_transposed + i * head_dim, tile.scores, tile.rows + i, tile.factors);
      if (dropout.drops()) drop(dropout, matrix_of(args, sequence.batch, head), few, some, tile.scores, 1, columns);
      // O = diag(exp(m_old - m)) O + P V
      for (int64_t r = 0; r < few.size(); ++r) {
        const C factor = tile.factors[r];
        if (factor == 1) continue;
        for (int64_t c = 0; c < width; ++c) out_rows[r * width + c] *= factor;
      }
      masked_product<C>(mask.shows_all(few, some), few.size(), width, some.size(), tile.scores, 1, columns,
                        tile.value + visible.begin * width, width, out_rows, width, true,
                        [&](int64_t r) { return mask.keys_of(few.begin + r).within(some); });
    }
  }

  // O = diag(l)^-1 O, L = m + log(l)
  C* const lse = static_cast<C*>(args.lse) + first_row(args, sequence, head);
  for (int64_t i = 0; i < queries.size(); ++i) {
    const bool sees_nothing = mask.keys_of(queries.begin + i).empty();
    T* const row = out.row(queries.begin + i);
    for (int64_t c = 0; c < head_dim; ++c) {
      row[c] = static_cast<T>(sees_nothing ? C(0) : tile.out[i * width + c] / tile.rows[i].sum);
    }
    lse[queries.begin + i] = tile.rows[i].lse(score.rest());
  }
}

template <class C>
size_t tile_bytes(int64_t head_dim) {
  Arena arena;
  ForwardTiles<C>(arena, head_dim);
  return arena.used();
}

int64_t count_items(const AttentionArgs& args) {
  return args.batch * args.num_heads * blocks_of(args.seq_len_q, attention_block);
}

}  // namespace

void flash_attention_forward(const AttentionArgs& args, const Stream& stream) {
  cpu::require_attention_support("flash_attention_forward", args, stream.device);
  const int64_t blocks = blocks_of(args.seq_len_q, attention_block);
  dispatch_floating(args.dtype, "flash_attention_forward", [&]<class T>() {
    using C = accumulate_t<T>;
    const size_t bytes = tile_bytes<C>(args.head_dim);
    const int64_t threads = team_size(args, count_items(args));
    STROBE_CHECK(args.workspace_bytes >= bytes * static_cast<size_t>(threads), "flash_attention_forward: workspace of ",
                 args.workspace_bytes, " bytes given, expected ", bytes * static_cast<size_t>(threads));
    for_each_in_order(count_items(args), threads, [&](int64_t item, int64_t thread) {
      const int64_t head = item / blocks;
      // With a causal mask late queries see most keys: they go first, and short blocks fill the gaps at the end.
      const int64_t begin = (blocks - 1 - item % blocks) * attention_block;
      const Sequence sequence = sequence_of(args, head / args.num_heads);
      const Interval queries{begin, std::min(begin + attention_block, sequence.mask.seq_len_q)};
      if (queries.empty()) return;
      Arena arena(static_cast<std::byte*>(args.workspace) + static_cast<size_t>(thread) * bytes);
      attend<T>(args, sequence, head % args.num_heads, queries, ForwardTiles<C>(arena, args.head_dim));
    });
    if (args.cu_seqlens_q == nullptr) return;
    const int64_t used = args.cu_seqlens_q[args.batch];
    clear_padding<T>(args.out, used, args.total_q, args.num_heads, args.head_dim);
    for (int64_t head = 0; head < args.num_heads; ++head) {
      C* const lse = static_cast<C*>(args.lse) + head * args.total_q;
      std::fill(lse + used, lse + args.total_q, -std::numeric_limits<C>::infinity());
    }
  });
}

size_t flash_attention_forward_workspace(const AttentionArgs& args, Device device) {
  cpu::require_attention_support("flash_attention_forward", args, device);
  return dispatch_floating(args.dtype, "flash_attention_forward", [&]<class T>() {
    return tile_bytes<accumulate_t<T>>(args.head_dim) * static_cast<size_t>(team_size(args, count_items(args)));
  });
}

}  // namespace strobe::kernels::cpu
