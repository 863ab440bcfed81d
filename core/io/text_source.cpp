#include "strobe/core/io/text_source.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>

#include "strobe/core/io/mapped_file.h"
#include "strobe/kernels/kernel.h"

namespace strobe {
namespace {

namespace fs = std::filesystem;

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const std::string path = entry->path().string();
    if (is_hidden(path)) {
      entry.disable_recursion_pending();
      continue;
    }
    std::error_code unknown;
    const fs::file_status status = entry->status(unknown);
    STROBE_CHECK(status.type() != fs::file_type::not_found, "read: ", path,
                 " is a link to what does not exist, expected a file or a folder");
    const bool filled = status.type() == fs::file_type::regular && fs::file_size(path, unknown) > 0;
    STROBE_CHECK(!unknown, "read: ", path, " cannot be read: ", unknown.message());
    if (filled) files.push_back(path);
  }
  STROBE_CHECK(!error, "read: folder ", folder, " cannot be listed: ", error.message());
  STROBE_CHECK(!files.empty(), "read: folder ", folder, " holds no files with text, expected at least one");
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

std::vector<std::string> list_text_files(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status status = path == "-" ? fs::file_status(fs::file_type::fifo) : fs::status(path, error);
    switch (status.type()) {
      case fs::file_type::regular:
      case fs::file_type::fifo:
        files.push_back(path);
        break;
      case fs::file_type::directory: {
        const std::vector<std::string> below = files_below(path);
        files.insert(files.end(), below.begin(), below.end());
        break;
      }
      case fs::file_type::not_found:
        fail("read: ", path, " does not exist, expected a file, a folder or -");
      case fs::file_type::none:
        fail("read: ", path, " cannot be read: ", error.message());
      default:
        fail("read: ", path, " is a device or socket, expected a file, a folder or -");
    }
  }
  return files;
}

std::string read_text(const std::string& path) {
  const bool standard_input = path == "-";
  const std::string name = standard_input ? "standard input" : path;
  const auto close = [&](std::FILE* file) { standard_input ? 0 : std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(standard_input ? stdin : std::fopen(path.c_str(), "rb"),
                                                         close);
  STROBE_CHECK(file != nullptr, "read: ", name, " cannot be read: ", std::strerror(errno));
  struct stat status;
  const bool device = !standard_input && fstat(fileno(file.get()), &status) == 0 &&
                      (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode));
  STROBE_CHECK(!device, "read: ", name, " is a device, expected a file");  // some have no end
  std::string text;
  std::vector<char> chunk(size_t{1} << 20);
  while (const size_t count = std::fread(chunk.data(), 1, chunk.size(), file.get())) text.append(chunk.data(), count);
  STROBE_CHECK(std::ferror(file.get()) == 0, "read: ", name, " cannot be read: ", std::strerror(errno));
  STROBE_CHECK(!text.empty(), "read: ", name, " is empty, expected text");
  refuse_git_lfs_pointer(name, std::as_bytes(std::span(text)));
  return text;
}

std::vector<Document> read_documents(const std::vector<std::string>& paths) {
  std::vector<Document> documents;
  for (const std::string& path : list_text_files(paths))
    documents.push_back({path == "-" ? "standard input" : path, read_text(path)});
  return documents;
}

std::string join_documents(const std::vector<Document>& documents) {
  std::string text;
  for (size_t i = 0; i < documents.size(); ++i) {
    text += documents[i].text;
    if (i + 1 == documents.size()) break;
    while (!text.ends_with("\n\n") && !text.ends_with("\n\r\n")) text += '\n';
  }
  return text;
}

std::vector<int32_t> encode_documents(const Tokenizer& tokenizer, const std::vector<Document>& documents) {
  const auto separator = tokenizer.special_tokens().find("<|endoftext|>");
  if (separator == tokenizer.special_tokens().end()) return tokenizer.encode(join_documents(documents));
  std::vector<int32_t> tokens;
  for (const Document& document : documents) {
    if (!tokens.empty()) tokens.push_back(separator->second);
    const std::vector<int32_t> ids = tokenizer.encode(document.text);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }
  return tokens;
}

}  // namespace strobe
