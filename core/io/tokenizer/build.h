// What the loaders of byte-level BPE share: names of tokens, their ids and merges become a tokenizer that is sound.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "strobe/core/io/tokenizer/added_tokens.h"
#include "strobe/core/io/tokenizer/parts.h"
#include "strobe/core/io/tokenizer/vocabulary.h"
#include "strobe/kernels/kernel.h"

namespace strobe {

// Throws Error, naming the file.
template <class... Why>
[[noreturn]] void refuse_file(const std::string& name, const Why&... why) {
  fail("tokenizer: ", name, " ", why...);
}

// Throws when the bytes are what git-lfs leaves in the place of a file, or nothing.
void refuse_placeholder(std::string_view bytes, const std::string& name);

// Fills in the vocabulary, `added` and special_tokens. Names are written in GPT-2's byte alphabet, but for those of
// added tokens, which may or may not be among them. Throws unless each of the ids 0 to n - 1 has one token.
void build_vocabulary(TokenizerParts& parts, const StringList& names, const std::vector<int32_t>& ids,
                      std::vector<AddedToken> added, const std::string& file);

// Fills in byte_tokens and merges, the latter "left right" in the byte alphabet and in the order of their ranks. Throws
// when a byte has no token, or a merge is not of two tokens to a third, or comes twice.
void build_merges(TokenizerParts& parts, const StringList& merges, const std::string& file);

}  // namespace strobe
