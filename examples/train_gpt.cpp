// Trains a GPT on a text and lets it write: train_gpt --data FILE. Everything it needs of the framework is one header.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strobe/strobe.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numbers>
#include <random>
#include <utility>

#include "loss_curve.h"
#include "report.h"
#include "text_data.h"
#include "train_options.h"

using namespace examples;
using namespace strobe;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

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

Device device_of(const TrainOptions& o) {
  const bool cuda = o.device == "cuda" || (o.device == "auto" && cuda_available());
  return cuda ? Device::cuda() : Device::cpu();
}

// Mean loss over windows spread evenly over the held-out tokens: the same ones every time.
double evaluate(GPT& model, const std::vector<int32_t>& tokens, const TrainOptions& o) {
  NoGrad no_grad;
  const bool training = std::exchange(model.training, false);
  const std::vector<int64_t> starts = spread_windows(tokens, o.eval_batches * o.batch, o.context);
  double sum = 0;
  for (size_t begin = 0; begin < starts.size(); begin += static_cast<size_t>(o.batch)) {
    const size_t end = std::min(begin + static_cast<size_t>(o.batch), starts.size());
    const Batch batch = batch_at(tokens, {starts.data() + begin, starts.data() + end}, o.context);
    sum += cross_entropy(model(batch.tokens), batch.targets).item<double>() * static_cast<double>(end - begin);
  }
  model.training = training;
  return sum / static_cast<double>(starts.size());
}

bool all_finite(const Tensor& tensor) {
  const std::vector<float> values = tensor.to_vector<float>();
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

// Where a non-finite loss or gradient comes from: the first parameter, else layer output, else gradient that shows it.
std::string first_non_finite(const GPT& model, const Tensor& tokens) {
  NoGrad no_grad;
  for (const NamedTensor& parameter : named_parameters(model))
    if (!all_finite(parameter.tensor)) return "parameter " + parameter.name;
  Tensor x = model.wte(tokens);
  if (!model.wpe.empty()) x = x + slice(model.wpe[0].weight, 0, 0, tokens.dim(1));
  if (!all_finite(x)) return "output of the embedding";
  for (size_t i = 0; i < model.h.size(); ++i) {
    x = model.h[i](x);
    if (!all_finite(x)) return fmt::format("output of h.{}", i);
  }
  if (!all_finite(model(tokens))) return "logits";
  for (const NamedTensor& parameter : named_parameters(model))
    if (parameter.tensor.grad().defined() && !all_finite(parameter.tensor.grad()))
      return "gradient of parameter " + parameter.name;
  return "loss";
}

[[noreturn]] void stop_non_finite(int64_t step, const std::string& what, const GPT& model, const Tensor& tokens) {
  throw Error(
      fmt::format("step {}: {}; first non-finite tensor: {}; stopped, nothing saved, expected finite values "
                  "(a lower --lr may help)",
                  step, what, first_non_finite(model, tokens)));
}

Corpus load_corpus(const TrainOptions& o) {
  return o.tokens.empty() ? load_text(o.data, o.tokenizer == "byte", o.val_fraction, o.context)
                          : load_tokens(o.tokens, o.vocab_size, o.val_fraction, o.context);
}

// What the sample continues: the given prompt, else a line break, else how the held-out tokens begin.
std::vector<int64_t> prompt_tokens(const Corpus& corpus, const TrainOptions& o) {
  std::vector<int32_t> tokens{corpus.validation.front()};
  if (corpus.vocabulary) {
    const std::vector<std::string>& symbols = corpus.vocabulary->symbols();
    if (!o.prompt.empty())
      tokens = corpus.vocabulary->encode(o.prompt, "--prompt");
    else if (std::find(symbols.begin(), symbols.end(), "\n") != symbols.end())
      tokens = corpus.vocabulary->encode("\n", "");
  }
  return {tokens.begin(), tokens.end()};
}

std::string sample_text(const Corpus& corpus, const std::vector<int64_t>& prompt, const std::vector<int64_t>& written) {
  std::vector<int32_t> tokens(prompt.begin(), prompt.end());
  tokens.insert(tokens.end(), written.begin(), written.end());
  return corpus.vocabulary ? printable(corpus.vocabulary->decode(tokens)) : fmt::format("{}", fmt::join(tokens, " "));
}

// Refuses what cannot fit into memory before anything is built: counts weights and gradients, and of the activations
// only the logits and ten vectors per layer and token.
void check_memory(const TrainOptions& o, int64_t vocab_size) {
  const double width = static_cast<double>(o.embed_dim), layers = static_cast<double>(o.layers);
  const double vocabulary = static_cast<double>(vocab_size);
  const double weights = 10 * layers * width * width + vocabulary * width;
  const double activations =
      static_cast<double>(o.batch) * static_cast<double>(o.context) * (10 * layers * width + vocabulary);
  const double bytes = sizeof(float) * (2 * weights + activations);
  if (bytes > static_cast<double>(memory_limit()))
    throw Error(
        fmt::format("--layers {} --embed-dim {} --batch {} --context {}: training takes more than {:.1f} GiB, "
                    "expected at most the memory of this machine, {}",
                    o.layers, o.embed_dim, o.batch, o.context, bytes / (1 << 30), human_bytes(memory_limit())));
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && !std::filesystem::is_directory(folder)) error = std::make_error_code(std::errc::not_a_directory);
  if (!error && access(folder.c_str(), W_OK) != 0) error = std::error_code(errno, std::generic_category());
  if (error)
    throw Error(fmt::format("--out {}: {}, expected a folder that can be written", folder.string(), error.message()));
}

