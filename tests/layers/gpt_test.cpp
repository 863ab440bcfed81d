#include "strobe/layers/gpt.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "support/gradcheck.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

GPTConfig small_config() {
  return {.vocab_size = 17, .max_seq_len = 12, .num_layers = 2, .num_heads = 4, .embed_dim = 32};
}

GPTConfig llama_config() {
  GPTConfig config = small_config();
  config.num_kv_heads = 2;
  config.positions = Positions::rotary;
  config.norm = NormKind::rms;
  config.mlp = MlpKind::swiglu;
  config.bias = false;
  config.tied_embeddings = false;
  return config;
}

// The same random batches for a given seed.
std::pair<Tensor, Tensor> batch(int64_t step) {
  std::vector<int64_t> tokens;
  std::vector<int64_t> targets;
  for (int64_t i = 0; i < 48; ++i) {
    tokens.push_back((i * 7 + i * i + step) % 17);
    targets.push_back((i * 7 + i * i + step + 3) % 17);
  }
  return {from_vector(tokens, {4, 12}), from_vector(targets, {4, 12})};
}

// Losses of `steps` training steps; batches repeat after `batches`.
std::vector<float> train(const GPT& model, int steps, int batches, float lr = 1e-2f) {
  AdamW optimizer(parameters(model), {.weight_decay = 0.1f});
  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    const auto [tokens, targets] = batch(step % batches);
    const Tensor loss = cross_entropy(model(tokens), targets);
    loss.backward();
    clip_grad_norm(optimizer.parameters, 1.0f);
    optimizer.step(lr);
    optimizer.zero_grad();
    losses.push_back(loss.item<float>());
  }
  return losses;
}

std::string temporary_file(const char* name) {
  return (std::filesystem::temp_directory_path() / (name + std::to_string(getpid()))).string();
}

}  // namespace

TEST_CASE("gpt: parameters carry GPT-2's names and number") {
  const GPT model(small_config());
  std::vector<std::string> names;
  for_each_parameter(model, [&](const std::string& name, const Tensor&) { names.push_back(name); });
  CHECK(names.size() == 2 + 2 * 12 + 2);
  CHECK(names[0] == "wte.weight");
  CHECK(names[1] == "wpe.weight");
  CHECK(std::count(names.begin(), names.end(), "h.1.attn.proj.weight") == 1);
  CHECK(names.back() == "ln_f.bias");
  const int64_t c = 32;
  CHECK(num_parameters(model) == 17 * c + 12 * c + 2 * (12 * c * c + 13 * c) + 2 * c);
  // GPT-2's published size.
  CHECK(12 * (12 * 768 * 768 + 13 * 768) + 2 * 768 + (50257 + 1024) * 768 == 124439808);
}

TEST_CASE("gpt: GPT-2's initialisation") {
  seed(1);
  const GPT model({.vocab_size = 1000, .max_seq_len = 64, .num_layers = 2, .num_heads = 4, .embed_dim = 128});
  const auto deviation = [](const Tensor& x) { return std::sqrt(dot(x, x) / static_cast<double>(x.size())); };
  CHECK(deviation(model.wte.weight) == doctest::Approx(0.02).epsilon(0.02));
  CHECK(deviation(model.h[0].attn.qkv.weight) == doctest::Approx(0.02).epsilon(0.02));
  CHECK(deviation(model.h[0].attn.proj.weight) == doctest::Approx(0.01).epsilon(0.02));
  CHECK(deviation(model.h[1].mlp.proj.weight) == doctest::Approx(0.01).epsilon(0.02));
  CHECK(deviation(model.h[1].mlp.fc.bias) == 0.0);
}

TEST_CASE("gpt: overfits one batch, in either form and with either attention") {
  for (const GPTConfig& base : {small_config(), llama_config()}) {
    for (Attention attention : {Attention::flash, Attention::standard}) {
      GPTConfig config = base;
      config.attention = attention;
      seed(11);
      const GPT model(config);
      const std::vector<float> losses = train(model, 80, 1);
      CHECK(losses.front() == doctest::Approx(std::log(17.0)).epsilon(0.1));
      CHECK(losses.back() < 0.2f);
    }
  }
}

