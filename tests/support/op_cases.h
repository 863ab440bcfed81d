// One row per operation, run several ways on each device: gradients in f64, agreement of every dtype with f64 on the
// CPU, both also on strided inputs, and no memory left behind.
#pragma once

#include <string>
#include <vector>

#include "support/gpu.h"
#include "support/gradcheck.h"

namespace strobe::testing {

struct OpCase {
  const char* name;
  std::vector<Shape> shapes;  // of the floating-point inputs
  OpFunction function;
  double low = -1.0;  // inputs are drawn uniformly from [low, high]
  double high = 1.0;
};

// Result and input gradients, the cotangent being all ones times a fixed pattern.
inline std::vector<Tensor> run_case(const OpCase& row, const std::vector<Tensor>& values, DType dtype, Device device,
                                    bool strided) {
  const DeviceGuard guard(device);
  std::vector<Input> inputs;
  std::vector<Tensor> views;
  for (const Tensor& value : values) {
    inputs.push_back(make_input(value.to(dtype).to(device), strided));
    views.push_back(inputs.back().view);
  }
  const Tensor y = row.function(views);
  const RandomState state = random_state();
  seed(77);
  Tensor w = uniform(y.shape(), 0.5, 1.5, DType::f64, Device::cpu()).to(DType::bf16).to(y.dtype()).to(device);
  set_random_state(state);
  if (strided && y.rank() > 1) w = transpose(contiguous(transpose(w, 0, -1)), 0, -1);
  y.backward(w);
  std::vector<Tensor> results{y.detach()};
  for (const Input& input : inputs) results.push_back(input.leaf.grad());
  return results;
}

inline void check_case(const OpCase& row, Device device) {
  CAPTURE(std::string(row.name));
  for (bool strided : {false, true}) {
    CAPTURE(strided);
    {
      const DeviceGuard guard(device);
      gradcheck(row.function, row.shapes, strided, row.low, row.high);
    }
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      CAPTURE(std::string(name_of(dtype)));
      std::vector<Tensor> values;  // rounded to the dtype, so that only the computation differs
      for (const Shape& shape : row.shapes) {
        values.push_back(uniform(shape, row.low, row.high, DType::f64).to(dtype).to(DType::f64));
      }
      const std::vector<Tensor> reference = run_case(row, values, DType::f64, Device::cpu(), strided);
      const size_t before = memory_stats(device).current;
      {
        const std::vector<Tensor> results = run_case(row, values, dtype, device, strided);
        for (size_t i = 0; i < results.size(); ++i) {
          CAPTURE(i);
          CHECK((i == 0 || results[i].dtype() == dtype));
          CHECK(results[i].device() == device);
          CHECK(relative_difference(results[i], reference[i]) <= tolerance(dtype));
        }
        const std::vector<Tensor> again = run_case(row, values, dtype, device, strided);
        for (size_t i = 0; i < results.size(); ++i) CHECK(same_bits(again[i], results[i]));
      }
      CHECK(memory_stats(device).current == before);
    }
  }
}

}  // namespace strobe::testing
