// What the training loop does with f16 gradients that overflow. Run by train_tests.
#include "train_loop.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "support/temporary_folder.h"

using namespace examples;
using namespace strobe;
using namespace strobe::testing;

namespace {

// A run on single tokens whose gradients overflow in f16, whatever the loss is scaled by, where 'x' is the target: its
// row of the output projection is near the end of f16. `x` is the target of the first step and of no other.
struct OverflowingRun {
  TemporaryFolder folder;
  TrainOptions options;
  TrainingData data;
  Training training;
  RunFolder run;

  OverflowingRun()
      : options(make_options(folder)),
        data(load_data(options, std::nullopt)),
        training(make_training(options, data)),
        run(options.out, FolderUse::fresh) {
    const NoGrad no_grad;
    const int32_t x = data.tokenizer->encode("x")[0];
    const Tensor head = training.model.lm_head[0].weight.detach();
    slice(head, 0, x, x + 1).copy_from(full({1, options.embed_dim}, 60000.0, DType::f16));
    const Tensor gain = std::get<LayerNorm>(training.model.ln_f.kind).weight.detach();
    gain.copy_from(full(gain.shape(), 0.01, DType::f16));
    DataPosition first;
    do {
      first = training.data.position();
    } while (training.data.next_batch(1).targets.item<int32_t>() != x);
    training.data.set_position(first);
    run.begin();
  }
  Ending train(double scale) {
    training.scaler->scale.copy_from(full({}, scale, DType::f32));
    MetricsFile metrics(run.metrics, [](const nlohmann::ordered_json&) { return true; });
    return examples::train(training, data, options, run, metrics, false);
  }
  std::vector<double> weights() const {
    std::vector<double> all;
    for (const Tensor& parameter : parameters(training.model)) {
      const std::vector<double> values = parameter.to_vector<double>();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

 private:
  static TrainOptions make_options(const TemporaryFolder& folder) {
    std::string text;
    for (int i = 0; i < 20; ++i) text += "abcdefghijklmnopqrstuvw";
    text.insert(50, 1, 'x');
    write_file(folder / "text", text);
    return complete(*parse_command({"--data", folder / "text", "--out", folder / "run", "--device=cpu", "--dtype=f16",
                                    "--layers=1", "--heads=1", "--embed-dim=16", "--context=1", "--batch=1",
                                    "--untied-embeddings", "--schedule=constant", "--steps=5", "--log-interval=5"}));
  }
};

}  // namespace

TEST_CASE("train loop: f16 gradients that overflow at the least scale hold back all steps behind them") {
  OverflowingRun run;
  const std::vector<double> before = run.weights();
  CHECK_THROWS_WITH_AS(run.train(1), doctest::Contains("step 1: gradients are not finite, the update was not made"),
                       Error);
  CHECK(run.weights() == before);
}

TEST_CASE("train loop: f16 gradients that overflow at a larger scale leave out one step") {
  OverflowingRun run;
  run.training.scaler->options.growth_interval = 3;
  const std::vector<double> before = run.weights();
  CHECK(run.train(2) == Ending::all_steps);
  CHECK(run.training.done.skipped == 1);
  CHECK(run.training.scaler->scale.item<double>() == 2);  // 1 after the first step, 2 again after three more
  CHECK(run.weights() != before);
}
