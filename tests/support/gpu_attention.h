// Attention problems on a GPU for tests: operands of any layout between guards, outputs full of NaN, and the f64
// reference for the same numbers.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "strobe/kernels/attention.h"
#include "support/attention_reference.h"
#include "support/gpu_operand.h"

namespace strobe::testing {

// (batch, seq_len, num_heads, head_dim), or (1, total, ...) where packed: values on the host, and on the GPU the same
// with `gap` elements of NaN around every row; heads before positions where `heads_first`.
class AttentionOperand {
 public:
  AttentionOperand(int64_t batch, int64_t seq_len, int64_t num_heads, int64_t head_dim, DType dtype, int64_t gap = 0,
                   bool heads_first = false)
      : shape_{batch, seq_len, num_heads, head_dim}, dtype_(dtype), gap_(gap) {
    const int64_t row = head_dim + gap;
    seq_stride_ = heads_first ? row : num_heads * row;
    head_stride_ = heads_first ? seq_len * row : row;
    batch_stride_ = seq_len * num_heads * row;
    values.assign(static_cast<size_t>(batch * seq_len * num_heads * head_dim), std::nan(""));
    upload();
  }

  std::vector<double> values;  // row-major

  // Rounds the values to the dtype and puts them on the GPU.
  void upload() {
    dispatch_floating(dtype_, "operand", [&]<class T>() {
      std::vector<T> image(size(), T(static_cast<accumulate_t<T>>(std::nan(""))));
      for_each([&](size_t index, size_t place) {
        image[place] = T(static_cast<accumulate_t<T>>(values[index]));
        values[index] = static_cast<double>(static_cast<accumulate_t<T>>(image[place]));
      });
      image_.resize(image.size() * sizeof(T));
      std::memcpy(image_.data(), image.data(), image_.size());
    });
    memory_ = std::make_shared<GpuMemory>(image_.size());
    memory_->write(image_);
  }
  // Fetches the values. Returns false where something between the rows has changed.
  bool download() {
    std::vector<std::byte> image = memory_->read(image_.size());
    dispatch_floating(dtype_, "operand", [&]<class T>() {
      for_each([&](size_t index, size_t place) {
        T value;
        std::memcpy(&value, image.data() + place * sizeof(T), sizeof(T));
        values[index] = static_cast<double>(static_cast<accumulate_t<T>>(value));
        std::memcpy(image.data() + place * sizeof(T), image_.data() + place * sizeof(T), sizeof(T));
      });
    });
    return image == image_;
  }

  void fill(const std::function<double()>& next) {
    for (double& x : values) x = next();
    upload();
  }
  void spoil_last_rows(int64_t count) {
    std::fill(values.end() - count * shape_[2] * shape_[3], values.end(), std::nan(""));
    upload();
  }
  kernels::AttentionTensor tensor() const {
    return {memory_->data() + static_cast<size_t>(gap_) * size_of(dtype_), batch_stride_, seq_stride_, head_stride_};
  }
  // As a tensor of the reference.
  Tensor reference(bool packed) const {
    const auto& [batch, seq_len, num_heads, head_dim] = shape_;
    return from_vector(values,
                       packed ? Shape{seq_len, num_heads, head_dim} : Shape{batch, seq_len, num_heads, head_dim});
  }

 private:
  size_t size() const { return static_cast<size_t>(gap_ + shape_[0] * batch_stride_); }
  template <class F>
  void for_each(F&& f) const {
    size_t index = 0;
    for (int64_t b = 0; b < shape_[0]; ++b) {
      for (int64_t i = 0; i < shape_[1]; ++i) {
        for (int64_t h = 0; h < shape_[2]; ++h) {
          for (int64_t c = 0; c < shape_[3]; ++c) {
            f(index++, static_cast<size_t>(gap_ + b * batch_stride_ + i * seq_stride_ + h * head_stride_ + c));
          }
        }
      }
    }
  }

  std::array<int64_t, 4> shape_;
  DType dtype_;
  int64_t gap_, batch_stride_, seq_stride_, head_stride_;
  std::vector<std::byte> image_;
  std::shared_ptr<GpuMemory> memory_;
};

// Sizes and options; lengths are those of packed sequences, where given.
struct GpuAttentionCase {
  int64_t batch = 1, seq_q = 1, seq_k = 1, heads = 1, kv_heads = 1, dim = 16;
  DType dtype = DType::f32;
  AttentionOptions options = {};
  std::vector<int64_t> lengths_q = {}, lengths_k = {};
  int64_t padding = 0;  // rows behind the last packed sequence
  bool with_dlse = false;
  int64_t gap = 0;
  bool heads_first = false;
  bool constant_dout = false;  // all strides 0
  int64_t gradient_gap = -1;   // of dkey and dvalue, if not the same

