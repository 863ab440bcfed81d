// The C interface of tiled attention: refuses what can be known to be wrong, then calls the kernels.
#include "strobe/kernels/attention_c.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <utility>

#include "strobe/kernels/attention.h"
#include "strobe/kernels/device.h"
#include "strobe/kernels/overlap.h"

namespace strobe::kernels {
namespace {

static_assert(static_cast<int>(DType::f32) == STROBE_DTYPE_F32 && static_cast<int>(DType::f64) == STROBE_DTYPE_F64 &&
              static_cast<int>(DType::bf16) == STROBE_DTYPE_BF16 && static_cast<int>(DType::f16) == STROBE_DTYPE_F16);
static_assert(static_cast<int>(DeviceType::cpu) == STROBE_DEVICE_CPU &&
              static_cast<int>(DeviceType::cuda) == STROBE_DEVICE_CUDA);
static_assert(static_cast<int>(AttentionKernel::auto_select) == STROBE_ATTENTION_AUTO &&
              static_cast<int>(AttentionKernel::portable) == STROBE_ATTENTION_PORTABLE &&
              static_cast<int>(AttentionKernel::mma) == STROBE_ATTENTION_MMA &&
              static_cast<int>(AttentionKernel::hopper) == STROBE_ATTENTION_HOPPER);

// Below these no size, offset or workspace that a kernel computes can overflow.
constexpr int64_t most_elements = int64_t{1} << 52;
constexpr int64_t most_axis_bytes = int64_t{1} << 58;
constexpr uintptr_t workspace_alignment = 64;

// An array and not a string: the pointer handed out stays good for the life of the thread.
thread_local char last_error[1024];

void set_last_error(const char* message) { std::snprintf(last_error, sizeof last_error, "%s", message); }

// Runs f(meaning), where `meaning` is the status that an Error thrown from then on stands for.
template <class F>
strobe_status status_of(F&& f) noexcept {
  last_error[0] = '\0';
  strobe_status meaning = STROBE_INVALID_ARGUMENT;
  try {
    f(meaning);
    return STROBE_OK;
  } catch (const Error& error) {
    set_last_error(error.what());
    return meaning;
  } catch (const std::exception& error) {
    set_last_error(error.what());
  } catch (...) {
    set_last_error("unknown exception");
  }
  return STROBE_INTERNAL_ERROR;
}

void check_struct_size(const char* operation, size_t struct_size) {
  STROBE_CHECK(struct_size == sizeof(strobe_attention_args), operation, ": struct_size ", struct_size,
               " given, expected ", sizeof(strobe_attention_args));
}

// A copy that no other thread changes between check and use; the original need not even be aligned.
strobe_attention_args copy_of(const char* operation, const strobe_attention_args* given) {
  STROBE_CHECK(given != nullptr, operation, ": args null given, expected a strobe_attention_args");
  size_t struct_size;
  std::memcpy(&struct_size, given, sizeof struct_size);
  check_struct_size(operation, struct_size);
  strobe_attention_args args;
  std::memcpy(&args, given, sizeof args);
  return args;
}

bool is_packed(const AttentionArgs& args) { return args.cu_seqlens_q != nullptr; }

int32_t checked_choice(const char* operation, const char* field, int32_t value, int32_t most) {
  STROBE_CHECK(value >= 0 && value <= most, operation, ": ", field, " ", value, " given, expected 0 to ", most);
  return value;
}

Device checked_device(const char* operation, const strobe_attention_args& given) {
  const Device device{
      static_cast<DeviceType>(checked_choice(operation, "device_type", given.device_type, STROBE_DEVICE_CUDA)),
      given.device_index};
  STROBE_CHECK(device.index >= 0, operation, ": device_index ", device.index, " given, expected at least 0");
  STROBE_CHECK(device.type == DeviceType::cuda || device.index == 0, operation, ": device_index ", device.index,
               " given, expected 0 for the CPU");
  return device;
}

void require_usable(const char* operation, Device device, strobe_status& meaning) {
  meaning = STROBE_UNSUPPORTED;
  try {
    require_device("device", device);
  } catch (const Error& error) {
    fail(operation, ": device ", device, " given, but ", error.what());
  }
  meaning = STROBE_INVALID_ARGUMENT;
}

// Throws unless the product is at most most_elements. 0 counts as 1: kernels also multiply the rest of an empty shape.
void check_product(const char* operation, std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  int64_t product = 1;
  for (const auto& [field, size] : sizes) {
    STROBE_CHECK(size >= 0, operation, ": ", field, " ", size, " given, expected at least 0");
    STROBE_CHECK(size <= most_elements / product, operation, ": ", field, " ", size,
                 " given, expected operands of at most ", most_elements, " elements");
    product *= std::max<int64_t>(size, 1);
  }
}

void check_sizes(const char* operation, const AttentionArgs& args) {
  STROBE_CHECK(args.num_kv_heads >= 1, operation, ": num_kv_heads ", args.num_kv_heads, " given, expected at least 1");
  STROBE_CHECK(args.num_heads >= 1 && args.num_heads % args.num_kv_heads == 0, operation, ": num_heads ",
               args.num_heads, " given, expected a positive multiple of num_kv_heads ", args.num_kv_heads);
  const std::pair<const char*, int64_t> head_dim{"head_dim", args.head_dim}, num_heads{"num_heads", args.num_heads},
      batch{"batch", args.batch};
  check_product(operation, {head_dim, num_heads, batch, {"seq_len_q", args.seq_len_q}});
  check_product(operation, {head_dim, num_heads, batch, {"seq_len_k", args.seq_len_k}});
  check_product(operation, {head_dim, num_heads, {"total_q", args.total_q}});
  check_product(operation, {head_dim, num_heads, {"total_k", args.total_k}});
}

template <class T>
bool is_aligned(const T* pointer, uintptr_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

void check_cu_seqlens(const char* operation, const char* field, const int32_t* cu_seqlens, int64_t batch, int64_t total,
                      int64_t longest) {
  STROBE_CHECK(is_aligned(cu_seqlens, sizeof(int32_t)), operation, ": ", field,
               " misaligned pointer given, expected a multiple of ", sizeof(int32_t));
  STROBE_CHECK(cu_seqlens[0] == 0, operation, ": ", field, "[0] ", cu_seqlens[0], " given, expected 0");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = cu_seqlens[b], end = cu_seqlens[b + 1];
    STROBE_CHECK(end >= begin && end <= total, operation, ": ", field, "[", b + 1, "] ", end, " given, expected ",
                 begin, " to ", total, ", the element before and the rows there are");
    STROBE_CHECK(end - begin <= longest, operation, ": ", field, " sequence ", b, " of length ", end - begin,
                 " given, expected at most its seq_len ", longest);
  }
}

// The call without operands and workspace, checked.
AttentionArgs checked_case(const char* operation, const strobe_attention_args& given, Device device) {
  const bool packed = given.cu_seqlens_q != nullptr;
  AttentionArgs args{.query = {},
                     .key = {},
                     .value = {},
                     .out = {},
                     .lse = nullptr,
                     .batch = given.batch,
                     .seq_len_q = given.seq_len_q,
                     .seq_len_k = given.seq_len_k,
                     .num_heads = given.num_heads,
                     .num_kv_heads = given.num_kv_heads,
                     .head_dim = given.head_dim,
                     .dtype = static_cast<DType>(checked_choice(operation, "dtype", given.dtype, STROBE_DTYPE_F16)),
                     .softmax_scale = given.softmax_scale,
                     .causal = checked_choice(operation, "causal", given.causal, 1) == 1,
                     .window_left = given.window_left,
                     .window_right = given.window_right,
                     .softcap = given.softcap,
                     .alibi_slopes = given.alibi_slopes,
                     .dropout_p = given.dropout_p,
                     .dropout_seed = given.dropout_seed,
                     .dropout_offset = given.dropout_offset,
                     .cu_seqlens_q = given.cu_seqlens_q,
                     .cu_seqlens_k = given.cu_seqlens_k,
                     .total_q = packed ? given.total_q : 0,
                     .total_k = packed ? given.total_k : 0,
                     .kernel = static_cast<AttentionKernel>(
                         checked_choice(operation, "kernel", given.kernel, STROBE_ATTENTION_HOPPER)),
                     .deterministic = checked_choice(operation, "deterministic", given.deterministic, 1) == 1};
  check_sizes(operation, args);
  require_attention_options(operation, args);
  if (packed && device.type == DeviceType::cpu) {
    check_cu_seqlens(operation, "cu_seqlens_q", args.cu_seqlens_q, args.batch, args.total_q, args.seq_len_q);
    check_cu_seqlens(operation, "cu_seqlens_k", args.cu_seqlens_k, args.batch, args.total_k, args.seq_len_k);
  }
  if (packed) {  // kernels count their blocks by the longest sequence, and none is longer than all rows
    args.seq_len_q = std::min(args.seq_len_q, args.total_q);
    args.seq_len_k = std::min(args.seq_len_k, args.total_k);
  }
  return args;
}

enum class Access { read, write };

// The memory of one call: checks each operand as it is added, and that what is written overlaps nothing.
class Operands {
 public:
  Operands(const char* operation, const AttentionArgs& args, Device device)
      : operation_(operation), args_(args), device_(device) {
    array("alibi_slopes", args.alibi_slopes, args.num_heads, sizeof(float), Access::read, true);
    array("cu_seqlens_q", args.cu_seqlens_q, args.batch + 1, sizeof(int32_t), Access::read, true);
    array("cu_seqlens_k", args.cu_seqlens_k, args.batch + 1, sizeof(int32_t), Access::read, true);
  }

