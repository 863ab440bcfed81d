// Which kernel computes an attention call on a GPU, and what is the same for all of them.
#include "strobe/kernels/attention.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>
#include <string_view>

#include "strobe/kernels/cuda/attention_common.cuh"
#include "strobe/kernels/cuda/attention_hopper.h"
#include "strobe/kernels/cuda/attention_mma.h"
#include "strobe/kernels/cuda/attention_portable.h"

namespace strobe::kernels::cuda {
namespace {

bool dispatch_is_logged() {
  static const bool wanted = [] {
    const char* const topics = std::getenv("STROBE_LOG");
    return topics != nullptr && std::string_view(topics).find("dispatch") != std::string_view::npos;
  }();
  return wanted;
}

// Prints a line the first time it comes up.
void log_dispatch(const char* operation, const AttentionArgs& args, const std::string& decision) {
  const std::string line = concat_message(
      "strobe: ", operation, ": ", args.dtype, ", batch ", args.batch, ", seq_len_q ", args.seq_len_q, ", seq_len_k ",
      args.seq_len_k, ", num_heads ", args.num_heads, ", num_kv_heads ", args.num_kv_heads, ", head_dim ",
      args.head_dim, args.causal ? ", causal" : "", args.cu_seqlens_q != nullptr ? ", packed" : "", ": ", decision);
  static std::mutex mutex;
  static std::set<std::string> printed;
  const std::lock_guard lock(mutex);
  if (printed.insert(line).second) std::cerr << line << '\n';
}

// Why a kernel does not compute a pass; empty if it does.
using Refusal = std::string (*)(const AttentionArgs&, Device);
struct Candidate {
  AttentionKernel kernel;
  const char* name;
  Refusal refusal;
  AttentionTile (*tile)(const AttentionArgs&, Device);
};

std::string no_refusal(const AttentionArgs&, Device) { return {}; }

// The fastest first; the last one takes everything.
constexpr Candidate forward_candidates[] = {
    {AttentionKernel::hopper, "hopper", hopper_attention_forward_refusal, hopper_attention_forward_tile},
    {AttentionKernel::mma, "mma", mma_attention_refusal, mma_attention_forward_tile},
    {AttentionKernel::portable, "portable", no_refusal, portable_attention_forward_tile}};
constexpr Candidate backward_candidates[] = {
    {AttentionKernel::hopper, "hopper", hopper_attention_backward_refusal, hopper_attention_backward_tile},
    {AttentionKernel::mma, "mma", mma_attention_refusal, mma_attention_backward_tile},
    {AttentionKernel::portable, "portable", no_refusal, portable_attention_backward_tile}};

void require_accepted(const char* operation, const Candidate& candidate, const AttentionArgs& args, Device device) {
  const std::string refusal = candidate.refusal(args, device);
  STROBE_CHECK(refusal.empty(), operation, ": kernel ", candidate.name, " given, but ", refusal);
}

// The kernel for a pass: the one that is asked for, or else the first that takes it. Throws when that is none.
const Candidate& choose(const char* operation, const AttentionArgs& args, Device device,
                        const Candidate (&candidates)[3]) {
  std::string reasons;
  for (const Candidate& candidate : candidates) {
    const bool asked = args.kernel == candidate.kernel;
    if (!asked && args.kernel != AttentionKernel::auto_select) continue;
    if (asked) require_accepted(operation, candidate, args, device);
    const std::string refusal = candidate.refusal(args, device);
    if (!refusal.empty()) {
      reasons += concat_message("; not ", candidate.name, ": ", refusal);
      continue;
    }
    if (dispatch_is_logged()) {
      const AttentionTile tile = candidate.tile(args, device);
      log_dispatch(operation, args,
                   concat_message("kernel ", candidate.name, ", tile ", tile.queries, " x ", tile.keys, reasons));
    }
    return candidate;
  }
  fail(operation, ": no kernel takes this case");
}
const Candidate& choose_forward(const AttentionArgs& args, Device device) {
  return choose("flash_attention_forward", args, device, forward_candidates);
}
const Candidate& choose_backward(const AttentionArgs& args, Device device) {
  return choose("flash_attention_backward", args, device, backward_candidates);
}
// The kernel of a backward pass whose dout is known.
AttentionKernel choose_backward(const AttentionGradArgs& args, Device device) {
  const AttentionKernel kernel = choose_backward(args.forward, device).kernel;
  if (kernel != AttentionKernel::hopper) return kernel;
  const std::string refusal = hopper_attention_dout_refusal(args);
  if (refusal.empty()) return kernel;
  constexpr const char* operation = "flash_attention_backward";
  STROBE_CHECK(args.forward.kernel != kernel, operation, ": kernel hopper given, but ", refusal);
  if (dispatch_is_logged()) log_dispatch(operation, args.forward, concat_message("kernel mma; not hopper: ", refusal));
  return AttentionKernel::mma;
}

// Rows of a packed tensor behind its last sequence become 0, and -inf in lse unless that is null.
template <class T>
__global__ void clear_padding_kernel(AttentionTensor tensor, int64_t num_heads, int64_t head_dim,
                                     const int32_t* cu_seqlens, int64_t batch, int64_t total, accumulate_t<T>* lse) {
  T* const data = static_cast<T*>(tensor.data);
  for (int64_t row = cu_seqlens[batch] + static_cast<int64_t>(blockIdx.x); row < total; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < num_heads * head_dim; i += blockDim.x) {
      data[row * tensor.seq_stride + i / head_dim * tensor.head_stride + i % head_dim] = T(0.0f);
    }
    if (lse == nullptr) continue;
    for (int64_t head = threadIdx.x; head < num_heads; head += blockDim.x) {
      lse[head * total + row] = -std::numeric_limits<accumulate_t<T>>::infinity();
    }
  }
}

void clear_padding(const char* operation, const AttentionTensor& tensor, int64_t num_heads, const int32_t* cu_seqlens,
                   int64_t total, void* lse, const AttentionArgs& args, const Stream& stream) {
  constexpr int64_t most_blocks = 256;  // padding is rare: enough to fill a GPU, few where there is none
  dispatch_floating(args.dtype, operation, [&]<class T>() {
    strobe::cuda::launch(operation, clear_padding_kernel<T>, static_cast<unsigned>(std::min(total, most_blocks)), 256,
                         0, stream, tensor, num_heads, args.head_dim, cu_seqlens, args.batch, total,
                         static_cast<accumulate_t<T>*>(lse));
  });
}

void require_workspace(const char* operation, const void* workspace, size_t given, size_t expected) {
  STROBE_CHECK(given >= expected && (expected == 0 || workspace != nullptr), operation, ": workspace of ",
               workspace == nullptr ? 0 : given, " bytes given, expected ", expected);
}

}  // namespace

