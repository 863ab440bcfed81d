// Named tensors in files: the safetensors format (8-byte header length, JSON header, raw little-endian data).
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strobe/core/io/atomic_file.h"
#include "strobe/core/tensor.h"

namespace strobe {

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

using Metadata = std::map<std::string, std::string>;

struct SafeTensors {
  std::vector<NamedTensor> tensors;  // in the order of their data
  Metadata metadata;
};

// Writes the file as an AtomicFile: whatever fails, one that was there before stays whole.
void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata = {});

// Reads all tensors to the CPU. Throws, naming the file and what is wrong, on anything that is not a whole and
// well-formed safetensors file: each byte of the data belongs to exactly one tensor.
SafeTensors load_safetensors(const std::string& path);

// The same for a file's bytes in memory; `name` stands for the file in messages.
SafeTensors parse_safetensors(std::span<const std::byte> bytes, std::string_view name);

}  // namespace strobe
