#!/usr/bin/env bash
# train_gpt from outside: what it leaves behind, what it repeats, and what it says about bad input.
# Usage: train_gpt_test.sh BUILD. The last line is "N passed, N failed, N skipped".
set -uo pipefail

train_gpt=$1/examples/train_gpt
# shellcheck source=tests/examples/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"

small=(--layers 1 --heads 2 --embed-dim 16 --context 16 --batch 2 --steps 4 --eval-batches 2 --sample-tokens 20)

train() { "$train_gpt" "${small[@]}" "$@"; }

# token_file COUNT ID: a token file of COUNT times the 16-bit id, in llm.c's layout.
token_file() {
  le() { printf '\\x%02x' $(($1 & 255)) $(($1 >> 8 & 255)) $(($1 >> 16 & 255)) $(($1 >> 24 & 255)); }
  printf '%b' "$(le 20240520)$(le 1)$(le "$1")"
  head -c 1012 /dev/zero
  printf '%b' "$(for ((i = 0; i < $1; ++i)); do le "$2" | cut -c 1-8; done | tr -d '\n')"
}

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
for file in checkpoints/{best,last}/{model.safetensors,optimizer.safetensors,state.json,tokenizer.json,config.toml} config.toml metrics.jsonl loss.svg; do check "$file is there" test -s "run/$file"; done
check "token level bytes" train --data text --tokenizer byte --out bytes
check "byte-pair tokens" train --data text --tokenizer bpe --vocab-size 300 --out bpe
check "a tokenizer from a file" train --data text --tokenizer bpe/checkpoints/last/tokenizer.json --out loaded
check "the same tokenizer" cmp {bpe,loaded}/checkpoints/last/tokenizer.json
mkdir folder && cp text folder/a && cp text folder/b
check "a folder, held-out text apart" train --data folder --val-data text --out folder_run
check "several files" train --data folder/a folder/b --out files
mkdir lines && for name in a b; do tr -d '\n' <text >lines/$name; done
check "several files without a line break, characters" train --data lines --tokenizer char --out lines_run
# shellcheck disable=SC2016  # the inner bash expands
check "standard input" bash -c '"$0" "${@:2}" --data - <"$1"' "$train_gpt" text "${small[@]}" --out stdin
check "standard attention" train --data text --attention standard --out standard
check "LLaMA-like form" train --data text --positions rotary --norm rms --mlp swiglu --kv-heads 1 --mlp-dim 24 --no-bias --untied-embeddings --recompute --out llama
check "SGD, accumulation and dropout" train --data text --optimizer sgd --lr 0.1 --grad-accumulation 2 --dropout 0.1 --out sgd
for schedule in constant cosine linear wsd; do check "schedule $schedule" train --data text --schedule $schedule --out schedule --overwrite; done
check "no sample" train --data text --sample-tokens 0 --out silent
check "a prompt" train --data text --prompt 'In the' --temperature 0 --out prompt
head -c 20000 "$train_gpt" >binary
check "arbitrary bytes as text" train --data binary --out binary_run
token_file 400 45177 >tokens.bin
check "token ids" train --tokens tokens.bin --vocab-size 65536 --out token_run
for preset in nano char gpt2-124M gpt2-350M llama-tiny; do
  check "preset $preset, flags win" train --preset $preset --kv-heads 1 --tokenizer byte --data text --dropout 0 --grad-accumulation 1 --warmup-steps 1 --out "$preset"
done
check "a run's settings give the same run" "$train_gpt" --config run/config.toml --out again
check "the same weights" cmp {run,again}/checkpoints/last/model.safetensors
check "the same settings" diff <(grep -v '^out' run/config.toml) <(grep -v '^out' again/config.toml)
check "flags win over the file" "$train_gpt" --config run/config.toml --steps 2 --out again --overwrite
check "they did" grep -q '^steps = 2$' again/config.toml
check "patience" train --data text --steps 50 --eval-interval 1 --patience 1 --lr 0 --out patience
cp log patience_log
check "patience ends the run" grep -q 'no better validation loss in 1 evaluations: stopped after step 2' patience_log
check "comparison" train --data text --compare flash,standard --out compared
cp log compared_log
check "comparison shows both" grep -qE '^validation loss +[0-9.]+ +[0-9.]+$' compared_log
check "comparison: the losses agree" grep -qE 'differ by at most [0-9.]+(e-0[4-9])?$' compared_log
check "a path with spaces" train --data text --out "a folder/with spaces"
# shellcheck disable=SC2016  # the inner bash expands
check "the file may come through a pipe" bash -c '"$0" "${@:2}" --data <(cat "$1")' "$train_gpt" text "${small[@]}" --out pipe

