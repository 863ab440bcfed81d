// Where UTF-8 holds and where it breaks off, and bytes as they may stand in a message.
#pragma once

#include <string>
#include <string_view>

namespace strobe {

// How many bytes at the beginning of the text are valid UTF-8 (RFC 3629), whole characters only.
size_t valid_utf8_length(std::string_view text);

// In quotes, with escapes for what is no printable text, and cut after 40 bytes.
std::string in_quotes(std::string_view bytes);

}  // namespace strobe
