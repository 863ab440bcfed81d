// The fuzzers' corpus of each loader, again: what they found once, and files that load.
#include "fuzz/corpus.h"
#include "fuzz/loaders.h"

using namespace strobe::testing;

TEST_CASE("loaders: every file of the fuzzers' corpus loads or is refused, in bounds") {
  for (const Loader& loader : library_loaders) replay_corpus(loader);
}
