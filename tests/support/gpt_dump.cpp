// Writes what a small GPT computes, for tests/torch_parity.py to compute again: weights, tokens, logits, loss and all
// gradients of the first batch, and the losses of training steps.
// Usage: gpt_dump gpt2|llama cpu|cuda FILE
#include <strobe/strobe.h>

#include <cstdio>
#include <exception>
#include <string>

using namespace strobe;

namespace {

constexpr int64_t steps = 50, batch = 4, seq_len = 48, vocab_size = 97;

GPTConfig config_of(const std::string& form) {
  GPTConfig config{.vocab_size = vocab_size, .max_seq_len = seq_len, .num_layers = 3, .num_heads = 4, .embed_dim = 64};
  if (form == "gpt2") return config;
  STROBE_CHECK(form == "llama", "gpt_dump: form ", form, " given, expected gpt2 or llama");
  config.num_kv_heads = 2;
  config.positions = Positions::rotary;
  config.norm = NormKind::rms;
  config.mlp = MlpKind::swiglu;
  config.bias = false;
  config.tied_embeddings = false;
  return config;
}

void run(const std::string& form, Device device, const std::string& path) {
  const DeviceGuard guard(device);
  seed(11);
  // (steps, batch, seq_len + 1): most tokens tell what follows, so that there is something to learn.
  std::vector<int64_t> text;
  const std::vector<float> noise = uniform({steps * batch * (seq_len + 1)}).to_vector<float>();
  for (size_t i = 0; i < noise.size(); ++i) {
    const int64_t guess = i == 0 ? 0 : (3 * text[i - 1] + 1) % vocab_size;
    text.push_back(noise[i] < 0.9f ? guess : static_cast<int64_t>(noise[i] * 1e6f) % vocab_size);
  }
  const Tensor tokens = from_vector(text, {steps, batch, seq_len + 1});
  const auto batch_at = [&](int64_t step, int64_t shift) {
    return contiguous(reshape(slice(slice(tokens, 0, step, step + 1), 2, shift, shift + seq_len), {batch, seq_len}));
  };

  const GPT model(config_of(form));
  for_each_parameter(model, [](const std::string&, const Tensor& x) {  // biases and gains away from 0 and 1
    x.copy_from(x.detach() + normal(x.shape(), 0, 0.05));
  });
  std::vector<NamedTensor> written{{"tokens", tokens}};
  const auto write = [&](const std::string& name, const Tensor& x) {
    written.push_back({name, x.detach().to(Device::cpu())});
  };
  for_each_parameter(model, [&](const std::string& name, const Tensor& x) {
    const Tensor start = empty_like(x);  // training changes the parameter in place
    start.copy_from(x);
    write("weight." + name, start);
  });
  write("logits", model(batch_at(0, 0)));
  const Tensor loss = cross_entropy(model(batch_at(0, 0)), batch_at(0, 1));
  loss.backward();
  for_each_parameter(model, [&](const std::string& name, const Tensor& x) { write("grad." + name, x.grad()); });

  AdamW optimizer(parameters(model), {.betas = {0.9, 0.95}, .weight_decay = 0.1});
  optimizer.zero_grad();
  std::vector<float> losses, norms;
  for (int64_t step = 0; step < steps; ++step) {
    const Tensor step_loss = cross_entropy(model(batch_at(step, 0)), batch_at(step, 1));
    step_loss.backward();
    norms.push_back(static_cast<float>(clip_grad_norm(optimizer.parameters, 1.0)));
    optimizer.step(3e-3);
    optimizer.zero_grad();
    losses.push_back(step_loss.item<float>());
  }
  write("loss", loss);
  write("losses", from_vector(losses, {steps}));
  write("norms", from_vector(norms, {steps}));
  save_safetensors(path, written, {{"form", form}});
}

}  // namespace

int main(int argc, char** argv) {
  try {
    STROBE_CHECK(argc == 4 && (argv[2] == std::string("cpu") || argv[2] == std::string("cuda")),
                 "gpt_dump: expected gpt2|llama cpu|cuda FILE");
    run(argv[1], argv[2] == std::string("cuda") ? Device::cuda() : Device::cpu(), argv[3]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
