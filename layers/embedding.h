// Embedding: a table with one learned row per index.
#pragma once

#include "strobe/layers/layer.h"

namespace strobe {

struct Embedding {
  Tensor weight;  // (num_embeddings, embed_dim)

  Embedding(int64_t num_embeddings, int64_t embed_dim, double init_std = 0.02)
      : weight(parameter(normal({num_embeddings, embed_dim}, 0.0, init_std))) {}

  // indices: (...), i32 or i64; result: (..., embed_dim).
  Tensor operator()(const Tensor& indices) const { return embedding(indices, weight); }

  void visit(auto&& field) const { field("weight", weight); }
};

}  // namespace strobe
