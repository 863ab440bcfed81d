// Byte-pair encoding: which pairs of tokens merge, and how a row of tokens is merged.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace strobe {

struct Merge {
  int32_t left, right, result;
  bool operator==(const Merge&) const = default;
};

// The merges of a vocabulary; the place of one in the list is its rank: lower ranks go first.
class MergeTable {
 public:
  void reserve(size_t count) { merges_.reserve(count); }

  // False when the pair is there already.
  bool add(const Merge& merge);
  const std::vector<Merge>& list() const { return merges_; }

  int32_t rank(int32_t left, int32_t right) const;  // -1 when the pair does not merge
  int32_t result(int32_t rank) const { return merges_[static_cast<size_t>(rank)].result; }

 private:
  size_t slot_of(int32_t left, int32_t right) const;  // where its rank is or would be

  std::vector<Merge> merges_;
  std::vector<int32_t> slots_;  // open addressing, a power of two, -1 where free
};

// Merges one row of tokens after the other and keeps its buffers in between.
class Merger {
 public:
  // Replaces pairs of neighbours by what they merge to, the lowest rank first, of equal ones the leftmost, until none
  // merges: O(n log n). `rules` has the functions rank and result of MergeTable. The result holds until the next call.
  template <class Rules>
  std::span<const int32_t> merge(std::span<const int32_t> tokens, const Rules& rules);

 private:
  std::vector<int32_t> tokens_;
  std::vector<uint32_t> previous_, next_;  // neighbours that are still there
  std::vector<int32_t> rank_;              // of the pair that begins here, -1 for none
  std::vector<uint64_t> heap_;             // rank and place of pairs, some of which are gone
};

template <class Rules>
std::span<const int32_t> Merger::merge(std::span<const int32_t> tokens, const Rules& rules) {
  const auto count = static_cast<uint32_t>(tokens.size());
  tokens_.assign(tokens.begin(), tokens.end());
  previous_.resize(count);
  next_.resize(count);
  rank_.assign(count, -1);
  heap_.clear();
  const auto look_at_pair = [&](uint32_t left) {
    const uint32_t right = next_[left];
    rank_[left] = right < count ? rules.rank(tokens_[left], tokens_[right]) : -1;
    if (rank_[left] < 0) return;
    heap_.push_back(static_cast<uint64_t>(rank_[left]) << 32 | left);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  };
  for (uint32_t i = 0; i < count; ++i) {
    previous_[i] = i - 1;
    next_[i] = i + 1;
    look_at_pair(i);
  }
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const auto rank = static_cast<int32_t>(heap_.back() >> 32);
    const auto left = static_cast<uint32_t>(heap_.back());
    heap_.pop_back();
    if (rank_[left] != rank) continue;  // one of the two has merged with another token since
    const uint32_t right = next_[left];
    tokens_[left] = rules.result(rank);
    rank_[right] = -1;
    next_[left] = next_[right];
    if (next_[left] < count) previous_[next_[left]] = left;
    look_at_pair(left);
    if (left > 0) look_at_pair(previous_[left]);
  }
  size_t kept = 0;
  for (uint32_t i = 0; i < count; i = next_[i]) tokens_[kept++] = tokens_[i];
  return std::span(tokens_).first(kept);
}

}  // namespace strobe
