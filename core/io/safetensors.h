// Named tensors in files: the safetensors format (8-byte header length, JSON header, raw little-endian data).
#pragma once

#include <map>
#include <string>
#include <vector>

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

// Writes beside `path`, syncs, then renames: whatever fails, a file that was there before stays whole.
void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata = {});

// Reads all tensors to the CPU. Throws, naming the file and what is wrong, on anything that is not a whole and
// well-formed safetensors file.
SafeTensors load_safetensors(const std::string& path);

// Replaces the file at `path` by `contents` in the same all-or-nothing way.
void write_file_atomically(const std::string& path, const std::vector<std::pair<const void*, size_t>>& contents);

}  // namespace strobe
