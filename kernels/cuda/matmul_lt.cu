// Products through cuBLASLt, whose matrices are column-major: it computes the transpose of out as that of b times a.
#include "strobe/kernels/cuda/matmul_lt.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "strobe/kernels/cuda/cuda.h"

namespace strobe::kernels::cuda {
namespace {

using strobe::cuda::ActiveDevice;
using strobe::cuda::cuda_stream;

constexpr size_t max_workspace_bytes = size_t(32) << 20;  // NVIDIA's advice for Hopper

void check_lt(cublasStatus_t status, const char* call) {
  STROBE_CHECK(status == CUBLAS_STATUS_SUCCESS, "matmul: ", call, " failed: ", cublasLtGetStatusString(status));
}

// One handle for each GPU, which any number of threads may use, kept until the process ends.
cublasLtHandle_t handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) check_lt(cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

cudaDataType_t lt_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f64:
      return CUDA_R_64F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    default:
      fail("matmul: dtype ", dtype, " given, expected f32, f64, bf16 or f16");
  }
}

// The largest power of two up to 16 that divides all of the numbers: addresses, and strides in bytes.
int common_alignment(std::initializer_list<uintptr_t> numbers) {
  uintptr_t bits = 16;
  for (uintptr_t number : numbers) bits |= number;
  return static_cast<int>(bits & -bits);
}

// The transpose of a (rows, columns) matrix in column-major terms; nothing where neither axis is contiguous or where
// elements share memory.
std::optional<LtMatrix> lt_matrix(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  if ((column_stride == 1 || columns == 1) && (row_stride >= columns || rows == 1)) {
    return LtMatrix{columns, rows, rows == 1 ? columns : row_stride, false, 0, 0};
  }
  if ((row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1)) {
    return LtMatrix{rows, columns, columns == 1 ? rows : column_stride, true, 0, 0};
  }
  return std::nullopt;
}

// cuBLASLt's epilogues are sets of bits: a function, an auxiliary matrix, a bias.
cublasLtEpilogue_t lt_epilogue(const LtProblem& problem) {
  int bits = 0;
  if (problem.epilogue == MatmulEpilogue::gelu) bits = CUBLASLT_EPILOGUE_GELU_AUX;
  if (problem.epilogue == MatmulEpilogue::gelu_backward) bits = CUBLASLT_EPILOGUE_DGELU;
  if (problem.has_bias) bits |= CUBLASLT_EPILOGUE_BIAS;
  return bits == 0 ? CUBLASLT_EPILOGUE_DEFAULT : static_cast<cublasLtEpilogue_t>(bits);
}

// Descriptions of one problem for cuBLASLt, on the stack.
class LtDescription {
 public:
  explicit LtDescription(const LtProblem& problem) {
    const bool is_double = problem.dtype == DType::f64;
    const cublasComputeType_t compute = is_double      ? CUBLAS_COMPUTE_64F
                                        : problem.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                       : CUBLAS_COMPUTE_32F;
    check_lt(cublasLtMatmulDescInit(&product, compute, is_double ? CUDA_R_64F : CUDA_R_32F), "cublasLtMatmulDescInit");
    set(CUBLASLT_MATMUL_DESC_TRANSA, problem.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, problem.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, lt_epilogue(problem));
    if (problem.has_bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, lt_type(problem.dtype));
    if (problem.epilogue != MatmulEpilogue::none) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, problem.out.first);
    init(a, problem.a, problem.dtype, problem.batch_size);
    init(b, problem.b, problem.dtype, problem.batch_size);
    init(out, problem.out, problem.out_dtype, problem.batch_size);
  }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check_lt(cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof(value)),
             "cublasLtMatmulDescSetAttribute");
  }

  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, out;

 private:
  static void init(cublasLtMatrixLayoutOpaque_t& layout, const LtMatrix& matrix, DType dtype, int64_t batch_size) {
    check_lt(cublasLtMatrixLayoutInit(&layout, lt_type(dtype), static_cast<uint64_t>(matrix.first),
                                      static_cast<uint64_t>(matrix.second), matrix.leading),
             "cublasLtMatrixLayoutInit");
    const int32_t count = static_cast<int32_t>(batch_size);
    check_lt(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
             "cublasLtMatrixLayoutSetAttribute");
    check_lt(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &matrix.batch_stride, sizeof(matrix.batch_stride)),
             "cublasLtMatrixLayoutSetAttribute");
  }
};

struct Choice {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace_bytes;
};

