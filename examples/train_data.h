// Text or token ids as what train_gpt trains on and what it holds out.
#pragma once

#include <strobe/strobe.h>

#include <optional>
#include <string>
#include <vector>

#include "train_options.h"

namespace examples {

struct TrainingData {
  std::string name;  // of the first file
  strobe::TokenSplit split;
  uint64_t training_fingerprint = 0, validation_fingerprint = 0;  // of the tokens in them
  int64_t vocab_size = 0;
  std::optional<strobe::Tokenizer> tokenizer;  // none when the ids come from elsewhere
};

// Reads and, where it is text, tokenizes it: with `saved` when a run is resumed. Throws when a file cannot be used, an
// id is not below the vocabulary, or a part is shorter than one context and its targets.
TrainingData load_data(const TrainOptions& o, const std::optional<strobe::Tokenizer>& saved);

// The windows of the held-out tokens that every evaluation looks at.
std::vector<int64_t> evaluation_windows(const TrainingData& data, const TrainOptions& o);

// How many bytes of text one target of these windows stands for, on average, special tokens for none; nothing without a
// tokenizer or such bytes.
std::optional<double> bytes_per_token(const TrainingData& data, const std::vector<int64_t>& windows, int64_t context);

}  // namespace examples
