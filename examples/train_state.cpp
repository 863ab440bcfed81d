// Builds a run, and takes it apart into tensors and JSON.
#include "train_state.h"

#include <nlohmann/json.hpp>

#include "option_checks.h"

namespace examples {
namespace {

using namespace strobe;
using Json = nlohmann::ordered_json;

constexpr const char* weights_file = "model.safetensors";
constexpr const char* optimizer_file = "optimizer.safetensors";
constexpr const char* state_file = "state.json";
constexpr const char* config_file = "config.toml";
constexpr const char* tokenizer_file = "tokenizer.json";

Optimizer make_optimizer(const TrainOptions& o, const std::vector<Tensor>& weights) {
  if (o.optimizer == "sgd") return SGD(weights, {.momentum = o.momentum, .weight_decay = o.weight_decay});
  return AdamW(weights, {.betas = {o.beta1, o.beta2}, .eps = o.eps, .weight_decay = o.weight_decay});
}

std::vector<std::string> parameter_names(const GPT& model) {
  std::vector<std::string> names;
  for (const NamedTensor& parameter : named_parameters(model)) names.push_back(parameter.name);
  return names;
}

const std::string& text_of(const Checkpoint& checkpoint, const char* file) {
  const auto found = checkpoint.texts.find(file);
  require(found != checkpoint.texts.end(), "the checkpoint of step {} has no {}, expected one that train_gpt wrote",
          checkpoint.step, file);
  return found->second;
}

const std::vector<NamedTensor>& tensors_of(const Checkpoint& checkpoint, const char* file) {
  const auto found = checkpoint.tensors.find(file);
  require(found != checkpoint.tensors.end(), "the checkpoint of step {} has no {}, expected one that train_gpt wrote",
          checkpoint.step, file);
  return found->second;
}

Json state_of(const Checkpoint& checkpoint) {
  const Json state = Json::parse(text_of(checkpoint, state_file), nullptr, false);
  require(state.is_object(), "the checkpoint of step {}: {} is no JSON object", checkpoint.step, state_file);
  return state;
}

template <class T>
T number(const Json& state, const char* key) {
  const bool right =
      state.contains(key) && (std::is_integral_v<T> ? state[key].is_number_integer() : state[key].is_number());
  require(right,
          "{}: '{}' is missing or not such a number, expected it as written "
          "by this version of train_gpt",
          state_file, key);
  return state[key].get<T>();
}

}  // namespace

Device device_of(const TrainOptions& o) {
  const bool cuda = o.device == "cuda" || (o.device == "auto" && cuda_available());
  return cuda ? Device::cuda() : Device::cpu();
}

DType dtype_of(const TrainOptions& o) {
  return o.dtype == "bf16" ? DType::bf16 : o.dtype == "f16" ? DType::f16 : DType::f32;
}

GPTConfig model_config(const TrainOptions& o, int64_t vocab_size) {
  return {.vocab_size = vocab_size,
          .max_seq_len = o.context,
          .num_layers = o.layers,
          .num_heads = o.heads,
          .num_kv_heads = o.kv_heads,
          .embed_dim = o.embed_dim,
          .mlp_dim = o.mlp_dim,
          .attention = o.attention == "flash" ? Attention::flash : Attention::standard,
          .positions = o.positions == "rotary" ? Positions::rotary : Positions::learned,
          .norm = o.norm == "rms" ? NormKind::rms : NormKind::layer,
          .mlp = o.mlp == "swiglu" ? MlpKind::swiglu : MlpKind::gelu,
          .bias = !o.no_bias,
          .tied_embeddings = !o.untied_embeddings,
          .dropout = o.dropout,
          .recompute = o.recompute};
}

Training make_training(const TrainOptions& o, const TrainingData& data) {
  GPT model(model_config(o, data.vocab_size));
  to(model, dtype_of(o));
  Optimizer optimizer = make_optimizer(o, parameters(model));
  return {std::move(model),
          std::move(optimizer),
          TokenDataset(data.split.training, o.context, static_cast<uint64_t>(o.seed)),
          {},
          dtype_of(o) == DType::f16 ? std::optional<GradScaler>(std::in_place) : std::nullopt};
}

Checkpoint to_checkpoint(const Training& training, const TrainOptions& o, const TrainingData& data) {
  const Progressed& done = training.done;
  const RandomState random = random_state();
  const DataPosition position = training.data.position();
  Json state{{"step", done.step},
             {"skipped", done.skipped},
             {"evaluated_step", done.evaluated_step},
             {"worse_evaluations", done.worse_evaluations},
             {"random_seed", random.seed},
             {"random_offset", random.offset},
             {"data_seed", position.seed},
             {"data_epoch", position.epoch},
             {"data_index", position.index},
             {"training_tokens", data.split.training.size()},
             {"validation_tokens", data.split.validation.size()},
             {"training_fingerprint", data.training_fingerprint},
             {"validation_fingerprint", data.validation_fingerprint},
             {"vocab_size", data.vocab_size}};
  if (done.best_loss) state["best_loss"] = *done.best_loss;
  if (training.scaler) {
    state["loss_scale"] = training.scaler->scale.item<double>();
    state["finite_steps"] = training.scaler->finite_steps.item<int64_t>();
  }

  Checkpoint checkpoint;
  checkpoint.step = done.step;
  checkpoint.tensors[weights_file] = named_parameters(training.model);
  checkpoint.tensors[optimizer_file] =
      std::visit([&](const auto& optimizer) { return named_state(optimizer, parameter_names(training.model)); },
                 training.optimizer);
  checkpoint.texts[state_file] = state.dump(2) + "\n";
  checkpoint.texts[config_file] = to_toml(o);
  if (data.tokenizer) checkpoint.texts[tokenizer_file] = data.tokenizer->to_json();
  return checkpoint;
}

void restore(Training& training, const Checkpoint& checkpoint, const TrainingData& data) {
  const Json state = state_of(checkpoint);
  const auto require_same = [&](const std::string& part, int64_t size, uint64_t fingerprint) {
    const int64_t expected = number<int64_t>(state, (part + "_tokens").c_str());
    require(expected == size,
            "--resume: {} {} tokens given, expected the {} that the run began with: is it the same text?", size, part,
            expected);
    require(number<uint64_t>(state, (part + "_fingerprint").c_str()) == fingerprint,
            "--resume: as many {} tokens given as the run began with, {}, but others: is it the same text?", part,
            size);
  };
  require_same("training", data.split.training.size(), data.training_fingerprint);
  require_same("validation", data.split.validation.size(), data.validation_fingerprint);
  load(training.model, tensors_of(checkpoint, weights_file));
  std::visit(
      [&](auto& optimizer) {
        load_state(optimizer, parameter_names(training.model), tensors_of(checkpoint, optimizer_file));
      },
      training.optimizer);
  training.data.set_position({.seed = number<uint64_t>(state, "data_seed"),
                              .epoch = number<int64_t>(state, "data_epoch"),
                              .index = number<int64_t>(state, "data_index")});
  training.done = {.step = number<int64_t>(state, "step"),
                   .skipped = number<int64_t>(state, "skipped"),
                   .evaluated_step = number<int64_t>(state, "evaluated_step"),
                   .worse_evaluations = number<int64_t>(state, "worse_evaluations"),
                   .best_loss = std::nullopt};
  if (state.contains("best_loss")) training.done.best_loss = number<double>(state, "best_loss");
  if (training.scaler) {
    training.scaler->scale.copy_from(full({}, number<double>(state, "loss_scale"), DType::f32));
    training.scaler->finite_steps.copy_from(
        cast(full({}, number<double>(state, "finite_steps"), DType::f64), DType::i64));
  }
  set_random_state({number<uint64_t>(state, "random_seed"), number<uint64_t>(state, "random_offset")});
}

std::string saved_config(const Checkpoint& checkpoint) { return text_of(checkpoint, config_file); }

int64_t saved_vocab_size(const Checkpoint& checkpoint) { return number<int64_t>(state_of(checkpoint), "vocab_size"); }

std::optional<Tokenizer> saved_tokenizer(const Checkpoint& checkpoint) {
  const auto found = checkpoint.texts.find(tokenizer_file);
  if (found == checkpoint.texts.end()) return std::nullopt;
  return parse_tokenizer_json(found->second, tokenizer_file);
}

const std::vector<NamedTensor>& saved_weights(const Checkpoint& checkpoint) {
  return tensors_of(checkpoint, weights_file);
}

}  // namespace examples
