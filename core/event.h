// Marks in the order of a stream's work, for measuring how long the work between two of them took.
#pragma once

#include <chrono>
#include <memory>

#include "strobe/core/context.h"

namespace strobe {

// A mark behind all work queued so far on this thread's current stream of a device; nothing waits for it.
class Event {
 public:
  explicit Event(Device device = default_device());

  // Seconds from `start`, an event of the same device, to this one: on a GPU by its own clock, to half a microsecond.
  // Waits until both are reached.
  double seconds_since(const Event& start) const;

 private:
  Device device_;
  std::shared_ptr<void> mark_;                     // on a GPU
  std::chrono::steady_clock::time_point reached_;  // on the CPU, whose work is done when it is queued
};

}  // namespace strobe
