// Passes run for Nsight Compute (ncu) to count their bytes, and its counts read back.
#pragma once

#include <filesystem>
#include <vector>

#include "io_model.h"

namespace examples {

// A case as a line of CSV, and back. Throws std::runtime_error on a line that is none.
inline constexpr const char* case_columns =
    "direction,attention,seq_len,batch,num_heads,head_dim,dtype,tile_queries,tile_keys";
std::string line_of(const IoCase& c);
IoCase case_of(const std::string& line);

// Runs each case once and prints its line. Between cases the L2 is filled with other data, so that each begins with its
// inputs, and ends with its results, in device memory.
void run_cases(const std::vector<IoCase>& cases, const strobe::AttentionOptions& options);

struct MeasuredCase {
  IoCase what;
  IoBytes bytes;
};

// What ncu printed about run_cases. Throws std::runtime_error, naming the file and what is missing there.
std::vector<MeasuredCase> read_profile(const std::filesystem::path& path);

}  // namespace examples
