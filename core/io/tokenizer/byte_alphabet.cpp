#include "strobe/core/io/tokenizer/byte_alphabet.h"

#include "strobe/core/io/tokenizer.h"

namespace strobe {
namespace {

struct Alphabet {
  std::array<uint16_t, 256> code_point;  // of a byte
  std::array<int16_t, 256 + 68> byte;    // of a code point, or -1
  std::array<unsigned char, 256> order;

  Alphabet() {
    byte.fill(-1);
    uint16_t next = 256;
    for (uint16_t b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b != 0xad);
      code_point[b] = printable ? b : next++;
      byte[code_point[b]] = static_cast<int16_t>(b);
    }
    size_t count = 0;
    for (const int16_t b : byte) {
      if (b >= 0) order[count++] = static_cast<unsigned char>(b);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet instance;
  return instance;
}

}  // namespace

std::string to_byte_alphabet(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    const uint16_t code_point = alphabet().code_point[static_cast<unsigned char>(byte)];
    if (code_point < 0x80) {
      text += static_cast<char>(code_point);
    } else {
      text += static_cast<char>(0xc0 | code_point >> 6);
      text += static_cast<char>(0x80 | (code_point & 0x3f));
    }
  }
  return text;
}

std::optional<std::string> from_byte_alphabet(std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const std::string_view character = first_character(text);
    const auto first = static_cast<unsigned char>(character[0]);
    if (character.size() > 2 || (character.size() == 1 && first >= 0x80)) return std::nullopt;
    const size_t code_point = character.size() == 1 ? first : (first & 0x1fu) << 6 | (character[1] & 0x3fu);
    if (code_point >= alphabet().byte.size() || alphabet().byte[code_point] < 0) return std::nullopt;
    bytes += static_cast<char>(alphabet().byte[code_point]);
    text.remove_prefix(character.size());
  }
  return bytes;
}

const std::array<unsigned char, 256>& bytes_in_alphabet_order() { return alphabet().order; }

}  // namespace strobe
