#include "strobe/core/io/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "strobe/kernels/kernel.h"

namespace strobe {

AtomicFile::AtomicFile(const std::string& path) : target_(path) {
  static std::atomic<uint64_t> counter{0};
  std::error_code code;
  const std::filesystem::path link_target = std::filesystem::canonical(path, code);
  if (!code) target_ = link_target.string();
  path_ = concat_message(target_, ".partial", getpid(), "-", counter.fetch_add(1));
  descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_with_errno("cannot be created");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!finished_) unlink(path_.c_str());
}

void AtomicFile::write(const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(descriptor_, next, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_errno("cannot be written");
    next += written;
    size -= static_cast<size_t>(written);
  }
}

void AtomicFile::write_at(uint64_t offset, const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = pwrite(descriptor_, next, size, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_errno("cannot be written");
    next += written;
    offset += static_cast<uint64_t>(written);
    size -= static_cast<size_t>(written);
  }
}

void AtomicFile::finish() {
  if (fsync(descriptor_) != 0) fail_with_errno("cannot be written");
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (close(descriptor) != 0) fail_with_errno("cannot be written");
  if (rename(path_.c_str(), target_.c_str()) != 0) fail_with_errno("cannot be replaced");
  finished_ = true;
  // The rename itself is on disk only once the folder is.
  const std::string folder = std::filesystem::path(target_).parent_path().string();
  const int folder_descriptor = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_descriptor >= 0) {
    fsync(folder_descriptor);
    close(folder_descriptor);
  }
}

void AtomicFile::fail_with_errno(const char* what) const {
  const int code = errno;
  fail("save: ", target_, " ", what, ": ", std::strerror(code));
}

void write_file_atomically(const std::string& path, const std::vector<std::pair<const void*, size_t>>& contents) {
  AtomicFile file(path);
  for (const auto& [data, size] : contents) file.write(data, size);
  file.finish();
}

}  // namespace strobe
