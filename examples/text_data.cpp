// Reads files, tokenizes them by characters or bytes, and cuts windows out of the tokens.
#include "text_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

namespace examples {
namespace {

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw std::runtime_error(fmt::format(format, std::forward<Args>(args)...));
}

std::string read_file(const std::string& option, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) refuse("{} {}: no such file", option, path);
  if (status.type() == fs::file_type::none) refuse("{} {}: cannot be read ({})", option, path, error.message());
  if (status.type() != fs::file_type::regular && status.type() != fs::file_type::fifo)
    refuse("{} {}: is a {}, expected a file", option, path,
           status.type() == fs::file_type::directory ? "directory" : "device");
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) refuse("{} {}: cannot be read ({})", option, path, std::strerror(errno));
  std::string content;
  std::vector<char> chunk(size_t{1} << 20);
  while (const size_t count = std::fread(chunk.data(), 1, chunk.size(), file)) content.append(chunk.data(), count);
  const int failure = std::ferror(file) != 0 ? errno : 0;
  std::fclose(file);
  if (failure != 0) refuse("{} {}: cannot be read ({})", option, path, std::strerror(failure));
  if (content.empty()) refuse("{} {}: is empty, expected something to train on", option, path);
  return content;
}

// nanoGPT's split: the first part trains, the end is held out.
void split(Corpus& corpus, std::vector<int32_t> tokens, double validation_fraction, int64_t context,
           const std::string& option, const std::string& path) {
  const size_t boundary = static_cast<size_t>(static_cast<double>(tokens.size()) * (1 - validation_fraction));
  corpus.validation.assign(tokens.begin() + static_cast<std::ptrdiff_t>(boundary), tokens.end());
  tokens.resize(boundary);
  corpus.training = std::move(tokens);
  const int64_t needed = context + 1;
  for (const auto& [name, part] : {std::pair{"training", &corpus.training}, std::pair{"held-out", &corpus.validation}})
    if (static_cast<int64_t>(part->size()) < needed)
      refuse("{} {}: {} tokens in the {} part (--val-fraction {}), expected at least {} (--context {} and one target)",
             option, path, part->size(), name, validation_fraction, needed, context);
}

}  // namespace

std::string_view first_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t length = first < 0xc2 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 1;
  if (length > text.size()) return text.substr(0, 1);
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return text.substr(0, 1);
  // Overlong forms, surrogates and code points above U+10FFFF are not UTF-8 (RFC 3629).
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) || (first == 0xf0 && byte(1) < 0x90) ||
      (first == 0xf4 && byte(1) >= 0x90))
    return text.substr(0, 1);
  return text.substr(0, length);
}

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::string_view character = first_character(text);
    text.remove_prefix(character.size());
    const unsigned char first = static_cast<unsigned char>(character[0]);
    const bool c1_control = first == 0xc2 && static_cast<unsigned char>(character.back()) < 0xa0;
    const bool shown =
        character.size() > 1 ? !c1_control : first == '\n' || first == '\t' || (first >= 0x20 && first < 0x7f);
    result += shown ? character : std::string_view("?");
  }
  return result;
}

Vocabulary::Vocabulary(std::vector<std::string> symbols, bool bytewise)
    : symbols_(std::move(symbols)), bytewise_(bytewise) {
  for (size_t i = 0; i < symbols_.size(); ++i) numbers_.emplace(symbols_[i], static_cast<int32_t>(i));
}

Vocabulary Vocabulary::bytes() {
  std::vector<std::string> symbols;
  for (int byte = 0; byte < 256; ++byte) symbols.emplace_back(1, static_cast<char>(byte));
  return Vocabulary(std::move(symbols), true);
}

Vocabulary Vocabulary::characters_of(std::string_view text) {
  std::set<std::string_view> distinct;
  while (!text.empty()) {
    const std::string_view character = first_character(text);
    distinct.insert(character);
    text.remove_prefix(character.size());
  }
  return Vocabulary(std::vector<std::string>(distinct.begin(), distinct.end()), false);
}

std::vector<int32_t> Vocabulary::encode(std::string_view text, std::string_view where) const {
  std::vector<int32_t> tokens;
  tokens.reserve(text.size());
  while (!text.empty()) {
    const std::string_view character = bytewise_ ? text.substr(0, 1) : first_character(text);
    const auto found = numbers_.find(character);
    if (found == numbers_.end())
      refuse("{}: character '{}' does not occur in the training text, expected only characters that do", where,
             printable(character));
    tokens.push_back(found->second);
    text.remove_prefix(character.size());
  }
  return tokens;
}

std::string Vocabulary::decode(const std::vector<int32_t>& tokens) const {
  std::string text;
  for (const int32_t token : tokens) text += symbols_.at(static_cast<size_t>(token));
  return text;
}

Corpus load_text(const std::string& path, bool bytewise, double validation_fraction, int64_t context) {
  const std::string text = read_file("--data", path);
  Corpus corpus;
  corpus.vocabulary = bytewise ? Vocabulary::bytes() : Vocabulary::characters_of(text);
  corpus.vocab_size = corpus.vocabulary->size();
  split(corpus, corpus.vocabulary->encode(text, path), validation_fraction, context, "--data", path);
  corpus.validation_bytes_per_token = static_cast<double>(corpus.vocabulary->decode(corpus.validation).size()) /
                                      static_cast<double>(corpus.validation.size());
  return corpus;
}

Corpus load_tokens(const std::string& path, int64_t vocab_size, double validation_fraction, int64_t context) {
  const std::string bytes = read_file("--tokens", path);
  if (bytes.size() % 2 != 0)
    refuse("--tokens {}: {} bytes, expected 16-bit token ids (an even number of bytes)", path, bytes.size());
  std::vector<int32_t> tokens(bytes.size() / 2);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<unsigned char>(bytes[2 * i]) | static_cast<unsigned char>(bytes[2 * i + 1]) << 8;
    if (tokens[i] >= vocab_size)
      refuse("--tokens {}: token id {} at position {}, expected ids below --vocab-size {}", path, tokens[i], i,
             vocab_size);
  }
  Corpus corpus;
  corpus.vocab_size = vocab_size;
  split(corpus, std::move(tokens), validation_fraction, context, "--tokens", path);
  return corpus;
}

Batch batch_at(const std::vector<int32_t>& tokens, const std::vector<int64_t>& starts, int64_t context) {
  const size_t length = static_cast<size_t>(context);
  std::vector<int32_t> inputs, targets;
  inputs.reserve(starts.size() * length);
  targets.reserve(starts.size() * length);
  for (const int64_t start : starts) {
    const auto first = tokens.begin() + start;
    inputs.insert(inputs.end(), first, first + context);
    targets.insert(targets.end(), first + 1, first + context + 1);
  }
  const strobe::Shape shape{static_cast<int64_t>(starts.size()), context};
  return {strobe::from_vector(inputs, shape), strobe::from_vector(targets, shape)};
}

Batch random_batch(const std::vector<int32_t>& tokens, int64_t batch, int64_t context, std::mt19937_64& random) {
  const uint64_t places = tokens.size() - static_cast<size_t>(context);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < batch; ++i) starts.push_back(static_cast<int64_t>(random() % places));
  return batch_at(tokens, starts, context);
}

std::vector<int64_t> spread_windows(const std::vector<int32_t>& tokens, int64_t count, int64_t context) {
  const int64_t last = static_cast<int64_t>(tokens.size()) - context - 1;
  count = std::min(count, last / context + 1);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < count; ++i) starts.push_back(count > 1 ? last * i / (count - 1) : 0);
  return starts;
}

}  // namespace examples
