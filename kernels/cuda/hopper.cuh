// Instructions of Hopper GPUs (sm_90a) that C++ has no words for: barriers in shared memory, tiles brought by the
// tensor memory accelerator (TMA), and products by a warpgroup, four warps together (wgmma). PTX ISA 8.0: mbarrier,
// cp.async.bulk.tensor, wgmma.mma_async, setmaxnreg. For other GPUs this compiles to nothing that works.
#pragma once

#include <cuda.h>

#include "strobe/kernels/cuda/mma.cuh"

namespace strobe::kernels::cuda::hopper {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STROBE_HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define STROBE_HOPPER_ASM(...)
#endif

// A barrier is a 64-bit word that counts the arrivals, and the bytes brought by TMA, of one phase after another. Phases
// have parity 0 and 1 in turn.
__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  STROBE_HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialized barriers known to TMA; a barrier of the whole block follows.
__device__ inline void barrier_init_fence() { STROBE_HOPPER_ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(uint64_t* barrier) {
  STROBE_HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and lets the phase last until so many bytes have come, too.
__device__ inline void barrier_expect(uint64_t* barrier, int bytes) {
  STROBE_HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                    : "memory");
}
// Returns when the phase of this parity is over. No phase may end unseen: the next one must need an arrival of the one
// that waits, or of another that comes later.
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  STROBE_HOPPER_ASM(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}\n" ::
          "r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A place in a ring of `stages` buffers with one barrier each, and the parity of the phase that is next there.
template <int stages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Copies the box of a tensor map that begins at (dim, row, head, batch); what lies outside the tensor becomes 0.
__device__ inline void tma_load(void* target, const CUtensorMap& map, uint64_t* barrier, int dim, int row, int head,
                                int batch) {
  STROBE_HOPPER_ASM(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(target)),
      "l"(&map), "r"(shared_address(barrier)), "r"(dim), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// The other way, as part of this thread's open group; what lies outside the tensor is not written.
__device__ inline void tma_store(const CUtensorMap& map, const void* source, int dim, int row, int head, int batch) {
  STROBE_HOPPER_ASM(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared_address(source)), "r"(dim), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ inline void tma_prefetch(const CUtensorMap& map) {
  STROBE_HOPPER_ASM("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies contiguous bytes, a multiple of 16 at such an address.
__device__ inline void bulk_load(void* target, const void* source, int bytes, uint64_t* barrier) {
  STROBE_HOPPER_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                        shared_address(target)),
                    "l"(source), "r"(bytes), "r"(shared_address(barrier))
                    : "memory");
}
// Adds contiguous floats of shared memory to as many in device memory, as part of this thread's open group.
__device__ inline void bulk_add(float* target, const float* source, int bytes) {
  STROBE_HOPPER_ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
                    "r"(shared_address(source)), "r"(bytes)
                    : "memory");
}
__device__ inline void bulk_commit() { STROBE_HOPPER_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's newest groups still read shared memory, or are under way at all.
template <int pending>
__device__ inline void bulk_wait_read() {
  STROBE_HOPPER_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
template <int pending>
__device__ inline void bulk_wait() {
  STROBE_HOPPER_ASM("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
// What this thread wrote to shared memory becomes visible to TMA and wgmma.
__device__ inline void fence_async_proxy() { STROBE_HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the 128 threads of a warpgroup.
__device__ inline void barrier_group(int group) { STROBE_HOPPER_ASM("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }
// Waits for the threads of several warpgroups.
template <int threads>
__device__ inline void barrier_groups() {
  STROBE_HOPPER_ASM("bar.sync 8, %0;" ::"n"(threads) : "memory");
}

// Waits at barrier `id` until so many threads have come, or is one of them and goes on.
template <int threads>
__device__ inline void barrier_sync(int id) {
  STROBE_HOPPER_ASM("bar.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
}
template <int threads>
__device__ inline void barrier_pass(int id) {
  STROBE_HOPPER_ASM("bar.arrive %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

// The lane, read anew: what depends on it is then computed here and not kept in registers from before.
__device__ inline int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A number that is the same in all lanes, told to the compiler: operands made of it then need no vector registers.
__device__ inline int uniform(int x) {
  int same = x;
  STROBE_HOPPER_ASM("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(same) : "r"(x));
  return same;
}

// From here on the threads of this warpgroup have so many registers each.
template <int count>
__device__ inline void give_registers() {
  STROBE_HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void take_registers() {
  STROBE_HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Tiles lie as TMA's 128-byte swizzle leaves them: chunks of 64 columns one after the other, in each of them rows of
// 128 bytes whose 16-byte pieces are exchanged by row. Where piece `piece` of a row lies, in bytes:
__host__ __device__ constexpr int swizzled_offset(int rows, int row, int piece) {
  return piece / 8 * rows * 128 + row * 128 + ((piece % 8 ^ (row & 7)) << 4);
}

// A tile at a multiple of 1,024 bytes as an operand of wgmma. `chunk_bytes` is the distance of chunks, read only for an
// operand whose rows are summed over. Adding x / 16 moves on by x bytes.
__device__ inline uint64_t wgmma_operand(const void* tile, uint32_t chunk_bytes = 16) {
  constexpr uint64_t eight_rows = 1024, swizzle_128 = uint64_t{1} << 62;
  return (shared_address(tile) >> 4 & 0x3fff) | static_cast<uint64_t>(chunk_bytes >> 4 & 0x3fff) << 16 |
         (eight_rows >> 4) << 32 | swizzle_128;
}
// The same `bytes` behind shared memory's 16 * place.
__host__ __device__ constexpr uint64_t wgmma_operand(uint32_t place, int bytes, int chunk_bytes = 16) {
  constexpr uint32_t eight_rows_swizzle_128 = 1024 >> 4 | 1u << 30;
  const uint32_t low = place + static_cast<uint32_t>(bytes / 16 + (chunk_bytes / 16 << 16));
  return static_cast<uint64_t>(eight_rows_swizzle_128) << 32 | low;
}
// An operand of squares of 8 rows and 8 columns, 128 bytes each without a swizzle; how many bytes further on the square
// of the next 8 rows and that of the next 8 columns are.
__host__ __device__ constexpr uint64_t wgmma_squares(uint32_t place, int bytes, int next_rows, int next_columns) {
  const uint32_t low = place + static_cast<uint32_t>(bytes / 16 + (next_columns / 16 << 16));
  return static_cast<uint64_t>(next_rows / 16) << 32 | low;
}
// Before a product whose registers have been written by other instructions.
__device__ inline void wgmma_fence() { STROBE_HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products.
__device__ inline void wgmma_commit() { STROBE_HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are under way. Registers of finished products are then passed to `hold`, lest
// the compiler read them earlier.
template <int pending>
__device__ inline void wgmma_wait() {
  STROBE_HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
template <int count>
__device__ inline void hold(float (&values)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Values that nobody reads again. Without this, registers that a product overwrites count as read by it, and stay
// taken.
template <int count>
__device__ inline void forget(float (&values)[count]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "=f"(value));
}

// Stores four 8 x 8 matrices that lie as wgmma's sums do, packed: lane l names where row l % 8 of matrix l / 8 goes.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&matrices)[4]) {
  STROBE_HOPPER_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
                    "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                    : "memory");
}
// Stores four 8 x 8 matrices that lie as wgmma's sums do, packed, each transposed: lane l names where column l % 8 of
// matrix l / 8 becomes a row.
__device__ inline void store_transposed(uint32_t address, const uint32_t (&matrices)[4]) {
  STROBE_HOPPER_ASM("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                    "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                    : "memory");
}

// sums (64 x n, f32) = a b, or += with `accumulate`, over 16 columns of a. Lane l of warp w holds rows 16 w + l / 4 +
// 8 h, columns 8 i + 2 (l % 4) + c at 4 i + 2 h + c. tiles: a (64 x 16) lies in shared memory; registers: it is packed
// in the order of such sums. b lies in shared memory as n x 16 or, with `b_rows`, as 16 x n.
template <class T, int n>
struct Wgmma;

#define STROBE_8(d, i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define STROBE_16(d) STROBE_8(d, 0), STROBE_8(d, 8)
#define STROBE_32(d, i) STROBE_8(d, i), STROBE_8(d, i + 8), STROBE_8(d, i + 16), STROBE_8(d, i + 24)
#define STROBE_40(d) STROBE_32(d, 0), STROBE_8(d, 32)
#define STROBE_48(d) STROBE_40(d), STROBE_8(d, 40)
#define STROBE_64(d) STROBE_32(d, 0), STROBE_32(d, 32)
#define STROBE_96(d) STROBE_64(d), STROBE_32(d, 64)
#define STROBE_128(d) STROBE_96(d), STROBE_32(d, 96)
#define STROBE_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define STROBE_NAMES_32 STROBE_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define STROBE_NAMES_40 STROBE_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define STROBE_NAMES_48 STROBE_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define STROBE_NAMES_64 STROBE_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define STROBE_NAMES_96                                              \
  STROBE_NAMES_64                                                    \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define STROBE_NAMES_128                                                         \
  STROBE_NAMES_96                                                                \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// o0, ..., o6: the names of the operands behind the sums.
#define STROBE_WGMMA(T, type, n, names, sums, o0, o1, o2, o3, o4, o5, o6)                                        \
  template <>                                                                                                    \
  struct Wgmma<T, n> {                                                                                           \
    template <bool b_rows = false>                                                                               \
    __device__ static void tiles(float (&d)[n / 2], uint64_t a, uint64_t b, bool accumulate) {                   \
      STROBE_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, " o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n      \
                        "k16.f32." type "." type " {" names "}, " o0 ", " o1 ", p, 1, 1, 0, " o3 ";\n}\n"        \
                        : sums                                                                                   \
                        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(b_rows)));     \
    }                                                                                                            \
    template <bool b_rows = true>                                                                                \
    __device__ static void registers(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {   \
      STROBE_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, " o5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n      \
                        "k16.f32." type "." type " {" names "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4           \
                        ", p, 1, 1, " o6 ";\n}\n"                                                                \
                        : sums                                                                                   \
                        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
                          "n"(static_cast<int>(b_rows)));                                                        \
    }                                                                                                            \
  };
#define STROBE_WGMMAS(T, type)                                                                                  \
  STROBE_WGMMA(T, type, 32, STROBE_NAMES_16, STROBE_16(d), "%16", "%17", "%18", "%19", "%20", "%21", "%22")     \
  STROBE_WGMMA(T, type, 64, STROBE_NAMES_32, STROBE_32(d, 0), "%32", "%33", "%34", "%35", "%36", "%37", "%38")  \
  STROBE_WGMMA(T, type, 80, STROBE_NAMES_40, STROBE_40(d), "%40", "%41", "%42", "%43", "%44", "%45", "%46")     \
  STROBE_WGMMA(T, type, 96, STROBE_NAMES_48, STROBE_48(d), "%48", "%49", "%50", "%51", "%52", "%53", "%54")     \
  STROBE_WGMMA(T, type, 128, STROBE_NAMES_64, STROBE_64(d), "%64", "%65", "%66", "%67", "%68", "%69", "%70")    \
  STROBE_WGMMA(T, type, 192, STROBE_NAMES_96, STROBE_96(d), "%96", "%97", "%98", "%99", "%100", "%101", "%102") \
  STROBE_WGMMA(T, type, 256, STROBE_NAMES_128, STROBE_128(d), "%128", "%129", "%130", "%131", "%132", "%133", "%134")
STROBE_WGMMAS(bfloat16, "bf16")
STROBE_WGMMAS(float16, "f16")
#undef STROBE_WGMMAS
#undef STROBE_WGMMA

}  // namespace strobe::kernels::cuda::hopper
