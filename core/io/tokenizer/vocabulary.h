// Tokens by id and ids by token, in little memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace strobe {

// Strings of any bytes, one behind the other: 4 GiB in all.
class StringList {
 public:
  void add(std::string_view text);
  size_t size() const { return ends_.size(); }
  std::string_view operator[](size_t i) const {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(characters_).substr(begin, ends_[i] - begin);
  }
  bool operator==(const StringList&) const = default;

 private:
  std::string characters_;
  std::vector<uint32_t> ends_;
};

// The bytes of every token. Ids count up from 0 in the order of add() and add_hidden().
class Vocabulary {
 public:
  // The token gets the next id, which is the result; or, when the same bytes were added before, the id they have.
  int32_t add(std::string_view bytes);

  // A token that find() does not see, such as the text of a special token.
  void add_hidden(std::string_view bytes) { tokens_.add(bytes); }

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
  std::string_view operator[](int64_t id) const { return tokens_[static_cast<size_t>(id)]; }
  int32_t find(std::string_view bytes) const;  // -1 when there is none
  bool operator==(const Vocabulary& other) const { return tokens_ == other.tokens_; }

 private:
  size_t slot_of(std::string_view bytes) const;  // where they are or would be

  StringList tokens_;
  std::vector<int32_t> slots_;  // open addressing, a power of two, -1 where free
  size_t used_ = 0;
};

}  // namespace strobe
