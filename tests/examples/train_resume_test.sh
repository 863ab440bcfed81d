#!/usr/bin/env bash
# train_gpt stopped and resumed: nothing is lost, and it ends with the bits of a run that was never stopped.
# Usage: train_resume_test.sh BUILD [STOPS [KILLS]]. The last line is "N passed, N failed, N skipped".
set -uo pipefail

train_gpt=$1/examples/train_gpt generate=$1/examples/generate
stops=${2:-3} kills=${3:-8}
# shellcheck source=tests/examples/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"

for i in {1..300}; do echo "In the beginning, $i: let there be light; and there was light."; done >text
settings=(--data text --layers 2 --heads 2 --embed-dim 32 --context 32 --batch 2 --grad-accumulation 2 --dropout 0.1
  --eval-interval 25 --eval-batches 2 --sample-tokens 0 --threads 1 --seed 7)

# What must not depend on how often a run was stopped: losses, weights, the optimizer's state.
losses() { sed -E 's/,"(tokens_per_second|bytes_held|bytes_peak)":[^,}]*//g' "$1/metrics.jsonl"; }
same_run() {
  diff <(losses "$1") <(losses "$2") || return
  for file in model.safetensors optimizer.safetensors state.json; do
    cmp "$1/checkpoints/last/$file" "$2/checkpoints/last/$file" || return
  done
  [[ $(readlink "$1/checkpoints/best") == "$(readlink "$2/checkpoints/best")" ]]
}

