// Progress bar, readable numbers and JSON lines.
#include "report.h"

#include <fmt/format.h>
#include <strobe/strobe.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "option_checks.h"

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

// The length of the UTF-8 sequence that `text` begins with (RFC 3629), or 1 where it does not begin with one.
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t length = first < 0xc2 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 1;
  if (length > text.size()) return 1;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 1;
  // Overlong forms, surrogates and code points above U+10FFFF.
  const bool invalid = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) ||
                       (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) >= 0x90);
  return invalid ? 1 : length;
}

std::string line_of(const nlohmann::ordered_json& object) {
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
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

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::string_view character = text.substr(0, sequence_length(text));
    text.remove_prefix(character.size());
    const unsigned char first = static_cast<unsigned char>(character[0]);
    const bool c1_control = first == 0xc2 && static_cast<unsigned char>(character.back()) < 0xa0;
    const bool shown =
        character.size() > 1 ? !c1_control : first == '\n' || first == '\t' || (first >= 0x20 && first < 0x7f);
    result += shown ? character : std::string_view("?");
  }
  return result;
}

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

Progress::Progress(int64_t first_step, int64_t total_steps, int64_t line_interval, std::FILE* out)
    : first_step_(first_step),
      total_steps_(total_steps),
      line_interval_(line_interval),
      out_(out),
      terminal_(is_terminal(out)),
      start_(Clock::now()) {}

Progress::~Progress() { erase(); }

void Progress::step(const StepReport& report) {
  const Clock::time_point now = Clock::now();
  const double seconds_left = seconds_between(start_, now) / static_cast<double>(report.step - first_step_) *
                              static_cast<double>(total_steps_ - report.step);
  if (terminal_) {
    if (drawn_ && report.step < total_steps_ && seconds_between(last_draw_, now) < 0.1) return;
    last_draw_ = now;
    draw(report, seconds_left);
  } else if (last_line_ < 0 || report.step / line_interval_ > last_line_ / line_interval_ ||
             report.step == total_steps_) {
    last_line_ = report.step;
    print(fmt::format("step {:>{}}/{}  loss {:.4f}  lr {}  {} tokens/s  {} left\n", human_count(report.step),
                      human_count(total_steps_).size(), human_count(total_steps_), report.loss,
                      human_learning_rate(report.learning_rate), human_rate(report.tokens_per_second),
                      human_duration(seconds_left)));
  }
}

void Progress::line(const std::string& text) {
  erase();
  print(text + "\n");
}

void Progress::draw(const StepReport& report, double seconds_left) {
  // One column stays free: a full last column makes some terminals wrap.
  print("\r\033[K" + progress_bar(report, total_steps_, seconds_left, terminal_columns(out_) - 1));
  drawn_ = true;
}

void Progress::erase() {
  if (!drawn_) return;
  print("\r\033[K");
  drawn_ = false;
}

void Progress::print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), out_);
  std::fflush(out_);
}

MetricsFile::MetricsFile(const std::filesystem::path& path,
                         const std::function<bool(const nlohmann::ordered_json&)>& keep)
    : path_(path.string()), file_(nullptr) {
  std::string kept;
  for_each_metric(path, [&](const nlohmann::ordered_json& line) {
    if (keep(line)) kept += line_of(line);
  });
  strobe::write_file_atomically(path_, {{kept.data(), kept.size()}});
  file_ = std::fopen(path.c_str(), "a");
  if (file_ == nullptr) fail();
}

MetricsFile::~MetricsFile() { std::fclose(file_); }

void MetricsFile::write(const nlohmann::ordered_json& object) {
  const std::string line = line_of(object);
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0) fail();
}

void MetricsFile::sync() {
  if (fsync(fileno(file_)) != 0) fail();
}

void MetricsFile::require_there() const {
  struct stat status;
  if (fstat(fileno(file_), &status) != 0) fail();
  require(status.st_nlink > 0, "{}: was removed while it was written", path_);
}

void MetricsFile::fail() const {
  throw std::runtime_error(fmt::format("{}: cannot be written ({})", path_, std::strerror(errno)));
}

void for_each_metric(const std::filesystem::path& path, const std::function<void(const nlohmann::ordered_json&)>& f) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const nlohmann::ordered_json object = nlohmann::ordered_json::parse(line, nullptr, false);
    if (object.is_object()) f(object);
  }
}

}  // namespace examples
