// What a run tells its user: a progress bar or plain lines, numbers people can read, and one JSON object per line in a
// file.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace examples {

std::string human_count(int64_t value);         // 1234567  -> "1,234,567"
std::string human_rate(double per_second);      // 41234.5  -> "41.2k"
std::string human_bytes(uint64_t bytes);        // 12897484 -> "12.3 MiB"
std::string human_duration(double seconds);     // 83.4     -> "1:23", from one hour on "1:02:03"
std::string human_learning_rate(double value);  // 0.0006   -> "6.00e-04"

struct StepReport {
  int64_t step = 0;  // steps done
  double loss = 0;
  double learning_rate = 0;
  double tokens_per_second = 0;
};

// Shows steps as they finish. On a terminal: one line, redrawn at most ten times a second and fitted to the window.
// Elsewhere: a plain line after the first step, every `line_interval` steps, and after the last.
class Progress {
 public:
  Progress(int64_t total_steps, int64_t line_interval, std::FILE* out = stdout);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepReport& report);
  void line(const std::string& text);  // a line that stays, above the bar

 private:
  void draw(const StepReport& report, double seconds_left);
  void erase();

  int64_t total_steps_;
  int64_t line_interval_;
  std::FILE* out_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

// The bar of `report`, at most `columns` wide: fields that do not fit are left out, from the right.
std::string progress_bar(const StepReport& report, int64_t total_steps, double seconds_left, int columns);

// metrics.jsonl: one JSON object per line, on disk as soon as it is written, so another program can follow the run.
class MetricsFile {
 public:
  explicit MetricsFile(const std::filesystem::path& path);  // throws std::runtime_error when the file cannot be made
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  void write(const nlohmann::ordered_json& object);  // throws std::runtime_error when the disk is full

 private:
  std::string path_;
  std::FILE* file_;
};

}  // namespace examples
