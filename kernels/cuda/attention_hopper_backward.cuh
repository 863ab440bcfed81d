// Attention backward on Hopper (FlashAttention-3, Shah et al. 2024, section 3): a block draws 128 keys of a kv head
// after the other and visits the queries that see them. Two threads have tiles brought by TMA, two warpgroups of 64
// keys multiply them by wgmma (attention_hopper_backward_group.cuh), a third one sums dquery over both
// (attention_hopper_backward_sum.cuh). Scores are computed transposed, so that P and dS are operands of dvalue and dkey
// as they lie in registers.
#pragma once

#include "strobe/kernels/cuda/attention_mma_backward.cuh"
#include "strobe/kernels/cuda/hopper.cuh"

namespace strobe::kernels::cuda::hopper {

struct GradParams {
  CUtensorMap query, key, value, dout;
  CUtensorMap dkey, dvalue;  // with boxes of 16 rows, if sends_sums
  BackwardParams base;
  int group_heads;   // query heads that read one kv head
  int inner_heads;   // of these, so many follow one another at each query tile: all, or 1
  int map_q, map_k;  // rows on their axes in tensor maps
  bool sends_sums;   // TMA stores dkey and dvalue
};

// Where tensor maps have row 0 of a sequence. It ends where their axis of rows ends, so that TMA reads zeros behind it,
// packed ones too: there the axis of batches has a place for every row that a sequence may end before (sequence_map).
struct MapPlace {
  int row, batch;

  __device__ MapPlace(const SequencePair& pair, int64_t first, int64_t seq_len, int map_rows)
      : row(pair.packed ? map_rows - static_cast<int>(seq_len) : 0),
        batch(static_cast<int>(pair.packed ? first + seq_len : pair.batch)) {}
};
__device__ inline MapPlace query_place(const GradParams& params, const SequencePair& pair) {
  return {pair, pair.first_q, pair.seq_len_q, params.map_q};
}
__device__ inline MapPlace key_place(const GradParams& params, const SequencePair& pair) {
  return {pair, pair.first_k, pair.seq_len_k, params.map_k};
}

// Where shared memory begins, / 16, computed anew where it is used and not kept in registers from before.
__device__ inline uint32_t memory_place() {
  extern __shared__ __align__(1024) char shared[];
  uint32_t place = shared_address(shared) >> 4 & 0x3fff;
  asm volatile("" : "+r"(place));
  return place;
}

// A query tile has `parts` times 64 queries, which one after the other meet the keys; dquery is summed in two halves:
// the 64 queries of each part, or 64 columns of the only one, as far as head_dim has them.
template <int columns_>
struct GradShape {
  static constexpr int columns = columns_;  // of tiles; head_dim may be less
  static constexpr int groups = 2, group_keys = 64, keys = groups * group_keys;
  static_assert(columns == 64 || columns == 128);
  static constexpr int parts = 128 / columns, part_queries = 64, queries = parts * part_queries;
  static constexpr int query_stages = 3, dout_stages = 2, score_stages = 2;
  static constexpr bool keys_in_registers = columns == 64;  // their rows as operands for S and dP
  // In registers values leave room for the next ones at once, keys when dquery has its last part: so keys come twice.
  static constexpr int key_stages = keys_in_registers ? 2 : 1;
  static constexpr bool sums_dquery = true, douts_apart = false;
  static constexpr bool publishes_block = true;      // one thread finds what belongs to it for all
  static constexpr bool sends_sums = columns == 64;  // by TMA: dvalue leaves while dkey is not done
  static constexpr int threads = 128 * groups, all_threads = threads + 256;
  static constexpr int key_bytes = keys * columns * 2, query_bytes = queries * columns * 2;
  static constexpr int score_bytes = queries * keys * 2;
  static constexpr bool rows_as_terms = true;
  static constexpr int part_row_bytes = RowTable::terms * part_queries * 2, row_bytes = parts * part_row_bytes;
  static constexpr int dquery_floats = queries * columns, staging_bytes = 16 * 64 * 2;
  static constexpr int loader_registers = 32, sum_registers = 64, group_registers = 208;
  // How finish_backward finds the parts of dquery that a thread has: of each warp 16 rows and 64 columns.
  static constexpr int warps = 4 * groups, query_warps = 4 * parts, query_rows = 1, query_columns = 8,
                       sum_threads = 128;

