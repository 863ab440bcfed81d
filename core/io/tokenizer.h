// Text as token ids and back, without loss for any bytes: by bytes, by characters, or by byte-level BPE.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace strobe {

// bytes: 256 tokens, id = byte. characters: one token for each UTF-8 character of a text; a byte that is not part of
// valid UTF-8 counts as a character. bpe: byte-level byte-pair encoding (Sennrich et al. 2016; over bytes: GPT-2).
enum class TokenizerKind { bytes, characters, bpe };
const char* name_of(TokenizerKind kind);

// Whether encode() takes the text of a special token, such as "<|endoftext|>", for that token or for ordinary text.
enum class SpecialTokens { as_text, recognised };

// The first character of a non-empty text: a UTF-8 sequence, or one byte where the text is not UTF-8 (RFC 3629).
std::string_view first_character(std::string_view text);

struct TokenizerParts;  // what the kinds share and differ in, in core/io/tokenizer/

// Immutable and cheap to copy; all functions may be called from several threads at once.
// For every text that encode() accepts, decode(encode(text)) == text, byte by byte.
class Tokenizer {
 public:
  explicit Tokenizer(std::shared_ptr<const TokenizerParts> parts) : parts_(std::move(parts)) {}

  static Tokenizer bytes();

  // The distinct characters of the texts, sorted by their bytes; ids follow that order. Throws when there are none.
  static Tokenizer characters(std::span<const std::string_view> texts);
  static Tokenizer characters(std::string_view text) { return characters(std::span(&text, 1)); }

  // Recognises by name and content: a tokenizer.json (Hugging Face; byte-level BPE as in GPT-2, or written by save()),
  // a folder with tokenizer.json or with vocab.json and merges.txt (GPT-2), a *.tiktoken file of ranks (OpenAI).
  // Throws, naming the file and what is wrong, on anything malformed and on anything that would tokenize differently
  // here than where it comes from.
  static Tokenizer load(const std::string& path);

  // Writes a Hugging Face tokenizer.json, of whatever kind, in an all-or-nothing way. load() gives the same back.
  void save(const std::string& path) const;
  std::string to_json() const;

  // The same with more special tokens, which get the next ids. Throws when one is empty or there already.
  Tokenizer with_special_tokens(const std::vector<std::string>& texts) const;

  TokenizerKind kind() const;
  int64_t vocab_size() const;                      // ids are 0 to vocab_size() - 1
  std::string_view token_bytes(int64_t id) const;  // valid as long as this or a copy of it is
  const std::map<std::string, int32_t, std::less<>>& special_tokens() const;  // text to id

  // Text: any bytes. Throws when `characters` lack one of its characters, which it names together with its place.
  std::vector<int32_t> encode(std::string_view text, SpecialTokens special = SpecialTokens::as_text) const;

  // The bytes of the tokens in a row. Throws on an id that is not in the vocabulary, naming its position.
  std::string decode(std::span<const int32_t> ids) const;
  std::string decode(std::span<const int64_t> ids) const;

  // Whether both give every text the same ids.
  friend bool operator==(const Tokenizer& a, const Tokenizer& b);

 private:
  std::shared_ptr<const TokenizerParts> parts_;
};

struct BpeTrainingOptions {
  int64_t vocab_size = 4096;  // the 256 bytes, merges and special tokens; fewer when the text runs out
  int64_t min_count = 2;      // how often a pair has to occur to be merged
  std::vector<std::string> special_tokens = {};  // get the last ids; where they stand in a text, it is cut
};

// Learns merges from texts cut by GPT-2's pattern: the most frequent pair first, of equal ones that of the smallest
// ids. The result depends on nothing but the texts and the options. Throws when vocab_size is too small for the bytes
// and the special tokens, or there is no text.
Tokenizer train_bpe(std::span<const std::string_view> texts, const BpeTrainingOptions& options);
inline Tokenizer train_bpe(std::string_view text, const BpeTrainingOptions& options) {
  return train_bpe(std::span(&text, 1), options);
}

// What load() does with a file's bytes; `name` stands for the file in messages.
Tokenizer parse_tokenizer_json(std::string_view bytes, const std::string& name);
Tokenizer parse_vocab_and_merges(std::string_view vocab_json, std::string_view merges_txt, const std::string& name);
Tokenizer parse_tiktoken(std::string_view bytes, const std::string& name);

}  // namespace strobe
