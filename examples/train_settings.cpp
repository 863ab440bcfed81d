// Declares the settings: names, ranges, help.
#include "train_settings.h"

#include <fmt/ranges.h>

#include <limits>

#include "option_checks.h"

namespace examples {

std::vector<Setting> declare_settings(CLI::App& app, TrainOptions& o) {
  constexpr int64_t any_size = 1'000'000'000;
  constexpr bool fixed = false;  // must not change when a run is resumed
  std::vector<Setting> settings;
  std::string current_group;
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

  const auto add = [&](const std::string& name, auto& value, bool may_change) {
    settings.push_back({name.substr(2), current_group, &value, may_change});
  };
  const auto group = [&](const std::string& name) { app.option_defaults()->group(current_group = name); };
  const auto integer = [&](const char* name, int64_t& value, int64_t low, int64_t high, const std::string& help,
                           bool may_change = true) {
    app.add_option(name, value, help)->check(range<int64_t>(low, high))->type_name("N");
    add(name, value, may_change);
  };
  const auto number = [&](const char* name, double& value, double low, double high, const char* help,
                          bool may_change = true) {
    app.add_option(name, value, help)->check(range<double>(low, high))->type_name("X");
    add(name, value, may_change);
  };
  const auto one_of = [&](const char* name, std::string& value, const Strings& values, const char* help,
                          bool may_change = true) {
    app.add_option(name, value, help)->check(choice(values))->type_name(fmt::format("{}", fmt::join(values, "|")));
    add(name, value, may_change);
  };
  const auto text = [&](const char* name, std::string& value, const char* type, const char* help,
                        bool may_change = true) {
    app.add_option(name, value, help)->type_name(type);
    add(name, value, may_change);
  };
  const auto paths = [&](const char* name, Strings& value, const char* help) {
    app.add_option(name, value, help)
        ->type_name("PATH")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->default_str("");
    add(name, value, true);
  };
  const auto flag = [&](const char* name, bool& value, const char* help, bool may_change = true) {
    app.add_flag(name, value, help);
    add(name, value, may_change);
  };

  group("Text");
  paths("--data", o.data, "texts to train on: files, folders, - for standard input; any bytes will do");
  paths("--tokens", o.tokens, "or: token files (*.bin in llm.c's layout) and folders of them");
  paths("--val-data", o.val_data, "what is held out; unless given, the end of the text or token files called *val*");
  number("--val-fraction", o.val_fraction, 0.0001, 0.9, "how much of the end", fixed);
  text("--tokenizer", o.tokenizer, "char|byte|bpe|PATH",
       "what a token is; bpe learns it; PATH: tokenizer.json, *.tiktoken, or a folder", fixed);
  integer("--vocab-size", o.vocab_size, 1, std::numeric_limits<int32_t>::max(),
          "tokens bpe learns; or how many ids --tokens have, without --tokenizer", fixed);

  group("Model");
  integer("--layers", o.layers, 1, any_size, "transformer blocks", fixed);
  integer("--heads", o.heads, 1, any_size, "attention heads", fixed);
  integer("--kv-heads", o.kv_heads, 0, any_size, "key/value heads that the heads share; 0: as many as heads", fixed);
  integer("--embed-dim", o.embed_dim, 1, any_size, "width", fixed);
  integer("--context", o.context, 1, any_size, "tokens the model sees at once", fixed);
  one_of("--attention", o.attention, {"flash", "standard"}, "tiled, or with the whole score matrix in memory");
  one_of("--positions", o.positions, {"learned", "rotary"}, "how the model knows positions", fixed);
  one_of("--norm", o.norm, {"layer", "rms"}, "normalization", fixed);
  one_of("--mlp", o.mlp, {"gelu", "swiglu"}, "feed-forward part", fixed);
  integer("--mlp-dim", o.mlp_dim, 0, any_size, "its width; 0: 4 * embed-dim, two thirds of that with swiglu", fixed);
  flag("--no-bias", o.no_bias, "linear layers without bias", fixed);
  flag("--untied-embeddings", o.untied_embeddings, "an output projection of its own", fixed);
  flag("--recompute", o.recompute, "keep only the input of each block, compute it again in backward");
  number("--dropout", o.dropout, 0, 0.99, "part of the activations dropped while training");

  group("Optimizer");
  one_of("--optimizer", o.optimizer, {"adamw", "sgd"}, "update rule", fixed);
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
  number("--momentum", o.momentum, 0, 0.999999, "SGD: momentum", fixed);
  number("--grad-clip", o.grad_clip, 0, 1e30, "largest gradient norm; 0: no limit");

  group("Run");
  integer("--steps", o.steps, 1, any_size, "optimizer steps");
  integer("--batch", o.batch, 1, any_size, "sequences per forward pass");
  integer("--grad-accumulation", o.grad_accumulation, 1, any_size, "forward passes per step");
  integer("--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "decides weights, data order, dropout and sample",
          fixed);
  one_of("--device", o.device, {"auto", "cpu", "cuda"}, "where to train; auto: on the GPU if there is one");
  one_of("--dtype", o.dtype, {"f32", "bf16", "f16"},
         "of weights and activations; the optimizer keeps f32, and f16 scales the loss", fixed);
  integer("--threads", o.threads, 0, 4096, "0: all processors");
  integer("--eval-interval", o.eval_interval, 1, any_size, "steps between evaluations on the held-out part");
  integer("--eval-batches", o.eval_batches, 1, any_size,
          "batches per evaluation, spread evenly over the held-out part");
  integer("--patience", o.patience, 0, any_size, "end after so many evaluations without a better loss; 0: never");
  integer("--log-interval", o.log_interval, 0, any_size,
          "steps between looks at the losses, for which a GPU has to wait; 0: 1 on the CPU, 10 on a GPU");
  flag("--skip-non-finite", o.skip_non_finite,
       "leave out steps whose loss or gradients are not finite, and count them; 20 in a row end the run");

  group("Results");
  text("--out", o.out, "FOLDER", "where they go; unless given, runs/ and the name of the data");
  integer("--save-interval", o.save_interval, 0, any_size, "steps between checkpoints; 0: one at every evaluation");
  integer("--keep", o.keep, 1, any_size, "checkpoints that stay, besides the best one");
  integer("--sample-tokens", o.sample_tokens, 0, any_size, "tokens to generate at the end");
  number("--temperature", o.temperature, 0, 1e3, "0: always the most likely token");
  integer("--top-k", o.top_k, 0, any_size, "sample from the k most likely tokens; 0: from all");
  text("--prompt", o.prompt, "TEXT", "what the sample continues; unless given, a line break");
  return settings;
}

}  // namespace examples
