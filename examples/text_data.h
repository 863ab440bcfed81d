// Text, or token ids from any source, as training and held-out tokens; batches of them in an order the seed decides.
#pragma once

#include <strobe/strobe.h>

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace examples {

// The first character of a non-empty text: a UTF-8 sequence, or one byte where the text is not UTF-8.
std::string_view first_character(std::string_view text);

// Text as it may go to a terminal: control characters (except newline and tab) and stray bytes become '?'.
std::string printable(std::string_view text);

// Symbols and their numbers; a text is a sequence of symbols.
class Vocabulary {
 public:
  static Vocabulary bytes();                               // the 256 byte values
  static Vocabulary characters_of(std::string_view text);  // the distinct characters, sorted by their bytes

  int64_t size() const { return static_cast<int64_t>(symbols_.size()); }
  const std::vector<std::string>& symbols() const { return symbols_; }

  // Throws std::runtime_error naming a character that is not a symbol, and `where` it stands.
  std::vector<int32_t> encode(std::string_view text, std::string_view where) const;
  std::string decode(const std::vector<int32_t>& tokens) const;

 private:
  explicit Vocabulary(std::vector<std::string> symbols, bool bytewise);

  std::vector<std::string> symbols_;
  std::map<std::string, int32_t, std::less<>> numbers_;
  bool bytewise_;
};

struct Corpus {
  std::vector<int32_t> training;
  std::vector<int32_t> validation;  // the end of the text
  int64_t vocab_size = 0;
  std::optional<Vocabulary> vocabulary;   // none when the ids come from elsewhere
  double validation_bytes_per_token = 0;  // zero without a vocabulary
};

// Reads a text and splits it; `bytewise` takes bytes as symbols instead of characters.
// Throws std::runtime_error when the file cannot be used or a part is shorter than one context and its targets.
Corpus load_text(const std::string& path, bool bytewise, double validation_fraction, int64_t context);

// The same for little-endian 16-bit token ids below vocab_size.
Corpus load_tokens(const std::string& path, int64_t vocab_size, double validation_fraction, int64_t context);

// tokens and targets: (batch, context) i32; a target is the token that follows.
struct Batch {
  strobe::Tensor tokens;
  strobe::Tensor targets;
};

// `batch` windows at random places.
Batch random_batch(const std::vector<int32_t>& tokens, int64_t batch, int64_t context, std::mt19937_64& random);

// The first tokens of at most `count` windows spread evenly over the text; fewer where they would overlap.
std::vector<int64_t> spread_windows(const std::vector<int32_t>& tokens, int64_t count, int64_t context);

// The windows that begin at `starts`.
Batch batch_at(const std::vector<int32_t>& tokens, const std::vector<int64_t>& starts, int64_t context);

}  // namespace examples
