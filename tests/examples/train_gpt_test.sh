#!/usr/bin/env bash
# train_gpt from outside: what it leaves behind, what it repeats, and what it says about bad input.
# Usage: train_gpt_test.sh BUILD. The last line is "N passed, N failed, N skipped".
set -uo pipefail

train_gpt=$1/examples/train_gpt
# shellcheck source=tests/examples/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"

small=(--layers 1 --heads 2 --embed-dim 16 --context 16 --batch 2 --steps 4 --eval-batches 2 --sample-tokens 20)

train() { "$train_gpt" "${small[@]}" "$@"; }

# refuses NAME PATTERN OPTIONS...: exit status 1 (not a crash), one line on stderr that matches, no output folder.
refuses() {
  local name=$1 pattern=$2 status=0
  shift 2
  rm -rf out
  "$train_gpt" --out out "$@" >stdout 2>stderr || status=$?
  if ((status != 1)); then
    fail "$name: status $status, expected 1"
  elif (($(wc -l <stderr) != 1)) || ! grep -qE -- "$pattern" stderr; then
    fail "$name: expected one line that matches '$pattern', got: $(head -c 500 stderr)"
  elif [[ -e out ]]; then
    fail "$name: left $(ls out)"
  else
    pass
  fi
}

for i in {1..200}; do echo "In the beginning, $i: let there be light; and there was light."; done >text

# What a run leaves.
check "a run on text" train --data text --out run
cp log summary
check "the summary names loss and bits per byte" grep -qE 'bits per byte +[0-9]+\.[0-9]+' summary
for file in model.safetensors config.json metrics.jsonl loss.svg; do check "$file is there" test -s "run/$file"; done
check "token level bytes" train --data text --tokenizer byte --out bytes
check "standard attention" train --data text --attention standard --out standard
check "LLaMA-like form" train --data text --positions rotary --norm rms --mlp swiglu --kv-heads 1 --mlp-dim 24 --no-bias --untied-embeddings --recompute --out llama
check "SGD, accumulation and dropout" train --data text --optimizer sgd --lr 0.1 --grad-accumulation 2 --dropout 0.1 --out sgd
for schedule in constant cosine linear wsd; do check "schedule $schedule" train --data text --schedule $schedule --out schedule; done
check "no sample" train --data text --sample-tokens 0 --out silent
check "a prompt" train --data text --prompt 'In the' --temperature 0 --out prompt
head -c 20000 "$train_gpt" >binary
check "arbitrary bytes as text" train --data binary --out binary_run
check "token ids" train --tokens binary --vocab-size 65536 --out token_run
check "a path with spaces" train --data text --out "a folder/with spaces"
# shellcheck disable=SC2016  # the inner bash expands
check "the file may come through a pipe" bash -c '"$0" "${@:2}" --data <(cat "$1")' "$train_gpt" text "${small[@]}" --out pipe

# The same seed gives the same bits; another seed does not.
losses() { sed -E 's/,"(tokens_per_second|seconds|median_tokens_per_second)":[^,}]*//g' "$1/metrics.jsonl"; }
train --data text --dropout 0.1 --seed 7 --out first >/dev/null 2>&1
train --data text --dropout 0.1 --seed 7 --out again >/dev/null 2>&1
train --data text --dropout 0.1 --seed 8 --out other >/dev/null 2>&1
check "same seed, same losses" diff <(losses first) <(losses again)
check "same seed, same weights" cmp first/model.safetensors again/model.safetensors
if cmp -s first/model.safetensors other/model.safetensors; then fail "another seed, other weights"; else pass; fi

