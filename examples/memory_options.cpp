// Declares the options of attention_memory, finds out how much memory there is, tries the output files.
#include "memory_options.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "option_checks.h"
#include "report.h"

namespace examples {
namespace {

uint64_t number_in(const char* file, uint64_t otherwise) {
  uint64_t value = 0;
  return std::ifstream(file) >> value ? value : otherwise;
}

// What new allocations can get, in bytes: on the CPU by the kernel's own estimate, and within this container's limit.
uint64_t available_memory(strobe::Device device) {
  if (device.type == strobe::DeviceType::cuda) return strobe::device_memory(device).available;
  uint64_t available = strobe::memory_limit();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name, rest; meminfo >> name; std::getline(meminfo, rest)) {
    uint64_t kibibytes = 0;
    if (name == "MemAvailable:" && meminfo >> kibibytes) available = std::min(available, kibibytes << 10);
  }
  const uint64_t allowed = number_in("/sys/fs/cgroup/memory.max", UINT64_MAX);
  const uint64_t used = std::min(number_in("/sys/fs/cgroup/memory.current", 0), allowed);
  return std::min(available, allowed - used);
}

// "6GiB", "500 MB", "1e9": bytes.
uint64_t parse_bytes(const std::string& option, const std::string& text) {
  static const std::map<std::string, double> units{{"", 1},         {"B", 1},        {"kB", 1e3},    {"KB", 1e3},
                                                   {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},   {"KiB", 0x1p10},
                                                   {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  while (*end == ' ') ++end;
  const auto unit = units.find(end);
  const double bytes = unit == units.end() ? 0 : number * unit->second;
  require(bytes >= 1 && bytes < 0x1p63, "{}: {} given, expected bytes above 0, such as 6GiB or 500MB", option, text);
  return static_cast<uint64_t>(bytes);
}

void require_writable(const char* option, const std::string& path) {
  require(!path.empty(), "{}: an empty path given, expected a file that can be written", option);
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error(fmt::format("{}: {}: {}, expected a file that can be written", option, path, why));
  };
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::is_directory(status)) refuse("is a directory");
  if (std::filesystem::exists(status)) {
    if (!std::filesystem::is_regular_file(status)) refuse("is a device, pipe or socket");
    if (access(path.c_str(), W_OK) != 0) refuse(std::strerror(errno));
  }
  // Results are written beside the file and renamed, so what counts is a new file there.
  const std::string trial = fmt::format("{}.partial{}-trial", path, getpid());
  const int descriptor = open(trial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) refuse(std::strerror(errno));
  close(descriptor);
  unlink(trial.c_str());
}

void check_together(const CLI::App& app, MemoryOptions& o) {
  SweepShape& shape = o.shape;
  require(!o.seq_lens.empty(), "--seq-lens: an empty list given, expected lengths such as 512,1024,2048");
  std::sort(o.seq_lens.begin(), o.seq_lens.end());
  o.seq_lens.erase(std::unique(o.seq_lens.begin(), o.seq_lens.end()), o.seq_lens.end());
  if (app.count("--embed-dim") == 0) shape.embed_dim = shape.num_heads * shape.head_dim;
  require(shape.embed_dim % shape.head_dim == 0, "--embed-dim: {} given, expected a multiple of --head-dim {}",
          shape.embed_dim, shape.head_dim);
  constexpr double most_elements = 0x1p48;  // far beyond any memory, and every count of bytes still fits 63 bits
  const double elements = static_cast<double>(shape.batch) * static_cast<double>(o.seq_lens.back()) *
                          static_cast<double>(std::max(shape.num_heads * shape.head_dim, shape.embed_dim));
  require(elements <= most_elements,
          "--seq-lens: {} given, for which one tensor has {:.1e} elements, expected at most {:.1e}", o.seq_lens.back(),
          elements, most_elements);
  if (app.count("--csv") > 0) require_writable("--csv", o.csv);
  if (app.count("--svg") > 0) require_writable("--svg", o.svg);
  const auto place = [](const std::string& path) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path));
  };
  require(o.csv.empty() || o.svg.empty() || place(o.csv) != place(o.svg),
          "--csv and --svg: {} given for both, expected two files", o.csv);
}

}  // namespace

std::optional<MemoryOptions> parse_memory_options(int argc, const char* const* argv) {
  constexpr int64_t any_size = int64_t{1} << 30;
  MemoryOptions o;
  std::string dtype = "f32", device = "auto", max_memory;
  CLI::App app(
      "Measures how the memory of attention grows with seq_len: tiled, standard, and in a stack of GPT blocks with and "
      "without recomputation, forward and backward.");
  app.get_formatter()->column_width(36);
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto integer = [&](const char* name, int64_t& value, int64_t low, int64_t high, const char* help) {
    app.add_option(name, value, help)->check(range<int64_t>(low, high))->type_name("N");
  };
  add_list(app, "--seq-lens", o.seq_lens, range<int64_t>(1, any_size),
           "lengths to measure, each series until memory or time is short")
      ->type_name("N,N,...");
  add_list(app, "--series", o.series, choice(o.series), "tiled, standard, blocks, recomputed")
      ->type_name("NAME,NAME,...");
  integer("--batch", o.shape.batch, 1, any_size, "sequences");
  integer("--num-heads", o.shape.num_heads, 1, any_size, "attention heads");
  integer("--head-dim", o.shape.head_dim, 1, 256, "width of a head");
  integer("--embed-dim", o.shape.embed_dim, 1, any_size,
          "width of the GPT blocks, whose heads have --head-dim; unless given, --num-heads times --head-dim");
  integer("--num-blocks", o.shape.num_blocks, 1, 10000, "GPT blocks in the stack");
  app.add_option("--dtype", dtype, "of inputs and results")
      ->check(choice({"f32", "f64", "bf16", "f16"}))
      ->type_name("f32|f64|bf16|f16");
  app.add_flag("--causal", o.shape.causal, "mask attention; GPT blocks always do");
  app.add_option("--device", device, "where to run; auto: on the GPU if there is one")
      ->check(choice({"auto", "cpu", "cuda"}))
      ->type_name("auto|cpu|cuda");
  integer("--threads", o.threads, 0, 4096, "of the CPU; 0: all processors");
  app.add_option("--max-memory", max_memory, "most memory to use; unless given, half of what is available")
      ->type_name("BYTES|GiB|GB|...");
  app.add_option("--max-seconds", o.max_seconds, "skip sizes expected to take longer than this for one pass")
      ->check(range<double>(1e-3, 1e9))
      ->type_name("X");
  app.add_option("--csv", o.csv, "write the measurements here")->type_name("FILE");
  app.add_option("--svg", o.svg, "draw them here")->type_name("FILE");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw std::runtime_error(error.what());
  }
  o.shape.dtype = dtypes.at(dtype);
  const bool gpu = device == "cuda" || (device == "auto" && strobe::cuda_available());
  o.device = gpu ? strobe::Device::cuda() : strobe::Device::cpu();
  try {
    strobe::require_device("--device cuda", o.device);
  } catch (const strobe::Error& error) {
    throw std::runtime_error(error.what());
  }
  o.max_memory =
      app.count("--max-memory") > 0 ? parse_bytes("--max-memory", max_memory) : available_memory(o.device) / 2;
  const uint64_t limit = strobe::memory_limit(o.device);
  require(o.max_memory <= limit, "--max-memory: {} given, expected at most the memory of this {}, {}", max_memory,
          gpu ? "GPU" : "machine", human_bytes(limit));
  check_together(app, o);
  return o;
}

}  // namespace examples
