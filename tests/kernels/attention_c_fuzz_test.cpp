// A million structs of random bytes and of valid calls gone wrong: the C interface of attention answers each.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "strobe/kernels/attention_c.h"
#include "strobe/kernels/device.h"

namespace {

constexpr size_t slot_bytes = 8192;
constexpr size_t slot_count = 16;
constexpr size_t workspace_size = 1 << 21;
constexpr int64_t most_sequences = 4;  // whose starts the arrays of cu_seqlens hold

// All memory that the pointers point to: slots for operands, the workspace behind them, starts of sequences.
struct Memory {
  std::unique_ptr<void, void (*)(void*)> block{strobe::raw_malloc(slot_count * slot_bytes + workspace_size, {}),
                                               [](void* pointer) { strobe::raw_free(pointer, {}); }};
  std::vector<std::array<int32_t, most_sequences + 1>> starts{{0, 3, 3, 8, 9}, {0, 1, 4, 4, 5}, {0, 0, 0, 0, 0},
                                                              {1, 2, 3, 4, 5}, {0, 5, 4, 6, 7}, {0, 1, 2, 3, 999},
                                                              {0, -1, 2, 3, 4}};

  Memory() {
    for (size_t i = 0; i < slot_count * slot_bytes / sizeof(float); ++i) static_cast<float*>(block.get())[i] = 0.125f;
  }
  char* slot(size_t index) const { return static_cast<char*>(block.get()) + index * slot_bytes; }
  char* workspace() const { return slot(slot_count); }
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  int64_t below(int64_t count) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(count)); }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool once_in(int64_t count) { return below(count) == 0; }

  int64_t integer() {
    static constexpr std::array<int64_t, 24> edges{0,
                                                   1,
                                                   -1,
                                                   2,
                                                   3,
                                                   -2,
                                                   7,
                                                   16,
                                                   255,
                                                   256,
                                                   257,
                                                   65535,
                                                   1L << 31,
                                                   -(1L << 31),
                                                   1L << 32,
                                                   1L << 45,
                                                   1L << 52,
                                                   1L << 58,
                                                   1L << 62,
                                                   -(1L << 62),
                                                   INT64_MAX,
                                                   INT64_MIN,
                                                   INT64_MAX - 1,
                                                   INT64_MAX / 8};
    return once_in(4) ? static_cast<int64_t>(bits()) : edges[static_cast<size_t>(below(edges.size()))];
  }
  double number() {
    static constexpr std::array<double, 14> edges{0,
                                                  -0.0,
                                                  1,
                                                  -1,
                                                  0.5,
                                                  0.999,
                                                  255.0 / 256,
                                                  1e30,
                                                  1e31,
                                                  -1e300,
                                                  std::numeric_limits<double>::quiet_NaN(),
                                                  std::numeric_limits<double>::infinity(),
                                                  -std::numeric_limits<double>::infinity(),
                                                  5e-324};
    if (!once_in(4)) return edges[static_cast<size_t>(below(edges.size()))];
    const uint64_t given = bits();
    double result;
    std::memcpy(&result, &given, sizeof result);
    return result;
  }
  // Null, the start of a slot, or somewhere within one, aligned or not.
  void* pointer(const Memory& memory) {
    if (once_in(6)) return nullptr;
    char* const slot = memory.slot(static_cast<size_t>(below(slot_count)));
    return once_in(2) ? slot : slot + below(once_in(2) ? 8 : slot_bytes);
  }
  const int32_t* sequence_starts(const Memory& memory) {
    const char* const starts = reinterpret_cast<const char*>(
        &memory.starts[static_cast<size_t>(below(static_cast<int64_t>(memory.starts.size())))]);
    return reinterpret_cast<const int32_t*>(once_in(8) ? starts + 1 : starts);
  }

 private:
  std::mt19937_64 engine_;
};

using Args = strobe_attention_args;
using Tensor = strobe_attention_tensor;

constexpr std::array<Tensor Args::*, 8> tensors{&Args::query, &Args::key,    &Args::value, &Args::out,
                                                &Args::dout,  &Args::dquery, &Args::dkey,  &Args::dvalue};

