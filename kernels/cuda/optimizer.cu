// SGD, AdamW and gradient clipping on CUDA: one launch for all parameters of a dtype.
#include "strobe/kernels/optimizer.h"

#include <cmath>

#include "strobe/kernels/cuda/cuda.h"
#include "strobe/kernels/math.h"

namespace strobe::kernels::cuda {
namespace {

using namespace strobe::cuda;

constexpr int threads = 256;

// As many arrays as one launch handles, passed to the kernel by value (at most 32 KiB). Each is cut into parts, and
// part p of the launch belongs to the last array whose first_part is at most p.
template <class Item>
struct Batch {
  static constexpr int capacity = 32000 / static_cast<int>(sizeof(Item) + sizeof(int64_t));
  int count = 0;
  int64_t parts = 0;
  int64_t first_part[capacity];
  Item items[capacity];

  void add(const Item& item, int64_t parts_of_item) {
    first_part[count] = parts;
    items[count++] = item;
    parts += parts_of_item;
  }

  __device__ int array_of(int64_t part) const {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_part[middle] <= part ? low : high) = middle;
    }
    return low;
  }
};

// Elements that a thread takes at a time: 16 bytes of the optimizer's own arrays.
template <class T>
inline constexpr int width = 16 / static_cast<int>(sizeof(accumulate_t<T>));

constexpr int64_t update_part = 16 * threads;  // elements of a block

template <class T>
struct SgdItem {
  using A = accumulate_t<T>;
  static constexpr int states = 1;
  T* parameter;
  const T* gradient;
  A* state[states];  // velocity
  A* master;
  int64_t size;
  A rate;
  A momentum;
  A decay;

  SgdItem() = default;
  SgdItem(const SgdArgs& args, const SgdParameter& own)
      : parameter(static_cast<T*>(own.parameter)),
        gradient(static_cast<const T*>(own.gradient)),
        state{static_cast<A*>(own.velocity)},
        master(static_cast<A*>(own.master)),
        size(own.size),
        rate(static_cast<A>(args.learning_rate)),
        momentum(static_cast<A>(args.momentum)),
        decay(static_cast<A>(own.weight_decay)) {}

  __device__ void leave_out() const {}
  __device__ void correct_bias() {}
  __device__ A update(A value, A g, A (&own)[states]) const {
    own[0] = momentum * own[0] + (g + decay * value);
    return value - rate * own[0];
  }
};

template <class T>
struct AdamWItem {
  using A = accumulate_t<T>;
  static constexpr int states = 2;
  T* parameter;
  const T* gradient;
  A* state[states];  // exp_avg, exp_avg_sq
  A* master;
  int64_t size;
  A beta1, rest1, beta2, rest2, rate, root_scale, eps, decay;
  int64_t step;
  int64_t* skipped;
  double learning_rate, betas[2];

  AdamWItem() = default;
  AdamWItem(const AdamWArgs& args, const AdamWParameter& own)
      : parameter(static_cast<T*>(own.parameter)),
        gradient(static_cast<const T*>(own.gradient)),
        state{static_cast<A*>(own.exp_avg), static_cast<A*>(own.exp_avg_sq)},
        master(static_cast<A*>(own.master)),
        size(own.size),
        beta1(static_cast<A>(args.beta1)),
        rest1(static_cast<A>(1 - args.beta1)),
        beta2(static_cast<A>(args.beta2)),
        rest2(static_cast<A>(1 - args.beta2)),
        eps(static_cast<A>(args.eps)),
        decay(static_cast<A>(args.learning_rate * own.weight_decay)),
        step(own.step),
        skipped(own.skipped),
        learning_rate(args.learning_rate),
        betas{args.beta1, args.beta2} {
    set_bias_correction(step);
  }

  __host__ __device__ void set_bias_correction(int64_t updates) {
    const double t = static_cast<double>(updates);
    rate = static_cast<A>(learning_rate / (1 - ::pow(betas[0], t)));
    root_scale = static_cast<A>(1 / ::sqrt(1 - ::pow(betas[1], t)));
  }
  __device__ void leave_out() const { ++*skipped; }
  // The host counts all steps; it does not know which ones were left out. All threads of the block must call it.
  __device__ void correct_bias() {
    if (skipped == nullptr || *skipped == 0) return;
    __shared__ A corrected[2];
    if (threadIdx.x == 0) {
      set_bias_correction(step - *skipped);
      corrected[0] = rate, corrected[1] = root_scale;
    }
    __syncthreads();
    rate = corrected[0], root_scale = corrected[1];
    __syncthreads();
  }

  __device__ A update(A value, A g, A (&own)[states]) const {
    own[0] = beta1 * own[0] + rest1 * g;
    own[1] = beta2 * own[1] + rest2 * (g * g);
    return value - decay * value - rate * own[0] / (sqrt_(own[1]) * root_scale + eps);
  }
};

