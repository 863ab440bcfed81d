// The folder of a run: one process at a time, and nothing of an earlier run lost.
#pragma once

#include <filesystem>
#include <string>

namespace examples {

enum class FolderUse { fresh, resume, overwrite };

// Claims the folder at `path` until destroyed. Throws std::runtime_error when it cannot be written, another process
// uses it, or it holds a run and `use` is fresh. It is made if it is not there, unless a run is to be resumed.
class RunFolder {
 public:
  RunFolder(const std::filesystem::path& path, FolderUse use);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // Removes what an earlier run left, when it is to be overwritten, and makes the folder of the checkpoints. Called
  // once everything else about the new run has proved usable.
  void begin();

  // Throws when another folder stands at `path` now, or none: what this process writes would go to another run.
  void require_there() const;

  const std::filesystem::path path, checkpoints, config, metrics, curve;

 private:
  FolderUse use_;
  bool made_ = false;
  bool begun_ = false;
  int descriptor_ = -1;
};

// The checkpoints in the folder of a run.
std::filesystem::path checkpoints_in(const std::filesystem::path& run);

}  // namespace examples