  bool packed() const { return !lengths_q.empty(); }
  int64_t rows_q() const { return packed() ? total(lengths_q) : seq_q; }
  int64_t rows_k() const { return packed() ? total(lengths_k) : seq_k; }
  std::string describe() const {
    return concat_message(name_of(dtype), " batch ", batch, " seq ", seq_q, " x ", seq_k, " heads ", heads, "/",
                          kv_heads, " dim ", dim, " causal ", options.causal, " window ", options.window_left, ",",
                          options.window_right, " softcap ", options.softcap, " alibi ", options.alibi_slopes.defined(),
                          " dropout ", options.dropout_p, " packed ", packed(), " dlse ", with_dlse, " gap ", gap,
                          " of gradients ", gradient_gap, " heads_first ", heads_first, " scale ",
                          options.softmax_scale.value_or(-999));
  }

 private:
  int64_t total(const std::vector<int64_t>& lengths) const {
    int64_t sum = padding;
    for (const int64_t length : lengths) sum += length;
    return sum;
  }
};

// Outputs as f64 in row-major order: out, lse, dquery, dkey, dvalue.
using AttentionValues = std::array<std::vector<double>, 5>;

class GpuAttention {
 public:
  GpuAttention(const GpuAttentionCase& problem, std::mt19937& random)
      : problem_(problem),
        query(operand(problem.rows_q(), problem.heads)),
        key(operand(problem.rows_k(), problem.kv_heads)),
        value(operand(problem.rows_k(), problem.kv_heads)),
        dout(operand(problem.rows_q(), problem.heads)) {
    std::normal_distribution<double> normal;
    for (AttentionOperand* x : {&query, &key, &value, &dout}) x->fill([&] { return normal(random); });
    if (problem.constant_dout) dout.fill([x = normal(random)] { return x; });
    if (problem.padding > 0) {
      for (AttentionOperand* x : {&query, &key, &value, &dout}) x->spoil_last_rows(problem.padding);
    }
    dlse_.resize(static_cast<size_t>(lse_size()));
    for (double& x : dlse_) x = static_cast<float>(normal(random));
    AttentionOptions& options = problem_.options;
    if (problem.packed()) {
      options.cu_seqlens_q = starts(problem.lengths_q);
      options.cu_seqlens_k = starts(problem.lengths_k);
    }
  }

