#include "strobe/core/io/dataset.h"

#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "strobe/core/io/permutation.h"
#include "support/compare.h"
#include "support/temporary_folder.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

// The ids 0, 1, ..., count - 1: an id is its position.
std::vector<int32_t> counting(int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

// Where the next window begins.
int64_t next_start(TokenDataset& data) { return data.next_batch(1).tokens.to_vector<int32_t>().front(); }

std::vector<int64_t> epoch_starts(TokenDataset& data, int64_t epoch) {
  data.set_position({.seed = data.position().seed, .epoch = epoch, .index = 0});
  std::vector<int64_t> starts(static_cast<size_t>(data.num_windows(epoch)));
  for (int64_t& start : starts) start = next_start(data);
  return starts;
}

std::vector<int32_t> all_of(const TokenSource& source) {
  std::vector<int32_t> ids(static_cast<size_t>(source.size()));
  source.read(0, ids);
  return ids;
}

}  // namespace

TEST_CASE("permutation: one-to-one for every size, and another one for another key") {
  for (uint64_t size = 1; size <= 300; ++size) {
    CAPTURE(size);
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < size; ++i) seen.insert(permuted(i, size, 7));
    CHECK(seen.size() == size);
    CHECK(*seen.rbegin() == size - 1);
  }
  // Sizes near the limit neither wrap around nor collide.
  for (const uint64_t size : {uint64_t{1} << 40, uint64_t{1} << 63, ~uint64_t{0}}) {
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < 500; ++i) seen.insert(permuted(size - 1 - i, size, 7));
    CHECK(seen.size() == 500);
    CHECK(*seen.rbegin() < size);
  }
}

TEST_CASE("permutation: all orders of four are about equally frequent") {
  std::map<std::vector<uint64_t>, int> counts;
  constexpr int draws = 24000;
  for (uint64_t key = 0; key < draws; ++key) {
    std::vector<uint64_t> order;
    for (uint64_t i = 0; i < 4; ++i) order.push_back(permuted(i, 4, key));
    ++counts[order];
  }
  CHECK(counts.size() == 24);
  double chi_square = 0;  // 23 degrees of freedom: above 49.7 once in a thousand
  for (const auto& [order, count] : counts) chi_square += (count - 1000.0) * (count - 1000.0) / 1000.0;
  CHECK(chi_square < 49.7);
}

TEST_CASE("permutation: neighbours do not stay together") {
  constexpr uint64_t size = 100000;
  double sum = 0;
  uint64_t fixed = 0;
  for (uint64_t i = 0; i + 1 < size; ++i) {
    const double distance = static_cast<double>(permuted(i, size, 3)) - static_cast<double>(permuted(i + 1, size, 3));
    sum += std::abs(distance);
    fixed += permuted(i, size, 3) == i;
  }
  CHECK(sum / size / size == doctest::Approx(1.0 / 3).epsilon(0.02));  // of two independent places
  CHECK(fixed < 8);                                                    // 1 on average
}

TEST_CASE("dataset: an epoch holds each of its windows once, and they share no target") {
  for (const auto& [count, seq_len] : {std::pair{2, 1}, {3, 2}, {17, 16}, {18, 16}, {1000, 16}, {1000, 7}, {64, 63}}) {
    TokenDataset data(TokenSource(counting(count)), seq_len, 5);
    for (int64_t epoch = 0; epoch < 5; ++epoch) {
      CAPTURE(count);
      CAPTURE(epoch);
      std::vector<int64_t> starts = epoch_starts(data, epoch);
      std::sort(starts.begin(), starts.end());
      REQUIRE(!starts.empty());
      CHECK(starts.front() >= 0);
      CHECK(starts.front() < seq_len);
      CHECK(starts.back() + seq_len < count);
      CHECK(starts.back() + 2 * seq_len >= count);  // no room for another
      for (size_t i = 1; i < starts.size(); ++i) CHECK(starts[i] == starts[i - 1] + seq_len);
    }
  }
}

TEST_CASE("dataset: every token but the first becomes a target, and offsets are spread") {
  constexpr int64_t count = 50, seq_len = 8;
  TokenDataset data(TokenSource(counting(count)), seq_len, 1);
  std::set<int64_t> targets, offsets;
  for (int64_t epoch = 0; epoch < 60; ++epoch) {
    const std::vector<int64_t> starts = epoch_starts(data, epoch);
    offsets.insert(*std::min_element(starts.begin(), starts.end()));
    for (const int64_t start : starts)
      for (int64_t i = 1; i <= seq_len; ++i) targets.insert(start + i);
  }
  CHECK(targets.size() == count - 1);
  CHECK(offsets.size() == seq_len);
}

TEST_CASE("dataset: the seed decides the order, and epochs differ") {
  TokenDataset a(TokenSource(counting(5000)), 10, 1), same(TokenSource(counting(5000)), 10, 1);
  TokenDataset other(TokenSource(counting(5000)), 10, 2);
  const std::vector<int64_t> first = epoch_starts(a, 0);
  CHECK(epoch_starts(same, 0) == first);
  CHECK(epoch_starts(other, 0) != first);
  CHECK(epoch_starts(a, 1) != first);
}

