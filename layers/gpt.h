// GPT: a decoder-only transformer, in the form of GPT-2 (Radford et al. 2019) by default, LLaMA-like by options.
#pragma once

#include <cmath>

#include "strobe/layers/attention.h"
#include "strobe/layers/embedding.h"
#include "strobe/layers/norm.h"

namespace strobe {

enum class NormKind { layer, rms };
enum class MlpKind { gelu, swiglu };

struct GPTConfig {
  int64_t vocab_size;
  int64_t max_seq_len;
  int64_t num_layers = 12;
  int64_t num_heads = 12;
  int64_t num_kv_heads = 0;  // 0: num_heads
  int64_t embed_dim = 768;
  int64_t mlp_dim = 0;  // 0: 4 embed_dim, or two thirds of that for SwiGLU
  Attention attention = Attention::flash;
  Positions positions = Positions::learned;
  NormKind norm = NormKind::layer;
  MlpKind mlp = MlpKind::gelu;
  bool bias = true;             // in the linear layers
  bool tied_embeddings = true;  // the output projection is the token embedding
  double dropout = 0;           // of embeddings, attention probabilities and branches, while training
  bool recompute = false;       // keep only each block's input and compute the block again in backward; on a GPU sums
                                // at its edges are then no longer fused with norms, and round differently
};

// Throws, naming the field, unless the configuration describes a model.
void validate(const GPTConfig& config);

// Either normalization; picked by the configuration.
struct Norm {
  std::variant<LayerNorm, RMSNorm> kind;

  explicit Norm(const GPTConfig& c) : kind(LayerNorm(c.embed_dim)) {
    if (c.norm == NormKind::rms) kind = RMSNorm(c.embed_dim);
  }
  Tensor operator()(const Tensor& x) const {
    return std::visit([&](const auto& norm) { return norm(x); }, kind);
  }
  AddNormResult operator()(const Tensor& x, const Tensor& residual) const {
    return std::visit([&](const auto& norm) { return norm(x, residual); }, kind);
  }
  void visit(auto&& field) const {
    std::visit([&](const auto& norm) { norm.visit(field); }, kind);
  }
};

// gelu: proj(gelu_tanh(fc(x))). swiglu: proj(silu(gate(x)) * fc(x)) (Shazeer 2020).
struct Mlp {
  Linear fc;                 // embed_dim -> mlp_dim
  std::vector<Linear> gate;  // SwiGLU's second projection; empty for GELU
  Linear proj;               // mlp_dim -> embed_dim

  explicit Mlp(const GPTConfig& c)
      : fc(c.embed_dim, hidden_dim(c), c.bias), proj(hidden_dim(c), c.embed_dim, c.bias, residual_init_std(c)) {
    if (c.mlp == MlpKind::swiglu) gate.emplace_back(c.embed_dim, hidden_dim(c), c.bias);
  }

  Tensor operator()(const Tensor& x) const {
    if (gate.empty()) return mlp(x, fc.weight, fc.bias, proj.weight, proj.bias);
    return proj(silu(gate[0](x)) * fc(x));
  }

  void visit(auto&& field) const {
    field("fc", fc);
    if (!gate.empty()) field("gate", gate[0]);
    field("proj", proj);
  }

  static int64_t hidden_dim(const GPTConfig& c) {
    if (c.mlp_dim > 0) return c.mlp_dim;
    // Three matrices of two thirds the width hold as much as two; rounded up to a multiple of 32.
    return c.mlp == MlpKind::gelu ? 4 * c.embed_dim : (8 * c.embed_dim / 3 + 31) / 32 * 32;
  }
  // GPT-2 starts the layers that write to the residual stream smaller, by the number of such writes.
  static double residual_init_std(const GPTConfig& c) {
    return 0.02 / std::sqrt(2.0 * static_cast<double>(c.num_layers));
  }
};

// The residual stream between two blocks. Its value is x + branch, but the branch is left for the next norm to add,
// which reads and writes x anyway.
struct ResidualStream {
  Tensor x;
  Tensor branch = Tensor();  // undefined before the first block
};

struct Block {
  Norm ln_1;
  CausalSelfAttention attn;
  Norm ln_2;
  Mlp mlp;

  explicit Block(const GPTConfig& c)
      : ln_1(c),
        attn({.embed_dim = c.embed_dim,
              .num_heads = c.num_heads,
              .num_kv_heads = c.num_kv_heads > 0 ? c.num_kv_heads : c.num_heads,
              .attention = c.attention,
              .positions = c.positions,
              .bias = c.bias,
              .proj_init_std = Mlp::residual_init_std(c)}),
        ln_2(c),
        mlp(c) {}

  // x: (batch, seq_len, embed_dim); result: the same shape.
  Tensor operator()(const Tensor& x, double dropout_p = 0) const {
    const ResidualStream after = (*this)(ResidualStream{x}, dropout_p);
    return after.x + after.branch;
  }
  // y = x + attn(ln_1(x)), then y + mlp(ln_2(y)), with dropout of both branches.
  ResidualStream operator()(const ResidualStream& before, double dropout_p = 0) const {
    const auto [x, attn_input] = ln_1(before.x, before.branch);
    const auto [y, mlp_input] = ln_2(x, dropout(attn(attn_input, dropout_p), dropout_p));
    return {y, dropout(mlp(mlp_input), dropout_p)};
  }

  void visit(auto&& field) const {
    field("ln_1", ln_1);
    field("attn", attn);
    field("ln_2", ln_2);
    field("mlp", mlp);
  }
};

struct GPT {
  GPTConfig config;
  Embedding wte;               // tokens
  std::vector<Embedding> wpe;  // positions, when they are learned
  std::vector<Block> h;
  Norm ln_f;
  std::vector<Linear> lm_head;  // only when it is not tied to wte
  bool training = false;        // dropout is on

  explicit GPT(const GPTConfig& c);

  // Logits: tokens (batch, seq_len) i32 or i64 -> (batch, seq_len, vocab_size).
  Tensor operator()(const Tensor& tokens) const { return logits(features(tokens)); }

  // The first block's input, token plus position: tokens (batch, seq_len) -> (batch, seq_len, embed_dim).
  Tensor embed(const Tensor& tokens) const;
  // The last block's normalized output: tokens (batch, seq_len) -> (batch, seq_len, embed_dim).
  Tensor features(const Tensor& tokens) const;
  // (..., embed_dim) -> (..., vocab_size).
  Tensor logits(const Tensor& features) const;

  void visit(auto&& field) const {
    field("wte", wte);
    if (!wpe.empty()) field("wpe", wpe[0]);
    field("h", h);
    field("ln_f", ln_f);
    if (!lm_head.empty()) field("lm_head", lm_head[0]);
  }

 private:
  GPT(const GPTConfig& c, const MemoryTag& parameters);
};

}  // namespace strobe
