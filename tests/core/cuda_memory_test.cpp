// The allocator and streams on a GPU.
#include "strobe/kernels/device.h"
#include "support/op_cases.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr Device gpu = Device::cuda();

// Keeps the stream busy for some milliseconds, and returns what the last of the work wrote.
Tensor slow_work(int64_t size) {
  Tensor x = ones({size}, DType::f32, gpu);
  for (int i = 0; i < 20; ++i) x = x * 1.0;
  return x;
}

}  // namespace

TEST_CASE("gpu memory: bytes are counted by tag, with peaks" * needs_gpu()) {
  const size_t before = memory_stats(gpu).current;
  reset_peak_memory(gpu);
  {
    const MemoryTag tag("gpu memory test");
    const Tensor a = empty({100}, DType::f32, gpu);
    { const Tensor b = empty({10}, DType::f64, gpu); }
    const Tensor c = empty({1}, DType::f32, gpu);
    CHECK(memory_stats("gpu memory test", gpu).current == 404);
    CHECK(memory_stats(gpu).peak == before + 480);
  }
  CHECK(memory_stats("gpu memory test", gpu).current == 0);
  CHECK(memory_stats("gpu memory test", Device::cpu()).peak == 0);
}

TEST_CASE("gpu memory: freed blocks are used again on their stream only" * needs_gpu()) {
  const void* first = empty({12345}, DType::f32, gpu).data();
  const size_t reserved = memory_reserved(gpu);
  CHECK(empty({12345}, DType::f32, gpu).data() == first);
  CHECK(memory_reserved(gpu) == reserved);
  const OwnStream other(gpu);
  {
    const StreamGuard guard(other.get());
    CHECK(empty({12345}, DType::f32, gpu).data() != first);
  }
  CHECK(empty({12345}, DType::f32, gpu).data() == first);
  release_cached_memory(gpu);
  CHECK(memory_reserved(gpu) < reserved);
}

TEST_CASE("gpu memory: the limit and the device's own end are said, and nothing breaks" * needs_gpu()) {
  const size_t limit = memory_limit(gpu);
  CHECK(limit == device_memory(gpu).total);
  {
    const MemoryTag tag("gpu ballast");
    release_cached_memory(gpu);
    const Tensor held = empty({1 << 20}, DType::f32, gpu);
    set_memory_limit(memory_reserved(gpu) + (2 << 20), gpu);
    const std::string message = error_of([] { empty({1 << 20}, DType::f32, gpu); });
    set_memory_limit(limit, gpu);
    CHECK(contains(message, "4 MiB (4194304 bytes) asked for tag 'gpu ballast' on cuda:0"));
    CHECK(contains(message, "'gpu ballast' 4 MiB"));
    CHECK(contains(message, "at most 2 MiB"));
    set_memory_limit(size_t{1} << 60, gpu);
    const std::string refused = error_of([] { empty({int64_t{1} << 50}, DType::f32, gpu); });
    set_memory_limit(limit, gpu);
    CHECK(contains(refused, "the device has no more"));
    CHECK(contains(refused, "is available"));
  }
  CHECK(sum(ones({1 << 20}, DType::f32, gpu)).item<double>() == 1 << 20);
}

TEST_CASE("gpu memory: memory freed while work still uses it is not given to others" * needs_gpu()) {
  constexpr int64_t size = 1 << 24;
  const OwnStream one(gpu), two(gpu);
  for (int round = 0; round < 5; ++round) {
    Tensor result;
    {
      const StreamGuard guard(one.get());
      result = slow_work(size) + 1.0;  // its inputs are freed while the work is still queued
    }
    {
      const StreamGuard guard(two.get());
      for (int i = 0; i < 8; ++i) full({size}, -5.0, DType::f32, gpu);
    }
    const StreamGuard guard(one.get());
    CHECK(sum(result).item<double>() == 2.0 * size);
  }
}

TEST_CASE("gpu memory: memory of one stream that another one used is reused after that use" * needs_gpu()) {
  constexpr int64_t size = 1 << 24;
  const OwnStream maker(gpu), user(gpu);
  for (int round = 0; round < 5; ++round) {
    Tensor x, y;
    {
      const StreamGuard guard(maker.get());
      x = full({size}, 3.0, DType::f32, gpu);
      synchronize(maker.get());
    }
    {
      const StreamGuard guard(user.get());
      slow_work(size);
      y = x * 2.0;
      x = Tensor();
    }
    {
      const StreamGuard guard(maker.get());
      full({size}, -1.0, DType::f32, gpu);  // may get x's memory
    }
    const StreamGuard guard(user.get());
    CHECK(sum(y).item<double>() == 6.0 * size);
  }
}

TEST_CASE("gpu streams: tensors may outlive the stream they were made on" * needs_gpu()) {
  Tensor x;
  {
    const OwnStream stream(gpu);
    const StreamGuard guard(stream.get());
    x = slow_work(1 << 20);
  }
  CHECK(sum(x).item<double>() == 1 << 20);
  x = Tensor();
  release_cached_memory(gpu);
}

TEST_CASE("gpu streams: a guard covers this thread and its scope" * needs_gpu()) {
  const OwnStream stream(gpu);
  CHECK(stream.get().handle != nullptr);
  {
    const StreamGuard guard(stream.get());
    CHECK(current_stream(gpu).handle == stream.get().handle);
    CHECK(current_stream(Device::cpu()).handle == nullptr);
    CHECK(ones({3}, DType::f32, gpu).to_vector<float>() == std::vector<float>(3, 1.0f));
  }
  CHECK(current_stream(gpu).handle == nullptr);
}
