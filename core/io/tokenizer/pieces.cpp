#include "strobe/core/io/tokenizer/pieces.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "strobe/core/io/tokenizer.h"
#include "strobe/core/io/tokenizer/utf8.h"
#include "strobe/kernels/kernel.h"

namespace strobe {

namespace {

// The same pattern. PCRE2's \s has U+180E, which Unicode no longer counts as white space, so the class is spelled out.
constexpr char pattern_for_pcre2[] = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\t-\r\x{85}\p{Z}\p{L}\p{N}]+)"
                                     R"(|[\t-\r\x{85}\p{Z}]+(?![^\t-\r\x{85}\p{Z}])|[\t-\r\x{85}\p{Z}]+)";

struct Code {
  pcre2_code* code;

  Code() {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern_for_pcre2), PCRE2_ZERO_TERMINATED,
                         PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, nullptr);
    STROBE_CHECK(code != nullptr, "tokenizer: PCRE2 does not take GPT-2's pattern (error ", error, " at ", offset,
                 "), expected a build of it with Unicode");
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where that fails PCRE2 interprets the pattern
  }
  ~Code() { pcre2_code_free(code); }
};

}  // namespace

struct Pieces::Match {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  Match() {
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Match() { pcre2_match_data_free(data); }
};

Pieces::Pieces(std::string_view text) : rest_(text), match_(std::make_unique<Match>()) {}
Pieces::~Pieces() = default;

std::string_view Pieces::next() {
  static const Code gpt2;
  size_t length = 0;
  if (valid_ == 0) valid_ = valid_utf8_length(rest_);
  if (valid_ > 0) {
    // What follows the valid part is out of sight of the pattern, as the end of a text is.
    const int result = pcre2_match(gpt2.code, reinterpret_cast<PCRE2_SPTR>(rest_.data()), valid_, 0, PCRE2_NO_UTF_CHECK,
                                   match_->data, nullptr);
    STROBE_CHECK(result > 0, "tokenizer: PCRE2 gives up with error ", result, " at ", in_quotes(rest_));
    length = pcre2_get_ovector_pointer(match_->data)[1];
    valid_ -= length;
  } else {
    while (length < rest_.size()) {
      const std::string_view character = first_character(rest_.substr(length));
      if (character.size() > 1 || static_cast<unsigned char>(character[0]) < 0x80) break;
      ++length;
    }
  }
  const std::string_view piece = rest_.substr(0, length);
  rest_.remove_prefix(length);
  return piece;
}

}  // namespace strobe
