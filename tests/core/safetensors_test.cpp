#include "strobe/core/io/safetensors.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "support/compare.h"

using namespace strobe;
using namespace strobe::testing;
namespace fs = std::filesystem;

namespace {

struct TemporaryFolder {
  fs::path path = fs::temp_directory_path() / ("strobe_io_test_" + std::to_string(getpid()));
  TemporaryFolder() { fs::create_directories(path); }
  ~TemporaryFolder() { fs::remove_all(path); }
  std::string operator/(const char* name) const { return (path / name).string(); }
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary) << contents;
}

// A file with this JSON header and this many bytes of data.
std::string crafted(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, '\0');
}

}  // namespace

TEST_CASE("safetensors: every dtype, empty and strided tensors and metadata come back unchanged") {
  const TemporaryFolder folder;
  std::vector<NamedTensor> tensors;
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64}) {
    tensors.push_back({std::string("w.") + name_of(dtype), uniform({3, 5}, -9.0, 9.0, DType::f64).to(dtype)});
  }
  tensors.push_back({"scalar", full({}, 2.0)});
  tensors.push_back({"nothing", empty({0, 3})});
  tensors.push_back({"turned \"quoted\"", transpose(uniform({2, 3}, 0.0, 1.0), 0, 1)});
  save_safetensors(folder / "a.safetensors", tensors, {{"model", "test"}});
  const SafeTensors loaded = load_safetensors(folder / "a.safetensors");
  CHECK(loaded.metadata == Metadata{{"model", "test"}});
  REQUIRE(loaded.tensors.size() == tensors.size());
  for (const NamedTensor& entry : loaded.tensors) {
    const auto original = std::find_if(tensors.begin(), tensors.end(), [&](auto& t) { return t.name == entry.name; });
    REQUIRE(original != tensors.end());
    CHECK(same_bits(entry.tensor, original->tensor));
  }
}

TEST_CASE("safetensors: anything but a whole file is refused, naming what is wrong") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  save_safetensors(path, {{"w", ones({100})}});
  const std::string whole = read_file(path);
  for (size_t length = 0; length < whole.size(); length += 7) {
    CAPTURE(length);
    write_file(path, whole.substr(0, length));
    CHECK_THROWS_AS(load_safetensors(path), Error);
  }
  const auto error_for = [&](const std::string& contents) {
    write_file(path, contents);
    return error_of([&] { load_safetensors(path); });
  };
  CHECK(contains(error_for(whole + "x"), "cut short or damaged"));
  CHECK(contains(error_for(std::string(100, '\xff')), "not a safetensors file"));
  CHECK(contains(error_for(crafted("[1, 2]", 0)), "no JSON object"));
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})", 4)), "dtype"));
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4)), "shape"));
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4)), "expected 8"));
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4)), "ends at byte"));
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0)),
                 "fits"));
  CHECK(contains(error_for(crafted(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                   R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                                   4)),
                 "no overlaps"));
  CHECK(contains(error_for(crafted(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                                   R"("a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
                                   0)),
                 "twice"));
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":)" + deep + R"(,"shape":[1],"data_offsets":[0,4]}})", 4)),
                 "too deeply"));
  CHECK(
      contains(error_for(crafted(R"({"w":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0)),
               "2^63"));
  CHECK(contains(error_of([&] { load_safetensors(folder / "missing"); }), "does not exist"));
  CHECK(contains(error_of([&] { load_safetensors(folder.path.string()); }), "not a regular file"));
}

TEST_CASE("safetensors: a failed save leaves the file that was there") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  save_safetensors(path, {{"w", ones({4})}});
  const std::string before = read_file(path);
  CHECK(contains(error_of([&] { save_safetensors(path, {{"w", ones({2})}, {"w", ones({2})}}); }), "two tensors named"));
  CHECK(contains(error_of([&] { save_safetensors(path, {{"__metadata__", ones({2})}}); }), "__metadata__"));
  CHECK(contains(error_of([&] { save_safetensors(path, {{"\xff", ones({2})}}); }), "UTF-8"));
  CHECK(read_file(path) == before);
  CHECK(contains(error_of([&] { save_safetensors(folder / "no/such/folder", {{"w", ones({2})}}); }), "cannot be"));
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);
}

TEST_CASE("safetensors: a disk that fills up while saving leaves the file that was there") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  save_safetensors(path, {{"w", ones({4})}});
  const std::string before = read_file(path);
  // A limit on the size of files makes write fail half way, as a full disk does.
  rlimit limit;
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{.rlim_cur = 10000, .rlim_max = limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string message = error_of([&] { save_safetensors(path, {{"w", ones({100000})}}); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  CHECK(contains(message, "cannot be written"));
  CHECK(read_file(path) == before);
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) == 1);
}