  // query, out, dout or dquery.
  AttentionTensor of_queries(const char* field, const strobe_attention_tensor& given, Access access,
                             int64_t dim_stride = 1) {
    return tensor(field, given, is_packed(args_) ? args_.total_q : args_.seq_len_q, args_.num_heads, dim_stride,
                  access);
  }
  // key, value, dkey or dvalue.
  AttentionTensor of_keys(const char* field, const strobe_attention_tensor& given, Access access) {
    return tensor(field, given, is_packed(args_) ? args_.total_k : args_.seq_len_k, args_.num_kv_heads, 1, access);
  }
  // lse or dlse.
  template <class T>
  T* of_rows(const char* field, T* given, Access access, bool may_be_null = false) {
    const int64_t rows = is_packed(args_) ? args_.total_q : args_.batch * args_.seq_len_q;
    return array(field, given, rows * args_.num_heads, size_of(accumulate_dtype(args_.dtype)), access, may_be_null);
  }
  void* workspace(void* given, size_t bytes) {
    STROBE_CHECK(bytes == 0 || is_aligned(given, workspace_alignment), operation_,
                 ": workspace misaligned pointer given, expected a multiple of ", workspace_alignment);
    return array("workspace", given, static_cast<int64_t>(bytes), 1, Access::write, false);
  }

