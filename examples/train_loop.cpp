// One step after another; what a GPT's loss needs is read from the device only every few of them.
#include "train_loop.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>

#include "train_finite.h"

namespace examples {
namespace {

using namespace strobe;
using Clock = std::chrono::steady_clock;

// So many steps without an update, and no later one will have any: the weights themselves are not finite.
constexpr int64_t most_skipped_in_a_row = 20;

volatile std::sig_atomic_t stop_signal = 0;

// While it exists the first SIGINT or SIGTERM asks the loop to stop; a second one ends the process at once.
class SignalsStopTheLoop {
 public:
  SignalsStopTheLoop() {
    stop_signal = 0;
    struct sigaction action {};
    action.sa_handler = [](int signal) { stop_signal = signal; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  ~SignalsStopTheLoop() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }
  SignalsStopTheLoop(const SignalsStopTheLoop&) = delete;
  SignalsStopTheLoop& operator=(const SignalsStopTheLoop&) = delete;

 private:
  struct sigaction interrupt_ {
  }, terminate_{};
};

double learning_rate(const TrainOptions& o, int64_t step) {
  if (o.schedule == "constant") return ConstantSchedule{o.lr}(step);
  if (o.schedule == "linear") return LinearSchedule{o.lr, o.warmup_steps, o.steps, o.min_lr_fraction}(step);
  if (o.schedule == "cosine") return CosineSchedule{o.lr, o.warmup_steps, o.steps, o.min_lr_fraction}(step);
  return WarmupStableDecaySchedule{o.lr, o.warmup_steps, o.steps, o.decay_steps, o.min_lr_fraction}(step);
}

// A step that was made, with what it takes to report it or to make it again.
struct Step {
  int64_t number = 0;
  double rate = 0;
  RandomState random;          // before it
  std::vector<Batch> batches;  // one for each forward pass
  std::vector<Tensor> losses;  // their shares of the step's loss
  Tensor norm;                 // of its gradients
  Tensor scale;                // of the loss that they are from, in f16 training
  Tensor fault;                // NaN from a step that ends the run on, else 0

  // These wait for the device.
  double loss() const {
    double sum = 0;
    for (const Tensor& share : losses) sum += share.item<double>();
    return sum;
  }
  double gradient_norm() const { return norm.item<double>(); }
  bool can_scale_less() const { return scale.defined() && scale.item<double>() > 1; }
};

// Of a step whose gradients are of a loss times `scale`, which `scaler` has adapted to them since: NaN where they
// overflow and no smaller scale would help, else 0. Only then the scale is 1 before and after, and no step in a row
// was finite.
Tensor overflow_fault(const Tensor& scale, const GradScaler& scaler) {
  const Tensor excess = cast(scale + scaler.scale - 2.0, DType::f64);
  return zeros({}, DType::f64) / (excess + cast(scaler.finite_steps, DType::f64));
}

// Updates the weights with the clipped gradients of the step; nothing waits for the device. There is no update when the
// loss or the gradients are not finite, nor when there was such a fault in the step `before`: so when that is found
// out, the weights still are those that it happened with. Gradients that overflow with a smaller scale left to try
// are no fault.
void update(Training& training, Step& step, double max_norm, const Step* before) {
  const NoGrad no_grad;
  std::visit(
      [&](auto& chosen) {
        if (training.scaler) step.scale = training.scaler->scale * 1.0;
        const Clipping clipping = training.scaler ? training.scaler->clip(chosen.parameters, max_norm)
                                                  : clip_factor(chosen.parameters, max_norm);
        step.norm = clipping.norm;
        step.fault = training.scaler ? overflow_fault(step.scale, *training.scaler) : clipping.norm * 0.0;
        for (const Tensor& loss : step.losses) step.fault = step.fault + cast(loss, DType::f64) * 0.0;
        if (before != nullptr) step.fault = step.fault + before->fault;
        chosen.step(step.rate, clipping.factor + step.fault);
      },
      training.optimizer);
}

Step make_step(Training& training, const TrainOptions& o, const Step* before) {
  Step step{.number = training.done.step + 1,
            .rate = learning_rate(o, training.done.step),
            .random = random_state(),
            .batches = {},
            .losses = {},
            .norm = {},
            .scale = {},
            .fault = {}};
  std::visit([](const auto& optimizer) { optimizer.zero_grad(); }, training.optimizer);
  const double share = 1 / static_cast<double>(o.grad_accumulation);
  for (int64_t i = 0; i < o.grad_accumulation; ++i) {
    const Batch batch = training.data.next_batch(o.batch);
    const Tensor loss = cross_entropy(training.model(batch.tokens), batch.targets) * share;
    (training.scaler ? (*training.scaler)(loss) : loss).backward();
    step.batches.push_back(batch);
    step.losses.push_back(loss.detach());
  }
  update(training, step, o.grad_clip > 0 ? o.grad_clip : INFINITY, before);
  training.done.step = step.number;
  return step;
}

// Mean loss over the windows; nothing when a signal arrives meanwhile.
std::optional<double> evaluate(GPT& model, const TokenSource& tokens, const std::vector<int64_t>& windows,
                               const TrainOptions& o) {
  const NoGrad no_grad;
  const bool training = std::exchange(model.training, false);
  const size_t batch_size = static_cast<size_t>(o.batch);
  std::vector<std::pair<Tensor, size_t>> losses;
  for (size_t begin = 0; begin < windows.size() && stop_signal == 0; begin += batch_size) {
    const size_t count = std::min(batch_size, windows.size() - begin);
    const Batch batch = batch_at(tokens, std::span(windows).subspan(begin, count), o.context);
    losses.emplace_back(cross_entropy(model(batch.tokens), batch.targets), count);
  }
  model.training = training;
  if (stop_signal != 0) return std::nullopt;
  double sum = 0;
  for (const auto& [loss, count] : losses) sum += loss.item<double>() * static_cast<double>(count);
  return sum / static_cast<double>(windows.size());
}

class Loop {
 public:
  Loop(Training& training, const TrainingData& data, const TrainOptions& o, const RunFolder& folder,
       MetricsFile& metrics, bool saved)
      : training_(training),
        done_(training.done),
        data_(data),
        o_(o),
        folder_(folder),
        metrics_(metrics),
        windows_(evaluation_windows(data, o)),
        bytes_per_token_(bytes_per_token(data, windows_, o.context)),
        log_interval_(o.log_interval > 0                         ? o.log_interval
                      : default_device().type == DeviceType::cpu ? 1
                                                                 : 10),
        progress_(done_.step, o.steps, std::max<int64_t>(1, o.steps / 40)),
        saved_step_(saved ? done_.step : -1),
        saved_evaluation_(done_.evaluated_step) {}

