// Tokenizer files that are damaged, crafted, or mean something else than byte-level BPE with GPT-2's pattern.
#include <doctest/doctest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "strobe/core/io/tokenizer.h"
#include "strobe/kernels/kernel.h"
#include "support/temporary_folder.h"
#include "support/tokenizer_texts.h"

using namespace strobe;
using namespace strobe::testing;

namespace {

using Json = nlohmann::json;

// The message of the error that f ends with, "" when it ends with none.
std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void check_refused(const std::string& message, const std::string& part) {
  CAPTURE(message);
  CHECK(message.starts_with("tokenizer: "));
  const bool found = message.find(part) != std::string::npos;
  CHECK_MESSAGE(found, "expected: ", part);
}

const std::string& good_json() {
  static const std::string text = read_file(tokenizer_data("tokenizer.json"));
  return text;
}

// The good tokenizer.json after a change.
std::string changed(const std::function<void(Json&)>& change) {
  Json json = Json::parse(good_json());
  change(json);
  return json.dump();
}

// Change at a path such as "/model/type".
std::string with(const std::string& path, const Json& value) {
  return changed([&](Json& json) { json[Json::json_pointer(path)] = value; });
}

std::string json_message(const std::string& text) {
  return message_of([&] { parse_tokenizer_json(text, "t.json"); });
}

std::string added_token(const Json& id, const Json& content, const char* flag = "special") {
  return changed([&](Json& json) {
    Json token = json["added_tokens"][0];
    token["id"] = id;
    token["content"] = content;
    token[flag] = true;
    json["added_tokens"].push_back(token);
  });
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t position = text.find(from);
  REQUIRE(position != std::string::npos);
  return text.replace(position, from.size(), to);
}

}  // namespace