bool is_of_keys(Tensor Args::*field) {
  return field == &Args::key || field == &Args::value || field == &Args::dkey || field == &Args::dvalue;
}

bool inside(const Memory& memory, const void* pointer, int64_t below, int64_t above) {
  const char* const first = memory.slot(0);
  const char* const given = static_cast<const char*>(pointer);
  return given - first >= below && first + slot_count * slot_bytes - given >= above;
}

// Whether everything the call may touch lies inside the slots; where it does not, the workspace stays too small, so
// that every check runs and no kernel does.
bool fits(const Memory& memory, const Args& args) {
  const auto small = [](int64_t size) { return size >= 0 && size <= 64; };
  for (const int64_t size :
       {args.batch, args.seq_len_q, args.seq_len_k, args.num_heads, args.num_kv_heads, args.head_dim}) {
    if (!small(size)) return false;
  }
  const bool packed = args.cu_seqlens_q != nullptr;
  if (packed && (!small(args.total_q) || !small(args.total_k))) return false;
  const int64_t element = args.dtype == STROBE_DTYPE_F64 ? 8 : args.dtype == STROBE_DTYPE_F32 ? 4 : 2;
  const int64_t batch = packed ? 1 : args.batch;
  const int64_t queries = packed ? args.total_q : args.seq_len_q, keys = packed ? args.total_k : args.seq_len_k;
  for (Tensor Args::*field : tensors) {
    const Tensor& x = args.*field;
    const bool of_keys = is_of_keys(field);
    const std::array<std::array<int64_t, 2>, 4> axes{
        {{batch, x.batch_stride},
         {of_keys ? keys : queries, x.seq_stride},
         {of_keys ? args.num_kv_heads : args.num_heads, x.head_stride},
         {args.head_dim, field == &Args::dout ? args.dout_dim_stride : 1}}};
    int64_t below = 0, above = element;
    for (const auto& [size, stride] : axes) {
      if (size <= 1) continue;
      if (std::max(stride, -(stride + 1)) > 4096) return false;
      (stride < 0 ? below : above) += (size - 1) * (stride < 0 ? -stride : stride) * element;
    }
    if (!inside(memory, x.data, below, above)) return false;
  }
  const int64_t rows = batch * queries * args.num_heads * 8;
  return inside(memory, args.lse, 0, rows) && (args.dlse == nullptr || inside(memory, args.dlse, 0, rows)) &&
         (args.alibi_slopes == nullptr || inside(memory, args.alibi_slopes, 0, args.num_heads * 4));
}

// A small valid call with random options.
Args valid_call(const Memory& memory, Random& random) {
  Args args;
  strobe_attention_args_init(&args, sizeof args);
  args.dtype = static_cast<int32_t>(random.below(4));
  args.batch = random.between(0, 2);
  args.seq_len_q = random.between(0, 5);
  args.seq_len_k = random.between(0, 5);
  args.num_kv_heads = random.between(1, 2);
  args.num_heads = args.num_kv_heads * random.between(1, 2);
  args.head_dim = random.between(1, 6);
  args.softmax_scale = 0.5;
  args.causal = static_cast<int32_t>(random.below(2));
  if (random.once_in(3)) args.window_left = random.between(-1, 4);
  if (random.once_in(3)) args.window_right = random.between(-1, 4);
  if (random.once_in(3)) args.softcap = 2;
  if (random.once_in(3)) args.dropout_p = 0.25;
  if (random.once_in(3)) {
    args.cu_seqlens_q = memory.starts[static_cast<size_t>(random.below(3))].data();
    args.cu_seqlens_k = memory.starts[static_cast<size_t>(random.below(3))].data();
    args.total_q = args.total_k = 9;
    args.seq_len_q = args.seq_len_k = 5;
  }
  size_t slot = 0;
  for (Tensor Args::*field : tensors) {
    const int64_t heads = is_of_keys(field) ? args.num_kv_heads : args.num_heads;
    const int64_t head_stride = args.head_dim + random.below(2);
    args.*field = {memory.slot(slot++), 9 * heads * head_stride, heads * head_stride, head_stride};
  }
  args.lse = memory.slot(slot++);
  if (random.once_in(2)) args.dlse = memory.slot(slot++);
  if (random.once_in(3)) args.alibi_slopes = reinterpret_cast<const float*>(memory.slot(slot++));
  args.workspace = memory.workspace();
  args.workspace_bytes = workspace_size;
  return args;
}

