#include "strobe/core/io/tokenizer.h"

#include <bit>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <set>

#include "strobe/core/io/atomic_file.h"
#include "strobe/core/io/tokenizer/byte_alphabet.h"
#include "strobe/core/io/tokenizer/parts.h"
#include "strobe/core/io/tokenizer/pieces.h"
#include "strobe/core/io/tokenizer/utf8.h"
#include "strobe/kernels/kernel.h"

namespace strobe {
namespace {

// Which tokens the pieces of a text became. Later pieces overwrite earlier ones of the same slot, so it stays small.
class PieceCache {
 public:
  explicit PieceCache(size_t text_size)
      : slots_(std::bit_ceil(std::clamp<size_t>(text_size / 8, 1, size_t{1} << 15))) {}

  struct Slot {
    std::string_view piece;
    size_t begin, count;  // its tokens among those of the text
  };
  Slot& slot(std::string_view piece) { return slots_[std::hash<std::string_view>()(piece) & (slots_.size() - 1)]; }

 private:
  std::vector<Slot> slots_;
};

class BpeEncoder {
 public:
  BpeEncoder(const TokenizerParts& parts, size_t text_size, std::vector<int32_t>& ids)
      : parts_(parts), cache_(text_size), ids_(ids) {}

  void encode(std::string_view text) {
    if (!parts_.in_pieces) return encode_piece(text);
    Pieces pieces(text);
    for (std::string_view piece = pieces.next(); !piece.empty(); piece = pieces.next()) {
      PieceCache::Slot& slot = cache_.slot(piece);
      if (slot.piece == piece) {
        for (size_t i = 0; i < slot.count; ++i) ids_.push_back(ids_[slot.begin + i]);
        continue;
      }
      slot = {piece, ids_.size(), 0};
      encode_piece(piece);
      slot.count = ids_.size() - slot.begin;
    }
  }

 private:
  void encode_piece(std::string_view piece) {
    STROBE_CHECK(piece.size() < UINT32_MAX, "encode: ", piece.size(),
                 " bytes without a place to cut, expected at most ", UINT32_MAX - 1);
    if (parts_.whole_pieces) {
      const int32_t id = parts_.vocabulary.find(piece);
      if (id >= 0) return ids_.push_back(id);
    }
    symbols_.clear();
    for (const char byte : piece) symbols_.push_back(parts_.byte_tokens[static_cast<unsigned char>(byte)]);
    const std::span<const int32_t> merged = merger_.merge(symbols_, parts_.merges);
    ids_.insert(ids_.end(), merged.begin(), merged.end());
  }

  const TokenizerParts& parts_;
  PieceCache cache_;
  Merger merger_;
  std::vector<int32_t> symbols_;
  std::vector<int32_t>& ids_;
};

// `ordinary` is a part of `text`.
void encode_characters(const Vocabulary& vocabulary, std::string_view text, std::string_view ordinary,
                       std::vector<int32_t>& ids) {
  while (!ordinary.empty()) {
    const std::string_view character = first_character(ordinary);
    const int32_t id = vocabulary.find(character);
    STROBE_CHECK(id >= 0, "encode: the character ", in_quotes(character), " at byte ", ordinary.data() - text.data(),
                 " is not in the vocabulary, expected only characters that are");
    ids.push_back(id);
    ordinary.remove_prefix(character.size());
  }
}

template <class Id>
std::string decode_ids(const Vocabulary& vocabulary, std::span<const Id> ids) {
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    STROBE_CHECK(ids[i] >= 0 && ids[i] < vocabulary.size(), "decode: id ", ids[i], " at position ", i,
                 " given, expected 0 to ", vocabulary.size() - 1);
    text += vocabulary[ids[i]];
  }
  return text;
}

}  // namespace

const char* name_of(TokenizerKind kind) {
  switch (kind) {
    case TokenizerKind::bytes:
      return "bytes";
    case TokenizerKind::characters:
      return "characters";
    case TokenizerKind::bpe:
      return "bpe";
  }
  return "unknown";
}

