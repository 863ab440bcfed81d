// The passes, their formulas and how they are measured.
#include "memory_series.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace examples {

using namespace strobe;

namespace {

double bytes_now() { return static_cast<double>(memory_stats().current); }

double product(std::initializer_list<int64_t> factors) {
  double result = 1;
  for (const int64_t factor : factors) result *= static_cast<double>(factor);
  return result;
}

double width_of(DType dtype) { return static_cast<double>(size_of(dtype)); }
double wide(DType dtype) { return dtype == DType::f64 ? 8 : 4; }  // what sums and statistics are kept in

// ---- attention alone

using AttentionFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const AttentionOptions&);

// query, key, value and dout in; out, dquery, dkey and dvalue back.
PassBytes attention_bytes(const SweepShape& s, int64_t seq_len, double extra) {
  const double tensor = product({s.batch, seq_len, s.num_heads, s.head_dim}) * width_of(s.dtype);
  return {.inputs = 4 * tensor, .results = 4 * tensor, .extra = extra};
}

// S and dP, or P and dS, and a sum for each row.
double standard_extra(const SweepShape& s, int64_t seq_len) {
  const double rows = product({s.batch, s.num_heads, seq_len});
  return wide(s.dtype) * rows * (2 * static_cast<double>(seq_len) + 1);
}

// What the backward kernel states: three numbers per row; on the CPU tiles of a fixed size for each thread; for 16-bit
// dtypes also dquery in f32.
double tiled_scratch(const SweepShape& s, int64_t seq_len) {
  const kernels::AttentionArgs forward{.query = {},
                                       .key = {},
                                       .value = {},
                                       .out = {},
                                       .lse = nullptr,
                                       .batch = s.batch,
                                       .seq_len_q = seq_len,
                                       .seq_len_k = seq_len,
                                       .num_heads = s.num_heads,
                                       .num_kv_heads = s.num_heads,
                                       .head_dim = s.head_dim,
                                       .dtype = s.dtype,
                                       .softmax_scale = 1,
                                       .causal = s.causal};
  return static_cast<double>(kernels::flash_attention_backward_workspace(
      {.forward = forward, .dout = {}, .dquery = {}, .dkey = {}, .dvalue = {}}, default_device()));
}

// The log-sum-exp of each row, and the scratch memory.
double tiled_extra(const SweepShape& s, int64_t seq_len) {
  return wide(s.dtype) * product({s.batch, s.num_heads, seq_len}) + tiled_scratch(s, seq_len);
}

Series attention_series(const char* name, const char* label, const std::string& explanation,
                        AttentionFunction attention, const SweepShape& s,
                        std::function<double(int64_t seq_len)> extra) {
  return {.name = name,
          .label = label,
          .explanation = explanation,
          .formula = [s, extra](int64_t seq_len) { return attention_bytes(s, seq_len, extra(seq_len)); },
          .prepare = [s, attention](int64_t seq_len) -> Pass {
            const MemoryTag tag("inputs");
            const auto random = [&] { return normal({s.batch, seq_len, s.num_heads, s.head_dim}, 0, 1, s.dtype); };
            const Tensor query = random().set_requires_grad(), key = random().set_requires_grad(),
                         value = random().set_requires_grad();
            const AttentionOptions options{.causal = s.causal};
            return {[=] { return attention(query, key, value, options); }, random()};
          }};
}

// ---- GPT blocks

std::vector<Block> make_blocks(const SweepShape& s, int64_t seq_len) {
  const GPTConfig config{.vocab_size = 1,
                         .max_seq_len = seq_len,
                         .num_layers = s.num_blocks,
                         .num_heads = s.embed_dim / s.head_dim,
                         .embed_dim = s.embed_dim};
  std::vector<Block> blocks;
  for (int64_t i = 0; i < s.num_blocks; ++i) {
    to(blocks.emplace_back(config), s.dtype);
    for (const Tensor& x : parameters(blocks.back())) x.set_grad(zeros_like(x));
  }
  return blocks;
}

// A block keeps 16 vectors of embed_dim per token (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
// Transformer Models", without dropout), and in f32 (f64) the mean and scale of two norms and the log-sum-exp of each
// head; with recomputation only its output, and one block at a time the rest. Backward of the MLP adds 2 vectors.
// Backward of attention, when the MLP has given back 8, adds its scratch memory instead.
PassBytes block_bytes(const SweepShape& s, int64_t seq_len, bool recompute) {
  const double vectors = product({s.batch, seq_len, s.embed_dim}) * width_of(s.dtype);
  const double weights = product({12 * s.embed_dim + 13, s.embed_dim, s.num_blocks}) * width_of(s.dtype);
  const double blocks = static_cast<double>(s.num_blocks);
  SweepShape attention = s;
  attention.num_heads = s.embed_dim / s.head_dim;
  attention.causal = true;
  const double statistics = product({s.batch, seq_len, 4 + attention.num_heads}) * wide(s.dtype);
  const double in_mlp = vectors * (recompute ? blocks + 18 : 16 * blocks + 2) + statistics * (recompute ? 1 : blocks);
  const double in_attention = in_mlp - 8 * vectors + tiled_scratch(attention, seq_len);
  return {.inputs = 3 * vectors + 2 * weights, .results = vectors, .extra = std::max(in_mlp, in_attention)};
}

