// The order of kernels is what connects the two programs: for each case two sweeps through the L2, the pass, and one
// more sweep. A sweep leaves the L2 as the one before it did, so the bytes of the pass are those of its kernels and of
// the last sweep, which writes back what the pass left in the L2, less those of the second.
#include "io_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "option_checks.h"

namespace examples {
namespace {

using namespace strobe;

// The kernel that no attention uses, so that it can be told from theirs by name.
Tensor sweep(const Tensor& x) { return relu(x); }
constexpr std::string_view sweep_kernel = "Relu";
constexpr int64_t sweep_elements = int64_t{1} << 26;  // 256 MiB in, as much out: several times any L2

void run_case(const IoCase& c, const AttentionOptions& options, const Tensor& other_data) {
  const auto random = [&] { return normal({c.batch, c.seq_len, c.num_heads, c.head_dim}, 0, 1, c.dtype); };
  const Tensor query = random(), key = random(), value = random(), dout = random();
  if (c.backward) {
    for (const Tensor& x : {query, key, value}) x.set_requires_grad();
  }
  const auto forward = [&] {
    return c.method == Method::tiled ? flash_attention(query, key, value, options)
                                     : standard_attention(query, key, value, options);
  };
  Tensor out = c.backward ? forward() : Tensor();
  for (int i = 0; i < 2; ++i) sweep(other_data);
  if (c.backward) {
    out.backward(dout);
  } else {
    out = forward();
  }
  sweep(other_data);
  synchronize(out.stream());
}

// The fields of a line of CSV, without the quotation marks.
std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else if (c != '\r') {
      fields.back() += c;
    }
  }
  return fields;
}

struct Kernel {
  bool sweeps = false;
  IoBytes bytes;
};

// Adds a metric of a kernel. What is not in base units, or was not asked for, is refused.
void add_metric(Kernel& kernel, const std::string& metric, const std::string& unit, std::string value) {
  std::erase(value, ',');  // of thousands
  size_t end = 0;
  const double number = std::stod(value, &end);
  require(end == value.size(), "{} is '{}', expected a number", metric, value);
  if (metric.starts_with("dram__bytes_")) {
    require(unit == "byte", "{} is in '{}', expected byte (--print-units base)", metric, unit);
    kernel.bytes.dram += number;
  } else if (metric.starts_with("lts__t_sectors_srcunit_tex")) {
    require(unit == "sector", "{} is in '{}', expected sector (--print-units base)", metric, unit);
    kernel.bytes.l2 += 32 * number;
  }
}

struct Profile {
  std::vector<IoCase> cases;
  std::vector<Kernel> kernels;  // as they ran
};

Profile read_lines(std::istream& in) {
  Profile profile;
  std::map<int64_t, Kernel> kernels;
  std::map<std::string, size_t> column;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("forward,") || line.starts_with("backward,")) profile.cases.push_back(case_of(line));
    if (!line.starts_with('"')) continue;
    const std::vector<std::string> fields = fields_of(line);
    if (fields[0] == "ID") {
      for (size_t i = 0; i < fields.size(); ++i) column[fields[i]] = i;
      continue;
    }
    const auto field = [&](const char* name) -> const std::string& {
      const auto found = column.find(name);
      require(found != column.end() && found->second < fields.size(), "a line has no column '{}'", name);
      return fields[found->second];
    };
    Kernel& kernel = kernels[std::stoll(field("ID"))];
    kernel.sweeps = field("Kernel Name").find(sweep_kernel) != std::string::npos;
    add_metric(kernel, field("Metric Name"), field("Metric Unit"), field("Metric Value"));
  }
  for (const auto& [id, kernel] : kernels) profile.kernels.push_back(kernel);
  return profile;
}

std::vector<MeasuredCase> assign(const Profile& profile) {
  std::vector<size_t> sweeps;
  for (size_t i = 0; i < profile.kernels.size(); ++i) {
    if (profile.kernels[i].sweeps) sweeps.push_back(i);
  }
  require(!profile.cases.empty() && sweeps.size() == 3 * profile.cases.size(),
          "{} cases and {} sweeps, expected some and three sweeps a case", profile.cases.size(), sweeps.size());
  std::vector<MeasuredCase> measured;
  for (size_t i = 0; i < profile.cases.size(); ++i) {
    const size_t before = sweeps[3 * i + 1], after = sweeps[3 * i + 2];
    IoBytes sum;
    for (size_t k = before + 1; k <= after; ++k) {
      sum.dram += profile.kernels[k].bytes.dram;
      if (k < after) sum.l2 += profile.kernels[k].bytes.l2;
    }
    sum.dram -= profile.kernels[before].bytes.dram;
    measured.push_back({profile.cases[i], sum});
  }
  return measured;
}

}  // namespace

std::string line_of(const IoCase& c) {
  return fmt::format("{},{},{},{},{},{},{},{},{}", c.backward ? "backward" : "forward",
                     c.method == Method::tiled ? "tiled" : "standard", c.seq_len, c.batch, c.num_heads, c.head_dim,
                     name_of(c.dtype), c.tile_queries, c.tile_keys);
}

IoCase case_of(const std::string& line) {
  const std::vector<std::string> fields = fields_of(line);
  require(fields.size() == 9 && dtypes.count(fields[6]) == 1 && (fields[1] == "tiled" || fields[1] == "standard"),
          "'{}' given, expected {}", line, case_columns);
  const auto number = [&](size_t index, int64_t low) {
    int64_t value = 0;
    require(CLI::detail::lexical_cast(fields[index], value) && value >= low && value <= int64_t{1} << 30,
            "'{}' given, expected {}", line, case_columns);
    return value;
  };
  const bool tiled = fields[1] == "tiled";
  return {.backward = fields[0] == "backward",
          .method = tiled ? Method::tiled : Method::standard,
          .batch = number(3, 1),
          .seq_len = number(2, 1),
          .num_heads = number(4, 1),
          .head_dim = number(5, 1),
          .dtype = dtypes.at(fields[6]),
          .tile_queries = number(7, tiled ? 1 : 0),
          .tile_keys = number(8, tiled ? 1 : 0)};
}

void run_cases(const std::vector<IoCase>& cases, const AttentionOptions& options) {
  const Tensor other_data = zeros({sweep_elements});
  for (const IoCase& c : cases) {
    run_case(c, options, other_data);
    release_cached_memory();
    fmt::print("{}\n", line_of(c));
    flush_output();
  }
}

std::vector<MeasuredCase> read_profile(const std::filesystem::path& path) {
  std::ifstream in(path);
  try {
    require(in.is_open(), "cannot be read ({})", std::strerror(errno));
    return assign(read_lines(in));
  } catch (const std::exception& error) {
    throw std::runtime_error(fmt::format("--measured: {}: {}", path.string(), error.what()));
  }
}

}  // namespace examples
