#include "strobe/core/io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "strobe/core/autograd.h"
#include "strobe/core/io/mapped_file.h"
#include "strobe/core/ops.h"

namespace strobe {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files hold little-endian numbers");

using Json = nlohmann::ordered_json;

// The format's own limit, which keeps a crafted length from taking the memory of the machine.
constexpr uint64_t max_header_bytes = 100'000'000;

constexpr std::pair<DType, std::string_view> dtype_names[] = {{DType::f32, "F32"},   {DType::f64, "F64"},
                                                              {DType::bf16, "BF16"}, {DType::f16, "F16"},
                                                              {DType::i32, "I32"},   {DType::i64, "I64"}};

std::string_view format_name(DType dtype) {
  for (const auto& [value, name] : dtype_names)
    if (value == dtype) return name;
  fail("save_safetensors: dtype ", dtype, " given, expected one the format has");
}

// Text from a file in an error message, in short.
std::string brief(std::string_view text) {
  return text.size() <= 100 ? concat_message("'", text, "'") : concat_message("'", text.substr(0, 97), "...'");
}

// One tensor's entry in the header.
struct Entry {
  std::string name;
  std::optional<DType> dtype;
  std::optional<Shape> shape;
  std::array<uint64_t, 2> offsets{};  // begin and end in the data section
  int num_offsets = 0;
};

// Reads the header event by event, so that what it costs is bounded by its length, however it nests.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(std::string_view file) : file_(file) {}

  // A deque grows without a large allocation at once.
  std::deque<Entry>& entries() { return entries_; }
  Metadata& metadata() { return metadata_; }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::start:
        return go(Place::header);
      case Place::value_of_metadata:
        return go(Place::metadata);
      case Place::value_of_tensor:
        return go(Place::tensor);
      default:
        malformed("an object");
    }
  }

  bool end_object() override {
    if (place_ == Place::header) return go(Place::end);
    if (place_ == Place::tensor) {
      const Entry& entry = entries_.back();
      STROBE_CHECK(entry.dtype && entry.shape && entry.num_offsets == 2, prefix(), "tensor ", brief(entry.name),
                   " lacks dtype, shape or two data_offsets");
    }
    return go(Place::header);
  }

  bool key(std::string& key) override {
    key_ = key;
    switch (place_) {
      case Place::header:
        if (key == "__metadata__") {
          STROBE_CHECK(!std::exchange(has_metadata_, true), prefix(), "__metadata__ is there twice");
          return go(Place::value_of_metadata);
        }
        entries_.push_back({.name = key, .dtype = {}, .shape = {}});
        return go(Place::value_of_tensor);
      case Place::metadata:
        return true;
      default:
        return tensor_key(entries_.back());
    }
  }

  bool start_array(size_t) override {
    if (place_ == Place::value_of_shape) {
      entries_.back().shape.emplace();
      return go(Place::shape);
    }
    if (place_ == Place::value_of_offsets) return go(Place::offsets);
    malformed("a list");
  }

  bool end_array() override { return go(Place::tensor); }

  bool number_unsigned(uint64_t value) override {
    Entry* entry = entries_.empty() ? nullptr : &entries_.back();
    if (place_ == Place::shape) {
      STROBE_CHECK(entry->shape->size() < Shape::max_rank, prefix(), "tensor ", brief(entry->name),
                   " has a shape of more than ", Shape::max_rank, " axes, expected at most ", Shape::max_rank);
      STROBE_CHECK(value <= static_cast<uint64_t>(INT64_MAX), prefix(), "tensor ", brief(entry->name),
                   " has a size of ", value, " in its shape, expected one that fits in memory");
      entry->shape->push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets && entry->num_offsets < 2) {
      entry->offsets[static_cast<size_t>(entry->num_offsets++)] = value;
      return true;
    }
    malformed(value);
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata) {
      STROBE_CHECK(metadata_.emplace(key_, value).second, prefix(), "__metadata__ ", brief(key_), " is there twice");
      return true;
    }
    if (place_ != Place::value_of_dtype) malformed(brief(value));
    const auto known = std::find_if(std::begin(dtype_names), std::end(dtype_names),
                                    [&](const auto& candidate) { return candidate.second == value; });
    STROBE_CHECK(known != std::end(dtype_names), prefix(), "tensor ", brief(entries_.back().name), " has dtype ",
                 brief(value), ", expected one of F32, F64, BF16, F16, I32, I64");
    entries_.back().dtype = known->first;
    return go(Place::tensor);
  }

  bool number_integer(int64_t value) override { malformed(value); }
  bool number_float(double, const std::string& digits) override { malformed(brief(digits)); }
  bool boolean(bool value) override { malformed(value ? "true" : "false"); }
  bool null() override { malformed("null"); }
  bool binary(Json::binary_t&) override { malformed("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail(prefix(), "its header is not JSON from byte ", position, " on: damaged, or not a safetensors file");
  }

 private:
  // Where in the header the next event is.
  enum class Place {
    start,
    header,
    value_of_metadata,
    metadata,
    value_of_tensor,
    tensor,
    value_of_dtype,
    value_of_shape,
    shape,
    value_of_offsets,
    offsets,
    end
  };

  bool go(Place place) {
    place_ = place;
    return true;
  }

  bool tensor_key(const Entry& entry) {
    const bool twice = key_ == "dtype"   ? entry.dtype.has_value()
                       : key_ == "shape" ? entry.shape.has_value()
                                         : entry.num_offsets > 0;
    STROBE_CHECK(!twice, prefix(), "tensor ", brief(entry.name), " has ", key_, " twice");
    if (key_ == "dtype") return go(Place::value_of_dtype);
    if (key_ == "shape") return go(Place::value_of_shape);
    if (key_ == "data_offsets") return go(Place::value_of_offsets);
    fail(prefix(), "tensor ", brief(entry.name), " has the key ", brief(key_),
         ", expected dtype, shape and data_offsets");
  }

  std::string prefix() const { return concat_message("load_safetensors: ", file_, ": "); }

  template <class Value>
  [[noreturn]] void malformed(const Value& found) const {
    switch (place_) {
      case Place::start:
        fail(prefix(), "no JSON object as header, expected a safetensors file");
      case Place::value_of_metadata:
        fail(prefix(), "__metadata__ is ", found, ", expected an object of strings");
      case Place::metadata:
        fail(prefix(), "__metadata__ ", brief(key_), " is ", found, ", expected a string");
      case Place::value_of_tensor:
        fail(prefix(), "tensor ", brief(key_), " is ", found, ", expected an object with dtype, shape, data_offsets");
      default:
        fail(prefix(), "tensor ", brief(entries_.back().name), " has ", found, " in ", brief(key_), ", expected ",
             place_ == Place::value_of_dtype ? "a string"
             : place_ == Place::shape || place_ == Place::value_of_shape
                 ? "a list of sizes of 0 or more"
                 : "two numbers, where the data begins and where it ends");
    }
  }

  std::string_view file_;
  Place place_ = Place::start;
  std::string key_;
  bool has_metadata_ = false;
  std::deque<Entry> entries_;
  Metadata metadata_;
};

