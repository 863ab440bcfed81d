// Tiled attention, backward: FlashAttention-2 (Dao 2023), algorithm 2, over batch x kv heads x key blocks.
#include <cmath>
#include <numbers>
#include <thread>

#include "strobe/kernels/cpu/attention_tile.h"

namespace strobe::kernels {
namespace cpu {
namespace {

// What one thread keeps in cache. Score tiles are (queries, keys); the key block stays, so it alone is transposed.
template <class C>
struct BackwardTiles {
  C* key;                  // (keys, head_dim)
  C* key_transposed;       // (head_dim, keys), times the sign of softmax_scale
  C* value_transposed;     // (head_dim, keys)
  C* dkey;                 // (keys, head_dim)
  C* dvalue;               // (keys, head_dim)
  C* query;                // (queries, head_dim)
  C* dout;                 // (queries, head_dim)
  C* dquery;               // (queries, head_dim)
  C* p;                    // (queries, keys): scores, then P
  C* ds;                   // (queries, keys): dP, then dS
  C* factors;              // (queries)
  OnlineSoftmax<C>* rows;  // (queries)

  BackwardTiles(Arena& arena, int64_t head_dim) {
    const int64_t width = whole_vectors<C>(head_dim);
    for (C** tile : {&key, &dkey, &dvalue, &query, &dout, &dquery}) *tile = arena.take<C>(attention_block * width);
    for (C** tile : {&key_transposed, &value_transposed}) *tile = arena.take<C>(head_dim * attention_block);
    for (C** tile : {&p, &ds}) *tile = arena.take<C>(attention_block * attention_block);
    factors = arena.take<C>(attention_block);
    rows = arena.take<OnlineSoftmax<C>>(attention_block);
  }
};

// products[i] = a_i . b_i over the rows of two tiles, each one sum in ascending order as in gemm_tile: dP - delta is
// then exactly 0 where one key has all the weight. Rows side by side hide the latency of the additions.
template <class C>
void row_products(const C* a, const C* b, int64_t rows, int64_t head_dim, C* products) {
  constexpr int64_t together = 8;
  const int64_t width = whole_vectors<C>(head_dim);
  for (int64_t i = 0; i < rows; i += together) {
    const int64_t count = std::min(together, rows - i);
    C sums[together] = {};
    for (int64_t c = 0; c < head_dim; ++c) {
      for (int64_t r = 0; r < count; ++r) sums[r] += a[(i + r) * width + c] * b[(i + r) * width + c];
    }
    std::copy(sums, sums + count, products + i);
  }
}

// One backward pass: what all threads share, and the steps they take.
template <class T>
class Backward {
  using C = accumulate_t<T>;
  static constexpr bool rounds = !std::is_same_v<T, C>;  // dquery accumulates in C apart from the result

 public:
  // With a null workspace only its size can be asked for.
  Backward(const AttentionGradArgs& args, void* workspace)
      : args_(args),
        forward_(args.forward),
        mask_(mask_of(args.forward)),
        scale_(args.forward.softmax_scale),
        head_dim_(args.forward.head_dim),
        width_(whole_vectors<C>(head_dim_)),
        query_blocks_(blocks_of(args.forward.seq_len_q, attention_block)),
        key_blocks_(blocks_of(args.forward.seq_len_k, attention_block)),
        workspace_(static_cast<std::byte*>(workspace)),
        dquery_(args.dquery) {
    const int64_t heads = forward_.batch * forward_.num_heads;
    const int64_t rows = heads * forward_.seq_len_q;
    Arena arena(workspace);
    delta_ = arena.take<C>(rows);
    reference_ = arena.take<C>(rows);
    log_sum_ = arena.take<C>(rows);
    turns_ = arena.take<std::atomic<int64_t>>(heads * query_blocks_);
    if constexpr (rounds) {
      dquery_ = {.data = arena.take<C>(rows * head_dim_),
                 .batch_stride = forward_.num_heads * forward_.seq_len_q * head_dim_,
                 .seq_stride = head_dim_,
                 .head_stride = forward_.seq_len_q * head_dim_};
    }
    shared_bytes_ = arena.used();
    BackwardTiles<C>(arena, head_dim_);
    tile_bytes_ = arena.used() - shared_bytes_;
    threads_ = team_size(forward_, heads * std::max(query_blocks_, key_blocks_));
  }

  size_t workspace_bytes() const { return shared_bytes_ + tile_bytes_ * static_cast<size_t>(threads_); }

