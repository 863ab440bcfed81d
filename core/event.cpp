#include "strobe/core/event.h"

#include "strobe/kernels/device.h"

namespace strobe {

Event::Event(Device device) : device_(device), reached_(std::chrono::steady_clock::now()) {
  if (device.type == DeviceType::cpu) return;
  mark_ = std::shared_ptr<void>(record_timed_event(current_stream(device)),
                                [device](void* event) { destroy_event(event, device); });
}

double Event::seconds_since(const Event& start) const {
  STROBE_CHECK(device_ == start.device_, "Event: start on ", start.device_, " given, expected ", device_);
  if (device_.type == DeviceType::cpu) return std::chrono::duration<double>(reached_ - start.reached_).count();
  return seconds_between(start.mark_.get(), mark_.get(), device_);
}

}  // namespace strobe