// Throws unless the shape, the dtype and the place in `data_bytes` bytes of data agree.
void check_extent(const std::string& prefix, const Entry& entry, uint64_t data_bytes) {
  uint64_t bytes = size_of(*entry.dtype);
  uint64_t extent = bytes;  // as if no size were 0: strides are computed from it
  for (const int64_t size : *entry.shape) {
    bytes *= static_cast<uint64_t>(size);
    STROBE_CHECK(!__builtin_mul_overflow(extent, static_cast<uint64_t>(std::max<int64_t>(size, 1)), &extent) &&
                     extent <= static_cast<uint64_t>(INT64_MAX),
                 prefix, "tensor ", brief(entry.name), " has shape ", *entry.shape,
                 ", expected one that fits in memory");
  }
  const uint64_t begin = entry.offsets[0], end = entry.offsets[1];
  STROBE_CHECK(begin <= end && end <= data_bytes, prefix, "tensor ", brief(entry.name), " begins at byte ", begin,
               " and ends at byte ", end, " of the data, expected a part of its ", data_bytes,
               " bytes: cut short or damaged");
  STROBE_CHECK(end - begin == bytes, prefix, "tensor ", brief(entry.name), " has ", end - begin,
               " bytes of data, expected ", bytes, " for shape ", *entry.shape);
}

// Throws unless the entries' names differ and their data, laid end to end in the order this gives them, is all there
// is.
void order_by_data(const std::string& prefix, std::deque<Entry>& entries, uint64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(entries.begin(), entries.end(),
                                        [](const Entry& a, const Entry& b) { return a.name == b.name; });
  STROBE_CHECK(twice == entries.end(), prefix, "tensor ", brief(twice->name), " is there twice");
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::tie(a.offsets, a.name) < std::tie(b.offsets, b.name); });
  uint64_t covered = 0;
  for (const Entry& entry : entries) {
    STROBE_CHECK(entry.offsets[0] == covered, prefix, "tensor ", brief(entry.name), " starts at byte ",
                 entry.offsets[0], " of the data, expected ", covered, " (no overlaps, no gaps)");
    covered = entry.offsets[1];
  }
  STROBE_CHECK(covered == data_bytes, prefix, data_bytes, " bytes of data, expected ", covered,
               " by its header: cut short or damaged");
}

// Copies `size` bytes from `offset` on to `out`.
using ReadAt = std::function<void(uint64_t offset, void* out, size_t size)>;

