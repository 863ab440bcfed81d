// The library's loaders, for the fuzzer and for the replay of its corpus.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fuzz/fuzz_one.h"
#include "strobe/core/io/checkpoint.h"
#include "strobe/core/io/token_file.h"
#include "strobe/core/io/tokenizer.h"
#include "support/temporary_folder.h"

namespace strobe::testing {

inline void fuzz_safetensors(std::string_view bytes) {
  const SafeTensors file = load_in_bounds(bytes.size(), {.in_all = 16, .for_any = 16 << 10}, [&] {
    return parse_safetensors(std::as_bytes(std::span(bytes)), "file.safetensors");
  });
  size_t data_bytes = 0;
  for (const NamedTensor& each : file.tensors) {
    const std::byte* data = static_cast<const std::byte*>(each.tensor.data());
    const size_t size = static_cast<size_t>(each.tensor.size()) * size_of(each.tensor.dtype());
    data_bytes += size;
    const std::vector<std::byte> copy(data, data + size);  // reads it all
  }
  expect(data_bytes <= bytes.size(), "more data than the file has");
}

// Any bytes are a text; so are those of the tokenizer.
inline void check_tokenizer(const Tokenizer& tokenizer, std::string_view text) {
  expect(parse_tokenizer_json(tokenizer.to_json(), "again") == tokenizer, "another tokenizer after saving");
  for (const SpecialTokens special : {SpecialTokens::as_text, SpecialTokens::recognised}) {
    std::vector<int32_t> ids;
    try {
      ids = tokenizer.encode(text, special);
    } catch (const Error&) {
      expect(tokenizer.kind() == TokenizerKind::characters, "bytes that cannot be encoded");
      continue;
    }
    expect(tokenizer.decode(ids) == text, "another text after encoding and decoding");
  }
}

inline void fuzz_tokenizer_json(std::string_view bytes) {
  check_tokenizer(load_in_bounds(bytes.size(), {.in_all = 4, .for_any = 64 << 10},
                                 [&] { return parse_tokenizer_json(bytes, "tokenizer.json"); }),
                  bytes);
}

// vocab.json, a byte 0, merges.txt.
inline void fuzz_vocab_and_merges(std::string_view bytes) {
  const size_t end = std::min(bytes.find('\0'), bytes.size());
  const std::string_view merges = bytes.substr(std::min(end + 1, bytes.size()));
  check_tokenizer(load_in_bounds(bytes.size(), {.in_all = 4, .for_any = 64 << 10},
                                 [&] { return parse_vocab_and_merges(bytes.substr(0, end), merges, "folder"); }),
                  bytes);
}

inline void fuzz_tiktoken(std::string_view bytes) {
  check_tokenizer(load_in_bounds(bytes.size(), {.in_all = 4, .for_any = 64 << 10},
                                 [&] { return parse_tiktoken(bytes, "file.tiktoken"); }),
                  bytes);
}

inline void fuzz_tokens(std::string_view bytes) {
  const TokenView view = load_in_bounds(bytes.size(), {.in_all = 4, .for_any = 16 << 10}, [&] {
    return parse_token_file(std::as_bytes(std::span(bytes)), "tokens.bin");
  });
  std::vector<int32_t> ids(static_cast<size_t>(view.size()));
  view.read(0, ids);
  const auto misfit = view.first_not_below(50257);
  const auto high = std::find_if(ids.begin(), ids.end(), [](int32_t id) { return id < 0 || id >= 50257; });
  expect(misfit ? misfit->position == high - ids.begin() : high == ids.end(), "another first id out of range");
}

// "@ NAME", a line break and the contents of that file; then a line break and the next one. Where none of them is
// checkpoint.json, a right one is added, so that changes to the others get past it.
inline void fuzz_checkpoint(std::string_view bytes) {
  constexpr std::string_view mark = "\n@ ";
  std::map<std::string, std::string_view> files;
  const std::string whole = concat_message("\n", bytes);
  for (size_t begin = whole.find(mark); begin < whole.size();) {
    const size_t end = std::min(whole.find(mark, begin + 1), whole.size());
    const std::string_view part = std::string_view(whole).substr(begin + mark.size(), end - begin - mark.size());
    const std::string name(part.substr(0, part.find('\n')));
    const bool plain = !name.empty() && name.size() < 64 && name[0] != '.' &&
                       name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789._-") == std::string::npos;
    if (plain) files[name] = part.substr(std::min(name.size() + 1, part.size()));
    begin = end;
  }
  nlohmann::json list{
      {"format", "strobe checkpoint"}, {"version", 1}, {"step", 7}, {"files", nlohmann::json::object()}};
  for (const auto& [name, contents] : files) list["files"][name] = contents.size();
  const std::string right_list = list.dump();
  const bool listed = files.emplace("checkpoint.json", right_list).second;

  const TemporaryFolder folder;
  size_t folder_bytes = 0;
  for (const auto& [name, contents] : files) {
    write_file(folder / name, contents);
    folder_bytes += contents.size();
  }
  const Checkpoint checkpoint = load_in_bounds(folder_bytes, {.in_all = 32, .for_any = 16 << 10},
                                               [&] { return load_checkpoint(folder.path.string()); });
  const size_t loaded = checkpoint.tensors.size() + checkpoint.texts.size();
  expect(listed ? loaded + 1 == files.size() : loaded < files.size(), "another number of files than in the list");
  for (const auto& [name, text] : checkpoint.texts) expect(text == files.at(name), "another text than in the file");
}

inline constexpr Loader library_loaders[] = {{"safetensors", fuzz_safetensors},
                                             {"tokenizer_json", fuzz_tokenizer_json},
                                             {"vocab_and_merges", fuzz_vocab_and_merges},
                                             {"tiktoken", fuzz_tiktoken},
                                             {"tokens", fuzz_tokens},
                                             {"checkpoint", fuzz_checkpoint}};

}  // namespace strobe::testing