  // Forward and backward with one kernel, or backward with another.
  AttentionValues run(kernels::AttentionKernel kernel) { return run(kernel, kernel); }
  AttentionValues run(kernels::AttentionKernel kernel, kernels::AttentionKernel backward_kernel) {
    AttentionOperand out = operand(problem_.rows_q(), problem_.heads), dquery = out;
    const int64_t gap = problem_.gradient_gap < 0 ? problem_.gap : problem_.gradient_gap;
    AttentionOperand dkey = operand(problem_.rows_k(), problem_.kv_heads, gap), dvalue = dkey;
    for (AttentionOperand* x : {&out, &dquery, &dkey, &dvalue}) x->upload();  // memory of its own
    const DType lse_dtype = accumulate_dtype(problem_.dtype);
    std::optional<Operand> lse(std::in_place, Operand::unwritten(lse_size()), lse_dtype);
    const Operand dlse(dlse_, lse_dtype);
    const AttentionOptions& options = problem_.options;
    const auto copied = [](const Tensor& x) {
      const size_t bytes = x.defined() ? static_cast<size_t>(x.size()) * size_of(x.dtype()) : 0;
      auto memory = std::make_shared<GpuMemory>(bytes);
      std::vector<std::byte> host(bytes);
      if (bytes > 0) std::memcpy(host.data(), x.data(), bytes);
      memory->write(host);
      return memory;
    };
    const auto slopes = copied(options.alibi_slopes), starts_q = copied(options.cu_seqlens_q),
               starts_k = copied(options.cu_seqlens_k);
    kernels::AttentionArgs args{
        .query = query.tensor(),
        .key = key.tensor(),
        .value = value.tensor(),
        .out = out.tensor(),
        .lse = lse->gpu(),
        .batch = problem_.batch,
        .seq_len_q = problem_.seq_q,
        .seq_len_k = problem_.seq_k,
        .num_heads = problem_.heads,
        .num_kv_heads = problem_.kv_heads,
        .head_dim = problem_.dim,
        .dtype = problem_.dtype,
        .softmax_scale = options.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(problem_.dim))),
        .causal = options.causal,
        .window_left = options.window_left,
        .window_right = options.window_right,
        .softcap = options.softcap,
        .dropout_p = options.dropout_p,
        .dropout_seed = options.dropout_seed,
        .dropout_offset = options.dropout_offset,
        .kernel = kernel,
        .deterministic = options.deterministic};
    if (options.alibi_slopes.defined()) args.alibi_slopes = reinterpret_cast<const float*>(slopes->data());
    if (problem_.packed()) {
      args.cu_seqlens_q = reinterpret_cast<const int32_t*>(starts_q->data());
      args.cu_seqlens_k = reinterpret_cast<const int32_t*>(starts_k->data());
      args.total_q = problem_.rows_q();
      args.total_k = problem_.rows_k();
    }
    kernels::flash_attention_forward(args, gpu_stream());
    args.kernel = backward_kernel;
    if (change_lse) {
      std::vector<double> changed = lse->gpu_values();
      for (double& x : changed) x = change_lse(x);
      lse.emplace(changed, lse_dtype);
      args.lse = lse->gpu();
    }
    kernels::AttentionGradArgs grad{.forward = args,
                                    .dout = dout.tensor(),
                                    .dquery = dquery.tensor(),
                                    .dkey = dkey.tensor(),
                                    .dvalue = dvalue.tensor()};
    if (problem_.constant_dout) {
      grad.dout = {grad.dout.data, 0, 0, 0};
      grad.dout_dim_stride = 0;
    }
    if (problem_.with_dlse) grad.dlse = dlse.gpu();
    grad.workspace_bytes = kernels::flash_attention_backward_workspace(grad, Device::cuda());
    const GpuMemory workspace(grad.workspace_bytes);
    grad.workspace = workspace.data();
    kernels::flash_attention_backward(grad, gpu_stream());
    bool untouched = true;
    for (AttentionOperand* x : {&out, &dquery, &dkey, &dvalue}) untouched &= x->download();
    CHECK(untouched);
    return {out.values, lse->gpu_values(), dquery.values, dkey.values, dvalue.values};
  }

  // `stored`: see reference_attention.
  AttentionValues reference(DType stored = DType::f64) const {
    const bool packed = problem_.packed();
    const Shape lse_shape =
        packed ? Shape{problem_.heads, problem_.rows_q()} : Shape{problem_.batch, problem_.heads, problem_.seq_q};
    const AttentionOutputs result = reference_attention(
        query.reference(packed), key.reference(packed), value.reference(packed), dout.reference(packed),
        problem_.options, problem_.with_dlse ? from_vector(dlse_, lse_shape) : Tensor(), stored);
    AttentionValues values;
    for (size_t i = 0; i < 5; ++i) values[i] = result.all()[i].to_vector<double>();
    return values;
  }

 private:
  AttentionOperand operand(int64_t rows, int64_t heads) const { return operand(rows, heads, problem_.gap); }
  AttentionOperand operand(int64_t rows, int64_t heads, int64_t gap) const {
    return AttentionOperand(problem_.packed() ? 1 : problem_.batch, rows, heads, problem_.dim, problem_.dtype, gap,
                            problem_.heads_first);
  }
  int64_t lse_size() const { return problem_.heads * problem_.rows_q() * (problem_.packed() ? 1 : problem_.batch); }
  static Tensor starts(const std::vector<int64_t>& lengths) {
    std::vector<int32_t> sums{0};
    for (const int64_t length : lengths) sums.push_back(sums.back() + static_cast<int32_t>(length));
    return from_vector(sums, {static_cast<int64_t>(sums.size())});
  }

  GpuAttentionCase problem_;
  std::vector<double> dlse_;

 public:
  AttentionOperand query, key, value, dout;
  std::function<double(double)> change_lse;  // between forward and backward
};

// The kernels that accept every case of a dtype, and the choice that takes others, too, where they accept it.
inline std::vector<kernels::AttentionKernel> gpu_attention_kernels(DType dtype) {
  if (dtype == DType::bf16 || dtype == DType::f16) {
    return {kernels::AttentionKernel::portable, kernels::AttentionKernel::mma, kernels::AttentionKernel::auto_select};
  }
  return {kernels::AttentionKernel::portable};
}

// The largest |x - expected|, relative to the largest finite |expected| or to `least`, whichever is larger; infinity
// where only one is NaN or infinite.
inline double relative_error(const std::vector<double>& x, const std::vector<double>& expected, double least = 0.1) {
  REQUIRE(x.size() == expected.size());
  double difference = 0, magnitude = least;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) && std::isnan(expected[i])) continue;
    if (std::isfinite(expected[i])) magnitude = std::max(magnitude, std::abs(expected[i]));
    if (x[i] == expected[i]) continue;
    if (!std::isfinite(x[i]) || !std::isfinite(expected[i])) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, std::abs(x[i] - expected[i]));
  }
  return difference / magnitude;
}

}  // namespace strobe::testing