void require_attention_support(const char* operation, const AttentionArgs& args, Device device) {
  require_attention_options(operation, args);
  for (const Candidate& candidate : forward_candidates) {
    if (candidate.kernel == args.kernel) require_accepted(operation, candidate, args, device);
  }
}

AttentionTile attention_tile(const AttentionArgs& args, bool backward, Device device) {
  cuda::require_attention_support("attention_tile", args, device);
  return (backward ? choose_backward(args, device) : choose_forward(args, device)).tile(args, device);
}

size_t flash_attention_forward_workspace(const AttentionArgs& args, Device device) {
  cuda::require_attention_support("flash_attention_forward", args, device);
  return 0;
}

size_t flash_attention_backward_workspace(const AttentionGradArgs& args, Device device) {
  constexpr const char* operation = "flash_attention_backward";
  cuda::require_attention_support(operation, args.forward, device);
  switch (choose_backward(args.forward, device).kernel) {
    case AttentionKernel::hopper:  // leaves some cases to mma: a dout that TMA cannot read, no queries
      return std::max(hopper_attention_backward_workspace(args), mma_attention_backward_workspace(args));
    case AttentionKernel::mma:
      return mma_attention_backward_workspace(args);
    default:
      return portable_attention_backward_workspace(args);
  }
}

void flash_attention_forward(const AttentionArgs& args, const Stream& stream) {
  constexpr const char* operation = "flash_attention_forward";
  cuda::require_attention_support(operation, args, stream.device);
  switch (choose_forward(args, stream.device).kernel) {
    case AttentionKernel::hopper:
      hopper_attention_forward(args, stream);
      break;
    case AttentionKernel::mma:
      mma_attention_forward(args, stream);
      break;
    default:
      portable_attention_forward(args, stream);
  }
  if (args.cu_seqlens_q != nullptr) {
    clear_padding(operation, args.out, args.num_heads, args.cu_seqlens_q, args.total_q, args.lse, args, stream);
  }
}

void flash_attention_backward(const AttentionGradArgs& args, const Stream& stream) {
  constexpr const char* operation = "flash_attention_backward";
  const AttentionArgs& forward = args.forward;
  cuda::require_attention_support(operation, forward, stream.device);
  const size_t bytes = cuda::flash_attention_backward_workspace(args, stream.device);
  require_workspace(operation, args.workspace, args.workspace_bytes, bytes);
  switch (choose_backward(args, stream.device)) {
    case AttentionKernel::hopper:
      hopper_attention_backward(args, stream);
      break;
    case AttentionKernel::mma:
      mma_attention_backward(args, stream);
      break;
    default:
      portable_attention_backward(args, stream);
  }
  if (forward.cu_seqlens_q != nullptr) {
    clear_padding(operation, args.dquery, forward.num_heads, forward.cu_seqlens_q, forward.total_q, nullptr, forward,
                  stream);
    for (const AttentionTensor& gradient : {args.dkey, args.dvalue}) {
      clear_padding(operation, gradient, forward.num_kv_heads, forward.cu_seqlens_k, forward.total_k, nullptr, forward,
                    stream);
    }
  }
}

}  // namespace strobe::kernels::cuda
