// OpenAI's rank files: a line for each token, its bytes in base64 and its rank, which is its id and its merge's
// priority.
#include <optional>

#include "strobe/core/io/tokenizer/build.h"
#include "strobe/core/io/tokenizer/pieces.h"
#include "strobe/core/io/tokenizer/utf8.h"

namespace strobe {
namespace {

// Tokens have to be merged from their bytes, which takes far more memory than a file's; real ones end at 128 bytes.
constexpr size_t max_token_size = 1024;

int base64_value(char character) {
  if (character >= 'A' && character <= 'Z') return character - 'A';
  if (character >= 'a' && character <= 'z') return character - 'a' + 26;
  if (character >= '0' && character <= '9') return character - '0' + 52;
  return character == '+' ? 62 : character == '/' ? 63 : -1;
}

// None unless it is base64 of RFC 4648, padded to a multiple of four characters.
std::optional<std::string> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size() - padding; ++i) {
    const int value = base64_value(text[i]);
    if (value < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (i % 4 != 0) bytes += static_cast<char>(bits >> (6 - i % 4 * 2) & 0xff);
  }
  if (padding > 0 && (bits & (padding == 1 ? 3u : 15u)) != 0) return std::nullopt;
  return bytes;
}

// In a rank file a pair merges when its bytes together are a token; its rank is the id of that.
struct PairsByBytes {
  const Vocabulary& vocabulary;
  size_t longest;    // token of the vocabulary
  int32_t excluded;  // a token that is not to be made

  int32_t rank(int32_t left, int32_t right) const {
    const std::string_view first = vocabulary[left], second = vocabulary[right];
    if (first.size() + second.size() > longest) return -1;
    const int32_t id = vocabulary.find(std::string(first).append(second));
    return id == excluded ? -1 : id;
  }
  int32_t result(int32_t rank) const { return rank; }
};

// Merging goes on inside a token's bytes as it would if they stood alone, as long as nothing merges across their ends.
// So there is one pair at most that becomes the token: what its bytes merge to when the token itself is left out.
void derive_merges(TokenizerParts& parts) {
  size_t longest = 0;
  for (int64_t id = 0; id < parts.vocabulary.size(); ++id) longest = std::max(longest, parts.vocabulary[id].size());
  Merger merger;
  std::vector<int32_t> bytes;
  for (int32_t id = 0; id < parts.vocabulary.size(); ++id) {
    if (parts.vocabulary[id].size() < 2) continue;
    bytes.clear();
    for (const char byte : parts.vocabulary[id]) bytes.push_back(parts.byte_tokens[static_cast<unsigned char>(byte)]);
    const auto halves = merger.merge(bytes, PairsByBytes{parts.vocabulary, longest, id});
    if (halves.size() == 2) parts.merges.add({halves[0], halves[1], id});
  }
}

// Rank files do not name their pattern. Tokens that GPT-2's would cut tell that it was another one.
void check_pattern(const Vocabulary& vocabulary, const std::string& file) {
  for (int64_t id = 0; id < vocabulary.size(); ++id) {
    const std::string_view token = vocabulary[id];
    if (valid_utf8_length(token) == token.size() && Pieces(token).next() != token) {
      refuse_file(file, "has a token ", in_quotes(token), ", which GPT-2's pattern would cut: ",
                  "expected ranks that were made with that pattern, such as gpt2, r50k_base and p50k_base");
    }
  }
}

}  // namespace

Tokenizer parse_tiktoken(std::string_view bytes, const std::string& name) {
  refuse_placeholder(bytes, name);
  auto parts = std::make_shared<TokenizerParts>();
  parts->in_pieces = parts->whole_pieces = true;
  for (int32_t id = 0; !bytes.empty(); ++id) {
    std::string_view line = bytes.substr(0, bytes.find('\n'));
    bytes.remove_prefix(std::min(line.size() + 1, bytes.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    const size_t space = std::min(line.find(' '), line.size());
    const std::optional<std::string> token = from_base64(line.substr(0, space));
    if (space == line.size() || !token || token->empty()) {
      refuse_file(name, "has ", in_quotes(line), " in line ", id + 1,
                  ", expected a token in base64, a space and its rank");
    }
    const std::string_view rank = line.substr(space + 1);
    if (rank != std::to_string(id)) {
      refuse_file(name, "has rank ", in_quotes(rank), " in line ", id + 1, ", expected ranks that count up from 0");
    }
    if (token->size() > max_token_size) {
      refuse_file(name, "has a token of ", token->size(), " bytes in line ", id + 1, ", expected at most ",
                  max_token_size);
    }
    const int32_t before = parts->vocabulary.add(*token);
    if (before != id) refuse_file(name, "has token ", in_quotes(*token), " in line ", before + 1, " and line ", id + 1);
  }
  build_merges(*parts, StringList(), name);
  check_pattern(parts->vocabulary, name);
  derive_merges(*parts);
  return Tokenizer(parts);
}

}  // namespace strobe
