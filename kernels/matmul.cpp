// The epilogue of a product as a pass over memory, for whatever cannot apply it to sums that are still in registers.
#include "strobe/kernels/matmul.h"

#include "strobe/kernels/pointwise.h"

namespace strobe::kernels {

MatmulArgs without_epilogue(const MatmulArgs& args) {
  MatmulArgs product = args;
  if (args.epilogue == MatmulEpilogue::gelu) product.out = args.pre;
  product.epilogue = MatmulEpilogue::none;
  product.pre = nullptr;
  return product;
}

void apply_epilogue(const MatmulArgs& args, const Stream& stream) {
  const int64_t size = args.m * args.n;
  if (args.epilogue == MatmulEpilogue::gelu) {
    gelu_tanh_forward({.y = args.out, .x = args.pre, .size = size, .dtype = args.dtype}, stream);
  } else if (args.epilogue == MatmulEpilogue::gelu_backward) {
    gelu_tanh_backward({.dx = args.out, .dy = args.out, .x = args.pre, .size = size, .dtype = args.dtype}, stream);
  }
}

}  // namespace strobe::kernels
