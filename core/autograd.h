// Reverse-mode automatic differentiation: operations record closures, backward runs them in reverse and frees them.
#pragma once

#include <functional>
#include <vector>

#include "strobe/core/tensor.h"

namespace strobe {

using Grads = std::vector<Tensor>;

// One recorded operation.
struct Node {
  // Where the gradient of an input goes: to the node that made it, or into the leaf itself.
  struct Edge {
    std::shared_ptr<Node> node;
    int output_index = 0;
    std::shared_ptr<TensorImpl> leaf;
    std::weak_ptr<TensorImpl> input;  // alive while anything, such as the closure, may still read it
    uint64_t assignments = 0;         // of the input when it was used
    Shape shape;
    DType dtype = DType::f32;
  };

  const char* name = "";
  uint64_t id = 0;  // grows with every recorded operation, so descending order is a reverse topological order
  int memory_tag = 0;
  int num_outputs = 1;
  std::vector<Edge> inputs;
  std::function<Grads(const Grads& douts)> backward;  // empty once it has run

  ~Node();
};

// Attaches `backward` to the freshly made `output` of an operation and returns it. Given the gradient of the output
// the closure returns one gradient per input, in order, of the input's shape and dtype; undefined where an input
// needs none. Outside of gradient mode, or when no input requires a gradient, the closure is dropped at once.
// Closures capture tensors by name (an output as out.detach(), or it would keep itself alive) and run under NoGrad.
Tensor record(const char* name, Tensor output, const std::vector<Tensor>& inputs,
              std::function<Grads(const Tensor& dout)> backward);

// The same for an operation with several outputs; douts holds an undefined tensor for an output no gradient reached.
std::vector<Tensor> record(const char* name, std::vector<Tensor> outputs, const std::vector<Tensor>& inputs,
                           std::function<Grads(const Grads& douts)> backward);

// True when record would keep a closure: gradients are on and one of the (defined) inputs requires one.
bool needs_grad(const std::vector<Tensor>& inputs);

// Whether operations on this thread are recorded.
bool grad_enabled();

// Nothing is recorded on this thread until the end of the scope.
class NoGrad {
 public:
  NoGrad() : NoGrad(false) {}
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 protected:
  explicit NoGrad(bool enabled);

 private:
  bool previous_;
};

// Recording is on again, within a NoGrad.
class EnableGrad : public NoGrad {
 public:
  EnableGrad() : NoGrad(true) {}
};

// An operation that has just run on this thread.
struct Operation {
  const char* name;
  const std::vector<Tensor>& inputs;   // undefined where an input is absent, or gone by the time backward runs
  const std::vector<Tensor>& results;  // forward its outputs; backward the gradients of its inputs, in their order
  bool backward;
};

// Shows f every operation on this thread until the end of the scope, forward and backward, in the order in which they
// run, those that a backward pass uses among them: to find out where a value comes from. The innermost observer sees
// them, but not what f itself computes.
class OperationObserver {
 public:
  explicit OperationObserver(std::function<void(const Operation&)> f);
  ~OperationObserver();
  OperationObserver(const OperationObserver&) = delete;
  OperationObserver& operator=(const OperationObserver&) = delete;

 private:
  std::function<void(const Operation&)> observe_;
  const std::function<void(const Operation&)>* previous_;
};

// Adds to the gradient of every leaf that `root` depends on, given the gradient of root, and frees the graph.
void run_backward(const Tensor& root, const Tensor& gradient);

// f(x), of which only x is kept: backward computes f again, with the same random numbers, and differentiates that
// (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). f may use leaves such as parameters freely;
// everything else that has a history must come through x.
Tensor checkpoint(const std::function<Tensor(const Tensor&)>& f, const Tensor& x);

}  // namespace strobe