// The files a run leaves.
struct Outputs {
  explicit Outputs(const std::filesystem::path& folder)
      : checkpoint(folder / "model.safetensors"),
        config(folder / "config.json"),
        metrics(folder / "metrics.jsonl"),
        curve(folder / "loss.svg") {}
  std::filesystem::path checkpoint, config, metrics, curve;
};

// What is needed to use the checkpoint later. A symbol that is not UTF-8 is written as its byte value.
nlohmann::ordered_json checkpoint_config(const TrainOptions& o, const Corpus& corpus) {
  nlohmann::ordered_json config{
      {"strobe_version", STROBE_VERSION}, {"vocab_size", corpus.vocab_size}, {"options", to_json(o)}};
  if (corpus.vocabulary)
    for (const std::string& symbol : corpus.vocabulary->symbols()) {
      const unsigned char first = static_cast<unsigned char>(symbol[0]);
      if (symbol.size() == 1 && first >= 0x80)
        config["vocabulary"].push_back(first);
      else
        config["vocabulary"].push_back(symbol);
    }
  return config;
}

double learning_rate(const TrainOptions& o, int64_t step) {
  if (o.schedule == "constant") return ConstantSchedule{o.lr}(step);
  if (o.schedule == "linear") return LinearSchedule{o.lr, o.warmup_steps, o.steps, o.min_lr_fraction}(step);
  if (o.schedule == "cosine") return CosineSchedule{o.lr, o.warmup_steps, o.steps, o.min_lr_fraction}(step);
  return WarmupStableDecaySchedule{o.lr, o.warmup_steps, o.steps, o.decay_steps, o.min_lr_fraction}(step);
}

struct History {
  std::vector<CurvePoint> training, validation;
  std::vector<double> step_seconds;
};

template <class Optimizer>
History train(GPT& model, Optimizer optimizer, const Corpus& corpus, const TrainOptions& o, MetricsFile& metrics) {
  History history;
  std::mt19937_64 order(static_cast<uint64_t>(o.seed));
  Progress progress(o.steps, std::max<int64_t>(1, o.steps / 40));
  const double tokens_per_step = static_cast<double>(o.batch * o.context * o.grad_accumulation);
  const double part = 1 / static_cast<double>(o.grad_accumulation);
  double smoothed_seconds = 0;

  const auto evaluate_at = [&](int64_t step) {
    const double loss = evaluate(model, corpus.validation, o);
    if (!std::isfinite(loss))
      stop_non_finite(step, "after the update the validation loss is not finite", model,
                      batch_at(corpus.validation, {0}, o.context).tokens);
    history.validation.push_back({step, loss});
    metrics.write({{"step", step}, {"validation_loss", loss}});
    progress.line(fmt::format("step {}  validation loss {:.4f}", human_count(step), loss));
  };

  model.training = true;
  evaluate_at(0);
  for (int64_t step = 1; step <= o.steps; ++step) {
    const Clock::time_point start = Clock::now();
    optimizer.zero_grad();
    double loss_value = 0;
    Tensor tokens;
    for (int64_t i = 0; i < o.grad_accumulation; ++i) {
      const Batch batch = random_batch(corpus.training, o.batch, o.context, order);
      const Tensor loss = cross_entropy(model(batch.tokens), batch.targets) * part;
      loss.backward();
      loss_value += loss.item<double>();
      tokens = batch.tokens;
      if (!std::isfinite(loss_value)) break;
    }
    const double norm = clip_grad_norm(optimizer.parameters, o.grad_clip > 0 ? o.grad_clip : INFINITY);
    if (!std::isfinite(loss_value) || !std::isfinite(norm))
      stop_non_finite(step,
                      std::isfinite(loss_value) ? "gradients are not finite, the update was not made"
                                                : "the loss is not finite, the update was not made",
                      model, tokens);
    const double rate = learning_rate(o, step - 1);
    optimizer.step(rate);

    const double seconds = seconds_since(start);
    history.step_seconds.push_back(seconds);
    history.training.push_back({step, loss_value});
    smoothed_seconds = step == 1 ? seconds : 0.9 * smoothed_seconds + 0.1 * seconds;
    const MemoryStats memory = memory_stats();
    metrics.write({{"step", step},
                   {"loss", loss_value},
                   {"learning_rate", rate},
                   {"gradient_norm", norm},
                   {"bytes_held", memory.current},
                   {"bytes_peak", memory.peak},
                   {"tokens_per_second", tokens_per_step / seconds}});
    progress.step({step, loss_value, rate, tokens_per_step / smoothed_seconds});
    if (step % o.eval_interval == 0 || step == o.steps) evaluate_at(step);
  }
  model.training = false;
  return history;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  write_file_atomically(path.string(), {{text.data(), text.size()}});
}

