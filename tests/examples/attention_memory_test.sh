#!/usr/bin/env bash
# attention_memory from outside: what it measures and writes, where it stops, and what it says about bad input.
# Usage: attention_memory_test.sh BUILD. The last line is "N passed, N failed, N skipped".
# shellcheck disable=SC2016,SC2054  # awk expands; lists are written with commas
set -uo pipefail

attention_memory=$1/examples/attention_memory
# shellcheck source=tests/examples/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"

export CUDA_VISIBLE_DEVICES=  # what is checked is the CPU's, also where there is a GPU

# holds NAME FILE AWK: the awk program, run on a CSV whose columns it names as in f["seq_len"], must exit with 0.
holds() {
  check "$1" awk -F, "NR == 1 { for (i = 1; i <= NF; ++i) column[i] = \$i; next }
    { for (i = 1; i <= NF; ++i) f[column[i]] = \$i } $3" "$2"
}

# exponent FILE SERIES: the slope of log(extra_bytes) over log(seq_len) by least squares, with two digits.
exponent() {
  awk -F, -v series="$2" '$1 == series && $15 != "" {
      x = log($2); y = log($15); ++n; sx += x; sy += y; sxx += x * x; sxy += x * y
    } END { printf "%.2f", (n * sxy - sx * sy) / (n * sxx - sx * sx) }' "$1"
}

# refuses NAME PATTERN OPTIONS...: exit status 1 (not a crash), one line on stderr that matches, no file left.
refuses() {
  local name=$1 pattern=$2 status=0
  shift 2
  rm -rf out && mkdir out
  (cd out && timeout 60 "$attention_memory" --seq-lens 64 --head-dim 16 --threads 1 "$@") >stdout 2>stderr || status=$?
  if ((status != 1)); then
    fail "$name: status $status, expected 1"
  elif (($(wc -l <stderr) != 1)) || ! grep -qE -- "$pattern" stderr; then
    fail "$name: expected one line that matches '$pattern', got: $(head -c 500 stderr)"
  elif [[ -s stdout ]]; then
    fail "$name: began to measure"
  elif [[ -n $(ls -A out) ]]; then
    fail "$name: left $(ls -A out)"
  else
    pass
  fi
}

small=(--seq-lens 4096,512,1024,2048,512 --head-dim 16 --num-blocks 3 --threads 1)

# A sweep: the table, the sentences, the CSV.
check "a sweep" "$attention_memory" "${small[@]}" --csv run.csv --svg run.svg
cp log table
header=series,seq_len,batch,num_heads,head_dim,embed_dim,num_blocks,dtype,causal,threads,input_bytes,result_bytes,kept_bytes
header+=,peak_bytes,extra_bytes,attention_peak_bytes,activations_peak_bytes,formula_extra_bytes,needed_bytes,ms
check "the columns of the CSV" test "$(head -n 1 run.csv)" == "$header"
check "a row for each series and length, sorted, each once" diff <(cut -d, -f1,2 run.csv | tail -n +2) \
  <(for series in tiled standard blocks recomputed; do for n in 512 1024 2048 4096; do echo $series,$n; done; done)
holds "fields are numbers and add up" run.csv '{ for (i = 11; i <= 20; ++i) if ($i !~ /^[0-9]+(\.[0-9]+)?$/) exit 1
  if (NF != 20 || f["peak_bytes"] != f["result_bytes"] + f["extra_bytes"]) exit 1 }'
holds "inputs and results of attention, to the byte" run.csv '$1 == "tiled" || $1 == "standard" {
  if (f["input_bytes"] != 4 * 16 * 4 * $2 || f["result_bytes"] != f["input_bytes"]) exit 1 }'
holds "tiled keeps the output and lse" run.csv '$1 == "tiled" && f["kept_bytes"] != (16 + 1) * 4 * $2 { exit 1 }'
holds "recomputation keeps one vector per block and token" run.csv \
  '$1 == "recomputed" && f["kept_bytes"] != 3 * 16 * 4 * $2 { exit 1 }'
holds "attention is measured under its tag" run.csv \
  '($1 == "tiled" || $1 == "standard") && f["attention_peak_bytes"] != f["peak_bytes"] { exit 1 }'
holds "the formulas" run.csv '$2 == 4096 { r = f["extra_bytes"] / f["formula_extra_bytes"]; if (r < 0.9 || r > 1.1) exit 1 }'
holds "predictions: never below by more than 2 %, above by a quarter" run.csv '$2 > 512 {
  r = f["needed_bytes"] / (f["input_bytes"] + f["peak_bytes"]); if (r < 0.98 || r > 1.25) exit 1 }'
check "tiled, short to long" "$attention_memory" --series tiled --seq-lens 1024,2048,4096,8192,16384 --head-dim 16 --csv long.csv
holds "tiled is what its formula says, scratch included" long.csv '{ r = f["extra_bytes"] / f["formula_extra_bytes"]
  if (r < 0.97 || r > 1.03) bad = 1; ++n } END { exit bad || n != 5 }'
