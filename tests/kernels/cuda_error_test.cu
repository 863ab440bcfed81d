// The library beside a program that uses CUDA itself and left an error there.
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include "strobe/strobe.h"
#include "support/gpu.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("gpu: an error that the caller left in CUDA is not taken for one of ours" * needs_gpu()) {
  const auto leave_error = [] {
    void* nothing = nullptr;
    CHECK(cudaMalloc(&nothing, size_t{1} << 60) == cudaErrorMemoryAllocation);
  };
  const DeviceGuard gpu(Device::cuda());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    leave_error();
    const Tensor query = ones({1, 40, 2, 64}, dtype).set_requires_grad();
    const Tensor out = flash_attention(query, query, query);
    out.backward(ones({1, 40, 2, 64}, dtype));
    CHECK(out.to_vector<double>() == std::vector<double>(40 * 2 * 64, 1.0));
    CHECK(query.grad().defined());
    leave_error();
    const Tensor a = ones({32, 32}, dtype);
    CHECK(matmul(a, a).to_vector<double>() == std::vector<double>(32 * 32, 32.0));
    leave_error();
    synchronize(current_stream(Device::cuda()));
  }
  cudaGetLastError();  // leaves none to other cases
}