// One field becomes something else.
void mutate(Args& args, const Memory& memory, Random& random) {
  static constexpr std::array<int64_t Args::*, 11> integers{&Args::batch,       &Args::seq_len_q,      &Args::seq_len_k,
                                                            &Args::num_heads,   &Args::num_kv_heads,   &Args::head_dim,
                                                            &Args::window_left, &Args::window_right,   &Args::total_q,
                                                            &Args::total_k,     &Args::dout_dim_stride};
  static constexpr std::array<int32_t Args::*, 6> choices{&Args::dtype,  &Args::device_type, &Args::device_index,
                                                          &Args::kernel, &Args::causal,      &Args::deterministic};
  static constexpr std::array<int64_t Tensor::*, 3> strides{&Tensor::batch_stride, &Tensor::seq_stride,
                                                            &Tensor::head_stride};
  static constexpr std::array<double Args::*, 3> numbers{&Args::softmax_scale, &Args::softcap, &Args::dropout_p};
  const auto pick = [&](const auto& from) {
    return from[static_cast<size_t>(random.below(static_cast<int64_t>(from.size())))];
  };
  switch (random.below(9)) {
    case 0:
      args.*pick(integers) = random.once_in(2) ? random.between(-1, 8) : random.integer();
      break;
    case 1:
      args.*pick(choices) = static_cast<int32_t>(random.once_in(2) ? random.between(-1, 4) : random.integer());
      break;
    case 2:
      args.*pick(tensors).*pick(strides) = random.once_in(2) ? random.between(-8, 40) : random.integer();
      break;
    case 3:
      args.*pick(numbers) = random.number();
      break;
    case 4:
      (args.*pick(tensors)).data = random.pointer(memory);
      break;
    case 5:
      (random.once_in(2) ? args.lse : args.workspace) = random.pointer(memory);
      break;
    case 6:
      args.dlse = random.pointer(memory);
      args.alibi_slopes = static_cast<const float*>(random.pointer(memory));
      break;
    case 7:
      (random.once_in(2) ? args.cu_seqlens_q : args.cu_seqlens_k) =
          random.once_in(4) ? nullptr : random.sequence_starts(memory);
      break;
    default:
      (random.once_in(2) ? args.struct_size : args.workspace_bytes) = static_cast<size_t>(random.integer());
  }
}

// Random bytes, but for pointers, which no library can check.
Args random_bytes(const Memory& memory, Random& random) {
  Args args;
  for (size_t offset = 0; offset < sizeof args; offset += sizeof(uint64_t)) {
    const uint64_t word = random.bits();
    std::memcpy(reinterpret_cast<char*>(&args) + offset, &word, sizeof word);
  }
  if (!random.once_in(16)) args.struct_size = sizeof args;
  for (int32_t* choice :
       {&args.dtype, &args.device_type, &args.device_index, &args.kernel, &args.causal, &args.deterministic}) {
    if (!random.once_in(8)) *choice = 0;
  }
  for (int64_t* size : {&args.batch, &args.seq_len_q, &args.seq_len_k, &args.num_heads, &args.num_kv_heads,
                        &args.head_dim, &args.total_q, &args.total_k, &args.window_left, &args.window_right}) {
    if (!random.once_in(4))
      *size = random.between(0, 3);
    else if (random.once_in(2))
      *size = random.integer();
  }
  for (double* number : {&args.softmax_scale, &args.softcap, &args.dropout_p}) {
    if (!random.once_in(4)) *number = random.once_in(4) ? random.number() : 0;
  }
  for (Tensor Args::*field : tensors) {
    Tensor& x = args.*field;
    x.data = random.pointer(memory);
    for (int64_t* stride : {&x.batch_stride, &x.seq_stride, &x.head_stride}) {
      if (!random.once_in(8)) *stride = random.once_in(2) ? random.between(-8, 40) : random.integer();
    }
  }
  args.lse = random.pointer(memory);
  args.dlse = random.pointer(memory);
  args.alibi_slopes = static_cast<const float*>(random.pointer(memory));
  args.cu_seqlens_q = random.once_in(2) ? nullptr : random.sequence_starts(memory);
  args.cu_seqlens_k = random.once_in(2) ? nullptr : random.sequence_starts(memory);
  args.workspace = random.once_in(4) ? random.pointer(memory) : memory.workspace();
  return args;
}