  void run() {
    const int64_t query_items = forward_.batch * forward_.num_heads * query_blocks_;
    const int64_t key_items = forward_.batch * forward_.num_kv_heads * key_blocks_;
    for_each_in_order(query_items, threads_, [&](int64_t item, int64_t thread) {
      const int64_t head = item / query_blocks_;
      prepare(head / forward_.num_heads, head % forward_.num_heads, item % query_blocks_, tiles_of(thread));
    });
    for_each_in_order(key_items, threads_, [&](int64_t item, int64_t thread) {
      const int64_t head = item / key_blocks_;
      visit(head / forward_.num_kv_heads, head % forward_.num_kv_heads, item % key_blocks_, tiles_of(thread));
    });
    if constexpr (rounds) {
      for_each_in_order(query_items, threads_, [&](int64_t item, int64_t) {
        const int64_t head = item / query_blocks_;
        round_dquery(head / forward_.num_heads, head % forward_.num_heads, item % query_blocks_);
      });
    }
  }

 private:
  BackwardTiles<C> tiles_of(int64_t thread) const {
    Arena arena(workspace_ + shared_bytes_ + static_cast<size_t>(thread) * tile_bytes_);
    return BackwardTiles<C>(arena, head_dim_);
  }
  Interval queries_of_block(int64_t block) const {
    return {block * attention_block, std::min((block + 1) * attention_block, forward_.seq_len_q)};
  }
  Interval keys_of_block(int64_t block) const {
    return {block * attention_block, std::min((block + 1) * attention_block, forward_.seq_len_k)};
  }
  int64_t kv_head_of(int64_t head) const { return head / (forward_.num_heads / forward_.num_kv_heads); }
  // Where a head's rows begin in lse, delta, reference and log_sum.
  int64_t row_of(int64_t batch, int64_t head) const { return (batch * forward_.num_heads + head) * forward_.seq_len_q; }
  const C* lse_of(int64_t batch, int64_t head) const {
    return static_cast<const C*>(forward_.lse) + row_of(batch, head);
  }
  // The key block whose turn it is to add to dquery of a query block.
  std::atomic<int64_t>* turn_of(int64_t batch, int64_t head, int64_t block) const {
    return turns_ + (batch * forward_.num_heads + head) * query_blocks_ + block;
  }
  HeadRows<T> dout_of(int64_t batch, int64_t head) const { return {args_.dout, batch, head, args_.dout_dim_stride}; }

  // delta = rowsum(dout * out), dquery = 0, and the first turn goes to the first key block that the queries see.
  void prepare(int64_t batch, int64_t head, int64_t block, const BackwardTiles<C>& tile) {
    const Interval queries = queries_of_block(block);
    const HeadRows<C> dquery(dquery_, batch, head);
    load_tile(HeadRows<T>(forward_.out, batch, head), queries, head_dim_, tile.query);
    load_tile(dout_of(batch, head), queries, head_dim_, tile.dout);
    row_products(tile.dout, tile.query, queries.size(), head_dim_, delta_ + row_of(batch, head) + queries.begin);
    for (int64_t i = queries.begin; i < queries.end; ++i) std::fill(dquery.row(i), dquery.row(i) + head_dim_, C(0));
    new (turn_of(batch, head, block)) std::atomic<int64_t>(mask_.keys_of(queries).begin / attention_block);
    split_lse(batch, head, queries, tile);
  }

  // lse = reference * magnitude + log_sum, from which P = exp((S - reference) * magnitude - log_sum). That is (0, lse),
  // unless lse is so large that its rounding would show in P: then m and l are computed again, as in the forward pass.
  // They are not used if they differ from lse by more than rounding: lse may belong to more keys than these.
  void split_lse(int64_t batch, int64_t head, Interval queries, const BackwardTiles<C>& tile) {
    constexpr C large = 32;
    const C* const lse = lse_of(batch, head) + queries.begin;
    C* const reference = reference_ + row_of(batch, head) + queries.begin;
    C* const log_sum = log_sum_ + row_of(batch, head) + queries.begin;
    const auto is_large = [&](int64_t i) { return std::isfinite(lse[i]) && std::abs(lse[i]) > large; };
    bool any_large = false;
    for (int64_t i = 0; i < queries.size(); ++i) {
      reference[i] = 0;
      log_sum[i] = lse[i];
      any_large |= is_large(i);
    }
    if (!any_large) return;

    const int64_t columns = whole_vectors<C>(queries.size());
    load_tile(HeadRows<T>(forward_.query, batch, head), queries, head_dim_, tile.query);
    transpose_tile(tile.query, queries.size(), head_dim_, scale_.sign, tile.key_transposed, columns);
    std::fill(tile.rows, tile.rows + columns, OnlineSoftmax<C>{});
    const Interval seen = mask_.keys_of(queries);
    for (int64_t begin = seen.begin; begin < seen.end; begin += attention_block) {
      const Interval keys{begin, std::min(begin + attention_block, seen.end)};
      load_tile(HeadRows<T>(forward_.key, batch, kv_head_of(head)), keys, head_dim_, tile.key);
      online_softmax_tile(mask_, queries, keys, head_dim_, tile.key, tile.key_transposed, scale_.magnitude, tile.p,
                          tile.rows, tile.factors);
    }
    for (int64_t i = 0; i < queries.size(); ++i) {
      const C rounding = 2 * std::numeric_limits<C>::epsilon() * std::abs(lse[i]);
      if (!is_large(i) || !(std::abs(tile.rows[i].lse(scale_.magnitude) - lse[i]) <= rounding)) continue;
      reference[i] = tile.rows[i].maximum;
      log_sum[i] = std::log(tile.rows[i].sum);
    }
  }

