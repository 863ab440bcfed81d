// The table of the CPU: each row also as a share of Eigen's rate for a product of 2048 x 2048 f32 matrices on the same
// threads in the same run. The column `kernel` is flash or standard, or flash and the path that --kernel picked, as in
// flash-portable.
#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>

#include "option_checks.h"
#include "speed_options.h"

namespace examples {
namespace {

using strobe::AttentionKernel;
using strobe::Tensor;

// Seconds of the fastest of `repeats` calls, after one that does not count; `prepare` is not timed.
double fastest(int repeats, const std::function<void()>& prepare, const std::function<void()>& run) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= repeats; ++i) {
    prepare();
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (i > 0) best = std::min(best, elapsed.count());
  }
  return best;
}

void print_row(const char* direction, const char* kernel, const SpeedOptions& o, int64_t seq_len, double seconds,
               double flops, double peer) {
  const double rate = 1e-9 * flops / seconds;
  std::printf("%s,%s,%s,%lld,%lld,%lld,%lld,%d,%.3f,%.1f,%.2f\n", direction, kernel, name_of(o.dtype),
              static_cast<long long>(o.batch), static_cast<long long>(seq_len), static_cast<long long>(o.num_heads),
              static_cast<long long>(o.head_dim), o.causal, 1e3 * seconds, rate, rate / peer);
  flush_output();
}

// GFLOP/s of Eigen's and of our own product of two square f32 matrices.
double measure_products(const SpeedOptions& o) {
  constexpr int64_t size = 2048;
  constexpr double flops = 2.0 * size * size * size;
  Eigen::setNbThreads(o.threads);
  const Eigen::MatrixXf a = Eigen::MatrixXf::Random(size, size), b = Eigen::MatrixXf::Random(size, size);
  Eigen::MatrixXf product(size, size);
  const double eigen = fastest(
      o.repeats, [] {}, [&] { product.noalias() = a * b; });
  const strobe::NoGrad no_grad;
  const Tensor x = strobe::normal({size, size}), y = strobe::normal({size, size});
  Tensor result;
  const double ours = fastest(
      o.repeats, [] {}, [&] { result = strobe::matmul(x, y); });
  const double peer = 1e-9 * flops / eigen;
  SpeedOptions square;
  square.num_heads = 1;
  square.head_dim = size;
  print_row("product", "eigen", square, size, eigen, flops, peer);
  print_row("product", "strobe", square, size, ours, flops, peer);
  return peer;
}

using Attention = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const strobe::AttentionOptions&);

void measure_attention(const char* kernel, Attention attention, const SpeedOptions& o, int64_t seq_len,
                       AttentionKernel path, double peer) {
  const strobe::Shape shape{o.batch, seq_len, o.num_heads, o.head_dim};
  const auto random = [&] { return strobe::normal(shape, 0, 1, o.dtype); };
  const Tensor query = random().set_requires_grad(), key = random().set_requires_grad(),
               value = random().set_requires_grad(), dout = random();
  const strobe::AttentionOptions options{.causal = o.causal, .kernel = path};
  // Two products of 2 seq_len^2 head_dim operations per head forward, five backward; causal sees half of the pairs.
  const double pairs = static_cast<double>(o.batch * o.num_heads) * static_cast<double>(seq_len) *
                       static_cast<double>(seq_len) * (o.causal ? 0.5 : 1.0);
  const double flops = 4.0 * pairs * static_cast<double>(o.head_dim);
  Tensor out;
  const double forward = fastest(
      o.repeats, [&] { out = Tensor(); },
      [&] {
        const strobe::NoGrad no_grad;
        out = attention(query, key, value, options);
      });
  print_row("forward", kernel, o, seq_len, forward, flops, peer);
  const double backward = fastest(
      o.repeats,
      [&] {
        for (const Tensor& x : {query, key, value}) x.set_grad(Tensor());
        out = attention(query, key, value, options);
      },
      [&] { out.backward(dout); });
  print_row("backward", kernel, o, seq_len, backward, 2.5 * flops, peer);
}

}  // namespace

void measure_on_cpu(const SpeedOptions& o) {
  strobe::set_num_threads(o.threads);
  const std::string flash = o.kernel == "auto" ? "flash" : "flash-" + o.kernel;
  std::printf("direction,kernel,dtype,batch,seq_len,num_heads,head_dim,causal,ms,gflops,share_of_eigen\n");
  const double peer = measure_products(o);
  for (const int64_t seq_len : o.seq_lens) {
    measure_attention(flash.c_str(), strobe::flash_attention, o, seq_len, o.path, peer);
    if (seq_len > o.standard_max) continue;
    measure_attention("standard", strobe::standard_attention, o, seq_len, AttentionKernel::auto_select, peer);
  }
}

}  // namespace examples
