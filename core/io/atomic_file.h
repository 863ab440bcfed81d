// A file that replaces another only when it is whole: written beside it, synced, then renamed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace strobe {

// Until finish() the file at `path` is what it was; a file that is not finished leaves nothing behind. A symbolic link
// stays one: what it points to is replaced. Every function throws Error naming the file and the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Appends.
  void write(const void* data, size_t size);
  // Overwrites bytes written before, from `offset` on.
  void write_at(uint64_t offset, const void* data, size_t size);
  // Puts the file in its place, and on disk.
  void finish();

 private:
  [[noreturn]] void fail_with_errno(const char* what) const;

  std::string target_;
  std::string path_;
  int descriptor_ = -1;
  bool finished_ = false;
};

// Replaces the file at `path` by `contents`, one after another, in this all-or-nothing way.
void write_file_atomically(const std::string& path, const std::vector<std::pair<const void*, size_t>>& contents);

}  // namespace strobe