# What stands in the way of a comparison is said before its first run.
mv compared/flash compared_flash
train --data text --compare flash,standard --out compared >stdout 2>stderr
check "comparison: a folder that holds a run" grep -q '^train_gpt: --out compared/standard: holds a run' stderr
check "comparison: the other one was not begun" test ! -e compared/flash

# A reader that is gone costs nothing.
endless=(--data text --steps 1000000000 --eval-interval 1000000000)
train "${endless[@]}" --steps 100000 --out unheard 2>stderr | head -n 5 >stdout
status=${PIPESTATUS[0]}
step=$(readlink unheard/checkpoints/last)
if ((status == 1)) && grep -q '^train_gpt: standard output: cannot be written; stopped after step .* and saved' stderr && [[ $step > step-00000000 && $step < step-00100000 ]]; then pass; else
  fail "output that is lost: status $status, saved ${step:-nothing}, $(head -c 500 stderr)"
fi
train --data text --out unheard_start >/dev/full 2>stderr
check "standard output that was never writable" grep -q '^train_gpt: standard output: ' stderr
train --data text --out closed 0<&- >&-
check "closed standard streams spoil no file" test "$(grep -vc '^{' closed/metrics.jsonl)" = 0
mkfifo output
cat output >stdout &
reader=$!
"$train_gpt" "${small[@]}" "${endless[@]}" --out unread >output 2>stderr &
trainer=$!
while kill -0 $trainer 2>/dev/null && ! grep -qs '"step":100,' unread/metrics.jsonl; do sleep 0.01; done
kill $reader
wait $reader 2>/dev/null
kill -INT $trainer
wait $trainer
status=$?
if ((status == 3)) && [[ -e unread/checkpoints/last ]]; then pass; else
  fail "interrupted together with the reader: status $status, $(head -c 500 stderr)"
fi

# The same seed gives the same bits; another seed does not.
losses() { sed -E 's/,"(tokens_per_second|seconds|median_tokens_per_second)":[^,}]*//g' "$1/metrics.jsonl"; }
train --data text --dropout 0.1 --seed 7 --out first >/dev/null 2>&1
train --data text --dropout 0.1 --seed 7 --out second >/dev/null 2>&1
train --data text --dropout 0.1 --seed 8 --out other >/dev/null 2>&1
check "same seed, same losses" diff <(losses first) <(losses second)
check "same seed, same weights" cmp {first,second}/checkpoints/last/model.safetensors
if cmp -s {first,other}/checkpoints/last/model.safetensors; then fail "another seed, other weights"; else pass; fi