  // All queries that see a key block, of all heads that share its kv head.
  void visit(int64_t batch, int64_t kv_head, int64_t block, const BackwardTiles<C>& tile) {
    const Interval keys = keys_of_block(block);
    const int64_t columns = whole_vectors<C>(keys.size());
    load_tile(HeadRows<T>(forward_.value, batch, kv_head), keys, head_dim_, tile.key);
    transpose_tile(tile.key, keys.size(), head_dim_, C(1), tile.value_transposed, columns);
    load_tile(HeadRows<T>(forward_.key, batch, kv_head), keys, head_dim_, tile.key);
    transpose_tile(tile.key, keys.size(), head_dim_, scale_.sign, tile.key_transposed, columns);
    for (C* gradient : {tile.dkey, tile.dvalue}) std::fill(gradient, gradient + keys.size() * width_, C(0));

    const int64_t group = forward_.num_heads / forward_.num_kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t i = 0; i < query_blocks_; ++i) {
        if (!mask_.keys_of(queries_of_block(i)).overlaps(keys)) continue;
        differentiate(batch, head, queries_of_block(i), keys, tile);
        add_dquery(batch, head, i, block, tile.dquery);
      }
    }
    store(tile.dkey, keys, HeadRows<T>(args_.dkey, batch, kv_head));
    store(tile.dvalue, keys, HeadRows<T>(args_.dvalue, batch, kv_head));
  }

  // One query block against one key block: adds to the tiles dkey and dvalue, leaves its share of dquery in that tile.
  void differentiate(int64_t batch, int64_t head, Interval queries, Interval keys, const BackwardTiles<C>& tile) {
    const int64_t rows = queries.size();
    const int64_t columns = whole_vectors<C>(keys.size());
    const HeadRows<T> query(forward_.query, batch, head), dout = dout_of(batch, head);
    const HeadRows<C> dquery(dquery_, batch, head);
    load_tile(query, queries, head_dim_, tile.query);
    load_tile(dout, queries, head_dim_, tile.dout);

    // S = Q K^T, dP = dO V^T
    gemm_tile<C>(rows, columns, head_dim_, tile.query, width_, 1, tile.key_transposed, columns, tile.p, columns, false);
    gemm_tile<C>(rows, columns, head_dim_, tile.dout, width_, 1, tile.value_transposed, columns, tile.ds, columns,
                 false);

    // P = exp(S - L), dS = P (dP - delta), both 0 where hidden
    const C scale = static_cast<C>(forward_.softmax_scale);
    const int64_t first_row = row_of(batch, head) + queries.begin;
    for (int64_t i = 0; i < rows; ++i) {
      C* const p = tile.p + i * columns;
      C* const ds = tile.ds + i * columns;
      const Interval visible = mask_.keys_of(queries.begin + i).within(keys);
      if (visible.size() < columns) {
        for (C* row : {p, ds}) {
          std::fill(row, row + visible.begin, C(0));
          std::fill(row + visible.end, row + columns, C(0));
        }
      }
      const C reference = reference_[first_row + i], log_sum = log_sum_[first_row + i], delta = delta_[first_row + i];
      if (reference != 0) {
        for (int64_t j = visible.begin; j < visible.end; ++j) p[j] -= reference;
      }
      prefetch_row(dquery, queries.begin + i, head_dim_);
      if (const int64_t next = queries.end + i; next < forward_.seq_len_q) {
        prefetch_row(query, next, head_dim_);
        prefetch_row(dout, next, head_dim_);
      }
#pragma omp simd
      for (int64_t j = visible.begin; j < visible.end; ++j) {
        p[j] = exp2_((p[j] * scale_.magnitude - log_sum) * std::numbers::log2e_v<C>);
        ds[j] = p[j] * (ds[j] - delta) * scale;
      }
    }

    // dV += P^T dO, dK += dS^T Q, dQ = dS K
    const auto keys_of = [&](int64_t i) { return mask_.keys_of(queries.begin + i).within(keys); };
    const auto queries_of = [&](int64_t j) { return mask_.queries_of(keys.begin + j).within(queries); };
    const bool all_visible = mask_.shows_all(queries, keys);
    masked_product<C>(all_visible, keys.size(), width_, rows, tile.p, 1, columns, tile.dout, tile.dvalue, true,
                      queries_of);
    masked_product<C>(all_visible, keys.size(), width_, rows, tile.ds, 1, columns, tile.query, tile.dkey, true,
                      queries_of);
    masked_product<C>(all_visible, rows, width_, keys.size(), tile.ds, columns, 1, tile.key, tile.dquery, false,
                      keys_of);
  }

