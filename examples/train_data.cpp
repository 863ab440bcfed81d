// Reads documents, picks or trains the tokenizer, and holds a part out.
#include "train_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "option_checks.h"

namespace examples {
namespace {

using namespace strobe;

constexpr const char* end_of_text = "<|endoftext|>";  // as GPT-2 calls it

// `texts` are all there are: characters that only the held-out part has would otherwise be unknown.
Tokenizer make_tokenizer(const TrainOptions& o, const std::vector<std::string_view>& texts) {
  if (o.tokenizer == "byte") return Tokenizer::bytes();
  if (o.tokenizer == "char") return Tokenizer::characters(texts);
  if (o.tokenizer != "bpe") {
    require(std::filesystem::exists(o.tokenizer),
            "--tokenizer: {} given, which does not exist, expected char, byte, bpe or the path of a tokenizer",
            o.tokenizer);
    return Tokenizer::load(o.tokenizer);
  }
  return train_bpe(texts, {.vocab_size = o.vocab_size, .special_tokens = {end_of_text}});
}

TokenSource encode(const Tokenizer& tokenizer, const std::vector<Document>& documents) {
  const std::string name = documents.size() == 1
                               ? documents[0].name
                               : fmt::format("{} and {} more", documents[0].name, documents.size() - 1);
  return TokenSource(encode_documents(tokenizer, documents), name);
}

void load_text(TrainingData& data, const TrainOptions& o, const std::optional<Tokenizer>& saved) {
  const std::vector<Document> training = read_documents(o.data);
  std::vector<Document> held_out;
  if (!o.val_data.empty()) held_out = read_documents(o.val_data);
  if (saved) {
    data.tokenizer = saved;
  } else {
    std::vector<std::string_view> texts;
    for (const auto* documents : {&training, &std::as_const(held_out)})
      for (const Document& document : *documents) texts.push_back(document.text);
    const bool joined = std::max(training.size(), held_out.size()) > 1;
    if (o.tokenizer == "char" && joined) texts.push_back("\n");  // stands between documents
    data.tokenizer = make_tokenizer(o, texts);
  }
  const TokenSource tokens = encode(*data.tokenizer, training);
  data.split =
      held_out.empty() ? split_tokens(tokens, o.val_fraction) : TokenSplit{tokens, encode(*data.tokenizer, held_out)};
}

void load_ids(TrainingData& data, const TrainOptions& o, const std::optional<Tokenizer>& saved) {
  if (saved)
    data.tokenizer = saved;
  else if (o.tokenizer != "none")
    data.tokenizer = Tokenizer::load(o.tokenizer);
  data.split = o.val_data.empty() ? load_tokens(o.tokens, o.val_fraction)
                                  : TokenSplit{TokenSource::from_files(o.tokens), TokenSource::from_files(o.val_data)};
}

}  // namespace

TrainingData load_data(const TrainOptions& o, const std::optional<Tokenizer>& saved) {
  TrainingData data;
  data.name = std::filesystem::path(o.data.empty() ? o.tokens.front() : o.data.front()).filename().string();
  if (o.data.empty())
    load_ids(data, o, saved);
  else
    load_text(data, o, saved);
  data.vocab_size = data.tokenizer ? data.tokenizer->vocab_size() : o.vocab_size;
  if (o.data.empty())
    for (const TokenSource* part : {&data.split.training, &data.split.validation})
      part->check_vocabulary(data.vocab_size);
  require_windows(data.split, o.context);
  data.training_fingerprint = data.split.training.fingerprint();
  data.validation_fingerprint = data.split.validation.fingerprint();
  return data;
}

std::vector<int64_t> evaluation_windows(const TrainingData& data, const TrainOptions& o) {
  return spread_windows(data.split.validation.size(), o.context, o.eval_batches * o.batch);
}

std::optional<double> bytes_per_token(const TrainingData& data, const std::vector<int64_t>& windows, int64_t context) {
  if (!data.tokenizer) return std::nullopt;
  std::set<int32_t> special;  // they stand between texts and are no bytes of any
  for (const auto& [name, id] : data.tokenizer->special_tokens()) special.insert(id);
  size_t bytes = 0;
  std::vector<int32_t> targets(static_cast<size_t>(context));
  for (const int64_t start : windows) {
    data.split.validation.read(start + 1, targets);
    for (const int32_t target : targets)
      if (!special.contains(target)) bytes += data.tokenizer->token_bytes(target).size();
  }
  if (bytes == 0) return std::nullopt;
  return static_cast<double>(bytes) / static_cast<double>(windows.size() * targets.size());
}

}  // namespace examples