struct Counts {
  int64_t answers = 0;
  int64_t wrong = 0;
  std::array<int64_t, 6> by_status{};
};

// Calls a pass with the struct, or both workspace functions. An answer is wrong when it is none of the expected ones,
// or its message is.
void call_with(Args args, const Memory& memory, Random& random, Counts& counts) {
  if (args.batch > most_sequences) args.cu_seqlens_q = args.cu_seqlens_k = nullptr;
  if (!fits(memory, args)) {
    args.workspace_bytes = 0;
    // Padding rows are written even where no sequence needs a workspace.
    if (args.batch == 0 || args.seq_len_q == 0 || args.seq_len_k == 0) args.cu_seqlens_q = args.cu_seqlens_k = nullptr;
  }
  if (args.workspace_bytes > workspace_size) args.workspace_bytes = workspace_size;
  if (args.workspace != memory.workspace()) args.workspace_bytes = std::min<size_t>(args.workspace_bytes, slot_bytes);
  const auto check = [&](strobe_status status, std::string_view operation) {
    const std::string_view message = strobe_last_error();
    const bool known = status == STROBE_OK || status == STROBE_INVALID_ARGUMENT || status == STROBE_UNSUPPORTED ||
                       status == STROBE_WORKSPACE_TOO_SMALL;
    const bool told = status == STROBE_OK ? message.empty() : message.substr(0, operation.size()) == operation;
    ++counts.answers;
    if (known) ++counts.by_status[static_cast<size_t>(status)];
    if (known && told) return;
    ++counts.wrong;
    MESSAGE(operation << " answers " << static_cast<int>(status) << ", " << std::string(message));
  };
  size_t bytes;
  const int64_t which = random.below(5);
  if (which < 2) return check(strobe_attention_forward(&args), "strobe_attention_forward: ");
  if (which < 4) return check(strobe_attention_backward(&args), "strobe_attention_backward: ");
  check(strobe_attention_forward_workspace(&args, &bytes), "strobe_attention_forward_workspace: ");
  check(strobe_attention_backward_workspace(&args, &bytes), "strobe_attention_backward_workspace: ");
}

}  // namespace

TEST_CASE("C attention: a million structs, valid calls with wrong fields and random bytes") {
  const Memory memory;
  Random random(17);
  Counts valid, mutated, bytes;
  for (int i = 0; i < 20'000; ++i) call_with(valid_call(memory, random), memory, random, valid);
  CHECK(valid.by_status[STROBE_OK] == valid.answers);
  for (int i = 0; i < 580'000; ++i) {
    Args args = valid_call(memory, random);
    for (int64_t j = random.between(1, 3); j > 0; --j) mutate(args, memory, random);
    call_with(args, memory, random, mutated);
  }
  for (int i = 0; i < 400'000; ++i) call_with(random_bytes(memory, random), memory, random, bytes);
  for (const Counts& counts : {valid, mutated, bytes}) CHECK(counts.wrong == 0);
  CHECK(mutated.by_status[STROBE_OK] > 100'000);
  CHECK(mutated.by_status[STROBE_INVALID_ARGUMENT] > 100'000);
  CHECK(mutated.by_status[STROBE_UNSUPPORTED] > 1000);
  CHECK(mutated.by_status[STROBE_WORKSPACE_TOO_SMALL] > 1000);
}
