// The fuzzer's corpus of train_gpt's settings, again, and texts too large for it. The library's loaders have theirs in
// core/fuzz_corpus_test.cpp.
#include "fuzz/config_loader.h"
#include "fuzz/corpus.h"

using namespace strobe::testing;

TEST_CASE("config: every file of the fuzzer's corpus is read or refused, in bounds") { replay_corpus(config_loader); }

TEST_CASE("config: a key of very many parts, a long list and a text of very many bytes are refused") {
  std::string key, list;
  for (int i = 0; i < 200'000; ++i) key += "a.", list += "1,";
  CHECK_FALSE(fuzz_one(config_loader, key + "a = 1\n"));
  CHECK_FALSE(fuzz_one(config_loader, "data = [" + list + "]\n"));
  CHECK_FALSE(fuzz_one(config_loader, std::string(2'000'000, '\n')));
}
