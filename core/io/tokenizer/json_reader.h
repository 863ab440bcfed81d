// The content of a tokenizer.json or vocab.json, in little more memory than the file takes; nothing is checked but
// JSON.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strobe/core/io/tokenizer/added_tokens.h"
#include "strobe/core/io/tokenizer/vocabulary.h"

namespace strobe {

struct JsonTokenizer {
  StringList vocabulary;     // the keys of model.vocab
  std::vector<int32_t> ids;  // their values
  StringList merges;         // of model.merges, "left right"
  std::vector<AddedToken> added;

  // All else by its path: "model.type" is "BPE"; objects and lists are there as empty ones, and so is what they hold.
  std::map<std::string, nlohmann::json> settings;
};

enum class JsonLayout { tokenizer, vocabulary };  // tokenizer.json; vocab.json, which is a vocabulary and nothing else

// Throws, naming the file and the place, when the bytes are no JSON or do not have this layout.
JsonTokenizer read_tokenizer_json(std::string_view bytes, JsonLayout layout, const std::string& name);

}  // namespace strobe
