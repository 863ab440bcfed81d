// Progress bar, readable numbers and JSON lines.
#include "report.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

namespace examples {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

bool is_terminal(std::FILE* out) {
  const char* term = std::getenv("TERM");
  return isatty(fileno(out)) != 0 && term != nullptr && std::string_view(term) != "dumb";
}

int terminal_columns(std::FILE* out) {
  winsize size{};
  return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string human_count(int64_t value) {
  std::string digits = fmt::format("{}", value);
  const int64_t first = value < 0 ? 1 : 0;
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > first; i -= 3)
    digits.insert(static_cast<size_t>(i), 1, ',');
  return digits;
}

std::string human_rate(double per_second) {
  if (per_second >= 999950) return fmt::format("{:.1f}M", per_second / 1e6);
  if (per_second >= 9999.5) return fmt::format("{:.1f}k", per_second / 1e3);
  return human_count(std::llround(per_second));
}

std::string human_bytes(uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1023.95) break;
    value /= 1024;
    unit = next;
  }
  return fmt::format("{:.1f} {}", value, unit);
}

std::string human_duration(double seconds) {
  const int64_t total = std::llround(std::clamp(seconds, 0.0, 1e9));
  const int64_t hours = total / 3600, minutes = total / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, total % 60);
  return fmt::format("{}:{:02}", minutes, total % 60);
}

std::string human_learning_rate(double value) { return fmt::format("{:.2e}", value); }

std::string progress_bar(const StepReport& report, int64_t total_steps, double seconds_left, int columns) {
  const std::string steps = fmt::format("step {}/{}", human_count(report.step), human_count(total_steps));
  const std::vector<std::string> fields{fmt::format("loss {:.3f}", report.loss),
                                        fmt::format("lr {}", human_learning_rate(report.learning_rate)),
                                        fmt::format("{} tokens/s", human_rate(report.tokens_per_second)),
                                        fmt::format("{} left", human_duration(seconds_left))};
  const size_t width = static_cast<size_t>(std::max(columns, 1));
  std::string tail;
  for (const std::string& field : fields) {
    if (steps.size() + tail.size() + field.size() + 2 > width) break;
    tail += "  " + field;
  }
  const size_t taken = steps.size() + tail.size() + 3;  // a space and two brackets
  constexpr size_t narrowest = 8, widest = 40;
  if (taken + narrowest > width) return (steps + tail).substr(0, width);
  const size_t cells = std::min(width - taken, widest);
  const double part = static_cast<double>(report.step) / static_cast<double>(std::max<int64_t>(total_steps, 1));
  const size_t filled = static_cast<size_t>(std::clamp(part, 0.0, 1.0) * static_cast<double>(cells));
  std::string bar(cells, ' ');
  std::fill_n(bar.begin(), filled, '=');
  if (filled < cells) bar[filled] = '>';
  return fmt::format("{} [{}]{}", steps, bar, tail);
}

Progress::Progress(int64_t total_steps, int64_t line_interval, std::FILE* out)
    : total_steps_(total_steps),
      line_interval_(line_interval),
      out_(out),
      terminal_(is_terminal(out)),
      start_(Clock::now()) {}

Progress::~Progress() { erase(); }

void Progress::step(const StepReport& report) {
  const Clock::time_point now = Clock::now();
  const double seconds_left =
      seconds_between(start_, now) / static_cast<double>(report.step) * static_cast<double>(total_steps_ - report.step);
  if (terminal_) {
    if (drawn_ && report.step < total_steps_ && seconds_between(last_draw_, now) < 0.1) return;
    last_draw_ = now;
    draw(report, seconds_left);
  } else if (report.step == 1 || report.step % line_interval_ == 0 || report.step == total_steps_) {
    fmt::print(out_, "step {:>{}}/{}  loss {:.4f}  lr {}  {} tokens/s  {} left\n", human_count(report.step),
               human_count(total_steps_).size(), human_count(total_steps_), report.loss,
               human_learning_rate(report.learning_rate), human_rate(report.tokens_per_second),
               human_duration(seconds_left));
    std::fflush(out_);
  }
}

void Progress::line(const std::string& text) {
  erase();
  fmt::print(out_, "{}\n", text);
  std::fflush(out_);
}

void Progress::draw(const StepReport& report, double seconds_left) {
  // One column stays free: a full last column makes some terminals wrap.
  fmt::print(out_, "\r\033[K{}", progress_bar(report, total_steps_, seconds_left, terminal_columns(out_) - 1));
  std::fflush(out_);
  drawn_ = true;
}

void Progress::erase() {
  if (!drawn_) return;
  fmt::print(out_, "\r\033[K");
  std::fflush(out_);
  drawn_ = false;
}

MetricsFile::MetricsFile(const std::filesystem::path& path)
    : path_(path.string()), file_(std::fopen(path.c_str(), "w")) {
  if (file_ == nullptr)
    throw std::runtime_error(fmt::format("{}: cannot be written ({})", path_, std::strerror(errno)));
}

MetricsFile::~MetricsFile() { std::fclose(file_); }

void MetricsFile::write(const nlohmann::ordered_json& object) {
  const std::string line = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0)
    throw std::runtime_error(fmt::format("{}: cannot be written ({})", path_, std::strerror(errno)));
}

}  // namespace examples
