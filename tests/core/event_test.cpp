// Events: time between two marks, on the CPU's clock and on a GPU's.
#include "strobe/core/event.h"

#include <chrono>
#include <thread>

#include "support/compare.h"
#include "support/gpu.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("event: the CPU's time passes between two marks") {
  const Event start(Device::cpu());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const Event end(Device::cpu());
  CHECK(end.seconds_since(start) >= 0.02);
  CHECK(start.seconds_since(end) == -end.seconds_since(start));
  CHECK(end.seconds_since(end) == 0);
}

TEST_CASE("event: a GPU that is not there is refused" * needs_no_gpu()) {
  CHECK(contains(error_of([] { Event event(Device::cuda()); }), "cuda:0"));
}

TEST_CASE("event: a GPU's time covers the work between two marks, which nothing waits for" * needs_gpu()) {
  const DeviceGuard device(Device::cuda());
  const Tensor x = zeros({int64_t{1} << 26});  // 256 MiB: at least 25 us to read and write
  const auto measure = [&](int sums) {
    const Event start;
    Tensor y = x;
    for (int i = 0; i < sums; ++i) y = y + 1.0;
    return Event().seconds_since(start);
  };
  measure(50);
  const double short_time = measure(5), long_time = measure(50);
  CAPTURE(short_time);
  CAPTURE(long_time);
  CHECK(short_time > 5 * 25e-6);
  CHECK(long_time > 5 * short_time);
  const Event start, end;
  CHECK(end.seconds_since(start) < 1e-3);
}

TEST_CASE("event: marks of two devices have no time between them" * needs_gpu()) {
  const Event cpu(Device::cpu()), gpu(Device::cuda());
  CHECK(contains(error_of([&] { gpu.seconds_since(cpu); }), "start on cpu given, expected cuda:0"));
}
