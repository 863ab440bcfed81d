// Tiled attention, backward: FlashAttention-2 (Dao 2023), algorithm 2, over batch x kv heads x key blocks.
#include <cmath>
#include <numbers>
#include <thread>

#include "strobe/kernels/cpu/attention_tile.h"

namespace strobe::kernels::cpu {
namespace {

// Keys of a tile. Long tiles spare passes over what belongs to queries, but waste work where a mask cuts through them.
constexpr int64_t short_key_block = attention_block;
constexpr int64_t long_key_block = 2 * attention_block;

int64_t key_block_of(const Sequence& sequence) {
  const Mask& mask = sequence.mask;
  return mask.shows_all({0, mask.seq_len_q}, {0, mask.seq_len_k}) ? long_key_block : short_key_block;
}

// Queries whose scores are worked on together: two rows of a tile for each fill the first-level cache.
constexpr int64_t rows_in_cache = 2 * strobe::cpu::tile_rows;

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
  C* p;                    // (queries, keys): scores, then P
  C* ds;                   // (queries, keys): dP, then dS
  C* softcap_slopes;       // (keys)
  C* factors;              // (queries)
  OnlineSoftmax<C>* rows;  // (queries)

  BackwardTiles(Arena& arena, int64_t head_dim) {
    const int64_t width = whole_vectors<C>(head_dim);
    for (C** tile : {&key, &dkey, &dvalue}) *tile = arena.take<C>(long_key_block * width);
    for (C** tile : {&query, &dout}) *tile = arena.take<C>(attention_block * width);
    for (C** tile : {&key_transposed, &value_transposed}) *tile = arena.take<C>(head_dim * long_key_block);
    for (C** tile : {&p, &ds}) *tile = arena.take<C>(attention_block * long_key_block);
    softcap_slopes = arena.take<C>(long_key_block);
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
        dropout_(dropout_of(args.forward)),
        head_dim_(args.forward.head_dim),
        width_(whole_vectors<C>(head_dim_)),
        query_blocks_(blocks_of(args.forward.seq_len_q, attention_block)),
        key_blocks_(blocks_of(args.forward.seq_len_k, short_key_block)),
        workspace_(static_cast<std::byte*>(workspace)),
        dquery_(args.dquery) {
    const int64_t heads = forward_.batch * forward_.num_heads;
    const int64_t rows = count_rows(forward_);
    Arena arena(workspace);
    delta_ = arena.take<C>(rows);
    reference_ = arena.take<C>(rows);
    log_sum_ = arena.take<C>(rows);
    turns_ = arena.take<std::atomic<int64_t>>(heads * query_blocks_);
    if constexpr (rounds) {
      const int64_t head_stride =
          (forward_.cu_seqlens_q == nullptr ? forward_.seq_len_q : forward_.total_q) * head_dim_;
      dquery_ = {.data = arena.take<C>(rows * head_dim_),
                 .batch_stride = forward_.num_heads * head_stride,
                 .seq_stride = head_dim_,
                 .head_stride = head_stride};
    }
    shared_bytes_ = arena.used();
    BackwardTiles<C>(arena, head_dim_);
    tile_bytes_ = arena.used() - shared_bytes_;
    threads_ = team_size(forward_, heads * std::max(query_blocks_, key_blocks_));
  }

  size_t workspace_bytes() const { return shared_bytes_ + tile_bytes_ * static_cast<size_t>(threads_); }

  void run() {
    const int64_t query_items = forward_.batch * forward_.num_heads * query_blocks_;
    for_each_in_order(query_items, threads_, [&](int64_t item, int64_t thread) {
      const Sequence sequence = sequence_of(forward_, item / query_blocks_ / forward_.num_heads);
      prepare(sequence, item / query_blocks_ % forward_.num_heads, item % query_blocks_, tiles_of(thread));
    });
    // The same key block of all heads before the next one: threads side by side then add to different dqueries, and
    // with a causal mask the blocks that most queries see go first.
    const int64_t heads = forward_.batch * forward_.num_kv_heads;
    for_each_in_order(heads * key_blocks_, threads_, [&](int64_t item, int64_t thread) {
      const int64_t head = item % heads;
      visit(sequence_of(forward_, head / forward_.num_kv_heads), head % forward_.num_kv_heads, item / heads,
            tiles_of(thread));
    });
    if constexpr (rounds) {
      for_each_in_order(query_items, threads_, [&](int64_t item, int64_t) {
        const Sequence sequence = sequence_of(forward_, item / query_blocks_ / forward_.num_heads);
        round_dquery(sequence, item / query_blocks_ % forward_.num_heads, item % query_blocks_);
      });
    }
    if (forward_.cu_seqlens_q == nullptr) return;
    const int64_t used_q = forward_.cu_seqlens_q[forward_.batch], used_k = forward_.cu_seqlens_k[forward_.batch];
    clear_padding<T>(args_.dquery, used_q, forward_.total_q, forward_.num_heads, head_dim_);
    clear_padding<T>(args_.dkey, used_k, forward_.total_k, forward_.num_kv_heads, head_dim_);
    clear_padding<T>(args_.dvalue, used_k, forward_.total_k, forward_.num_kv_heads, head_dim_);
  }

 private:
  BackwardTiles<C> tiles_of(int64_t thread) const {
    Arena arena(workspace_ + shared_bytes_ + static_cast<size_t>(thread) * tile_bytes_);
    return BackwardTiles<C>(arena, head_dim_);
  }
  // The rows of a block; empty behind the end of a sequence that is shorter than others.
  static Interval block_of(int64_t block, int64_t size, int64_t length) {
    return {block * size, std::min((block + 1) * size, length)};
  }
  Interval queries_of_block(const Sequence& sequence, int64_t block) const {
    return block_of(block, attention_block, sequence.mask.seq_len_q);
  }
  int64_t kv_head_of(int64_t head) const { return head / (forward_.num_heads / forward_.num_kv_heads); }
  const C* lse_of(const Sequence& sequence, int64_t head) const {
    return static_cast<const C*>(forward_.lse) + first_row(forward_, sequence, head);
  }
  // The first key block that some of the queries see: it writes their dquery, to which the others add.
  static int64_t first_key_block(const Sequence& sequence, Interval queries) {
    return sequence.mask.keys_of(queries).begin / key_block_of(sequence);
  }
  // The key block whose turn it is to add to dquery of a query block.
  std::atomic<int64_t>* turn_of(const Sequence& sequence, int64_t head, int64_t block) const {
    return turns_ + matrix_of(forward_, sequence.batch, head) * query_blocks_ + block;
  }
  HeadRows<T> rows_of_queries(const AttentionTensor& tensor, const Sequence& sequence, int64_t head) const {
    return query_rows<T>(forward_, tensor, sequence, head);
  }
  HeadRows<T> rows_of_keys(const AttentionTensor& tensor, const Sequence& sequence, int64_t kv_head) const {
    return key_rows<T>(forward_, tensor, sequence, kv_head);
  }
  HeadRows<T> rows_of_dout(const Sequence& sequence, int64_t head) const {
    return query_rows<T>(forward_, args_.dout, sequence, head, args_.dout_dim_stride);
  }
  HeadRows<C> rows_of_dquery(const Sequence& sequence, int64_t head) const {
    return query_rows<C>(forward_, dquery_, sequence, head);
  }

  // delta = rowsum(dout * out) - dlse, dquery = 0 unless a key block writes it, and the first turn goes to that block.
  void prepare(const Sequence& sequence, int64_t head, int64_t block, const BackwardTiles<C>& tile) {
    const Interval queries = queries_of_block(sequence, block);
    if (queries.empty()) return;
    const HeadRows<C> dquery = rows_of_dquery(sequence, head);
    const int64_t first = first_row(forward_, sequence, head);
    C* const delta = delta_ + first;
    const bool see_nothing = sequence.mask.keys_of(queries).empty();
    load_tile(rows_of_queries(forward_.out, sequence, head), queries, head_dim_, tile.query);
    load_tile(rows_of_dout(sequence, head), queries, head_dim_, tile.dout);
    row_products(tile.dout, tile.query, queries.size(), head_dim_, delta + queries.begin);
    for (int64_t i = queries.begin; i < queries.end; ++i) {
      if (args_.dlse != nullptr) delta[i] -= static_cast<const C*>(args_.dlse)[first + i];
      if (see_nothing) std::fill(dquery.row(i), dquery.row(i) + head_dim_, C(0));
    }
    new (turn_of(sequence, head, block)) std::atomic<int64_t>(first_key_block(sequence, queries));
    split_lse(sequence, head, queries, tile);
  }

  // lse = reference * rest + log_sum, from which P = exp((S - reference) * rest - log_sum). That is (0, lse), unless
  // lse is so large that its rounding would show in P: then m and l are computed again, as in the forward pass. They
  // are not used if they differ from lse by more than rounding: lse may belong to more keys than these.
  void split_lse(const Sequence& sequence, int64_t head, Interval queries, const BackwardTiles<C>& tile) {
    constexpr C large = 32;
    const Scores<C> score = scores_of<C>(forward_, sequence, head);
    const C* const lse = lse_of(sequence, head) + queries.begin;
    C* const reference = reference_ + first_row(forward_, sequence, head) + queries.begin;
    C* const log_sum = log_sum_ + first_row(forward_, sequence, head) + queries.begin;
    const auto is_large = [&](int64_t i) { return std::isfinite(lse[i]) && std::abs(lse[i]) > large; };
    bool any_large = false;
    for (int64_t i = 0; i < queries.size(); ++i) {
      reference[i] = 0;
      log_sum[i] = lse[i];
      any_large |= is_large(i);
    }
    if (!any_large) return;

    const int64_t columns = whole_vectors<C>(queries.size());
    load_tile(rows_of_queries(forward_.query, sequence, head), queries, head_dim_, tile.query);
    transpose_tile(tile.query, queries.size(), head_dim_, score.sign, tile.key_transposed, columns);
    std::fill(tile.rows, tile.rows + columns, OnlineSoftmax<C>{});
    const Interval seen = sequence.mask.keys_of(queries);
    for (int64_t begin = seen.begin; begin < seen.end; begin += long_key_block) {
      const Interval keys{begin, std::min(begin + long_key_block, seen.end)};
      load_tile(rows_of_keys(forward_.key, sequence, kv_head_of(head)), keys, head_dim_, tile.key);
      online_softmax_tile(sequence.mask, score, queries, keys, head_dim_, tile.key, tile.key_transposed, tile.p,
                          tile.rows, tile.factors);
    }
    for (int64_t i = 0; i < queries.size(); ++i) {
      const C rounding = 2 * std::numeric_limits<C>::epsilon() * std::abs(lse[i]);
      if (!is_large(i) || !(std::abs(tile.rows[i].lse(score.rest()) - lse[i]) <= rounding)) continue;
      reference[i] = tile.rows[i].maximum;
      log_sum[i] = std::log(tile.rows[i].sum);
    }
  }

  // All queries that see a key block, of all heads that share its kv head.
  void visit(const Sequence& sequence, int64_t kv_head, int64_t block, const BackwardTiles<C>& tile) {
    const Interval keys = block_of(block, key_block_of(sequence), sequence.mask.seq_len_k);
    if (keys.empty()) return;
    const int64_t columns = whole_vectors<C>(keys.size());
    load_tile(rows_of_keys(forward_.value, sequence, kv_head), keys, head_dim_, tile.key);
    transpose_tile(tile.key, keys.size(), head_dim_, C(1), tile.value_transposed, columns);
    load_tile(rows_of_keys(forward_.key, sequence, kv_head), keys, head_dim_, tile.key);
    const C sign = scores_of<C>(forward_, sequence, 0).sign;
    transpose_tile(tile.key, keys.size(), head_dim_, sign, tile.key_transposed, columns);
    for (C* gradient : {tile.dkey, tile.dvalue}) std::fill(gradient, gradient + keys.size() * width_, C(0));

    const int64_t group = forward_.num_heads / forward_.num_kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t i = 0; i < query_blocks_; ++i) {
        const Interval queries = queries_of_block(sequence, i);
        if (queries.empty() || !sequence.mask.keys_of(queries).overlaps(keys)) continue;
        differentiate(sequence, head, queries, keys, block, *turn_of(sequence, head, i), tile);
      }
    }
    store(tile.dkey, keys, rows_of_keys(args_.dkey, sequence, kv_head));
    store(tile.dvalue, keys, rows_of_keys(args_.dvalue, sequence, kv_head));
  }