template <class T, class Item>
__device__ void update_element(const Item& item, int64_t i, accumulate_t<T> factor) {
  using A = accumulate_t<T>;
  A own[Item::states];
  for (int k = 0; k < Item::states; ++k) own[k] = item.state[k] != nullptr ? item.state[k][i] : A(0);
  const A value = item.master != nullptr ? item.master[i] : A(item.parameter[i]);
  const A updated = item.update(value, A(item.gradient[i]) * factor, own);
  for (int k = 0; k < Item::states; ++k) {
    if (item.state[k] != nullptr) item.state[k][i] = own[k];
  }
  if (item.master != nullptr) item.master[i] = updated;
  item.parameter[i] = T(updated);
}

template <class T, class Item>
__global__ void __launch_bounds__(threads)
    update_parts(const __grid_constant__ Batch<Item> batch, const double* grad_factor) {
  using A = accumulate_t<T>;
  constexpr int n = width<T>;
  const A factor = static_cast<A>(grad_factor != nullptr ? *grad_factor : 1);
  for (int64_t part = blockIdx.x; part < batch.parts; part += gridDim.x) {
    const int array = batch.array_of(part);
    Item item = batch.items[array];
    const int64_t begin = (part - batch.first_part[array]) * update_part;
    if (!isfinite(factor)) {
      if (begin == 0 && threadIdx.x == 0) item.leave_out();
      continue;
    }
    item.correct_bias();
    const int64_t end = begin + update_part < item.size ? begin + update_part : item.size;
    bool packed = reinterpret_cast<uintptr_t>(item.parameter) % 16 == 0 &&
                  reinterpret_cast<uintptr_t>(item.gradient) % 16 == 0 &&
                  reinterpret_cast<uintptr_t>(item.master) % 16 == 0;
    for (A* state : item.state) packed = packed && reinterpret_cast<uintptr_t>(state) % 16 == 0;
    for (int64_t i = begin + int64_t{threadIdx.x} * n; i < end; i += threads * n) {
      if (!packed || i + n > end) {
        for (int64_t j = i; j < i + n && j < end; ++j) update_element<T>(item, j, factor);
        continue;
      }
      const Pack<T, n> gradient = load_pack<T, n>(item.gradient + i);
      Pack<A, n> states[Item::states];
      for (int k = 0; k < Item::states; ++k) {
        states[k] = item.state[k] != nullptr ? load_pack<A, n>(item.state[k] + i) : Pack<A, n>{};
      }
      Pack<A, n> value;
      if (item.master != nullptr) {
        value = load_pack<A, n>(item.master + i);
      } else {
        const Pack<T, n> stored = load_pack<T, n>(item.parameter + i);
        for (int j = 0; j < n; ++j) value[j] = A(stored[j]);
      }
      Pack<T, n> rounded;
#pragma unroll
      for (int j = 0; j < n; ++j) {
        A own[Item::states];
        for (int k = 0; k < Item::states; ++k) own[k] = states[k][j];
        value[j] = item.update(value[j], A(gradient[j]) * factor, own);
        for (int k = 0; k < Item::states; ++k) states[k][j] = own[k];
        rounded[j] = T(value[j]);
      }
      for (int k = 0; k < Item::states; ++k) {
        if (item.state[k] != nullptr) store_pack<A, n>(item.state[k] + i, states[k]);
      }
      if (item.master != nullptr) store_pack<A, n>(item.master + i, value);
      store_pack<T, n>(item.parameter + i, rounded);
    }
  }
}

// Calls flush(batch) for batches of the list's entries of dtype T; add(batch, entry, its position in the list) fills
// them.
template <class T, class Item, class Entry, class Add, class Flush>
void in_batches(const Entry* list, int64_t count, Add&& add, Flush&& flush) {
  Batch<Item> batch;
  for (int64_t p = 0; p < count; ++p) {
    if (list[p].dtype != dtype_of<T>() || list[p].size == 0) continue;
    if (batch.count == Batch<Item>::capacity) {
      flush(batch);
      batch.count = 0;
      batch.parts = 0;
    }
    add(batch, list[p], p);
  }
  if (batch.count > 0) flush(batch);
}

template <class F>
void for_each_floating(F&& f) {
  f.template operator()<float>();
  f.template operator()<double>();
  f.template operator()<bfloat16>();
  f.template operator()<float16>();
}

template <template <class> class ItemOf, class Args>
void update_all(const char* name, const Args& args, const Stream& stream) {
  for_each_floating([&]<class T>() {
    using Item = ItemOf<T>;
    in_batches<T, Item>(
        args.parameters, args.count,
        [&](Batch<Item>& batch, const auto& own, int64_t) {
          batch.add(Item(args, own), ceil_div(own.size, update_part));
        },
        [&](const Batch<Item>& batch) {
          launch(name, update_parts<T, Item>, grid_size(batch.parts, 1), threads, 0, stream, batch, args.grad_factor);
        });
  });
}

template <class T>
struct ArrayItem {
  T* data;
  int64_t size;
  double* parts;  // of sum_squares
};

