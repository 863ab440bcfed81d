// Gradients of attention against central differences: every option, through out, through lse and through
// attention_combine.
#include "support/attention_problem.h"
#include "support/gradcheck.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// Each option alone, then all together.
std::vector<NamedOptions> every_option(int64_t heads) {
  const Tensor slopes = uniform({heads}, 0.05, 0.5);
  return {{"none", {}},
          {"softmax_scale", {.softmax_scale = -0.7}},
          {"causal", {.causal = true}},
          {"window_left", {.window_left = 4}},
          {"window_right", {.window_right = 3}},
          {"window", {.window_left = 2, .window_right = 2}},
          {"softcap", {.softcap = 0.8}},
          {"alibi_slopes", {.alibi_slopes = slopes}},
          {"dropout", {.dropout_p = 0.4, .dropout_seed = 21, .dropout_offset = 3}},
          {"all",
           {.softmax_scale = 0.9,
            .causal = true,
            .window_left = 5,
            .window_right = 1,
            .softcap = 1.2,
            .alibi_slopes = slopes,
            .dropout_p = 0.2,
            .dropout_seed = 4}}};
}

Tensor flat(const Tensor& x) { return reshape(x, {-1}); }
Tensor flat(const AttentionResult& x) { return concat({flat(x.out), flat(x.lse)}, 0); }

// lse takes part where every query sees a key: differences of -inf say nothing.
void check(const AttentionOptions& options, const std::vector<Shape>& shapes, bool with_lse) {
  for (const AttentionPath& path : attention_paths) {
    INFO(path.name);
    for (const bool strided : {false, true}) {
      CAPTURE(strided);
      gradcheck([&](const std::vector<Tensor>& x) { return path.function(x[0], x[1], x[2], options).out; }, shapes,
                strided);
      if (!with_lse) continue;
      gradcheck([&](const std::vector<Tensor>& x) { return flat(path.function(x[0], x[1], x[2], options)); }, shapes,
                strided);
    }
  }
}

std::vector<Shape> shapes_of(int64_t seq_q, int64_t seq_k, int64_t heads, int64_t kv_heads, int64_t dim) {
  return {{2, seq_q, heads, dim}, {2, seq_k, kv_heads, dim}, {2, seq_k, kv_heads, dim}};
}

}  // namespace

TEST_CASE("attention gradients: every option matches central differences, through out and lse") {
  seed(1);
  for (const NamedOptions& option : every_option(4)) {
    INFO(option.name);
    check(option.options, shapes_of(9, 13, 4, 2, 8), true);
    check(option.options, shapes_of(11, 11, 4, 1, 3), true);
    check(option.options, shapes_of(13, 9, 4, 4, 5), false);
  }
}

TEST_CASE("attention gradients: every option over several tiles") {
  seed(2);
  for (const NamedOptions& option : every_option(1)) {
    INFO(option.name);
    AttentionOptions options = option.options;
    for (int64_t* window : {&options.window_left, &options.window_right}) *window *= *window > 0 ? 20 : 1;
    check(options, shapes_of(140, 150, 1, 1, 3), true);
  }
}

TEST_CASE("attention gradients: packed sequences with every option") {
  seed(3);
  for (const NamedOptions& option : every_option(4)) {
    INFO(option.name);
    AttentionOptions options = option.options;
    options.cu_seqlens_q = cu_seqlens({3, 0, 7, 1});
    options.cu_seqlens_k = cu_seqlens({5, 4, 7, 2});
    check(options, {{11, 4, 6}, {18, 2, 6}, {18, 2, 6}}, true);
    options.cu_seqlens_q = cu_seqlens({3, 2, 0, 6});
    options.cu_seqlens_k = cu_seqlens({0, 4, 0, 5});
    check(options, {{13, 4, 6}, {11, 2, 6}, {11, 2, 6}}, false);  // rows of padding, and queries that see nothing
  }
}

TEST_CASE("attention gradients: flash_attention_qkvpacked with every option") {
  seed(4);
  for (const NamedOptions& option : every_option(2)) {
    INFO(option.name);
    for (const bool strided : {false, true}) {
      gradcheck([&](const std::vector<Tensor>& x) { return flash_attention_qkvpacked(x[0], 2, option.options); },
                {{2, 17, 3 * 2 * 5}}, strided);
    }
  }
}

TEST_CASE("attention gradients: attention_combine by itself and behind attention over two halves of the keys") {
  seed(5);
  for (const bool strided : {false, true}) {
    CAPTURE(strided);
    gradcheck([](const std::vector<Tensor>& x) { return flat(attention_combine(x[0], x[1], x[2], x[3])); },
              {{2, 9, 3, 4}, {2, 3, 9}, {2, 9, 3, 4}, {2, 3, 9}}, strided);
    gradcheck([](const std::vector<Tensor>& x) { return flat(attention_combine(x[0], x[1], x[2], x[3])); },
              {{9, 3, 4}, {3, 9}, {9, 3, 4}, {3, 9}}, strided);
    for (const AttentionPath& path : attention_paths) {
      INFO(path.name);
      gradcheck(
          [&](const std::vector<Tensor>& x) {
            const AttentionResult a = path.function(x[0], x[1], x[2], {.softcap = 2});
            const AttentionResult b = path.function(x[0], x[3], x[4], {.causal = true});
            return flat(attention_combine(a.out, a.lse, b.out, b.lse));
          },
          {{2, 7, 4, 5}, {2, 9, 2, 5}, {2, 9, 2, 5}, {2, 5, 2, 5}, {2, 5, 2, 5}}, strided);
    }
  }
}