  // P and dS of neighbouring queries, few enough that both stay in the first-level cache from their products on.
  // query, dout, p, ds: the queries' first rows in the tiles.
  void differentiate_rows(const Sequence& sequence, int64_t head, Interval queries, Interval keys,
                          const BackwardTiles<C>& tile, const C* query, const C* dout, C* p, C* ds) const {
    const Mask& mask = sequence.mask;
    const Scores<C> score = scores_of<C>(forward_, sequence, head);
    const int64_t matrix = matrix_of(forward_, sequence.batch, head);
    const int64_t columns = whole_vectors<C>(keys.size());
    // Whole vectors around what some of the queries see: the columns worked on
    const Interval seen = mask.keys_of(queries).within(keys);
    const int64_t begin = seen.begin / vector_size<C> * vector_size<C>, end = whole_vectors<C>(seen.end);

    // S = Q K^T, dP = dO V^T
    const auto multiply = [&](const C* a, const C* b, C* out) {
      gemm_tile<C>(queries.size(), end - begin, head_dim_, a, width_, 1, b + begin, columns, out + begin, columns,
                   false);
    };
    multiply(query, tile.key_transposed, p);
    multiply(dout, tile.value_transposed, ds);
    if (dropout_.drops()) drop(dropout_, matrix, queries, keys, ds, columns, 1);

    // P = exp(S - L), dS = P (dP - delta), both 0 where hidden
    const C scale = static_cast<C>(forward_.softmax_scale), rest = score.rest();
    const int64_t first = first_row(forward_, sequence, head);
    const HeadRows<T> next_query = rows_of_queries(forward_.query, sequence, head);
    const HeadRows<T> next_dout = rows_of_dout(sequence, head);
    const HeadRows<C> dquery = rows_of_dquery(sequence, head);
    C* p_row = p;
    C* ds_row = ds;
    for (int64_t i = queries.begin; i < queries.end; ++i, p_row += columns, ds_row += columns) {
      prefetch_row(dquery, i, head_dim_);
      if (const int64_t next = i + attention_block; next < mask.seq_len_q) {
        prefetch_row(next_query, next, head_dim_);
        prefetch_row(next_dout, next, head_dim_);
      }
      if (!score.plain()) score.finish(p_row + begin, end - begin, i, 0, keys.begin + begin, 1, tile.softcap_slopes);
      if (const C reference = reference_[first + i]; reference != 0) {
        for (int64_t j = begin; j < end; ++j) p_row[j] -= reference;
      }
      const C log_sum = log_sum_[first + i], delta = delta_[first + i];
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) {
        p_row[j] = exp2_((p_row[j] * rest - log_sum) * std::numbers::log2e_v<C>);
        ds_row[j] = p_row[j] * (ds_row[j] - delta) * scale;
      }
      for (int64_t j = begin; score.softcap != 0 && j < end; ++j) ds_row[j] *= tile.softcap_slopes[j - begin];
      const Interval visible = mask.keys_of(i).within(keys);
      if (visible.size() == columns) continue;
      for (C* row : {p_row, ds_row}) {
        std::fill(row, row + visible.begin, C(0));
        std::fill(row + visible.end, row + columns, C(0));
      }
    }
    if (dropout_.drops()) drop(dropout_, matrix, queries, keys, p, columns, 1);
  }

  // One query block against key block `block`: adds to the tiles dkey and dvalue, and in its turn to dquery.
  void differentiate(const Sequence& sequence, int64_t head, Interval queries, Interval keys, int64_t block,
                     std::atomic<int64_t>& turn, const BackwardTiles<C>& tile) {
    const Mask& mask = sequence.mask;
    const int64_t rows = queries.size();
    const int64_t columns = whole_vectors<C>(keys.size());
    const HeadRows<T> query = rows_of_queries(forward_.query, sequence, head), dout = rows_of_dout(sequence, head);
    const HeadRows<C> dquery = rows_of_dquery(sequence, head);
    load_tile(query, queries, head_dim_, tile.query);
    load_tile(dout, queries, head_dim_, tile.dout);
    for (int64_t i = 0; i < rows; i += rows_in_cache) {
      const Interval few{queries.begin + i, std::min(queries.begin + i + rows_in_cache, queries.end)};
      differentiate_rows(sequence, head, few, keys, tile, tile.query + i * width_, tile.dout + i * width_,
                         tile.p + i * columns, tile.ds + i * columns);
    }

    // dV += P^T dO, dK += dS^T Q, dQ += dS K
    const auto keys_of = [&](int64_t i) { return mask.keys_of(queries.begin + i).within(keys); };
    const auto queries_of = [&](int64_t j) { return mask.queries_of(keys.begin + j).within(queries); };
    const bool all_visible = mask.shows_all(queries, keys);
    masked_product<C>(all_visible, keys.size(), width_, rows, tile.p, 1, columns, tile.dout, width_, tile.dvalue,
                      width_, true, queries_of);
    masked_product<C>(all_visible, keys.size(), width_, rows, tile.ds, 1, columns, tile.query, width_, tile.dkey,
                      width_, true, queries_of);
    await_turn(turn, block);
    masked_product<C>(all_visible, rows, head_dim_, keys.size(), tile.ds, columns, 1, tile.key, width_,
                      dquery.row(queries.begin), dquery.row_stride, block > first_key_block(sequence, queries),
                      keys_of);
    turn.store(block + 1, std::memory_order_release);
  }

  // Key blocks take turns in adding to dquery, in ascending order whichever threads compute them, so that the bits
  // never change.
  static void await_turn(const std::atomic<int64_t>& turn, int64_t block) {
    while (turn.load(std::memory_order_acquire) != block) std::this_thread::yield();
  }

  void store(const C* tile, Interval rows, const HeadRows<T>& target) {
    for (int64_t j = 0; j < rows.size(); ++j) {
      if (j + rows_ahead < rows.size()) prefetch_row(target, rows.begin + j + rows_ahead, head_dim_);
      T* const row = target.row(rows.begin + j);
      for (int64_t c = 0; c < head_dim_; ++c) row[c] = static_cast<T>(tile[j * width_ + c]);
    }
  }

  void round_dquery(const Sequence& sequence, int64_t head, int64_t block) {
    const HeadRows<C> exact = rows_of_dquery(sequence, head);
    const HeadRows<T> rounded = rows_of_queries(args_.dquery, sequence, head);
    const Interval queries = queries_of_block(sequence, block);
    for (int64_t i = queries.begin; i < queries.end; ++i) {
      for (int64_t c = 0; c < head_dim_; ++c) rounded.row(i)[c] = static_cast<T>(exact.row(i)[c]);
    }
  }

  const AttentionGradArgs& args_;
  const AttentionArgs& forward_;
  const AttentionDropout dropout_;
  const int64_t head_dim_;
  const int64_t width_;  // of a tile's row
  const int64_t query_blocks_;
  const int64_t key_blocks_;
  std::byte* const workspace_;
  AttentionTensor dquery_;       // where dquery accumulates
  C* delta_;                     // as lse
  C* reference_;                 // as lse
  C* log_sum_;                   // as lse
  std::atomic<int64_t>* turns_;  // (batch, num_heads, query blocks)
  size_t shared_bytes_;
  size_t tile_bytes_;
  int64_t threads_;
};

}  // namespace

void flash_attention_backward(const AttentionGradArgs& args, const Stream& stream) {
  cpu::require_attention_support("flash_attention_backward", args.forward, stream.device);
  dispatch_floating(args.forward.dtype, "flash_attention_backward", [&]<class T>() {
    Backward<T> backward(args, args.workspace);
    STROBE_CHECK(args.workspace_bytes >= backward.workspace_bytes(), "flash_attention_backward: workspace of ",
                 args.workspace_bytes, " bytes given, expected ", backward.workspace_bytes());
    backward.run();
  });
}

size_t flash_attention_backward_workspace(const AttentionGradArgs& args, Device device) {
  cpu::require_attention_support("flash_attention_backward", args.forward, device);
  return dispatch_floating(args.forward.dtype, "flash_attention_backward",
                           [&]<class T>() { return Backward<T>(args, nullptr).workspace_bytes(); });
}

}  // namespace strobe::kernels::cpu
