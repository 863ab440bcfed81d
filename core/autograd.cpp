#include "strobe/core/autograd.h"

#include <atomic>
#include <map>
#include <unordered_set>
#include <utility>

#include "strobe/core/ops.h"
#include "strobe/kernels/pointwise.h"

namespace strobe {
namespace {

thread_local bool recording = true;
thread_local const std::function<void(const Operation&)>* observer = nullptr;
std::atomic<uint64_t> next_node_id{1};

std::shared_ptr<Node> make_node(const char* name, const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                                std::function<Grads(const Grads&)> backward) {
  auto node = std::make_shared<Node>();
  node->name = name;
  node->id = next_node_id.fetch_add(1);
  node->memory_tag = MemoryTag::current();
  node->num_outputs = static_cast<int>(outputs.size());
  node->backward = std::move(backward);
  for (const Tensor& input : inputs) {
    Node::Edge& edge = node->inputs.emplace_back();
    if (!input.defined()) continue;
    edge.input = input.impl();
    edge.assignments = input.impl()->assignments;
    if (!input.requires_grad()) continue;
    edge.node = input.impl()->node;
    edge.output_index = input.impl()->output_index;
    if (edge.node == nullptr) edge.leaf = input.impl();
    edge.shape = input.shape();
    edge.dtype = input.dtype();
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    TensorImpl& output = *outputs[i].impl();
    output.requires_grad = is_floating(output.dtype);
    output.node = node;
    output.output_index = static_cast<int>(i);
  }
  return node;
}

// Shows an operation to the observer, which may itself compute without being shown that.
void show(const Operation& operation) {
  if (observer == nullptr) return;
  const auto* const shown_to = std::exchange(observer, nullptr);
  const NoGrad no_grad;
  (*shown_to)(operation);
  observer = shown_to;
}

void show_backward(const Node& node, const std::vector<Node::Edge>& edges, const Grads& grads) {
  if (observer == nullptr) return;
  std::vector<Tensor> inputs;
  for (const Node::Edge& edge : edges) inputs.emplace_back(edge.input.lock());
  show({node.name, inputs, grads, true});
}

// Adds `gradient` to `sum`, in place when nothing else can see that memory.
void add_gradient(Tensor& sum, const Tensor& gradient) {
  if (!sum.defined()) {
    sum = gradient;
  } else if (owns_storage_alone(sum) && sum.is_contiguous()) {
    const Tensor source = contiguous(gradient);
    kernels::accumulate({.dst = sum.data(), .src = source.data(), .size = sum.size(), .dtype = sum.dtype()},
                        sum.stream());
  } else {
    sum = sum + gradient;
  }
}

void check_gradient(const Node& node, const Node::Edge& edge, const Tensor& gradient) {
  STROBE_CHECK(gradient.shape() == edge.shape, node.name, ": gradient ", gradient.shape(), " does not match input ",
               edge.shape);
  STROBE_CHECK(gradient.dtype() == edge.dtype, node.name, ": gradient of dtype ", gradient.dtype(),
               " does not match input of dtype ", edge.dtype);
}

// Throws when part of the graph has been freed, or is older than `oldest`, before any gradient is touched.
void check_graph(const std::shared_ptr<Node>& root, uint64_t oldest) {
  std::vector<const Node*> pending{root.get()};
  std::unordered_set<const Node*> seen{root.get()};
  while (!pending.empty()) {
    const Node* node = pending.back();
    pending.pop_back();
    STROBE_CHECK(node->backward != nullptr, "backward: the graph of '", node->name,
                 "' was freed by an earlier backward, expected a fresh forward pass");
    STROBE_CHECK(node->id >= oldest, "checkpoint: f uses the result of '", node->name,
                 "' that was computed outside of it, expected it to come through x");
    for (const Node::Edge& edge : node->inputs) {
      const std::shared_ptr<TensorImpl> input = edge.input.lock();
      STROBE_CHECK(input == nullptr || input->assignments == edge.assignments, "backward: an input of '", node->name,
                   "' was assigned to after it was used, expected a fresh forward pass");
      if (edge.node != nullptr && seen.insert(edge.node.get()).second) pending.push_back(edge.node.get());
    }
  }
}

void accumulate_into_leaf(const std::shared_ptr<TensorImpl>& leaf, const Tensor& gradient) {
  // A gradient that shares memory with something else (a view, a broadcast, the caller) is copied, so that later sums
  // may be written in place.
  if (leaf->grad.defined()) {
    add_gradient(leaf->grad, gradient);
  } else if (gradient.is_contiguous() && owns_storage_alone(gradient)) {
    leaf->grad = gradient.detach();
  } else {
    leaf->grad = empty_like(gradient);
    leaf->grad.copy_from(gradient);
  }
}

void run_graph(const Tensor& root, const Tensor& gradient, uint64_t oldest) {
  require_same_kind("backward", "gradient", gradient, "tensor", root);
  STROBE_CHECK(gradient.shape() == root.shape(), "backward: gradient ", gradient.shape(), " given, expected shape ",
               root.shape());
  STROBE_CHECK(root.requires_grad(),
               "backward: the tensor depends on nothing that requires a gradient, expected one computed in gradient "
               "mode from a tensor with set_requires_grad()");
  const NoGrad no_grad;
  if (root.impl()->node == nullptr) return accumulate_into_leaf(root.impl(), gradient);
  check_graph(root.impl()->node, oldest);

  struct Pending {
    std::shared_ptr<Node> node;
    Grads douts;
  };
  std::map<uint64_t, Pending, std::greater<>> pending;
  const auto send = [&pending](const std::shared_ptr<Node>& node, int output_index, const Tensor& dout) {
    Pending& entry = pending[node->id];
    entry.node = node;
    entry.douts.resize(static_cast<size_t>(node->num_outputs));
    add_gradient(entry.douts[static_cast<size_t>(output_index)], dout);
  };
  send(root.impl()->node, root.impl()->output_index, gradient);

  while (!pending.empty()) {
    Pending current = std::move(pending.begin()->second);
    pending.erase(pending.begin());
    const std::vector<Node::Edge> inputs = std::move(current.node->inputs);
    Grads grads;
    {
      const auto backward = std::move(current.node->backward);
      current.node->backward = nullptr;
      const MemoryTag tag(current.node->memory_tag);
      grads = backward(current.douts);
    }
    current.douts.clear();
    show_backward(*current.node, inputs, grads);
    STROBE_CHECK(grads.size() == inputs.size(), current.node->name, ": backward gave ", grads.size(),
                 " gradients, expected ", inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor input_gradient = std::move(grads[i]);
      const Node::Edge& edge = inputs[i];
      if (!input_gradient.defined() || (edge.node == nullptr && edge.leaf == nullptr)) continue;
      check_gradient(*current.node, edge, input_gradient);
      if (edge.node != nullptr) {
        send(edge.node, edge.output_index, input_gradient);
      } else {
        accumulate_into_leaf(edge.leaf, input_gradient);
      }
    }
  }
}

}  // namespace

// Frees a long chain of nodes in a loop: the default would recurse once per operation and overflow the stack.
Node::~Node() {
  std::vector<std::shared_ptr<Node>> doomed;
  const auto collect = [&doomed](Node& node) {
    // The closure holds tensors, whose nodes are those of the edges: the edges are moved out first.
    for (Edge& edge : node.inputs) {
      if (edge.node != nullptr) doomed.push_back(std::move(edge.node));
    }
    node.inputs.clear();
    node.backward = nullptr;
  };
  collect(*this);
  while (!doomed.empty()) {
    const std::shared_ptr<Node> node = std::move(doomed.back());
    doomed.pop_back();
    if (node.use_count() == 1) collect(*node);
  }
}

std::vector<Tensor> record(const char* name, std::vector<Tensor> outputs, const std::vector<Tensor>& inputs,
                           std::function<Grads(const Grads& douts)> backward) {
  show({name, inputs, outputs, false});
  if (needs_grad(inputs)) make_node(name, outputs, inputs, std::move(backward));
  return outputs;
}

Tensor record(const char* name, Tensor output, const std::vector<Tensor>& inputs,
              std::function<Grads(const Tensor& dout)> backward) {
  if (observer != nullptr) show({name, inputs, {output}, false});
  if (needs_grad(inputs)) {
    make_node(name, {output}, inputs,
              [backward = std::move(backward)](const Grads& douts) { return backward(douts.front()); });
  }
  return output;
}

bool needs_grad(const std::vector<Tensor>& inputs) {
  return recording && std::any_of(inputs.begin(), inputs.end(),
                                  [](const Tensor& input) { return input.defined() && input.requires_grad(); });
}

bool grad_enabled() { return recording; }

NoGrad::NoGrad(bool enabled) : previous_(recording) { recording = enabled; }
NoGrad::~NoGrad() { recording = previous_; }

OperationObserver::OperationObserver(std::function<void(const Operation&)> f)
    : observe_(std::move(f)), previous_(observer) {
  observer = &observe_;
}
OperationObserver::~OperationObserver() { observer = previous_; }

void run_backward(const Tensor& root, const Tensor& gradient) { run_graph(root, gradient, 0); }

Tensor checkpoint(const std::function<Tensor(const Tensor&)>& f, const Tensor& x) {
  require_floating("checkpoint", "x", x);
  if (!grad_enabled()) return f(x);
  const RandomState state = random_state();
  Tensor y;
  {
    const NoGrad no_grad;
    y = f(x).detach();
  }
  // Recorded whether or not x requires a gradient: the parameters inside f may.
  make_node("checkpoint", {y}, {x}, [f, x, state](const Grads& douts) -> Grads {
    const Tensor input = x.detach().set_requires_grad(x.requires_grad());
    const uint64_t oldest = next_node_id.load();
    Tensor output;
    {
      const EnableGrad enable_grad;
      const RandomStateGuard same_numbers(state);
      output = f(input);
    }
    if (output.requires_grad()) run_graph(output, douts.front(), oldest);
    return {input.grad()};
  });
  return y;
}

}  // namespace strobe
