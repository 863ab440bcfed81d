// The files that fuzzing left in data/fuzz/<loader>/, for the tests.
#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "fuzz/fuzz_one.h"
#include "support/temporary_folder.h"

namespace strobe::testing {

// Hands each file of the loader's folder to it: those called valid* load, all others are refused, and there are both.
inline void replay_corpus(const Loader& loader) {
  const char* moved = std::getenv("STROBE_TEST_DATA");
  const std::filesystem::path folder =
      std::filesystem::path(moved != nullptr ? moved : STROBE_TEST_DATA) / "fuzz" / loader.name;
  int num_valid = 0, num_refused = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string contents = read_file(entry.path().string());
    const std::vector<char> bytes(contents.begin(), contents.end());  // nothing behind them
    CAPTURE(entry.path().string());
    bool loaded = false;
    CHECK_NOTHROW(loaded = fuzz_one(loader, {bytes.data(), bytes.size()}));
    CHECK(loaded == entry.path().filename().string().starts_with("valid"));
    (loaded ? num_valid : num_refused) += 1;
  }
  CAPTURE(loader.name);
  CHECK(num_valid > 0);
  CHECK(num_refused > 0);
}

}  // namespace strobe::testing
