#include "strobe/core/memory.h"

#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("memory: bytes are counted by tag, with peaks") {
  const size_t before = memory_stats().current;
  reset_peak_memory();
  {
    const MemoryTag tag("memory test");
    const Tensor a = empty({100});
    {
      const MemoryTag inner("memory test, inner");
      const Tensor b = empty({10}, DType::f64);
      CHECK(memory_stats("memory test, inner").current == 80);
    }
    const Tensor c = empty({1});
    CHECK(memory_stats("memory test").current == 404);
    CHECK(memory_stats().current == before + 404);
    CHECK(memory_stats().peak == before + 480);
  }
  CHECK(memory_stats("memory test").current == 0);
  CHECK(memory_stats("memory test").peak == 404);
  reset_peak_memory();
  CHECK(memory_stats("memory test").peak == 0);
  CHECK(memory_stats("never used").current == 0);
}

TEST_CASE("memory: backward runs under the tag of its forward") {
  const Tensor x = ones({64}).set_requires_grad();
  Tensor y;
  {
    const MemoryTag tag("forward tag");
    y = sum(exp(x) * x);
  }
  reset_peak_memory();
  const size_t held = memory_stats("forward tag").current;
  y.backward();
  CHECK(memory_stats("forward tag").peak > held);
}

#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("memory: freed blocks are used again") {
  const void* first = empty({12345}).data();
  const size_t reserved = memory_reserved();
  CHECK(empty({12345}).data() == first);
  CHECK(empty({12300}).data() == first);
  CHECK(memory_reserved() == reserved);
  release_cached_memory();
  CHECK(memory_reserved() < reserved);
}
#endif

TEST_CASE("memory: the limit's error says what was asked, what is held and what would fit") {
  const size_t limit = memory_limit();
  {
    const MemoryTag tag("ballast");
    const Tensor held = empty({1 << 20});
    release_cached_memory();
    set_memory_limit(memory_reserved() + (2 << 20));
    const Tensor fits = empty({1 << 18});
    const std::string message = error_of([] { empty({1 << 20}); });
    set_memory_limit(limit);
    CHECK(contains(message, "4 MiB (4194304 bytes) asked for tag 'ballast'"));
    CHECK(contains(message, "'ballast' 5 MiB"));
    CHECK(contains(message, "at most 1 MiB (1048576 bytes) would fit"));
  }
  CHECK_NOTHROW(empty({1 << 20}));
  CHECK_THROWS_AS(empty({int64_t{1} << 60}), OutOfMemory);
  CHECK_THROWS_AS(empty({int64_t{1} << 62}), Error);
}

TEST_CASE("memory: what the error says would fit does fit, for odd sizes too") {
  const size_t limit = memory_limit();
  release_cached_memory();
  const size_t held = memory_reserved();
  set_memory_limit(held + 1000);
  const std::string message = error_of([] { empty({1000}); });
  const size_t start = message.rfind("at most ");
  const size_t digits = message.find('(', start);
  const int64_t room = std::stoll(message.substr(digits + 1));
  CHECK(room > 800);
  CHECK_NOTHROW(empty({room / 4}));
  release_cached_memory();
  CHECK_THROWS_AS(empty({room / 4 + 16}), OutOfMemory);
  set_memory_limit(limit);
}