void TokenizerParts::set_added(std::vector<AddedToken> tokens) {
  std::sort(tokens.begin(), tokens.end(), [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  special_tokens.clear();
  for (const AddedToken& token : tokens) {
    if (token.special) special_tokens.emplace(token.text, token.id);
  }
  added = AddedTokens(std::move(tokens));
}

void TokenizerParts::add_special(const std::vector<std::string>& texts) {
  std::vector<AddedToken> tokens = added.list();
  for (const std::string& text : texts) {
    STROBE_CHECK(!text.empty(), "special token: an empty text given, expected a name such as <|endoftext|>");
    STROBE_CHECK(valid_utf8_length(text) == text.size(), "special token: ", in_quotes(text), " given, expected UTF-8");
    const std::optional<std::string> spelled = from_byte_alphabet(text);  // tokenizer.json has one token for both
    const bool taken = (spelled && vocabulary.find(*spelled) >= 0) ||
                       std::any_of(tokens.begin(), tokens.end(), [&](const AddedToken& t) { return t.text == text; });
    STROBE_CHECK(!taken, "special token: ", in_quotes(text), " is a token already, expected a new one");
    tokens.push_back({.text = text, .id = static_cast<int32_t>(vocabulary.size())});
    vocabulary.add_hidden(text);
  }
  set_added(std::move(tokens));
}

Tokenizer Tokenizer::bytes() {
  auto parts = std::make_shared<TokenizerParts>();
  parts->kind = TokenizerKind::bytes;
  for (int byte = 0; byte < 256; ++byte) {
    const char character = static_cast<char>(byte);
    parts->byte_tokens[static_cast<size_t>(byte)] = parts->vocabulary.add({&character, 1});
  }
  return Tokenizer(parts);
}

Tokenizer Tokenizer::characters(std::span<const std::string_view> texts) {
  std::set<std::string_view> distinct;
  for (std::string_view text : texts) {
    while (!text.empty()) {
      const std::string_view character = first_character(text);
      distinct.insert(character);
      text.remove_prefix(character.size());
    }
  }
  STROBE_CHECK(!distinct.empty(), "Tokenizer::characters: text without a character given, expected at least one");
  auto parts = std::make_shared<TokenizerParts>();
  parts->kind = TokenizerKind::characters;
  for (const std::string_view character : distinct) parts->vocabulary.add(character);
  return Tokenizer(parts);
}

void Tokenizer::save(const std::string& path) const {
  const std::string json = to_json();
  write_file_atomically(path, {{json.data(), json.size()}});
}

Tokenizer Tokenizer::with_special_tokens(const std::vector<std::string>& texts) const {
  auto parts = std::make_shared<TokenizerParts>(*parts_);
  parts->add_special(texts);
  return Tokenizer(parts);
}

TokenizerKind Tokenizer::kind() const { return parts_->kind; }
int64_t Tokenizer::vocab_size() const { return parts_->vocabulary.size(); }
const std::map<std::string, int32_t, std::less<>>& Tokenizer::special_tokens() const { return parts_->special_tokens; }

std::string_view Tokenizer::token_bytes(int64_t id) const {
  STROBE_CHECK(id >= 0 && id < vocab_size(), "token_bytes: id ", id, " given, expected 0 to ", vocab_size() - 1);
  return parts_->vocabulary[id];
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
  std::vector<int32_t> ids;
  std::optional<BpeEncoder> bpe;
  if (kind() == TokenizerKind::bpe) bpe.emplace(*parts_, text.size(), ids);
  parts_->added.split(
      text, special,
      [&](std::string_view ordinary) {
        if (bpe) {
          bpe->encode(ordinary);
        } else if (kind() == TokenizerKind::characters) {
          encode_characters(parts_->vocabulary, text, ordinary, ids);
        } else {
          for (const char byte : ordinary) ids.push_back(parts_->byte_tokens[static_cast<unsigned char>(byte)]);
        }
      },
      [&](int32_t id) { ids.push_back(id); });
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const { return decode_ids(parts_->vocabulary, ids); }
std::string Tokenizer::decode(std::span<const int64_t> ids) const { return decode_ids(parts_->vocabulary, ids); }

bool operator==(const Tokenizer& a, const Tokenizer& b) {
  const TokenizerParts &x = *a.parts_, &y = *b.parts_;
  return x.kind == y.kind && x.vocabulary == y.vocabulary && x.added.list() == y.added.list() &&
         x.byte_tokens == y.byte_tokens && x.merges.list() == y.merges.list() && x.in_pieces == y.in_pieces &&
         x.whole_pieces == y.whole_pieces;
}

}  // namespace strobe