TEST_CASE("gpt: gradients of the whole model match finite differences in f64") {
  for (const GPTConfig& config : {small_config(), llama_config()}) {
    seed(4);
    const GPT model(config);
    to(model, DType::f64);
    const auto [tokens, targets] = batch(0);
    for (const NamedTensor& chosen : named_parameters(model)) {
      if (chosen.name.find(".1.") == std::string::npos && chosen.name != "wte.weight") continue;
      CAPTURE(chosen.name);
      for (const Tensor& p : parameters(model)) p.set_grad(Tensor());
      cross_entropy(model(tokens), targets).backward();
      const NoGrad no_grad;
      const Tensor v = uniform(chosen.tensor.shape(), -1.0, 1.0, DType::f64);
      const double analytic = dot(chosen.tensor.grad(), v);
      const Tensor start = empty_like(chosen.tensor);
      start.copy_from(chosen.tensor);
      const auto loss_at = [&](double step) {
        chosen.tensor.copy_from(start + v * step);
        return cross_entropy(model(tokens), targets).item<double>();
      };
      const double h = 1e-4;
      const double numeric = (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h);
      chosen.tensor.copy_from(start);
      const double typical = 0.1 * std::sqrt(dot(chosen.tensor.grad(), chosen.tensor.grad()));
      CHECK(std::abs(analytic - numeric) <= 1e-7 * std::max(std::abs(analytic), typical) + 1e-12);
    }
  }
}

TEST_CASE("gpt: flash and standard attention give the same losses over 200 steps, dropout included") {
  for (const double dropout : {0.0, 0.2}) {
    std::vector<std::vector<float>> losses;
    for (Attention attention : {Attention::flash, Attention::standard}) {
      GPTConfig config = small_config();
      config.attention = attention;
      config.dropout = dropout;
      seed(5);
      GPT model(config);
      model.training = true;
      losses.push_back(train(model, 200, 50, 1e-3f));
    }
    for (size_t step = 0; step < losses[0].size(); ++step) {
      CHECK(losses[0][step] == doctest::Approx(losses[1][step]).epsilon(1e-4));
    }
  }
}

TEST_CASE("gpt: the same seed gives the same bits, dropout and recomputation included") {
  std::vector<std::vector<Tensor>> weights;
  std::vector<std::vector<float>> losses;
  for (bool recompute : {false, false, true}) {
    GPTConfig config = small_config();
    config.dropout = 0.1;
    config.recompute = recompute;
    seed(6);
    GPT model(config);
    model.training = true;
    losses.push_back(train(model, 12, 12));
    weights.push_back(parameters(model));
  }
  for (size_t run : {1, 2}) {
    CHECK(losses[0] == losses[run]);
    for (size_t i = 0; i < weights[0].size(); ++i) CHECK(same_bits(weights[0][i], weights[run][i]));
  }
}

TEST_CASE("gpt: a loss outlives its model, recomputation included") {
  for (bool recompute : {false, true}) {
    Tensor loss, weight;
    {
      GPTConfig config = small_config();
      config.recompute = recompute;
      const GPT model(config);
      weight = model.h[1].mlp.fc.weight;
      loss = cross_entropy(model(batch(0).first), batch(0).second);
    }
    loss.backward();
    CHECK(weight.grad().defined());
  }
}

TEST_CASE("gpt: training holds the same bytes at every step") {
  seed(7);
  const GPT model(small_config());
  AdamW optimizer(parameters(model), {});
  std::vector<size_t> held;
  for (int step = 0; step < 60; ++step) {
    {
      const auto [tokens, targets] = batch(step);
      cross_entropy(model(tokens), targets).backward();
      optimizer.step(1e-3f);
      optimizer.zero_grad();
    }
    held.push_back(memory_stats().current);
  }
  CHECK(held.back() == held[5]);
}

TEST_CASE("gpt: a saved model comes back bit for bit, and another model's file is refused unread") {
  const std::string path = temporary_file("strobe_gpt_test");
  seed(8);
  const GPT model(small_config());
  save(model, path, {{"note", "test"}});
  const GPT other(small_config());
  CHECK_FALSE(same_bits(model.wte.weight, other.wte.weight));
  load(other, path);
  for (size_t i = 0; i < parameters(model).size(); ++i) CHECK(same_bits(parameters(model)[i], parameters(other)[i]));
  const GPT llama(llama_config());
  const Tensor before = empty_like(llama.wte.weight);
  before.copy_from(llama.wte.weight);
  CHECK(contains(error_of([&] { load(llama, path); }), "of another model"));
  GPTConfig wider = small_config();
  wider.embed_dim = 64;
  CHECK(contains(error_of([&] { load(GPT(wider), path); }), "'wte.weight'"));
  CHECK(same_bits(before, llama.wte.weight));
  std::vector<NamedTensor> integers = named_parameters(model);
  integers[0].tensor = integers[0].tensor.to(DType::i32);
  save_safetensors(path, integers);
  CHECK(contains(error_of([&] { load(other, path); }), "dtype i32"));
  std::filesystem::remove(path);
}