  // Key blocks take turns in ascending order, whichever threads compute them, so that the bits never change.
  void add_dquery(int64_t batch, int64_t head, int64_t block, int64_t key_block, const C* tile) {
    std::atomic<int64_t>& turn = *turn_of(batch, head, block);
    while (turn.load(std::memory_order_acquire) != key_block) std::this_thread::yield();
    const Interval queries = queries_of_block(block);
    const HeadRows<C> dquery(dquery_, batch, head);
    for (int64_t i = 0; i < queries.size(); ++i) {
      C* const row = dquery.row(queries.begin + i);
      for (int64_t c = 0; c < head_dim_; ++c) row[c] += tile[i * width_ + c];
    }
    turn.store(key_block + 1, std::memory_order_release);
  }

  void store(const C* tile, Interval rows, const HeadRows<T>& target) {
    for (int64_t j = 0; j < rows.size(); ++j) {
      T* const row = target.row(rows.begin + j);
      for (int64_t c = 0; c < head_dim_; ++c) row[c] = static_cast<T>(tile[j * width_ + c]);
    }
  }

  void round_dquery(int64_t batch, int64_t head, int64_t block) {
    const HeadRows<C> exact(dquery_, batch, head);
    const HeadRows<T> rounded(args_.dquery, batch, head);
    const Interval queries = queries_of_block(block);
    for (int64_t i = queries.begin; i < queries.end; ++i) {
      for (int64_t c = 0; c < head_dim_; ++c) rounded.row(i)[c] = static_cast<T>(exact.row(i)[c]);
    }
  }

  const AttentionGradArgs& args_;
  const AttentionArgs& forward_;
  const Mask mask_;
  const ScoreScale<C> scale_;
  const int64_t head_dim_;
  const int64_t width_;  // of a tile's row
  const int64_t query_blocks_;
  const int64_t key_blocks_;
  std::byte* const workspace_;
  AttentionTensor dquery_;       // where dquery accumulates
  C* delta_;                     // (batch, num_heads, seq_len_q)
  C* reference_;                 // (batch, num_heads, seq_len_q)
  C* log_sum_;                   // (batch, num_heads, seq_len_q)
  std::atomic<int64_t>* turns_;  // (batch, num_heads, query blocks)
  size_t shared_bytes_;
  size_t tile_bytes_;
  int64_t threads_;
};

}  // namespace

void flash_attention_backward(const AttentionGradArgs& args, const Stream& stream) {
  require_attention_support("flash_attention_backward", args.forward, stream.device);
  dispatch_floating(args.forward.dtype, "flash_attention_backward", [&]<class T>() {
    Backward<T> backward(args, args.workspace);
    STROBE_CHECK(args.workspace_bytes >= backward.workspace_bytes(), "flash_attention_backward: workspace of ",
                 args.workspace_bytes, " bytes given, expected ", backward.workspace_bytes());
    backward.run();
  });
}

}  // namespace cpu

size_t flash_attention_backward_workspace(const AttentionGradArgs& args, Device device) {
  require_attention_support("flash_attention_backward", args.forward, device);
  return dispatch_floating(args.forward.dtype, "flash_attention_backward",
                           [&]<class T>() { return cpu::Backward<T>(args, nullptr).workspace_bytes(); });
}

}  // namespace strobe::kernels
