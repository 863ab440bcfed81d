// The command line of attention_speed.
#pragma once

#include <strobe/strobe.h>

#include <optional>
#include <string>
#include <vector>

namespace examples {

struct SpeedOptions {
  strobe::Device device;
  std::vector<int64_t> seq_lens;  // rows of the table, in this order
  strobe::DType dtype = strobe::DType::f32;
  std::string kernel = "auto";
  strobe::AttentionKernel path = strobe::AttentionKernel::auto_select;
  bool causal = false;
  int repeats = 0;
  int64_t standard_max = 0;  // longest seq_len for standard attention

  // On the CPU
  int64_t batch = 1;
  int64_t num_heads = 8;
  int64_t head_dim = 64;
  int threads = 0;

  // On a GPU
  std::vector<int64_t> head_dims{64, 128};
  std::vector<int64_t> packed;  // lengths of the sequences of the one row there is instead of seq_lens
  int64_t group = 1;            // query heads for each key/value head
  int64_t window = -1;
  bool any_order = false;
  int64_t rest_ms = 200;
};

// Reads the command line and checks, naming the option, all that could otherwise fail after minutes of measuring.
// Nothing when it asked for help, which has then been printed. Throws std::runtime_error with one line.
std::optional<SpeedOptions> parse_speed_options(int argc, const char* const* argv);

// The two tables, printed row by row.
void measure_on_cpu(const SpeedOptions& options);
void measure_on_gpu(const SpeedOptions& options);

}  // namespace examples
