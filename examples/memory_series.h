// What attention_memory measures: four forward and backward passes, the memory of each by formula and as counted by
// the allocator.
#pragma once

#include <strobe/strobe.h>

#include <functional>
#include <string>
#include <vector>

namespace examples {

struct SweepShape {
  int64_t batch = 1;
  int64_t num_heads = 1;
  int64_t head_dim = 64;
  int64_t embed_dim = 64;  // of the GPT blocks, a multiple of head_dim
  int64_t num_blocks = 4;
  strobe::DType dtype = strobe::DType::f32;
  bool causal = false;  // of attention alone; GPT blocks always are
};

// Bytes of one forward and backward pass. Double, because a size that is only asked about may exceed 64 bits.
struct PassBytes {
  double inputs = 0;   // before the pass; with GPT blocks also the parameters and the gradients they add to
  double results = 0;  // that any implementation returns: the output, and the gradients unless they are inputs
  double extra = 0;    // at most beyond these two
  double total() const { return inputs + results + extra; }
};

struct Measurement {
  int64_t seq_len = 0;
  PassBytes bytes;
  double kept = 0;              // beyond inputs, between forward and backward
  double attention_peak = 0;    // under the allocator's tag "attention"
  double activations_peak = 0;  // and "activations"
  double seconds = 0;
  double peak() const { return bytes.results + bytes.extra; }
};

struct Pass {
  std::function<strobe::Tensor()> forward;
  strobe::Tensor dout;
};

struct Series {
  std::string name;         // as --series and the CSV have it
  std::string label;        // as a reader calls it
  std::string explanation;  // of the formula's extra memory
  std::function<PassBytes(int64_t seq_len)> formula;
  std::function<Pass(int64_t seq_len)> prepare;  // makes the inputs
};

// "tiled", "standard", "blocks", "recomputed"
std::vector<Series> all_series(const SweepShape& shape);

// Runs forward and backward once, and short passes up to five times, of which the fastest counts.
Measurement measure(const Series& series, int64_t seq_len);

// The slope of log(extra) over log(seq_len) by least squares: memory grows with this power of seq_len. Not a number
// for fewer than two points.
double fitted_exponent(const std::vector<Measurement>& points);

}  // namespace examples