  Ending run() {
    training_.model.training = true;
    for (;;) {
      const bool last = done_.step >= o_.steps;
      const bool improved = evaluation_is_due() && evaluate_now();
      const bool patience_lost = o_.patience > 0 && done_.worse_evaluations >= o_.patience;
      const bool signalled = stop_signal != 0;
      const bool output_lost = std::ferror(stdout) != 0;
      const bool stop = last || patience_lost || signalled || output_lost;
      if (stop && !unread_.empty()) read_steps();
      const bool due = done_.step > 0 && done_.step % o_.save_interval == 0;
      const bool unsaved = saved_step_ != done_.step || saved_evaluation_ != done_.evaluated_step;
      const bool sound = skipped_in_a_row_ == 0;  // else older weights, which may be sound, would make room for these
      if (improved || ((stop || (due && sound)) && unsaved)) save(improved);
      if (stop) {
        training_.model.training = false;
        return signalled     ? Ending::signal
               : output_lost ? Ending::output_lost
               : last        ? Ending::all_steps
                             : Ending::no_improvement;
      }
      if (unread_.empty()) unread_since_ = Clock::now();
      const Step* before = unread_.empty() || o_.skip_non_finite ? nullptr : &unread_.back();
      unread_.push_back(make_step(training_, o_, before));
      if (done_.step % log_interval_ == 0 || stop_signal != 0 || evaluation_is_due() ||
          done_.step % o_.save_interval == 0)
        read_steps();
    }
  }

 private:
  bool evaluation_is_due() const {
    return (done_.step % o_.eval_interval == 0 || done_.step >= o_.steps) && done_.evaluated_step != done_.step;
  }

  // Reports the steps since the last time; their losses come from the device here.
  void read_steps() {
    std::vector<double> losses, norms;
    for (const Step& step : unread_) {
      losses.push_back(step.loss());
      norms.push_back(step.gradient_norm());
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - unread_since_).count();
    const double tokens_per_second = static_cast<double>(o_.batch * o_.context * o_.grad_accumulation) *
                                     static_cast<double>(unread_.size()) / seconds;
    smoothed_rate_ = smoothed_rate_ > 0 ? 0.9 * smoothed_rate_ + 0.1 * tokens_per_second : tokens_per_second;
    const MemoryStats memory = memory_stats();
    for (size_t i = 0; i < unread_.size(); ++i) {
      const Step& step = unread_[i];
      if (std::isfinite(losses[i]) && std::isfinite(norms[i])) {
        skipped_in_a_row_ = 0;
      } else if (std::isfinite(losses[i]) && step.can_scale_less()) {
        ++done_.skipped;
        progress_.line(fmt::format("step {}: gradients beyond f16 with the loss times {}; left out, {} so far",
                                   step.number, step.scale.item<double>(), done_.skipped));
      } else {
        refuse(step, losses[i]);
      }
      metrics_.write({{"step", step.number},
                      {"loss", losses[i]},
                      {"learning_rate", step.rate},
                      {"gradient_norm", norms[i]},
                      {"bytes_held", memory.current},
                      {"bytes_peak", memory.peak},
                      {"tokens_per_second", tokens_per_second}});
    }
    if (std::isfinite(losses.back())) progress_.step({done_.step, losses.back(), unread_.back().rate, smoothed_rate_});
    unread_.clear();
  }

