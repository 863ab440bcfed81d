// The C interface of attention on a GPU: device memory, a stream of the caller's, and host memory refused.
#include "strobe/kernels/attention_c.h"
#include "support/compare.h"
#include "support/gpu.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

constexpr int64_t seq_len = 200, num_heads = 2, head_dim = 64;

strobe_attention_tensor operand(const Tensor& x) { return {x.data(), x.strides()[0], x.strides()[1], x.strides()[2]}; }

strobe_attention_args causal_call(const Tensor& query, const Tensor& key, const Tensor& value) {
  strobe_attention_args args;
  strobe_attention_args_init(&args, sizeof args);
  args.dtype = STROBE_DTYPE_BF16;
  args.device_type = STROBE_DEVICE_CUDA;
  args.batch = 1;
  args.num_heads = args.num_kv_heads = num_heads;
  args.seq_len_q = args.seq_len_k = seq_len;
  args.head_dim = head_dim;
  args.softmax_scale = 0.125;
  args.causal = 1;
  args.query = operand(query);
  args.key = operand(key);
  args.value = operand(value);
  return args;
}

}  // namespace

TEST_CASE("C attention: the bits of the C++ function on a GPU, on a stream of the caller's" * needs_gpu()) {
  const DeviceGuard device(Device::cuda());
  const OwnStream stream(Device::cuda());
  const StreamGuard guard(stream.get());
  seed(1);
  const auto random = [] { return normal({1, seq_len, num_heads, head_dim}, 0, 1, DType::bf16); };
  const Tensor query = random().set_requires_grad(), key = random().set_requires_grad(),
               value = random().set_requires_grad(), dout = random();
  const AttentionResult expected =
      flash_attention_return_lse(query, key, value, {.softmax_scale = 0.125, .causal = true});
  expected.out.backward(dout);

  strobe_attention_args args = causal_call(query, key, value);
  args.stream = current_stream(Device::cuda()).handle;
  const Tensor out = full(query.shape(), NAN, DType::bf16), lse = full({1, num_heads, seq_len}, NAN);
  const Tensor dquery = full(query.shape(), NAN, DType::bf16), dkey = full(query.shape(), NAN, DType::bf16),
               dvalue = full(query.shape(), NAN, DType::bf16);
  args.out = operand(out);
  args.lse = lse.data();
  args.dout = operand(dout);
  args.dquery = operand(dquery);
  args.dkey = operand(dkey);
  args.dvalue = operand(dvalue);
  const auto call = [&](auto workspace_bytes, auto run) {
    CHECK(workspace_bytes(&args, &args.workspace_bytes) == STROBE_OK);
    const Tensor workspace = empty_bytes(args.workspace_bytes, Device::cuda());
    args.workspace = workspace.data();
    CHECK(run(&args) == STROBE_OK);
    CHECK(std::string(strobe_last_error()) == "");
  };
  call(strobe_attention_forward_workspace, strobe_attention_forward);
  call(strobe_attention_backward_workspace, strobe_attention_backward);
  const auto same = [](const Tensor& a, const Tensor& b) { return a.to_vector<double>() == b.to_vector<double>(); };
  CHECK(same(out, expected.out));
  CHECK(same(lse, expected.lse));
  CHECK(same(dquery, query.grad()));
  CHECK(same(dkey, key.grad()));
  CHECK(same(dvalue, value.grad()));
}

TEST_CASE("C attention: host memory is refused on a GPU" * needs_gpu()) {
  const Tensor x = zeros({1, seq_len, num_heads, head_dim}, DType::bf16, Device::cpu());
  const Tensor away = x.to(Device::cuda()), lse = zeros({1, num_heads, seq_len}, DType::f32, Device::cuda());
  strobe_attention_args args = causal_call(away, x, away);
  const Tensor out = empty_like(away);
  args.out = operand(out);
  args.lse = lse.data();
  CHECK(strobe_attention_forward(&args) == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "key pointer given that cuda:0 cannot read"));
}