std::optional<Choice> choose(const LtProblem& problem) {
  LtDescription description(problem);
  cublasLtMatmulPreferenceOpaque_t preference;
  check_lt(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_lt(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
             "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, max_workspace_bytes);
  // A sum cut into parts is put together in the type it is computed in, not in 16 bits.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(problem.b.alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(problem.a.alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(problem.out.alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(problem.out.alignment));
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_of(problem.device), &description.product, &description.b, &description.a,
                                     &description.out, &description.out, &preference, 1, &result, &found);
  const bool unsupported = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
  if (!unsupported) check_lt(status, "cublasLtMatmulAlgoGetHeuristic");
  if (unsupported || found == 0 || result.state != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return Choice{result.algo, result.workspaceSize};
}

// Calls f(a, b, out) with the elements by which the operands of each call are shifted.
template <class F>
void for_each_call(const LtPlan& plan, const MatmulArgs& args, F&& f) {
  int64_t calls = 1;
  const auto skipped = [&](int dim) { return dim == plan.batch_dim; };
  for (int dim = 0; dim < MatmulArgs::max_batch_dims; ++dim) calls *= skipped(dim) ? 1 : args.batch[dim].size;
  for (int64_t call = 0; call < calls; ++call) {
    int64_t rest = call, a = 0, b = 0, out = 0;
    for (int dim = 0; dim < MatmulArgs::max_batch_dims; ++dim) {
      if (skipped(dim)) continue;
      const MatmulBatch& batch = args.batch[dim];
      const int64_t index = rest % batch.size;
      rest /= batch.size;
      a += index * batch.a_stride;
      b += index * batch.b_stride;
      out += index * batch.out_stride;
    }
    f(a, b, out);
  }
}

}  // namespace

std::optional<LtPlan> plan_lt(const MatmulArgs& args, Device device) {
  const std::optional<LtMatrix> a = lt_matrix(args.m, args.k, args.a_row_stride, args.a_column_stride);
  const std::optional<LtMatrix> b = lt_matrix(args.k, args.n, args.b_row_stride, args.b_column_stride);
  const std::optional<LtMatrix> out = lt_matrix(args.m, args.n, args.out_row_stride, 1);
  if (!a || !b || !out || out->transposed) return std::nullopt;
  if (args.epilogue != MatmulEpilogue::none &&
      (size_of(args.dtype) != 2 || args.n % 8 != 0 || !strobe::cuda::aligned_to(16, args.pre))) {
    return std::nullopt;
  }

  const auto larger = [](const MatmulBatch& x, const MatmulBatch& y) { return x.size < y.size; };
  const MatmulBatch* longest = std::max_element(std::begin(args.batch), std::end(args.batch), larger);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (longest->size > most) return std::nullopt;
  LtPlan plan{.problem = {.device = device.index,
                          .dtype = args.dtype,
                          .out_dtype = args.out_dtype,
                          .has_bias = args.bias != nullptr,
                          .epilogue = args.epilogue,
                          .tf32 = args.dtype == DType::f32 && allow_tf32(),
                          .batch_size = longest->size,
                          .a = *a,
                          .b = *b,
                          .out = *out},
              .batch_dim = static_cast<int>(longest - args.batch),
              .algorithm = {},
              .workspace_bytes = 0};
  const auto complete = [&](LtMatrix& matrix, const void* data, DType dtype, int64_t MatmulBatch::*stride) {
    matrix.batch_stride = longest->*stride;
    matrix.alignment = common_alignment({reinterpret_cast<uintptr_t>(data)});
    for (const MatmulBatch& batch : args.batch) {
      const uintptr_t bytes = static_cast<uintptr_t>(batch.*stride) * size_of(dtype);
      if (batch.size > 1) matrix.alignment = common_alignment({static_cast<uintptr_t>(matrix.alignment), bytes});
    }
  };
  complete(plan.problem.a, args.a, args.dtype, &MatmulBatch::a_stride);
  complete(plan.problem.b, args.b, args.dtype, &MatmulBatch::b_stride);
  complete(plan.problem.out, args.out, args.out_dtype, &MatmulBatch::out_stride);

  static std::mutex mutex;
  static std::map<LtProblem, std::optional<Choice>> choices;
  const std::lock_guard lock(mutex);
  auto known = choices.find(plan.problem);
  if (known == choices.end()) {
    const ActiveDevice active(device);
    known = choices.emplace(plan.problem, choose(plan.problem)).first;
  }
  if (!known->second) return std::nullopt;
  plan.algorithm = known->second->algorithm;
  plan.workspace_bytes = known->second->workspace_bytes;
  return plan;
}

bool run_lt(const LtPlan& plan, const MatmulArgs& args, void* workspace, const Stream& stream) {
  const ActiveDevice active(stream.device);
  LtDescription description(plan.problem);
  if (args.bias != nullptr) description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
  if (args.pre != nullptr) description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, args.pre);
  const float one = 1, zero = 0;
  const double double_one = 1, double_zero = 0;
  const bool is_double = args.dtype == DType::f64;
  const void* alpha = is_double ? static_cast<const void*>(&double_one) : &one;
  const void* beta = is_double ? static_cast<const void*>(args.accumulate ? &double_one : &double_zero)
                               : (args.accumulate ? &one : &zero);
  bool possible = true;
  for_each_call(plan, args, [&](int64_t a, int64_t b, int64_t out) {
    if (!possible) return;
    const auto shifted = [](const void* data, int64_t elements, DType dtype) {
      return static_cast<const std::byte*>(data) + elements * static_cast<int64_t>(size_of(dtype));
    };
    std::byte* const target = static_cast<std::byte*>(args.out) + out * static_cast<int64_t>(size_of(args.out_dtype));
    const cublasStatus_t status =
        cublasLtMatmul(handle_of(stream.device.index), &description.product, alpha, shifted(args.b, b, args.dtype),
                       &description.b, shifted(args.a, a, args.dtype), &description.a, beta, target, &description.out,
                       target, &description.out, &plan.algorithm, workspace, plan.workspace_bytes, cuda_stream(stream));
    possible = status != CUBLAS_STATUS_NOT_SUPPORTED;
    if (possible) check_lt(status, "cublasLtMatmul");
  });
  return possible;
}

}  // namespace strobe::kernels::cuda
