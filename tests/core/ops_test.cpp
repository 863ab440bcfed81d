// Every operation as a row of one table; a new operation is one more row.
#include "support/op_cases.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

using Inputs = std::vector<Tensor>;

Tensor indices(const std::vector<int64_t>& values, const Shape& shape) { return from_vector(values, shape); }

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> rows{
      {"add", {{3, 5}, {3, 5}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"add broadcast", {{4, 1, 5}, {3, 1}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"add itself", {{3, 5}}, [](const Inputs& x) { return x[0] + x[0]; }},
      {"add scalar", {{7}}, [](const Inputs& x) { return 2.0 + (x[0] + 1.5); }},
      {"sub", {{3, 5}, {5}}, [](const Inputs& x) { return x[0] - x[1]; }},
      {"sub scalar", {{3, 5}}, [](const Inputs& x) { return 1.5 - (x[0] - 0.5); }},
      {"negate", {{3, 5}}, [](const Inputs& x) { return -x[0]; }},
      {"mul", {{2, 3, 5}, {3, 5}}, [](const Inputs& x) { return x[0] * x[1]; }},
      {"mul scalar", {{3, 5}}, [](const Inputs& x) { return 3.0 * (x[0] * 0.5); }},
      {"div", {{3, 5}, {3, 1}}, [](const Inputs& x) { return x[0] / x[1]; }, 0.5, 2.0},
      {"div scalar", {{3, 5}}, [](const Inputs& x) { return 2.0 / (x[0] / 3.0); }, 0.5, 2.0},
      {"exp", {{33}}, [](const Inputs& x) { return exp(x[0]); }, -3.0, 3.0},
      {"log", {{33}}, [](const Inputs& x) { return log(x[0]); }, 0.5, 4.0},
      {"sqrt", {{33}}, [](const Inputs& x) { return sqrt(x[0]); }, 0.5, 4.0},
      {"tanh", {{5, 33}}, [](const Inputs& x) { return tanh(x[0]); }, -3.0, 3.0},
      {"relu", {{5, 33}}, [](const Inputs& x) { return relu(x[0] + 0.101); }},
      {"silu", {{5, 33}}, [](const Inputs& x) { return silu(x[0]); }, -4.0, 4.0},
      {"gelu", {{5, 33}}, [](const Inputs& x) { return gelu(x[0]); }, -4.0, 4.0},
      {"gelu tanh", {{5, 33}}, [](const Inputs& x) { return gelu(x[0], GeluForm::tanh); }, -4.0, 4.0},
      {"matmul", {{5, 7}, {7, 3}}, [](const Inputs& x) { return matmul(x[0], x[1]); }},
      {"matmul batched", {{2, 3, 5, 7}, {3, 7, 4}}, [](const Inputs& x) { return matmul(x[0], x[1]); }},
      {"matmul transposed",
       {{6, 5, 7}, {6, 3, 5}},
       [](const Inputs& x) { return matmul(transpose(x[0], 1, 2), transpose(x[1], 1, 2)); }},
      {"linear", {{2, 3, 7}, {5, 7}, {5}}, [](const Inputs& x) { return linear(x[0], x[1], x[2]); }},
      {"linear without bias", {{4, 7}, {5, 7}}, [](const Inputs& x) { return linear(x[0], x[1]); }},
      {"linear to rows that a GPU pads", {{9, 7}, {131, 7}}, [](const Inputs& x) { return linear(x[0], x[1]); }},
      {"mlp",
       {{2, 3, 16}, {24, 16}, {24}, {8, 24}, {8}},
       [](const Inputs& x) { return mlp(x[0], x[1], x[2], x[3], x[4]); }},
      {"mlp without biases, of odd sizes",
       {{5, 7}, {11, 7}, {3, 11}},
       [](const Inputs& x) { return mlp(x[0], x[1], {}, x[2], {}); }},
      {"sum", {{3, 4, 5}}, [](const Inputs& x) { return sum(x[0]); }},
      {"sum over axes",
       {{3, 4, 5}},
       [](const Inputs& x) {
         return sum(x[0], {0, -1});
       }},
      {"sum keeping axes", {{3, 4, 5}}, [](const Inputs& x) { return sum(x[0], {1}, true); }},
      {"mean",
       {{3, 4, 5}},
       [](const Inputs& x) {
         return mean(x[0], {1, 2});
       }},
      {"max", {{3, 40}}, [](const Inputs& x) { return max(x[0], {1}); }},
      {"max over the first axis", {{9, 4, 5}}, [](const Inputs& x) { return max(x[0], {0}); }},
      {"softmax", {{3, 40}}, [](const Inputs& x) { return softmax(x[0]); }, -4.0, 4.0},
      {"log_softmax", {{3, 40}}, [](const Inputs& x) { return log_softmax(x[0]); }, -4.0, 4.0},
      {"layer_norm", {{2, 3, 40}, {40}, {40}}, [](const Inputs& x) { return layer_norm(x[0], x[1], x[2]); }},
      {"rms_norm", {{2, 3, 40}, {40}}, [](const Inputs& x) { return rms_norm(x[0], x[1]); }},
      {"add_layer_norm",
       {{2, 3, 40}, {2, 3, 40}, {40}, {40}},
       [](const Inputs& x) {
         const auto [sum, normalized] = add_layer_norm(x[0], x[1], x[2], x[3]);
         return sum * 0.5 + normalized;
       }},
      {"add_layer_norm of which only the norm is used",
       {{5, 37}, {5, 37}, {37}},
       [](const Inputs& x) { return add_layer_norm(x[0], x[1], x[2], {}).normalized; }},
      {"add_layer_norm of which only the sum is used",
       {{5, 37}, {5, 37}},
       [](const Inputs& x) { return add_layer_norm(x[0], x[1], {}, {}).sum; }},
      {"add_rms_norm",
       {{3, 2048}, {3, 2048}, {2048}},
       [](const Inputs& x) {
         const auto [sum, normalized] = add_rms_norm(x[0], x[1], x[2]);
         return sum * normalized;
       }},
      {"embedding",
       {{5, 4}},
       [](const Inputs& x) {
         return embedding(indices({0, 4, 4, 1, 0, 4}, {2, 3}), x[0]);
       }},
      {"rope", {{2, 5, 3, 8}}, [](const Inputs& x) { return rope(x[0]); }},
      {"rope from a later position", {{1, 5, 3, 8}}, [](const Inputs& x) { return rope(x[0], 100.0, 7); }},
      {"dropout",
       {{20, 30}},
       [](const Inputs& x) {
         seed(5);
         return dropout(x[0], 0.3);
       }},
      {"cross_entropy",
       {{4, 11}},
       [](const Inputs& x) {
         return cross_entropy(x[0] * 1.0, indices({0, 10, 3, 3}, {4}));
       }},
      {"cross_entropy ignoring a target",
       {{2, 2, 11}},
       [](const Inputs& x) {
         return cross_entropy(x[0], indices({0, -100, 3, 3}, {2, 2}));
       }},
      {"cross_entropy of linear",
       {{2, 4, 16}, {131, 16}},
       [](const Inputs& x) {
         return cross_entropy(linear(x[0], x[1]), indices({0, 130, 3, 3, 64, 1, -100, 7}, {2, 4}));
       }},
      {"reshape",
       {{3, 4, 5}},
       [](const Inputs& x) {
         return reshape(x[0], {4, -1});
       }},
      {"permute",
       {{3, 4, 5}},
       [](const Inputs& x) {
         return permute(x[0], {2, 0, 1});
       }},
      {"expand",
       {{3, 1}},
       [](const Inputs& x) {
         return expand(x[0], {2, 3, 4}) * 1.0;
       }},
      {"slice", {{3, 7}}, [](const Inputs& x) { return slice(x[0], 1, 2, 6); }},
      {"split",
       {{3, 7}},
       [](const Inputs& x) {
         const std::vector<Tensor> parts = split(x[0], {2, 3, 2}, 1);
         return parts[0] * parts[2];
       }},
      {"concat",
       {{3, 2}, {3, 4}},
       [](const Inputs& x) {
         return concat({x[0], x[1], x[0]}, 1);
       }},
      {"contiguous", {{3, 4}}, [](const Inputs& x) { return contiguous(transpose(x[0], 0, 1)); }},
      {"checkpoint",
       {{3, 4}},
       [](const Inputs& x) {
         seed(6);
         return checkpoint([](const Tensor& input) { return dropout(tanh(input), 0.25) * input; }, x[0]);
       }},
      {"square", {{33}}, [](const Inputs& x) { return square(x[0]); }, -3.0, 3.0},
      {"add scalar tensor", {{3, 5}, {}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"mul itself", {{3, 5}}, [](const Inputs& x) { return x[0] * x[0]; }},
      {"div itself broadcast", {{3, 1}, {4}}, [](const Inputs& x) { return x[0] / x[1] / (x[0] + 1.0); }, 0.5, 2.0},
      {"mean of all", {{3, 4, 5}}, [](const Inputs& x) { return mean(x[0]); }},
      {"max over separate axes",
       {{3, 4, 5}},
       [](const Inputs& x) {
         return max(x[0], {0, 2}, true);
       }},
      {"sum_to",
       {{4, 3, 5}},
       [](const Inputs& x) {
         return sum_to(x[0], {3, 1});
       }},
      {"softmax over the first axis", {{7, 4}}, [](const Inputs& x) { return softmax(x[0], 0); }, -4.0, 4.0},
      {"log_softmax over a middle axis", {{2, 7, 4}}, [](const Inputs& x) { return log_softmax(x[0], 1); }, -4.0, 4.0},
      {"layer_norm without parameters", {{3, 40}}, [](const Inputs& x) { return layer_norm(x[0], {}, {}); }},
      {"layer_norm without bias", {{3, 40}, {40}}, [](const Inputs& x) { return layer_norm(x[0], x[1], {}); }},
      {"layer_norm without weight", {{3, 300}, {300}}, [](const Inputs& x) { return layer_norm(x[0], {}, x[1]); }},
      {"rms_norm without weight", {{3, 40}}, [](const Inputs& x) { return rms_norm(x[0], {}); }},
      {"embedding by i32",
       {{5, 300}},
       [](const Inputs& x) {
         return embedding(cast(indices({0, 4, 4}, {3}), DType::i32), x[0]);
       }},
      {"cross_entropy in place",
       {{4, 300}},
       [](const Inputs& x) {
         return cross_entropy(x[0] * 2.0, indices({0, 299, -1, 3}, {4}), {.ignore_index = -1});
       }},
  };
  return rows;
}

}  // namespace

TEST_CASE("ops: gradients, agreement of dtypes, the same bits again, no memory left behind") {
  for (const OpCase& row : op_cases()) {
    seed(2024);
    check_case(row, Device::cpu());
  }
}

TEST_CASE("ops: the same on a GPU" * needs_gpu()) {
  for (const OpCase& row : op_cases()) {
    seed(2024);
    check_case(row, Device::cuda());
  }
}
