// Tensor maps are encoded by the driver, whose function is looked up so that no program has to link to it.
#include "strobe/kernels/cuda/tensor_map.h"

#include <array>

#include "strobe/kernels/cuda/cuda.h"

namespace strobe::kernels::cuda {
namespace {

decltype(&cuTensorMapEncodeTiled) encode_function(const char* operation) {
  static const auto function = [operation] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    strobe::cuda::check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
        operation);
#else
    strobe::cuda::check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result),
                             operation);
#endif
    STROBE_CHECK(found != nullptr, operation,
                 ": the driver has no cuTensorMapEncodeTiled, expected a driver for CUDA 12.0 or newer");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

constexpr int64_t element_bytes = 2, alignment = 16;

struct Axis {
  int64_t size;
  int64_t bytes;  // from one position to the next
};
// seq_len, num_heads, batch; where there is but one position any distance will do.
std::array<Axis, 3> outer_axes(const AttentionTensor& tensor, int64_t batch, int64_t seq_len, int64_t num_heads) {
  std::array<Axis, 3> axes{{{seq_len, tensor.seq_stride * element_bytes},
                            {num_heads, tensor.head_stride * element_bytes},
                            {batch, tensor.batch_stride * element_bytes}}};
  for (Axis& axis : axes) {
    if (axis.size == 1) axis.bytes = alignment;
  }
  return axes;
}

}  // namespace

std::string tensor_map_refusal(const char* name, const AttentionTensor& tensor, int64_t batch, int64_t seq_len,
                               int64_t num_heads) {
  constexpr int64_t farthest = int64_t{1} << 40;  // in bytes
  const bool is_given =
      tensor.data != nullptr || tensor.batch_stride != 0 || tensor.seq_stride != 0 || tensor.head_stride != 0;
  if (!is_given) return {};
  if (!strobe::cuda::aligned_to(alignment, static_cast<const char*>(tensor.data))) {
    return concat_message(name, " does not begin at a multiple of ", alignment, " bytes");
  }
  for (const auto& [size, bytes] : outer_axes(tensor, batch, seq_len, num_heads)) {
    if (bytes <= 0 || bytes % alignment != 0 || bytes >= farthest) {
      return concat_message(name, " has strides ", tensor.batch_stride, ", ", tensor.seq_stride, ", ",
                            tensor.head_stride, ", it takes multiples of ", alignment / element_bytes);
    }
  }
  return {};
}

CUtensorMap tensor_map(const char* operation, const AttentionTensor& tensor, DType dtype, int64_t batch,
                       int64_t seq_len, int64_t num_heads, int64_t head_dim, int box_rows) {
  cuuint64_t sizes[4] = {static_cast<cuuint64_t>(head_dim)}, strides[3];
  const std::array<Axis, 3> axes = outer_axes(tensor, batch, seq_len, num_heads);
  for (size_t i = 0; i < axes.size(); ++i) {
    sizes[i + 1] = static_cast<cuuint64_t>(axes[i].size);
    strides[i] = static_cast<cuuint64_t>(axes[i].bytes);
  }
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode_function(operation)(
      &map, dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, tensor.data,
      sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STROBE_CHECK(status == CUDA_SUCCESS, operation, ": the driver refuses a tensor map (error ", static_cast<int>(status),
               ") of sizes ", head_dim, ", ", seq_len, ", ", num_heads, ", ", batch);
  return map;
}

}  // namespace strobe::kernels::cuda