TEST_CASE("dataset: targets are the tokens that follow; batches go on over the end of an epoch") {
  TokenDataset data(TokenSource(counting(100)), 9, 3);
  std::vector<int64_t> expected = epoch_starts(data, 0);
  for (int64_t start : epoch_starts(data, 1)) expected.push_back(start);
  data.set_position({.seed = 3, .epoch = 0, .index = 0});
  std::vector<int64_t> starts;
  for (int i = 0; i < 4; ++i) {
    const Batch batch = data.next_batch(5);
    CHECK(batch.tokens.shape() == Shape{5, 9});
    CHECK(batch.tokens.dtype() == DType::i32);
    CHECK(same_bits(batch.tokens.to(DType::f64) + ones({5, 9}, DType::f64), batch.targets.to(DType::f64)));
    for (int64_t row = 0; row < 5; ++row) starts.push_back(batch.tokens.to_vector<int32_t>()[9 * row]);
  }
  REQUIRE(expected.size() >= starts.size());
  expected.resize(starts.size());
  CHECK(starts == expected);
  CHECK(data.position().epoch == 1);
}

TEST_CASE("dataset: going on from a saved position gives what would have come") {
  TokenDataset data(TokenSource(counting(300)), 7, 11);
  for (int step = 0; step < 100; ++step) {
    const DataPosition saved = data.position();
    TokenDataset resumed(TokenSource(counting(300)), 7, 0);
    resumed.set_position(saved);
    const Batch batch = data.next_batch(3), again = resumed.next_batch(3);
    CHECK(same_bits(batch.tokens, again.tokens));
    CHECK(same_bits(batch.targets, again.targets));
    CHECK(data.position() == resumed.position());
  }
  CHECK(data.position().epoch > 5);
}

TEST_CASE("dataset: a position that does not fit is refused and changes nothing") {
  TokenDataset data(TokenSource(counting(300)), 7, 11);
  const DataPosition before = data.position();
  CHECK(contains(error_of([&] { data.set_position({11, 0, 43}); }), "position 43 of epoch 0"));
  CHECK_THROWS_AS(data.set_position({11, -1, 0}), Error);
  CHECK_THROWS_AS(data.set_position({11, 0, -1}), Error);
  CHECK_THROWS_AS(data.next_batch(0), Error);
  CHECK(data.position() == before);
}

TEST_CASE("dataset: token files are one sequence, as are vectors") {
  const TemporaryFolder folder;
  const std::vector<int32_t> ids = counting(1000);
  const std::span<const int32_t> all(ids);
  save_tokens(folder / "a.bin", all.first(1), 1000);
  save_tokens(folder / "b.bin", all.subspan(1, 500), 1000);
  save_tokens(folder / "c.bin", all.subspan(501), 100000);  // 32 bits
  const TokenSource files = TokenSource::from_files({folder / "a.bin", folder / "b.bin", folder / "c.bin"});
  CHECK(all_of(files) == ids);
  CHECK(all_of(TokenSource::from_files({folder.path.string()})) == ids);
  CHECK(all_of(files.slice(400, 700, "part")) == std::vector<int32_t>(ids.begin() + 400, ids.begin() + 700));
  CHECK(all_of(files.slice(400, 700, "part").slice(90, 110, "part")) ==
        std::vector<int32_t>(ids.begin() + 490, ids.begin() + 510));
  CHECK(files.slice(10, 10, "none").size() == 0);
  CHECK(files.fingerprint() == TokenSource(ids).fingerprint());
  std::vector<int32_t> others(ids);
  std::swap(others[998], others[999]);
  CHECK(TokenSource(others).fingerprint() != files.fingerprint());
  TokenDataset from_files(files, 16, 4), from_vector(TokenSource(ids), 16, 4);
  for (int i = 0; i < 20; ++i) CHECK(same_bits(from_files.next_batch(4).tokens, from_vector.next_batch(4).tokens));
  std::vector<int32_t> out(3);
  for (const int64_t begin : {int64_t{-1}, int64_t{998}, std::numeric_limits<int64_t>::max()})
    CHECK(contains(error_of([&] { files.read(begin, out); }), "of the 1000"));
}

TEST_CASE("dataset: an id outside the vocabulary is named with file, position and vocabulary") {
  const TemporaryFolder folder;
  save_tokens(folder / "a.bin", std::vector<int32_t>{1, 2, 3}, 256);
  save_tokens(folder / "b.bin", std::vector<int32_t>{4, 5, 6, 200, 7}, 256);
  const TokenSource files = TokenSource::from_files({folder / "a.bin", folder / "b.bin"});
  files.check_vocabulary(201);
  const std::string message = (folder / "b.bin") + ": token id 200 at position 3, expected ids of a vocabulary of 200";
  CHECK(error_of([&] { files.check_vocabulary(200); }) == message);
  // Positions are those in the file, also when only a part of it is used.
  CHECK(error_of([&] { files.slice(5, 8, "part").check_vocabulary(200); }) == message);
  files.slice(0, 6, "part").check_vocabulary(200);
  const TokenSource negative(std::vector<int32_t>{1, -1}, "ids");
  CHECK(contains(error_of([&] { negative.check_vocabulary(200); }), "ids: token id"));
}

