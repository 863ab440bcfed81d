// Declares the options, checks each by itself and then together.
#include "train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "option_checks.h"

namespace examples {
namespace {

constexpr int64_t any_size = 1'000'000'000;

void declare(CLI::App& app, TrainOptions& o) {
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto integer = [&](const char* name, int64_t& value, int64_t low, int64_t high, const char* help) {
    app.add_option(name, value, help)->check(range<int64_t>(low, high))->type_name("N");
  };
  const auto number = [&](const char* name, double& value, double low, double high, const char* help) {
    app.add_option(name, value, help)->check(range<double>(low, high))->type_name("X");
  };
  const auto one_of = [&](const char* name, std::string& value, const std::vector<std::string>& values,
                          const char* help) {
    app.add_option(name, value, help)->check(choice(values))->type_name(fmt::format("{}", fmt::join(values, "|")));
  };
  const auto text = [&](const char* name, std::string& value, const char* type, const char* help) {
    app.add_option(name, value, help)->type_name(type);
  };
  const auto flag = [&](const char* name, bool& value, const char* help) { app.add_flag(name, value, help); };
  const auto group = [&](const char* name) { app.option_defaults()->group(name); };

  group("Text");
  text("--data", o.data, "FILE", "text to train on; any bytes will do");
  text("--tokens", o.tokens, "FILE", "or: token ids, 16 bits each, little-endian");
  one_of("--tokenizer", o.tokenizer, {"char", "byte"}, "what a token of a text is");
  number("--val-fraction", o.val_fraction, 0.0001, 0.9, "part held out, at the end");

  group("Model");
  integer("--layers", o.layers, 1, any_size, "transformer blocks");
  integer("--heads", o.heads, 1, any_size, "attention heads");
  integer("--kv-heads", o.kv_heads, 0, any_size, "key/value heads that the heads share; 0: as many as heads");
  integer("--embed-dim", o.embed_dim, 1, any_size, "width");
  integer("--context", o.context, 1, any_size, "tokens the model sees at once");
  integer("--vocab-size", o.vocab_size, 0, 65536, "number of token ids, with --tokens");
  one_of("--attention", o.attention, {"flash", "standard"}, "tiled, or with the whole score matrix in memory");
  one_of("--positions", o.positions, {"learned", "rotary"}, "how the model knows positions");
  one_of("--norm", o.norm, {"layer", "rms"}, "normalization");
  one_of("--mlp", o.mlp, {"gelu", "swiglu"}, "feed-forward part");
  integer("--mlp-dim", o.mlp_dim, 0, any_size, "its width; 0: 4 * embed-dim, two thirds of that with swiglu");
  flag("--no-bias", o.no_bias, "linear layers without bias");
  flag("--untied-embeddings", o.untied_embeddings, "an output projection of its own");
  flag("--recompute", o.recompute, "keep only the input of each block, compute it again in backward");
  number("--dropout", o.dropout, 0, 0.99, "part of the activations dropped while training");

  group("Optimizer");
  one_of("--optimizer", o.optimizer, {"adamw", "sgd"}, "update rule");
  number("--lr", o.lr, 0, 1e30, "peak learning rate");
  one_of("--schedule", o.schedule, {"constant", "cosine", "linear", "wsd"}, "learning rate over the steps");
  number("--min-lr-fraction", o.min_lr_fraction, 0, 1, "where the schedule ends, as part of --lr");
  integer("--warmup-steps", o.warmup_steps, 0, any_size,
          "steps to reach --lr; unless given, at most a tenth of --steps");
  integer("--decay-steps", o.decay_steps, 0, any_size, "wsd: steps of decay at the end; 0: a fifth of --steps");
  number("--weight-decay", o.weight_decay, 0, 1e3, "decay of matrices");
  number("--beta1", o.beta1, 0, 0.999999, "AdamW: memory of the mean");
  number("--beta2", o.beta2, 0, 0.999999, "AdamW: memory of the square");
  number("--eps", o.eps, 1e-30, 1, "AdamW: added to the denominator");
  number("--momentum", o.momentum, 0, 0.999999, "SGD: momentum");
  number("--grad-clip", o.grad_clip, 0, 1e30, "largest gradient norm; 0: no limit");

  group("Run");
  integer("--steps", o.steps, 1, any_size, "optimizer steps");
  integer("--batch", o.batch, 1, any_size, "sequences per forward pass");
  integer("--grad-accumulation", o.grad_accumulation, 1, any_size, "forward passes per step");
  integer("--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "decides weights, data order, dropout and sample");
  one_of("--device", o.device, {"auto", "cpu", "cuda"}, "where to train; auto: on the GPU if there is one");
  one_of("--dtype", o.dtype, {"f32", "bf16"}, "of weights and activations; the optimizer keeps f32");
  integer("--threads", o.threads, 0, 4096, "0: all processors");
  integer("--eval-interval", o.eval_interval, 1, any_size, "steps between evaluations on the held-out part");
  integer("--eval-batches", o.eval_batches, 1, any_size,
          "batches per evaluation, spread evenly over the held-out part");
  text("--out", o.out, "FOLDER", "where the results go; unless given, runs/ and the name of the data");

  group("Sample");
  integer("--sample-tokens", o.sample_tokens, 0, any_size, "tokens to generate at the end");
  number("--temperature", o.temperature, 0, 1e3, "0: always the most likely token");
  integer("--top-k", o.top_k, 0, any_size, "sample from the k most likely tokens; 0: from all");
  text("--prompt", o.prompt, "TEXT", "what the sample continues; unless given, a line break");
}

void check_together(const CLI::App& app, TrainOptions& o) {
  const auto given = [&](const char* name) { return app.count(name) > 0; };
  const auto only_with = [&](const char* name, bool sensible, const std::string& needed) {
    require(!given(name) || sensible, "{}: contradicts the other options, expected only with {}", name, needed);
  };
  require(given("--data") || given("--tokens"),
          "--data: missing, expected --data FILE (a text) or --tokens FILE (token ids)");
  require(!given("--data") || !given("--tokens"), "--data and --tokens: both given, expected one of them");
  only_with("--tokenizer", given("--data"), "--data");
  only_with("--prompt", given("--data"), "--data");
  only_with("--prompt", o.sample_tokens > 0, "--sample-tokens above 0");
  only_with("--vocab-size", given("--tokens"), "--tokens");
  require(!given("--tokens") || o.vocab_size > 0, "--vocab-size: {}, expected the number of token ids of --tokens",
          given("--vocab-size") ? "0 given" : "missing");
  for (const char* name : {"--beta1", "--beta2", "--eps"}) only_with(name, o.optimizer == "adamw", "--optimizer adamw");
  only_with("--momentum", o.optimizer == "sgd", "--optimizer sgd");
  only_with("--decay-steps", o.schedule == "wsd", "--schedule wsd");
  for (const char* name : {"--min-lr-fraction", "--warmup-steps"})
    only_with(name, o.schedule != "constant", "a --schedule other than constant");

  require(o.embed_dim % o.heads == 0, "--heads: {} given, expected a divisor of --embed-dim {}", o.heads, o.embed_dim);
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  require(o.heads % o.kv_heads == 0, "--kv-heads: {} given, expected a divisor of --heads {}", o.kv_heads, o.heads);
  const int64_t head_dim = o.embed_dim / o.heads;
  require(o.positions != "rotary" || head_dim % 2 == 0,
          "--positions: rotary with a head width of {} (--embed-dim / --heads), expected an even width", head_dim);
  if (o.schedule == "constant") {
    o.warmup_steps = 0;
    o.min_lr_fraction = 1;
  } else if (!given("--warmup-steps")) {
    o.warmup_steps = std::min(o.warmup_steps, o.steps / 10);
  }
  require(o.warmup_steps <= o.steps, "--warmup-steps: {} given, expected at most --steps {}", o.warmup_steps, o.steps);
  if (o.schedule == "wsd" && o.decay_steps == 0) o.decay_steps = std::min(o.steps / 5, o.steps - o.warmup_steps);
  require(o.decay_steps <= o.steps - o.warmup_steps,
          "--decay-steps: {} given, expected at most the {} after the warm-up", o.decay_steps,
          o.steps - o.warmup_steps);
  if (o.out.empty()) o.out = (std::filesystem::path("runs") / std::filesystem::path(o.data + o.tokens).stem()).string();
}

}  // namespace

std::optional<TrainOptions> parse_options(int argc, const char* const* argv) {
  TrainOptions options;
  CLI::App app("Trains a GPT on a text, then lets it write. Leaves a checkpoint, metrics and the loss curve in --out.");
  app.get_formatter()->column_width(44);
  declare(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw std::runtime_error(error.what());
  }
  check_together(app, options);
  return options;
}

nlohmann::ordered_json to_json(const TrainOptions& o) {
  return {{"data", o.data},
          {"tokens", o.tokens},
          {"tokenizer", o.tokenizer},
          {"val_fraction", o.val_fraction},
          {"layers", o.layers},
          {"heads", o.heads},
          {"kv_heads", o.kv_heads},
          {"embed_dim", o.embed_dim},
          {"context", o.context},
          {"vocab_size", o.vocab_size},
          {"attention", o.attention},
          {"positions", o.positions},
          {"norm", o.norm},
          {"mlp", o.mlp},
          {"mlp_dim", o.mlp_dim},
          {"bias", !o.no_bias},
          {"tied_embeddings", !o.untied_embeddings},
          {"recompute", o.recompute},
          {"dropout", o.dropout},
          {"optimizer", o.optimizer},
          {"lr", o.lr},
          {"min_lr_fraction", o.min_lr_fraction},
          {"schedule", o.schedule},
          {"warmup_steps", o.warmup_steps},
          {"decay_steps", o.decay_steps},
          {"weight_decay", o.weight_decay},
          {"beta1", o.beta1},
          {"beta2", o.beta2},
          {"eps", o.eps},
          {"momentum", o.momentum},
          {"grad_clip", o.grad_clip},
          {"steps", o.steps},
          {"batch", o.batch},
          {"grad_accumulation", o.grad_accumulation},
          {"seed", o.seed},
          {"device", o.device},
          {"dtype", o.dtype},
          {"threads", o.threads},
          {"eval_interval", o.eval_interval},
          {"eval_batches", o.eval_batches}};
}

}  // namespace examples
