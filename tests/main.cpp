// Runs every test case of the library; doctest's own flags select some of them.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <iostream>

#include "support/gpu.h"

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  if (!strobe::cuda_available()) {
    context.addFilter("test-suite-exclude", "gpu,hopper");
    return context.run();
  }
  context.addFilter("test-suite-exclude", "without gpu");
  const std::string refusal = strobe::testing::hopper_refusal();
  if (!refusal.empty()) {
    std::cout << "skipped: test cases of Hopper: " << refusal << '\n';
    context.addFilter("test-suite-exclude", "hopper");
  }
  return context.run();
}