# Bad input.
: >empty
refuses "empty file" 'empty: is empty' --data empty
echo short >short
refuses "file shorter than one context" 'short: [0-9]+ tokens .*expected at least 129' --data short
refuses "missing file" 'missing: no such file' --data missing
refuses "directory" 'is a directory' --data .
refuses "device" 'is a device' --data /dev/zero
refuses "no data" '--data: missing, expected' --steps 1
refuses "context 0" '--context: 0 given, expected an integer from 1' --data text --context 0
refuses "heads" '--heads: 3 given, expected a divisor of --embed-dim 128' --data text --heads 3
refuses "kv heads" '--kv-heads: 3 given, expected a divisor of --heads 4' --data text --kv-heads 3
refuses "odd rotary" 'expected an even width' --data text --positions rotary --embed-dim 12 --heads 4
refuses "learning rate nan" '--lr: nan given, expected' --data text --lr nan
refuses "learning rate inf" '--lr: inf given, expected' --data text --lr inf
refuses "not a number" '--steps: many given, expected' --data text --steps many
refuses "negative seed" '--seed: -1 given, expected' --data text --seed -1
refuses "unknown option" 'not expected: --epochs' --data text --epochs
refuses "unknown choice" '--attention: fast given, expected flash or standard' --data text --attention fast
refuses "both sources" '--data and --tokens: both given' --data text --tokens binary --vocab-size 65536
refuses "beta with SGD" '--beta1: contradicts' --data text --optimizer sgd --beta1 0.9
refuses "momentum with AdamW" '--momentum: contradicts' --data text --momentum 0.9
refuses "vocabulary of a text" '--vocab-size: contradicts' --data text --vocab-size 100
refuses "tokenizer of token ids" '--tokenizer: contradicts' --tokens binary --vocab-size 65536 --tokenizer byte
refuses "warm-up of a constant rate" '--warmup-steps: contradicts' --data text --schedule constant --warmup-steps 5
refuses "decay of another schedule" '--decay-steps: contradicts' --data text --decay-steps 5
refuses "warm-up longer than the run" '--warmup-steps: 9 given, expected at most --steps 5' --data text --steps 5 --warmup-steps 9
refuses "token ids without their number" '--vocab-size: missing' --tokens binary
refuses "token id out of range" 'token id 45177 at position 1, expected ids below --vocab-size 256' --tokens <(printf '\0\0\171\260') --vocab-size 256
printf 'odd' >odd
refuses "half a token id" 'odd: 3 bytes, expected 16-bit token ids' --tokens odd --vocab-size 256
refuses "prompt outside of the vocabulary" "--prompt: character 'é' does not occur" --data text --prompt 'é'
refuses "a model larger than memory" 'expected at most the memory' --data text --layers 10000 --embed-dim 100000 --heads 10
refuses "a batch larger than memory" 'expected at most the memory' --data text --batch 100000000

if ((EUID != 0)); then
  cp text locked && chmod 000 locked
  refuses "unreadable file" 'locked: cannot be read \(Permission denied\)' --data locked
  mkdir closed && chmod 500 closed
  unwritable=closed/run
else
  skip "unreadable file: root reads everything"
  unwritable=/proc/run
fi
for folder in "$unwritable" text text/run; do
  if train --data text --out "$folder" >stdout 2>stderr; then fail "output folder $folder"; else
    check "output folder $folder: one clear line" grep -qE "^train_gpt: --out $folder: " stderr
  fi
done

# A run that diverges stops before the update that would spoil the weights, and leaves an earlier checkpoint alone.
cp run/model.safetensors before
train --data text --optimizer sgd --lr 1e30 --grad-clip 0 --steps 20 --out run >stdout 2>stderr
status=$?
if ((status == 1)) && grep -qE 'step [0-9]+: .* not finite, the update was not made; first non-finite tensor: ' stderr; then pass; else
  fail "non-finite loss: status $status, $(head -c 500 stderr)"
fi
train --data text --optimizer sgd --lr 1e30 --grad-clip 0 --steps 1 --out run >stdout 2>stderr
status=$?
if ((status == 1)) && grep -qE 'step 1: after the update the validation loss is not finite' stderr; then pass; else
  fail "non-finite validation loss: status $status, $(head -c 500 stderr)"
fi
check "non-finite loss: the earlier checkpoint survives" cmp before run/model.safetensors

# A full disk while saving: here the largest file the process may write is smaller than the checkpoint.
cp -r run full
status=0
(ulimit -f 8 && train --data text --out full) >stdout 2>stderr || status=$?
if ((status == 1)) && (($(wc -l <stderr) == 1)) && grep -q 'full/model.safetensors' stderr; then pass; else
  fail "full disk: status $status, $(head -c 500 stderr)"
fi
check "full disk: the earlier checkpoint survives" cmp run/model.safetensors full/model.safetensors
check "full disk: nothing else is left" diff <(ls run) <(ls full)

# Terminals get a bar, everything else lines.
train --data text --out run >stdout 2>&1
if grep -q $'\r' stdout; then fail "plain lines in a pipe"; else pass; fi
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
  TERM=xterm script -qec "'$train_gpt' ${small[*]} --data text --out run" /dev/null >stdout </dev/null
  check "a bar on a terminal" grep -qE $'\r.*step 4/4 \\[=+\\]' stdout
else
  skip "a bar on a terminal: no script command or no pseudo-terminals"
fi

finish
