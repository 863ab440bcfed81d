// What a Tokenizer is made of; the loaders and the training fill it in.
#pragma once

#include <array>
#include <map>
#include <string>

#include "strobe/core/io/tokenizer.h"
#include "strobe/core/io/tokenizer/added_tokens.h"
#include "strobe/core/io/tokenizer/bpe.h"
#include "strobe/core/io/tokenizer/vocabulary.h"

namespace strobe {

struct TokenizerParts {
  TokenizerKind kind = TokenizerKind::bpe;
  Vocabulary vocabulary;  // the texts of added tokens are hidden there
  AddedTokens added;
  std::map<std::string, int32_t, std::less<>> special_tokens;  // those of `added` that are special

  // Of bytes and bpe:
  std::array<int32_t, 256> byte_tokens{};
  MergeTable merges;
  bool in_pieces = false;     // whether GPT-2's pattern cuts the text first
  bool whole_pieces = false;  // whether a piece that is a token itself is taken as that without merging

  void set_added(std::vector<AddedToken> tokens);

  // Gives special tokens the next ids. Throws when a text is empty, no UTF-8 or a token already.
  void add_special(const std::vector<std::string>& texts);
};

}  // namespace strobe
