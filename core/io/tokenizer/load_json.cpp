// Hugging Face's tokenizer.json: what of it means byte-level BPE or characters, and the refusal of all else.
#include "strobe/core/io/tokenizer/build.h"
#include "strobe/core/io/tokenizer/json_reader.h"
#include "strobe/core/io/tokenizer/pieces.h"
#include "strobe/core/io/tokenizer/utf8.h"

namespace strobe {
namespace {

using Json = nlohmann::json;

// The settings of a file, each to be taken once: whatever nobody asked for could change the tokens.
class Settings {
 public:
  Settings(std::map<std::string, Json> values, const std::string& file) : values_(std::move(values)), file_(file) {}

  // Null when it is not there.
  Json take(const std::string& path) {
    const auto found = values_.find(path);
    if (found == values_.end()) return nullptr;
    Json value = std::move(found->second);
    values_.erase(found);
    return value;
  }

  // Takes a setting that must have one of these values; null stands for none.
  Json take_one_of(const std::string& path, const std::vector<Json>& expected) {
    const auto found = values_.find(path);
    const std::string given = found == values_.end() ? "none" : describe(path, found->second);
    Json value = take(path);
    if (std::find(expected.begin(), expected.end(), value) == expected.end()) {
      std::string list;
      for (const Json& one : expected) list += (list.empty() ? "" : " or ") + expectation(one);
      refuse_file(file_, "has ", path, " ", given, ", expected ", list);
    }
    return value;
  }

  // Forgets a setting that changes no tokens, and what it holds.
  void drop(const std::string& path) {
    std::erase_if(values_,
                  [&](const auto& entry) { return entry.first == path || entry.first.starts_with(path + "."); });
  }

  void finish() const {
    if (values_.empty()) return;
    const auto& [path, value] = *values_.begin();
    refuse_file(file_, "has ", path, " ", describe(path, value), ", which is not known here");
  }

 private:
  static std::string expectation(const Json& value) {
    return value.is_null() ? "none" : value.is_object() ? "an object" : value.is_array() ? "a list" : value.dump();
  }

  std::string describe(const std::string& path, const Json& value) const {
    if (value.is_string()) return in_quotes(value.get_ref<const std::string&>());
    if (!value.is_structured()) return value.dump();
    const auto type = values_.find(path + ".type");
    if (type == values_.end() || !type->second.is_string()) return concat_message("of kind ", value.type_name());
    return in_quotes(type->second.get_ref<const std::string&>());
  }

  std::map<std::string, Json> values_;
  const std::string& file_;
};

enum class Cut { nowhere, gpt2_pieces, characters };

// Reads a pre-tokenizer of type ByteLevel; the result says whether it cuts by GPT-2's pattern.
bool take_byte_level(Settings& settings, const std::string& path) {
  settings.take_one_of(path, {Json::object()});
  settings.take_one_of(path + ".type", {"ByteLevel"});
  settings.take_one_of(path + ".add_prefix_space", {false});
  settings.drop(path + ".trim_offsets");
  return settings.take_one_of(path + ".use_regex", {true, false, nullptr}) != false;
}

Cut take_pre_tokenizer(Settings& settings) {
  const std::string path = "pre_tokenizer", list = path + ".pretokenizers", split = list + ".0";
  if (settings.take(list) != Json::array()) return take_byte_level(settings, path) ? Cut::gpt2_pieces : Cut::nowhere;
  settings.take(path);
  settings.take_one_of(path + ".type", {"Sequence"});
  settings.take_one_of(split, {Json::object()});
  settings.take_one_of(split + ".type", {"Split"});
  settings.take_one_of(split + ".pattern", {Json::object()});
  const Json pattern = settings.take_one_of(split + ".pattern.Regex", {gpt2_pattern, character_pattern});
  settings.take_one_of(split + ".behavior", {"Isolated"});
  settings.take_one_of(split + ".invert", {false});
  settings.take_one_of(list + ".1.use_regex", {false});
  take_byte_level(settings, list + ".1");
  return pattern == gpt2_pattern ? Cut::gpt2_pieces : Cut::characters;
}

// A vocabulary of the 256 bytes under their own numbers, and no merges.
bool is_bytewise(const TokenizerParts& parts) {
  for (size_t byte = 0; byte < parts.byte_tokens.size(); ++byte) {
    if (parts.byte_tokens[byte] != static_cast<int32_t>(byte)) return false;
  }
  return parts.vocabulary.size() == static_cast<int64_t>(256 + parts.added.list().size()) &&
         parts.merges.list().empty();
}

}  // namespace

Tokenizer parse_tokenizer_json(std::string_view bytes, const std::string& name) {
  refuse_placeholder(bytes, name);
  JsonTokenizer file = read_tokenizer_json(bytes, JsonLayout::tokenizer, name);
  Settings settings(std::move(file.settings), name);
  if (settings.take("") != Json::object()) refuse_file(name, "is no JSON object, expected a tokenizer.json");
  settings.take_one_of("model", {Json::object()});
  const Json type = settings.take_one_of("model.type", {"BPE", "WordLevel", nullptr});  // none: BPE of before 2020
  settings.take_one_of("model.vocab", {Json::object()});
  settings.take_one_of("added_tokens", {Json::array(), nullptr});
  for (const char* changes_text : {"normalizer", "truncation", "padding"})
    settings.take_one_of(changes_text, {nullptr});
  for (const std::string shows_text : {"post_processor", "decoder"}) {
    settings.take_one_of(shows_text, {Json::object(), nullptr});
    settings.take_one_of(shows_text + ".type", {"ByteLevel", nullptr});
    settings.drop(shows_text);
  }
  for (const char* without_meaning : {"version", "model.unk_token", "model.fuse_unk", "model.byte_fallback"}) {
    settings.drop(without_meaning);  // every byte has a token, so none is unknown
  }
  const Cut cut = take_pre_tokenizer(settings);

  auto parts = std::make_shared<TokenizerParts>();
  if (type == "WordLevel") {
    if (cut != Cut::characters) refuse_file(name, "has model 'WordLevel' of words, expected one of characters");
    settings.finish();
    parts->kind = TokenizerKind::characters;
    build_vocabulary(*parts, file.vocabulary, file.ids, std::move(file.added), name);
    for (int64_t id = 0; id < parts->vocabulary.size(); ++id) {
      const std::string_view token = parts->vocabulary[id];
      if (parts->vocabulary.find(token) == id && first_character(token) != token) {
        refuse_file(name, "has a token ", in_quotes(token), ", expected single characters");
      }
    }
    return Tokenizer(parts);
  }
  if (cut == Cut::characters) refuse_file(name, "cuts a text into characters, which model 'BPE' could not merge");
  settings.take_one_of("model.merges", {Json::array()});
  settings.take_one_of("model.dropout", {nullptr, 0});
  settings.take_one_of("model.continuing_subword_prefix", {nullptr, ""});
  settings.take_one_of("model.end_of_word_suffix", {nullptr, ""});
  parts->in_pieces = cut == Cut::gpt2_pieces;
  parts->whole_pieces = settings.take_one_of("model.ignore_merges", {true, false, nullptr}) == true;
  settings.finish();
  build_vocabulary(*parts, file.vocabulary, file.ids, std::move(file.added), name);
  build_merges(*parts, file.merges, name);
  if (is_bytewise(*parts)) parts->kind = TokenizerKind::bytes;
  return Tokenizer(parts);
}

}  // namespace strobe
