#include "strobe/core/io/tokenizer/build.h"

#include "strobe/core/io/tokenizer/byte_alphabet.h"
#include "strobe/core/io/tokenizer/utf8.h"

namespace strobe {

void refuse_placeholder(std::string_view bytes, const std::string& name) {
  if (bytes.empty()) refuse_file(name, "is empty, expected a tokenizer");
  if (bytes.starts_with("version https://git-lfs.github.com/spec/")) {
    refuse_file(name, "is a git-lfs pointer, not the file itself: fetch that by 'git lfs pull'");
  }
}

void build_vocabulary(TokenizerParts& parts, const StringList& names, const std::vector<int32_t>& ids,
                      std::vector<AddedToken> added, const std::string& file) {
  std::map<std::string_view, const AddedToken*> added_by_text;
  for (const AddedToken& token : added) {
    if (!added_by_text.emplace(token.text, &token).second) refuse_file(file, "adds ", in_quotes(token.text), " twice");
  }
  size_t count = names.size() + added.size();
  for (size_t i = 0; i < names.size(); ++i) {
    const auto found = added_by_text.find(names[i]);
    if (found == added_by_text.end()) continue;
    --count;
    if (found->second->id != ids[i]) {
      refuse_file(file, "gives ", in_quotes(names[i]), " the ids ", ids[i], " and ", found->second->id);
    }
  }
  if (count == 0) refuse_file(file, "has no tokens");

  // Of each id, the place of its name, or that of an added token behind all names.
  constexpr uint32_t none = UINT32_MAX;
  std::vector<uint32_t> places(count, none);
  const auto name_at = [&](uint32_t place) {
    return place < names.size() ? names[place] : std::string_view(added[place - names.size()].text);
  };
  const auto claim = [&](int32_t id, size_t place) {
    const auto index = static_cast<size_t>(id);
    if (index >= count) {
      refuse_file(file, "gives ", in_quotes(name_at(static_cast<uint32_t>(place))), " id ", id, ", expected 0 to ",
                  count - 1, " for ", count, " tokens");
    }
    if (places[index] != none && name_at(places[index]) != name_at(static_cast<uint32_t>(place))) {
      refuse_file(file, "gives ", in_quotes(name_at(places[index])), " and ",
                  in_quotes(name_at(static_cast<uint32_t>(place))), " the same id ", id);
    }
    places[index] = static_cast<uint32_t>(place);
  };
  for (size_t i = 0; i < names.size(); ++i) claim(ids[i], i);
  for (size_t i = 0; i < added.size(); ++i) claim(added[i].id, names.size() + i);

  for (size_t id = 0; id < count; ++id) {
    if (places[id] == none)
      refuse_file(file, "has no token with id ", id, ", expected one for each of 0 to ", count - 1);
    const std::string_view name = name_at(places[id]);
    if (added_by_text.contains(name)) {
      parts.vocabulary.add_hidden(name);
      continue;
    }
    const std::optional<std::string> bytes = from_byte_alphabet(name);
    if (!bytes || bytes->empty()) {
      refuse_file(file, "has a token ", in_quotes(name),
                  ", expected names in GPT-2's byte alphabet: not a byte-level model");
    }
    if (parts.vocabulary.add(*bytes) != static_cast<int32_t>(id)) {
      refuse_file(file, "has token ", in_quotes(name), " twice");
    }
  }
  parts.set_added(std::move(added));
}

void build_merges(TokenizerParts& parts, const StringList& merges, const std::string& file) {
  for (size_t byte = 0; byte < parts.byte_tokens.size(); ++byte) {
    const char character = static_cast<char>(byte);
    parts.byte_tokens[byte] = parts.vocabulary.find({&character, 1});
    if (parts.byte_tokens[byte] < 0) {
      refuse_file(file, "has no token for the byte ", byte, ", expected one for each of 256: text would be lost");
    }
  }
  parts.merges.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const std::string_view merge = merges[i];
    const size_t space = merge.find(' ');
    if (space == std::string_view::npos || merge.find(' ', space + 1) != std::string_view::npos) {
      refuse_file(file, "has ", in_quotes(merge), " as merge ", i, ", expected two tokens and a space");
    }
    const auto find = [&](std::string_view name) {
      const std::optional<std::string> bytes = from_byte_alphabet(name);
      const int32_t id = bytes ? parts.vocabulary.find(*bytes) : -1;
      if (id < 0) {
        refuse_file(file, "has ", in_quotes(merge), " as merge ", i, ", but ", in_quotes(name),
                    " is not in its vocabulary");
      }
      return id;
    };
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    const Merge entry{find(left), find(right), find(std::string(left).append(right))};
    if (!parts.merges.add(entry))
      refuse_file(file, "has ", in_quotes(merge), " as merge ", i, " and before, expected it once");
  }
}

}  // namespace strobe