SafeTensors read_safetensors(std::string_view name, uint64_t file_bytes, const ReadAt& read_at) {
  const std::string prefix = concat_message("load_safetensors: ", name, ": ");
  uint64_t header_bytes = 0;
  constexpr uint64_t length_bytes = sizeof(header_bytes);
  char start[64];
  const size_t start_bytes = std::min<uint64_t>(file_bytes, sizeof(start));
  read_at(0, start, start_bytes);
  refuse_git_lfs_pointer(name, std::as_bytes(std::span(start, start_bytes)));
  STROBE_CHECK(file_bytes >= length_bytes, prefix, file_bytes, " bytes, expected a safetensors file");
  std::memcpy(&header_bytes, start, length_bytes);
  STROBE_CHECK(header_bytes <= file_bytes - length_bytes, prefix, "announces a header of ", header_bytes,
               " bytes but has ", file_bytes - length_bytes, " left: cut short, or not a safetensors file");
  STROBE_CHECK(header_bytes <= max_header_bytes, prefix, "announces a header of ", header_bytes,
               " bytes, expected at most ", max_header_bytes);
  std::string header(header_bytes, '\0');
  read_at(length_bytes, header.data(), header_bytes);
  HeaderReader reader(name);
  Json::sax_parse(header, &reader);

  const uint64_t data_begin = length_bytes + header_bytes;
  std::deque<Entry>& entries = reader.entries();
  for (const Entry& entry : entries) check_extent(prefix, entry, file_bytes - data_begin);
  order_by_data(prefix, entries, file_bytes - data_begin);
  SafeTensors result{.tensors = {}, .metadata = std::move(reader.metadata())};
  for (Entry& entry : entries) {
    const Tensor tensor = empty(*entry.shape, *entry.dtype, Device::cpu());
    const uint64_t bytes = entry.offsets[1] - entry.offsets[0];
    if (bytes > 0) read_at(data_begin + entry.offsets[0], tensor.data(), bytes);
    result.tensors.push_back({std::move(entry.name), tensor});
  }
  return result;
}

}  // namespace

void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  const NoGrad no_grad;
  std::set<std::string_view> names;
  std::vector<Tensor> on_cpu;
  uint64_t offset = 0;
  for (const NamedTensor& entry : tensors) {
    require_defined("save_safetensors", "a tensor", entry.tensor);
    STROBE_CHECK(entry.name != "__metadata__",
                 "save_safetensors: a tensor named '__metadata__' given, expected a name ",
                 "that the format does not use itself");
    STROBE_CHECK(names.insert(entry.name).second, "save_safetensors: two tensors named '", entry.name,
                 "' given, expected names that differ");
    on_cpu.push_back(contiguous(entry.tensor.detach().to(Device::cpu())));
    const Tensor& tensor = on_cpu.back();
    const uint64_t bytes = static_cast<uint64_t>(tensor.size()) * size_of(tensor.dtype());
    header[entry.name] = {{"dtype", format_name(tensor.dtype())},
                          {"shape", std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end())},
                          {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    fail("save_safetensors: ", path, ": a name or metadata that is not UTF-8 given, expected text");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // keeps the data aligned
  const uint64_t length = text.size();
  std::vector<std::pair<const void*, size_t>> contents{{&length, sizeof(length)}, {text.data(), text.size()}};
  for (const Tensor& tensor : on_cpu) {
    contents.emplace_back(tensor.data(), static_cast<size_t>(tensor.size()) * size_of(tensor.dtype()));
  }
  write_file_atomically(path, contents);
}

SafeTensors parse_safetensors(std::span<const std::byte> bytes, std::string_view name) {
  return read_safetensors(name, bytes.size(), [&](uint64_t offset, void* out, size_t size) {
    if (size > 0) std::memcpy(out, bytes.data() + offset, size);
  });
}

SafeTensors load_safetensors(const std::string& path) {
  std::error_code code;
  STROBE_CHECK(std::filesystem::exists(path, code), "load_safetensors: ", path, " does not exist");
  STROBE_CHECK(std::filesystem::is_regular_file(path, code), "load_safetensors: ", path,
               " is not a regular file, expected a safetensors file");
  const uint64_t file_bytes = std::filesystem::file_size(path, code);
  std::ifstream file(path, std::ios::binary);
  STROBE_CHECK(!code && file, "load_safetensors: ", path, " cannot be read: ", std::strerror(errno));
  // Straight into the tensors' memory. A mapping would save no copy, and end the process where the disk fails.
  return read_safetensors(path, file_bytes, [&](uint64_t offset, void* out, size_t size) {
    file.seekg(static_cast<std::streamoff>(offset));
    STROBE_CHECK(file.read(static_cast<char*>(out), static_cast<std::streamsize>(size)), "load_safetensors: ", path,
                 " cannot be read to its end");
  });
}

}  // namespace strobe
