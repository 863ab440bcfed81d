// Declares the options of attention_speed; each device has defaults of its own.
#include "speed_options.h"

#include <limits>
#include <numeric>

#include "option_checks.h"

namespace examples {
namespace {

using strobe::AttentionKernel;
using strobe::Device;
using strobe::DType;

void check_memory(const SpeedOptions& o) {
  const double memory = static_cast<double>(strobe::memory_limit());
  for (const int64_t seq_len : o.seq_lens) {
    const double rows = static_cast<double>(o.batch) * static_cast<double>(o.num_heads) * static_cast<double>(seq_len);
    // query, key, value, dout, out and three gradients
    const double tensors = 8.0 * rows * static_cast<double>(o.head_dim) * static_cast<double>(size_of(o.dtype));
    require(tensors <= memory,
            "--seq-lens: {} given, for which inputs and results take {:.1f} GiB, expected at most the {:.1f} GiB of "
            "this machine",
            seq_len, tensors / 0x1p30, memory / 0x1p30);
    if (seq_len > o.standard_max) continue;
    // P and dP as wide as sums; with 16-bit dtypes P is half as wide, and so is dS beside it
    const double matrices = 2.0 * rows * static_cast<double>(seq_len) * (o.dtype == DType::f64 ? 8 : 4);
    require(tensors + matrices <= memory,
            "--standard-max: {} given, but standard attention of seq_len {} takes {:.1f} GiB, expected at most the "
            "{:.1f} GiB of this machine",
            o.standard_max, seq_len, (tensors + matrices) / 0x1p30, memory / 0x1p30);
  }
}

void check_kernel(const SpeedOptions& o) {
  const bool gpu = o.device.type == strobe::DeviceType::cuda;
  for (const int64_t head_dim : gpu ? o.head_dims : std::vector{o.head_dim}) {
    try {
      const strobe::Tensor one = strobe::zeros({1, 1, 1, head_dim}, o.dtype, o.device);
      strobe::flash_attention(one, one, one, {.causal = o.causal, .kernel = o.path});
    } catch (const strobe::Error& error) {
      throw std::runtime_error(fmt::format("--kernel {}: {}", o.kernel, error.what()));
    }
  }
}

}  // namespace

std::optional<SpeedOptions> parse_speed_options(int argc, const char* const* argv) {
  constexpr int64_t any_size = int64_t{1} << 30;
  SpeedOptions o;
  std::string device = "auto", dtype = "f32";
  o.seq_lens = {512, 1024, 2048, 4096, 8192};
  o.threads = strobe::num_threads();
  o.repeats = 3;
  o.standard_max = 4096;
  CLI::App app{"Times tiled and standard attention and prints CSV."};
  app.option_defaults()->always_capture_default();
  const auto integer = [&](const char* name, auto& value, int64_t low, int64_t high, const char* help) {
    return app.add_option(name, value, help)->check(range<int64_t>(low, high))->type_name("N");
  };
  app.add_option("--device", device, "What to measure; auto: the GPU if there is one")
      ->check(choice({"auto", "cpu", "cuda"}))
      ->type_name("auto|cpu|cuda");
  const CLI::Option* const seq_lens =
      add_list(app, "--seq-lens", o.seq_lens, range<int64_t>(1, any_size), "Lengths to measure; on a GPU also 16384")
          ->type_name("N,N,...");
  app.add_flag("--causal", o.causal, "Mask what comes later; a GPU measures both unless given");
  const CLI::Option* const dtypes_option = app.add_option("--dtype", dtype, "Of inputs and results; on a GPU bf16")
                                               ->check(choice({"f32", "f64", "bf16", "f16"}))
                                               ->type_name("f32|f64|bf16|f16");
  app.add_option("--kernel", o.kernel, "Path of tiled attention; auto: the fastest for the case")
      ->check(choice({"auto", "portable", "mma", "hopper"}))
      ->type_name("auto|portable|mma|hopper");
  const CLI::Option* const repeats =
      integer("--repeats", o.repeats, 1, 1000000, "The fastest counts; on a GPU the median of 30");
  const CLI::Option* const standard_max =
      integer("--standard-max", o.standard_max, 0, any_size,
              "Longest seq_len for standard attention, whose memory grows with the square; on a GPU 0");
  const std::vector<const CLI::Option*> on_cpu{
      integer("--batch", o.batch, 1, any_size, "Sequences"), integer("--num-heads", o.num_heads, 1, any_size, "Heads"),
      integer("--head-dim", o.head_dim, 1, 256, "Width of a head"),
      integer("--threads", o.threads, 1, 4096, "Threads, also of the product")};
  const std::vector<const CLI::Option*> on_gpu{
      add_list(app, "--head-dims", o.head_dims, range<int64_t>(1, 256), "Widths of a head, 2048 of all heads together")
          ->type_name("N,N,..."),
      add_list(app, "--packed", o.packed, range<int64_t>(1, any_size),
               "Lengths of sequences, packed one behind the other and measured together, instead of --seq-lens")
          ->type_name("N,N,...")
          ->default_str("")
          ->excludes("--seq-lens"),
      integer("--gqa", o.group, 1, 2048, "Query heads for each key/value head"),
      integer("--window", o.window, -1, any_size, "Keys seen left and right of a query; -1: all"),
      app.add_flag("--any-order", o.any_order, "Gradients summed in any order, no longer the same bits each time"),
      integer("--rest-ms", o.rest_ms, 0, 60000, "Rest before each row, so that power and clock start alike")};
  for (const CLI::Option* option : on_cpu) app.get_option(option->get_name())->group("On the CPU");
  for (const CLI::Option* option : on_gpu) app.get_option(option->get_name())->group("On a GPU");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw std::runtime_error(error.what());
  }
  require(!o.seq_lens.empty(), "--seq-lens: an empty list given, expected lengths such as 512,1024,2048");
  require(!o.head_dims.empty(), "--head-dims: an empty list given, expected widths such as 64,128");
  const int64_t rows = std::reduce(o.packed.begin(), o.packed.end());
  require(rows <= std::numeric_limits<int32_t>::max(), "--packed: {} rows given, expected at most {}", rows,
          std::numeric_limits<int32_t>::max());
  const bool gpu = device == "cuda" || (device == "auto" && strobe::cuda_available());
  o.device = gpu ? Device::cuda() : Device::cpu();
  for (const CLI::Option* option : gpu ? on_cpu : on_gpu) {
    require(option->count() == 0, "{}: given, but it does not go with --device {}", option->get_name(),
            gpu ? "cuda" : "cpu");
  }
  if (gpu) {
    if (seq_lens->count() == 0) o.seq_lens = {512, 1024, 2048, 4096, 8192, 16384};
    if (dtypes_option->count() == 0) dtype = "bf16";
    if (repeats->count() == 0) o.repeats = 30;
    if (standard_max->count() == 0) o.standard_max = 0;
    try {
      strobe::require_device("--device cuda", o.device);
    } catch (const strobe::Error& error) {
      throw std::runtime_error(error.what());
    }
  }
  o.dtype = dtypes.at(dtype);
  o.path = attention_kernels.at(o.kernel);
  if (!gpu) check_memory(o);
  check_kernel(o);
  return o;
}

}  // namespace examples