  void check_overlaps() const {
    for (size_t i = 0; i < count_; ++i) {
      const Entry& written = entries_[i];
      if (written.access != Access::write) continue;
      STROBE_CHECK(!overlaps_itself(written.bytes), operation_, ": ", written.field,
                   " strides under which its elements overlap given, expected each in a place of its own");
      for (size_t j = 0; j < count_; ++j) {
        const Entry& other = entries_[j];
        STROBE_CHECK(i == j || !overlap(written.bytes, other.bytes), operation_, ": ", written.field, " overlapping ",
                     other.field, " given, expected memory of its own");
      }
    }
  }

 private:
  struct Entry {
    const char* field = nullptr;
    StridedBytes bytes = {};
    Access access = Access::read;
  };

  void add(const char* field, const void* pointer, size_t alignment, const StridedBytes& bytes, uintptr_t below,
           uintptr_t above, Access access) {
    STROBE_CHECK(pointer != nullptr, operation_, ": ", field, " null given, expected a pointer");
    STROBE_CHECK(is_aligned(pointer, alignment), operation_, ": ", field,
                 " misaligned pointer given, expected a multiple of ", alignment);
    STROBE_CHECK(is_accessible(pointer, device_), operation_, ": ", field, " pointer given that ", device_,
                 " cannot read, expected its own memory");
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    STROBE_CHECK(below <= address && above <= UINTPTR_MAX - address, operation_, ": ", field,
                 " sizes and strides that leave the address space given, expected an operand within it");
    entries_[count_] = {field, bytes, access};
    entries_[count_++].bytes.lowest = address - below;
  }

