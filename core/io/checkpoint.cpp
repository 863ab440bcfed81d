#include "strobe/core/io/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "strobe/core/io/atomic_file.h"
#include "strobe/core/io/mapped_file.h"

namespace strobe {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t format_version = 1;
constexpr const char* list_file = "checkpoint.json";
constexpr uint64_t max_list_bytes = 1 << 20;
constexpr const char* tensor_suffix = ".safetensors";
constexpr const char* unfinished = ".unfinished-";  // begins the name of what is being written or removed
constexpr const char* step_prefix = "step-";
constexpr int step_digits = 8;

// A plain name: nothing that leads out of the folder, and no hidden file.
bool is_file_name(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.find_first_of(std::string("/\0", 2)) == std::string::npos;
}

[[noreturn]] void fail_to(const char* operation, const fs::path& path, const char* what, int code) {
  fail(operation, ": ", path.string(), " cannot be ", what, ": ", std::strerror(code));
}

void sync_folder(const fs::path& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_to("save_checkpoint", folder, "written", errno);
  const int code = fsync(descriptor) == 0 ? 0 : errno;
  close(descriptor);
  if (code != 0) fail_to("save_checkpoint", folder, "written", code);
}

void move(const fs::path& from, const fs::path& to) {
  if (rename(from.c_str(), to.c_str()) != 0) fail_to("save_checkpoint", to, "written", errno);
}

void remove_unfinished(const fs::path& folder) {
  std::error_code code;
  std::vector<fs::path> doomed;
  for (fs::directory_iterator entry(folder, code), end; !code && entry != end; entry.increment(code)) {
    if (entry->path().filename().string().starts_with(unfinished)) doomed.push_back(entry->path());
  }
  if (code) fail_to("save_checkpoint", folder, "read", code.value());
  for (const fs::path& path : doomed) {
    fs::remove_all(path, code);
    if (code) fail_to("save_checkpoint", path, "removed", code.value());
  }
}

// Renamed first: a checkpoint never stands there with half of its files.
void remove_checkpoint(const fs::path& path) {
  const fs::path doomed = path.parent_path() / (unfinished + path.filename().string());
  move(path, doomed);
  std::error_code code;
  fs::remove_all(doomed, code);
  if (code) fail_to("save_checkpoint", doomed, "removed", code.value());
}

// Puts `fresh` in the place of `path`, at once where the file system can exchange two folders.
void replace_folder(const fs::path& fresh, const fs::path& path) {
  if (!fs::exists(fs::symlink_status(path))) return move(fresh, path);
  if (renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    std::error_code code;
    fs::remove_all(fresh, code);
    if (code) fail_to("save_checkpoint", fresh, "removed", code.value());
  } else {
    remove_checkpoint(path);
    move(fresh, path);
  }
}

void point_link(const fs::path& link, const fs::path& target) {
  const fs::path fresh = link.parent_path() / (unfinished + link.filename().string());
  if (symlink(target.filename().c_str(), fresh.c_str()) != 0) fail_to("save_checkpoint", link, "written", errno);
  move(fresh, link);
}

void write_files(const fs::path& folder, const Checkpoint& checkpoint, bool best) {
  Json files = Json::object();
  const auto check_name = [](const std::string& name, bool tensors) {
    STROBE_CHECK(is_file_name(name) && name != list_file && name.ends_with(tensor_suffix) == tensors,
                 "save_checkpoint: file name '", name, "' given, expected ",
                 tensors ? "one that ends in .safetensors" : "a plain one that does not end in .safetensors");
  };
  for (const auto& [name, tensors] : checkpoint.tensors) {
    check_name(name, true);
    save_safetensors((folder / name).string(), tensors);
    std::error_code code;
    files[name] = fs::file_size(folder / name, code);
    if (code) fail_to("save_checkpoint", folder / name, "read", code.value());
  }
  for (const auto& [name, text] : checkpoint.texts) {
    check_name(name, false);
    write_file_atomically((folder / name).string(), {{text.data(), text.size()}});
    files[name] = text.size();
  }
  const std::string list = Json{{"format", "strobe checkpoint"},
                                {"version", format_version},
                                {"step", checkpoint.step},
                                {"best", best},
                                {"files", files}}
                               .dump(2) +
                           "\n";
  STROBE_CHECK(list.size() <= max_list_bytes, "save_checkpoint: ", files.size(),
               " files given, expected fewer: their list takes more than ", max_list_bytes, " bytes");
  write_file_atomically((folder / list_file).string(), {{list.data(), list.size()}});
  sync_folder(folder);
}

void remove_older(const fs::path& folder, int64_t step, int64_t keep_last) {
  std::vector<int64_t> older = checkpoint_steps(folder.string());
  std::erase_if(older, [&](int64_t each) { return each >= step; });
  std::error_code code;
  const fs::path best = fs::read_symlink(folder / "best", code);
  const size_t kept = std::min(older.size(), static_cast<size_t>(keep_last - 1));
  older.resize(older.size() - kept);
  for (int64_t each : older) {
    const fs::path path = checkpoint_path(folder.string(), each);
    if (code || path.filename() != best) remove_checkpoint(path);
  }
}

std::string read_text_file(const fs::path& path, uint64_t size) {
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  STROBE_CHECK(file.read(text.data(), static_cast<std::streamsize>(size)), "load_checkpoint: ", path.string(),
               " cannot be read: ", std::strerror(errno));
  return text;
}

// As much of it as tells what it is.
std::string read_start(const fs::path& path) {
  std::string text(64, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), std::ssize(text));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

// What load_newest_checkpoint does not pass over.
class OtherVersion : public Error {
 public:
  using Error::Error;
};

uint64_t size_of_file(const fs::path& path) {
  std::error_code code;
  const fs::file_status status = fs::status(path, code);
  STROBE_CHECK(status.type() != fs::file_type::not_found, "load_checkpoint: ", path.string(),
               " is missing, expected a whole checkpoint");
  STROBE_CHECK(status.type() == fs::file_type::regular, "load_checkpoint: ", path.string(), " is not a file");
  const uint64_t size = fs::file_size(path, code);
  if (code) fail_to("load_checkpoint", path, "read", code.value());
  return size;
}

// checkpoint.json, checked.
nlohmann::json read_list(const fs::path& folder) {
  using Json = nlohmann::json;  // its objects allocate each value for itself
  const fs::path path = folder / list_file;
  const uint64_t size = size_of_file(path);
  STROBE_CHECK(size <= max_list_bytes, "load_checkpoint: ", path.string(), " has ", size,
               " bytes, expected the list of a checkpoint, of at most ", max_list_bytes);
  const std::string text = read_text_file(path, size);
  // Nothing in the list is nested deeper than its files; what is would be copied recursively.
  bool too_deep = false;
  const Json list = Json::parse(
      text,
      [&](int depth, Json::parse_event_t, Json&) {
        too_deep |= depth > 2;
        return depth <= 2;
      },
      false);
  STROBE_CHECK(list.is_object() && !too_deep && list.contains("format") && list["format"] == "strobe checkpoint",
               "load_checkpoint: ", path.string(), " is not the list of a checkpoint");
  if (!list.contains("version") || list["version"] != format_version) {
    throw OtherVersion(concat_message("load_checkpoint: ", path.string(), " has version ",
                                      list.contains("version") ? list["version"].dump() : "none", ", expected ",
                                      format_version, ": it was written by another version of this library"));
  }
  STROBE_CHECK(list.contains("step") && list["step"].is_number_unsigned() &&
                   list["step"].get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX) && list.contains("files") &&
                   list["files"].is_object(),
               "load_checkpoint: ", path.string(), " lacks step or files, expected the list of a checkpoint");
  return list;
}

