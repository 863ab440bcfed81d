#include "strobe/core/io/safetensors.h"

#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "support/compare.h"
#include "support/temporary_folder.h"

using namespace strobe;
using namespace strobe::testing;
namespace fs = std::filesystem;

namespace {

// A file with this JSON header and this many bytes of data.
std::string crafted(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, '\0');
}

SafeTensors parse(const std::string& contents) {
  return parse_safetensors(std::as_bytes(std::span(contents)), "a.safetensors");
}

std::string error_for(const std::string& contents) {
  return error_of([&] { parse(contents); });
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

TEST_CASE("safetensors: a file cut short anywhere, or longer than it says, is refused") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  save_safetensors(path, {{"w", ones({100})}});
  const std::string whole = read_file(path);
  for (size_t length = 0; length < whole.size(); ++length) {
    CAPTURE(length);
    CHECK_THROWS_AS(parse_safetensors(std::as_bytes(std::span(whole.data(), length)), "a"), Error);
  }
  CHECK(contains(error_for(whole + "x"), "cut short or damaged"));
  write_file(path, whole.substr(0, whole.size() - 1));
  CHECK(contains(error_of([&] { load_safetensors(path); }), path + ": tensor 'w' begins at byte 0"));
  CHECK(contains(error_of([&] { load_safetensors(folder / "missing"); }), "does not exist"));
  CHECK(contains(error_of([&] { load_safetensors(folder.path.string()); }), "not a regular file"));
}

TEST_CASE("safetensors: a file in memory and the same on disk give the same") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  save_safetensors(path, {{"w", uniform({3, 7}, 0.0, 1.0)}, {"none", empty({0})}}, {{"key", "value"}});
  const std::string whole = read_file(path);
  const SafeTensors parsed = parse_safetensors(std::as_bytes(std::span(whole)), "a");
  const SafeTensors loaded = load_safetensors(path);
  REQUIRE(parsed.tensors.size() == 2);
  for (size_t i = 0; i < 2; ++i) {
    CHECK(parsed.tensors[i].name == loaded.tensors[i].name);
    CHECK(same_bits(parsed.tensors[i].tensor, loaded.tensors[i].tensor));
  }
  CHECK(parsed.metadata == loaded.metadata);
}

TEST_CASE("safetensors: a foreign file is refused, saying what it is") {
  CHECK(contains(error_for(""), "0 bytes"));
  CHECK(contains(error_for("1234567"), "7 bytes"));
  CHECK(contains(error_for(std::string(100, '\xff')), "not a safetensors file"));
  CHECK(contains(error_for("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"), "git-lfs pointer"));
  CHECK(contains(error_for(crafted("[1, 2]", 0)), "no JSON object"));
  CHECK(contains(error_for(crafted("", 0)), "not JSON from byte"));
  CHECK(contains(error_for(crafted("{}{}", 0)), "not JSON from byte"));
  CHECK(contains(error_for(crafted("{\"\xff\":0}", 0)), "not JSON from byte"));
  CHECK(contains(error_for(crafted("{}", 1)), "1 bytes of data, expected 0"));
  std::string huge(std::size_t{100'000'009}, ' ');
  const uint64_t length = 100'000'001;
  std::memcpy(huge.data(), &length, 8);
  CHECK(contains(error_for(huge), "expected at most 100000000"));
  CHECK(parse(crafted("{}", 0)).tensors.empty());
  CHECK(parse(crafted("  {\"__metadata__\" : {}}  ", 0)).tensors.empty());
}

