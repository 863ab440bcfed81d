// What each thread takes for granted: the device new tensors go to, the stream work is queued on, the random state.
#pragma once

#include "strobe/kernels/kernel.h"

namespace strobe {

// The device of tensors made without naming one; the CPU unless a DeviceGuard says otherwise.
Device default_device();

// Makes `device` this thread's default until the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  Device previous_;
};

// The stream on which this thread queues work for `device`: on a GPU CUDA's default stream unless a StreamGuard says
// otherwise.
Stream current_stream(Device device);

// Queues this thread's work for the stream's device on `stream` until the end of the scope. Streams know nothing of
// each other: who needs results of one on another waits for them (synchronize in kernels/device.h, or item and
// to_vector).
class StreamGuard {
 public:
  explicit StreamGuard(Stream stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  Stream previous_;
};

// A stream of its own: on a GPU its work may overlap that of all others. Waits for its work in the end.
class OwnStream {
 public:
  explicit OwnStream(Device device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  const Stream& get() const { return stream_; }

 private:
  Stream stream_;
};

// Random numbers are counter-based (Philox; Salmon et al. 2011): each random operation takes the current offset, which
// then grows by one. Saving and restoring this state repeats everything that follows bit for bit.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;
  friend bool operator==(const RandomState&, const RandomState&) = default;
};

RandomState random_state();
void set_random_state(RandomState state);

// Starts the sequence of `value` from its beginning.
void seed(uint64_t value);

// Draws from `state` until the end of the scope, then goes on where the thread was.
class RandomStateGuard {
 public:
  explicit RandomStateGuard(RandomState state) : previous_(random_state()) { set_random_state(state); }
  ~RandomStateGuard() { set_random_state(previous_); }
  RandomStateGuard(const RandomStateGuard&) = delete;
  RandomStateGuard& operator=(const RandomStateGuard&) = delete;

 private:
  RandomState previous_;
};

// The state one random operation uses; moves on to the next.
RandomState next_random_state();

}  // namespace strobe
