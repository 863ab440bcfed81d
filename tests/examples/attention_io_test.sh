#!/usr/bin/env bash
# attention_io from outside: what it counts, what it reads of a profiler's table, and what it says about bad input.
# Usage: attention_io_test.sh BUILD. The last line is "N passed, N failed, N skipped".
# shellcheck disable=SC2016  # awk expands
set -uo pipefail

attention_io=$1/examples/attention_io
# shellcheck source=tests/examples/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"
export CUDA_VISIBLE_DEVICES=  # tiles are those that are taken for granted without a GPU

# holds NAME FILE AWK: the awk program, run on a CSV whose columns it names as in f["seq_len"], must exit with 0.
holds() {
  check "$1" awk -F, "/^#/ { next } !n++ { for (i = 1; i <= NF; ++i) column[i] = \$i; next }
    { for (i = 1; i <= NF; ++i) f[column[i]] = \$i } $3" "$2"
}

# refuses NAME PATTERN OPTIONS...: exit status 1 (not a crash), one line on stderr that matches, nothing printed.
refuses() {
  local name=$1 pattern=$2 status=0
  shift 2
  timeout 60 "$attention_io" "$@" >stdout 2>stderr || status=$?
  if ((status != 1)); then
    fail "$name: status $status, expected 1"
  elif (($(wc -l <stderr) != 1)) || ! grep -qE -- "$pattern" stderr; then
    fail "$name: expected one line that matches '$pattern', got: $(head -c 500 stderr)"
  elif [[ -s stdout ]]; then
    fail "$name: printed a table"
  else
    pass
  fi
}

# What is counted.
check "counts" "$attention_io" --seq-lens 4096,1024,2048,1024 --svg io.svg --tile-svg tile.svg
cp log counted.csv
header=direction,attention,seq_len,batch,num_heads,head_dim,dtype,tile_queries,tile_keys,dram_bytes,dram_measured
header+=,l2_bytes,l2_measured
check "the columns" test "$(head -n 1 counted.csv)" == "$header"
check "a row for each pass, method and length" diff <(cut -d, -f1-3 counted.csv | grep -E '^(for|back)ward,') \
  <(for pass in forward backward; do for method in standard tiled; do for n in 1024 2048 4096; do
    echo $pass,$method,$n
  done; done; done)
holds "standard forward, by hand" counted.csv '/^forward,standard,4096/ {
  s = 4 * 32 * 4096 * 4096; t = 4 * 32 * 4096 * 64; r = 4 * 32 * 4096
  q = s * 4 + 2 * t * 2                    # S = Q K^T
  q += s * 4 + s * 2 + 8 * r               # softmax: sums and lse beside P
  q += s * 2 + t * 2 + t * 4               # P V
  q += t * 4 + 4 * r + t * 4 + t * 4 + t * 2  # divided by the sums, then rounded
  ++found; if (f["dram_bytes"] != q) wrong = 1 } END { exit wrong || found != 1 }'
holds "tiled forward: four tensors and lse, whatever seq_len" counted.csv '/^forward,tiled/ {
  if (f["dram_bytes"] != 16384 * 2048 * 4 * 2 + 16384 * 32 * 4) exit 1 }'
holds "standard is quadratic" counted.csv '{ b[$1, $2, $3] = f["dram_bytes"] } END {
  r = b["backward", "standard", 4096] / b["backward", "standard", 2048]; if (r < 1.8 || r > 2) exit 1
  if (b["backward", "tiled", 4096] != b["backward", "tiled", 2048]) exit 1 }'  # of the same number of tokens
holds "each block of queries reads all keys and values" counted.csv '/^forward,tiled/ {
  t = 16384 * 2048 * 2; if (f["l2_bytes"] != 2 * t + 16384 * 32 * 4 + f["seq_len"] / f["tile_queries"] * 2 * t) exit 1 }'
