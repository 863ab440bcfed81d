#!/usr/bin/env bash
# The build stops at a Hopper kernel that spills or whose products are serialized: its own command for the Hopper
# forward compiles kernels that do. Usage: hopper_build_test.sh BUILD. The last line is "N passed, N failed, N skipped".
set -uo pipefail
build=$(cd -- "$1" && pwd)
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
source=$root/kernels/cuda/attention_hopper_forward.cu
object=CMakeFiles/strobe_kernels.dir/kernels/cuda/attention_hopper_forward.cu.o
command=$(ninja -C "$build" -t commands "$object" 2>/dev/null | tail -n 1)
if [[ $command != *refuse_serialized*STROBE_CUDA_HOPPER*"$source"* ]]; then
  echo "skipped: '$build' was not built here for Hopper by ninja and CUDA 13 or newer"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
# shellcheck source=tests/examples/checks.sh
source "$root/tests/examples/checks.sh"
command=${command//"$source"/"$work/kernel.cu"}
command=${command//"$object"/"$work/kernel.o"}

# The build's command on the kernel from standard input.
compile() {
  cat >"$work/kernel.cu"
  (cd "$build" && eval "$command")
}
# refuses NAME PATTERN: the command must fail and say what matches.
refuses() {
  if ! compile >"$work/log" 2>&1 && grep -qE -- "$2" "$work/log"; then pass; else
    fail "$1: expected to be refused with '$2'"
    tail -n 5 "$work/log"
  fi
}

check 'a plain kernel' compile <<'END'
__global__ void copies(float* x) { x[threadIdx.x] = x[threadIdx.x + 32]; }
END

refuses 'spills' 'Registers are spilled' <<'END'
__global__ void __launch_bounds__(1024) spills(float* x, int n) {
  float a[160];
#pragma unroll
  for (int i = 0; i < 160; ++i) a[i] = x[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 160; ++i) x[i * n + 1] = a[i] * a[i * 7 % 160];
}
END

refuses 'serialized products' 'serialized, expected none' <<'END'
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define ASM(...)
#else
#define ASM(...) asm volatile(__VA_ARGS__)
#endif
__device__ void multiply(float (&d)[4], unsigned long long a, unsigned long long b) {
  ASM("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b));
}
__global__ void serialized(float* x, unsigned long long a, unsigned long long b) {
  float d[4] = {x[0], x[1], x[2], x[3]};
  ASM("wgmma.fence.sync.aligned;" ::: "memory");
  multiply(d, a, b);
  d[0] += 1;  // while it is being computed
  multiply(d, a, b);
  ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
  ASM("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) x[i] = d[i];
}
END

finish