  // Where operands begin in their tiles, in bytes, for step `step` of 16 summed elements. Tiles are chunks of 64
  // columns; dS has a row for each query, and a chunk for each warpgroup's keys.
  static constexpr int chunk_bytes(int rows) { return rows * 128; }
  static constexpr int key_columns_at(int group, int step) {
    return step / 4 * chunk_bytes(keys) + group * group_keys * 128 + step % 4 * 32;
  }
  static constexpr int query_columns_at(int part, int step) {
    return step / 4 * chunk_bytes(queries) + part * part_queries * 128 + step % 4 * 32;
  }
  static constexpr int query_rows_at(int part, int step) { return part * part_queries * 128 + step * 16 * 128; }
  static constexpr int score_columns_at(int half, int step) {
    return step / 4 * chunk_bytes(queries) + (parts == 1 ? 0 : half * part_queries * 128) + step % 4 * 32;
  }
  static constexpr int key_rows_at(int half, int step) {
    return (parts == 1 ? half * chunk_bytes(keys) : 0) + step * 16 * 128;
  }
  // Where a lane stores its row of the transposed dS of 16 queries: the first ones of part 0 ...
  static constexpr int score_store_at(int group, int warp, int lane) {
    return group * chunk_bytes(queries) + swizzled_offset(queries, lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  }
  // ... and how much further on 16 queries of number `step` of a part.
  static constexpr int score_step(int part, int step) { return (part * part_queries + 16 * step) * 128; }
};

// Some blocks of keys come in two pieces, so that the last ones drawn are short and all multiprocessors end at the same
// time. The second one goes on where the first one ended: the sums are the same to the bit.
enum class Piece { whole, first, second };

// Some keys of a kv head, by their number among all; second pieces are numbered behind these.
template <class Shape>
struct KeyPlace {
  int batch, kv_head, block;
  Piece piece = Piece::whole;
  int cut;  // of a cut block its number among these

  // Blocks of one head at the same time share its queries, but in turns they wait for each other: so those of some
  // heads alternate. The first keys come first: under a causal mask they have most to do.
  __device__ KeyPlace(const BackwardParams& params, int ticket) {
    int number = ticket;
    if constexpr (!Shape::sums_dquery) {
      const int blocks = static_cast<int>(params.blocks);
      if (ticket < params.cut_blocks) piece = Piece::first;
      if (ticket >= blocks) piece = Piece::second, number -= blocks;
    }
    cut = number;
    const int key_blocks = static_cast<int>(params.key_blocks), together = static_cast<int>(params.heads_together);
    const int kv_heads = static_cast<int>(params.grad.forward.num_kv_heads);
    const int first = number / (together * key_blocks) * together;
    const int heads = min(together, static_cast<int>(params.blocks) / key_blocks - first);
    block = (number - first * key_blocks) / heads;
    const int matrix = first + (number - first * key_blocks) % heads;
    batch = matrix / kv_heads;
    kv_head = matrix % kv_heads;
  }
  // Blocks are numbered by the longest sequence.
  __device__ bool has_keys(const AttentionArgs& args) const {
    const int32_t* const ends = args.cu_seqlens_k;
    return ends == nullptr || block * Shape::keys < ends[batch + 1] - ends[batch];
  }
};

// Such keys and the query tiles that see them.
template <class Shape>
struct KeyBlock {
  int batch, kv_head;
  int number;  // among the blocks of the head
  int first_key;
  int seq_len_q;
  int first_head;  // of the group that reads this kv head
  int inner_heads;
  int first_tile, tiles;
  int first_step = 0, steps;  // of this piece
  int cut;                    // of a cut block its number among these
  Piece piece;
  int table_tile;  // of the first head's query 0
  MapPlace queries, keys;
  Band band;

  __device__ KeyBlock(const GradParams& params, const KeyPlace<Shape>& place)
      : KeyBlock(params, place, SequencePair(params.base.grad.forward, place.batch)) {}

