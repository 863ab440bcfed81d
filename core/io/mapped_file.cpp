#include "strobe/core/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "strobe/kernels/kernel.h"

namespace strobe {
namespace {

// A descriptor that is closed again unless the constructor that opened it gets to its end.
struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) close(value);
  }
  int release() { return std::exchange(value, -1); }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // Not blocking, so that a pipe without a writer is refused and not waited for.
  Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  STROBE_CHECK(file.value >= 0, "read: ", path, " cannot be opened: ", std::strerror(errno));
  struct stat status;
  STROBE_CHECK(fstat(file.value, &status) == 0, "read: ", path, " cannot be read: ", std::strerror(errno));
  STROBE_CHECK(S_ISREG(status.st_mode), "read: ", path, " is a ", S_ISDIR(status.st_mode) ? "folder" : "pipe or device",
               ", expected a file");
  const size_t size = static_cast<size_t>(status.st_size);
  if (size > 0) {  // the system maps no empty range
    void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value, 0);
    STROBE_CHECK(memory != MAP_FAILED, "read: ", path, " cannot be mapped into memory: ", std::strerror(errno));
    bytes_ = {static_cast<const std::byte*>(memory), size};
  }
  descriptor_ = file.release();
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  close(descriptor_);
}

void MappedFile::require_whole() const {
  struct stat status;
  STROBE_CHECK(fstat(descriptor_, &status) == 0, "read: ", path_, " cannot be read: ", std::strerror(errno));
  STROBE_CHECK(static_cast<size_t>(status.st_size) >= bytes_.size(), "read: ", path_, " has shrunk to ", status.st_size,
               " bytes while in use, expected the ", bytes_.size(), " it had when it was opened");
}

void refuse_git_lfs_pointer(std::string_view name, std::span<const std::byte> bytes) {
  constexpr std::string_view start = "version https://git-lfs.github.com/spec/";
  const bool pointer = bytes.size() >= start.size() && std::memcmp(bytes.data(), start.data(), start.size()) == 0;
  STROBE_CHECK(!pointer, "read: ", name,
               " is a git-lfs pointer, not the file it stands for, expected the file itself (git lfs pull fetches it)");
}

}  // namespace strobe