  // A contiguous operand; null where it has no elements, so that no kernel computes with the pointer.
  template <class T>
  T* array(const char* field, T* given, int64_t count, size_t element_bytes, Access access, bool may_be_null) {
    if (count == 0 || (may_be_null && given == nullptr)) return nullptr;
    const int64_t bytes = count * static_cast<int64_t>(element_bytes);
    add(field, given, element_bytes, {.run_bytes = bytes}, 0, static_cast<uintptr_t>(bytes), access);
    return given;
  }

  // Strides that are not read, of axes of length 1 and of empty operands, become 0: no kernel overflows with them.
  AttentionTensor tensor(const char* field, const strobe_attention_tensor& given, int64_t rows, int64_t num_heads,
                         int64_t dim_stride, Access access) {
    const int64_t batch = is_packed(args_) ? 1 : args_.batch;
    if (batch == 0 || rows == 0) return {};
    struct Axis {
      const char* name;
      int64_t size;
      int64_t stride;
    };
    std::array<Axis, 4> axes{{{"batch_stride", batch, given.batch_stride},
                              {"seq_stride", rows, given.seq_stride},
                              {"head_stride", num_heads, given.head_stride},
                              {"dim_stride", args_.head_dim, dim_stride}}};
    const int64_t element_bytes = static_cast<int64_t>(size_of(args_.dtype));
    StridedBytes bytes{.run_bytes = element_bytes};
    int64_t below = 0, above = element_bytes;
    for (size_t i = 0; i < axes.size(); ++i) {
      auto& [name, size, stride] = axes[i];
      if (size == 1) stride = 0;
      const int64_t most = most_axis_bytes / (size * element_bytes);
      STROBE_CHECK(-most <= stride && stride <= most, operation_, ": ", field, " ", name, " ", stride,
                   " given, expected at most ", most, " for ", size, " steps");
      bytes.axes[i] = {size, std::abs(stride) * element_bytes};
      (stride < 0 ? below : above) += (size - 1) * bytes.axes[i].stride;
    }
    add(field, given.data, static_cast<size_t>(element_bytes), bytes, static_cast<uintptr_t>(below),
        static_cast<uintptr_t>(above), access);
    return {given.data, axes[0].stride, axes[1].stride, axes[2].stride};
  }

  const char* operation_;
  const AttentionArgs& args_;
  Device device_;
  std::array<Entry, 14> entries_;
  size_t count_ = 0;
};

// The operands of the forward pass; the backward pass reads out and lse.
void add_forward_operands(const strobe_attention_args& given, Access results, Operands& operands, AttentionArgs& args) {
  args.query = operands.of_queries("query", given.query, Access::read);
  args.key = operands.of_keys("key", given.key, Access::read);
  args.value = operands.of_keys("value", given.value, Access::read);
  args.out = operands.of_queries("out", given.out, results);
  args.lse = operands.of_rows("lse", given.lse, results);
}

AttentionGradArgs without_gradients(const AttentionArgs& forward) {
  return {.forward = forward, .dout = {}, .dquery = {}, .dkey = {}, .dvalue = {}};
}

void add_backward_operands(const strobe_attention_args& given, Operands& operands, AttentionGradArgs& args) {
  args.dout = operands.of_queries("dout", given.dout, Access::read, given.dout_dim_stride);
  args.dout_dim_stride = args.forward.head_dim == 1 ? 1 : given.dout_dim_stride;
  args.dlse = operands.of_rows("dlse", given.dlse, Access::read, true);
  args.dquery = operands.of_queries("dquery", given.dquery, Access::write);
  args.dkey = operands.of_keys("dkey", given.dkey, Access::write);
  args.dvalue = operands.of_keys("dvalue", given.dvalue, Access::write);
}

// Where the kernel finds its scratch memory: after the size, which the device decides, the pointer is checked.
template <class Args>
void add_workspace(const char* operation, const strobe_attention_args& given, size_t expected, Operands& operands,
                   strobe_status& meaning, Args& args) {
  meaning = STROBE_WORKSPACE_TOO_SMALL;
  STROBE_CHECK(given.workspace_bytes >= expected, operation, ": workspace_bytes ", given.workspace_bytes,
               " given, expected at least ", expected);
  meaning = STROBE_INVALID_ARGUMENT;
  args.workspace = operands.workspace(given.workspace, expected);
  args.workspace_bytes = expected;
  operands.check_overlaps();
}

strobe_status status_of_failures(Device device) {
  return device.type == DeviceType::cuda ? STROBE_CUDA_ERROR : STROBE_INTERNAL_ERROR;
}

template <class Bytes>
strobe_status write_workspace_bytes(const char* operation, const strobe_attention_args* given, size_t* bytes,
                                    Bytes&& bytes_of) {
  if (bytes != nullptr) *bytes = 0;
  return status_of([&](strobe_status& meaning) {
    const strobe_attention_args copy = copy_of(operation, given);
    STROBE_CHECK(bytes != nullptr, operation, ": bytes null given, expected a pointer");
    const Device device = checked_device(operation, copy);
    require_usable(operation, device, meaning);
    const AttentionArgs args = checked_case(operation, copy, device);
    meaning = STROBE_UNSUPPORTED;
    require_attention_support(operation, args, device);
    meaning = STROBE_INTERNAL_ERROR;
    *bytes = bytes_of(args, device);
  });
}

}  // namespace
}  // namespace strobe::kernels

