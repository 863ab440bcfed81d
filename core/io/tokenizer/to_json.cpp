// A tokenizer as Hugging Face's tokenizer.json.
#include <nlohmann/json.hpp>

#include "strobe/core/io/tokenizer/byte_alphabet.h"
#include "strobe/core/io/tokenizer/parts.h"
#include "strobe/core/io/tokenizer/pieces.h"
#include "strobe/kernels/kernel.h"

namespace strobe {
namespace {

std::string json_string(const std::string& text) { return nlohmann::json(text).dump(); }

const char* json_bool(bool value) { return value ? "true" : "false"; }

// Every token by its name; the texts of added tokens stand for themselves.
std::string vocabulary_json(const TokenizerParts& parts) {
  std::string json = "{";
  auto next_added = parts.added.list().begin();
  for (int64_t id = 0; id < parts.vocabulary.size(); ++id) {
    const bool is_added = next_added != parts.added.list().end() && next_added->id == id;
    const std::string name = is_added ? (next_added++)->text : to_byte_alphabet(parts.vocabulary[id]);
    json += concat_message(id == 0 ? "" : ",", "\n      ", json_string(name), ": ", id);
  }
  return json + "\n    }";
}

std::string merges_json(const TokenizerParts& parts) {
  std::string json = "[";
  for (const Merge& merge : parts.merges.list()) {
    const std::string left = to_byte_alphabet(parts.vocabulary[merge.left]);
    const std::string right = to_byte_alphabet(parts.vocabulary[merge.right]);
    json += concat_message(json.size() == 1 ? "" : ",", "\n      ", json_string(left + " " + right));
  }
  return json + (json.size() == 1 ? "]" : "\n    ]");
}

std::string added_json(const TokenizerParts& parts) {
  std::string json = "[";
  for (const AddedToken& token : parts.added.list()) {
    json += concat_message(
        json.size() == 1 ? "" : ",", "\n    {\"id\": ", token.id, ", \"content\": ", json_string(token.text),
        ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, ",
        "\"normalized\": ", json_bool(token.normalized), ", \"special\": ", json_bool(token.special), "}");
  }
  return json + (json.size() == 1 ? "]" : "\n  ]");
}

std::string byte_level_json(bool use_regex) {
  return concat_message(R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": )",
                        json_bool(use_regex), "}");
}

}  // namespace

std::string Tokenizer::to_json() const {
  const TokenizerParts& parts = *parts_;
  std::string pre_tokenizer = byte_level_json(parts.in_pieces);
  std::string model;
  if (kind() == TokenizerKind::characters) {
    // Each character is a word; its bytes are written in the byte alphabet, as it need not be UTF-8.
    pre_tokenizer = concat_message(R"({"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": )",
                                   json_string(character_pattern),
                                   R"(}, "behavior": "Isolated", "invert": false},
    )",
                                   byte_level_json(false), "\n  ]}");
    model = R"(
    "type": "WordLevel",
    "unk_token": "<unk>")";
  } else {
    model = concat_message(R"(
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": )",
                           json_bool(parts.whole_pieces), ",\n    \"merges\": ", merges_json(parts));
  }
  return concat_message(R"({
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": )",
                        added_json(parts), R"(,
  "normalizer": null,
  "pre_tokenizer": )",
                        pre_tokenizer, R"(,
  "post_processor": null,
  "decoder": )",
                        byte_level_json(true), R"(,
  "model": {)",
                        model, R"(,
    "vocab": )",
                        vocabulary_json(parts), R"(
  }
}
)");
}

}  // namespace strobe
