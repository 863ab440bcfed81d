// One row per operation, run several ways: gradients in f64 (also on strided inputs), agreement of every dtype and
// device with f64 on the CPU, and no memory left behind.
#pragma once

#include <string>
#include <vector>

#include "support/gradcheck.h"

namespace strobe::testing {

struct OpCase {
  const char* name;
  std::vector<Shape> shapes;  // of the floating-point inputs
  OpFunction function;
  double low = -1.0;  // inputs are drawn uniformly from [low, high]
  double high = 1.0;
};

inline std::vector<Device> devices() {
  std::vector<Device> present{Device::cpu()};
  if (cuda_available()) present.push_back(Device::cuda());
  return present;
}

// Result and input gradients, the cotangent being all ones times a fixed pattern.
inline std::vector<Tensor> run_case(const OpCase& row, const std::vector<Tensor>& values, DType dtype, Device device) {
  std::vector<Tensor> inputs;
  for (const Tensor& value : values) {
    Tensor input = value.to(dtype).to(device);
    if (!owns_storage_alone(input)) {
      const Tensor copy = empty_like(input);
      copy.copy_from(input);
      input = copy;
    }
    inputs.push_back(input.set_requires_grad());
  }
  const Tensor y = row.function(inputs);
  const RandomState state = random_state();
  seed(77);
  const Tensor w = uniform(y.shape(), 0.5, 1.5, DType::f64).to(DType::bf16).to(y.dtype()).to(device);
  set_random_state(state);
  y.backward(w);
  std::vector<Tensor> results{y.detach()};
  for (const Tensor& input : inputs) results.push_back(input.grad());
  return results;
}

inline void check_case(const OpCase& row) {
  CAPTURE(std::string(row.name));
  for (bool strided : {false, true}) {
    CAPTURE(strided);
    gradcheck(row.function, row.shapes, strided, row.low, row.high);
  }
  for (Device device : devices()) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      std::vector<Tensor> values;  // rounded to the dtype, so that only the computation differs
      for (const Shape& shape : row.shapes) {
        values.push_back(uniform(shape, row.low, row.high, DType::f64).to(dtype).to(DType::f64));
      }
      const std::vector<Tensor> reference = run_case(row, values, DType::f64, Device::cpu());
      const size_t before = memory_stats(device).current;
      {
        const std::vector<Tensor> results = run_case(row, values, dtype, device);
        for (size_t i = 0; i < results.size(); ++i) {
          CAPTURE(std::string(name_of(dtype)));
          CAPTURE(i);
          CHECK((i == 0 || results[i].dtype() == dtype));
          CHECK(relative_difference(results[i], reference[i]) <= tolerance(dtype));
        }
      }
      CHECK(memory_stats(device).current == before);
    }
  }
}

}  // namespace strobe::testing
