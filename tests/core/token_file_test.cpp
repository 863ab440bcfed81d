#include "strobe/core/io/token_file.h"

#include <filesystem>
#include <limits>
#include <numeric>
#include <vector>

#include "support/compare.h"
#include "support/temporary_folder.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

std::vector<int32_t> all_of(const TokenView& tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(tokens.size()));
  tokens.read(0, ids);
  return ids;
}

// A header with these first three numbers and these bytes behind it.
std::string crafted(int32_t magic, int32_t version, int32_t count, const std::string& ids) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic, header[1] = version, header[2] = count;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) + ids;
}

std::string error_for(const std::string& contents) {
  return error_of([&] { parse_token_file(std::as_bytes(std::span(contents)), "a.bin"); });
}

}  // namespace

TEST_CASE("token file: ids come back unchanged, in 16 bits up to a vocabulary of 65,536 and in 32 above") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.bin";
  const std::vector<int32_t> narrow{0, 1, 50256, 65535};
  save_tokens(path, narrow, 65536);
  CHECK(std::filesystem::file_size(path) == 1024 + 4 * 2);
  CHECK(all_of(TokenFile(path).tokens()) == narrow);
  const std::vector<int32_t> wide{0, 65536, 128255, std::numeric_limits<int32_t>::max()};
  save_tokens(path, wide, int64_t{1} << 31);
  CHECK(std::filesystem::file_size(path) == 1024 + 4 * 4);
  CHECK(all_of(TokenFile(path).tokens()) == wide);
}

TEST_CASE("token file: the layout is llm.c's, byte for byte") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.bin";
  save_tokens(path, std::vector<int32_t>{0x0102, 7}, 50257);
  CHECK(read_file(path) == crafted(20240520, 1, 2, std::string("\x02\x01\x07\x00", 4)));
  save_tokens(path, std::vector<int32_t>{0x01020304}, 128256 << 10);
  CHECK(read_file(path) == crafted(20240801, 7, 1, "\x04\x03\x02\x01"));
}

TEST_CASE("token file: anything but a whole file is refused, naming what is wrong") {
  const std::string ids(8, '\x01');
  CHECK(contains(error_for(""), "has 0 bytes"));
  CHECK(contains(error_for(std::string(1023, 'x')), "1023 bytes"));
  CHECK(contains(error_for(crafted(20240521, 1, 4, ids)), "20240521, expected 20240520"));
  CHECK(contains(error_for(crafted(20240520, 7, 4, ids)), "version 7, expected 1"));
  CHECK(contains(error_for(crafted(20240801, 1, 2, ids)), "version 1, expected 7"));
  CHECK(contains(error_for(crafted(20240520, 1, 0, "")), "announces 0 tokens"));
  CHECK(contains(error_for(crafted(20240520, 1, -4, ids)), "announces -4 tokens"));
  CHECK(contains(error_for(crafted(20240520, 1, 5, ids)), "1032 bytes, expected 1034"));
  CHECK(contains(error_for(crafted(20240520, 1, 3, ids)), "cut short or damaged"));
  CHECK(contains(error_for(crafted(20240520, 1, 4, ids + "x")), "1033 bytes"));
  CHECK(contains(error_for(crafted(20240801, 7, std::numeric_limits<int32_t>::max(), ids)), "8589935612"));
  CHECK(contains(error_for("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"), "git-lfs pointer"));
  CHECK(contains(error_of([] { TokenFile("/nonexistent/a.bin"); }), "No such file"));
  CHECK(contains(error_of([] { TokenFile("/tmp"); }), "is a folder"));
  CHECK(contains(error_of([] { TokenFile("/dev/zero"); }), "device"));
}

TEST_CASE("token file: every length but the right one is refused") {
  const std::string whole = crafted(20240520, 1, 3, "abcdef");
  for (size_t length = 0; length < whole.size(); ++length) {
    CAPTURE(length);
    CHECK_THROWS_AS(parse_token_file(std::as_bytes(std::span(whole.data(), length)), "a.bin"), Error);
  }
  CHECK(parse_token_file(std::as_bytes(std::span(whole)), "a.bin").size() == 3);
}

