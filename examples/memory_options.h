// The command line of attention_memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "memory_series.h"

namespace examples {

struct MemoryOptions {
  std::vector<int64_t> seq_lens{512, 1024, 2048, 4096, 8192, 16384};  // rising once parsed
  std::vector<std::string> series{"tiled", "standard", "blocks", "recomputed"};
  SweepShape shape;
  strobe::Device device;
  int64_t threads = 0;      // of the CPU; 0: all
  uint64_t max_memory = 0;  // bytes
  double max_seconds = 60;  // that one pass may be expected to take
  std::string csv, svg;     // empty: none
};

// Reads and checks everything that can be checked without running; that the files can be written is tried out. Nothing
// when the command line asked for help, which has then been printed. Throws std::runtime_error with one line: the
// option, what was given, what was expected.
std::optional<MemoryOptions> parse_memory_options(int argc, const char* const* argv);

}  // namespace examples