using namespace strobe;
using namespace strobe::kernels;

strobe_status strobe_attention_args_init(strobe_attention_args* args, size_t struct_size) {
  return status_of([&](strobe_status&) {
    constexpr const char* operation = "strobe_attention_args_init";
    STROBE_CHECK(args != nullptr, operation, ": args null given, expected a strobe_attention_args");
    check_struct_size(operation, struct_size);
    strobe_attention_args defaults = {};
    defaults.struct_size = sizeof defaults;
    defaults.softmax_scale = std::numeric_limits<double>::quiet_NaN();
    defaults.deterministic = 1;
    defaults.window_left = -1;
    defaults.window_right = -1;
    defaults.dout_dim_stride = 1;
    std::memcpy(args, &defaults, sizeof defaults);
  });
}

strobe_status strobe_attention_forward_workspace(const strobe_attention_args* args, size_t* bytes) {
  return write_workspace_bytes("strobe_attention_forward_workspace", args, bytes, flash_attention_forward_workspace);
}

strobe_status strobe_attention_backward_workspace(const strobe_attention_args* args, size_t* bytes) {
  return write_workspace_bytes("strobe_attention_backward_workspace", args, bytes,
                               [](const AttentionArgs& forward, Device device) {
                                 return flash_attention_backward_workspace(without_gradients(forward), device);
                               });
}

strobe_status strobe_attention_forward(const strobe_attention_args* args) {
  return status_of([&](strobe_status& meaning) {
    constexpr const char* operation = "strobe_attention_forward";
    const strobe_attention_args given = copy_of(operation, args);
    const Device device = checked_device(operation, given);
    require_usable(operation, device, meaning);
    AttentionArgs call = checked_case(operation, given, device);
    Operands operands(operation, call, device);
    add_forward_operands(given, Access::write, operands, call);
    meaning = STROBE_UNSUPPORTED;
    require_attention_support(operation, call, device);
    add_workspace(operation, given, flash_attention_forward_workspace(call, device), operands, meaning, call);
    meaning = status_of_failures(device);
    flash_attention_forward(call, {device, given.stream});
  });
}

strobe_status strobe_attention_backward(const strobe_attention_args* args) {
  return status_of([&](strobe_status& meaning) {
    constexpr const char* operation = "strobe_attention_backward";
    const strobe_attention_args given = copy_of(operation, args);
    const Device device = checked_device(operation, given);
    require_usable(operation, device, meaning);
    AttentionGradArgs call = without_gradients(checked_case(operation, given, device));
    Operands operands(operation, call.forward, device);
    add_forward_operands(given, Access::read, operands, call.forward);
    add_backward_operands(given, operands, call);
    meaning = STROBE_UNSUPPORTED;
    require_attention_support(operation, call.forward, device);
    add_workspace(operation, given, flash_attention_backward_workspace(call, device), operands, meaning, call);
    meaning = status_of_failures(device);
    flash_attention_backward(call, {device, given.stream});
  });
}

const char* strobe_last_error(void) { return last_error; }

int32_t strobe_version_number(void) { return STROBE_VERSION_NUMBER; }
const char* strobe_version_string(void) { return STROBE_VERSION; }