  __device__ KeyBlock(const GradParams& params, const KeyPlace<Shape>& place, const SequencePair& pair)
      : batch(place.batch),
        kv_head(place.kv_head),
        number(place.block),
        first_key(place.block * Shape::keys),
        seq_len_q(static_cast<int>(pair.seq_len_q)),
        first_head(place.kv_head * params.group_heads),
        inner_heads(params.inner_heads),
        cut(place.cut),
        piece(place.piece),
        table_tile(static_cast<int>(params.base.table.first_tile(params.base.grad.forward, pair, first_head))),
        queries(query_place(params, pair)),
        keys(key_place(params, pair)),
        band(pair) {
    const int past = min(seq_len_q, first_key + Shape::keys - band.lower);
    first_tile = max(first_key - band.upper, 0) / Shape::queries;
    tiles = (past <= 0 ? 0 : (past + Shape::queries - 1) / Shape::queries) - first_tile;
    steps = tiles <= 0 ? 0 : tiles * params.group_heads;
    if (piece == Piece::whole) return;
    // The second pieces have from 3/4 of the steps down to 1/12, so that each fits where others leave room.
    const int first_steps = steps / 4 + 2 * steps * cut / (3 * static_cast<int>(params.base.cut_blocks));
    first_step = piece == Piece::first ? 0 : first_steps;
    steps = piece == Piece::first ? first_steps : steps - first_steps;
  }

  // Calls f(x) for each number that a whole block has.
  template <class F>
  __device__ void for_each_number(F&& f) {
    for (int* x : {&batch, &kv_head, &number, &first_key, &seq_len_q, &first_head, &inner_heads, &first_tile, &tiles,
                   &steps, &table_tile, &queries.row, &queries.batch, &keys.row, &keys.batch, &band.lower, &band.upper,
                   &band.seq_len_k}) {
      f(*x);
    }
  }

  // Whether some of 64 queries do not see all of 64 keys.
  __device__ bool is_cut(int first_query, int key) const {
    const bool past_end = key + 64 > band.seq_len_k, sees_first = first_query + 63 + band.lower <= key;
    const bool all_see_first = sees_first || seq_len_q - 1 + band.lower <= key;
    return past_end || !all_see_first || key + 63 > first_query + band.upper;
  }

  // In turns, key blocks add to dquery of a query tile in ascending order; this is how many come before.
  __device__ int turn(int tile) const { return number - band.begin(tile * Shape::queries) / Shape::keys; }
};

// Squares of 8 x 8: in each row ones that pick, out of the 8 terms of the row table, those for S or those for dP; or
// zeros.
enum class Pick { weight, delta, nothing, count };

template <class Shape>
struct GradMemory {
  alignas(1024) char key[Shape::key_stages][Shape::key_bytes];
  alignas(1024) char value[Shape::key_bytes];
  alignas(1024) char query[Shape::query_stages][Shape::query_bytes];
  alignas(1024) char dout[Shape::dout_stages][Shape::query_bytes];
  alignas(1024) char scores[Shape::score_stages][Shape::score_bytes];  // dS
  // Not last: compute-sanitizer takes an operand whose squares repeat for 2,048 bytes without gaps.
  alignas(128) uint16_t picks[static_cast<int>(Pick::count)][64];
  alignas(128) char rows[Shape::query_stages][Shape::row_bytes];   // of RowTable
  alignas(1024) char staging[Shape::warps][Shape::staging_bytes];  // dkey and dvalue on their way out
  uint64_t number_full, number_empty;
  uint64_t key_full[Shape::key_stages], key_empty[Shape::key_stages];
  uint64_t value_full, value_empty;
  uint64_t query_full[Shape::query_stages], query_empty[Shape::query_stages];
  uint64_t dout_full[Shape::dout_stages], dout_empty[Shape::dout_stages];
  uint64_t scores_full[Shape::score_stages], scores_empty[Shape::score_stages];
  uint64_t turn_open, turn_used;
  int number;                            // of the next block of keys
  KeyBlock<Shape> block;                 // and what one thread found out about it
  int first_query[Shape::query_stages];  // of the tile there
  int is_first[2];                       // at this query tile, and at the next one
  int place[2];                          // of these in the workspace
};

// By all threads, before the block's barrier.
template <class Shape>
__device__ inline void write_picks(GradMemory<Shape>& memory) {
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(Pick::count) * 64; i += Shape::all_threads) {
    const Pick pick{i / 64};
    const bool is_weight = i % 8 < RowTable::weight_terms;
    const bool is_one = pick == (is_weight ? Pick::weight : Pick::delta);
    memory.picks[i / 64][i % 64] = is_one ? 0x3f80 : 0;  // 1 in bf16
  }
  fence_async_proxy();
}

template <class Shape>
constexpr int grad_shared_bytes = static_cast<int>(sizeof(GradMemory<Shape>));  // at most 232,448

// A query tile of a block of keys: all of one head, then those of the next one; or each tile's heads one after the
// other, then the next tile's. In turns tiles go from the last one to the first: so a block follows on the heels of the
// one before it, and both wait little, whatever the mask. In any order few are to add to one tile at the same time:
// each block begins where its own keys stand and goes upwards and round, or at a head and near the last tile by its
// number.
template <class Shape>
struct Step {
  const KeyBlock<Shape>& block;
  int head, tile, start;
  int inner, first_inner = 0;  // which of the heads at a tile this one is, and which comes first
  int place;                   // in the workspace
  bool upwards = false;