# Bad input.
: >empty
refuses "empty file" 'empty is empty, expected text' --data empty
echo short >short
refuses "file shorter than one context" '5 tokens to train on and 1 held out .*expected at least 129 of each' --data short
mkdir inside && cp text inside/a
refuses "results among the texts" '--out inside/run: lies in the folder inside, whose files are the text' --data inside --out inside/run
check "results in a hidden folder, which is not read" train --data inside --out inside/.run
check "whose run goes on" "$train_gpt" --resume --out inside/.run --steps 6
refuses "misspelt tokenizer" '--tokenizer: bit given, which does not exist, expected char, byte, bpe' --data text --tokenizer bit
refuses "missing file" 'missing does not exist' --data missing
mkdir nothing
refuses "empty folder" 'holds no files with text' --data nothing
refuses "device" 'is a device' --data /dev/zero
refuses "settings from a device" '/dev/zero is a device' --config /dev/zero --data text
refuses "comparison of standard input" '--compare with standard input' --data - --compare flash,standard
refuses "standard input twice" 'standard input [(]-[)] given twice' --data - --val-data -
refuses "comparison of one with itself" '--compare: flash given twice' --data text --compare flash,flash
cp text $'caf\xe9'
refuses "a path that the settings cannot hold" "--data: 'caf[?]' given, expected UTF-8" --data $'caf\xe9'
refuses "a prompt that they cannot hold" "--prompt: '[?]' given, expected UTF-8" --data text --tokenizer byte --prompt $'\xff'
refuses "no data" '--data: missing, expected' --steps 1
refuses "context 0" '--context: 0 given, expected an integer from 1' --data text --context 0
refuses "heads" '--heads: 3 given, expected a divisor of --embed-dim 128' --data text --heads 3
refuses "kv heads" '--kv-heads: 3 given, expected a divisor of --heads 4' --data text --kv-heads 3
refuses "odd rotary" 'expected an even width' --data text --positions rotary --embed-dim 12 --heads 4
refuses "learning rate nan" '--lr: nan given, expected' --data text --lr nan
refuses "learning rate inf" '--lr: inf given, expected' --data text --lr inf
refuses "not a number" '--steps: many given, expected' --data text --steps many
refuses "negative seed" '--seed: -1 given, expected' --data text --seed -1
refuses "unknown option" '^train_gpt: --step: unknown option; the nearest is --steps$' --data text --step 5
refuses "abbreviated option" '^train_gpt: --attn: unknown option; the nearest is --attention$' --data text --attn flash
refuses "not an option" 'extra' --data text --steps 5 extra
refuses "unknown preset" '--preset: nan0 given, expected nano or char' --preset nan0 --data text
config() { # config NAME PATTERN LINE: a configuration file with this line is refused
  printf '# a comment\n%b\n' "$3" >config.toml
  refuses "$1" "$2" --config config.toml --data text
}
config "misspelt key" "^train_gpt: config.toml:2: unknown key 'layer'; the nearest is 'layers'\$" 'layer = 3'
config "wrong type" 'config.toml:2: layers: .3. given, expected an integer' 'layers = "3"'
config "fraction for an integer" 'config.toml:2: layers: 3.5 given, expected an integer' 'layers = 3.5'
config "number for a flag" 'no-bias: 1 given, expected true or false' 'no-bias = 1'
config "list of numbers" 'data: .* given, expected a list of strings' 'data = [1]'
config "table" "unknown key 'model'" '[model]\nlayers = 3'
config "out of range" 'config.toml: --layers: 0 given, expected an integer from 1' 'layers = 0'
config "broken TOML" 'config.toml:2: .*, expected TOML such as' 'layers = = 3'
refuses "missing configuration" 'absent.toml cannot be read: No such file' --config absent.toml
refuses "unknown choice" '--attention: fast given, expected flash or standard' --data text --attention fast
refuses "both sources" '--data and --tokens: both given' --data text --tokens tokens.bin --vocab-size 65536
refuses "beta with SGD" '--beta1: contradicts' --data text --optimizer sgd --beta1 0.9
refuses "momentum with AdamW" '--momentum: contradicts' --data text --momentum 0.9
refuses "vocabulary of a text" '--vocab-size: contradicts' --data text --vocab-size 100
refuses "tokenizer of token ids" '--tokenizer: contradicts' --tokens tokens.bin --vocab-size 65536 --tokenizer byte
refuses "warm-up of a constant rate" '--warmup-steps: contradicts' --data text --schedule constant --warmup-steps 5
refuses "decay of another schedule" '--decay-steps: contradicts' --data text --decay-steps 5
refuses "warm-up longer than the run" '--warmup-steps: 9 given, expected at most --steps 5' --data text --steps 5 --warmup-steps 9
refuses "token ids without their number" '--vocab-size: missing' --tokens tokens.bin
refuses "token id out of range" 'tokens.bin: token id 45177 at position 0, expected ids of a vocabulary of 256' --tokens tokens.bin --vocab-size 256
refuses "no token file" 'binary begins with the number' --tokens binary --vocab-size 256
head -c 1100 tokens.bin >cut.bin
refuses "token file cut short" 'cut.bin has 1100 bytes, expected 1824' --tokens cut.bin --vocab-size 65536
refuses "no tokenizer" 'binary' --data text --tokenizer binary
"$train_gpt" --resume >stdout 2>stderr
check "resume what?" grep -q '^train_gpt: --resume: which run?' stderr
refuses "resume nothing" 'out/checkpoints has no checkpoint' --data text --resume
refuses "prompt outside of the vocabulary" "'é'" --data text --prompt 'é'
refuses "a model larger than memory" 'expected at most the memory' --data text --layers 10000 --embed-dim 100000 --heads 10
refuses "a batch larger than memory" 'expected at most the memory' --data text --batch 100000000

