// What tokenizers promise about any text: nothing is lost, and the same text always gives the same ids.
#include <doctest/doctest.h>

#include <set>

#include "strobe/core/io/tokenizer.h"
#include "strobe/core/io/tokenizer/pieces.h"
#include "strobe/kernels/kernel.h"
#include "support/temporary_folder.h"
#include "support/tokenizer_texts.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

std::string all_bytes() {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  return text;
}

// Every kind of tokenizer, able to encode `text`.
std::vector<Tokenizer> every_kind(std::string_view text) {
  return {Tokenizer::bytes(), Tokenizer::characters(text), train_bpe(text, {.vocab_size = 400}),
          Tokenizer::load(tokenizer_data("tokenizer.json")), Tokenizer::load(tokenizer_data("ranks.tiktoken"))};
}

void check_round_trip(const Tokenizer& tokenizer, std::string_view text) {
  const std::vector<int32_t> ids = tokenizer.encode(text);
  const bool same = tokenizer.decode(ids) == text;
  CHECK(same);
}

}  // namespace

TEST_CASE("tokenizer: every byte and all pairs of bytes come back") {
  std::string pairs;
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) pairs += {static_cast<char>(first), static_cast<char>(second)};
  }
  for (const Tokenizer& tokenizer : every_kind(pairs + all_bytes())) {
    CAPTURE(name_of(tokenizer.kind()));
    check_round_trip(tokenizer, pairs);
    size_t wrong = 0;
    // A pair of bytes is a character that a vocabulary of characters may lack; bytes on their own are all there.
    for (size_t i = 0; i < pairs.size() && tokenizer.kind() != TokenizerKind::characters; i += 2) {
      const std::string_view pair = std::string_view(pairs).substr(i, 2);
      wrong += tokenizer.decode(tokenizer.encode(pair)) != pair;
    }
    for (const char byte : all_bytes()) wrong += tokenizer.decode(tokenizer.encode({&byte, 1})) != std::string(1, byte);
    CHECK(wrong == 0);
  }
}

TEST_CASE("tokenizer: 100,000 random byte strings come back") {
  std::vector<std::string> texts;
  std::string joined = all_bytes();
  RandomText random(1);
  for (int i = 0; i < 100'000; ++i) {
    texts.push_back(random.bytes(random.below(40)));
    if (i % 100 == 0) joined += texts.back();
  }
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  std::vector<Tokenizer> tokenizers = every_kind(joined);
  tokenizers[1] = Tokenizer::characters(views);
  for (const Tokenizer& tokenizer : tokenizers) {
    CAPTURE(name_of(tokenizer.kind()));
    size_t wrong = 0;
    for (const std::string& text : texts) wrong += tokenizer.decode(tokenizer.encode(text)) != text;
    CHECK(wrong == 0);
  }
}

TEST_CASE("tokenizer: line ends, marks, NUL, other scripts, joined emoji and broken UTF-8 come back") {
  const std::string texts[] = {
      "",
      "\xef\xbb\xbf"
      "one\r\ntwo\rthree\n\n  four\t\r\n ",
      std::string("a\0b\0\0", 5),
      "日本語のテキスト、中文文本。한국어 텍스트",
      "👩‍👩‍👧‍👦 👩🏽‍💻 🇩🇪🇫🇷 ❤️ e\u0301",
      "don't you'll 'S 1234 ½² \u00a0\u2003\u3000x \u0085\u180e\u200b",
      "cut \xe2\x82 off, \xc0\x80 overlong, \xed\xa0\x80 surrogate, \xf4\x90\x80\x80 too large, \x80\xbf\xff\xfe",
      "\xe2\x82",
      "\xf0\x9f\x91",
  };
  for (const std::string& text : texts) {
    CAPTURE(text);
    for (const Tokenizer& tokenizer : every_kind(text + "x")) check_round_trip(tokenizer, text);
  }
}

