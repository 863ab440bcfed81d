// The same tokens as Hugging Face's tokenizers and OpenAI's tiktoken give: tests/data/make_tokenizer_reference.py.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "strobe/core/io/tokenizer.h"
#include "strobe/kernels/kernel.h"
#include "support/temporary_folder.h"
#include "support/tokenizer_texts.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// The tokenizer.json, the pair of vocab.json and merges.txt, and the rank file, all of the same vocabulary.
std::vector<Tokenizer> loaded() {
  return {
      Tokenizer::load(tokenizer_data("tokenizer.json")),
      parse_vocab_and_merges(read_file(tokenizer_data("vocab.json")), read_file(tokenizer_data("merges.txt")), "pair")
          .with_special_tokens({"<|endoftext|>"}),
      Tokenizer::load(tokenizer_data("ranks.tiktoken")).with_special_tokens({"<|endoftext|>"})};
}

}  // namespace

TEST_CASE("tokenizer reference: every file format gives the ids of the libraries it comes from") {
  const std::string text = read_file(tokenizer_data("sample.txt"));
  const nlohmann::json ids = nlohmann::json::parse(read_file(tokenizer_data("ids.json")));
  REQUIRE(text.size() > 4000);
  for (const Tokenizer& tokenizer : loaded()) {
    CHECK(tokenizer.vocab_size() == 557);
    CHECK(tokenizer.kind() == TokenizerKind::bpe);
    CHECK(tokenizer.encode(text) == ids.at("as_text").get<std::vector<int32_t>>());
    CHECK(tokenizer.encode(text, SpecialTokens::recognised) == ids.at("recognised").get<std::vector<int32_t>>());
  }
}

TEST_CASE("tokenizer reference: training learns the merges that Hugging Face's trainer does") {
  const std::string text = read_file(tokenizer_data("training.txt"));
  const BpeTrainingOptions options{.vocab_size = 557, .min_count = 2, .special_tokens = {"<|endoftext|>"}};
  const Tokenizer trained = train_bpe(text, options);
  CHECK(trained == Tokenizer::load(tokenizer_data("tokenizer.json")));
  CHECK(trained != train_bpe(text, {.vocab_size = 556, .min_count = 2, .special_tokens = {"<|endoftext|>"}}));
}

TEST_CASE("tokenizer reference: what is saved loads as the same, whatever the kind") {
  const TemporaryFolder folder;
  const std::string text = read_file(tokenizer_data("sample.txt")) + "\xff\xc3";
  std::vector<Tokenizer> tokenizers = loaded();
  tokenizers.push_back(Tokenizer::bytes());
  tokenizers.push_back(Tokenizer::bytes().with_special_tokens({"<|endoftext|>", "\"\\\u0085日"}));
  tokenizers.push_back(Tokenizer::characters(text));
  tokenizers.push_back(Tokenizer::characters(text).with_special_tokens({"<|endoftext|>"}));
  for (const Tokenizer& tokenizer : tokenizers) {
    tokenizer.save(folder / "tokenizer.json");
    for (const std::string& path : {folder / "tokenizer.json", folder.path.string()}) {
      const Tokenizer again = Tokenizer::load(path);
      CHECK(again == tokenizer);
      CHECK(again.kind() == tokenizer.kind());
      CHECK(again.special_tokens() == tokenizer.special_tokens());
      CHECK(again.encode(text, SpecialTokens::recognised) == tokenizer.encode(text, SpecialTokens::recognised));
    }
  }
}

TEST_CASE("tokenizer reference: in vocab.json, tokens that no merge makes are special") {
  nlohmann::json vocabulary = nlohmann::json::parse(read_file(tokenizer_data("vocab.json")));
  vocabulary["<|endoftext|>"] = 556;
  vocabulary["日"] = 557;  // not in the byte alphabet
  const TemporaryFolder folder;
  write_file(folder / "vocab.json", vocabulary.dump());
  write_file(folder / "merges.txt", read_file(tokenizer_data("merges.txt")));
  const Tokenizer tokenizer = Tokenizer::load(folder.path.string());
  CHECK(tokenizer == loaded()[0].with_special_tokens({"日"}));
}
