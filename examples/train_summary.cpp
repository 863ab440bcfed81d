// Sums up metrics.jsonl, and lays runs side by side.
#include "train_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "report.h"

namespace examples {

Summary summarize(const std::filesystem::path& metrics, int64_t tokens_per_step) {
  Summary summary;
  std::vector<double> rates;
  for_each_metric(metrics, [&](const nlohmann::ordered_json& line) {
    const auto number = [&](const char* key) {
      return line.contains(key) && line[key].is_number() ? line[key].get<double>() : NAN;
    };
    const int64_t step = line.value("step", int64_t{0});
    if (line.contains("validation_loss")) {
      summary.validation.push_back({step, number("validation_loss")});
      if (line.contains("bits_per_byte")) summary.bits_per_byte = number("bits_per_byte");
    } else if (line.contains("loss")) {
      summary.training.push_back({step, number("loss")});
      rates.push_back(number("tokens_per_second"));
      summary.seconds += static_cast<double>(tokens_per_step) / rates.back();
      summary.bytes_peak = std::max(summary.bytes_peak, line.value("bytes_peak", uint64_t{0}));
    }
  });
  if (!rates.empty()) {
    const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
    std::nth_element(rates.begin(), middle, rates.end());
    summary.tokens_per_second = *middle;
  }
  return summary;
}

std::string comparison_table(const std::vector<Compared>& runs) {
  std::string table;
  const auto row = [&](const std::string& name, const std::function<std::string(const Compared&)>& cell) {
    table += fmt::format("{:<18}", name);
    for (const Compared& run : runs) table += fmt::format("{:>16}", cell(run));
    table += "\n";
  };
  row("", [](const Compared& run) { return run.name; });
  row("training loss", [](const Compared& run) {
    return run.summary.training.empty() ? "none" : fmt::format("{:.5f}", run.summary.training.back().loss);
  });
  row("validation loss", [](const Compared& run) { return fmt::format("{:.5f}", run.summary.last_loss()); });
  row("time in steps", [](const Compared& run) { return fmt::format("{:.1f} s", run.summary.seconds); });
  row("tokens/s (median)", [](const Compared& run) { return human_rate(run.summary.tokens_per_second); });
  row("memory at most", [](const Compared& run) { return human_bytes(run.summary.bytes_peak); });
  double apart = 0;
  const std::vector<CurvePoint>& first = runs.front().summary.training;
  for (const Compared& run : runs)
    for (size_t i = 0; i < std::min(first.size(), run.summary.training.size()); ++i)
      apart = std::max(apart, std::abs(run.summary.training[i].loss - first[i].loss));
  return table + fmt::format("training losses of one step differ by at most {:.2g}\n", apart);
}

}  // namespace examples
