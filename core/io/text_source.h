// Text from files, folders and standard input, as documents of raw bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "strobe/core/io/tokenizer.h"

namespace strobe {

struct Document {
  std::string name;  // the file's path, or "standard input"
  std::string text;  // its bytes, unchanged
};

// The files that `paths` stand for, in a fixed order: a file is itself (pipes included), "-" is standard input, a
// folder is all the files in it and below, sorted by path, without those that are empty or whose name (or whose
// folder's name) begins with a dot. Links to folders are not followed.
// Throws Error for a path that does not exist or is neither file nor folder, and for a folder without files.
std::vector<std::string> list_text_files(const std::vector<std::string>& paths);

// Reads all of them. Throws Error, naming the file, for one that is empty, cannot be read, or is a device or a git-lfs
// pointer.
std::vector<Document> read_documents(const std::vector<std::string>& paths);
std::string read_text(const std::string& path);

// One text: a blank line ends each document but the last, as paragraphs are told apart. For tokenizers that have no
// token for the end of a text.
std::string join_documents(const std::vector<Document>& documents);

// The ids of all documents, with "<|endoftext|>" between two of them where the tokenizer has that special token, else
// the ids of join_documents. What looks like a special token in a document is ordinary text.
std::vector<int32_t> encode_documents(const Tokenizer& tokenizer, const std::vector<Document>& documents);

}  // namespace strobe