# The number in the name of the newest checkpoint, 0 when there is none.
newest() {
  local step=0
  for folder in "$1"/checkpoints/step-*; do [[ -d $folder ]] && step=$((10#${folder##*-})); done
  echo "$step"
}

# The last step that metrics.jsonl tells of.
last_step() { sed -nE 's/^\{"step":([0-9]+),"loss.*\}$/\1/p' "$1/metrics.jsonl" | tail -n 1; }

# Waits until the run in folder $1 has told of step $2, or its process $3 has ended.
await_step() {
  while kill -0 "$3" 2>/dev/null; do
    [[ -e $1/metrics.jsonl ]] && (($(last_step "$1") + 0 >= $2)) && return
    sleep 0.002
  done
}

# The same for a checkpoint of step $2.
await_checkpoint() {
  while kill -0 "$3" 2>/dev/null && (($(newest "$1") < $2)); do sleep 0.002; done
}

# Stopped by a signal at a random step and resumed, for each way of training.
steps=600
run_ways=("--optimizer adamw" "--optimizer sgd --schedule wsd" "--dtype bf16 --positions rotary --norm rms --mlp swiglu --recompute --attention standard" "--dtype f16")
for way in "${!run_ways[@]}"; do
  read -ra options <<<"${run_ways[$way]}"
  check "${run_ways[$way]}: a whole run" "$train_gpt" "${settings[@]}" "${options[@]}" --steps $steps --out "whole$way"
done
for ((i = 0; i < stops; ++i)); do
  way=$((i % ${#run_ways[@]})) signal=$((i % 2 == 0 ? 15 : 2)) out=stopped$i
  read -ra options <<<"${run_ways[$way]}"
  "$train_gpt" "${settings[@]}" "${options[@]}" --steps $steps --out $out >stdout 2>stderr &
  stop_at=$((RANDOM % (steps / 2) + 1))  # far enough from the end for a machine that is busy
  await_step $out $stop_at $!
  kill -$signal $!
  wait $!
  status=$?
  stopped_at=$(newest $out)
  if ((status == 3 && stopped_at == $(last_step $out) && stopped_at >= stop_at && stopped_at < steps)) &&
    grep -q "stopped by a signal after step $stopped_at and saved; to go on: " stdout; then pass; else
    fail "signal $signal at step $stop_at: status $status, newest checkpoint $stopped_at, last step $(last_step $out): $(tail -n 1 stderr)"
  fi
  check "resumed after step $stopped_at" "$train_gpt" --resume --out $out
  check "resumed after step $stopped_at (${run_ways[$way]}): the run is the same" same_run "whole$way" $out
  rm -rf $out
done

# Killed at random moments while saving every step.
kill_settings=("${settings[@]}" --steps 1000000 --save-interval 1 --schedule constant)
lost=0
"$train_gpt" "${kill_settings[@]}" --out killed >stdout 2>stderr &
for ((i = 0; i < kills; ++i)); do
  await_checkpoint killed $(($(newest killed) + 1)) $!
  sleep "0.0$((RANDOM % 90 + 10))"
  kill -9 $!
  wait $! 2>/dev/null
  step=$(newest killed) told=$(last_step killed)
  ((told - step <= 1)) || lost=$((lost + 1))
  "$train_gpt" --resume --out killed >stdout 2>stderr &
  await_checkpoint killed $((step + 1)) $!
  if kill -0 $! 2>/dev/null && grep -q "^resume killed/checkpoints/step-0*$step\$" stdout && ! grep -q '^passed over' stdout; then pass; else
    fail "after kill $i at step $step: $(cat stderr) $(head -n 2 stdout)"
  fi
done
await_checkpoint killed $(($(newest killed) + 1)) $!
kill -15 $!
wait $!
if ((lost == 0)); then pass; else fail "$lost of $kills kills lost more than one step"; fi
check "nothing unfinished is left" test -z "$(find killed -name '.unfinished*')"
step=$(newest killed)
check "an undisturbed run of $step steps" "$train_gpt" "${kill_settings[@]}" --save-interval 1000000 --steps "$step" --out undisturbed
check "after $kills kills the losses are the same" diff <(losses killed | grep '"loss"') <(losses undisturbed | grep '"loss"')
check "after $kills kills the weights are the same" cmp {killed,undisturbed}/checkpoints/last/model.safetensors
check "generate reads the checkpoint" "$generate" --checkpoint killed --tokens 5
check "and one folder of it" "$generate" --checkpoint killed/checkpoints/last --tokens 5 --prompt 'In the'
cp -r whole0 damaged
best=$(readlink damaged/checkpoints/best)
other=$(find damaged/checkpoints/step-* -prune ! -name "$best" | sort | tail -n 1)
truncate -s 100 "damaged/checkpoints/$best/model.safetensors"
refuses_to_generate() { # refuses_to_generate NAME PATTERN: one line that matches
  if "$generate" --checkpoint damaged >stdout 2>stderr || (($(wc -l <stderr) != 1)) || ! grep -qE -- "$2" stderr; then
    fail "$1: $(head -c 500 stderr)"
  else
    pass
  fi
}
damage="^generate: load_checkpoint: damaged/checkpoints/best/model.safetensors has 100 bytes, expected .* since it was written"
refuses_to_generate "a damaged best checkpoint" "$damage; the newest checkpoint that is whole: --checkpoint $other\$"
check "generate reads that one" "$generate" --checkpoint "$other" --tokens 5
for model in damaged/checkpoints/step-*/model.safetensors; do truncate -s 100 "$model"; done
refuses_to_generate "no checkpoint that is whole" "$damage\$"
"$generate" --chekpoint killed >stdout 2>stderr
check "generate knows the nearest option" grep -q '^generate: --chekpoint: unknown option; the nearest is --checkpoint$' stderr
tr -d '\n' <text >unbroken
check "a run without line breaks" "$train_gpt" "${settings[@]}" --data unbroken --steps 2 --out unbroken_run
check "generate begins without one" "$generate" --checkpoint unbroken_run --tokens 5

# A run that is still going keeps others out of its folder.
"$train_gpt" "${kill_settings[@]}" --out busy >stdout 2>stderr &
await_checkpoint busy 1 $!
"$train_gpt" --resume --out busy >other 2>&1
check "one process for one folder" grep -q '^train_gpt: --out busy: another process is using it' other
# A folder that vanishes stops the run, and what takes its place is left alone.
mv busy elsewhere && mkdir -p busy/checkpoints/step-00000000
wait $!
status=$?
if ((status == 1)) && grep -qE '^train_gpt: (--out busy: was moved or removed|save.*: busy/checkpoints.*: No such file or directory)' stderr; then pass; else
  fail "a vanished folder: status $status, $(cat stderr)"
fi
check "the folder in its place" test "$(find busy | wc -l) $(ls busy/checkpoints)" = "3 step-00000000"

# So do metrics that vanish, after a checkpoint.
"$train_gpt" "${kill_settings[@]}" --save-interval 50 --out unmeasured >stdout 2>stderr &
await_checkpoint unmeasured 50 $!
rm unmeasured/metrics.jsonl
wait $!
status=$?
if ((status == 1)) && grep -q '^train_gpt: unmeasured/metrics.jsonl: was removed while it was written$' stderr; then pass; else
  fail "vanished metrics: status $status, $(cat stderr)"
fi

# What changes between the parts of a run, and what cannot.
rm -rf part && "$train_gpt" "${settings[@]}" --steps 10 --out part >stdout 2>&1
check "more steps at another rate" "$train_gpt" --resume --out part --steps 20 --lr 1e-3
cp log resumed
check "what changed is said" grep -qE 'it had --lr 0.002, now 0.001: the new value wins' resumed
check "from another folder, told where the text is" env -C / "$train_gpt" --resume --out "$work/part" --data "$work/text" --steps 20
check "metrics go on" test "$(last_step part) $(grep -c '"loss"' part/metrics.jsonl)" = "20 20"
sum_of_part() { cat part/metrics.jsonl part/checkpoints/last/* 2>/dev/null | cksum; }
before=$(sum_of_part)
refused() { # refused NAME PATTERN OPTIONS...: one line that matches, and the run is as it was
  local name=$1 pattern=$2
  shift 2
  if "$train_gpt" --resume --out part "$@" >stdout 2>stderr || (($(wc -l <stderr) != 1)) || ! grep -qE -- "$pattern" stderr ||
    [[ $before != "$(sum_of_part)" ]]; then fail "$name: $(head -c 500 stderr)"; else pass; fi
}
refused "another model" 'began with --layers 2, now 3; --heads 2, now 4; what it began with wins' --layers 3 --heads 4
refused "another tokenizer" 'began with --tokenizer "char", now "byte"' --tokenizer byte
head -n 200 text >shorter
refused "another text" 'training tokens given, expected the [0-9]+ that the run began with' --data shorter
tr '[:lower:]' '[:upper:]' <text >upper
tac text >reordered
refused "as much of another text" 'as many training tokens given as the run began with, [0-9]+, but others' --data reordered
mkdir elsewhere_now
cd elsewhere_now || exit 1
"$train_gpt" --resume --out ../part --steps 30 >../stdout 2>../stderr
cd .. || exit 1
check "relative paths in another folder" grep -qE "^train_gpt: --resume: the run's --data text does not exist in the current folder, .*/elsewhere_now, expected the folder that it began in, or --data with another path\$" stderr
check "which leaves the run as it was" test "$before" = "$(sum_of_part)"
refused "text with other characters" 'read|characters' --data upper
refused "overwrite and resume" 'both given' --overwrite
sed -i 's/"version": 1/"version": 2/' part/checkpoints/step-*/checkpoint.json
before=$(sum_of_part)
refused "a checkpoint of another version" 'has version 2, expected 1'
rm -rf part/checkpoints/step-*
before=$(sum_of_part)
refused "no checkpoint" 'part/checkpoints has no checkpoint'

finish
