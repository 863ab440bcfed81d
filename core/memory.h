// Memory of tensors: a caching allocator that counts live bytes by tag, keeps their peaks and enforces a limit.
//
// On a GPU it works in the order of streams, and the host never waits: memory that is freed while queued work still
// uses it is given to later work on the stream it was allocated on, which runs after. What the thread's current stream
// did with it until it was freed is waited for, too. A tensor that yet another stream uses has to outlive that use.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "strobe/core/context.h"

namespace strobe {

// Thrown when an allocation does not fit. The message says what was asked, what each tag holds and what would fit.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// Names what is allocated until the end of the scope (on this thread). Backward passes run under their forward's tag.
class MemoryTag {
 public:
  explicit MemoryTag(const std::string& name);
  explicit MemoryTag(int id);
  ~MemoryTag();
  MemoryTag(const MemoryTag&) = delete;
  MemoryTag& operator=(const MemoryTag&) = delete;

  // The tag this thread allocates under now.
  static int current();

 private:
  int previous_;
};

// Live bytes as asked for by tensors; what the allocator keeps for reuse is not among them.
struct MemoryStats {
  size_t current = 0;
  size_t peak = 0;
};

// Over all tags, and of one tag (zero for a tag never used).
MemoryStats memory_stats(Device device = default_device());
MemoryStats memory_stats(const std::string& tag, Device device = default_device());
std::vector<std::string> memory_tags(Device device = default_device());

// Sets every peak to the current value.
void reset_peak_memory(Device device = default_device());

// Bytes held from the device: live ones and those kept for reuse.
size_t memory_reserved(Device device = default_device());

// Gives all that is kept for reuse back to the device.
void release_cached_memory(Device device = default_device());

// The most bytes to hold from the device; by default all that the machine or the GPU has.
void set_memory_limit(size_t bytes, Device device = default_device());
size_t memory_limit(Device device = default_device());

// Owns a run of bytes on a device, for the current stream of this thread.
class Storage {
 public:
  Storage(size_t bytes, Device device);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return stream_.device; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
  Stream stream_;
  int tag_;
};

}  // namespace strobe