holds "nothing is measured" counted.csv '{ if (f["dram_measured"] != "" || f["l2_measured"] != "") exit 1 }'
check "a sentence that compares" grep -qE '^# Forward, seq_len 4,096: standard attention moves [0-9.]+ times the bytes' counted.csv
for dtype in f32 f16; do check "$dtype" "$attention_io" --seq-lens 512 --head-dim 128 --dtype $dtype; done

# The pictures.
for picture in io tile; do
  if command -v python3 >/dev/null; then
    check "$picture.svg is XML" python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' $picture.svg
  else
    skip "$picture.svg is XML: no python3"
  fi
done
check "six dashed lines" test "$(grep -c '<polyline.*dasharray' io.svg)" -eq 6
check "four dashed lines" test "$(grep -c '<polyline.*dasharray' tile.svg)" -eq 4
check "the tile has a length" grep -qF 'seq_len 4,096' tile.svg

# A profiler's table: one case whose numbers can be added by hand.
kernel() {  # kernel ID NAME READ WRITTEN SECTORS
  local metric
  for metric in "dram__bytes_read.sum byte $3" "dram__bytes_write.sum byte $4" "lts__t_sectors_srcunit_tex.sum sector $5"; do
    # shellcheck disable=SC2086  # words
    printf '"%s","7","attention_io","host","%s<float, 4>(T1 *, long)","1","7","(128, 1, 1)","(9, 1, 1)","0","9.0","Command line profiler metrics","%s","%s","%s"\n' "$1" "$2" $metric
  done
}
columns='"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC"'
columns+=',"Section Name","Metric Name","Metric Unit","Metric Value"'
{
  echo "==PROF== Connected to process 7"
  echo "forward,tiled,2048,8,32,64,bf16,128,128"
  echo "==PROF== Disconnected from process 7"
  echo "$columns"
  kernel 0 normal 1 1 1
  kernel 1 'map<Relu>' 1,000 500 9
  kernel 2 'map<Relu>' 1,100 600 9
  kernel 3 attention_forward '200,000,000' 40,000,000 1,000
  kernel 4 clear 10 20 30
  kernel 5 'map<Relu>' 1,200 30,000,700 9
} >profile.csv
check "a profile" "$attention_io" --measured profile.csv --svg measured.svg
cp log measured.csv
holds "what the pass left in the cache counts" measured.csv '{
  ++rows; if (f["dram_measured"] != 240000030 + 30001900 - 1700 || f["l2_measured"] != 32 * 1030) wrong = 1
} END { exit wrong || rows != 1 }'
check "its dots" test "$(grep -c '<circle' measured.svg)" -ge 2

# Bad input.
refuses "no length" '^attention_io: --seq-lens: ' --seq-lens ''
refuses "length 0" '--seq-lens: 0 given, expected an integer from 1' --seq-lens 0
refuses "head_dim" '--head-dim: 257 given, expected an integer from 1 to 256' --head-dim 257
refuses "dtype" '--dtype: f64 given, expected f32 or bf16 or f16' --dtype f64
refuses "a run without a GPU" '--run: .*(no CUDA backend|driver)' --run
refuses "no file" '--measured: missing.csv: cannot be read' --measured missing.csv
grep -v Relu profile.csv >cut.csv
refuses "a profile without its sweeps" '--measured: cut.csv: 1 cases and 0 sweeps' --measured cut.csv
sed 's/"byte"/"Mbyte"/' profile.csv >units.csv
refuses "units" "--measured: units.csv: dram__bytes_read.sum is in 'Mbyte', expected byte" --measured units.csv
sed 's/"Metric Value"/"Value"/' profile.csv >renamed.csv
refuses "columns" "--measured: renamed.csv: a line has no column 'Metric Value'" --measured renamed.csv
sed 's/^forward,tiled,2048/forward,tiled,0/' profile.csv >zero.csv
refuses "a case" "--measured: zero.csv: 'forward,tiled,0,8,32,64,bf16,128,128' given, expected direction,attention" --measured zero.csv
: >empty.csv
refuses "an empty file" '--measured: empty.csv: 0 cases' --measured empty.csv

finish