TEST_CASE("gpt: parameters change dtype in place and still train") {
  seed(9);
  const GPT model(small_config());
  const Tensor handle = model.wte.weight;
  to(model, DType::bf16);
  CHECK(handle.dtype() == DType::bf16);
  const std::vector<float> losses = train(model, 60, 1);
  CHECK(losses.back() < 1.0f);
}

TEST_CASE("generate: greedy, top-k and seeded sampling") {
  seed(10);
  const GPT model(small_config());
  train(model, 60, 1);
  const std::vector<int64_t> greedy = generate(model, {3}, {.max_new_tokens = 20, .temperature = 0});
  CHECK(greedy.size() == 20);
  CHECK(generate(model, {3}, {.max_new_tokens = 20, .top_k = 1}) == greedy);
  seed(1);
  const std::vector<int64_t> first = generate(model, {3}, {.max_new_tokens = 30, .temperature = 2.0});
  seed(1);
  CHECK(generate(model, {3}, {.max_new_tokens = 30, .temperature = 2.0}) == first);
  CHECK(std::all_of(first.begin(), first.end(), [](int64_t token) { return token >= 0 && token < 17; }));
  CHECK(contains(error_of([&] { generate(model, {}); }), "empty prompt"));
  CHECK(contains(error_of([&] { generate(model, {1}, {.temperature = -1}); }), "temperature"));
}

TEST_CASE("gpt: bad configurations and inputs are refused by field") {
  const auto error_with = [](auto&& change) {
    GPTConfig config = small_config();
    change(config);
    return error_of([&] { GPT model(config); });
  };
  CHECK(contains(error_with([](GPTConfig& c) { c.num_heads = 5; }), "num_heads 5"));
  CHECK(contains(error_with([](GPTConfig& c) { c.num_kv_heads = 3; }), "num_kv_heads 3"));
  CHECK(contains(error_with([](GPTConfig& c) { c.max_seq_len = 0; }), "max_seq_len 0"));
  CHECK(contains(error_with([](GPTConfig& c) { c.dropout = 1.0; }), "dropout 1"));
  CHECK(contains(error_with([](GPTConfig& c) { c.embed_dim = 12, c.positions = Positions::rotary; }), "even head_dim"));
  const GPT model(small_config());
  CHECK(contains(error_of([&] { model(zeros({1, 13}, DType::i64)); }), "max_seq_len 12"));
  CHECK(contains(error_of([&] { model(zeros({3}, DType::i64)); }), "(batch, seq_len)"));
  CHECK(contains(error_of([&] { model(full({1, 3}, 17, DType::i64)); }), "17"));
}

TEST_CASE("gpt: f16 training with a scaled loss follows f32, where without one small gradients vanish") {
  const auto losses = [](DType dtype, double scale) {
    seed(21);
    const GPT model(small_config());
    to(model, dtype);
    AdamW optimizer(parameters(model), {.weight_decay = 0.1});
    GradScaler scaler({.initial_scale = scale, .growth_interval = 20});
    std::vector<double> result;
    for (int step = 0; step < 60; ++step) {
      const auto [tokens, targets] = batch(step % 4);
      const Tensor loss = cross_entropy(model(tokens), targets) * 1e-8;  // gradients that f16 cannot hold
      scaler(loss).backward();
      optimizer.step(1e-2, scaler.clip(optimizer.parameters, 1e-8).factor * 1e8);
      optimizer.zero_grad();
      result.push_back(loss.item<double>() * 1e8);
    }
    return result;
  };
  const std::vector<double> f32 = losses(DType::f32, 1), f16 = losses(DType::f16, 0x1p30);
  CHECK(f32.back() < 0.5 * f32.front());
  for (size_t step = 0; step < f32.size(); ++step) {
    CAPTURE(step);
    CHECK(std::abs(f16[step] - f32[step]) <= 0.03 * f32.front());
  }
  CHECK(losses(DType::f16, 1).back() > 0.9 * f32.front());
}
