// What a run tells its user: a progress bar or plain lines, numbers people can read, and one JSON object per line in a
// file.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace examples {

std::string human_count(int64_t value);         // 1234567  -> "1,234,567"
std::string human_rate(double per_second);      // 41234.5  -> "41.2k"
std::string human_bytes(uint64_t bytes);        // 12897484 -> "12.3 MiB"
std::string human_duration(double seconds);     // 83.4     -> "1:23", from one hour on "1:02:03"
std::string human_learning_rate(double value);  // 0.0006   -> "6.00e-04"

// Text as it may go to a terminal: control characters (except newline and tab) and stray bytes become '?'.
std::string printable(std::string_view text);

struct StepReport {
  int64_t step = 0;  // steps done, those before this process included
  double loss = 0;
  double learning_rate = 0;
  double tokens_per_second = 0;
};

// Shows steps as they finish. On a terminal: one line, redrawn at most ten times a second and fitted to the window.
// Elsewhere: a plain line after the first step, every `line_interval` steps or more, and after the last. `first_step`
// steps were done before.
class Progress {
 public:
  Progress(int64_t first_step, int64_t total_steps, int64_t line_interval, std::FILE* out = stdout);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepReport& report);
  void line(const std::string& text);  // a line that stays, above the bar

 private:
  void draw(const StepReport& report, double seconds_left);
  void erase();
  void print(const std::string& text);  // a failure shows in ferror(out): no step ends halfway for it

  int64_t first_step_;
  int64_t total_steps_;
  int64_t line_interval_;
  std::FILE* out_;
  bool terminal_;
  bool drawn_ = false;
  int64_t last_line_ = -1;  // the step of the last plain line
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

// The bar of `report`, at most `columns` wide: fields that do not fit are left out, from the right.
std::string progress_bar(const StepReport& report, int64_t total_steps, double seconds_left, int columns);

// metrics.jsonl: one JSON object per line, in the file as soon as it is written, so another program can follow the run.
// All throw std::runtime_error when the file cannot be read or written.
class MetricsFile {
 public:
  // Goes on after the lines that are there already, of which only those stay that `keep` accepts.
  MetricsFile(const std::filesystem::path& path, const std::function<bool(const nlohmann::ordered_json&)>& keep);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  void write(const nlohmann::ordered_json& object);
  void sync();                 // to the disk
  void require_there() const;  // throws when another program has removed it

 private:
  [[noreturn]] void fail() const;

  std::string path_;
  std::FILE* file_;
};

// Shows f the lines of such a file that are whole; none when there is no such file.
void for_each_metric(const std::filesystem::path& path, const std::function<void(const nlohmann::ordered_json&)>& f);

}  // namespace examples
