#!/usr/bin/env bash
# attention_speed from outside: its columns, the kernel it is told to use, and what it says about bad input.
# Usage: attention_speed_test.sh BUILD. The last line is "N passed, N failed, N skipped".
set -uo pipefail

attention_speed=$1/examples/attention_speed
# shellcheck source=tests/examples/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"
if [[ ! -x $attention_speed ]]; then
  skip "built without Eigen"
  finish
fi

export CUDA_VISIBLE_DEVICES=  # what is checked is the CPU's, also where there is a GPU

# refuses NAME PATTERN OPTIONS...: exit status 1 (not a crash), one line on stderr that matches, nothing measured.
refuses() {
  local name=$1 pattern=$2 status=0
  shift 2
  timeout 60 "$attention_speed" "$@" >stdout 2>stderr || status=$?
  if ((status != 1)); then
    fail "$name: status $status, expected 1"
  elif (($(wc -l <stderr) != 1)) || ! grep -qE -- "$pattern" stderr; then
    fail "$name: expected one line that matches '$pattern', got: $(head -c 500 stderr)"
  elif [[ -s stdout ]]; then
    fail "$name: began to measure"
  else
    pass
  fi
}

refuses "no length" '^attention_speed: --seq-lens: ' --seq-lens ''
refuses "length 0" '--seq-lens: 0 given, expected an integer from 1' --seq-lens 0
refuses "negative length" '--seq-lens: -5 given, expected an integer from 1' --seq-lens 64,-5
refuses "a length that overflows" '--seq-lens: 9223372036854775808 given, expected an integer' --seq-lens 9223372036854775808
refuses "a length that cannot fit" '--seq-lens: 1000000000 given, .*expected at most' --seq-lens 64,1000000000
refuses "an empty length" '--seq-lens: an empty value given' --seq-lens 512,,1024
refuses "standard's matrices" '--standard-max: 1000000 given, but standard attention of seq_len 1000000 takes .*expected at most' \
  --seq-lens 64,1000000 --standard-max 1000000 --num-heads 8 --head-dim 1
refuses "head_dim" '--head-dim: 257 given, expected an integer from 1 to 256' --head-dim 257
refuses "a GPU that is not there" '--device cuda: .*(no CUDA backend|driver)' --device cuda
refuses "unknown device" '--device: tpu given, expected auto or cpu or cuda' --device tpu
refuses "a packed length of 0" '--packed: 0 given, expected an integer from 1' --packed 17,0
refuses "packed rows beyond 32 bits" '--packed: 3000000000 rows given, expected at most 2147483647' \
  --packed 1000000000,1000000000,1000000000
refuses "packed sequences and lengths" '--seq-lens excludes --packed' --packed 17 --seq-lens 64
for option in --head-dims=64 --packed=17 --gqa=4 --window=100 --any-order --rest-ms=0; do
  refuses "$option on the CPU" "${option%=*}: given, but it does not go with --device cpu" $option
done
refuses "--batch on a GPU" '--batch: given, but it does not go with --device cuda' --device cuda --batch 2
refuses "threads" '--threads: 0 given, expected' --threads 0
refuses "dtype" '--dtype: i32 given, expected f32' --dtype i32
refuses "unknown kernel" '--kernel: fast given, expected auto or portable or mma or hopper' --kernel fast
for kernel in mma hopper; do
  refuses "kernel $kernel of other devices" "--kernel $kernel: .*kernel $kernel given, but the CPU has only" --kernel $kernel
done

for options in --help '--seq-lens 64 --repeats 1'; do
  status=0
  # shellcheck disable=SC2086  # words
  "$attention_speed" $options >/dev/full 2>stderr || status=$?
  if ((status == 1)) && (($(wc -l <stderr) == 1)) && grep -q '^attention_speed: standard output: .*No space left' stderr; then pass; else
    fail "full standard output, $options: status $status, $(head -c 500 stderr)"
  fi
done

if grep -qa __asan_init "$attention_speed"; then
  skipped=$((skipped + 1))
  echo "skipped: a run, which takes minutes under sanitizers"
else
  header=direction,kernel,dtype,batch,seq_len,num_heads,head_dim,causal,ms,gflops,share_of_eigen
  for kernel in auto portable; do
    flash=flash
    [[ $kernel == auto ]] || flash=flash-$kernel
    "$attention_speed" --seq-lens 64,128 --standard-max 64 --num-heads 2 --repeats 1 --kernel $kernel >stdout 2>stderr
    cut -d, -f1-8 stdout >cases
    if diff cases - <<END && awk -F, 'NR == 1 { exit $0 != "'$header'" } NF != 11 || $9 <= 0 || $10 <= 0 { exit 1 }' stdout; then pass; else
direction,kernel,dtype,batch,seq_len,num_heads,head_dim,causal
product,eigen,f32,1,2048,1,2048,0
product,strobe,f32,1,2048,1,2048,0
forward,$flash,f32,1,64,2,64,0
backward,$flash,f32,1,64,2,64,0
forward,standard,f32,1,64,2,64,0
backward,standard,f32,1,64,2,64,0
forward,$flash,f32,1,128,2,64,0
backward,$flash,f32,1,128,2,64,0
END
      fail "a run with --kernel $kernel: $(cat stdout stderr)"
    fi
  done
fi

finish