  __device__ Step(const BackwardParams& params, const KeyBlock<Shape>& keys)
      : block(keys), head(keys.first_head), start(last_tile()) {
    if (Shape::sums_dquery && !params.deterministic) {
      if (keys.inner_heads > 1) {
        first_inner = keys.number % keys.inner_heads;
        start -= keys.number / keys.inner_heads % max(keys.tiles, 1);
      } else {
        start = max(min(keys.first_key / Shape::queries, last_tile()), keys.first_tile);
        upwards = true;
      }
    }
    inner = first_inner;
    head += inner;
    tile = start;
    place = keys.table_tile + inner * static_cast<int>(params.table.head_tiles) + tile;
    if constexpr (!Shape::sums_dquery) {
      if (keys.first_step == 0) return;
      const int heads = keys.first_step / keys.tiles, tiles = keys.first_step % keys.tiles;
      head += heads;
      tile -= tiles;
      place += heads * static_cast<int>(params.table.head_tiles) - tiles;
    }
  }
  __device__ void advance(const BackwardParams& params) {
    const int head_tiles = static_cast<int>(params.table.head_tiles);
    int heads = 1;  // that have come at this tile
    if constexpr (Shape::sums_dquery) {
      heads = block.inner_heads;
      ++head;
      place += head_tiles;
      if (++inner == heads) {
        inner = 0;
        head -= heads;
        place -= heads * head_tiles;
      }
      if (inner != first_inner) return;
    }
    const int before = tile;
    if (upwards) {
      tile = tile == last_tile() ? block.first_tile : tile + 1;
    } else {
      tile = tile == block.first_tile ? last_tile() : tile - 1;
    }
    place += tile - before;
    if (tile != start) return;
    head += heads;
    place += heads * head_tiles;
  }
  __device__ int first_query() const { return tile * Shape::queries; }
  __device__ int turn() const { return block.turn(tile); }

