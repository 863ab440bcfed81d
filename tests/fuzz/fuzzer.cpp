// The loaders under libFuzzer, one at a time: the environment variable STROBE_LOADER names it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "fuzz/config_loader.h"
#include "fuzz/loaders.h"

using namespace strobe::testing;

namespace {

Loader chosen_loader() {
  std::vector<Loader> loaders(std::begin(library_loaders), std::end(library_loaders));
  loaders.push_back(config_loader);
  const char* name = std::getenv("STROBE_LOADER");
  for (const Loader& loader : loaders) {
    if (name != nullptr && std::string_view(loader.name) == name) return loader;
  }
  std::fputs("STROBE_LOADER: expected one of", stderr);
  for (const Loader& loader : loaders) std::fprintf(stderr, " %s", loader.name);
  std::fputs("\n", stderr);
  std::exit(2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Loader loader = chosen_loader();
  fuzz_one(loader, {reinterpret_cast<const char*>(data), size});
  return 0;
}
