// How much memory a piece of code allocates, counted where the address sanitizer is there to do so.
#pragma once

#include <algorithm>
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
// As in <sanitizer/allocator_interface.h>, which comes with Clang alone.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*, size_t),
                                                         void (*free_hook)(const volatile void*));
extern "C" size_t __sanitizer_get_allocated_size(const volatile void*);
#endif

namespace strobe::testing {

// Counts what its thread allocates as long as it lives; one at a time. All is 0 without the address sanitizer.
class MemoryMeter {
 public:
  MemoryMeter() {
#if defined(__SANITIZE_ADDRESS__)
    static const int installed = __sanitizer_install_malloc_and_free_hooks(
        [](const volatile void*, size_t size) {
          if (!counts_) return;
          largest_ = std::max(largest_, size);
          live_ += static_cast<std::ptrdiff_t>(size);
          peak_ = std::max(peak_, live_);
        },
        [](const volatile void* memory) {
          if (!counts_ || memory == nullptr) return;
          live_ -= static_cast<std::ptrdiff_t>(__sanitizer_get_allocated_size(memory));
        });
    counts_ = installed != 0;
#endif
    largest_ = 0;
    live_ = peak_ = 0;
  }
  ~MemoryMeter() { counts_ = false; }
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  size_t largest() const { return largest_; }                 // of single allocations
  size_t peak() const { return static_cast<size_t>(peak_); }  // of what was allocated since and not yet freed

 private:
  static inline thread_local bool counts_ = false;
  static inline thread_local size_t largest_ = 0;
  static inline thread_local std::ptrdiff_t live_ = 0, peak_ = 0;
};

}  // namespace strobe::testing