bool was_best(const fs::path& path) {
  try {
    const nlohmann::json list = read_list(path);
    return list.contains("best") && list["best"] == true;
  } catch (const Error&) {
    return false;  // damaged
  }
}

}  // namespace

void save_checkpoint(const std::string& folder, const Checkpoint& checkpoint, const CheckpointOptions& options) {
  STROBE_CHECK(checkpoint.step >= 0, "save_checkpoint: step ", checkpoint.step, " given, expected at least 0");
  STROBE_CHECK(options.keep_last >= 1, "save_checkpoint: keep_last ", options.keep_last, " given, expected at least 1");
  const fs::path path = checkpoint_path(folder, checkpoint.step);
  const fs::path fresh = fs::path(folder) / (std::string(unfinished) + "new");
  remove_unfinished(folder);
  try {
    if (mkdir(fresh.c_str(), 0777) != 0) fail_to("save_checkpoint", fresh, "created", errno);
    std::error_code code;
    const bool stays_best = fs::read_symlink(fs::path(folder) / "best", code) == path.filename();
    write_files(fresh, checkpoint, options.best || stays_best);
    replace_folder(fresh, path);
    sync_folder(folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(fresh, ignored);
    throw;
  }
  point_link(fs::path(folder) / "last", path);
  if (options.best) point_link(fs::path(folder) / "best", path);
  remove_older(folder, checkpoint.step, options.keep_last);
}

void repair_checkpoint_links(const std::string& folder, int64_t step) {
  const auto point = [&](const char* link, int64_t to) {
    const fs::path path = checkpoint_path(folder, to);
    std::error_code code;
    if (fs::read_symlink(fs::path(folder) / link, code) != path.filename()) point_link(fs::path(folder) / link, path);
  };
  remove_unfinished(folder);
  point("last", step);
  const std::vector<int64_t> steps = checkpoint_steps(folder);
  const auto best = std::find_if(steps.rbegin(), steps.rend(),
                                 [&](int64_t each) { return each <= step && was_best(checkpoint_path(folder, each)); });
  if (best != steps.rend()) point("best", *best);
}

Checkpoint load_checkpoint(const std::string& path) {
  const nlohmann::json list = read_list(path);
  Checkpoint checkpoint;
  checkpoint.step = list["step"].get<int64_t>();
  for (const auto& [name, size] : list["files"].items()) {
    STROBE_CHECK(is_file_name(name) && size.is_number_unsigned(), "load_checkpoint: ", path, "/", list_file,
                 " lists a file '", name.substr(0, 40), "' without a size or outside of the folder");
    const fs::path file = fs::path(path) / name;
    const uint64_t found = size_of_file(file);
    if (found != size.get<uint64_t>()) {
      const std::string start = read_start(file);
      refuse_git_lfs_pointer(file.string(), std::as_bytes(std::span(start)));
    }
    STROBE_CHECK(found == size.get<uint64_t>(), "load_checkpoint: ", file.string(), " has ", found, " bytes, expected ",
                 size.get<uint64_t>(), ": cut short or changed since it was written");
    if (name.ends_with(tensor_suffix)) {
      checkpoint.tensors[name] = load_safetensors(file.string()).tensors;
    } else {
      checkpoint.texts[name] = read_text_file(file, found);
    }
  }
  return checkpoint;
}

std::string checkpoint_path(const std::string& folder, int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < step_digits) digits.insert(0, step_digits - digits.size(), '0');
  return (fs::path(folder) / (step_prefix + digits)).string();
}

