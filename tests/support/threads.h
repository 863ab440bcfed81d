// The number of threads of the CPU kernels, for the length of a scope.
#pragma once

#include "strobe/kernels/device.h"

namespace strobe::testing {

class Threads {
 public:
  explicit Threads(int count) { set_num_threads(count); }
  ~Threads() { set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_ = num_threads();
};

}  // namespace strobe::testing
