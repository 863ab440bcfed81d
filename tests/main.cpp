// Runs every test case of the library; doctest's own flags select some of them.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "strobe/kernels/device.h"

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  context.addFilter("test-suite-exclude", strobe::cuda_available() ? "without gpu" : "gpu");
  return context.run();
}
