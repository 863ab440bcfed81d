#include "strobe/core/io/tokenizer/added_tokens.h"

#include <algorithm>

namespace strobe {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (const AddedToken& token : tokens_) {
    if (!token.special) searches_[0][token.normalized].add(token);
    searches_[1][token.normalized].add(token);
  }
  for (auto& searches : searches_) {
    for (Search& search : searches) search.sort();
  }
}

void AddedTokens::Search::add(const AddedToken& token) {
  sorted_.push_back(token);
  begins_[static_cast<unsigned char>(token.text[0])] = true;
}

void AddedTokens::Search::sort() {
  std::sort(sorted_.begin(), sorted_.end(), [](const AddedToken& a, const AddedToken& b) { return a.text < b.text; });
}

AddedTokens::Found AddedTokens::Search::in(std::string_view text) const {
  for (size_t i = 0; !sorted_.empty() && i < text.size(); ++i) {
    if (!begins_[static_cast<unsigned char>(text[i])]) continue;
    if (const AddedToken* token = longest_at_start(text.substr(i))) return {i, token};
  }
  return {text.size(), nullptr};
}

const AddedToken* AddedTokens::Search::longest_at_start(std::string_view text) const {
  const AddedToken* longest = nullptr;
  auto begin = sorted_.begin(), end = sorted_.end();
  // The tokens that agree with the text so far are neighbours; each further byte narrows them down.
  for (size_t length = 0; begin != end; ++length) {
    if (begin->text.size() == length) longest = &*begin++;
    if (length == text.size()) break;
    const auto byte = static_cast<unsigned char>(text[length]);
    const auto at = [&](const AddedToken& token) { return static_cast<unsigned char>(token.text[length]); };
    begin = std::partition_point(begin, end, [&](const AddedToken& token) { return at(token) < byte; });
    end = std::partition_point(begin, end, [&](const AddedToken& token) { return at(token) == byte; });
  }
  return longest;
}

}  // namespace strobe