 private:
  __device__ int last_tile() const { return block.first_tile + block.tiles - 1; }
};

// Who follows the blocks of keys: one thread, or a whole warp, for which numbers are the same in all lanes.
struct OneThread {
  __device__ static int same(int x) { return x; }
};
struct WholeWarp {
  __device__ static void arrive(uint64_t* barrier) {  // each warp for itself: none may miss a phase
    __syncwarp();
    if (fresh_lane() == 0) barrier_arrive(barrier);
  }
  __device__ static int same(int x) { return uniform(x); }
};

// How many blocks and second pieces are drawn.
template <class Shape>
__device__ inline int piece_count(const BackwardParams& params) {
  return static_cast<int>(params.blocks + (Shape::sums_dquery ? 0 : params.cut_blocks));
}

// Calls f(block) for each block of keys that this block of threads gets. They are drawn one by one, so that none waits
// for one that has not been drawn, and nobody is idle.
template <class Shape, class Reader, class F>
__device__ inline void for_each_block(const GradParams& params, GradMemory<Shape>& memory, Reader, F&& f) {
  for (uint32_t parity = 0;; parity ^= 1) {
    barrier_wait(&memory.number_full, parity);
    const int number = Reader::same(memory.number);
    if constexpr (Shape::publishes_block) {
      KeyBlock<Shape> block = memory.block;
      barrier_arrive(&memory.number_empty);
      if (number >= piece_count<Shape>(params.base)) return;
      block.for_each_number([](int& x) { x = Reader::same(x); });
      f(block);
    } else {
      barrier_arrive(&memory.number_empty);
      if (number >= piece_count<Shape>(params.base)) return;
      KeyPlace<Shape> place(params.base, number);
      for (int* x : {&place.batch, &place.kv_head, &place.block}) *x = Reader::same(*x);
      f(KeyBlock<Shape>(params, place));
    }
  }
}

// Brings a tile of `rows` rows of a sequence.
template <class Shape>
__device__ inline void load_tile(char* tile, const CUtensorMap& map, uint64_t* full, int rows, int first_row, int head,
                                 const MapPlace& sequence) {
#pragma unroll
  for (int chunk = 0; chunk < Shape::columns / 64; ++chunk) {
    tma_load(tile + chunk * Shape::chunk_bytes(rows), map, full, 64 * chunk, sequence.row + first_row, head,
             sequence.batch);
  }
}

// Draws blocks of keys and brings the tiles of queries and dout in the order in which they are used.
template <class Shape>
__device__ inline void load_queries(const GradParams& params, GradMemory<Shape>& memory) {
  const BackwardParams& base = params.base;
  tma_prefetch(params.query);
  tma_prefetch(params.dout);
  Ring<Shape::query_stages> queries;
  Ring<Shape::dout_stages> douts;
  for (uint32_t parity = 0;; parity ^= 1) {
    int number;
    do {
      number = atomicAdd(base.ticket, 1);
    } while (number < piece_count<Shape>(base) && !KeyPlace<Shape>(base, number).has_keys(base.grad.forward));
    barrier_wait(&memory.number_empty, parity ^ 1);
    memory.number = number;
    const KeyBlock<Shape> block(params, KeyPlace<Shape>(base, min(number, piece_count<Shape>(base) - 1)));
    if constexpr (Shape::publishes_block) memory.block = block;
    barrier_arrive(&memory.number_full);
    if (number >= piece_count<Shape>(base)) return strobe::cuda::let_next_kernel_start();
    Step<Shape> step(base, block);
#pragma unroll 1
    for (int i = 0; i < block.steps; ++i, step.advance(base)) {
      uint64_t* full = &memory.query_full[queries.stage];
      barrier_wait(&memory.query_empty[queries.stage], queries.parity ^ 1);
      if constexpr (Shape::sums_dquery) memory.first_query[queries.stage] = step.first_query();
      barrier_expect(full, Shape::query_bytes + Shape::row_bytes);
      load_tile<Shape>(memory.query[queries.stage], params.query, full, Shape::queries, step.first_query(), step.head,
                       block.queries);
      bulk_load(memory.rows[queries.stage], base.table.data + int64_t{step.place} * (Shape::row_bytes / 4),
                Shape::row_bytes, full);
      queries.advance();
      if constexpr (Shape::douts_apart) continue;
      full = &memory.dout_full[douts.stage];
      barrier_wait(&memory.dout_empty[douts.stage], douts.parity ^ 1);
      barrier_expect(full, Shape::query_bytes);
      load_tile<Shape>(memory.dout[douts.stage], params.dout, full, Shape::queries, step.first_query(), step.head,
                       block.queries);
      douts.advance();
    }
  }
}

// Brings keys and values.
template <class Shape>
__device__ inline void load_keys(const GradParams& params, GradMemory<Shape>& memory) {
  tma_prefetch(params.key);
  tma_prefetch(params.value);
  Ring<static_cast<int>(std::extent_v<decltype(memory.key)>)> keys;
  Ring<1> values;
  for_each_block(params, memory, OneThread(), [&](const KeyBlock<Shape>& block) {
    if (block.steps == 0) return;
    const auto load = [&](char* tile, const CUtensorMap& map, uint64_t* full, uint64_t* empty, auto& ring) {
      barrier_wait(empty, ring.parity ^ 1);
      barrier_expect(full, Shape::key_bytes);
      load_tile<Shape>(tile, map, full, Shape::keys, block.first_key, block.kv_head, block.keys);
      ring.advance();
    };
    load(memory.key[keys.stage], params.key, &memory.key_full[keys.stage], &memory.key_empty[keys.stage], keys);
    load(memory.value, params.value, &memory.value_full, &memory.value_empty, values);
  });
}

// Calls f(step, parity) for each step of each block, as one thread.
template <class Shape, class F>
__device__ inline void for_each_step(const GradParams& params, GradMemory<Shape>& memory, F&& f) {
  uint32_t parity = 0;
  for_each_block(params, memory, OneThread(), [&](const KeyBlock<Shape>& block) {
    Step<Shape> step(params.base, block);
#pragma unroll 1
    for (int i = 0; i < block.steps; ++i, step.advance(params.base), parity ^= 1) f(step, parity);
  });
}

}  // namespace strobe::kernels::cuda::hopper
