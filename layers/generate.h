// Sampling from a language model, one token at a time.
#pragma once

#include "strobe/layers/gpt.h"

namespace strobe {

struct GenerateOptions {
  int64_t max_new_tokens = 100;
  double temperature = 1.0;  // 0: always the most likely token
  int64_t top_k = 0;         // sample among the k most likely tokens; 0: among all
};

// Continues `prompt` (token ids, at least one) and returns the new tokens. Draws from this thread's random state.
// The model sees at most its last max_seq_len tokens.
std::vector<int64_t> generate(const GPT& model, std::vector<int64_t> prompt, const GenerateOptions& options = {});

}  // namespace strobe
