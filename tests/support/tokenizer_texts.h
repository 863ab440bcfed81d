// Texts for the tests of tokenizers: reference files and random bytes.
#pragma once

#include <cstdlib>
#include <random>
#include <string>

namespace strobe::testing {

// The path of a file in tests/data/tokenizer/, which make_tokenizer_reference.py wrote. The environment says where
// tests/data is when that is no longer where it was built.
inline std::string tokenizer_data(const std::string& name) {
  const char* moved = std::getenv("STROBE_TEST_DATA");
  return std::string(moved != nullptr ? moved : STROBE_TEST_DATA).append("/tokenizer/").append(name);
}

class RandomText {
 public:
  explicit RandomText(uint64_t seed) : engine_(seed) {}

  size_t below(size_t bound) { return engine_() % bound; }

  // Half of the strings are any bytes; the others have the bytes of a few characters, so that UTF-8 often holds.
  std::string bytes(size_t size) {
    static constexpr char likely[] = "aab  't\r\n1\xc3\xa9\xe2\x82\xac\xf0\x9f\x91\xa9\xe2\x80\x8d";
    const bool any = below(2) == 0;
    std::string result;
    for (size_t i = 0; i < size; ++i) {
      result += any ? static_cast<char>(engine_()) : likely[below(sizeof(likely) - 1)];
    }
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace strobe::testing
