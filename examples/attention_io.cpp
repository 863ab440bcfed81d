// The bytes that attention moves, standard and tiled, forward and backward: counted from formulas against seq_len and
// against the size of a tile, and measured by a GPU's counters, as CSV and as pictures.
//
// Nsight Compute (ncu) reads the counters of every kernel of a run, and a second run merges its table:
//   M=dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_srcunit_tex.sum
//   ncu --clock-control none --cache-control none --print-units base --csv --metrics $M attention_io --run > run.csv
//   attention_io --measured run.csv --svg io.svg --tile-svg tile.svg
//
// CSV: dram_bytes are read from and written to device memory, l2_bytes move between multiprocessors and the L2 cache;
// those measured are empty where nothing was.
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>

#include "bytes_chart.h"
#include "io_profile.h"
#include "option_checks.h"
#include "report.h"

using namespace examples;

namespace {

struct Options {
  std::vector<int64_t> seq_lens{1024, 2048, 4096, 8192, 16384};
  int64_t head_dim = 64;
  std::string dtype = "bf16";
  std::string kernel = "auto";
  bool run = false;
  bool deterministic = false;
  std::string measured, svg, tile_svg;
};

std::optional<Options> parse(int argc, const char* const* argv) {
  Options o;
  CLI::App app(
      "Counts the bytes that standard and tiled attention move, 16,384 tokens and 2,048 numbers a token whatever "
      "seq_len is.");
  app.option_defaults()->always_capture_default();
  add_list(app, "--seq-lens", o.seq_lens, range<int64_t>(1, int64_t{1} << 20), "Lengths")->type_name("N,N,...");
  app.add_option("--head-dim", o.head_dim, "Width of a head")->check(range<int64_t>(1, 256))->type_name("N");
  app.add_option("--dtype", o.dtype, "Of inputs and results")
      ->check(choice({"f32", "bf16", "f16"}))
      ->type_name("f32|bf16|f16");
  app.add_option("--kernel", o.kernel, "Path of tiled attention on the GPU; auto: the fastest for the case")
      ->check(choice({"auto", "portable", "mma", "hopper"}))
      ->type_name("auto|portable|mma|hopper");
  CLI::Option* const run = app.add_flag("--run", o.run, "Run each case once on the GPU, for ncu to count");
  app.add_flag("--deterministic", o.deterministic,
               "With --run: gradients summed in a fixed order, which costs bytes that are not counted")
      ->needs(run);
  app.add_option("--measured", o.measured, "What ncu printed about --run; its cases take the place of the options")
      ->type_name("FILE")
      ->excludes(run);
  app.add_option("--svg", o.svg, "Draw the bytes against seq_len here")->type_name("FILE")->excludes(run);
  app.add_option("--tile-svg", o.tile_svg, "Draw them against the tile here")->type_name("FILE")->excludes(run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw std::runtime_error(error.what());
  }
  require(!o.seq_lens.empty(), "--seq-lens: an empty list given, expected lengths such as 1024,2048");
  std::sort(o.seq_lens.begin(), o.seq_lens.end());
  o.seq_lens.erase(std::unique(o.seq_lens.begin(), o.seq_lens.end()), o.seq_lens.end());
  return o;
}

// The tile of the kernel that would run: the GPU's own answer, and where there is none what the kernels for 16-bit
// dtypes take on large GPUs.
void set_tile(IoCase& c, strobe::AttentionKernel kernel) {
  const strobe::Device gpu = strobe::Device::cuda();
  strobe::kernels::AttentionTile tile{.queries = 128, .keys = 128};
  if (strobe::cuda_available()) {
    const strobe::kernels::AttentionTensor operand{.batch_stride = c.seq_len * c.num_heads * c.head_dim,
                                                   .seq_stride = c.num_heads * c.head_dim,
                                                   .head_stride = c.head_dim};
    tile = strobe::kernels::attention_tile({.query = operand,
                                            .key = operand,
                                            .value = operand,
                                            .out = operand,
                                            .lse = nullptr,
                                            .batch = c.batch,
                                            .seq_len_q = c.seq_len,
                                            .seq_len_k = c.seq_len,
                                            .num_heads = c.num_heads,
                                            .num_kv_heads = c.num_heads,
                                            .head_dim = c.head_dim,
                                            .dtype = c.dtype,
                                            .softmax_scale = 1,
                                            .kernel = kernel},
                                           c.backward, gpu);
  }
  c.tile_queries = tile.queries;
  c.tile_keys = tile.keys;
}

std::vector<IoCase> cases_of(const Options& o) {
  std::vector<IoCase> cases;
  for (const bool backward : {false, true}) {
    for (const Method method : {Method::standard, Method::tiled}) {
      for (const int64_t seq_len : o.seq_lens) {
        IoCase& c = cases.emplace_back(IoCase{.backward = backward,
                                              .method = method,
                                              .batch = std::max<int64_t>(1, 16384 / seq_len),
                                              .seq_len = seq_len,
                                              .num_heads = std::max<int64_t>(1, 2048 / o.head_dim),
                                              .head_dim = o.head_dim,
                                              .dtype = dtypes.at(o.dtype)});
        if (method == Method::tiled) set_tile(c, attention_kernels.at(o.kernel));
      }
    }
  }
  return cases;
}

std::string number(double bytes) { return bytes > 0 ? fmt::format("{:.0f}", bytes) : std::string(); }

void print_table(const std::vector<MeasuredCase>& rows) {
  fmt::print("{},dram_bytes,dram_measured,l2_bytes,l2_measured\n", case_columns);
  for (const auto& [c, measured] : rows) {
    const IoBytes counted = count_bytes(c);
    fmt::print("{},{},{},{},{}\n", line_of(c), number(counted.dram), number(measured.dram), number(counted.l2),
               number(measured.l2));
  }
}

// "Backward, seq_len 16,384: standard attention moves 95 times the bytes of tiled attention to and from device memory."
void print_comparison(const std::vector<MeasuredCase>& rows) {
  for (const bool backward : {false, true}) {
    double bytes[2] = {};
    int64_t longest = 0;
    for (const auto& [c, measured] : rows) {
      if (c.backward != backward || c.seq_len < longest) continue;
      longest = c.seq_len;
      bytes[c.method == Method::tiled] = measured.dram > 0 ? measured.dram : count_bytes(c).dram;
    }
    if (bytes[0] == 0 || bytes[1] == 0) continue;
    fmt::print(
        "# {}, seq_len {}: standard attention moves {:.1f} times the bytes of tiled attention to and from device "
        "memory.\n",
        backward ? "Backward" : "Forward", human_count(longest), bytes[0] / bytes[1]);
  }
}

std::string describe(const IoCase& c) {
  return fmt::format("{} tokens, {} heads of {}, {}", human_count(c.batch * c.seq_len), c.num_heads, c.head_dim,
                     strobe::name_of(c.dtype));
}

constexpr const char* marks = "dots: measured; dashed: counted";

// DRAM bytes of both methods and L2 bytes of tiled attention, against seq_len.
std::string seq_len_svg(const std::vector<MeasuredCase>& rows) {
  std::vector<ByteCurve> curves;
  for (const bool backward : {false, true}) {
    const std::string pass = backward ? "backward" : "forward";
    ByteCurve standard{.label = "standard " + pass + ", device memory", .measured = {}, .formula = {}, .predicted = {}};
    ByteCurve tiled{.label = "tiled " + pass + ", device memory", .measured = {}, .formula = {}, .predicted = {}};
    ByteCurve cache{.label = "tiled " + pass + ", L2", .measured = {}, .formula = {}, .predicted = {}};
    for (const auto& [c, measured] : rows) {
      if (c.backward != backward) continue;
      const double x = static_cast<double>(c.seq_len);
      const IoBytes counted = count_bytes(c);
      ByteCurve& curve = c.method == Method::tiled ? tiled : standard;
      curve.formula.emplace_back(x, counted.dram);
      curve.measured.emplace_back(x, measured.dram);
      if (c.method != Method::tiled) continue;
      cache.formula.emplace_back(x, counted.l2);
      cache.measured.emplace_back(x, measured.l2);
    }
    for (ByteCurve* curve : {&standard, &tiled, &cache}) curves.push_back(*curve);
  }
  return bytes_chart_svg({.title = "Bytes that attention moves, of the same tokens",
                          .subtitle = describe(rows.front().what),
                          .x = "seq_len",
                          .y = "bytes",
                          .marks = marks},
                         curves);
}

// Bytes of the longest tiled cases, were their tiles of other sizes.
std::string tile_svg(const std::vector<MeasuredCase>& rows) {
  std::vector<ByteCurve> curves;
  IoCase longest;
  for (const bool backward : {false, true}) {
    const std::string pass = backward ? "backward" : "forward";
    const MeasuredCase* last = nullptr;
    for (const MeasuredCase& row : rows) {
      if (row.what.backward == backward && row.what.method == Method::tiled) last = &row;
    }
    if (last == nullptr) continue;
    longest = last->what;
    ByteCurve cache{.label = pass + ", L2", .measured = {}, .formula = {}, .predicted = {}};
    ByteCurve memory{.label = pass + ", device memory", .measured = {}, .formula = {}, .predicted = {}};
    for (int64_t tile = 16; tile <= std::min<int64_t>(1024, longest.seq_len); tile *= 2) {
      IoCase c = longest;
      c.tile_queries = c.tile_keys = tile;
      cache.formula.emplace_back(tile, count_bytes(c).l2);
      memory.formula.emplace_back(tile, count_bytes(c).dram);
    }
    // What is read again and again is what the block does not own.
    const double own = static_cast<double>(backward ? longest.tile_keys : longest.tile_queries);
    cache.measured.emplace_back(own, last->bytes.l2);
    memory.measured.emplace_back(own, last->bytes.dram);
    curves.push_back(cache);
    curves.push_back(memory);
  }
  return bytes_chart_svg({.title = "Bytes of tiled attention against the size of its tiles",
                          .subtitle = fmt::format("seq_len {}, {}", human_count(longest.seq_len), describe(longest)),
                          .x = "queries that a block owns (backward: keys)",
                          .y = "bytes",
                          .marks = marks},
                         curves);
}

void write_text(const std::string& path, const std::string& text) {
  strobe::write_file_atomically(path, {{text.data(), text.size()}});
  fmt::print("# {}\n", path);
}

void run_all(const Options& o) {
  if (o.run) {
    strobe::require_device("--run", strobe::Device::cuda());
    const strobe::DeviceGuard device(strobe::Device::cuda());
    strobe::seed(1);
    return run_cases(cases_of(o), {.kernel = attention_kernels.at(o.kernel), .deterministic = o.deterministic});
  }
  std::vector<MeasuredCase> rows;
  if (o.measured.empty()) {
    for (const IoCase& c : cases_of(o)) rows.push_back({c, {}});
  } else {
    rows = read_profile(o.measured);
  }
  print_table(rows);
  print_comparison(rows);
  if (!o.svg.empty()) write_text(o.svg, seq_len_svg(rows));
  if (!o.tile_svg.empty()) write_text(o.tile_svg, tile_svg(rows));
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the size limit is an error like a full disk
  try {
    const std::optional<Options> options = parse(argc, argv);
    if (options) run_all(*options);
    flush_output();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_io: %s\n", error.what());
    return 1;
  }
}
