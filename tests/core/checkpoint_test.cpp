// Checkpoint folders: what comes back, what stays, and what is refused.
#include "strobe/core/io/checkpoint.h"

#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "support/compare.h"
#include "support/temporary_folder.h"

using namespace strobe;
using namespace strobe::testing;
namespace fs = std::filesystem;

namespace {

Checkpoint example(int64_t step) {
  Checkpoint checkpoint;
  checkpoint.step = step;
  checkpoint.tensors["model.safetensors"] = {{"w", full({3, 4}, static_cast<double>(step))}, {"b", zeros({0})}};
  checkpoint.texts["state.json"] = std::string("any \0 bytes \xff", 13) + std::to_string(step);
  return checkpoint;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("checkpoint: tensors and texts come back bit for bit") {
  const TemporaryFolder folder;
  save_checkpoint(folder.path.string(), example(7));
  const Checkpoint back = load_checkpoint(checkpoint_path(folder.path.string(), 7));
  CHECK(back.step == 7);
  CHECK(back.texts == example(7).texts);
  REQUIRE(back.tensors.size() == 1);
  const std::vector<NamedTensor>& tensors = back.tensors.at("model.safetensors");
  REQUIRE(tensors.size() == 2);
  const Checkpoint original = example(7);
  for (const NamedTensor& wanted : original.tensors.at("model.safetensors")) {
    const NamedTensor& found = tensors[0].name == wanted.name ? tensors[0] : tensors[1];
    CHECK(found.name == wanted.name);
    CHECK(same_bits(found.tensor, wanted.tensor));
  }
}

TEST_CASE("checkpoint: the last k and the best stay, links point to the last and the best") {
  const TemporaryFolder folder;
  const std::string path = folder.path.string();
  for (int64_t step = 1; step <= 6; ++step) {
    save_checkpoint(path, example(step), {.keep_last = 2, .best = step == 2 || step == 3});
  }
  CHECK(names_in(folder.path) == Names{"best", "last", "step-00000003", "step-00000005", "step-00000006"});
  CHECK(load_checkpoint(folder / "best").step == 3);
  CHECK(load_checkpoint(folder / "last").step == 6);
  CHECK(checkpoint_steps(path) == std::vector<int64_t>{3, 5, 6});
  CHECK(load_newest_checkpoint(path)->checkpoint.step == 6);
  CHECK_FALSE(load_newest_checkpoint(folder / "nothing here").has_value());
}

TEST_CASE("checkpoint: one of the same step is replaced as a whole") {
  const TemporaryFolder folder;
  Checkpoint first = example(1);
  first.texts["only_in_the_first"] = "x";
  save_checkpoint(folder.path.string(), first);
  save_checkpoint(folder.path.string(), example(1), {.best = true});
  CHECK(load_checkpoint(folder / "best").texts == example(1).texts);
  CHECK(names_in(folder.path) == Names{"best", "last", "step-00000001"});
}

TEST_CASE("checkpoint: links that a killed process left behind are repaired") {
  const TemporaryFolder folder;
  const std::string path = folder.path.string();
  for (int64_t step = 1; step <= 4; ++step) save_checkpoint(path, example(step), {.keep_last = 9, .best = step <= 3});
  save_checkpoint(path, example(3), {.keep_last = 9});  // still the best
  const auto link = [&](const char* name, const char* to) {
    fs::remove(folder.path / name);
    if (to != nullptr) fs::create_symlink(to, folder.path / name);
  };
  for (const char* stale : {"step-00000002", static_cast<const char*>(nullptr)}) {
    link("best", stale);
    link("last", stale);
    repair_checkpoint_links(path, 4);
    CHECK(load_checkpoint(folder / "best").step == 3);
    CHECK(load_checkpoint(folder / "last").step == 4);
  }
  fs::remove(folder.path / "step-00000002/checkpoint.json");  // damaged: as if it had not been the best
  repair_checkpoint_links(path, 2);
  CHECK(load_checkpoint(folder / "best").step == 1);
}

TEST_CASE("checkpoint: what an interrupted save left is passed over, and removed by the next one") {
  const TemporaryFolder folder;
  save_checkpoint(folder.path.string(), example(1));
  write_file(folder / ".unfinished-new/model.safetensors", "half a file");
  CHECK(load_newest_checkpoint(folder.path.string())->checkpoint.step == 1);
  save_checkpoint(folder.path.string(), example(2));
  CHECK(names_in(folder.path) == Names{"last", "step-00000001", "step-00000002"});
}

TEST_CASE("checkpoint: damaged ones are passed over, with what is wrong") {
  const TemporaryFolder folder;
  const std::string path = folder.path.string();
  for (int64_t step = 1; step <= 4; ++step) save_checkpoint(path, example(step), {.keep_last = 9});
  fs::resize_file(folder / "step-00000004/model.safetensors", 20);
  fs::remove(folder / "step-00000003/state.json");
  const std::optional<NewestCheckpoint> newest = load_newest_checkpoint(path);
  REQUIRE(newest.has_value());
  CHECK(newest->checkpoint.step == 2);
  REQUIRE(newest->damaged.size() == 2);
  CHECK(contains(newest->damaged[0], "step-00000004/model.safetensors has 20 bytes, expected"));
  CHECK(contains(newest->damaged[1], "step-00000003/state.json is missing"));
  write_file(folder.path / "step-00000004/model.safetensors",
             "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
  CHECK(contains(load_newest_checkpoint(path)->damaged[0], "step-00000004/model.safetensors is a git-lfs pointer"));
  write_file(folder.path / "step-00000003/checkpoint.json", R"({"format": "strobe checkpoint", "version": 2})");
  CHECK(contains(error_of([&] { load_newest_checkpoint(path); }), "has version 2, expected 1"));
  for (const char* step : {"step-00000001", "step-00000002", "step-00000003"}) fs::remove_all(folder.path / step);
  CHECK(contains(error_of([&] { load_newest_checkpoint(path); }), "is a git-lfs pointer"));
}

TEST_CASE("checkpoint: a list that is crafted, cut or of another version is refused") {
  const TemporaryFolder folder;
  save_checkpoint(folder.path.string(), example(1));
  const std::string path = checkpoint_path(folder.path.string(), 1);
  const auto error_with = [&](const std::string& list) {
    write_file(path + "/checkpoint.json", list);
    return error_of([&] { load_checkpoint(path); });
  };
  const std::string begin = R"({"format": "strobe checkpoint", "version": 1, "step": 1, "files": )";
  write_file(path + "/checkpoint.json", begin + "{}}");
  CHECK(load_checkpoint(path).texts.empty());
  CHECK(contains(error_with(begin + R"({"../../secret": 5}})"), "outside of the folder"));
  CHECK(contains(error_with(begin + R"({".hidden": 5}})"), "outside of the folder"));
  CHECK(contains(error_with(begin + R"({"state.json": -1}})"), "without a size"));
  CHECK(contains(error_with(begin + R"({"state.json": 999}})"), "bytes, expected 999"));
  CHECK(contains(error_with(begin + R"({"/": {"a": {"b": 1}}}})"), "not the list"));
  CHECK(contains(error_with(R"({"format": "strobe checkpoint", "version": 2})"), "has version 2, expected 1"));
  CHECK(
      contains(error_with(R"({"format": "strobe checkpoint", "version": 1, "step": -1, "files": {}})"), "lacks step"));
  CHECK(contains(error_with("{}"), "is not the list of a checkpoint"));
  CHECK(contains(error_with(""), "is not the list of a checkpoint"));
  CHECK(contains(error_with(std::string(100000, '[')), "is not the list of a checkpoint"));
}

TEST_CASE("checkpoint: a full disk or a vanished folder leaves the earlier one whole") {
  const TemporaryFolder folder;
  const std::string path = folder.path.string();
  save_checkpoint(path, example(1), {.best = true});
  Checkpoint large = example(2);
  large.tensors["optimizer.safetensors"] = {{"w", zeros({1 << 20})}};
  const auto previous = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{1 << 20, limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] { save_checkpoint(path, large, {.keep_last = 1, .best = true}); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, previous);
  CHECK(contains(error, "optimizer.safetensors cannot be written: File too large"));
  CHECK(names_in(folder.path) == Names{"best", "last", "step-00000001"});
  CHECK(load_checkpoint(folder / "best").step == 1);
  CHECK(contains(error_of([&] { save_checkpoint(folder / "gone", example(1)); }), "No such file"));
}

TEST_CASE("checkpoint: bad arguments are named") {
  const TemporaryFolder folder;
  const std::string path = folder.path.string();
  CHECK(contains(error_of([&] { save_checkpoint(path, example(-1)); }), "step -1 given"));
  CHECK(contains(error_of([&] { save_checkpoint(path, example(1), {.keep_last = 0}); }), "keep_last 0 given"));
  for (const char* name : {"", "../a", ".a", "checkpoint.json", "a.safetensors"}) {
    Checkpoint checkpoint = example(1);
    checkpoint.texts.insert_or_assign(name, std::string(1, 'x'));
    CHECK(contains(error_of([&] { save_checkpoint(path, checkpoint); }), "file name '"));
  }
  CHECK(names_in(folder.path).empty());
}