void run(const TrainOptions& o) {
  const Clock::time_point start = Clock::now();
  if (o.threads > 0) set_num_threads(static_cast<int>(o.threads));
  const Device device = device_of(o);
  const DeviceGuard guard(device);
  seed(static_cast<uint64_t>(o.seed));
  const Corpus corpus = load_corpus(o);
  const std::vector<int64_t> prompt = prompt_tokens(corpus, o);
  check_memory(o, corpus.vocab_size);
  GPT model(model_config(o, corpus.vocab_size));
  if (o.dtype == "bf16") to(model, DType::bf16);
  make_folder(o.out);
  const Outputs outputs(o.out);
  MetricsFile metrics(outputs.metrics);

  const std::string source = std::filesystem::path(o.data + o.tokens).filename().string();
  const std::string shape =
      fmt::format("{} layers, {} heads, {} wide, context {}", o.layers, o.heads, o.embed_dim, o.context);
  fmt::print("data   {}: {} tokens to train on, {} held out, vocabulary {}\n", printable(source),
             human_count(static_cast<int64_t>(corpus.training.size())),
             human_count(static_cast<int64_t>(corpus.validation.size())), human_count(corpus.vocab_size));
  fmt::print("model  {}, {} attention: {} parameters\n", shape, o.attention, human_count(num_parameters(model)));
  const std::string where = device.type == DeviceType::cpu ? fmt::format("{} threads", num_threads()) : "one GPU";
  fmt::print("run    {} steps of {} x {} tokens, {}, {}, {}\n", human_count(o.steps), o.batch * o.grad_accumulation,
             o.context, o.optimizer, o.dtype, where);

  const std::vector<Tensor> weights = parameters(model);
  const History history =
      o.optimizer == "adamw"
          ? train(model, AdamW(weights, {.betas = {o.beta1, o.beta2}, .eps = o.eps, .weight_decay = o.weight_decay}),
                  corpus, o, metrics)
          : train(model, SGD(weights, {.momentum = o.momentum, .weight_decay = o.weight_decay}), corpus, o, metrics);

  const double validation_loss = history.validation.back().loss;
  const double tokens_per_second =
      static_cast<double>(o.batch * o.context * o.grad_accumulation) / median(history.step_seconds);
  nlohmann::ordered_json summary{{"validation_loss", validation_loss}, {"median_tokens_per_second", tokens_per_second}};
  save(model, outputs.checkpoint.string());
  write_text(outputs.config,
             checkpoint_config(o, corpus).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  write_text(outputs.curve,
             loss_curve_svg(fmt::format("{}: {}", printable(source), shape), history.training, history.validation));

  fmt::print("\nvalidation loss  {:.4f}\n", validation_loss);
  if (corpus.vocabulary) {
    const double bits_per_byte = validation_loss / std::numbers::ln2 / corpus.validation_bytes_per_token;
    summary["bits_per_byte"] = bits_per_byte;
    fmt::print("bits per byte    {:.3f}\n", bits_per_byte);
  }
  metrics.write(summary);
  fmt::print("speed            {} tokens/s (median step)\n", human_rate(tokens_per_second));
  fmt::print("memory           {} at most\n", human_bytes(memory_stats().peak));

  if (o.sample_tokens > 0) {
    const std::vector<int64_t> written =
        generate(model, prompt, {.max_new_tokens = o.sample_tokens, .temperature = o.temperature, .top_k = o.top_k});
    fmt::print("\n--- sample ---\n{}\n--------------\n", sample_text(corpus, prompt, written));
  }
  fmt::print("\ncheckpoint  {} (settings: {})\nmetrics     {}\nloss curve  {}\ntime        {}\n",
             outputs.checkpoint.string(), outputs.config.filename().string(), outputs.metrics.string(),
             outputs.curve.string(), human_duration(seconds_since(start)));
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond the allowed size is an error of write, which is reported
  try {
    if (const std::optional<TrainOptions> options = parse_options(argc, argv)) run(*options);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "train_gpt: {}\n", error.what());
    return 1;
  }
}