  // A step that is not finite and was not applied: stops, or counts it.
  void refuse(const Step& step, double loss) {
    const RandomStateGuard as_then(step.random);
    const std::string what = std::isfinite(loss) ? "gradients are not finite" : "the loss is not finite";
    const std::string message =
        fmt::format("step {}: {}, the update was not made; first non-finite tensor: {}", step.number, what,
                    first_non_finite(training_.model, step.batches).value_or("none when computed again"));
    constexpr const char* stopped = "; stopped, checkpoints are as they were (a lower --lr may help";
    if (!o_.skip_non_finite) throw Error(message + stopped + ", --skip-non-finite goes on)");
    ++done_.skipped;
    if (++skipped_in_a_row_ == most_skipped_in_a_row)
      throw Error(fmt::format("{}; left out, the last of {} in a row{})", message, skipped_in_a_row_, stopped));
    progress_.line(fmt::format("{}; left out, {} so far", message, done_.skipped));
  }

  // True when the loss on the held-out part is the best so far.
  bool evaluate_now() {
    const std::optional<double> loss = evaluate(training_.model, data_.split.validation, windows_, o_);
    if (!loss) return false;
    require_finite(*loss);
    done_.evaluated_step = done_.step;
    nlohmann::ordered_json line{{"step", done_.step}, {"validation_loss", *loss}, {"perplexity", std::exp(*loss)}};
    if (bytes_per_token_) line["bits_per_byte"] = *loss / std::numbers::ln2 / *bytes_per_token_;
    metrics_.write(line);
    const bool best = done_.step > 0 && (!done_.best_loss || *loss < *done_.best_loss);
    progress_.line(
        fmt::format("step {}  validation loss {:.4f}{}", human_count(done_.step), *loss, best ? ", the best" : ""));
    if (best) done_.best_loss = loss;
    if (done_.step > 0) done_.worse_evaluations = best ? 0 : done_.worse_evaluations + 1;
    return best;
  }

  // One window of the held-out part tells whether the last update ruined the weights. Its own loss and gradients were
  // finite, and a checkpoint of such weights would take the place of one that training can go on from.
  void check_weights() {
    const NoGrad no_grad;
    training_.model.training = false;
    const Batch batch = first_window();
    require_finite(cross_entropy(training_.model(batch.tokens), batch.targets).item<double>());
    training_.model.training = true;
  }
  Batch first_window() const {
    const std::vector<int64_t> first{windows_.front()};
    return batch_at(data_.split.validation, first, o_.context);
  }
  void require_finite(double validation_loss) {
    if (std::isfinite(validation_loss)) return;
    training_.model.training = false;
    throw Error(fmt::format(
        "step {}: after the update the validation loss is not finite; first non-finite tensor: {}; stopped, "
        "checkpoints are as they were (a lower --lr may help)",
        done_.step, first_non_finite(training_.model, {first_window()}).value_or("unknown")));
  }

  void save(bool best) {
    if (done_.evaluated_step != done_.step) check_weights();
    metrics_.sync();
    const Checkpoint checkpoint = to_checkpoint(training_, o_, data_);
    folder_.require_there();
    save_checkpoint(folder_.checkpoints.string(), checkpoint, {.keep_last = o_.keep, .best = best});
    saved_step_ = done_.step;
    saved_evaluation_ = done_.evaluated_step;
    metrics_.require_there();  // only now: what was learned is saved
  }

  Training& training_;
  Progressed& done_;
  const TrainingData& data_;
  const TrainOptions& o_;
  const RunFolder& folder_;
  MetricsFile& metrics_;
  const std::vector<int64_t> windows_;
  const std::optional<double> bytes_per_token_;
  const int64_t log_interval_;
  const SignalsStopTheLoop signals_;
  Progress progress_;
  int64_t saved_step_;        // of the newest checkpoint
  int64_t saved_evaluation_;  // the last evaluation that it knows of
  int64_t skipped_in_a_row_ = 0;
  std::vector<Step> unread_;
  Clock::time_point unread_since_;
  double smoothed_rate_ = 0;
};

}  // namespace

Ending train(Training& training, const TrainingData& data, const TrainOptions& o, const RunFolder& folder,
             MetricsFile& metrics, bool saved) {
  return Loop(training, data, o, folder, metrics, saved).run();
}

}  // namespace examples
