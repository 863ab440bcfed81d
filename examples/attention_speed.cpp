// How fast attention is on this processor, tiled and standard, forward and backward, as CSV: each row also as a share
// of Eigen's rate for a product of 2048 x 2048 f32 matrices on the same threads in the same run. The column `kernel` is
// flash or standard, or flash and the path that --kernel picked, as in flash-portable.
#include <strobe/strobe.h>

#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "option_checks.h"

namespace {

using namespace examples;

using strobe::AttentionKernel;
using strobe::DType;
using strobe::Tensor;

struct Settings {
  std::vector<int64_t> seq_lens{512, 1024, 2048, 4096, 8192};
  int64_t batch = 1;
  int64_t num_heads = 8;
  int64_t head_dim = 64;
  bool causal = false;
  std::string dtype = "f32";
  std::string kernel = "auto";
  int threads = strobe::num_threads();
  int repeats = 3;
  int64_t standard_max = 4096;
};

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

void print_row(const char* direction, const char* kernel, const Settings& settings, int64_t seq_len, double seconds,
               double flops, double peer) {
  const double rate = 1e-9 * flops / seconds;
  std::printf("%s,%s,%s,%lld,%lld,%lld,%lld,%d,%.3f,%.1f,%.2f\n", direction, kernel, settings.dtype.c_str(),
              static_cast<long long>(settings.batch), static_cast<long long>(seq_len),
              static_cast<long long>(settings.num_heads), static_cast<long long>(settings.head_dim), settings.causal,
              1e3 * seconds, rate, rate / peer);
  flush_output();
}

// GFLOP/s of Eigen's and of our own product of two square f32 matrices.
double measure_products(const Settings& settings) {
  constexpr int64_t size = 2048;
  constexpr double flops = 2.0 * size * size * size;
  Eigen::setNbThreads(settings.threads);
  const Eigen::MatrixXf a = Eigen::MatrixXf::Random(size, size), b = Eigen::MatrixXf::Random(size, size);
  Eigen::MatrixXf product(size, size);
  const double eigen = fastest(
      settings.repeats, [] {}, [&] { product.noalias() = a * b; });
  const strobe::NoGrad no_grad;
  const Tensor x = strobe::normal({size, size}), y = strobe::normal({size, size});
  Tensor result;
  const double ours = fastest(
      settings.repeats, [] {}, [&] { result = strobe::matmul(x, y); });
  const double peer = 1e-9 * flops / eigen;
  const Settings square{.num_heads = 1, .head_dim = size, .causal = false};
  print_row("product", "eigen", square, size, eigen, flops, peer);
  print_row("product", "strobe", square, size, ours, flops, peer);
  return peer;
}

using Attention = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const strobe::AttentionOptions&);

void measure_attention(const char* kernel, Attention attention, const Settings& settings, int64_t seq_len, DType dtype,
                       AttentionKernel path, double peer) {
  const strobe::Shape shape{settings.batch, seq_len, settings.num_heads, settings.head_dim};
  const auto random = [&] { return strobe::normal(shape, 0, 1, dtype); };
  const Tensor query = random().set_requires_grad(), key = random().set_requires_grad(),
               value = random().set_requires_grad(), dout = random();
  const strobe::AttentionOptions options{.causal = settings.causal, .kernel = path};
  // Two products of 2 seq_len^2 head_dim operations per head forward, five backward; causal sees half of the pairs.
  const double pairs = static_cast<double>(settings.batch * settings.num_heads) * static_cast<double>(seq_len) *
                       static_cast<double>(seq_len) * (settings.causal ? 0.5 : 1.0);
  const double flops = 4.0 * pairs * static_cast<double>(settings.head_dim);
  Tensor out;
  const double forward = fastest(
      settings.repeats, [&] { out = Tensor(); },
      [&] {
        const strobe::NoGrad no_grad;
        out = attention(query, key, value, options);
      });
  print_row("forward", kernel, settings, seq_len, forward, flops, peer);
  const double backward = fastest(
      settings.repeats,
      [&] {
        for (const Tensor& x : {query, key, value}) x.set_grad(Tensor());
        out = attention(query, key, value, options);
      },
      [&] { out.backward(dout); });
  print_row("backward", kernel, settings, seq_len, backward, 2.5 * flops, peer);
}

const std::map<std::string, AttentionKernel> kernels{{"auto", AttentionKernel::auto_select},
                                                     {"portable", AttentionKernel::portable},
                                                     {"mma", AttentionKernel::mma},
                                                     {"hopper", AttentionKernel::hopper}};

