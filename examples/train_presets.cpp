// Models and runs of known shapes, as the arguments they stand for.
#include <algorithm>
#include <utility>

#include "train_settings.h"

namespace examples {
namespace {

const std::vector<std::pair<std::string, Strings>> presets{
    // Seconds on one core: to try things out.
    {"nano", {"--layers=2", "--heads=2", "--embed-dim=64", "--context=64", "--batch=8", "--steps=500"}},
    // nanoGPT's model of tiny Shakespeare's characters.
    {"char",
     {"--tokenizer=char", "--layers=6", "--heads=6", "--embed-dim=384", "--context=256", "--dropout=0.2", "--batch=64",
      "--steps=5000", "--lr=1e-3", "--warmup-steps=100", "--beta2=0.99"}},
    // Radford et al. 2019; the optimizer's settings are those of nanoGPT's reproduction, half a million tokens a step.
    {"gpt2-124M",
     {"--tokenizer=bpe", "--vocab-size=50257", "--layers=12", "--heads=12", "--embed-dim=768", "--context=1024",
      "--batch=8", "--grad-accumulation=60", "--lr=6e-4", "--warmup-steps=2000", "--steps=600000", "--beta2=0.95",
      "--eval-interval=1000"}},
    {"gpt2-350M",
     {"--tokenizer=bpe", "--vocab-size=50257", "--layers=24", "--heads=16", "--embed-dim=1024", "--context=1024",
      "--batch=8", "--grad-accumulation=60", "--lr=3e-4", "--warmup-steps=2000", "--steps=600000", "--beta2=0.95",
      "--eval-interval=1000"}},
    // The form of LLaMA (Touvron et al. 2023) with grouped heads, small enough for a CPU.
    {"llama-tiny",
     {"--positions=rotary", "--norm=rms", "--mlp=swiglu", "--no-bias", "--untied-embeddings", "--layers=4", "--heads=8",
      "--kv-heads=2", "--embed-dim=256", "--context=256", "--beta2=0.95", "--lr=1e-3"}}};

}  // namespace

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, arguments] : presets) result.push_back(name);
    return result;
  }();
  return names;
}

const Strings& preset_arguments(const std::string& preset) {
  const auto found =
      std::find_if(presets.begin(), presets.end(), [&](const auto& entry) { return entry.first == preset; });
  return found->second;
}

}  // namespace examples
