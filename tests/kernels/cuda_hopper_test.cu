// The building blocks of the Hopper kernels one by one: products of one tile in each operand form, TMA with what lies
// outside of the tensor, a ring of barriers, bulk copies and additions, transposed stores.
#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include "strobe/kernels/cuda/cuda.h"
#include "strobe/kernels/cuda/hopper.cuh"
#include "strobe/kernels/cuda/tensor_map.h"
#include "support/gpu.h"
#include "support/gpu_operand.h"

using namespace strobe;
using namespace strobe::kernels;
using namespace strobe::kernels::cuda;
using namespace strobe::kernels::cuda::hopper;
using namespace strobe::testing;

namespace {

// Values on the GPU.
template <class T>
class Array {
 public:
  explicit Array(const std::vector<T>& values) : size_(values.size()), memory_(values.size() * sizeof(T)) {
    std::vector<std::byte> bytes(size_ * sizeof(T));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    memory_.write(bytes);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  std::vector<T> read() const {
    std::vector<T> values(size_, T(0.0f));
    const std::vector<std::byte> bytes = memory_.read(size_ * sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

 private:
  size_t size_;
  GpuMemory memory_;
};

template <class T>
std::vector<T> small_integers(size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> pick(-8, 8);
  std::vector<T> values(count, T(0.0f));
  for (T& x : values) x = T(static_cast<float>(pick(random)));
  return values;
}

// Puts a (rows, columns) matrix into a tile as TMA does.
template <class T>
__device__ void copy_to_tile(char* tile, const T* matrix, int rows, int columns) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += static_cast<int>(blockDim.x)) {
    const int row = i / columns, column = i % columns;
    *reinterpret_cast<T*>(tile + swizzled_offset(rows, row, column / 8) + column % 8 * 2) = matrix[i];
  }
}

// out (64, n) = a (64, 64) b^T with b (n, 64), or a b with b (64, n), as one warpgroup.
template <class T, int n, bool from_registers, bool b_rows>
__global__ void __launch_bounds__(128) multiply_kernel(float* out, const T* a, const T* b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(1024) char a_tile[64 * 128], b_tile[2 * 128 * 128];
  copy_to_tile(a_tile, a, 64, 64);
  copy_to_tile(b_tile, b, b_rows ? 64 : n, b_rows ? n : 64);
  fence_async_proxy();
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t rows[4][4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices(rows[step], shared_address(a_tile) + static_cast<uint32_t>(swizzled_offset(64, 16 * warp + lane % 16,
                                                                                             2 * step + lane / 16)));
  }
  float sums[n / 2];
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint64_t b_step = wgmma_operand(b_tile, 64 * 128) + step * (b_rows ? 16 * 128 : 32) / 16;
    if constexpr (from_registers) {
      Wgmma<T, n>::template registers<b_rows>(sums, rows[step], b_step, step > 0);
    } else {
      Wgmma<T, n>::template tiles<b_rows>(sums, wgmma_operand(a_tile) + step * 32 / 16, b_step, step > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(sums);
#pragma unroll
  for (int i = 0; i < n / 2; ++i) {
    out[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * n + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sums[i];
  }
#endif
}

template <class T, int n, bool from_registers, bool b_rows>
void check_product(std::mt19937& random) {
  const std::vector<T> a = small_integers<T>(64 * 64, random), b = small_integers<T>(64 * n, random);
  const Array<T> gpu_a(a), gpu_b(b);
  const Array<float> out(std::vector<float>(64 * n, NAN));
  strobe::cuda::launch("multiply", multiply_kernel<T, n, from_registers, b_rows>, 1, 128, 0, gpu_stream(), out.data(),
                       gpu_a.data(), gpu_b.data());
  const std::vector<float> given = out.read();
  int wrong = 0;
  for (size_t i = 0; i < 64; ++i) {
    for (size_t j = 0; j < n; ++j) {
      float sum = 0;
      for (size_t k = 0; k < 64; ++k) {
        sum += static_cast<float>(a[i * 64 + k]) * static_cast<float>(b_rows ? b[k * n + j] : b[j * 64 + k]);
      }
      wrong += given[i * n + j] != sum;
    }
  }
  CAPTURE(n);
  CAPTURE(from_registers);
  CAPTURE(b_rows);
  CHECK(wrong == 0);
}

// out (64, 64) = a (64, 16) b (64, 16)^T, laid out in squares; `repeated`: the first square of a stands for all.
__global__ void __launch_bounds__(128)
    multiply_squares_kernel(float* out, const bfloat16* a, const bfloat16* b, bool repeated) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(1024) bfloat16 squares[2][64 * 16];
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 16; i += 128) {
    const int row = i / 16, column = i % 16, place = (row / 8 * 2 + column / 8) * 64 + row % 8 * 8 + column % 8;
    squares[0][place] = a[i];
    squares[1][place] = b[i];
  }
  fence_async_proxy();
  __syncthreads();
  const uint32_t place = shared_address(squares) >> 4 & 0x3fff;
  const uint64_t all = wgmma_squares(place, 0, 256, 128), first = wgmma_squares(place, 0, 0, 0);
  float sums[32];
  wgmma_fence();
  Wgmma<bfloat16, 64>::tiles(sums, repeated ? first : all, wgmma_squares(place, sizeof(squares[0]), 256, 128), false);
  wgmma_commit();
  wgmma_wait<0>();
  hold(sums);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    out[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * 64 + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sums[i];
  }
#endif
}

__global__ void __launch_bounds__(128)
    load_kernel(const __grid_constant__ CUtensorMap map, bfloat16* out, int dim, int row, int head, int batch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(1024) char tile[64 * 128];
  __shared__ uint64_t full;
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 128; i += 128) tile[i] = static_cast<char>(0xff);
  if (threadIdx.x == 0) {
    barrier_init(&full, 1);
    barrier_init_fence();
  }
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect(&full, 64 * 128);
    tma_load(tile, map, &full, dim, row, head, batch);
  }
  barrier_wait(&full, 0);
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 64; i += 128) {
    out[i] = *reinterpret_cast<bfloat16*>(tile + swizzled_offset(64, i / 64, i % 64 / 8) + i % 8 * 2);
  }
#endif
}

