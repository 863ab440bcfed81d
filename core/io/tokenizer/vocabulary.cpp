#include "strobe/core/io/tokenizer/vocabulary.h"

#include <functional>

#include "strobe/kernels/kernel.h"

namespace strobe {

void StringList::add(std::string_view text) {
  STROBE_CHECK(text.size() <= UINT32_MAX - characters_.size(), "tokenizer: its tokens have more than ", UINT32_MAX,
               " bytes, expected at most that");
  characters_ += text;
  ends_.push_back(static_cast<uint32_t>(characters_.size()));
}

size_t Vocabulary::slot_of(std::string_view bytes) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = std::hash<std::string_view>()(bytes) & mask;
  while (slots_[slot] >= 0 && tokens_[static_cast<size_t>(slots_[slot])] != bytes) slot = (slot + 1) & mask;
  return slot;
}

int32_t Vocabulary::add(std::string_view bytes) {
  if (3 * (used_ + 1) > 2 * slots_.size()) {
    std::vector<int32_t> old = std::move(slots_);
    slots_.assign(old.empty() ? 512 : 2 * old.size(), -1);
    for (const int32_t id : old) {
      if (id >= 0) slots_[slot_of(tokens_[static_cast<size_t>(id)])] = id;
    }
  }
  const size_t slot = slot_of(bytes);
  if (slots_[slot] >= 0) return slots_[slot];
  ++used_;
  slots_[slot] = static_cast<int32_t>(tokens_.size());
  tokens_.add(bytes);
  return slots_[slot];
}

int32_t Vocabulary::find(std::string_view bytes) const { return slots_.empty() ? -1 : slots_[slot_of(bytes)]; }

}  // namespace strobe
