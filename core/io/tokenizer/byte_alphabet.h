// GPT-2's way to write bytes as text: each of the 256 bytes has a printable character of its own.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace strobe {

// The printable bytes of Latin-1 stand for themselves; the others, in order, are U+0100 and what follows: " the" is
// written "Ġthe".
std::string to_byte_alphabet(std::string_view bytes);

// The bytes again; none when the text has another character.
std::optional<std::string> from_byte_alphabet(std::string_view text);

// The bytes in the order of their characters, which is that of their ids in GPT-2's vocabulary.
const std::array<unsigned char, 256>& bytes_in_alphabet_order();

}  // namespace strobe