check "short blocks" "$attention_memory" --series blocks,recomputed --seq-lens 1,16,128 --csv short.csv
holds "GPT blocks are what their formula says, however short" short.csv '{ r = f["extra_bytes"] / f["formula_extra_bytes"]
  if (r < 0.95 || r > 1.05) bad = 1; ++n } END { exit bad || n != 6 }'
tiled=$(exponent run.csv tiled) standard=$(exponent run.csv standard)
blocks=$(exponent run.csv blocks) recomputed=$(exponent run.csv recomputed)
echo "exponents: tiled $tiled, standard $standard, blocks $blocks, recomputed $recomputed"
check "tiled grows at most linearly" awk "BEGIN { exit !($tiled <= 1.05) }"
check "standard grows with the square" awk "BEGIN { exit !($standard >= 1.9 && $standard <= 2.05) }"
check "GPT blocks grow linearly" awk "BEGIN { exit !($blocks >= 0.9 && $blocks <= 1.05 && $recomputed <= 1.05) }"
holds "recomputation saves memory" run.csv '{ extra[$1, $2] = f["extra_bytes"] }
  END { exit !(extra["recomputed", 4096] < 0.6 * extra["blocks", 4096]) }'
check "the table names all" test "$(grep -cE '^(tiled attention|standard attention|3 GPT blocks|3 recomputed GPT blocks) .* [KM]iB ' table)" -eq 16
check "a sentence with the exponent" grep -qE "^Standard attention: from seq_len 512 to 4,096 extra memory grew [0-9]+-fold, .* \(exponent $standard\)\.$" table
check "a sentence that compares" grep -qE '^At seq_len 4,096, .*: standard attention needed .*, tiled attention ' table

# The chart.
if command -v python3 >/dev/null; then
  check "the chart is XML" python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' run.svg
elif command -v xmllint >/dev/null; then
  check "the chart is XML" xmllint --noout run.svg
else
  skip "the chart is XML: neither python3 nor xmllint"
fi
check "a dot for each point and series" test "$(grep -c '<circle' run.svg)" -eq 20
check "a dashed line for each formula" test "$(grep -c '<polyline.*dasharray' run.svg)" -eq 4
for text in "exponent $standard" 'standard attention' '3 recomputed GPT blocks' ' MiB<' '>4,096<' '>seq_len<'; do
  check "the chart says $text" grep -qF -- "$text" run.svg
done
if grep -qiE '[^a-z](nan|inf)[^a-z]' run.svg run.csv table; then fail "numbers are finite"; else pass; fi
check "one point is enough for a chart" "$attention_memory" --series tiled --seq-lens 100 --head-dim 16 --svg one.svg
check "16-bit, causal, several heads" "$attention_memory" --seq-lens 64,128 --head-dim 16 --num-heads 2 --batch 2 \
  --embed-dim 48 --dtype bf16 --causal --csv half.csv
holds "16-bit inputs" half.csv '$1 == "tiled" && f["input_bytes"] != 4 * 2 * 2 * 16 * 2 * $2 { exit 1 }'

# It stops before memory runs out and says what would have been needed.
check "too little memory for all" "$attention_memory" "${small[@]}" --series tiled,standard --max-memory 8MiB --csv stop.csv --svg stop.svg
cp log table
check "the next size is named" grep -qE '^Standard attention: .*; 1,024 would need (8\.[0-9]|9\.[0-9]) MiB, more than --max-memory 8\.0 MiB\.$' table
check "and the longest compared" grep -qE '^At seq_len 4,096, .*: standard attention would need 128\.[0-9] MiB, tiled attention' table
holds "what was run stayed below, the rest is predicted" stop.csv '{ run = f["input_bytes"] + f["peak_bytes"]
  if ((f["extra_bytes"] == "") != ($1 == "standard" && $2 > 512) || run > 8 * 1024 * 1024) exit 1
  if (f["extra_bytes"] == "" && f["needed_bytes"] <= 8 * 1024 * 1024) exit 1 }'
check "sizes that were not run are rings" test "$(grep -c '<circle.*fill="white"' stop.svg)" -eq 3
check "far from what was measured" "$attention_memory" --seq-lens 1,2,1048576 --max-memory 200MiB --threads 1 --csv far.csv --svg far.svg
cp log table
holds "what is fixed does not grow with seq_len" far.csv '$2 == 1048576 && ($1 == "blocks" || $1 == "recomputed") {
  known = f["formula_extra_bytes"] + 4 * 64 * 4 * $2; r = f["needed_bytes"] / known
  if (r < 0.98 || r > 1.02) bad = 1; ++n } END { exit bad || n != 2 }'
