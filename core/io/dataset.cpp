#include "strobe/core/io/dataset.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "strobe/core/io/permutation.h"

namespace strobe {
namespace {

namespace fs = std::filesystem;

// A key of its own for each use of (seed, epoch), told apart from the random numbers of operations.
uint64_t epoch_key(uint64_t seed, int64_t epoch, uint32_t purpose) {
  const uint64_t counter = static_cast<uint64_t>(epoch);
  const PhiloxCounter words =
      philox4x32({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), purpose, 0x64617461}, seed);
  return uint64_t{words[0]} << 32 | words[1];
}
constexpr uint32_t for_offset = 0;
constexpr uint32_t for_order = 1;

// What a window takes: its tokens and the last one's target. Unsigned, as any seq_len may be given.
uint64_t window_tokens(int64_t seq_len) { return static_cast<uint64_t>(seq_len) + 1; }

// Where the first window of an epoch begins.
int64_t epoch_offset(int64_t num_tokens, int64_t seq_len, uint64_t seed, int64_t epoch) {
  const int64_t choices = std::min(seq_len, num_tokens - seq_len);  // each leaves room for a window
  return static_cast<int64_t>(epoch_key(seed, epoch, for_offset) % static_cast<uint64_t>(choices));
}

bool is_validation_file(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  std::string word;
  for (size_t i = 0; i <= name.size(); ++i) {
    if (i < name.size() && std::isalpha(static_cast<unsigned char>(name[i])) != 0) {
      word += name[i];
      continue;
    }
    if (word == "val" || word == "validation") return true;
    word.clear();
  }
  return false;
}

std::vector<std::string> list_token_files(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      files.push_back(path);
      continue;
    }
    const size_t before = files.size();
    fs::directory_iterator entry(path, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error))
      if (entry->path().extension() == ".bin") files.push_back(entry->path().string());
    STROBE_CHECK(!error, "load_tokens: folder ", path, " cannot be listed: ", error.message());
    STROBE_CHECK(files.size() > before, "load_tokens: folder ", path,
                 " holds no token files, expected at least one whose name ends in .bin");
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(before), files.end());
  }
  return files;
}

}  // namespace

TokenSource::TokenSource(std::vector<int32_t> tokens, std::string name) : name_(std::move(name)) {
  const auto vector = std::make_shared<const std::vector<int32_t>>(std::move(tokens));
  const std::span<const uint32_t> ids(reinterpret_cast<const uint32_t*>(vector->data()), vector->size());
  add({.name = name_, .vector = vector, .file = nullptr, .tokens = TokenView(ids)});
}

TokenSource TokenSource::from_files(const std::vector<std::string>& paths) {
  const std::vector<std::string> files = list_token_files(paths);
  STROBE_CHECK(!files.empty(), "load_tokens: no files given, expected at least one");
  TokenSource source;
  for (const std::string& path : files) {
    const auto file = std::make_shared<const TokenFile>(path);
    source.add({.name = path, .vector = nullptr, .file = file, .tokens = file->tokens()});
  }
  source.name_ = files.size() == 1 ? files[0] : concat_message(files[0], " and ", files.size() - 1, " more");
  return source;
}

void TokenSource::add(Piece piece) {
  if (piece.tokens.size() == 0) return;
  piece.begin = size_;
  size_ += piece.tokens.size();
  pieces_.push_back(std::move(piece));
}

void TokenSource::read(int64_t begin, std::span<int32_t> out) const {
  STROBE_CHECK(begin >= 0 && begin <= size_ && std::ssize(out) <= size_ - begin, "TokenSource: ", out.size(),
               " tokens from position ", begin, " asked for, expected a part of the ", size_, " of ", name_);
  // The first piece that begins behind `begin`; the one before it holds `begin`.
  auto next = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                               [](int64_t position, const Piece& piece) { return position < piece.begin; });
  while (!out.empty()) {
    const Piece& piece = *std::prev(next++);
    if (piece.file) piece.file->require_whole();
    const int64_t local = begin - piece.begin;
    const size_t count = std::min(out.size(), static_cast<size_t>(piece.tokens.size() - local));
    piece.tokens.read(local, out.first(count));
    out = out.subspan(count);
    begin += static_cast<int64_t>(count);
  }
}

TokenSource TokenSource::slice(int64_t begin, int64_t end, std::string name) const {
  STROBE_CHECK(0 <= begin && begin <= end && end <= size_, "TokenSource: positions ", begin, " to ", end,
               " given, expected a part of the ", size_, " tokens of ", name_);
  TokenSource result;
  result.name_ = std::move(name);
  for (const Piece& piece : pieces_) {
    const int64_t first = std::clamp<int64_t>(begin - piece.begin, 0, piece.tokens.size());
    const int64_t last = std::clamp<int64_t>(end - piece.begin, 0, piece.tokens.size());
    Piece part = piece;
    part.tokens = piece.tokens.slice(first, last);
    part.first += first;
    result.add(std::move(part));
  }
  return result;
}

void TokenSource::check_vocabulary(int64_t vocab_size) const {
  for (const Piece& piece : pieces_) {
    const auto misfit = piece.tokens.first_not_below(vocab_size);
    STROBE_CHECK(!misfit, piece.name, ": token id ", misfit->id, " at position ", piece.first + misfit->position,
                 ", expected ids of a vocabulary of ", vocab_size);
  }
}

uint64_t TokenSource::fingerprint() const {
  uint64_t hash = 0xcbf29ce484222325;
  std::vector<int32_t> chunk(size_t{1} << 16);
  for (int64_t begin = 0; begin < size_; begin += std::ssize(chunk)) {
    chunk.resize(static_cast<size_t>(std::min<int64_t>(std::ssize(chunk), size_ - begin)));
    read(begin, chunk);
    for (const int32_t id : chunk) hash = (hash ^ static_cast<uint32_t>(id)) * 0x100000001b3;
  }
  return hash;
}

