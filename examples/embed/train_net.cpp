// A layer of one's own in a small net that learns to tell two interleaved spirals apart.
#include <strobe/strobe.h>

#include <cmath>
#include <cstdio>
#include <numbers>
#include <vector>

using namespace strobe;

// x + gate * silu(branch(x)), the gate being one learned number per feature. With its visit this struct is a layer:
// parameters, save, load and to work on it and on whatever contains it.
struct GatedResidual {
  Linear branch;  // dim -> dim
  Tensor gate;    // (dim)

  explicit GatedResidual(int64_t dim)
      : branch(dim, dim, true, 1 / std::sqrt(static_cast<double>(dim))), gate(parameter(full({dim}, 0.5))) {}

  // x: (batch, dim); result: the same shape.
  Tensor operator()(const Tensor& x) const { return x + gate * silu(branch(x)); }

  void visit(auto&& field) const {
    field("branch", branch);
    field("gate", gate);
  }
};

struct Net {
  Linear input;
  std::vector<GatedResidual> hidden;
  Linear output;

  Net(int64_t dim, int depth) : input(2, dim, true, 1.0), output(dim, 2) {
    for (int i = 0; i < depth; ++i) hidden.emplace_back(dim);
  }

  // points: (batch, 2); result: logits (batch, 2).
  Tensor operator()(const Tensor& points) const {
    Tensor x = input(points);
    for (const GatedResidual& layer : hidden) x = layer(x);
    return output(x);
  }

  void visit(auto&& field) const {
    field("input", input);
    field("hidden", hidden);
    field("output", output);
  }
};

struct Spirals {
  Tensor points;   // (2 n, 2), f32
  Tensor classes;  // (2 n), i32
};

// n points on each of two arms that wind around each other one and a half times.
Spirals two_spirals(int64_t n) {
  std::vector<float> points;
  std::vector<int32_t> classes;
  for (int32_t arm = 0; arm < 2; ++arm) {
    for (int64_t i = 0; i < n; ++i) {
      const double radius = 0.25 + 0.75 * static_cast<double>(i) / static_cast<double>(n);
      const double angle = (4 * radius + arm) * std::numbers::pi;
      points.push_back(static_cast<float>(radius * std::cos(angle)));
      points.push_back(static_cast<float>(radius * std::sin(angle)));
      classes.push_back(arm);
    }
  }
  return {from_vector(points, {2 * n, 2}), from_vector(classes, {2 * n})};
}

double accuracy(const Net& net, const Spirals& spirals) {
  const NoGrad no_grad;
  const std::vector<float> logits = net(spirals.points).to_vector<float>();
  const std::vector<int32_t> classes = spirals.classes.to_vector<int32_t>();
  int64_t right = 0;
  for (size_t i = 0; i < classes.size(); ++i) right += (logits[2 * i + 1] > logits[2 * i]) == (classes[i] == 1);
  return static_cast<double>(right) / static_cast<double>(classes.size());
}

int main() {
  const DeviceGuard device(cuda_available() ? Device::cuda() : Device::cpu());  // where new tensors go
  seed(1);
  const Spirals spirals = two_spirals(100);
  const Net net(32, 3);
  AdamW optimizer(parameters(net));
  const CosineSchedule learning_rate{.peak = 6e-3, .warmup_steps = 10, .total_steps = 200};
  std::printf("two spirals, %d points, a net of %d parameters on the %s\n", static_cast<int>(spirals.classes.size()),
              static_cast<int>(num_parameters(net)), default_device() == Device::cpu() ? "CPU" : "GPU");
  for (int step = 0; step <= 200; ++step) {
    const Tensor loss = cross_entropy(net(spirals.points), spirals.classes);
    loss.backward();
    optimizer.step(learning_rate(step));
    optimizer.zero_grad();
    if (step % 20 == 0) std::printf("step %3d  loss %.4f\n", step, loss.item<double>());
  }
  const double right = accuracy(net, spirals);
  std::printf("%.1f%% of the points on the right side\n", 100 * right);
  return right >= 0.99 ? 0 : 1;
}
