// How the memory of attention grows with seq_len: tiled attention, standard attention, and a stack of GPT blocks with
// and without activation recomputation, each forward and backward. Prints a table and what it shows, on request also
// CSV and a chart.
//
// What is counted: bytes of live tensors as the allocator sees them. `inputs` are there before the pass; `results` are
// what any implementation must return, the output and the gradients; `extra` is the most held beyond these two during
// the pass, and is what the exponents and the chart are about. `kept` is held between forward and backward. GPT blocks
// add to gradients that exist already, as from the second micro-batch on; these count as inputs.
//
// CSV: one row per series and seq_len, bytes as integers, fields of sizes that were not run empty:
//   series,seq_len,batch,num_heads,head_dim,embed_dim,num_blocks,dtype,causal,threads   the case; on a GPU 0 threads
//   input_bytes,result_bytes,kept_bytes,peak_bytes,extra_bytes   peak = result + extra: the most beyond the inputs
//   attention_peak_bytes,activations_peak_bytes                  the most under each tag of the allocator
//   formula_extra_bytes,needed_bytes    extra by formula; inputs + results + extra as predicted from smaller sizes
//   ms                                  forward and backward
#include <cmath>
#include <csignal>
#include <cstdio>
#include <exception>

#include "bytes_chart.h"
#include "memory_options.h"
#include "option_checks.h"
#include "report.h"

using namespace examples;

namespace {

std::string readable(double bytes) {
  constexpr double countable = 0x1p60;
  return bytes < countable ? human_bytes(static_cast<uint64_t>(std::llround(bytes))) : fmt::format("{:.1e} B", bytes);
}

struct Sweep {
  Series series;
  std::vector<Measurement> points;
  std::vector<double> needed;  // for each of the requested sizes, predicted when the ones before it were known
  std::string stop;            // why the next size was not run; empty when all were

  bool ran(size_t index) const { return index < points.size(); }
};

std::string readable_seconds(double seconds) {
  if (seconds < 999.5) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 1e15) return fmt::format("{:.1e} s", seconds);
  const double unit = std::pow(10, std::floor(std::log10(seconds)) - 2);  // three digits count
  return human_count(std::llround(std::round(seconds / unit) * unit)) + " s";
}

// Bytes in all: by formula, and what the longest size so far took beyond its formula.
double predict(const Sweep& sweep, int64_t seq_len) {
  double bytes = sweep.series.formula(seq_len).total();
  if (sweep.points.empty()) return bytes;
  const Measurement& last = sweep.points.back();
  const double beyond = last.bytes.total() - sweep.series.formula(last.seq_len).total();
  return bytes + std::max(beyond, 0.0);
}

// At most: no pass grows faster than with the square of seq_len.
double predict_seconds(const Sweep& sweep, int64_t seq_len) {
  if (sweep.points.empty()) return 0;
  const Measurement& last = sweep.points.back();
  return last.seconds * std::pow(static_cast<double>(seq_len) / static_cast<double>(last.seq_len), 2);
}

void print_row(const Series& series, const Measurement& m) {
  const double formula = series.formula(m.seq_len).extra;
  fmt::print("{:<26}{:>9}{:>12}{:>12}{:>12}{:>12}{:>10.3f}{:>12.1f}\n", series.label, human_count(m.seq_len),
             readable(m.bytes.inputs), readable(m.bytes.results), readable(m.kept), readable(m.bytes.extra),
             m.bytes.extra / formula, 1e3 * m.seconds);
  flush_output();
}

Sweep run(const Series& series, const MemoryOptions& o) {
  Sweep sweep{series, {}, {}, {}};
  for (const int64_t seq_len : o.seq_lens) {
    const double needed = predict(sweep, seq_len), seconds = predict_seconds(sweep, seq_len);
    sweep.needed.push_back(needed);
    if (!sweep.stop.empty()) continue;
    if (needed > static_cast<double>(o.max_memory)) {
      sweep.stop = fmt::format("{} would need {}, more than --max-memory {}", human_count(seq_len), readable(needed),
                               readable(static_cast<double>(o.max_memory)));
    } else if (seconds > o.max_seconds) {
      sweep.stop = fmt::format("{} would need {} and up to {}, more than --max-seconds {}", human_count(seq_len),
                               readable(needed), readable_seconds(seconds), o.max_seconds);
    } else {
      try {
        sweep.points.push_back(measure(series, seq_len));
        print_row(series, sweep.points.back());
      } catch (const strobe::OutOfMemory& error) {
        strobe::release_cached_memory();
        sweep.stop = fmt::format("{} did not fit ({})", human_count(seq_len), error.what());
      }
    }
  }
  return sweep;
}

