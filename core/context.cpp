#include "strobe/core/context.h"

namespace strobe {
namespace {

thread_local Device current_device = Device::cpu();
thread_local Stream cuda_stream{Device::cuda(), nullptr};
thread_local RandomState current_random_state;

}  // namespace

Device default_device() { return current_device; }

DeviceGuard::DeviceGuard(Device device) : previous_(current_device) {
  STROBE_CHECK(device.type == DeviceType::cpu || built_with_cuda, "DeviceGuard: device ", device,
               " given, but this build has no CUDA backend");
  current_device = device;
}
DeviceGuard::~DeviceGuard() { current_device = previous_; }

Stream current_stream(Device device) {
  if (device.type == DeviceType::cpu) return {device, nullptr};
  return cuda_stream.device == device ? cuda_stream : Stream{device, nullptr};
}

StreamGuard::StreamGuard(Stream stream) : previous_(cuda_stream) {
  if (stream.device.type == DeviceType::cuda) cuda_stream = stream;
}
StreamGuard::~StreamGuard() { cuda_stream = previous_; }

RandomState random_state() { return current_random_state; }
void set_random_state(RandomState state) { current_random_state = state; }
void seed(uint64_t value) { current_random_state = {value, 0}; }
RandomState next_random_state() {
  const RandomState state = current_random_state;
  ++current_random_state.offset;
  return state;
}

}  // namespace strobe
