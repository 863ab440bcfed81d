// Tokens that stand in a text as they are and are looked for before the text is cut any further.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "strobe/core/io/tokenizer.h"

namespace strobe {

struct AddedToken {
  std::string text;
  int32_t id = 0;
  bool special = true;      // whether SpecialTokens::as_text hides it
  bool normalized = false;  // tokenizer.json: whether it is looked for only between the others
  bool operator==(const AddedToken&) const = default;
};

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  const std::vector<AddedToken>& list() const { return tokens_; }

  // Walks through the text: calls ordinary(text) and token(id) for its parts in order. Of tokens that overlap the one
  // that begins first counts, of those the longest.
  template <class Ordinary, class Token>
  void split(std::string_view text, SpecialTokens special, Ordinary&& ordinary, Token&& token) const {
    const std::array<Search, 2>& searches = searches_[special == SpecialTokens::recognised];
    split_by(searches[0], text, token,
             [&](std::string_view between) { split_by(searches[1], between, token, ordinary); });
  }

 private:
  struct Found {
    size_t position;
    const AddedToken* token;  // null when there is none
  };

  class Search {
   public:
    void add(const AddedToken& token);
    void sort();
    Found in(std::string_view text) const;

   private:
    const AddedToken* longest_at_start(std::string_view text) const;

    std::vector<AddedToken> sorted_;  // by their texts
    std::array<bool, 256> begins_{};  // whether a token begins with this byte
  };

  template <class Token, class Between>
  static void split_by(const Search& search, std::string_view text, Token&& token, Between&& between) {
    while (!text.empty()) {
      const Found found = search.in(text);
      if (found.position > 0) between(text.substr(0, found.position));
      if (found.token == nullptr) break;
      token(found.token->id);
      text.remove_prefix(found.position + found.token->text.size());
    }
  }

  std::vector<AddedToken> tokens_;
  std::array<std::array<Search, 2>, 2> searches_;  // without and with special tokens; not normalized, normalized
};

}  // namespace strobe
