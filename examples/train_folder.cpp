// Makes, locks and clears the folder of a run.
#include "train_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "option_checks.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const std::string& why) {
  throw std::runtime_error(fmt::format("--out {}: {}, expected a folder that can be written", path.string(), why));
}

void make_folder(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error && !fs::is_directory(path)) error = std::make_error_code(std::errc::not_a_directory);
  if (!error && access(path.c_str(), W_OK) != 0) error = std::error_code(errno, std::generic_category());
  if (error) refuse(path, error.message());
}

}  // namespace

fs::path checkpoints_in(const fs::path& run) { return run / "checkpoints"; }

RunFolder::RunFolder(const fs::path& folder, FolderUse use)
    : path(folder),
      checkpoints(checkpoints_in(folder)),
      config(folder / "config.toml"),
      metrics(folder / "metrics.jsonl"),
      curve(folder / "loss.svg"),
      use_(use) {
  made_ = !fs::exists(path);
  require(use != FolderUse::resume || !made_, "--out {}: no such folder, expected one that holds a run to resume",
          path.string());
  make_folder(path);
  descriptor_ = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor_ < 0) refuse(path, std::strerror(errno));
  if (flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(descriptor_);
    throw std::runtime_error(
        fmt::format("--out {}: another process is using it, expected a folder of its own", path.string()));
  }
  const bool holds_run = fs::exists(checkpoints) || fs::exists(metrics) || fs::exists(config);
  if (holds_run && use == FolderUse::fresh) {
    close(descriptor_);
    throw std::runtime_error(
        fmt::format("--out {}: holds a run, expected --resume to go on with it, --overwrite to replace it, or another "
                    "folder",
                    path.string()));
  }
}

RunFolder::~RunFolder() {
  close(descriptor_);
  std::error_code ignored;
  if (made_ && !begun_) fs::remove(path, ignored);  // nothing came of it
}

void RunFolder::require_there() const {
  struct stat claimed, found;
  require(fstat(descriptor_, &claimed) == 0 && stat(path.c_str(), &found) == 0 && claimed.st_dev == found.st_dev &&
              claimed.st_ino == found.st_ino,
          "--out {}: was moved or removed, expected the folder that the run began with", path.string());
}

void RunFolder::begin() {
  if (use_ == FolderUse::overwrite)
    for (const fs::path& old : {checkpoints, config, metrics, curve}) {
      std::error_code error;
      fs::remove_all(old, error);
      if (error) refuse(old, error.message());
    }
  make_folder(checkpoints);
  begun_ = true;
}

}  // namespace examples
