// Everything about a run that changes while it trains, and its way into a checkpoint and back.
#pragma once

#include <strobe/strobe.h>

#include <optional>
#include <string>
#include <variant>

#include "train_data.h"
#include "train_options.h"

namespace examples {

using Optimizer = std::variant<strobe::AdamW, strobe::SGD>;

struct Progressed {
  int64_t step = 0;               // steps done
  int64_t skipped = 0;            // of them left out, as something was not finite
  int64_t evaluated_step = -1;    // when the loss on the held-out part was last measured
  int64_t worse_evaluations = 0;  // since the best one
  std::optional<double> best_loss;
};

struct Training {
  strobe::GPT model;
  Optimizer optimizer;
  strobe::TokenDataset data;
  Progressed done;
  std::optional<strobe::GradScaler> scaler;  // of f16 training
};

strobe::Device device_of(const TrainOptions& o);
// Of weights and activations.
strobe::DType dtype_of(const TrainOptions& o);
strobe::GPTConfig model_config(const TrainOptions& o, int64_t vocab_size);

// A run before its first step, on this thread's device; draws from its random state.
Training make_training(const TrainOptions& o, const TrainingData& data);

// Weights, optimizer, random state, data position, settings and tokenizer.
strobe::Checkpoint to_checkpoint(const Training& training, const TrainOptions& o, const TrainingData& data);

// Continues where the checkpoint was written. Throws, naming the keys that differ, when it is one of another model,
// optimizer or text.
void restore(Training& training, const strobe::Checkpoint& checkpoint, const TrainingData& data);

// Parts of a checkpoint that are needed before there is a model. Throw when the checkpoint has none.
std::string saved_config(const strobe::Checkpoint& checkpoint);
int64_t saved_vocab_size(const strobe::Checkpoint& checkpoint);
// None for a run on token ids that had no tokenizer.
std::optional<strobe::Tokenizer> saved_tokenizer(const strobe::Checkpoint& checkpoint);
const std::vector<strobe::NamedTensor>& saved_weights(const strobe::Checkpoint& checkpoint);

}  // namespace examples
