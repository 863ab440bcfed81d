#include "strobe/core/io/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "strobe/core/autograd.h"
#include "strobe/core/ops.h"

namespace strobe {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::pair<DType, const char*> dtype_names[] = {{DType::f32, "F32"},   {DType::f64, "F64"},
                                                         {DType::bf16, "BF16"}, {DType::f16, "F16"},
                                                         {DType::i32, "I32"},   {DType::i64, "I64"}};

const char* format_name(DType dtype) {
  for (const auto& [value, name] : dtype_names) {
    if (value == dtype) return name;
  }
  fail("save_safetensors: dtype ", dtype, " given, expected one the format has");
}

// A file that is being written beside its target; removed again unless it was finished.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target) : target_(target) {
    static std::atomic<uint64_t> counter{0};
    std::error_code code;
    const std::filesystem::path link_target = std::filesystem::canonical(target, code);
    if (!code) target_ = link_target.string();  // a link stays one
    path_ = concat_message(target_, ".partial", getpid(), "-", counter.fetch_add(1));
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0) fail_with_errno("cannot be created");
  }
  ~TemporaryFile() {
    if (descriptor_ >= 0) close(descriptor_);
    if (!finished_) unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const void* data, size_t size) {
    const char* next = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t written = ::write(descriptor_, next, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_with_errno("cannot be written");
      next += written;
      size -= static_cast<size_t>(written);
    }
  }

  void finish() {
    if (fsync(descriptor_) != 0) fail_with_errno("cannot be written");
    const int descriptor = descriptor_;
    descriptor_ = -1;
    if (close(descriptor) != 0) fail_with_errno("cannot be written");
    if (rename(path_.c_str(), target_.c_str()) != 0) fail_with_errno("cannot be replaced");
    finished_ = true;
    // The rename itself is on disk only once the folder is.
    const std::string folder = std::filesystem::path(target_).parent_path().string();
    const int folder_descriptor = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY);
    if (folder_descriptor >= 0) {
      fsync(folder_descriptor);
      close(folder_descriptor);
    }
  }

 private:
  [[noreturn]] void fail_with_errno(const char* what) const {
    const int code = errno;
    fail("save: ", target_, " ", what, ": ", std::strerror(code));
  }

  std::string target_;
  std::string path_;
  int descriptor_ = -1;
  bool finished_ = false;
};

// A JSON value in an error message, in short.
std::string brief(const Json& value) {
  if (value.is_string()) return concat_message("'", value.get<std::string>().substr(0, 40), "'");
  if (value.is_number()) return value.dump();
  if (!value.is_array() || value.size() > 16) return concat_message("of type ", value.type_name());
  std::ostringstream text;
  for (const Json& element : value) {
    text << (text.tellp() > 0 ? ", " : "(") << (element.is_number() ? element.dump() : "?");
  }
  text << (value.empty() ? "()" : ")");
  return text.str();
}

// One tensor's entry in the header, checked against the size of the data section.
struct Entry {
  std::string name;
  DType dtype;
  Shape shape;
  uint64_t begin;
  uint64_t end;
};

Entry parse_entry(const std::string& path, const std::string& name, const Json& value, uint64_t data_bytes) {
  const auto malformed = [&](const auto&... why) {
    fail("load_safetensors: ", path, ": tensor '", name, "' ", why...);
  };
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets")) {
    malformed("lacks dtype, shape or data_offsets");
  }
  Entry entry{.name = name, .dtype = DType::f32, .shape = {}, .begin = 0, .end = 0};
  const Json& dtype = value["dtype"];
  bool known = false;
  for (const auto& [candidate, format] : dtype_names) {
    if (dtype == format) {
      entry.dtype = candidate;
      known = true;
    }
  }
  if (!known) malformed("has dtype ", brief(dtype), ", expected one of F32, F64, BF16, F16, I32, I64");
  const Json& shape = value["shape"];
  if (!shape.is_array() || shape.size() > static_cast<size_t>(Shape::max_rank)) {
    malformed("has no usable shape, expected a list of at most ", Shape::max_rank, " sizes");
  }
  uint64_t bytes = size_of(entry.dtype);
  for (const Json& size : shape) {
    if (!size.is_number_unsigned()) malformed("has shape ", brief(shape), ", expected sizes of 0 or more");
    const uint64_t count = size.get<uint64_t>();
    if (count > static_cast<uint64_t>(INT64_MAX) || __builtin_mul_overflow(bytes, count, &bytes)) {
      malformed("has shape ", brief(shape), ", expected one that fits in memory");
    }
    entry.shape.push_back(static_cast<int64_t>(count));
  }
  const Json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    malformed("has data_offsets ", brief(offsets), ", expected two numbers");
  }
  entry.begin = offsets[0].get<uint64_t>();
  entry.end = offsets[1].get<uint64_t>();
  if (entry.begin > entry.end || entry.end > data_bytes) {
    malformed("ends at byte ", entry.end, " of the data, expected at most ", data_bytes, ": the file is cut short");
  }
  if (entry.end - entry.begin != bytes) {
    malformed("has ", entry.end - entry.begin, " bytes of data, expected ", bytes, " for shape ", entry.shape);
  }
  return entry;
}

}  // namespace