TokenSplit split_tokens(const TokenSource& tokens, double validation_fraction) {
  STROBE_CHECK(validation_fraction > 0 && validation_fraction < 1, "split_tokens: validation_fraction ",
               validation_fraction, " given, expected one between 0 and 1");
  const int64_t boundary = static_cast<int64_t>(static_cast<double>(tokens.size()) * (1 - validation_fraction));
  return {tokens.slice(0, boundary, tokens.name()), tokens.slice(boundary, tokens.size(), tokens.name())};
}

TokenSplit load_tokens(const std::vector<std::string>& paths, double validation_fraction) {
  std::vector<std::string> training = list_token_files(paths);
  const auto middle = std::stable_partition(training.begin(), training.end(),
                                            [](const std::string& path) { return !is_validation_file(path); });
  const std::vector<std::string> validation(middle, training.end());
  training.erase(middle, training.end());
  if (validation.empty()) return split_tokens(TokenSource::from_files(training), validation_fraction);
  STROBE_CHECK(!training.empty(), "load_tokens: only validation files given (", validation[0],
               " ...), expected one whose name does not say 'val' to train on");
  return {TokenSource::from_files(training), TokenSource::from_files(validation)};
}

void require_windows(const TokenSplit& split, int64_t seq_len) {
  const int64_t training = split.training.size();
  const int64_t validation = split.validation.size();
  STROBE_CHECK(seq_len > 0 && std::min(training, validation) > seq_len, "data: ", training, " tokens to train on and ",
               validation, " held out for validation given, expected at least ", window_tokens(seq_len),
               " of each (seq_len ", seq_len, " and one target)");
}

Batch batch_at(const TokenSource& tokens, std::span<const int64_t> starts, int64_t seq_len) {
  STROBE_CHECK(seq_len > 0 && !starts.empty(), "batch_at: ", starts.size(), " windows of seq_len ", seq_len,
               " given, expected at least 1 of each");
  const size_t length = static_cast<size_t>(seq_len);
  std::vector<int32_t> window(length + 1);
  std::vector<int32_t> inputs, targets;
  inputs.reserve(starts.size() * length);
  targets.reserve(starts.size() * length);
  for (const int64_t start : starts) {
    tokens.read(start, window);
    inputs.insert(inputs.end(), window.begin(), window.end() - 1);
    targets.insert(targets.end(), window.begin() + 1, window.end());
  }
  const Shape shape{std::ssize(starts), seq_len};
  return {from_vector(inputs, shape), from_vector(targets, shape)};
}

std::vector<int64_t> spread_windows(int64_t num_tokens, int64_t seq_len, int64_t max_windows) {
  STROBE_CHECK(seq_len > 0 && num_tokens > seq_len && max_windows > 0, "spread_windows: ", num_tokens, " tokens and ",
               max_windows, " windows given, expected at least ", window_tokens(seq_len), " (seq_len ", seq_len,
               " and one target) and 1");
  const int64_t last = num_tokens - seq_len - 1;
  const int64_t count = std::min(max_windows, last / seq_len + 1);
  if (count == 1) return {0};
  std::vector<int64_t> starts;
  // last * i / (count - 1), in an order that does not overflow
  const int64_t step = last / (count - 1), rest = last % (count - 1);
  for (int64_t i = 0; i < count; ++i) starts.push_back(step * i + rest * i / (count - 1));
  return starts;
}

TokenDataset::TokenDataset(TokenSource tokens, int64_t seq_len, uint64_t seed)
    : tokens_(std::move(tokens)), seq_len_(seq_len), position_{.seed = seed} {
  STROBE_CHECK(seq_len > 0 && tokens_.size() > seq_len, "TokenDataset: ", tokens_.name(), " of ", tokens_.size(),
               " tokens given, expected at least ", window_tokens(seq_len), " (seq_len ", seq_len, " and one target)");
}

int64_t TokenDataset::num_windows(int64_t epoch) const {
  return (tokens_.size() - 1 - epoch_offset(tokens_.size(), seq_len_, position_.seed, epoch)) / seq_len_;
}

int64_t TokenDataset::next_window() {
  if (position_.index == num_windows(position_.epoch)) {
    ++position_.epoch;
    position_.index = 0;
  }
  const auto& [seed, epoch, index] = position_;
  const uint64_t window = permuted(static_cast<uint64_t>(index), static_cast<uint64_t>(num_windows(epoch)),
                                   epoch_key(seed, epoch, for_order));
  ++position_.index;
  return epoch_offset(tokens_.size(), seq_len_, seed, epoch) + static_cast<int64_t>(window) * seq_len_;
}

Batch TokenDataset::next_batch(int64_t batch_size) {
  STROBE_CHECK(batch_size > 0, "TokenDataset: batch_size ", batch_size, " given, expected at least 1");
  const DataPosition before = position_;
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < batch_size; ++i) starts.push_back(next_window());
  try {
    return batch_at(tokens_, starts, seq_len_);
  } catch (...) {
    position_ = before;
    throw;
  }
}

void TokenDataset::set_position(const DataPosition& position) {
  const DataPosition before = std::exchange(position_, position);
  const int64_t count = position.epoch >= 0 ? num_windows(position.epoch) : 0;
  if (position.epoch >= 0 && position.index >= 0 && position.index <= count) return;
  position_ = before;
  fail("TokenDataset: position ", position.index, " of epoch ", position.epoch, " given, expected one of the ", count,
       " windows that these ", tokens_.size(), " tokens have with seq_len ", seq_len_);
}

}  // namespace strobe
