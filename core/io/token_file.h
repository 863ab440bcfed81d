// Token ids in files, in the layout of Karpathy's llm.c: a header of 256 little-endian int32, then the ids.
//
// | header                 | ids               | written for vocabularies |
// |------------------------|-------------------|--------------------------|
// | 20240520, 1, count, 0s | uint16, as GPT-2  | up to 65,536             |
// | 20240801, 7, count, 0s | uint32, as Llama 3| larger ones              |
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "strobe/core/io/atomic_file.h"
#include "strobe/core/io/mapped_file.h"

namespace strobe {

// Token ids that lie in memory, 16 or 32 bits each. Owns nothing.
class TokenView {
 public:
  TokenView() = default;
  explicit TokenView(std::span<const uint16_t> ids) : ids_(ids.data()), size_(std::ssize(ids)), wide_(false) {}
  explicit TokenView(std::span<const uint32_t> ids) : ids_(ids.data()), size_(std::ssize(ids)), wide_(true) {}

  int64_t size() const { return size_; }
  // Copies the ids from `begin` on; all of them must exist.
  void read(int64_t begin, std::span<int32_t> out) const;
  // The ids from `begin` to `end`, which must exist.
  TokenView slice(int64_t begin, int64_t end) const;
  struct Misfit {
    int64_t position;
    uint32_t id;
  };
  // The first id that is not below vocab_size, if any.
  std::optional<Misfit> first_not_below(int64_t vocab_size) const;

 private:
  template <class F>
  decltype(auto) with_ids(F&& f) const;

  const void* ids_ = nullptr;
  int64_t size_ = 0;
  bool wide_ = false;
};

// The ids in a token file's bytes, which must be aligned to 4 bytes and outlive the result. Throws Error, naming the
// file (`name`) and what is wrong, unless they are exactly one whole token file.
TokenView parse_token_file(std::span<const std::byte> bytes, std::string_view name);

// A token file, mapped into memory.
class TokenFile {
 public:
  explicit TokenFile(const std::string& path) : file_(path), tokens_(parse_token_file(file_.bytes(), path)) {}

  const std::string& path() const { return file_.path(); }
  const TokenView& tokens() const { return tokens_; }
  void require_whole() const { file_.require_whole(); }

 private:
  MappedFile file_;
  TokenView tokens_;
};

// Writes a token file piece by piece; it appears at `path` only with finish().
class TokenFileWriter {
 public:
  // The vocabulary decides between 16 and 32 bits.
  TokenFileWriter(const std::string& path, int64_t vocab_size);

  // Throws, writing nothing of it, when an id is not in [0, vocab_size) or the count would exceed the format's 2^31
  // - 1.
  void append(std::span<const int32_t> tokens);
  int64_t size() const { return size_; }
  void finish();

 private:
  std::string path_;
  int64_t vocab_size_;
  int64_t size_ = 0;
  AtomicFile file_;
};

// All of a token file at once.
void save_tokens(const std::string& path, std::span<const int32_t> tokens, int64_t vocab_size);

}  // namespace strobe