Series block_series(const char* name, const SweepShape& s, bool recompute) {
  const char* const all =
      "16 vectors of embed_dim per block and token, 2 more in backward, or 6 fewer and attention's scratch";
  const char* const one =
      "one vector of embed_dim per block and token, 20 for the block at hand, or 10 and attention's scratch";
  return {.name = name,
          .label = fmt::format("{} {}GPT block{}", s.num_blocks, recompute ? "recomputed " : "",
                               s.num_blocks == 1 ? "" : "s"),
          .explanation = recompute ? one : all,
          .formula = [s, recompute](int64_t seq_len) { return block_bytes(s, seq_len, recompute); },
          .prepare = [s, recompute](int64_t seq_len) -> Pass {
            const MemoryTag tag("inputs");
            const std::vector<Block> blocks = make_blocks(s, seq_len);
            const Shape shape{s.batch, seq_len, s.embed_dim};
            const Tensor x = normal(shape, 0, 1, s.dtype).set_requires_grad();
            x.set_grad(zeros_like(x));
            const auto forward = [blocks, x, recompute] {
              const MemoryTag activations("activations");
              Tensor y = x;
              for (const Block& block : blocks) {
                const auto apply = [block](const Tensor& input) { return block(input); };
                y = recompute ? checkpoint(apply, y) : apply(y);
              }
              return y;
            };
            return {forward, normal(shape, 0, 1, s.dtype)};
          }};
}

// ---- measuring

Measurement measure_once(const Series& series, int64_t seq_len) {
  const double before = bytes_now();
  const Pass pass = series.prepare(seq_len);
  Measurement m;
  m.seq_len = seq_len;
  const double inputs = bytes_now();
  m.bytes.inputs = inputs - before;
  reset_peak_memory();
  const Event start;
  const Tensor out = pass.forward();
  m.kept = bytes_now() - inputs;
  out.backward(pass.dout);
  m.seconds = Event().seconds_since(start);
  m.bytes.results = bytes_now() - inputs;
  m.bytes.extra = static_cast<double>(memory_stats().peak) - inputs - m.bytes.results;
  m.attention_peak = static_cast<double>(memory_stats("attention").peak);
  m.activations_peak = static_cast<double>(memory_stats("activations").peak);
  return m;
}

}  // namespace

std::vector<Series> all_series(const SweepShape& s) {
  std::string tiled = "four numbers per row and head";
  if (size_of(s.dtype) == 2) tiled += ", dquery in f32";
  if (default_device().type == DeviceType::cpu) tiled += ", and tiles of a fixed size";
  return {attention_series("tiled", "tiled attention", tiled, flash_attention, s,
                           [s](int64_t seq_len) { return tiled_extra(s, seq_len); }),
          attention_series("standard", "standard attention", "two seq_len x seq_len matrices per head",
                           standard_attention, s, [s](int64_t seq_len) { return standard_extra(s, seq_len); }),
          block_series("blocks", s, false), block_series("recomputed", s, true)};
}

Measurement measure(const Series& series, int64_t seq_len) {
  constexpr double enough_seconds = 0.2;
  Measurement best = measure_once(series, seq_len);
  double total = best.seconds;
  for (int repeat = 1; repeat < 5 && total < enough_seconds; ++repeat) {
    const double seconds = measure_once(series, seq_len).seconds;
    best.seconds = std::min(best.seconds, seconds);
    total += seconds;
  }
  release_cached_memory();
  return best;
}

double fitted_exponent(const std::vector<Measurement>& points) {
  double mean_x = 0, mean_y = 0;
  const double count = static_cast<double>(points.size());
  for (const Measurement& point : points) {
    mean_x += std::log(static_cast<double>(point.seq_len)) / count;
    mean_y += std::log(point.bytes.extra) / count;
  }
  double covariance = 0, variance = 0;
  for (const Measurement& point : points) {
    const double x = std::log(static_cast<double>(point.seq_len)) - mean_x;
    covariance += x * (std::log(point.bytes.extra) - mean_y);
    variance += x * x;
  }
  return points.size() < 2 ? std::numeric_limits<double>::quiet_NaN() : covariance / variance;
}

}  // namespace examples
