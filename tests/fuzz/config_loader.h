// The reader of train_gpt's settings, for the fuzzer and for the replay of its corpus.
#pragma once

#include <stdexcept>
#include <typeinfo>

#include "fuzz/fuzz_one.h"
#include "train_options.h"

namespace strobe::testing {

inline void fuzz_config(std::string_view bytes) {
  examples::TrainOptions options;
  try {
    options = load_in_bounds(bytes.size(), {.in_one = 4, .in_all = 128, .for_any = 64 << 10},
                             [&] { return examples::from_toml(std::string(bytes), "config.toml"); });
  } catch (const std::runtime_error& error) {
    if (typeid(error) != typeid(std::runtime_error)) throw;  // a package's, that should have become a plain one
    throw Error(error.what());                               // how the library says that it refuses a file
  }
  const std::string written = examples::to_toml(options);
  std::string again;
  try {
    again = examples::to_toml(examples::from_toml(written, "written.toml"));
  } catch (const std::runtime_error& error) {
    throw Finding(error.what());
  }
  expect(again == written, "other settings after writing and reading:\n" + written + again);
}

inline constexpr Loader config_loader{"config", fuzz_config};

}  // namespace strobe::testing