TEST_CASE("tokenizer files: a tokenizer.json that would tokenize differently is refused by name") {
  const std::pair<std::string, std::string> cases[] = {
      {with("/model/type", "Unigram"), "has model.type 'Unigram', expected \"BPE\""},
      {with("/model/type", "WordPiece"), "has model.type 'WordPiece'"},
      {with("/model/type", "WordLevel"), "expected one of characters"},
      {with("/model/dropout", 0.1), "has model.dropout 0.1"},
      {with("/model/continuing_subword_prefix", "##"), "has model.continuing_subword_prefix '##'"},
      {with("/model/end_of_word_suffix", "</w>"), "has model.end_of_word_suffix '</w>'"},
      {with("/model/novelty", 1), "has model.novelty 1, which is not known here"},
      {with("/normalizer", {{"type", "NFC"}}), "has normalizer 'NFC', expected none"},
      {with("/truncation", {{"max_length", 8}}), "has truncation of kind object"},
      {with("/padding", {{"pad_id", 8}}), "has padding of kind object"},
      {with("/pre_tokenizer", nullptr), "has pre_tokenizer null, expected an object"},
      {with("/pre_tokenizer/type", "Metaspace"), "has pre_tokenizer.type 'Metaspace', expected \"ByteLevel\""},
      {with("/pre_tokenizer/add_prefix_space", true), "has pre_tokenizer.add_prefix_space true"},
      {with("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {{{"type", "Digits"}}}}}), "'Digits'"},
      {with("/post_processor", {{"type", "TemplateProcessing"}}), "has post_processor.type 'TemplateProcessing'"},
      {with("/decoder/type", "WordPiece"), "has decoder.type 'WordPiece'"},
      {added_token(557, "<x>", "lstrip"), "has an added token with lstrip"},
      {added_token(557, "<x>", "single_word"), "has an added token with single_word"},
      {added_token(557, "<x>", "novelty"), "has an added token with 'novelty'"},
  };
  for (const auto& [text, part] : cases) check_refused(json_message(text), part);
}

TEST_CASE("tokenizer files: a tokenizer.json of wrong types, ids or merges is refused") {
  const std::pair<std::string, std::string> cases[] = {
      {"", "is empty"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a git-lfs pointer"},
      {"[]", "is no JSON object"},
      {"7", "is no JSON object"},
      {"nonsense", "is not valid JSON at byte 2"},
      {"{\"a\": \"\xff\"}", "is not valid JSON"},
      {"{}", "has model none"},
      {std::string(100'000, '['), "nests its values too deeply"},
      {with("/model", 1), "has model 1"},
      {with("/model/vocab", Json::array()), "has model.vocab of kind array"},
      {with("/model/vocab", Json::object()), "id 556, expected 0 to 0 for 1 tokens"},
      {with("/model/merges", Json::object()), "has model.merges of kind object"},
      {with("/model/merges/0", 1), "has a merge that is no pair"},
      {with("/model/merges/0", {"t", 1}), "has a merge that is no pair"},
      {with("/model/merges/0", {"t"}), "has a merge of 1 tokens"},
      {with("/model/merges/0", {"t", "h", "e"}), "has a merge that is no pair"},
      {with("/model/merges/0", "th"), "expected two tokens and a space"},
      {with("/model/merges/0", "t  h"), "expected two tokens and a space"},
      {with("/model/merges/0", "t 日"), "'日' is not in its vocabulary"},
      {with("/model/merges/0", "t zebra"), "'zebra' is not in its vocabulary"},
      {with("/model/merges/0", "z z"), "'zz' is not in its vocabulary"},
      {with("/model/merges/1", {"t", "h"}), "as merge 1 and before"},
      {with("/model/vocab/th", -1), "has -1 as id of token 'th'"},
      {with("/model/vocab/th", 1.5), "has 1.5 as id of token 'th'"},
      {with("/model/vocab/th", "1"), "has string as id of token 'th'"},
      {with("/model/vocab/th", {1}), "has no number as id of token 'th'"},
      {with("/model/vocab/th", 18446744073709551615u), "has 18446744073709551615 as id of token 'th'"},
      {with("/model/vocab/th", 1'000'000), "gives 'th' id 1000000, expected 0 to 556"},
      {with("/model/vocab/th", 255), "the same id 255"},
      {with("/model/vocab/日", 557), "has a token '日', expected names in GPT-2's byte alphabet"},
      {with("/model/vocab/", 557), "has a token '', expected names"},
      {with("/model/vocab/th", 557), "id 557, expected 0 to 556"},
      {changed([](Json& json) { json["model"]["vocab"].erase("!"); }), "id 556, expected 0 to 555 for 556 tokens"},
      {changed([](Json& json) { json["added_tokens"][0]["id"] = 0; }), "the same id 0"},
      {changed([](Json& json) {
         json["model"]["vocab"].erase("Q");
         json["model"]["vocab"]["QQ"] = 48;
       }),
       "has no token for the byte 81"},
      {replaced(good_json(), "\"th\":256", "\"th\":256,\"th\":557"), "has token 'th' twice"},
      {replaced(good_json(), "\"model\"", "\"model\":1,\"model\""), "has 'model' twice"},
      {added_token(558, "<x>"), "id 558, expected 0 to 557"},
      {added_token(-1, "<x>"), "has -1 as id"},
      {added_token(557, ""), "has an added token without a text"},
      {added_token(557, 1), "has an added token without a text"},
      {added_token(557, "th"), "gives 'th' the ids 256 and 557"},
      {added_token(557, "<|endoftext|>"), "adds '<|endoftext|>' twice"},
      {with("/added_tokens", Json::object()), "has added_tokens of kind object"},
      {with("/added_tokens/0", 1), "has an added token that is no object"},
      {with("/added_tokens/0/special", 1), "whose special is neither true nor false"},
      {with("/added_tokens/0/special", Json::array()), "is a list or object"},
      {changed([](Json& json) { json["added_tokens"][0].erase("lstrip"); }), "lacks one of"},
      {with("/model.type", 1), "expected no dots"},
      {with(concat_message("/", std::string(1000, 'x')), 1), "a name of 1000 bytes"},
      {with("/many", Json(std::vector<int>(2000))), "has more than 200 settings"},
  };
  for (const auto& [text, part] : cases) check_refused(json_message(text), part);
}

TEST_CASE("tokenizer files: a file that is cut short anywhere is refused") {
  for (size_t size = 0; size + 1 < good_json().size(); size += 7) {
    CHECK(json_message(good_json().substr(0, size)).starts_with("tokenizer: t.json "));
  }
  const std::string ranks = read_file(tokenizer_data("ranks.tiktoken"));
  for (size_t size = 0; size < 256 * 8; size += 7) {
    CHECK(message_of([&] { parse_tiktoken(ranks.substr(0, size), "t"); }).starts_with("tokenizer: t "));
  }
}

TEST_CASE("tokenizer files: older and other spellings of the same tokenizer are read") {
  const Tokenizer good = parse_tokenizer_json(good_json(), "good");
  const std::string spellings[] = {
      changed([](Json& json) {  // before 2020: no type, merges as text, an unknown token that never occurs
        Json& model = json["model"];
        model.erase("type");
        model.erase("ignore_merges");
        model["unk_token"] = "<|endoftext|>";
        model["continuing_subword_prefix"] = model["end_of_word_suffix"] = "";
        for (Json& merge : model["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
        json["post_processor"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}};
        json["pre_tokenizer"].erase("use_regex");
      }),
      changed([](Json& json) {  // the pattern spelled out
        Json byte_level = json["pre_tokenizer"];
        byte_level["use_regex"] = false;
        const char* gpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
        json["pre_tokenizer"] = {
            {"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", gpt2}}}, {"behavior", "Isolated"}, {"invert", false}},
              byte_level}}};
      }),
      changed([](Json& json) { json["model"]["vocab"]["<|endoftext|>"] = 556; }),
      "\xef\xbb\xbf" + good_json(),
  };
  for (const std::string& text : spellings) CHECK(parse_tokenizer_json(text, "t.json") == good);
}

TEST_CASE("tokenizer files: added tokens that are not special are always taken, those not normalized first") {
  const std::string text = changed([](Json& json) {
    const auto add = [&](const char* content, bool special, bool normalized) {
      Json token = json["added_tokens"][0];
      token["id"] = 556 + json["added_tokens"].size();
      token["content"] = content;
      token["special"] = special;
      token["normalized"] = normalized;
      json["added_tokens"].push_back(token);
    };
    add("<a>", false, false);
    add("x<a>y", false, true);
    add("<b>", true, true);
  });
  const Tokenizer tokenizer = parse_tokenizer_json(text, "t.json");
  CHECK(tokenizer.special_tokens().size() == 2);
  const auto x = tokenizer.encode("x"), y = tokenizer.encode("y");
  CHECK(tokenizer.encode("x<a>y") == std::vector<int32_t>{x[0], 557, y[0]});
  CHECK(tokenizer.encode("x<a>y<b>", SpecialTokens::recognised) == std::vector<int32_t>{x[0], 557, y[0], 559});
  CHECK(parse_tokenizer_json(tokenizer.to_json(), "again") == tokenizer);
}

TEST_CASE("tokenizer files: vocab.json and merges.txt that do not belong together are refused") {
  const std::string vocabulary = read_file(tokenizer_data("vocab.json"));
  const std::string merges = read_file(tokenizer_data("merges.txt"));
  const auto message = [](const std::string& vocab_json, const std::string& merges_txt) {
    return message_of([&] { parse_vocab_and_merges(vocab_json, merges_txt, "folder"); });
  };
  CHECK(message(vocabulary, merges).empty());
  CHECK(message(vocabulary, replaced(merges, "#version: 0.2\n", "")).empty());
  check_refused(message("", merges), "is empty");
  check_refused(message(vocabulary, ""), "is empty");
  check_refused(message("[1]", merges), "has no JSON object of tokens");
  check_refused(message("{\"!\": {}}", merges), "has no number as id");
  check_refused(message(vocabulary, merges + "\n"), "has '' as merge 300");
  check_refused(message(vocabulary, merges + "q q\n"), "'qq' is not in its vocabulary");
  check_refused(message("{\"a\": 0}", merges), "has no token for the byte 0");
}

TEST_CASE("tokenizer files: a damaged rank file, or one made with another pattern, is refused") {
  const std::string ranks = read_file(tokenizer_data("ranks.tiktoken"));
  const auto message = [](const std::string& text) { return message_of([&] { parse_tiktoken(text, "t.tiktoken"); }); };
  CHECK(message(ranks).empty());
  CHECK(parse_tiktoken(ranks.substr(0, ranks.size() - 1), "no end of line") == parse_tiktoken(ranks, "t"));
  check_refused(message(""), "is empty");
  check_refused(message("version https://git-lfs.github.com/spec/v1\n"), "is a git-lfs pointer");
  check_refused(message("IQ== 0\nIg== 1\n"), "has no token for the byte 0");
  check_refused(message("IQ 0\n"), "has 'IQ 0' in line 1, expected a token in base64");
  check_refused(message("I=== 0\n"), "in line 1, expected a token in base64");
  check_refused(message("I?== 0\n"), "in line 1, expected a token in base64");
  check_refused(message("IR== 0\n"), "in line 1, expected a token in base64");  // bits that no byte has
  check_refused(message(" 0\n"), "in line 1, expected a token in base64");
  check_refused(message("\n"), "in line 1, expected a token in base64");
  check_refused(message("IQ==\n"), "in line 1, expected a token in base64");
  check_refused(message("IQ== 1\n"), "has rank '1' in line 1, expected ranks that count up from 0");
  check_refused(message("IQ== 0\nIg== 2\n"), "has rank '2' in line 2");
  check_refused(message("IQ== 0\nIg== 99999999999999999999\n"), "has rank '99999999999999999999' in line 2");
  check_refused(message("IQ== 0\nIQ== 1\n"), "has token '!' in line 1 and line 2");
  check_refused(message(std::string(1368, 'A') + " 0\n"), "has a token of 1026 bytes in line 1, expected at most 1024");
  check_refused(message(ranks + "KG5hbWU= 556\n"), "has a token '(name', which GPT-2's pattern would cut");
}

TEST_CASE("tokenizer files: what is no tokenizer file is refused, with its path") {
  const TemporaryFolder folder;
  const auto message = [&](const std::string& path) { return message_of([&] { Tokenizer::load(path); }); };
  check_refused(message(folder / "missing.json"), "missing.json does not exist");
  check_refused(message(folder.path.string()), "holds neither tokenizer.json nor vocab.json with merges.txt");
  write_file(folder / "vocab.json", "{}");
  check_refused(message(folder.path.string()), "holds neither tokenizer.json nor vocab.json with merges.txt");
  write_file(folder / "a.tiktoken", "{}");
  check_refused(message(folder / "a.tiktoken"), "a.tiktoken has '{}' in line 1");
  check_refused(message("/dev/zero"), "/dev/zero is not a regular file");
}
