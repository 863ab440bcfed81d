// Marks test cases that need a GPU, or that there is none.
#pragma once

#include <doctest/doctest.h>

namespace strobe::testing {

// For TEST_CASE("..." * needs_gpu()). Without a GPU main.cpp leaves the suite out and doctest counts its cases as
// skipped. Decorators run before main, when CUDA knows no kernels yet, so they cannot ask for a GPU themselves.
inline doctest::test_suite needs_gpu() { return doctest::test_suite("gpu"); }

// The opposite: left out where there is a GPU.
inline doctest::test_suite needs_no_gpu() { return doctest::test_suite("without gpu"); }

}  // namespace strobe::testing
