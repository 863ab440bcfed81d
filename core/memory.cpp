#include "strobe/core/memory.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "strobe/kernels/device.h"

namespace strobe {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool reuse_blocks = false;  // every block fresh, so that the sanitizer sees use after free
#else
constexpr bool reuse_blocks = true;
#endif

thread_local int current_tag = 0;

// Rounds up to one of eight sizes per power of two: few classes, so blocks are reused, and at most 1/8 is wasted.
size_t class_step(size_t bytes) { return std::max<size_t>(64, std::bit_floor(bytes) / 8); }
size_t size_class(size_t bytes) {
  const size_t step = class_step(bytes);
  return bytes > SIZE_MAX - step ? bytes : (bytes + step - 1) / step * step;
}

std::string readable(size_t bytes) {
  std::ostringstream out;
  out.precision(4);
  if (bytes >= size_t{1} << 30) {
    out << static_cast<double>(bytes) / (1 << 30) << " GiB";
  } else if (bytes >= size_t{1} << 20) {
    out << static_cast<double>(bytes) / (1 << 20) << " MiB";
  } else if (bytes >= size_t{1} << 10) {
    out << static_cast<double>(bytes) / (1 << 10) << " KiB";
  } else {
    out << bytes << " bytes";
  }
  return out.str();
}

// Memory kept for reuse. Work queued on `stream` may still use it, so it is reused in that stream's order; `event`
// marks work on another stream that has to be waited for.
struct Block {
  void* data;
  void* event;
};

struct Pool {
  explicit Pool(Device pool_device) : device(pool_device) {}

  Device device;
  std::map<std::pair<void*, size_t>, std::vector<Block>> cached;  // by stream and size class
  size_t cached_bytes = 0;
  size_t live_class_bytes = 0;
  size_t limit = device_memory(device).total;
  MemoryStats total;
  std::vector<MemoryStats> by_tag;

  void release_cached() {
    for (auto& [place, blocks] : cached) {
      for (const Block& block : blocks) {
        destroy_event(block.event, device);
        raw_free(block.data, device);
      }
    }
    cached.clear();
    cached_bytes = 0;
  }
};

struct Allocator {
  std::mutex mutex;
  std::vector<std::string> tag_names{"untagged"};
  std::vector<std::unique_ptr<Pool>> pools;

  Pool& pool(Device device) {
    for (auto& pool : pools) {
      if (pool->device == device) return *pool;
    }
    return *pools.emplace_back(std::make_unique<Pool>(device));
  }

  int tag_id(const std::string& name) {
    const auto id = std::find(tag_names.begin(), tag_names.end(), name) - tag_names.begin();
    if (id == std::ssize(tag_names)) tag_names.push_back(name);
    return static_cast<int>(id);
  }

  // `refused`: by the device itself, below the limit.
  [[noreturn]] void out_of_memory(const Pool& pool, size_t bytes, int tag, bool refused) {
    std::ostringstream out;
    out << "allocate: " << readable(bytes) << " (" << bytes << " bytes) asked for tag '"
        << tag_names[static_cast<size_t>(tag)] << "' on " << pool.device << ", but ";
    if (refused) {
      out << "the device has no more (" << readable(device_memory(pool.device).available) << " of "
          << readable(device_memory(pool.device).total) << " is available)";
    } else {
      out << "the limit is " << readable(pool.limit);
    }
    out << " and " << readable(pool.total.current) << " is held";
    for (size_t id = 0; id < pool.by_tag.size(); ++id) {
      if (pool.by_tag[id].current > 0) out << ", '" << tag_names[id] << "' " << readable(pool.by_tag[id].current);
    }
    if (!refused) {
      const size_t left = pool.limit > pool.live_class_bytes ? pool.limit - pool.live_class_bytes : 0;
      const size_t room = left / class_step(left) * class_step(left);
      out << "; at most " << readable(room) << " (" << room << " bytes) would fit";
    }
    throw OutOfMemory(out.str());
  }