void write_file_atomically(const std::string& path, const std::vector<std::pair<const void*, size_t>>& contents) {
  TemporaryFile file(path);
  for (const auto& [data, size] : contents) file.write(data, size);
  file.finish();
}

void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, const Metadata& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  const NoGrad no_grad;
  std::vector<Tensor> on_cpu;
  uint64_t offset = 0;
  for (const NamedTensor& entry : tensors) {
    require_defined("save_safetensors", "a tensor", entry.tensor);
    STROBE_CHECK(entry.name != "__metadata__",
                 "save_safetensors: a tensor named '__metadata__' given, expected a name ",
                 "that the format does not use itself");
    STROBE_CHECK(!header.contains(entry.name), "save_safetensors: two tensors named '", entry.name,
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

SafeTensors load_safetensors(const std::string& path) {
  std::error_code code;
  STROBE_CHECK(std::filesystem::exists(path, code), "load_safetensors: ", path, " does not exist");
  STROBE_CHECK(std::filesystem::is_regular_file(path, code), "load_safetensors: ", path,
               " is not a regular file, expected a safetensors file");
  const uint64_t file_bytes = std::filesystem::file_size(path, code);
  std::ifstream file(path, std::ios::binary);
  STROBE_CHECK(!code && file, "load_safetensors: ", path, " cannot be read: ", std::strerror(errno));
  uint64_t header_bytes = 0;
  STROBE_CHECK(file_bytes >= sizeof(header_bytes) && file.read(reinterpret_cast<char*>(&header_bytes), 8),
               "load_safetensors: ", path, " has ", file_bytes, " bytes, expected a safetensors file");
  STROBE_CHECK(header_bytes >= 2 && header_bytes <= file_bytes - sizeof(header_bytes), "load_safetensors: ", path,
               " announces a header of ", header_bytes, " bytes but has ", file_bytes - sizeof(header_bytes),
               " left: cut short, or not a safetensors file");
  std::string text(header_bytes, '\0');
  STROBE_CHECK(file.read(text.data(), static_cast<std::streamsize>(header_bytes)), "load_safetensors: ", path,
               " cannot be read");
  std::set<std::string> names;
  bool duplicate = false;
  bool too_deep = false;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::key && depth == 1) duplicate |= !names.insert(parsed.get<std::string>()).second;
    too_deep |= depth > 3;
    return depth <= 3;  // what lies deeper is dropped, as the library copies values recursively
  };
  const Json header = Json::parse(text, watch, false);
  STROBE_CHECK(header.is_object(), "load_safetensors: ", path,
               " has no JSON object as header, expected a safetensors file");
  STROBE_CHECK(!too_deep, "load_safetensors: ", path, " nests its header too deeply, expected a safetensors file");
  STROBE_CHECK(!duplicate, "load_safetensors: ", path, " names a tensor twice in its header");
  const uint64_t data_bytes = file_bytes - sizeof(header_bytes) - header_bytes;

  SafeTensors result;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(path, name, value, data_bytes));
      continue;
    }
    STROBE_CHECK(value.is_object(), "load_safetensors: ", path, ": __metadata__ is no object of strings");
    for (const auto& [key, entry] : value.items()) {
      STROBE_CHECK(entry.is_string(), "load_safetensors: ", path, ": __metadata__ '", key, "' is no string");
      result.metadata[key] = entry.get<std::string>();
    }
  }
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const Entry& entry : entries) {
    STROBE_CHECK(entry.begin == covered, "load_safetensors: ", path, ": tensor '", entry.name, "' starts at byte ",
                 entry.begin, " of the data, expected ", covered, " (no overlaps, no gaps)");
    covered = entry.end;
  }
  STROBE_CHECK(covered == data_bytes, "load_safetensors: ", path, " has ", data_bytes, " bytes of data, expected ",
               covered, " by its header: cut short or damaged");
  for (const Entry& entry : entries) {
    const Tensor tensor = empty(entry.shape, entry.dtype, Device::cpu());
    const auto bytes = static_cast<std::streamsize>(entry.end - entry.begin);
    STROBE_CHECK(bytes == 0 || file.read(static_cast<char*>(tensor.data()), bytes), "load_safetensors: ", path,
                 " cannot be read to its end");
    result.tensors.push_back({entry.name, tensor});
  }
  return result;
}

}  // namespace strobe
