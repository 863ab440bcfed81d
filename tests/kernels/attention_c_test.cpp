// The C interface of attention: the bits of the C++ kernels, any strides, empty calls, errors per thread, plain C.
#include "strobe/kernels/attention_c.h"

#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>

#include "support/attention_c_call.h"

extern "C" int strobe_test_attention_from_c(void);

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::testing;

namespace {

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Option {
  std::string_view name;
  std::function<void(strobe_attention_args&)> in_c;
  std::function<void(AttentionArgs&)> in_cpp;
};

const std::vector<Option> options = {
    {"none", [](auto&) {}, [](auto&) {}},
    {"causal", [](auto& x) { x.causal = 1; }, [](auto& x) { x.causal = true; }},
    {"window_left", [](auto& x) { x.window_left = 9; }, [](auto& x) { x.window_left = 9; }},
    {"window_right", [](auto& x) { x.window_right = 3; }, [](auto& x) { x.window_right = 3; }},
    {"softcap", [](auto& x) { x.softcap = 1.5; }, [](auto& x) { x.softcap = 1.5; }},
    {"dropout", [](auto& x) { x.dropout_p = 0.25; }, [](auto& x) { x.dropout_p = 0.25; }},
    {"dropout_seed", [](auto& x) { x.dropout_p = 0.25, x.dropout_seed = 7; },
     [](auto& x) { x.dropout_p = 0.25, x.dropout_seed = 7; }},
    {"dropout_offset", [](auto& x) { x.dropout_p = 0.25, x.dropout_offset = 5; },
     [](auto& x) { x.dropout_p = 0.25, x.dropout_offset = 5; }},
    {"kernel, deterministic", [](auto& x) { x.kernel = STROBE_ATTENTION_PORTABLE, x.deterministic = 0; },
     [](auto& x) { x.kernel = AttentionKernel::portable, x.deterministic = false; }},
    {"all",
     [](auto& x) {
       x.causal = 1, x.window_left = 20, x.window_right = 2, x.softcap = 2, x.dropout_p = 0.5, x.dropout_seed = 11;
     },
     [](auto& x) {
       x.causal = true, x.window_left = 20, x.window_right = 2, x.softcap = 2, x.dropout_p = 0.5, x.dropout_seed = 11;
     }}};

}  // namespace

TEST_CASE_TEMPLATE("C attention: every option gives the bits of the C++ kernels", T, float, double, bfloat16, float16) {
  for (const bool packed : {false, true}) {
    for (const bool alibi : {false, true}) {
      for (const bool with_dlse : {false, true}) {
        for (const Option& option : options) {
          INFO(option.name, " packed ", packed, " ALiBi ", alibi, " dlse ", with_dlse);
          CAttentionCall<T> call(packed), expected(packed);
          option.in_c(call.args);
          AttentionGradArgs cpp = expected.cpp_args(option.in_cpp);
          if (alibi) {
            call.args.alibi_slopes = call.slopes.data();
            cpp.forward.alibi_slopes = expected.slopes.data();
          }
          if (with_dlse) {
            call.args.dlse = call.dlse.data();
            cpp.dlse = expected.dlse.data();
          }
          CHECK(call.forward() == STROBE_OK);
          CHECK(call.backward() == STROBE_OK);
          CHECK(std::string(strobe_last_error()) == "");
          expected.run_cpp(cpp);
          CHECK(same_bits(call.lse, expected.lse));
          for (size_t i = 0; i < 4; ++i) CHECK(same_bits(call.results()[i], expected.results()[i]));
        }
      }
    }
  }
}

TEST_CASE("C attention: packed sequences may be said to be of any length") {
  CAttentionCall<float> call(true), expected(true);
  call.args.seq_len_q = int64_t{1} << 40;
  call.args.seq_len_k = int64_t{1} << 40;
  CHECK(call.forward() == STROBE_OK);
  CHECK(call.backward() == STROBE_OK);
  CHECK(expected.forward() == STROBE_OK);
  CHECK(expected.backward() == STROBE_OK);
  for (size_t i = 0; i < 4; ++i) CHECK(same_bits(call.results()[i], expected.results()[i]));
}

