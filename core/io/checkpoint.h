// Checkpoints of a run: numbered folders that appear whole or not at all.
#pragma once

#include <optional>

#include "strobe/core/io/safetensors.h"

namespace strobe {

// What a checkpoint holds, by file name: tensors in "*.safetensors", everything else as text.
struct Checkpoint {
  int64_t step = 0;
  std::map<std::string, std::vector<NamedTensor>> tensors;
  std::map<std::string, std::string> texts;
};

struct CheckpointOptions {
  int64_t keep_last = 2;  // the newest ones that stay, at least 1; the best one stays anyway
  bool best = false;      // this one is the best so far
};

// Writes `folder`/step-00000123: its files and a list of them, checkpoint.json, go to a folder beside it, which is
// synced and then renamed. So whatever happens, a folder of that name is whole. Then points the links "last" and "best"
// to it and removes older checkpoints. `folder` must exist, and only one process may write there at a time: what an
// earlier one left unfinished is removed. Throws Error, leaving all earlier checkpoints, when anything cannot be
// written.
void save_checkpoint(const std::string& folder, const Checkpoint& checkpoint, const CheckpointOptions& options = {});

// Points "last" to the checkpoint of `step`, and "best" to the newest up to it that was the best when it was saved: a
// process that is killed between the steps of save_checkpoint leaves them behind. Throws Error as save_checkpoint does.
void repair_checkpoint_links(const std::string& folder, int64_t step);

// Reads one checkpoint folder, to the CPU. Throws Error, naming the file and what is wrong, unless it is whole and of
// the version that save_checkpoint writes.
Checkpoint load_checkpoint(const std::string& path);

// The steps of the checkpoints in `folder`, ascending, whole or not; none when there is no such folder.
std::vector<int64_t> checkpoint_steps(const std::string& folder);
std::string checkpoint_path(const std::string& folder, int64_t step);

struct NewestCheckpoint {
  std::string path;
  Checkpoint checkpoint;
  std::vector<std::string> damaged;  // what is wrong with newer ones, which were passed over
};

// The newest checkpoint in `folder` that can be read, if there is any. Throws what is wrong with the newest when there
// are some but none can be read, and when one is of another version.
std::optional<NewestCheckpoint> load_newest_checkpoint(const std::string& folder);

// The first few of what differs between a checkpoint and what it is loaded into, for a message.
std::string list_differences(const std::vector<std::string>& differences);

}  // namespace strobe