TEST_CASE("dataset: a file cut short in use gives an error, and the position stays") {
  const TemporaryFolder folder;
  save_tokens(folder / "a.bin", counting(5000), 5000);
  TokenDataset data(TokenSource::from_files({folder / "a.bin"}), 16, 4);
  data.next_batch(2);
  const DataPosition before = data.position();
  std::filesystem::resize_file(folder / "a.bin", 3000);
  CHECK(contains(error_of([&] { data.next_batch(2); }), "shrunk"));
  CHECK(data.position() == before);
}

TEST_CASE("dataset: the end of the tokens is held out, or the files that say so") {
  const TokenSplit split = split_tokens(TokenSource(counting(1000)), 0.1);
  CHECK(all_of(split.training) == counting(900));
  CHECK(all_of(split.validation).front() == 900);
  CHECK(split.validation.size() == 100);
  for (const double fraction : {0.0, 1.0, -0.5, std::nan("")})
    CHECK(contains(error_of([&] { split_tokens(TokenSource(counting(10)), fraction); }), "between 0 and 1"));

  const TemporaryFolder folder;
  save_tokens(folder / "story_train_000001.bin", std::vector<int32_t>{3, 4}, 256);
  save_tokens(folder / "story_train_000000.bin", std::vector<int32_t>{1, 2}, 256);
  save_tokens(folder / "interval.bin", std::vector<int32_t>{0}, 256);
  write_file(folder / "notes.txt", "not tokens");
  CHECK(all_of(load_tokens({folder.path.string()}, 0.4).training) == std::vector<int32_t>{0, 1, 2});
  save_tokens(folder / "story_val_000000.bin", std::vector<int32_t>{5, 6, 7}, 256);
  const TokenSplit by_file = load_tokens({folder.path.string()}, 0.4);
  CHECK(all_of(by_file.training) == std::vector<int32_t>{0, 1, 2, 3, 4});
  CHECK(all_of(by_file.validation) == std::vector<int32_t>{5, 6, 7});
  CHECK(contains(error_of([&] { load_tokens({folder / "story_val_000000.bin"}, 0.4); }), "only validation files"));
  CHECK(contains(error_of([&] { load_tokens({folder / "notes.txt"}, 0.4); }), "notes.txt has 10 bytes"));
  std::filesystem::create_directory(folder / "nothing");
  CHECK(contains(error_of([&] { load_tokens({folder / "nothing"}, 0.4); }), "no token files"));
  CHECK_THROWS_AS(load_tokens({}, 0.4), Error);
}

TEST_CASE("dataset: a text shorter than the context is refused with both numbers") {
  const TokenSplit split = split_tokens(TokenSource(counting(100)), 0.1);
  require_windows(split, 9);
  CHECK(
      error_of([&] { require_windows(split, 10); }) ==
      "data: 90 tokens to train on and 10 held out for validation given, expected at least 11 of each (seq_len 10 and "
      "one target)");
  CHECK_THROWS_AS(require_windows(split, 0), Error);
  CHECK(contains(error_of([&] { TokenDataset(split.training, 90, 1); }), "of 90 tokens given, expected at least 91"));
  CHECK_THROWS_AS(TokenDataset(TokenSource(), 1, 1), Error);
  CHECK_THROWS_AS(TokenDataset(split.training, std::numeric_limits<int64_t>::max(), 1), Error);
}

TEST_CASE("dataset: evaluation windows lie evenly from the first token to the last and do not overlap") {
  for (const int64_t num_tokens : {11, 12, 20, 21, 22, 1000, 1001})
    for (const int64_t max_windows : {1, 2, 3, 7, 1000}) {
      CAPTURE(num_tokens);
      CAPTURE(max_windows);
      const std::vector<int64_t> starts = spread_windows(num_tokens, 10, max_windows);
      CHECK(std::ssize(starts) == std::min(max_windows, (num_tokens - 1) / 10));
      CHECK(starts.front() == 0);
      if (starts.size() > 1) CHECK(starts.back() == num_tokens - 11);
      for (size_t i = 1; i < starts.size(); ++i) CHECK(starts[i] - starts[i - 1] >= 10);
    }
  const int64_t huge = int64_t{1} << 62;
  CHECK(spread_windows(huge, 1024, 5).back() == huge - 1025);
  CHECK_THROWS_AS(spread_windows(10, 10, 5), Error);
  CHECK_THROWS_AS(spread_windows(11, 10, 0), Error);
}