TEST_CASE("C attention: strides, negative and 0 ones included, and packed QKV") {
  CAttentionCall<float> plain;
  REQUIRE(plain.forward() == STROBE_OK);
  REQUIRE(plain.backward() == STROBE_OK);

  // Heads in reverse order, forward and in every result.
  CAttentionCall<float> reversed;
  for (strobe_attention_tensor* x :
       {&reversed.args.query, &reversed.args.out, &reversed.args.dout, &reversed.args.dquery, &reversed.args.key,
        &reversed.args.value, &reversed.args.dkey, &reversed.args.dvalue}) {
    const int64_t heads = x->seq_stride / x->head_stride;
    x->data = static_cast<float*>(x->data) + (heads - 1) * x->head_stride;
    x->head_stride = -x->head_stride;
  }
  REQUIRE(reversed.forward() == STROBE_OK);
  REQUIRE(reversed.backward() == STROBE_OK);
  for (size_t i = 0; i < 4; ++i) CHECK(same_bits(plain.results()[i], reversed.results()[i]));

  // dout is one number everywhere, or with its head_dim in reverse order.
  CAttentionCall<float> ones, broadcast, backwards;
  ones.dout.assign(ones.dout.size(), 1.f);
  const float one = 1;
  broadcast.args.dout = {const_cast<float*>(&one), 0, 0, 0};
  broadcast.args.dout_dim_stride = 0;
  for (size_t i = 0; i < plain.dout.size(); ++i) {
    const size_t dim = CAttentionCall<float>::head_dim;
    backwards.dout[i] = plain.dout[i / dim * dim + (dim - 1 - i % dim)];
  }
  backwards.args.dout.data = backwards.dout.data() + CAttentionCall<float>::head_dim - 1;
  backwards.args.dout_dim_stride = -1;
  for (CAttentionCall<float>* call : {&ones, &broadcast, &backwards}) {
    REQUIRE(call->forward() == STROBE_OK);
    REQUIRE(call->backward() == STROBE_OK);
  }
  for (size_t i = 0; i < 4; ++i) {
    CHECK(same_bits(ones.results()[i], broadcast.results()[i]));
    CHECK(same_bits(plain.results()[i], backwards.results()[i]));
  }

  // Thirds of one buffer as inputs and as gradients; one element on, they overlap.
  CAttentionCall<float> thirds;
  constexpr int64_t seq_len = 8, heads = 2, dim = 3, row = 3 * heads * dim;
  std::vector<float> qkv(seq_len * row + 1, 0.5f), dqkv(qkv.size(), NAN);
  strobe_attention_args& args = thirds.args;
  args.batch = 1;
  args.seq_len_q = args.seq_len_k = seq_len;
  args.num_heads = args.num_kv_heads = heads;
  args.head_dim = dim;
  int64_t index = 0;
  for (auto [input, gradient] :
       {std::pair{&args.query, &args.dquery}, std::pair{&args.key, &args.dkey}, std::pair{&args.value, &args.dvalue}}) {
    *input = {qkv.data() + index * heads * dim, 0, row, dim};
    *gradient = {dqkv.data() + index * heads * dim, 0, row, dim};
    ++index;
  }
  CHECK(thirds.forward() == STROBE_OK);
  CHECK(thirds.backward() == STROBE_OK);
  CHECK(std::none_of(dqkv.begin(), dqkv.end() - 1, [](float x) { return std::isnan(x); }));
  args.dkey.data = static_cast<float*>(args.dkey.data) + 1;
  CHECK(thirds.backward() == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "dkey overlapping dvalue"));
}

TEST_CASE("C attention: calls without queries, keys or sequences need no memory for them") {
  for (const auto& [batch, seq_len_q, seq_len_k] :
       {std::array<int64_t, 3>{0, 5, 5}, {2, 0, 0}, {2, 0, 5}, {2, 5, 0}, {int64_t{1} << 40, 0, 0}}) {
    INFO(batch, " x ", seq_len_q, " and ", seq_len_k);
    CAttentionCall<double> call;
    call.args.batch = batch;
    call.args.seq_len_q = seq_len_q;
    call.args.seq_len_k = seq_len_k;
    const strobe_attention_tensor nothing{nullptr, INT64_MAX, INT64_MIN, 3};
    if (batch * seq_len_q == 0) {
      call.args.query = call.args.out = call.args.dout = call.args.dquery = nothing;
      call.args.lse = nullptr;
    }
    if (batch * seq_len_k == 0) call.args.key = call.args.value = call.args.dkey = call.args.dvalue = nothing;
    CHECK(call.forward() == STROBE_OK);
    CHECK(call.backward() == STROBE_OK);
    if (seq_len_q == 5 && batch > 0) {
      CHECK(call.lse[0] == -INFINITY);
      CHECK(call.out[0] == 0);
    }
    if (seq_len_k == 5 && batch > 0) CHECK(call.dvalue[0] == 0);
  }
}

TEST_CASE("C attention: the defaults, and required fields that were forgotten") {
  strobe_attention_args args;
  std::memset(&args, 0xff, sizeof args);
  REQUIRE(strobe_attention_args_init(&args, sizeof args) == STROBE_OK);
  CHECK(args.struct_size == sizeof args);
  CHECK(args.window_left == -1);
  CHECK(args.window_right == -1);
  CHECK(args.deterministic == 1);
  CHECK(args.causal == 0);
  CHECK(args.dout_dim_stride == 1);
  CHECK(args.alibi_slopes == nullptr);
  CHECK(args.dvalue.head_stride == 0);
  CHECK(strobe_attention_forward(&args) == STROBE_INVALID_ARGUMENT);
  args.num_heads = args.num_kv_heads = args.head_dim = 1;
  CHECK(strobe_attention_forward(&args) == STROBE_INVALID_ARGUMENT);
  CHECK(contains(strobe_last_error(), "softmax_scale nan"));
}

TEST_CASE("C attention: each thread has its own last error") {
  CHECK(strobe_attention_forward(nullptr) == STROBE_INVALID_ARGUMENT);
  const char* const here = strobe_last_error();
  std::string before, after;
  std::thread([&] {
    before = strobe_last_error();
    strobe_attention_backward(nullptr);
    after = strobe_last_error();
  }).join();
  CHECK(before == "");
  CHECK(contains(after, "strobe_attention_backward: args null"));
  CHECK(contains(here, "strobe_attention_forward: args null"));
  CHECK(strobe_last_error() == here);
  CAttentionCall<float> call;
  CHECK(call.forward() == STROBE_OK);
  CHECK(std::string(strobe_last_error()) == "");
}

TEST_CASE("C attention: a C99 program") {
  CHECK(strobe_test_attention_from_c() == 0);
  const int32_t version = strobe_version_number();
  CHECK(std::string(strobe_version_string()) == std::to_string(version / 10000) + "." +
                                                    std::to_string(version / 100 % 100) + "." +
                                                    std::to_string(version % 100));
}