std::vector<int64_t> checkpoint_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  std::error_code code;
  for (fs::directory_iterator entry(folder, code), end; !code && entry != end; entry.increment(code)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(step_prefix)) continue;
    const std::string digits = name.substr(std::strlen(step_prefix));
    if (digits.size() < step_digits || digits.size() > 18) continue;
    if (digits.find_first_not_of("0123456789") != std::string::npos) continue;
    steps.push_back(std::stoll(digits));
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<NewestCheckpoint> load_newest_checkpoint(const std::string& folder) {
  const std::vector<int64_t> steps = checkpoint_steps(folder);
  std::vector<std::string> damaged;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const std::string path = checkpoint_path(folder, *step);
    try {
      return NewestCheckpoint{path, load_checkpoint(path), damaged};
    } catch (const OtherVersion&) {
      throw;
    } catch (const Error& error) {
      damaged.push_back(error.what());
    }
  }
  STROBE_CHECK(damaged.empty(), damaged.front());
  return std::nullopt;
}

std::string list_differences(const std::vector<std::string>& differences) {
  constexpr size_t shown = 5;
  std::string list;
  for (size_t i = 0; i < std::min(differences.size(), shown); ++i) list += (i > 0 ? "; " : "") + differences[i];
  if (differences.size() > shown) list += concat_message("; and ", differences.size() - shown, " more");
  return list;
}

}  // namespace strobe
