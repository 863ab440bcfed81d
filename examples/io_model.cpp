// Sums over kernels of what each reads and writes.
#include "io_model.h"

namespace examples {
namespace {

double real(int64_t x) { return static_cast<double>(x); }

IoBytes standard_bytes(const IoCase& c) {
  const double heads = real(c.batch * c.num_heads), width = real(static_cast<int64_t>(size_of(c.dtype)));
  const double matrix = heads * real(c.seq_len) * real(c.seq_len);  // elements of S
  const double tensor = heads * real(c.seq_len) * real(c.head_dim);
  const double rows = heads * real(c.seq_len);
  const bool narrow = width < 4;                  // sums are f32 and rounded by a further kernel
  const double rounded = narrow ? 4 + width : 0;  // an element of a tensor
  if (!c.backward) {
    const double products = (4 + width) * matrix + 2 * width * tensor + width * tensor;  // S = Q K^T, P V
    const double softmax = (4 + width) * matrix + 8 * rows;                              // with sums and lse
    const double division = 4 * tensor + (8 + rounded) * tensor + 4 * rows;              // P V written, then divided
    return {.dram = products + softmax + division};
  }
  const double dp = 4 * matrix + 2 * width * tensor;           // dO V^T
  const double softmax = (4 + 3 * width) * matrix + 4 * rows;  // dP and P in, dS and P out
  const double dquery = width * matrix + 2 * width * tensor;
  // The sums over a group of query heads, here of one, are a pass of their own.
  const double dkey = width * matrix + width * tensor + (12 + rounded) * tensor;
  return {.dram = dp + softmax + dquery + 2 * dkey};  // dvalue is as dkey
}

IoBytes tiled_bytes(const IoCase& c) {
  const double heads = real(c.batch * c.num_heads), width = real(static_cast<int64_t>(size_of(c.dtype)));
  const double tensor = heads * real(c.seq_len) * real(c.head_dim);
  const double rows = heads * real(c.seq_len);
  const double query_blocks = real((c.seq_len + c.tile_queries - 1) / c.tile_queries);
  const double key_blocks = real((c.seq_len + c.tile_keys - 1) / c.tile_keys);
  if (!c.backward) {
    const double own = 2 * width * tensor + 4 * rows;  // query, out, lse
    return {.dram = own + 2 * width * tensor, .l2 = own + query_blocks * 2 * width * tensor};
  }
  // Before: delta from out and dout, and three numbers a row.
  const double before = 2 * width * tensor + (4 + 12) * rows;
  const double stream = 2 * width * tensor + 12 * rows;  // query, dout and the numbers of every row
  if (width < 4) {
    // dquery begins as zeros, and is rounded when it is complete.
    const double around = before + 4 * tensor + 4 * rows + (4 + width) * tensor;
    const double keys = 4 * width * tensor;  // key, value, dkey, dvalue
    return {.dram = around + keys + stream + 8 * tensor, .l2 = around + keys + key_blocks * (stream + 4 * tensor)};
  }
  const double key_walk = 4 * width * tensor, query_walk = 3 * width * tensor + 12 * rows;
  return {.dram = before + key_walk + stream + query_walk + 2 * width * tensor,
          .l2 = before + key_walk + key_blocks * stream + query_walk + query_blocks * 2 * width * tensor};
}

}  // namespace

IoBytes count_bytes(const IoCase& c) { return c.method == Method::standard ? standard_bytes(c) : tiled_bytes(c); }

}  // namespace examples
