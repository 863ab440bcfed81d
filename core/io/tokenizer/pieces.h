// Pre-tokenization: cuts a text into the pieces that merges do not cross.
#pragma once

#include <memory>
#include <string_view>

namespace strobe {

// As tokenizer.json spells them: GPT-2's pattern, and one that matches any character.
inline constexpr char gpt2_pattern[] = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr char character_pattern[] = R"([\s\S])";

// GPT-2's pieces of a text, in order and without gaps: words, numbers and other characters, each with the space before
// it, the endings of "it's" and "they'll", and white space. Bytes that are not UTF-8, as many as stand in a row, are a
// piece of their own.
class Pieces {
 public:
  explicit Pieces(std::string_view text);
  ~Pieces();
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  std::string_view next();  // empty at the end

 private:
  struct Match;

  std::string_view rest_;
  size_t valid_ = 0;  // bytes of rest_ known to be UTF-8
  std::unique_ptr<Match> match_;
};

}  // namespace strobe
