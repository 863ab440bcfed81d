// Attention problems and the ways to run them, for the tests of the attention operations.
#pragma once

#include <algorithm>
#include <random>

#include "support/attention_reference.h"

namespace strobe::testing {

using AttentionFunction = AttentionResult (*)(const Tensor&, const Tensor&, const Tensor&, const AttentionOptions&);
struct AttentionPath {
  std::string_view name;
  AttentionFunction function;
};
inline constexpr AttentionPath attention_paths[] = {{"flash_attention", flash_attention_return_lse},
                                                    {"standard_attention", standard_attention_return_lse}};
struct NamedOptions {
  std::string_view name;
  AttentionOptions options;
};

inline constexpr DType all_dtypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

// f(function, dtype) for both functions and every dtype.
template <class F>
void for_each_path(F&& f) {
  for (const AttentionPath& path : attention_paths) {
    for (const DType dtype : all_dtypes) {
      INFO(path.name, " in ", std::string(name_of(dtype)));
      f(path.function, dtype);
    }
  }
}

inline Tensor copy_of(const Tensor& x) {
  const Tensor copy = empty_like(x);
  copy.copy_from(x);
  return copy;
}

inline Tensor random_tensor(const Shape& shape, DType dtype) { return normal(shape, 0, 1, DType::f64).to(dtype); }

// Query, key, value, dout and dlse of one dtype; without dlse only out is differentiated.
struct AttentionProblem {
  Tensor query, key, value, dout, dlse = {};

  AttentionProblem(Tensor query_, Tensor key_, Tensor value_, Tensor dout_, Tensor dlse_ = {})
      : query(query_), key(key_), value(value_), dout(dout_), dlse(dlse_) {}

  // Random numbers from N(0, 1).
  AttentionProblem(int64_t batch, int64_t seq_q, int64_t seq_k, int64_t heads, int64_t kv_heads, int64_t dim,
                   DType dtype)
      : AttentionProblem(
            random_tensor({batch, seq_q, heads, dim}, dtype), random_tensor({batch, seq_k, kv_heads, dim}, dtype),
            random_tensor({batch, seq_k, kv_heads, dim}, dtype), random_tensor({batch, seq_q, heads, dim}, dtype)) {}

  static AttentionProblem packed(int64_t total_q, int64_t total_k, int64_t heads, int64_t kv_heads, int64_t dim,
                                 DType dtype) {
    return {random_tensor({total_q, heads, dim}, dtype), random_tensor({total_k, kv_heads, dim}, dtype),
            random_tensor({total_k, kv_heads, dim}, dtype), random_tensor({total_q, heads, dim}, dtype)};
  }

  AttentionProblem& with_random_dlse() {
    const Shape shape =
        query.rank() == 4 ? Shape{query.dim(0), query.dim(2), query.dim(1)} : Shape{query.dim(1), query.dim(0)};
    dlse = random_tensor(shape, query.dtype() == DType::f64 ? DType::f64 : DType::f32);
    return *this;
  }

  AttentionOutputs run(AttentionFunction attention, const AttentionOptions& options = {}) const {
    const Tensor q = copy_of(query).set_requires_grad(), k = copy_of(key).set_requires_grad(),
                 v = copy_of(value).set_requires_grad();
    return differentiate(attention(q, k, v, options), q, k, v);
  }

  // The outputs of a result computed from the leaves q, k and v.
  AttentionOutputs differentiate(const AttentionResult& result, const Tensor& q, const Tensor& k,
                                 const Tensor& v) const {
    if (dlse.defined()) {  // one number whose gradients with respect to out and lse are dout and dlse
      (sum(cast(result.out, DType::f64) * dout.to(DType::f64)) +
       sum(cast(result.lse, DType::f64) * dlse.to(DType::f64)))
          .backward();
    } else {
      result.out.backward(dout);
    }
    return {result.out.detach(), result.lse.detach(), q.grad(), k.grad(), v.grad()};
  }

  AttentionOutputs reference(const AttentionOptions& options = {}, DType stored = DType::f64) const {
    const auto wide = [](const Tensor& x) { return x.defined() ? x.to(DType::f64) : x; };
    return reference_attention(wide(query), wide(key), wide(value), wide(dout), options, wide(dlse), stored);
  }
};

inline Tensor cu_seqlens(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> starts{0};
  for (const int64_t length : lengths) starts.push_back(starts.back() + static_cast<int32_t>(length));
  return from_vector(starts, {static_cast<int64_t>(starts.size())});
}

inline double unit_in_last_place(double x, DType dtype) {
  const int digits = dtype == DType::f64 ? 52 : dtype == DType::f32 ? 23 : dtype == DType::bf16 ? 7 : 10;
  return std::ldexp(1.0, std::ilogb(x) - digits);
}

// Every element is within 2 units in the last place of what is expected.
inline void check_exact(const Tensor& x, const std::vector<double>& expected) {
  const std::vector<double> values = x.to_vector<double>();
  REQUIRE(values.size() == expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    CAPTURE(i);
    if (std::isinf(expected[i])) {
      CHECK(values[i] == expected[i]);
      continue;
    }
    const double bound = expected[i] == 0 ? 0 : 2 * unit_in_last_place(expected[i], x.dtype());
    CHECK(std::abs(values[i] - expected[i]) <= bound);
  }
}

inline void check_exact(const Tensor& x, double expected) {
  check_exact(x, std::vector<double>(static_cast<size_t>(x.size()), expected));
}

inline void check_same_bits(const AttentionOutputs& a, const AttentionOutputs& b) {
  for (size_t i = 0; i < 5; ++i) {
    INFO(AttentionOutputs::names[i]);
    CHECK(same_bits(a.all()[i], b.all()[i]));
  }
}

// Out and gradients are within `bound` of the reference, relative to its largest magnitude; lse, which is not rounded
// to 16 bits, within 1e-5.
inline void check_close(const AttentionOutputs& x, const AttentionOutputs& reference, double bound) {
  for (size_t i = 0; i < 5; ++i) {
    INFO(AttentionOutputs::names[i]);
    CHECK(relative_difference(x.all()[i], reference.all()[i]) <= (i == 1 ? std::min(bound, 1e-5) : bound));
  }
}

}  // namespace strobe::testing