// One thread fills places of a ring with the numbers of rounds, warpgroups of consumers add up what they find.
[[maybe_unused]] constexpr int ring_stages = 3;
constexpr int consumers = 2;
__global__ void __launch_bounds__(128 * (consumers + 1)) ring_kernel(unsigned long long* sums, int rounds) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ uint64_t full[ring_stages], empty[ring_stages];
  __shared__ int places[ring_stages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < ring_stages; ++stage) {
      barrier_init(&full[stage], 1);
      barrier_init(&empty[stage], 4 * consumers);
    }
    barrier_init_fence();
  }
  __syncthreads();
  Ring<ring_stages> ring;
  uint32_t noise = threadIdx.x / 32 * 2654435761u + 1;
  const auto delay = [&] {
    noise = noise * 1664525u + 1013904223u;
    if (noise >> 28 == 0) __nanosleep(noise >> 22);
  };
  if (threadIdx.x / 128 == consumers) {
    if (threadIdx.x % 128 != 0) return;
    for (int i = 0; i < rounds; ++i, ring.advance()) {
      barrier_wait(&empty[ring.stage], ring.parity ^ 1);
      delay();
      places[ring.stage] = i;
      barrier_arrive(&full[ring.stage]);
    }
    return;
  }
  unsigned long long sum = 0;
  for (int i = 0; i < rounds; ++i, ring.advance()) {
    barrier_wait(&full[ring.stage], ring.parity);
    delay();
    sum += static_cast<unsigned long long>(places[ring.stage]) * (i % 7 + 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&empty[ring.stage]);
  }
  sums[threadIdx.x] = sum;
#endif
}

// Each block brings `source` to shared memory and adds it to `target`; the first also stores it to `copy`.
constexpr int bulk_floats = 1024;
__global__ void bulk_kernel(float* target, float* copy, const float* source) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(128) float values[bulk_floats];
  __shared__ uint64_t full;
  barrier_init(&full, 1);
  barrier_init_fence();
  barrier_expect(&full, bulk_floats * 4);
  bulk_load(values, source, bulk_floats * 4, &full);
  barrier_wait(&full, 0);
  bulk_add(target, values, bulk_floats * 4);
  for (int i = 0; blockIdx.x == 0 && i < bulk_floats; ++i) copy[i] = values[i];
  bulk_commit();
  bulk_wait<0>();
#endif
}

// Rows of a 16 x 16 matrix as one warp holds it, packed, stored as columns.
__global__ void store_transposed_kernel(bfloat16* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(16) bfloat16 tile[16 * 16];
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t matrices[4];
  for (int i = 0; i < 4; ++i) {  // rows 8 (i % 2), columns 8 (i / 2)
    const int row = i % 2 * 8 + lane / 4, column = i / 2 * 8 + 2 * (lane % 4);
    matrices[i] = pack<bfloat16>(static_cast<float>(16 * row + column), static_cast<float>(16 * row + column + 1));
  }
  store_transposed(shared_address(tile + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8), matrices);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) out[i] = tile[i];
#endif
}

}  // namespace

TEST_CASE("hopper: attention takes a GPU of this kind in a build for it, and refuses others by name" * needs_gpu()) {
#ifdef STROBE_CUDA_HOPPER
  const bool expected = strobe::cuda::device_properties(Device::cuda()).compute_capability == 90;
#else
  const bool expected = false;
#endif
  const std::string refusal = hopper_refusal();
  CHECK(refusal.empty() == expected);
  if (!expected) CHECK(refusal.find("kernel hopper given, but ") != std::string::npos);
}

