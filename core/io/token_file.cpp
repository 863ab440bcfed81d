#include "strobe/core/io/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <vector>

#include "strobe/kernels/kernel.h"

namespace strobe {
namespace {

static_assert(std::endian::native == std::endian::little, "token files hold little-endian numbers");

using Header = std::array<int32_t, 256>;

struct Layout {
  int32_t magic;
  int32_t version;
  int64_t bytes_per_token;
};
constexpr Layout narrow_layout{20240520, 1, 2};
constexpr Layout wide_layout{20240801, 7, 4};

const Layout& layout_for(int64_t vocab_size) { return vocab_size <= 65536 ? narrow_layout : wide_layout; }

// How many of `ids`, from the first on, are below `limit`.
template <class Id>
int64_t count_below(std::span<const Id> ids, uint32_t limit) {
  // The largest of a block is found without branches, so at the speed of memory.
  constexpr size_t block = 4096;
  for (size_t begin = 0; begin < ids.size(); begin += block) {
    const std::span<const Id> part = ids.subspan(begin, std::min(block, ids.size() - begin));
    Id largest = 0;
    for (const Id id : part) largest = std::max(largest, id);
    if (largest < limit) continue;
    const auto misfit = std::find_if(part.begin(), part.end(), [&](Id id) { return id >= limit; });
    return static_cast<int64_t>(begin) + (misfit - part.begin());
  }
  return std::ssize(ids);
}

}  // namespace

template <class F>
decltype(auto) TokenView::with_ids(F&& f) const {
  const size_t count = static_cast<size_t>(size_);
  return wide_ ? f(std::span(static_cast<const uint32_t*>(ids_), count))
               : f(std::span(static_cast<const uint16_t*>(ids_), count));
}

void TokenView::read(int64_t begin, std::span<int32_t> out) const {
  STROBE_CHECK(0 <= begin && begin <= size_ && std::ssize(out) <= size_ - begin, "TokenView: ", out.size(),
               " tokens from position ", begin, " asked for, expected a part of the ", size_, " there are");
  slice(begin, begin + std::ssize(out)).with_ids([&](auto ids) {
    std::transform(ids.begin(), ids.end(), out.begin(), [](auto id) { return static_cast<int32_t>(id); });
  });
}

TokenView TokenView::slice(int64_t begin, int64_t end) const {
  STROBE_CHECK(0 <= begin && begin <= end && end <= size_, "TokenView: positions ", begin, " to ", end,
               " given, expected a part of 0 to ", size_);
  return with_ids(
      [&](auto ids) { return TokenView(ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))); });
}

std::optional<TokenView::Misfit> TokenView::first_not_below(int64_t vocab_size) const {
  // Ids are int32 everywhere else.
  const uint32_t limit = static_cast<uint32_t>(std::clamp<int64_t>(vocab_size, 0, int64_t{1} << 31));
  return with_ids([&](auto ids) -> std::optional<Misfit> {
    const int64_t position = count_below(ids, limit);
    if (position == size_) return std::nullopt;
    return Misfit{position, ids[static_cast<size_t>(position)]};
  });
}

TokenView parse_token_file(std::span<const std::byte> bytes, std::string_view name) {
  refuse_git_lfs_pointer(name, bytes);
  STROBE_CHECK(bytes.size() >= sizeof(Header), "load_tokens: ", name, " has ", bytes.size(),
               " bytes, expected a token file, which begins with a header of ", sizeof(Header));
  const auto* header = reinterpret_cast<const int32_t*>(bytes.data());
  const Layout* layout = nullptr;
  for (const Layout* candidate : {&narrow_layout, &wide_layout})
    if (header[0] == candidate->magic) layout = candidate;
  STROBE_CHECK(layout != nullptr, "load_tokens: ", name, " begins with the number ", header[0], ", expected ",
               narrow_layout.magic, " (a token file of 16-bit ids) or ", wide_layout.magic, " (of 32-bit ids)");
  STROBE_CHECK(header[1] == layout->version, "load_tokens: ", name, " is a token file of version ", header[1],
               ", expected ", layout->version);
  const int64_t count = header[2];
  STROBE_CHECK(count > 0, "load_tokens: ", name, " announces ", count, " tokens, expected at least 1");
  const size_t expected = sizeof(Header) + static_cast<size_t>(count * layout->bytes_per_token);
  STROBE_CHECK(bytes.size() == expected, "load_tokens: ", name, " has ", bytes.size(), " bytes, expected ", expected,
               " for the ", count, " tokens that it announces: cut short or damaged");
  const std::byte* ids = bytes.data() + sizeof(Header);
  const size_t length = static_cast<size_t>(count);
  if (layout == &narrow_layout) return TokenView(std::span(reinterpret_cast<const uint16_t*>(ids), length));
  return TokenView(std::span(reinterpret_cast<const uint32_t*>(ids), length));
}

TokenFileWriter::TokenFileWriter(const std::string& path, int64_t vocab_size)
    : path_(path), vocab_size_(vocab_size), file_(path) {
  STROBE_CHECK(vocab_size > 0 && vocab_size <= int64_t{1} << 31, "save_tokens: ", path, ": vocab_size ", vocab_size,
               " given, expected 1 to 2^31");
  const Header placeholder{};
  file_.write(placeholder.data(), sizeof(placeholder));
}

void TokenFileWriter::append(std::span<const int32_t> tokens) {
  for (size_t i = 0; i < tokens.size(); ++i)
    STROBE_CHECK(tokens[i] >= 0 && tokens[i] < vocab_size_, "save_tokens: ", path_, ": token id ", tokens[i],
                 " at position ", size_ + static_cast<int64_t>(i), " given, expected ids of a vocabulary of ",
                 vocab_size_);
  STROBE_CHECK(std::ssize(tokens) <= std::numeric_limits<int32_t>::max() - size_, "save_tokens: ", path_, ": ",
               size_ + std::ssize(tokens), " tokens given, expected at most 2^31 - 1 in one file");
  if (layout_for(vocab_size_).bytes_per_token == 2) {
    const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
    file_.write(narrow.data(), narrow.size() * sizeof(uint16_t));
  } else {
    file_.write(tokens.data(), tokens.size_bytes());
  }
  size_ += std::ssize(tokens);
}

void TokenFileWriter::finish() {
  STROBE_CHECK(size_ > 0, "save_tokens: ", path_, ": no tokens given, expected at least 1");
  const Layout& layout = layout_for(vocab_size_);
  const Header header{layout.magic, layout.version, static_cast<int32_t>(size_)};
  file_.write_at(0, header.data(), sizeof(header));
  file_.finish();
}

void save_tokens(const std::string& path, std::span<const int32_t> tokens, int64_t vocab_size) {
  TokenFileWriter file(path, vocab_size);
  file.append(tokens);
  file.finish();
}

}  // namespace strobe
