#include "strobe/core/context.h"

#include <array>

#include "strobe/kernels/device.h"

namespace strobe {
namespace {

constexpr int max_gpus = 64;

thread_local Device current_device = Device::cpu();
// Without a destructor, as tensors of static lifetime are freed after the thread's own variables.
thread_local std::array<void*, max_gpus> gpu_streams{};
thread_local RandomState current_random_state;

void*& gpu_stream(Device device) {
  STROBE_CHECK(device.index >= 0 && device.index < max_gpus, "stream: device ", device, " given, expected at most ",
               max_gpus, " GPUs");
  return gpu_streams[static_cast<size_t>(device.index)];
}

}  // namespace

Device default_device() { return current_device; }

DeviceGuard::DeviceGuard(Device device) : previous_(current_device) {
  require_device("DeviceGuard", device);
  current_device = device;
}
DeviceGuard::~DeviceGuard() { current_device = previous_; }

Stream current_stream(Device device) { return {device, device.type == DeviceType::cpu ? nullptr : gpu_stream(device)}; }

StreamGuard::StreamGuard(Stream stream) : previous_(current_stream(stream.device)) {
  require_device("StreamGuard", stream.device);
  if (stream.device.type == DeviceType::cuda) gpu_stream(stream.device) = stream.handle;
}
StreamGuard::~StreamGuard() {
  if (previous_.device.type == DeviceType::cuda) gpu_stream(previous_.device) = previous_.handle;
}

OwnStream::OwnStream(Device device) : stream_(create_stream(device)) {}
OwnStream::~OwnStream() { destroy_stream(stream_); }

RandomState random_state() { return current_random_state; }
void set_random_state(RandomState state) { current_random_state = state; }
void seed(uint64_t value) { current_random_state = {value, 0}; }
RandomState next_random_state() {
  const RandomState state = current_random_state;
  ++current_random_state.offset;
  return state;
}

}  // namespace strobe