template <class T>
__global__ void __launch_bounds__(threads) sum_parts(const __grid_constant__ Batch<ArrayItem<T>> batch) {
  constexpr int n = 16 / static_cast<int>(sizeof(T));
  for (int64_t part = blockIdx.x; part < batch.parts; part += gridDim.x) {
    const int array = batch.array_of(part);
    const ArrayItem<T>& item = batch.items[array];
    const int64_t own = part - batch.first_part[array];
    const int64_t begin = own * squares_part;
    const int64_t end = begin + squares_part < item.size ? begin + squares_part : item.size;
    const bool packed = reinterpret_cast<uintptr_t>(item.data) % 16 == 0;
    double total = 0;
    for (int64_t i = begin + int64_t{threadIdx.x} * n; i < end; i += threads * n) {
      if (packed && i + n <= end) {
        const Pack<T, n> pack = load_pack<T, n>(item.data + i);
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const double value = static_cast<double>(accumulate_t<T>(pack[j]));
          total += value * value;
        }
      } else {
        for (int64_t j = i; j < i + n && j < end; ++j) {
          const double value = static_cast<double>(accumulate_t<T>(item.data[j]));
          total += value * value;
        }
      }
    }
    total = block_sum(total);
    if (threadIdx.x == 0) item.parts[own] = total;
  }
}

template <class T>
__global__ void __launch_bounds__(threads)
    scale_parts(const __grid_constant__ Batch<ArrayItem<T>> batch, accumulate_t<T> factor) {
  constexpr int n = 16 / static_cast<int>(sizeof(T));
  for (int64_t part = blockIdx.x; part < batch.parts; part += gridDim.x) {
    const int array = batch.array_of(part);
    const ArrayItem<T>& item = batch.items[array];
    const int64_t begin = (part - batch.first_part[array]) * update_part;
    const int64_t end = begin + update_part < item.size ? begin + update_part : item.size;
    const bool packed = reinterpret_cast<uintptr_t>(item.data) % 16 == 0;
    for (int64_t i = begin + int64_t{threadIdx.x} * n; i < end; i += threads * n) {
      if (packed && i + n <= end) {
        Pack<T, n> pack = load_pack<T, n>(item.data + i);
#pragma unroll
        for (int j = 0; j < n; ++j) pack[j] = T(accumulate_t<T>(pack[j]) * factor);
        store_pack<T, n>(item.data + i, pack);
      } else {
        for (int64_t j = i; j < i + n && j < end; ++j) item.data[j] = T(accumulate_t<T>(item.data[j]) * factor);
      }
    }
  }
}

__global__ void __launch_bounds__(1024) sum_of_parts(const ClipFactorArgs args) {
  double total = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < args.count; i += blockDim.x) total += args.parts[i];
  total = block_sum(total);
  if (threadIdx.x == 0) finish_clip_factor(args, total);
}

__global__ void adapt(const LossScaleArgs args) { finish_loss_scale(args); }

}  // namespace

void sgd_step(const SgdArgs& args, const Stream& stream) { update_all<SgdItem>("sgd_step", args, stream); }

void adamw_step(const AdamWArgs& args, const Stream& stream) { update_all<AdamWItem>("adamw_step", args, stream); }

void sum_squares(const SumSquaresArgs& args, const Stream& stream) {
  for_each_floating([&]<class T>() {
    int64_t next = 0;  // the first array whose parts are not counted yet
    double* parts = args.parts;
    in_batches<T, ArrayItem<T>>(
        args.gradients, args.count,
        [&](Batch<ArrayItem<T>>& batch, const GradientArray& own, int64_t position) {
          for (; next < position; ++next) parts += squares_parts(args.gradients[next].size);
          batch.add({static_cast<T*>(own.data), own.size, parts}, squares_parts(own.size));
        },
        [&](const Batch<ArrayItem<T>>& batch) {
          launch("sum_squares", sum_parts<T>, grid_size(batch.parts, 1), threads, 0, stream, batch);
        });
  });
}

void clip_factor(const ClipFactorArgs& args, const Stream& stream) {
  launch("clip_factor", sum_of_parts, 1, 1024, 0, stream, args);
}

void adapt_loss_scale(const LossScaleArgs& args, const Stream& stream) {
  launch("adapt_loss_scale", adapt, 1, 1, 0, stream, args);
}

void scale(const ScaleArgs& args, const Stream& stream) {
  for_each_floating([&]<class T>() {
    in_batches<T, ArrayItem<T>>(
        args.gradients, args.count,
        [&](Batch<ArrayItem<T>>& batch, const GradientArray& own, int64_t) {
          batch.add({static_cast<T*>(own.data), own.size, nullptr}, ceil_div(own.size, update_part));
        },
        [&](const Batch<ArrayItem<T>>& batch) {
          launch("scale", scale_parts<T>, grid_size(batch.parts, 1), threads, 0, stream, batch,
                 static_cast<accumulate_t<T>>(args.factor));
        });
  });
}

}  // namespace strobe::kernels::cuda