// Throws, naming the option, for what could only fail after minutes of measuring.
void check(const Settings& settings) {
  require(!settings.seq_lens.empty(), "--seq-lens: an empty list given, expected lengths such as 512,1024,2048");
  const DType dtype = dtypes.at(settings.dtype);
  const double memory = static_cast<double>(strobe::memory_limit());
  for (const int64_t seq_len : settings.seq_lens) {
    const double rows =
        static_cast<double>(settings.batch) * static_cast<double>(settings.num_heads) * static_cast<double>(seq_len);
    // query, key, value, dout, out and three gradients
    const double tensors = 8.0 * rows * static_cast<double>(settings.head_dim) * static_cast<double>(size_of(dtype));
    require(tensors <= memory,
            "--seq-lens: {} given, for which inputs and results take {:.1f} GiB, expected at most the {:.1f} GiB of "
            "this machine",
            seq_len, tensors / 0x1p30, memory / 0x1p30);
    if (seq_len > settings.standard_max) continue;
    // P and dP as wide as sums; with 16-bit dtypes P is half as wide, and so is dS beside it
    const double matrices = 2.0 * rows * static_cast<double>(seq_len) * (dtype == DType::f64 ? 8 : 4);
    require(tensors + matrices <= memory,
            "--standard-max: {} given, but standard attention of seq_len {} takes {:.1f} GiB, expected at most the "
            "{:.1f} GiB of this machine",
            settings.standard_max, seq_len, (tensors + matrices) / 0x1p30, memory / 0x1p30);
  }
  try {
    const Tensor one = strobe::zeros({1, 1, 1, settings.head_dim}, dtype);
    strobe::flash_attention(one, one, one, {.causal = settings.causal, .kernel = kernels.at(settings.kernel)});
  } catch (const strobe::Error& error) {
    throw std::runtime_error(fmt::format("--kernel {}: {}", settings.kernel, error.what()));
  }
}

// Nothing when the command line asked for help, which has then been printed.
std::optional<Settings> parse(int argc, char** argv) {
  constexpr int64_t any_size = int64_t{1} << 30;
  Settings settings;
  CLI::App app{"Times tiled and standard attention and prints CSV."};
  app.option_defaults()->always_capture_default();
  const auto integer = [&](const char* name, auto& value, int64_t low, int64_t high, const char* help) {
    app.add_option(name, value, help)->check(range<int64_t>(low, high))->type_name("N");
  };
  add_list(app, "--seq-lens", settings.seq_lens, range<int64_t>(1, any_size), "Lengths to measure")
      ->type_name("N,N,...");
  integer("--batch", settings.batch, 1, any_size, "Sequences");
  integer("--num-heads", settings.num_heads, 1, any_size, "Heads");
  integer("--head-dim", settings.head_dim, 1, 256, "Width of a head");
  app.add_flag("--causal", settings.causal, "Mask what comes later");
  app.add_option("--dtype", settings.dtype, "Of inputs and results")
      ->check(choice({"f32", "f64", "bf16", "f16"}))
      ->type_name("f32|f64|bf16|f16");
  app.add_option("--kernel", settings.kernel, "Path of tiled attention; auto: the fastest for the case")
      ->check(choice({"auto", "portable", "mma", "hopper"}))
      ->type_name("auto|portable|mma|hopper");
  integer("--threads", settings.threads, 1, 4096, "Threads, also of the product");
  integer("--repeats", settings.repeats, 1, 1000000, "The fastest counts");
  integer("--standard-max", settings.standard_max, 0, any_size,
          "Longest seq_len for standard attention: its memory grows with the square");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::printf("%s", app.help().c_str());
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw std::runtime_error(error.what());
  }
  return settings;
}

void run(const Settings& settings) {
  strobe::set_num_threads(settings.threads);
  check(settings);
  const DType dtype = dtypes.at(settings.dtype);
  const AttentionKernel path = kernels.at(settings.kernel);
  const std::string flash = settings.kernel == "auto" ? "flash" : "flash-" + settings.kernel;
  std::printf("direction,kernel,dtype,batch,seq_len,num_heads,head_dim,causal,ms,gflops,share_of_eigen\n");
  const double peer = measure_products(settings);
  for (const int64_t seq_len : settings.seq_lens) {
    measure_attention(flash.c_str(), strobe::flash_attention, settings, seq_len, dtype, path, peer);
    if (seq_len > settings.standard_max) continue;
    measure_attention("standard", strobe::standard_attention, settings, seq_len, dtype, AttentionKernel::auto_select,
                      peer);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (const std::optional<Settings> settings = parse(argc, argv)) run(*settings);
    flush_output();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_speed: %s\n", error.what());
    return 1;
  }
}
