#!/usr/bin/env bash
# prepare_data from outside: the files it leaves, byte for byte, and what it says about bad input.
# Usage: prepare_data_test.sh BUILD. The last line is "N passed, N failed, N skipped".
set -uo pipefail

prepare_data=$1/examples/prepare_data
# shellcheck source=tests/examples/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"

# refuses NAME PATTERN OPTIONS...: exit status 1 (not a crash) and one line on stderr that matches.
refuses() {
  local name=$1 pattern=$2 status=0
  shift 2
  "$prepare_data" "$@" >stdout 2>stderr </dev/null || status=$?
  if ((status == 1)) && (($(wc -l <stderr) == 1)) && grep -qE -- "^prepare_data: $pattern" stderr; then pass; else
    fail "$name: status $status, expected 1 and one line that matches '$pattern', got: $(head -c 500 stderr)"
  fi
}

# ids FILE: the 16-bit ids of a token file, behind its magic number, version and count.
ids() { od -An -v -td4 -N12 "$1" && od -An -v -tu2 -j1024 "$1"; }

mkdir texts
printf 'abc' >texts/1.txt
printf 'defghij' >texts/2.txt
check "two texts as bytes" "$prepare_data" --data texts --tokenizer byte --val-fraction 0.25 --shard-tokens 5 --out bytes
check "the files" diff <(ls bytes) <(printf 'text_%s.bin\n' train_000000 train_000001 val_000000 && echo tokenizer.json)
words() { tr -s ' \n' ' '; }
check "the first training tokens" diff <(ids bytes/text_train_000000.bin | words) <(echo -n ' 20240520 1 5 97 98 99 10 10 ')
check "the next ones" diff <(ids bytes/text_train_000001.bin | words) <(echo -n ' 20240520 1 4 100 101 102 103 ')
check "those held out" diff <(ids bytes/text_val_000000.bin | words) <(echo -n ' 20240520 1 3 104 105 106 ')

printf aba >aba
check "standard input, held-out text of its own" "$prepare_data" --data - --val-data texts/1.txt --out chars <aba
check "its training tokens" diff <(ids chars/text_train_000000.bin | words) <(echo -n ' 20240520 1 3 0 1 0 ')
check "its held-out tokens" diff <(ids chars/text_val_000000.bin | words) <(echo -n ' 20240520 1 3 0 1 2 ')

printf '' >empty
refuses "a misspelt option" '--dta: unknown option; the nearest is --data$' --dta texts --out x
refuses "no text" '--data is required' --out x
refuses "a missing text" 'read: nothing does not exist' --data nothing --out x
refuses "an empty text" 'read: empty is empty' --data empty --out x
refuses "a folder without files" 'read: folder x holds no files' --data x --out x
refuses "a folder in use" '--out bytes: holds token files already' --data texts --out bytes
refuses "a file as folder" '--out empty: ' --data texts --out empty
refuses "a text too short to split" 'data: 6 tokens to train on and 1 held out .* at least 2' \
  --data texts/2.txt --val-fraction 0.1 --out x
refuses "no tokens in a file" '--shard-tokens: 0 given, expected an integer from 1' --data texts --out x --shard-tokens 0
head -c 20000 "$prepare_data" >large
limit=$(ulimit -S -f)
ulimit -S -f 8  # KiB: enough for the held-out tokens alone, as on a disk that fills up
refuses "a full disk" 'save: x/text_train_000000.bin cannot be written: File too large' --data large --tokenizer byte --out x
ulimit -S -f "$limit"
check "what was written before" grep -q '^x/text_val_000000.bin  2000 tokens$' stdout
if [[ -z $(ls x) ]]; then pass; else fail "bad input left $(ls x)"; fi

finish
