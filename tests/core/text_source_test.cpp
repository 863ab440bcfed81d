#include "strobe/core/io/text_source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "support/compare.h"
#include "support/temporary_folder.h"

using namespace strobe;
using namespace strobe::testing;

TEST_CASE("text source: bytes come back unchanged") {
  const TemporaryFolder folder;
  std::string bytes =
      "\xef\xbb\xbf"
      "line\r\nline\n\n\xff\xfe broken";
  bytes += std::string("\0nul", 4);
  write_file(folder / "a.txt", bytes);
  CHECK(read_text(folder / "a.txt") == bytes);
  const std::vector<Document> documents = read_documents({folder / "a.txt"});
  REQUIRE(documents.size() == 1);
  CHECK(documents[0].name == folder / "a.txt");
  CHECK(join_documents(documents) == bytes);
}

TEST_CASE("text source: a folder is its files and those below it, sorted, without hidden and empty ones") {
  const TemporaryFolder folder;
  for (const char* name : {"c.txt", "b/2.txt", "b/10.txt", "a/z/deep", "A.md", ".git/config", ".hidden", "b/.DS_Store"})
    write_file(folder / name, name);
  write_file(folder / "empty.txt", "");
  std::filesystem::create_directories(folder / "nothing");
  std::filesystem::create_directory_symlink(folder.path, folder.path / "loop");
  std::filesystem::create_symlink(folder / "c.txt", folder.path / "link.txt");
  std::vector<std::string> expected;
  for (const char* name : {"A.md", "a/z/deep", "b/10.txt", "b/2.txt", "c.txt", "link.txt"})
    expected.push_back(folder / name);
  CHECK(list_text_files({folder.path.string()}) == expected);
  CHECK(list_text_files({folder / "c.txt", folder / "b", "-"}) ==
        std::vector<std::string>{folder / "c.txt", folder / "b/10.txt", folder / "b/2.txt", "-"});
  CHECK(read_documents({folder / "b"})[1].text == "b/2.txt");
}

TEST_CASE("text source: what is no text is refused, naming it") {
  const TemporaryFolder folder;
  write_file(folder / "empty", "");
  write_file(folder / "lfs", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n");
  std::filesystem::create_directories(folder / "nothing/below");
  write_file(folder / "links/text", "text");
  std::filesystem::create_symlink("nowhere", folder / "links/.hidden");
  const auto error_for = [&](const std::string& name) { return error_of([&] { read_documents({folder / name}); }); };
  CHECK(contains(error_for("missing"), "missing does not exist"));
  CHECK(contains(error_for("empty"), "empty is empty"));
  CHECK(contains(error_for("lfs"), "git-lfs pointer"));
  CHECK(contains(error_for("nothing"), "no files with text"));
  CHECK(list_text_files({folder / "links"}) == std::vector<std::string>{folder / "links/text"});
  std::filesystem::create_symlink("nowhere", folder / "links/broken");
  CHECK(contains(error_for("links"), "links/broken is a link to what does not exist"));
  std::filesystem::remove(folder / "links/broken");
  std::filesystem::create_symlink("round", folder / "links/round");
  CHECK(contains(error_for("links"), "links/round cannot be read: Too many levels of symbolic links"));
  CHECK(contains(error_of([&] { read_documents({"/dev/null"}); }), "device"));
  CHECK(contains(error_of([&] { read_text(folder.path.string()); }), "cannot be read"));
  if (geteuid() != 0) {  // root may read everything
    write_file(folder / "secret", "x");
    std::filesystem::permissions(folder / "secret", std::filesystem::perms::none);
    CHECK(contains(error_for("secret"), "Permission denied"));
  }
}

TEST_CASE("text source: a pipe is read to its end") {
  const TemporaryFolder folder;
  const std::string path = folder / "pipe";
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  const std::string text(300000, 'p');
  std::thread writer([&] { std::ofstream(path) << text; });
  const std::vector<Document> documents = read_documents({path});
  writer.join();
  CHECK(documents[0].text == text);
}

TEST_CASE("text source: standard input is read to its end") {
  const TemporaryFolder folder;
  write_file(folder / "in", "from standard input");
  const int saved = dup(STDIN_FILENO);
  REQUIRE(std::freopen((folder / "in").c_str(), "rb", stdin) != nullptr);
  const std::vector<Document> documents = read_documents({"-"});
  dup2(saved, STDIN_FILENO);
  close(saved);
  CHECK(documents[0].name == "standard input");
  CHECK(documents[0].text == "from standard input");
}

TEST_CASE("text source: a blank line ends each document but the last") {
  CHECK(join_documents({}) == "");
  CHECK(join_documents({{"a", "one"}}) == "one");
  CHECK(join_documents({{"a", "one"}, {"b", "two\n"}, {"c", "three\n\n"}, {"d", "four\r\n\r\n"}, {"e", "five\n"}}) ==
        "one\n\ntwo\n\nthree\n\nfour\r\n\r\nfive\n");
}

TEST_CASE("text source: documents are told apart by the end of a text where the tokenizer knows it") {
  const std::vector<Document> documents{{"a", "one<|endoftext|>"}, {"b", "two"}};
  const Tokenizer bytes = Tokenizer::bytes();
  CHECK(encode_documents(bytes, documents) == bytes.encode("one<|endoftext|>\n\ntwo"));
  const Tokenizer with_end = bytes.with_special_tokens({"<|endoftext|>"});
  std::vector<int32_t> expected = bytes.encode("one<|endoftext|>");
  expected.push_back(256);
  for (const int32_t id : bytes.encode("two")) expected.push_back(id);
  CHECK(encode_documents(with_end, documents) == expected);
  CHECK(encode_documents(with_end, {documents[1]}) == bytes.encode("two"));
}
