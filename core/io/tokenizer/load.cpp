// Which files make a tokenizer, and GPT-2's pair of them, vocab.json and merges.txt.
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "strobe/core/io/tokenizer/build.h"
#include "strobe/core/io/tokenizer/byte_alphabet.h"
#include "strobe/core/io/tokenizer/json_reader.h"

namespace strobe {
namespace {

namespace fs = std::filesystem;

std::string read_file(const std::string& path) {
  std::error_code code;
  if (!fs::exists(path, code)) refuse_file(path, "does not exist");
  if (!fs::is_regular_file(path, code)) refuse_file(path, "is not a regular file, expected a tokenizer");
  const uint64_t size = fs::file_size(path, code);
  std::ifstream file(path, std::ios::binary);
  if (code || !file) refuse_file(path, "cannot be read: ", std::strerror(errno));
  if (size > INT32_MAX) refuse_file(path, "has ", size, " bytes, expected a tokenizer, of at most ", INT32_MAX);
  std::string bytes(size, '\0');
  if (!file.read(bytes.data(), static_cast<std::streamsize>(size))) refuse_file(path, "cannot be read to its end");
  return bytes;
}

// A line for each merge, below a line with the version. The version is not told from a merge by its place alone, as
// some files lack it.
StringList read_merges(std::string_view text) {
  StringList merges;
  for (bool first = true; !text.empty(); first = false) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!(first && line.starts_with("#version"))) merges.add(line);
  }
  return merges;
}

}  // namespace

Tokenizer parse_vocab_and_merges(std::string_view vocab_json, std::string_view merges_txt, const std::string& name) {
  refuse_placeholder(vocab_json, name);
  refuse_placeholder(merges_txt, name);
  const JsonTokenizer file = read_tokenizer_json(vocab_json, JsonLayout::vocabulary, name);
  if (file.settings != decltype(file.settings){{"", nlohmann::json::object()}}) {
    refuse_file(name, "has no JSON object of tokens and ids in vocab.json");
  }
  const StringList merges = read_merges(merges_txt);
  const auto build = [&](const std::vector<AddedToken>& special) {
    auto parts = std::make_shared<TokenizerParts>();
    parts->in_pieces = true;
    build_vocabulary(*parts, file.vocabulary, file.ids, special, name);
    build_merges(*parts, merges, name);
    return parts;
  };

  // The two files do not say which tokens are special. It is those that no text would give: neither a byte nor merged.
  std::vector<AddedToken> special;
  for (size_t i = 0; i < file.ids.size(); ++i) {
    if (!from_byte_alphabet(file.vocabulary[i])) {
      special.push_back({.text = std::string(file.vocabulary[i]), .id = file.ids[i]});
    }
  }
  auto parts = build(special);
  std::vector<bool> made(static_cast<size_t>(parts->vocabulary.size()));
  for (const int32_t id : parts->byte_tokens) made[static_cast<size_t>(id)] = true;
  for (const Merge& merge : parts->merges.list()) made[static_cast<size_t>(merge.result)] = true;
  for (const AddedToken& token : special) made[static_cast<size_t>(token.id)] = true;
  for (size_t i = 0; i < file.ids.size(); ++i) {
    if (!made[static_cast<size_t>(file.ids[i])]) {
      special.push_back({.text = std::string(file.vocabulary[i]), .id = file.ids[i]});
    }
  }
  if (special.size() > parts->added.list().size()) parts = build(special);
  return Tokenizer(parts);
}

Tokenizer Tokenizer::load(const std::string& path) {
  std::error_code code;
  if (!fs::is_directory(path, code)) {
    const std::string bytes = read_file(path);
    return fs::path(path).extension() == ".tiktoken" ? parse_tiktoken(bytes, path) : parse_tokenizer_json(bytes, path);
  }
  const fs::path folder(path);
  if (fs::exists(folder / "tokenizer.json", code)) return load((folder / "tokenizer.json").string());
  const std::string vocabulary = (folder / "vocab.json").string(), merges = (folder / "merges.txt").string();
  if (!fs::exists(vocabulary, code) || !fs::exists(merges, code)) {
    refuse_file(path, "holds neither tokenizer.json nor vocab.json with merges.txt");
  }
  return parse_vocab_and_merges(read_file(vocabulary), read_file(merges), path);
}

}  // namespace strobe