TEST_CASE("safetensors: a crafted header is refused, naming what is wrong") {
  const auto error_of_tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return error_for(
        crafted(R"({"w":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}", 4));
  };
  CHECK(parse(crafted(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4)).tensors.size() == 1);
  for (const char* dtype : {R"("F99")", R"("f32")", R"("BOOL")", "4", "null", R"(["F32"])", "{}"}) {
    CAPTURE(dtype);
    CHECK(contains(error_of_tensor(dtype, "[1]", "[0,4]"), "dtype"));
  }
  for (const char* shape : {"[-1]", "[1.5]", "[1e300]", R"(["1"])", "[[1]]", "1", "[null]", "[true]", "{}",
                            "[1,1,1,1,1,1,1,1,1]", "[18446744073709551616]", "[9223372036854775808]"}) {
    CAPTURE(shape);
    CHECK(contains(error_of_tensor(R"("F32")", shape, "[0,4]"), "shape"));
  }
  for (const char* offsets : {"[0]", "[]", "[0,4,8]", "[-4,0]", "[0,4.0]", R"(["0","4"])", "4", "[[0,4]]", "{}"}) {
    CAPTURE(offsets);
    CHECK(contains(error_of_tensor(R"("F32")", "[1]", offsets), "data_offsets"));
  }
  CHECK(contains(error_of_tensor(R"("F32")", "[2]", "[0,4]"), "4 bytes of data, expected 8"));
  CHECK(contains(error_of_tensor(R"("F32")", "[1]", "[4,0]"), "ends at byte 0"));
  CHECK(contains(error_of_tensor(R"("F32")", "[2]", "[0,8]"), "ends at byte 8"));
  // Numbers that wrap around in 64 bits.
  CHECK(
      contains(error_of_tensor(R"("F32")", "[1]", "[18446744073709551612,0]"), "begins at byte 18446744073709551612"));
  CHECK(contains(error_of_tensor(R"("F32")", "[4611686018427387905]", "[0,4]"), "fits"));
  CHECK(contains(error_of_tensor(R"("F32")", "[4611686018427387904,4]", "[0,0]"), "fits"));
  CHECK(contains(error_of_tensor(R"("F32")", "[0,4611686018427387904,4]", "[0,0]"), "fits"));
  CHECK(contains(error_of_tensor(R"("F32")", "[0,2305843009213693952]", "[0,0]"), "fits"));
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":"F32","shape":[1]}})", 4)), "lacks"));
  CHECK(contains(error_for(crafted(R"({"w":{}})", 4)), "lacks"));
  CHECK(contains(error_for(crafted(R"({"w":3})", 4)), "tensor 'w' is 3"));
  CHECK(contains(error_for(crafted(R"({"w":[]})", 4)), "tensor 'w' is a list"));
  CHECK(contains(error_for(crafted(R"({"w":{"dtype":"F32","dtype":"F32"}})", 4)), "dtype twice"));
  CHECK(contains(error_for(crafted(R"({"w":{"shape":[],"shape":[]}})", 4)), "shape twice"));
  CHECK(contains(error_for(crafted(R"({"w":{"data_offsets":[0,4],"data_offsets":[0,4]}})", 4)), "data_offsets twice"));
  CHECK(contains(error_for(crafted(R"({"w":{"data":0}})", 4)), "key 'data'"));
  CHECK(contains(error_for(crafted(R"({"__metadata__":[]})", 0)), "__metadata__ is a list"));
  CHECK(contains(error_for(crafted(R"({"__metadata__":{"a":1}})", 0)), "'a' is 1"));
  CHECK(contains(error_for(crafted(R"({"__metadata__":{"a":{}}})", 0)), "'a' is an object"));
  CHECK(contains(error_for(crafted(R"({"__metadata__":{"a":"","a":""}})", 0)), "'a' is there twice"));
  CHECK(contains(error_for(crafted(R"({"__metadata__":{},"__metadata__":{}})", 0)), "there twice"));
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');
  CHECK(contains(error_of_tensor(deep, "[1]", "[0,4]"), "a list in 'dtype'"));
}

TEST_CASE("safetensors: tensors that overlap, leave gaps or share a name are refused") {
  const auto error_of_two = [](const char* name, const char* first, const char* second, size_t data_bytes) {
    return error_for(crafted(concat_message(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":)", first, R"(},")", name,
                                            R"(":{"dtype":"F32","shape":[1],"data_offsets":)", second, "}}"),
                             data_bytes));
  };
  CHECK(contains(error_of_two("b", "[0,4]", "[0,4]", 4), "tensor 'b' starts at byte 0 of the data, expected 4"));
  CHECK(contains(error_of_two("b", "[0,4]", "[2,6]", 6), "no overlaps"));
  CHECK(contains(error_of_two("b", "[0,4]", "[8,12]", 12), "no gaps"));
  CHECK(contains(error_of_two("b", "[8,12]", "[4,8]", 12), "tensor 'b' starts at byte 4 of the data, expected 0"));
  CHECK(contains(error_of_two("b", "[4,8]", "[0,4]", 9), "9 bytes of data, expected 8"));
  CHECK(contains(error_of_two("a", "[0,4]", "[4,8]", 8), "tensor 'a' is there twice"));
  CHECK(contains(error_of_two("\\u0061", "[0,4]", "[4,8]", 8), "tensor 'a' is there twice"));
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
