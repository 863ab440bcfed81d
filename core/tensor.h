// Tensor: a handle to strided memory on a device, and to its place in the autograd graph.
#pragma once

#include <memory>
#include <vector>

#include "strobe/core/memory.h"
#include "strobe/core/shape.h"

namespace strobe {

struct Node;
struct TensorImpl;

// Copies of a Tensor share data and gradient. Views (reshape, permute, slice, ...) share memory with their base.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(std::shared_ptr<TensorImpl> impl) : impl_(std::move(impl)) {}

  bool defined() const { return impl_ != nullptr; }
  const Shape& shape() const;
  const Shape& strides() const;  // in elements
  int rank() const { return shape().size(); }
  int64_t dim(int axis) const;  // negative axes count from the end
  int64_t size() const;         // number of elements
  DType dtype() const;
  Device device() const;
  Stream stream() const { return current_stream(device()); }
  bool is_contiguous() const;

  // The first element. Its memory is the device's; work queued on the stream may still be writing it.
  void* data() const;
  template <class T>
  T* data() const {
    require_dtype(dtype_of<T>());
    return static_cast<T*>(data());
  }

  // The value of a tensor with one element / all elements in row-major order, converted to T, a C++ type that has a
  // DType (floating to integer saturates); waits for the stream.
  template <class T>
  T item() const {
    require_one_element();
    return to_vector<T>().front();
  }
  template <class T>
  std::vector<T> to_vector() const;

  // A copy on another device or with another dtype; itself when nothing changes. Not differentiable: see cast.
  Tensor to(Device device) const;
  Tensor to(DType dtype) const;

  // Overwrites the elements with those of `source` (same shape; dtype and device are converted), which may share its
  // memory. Not recorded: a pending backward pass sees the new values.
  void copy_from(const Tensor& source) const;
  // Makes this handle, and every copy of it, refer to the memory of `source` instead. Drops a gradient. A backward
  // pass that was pending is refused.
  void assign(const Tensor& source) const;

  bool requires_grad() const;
  // Marks a floating-point leaf as something to differentiate by; returns it.
  const Tensor& set_requires_grad(bool value = true) const;
  // The sum of gradients that backward passes left here; undefined before the first.
  Tensor grad() const;
  // Replaces it, outside the graph; the memory is shared with `gradient`.
  void set_grad(const Tensor& gradient) const;
  // Gradients of this one-element tensor with respect to all leaves it was computed from; frees the graph.
  void backward() const;
  // As above for a tensor of any shape, given the gradient with respect to it.
  void backward(const Tensor& gradient) const;
  // The same memory outside the graph.
  Tensor detach() const;

  const std::shared_ptr<TensorImpl>& impl() const;

 private:
  void require_dtype(DType dtype) const;
  void require_one_element() const;

  std::shared_ptr<TensorImpl> impl_;
};

struct TensorImpl {
  std::shared_ptr<Storage> storage;
  Shape shape;
  Shape strides;
  int64_t offset = 0;  // in elements
  DType dtype = DType::f32;
  bool requires_grad = false;
  Tensor grad;
  std::shared_ptr<Node> node;  // the operation that made it; null for leaves
  int output_index = 0;        // which of the node's outputs it is
  uint64_t assignments = 0;    // how often assign() gave it other memory
};

// Uninitialized, row-major.
Tensor empty(const Shape& shape, DType dtype = DType::f32, Device device = default_device());
Tensor empty_like(const Tensor& x);
// Scratch memory for a kernel: i32 elements, at least `bytes` bytes.
Tensor empty_bytes(size_t bytes, Device device);

Tensor full(const Shape& shape, double value, DType dtype = DType::f32, Device device = default_device());
Tensor zeros(const Shape& shape, DType dtype = DType::f32, Device device = default_device());
Tensor ones(const Shape& shape, DType dtype = DType::f32, Device device = default_device());
Tensor zeros_like(const Tensor& x);

// The integers 0, 1, ..., count - 1.
Tensor arange(int64_t count, DType dtype = DType::i64, Device device = default_device());

// Takes values in row-major order; their number must be that of the shape.
template <class T>
Tensor from_vector(const std::vector<T>& values, const Shape& shape, Device device = default_device());

// A tensor over `base`'s memory with other sizes, strides and offset (in elements, from the storage's start).
Tensor view_of(const Tensor& base, const Shape& shape, const Shape& strides, int64_t offset);

// The address of x's memory; null for an undefined x, by which kernels know an operand that is absent.
inline void* data_or_null(const Tensor& x) { return x.defined() ? x.data() : nullptr; }

// True when no other tensor handle or view refers to x's memory: an operation may then write over it.
bool owns_storage_alone(const Tensor& x);

// Throws unless x is defined; `argument` names it in the message.
void require_defined(const char* operation, const char* argument, const Tensor& x);
// Throws unless both have one dtype and live on one device.
void require_same_kind(const char* operation, const char* argument_a, const Tensor& a, const char* argument_b,
                       const Tensor& b);
// Throws unless x is defined and floating-point.
void require_floating(const char* operation, const char* argument, const Tensor& x);

}  // namespace strobe