if ((EUID != 0)); then
  cp text locked && chmod 000 locked
  refuses "unreadable file" 'locked cannot be read: Permission denied' --data locked
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
sums() { (cd "$1" && find . -type f -exec cksum {} + | sort -k 3); }
sums run >before
refuses_run() { # refuses_run NAME PATTERN OPTIONS...: the run in "run" is as it was
  local name=$1 pattern=$2
  shift 2
  if train --data text --out run "$@" >stdout 2>stderr || ! grep -qE -- "$pattern" stderr || ! diff before <(sums run); then
    fail "$name: $(head -c 500 stderr)"
  else
    pass
  fi
}
refuses_run "a folder that holds a run" '--out run: holds a run, expected --resume to go on with it, --overwrite to replace it'
refuses_run "bad input deletes nothing" 'expected a divisor of --embed-dim' --overwrite --heads 3
refuses_run "bad text deletes nothing" 'empty is empty' --overwrite --data empty
wild=(--optimizer sgd --grad-clip 0 --eval-interval 100)
train --data text "${wild[@]}" --lr 1e30 --steps 20 --save-interval 20 --out wild >stdout 2>stderr
status=$?
if ((status == 1)) && grep -qE 'step 2: .* not finite, the update was not made; first non-finite tensor: output of linear with h.0.attn.qkv.weight' stderr; then pass; else
  fail "non-finite loss: status $status, $(head -c 500 stderr)"
fi
train --data text "${wild[@]}" --steps 1 --out wild --overwrite >stdout 2>stderr
train --resume --out wild --lr 1e30 --steps 2 --save-interval 20 >stdout 2>stderr
status=$?
if ((status == 1)) && grep -qE 'step 2: after the update the validation loss is not finite' stderr; then pass; else
  fail "non-finite validation loss: status $status, $(head -c 500 stderr)"
fi
train --resume --out wild --lr 1e30 --steps 20 --save-interval 1 >stdout 2>stderr
status=$?
if ((status == 1)) && grep -qE 'step 2: after the update the validation loss is not finite' stderr; then pass; else
  fail "ruined weights: status $status, $(head -c 500 stderr)"
fi
train --resume --out wild --lr 1e30 --steps 4 --save-interval 20 --skip-non-finite >stdout 2>stderr
check "steps that are left out are counted" grep -q '^step 4: the loss is not finite.*; left out, 2 so far$' stdout
train --resume --out wild --lr 1e30 --steps 40 --save-interval 50 --skip-non-finite >stdout 2>stderr
status=$?
if ((status == 1)) && grep -q '^train_gpt: step .*, the last of 20 in a row; stopped, checkpoints are as they were' stderr; then pass; else
  fail "too many steps left out: status $status, $(head -c 500 stderr)"
fi
check "the checkpoint of before is there" test "$(readlink wild/checkpoints/last)" = step-00000001
check "and training goes on from it" train --resume --out wild --lr 1e-3 --steps 3 --save-interval 1
train --data text --steps 40 --warmup-steps 9 --out lengthy >stdout 2>&1
check "a file's warm-up yields to fewer steps" train --config lengthy/config.toml --steps 3 --out brief

# A full disk while saving: here the largest file the process may write is smaller than the checkpoint.
cp -r run full
status=0
(ulimit -f 8 && "$train_gpt" --resume --out full --steps 8) >stdout 2>stderr || status=$?
if ((status == 1)) && (($(wc -l <stderr) == 1)) && grep -q 'full/checkpoints/.*/model.safetensors cannot be written: File too large' stderr; then pass; else
  fail "full disk: status $status, $(head -c 500 stderr)"
fi
check "full disk: the earlier checkpoints survive, nothing else is left" diff <(sums run/checkpoints) <(sums full/checkpoints)

# Terminals get a bar, everything else lines.
train --data text --out run --overwrite >stdout 2>&1
if grep -q $'\r' stdout; then fail "plain lines in a pipe"; else pass; fi
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
  TERM=xterm script -qec "'$train_gpt' ${small[*]} --data text --out run --overwrite" /dev/null >stdout </dev/null
  check "a bar on a terminal" grep -qE $'\r.*step 4/4 \\[=+\\]' stdout
else
  skip "a bar on a terminal: no script command or no pseudo-terminals"
fi

finish
