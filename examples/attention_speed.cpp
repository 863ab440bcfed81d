// How fast attention is, tiled and standard, forward and backward, as CSV: on a GPU beside what scripts for other
// libraries print, on the CPU beside Eigen's matrix product.
#include <cstdio>
#include <exception>

#include "option_checks.h"
#include "speed_options.h"

int main(int argc, char** argv) {
  using namespace examples;
  try {
    if (const std::optional<SpeedOptions> options = parse_speed_options(argc, argv)) {
      options->device.type == strobe::DeviceType::cuda ? measure_on_gpu(*options) : measure_on_cpu(*options);
    }
    flush_output();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_speed: %s\n", error.what());
    return 1;
  }
}