TEST_CASE("token file: the first id outside the vocabulary is found wherever it is") {
  for (const int64_t size : {1, 4095, 4096, 4097, 20000})
    for (const int64_t position : {int64_t{0}, size / 2, size - 1}) {
      CAPTURE(size);
      CAPTURE(position);
      std::vector<uint16_t> narrow(static_cast<size_t>(size), 99);
      std::vector<uint32_t> wide(narrow.begin(), narrow.end());
      CHECK(!TokenView(narrow).first_not_below(100));
      CHECK(!TokenView(wide).first_not_below(100));
      narrow[static_cast<size_t>(position)] = narrow.back() = 100;
      wide[static_cast<size_t>(position)] = wide.back() = 4'000'000'000;
      REQUIRE(TokenView(narrow).first_not_below(100));
      CHECK(TokenView(narrow).first_not_below(100)->position == position);
      CHECK(TokenView(narrow).first_not_below(100)->id == 100);
      CHECK(!TokenView(narrow).first_not_below(101));
      // An id that is no int32 is in no vocabulary.
      REQUIRE(TokenView(wide).first_not_below(int64_t{1} << 40));
      CHECK(TokenView(wide).first_not_below(int64_t{1} << 40)->position == position);
      CHECK(TokenView(wide).first_not_below(int64_t{1} << 40)->id == 4'000'000'000);
    }
}

TEST_CASE("token file: a part that does not exist cannot be read") {
  const std::vector<uint16_t> ids{1, 2, 3};
  const TokenView tokens(ids);
  std::vector<int32_t> out(2);
  tokens.read(1, out);
  CHECK(out == std::vector<int32_t>{2, 3});
  CHECK_THROWS_AS(tokens.read(2, out), Error);
  CHECK_THROWS_AS(tokens.read(-1, out), Error);
  CHECK_THROWS_AS(tokens.read(std::numeric_limits<int64_t>::max() - 1, out), Error);
}

TEST_CASE("token file: a file cut short while it is mapped gives an error") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.bin";
  save_tokens(path, std::vector<int32_t>(10000, 1), 2);
  const TokenFile file(path);
  file.require_whole();
  std::filesystem::resize_file(path, 2000);
  CHECK(contains(error_of([&] { file.require_whole(); }), "shrunk to 2000"));
}

TEST_CASE("token file: what fails leaves the file that was there and nothing beside it") {
  const TemporaryFolder folder;
  const std::string path = folder / "a.bin";
  save_tokens(path, std::vector<int32_t>{1, 2, 3}, 4);
  const std::string before = read_file(path);
  CHECK(contains(error_of([&] { save_tokens(path, std::vector<int32_t>{1, 4}, 4); }), "id 4 at position 1"));
  CHECK(contains(error_of([&] { save_tokens(path, std::vector<int32_t>{-1}, 4); }), "id -1 at position 0"));
  CHECK(contains(error_of([&] { save_tokens(path, {}, 4); }), "no tokens"));
  CHECK(contains(error_of([&] { save_tokens(path, std::vector<int32_t>{1}, 0); }), "vocab_size 0"));
  {
    TokenFileWriter unfinished(path, 4);
    unfinished.append(std::vector<int32_t>{1, 2});
  }
  CHECK(read_file(path) == before);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path), {}) == 1);
  CHECK(contains(error_of([&] { save_tokens(folder / "no/such/folder", std::vector<int32_t>{1}, 4); }), "cannot be"));
}

TEST_CASE("token file: appending in pieces gives the same file as saving at once") {
  const TemporaryFolder folder;
  std::vector<int32_t> ids(1000);
  std::iota(ids.begin(), ids.end(), 0);
  save_tokens(folder / "once.bin", ids, 1000);
  TokenFileWriter writer(folder / "pieces.bin", 1000);
  const std::span<const int32_t> all(ids);
  writer.append(all.first(1));
  writer.append({});
  writer.append(all.subspan(1));
  CHECK(writer.size() == 1000);
  writer.finish();
  CHECK(read_file(folder / "once.bin") == read_file(folder / "pieces.bin"));
}
