#include "strobe/core/io/tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

#include "strobe/core/io/tokenizer.h"

namespace strobe {

std::string_view first_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t length = first < 0xc2 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 1;
  if (length > text.size()) return text.substr(0, 1);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return text.substr(0, 1);
  }
  // Overlong forms, surrogates and code points above U+10FFFF are not UTF-8.
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) || (first == 0xf0 && byte(1) < 0x90) ||
      (first == 0xf4 && byte(1) >= 0x90)) {
    return text.substr(0, 1);
  }
  return text.substr(0, length);
}

size_t valid_utf8_length(std::string_view text) {
  size_t position = 0;
  while (position < text.size()) {
    uint64_t eight_bytes;
    if (text.size() - position >= sizeof(eight_bytes)) {
      std::memcpy(&eight_bytes, text.data() + position, sizeof(eight_bytes));
      if ((eight_bytes & 0x8080808080808080) == 0) {  // all ASCII
        position += sizeof(eight_bytes);
        continue;
      }
    }
    const std::string_view character = first_character(text.substr(position));
    if (character.size() == 1 && static_cast<unsigned char>(character[0]) >= 0x80) break;
    position += character.size();
  }
  return position;
}

std::string in_quotes(std::string_view bytes) {
  constexpr size_t longest = 40;
  constexpr char digits[] = "0123456789abcdef";
  std::string result = "'";
  const std::string_view all = bytes;
  while (!bytes.empty() && all.size() - bytes.size() < longest) {
    const std::string_view character = first_character(bytes);
    bytes.remove_prefix(character.size());
    const auto first = static_cast<unsigned char>(character[0]);
    const bool c1_control = first == 0xc2 && static_cast<unsigned char>(character.back()) < 0xa0;
    if (character.size() > 1 ? !c1_control : first >= 0x20 && first < 0x7f && first != '\\') {
      result += character;
      continue;
    }
    for (const char byte : character) {
      result += "\\x";
      result += digits[static_cast<unsigned char>(byte) >> 4];
      result += digits[static_cast<unsigned char>(byte) & 15];
    }
  }
  return result + (bytes.empty() ? "'" : "'...");
}

}  // namespace strobe
