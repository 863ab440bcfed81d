// Causal self-attention as a layer: one projection to queries, keys and values, attention, one projection back.
#pragma once

#include "strobe/layers/linear.h"

namespace strobe {

// Which attention a model uses: both compute the same function, standard keeps the (seq_len, seq_len) matrices.
enum class Attention { flash, standard };

// How a model knows where a token stands: a learned vector per position, or rotated queries and keys (Su et al. 2021).
enum class Positions { learned, rotary };

struct AttentionConfig {
  int64_t embed_dim;
  int64_t num_heads;
  int64_t num_kv_heads;  // divides num_heads; fewer than num_heads is grouped-query attention
  Attention attention = Attention::flash;
  Positions positions = Positions::learned;
  double rotary_base = 10000;
  bool bias = true;
  double proj_init_std = 0.02;
};

struct CausalSelfAttention {
  AttentionConfig config;
  Linear qkv;   // embed_dim -> (num_heads + 2 num_kv_heads) * head_dim
  Linear proj;  // embed_dim -> embed_dim

  explicit CausalSelfAttention(const AttentionConfig& c)
      : config(checked(c)),
        qkv(c.embed_dim, c.embed_dim / c.num_heads * (c.num_heads + 2 * c.num_kv_heads), c.bias),
        proj(c.embed_dim, c.embed_dim, c.bias, c.proj_init_std) {}

  // x: (batch, seq_len, embed_dim); result: the same shape. Attention probabilities are dropped with dropout_p.
  Tensor operator()(const Tensor& x, double dropout_p = 0) const {
    const Tensor packed = qkv(x);
    return proj(reshape(attend(packed, dropout_p), x.shape()));
  }

  void visit(auto&& field) const {
    field("qkv", qkv);
    field("proj", proj);
  }

 private:
  // packed: (batch, seq_len, (num_heads + 2 num_kv_heads) * head_dim); result: (batch, seq_len, num_heads, head_dim).
  Tensor attend(const Tensor& packed, double dropout_p) const {
    AttentionOptions options{.causal = true};
    if (dropout_p > 0) {
      const RandomState state = next_random_state();
      options.dropout_p = dropout_p;
      options.dropout_seed = state.seed;
      options.dropout_offset = state.offset;
    }
    const bool flash = config.attention == Attention::flash;
    const bool rotary = config.positions == Positions::rotary;
    if (flash && !rotary && config.num_kv_heads == config.num_heads) {
      return flash_attention_qkvpacked(packed, config.num_heads, options);
    }
    const int64_t head_dim = config.embed_dim / config.num_heads;
    const Tensor heads = reshape(packed, {packed.dim(0), packed.dim(1), -1, head_dim});
    const std::vector<Tensor> parts = split(heads, {config.num_heads, config.num_kv_heads, config.num_kv_heads}, 2);
    const Tensor query = rotary ? rope(parts[0], config.rotary_base) : parts[0];
    const Tensor key = rotary ? rope(parts[1], config.rotary_base) : parts[1];
    return flash ? flash_attention(query, key, parts[2], options) : standard_attention(query, key, parts[2], options);
  }

  static const AttentionConfig& checked(const AttentionConfig& c) {
    STROBE_CHECK(c.embed_dim > 0 && c.num_heads > 0 && c.embed_dim % c.num_heads == 0,
                 "CausalSelfAttention: embed_dim ", c.embed_dim, " and num_heads ", c.num_heads,
                 " given, expected num_heads to divide embed_dim");
    STROBE_CHECK(c.num_kv_heads > 0 && c.num_heads % c.num_kv_heads == 0, "CausalSelfAttention: num_kv_heads ",
                 c.num_kv_heads, " given, expected it to divide num_heads ", c.num_heads);
    STROBE_CHECK(c.positions == Positions::learned || c.embed_dim / c.num_heads % 2 == 0,
                 "CausalSelfAttention: head_dim ", c.embed_dim / c.num_heads,
                 " given, expected an even one for rotary positions");
    return c;
  }
};

}  // namespace strobe
