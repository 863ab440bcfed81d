// Tokens to train on: where they lie, which are held out, and batches of them in an order that the seed decides.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strobe/core/io/token_file.h"
#include "strobe/core/tensor.h"

namespace strobe {

// One long sequence of token ids made of pieces: vectors in memory, or mapped token files, however large. Copies share
// the pieces.
class TokenSource {
 public:
  TokenSource() = default;
  // `name` is what errors call it.
  explicit TokenSource(std::vector<int32_t> tokens, std::string name = "tokens");
  // Token files one after another, in the order given; a folder stands for the *.bin files in it, sorted.
  static TokenSource from_files(const std::vector<std::string>& paths);

  int64_t size() const { return size_; }
  const std::string& name() const { return name_; }
  // Copies the ids from `begin` on; throws unless all of them exist.
  void read(int64_t begin, std::span<int32_t> out) const;
  // The ids from `begin` to `end`, as a source of that name.
  TokenSource slice(int64_t begin, int64_t end, std::string name) const;
  // Throws, naming file, position, id and vocabulary, unless all ids are below vocab_size. Reads everything once.
  void check_vocabulary(int64_t vocab_size) const;
  // A hash of all ids in their order (FNV-1a over 32-bit words), whatever pieces they lie in. Reads everything once.
  uint64_t fingerprint() const;

 private:
  struct Piece {
    std::string name;
    std::shared_ptr<const std::vector<int32_t>> vector;  // what the ids lie in:
    std::shared_ptr<const TokenFile> file;               // one or the other
    TokenView tokens;
    int64_t first = 0;  // position of tokens[0] in the vector or file
    int64_t begin = 0;  // position of tokens[0] in this source
  };
  void add(Piece piece);

  std::vector<Piece> pieces_;
  int64_t size_ = 0;
  std::string name_;
};

struct TokenSplit {
  TokenSource training;
  TokenSource validation;
};

// The last `validation_fraction` (in (0, 1)) of the tokens is held out.
TokenSplit split_tokens(const TokenSource& tokens, double validation_fraction);

// Token files, as from_files takes them. Files with "val" or "validation" as a word of their
// name (story_val_000000.bin, as llm.c calls them) are held out; where there are none, split_tokens decides.
TokenSplit load_tokens(const std::vector<std::string>& paths, double validation_fraction);

// Throws, with the length of both parts, unless each holds at least one window: seq_len tokens and one target more.
void require_windows(const TokenSplit& split, int64_t seq_len);

// tokens and targets: (batch, seq_len) i32 on the current device; a target is the token that follows.
struct Batch {
  Tensor tokens;
  Tensor targets;
};

// The windows of seq_len tokens that begin at `starts`.
Batch batch_at(const TokenSource& tokens, std::span<const int64_t> starts, int64_t seq_len);

// Where at most `max_windows` windows begin that do not overlap and lie evenly over the tokens, the last one at their
// end: for evaluation, the same each time.
std::vector<int64_t> spread_windows(int64_t num_tokens, int64_t seq_len, int64_t max_windows);

// Which window comes next: all there is to save and restore.
struct DataPosition {
  uint64_t seed = 0;
  int64_t epoch = 0;
  int64_t index = 0;  // windows of this epoch that were handed out
  friend bool operator==(const DataPosition&, const DataPosition&) = default;
};

// Training batches without end. Each epoch cuts the tokens into windows that share no target, beginning at a random
// offset below seq_len, and hands every window out once in random order; so an epoch sees all targets but fewer than
// 2 seq_len at the ends, and in time each token behind each length of context. The order depends on nothing but
// seed, epoch, number of tokens and seq_len; no permutation is stored.
class TokenDataset {
 public:
  // Throws unless there is at least one window.
  TokenDataset(TokenSource tokens, int64_t seq_len, uint64_t seed);

  const TokenSource& tokens() const { return tokens_; }
  int64_t seq_len() const { return seq_len_; }
  // How many windows an epoch has; the offset makes one more or less.
  int64_t num_windows(int64_t epoch) const;

  // The next batch_size windows; a batch may hold the end of one epoch and the beginning of the next.
  Batch next_batch(int64_t batch_size);

  DataPosition position() const { return position_; }
  // Goes on from there. Throws when there is no such window with these tokens and this seq_len.
  void set_position(const DataPosition& position);

 private:
  int64_t next_window();

  TokenSource tokens_;
  int64_t seq_len_;
  DataPosition position_;
};

}  // namespace strobe
