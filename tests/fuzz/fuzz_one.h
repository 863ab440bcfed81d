// What is done with the bytes of a file, by the fuzzer and by the replay of its corpus: they are loaded, in bounds.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "fuzz/memory_meter.h"
#include "strobe/core/memory.h"

namespace strobe::testing {

// Something that no file may bring about. Not an Error, which is how a loader refuses a file.
struct Finding : std::logic_error {
  using std::logic_error::logic_error;
};

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw Finding(what);
}

// What loading may take, each as a multiple of the file's size, plus what any file may take.
struct Bounds {
  size_t in_one = 4;  // allocation
  size_t in_all;      // of them that live together: many are small
  size_t for_any;
};

// The result of load().
template <class Load>
auto load_in_bounds(size_t file_bytes, Bounds bounds, Load load) {
  const MemoryMeter meter;
  const auto check = [&] {
    const size_t largest = meter.largest(), peak = meter.peak();
    expect(
        largest <= bounds.in_one * file_bytes + bounds.for_any && peak <= bounds.in_all * file_bytes + bounds.for_any,
        concat_message("a file of ", file_bytes, " bytes took ", peak, " bytes of memory, ", largest, " in one"));
  };
  try {
    auto result = load();
    check();
    return result;
  } catch (const OutOfMemory& error) {
    throw Finding(error.what());
  } catch (const std::runtime_error&) {
    check();
    throw;
  }
}

struct Loader {
  const char* name;  // of its folder in the corpus
  void (*fuzz)(std::string_view bytes);
};

// Whether the bytes could be loaded. What is wrong with a loader, it throws: Finding, or whatever else is not Error.
inline bool fuzz_one(const Loader& loader, std::string_view bytes) {
  try {
    loader.fuzz(bytes);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace strobe::testing
