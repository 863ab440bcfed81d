// Turns text into token files once, for runs that begin at once: prepare_data --data FILE --out FOLDER, then
// train_gpt --tokens FOLDER --tokenizer FOLDER.
#include <fmt/format.h>
#include <strobe/strobe.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <limits>

#include "command_line.h"
#include "option_checks.h"
#include "train_data.h"

using namespace examples;
using namespace strobe;

namespace {

namespace fs = std::filesystem;

struct PrepareOptions {
  TrainOptions text;  // of which only what load_data needs of a text
  std::string out;
  int64_t shard_tokens = 100'000'000;
};

bool is_token_file(const fs::path& path) { return path.extension() == ".bin"; }

// A folder that holds token files already would mix them with the new ones.
void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  fs::directory_iterator entry(folder, error);
  require(!error, "--out {}: {}, expected a folder that can be written", folder, error.message());
  const bool used = std::any_of(begin(entry), end(entry), [](const auto& file) { return is_token_file(file.path()); });
  require(!used, "--out {}: holds token files already, expected a folder without *.bin", folder);
}

// FOLDER/text_PART_000000.bin and so on; `written` gets the paths of those that are whole.
void write_shards(const TokenSource& tokens, const std::string& part, const PrepareOptions& o, int64_t vocab_size,
                  std::vector<fs::path>& written) {
  std::vector<int32_t> piece;
  int64_t shard = 0;
  for (int64_t begin = 0; begin < tokens.size(); ++shard) {
    const int64_t end = std::min(begin + o.shard_tokens, tokens.size());
    const std::string path = (fs::path(o.out) / fmt::format("text_{}_{:06}.bin", part, shard)).string();
    TokenFileWriter file(path, vocab_size);
    while (begin < end) {
      piece.resize(static_cast<size_t>(std::min<int64_t>(end - begin, 1 << 20)));
      tokens.read(begin, piece);
      file.append(piece);
      begin += std::ssize(piece);
    }
    file.finish();
    written.emplace_back(path);
    fmt::print("{}  {} tokens\n", path, file.size());
  }
}

void prepare(PrepareOptions& o) {
  make_folder(o.out);
  o.text.context = 1;  // one token and its target are enough here
  const TrainingData data = load_data(o.text, std::nullopt);
  std::vector<fs::path> written;
  try {
    write_shards(data.split.validation, "val", o, data.vocab_size, written);
    write_shards(data.split.training, "train", o, data.vocab_size, written);
    // Last, so that a folder with a tokenizer is whole.
    const std::string tokenizer = (fs::path(o.out) / "tokenizer.json").string();
    data.tokenizer->save(tokenizer);
    fmt::print("{}  vocabulary of {}\n", tokenizer, data.vocab_size);
  } catch (...) {  // a part of the text would be taken for all of it
    std::error_code ignored;
    for (const fs::path& path : written) fs::remove(path, ignored);
    throw;
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the size limit is an error like a full disk
  PrepareOptions o;
  TrainOptions& t = o.text;
  CLI::App app("Writes a text as token files (llm.c's layout) and the tokenizer beside them, for train_gpt --tokens.");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", t.data, "texts: files, folders, or - for standard input")->required();
  app.add_option("--val-data", t.val_data, "texts to hold out; without them --val-fraction decides");
  app.add_option("--val-fraction", t.val_fraction, "how much of the end of the tokens is held out")
      ->check(range(1e-9, 0.9));
  app.add_option("--tokenizer", t.tokenizer, "char, byte, bpe, or PATH: tokenizer.json, *.tiktoken, or a folder");
  app.add_option("--vocab-size", t.vocab_size, "tokens that bpe learns")->check(range<int64_t>(257, 1 << 30));
  app.add_option("--out", o.out, "the folder to write to")->required();
  app.add_option("--shard-tokens", o.shard_tokens, "tokens in one file")
      ->check(range<int64_t>(1, std::numeric_limits<int32_t>::max()));
  try {
    parse(app, {argv + 1, argv + argc});
    prepare(o);
    flush_output();
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "prepare_data: %s\n", error.what());
    return 1;
  }
}