  void* allocate(size_t bytes, const Stream& stream, int tag) {
    const std::lock_guard lock(mutex);
    Pool& from = pool(stream.device);
    const size_t size = size_class(bytes);
    if (size > from.limit || from.live_class_bytes > from.limit - size) out_of_memory(from, bytes, tag, false);
    void* data = nullptr;
    if (const auto found = from.cached.find({stream.handle, size});
        found != from.cached.end() && !found->second.empty()) {
      const Block block = found->second.back();
      wait_event(block.event, stream);
      found->second.pop_back();
      from.cached_bytes -= size;
      data = block.data;
    } else {
      if (from.live_class_bytes + from.cached_bytes > from.limit - size) from.release_cached();
      data = raw_malloc(size, stream.device);
      if (data == nullptr) {
        from.release_cached();
        data = raw_malloc(size, stream.device);
      }
      if (data == nullptr) out_of_memory(from, bytes, tag, true);
    }
    from.live_class_bytes += size;
    if (from.by_tag.size() < tag_names.size()) from.by_tag.resize(tag_names.size());
    for (MemoryStats* stats : {&from.total, &from.by_tag[static_cast<size_t>(tag)]}) {
      stats->current += bytes;
      stats->peak = std::max(stats->peak, stats->current);
    }
    return data;
  }

  // `stream` is the one the memory was allocated on.
  void free(void* data, size_t bytes, const Stream& stream, int tag) {
    const Stream last_user = current_stream(stream.device);
    void* const event = last_user.handle == stream.handle ? nullptr : record_event(last_user);
    const std::lock_guard lock(mutex);
    Pool& to = pool(stream.device);
    const size_t size = size_class(bytes);
    to.live_class_bytes -= size;
    to.total.current -= bytes;
    to.by_tag[static_cast<size_t>(tag)].current -= bytes;
    if (!reuse_blocks) return raw_free(data, stream.device);
    to.cached[{stream.handle, size}].push_back({data, event});
    to.cached_bytes += size;
  }
};

// Never destroyed: tensors of static lifetime may outlive any static allocator.
Allocator& allocator() {
  static Allocator* const instance = new Allocator;
  return *instance;
}

// Runs f(allocator, pool) under the lock.
template <class F>
auto with_pool(Device device, F&& f) {
  Allocator& all = allocator();
  const std::lock_guard lock(all.mutex);
  return f(all, all.pool(device));
}

}  // namespace

MemoryTag::MemoryTag(const std::string& name) : previous_(current_tag) {
  Allocator& all = allocator();
  const std::lock_guard lock(all.mutex);
  current_tag = all.tag_id(name);
}
MemoryTag::MemoryTag(int id) : previous_(current_tag) {
  Allocator& all = allocator();
  const std::lock_guard lock(all.mutex);
  STROBE_CHECK(id >= 0 && id < std::ssize(all.tag_names), "MemoryTag: id ", id, " given, expected one of ",
               all.tag_names.size(), " tags");
  current_tag = id;
}
MemoryTag::~MemoryTag() { current_tag = previous_; }
int MemoryTag::current() { return current_tag; }

MemoryStats memory_stats(Device device) {
  return with_pool(device, [](Allocator&, Pool& pool) { return pool.total; });
}

MemoryStats memory_stats(const std::string& tag, Device device) {
  return with_pool(device, [&](Allocator& all, Pool& pool) {
    const size_t id = static_cast<size_t>(all.tag_id(tag));
    return id < pool.by_tag.size() ? pool.by_tag[id] : MemoryStats{};
  });
}

std::vector<std::string> memory_tags(Device device) {
  return with_pool(device, [](Allocator& all, Pool& pool) {
    std::vector<std::string> used;
    for (size_t id = 0; id < pool.by_tag.size(); ++id) {
      if (pool.by_tag[id].peak > 0) used.push_back(all.tag_names[id]);
    }
    return used;
  });
}

void reset_peak_memory(Device device) {
  with_pool(device, [](Allocator&, Pool& pool) {
    pool.total.peak = pool.total.current;
    for (MemoryStats& stats : pool.by_tag) stats.peak = stats.current;
  });
}

size_t memory_reserved(Device device) {
  return with_pool(device, [](Allocator&, Pool& pool) { return pool.live_class_bytes + pool.cached_bytes; });
}

void release_cached_memory(Device device) {
  with_pool(device, [](Allocator&, Pool& pool) { pool.release_cached(); });
}

void set_memory_limit(size_t bytes, Device device) {
  with_pool(device, [bytes](Allocator&, Pool& pool) {
    pool.limit = bytes;
    if (pool.live_class_bytes + pool.cached_bytes > bytes) pool.release_cached();
  });
}

size_t memory_limit(Device device) {
  return with_pool(device, [](Allocator&, Pool& pool) { return pool.limit; });
}

Storage::Storage(size_t bytes, Device device) : bytes_(bytes), stream_(current_stream(device)), tag_(current_tag) {
  if (bytes > 0) {
    data_ = allocator().allocate(bytes, stream_, tag_);
  } else {
    require_device("allocate", device);
  }
}

Storage::~Storage() {
  if (data_ != nullptr) allocator().free(data_, bytes_, stream_, tag_);
}

}  // namespace strobe
