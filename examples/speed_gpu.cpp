// The table of a GPU: shapes as in the FlashAttention papers, batch * seq_len = 16,384 tokens and num_heads * head_dim
// = 2,048, and the columns of scripts that measure other libraries the same way. Packed sequences are a row of which
// seq_len is the longest.
#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include "option_checks.h"
#include "speed_options.h"

namespace examples {
namespace {

using namespace strobe;

constexpr int warm_up = 3;  // calls that do not count

// Milliseconds of the GPU: the median of `repeats` calls, each begun when the GPU was idle, after the warm-up;
// `prepare` is not timed.
double median_ms(const SpeedOptions& o, const std::function<void()>& prepare, const std::function<void()>& run) {
  synchronize(current_stream(o.device));
  std::this_thread::sleep_for(std::chrono::milliseconds(o.rest_ms));
  std::vector<double> times;
  for (int i = 0; i < warm_up + o.repeats; ++i) {
    prepare();
    synchronize(current_stream(o.device));
    const Event start;
    run();
    const Event end;
    const double ms = 1e3 * end.seconds_since(start);
    if (i >= warm_up) times.push_back(ms);
  }
  const auto middle = times.begin() + std::ssize(times) / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// What the GPU can reach at best, in the same run.
void print_ceilings(const SpeedOptions& o) {
  const NoGrad no_grad;
  const auto nothing = [] {};
  constexpr int64_t size = 8192;
  const DType dtype = o.dtype == DType::f64 ? DType::f32 : o.dtype;
  const Tensor a = normal({size, size}, 0, 1, dtype), b = normal({size, size}, 0, 1, dtype);
  Tensor product;
  const double product_ms = median_ms(o, nothing, [&] { product = matmul(a, b); });
  fmt::print("# ceiling: {} {}^3 matrix product {:.0f} TFLOP/s\n", name_of(dtype), size,
             2e-9 * size * size * size / product_ms);
  const Tensor source = empty({int64_t{1} << 29}), copy = empty_like(source);
  const double copy_ms = median_ms(o, nothing, [&] { copy.copy_from(source); });
  fmt::print("# ceiling: device copy {:.2f} TB/s read+write\n", 8e-9 * static_cast<double>(source.size()) / copy_ms);
}

// Pairs of a query and a key that it sees, of one head and sequence; under a causal mask alone half of all, as is the
// custom.
double visible_pairs(const SpeedOptions& o, int64_t seq_len, bool causal) {
  const double n = static_cast<double>(seq_len);
  if (o.window < 0 || o.window >= seq_len) return causal ? n * n / 2 : n * n;
  const double w = static_cast<double>(o.window);
  const double left = w * (w - 1) / 2 + (n - w) * w;  // the sum of min(i, w) over all queries i
  return n + (causal ? 1 : 2) * left;
}

struct Case {
  std::string impl;
  int64_t head_dim, num_heads;
  std::vector<int64_t> seq_lens;  // one a sequence
  bool causal;
};

// Where each of packed sequences ends, behind a 0.
Tensor cumulative(const std::vector<int64_t>& seq_lens) {
  std::vector<int32_t> ends{0};
  for (const int64_t seq_len : seq_lens) ends.push_back(ends.back() + static_cast<int32_t>(seq_len));
  return from_vector(ends, {std::ssize(ends)});
}

void print_row(const SpeedOptions& o, const Case& c, const char* pass, double flops, double ms, double peak) {
  fmt::print("{},{},{},{},{},{},{},{:d},{:.4f},{:.1f},{:.0f}\n", c.impl, name_of(o.dtype), pass, c.head_dim,
             std::ranges::max(c.seq_lens), c.seq_lens.size(), c.num_heads, c.causal, ms, 1e-9 * flops / ms,
             peak / 0x1p20);
  flush_output();
}

using Attention = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const AttentionOptions&);

// `graphs`: how many results may wait at a time for their backward pass, which frees what it has used.
void measure(const SpeedOptions& o, const Case& c, Attention attention, AttentionKernel path, int graphs) {
  const int64_t batch = std::ssize(c.seq_lens), longest = std::ranges::max(c.seq_lens);
  const bool packed = !o.packed.empty();
  const auto random = [&](int64_t heads) {
    if (!packed) return normal({batch, longest, heads, c.head_dim}, 0, 1, o.dtype);
    return normal({std::reduce(c.seq_lens.begin(), c.seq_lens.end()), heads, c.head_dim}, 0, 1, o.dtype);
  };
  const Tensor query = random(c.num_heads).set_requires_grad(), key = random(c.num_heads / o.group).set_requires_grad(),
               value = random(c.num_heads / o.group).set_requires_grad(), dout = random(c.num_heads);
  AttentionOptions options{.causal = c.causal,
                           .window_left = o.window,
                           .window_right = c.causal ? -1 : o.window,
                           .kernel = path,
                           .deterministic = !o.any_order};
  if (packed) {
    options.cu_seqlens_q = options.cu_seqlens_k = cumulative(c.seq_lens);
    options.max_seq_len_q = options.max_seq_len_k = longest;
  }
  double pairs = 0;
  for (const int64_t seq_len : c.seq_lens) pairs += visible_pairs(o, seq_len, c.causal);
  const double flops = 4.0 * pairs * static_cast<double>(c.head_dim * c.num_heads);
  const auto forget_gradients = [&] {
    for (const Tensor& x : {query, key, value}) x.set_grad(Tensor());
  };
  const double inputs = static_cast<double>(memory_stats().current);
  reset_peak_memory();
  attention(query, key, value, options).backward(dout);
  const double peak = static_cast<double>(memory_stats().peak) - inputs;
  Tensor out;
  const double forward = median_ms(
      o,
      [&] {
        forget_gradients();
        out = Tensor();
      },
      [&] {
        const NoGrad no_grad;
        out = attention(query, key, value, options);
      });
  // Forward passes come before the rest, where memory allows: between backward passes they would heat the GPU.
  std::vector<Tensor> outs;
  const auto run_forward = [&](int count) {
    while (std::ssize(outs) < count) outs.push_back(attention(query, key, value, options));
  };
  run_forward(std::min(graphs, warm_up + o.repeats));
  const double backward = median_ms(
      o,
      [&] {
        forget_gradients();
        run_forward(1);
      },
      [&] {
        outs.back().backward(dout);
        outs.pop_back();
      });
  print_row(o, c, "fwd", flops, forward, peak);
  print_row(o, c, "bwd", 2.5 * flops, backward, peak);
}

}  // namespace

void measure_on_gpu(const SpeedOptions& o) {
  const DeviceGuard device(o.device);
  seed(1);
  print_ceilings(o);
  std::string tiled = o.kernel == "auto" ? "strobe" : "strobe-" + o.kernel;
  if (o.any_order) tiled += "-any-order";
  fmt::print("impl,dtype,pass,head_dim,seq_len,batch,heads,causal,ms,TFLOPs,peak_MiB\n");
  std::vector<std::vector<int64_t>> rows;
  if (!o.packed.empty()) {
    rows.push_back(o.packed);
  } else {
    for (const int64_t n : o.seq_lens) rows.emplace_back(std::max<int64_t>(1, 16384 / n), n);
  }
  for (const int64_t head_dim : o.head_dims) {
    for (const std::vector<int64_t>& seq_lens : rows) {
      for (const bool causal : {false, true}) {
        if (o.causal && !causal) continue;
        Case c{tiled, head_dim, std::max<int64_t>(1, 2048 / head_dim / o.group) * o.group, seq_lens, causal};
        measure(o, c, flash_attention, o.path, 64);
        if (std::ranges::max(seq_lens) > o.standard_max) continue;
        c.impl = "strobe-standard";
        measure(o, c, standard_attention, AttentionKernel::auto_select, 1);
        release_cached_memory();
      }
    }
  }
}

}  // namespace examples
