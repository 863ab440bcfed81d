#include "strobe/core/io/tokenizer/json_reader.h"

#include "strobe/core/io/tokenizer/utf8.h"
#include "strobe/kernels/kernel.h"

namespace strobe {
namespace {

using Json = nlohmann::json;

// Bounds on what a file that is no tokenizer could make us keep.
constexpr size_t max_depth = 16;
constexpr size_t max_path = 128;
constexpr size_t max_settings = 200;

// Called by the parser for everything it meets, in order.
class Reader : public nlohmann::json_sax<Json> {
 public:
  Reader(JsonLayout layout, const std::string& name)
      : name_(name), vocabulary_path_(layout == JsonLayout::vocabulary ? "" : "model.vocab") {}

  JsonTokenizer take() { return std::move(result_); }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(int64_t value) override { return scalar(value); }
  bool number_unsigned(uint64_t value) override { return scalar(value); }
  bool number_float(double value, const std::string&) override { return scalar(value); }
  bool string(std::string& value) override { return scalar(std::move(value)); }
  bool binary(Json::binary_t&) override { return false; }
  bool start_object(size_t) override { return start(false); }
  bool start_array(size_t) override { return start(true); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }
  bool key(std::string& key) override {
    levels_.back().key = std::move(key);
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    refuse("is not valid JSON at byte ", position, ": cut short or damaged");
  }

 private:
  enum class Place { elsewhere, vocabulary, merges, merge, added_tokens, added_token };

  struct Level {
    Place place;
    bool list;
    size_t path_size;  // of the value that this level is
    size_t index = 0;
    std::string key = {};
  };

  template <class... Why>
  [[noreturn]] void refuse(const Why&... why) const {
    fail("tokenizer: ", name_, " ", why...);
  }

  Place place() const { return levels_.empty() ? Place::elsewhere : levels_.back().place; }

  // Appends the key or the index of the next value to path_, which is "" for the whole file.
  void extend_path() {
    if (levels_.empty()) return;
    Level& level = levels_.back();
    path_.resize(level.path_size);
    if (!path_.empty()) path_ += '.';
    if (level.key.find('.') != std::string::npos) refuse("has a setting ", in_quotes(level.key), ", expected no dots");
    path_ += level.list ? std::to_string(level.index++) : level.key;
    if (path_.size() > max_path) refuse("has a setting with a name of ", path_.size(), " bytes, expected a tokenizer");
  }

  void keep_setting(Json value) {
    if (!result_.settings.emplace(path_, std::move(value)).second) refuse("has '", path_, "' twice");
    if (result_.settings.size() > max_settings) {
      refuse("has more than ", max_settings, " settings beside its tokens, expected a tokenizer");
    }
  }

  bool start(bool list) {
    if (levels_.size() == max_depth) refuse("nests its values too deeply, expected a tokenizer");
    Place inside = Place::elsewhere;
    switch (place()) {
      case Place::vocabulary:
        refuse("has no number as id of token ", in_quotes(levels_.back().key));
      case Place::merge:
        refuse("has a merge that is no pair of tokens");
      case Place::added_token:
        refuse("has an added token whose ", in_quotes(levels_.back().key), " is a list or object");
      case Place::merges:
        if (!list) refuse("has a merge that is no pair of tokens");
        inside = Place::merge;
        pair_.clear();
        break;
      case Place::added_tokens:
        if (list) refuse("has an added token that is no object");
        inside = Place::added_token;
        fields_ = 0;
        result_.added.emplace_back();
        break;
      case Place::elsewhere:
        extend_path();
        keep_setting(list ? Json::array() : Json::object());
        if (path_ == vocabulary_path_ && !list) inside = Place::vocabulary;
        if (path_ == "model.merges" && list) inside = Place::merges;
        if (path_ == "added_tokens" && list) inside = Place::added_tokens;
    }
    levels_.push_back({.place = inside, .list = list, .path_size = path_.size()});
    return true;
  }

  bool end() {
    if (place() == Place::merge) {
      if (pair_.size() != 2) refuse("has a merge of ", pair_.size(), " tokens, expected 2");
      result_.merges.add(pair_[0] + " " + pair_[1]);
    }
    if (place() == Place::added_token && fields_ != all_fields) {
      refuse("has an added token ", in_quotes(result_.added.back().text),
             " that lacks one of id, content, single_word, lstrip, rstrip, normalized and special");
    }
    levels_.pop_back();
    return true;
  }

  bool scalar(Json value) {
    switch (place()) {
      case Place::vocabulary:
        result_.vocabulary.add(levels_.back().key);
        result_.ids.push_back(id_of(value, levels_.back().key));
        break;
      case Place::merges:
        if (!value.is_string()) refuse("has a merge that is no pair of tokens");
        result_.merges.add(value.get_ref<const std::string&>());
        break;
      case Place::merge:
        if (!value.is_string() || pair_.size() == 2) refuse("has a merge that is no pair of tokens");
        pair_.push_back(std::move(value.get_ref<std::string&>()));
        break;
      case Place::added_tokens:
        refuse("has an added token that is no object");
      case Place::added_token:
        added_field(levels_.back().key, value);
        break;
      case Place::elsewhere:
        extend_path();
        keep_setting(std::move(value));
    }
    return true;
  }

  int32_t id_of(const Json& value, std::string_view token) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() >= INT32_MAX) {
      refuse("has ", value.is_number() ? value.dump() : value.type_name(), " as id of token ", in_quotes(token),
             ", expected a number from 0 to ", INT32_MAX - 1);
    }
    return value.get<int32_t>();
  }

  void added_field(const std::string& field, const Json& value) {
    constexpr const char* names[] = {"id", "content", "special", "normalized", "single_word", "lstrip", "rstrip"};
    const size_t index = static_cast<size_t>(std::find(std::begin(names), std::end(names), field) - names);
    if (index == std::size(names)) refuse("has an added token with ", in_quotes(field), ", which is not known here");
    if ((fields_ >> index & 1) != 0) refuse("has an added token with ", in_quotes(field), " twice");
    fields_ |= 1u << index;
    AddedToken& token = result_.added.back();
    if (field == "id") {
      token.id = id_of(value, token.text);
    } else if (field == "content") {
      if (!value.is_string() || value == "") refuse("has an added token without a text");
      token.text = value.get<std::string>();
    } else {
      if (!value.is_boolean()) refuse("has an added token whose ", field, " is neither true nor false");
      if (field == "special") token.special = value.get<bool>();
      if (field == "normalized") token.normalized = value.get<bool>();
      if (index >= 4 && value.get<bool>()) {
        refuse("has an added token with ", field, ", expected none: it would take neighbouring text with it");
      }
    }
  }

  static constexpr unsigned all_fields = 0x7f;

  const std::string& name_;
  const std::string vocabulary_path_;
  JsonTokenizer result_;
  std::vector<Level> levels_;
  std::string path_;
  std::vector<std::string> pair_;  // the merge that is being read
  unsigned fields_ = 0;            // of the added token that is being read, one bit each
};

}  // namespace

JsonTokenizer read_tokenizer_json(std::string_view bytes, JsonLayout layout, const std::string& name) {
  Reader reader(layout, name);
  Json::sax_parse(bytes.begin(), bytes.end(), &reader);
  return reader.take();
}

}  // namespace strobe