// Whoever asks for what cannot run at all hears so at once.
void require_one_point(const std::vector<Series>& series, const MemoryOptions& o) {
  const int64_t seq_len = o.seq_lens.front();
  const auto least = std::min_element(series.begin(), series.end(), [&](const Series& a, const Series& b) {
    return a.formula(seq_len).total() < b.formula(seq_len).total();
  });
  const double bytes = least->formula(seq_len).total();
  require(bytes <= static_cast<double>(o.max_memory),
          "--seq-lens: {} given, for which even {} would need {}, expected at most --max-memory {}",
          human_count(seq_len), least->label, readable(bytes), readable(static_cast<double>(o.max_memory)));
}

std::string describe(const MemoryOptions& o) {
  const SweepShape& s = o.shape;
  const std::string where = o.device.type == strobe::DeviceType::cuda
                                ? "one GPU"
                                : fmt::format("{} thread{}", o.threads, o.threads == 1 ? "" : "s");
  return fmt::format("batch {}, {} head{} of {}, {}{}, {}; GPT blocks {} wide", s.batch, s.num_heads,
                     s.num_heads == 1 ? "" : "s", s.head_dim, strobe::name_of(s.dtype), s.causal ? ", causal" : "",
                     where, s.embed_dim);
}

std::string capitalized(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

// "grew 130-fold, from 2.0 MiB to 260.0 MiB"
std::string describe_growth(double first, double last) {
  const double growth = last / first;
  if (std::abs(growth - 1) < 0.005) return "stayed at " + readable(last);
  const std::string by = growth < 1.5
                             ? fmt::format("{} by {:.0f} %", growth < 1 ? "shrank" : "grew", 100 * std::abs(growth - 1))
                             : fmt::format("grew {}-fold", growth < 10 ? fmt::format("{:.1f}", growth)
                                                                       : human_count(std::llround(growth)));
  return fmt::format("{}, from {} to {}", by, readable(first), readable(last));
}

// "Tiled attention: from seq_len 512 to 16,384 extra memory grew 1.9-fold, from ... to ... (exponent 0.13)."
void print_sentence(const Sweep& sweep) {
  const std::vector<Measurement>& points = sweep.points;
  std::string text = capitalized(sweep.series.label) + ": ";
  if (points.empty()) {
    text += "nothing measured";
  } else if (points.size() == 1) {
    text += fmt::format("{} of extra memory at seq_len {}", readable(points[0].bytes.extra),
                        human_count(points[0].seq_len));
  } else {
    const Measurement &first = points.front(), &last = points.back();
    text += fmt::format("from seq_len {} to {} extra memory {} (exponent {:.2f})", human_count(first.seq_len),
                        human_count(last.seq_len), describe_growth(first.bytes.extra, last.bytes.extra),
                        fitted_exponent(points));
  }
  if (!sweep.stop.empty()) text += "; " + sweep.stop;
  fmt::print("{}.\n", text);
}

const Sweep* find(const std::vector<Sweep>& sweeps, const std::string& name) {
  for (const Sweep& sweep : sweeps)
    if (sweep.series.name == name) return &sweep;
  return nullptr;
}

// The two comparisons the experiment is about, each at the longest size that its cheaper side ran.
void print_comparison(const std::vector<Sweep>& sweeps) {
  const auto compare = [&](const char* cheaper_name, const char* dearer_name) {
    const Sweep *cheaper = find(sweeps, cheaper_name), *dearer = find(sweeps, dearer_name);
    if (cheaper == nullptr || dearer == nullptr || cheaper->points.empty()) return;
    const Measurement& last = cheaper->points.back();
    const bool ran = dearer->ran(cheaper->points.size() - 1);
    const double bytes =
        ran ? dearer->points[cheaper->points.size() - 1].bytes.extra : dearer->series.formula(last.seq_len).extra;
    fmt::print("At seq_len {}, beyond inputs and results: {} {} {}, {} {}.\n", human_count(last.seq_len),
               dearer->series.label, ran ? "needed" : "would need", readable(bytes), cheaper->series.label,
               readable(last.bytes.extra));
  };
  compare("tiled", "standard");
  compare("recomputed", "blocks");
}

std::string csv_of(const std::vector<Sweep>& sweeps, const MemoryOptions& o) {
  std::string csv =
      "series,seq_len,batch,num_heads,head_dim,embed_dim,num_blocks,dtype,causal,threads,input_bytes,result_bytes,"
      "kept_bytes,peak_bytes,extra_bytes,attention_peak_bytes,activations_peak_bytes,formula_extra_bytes,needed_bytes,"
      "ms\n";
  const SweepShape& s = o.shape;
  for (const Sweep& sweep : sweeps) {
    for (size_t i = 0; i < o.seq_lens.size(); ++i) {
      csv += fmt::format("{},{},{},{},{},{},{},{},{:d},{},", sweep.series.name, o.seq_lens[i], s.batch, s.num_heads,
                         s.head_dim, s.embed_dim, s.num_blocks, strobe::name_of(s.dtype), s.causal, o.threads);
      const double formula = sweep.series.formula(o.seq_lens[i]).extra;
      if (sweep.ran(i)) {
        const Measurement& m = sweep.points[i];
        csv += fmt::format("{:.0f},{:.0f},{:.0f},{:.0f},{:.0f},{:.0f},{:.0f},{:.0f},{:.0f},{:.3f}\n", m.bytes.inputs,
                           m.bytes.results, m.kept, m.peak(), m.bytes.extra, m.attention_peak, m.activations_peak,
                           formula, sweep.needed[i], 1e3 * m.seconds);
      } else {
        csv += fmt::format(",,,,,,,{:.0f},{:.0f},\n", formula, sweep.needed[i]);
      }
    }
  }
  return csv;
}

std::string svg_of(const std::vector<Sweep>& sweeps, const MemoryOptions& o) {
  std::vector<ByteCurve> curves;
  for (const Sweep& sweep : sweeps) {
    ByteCurve& curve = curves.emplace_back();
    curve.label = sweep.series.label;
    if (sweep.points.empty()) curve.label += ": not run";
    if (sweep.points.size() > 1) curve.label += fmt::format(": exponent {:.2f}", fitted_exponent(sweep.points));
    for (const Measurement& m : sweep.points)
      curve.measured.emplace_back(static_cast<double>(m.seq_len), m.bytes.extra);
    for (size_t i = 0; i < o.seq_lens.size(); ++i) {
      const double seq_len = static_cast<double>(o.seq_lens[i]);
      curve.formula.emplace_back(seq_len, sweep.series.formula(o.seq_lens[i]).extra);
      if (!sweep.ran(i)) curve.predicted.push_back(curve.formula.back());
    }
  }
  return bytes_chart_svg({.title = "Memory of forward and backward beyond inputs and results",
                          .subtitle = describe(o),
                          .x = "seq_len",
                          .y = "extra memory",
                          .marks = "dots: measured; dashed: formula; rings: not run"},
                         curves);
}

void write_text(const std::string& path, const std::string& text) {
  strobe::write_file_atomically(path, {{text.data(), text.size()}});
  fmt::print("{}\n", path);
}

void run_all(MemoryOptions o) {
  const strobe::DeviceGuard device(o.device);
  if (o.threads > 0) strobe::set_num_threads(static_cast<int>(o.threads));
  o.threads = o.device.type == strobe::DeviceType::cuda ? 0 : strobe::num_threads();
  strobe::seed(1);
  std::vector<Series> chosen;
  for (const Series& series : all_series(o.shape))
    if (std::find(o.series.begin(), o.series.end(), series.name) != o.series.end()) chosen.push_back(series);
  require_one_point(chosen, o);
  strobe::set_memory_limit(o.max_memory);  // for what the predictions miss

  fmt::print("Forward and backward, {}.\nextra: the most held beyond inputs and results (output and gradients)\n\n",
             describe(o));
  fmt::print("{:<26}{:>9}{:>12}{:>12}{:>12}{:>12}{:>10}{:>12}\n", "", "seq_len", "inputs", "results", "kept", "extra",
             "/ formula", "ms");
  std::vector<Sweep> sweeps;
  for (const Series& series : chosen) sweeps.push_back(run(series, o));
  fmt::print("\nFormulas of extra memory:\n");
  for (const Series& series : chosen) fmt::print("  {}: {}\n", series.label, series.explanation);
  fmt::print("\n");
  for (const Sweep& sweep : sweeps) print_sentence(sweep);
  print_comparison(sweeps);
  if (!o.csv.empty()) write_text(o.csv, csv_of(sweeps, o));
  if (!o.svg.empty()) write_text(o.svg, svg_of(sweeps, o));
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the size limit is an error like a full disk
  try {
    const std::optional<MemoryOptions> options = parse_memory_options(argc, argv);
    if (options) run_all(*options);
    flush_output();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_memory: %s\n", error.what());
    return 1;
  }
}
