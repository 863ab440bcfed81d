// Training of byte-level BPE: counts pairs of neighbours once and keeps the counts up to date while pairs merge.
#include <optional>
#include <queue>
#include <unordered_map>

#include "strobe/core/io/tokenizer/byte_alphabet.h"
#include "strobe/core/io/tokenizer/parts.h"
#include "strobe/core/io/tokenizer/pieces.h"
#include "strobe/kernels/kernel.h"

namespace strobe {
namespace {

using WordCounts = std::unordered_map<std::string_view, int64_t>;

WordCounts count_words(std::span<const std::string_view> texts, const AddedTokens& special) {
  WordCounts counts;
  for (const std::string_view text : texts) {
    special.split(
        text, SpecialTokens::recognised,
        [&](std::string_view ordinary) {
          Pieces pieces(ordinary);
          for (std::string_view piece = pieces.next(); !piece.empty(); piece = pieces.next()) ++counts[piece];
        },
        [](int32_t) {});
  }
  return counts;
}

// The distinct words, one behind the other, as tokens that merge.
class Corpus {
 public:
  Corpus(const WordCounts& words, const std::array<int32_t, 256>& byte_tokens) {
    size_t size = 1;
    for (const auto& [word, count] : words) size += word.size() + 1;
    STROBE_CHECK(size < UINT32_MAX, "train_bpe: ", size, " bytes of distinct words given, expected fewer than ",
                 UINT32_MAX);
    for (std::vector<uint32_t>* numbers : {&previous_, &next_}) numbers->reserve(size);
    tokens_.reserve(size);
    counts_.reserve(size);
    append(border, 0);
    for (const auto& [word, count] : words) {
      for (const char byte : word) append(byte_tokens[static_cast<unsigned char>(byte)], count);
      append(border, 0);
    }
    for (uint32_t place = 0; place + 1 < tokens_.size(); ++place) change_pair(place, +1);
    queue_new_pairs();
  }

  // The most frequent pair, of equal ones that of the smallest ids; none when it occurs less than min_count times.
  std::optional<std::pair<int32_t, int32_t>> most_frequent(int64_t min_count) {
    while (!queue_.empty()) {
      const auto [count, pair] = queue_.top();
      const auto found = pairs_.find(pair);
      const int64_t now = found == pairs_.end() ? 0 : found->second.count;
      if (count == now) {
        if (count < min_count) break;
        return std::pair(static_cast<int32_t>(pair >> 32), static_cast<int32_t>(pair));
      }
      queue_.pop();  // it has become rarer since: counts of a pair only fall once the merge that made it is done
      if (now > 0) queue_.push({now, pair});
    }
    return std::nullopt;
  }

  void merge(int32_t left, int32_t right, int32_t result) {
    // All places of a pair came about in one pass over the corpus, so they are in order.
    const std::vector<uint32_t> places = std::move(pairs_[pair_of(left, right)].places);
    for (const uint32_t place : places) {
      const uint32_t before = previous_[place], second = next_[place], after = next_[second];
      if (tokens_[place] != left || tokens_[second] != right) continue;
      change_pair(before, -1);
      change_pair(place, -1);
      change_pair(second, -1);
      tokens_[place] = result;
      next_[place] = after;
      previous_[after] = place;
      tokens_[second] = border;
      change_pair(before, +1);
      change_pair(place, +1);
    }
    pairs_.erase(pair_of(left, right));
    queue_new_pairs();
  }

 private:
  static constexpr int32_t border = -1;  // between words

  static uint64_t pair_of(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }

  void append(int32_t token, int64_t count) {
    const auto place = static_cast<uint32_t>(tokens_.size());
    tokens_.push_back(token);
    counts_.push_back(count);
    previous_.push_back(place - 1);
    next_.push_back(place + 1);
  }

  // Counts the pair that begins at `place` in or out.
  void change_pair(uint32_t place, int sign) {
    const int32_t left = tokens_[place];
    const int32_t right = left == border ? border : tokens_[next_[place]];
    if (left == border || right == border) return;
    Pair& pair = pairs_[pair_of(left, right)];
    pair.count += sign * counts_[place];
    if (sign < 0) return;
    if (pair.places.empty()) new_pairs_.push_back(pair_of(left, right));
    pair.places.push_back(place);
  }

  void queue_new_pairs() {
    for (const uint64_t pair : new_pairs_) {
      if (pairs_[pair].count > 0) queue_.push({pairs_[pair].count, pair});
    }
    new_pairs_.clear();
  }

  struct Pair {
    int64_t count = 0;
    std::vector<uint32_t> places;  // where it begins; some of them are gone
  };
  struct Candidate {
    int64_t count;
    uint64_t pair;
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };

  std::vector<int32_t> tokens_;
  std::vector<uint32_t> previous_, next_;
  std::vector<int64_t> counts_;  // how often the word occurs
  std::unordered_map<uint64_t, Pair> pairs_;
  std::vector<uint64_t> new_pairs_;  // not in the queue yet
  std::priority_queue<Candidate> queue_;
};

}  // namespace

Tokenizer train_bpe(std::span<const std::string_view> texts, const BpeTrainingOptions& options) {
  const auto special_count = static_cast<int64_t>(options.special_tokens.size());
  STROBE_CHECK(options.vocab_size >= 256 + special_count && options.vocab_size <= INT32_MAX, "train_bpe: vocab_size ",
               options.vocab_size, " given, expected at least ", 256 + special_count,
               " (the bytes and the special tokens) and at most ", INT32_MAX);
  STROBE_CHECK(options.min_count >= 1, "train_bpe: min_count ", options.min_count, " given, expected at least 1");
  STROBE_CHECK(std::any_of(texts.begin(), texts.end(), [](std::string_view text) { return !text.empty(); }),
               "train_bpe: no text given, expected at least one byte");
  auto parts = std::make_shared<TokenizerParts>();
  parts->in_pieces = true;
  for (const unsigned char byte : bytes_in_alphabet_order()) {
    const char character = static_cast<char>(byte);
    parts->byte_tokens[byte] = parts->vocabulary.add({&character, 1});
  }
  TokenizerParts untrained = *parts;
  untrained.add_special(options.special_tokens);
  Corpus corpus(count_words(texts, untrained.added), parts->byte_tokens);
  while (parts->vocabulary.size() + special_count < options.vocab_size) {
    const auto pair = corpus.most_frequent(options.min_count);
    if (!pair) break;
    const auto [left, right] = *pair;
    const std::string bytes = std::string(parts->vocabulary[left]).append(parts->vocabulary[right]);
    const int32_t result = parts->vocabulary.add(bytes);
    parts->merges.add({left, right, result});
    corpus.merge(left, right, result);
  }
  parts->add_special(options.special_tokens);
  return Tokenizer(parts);
}

}  // namespace strobe
