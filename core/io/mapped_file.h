// A file's bytes as memory that the system reads in when they are touched.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace strobe {

// Read-only. The bytes stay valid as long as the object, whatever happens to the name: a file that is replaced or
// deleted lives on until then. Throws Error when there is no regular file at `path` or it cannot be read.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }

  // Throws when the file has been cut short since. Touching bytes that are gone would end the process (SIGBUS), so
  // long-lived readers ask first.
  void require_whole() const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::span<const std::byte> bytes_;
};

// Throws when `bytes` are what git-lfs leaves in place of a large file that was not fetched; `name` is the file's.
void refuse_git_lfs_pointer(std::string_view name, std::span<const std::byte> bytes);

}  // namespace strobe