TEST_CASE("hopper: products of one tile in every form of operands" * needs_hopper()) {
  std::mt19937 random(1);
  const auto each_form = [&]<class T, int n>() {
    check_product<T, n, false, false>(random);
    check_product<T, n, false, true>(random);
    check_product<T, n, true, false>(random);
    check_product<T, n, true, true>(random);
  };
  each_form.operator()<bfloat16, 64>();
  each_form.operator()<bfloat16, 80>();
  each_form.operator()<bfloat16, 96>();
  each_form.operator()<bfloat16, 128>();
  each_form.operator()<bfloat16, 192>();
  each_form.operator()<bfloat16, 256>();
  each_form.operator()<float16, 64>();
  each_form.operator()<float16, 128>();
  each_form.operator()<float16, 256>();
}

TEST_CASE("hopper: products of operands in squares without a swizzle, also of one square in all places" *
          needs_hopper()) {
  std::mt19937 random(1);
  const std::vector<bfloat16> a = small_integers<bfloat16>(64 * 16, random);
  const std::vector<bfloat16> b = small_integers<bfloat16>(64 * 16, random);
  const Array<bfloat16> gpu_a(a), gpu_b(b);
  for (const bool repeated : {false, true}) {
    const Array<float> out(std::vector<float>(64 * 64, NAN));
    strobe::cuda::launch("multiply", multiply_squares_kernel, 1, 128, 0, gpu_stream(), out.data(), gpu_a.data(),
                         gpu_b.data(), repeated);
    const std::vector<float> given = out.read();
    int wrong = 0;
    for (size_t i = 0; i < 64; ++i) {
      for (size_t j = 0; j < 64; ++j) {
        float sum = 0;
        for (size_t k = 0; k < 16; ++k) {
          const size_t at = repeated ? i % 8 * 16 + k % 8 : i * 16 + k;
          sum += static_cast<float>(a[at]) * static_cast<float>(b[j * 16 + k]);
        }
        wrong += given[i * 64 + j] != sum;
      }
    }
    CAPTURE(repeated);
    CHECK(wrong == 0);
  }
}

TEST_CASE("hopper: TMA swizzles tiles and fills what lies outside of the tensor with 0" * needs_hopper()) {
  constexpr int batches = 2, rows = 70, heads = 3, dims = 96;
  std::mt19937 random(2);
  const std::vector<bfloat16> values = small_integers<bfloat16>(batches * rows * heads * dims, random);
  const Array<bfloat16> tensor(values), out(std::vector<bfloat16>(64 * 64, bfloat16(NAN)));
  const CUtensorMap map = tensor_map("test", {tensor.data(), rows * heads * dims, heads * dims, dims}, DType::bf16,
                                     batches, rows, heads, dims, 64);
  for (const int first_dim : {0, 64}) {
    for (const int first_row : {-3, 0, 10, 69}) {
      strobe::cuda::launch("load", load_kernel, 1, 128, 0, gpu_stream(), map, out.data(), first_dim, first_row, 2, 1);
      const std::vector<bfloat16> given = out.read();
      int wrong = 0;
      for (int i = 0; i < 64 * 64; ++i) {
        const int row = first_row + i / 64, dim = first_dim + i % 64;
        const bool inside = row >= 0 && row < rows && dim < dims;
        const float expected =
            inside ? static_cast<float>(values[static_cast<size_t>(((rows + row) * heads + 2) * dims + dim)]) : 0.0f;
        wrong += static_cast<float>(given[static_cast<size_t>(i)]) != expected;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("hopper: a ring of barriers loses no round and repeats none" * needs_hopper()) {
  constexpr int rounds = 20000;
  const Array<unsigned long long> sums(std::vector<unsigned long long>(128 * consumers, 0));
  strobe::cuda::launch("ring", ring_kernel, 1, 128 * (consumers + 1), 0, gpu_stream(), sums.data(), rounds);
  unsigned long long expected = 0;
  for (int i = 0; i < rounds; ++i) expected += static_cast<unsigned long long>(i) * static_cast<unsigned>(i % 7 + 1);
  for (const unsigned long long sum : sums.read()) CHECK(sum == expected);
}

TEST_CASE("hopper: bulk copies bring all, bulk additions of many blocks lose none" * needs_hopper()) {
  constexpr unsigned blocks = 500;
  std::mt19937 random(3);
  const std::vector<float> values = small_integers<float>(bulk_floats, random);
  const Array<float> source(values), target(std::vector<float>(bulk_floats, 1.0f)),
      copy(std::vector<float>(bulk_floats, NAN));
  strobe::cuda::launch("bulk", bulk_kernel, blocks, 1, 0, gpu_stream(), target.data(), copy.data(), source.data());
  CHECK(copy.read() == values);
  std::vector<float> expected = values;
  for (float& x : expected) x = 1 + blocks * x;
  CHECK(target.read() == expected);
}

TEST_CASE("hopper: transposed stores turn columns into rows" * needs_hopper()) {
  const Array<bfloat16> out(std::vector<bfloat16>(256, bfloat16(NAN)));
  strobe::cuda::launch("store", store_transposed_kernel, 1, 32, 0, gpu_stream(), out.data());
  const std::vector<bfloat16> given = out.read();
  for (size_t i = 0; i < 256; ++i) CHECK(static_cast<float>(given[i]) == static_cast<float>(i % 16 * 16 + i / 16));
}