TEST_CASE("tokenizer: a long text without a place to cut takes time in proportion") {
  RandomText random(2);
  std::string letters;
  for (int i = 0; i < 300'000; ++i) letters += static_cast<char>('a' + random.below(4));
  const std::string texts[] = {std::string(300'000, 'a'), std::string(300'000, ' ') + "x", std::string(300'000, '\xff'),
                               letters};
  for (const std::string& text : texts) {
    for (const Tokenizer& tokenizer : every_kind(text)) check_round_trip(tokenizer, text);
  }
}

TEST_CASE("tokenizer: bytes are their own ids") {
  const Tokenizer tokenizer = Tokenizer::bytes();
  CHECK(tokenizer.vocab_size() == 256);
  CHECK(tokenizer.encode("A\xff") == std::vector<int32_t>{65, 255});
  CHECK(tokenizer.token_bytes(255) == "\xff");
}

TEST_CASE("tokenizer: characters are those of the text, sorted, and broken bytes count as some") {
  const std::string_view texts[] = {"bä\xff", "a\xc3"};
  const Tokenizer tokenizer = Tokenizer::characters(texts);
  REQUIRE(tokenizer.vocab_size() == 5);
  const std::vector<std::string_view> expected{"a", "b", "\xc3", "ä", "\xff"};
  for (int64_t id = 0; id < 5; ++id) CHECK(tokenizer.token_bytes(id) == expected[static_cast<size_t>(id)]);
  CHECK(tokenizer.encode("äb") == std::vector<int32_t>{3, 1});
  CHECK_THROWS_WITH_AS(
      tokenizer.encode("ab\nc"),
      "encode: the character '\\x0a' at byte 2 is not in the vocabulary, expected only characters that "
      "are",
      Error);
  CHECK_THROWS_AS(Tokenizer::characters(""), Error);
}

TEST_CASE("tokenizer: pieces are those of GPT-2's pattern, and broken UTF-8 is a piece of its own") {
  const std::vector<std::string_view> texts[] = {
      {"It", "'s", " they", "'re", " can", "'t", " we", "'ve", " I", "'m", " they", "'ll", " he", "'d", " '", "S"},
      {"a", " ", " b", "  ", "\n", "c"},
      {"x", "   "},
      {"3", ".", "14", " ½²", " Ⅷ४२"},
      {"a", "!", "\u0085", "b", "\u00a0", "c", "\u2028", "d", "\u3000", "e"},
      {"a", "\u180e\u200b", "b"},  // no white space
      {"日本語", "、", "한국어", " größe", "👩\u200d👩"},
      {"a", "\xff\xfe", "b", " !", "\xed\xa0\x80", " ", "\xc0", " c", "\xe2\x82"},
  };
  for (const std::vector<std::string_view>& expected : texts) {
    std::string text;
    for (const std::string_view piece : expected) text += piece;
    std::vector<std::string_view> found;
    Pieces pieces(text);
    for (std::string_view piece = pieces.next(); !piece.empty(); piece = pieces.next()) found.push_back(piece);
    CAPTURE(text);
    CHECK(found == expected);
  }
}

TEST_CASE("tokenizer: in ranks, a piece that is a token needs no merges") {
  const std::string ranks = read_file(tokenizer_data("ranks.tiktoken"));
  const Tokenizer tokenizer = parse_tiktoken(ranks + "cXp4 556\n", "with qzx, but neither qz nor zx");
  CHECK(tokenizer.encode("qzx") == std::vector<int32_t>{556});
  CHECK(tokenizer.encode("qzxq").size() == 4);
  CHECK(parse_tokenizer_json(tokenizer.to_json(), "again").encode("qzx") == std::vector<int32_t>{556});
}

TEST_CASE("tokenizer: merges go by rank, not from left to right") {
  // Trained on: "bc" is the most frequent pair, so that "abc" is a + bc; then "ab" where no c follows.
  const Tokenizer tokenizer = train_bpe("bc bc bc bc bc abd abd", {.vocab_size = 256 + 3});
  const auto tokens = [&](std::string_view text) {
    std::vector<std::string_view> result;
    for (const int32_t id : tokenizer.encode(text)) result.push_back(tokenizer.token_bytes(id));
    return result;
  };
  CHECK(tokens("abc") == std::vector<std::string_view>{"a", "bc"});
  CHECK(tokens(" bc") == std::vector<std::string_view>{" bc"});
}

TEST_CASE("tokenizer: special tokens are recognised on request, the longest first, and cut the training text") {
  Tokenizer tokenizer = train_bpe("low <|end|>low low", {.vocab_size = 270, .special_tokens = {"<|end|>"}});
  const auto end = static_cast<int32_t>(tokenizer.vocab_size()) - 1;
  CHECK(tokenizer.special_tokens().at("<|end|>") == end);
  CHECK(tokenizer.token_bytes(end) == "<|end|>");
  for (int64_t id = 0; id < end; ++id) CHECK(tokenizer.token_bytes(id).find("<|") == std::string_view::npos);
  CHECK(tokenizer.encode("<|end|>").size() > 1);
  CHECK(tokenizer.encode("<|end|>", SpecialTokens::recognised) == std::vector<int32_t>{end});

  tokenizer = tokenizer.with_special_tokens({"<|end|>>", "日"});
  CHECK(tokenizer.vocab_size() == end + 3);
  const std::string text = "low<|end|>>日<|end|><|end<|end|>";
  const std::vector<int32_t> ids = tokenizer.encode(text, SpecialTokens::recognised);
  CHECK(tokenizer.decode(ids) == text);
  std::vector<int32_t> special;
  for (const int32_t id : ids) {
    if (id >= end) special.push_back(id);
  }
  CHECK(special == std::vector<int32_t>{end + 1, end + 2, end, end});

  CHECK_THROWS_AS(tokenizer.with_special_tokens({""}), Error);
  CHECK_THROWS_AS(tokenizer.with_special_tokens({"<|end|>"}), Error);
  CHECK_THROWS_AS(tokenizer.with_special_tokens({"<a>", "<a>"}), Error);
  CHECK_THROWS_AS(tokenizer.with_special_tokens({"\xff"}), Error);
  CHECK_THROWS_AS(tokenizer.with_special_tokens({"l"}), Error);
}

TEST_CASE("tokenizer: training stops at the vocabulary's size, or when no pair is left that occurs often enough") {
  CHECK(train_bpe("abab", {.vocab_size = 256}).vocab_size() == 256);
  CHECK(train_bpe("aaaa bbbb", {.vocab_size = 300, .min_count = 1}).vocab_size() == 261);
  CHECK(train_bpe("abcd", {.vocab_size = 300}).vocab_size() == 256);
  const std::string_view texts[] = {"abcd", "abcd"};
  CHECK(train_bpe(texts, {.vocab_size = 300}).vocab_size() == 259);
  CHECK_THROWS_AS(train_bpe("abc", {.vocab_size = 255}), Error);
  CHECK_THROWS_AS(train_bpe("abc", {.vocab_size = 256, .special_tokens = {"<|end|>"}}), Error);
  CHECK_THROWS_AS(train_bpe("abc", {.min_count = 0}), Error);
  CHECK_THROWS_AS(train_bpe("", {}), Error);
}

TEST_CASE("tokenizer: an id that is not in the vocabulary is refused with its position") {
  for (const Tokenizer& tokenizer : every_kind("text")) {
    const auto size = static_cast<int32_t>(tokenizer.vocab_size());
    CHECK_THROWS_AS(tokenizer.decode(std::vector<int32_t>{0, size}), Error);
    CHECK_THROWS_AS(tokenizer.decode(std::vector<int64_t>{-1}), Error);
    CHECK_THROWS_AS(tokenizer.token_bytes(size), Error);
  }
  CHECK_THROWS_WITH_AS(Tokenizer::bytes().decode(std::vector<int64_t>{7, int64_t{1} << 32}),
                       "decode: id 4294967296 at position 1 given, expected 0 to 255", Error);
}
