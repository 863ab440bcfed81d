// Marks test cases that need a GPU, a Hopper GPU, or that there is none.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "strobe/kernels/attention.h"
#include "strobe/kernels/device.h"

namespace strobe::testing {

// For TEST_CASE("..." * needs_gpu()). Without a GPU main.cpp leaves the suite out and doctest counts its cases as
// skipped. Decorators run before main, when CUDA knows no kernels yet, so they cannot ask for a GPU themselves.
inline doctest::test_suite needs_gpu() { return doctest::test_suite("gpu"); }

// Left out where hopper_refusal() says why, too.
inline doctest::test_suite needs_hopper() { return doctest::test_suite("hopper"); }

// The opposite of needs_gpu(): left out where there is a GPU.
inline doctest::test_suite needs_no_gpu() { return doctest::test_suite("without gpu"); }

// Why the GPU or this build cannot run the kernels of Hopper; empty if they can.
inline std::string hopper_refusal() {
  kernels::AttentionArgs args{};
  args.batch = args.seq_len_q = args.seq_len_k = args.num_heads = args.num_kv_heads = 1;
  args.head_dim = 64;
  args.dtype = DType::bf16;
  args.kernel = kernels::AttentionKernel::hopper;
  try {
    kernels::attention_tile(args, false, Device::cuda());
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace strobe::testing
