// Elementwise operations: unary ones from the kernels' list, arithmetic with broadcasting, conversion.
#include "strobe/kernels/pointwise.h"

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"

namespace strobe {
namespace {

using UnaryKernel = void (*)(const kernels::UnaryArgs&, const Stream&);
using UnaryGradKernel = void (*)(const kernels::UnaryGradArgs&, const Stream&);
using BinaryKernel = void (*)(const kernels::BinaryArgs&, const Stream&);

Tensor unary(const char* name, UnaryKernel forward, UnaryGradKernel backward, const Tensor& input) {
  require_floating(name, "x", input);
  const Tensor x = contiguous(input);
  const Tensor y = empty_like(x);
  forward({.y = y.data(), .x = x.data(), .size = x.size(), .dtype = x.dtype()}, x.stream());
  return record(name, y, {x}, [x, backward](const Tensor& dout) -> Grads {
    const Tensor dy = contiguous(dout);
    const Tensor dx = empty_like(x);
    backward({.dx = dx.data(), .dy = dy.data(), .x = x.data(), .size = x.size(), .dtype = x.dtype()}, x.stream());
    return {dx};
  });
}

// One side of a binary operation: a tensor, or a number that stands for a tensor full of it.
struct Operand {
  Operand(const Tensor& value) : tensor(value) {}
  Operand(double value) : scalar(value) {}

  void* data() const { return data_or_null(tensor); }
  Shape shape() const { return tensor.defined() ? tensor.shape() : Shape(); }
  // Strides along the axes of the shape it is broadcast to, 0 where it is stretched.
  Shape strides_in(const Shape& target) const {
    if (tensor.defined()) return expand(tensor.detach(), target).strides();
    Shape strides = target;
    std::fill(strides.begin(), strides.end(), 0);
    return strides;
  }

  Tensor tensor;
  double scalar = 0;
};

// The gradient of one operand, from one that has the output's shape.
struct OperandGradient {
  explicit OperandGradient(const Operand& operand)
      : wanted(operand.tensor.defined() && needs_grad({operand.tensor})), shape(operand.shape()) {}
  Tensor operator()(const Tensor& gradient) const { return sum_to(gradient, shape); }

  bool wanted;
  Shape shape;
};

void check(const char* name, const Operand& a, const Operand& b) {
  if (a.tensor.defined() && b.tensor.defined()) require_same_kind(name, "a", a.tensor, "b", b.tensor);
  require_floating(name, a.tensor.defined() ? "a" : "b", a.tensor.defined() ? a.tensor : b.tensor);
}

// The operation without autograd.
Tensor compute(const char* name, BinaryKernel kernel, const Operand& a, const Operand& b) {
  const Tensor& tensor = a.tensor.defined() ? a.tensor : b.tensor;
  const Shape shape = broadcast_shapes(name, a.shape(), b.shape());
  const Shape a_strides = a.strides_in(shape);
  const Shape b_strides = b.strides_in(shape);
  const Tensor out = empty(shape, tensor.dtype(), tensor.device());
  kernel({.out = out.data(),
          .a = a.data(),
          .b = b.data(),
          .rank = shape.size(),
          .sizes = shape.data(),
          .a_strides = a_strides.data(),
          .b_strides = b_strides.data(),
          .dtype = out.dtype(),
          .scalar = a.tensor.defined() ? b.scalar : a.scalar},
         out.stream());
  return out;
}

Tensor record_add(const Operand& a, const Operand& b) {
  check("add", a, b);
  return record("add", compute("add", kernels::add, a, b), {a.tensor, b.tensor},
                [da = OperandGradient(a), db = OperandGradient(b)](const Tensor& dout) -> Grads {
                  return {da.wanted ? da(dout) : Tensor(), db.wanted ? db(dout) : Tensor()};
                });
}

Tensor record_sub(const Operand& a, const Operand& b) {
  check("sub", a, b);
  return record("sub", compute("sub", kernels::sub, a, b), {a.tensor, b.tensor},
                [da = OperandGradient(a), db = OperandGradient(b)](const Tensor& dout) -> Grads {
                  return {da.wanted ? da(dout) : Tensor(), db.wanted ? neg(db(dout)) : Tensor()};
                });
}

Tensor record_mul(const Operand& a, const Operand& b) {
  check("mul", a, b);
  const OperandGradient da(a);
  const OperandGradient db(b);
  return record("mul", compute("mul", kernels::mul, a, b), {a.tensor, b.tensor},
                [da, db, a = db.wanted ? a : Operand(0), b = da.wanted ? b : Operand(0)](const Tensor& dout) -> Grads {
                  return {da.wanted ? da(compute("mul", kernels::mul, dout, b)) : Tensor(),
                          db.wanted ? db(compute("mul", kernels::mul, dout, a)) : Tensor()};
                });
}

Tensor record_div(const Operand& a, const Operand& b) {
  check("div", a, b);
  const OperandGradient da(a);
  const OperandGradient db(b);
  const Tensor out = compute("div", kernels::div, a, b);
  return record("div", out, {a.tensor, b.tensor},
                [da, db, b, out = db.wanted ? out.detach() : Tensor()](const Tensor& dout) -> Grads {
                  const Tensor quotient = compute("div", kernels::div, dout, b);
                  return {da.wanted ? da(quotient) : Tensor(),
                          db.wanted ? neg(db(compute("mul", kernels::mul, quotient, out))) : Tensor()};
                });
}

}  // namespace

#define STROBE_UNARY_OP(name, Functor) \
  Tensor name(const Tensor& x) { return unary(#name, kernels::name##_forward, kernels::name##_backward, x); }
STROBE_UNARY_OPS(STROBE_UNARY_OP)
#undef STROBE_UNARY_OP

#define STROBE_BINARY_OP(name, symbol)                                              \
  Tensor name(const Tensor& a, const Tensor& b) {                                   \
    require_same_kind(#name, "a", a, "b", b);                                       \
    return record_##name(a, b);                                                     \
  }                                                                                 \
  Tensor operator symbol(const Tensor& a, const Tensor& b) { return name(a, b); }   \
  Tensor operator symbol(const Tensor& a, double b) { return record_##name(a, b); } \
  Tensor operator symbol(double a, const Tensor& b) { return record_##name(a, b); }
STROBE_BINARY_OP(add, +)
STROBE_BINARY_OP(sub, -)
STROBE_BINARY_OP(mul, *)
STROBE_BINARY_OP(div, /)
#undef STROBE_BINARY_OP

Tensor operator-(const Tensor& x) { return neg(x); }

Tensor gelu(const Tensor& x, GeluForm form) { return form == GeluForm::tanh ? gelu_tanh(x) : gelu(x); }

Tensor cast(const Tensor& x, DType dtype) {
  require_defined("cast", "x", x);
  const Tensor y = x.to(dtype);
  if (dtype == x.dtype() || !is_floating(dtype)) return y;
  return record("cast", y, {x}, [dtype = x.dtype()](const Tensor& dout) -> Grads { return {dout.to(dtype)}; });
}

}  // namespace strobe
