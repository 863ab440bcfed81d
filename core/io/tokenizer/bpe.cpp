#include "strobe/core/io/tokenizer/bpe.h"

namespace strobe {

size_t MergeTable::slot_of(int32_t left, int32_t right) const {
  const uint64_t pair = static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  const size_t mask = slots_.size() - 1;
  size_t slot = (pair * 0x9e3779b97f4a7c15) >> 32 & mask;
  while (slots_[slot] >= 0) {
    const Merge& merge = merges_[static_cast<size_t>(slots_[slot])];
    if (merge.left == left && merge.right == right) break;
    slot = (slot + 1) & mask;
  }
  return slot;
}

bool MergeTable::add(const Merge& merge) {
  if (3 * (merges_.size() + 1) > 2 * slots_.size()) {
    slots_.assign(slots_.empty() ? 512 : 2 * slots_.size(), -1);
    for (size_t rank = 0; rank < merges_.size(); ++rank) {
      slots_[slot_of(merges_[rank].left, merges_[rank].right)] = static_cast<int32_t>(rank);
    }
  }
  const size_t slot = slot_of(merge.left, merge.right);
  if (slots_[slot] >= 0) return false;
  slots_[slot] = static_cast<int32_t>(merges_.size());
  merges_.push_back(merge);
  return true;
}

int32_t MergeTable::rank(int32_t left, int32_t right) const {
  return slots_.empty() ? -1 : slots_[slot_of(left, right)];
}

}  // namespace strobe
