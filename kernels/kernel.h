// How a kernel is declared, dispatched by device and dtype, and how errors are raised.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "strobe/config.h"
#include "strobe/kernels/types.h"

namespace strobe {

// Every failure of the library: the message names the operation, the argument, what was given and what was expected.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name_of(dtype); }
inline std::ostream& operator<<(std::ostream& out, Device device) {
  return device.type == DeviceType::cpu ? out << "cpu" : out << "cuda:" << device.index;
}

template <class... Parts>
std::string concat_message(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(concat_message(parts...));
}

#define STROBE_CHECK(condition, ...)               \
  do {                                             \
    if (!(condition)) ::strobe::fail(__VA_ARGS__); \
  } while (false)

// Declares kernel `name` for every backend and the function that picks one. A backend without it fails to link.
#define STROBE_KERNEL(name, Args)                                              \
  namespace cpu {                                                              \
  void name(const Args& args, const Stream& stream);                           \
  }                                                                            \
  namespace cuda {                                                             \
  void name(const Args& args, const Stream& stream);                           \
  }                                                                            \
  inline void name(const Args& args, const Stream& stream) {                   \
    if (stream.device.type == DeviceType::cpu) return cpu::name(args, stream); \
    if constexpr (built_with_cuda) {                                           \
      cuda::name(args, stream);                                                \
    } else {                                                                   \
      fail(#name ": this build has no CUDA backend");                          \
    }                                                                          \
  }

// Declares for every backend, and the function that picks one: bytes of scratch memory a kernel needs on `device`.
#define STROBE_WORKSPACE(name, Args)                                    \
  namespace cpu {                                                       \
  size_t name(const Args& args, Device device);                         \
  }                                                                     \
  namespace cuda {                                                      \
  size_t name(const Args& args, Device device);                         \
  }                                                                     \
  inline size_t name(const Args& args, Device device) {                 \
    if (device.type == DeviceType::cpu) return cpu::name(args, device); \
    if constexpr (built_with_cuda) {                                    \
      return cuda::name(args, device);                                  \
    } else {                                                            \
      fail(#name ": this build has no CUDA backend");                   \
    }                                                                   \
  }

// Calls f.template operator()<T>() with the C++ type of a floating-point dtype.
template <class F>
decltype(auto) dispatch_floating(DType dtype, const char* operation, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f.template operator()<float>();
    case DType::f64:
      return f.template operator()<double>();
    case DType::bf16:
      return f.template operator()<bfloat16>();
    case DType::f16:
      return f.template operator()<float16>();
    default:
      fail(operation, ": dtype ", dtype, " given, expected f32, f64, bf16 or f16");
  }
}

// Calls f.template operator()<T>() with the C++ type of an index dtype.
template <class F>
decltype(auto) dispatch_index(DType dtype, const char* operation, F&& f) {
  switch (dtype) {
    case DType::i32:
      return f.template operator()<int32_t>();
    case DType::i64:
      return f.template operator()<int64_t>();
    default:
      fail(operation, ": dtype ", dtype, " given, expected i32 or i64");
  }
}

// Calls f.template operator()<T>() with the C++ type of any dtype.
template <class F>
decltype(auto) dispatch_any(DType dtype, const char* operation, F&& f) {
  return is_floating(dtype) ? dispatch_floating(dtype, operation, f) : dispatch_index(dtype, operation, f);
}

}  // namespace strobe