check "and is said to stay" grep -qE '^Tiled attention: from seq_len 1 to 2 extra memory stayed at [0-9.]+ KiB \(exponent -?0\.00\)' table
check "what falls is said to shrink" grep -qE '^Standard attention: .* extra memory shrank by [0-9]+ %, from' table
check "no growth is 0.9-fold or 1.0-fold" test "$(grep -cE '[^0-9](0\.[0-9]|1\.0)-fold' table)" -eq 0
# labels_fit SVG: half of each label below the x axis, at 7.3 pixels a character, ends within the picture's 860.
labels_fit() {
  sed -nE 's/^<text x="([0-9.]+)" y="522\.0" text-anchor="middle" *>([0-9,]+)<.*/\1 \2/p' "$1" |
    awk '{ ++n; if ($1 + 7.3 * length($2) / 2 > 860) bad = 1 } END { exit bad || n < 2 }'
}
check "the last label is not cut" labels_fit far.svg
check "too little time for all" "$attention_memory" "${small[@]}" --series standard --max-seconds 0.001
cp log table
check "the time is named" grep -qE '^Standard attention: .* would need .* s, more than --max-seconds 0\.001\.$' table

check "a long time in digits" "$attention_memory" --series tiled --seq-lens 64,1048576 --head-dim 16 --max-memory 2GiB --threads 1
cp log table
check "with commas" grep -qE ' up to [0-9,]*[0-9],[0-9]{3} s, more than --max-seconds 60\.$' table

# Bad input, refused before anything is measured.
refuses "no length" '^attention_memory: --seq-lens: ' --seq-lens ''
refuses "length 0" '--seq-lens: 0 given, expected an integer from 1' --seq-lens 0
refuses "negative length" '--seq-lens: -5 given, expected an integer from 1' --seq-lens 64,-5
refuses "not a length" '--seq-lens: long given, expected an integer' --seq-lens 64,long
refuses "an empty length" '--seq-lens: an empty value given' --seq-lens 512,,1024
refuses "an empty length at the end" '--seq-lens: an empty value given' --seq-lens 512,
refuses "an empty series" '--series: an empty value given' --series tiled,,standard
refuses "a length that overflows" '--seq-lens: 9223372036854775808 given, expected an integer' --seq-lens 9223372036854775808
refuses "a length that cannot fit" '--seq-lens: 64 given, .* would need .* expected at most --max-memory 1\.0 KiB' --max-memory 1KiB
refuses "sizes whose product overflows" '--seq-lens: 1000000000 given, .* elements, expected at most' --seq-lens 1000000000 \
  --batch 1000000000 --num-heads 1000000000
refuses "no memory" '--max-memory: 0 given, expected bytes above 0' --max-memory 0
refuses "not bytes" '--max-memory: 5 miles given, expected bytes' --max-memory '5 miles'
refuses "more memory than there is" '--max-memory: 1000TB given, expected at most the memory of this machine' --max-memory 1000TB
refuses "no time" '--max-seconds: 0 given, expected a number' --max-seconds 0
refuses "head_dim" '--head-dim: 257 given, expected an integer from 1 to 256' --head-dim 257
refuses "embed_dim" '--embed-dim: 40 given, expected a multiple of --head-dim 16' --embed-dim 40
refuses "dtype" '--dtype: f8 given, expected f32' --dtype f8
refuses "series" '--series: dense given, expected tiled' --series tiled,dense
refuses "a GPU that is not there" '--device cuda: .*(no CUDA backend|driver)' --device cuda
refuses "unknown device" '--device: tpu given, expected auto or cpu or cuda' --device tpu
refuses "threads" '--threads: -1 given, expected' --threads -1
refuses "unknown option" 'not expected: --heads' --heads
refuses "empty path" '--csv: an empty path given' --csv ''
refuses "folder" '--svg: \.: is a directory' --svg .
refuses "missing folder" '--csv: missing/run.csv: No such file' --csv missing/run.csv
refuses "device" '--csv: /dev/null: is a device' --csv /dev/null
refuses "one file for both" '--csv and --svg: run given for both' --csv run --svg ./run
if ((EUID != 0)); then
  mkdir closed && chmod 500 closed
  refuses "unwritable folder" "--csv: .*/closed/run.csv: Permission denied" --csv "$work/closed/run.csv"
else
  refuses "unwritable folder" '--csv: /proc/run.csv: ' --csv /proc/run.csv
fi

status=0
"$attention_memory" --series tiled --seq-lens 64 --threads 1 >/dev/full 2>stderr || status=$?
if ((status == 1)) && (($(wc -l <stderr) == 1)) && grep -q '^attention_memory: standard output: .*No space left' stderr; then pass; else
  fail "full standard output: status $status, $(head -c 500 stderr)"
fi

# Whatever fails, an earlier file stays whole and nothing lies beside it.
mkdir kept && cp run.csv kept/run.csv
status=0
(ulimit -f 1 && "$attention_memory" "${small[@]}" --series tiled,standard --batch 2 --csv kept/run.csv) >/dev/null 2>stderr || status=$?
if ((status == 1)) && (($(wc -l <stderr) == 1)) && grep -q 'kept/run.csv' stderr; then pass; else
  fail "full disk: status $status, $(head -c 500 stderr)"
fi
check "full disk: the earlier file survives" cmp run.csv kept/run.csv
check "full disk: nothing else is left" test "$(ls kept)" == run.csv

finish
