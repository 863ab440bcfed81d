#!/usr/bin/env python3
"""Writes what tests/core/tokenizer_reference_test.cpp compares with into tests/data/tokenizer/.

Needs `pip install tokenizers tiktoken`. training.txt is the beginning of the King James Bible and some lines of other
languages and of code. Hugging Face's trainer learns from it; ids.json has what both libraries make of sample.txt, with
special tokens recognised and taken as text.
"""
import base64
import json
import pathlib
import random

import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

FOLDER = pathlib.Path(__file__).parent / "tokenizer"
END_OF_TEXT = "<|endoftext|>"
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NUM_MERGES = 300


def sample(training: str) -> str:
    """The training text in pieces that are cut and joined anew, and white space, controls and what joins characters."""
    rng = random.Random(0)
    special = ["'s", "'LL", "'re", " 's", "\r\n", "\n\n", "  ", "\t", " \n ", "\0", "\ufeff", "\u0085", "\u00a0",
               "\u180e", "\u2003", "\u200b", "\u200d", "\u2028", "\u3000", "\U0001f469\u200d\U0001f4bb", "e\u0301",
               "\U00010000", "\U0010ffff", "\ufffd", END_OF_TEXT, "<|endoftext", "<|", "123", "४२"]
    parts = []
    for _ in range(400):
        begin = rng.randrange(len(training))
        parts.append(training[begin : begin + rng.randrange(1, 12)])
        parts.append("".join(rng.choice(special) for _ in range(rng.randrange(4))))
    return "".join(parts)


def main() -> None:
    training = (FOLDER / "training.txt").read_bytes().decode()
    text = sample(training)
    (FOLDER / "sample.txt").write_bytes(text.encode())

    hugging_face = tokenizers.Tokenizer(models.BPE())
    hugging_face.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hugging_face.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    hugging_face.train_from_iterator(
        [training],
        trainers.BpeTrainer(vocab_size=256 + NUM_MERGES, min_frequency=2, initial_alphabet=alphabet, show_progress=False),
    )
    hugging_face.model.save(str(FOLDER))  # vocab.json and merges.txt
    hugging_face.add_special_tokens([END_OF_TEXT])
    hugging_face.save(str(FOLDER / "tokenizer.json"), pretty=False)

    # The same tokens as ranks, which tiktoken merges by their bytes.
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    vocabulary = json.loads((FOLDER / "vocab.json").read_text())
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in sorted(vocabulary.items(), key=lambda t: t[1])}
    lines = [base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in ranks.items()]
    (FOLDER / "ranks.tiktoken").write_bytes(b"".join(lines))
    rank_based = tiktoken.Encoding(
        "test", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
    )

    recognised = hugging_face.encode(text).ids
    assert recognised == rank_based.encode(text, allowed_special="all")
    assert hugging_face.decode(recognised, skip_special_tokens=False) == text
    hugging_face.encode_special_tokens = True
    as_text = hugging_face.encode(text).ids
    assert as_text == rank_based.encode_ordinary(text)
    ids = {"recognised": recognised, "as_text": as_text}
    (FOLDER / "ids.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
