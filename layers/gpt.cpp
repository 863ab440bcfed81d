#include "strobe/layers/gpt.h"

namespace strobe {
namespace {

// Checks before the first member allocates anything.
const GPTConfig& validated(const GPTConfig& config) {
  validate(config);
  return config;
}

}  // namespace

void validate(const GPTConfig& c) {
  const auto at_least = [](const char* field, int64_t value, int64_t least) {
    STROBE_CHECK(value >= least, "GPTConfig: ", field, " ", value, " given, expected at least ", least);
  };
  at_least("vocab_size", c.vocab_size, 1);
  at_least("max_seq_len", c.max_seq_len, 1);
  at_least("num_layers", c.num_layers, 1);
  at_least("num_heads", c.num_heads, 1);
  at_least("num_kv_heads", c.num_kv_heads, 0);
  at_least("embed_dim", c.embed_dim, 1);
  at_least("mlp_dim", c.mlp_dim, 0);
  STROBE_CHECK(c.embed_dim % c.num_heads == 0, "GPTConfig: num_heads ", c.num_heads, " given for embed_dim ",
               c.embed_dim, ", expected a divisor of it");
  STROBE_CHECK(c.num_kv_heads == 0 || c.num_heads % c.num_kv_heads == 0, "GPTConfig: num_kv_heads ", c.num_kv_heads,
               " given for num_heads ", c.num_heads, ", expected a divisor of it");
  STROBE_CHECK(c.positions == Positions::learned || c.embed_dim / c.num_heads % 2 == 0,
               "GPTConfig: embed_dim / num_heads = ", c.embed_dim / c.num_heads,
               " given, expected an even head_dim for rotary positions");
  STROBE_CHECK(c.dropout >= 0 && c.dropout < 1, "GPTConfig: dropout ", c.dropout, " given, expected 0 <= dropout < 1");
}

// The tag lives while the other constructor runs, so that every member is allocated under it.
GPT::GPT(const GPTConfig& c) : GPT(c, MemoryTag("parameters")) {}

GPT::GPT(const GPTConfig& c, const MemoryTag&) : config(validated(c)), wte(c.vocab_size, c.embed_dim), ln_f(c) {
  if (c.positions == Positions::learned) wpe.emplace_back(c.max_seq_len, c.embed_dim);
  for (int64_t layer = 0; layer < c.num_layers; ++layer) h.emplace_back(c);
  if (!c.tied_embeddings) lm_head.emplace_back(c.embed_dim, c.vocab_size, false);
}

Tensor GPT::embed(const Tensor& tokens) const {
  require_defined("GPT", "tokens", tokens);
  STROBE_CHECK(tokens.rank() == 2, "GPT: tokens of shape ", tokens.shape(), " given, expected (batch, seq_len)");
  const int64_t seq_len = tokens.dim(1);
  STROBE_CHECK(seq_len <= config.max_seq_len, "GPT: tokens of shape ", tokens.shape(),
               " given, expected a seq_len of at most max_seq_len ", config.max_seq_len);
  const MemoryTag tag("activations");
  const Tensor x = wte(tokens);
  return wpe.empty() ? x : x + slice(wpe[0].weight, 0, 0, seq_len);
}

Tensor GPT::features(const Tensor& tokens) const {
  const MemoryTag tag("activations");
  const double dropout_p = training ? config.dropout : 0;
  ResidualStream stream{dropout(embed(tokens), dropout_p)};
  for (const Block& block : h) {
    if (config.recompute) {
      // By value: the block's tensors live as long as the graph, whatever happens to the model.
      const auto apply = [block, dropout_p](const Tensor& input) { return block(input, dropout_p); };
      stream.x = checkpoint(apply, stream.x);
    } else {
      stream = block(stream, dropout_p);
    }
  }
  return ln_f(stream.x, stream.branch).normalized;
}

Tensor GPT::logits(const Tensor& features) const {
  const MemoryTag tag("activations");
  return lm_head.empty() ? linear(features, wte.weight) : lm_head[0](features);
}

}  // namespace strobe
