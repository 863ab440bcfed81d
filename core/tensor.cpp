#include "strobe/core/tensor.h"

#include <numeric>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"
#include "strobe/kernels/device.h"
#include "strobe/kernels/pointwise.h"

namespace strobe {
namespace {

void copy_strided(const TensorImpl& destination, void* to, const TensorImpl& source, const void* from,
                  const Stream& stream) {
  kernels::copy({.dst = to,
                 .src = from,
                 .dst_dtype = destination.dtype,
                 .src_dtype = source.dtype,
                 .rank = destination.shape.size(),
                 .sizes = destination.shape.data(),
                 .dst_strides = destination.strides.data(),
                 .src_strides = source.strides.data()},
                stream);
}

}  // namespace

const std::shared_ptr<TensorImpl>& Tensor::impl() const {
  STROBE_CHECK(impl_ != nullptr, "tensor: an undefined tensor was used, expected one with memory");
  return impl_;
}

const Shape& Tensor::shape() const { return impl()->shape; }
const Shape& Tensor::strides() const { return impl()->strides; }
int64_t Tensor::dim(int axis) const { return shape()[normalize_axis("dim", axis, rank())]; }
int64_t Tensor::size() const { return shape().numel(); }
DType Tensor::dtype() const { return impl()->dtype; }
Device Tensor::device() const { return impl()->storage->device(); }

bool Tensor::is_contiguous() const {
  const Shape expected = contiguous_strides(shape());
  for (int axis = 0; axis < rank(); ++axis) {
    if (shape()[axis] == 0) return true;
    if (shape()[axis] != 1 && strides()[axis] != expected[axis]) return false;
  }
  return true;
}

void* Tensor::data() const {
  const TensorImpl& self = *impl();
  char* base = static_cast<char*>(self.storage->data());
  return base == nullptr ? nullptr : base + self.offset * static_cast<int64_t>(size_of(self.dtype));
}

void Tensor::require_dtype(DType expected) const {
  STROBE_CHECK(dtype() == expected, "data: dtype ", expected, " asked of a tensor of dtype ", dtype());
}

void Tensor::require_one_element() const {
  STROBE_CHECK(size() == 1, "item: a tensor of shape ", shape(), " given, expected one element");
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  const Tensor on_cpu = contiguous(detach().to(Device::cpu()).to(dtype_of<T>()));
  const T* first = on_cpu.data<T>();
  return first == nullptr ? std::vector<T>{} : std::vector<T>(first, first + on_cpu.size());
}
template std::vector<float> Tensor::to_vector() const;
template std::vector<double> Tensor::to_vector() const;
template std::vector<int32_t> Tensor::to_vector() const;
template std::vector<int64_t> Tensor::to_vector() const;
template std::vector<float16> Tensor::to_vector() const;
template std::vector<bfloat16> Tensor::to_vector() const;

Tensor Tensor::to(Device target) const {
  if (target == device()) return *this;
  const NoGrad no_grad;
  const Tensor source = contiguous(*this);
  const Tensor result = empty(shape(), dtype(), target);
  const size_t bytes = static_cast<size_t>(size()) * size_of(dtype());
  const bool from_host = device().type == DeviceType::cpu;
  raw_copy(result.data(), target, source.data(), device(), bytes, from_host ? result.stream() : stream());
  if (!from_host) synchronize(stream());  // work on the other GPU may follow at once
  return result;
}

Tensor Tensor::to(DType target) const {
  if (target == dtype()) return *this;
  const Tensor result = empty(shape(), target, device());
  copy_strided(*result.impl(), result.data(), *impl(), data(), stream());
  return result;
}

void Tensor::copy_from(const Tensor& source) const {
  require_defined("copy_from", "source", source);
  STROBE_CHECK(source.shape() == shape(), "copy_from: source ", source.shape(), " given, expected shape ", shape());
  for (int axis = 0; axis < rank(); ++axis) {
    STROBE_CHECK(strides()[axis] != 0 || shape()[axis] <= 1, "copy_from: an expanded tensor of shape ", shape(),
                 " given to write to, expected one without repeated elements");
  }
  Tensor here = source.detach().to(device());
  if (here.impl()->storage == impl()->storage) {  // elements may be overwritten before they are read
    const Tensor copy = empty_like(here);
    copy_strided(*copy.impl(), copy.data(), *here.impl(), here.data(), stream());
    here = copy;
  }
  copy_strided(*impl(), data(), *here.impl(), here.data(), stream());
}

void Tensor::assign(const Tensor& source) const {
  require_defined("assign", "source", source);
  STROBE_CHECK(impl()->node == nullptr, "assign: a computed tensor given, expected a leaf");
  STROBE_CHECK(source.shape() == shape(), "assign: source ", source.shape(), " given, expected shape ", shape());
  STROBE_CHECK(!impl()->requires_grad || is_floating(source.dtype()), "assign: source of dtype ", source.dtype(),
               " given, expected a floating-point dtype for a tensor that requires a gradient");
  impl()->storage = source.impl()->storage;
  impl()->strides = source.impl()->strides;
  impl()->offset = source.impl()->offset;
  impl()->dtype = source.impl()->dtype;
  impl()->grad = Tensor();
  ++impl()->assignments;
}

bool Tensor::requires_grad() const { return impl()->requires_grad; }

const Tensor& Tensor::set_requires_grad(bool value) const {
  STROBE_CHECK(!value || is_floating(dtype()), "set_requires_grad: dtype ", dtype(),
               " given, expected a floating-point dtype");
  STROBE_CHECK(impl()->node == nullptr, "set_requires_grad: the result of '", impl()->node->name,
               "' given, expected a leaf (see detach)");
  impl()->requires_grad = value;
  return *this;
}

Tensor Tensor::grad() const { return impl()->grad; }

void Tensor::set_grad(const Tensor& gradient) const {
  if (gradient.defined()) {
    STROBE_CHECK(gradient.shape() == shape(), "set_grad: gradient ", gradient.shape(), " given, expected shape ",
                 shape());
    require_same_kind("set_grad", "gradient", gradient, "tensor", *this);
  }
  impl()->grad = gradient.defined() ? gradient.detach() : gradient;
}

void Tensor::backward() const {
  STROBE_CHECK(size() == 1, "backward: a tensor of shape ", shape(),
               " given, expected one element (or pass the gradient)");
  backward(full(shape(), 1.0, dtype(), device()));
}

void Tensor::backward(const Tensor& gradient) const { run_backward(*this, gradient); }

Tensor Tensor::detach() const { return view_of(*this, shape(), strides(), impl()->offset); }

Tensor empty(const Shape& shape, DType dtype, Device device) {
  size_t bytes = 0;
  STROBE_CHECK(!__builtin_mul_overflow(static_cast<size_t>(shape.numel()), size_of(dtype), &bytes), "empty: shape ",
               shape, " given, expected fewer than 2^64 bytes");
  auto impl = std::make_shared<TensorImpl>();
  impl->storage = std::make_shared<Storage>(bytes, device);
  impl->shape = shape;
  impl->strides = contiguous_strides(shape);
  impl->dtype = dtype;
  return Tensor(std::move(impl));
}

Tensor empty_like(const Tensor& x) { return empty(x.shape(), x.dtype(), x.device()); }

Tensor empty_bytes(size_t bytes, Device device) {
  return empty({static_cast<int64_t>((bytes + 3) / 4)}, DType::i32, device);
}

Tensor full(const Shape& shape, double value, DType dtype, Device device) {
  const Tensor result = empty(shape, dtype, device);
  kernels::fill({.dst = result.data(), .size = result.size(), .dtype = dtype, .value = value}, result.stream());
  return result;
}

Tensor zeros(const Shape& shape, DType dtype, Device device) { return full(shape, 0.0, dtype, device); }
Tensor ones(const Shape& shape, DType dtype, Device device) { return full(shape, 1.0, dtype, device); }
Tensor zeros_like(const Tensor& x) { return zeros(x.shape(), x.dtype(), x.device()); }

Tensor arange(int64_t count, DType dtype, Device device) {
  STROBE_CHECK(count >= 0, "arange: count ", count, " given, expected at least 0");
  const Tensor values = empty({count}, DType::i64, Device::cpu());
  std::iota(values.data<int64_t>(), values.data<int64_t>() + count, int64_t{0});
  return values.to(device).to(dtype);
}

template <class T>
Tensor from_vector(const std::vector<T>& values, const Shape& shape, Device device) {
  STROBE_CHECK(static_cast<int64_t>(values.size()) == shape.numel(), "from_vector: ", values.size(),
               " values given, expected ", shape.numel(), " for shape ", shape);
  const Tensor result = empty(shape, dtype_of<T>(), device);
  raw_copy(result.data(), device, values.data(), Device::cpu(), values.size() * sizeof(T), result.stream());
  return result;
}
template Tensor from_vector(const std::vector<float>&, const Shape&, Device);
template Tensor from_vector(const std::vector<double>&, const Shape&, Device);
template Tensor from_vector(const std::vector<int32_t>&, const Shape&, Device);
template Tensor from_vector(const std::vector<int64_t>&, const Shape&, Device);

Tensor view_of(const Tensor& base, const Shape& shape, const Shape& strides, int64_t offset) {
  auto impl = std::make_shared<TensorImpl>();
  impl->storage = base.impl()->storage;
  impl->shape = shape;
  impl->strides = strides;
  impl->offset = offset;
  impl->dtype = base.dtype();
  return Tensor(std::move(impl));
}

bool owns_storage_alone(const Tensor& x) { return x.impl().use_count() == 1 && x.impl()->storage.use_count() == 1; }

void require_defined(const char* operation, const char* argument, const Tensor& x) {
  STROBE_CHECK(x.defined(), operation, ": ", argument, " is undefined, expected a tensor");
}

void require_same_kind(const char* operation, const char* argument_a, const Tensor& a, const char* argument_b,
                       const Tensor& b) {
  require_defined(operation, argument_a, a);
  require_defined(operation, argument_b, b);
  STROBE_CHECK(a.dtype() == b.dtype(), operation, ": ", argument_a, " of dtype ", a.dtype(), " and ", argument_b,
               " of dtype ", b.dtype(), " given, expected one dtype (see cast)");
  STROBE_CHECK(a.device() == b.device(), operation, ": ", argument_a, " on ", a.device(), " and ", argument_b, " on ",
               b.device(), " given, expected one device (see to)");
}

void require_floating(const char* operation, const char* argument, const Tensor& x) {
  require_defined(operation, argument, x);
  STROBE_CHECK(is_floating(x.dtype()), operation, ": ", argument, " of dtype ", x.dtype(),
               " given, expected f32, f64, bf16 or f16");
}

}  // namespace strobe
