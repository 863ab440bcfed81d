// The C interface of attention: each wrong field is refused by its name, and the workspace is checked to the byte.
#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "support/attention_c_call.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("C attention: each wrong field is refused by name, before anything is written") {
  enum Passes { both, forward_only, backward_only };
  struct Wrong {
    const char* says;
    std::function<void(CAttentionCall<float>&)> change;
    strobe_status status = STROBE_INVALID_ARGUMENT;
    Passes passes = both;
    bool packed = false;
  };
  constexpr int64_t huge = int64_t{1} << 62;
  const auto misaligned = [](void* pointer) { return static_cast<void*>(static_cast<char*>(pointer) + 1); };
  const std::vector<Wrong> cases = {
      {"struct_size 8", [](auto& x) { x.args.struct_size = 8; }},
      {"struct_size 1000", [](auto& x) { x.args.struct_size = 1000; }},
      {"dtype 4", [](auto& x) { x.args.dtype = 4; }},
      {"dtype -1", [](auto& x) { x.args.dtype = -1; }},
      {"device_type 2", [](auto& x) { x.args.device_type = 2; }},
      {"device_index -1", [](auto& x) { x.args.device_index = -1; }},
      {"device_index 1", [](auto& x) { x.args.device_index = 1; }},
      {"device cuda:99",
       [](auto& x) {
         x.args.device_type = STROBE_DEVICE_CUDA;
         x.args.device_index = 99;
       },
       STROBE_UNSUPPORTED},
      {"kernel 4", [](auto& x) { x.args.kernel = 4; }},
      {"kernel mma", [](auto& x) { x.args.kernel = STROBE_ATTENTION_MMA; }, STROBE_UNSUPPORTED},
      {"kernel hopper", [](auto& x) { x.args.kernel = STROBE_ATTENTION_HOPPER; }, STROBE_UNSUPPORTED},
      {"batch -1", [](auto& x) { x.args.batch = -1; }},
      {"seq_len_q -1", [](auto& x) { x.args.seq_len_q = -1; }},
      {"seq_len_k -5", [](auto& x) { x.args.seq_len_k = -5; }},
      {"batch 4611686018427387904", [](auto& x) { x.args.batch = huge; }},
      {"seq_len_q 4611686018427387904", [](auto& x) { x.args.seq_len_q = huge; }},
      {"seq_len_k 2147483648",
       [](auto& x) {
         x.args.batch = x.args.seq_len_k = int64_t{1} << 31;
         x.args.seq_len_q = 0;
       }},
      {"num_heads 0", [](auto& x) { x.args.num_heads = 0; }},
      {"num_heads 5", [](auto& x) { x.args.num_heads = 5; }},
      {"num_heads -4", [](auto& x) { x.args.num_heads = -4; }},
      {"num_kv_heads 0", [](auto& x) { x.args.num_kv_heads = 0; }},
      {"head_dim 0", [](auto& x) { x.args.head_dim = 0; }},
      {"head_dim 257", [](auto& x) { x.args.head_dim = 257; }},
      {"softmax_scale nan", [](auto& x) { x.args.softmax_scale = NAN; }},
      {"softmax_scale -inf", [](auto& x) { x.args.softmax_scale = -INFINITY; }},
      {"softmax_scale 1e+31", [](auto& x) { x.args.softmax_scale = 1e31; }},
      {"causal 2", [](auto& x) { x.args.causal = 2; }},
      {"deterministic -1", [](auto& x) { x.args.deterministic = -1; }},
      {"window_left -2", [](auto& x) { x.args.window_left = -2; }},
      {"window_right -2", [](auto& x) { x.args.window_right = -2; }},
      {"softcap -1", [](auto& x) { x.args.softcap = -1; }},
      {"softcap nan", [](auto& x) { x.args.softcap = NAN; }},
      {"softcap inf", [](auto& x) { x.args.softcap = INFINITY; }},
      {"dropout_p 1", [](auto& x) { x.args.dropout_p = 1; }},
      {"dropout_p 0.999", [](auto& x) { x.args.dropout_p = 0.999; }},
      {"dropout_p -0.1", [](auto& x) { x.args.dropout_p = -0.1; }},
      {"dropout_p nan", [](auto& x) { x.args.dropout_p = NAN; }},
      {"alibi_slopes misaligned",
       [&](auto& x) { x.args.alibi_slopes = static_cast<const float*>(misaligned(x.slopes.data())); }},

      {"query null", [](auto& x) { x.args.query.data = nullptr; }},
      {"key null", [](auto& x) { x.args.key.data = nullptr; }},
      {"value null", [](auto& x) { x.args.value.data = nullptr; }},
      {"out null", [](auto& x) { x.args.out.data = nullptr; }},
      {"lse null", [](auto& x) { x.args.lse = nullptr; }},
      {"query misaligned", [&](auto& x) { x.args.query.data = misaligned(x.args.query.data); }},
      {"value misaligned", [&](auto& x) { x.args.value.data = misaligned(x.args.value.data); }},
      {"lse misaligned", [&](auto& x) { x.args.lse = misaligned(x.args.lse); }},
      {"query batch_stride", [](auto& x) { x.args.query.batch_stride = INT64_MAX; }},
      {"key seq_stride", [](auto& x) { x.args.key.seq_stride = INT64_MIN; }},
      {"out head_stride", [](auto& x) { x.args.out.head_stride = huge; }},
      {"query sizes and strides that leave the address space",
       [](auto& x) { x.args.query.batch_stride = -(int64_t{1} << 54); }},
      {"value sizes and strides that leave the address space",
       [](auto& x) { x.args.value.data = reinterpret_cast<void*>(~uintptr_t{63}); }},
      {"out strides", [](auto& x) { x.args.out.seq_stride = 0; }, STROBE_INVALID_ARGUMENT, forward_only},
      {"out strides", [](auto& x) { x.args.out.head_stride -= 1; }, STROBE_INVALID_ARGUMENT, forward_only},
      {"out overlapping query", [](auto& x) { x.args.out = x.args.query; }, STROBE_INVALID_ARGUMENT, forward_only},
      // What is only read is moved: a result moved past an array's end could meet another of the call's arrays first.
      {"out overlapping value", [](auto& x) { x.args.value.data = x.out.data() + x.out.size() - 1; },
       STROBE_INVALID_ARGUMENT, forward_only},
      {"lse overlapping key", [](auto& x) { x.args.lse = x.key.data(); }, STROBE_INVALID_ARGUMENT, forward_only},
      {"out overlapping alibi_slopes",
       [](auto& x) { x.args.alibi_slopes = x.out.data() + x.out.size() - x.slopes.size(); }, STROBE_INVALID_ARGUMENT,
       forward_only},
      {"out overlapping lse", [](auto& x) { x.args.lse = x.out.data(); }, STROBE_INVALID_ARGUMENT, forward_only},

      {"dout null", [](auto& x) { x.args.dout.data = nullptr; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dout dim_stride", [](auto& x) { x.args.dout_dim_stride = huge; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dlse misaligned", [&](auto& x) { x.args.dlse = misaligned(x.dlse.data()); }, STROBE_INVALID_ARGUMENT,
       backward_only},
      {"dquery null", [](auto& x) { x.args.dquery.data = nullptr; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dkey null", [](auto& x) { x.args.dkey.data = nullptr; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dvalue null", [](auto& x) { x.args.dvalue.data = nullptr; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dvalue misaligned", [&](auto& x) { x.args.dvalue.data = misaligned(x.args.dvalue.data); },
       STROBE_INVALID_ARGUMENT, backward_only},
      {"dkey overlapping dvalue", [](auto& x) { x.args.dkey = x.args.dvalue; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dquery overlapping dout", [](auto& x) { x.args.dquery = x.args.dout; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dquery overlapping out", [](auto& x) { x.args.dquery = x.args.out; }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dvalue overlapping value", [](auto& x) { x.args.dvalue = x.args.value; }, STROBE_INVALID_ARGUMENT,
       backward_only},
      {"dkey overlapping lse", [](auto& x) { x.args.lse = x.dkey.data(); }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dkey overlapping dlse", [](auto& x) { x.args.dlse = x.dkey.data(); }, STROBE_INVALID_ARGUMENT, backward_only},
      {"dkey strides", [](auto& x) { x.args.dkey.batch_stride = 0; }, STROBE_INVALID_ARGUMENT, backward_only},

      {"cu_seqlens_q null", [](auto& x) { x.args.cu_seqlens_k = x.cu_seqlens_k.data(); }},
      {"cu_seqlens_k null", [](auto& x) { x.args.cu_seqlens_q = x.cu_seqlens_q.data(); }},
      {"cu_seqlens_q misaligned",
       [&](auto& x) { x.args.cu_seqlens_q = static_cast<const int32_t*>(misaligned(x.cu_seqlens_q.data())); },
       STROBE_INVALID_ARGUMENT, both, true},
      {"cu_seqlens_q[0] 1", [](auto& x) { x.cu_seqlens_q[0] = 1; }, STROBE_INVALID_ARGUMENT, both, true},
      {"cu_seqlens_k[2] 19", [](auto& x) { x.cu_seqlens_k[2] = 19; }, STROBE_INVALID_ARGUMENT, both, true},
      {"cu_seqlens_k[1] -1", [](auto& x) { x.cu_seqlens_k[1] = -1; }, STROBE_INVALID_ARGUMENT, both, true},
      {"cu_seqlens_q[2] 51", [](auto& x) { x.cu_seqlens_q[2] = 51; }, STROBE_INVALID_ARGUMENT, both, true},
      {"cu_seqlens_q sequence 0 of length 37", [](auto& x) { x.args.seq_len_q = 36; }, STROBE_INVALID_ARGUMENT, both,
       true},
      {"out overlapping query", [](auto& x) { x.args.query.data = x.out.data() + x.out.size() - 1; },
       STROBE_INVALID_ARGUMENT, forward_only, true},
      {"total_q -1", [](auto& x) { x.args.total_q = -1; }, STROBE_INVALID_ARGUMENT, both, true},
      {"total_k 4611686018427387904", [](auto& x) { x.args.total_k = huge; }, STROBE_INVALID_ARGUMENT, both, true}};
  for (const Wrong& wrong : cases) {
    for (const bool backward : {false, true}) {
      if (wrong.passes == (backward ? forward_only : backward_only)) continue;
      CAttentionCall<float> call(wrong.packed);
      const Bytes memory(1 << 22);
      call.args.workspace = memory.get();
      call.args.workspace_bytes = 1 << 22;
      const std::string operation = backward ? "strobe_attention_backward: " : "strobe_attention_forward: ";
      INFO(operation, std::string(wrong.says));
      REQUIRE(call.untouched());
      wrong.change(call);
      const strobe_status status =
          backward ? strobe_attention_backward(&call.args) : strobe_attention_forward(&call.args);
      const std::string message = strobe_last_error();
      INFO(message);
      CHECK(status == wrong.status);
      CHECK(message.rfind(operation, 0) == 0);
      CHECK(contains(message, wrong.says));
      CHECK(contains(message, " given, "));
      CHECK(call.untouched());
    }
  }
}

TEST_CASE("C attention: null structs, and the workspace to the byte") {
  CHECK(strobe_attention_forward(nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "strobe_attention_forward: args null"));
  CHECK(strobe_attention_backward(nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(strobe_attention_args_init(nullptr, sizeof(strobe_attention_args)) == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "args null"));
  strobe_attention_args none;
  CHECK(strobe_attention_args_init(&none, sizeof none - 1) == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "struct_size"));

  CAttentionCall<float> call;
  size_t bytes = 5;
  CHECK(strobe_attention_forward_workspace(nullptr, &bytes) == STROBE_INVALID_ARGUMENT);
  CHECK(bytes == 0);
  CHECK(strobe_attention_backward_workspace(&call.args, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "strobe_attention_backward_workspace: bytes null"));

  for (const bool backward : {false, true}) {
    const auto workspace_of = backward ? strobe_attention_backward_workspace : strobe_attention_forward_workspace;
    const auto pass = backward ? strobe_attention_backward : strobe_attention_forward;
    CAttentionCall<float> sizes_only;
    for (strobe_attention_tensor* x : {&sizes_only.args.query, &sizes_only.args.key, &sizes_only.args.value,
                                       &sizes_only.args.out, &sizes_only.args.dout}) {
      *x = {};
    }
    REQUIRE(workspace_of(&sizes_only.args, &bytes) == STROBE_OK);
    REQUIRE(bytes > 0);
    const Bytes memory(bytes + 64);
    call.args.workspace = memory.get();
    call.args.workspace_bytes = bytes - 1;
    CHECK(pass(&call.args) == STROBE_WORKSPACE_TOO_SMALL);
    CHECK(contains(strobe_last_error(), "workspace_bytes " + std::to_string(bytes - 1)));
    CHECK(contains(strobe_last_error(), std::to_string(bytes)));
    call.args.workspace_bytes = bytes;
    call.args.workspace = nullptr;
    CHECK(pass(&call.args) == STROBE_INVALID_ARGUMENT);
    CHECK(contains(strobe_last_error(), "workspace null"));
    call.args.workspace = static_cast<char*>(memory.get()) + 32;
    CHECK(pass(&call.args) == STROBE_INVALID_ARGUMENT);
    CHECK(contains(strobe_last_error(), "workspace misaligned"));
    CHECK(call.untouched() != backward);
    call.args.workspace = memory.get();
    CHECK(pass(&call.args) == STROBE_OK);
  }

  const Bytes large(1 << 20);
  call.args.workspace = large.get();
  call.args.workspace_bytes = 1 << 20;
  call.args.query.data = static_cast<char*>(large.get()) + 64;
  CHECK(strobe_attention_forward(&call.args) == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "workspace overlapping query"));
}
