// The command line of train_gpt.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace examples {

// Every setting of a run; what is written here are the defaults: a small model that trains in about two minutes.
struct TrainOptions {
  std::string data;    // text file
  std::string tokens;  // or token ids
  std::string tokenizer = "char";
  double val_fraction = 0.1;

  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t embed_dim = 128;
  int64_t context = 128;
  int64_t vocab_size = 0;  // with token ids only
  std::string attention = "flash";
  std::string positions = "learned";
  std::string norm = "layer";
  std::string mlp = "gelu";
  int64_t mlp_dim = 0;  // 0: four times embed_dim, two thirds of that with swiglu
  bool no_bias = false;
  bool untied_embeddings = false;
  bool recompute = false;
  double dropout = 0;

  std::string optimizer = "adamw";
  double lr = 2e-3;
  double min_lr_fraction = 0.1;
  std::string schedule = "cosine";
  int64_t warmup_steps = 100;  // fewer in short runs
  int64_t decay_steps = 0;     // of the schedule wsd; 0: a fifth of the steps
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double eps = 1e-8;
  double momentum = 0.9;
  double grad_clip = 1;

  int64_t steps = 2500;
  int64_t batch = 8;
  int64_t grad_accumulation = 1;
  int64_t seed = 1;
  std::string device = "auto";  // cuda where there is a GPU that this build can use, else cpu
  std::string dtype = "f32";    // of weights and activations; the optimizer keeps f32
  int64_t threads = 0;          // 0: all
  int64_t eval_interval = 250;
  int64_t eval_batches = 50;
  std::string out;  // runs/<name of the data> when empty

  int64_t sample_tokens = 400;
  double temperature = 0.8;
  int64_t top_k = 40;
  std::string prompt;
};

// Reads and checks everything that can be checked without opening a file; nothing when the command line asked for help,
// which has then been printed. Throws std::runtime_error with one line: the option, what was given, what was expected.
std::optional<TrainOptions> parse_options(int argc, const char* const* argv);

// The settings as they are saved beside a checkpoint.
nlohmann::ordered_json to_json(const TrainOptions& options);

}  // namespace examples
