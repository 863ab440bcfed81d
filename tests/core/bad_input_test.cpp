// Every operation refuses shapes, dtypes and devices that do not fit, by its own name and before it writes anything.
#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

struct BadCall {
  const char* operation;  // the error must begin with it
  const char* says;       // and contain this
  std::function<Tensor()> call;
};

}  // namespace

TEST_CASE("ops: bad shapes, dtypes and undefined tensors are refused by name") {
  const Tensor x = ones({2, 3});
  const Tensor y = ones({2, 4});
  const Tensor wide = ones({2, 3}, DType::f64);
  const Tensor whole = ones({2, 3}, DType::i64);
  const Tensor heads = ones({1, 5, 4, 8});
  const Tensor none;
  const std::vector<BadCall> calls{
      {"add", "(2, 3) and (2, 4)", [&] { return x + y; }},
      {"add", "dtype", [&] { return x + wide; }},
      {"add", "i64", [&] { return whole + whole; }},
      {"add", "undefined", [&] { return x + none; }},
      {"sub", "(2, 3) and (2, 4)", [&] { return x - y; }},
      {"mul", "(2, 3) and (2, 4)", [&] { return x * y; }},
      {"mul", "dtype", [&] { return x * wide; }},
      {"div", "(2, 3) and (2, 4)", [&] { return x / y; }},
      {"neg", "i64", [&] { return -whole; }},
      {"exp", "i64", [&] { return exp(whole); }},
      {"log", "undefined", [&] { return log(none); }},
      {"sqrt", "i64", [&] { return sqrt(whole); }},
      {"square", "i64", [&] { return square(whole); }},
      {"tanh", "i64", [&] { return tanh(whole); }},
      {"relu", "i64", [&] { return relu(whole); }},
      {"silu", "i64", [&] { return silu(whole); }},
      {"gelu", "i64", [&] { return gelu(whole); }},
      {"gelu_tanh", "i64", [&] { return gelu(whole, GeluForm::tanh); }},
      {"cast", "undefined", [&] { return cast(none, DType::f64); }},
      {"matmul", "(2, 3)", [&] { return matmul(x, y); }},
      {"matmul", "dtype", [&] { return matmul(x, transpose(wide, 0, 1)); }},
      {"matmul", "2 axes", [&] { return matmul(ones({3}), ones({3})); }},
      {"linear", "(2, 3)",
       [&] {
         return linear(x, ones({5, 4}));
       }},
      {"linear", "dtype",
       [&] {
         return linear(x, ones({5, 3}, DType::f64));
       }},
      {"linear", "bias (4)",
       [&] {
         return linear(x, ones({5, 3}), ones({4}));
       }},
      {"sum", "axis 2", [&] { return sum(x, {2}); }},
      {"sum", "twice",
       [&] {
         return sum(x, {0, 0});
       }},
      {"mean", "i64", [&] { return mean(whole); }},
      {"max", "axis -3", [&] { return max(x, {-3}); }},
      {"max", "",
       [&] {
         return max(ones({2, 0}), {1});
       }},
      {"sum_to", "(2, 4)",
       [&] {
         return sum_to(x, {2, 4});
       }},
      {"softmax", "axis 2", [&] { return softmax(x, 2); }},
      {"log_softmax", "i64", [&] { return log_softmax(whole); }},
      {"layer_norm", "weight", [&] { return layer_norm(x, ones({4}), ones({3})); }},
      {"layer_norm", "dtype", [&] { return layer_norm(x, ones({3}, DType::f64), ones({3})); }},
      {"rms_norm", "weight", [&] { return rms_norm(x, ones({2})); }},
      {"embedding", "indices", [&] { return embedding(x, x); }},
      {"embedding", "weight", [&] { return embedding(whole, ones({3})); }},
      {"embedding", "7", [&] { return embedding(full({2}, 7, DType::i64), x); }},
      {"embedding", "-1", [&] { return embedding(full({2}, -1, DType::i64), x); }},
      {"rope", "(2, 3)", [&] { return rope(x); }},
      {"rope", "even",
       [&] {
         return rope(ones({1, 2, 2, 3}));
       }},
      {"dropout", "1.5", [&] { return dropout(x, 1.5); }},
      {"dropout", "nan", [&] { return dropout(x, std::nan("")); }},
      {"cross_entropy", "targets", [&] { return cross_entropy(x, ones({3}, DType::i64)); }},
      {"cross_entropy", "targets", [&] { return cross_entropy(x, ones({2})); }},
      {"cross_entropy", "3", [&] { return cross_entropy(x, full({2}, 3, DType::i64)); }},
      {"reshape", "(2, 4)",
       [&] {
         return reshape(x, {2, 4});
       }},
      {"permute", "axes", [&] { return permute(x, {0}); }},
      {"transpose", "axis 5", [&] { return transpose(x, 0, 5); }},
      {"expand", "(3, 3)",
       [&] {
         return expand(x, {3, 3});
       }},
      {"slice", "range", [&] { return slice(x, 0, 1, 3); }},
      {"split", "expected 3",
       [&] {
         return split(x, {1, 1}, 1)[0];
       }},
      {"concat", "tensor 1",
       [&] {
         return concat({x, y}, 0);
       }},
      {"concat", "dtype",
       [&] {
         return concat({x, wide}, 0);
       }},
      {"concat", "no tensors", [&] { return concat({}, 0); }},
      {"flash_attention", "query", [&] { return flash_attention(x, x, x); }},
      {"flash_attention", "head_dim",
       [&] {
         return flash_attention(heads, ones({1, 5, 4, 4}), ones({1, 5, 4, 4}));
       }},
      {"standard_attention", "dtype", [&] { return standard_attention(heads, heads, heads.to(DType::f64)); }},
      {"standard_attention", "num_kv_heads 3",
       [&] {
         return standard_attention(heads, ones({1, 5, 3, 8}), ones({1, 5, 3, 8}));
       }},
      {"flash_attention_qkvpacked", "heads",
       [&] {
         return flash_attention_qkvpacked(ones({1, 4, 10}), 2);
       }},
      {"checkpoint", "i64", [&] { return checkpoint([](const Tensor& t) { return t; }, whole); }},
  };
  const size_t before = memory_stats().current;
  for (const BadCall& bad : calls) {
    CAPTURE(std::string(bad.operation));
    CAPTURE(std::string(bad.says));
    const std::string message = error_of([&] { bad.call(); });
    CAPTURE(message);
    CHECK(message.rfind(std::string(bad.operation) + ":", 0) == 0);
    CHECK(contains(message, bad.says));
    CHECK(memory_stats().current == before);
  }
}

TEST_CASE("devices: a build without CUDA says so" * doctest::skip(built_with_cuda)) {
  CHECK(contains(error_of([] { empty({2}, DType::f32, Device::cuda()); }), "no CUDA backend"));
  CHECK(contains(error_of([] { ones({2}).to(Device::cuda()); }), "no CUDA backend"));
  CHECK(contains(error_of([] { DeviceGuard guard(Device::cuda()); }), "no CUDA backend"));
  CHECK_FALSE(cuda_available());
}
