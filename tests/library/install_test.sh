#!/usr/bin/env bash
# What `cmake --install` leaves: headers that stand alone, macros and symbols with our prefix, no exit and no output.
# Usage: install_test.sh BUILD. The last line is "N passed, N failed, N skipped".
# shellcheck disable=SC2317  # functions are called through check and silent
set -uo pipefail
# shellcheck source=tests/library/checks.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/checks.sh"

prefix=$work/prefix include=$work/prefix/include
mapfile -t headers < <(cd "$include" && find strobe -name '*.h' | sort)
mapfile -t libraries < <(find "$prefix" -name 'lib*.a' | sort)

# The tree: every public folder, nothing internal, no path of this machine.
for header in strobe config kernels/{attention,attention_c} core/{tensor,io/safetensors,io/tokenizer} layers/gpt \
  optim/adamw; do
  check "strobe/$header.h is installed" test -f "$include/strobe/$header.h"
done
check "two libraries" test ${#libraries[@]} = 2
silent "no internal folder, source or empty folder" find "$prefix" -name cpu -o -name cuda -o -name ops \
  -o -name tokenizer -o -name '*.cpp' -o -name '*.in' -o -empty
silent "no path of this machine" grep -rF --include='*.h' --include='*.cmake' -e "$(cached CMAKE_HOME_DIRECTORY)" \
  -e "$work" "$prefix"

# included DEPENDENCIES: the files in what a compiler wrote by -MD, one a line.
included() { tr -s '\\[:space:]' '\n' <"$1" | grep /; }

# compiles_alone HEADER: also twice, without a warning, and it reaches only our headers and those of C++.
compiles_alone() {
  local name=$work/${1//\//_} foreign source="#include \"$1\""$'\n'
  local flags=(-fsyntax-only -Wall -Wextra -Wpedantic -Wconversion -Werror -I "$include" -MD -MF "$name.d" -)
  if [[ $1 == */attention_c.h ]]; then "$CC" -x c -std=c99 "${flags[@]}" <<<"$source$source" || return 1; fi
  "$CXX" -x c++ -std=c++20 "${flags[@]}" <<<"$source$source" || return 1
  foreign=$(included "$name.d" | grep -vF "$include/strobe/" | grep -vxF -f "$work/standard")
  [[ -z $foreign ]] || { echo "$1 includes $foreign" && return 1; }
}
"$CXX" -x c++ -std=c++20 -fsyntax-only -MD -MF "$work/standard.d" - <<<'#include <bits/stdc++.h>'
included "$work/standard.d" >"$work/standard"
export CC CXX include work
export -f compiles_alone included
# shellcheck disable=SC2016  # the inner bash expands
printf '%s\n' "${headers[@]}" |
  xargs -P 2 -I {} bash -c 'log=$work/${1//\//_}; compiles_alone "$1" >"$log.log" 2>&1 && touch "$log.passed"' bash {}
for header in "${headers[@]}"; do
  cp "$work/${header//\//_}.log" "$work/log"
  if [[ -e $work/${header//\//_}.passed ]]; then pass; else fail "$header alone"; fi
done

foreign_macros() { grep -rnE '^\s*#\s*(define|undef)\b' "$include" | grep -vE '\b(define|undef)\s+STROBE_'; }
silent "macros begin with STROBE_" foreign_macros

# Symbols that another object file could collide with: all in strobe:: or beginning with strobe_, as the C interface
# does. What compilers emit from inline code of other headers is weak and the same everywhere: that of std::, and of the
# JSON parser, whose namespace carries its version. OpenMP's critical section and nvcc's stubs of our kernels are ours by
# the end of their names.
foreign_symbols() {
  local within='^_Z(GV|T[VTISHW])?Z*'
  nm -A --defined-only --extern-only "${libraries[@]}" | awk -v ours="$within"'N[KRO]*6strobe|^strobe_' \
    -v standard="$within(N?[KRO]*S[tabsiod]|n[wa]mPv$|d[la]PvS_$|NK?(9__gnu_cxx|8nlohmann[0-9]+json_abi_v))|^DW[.]ref" '
    NF < 3 || $NF ~ ours || $NF == ".gomp_critical_user_strobe_parallel_for" { next }
    $NF ~ /^_Z[0-9]+__device_stub__ZN6strobe/ { next }
    $(NF - 1) ~ /^[WVu]$/ && $NF ~ standard { next }
    { print }'
}
silent "symbols are in strobe:: or begin with strobe_" foreign_symbols

# Ways to end the process, to print and to change its state. Some are there with a reason: in core/io/atomic_file.cpp
# write() fills the file that the user named; without NDEBUG the JSON parser checks itself by assert; in
# kernels/cuda/attention.cu std::cerr shows what STROBE_LOG asks for. std::terminate is not looked for: compilers call it
# where a destructor would throw.
ends_or_prints() {
  local names='exit|_exit|_Exit|quick_exit|abort|raise|kill|signal|sigaction|__assert_fail|system|fork|execve?'
  names+='|setlocale|(__)?v?f?d?printf(_chk)?|puts|putchar|putc|_IO_putc|fputs|fputc|fwrite|write|perror|psignal|syslog'
  names+='|stdout|stderr|_ZSt4(cout|cerr|clog)|_ZSt5(wcout|wcerr|wclog)|_ZNSt8ios_base4InitC1Ev'
  nm -A --undefined-only "${libraries[@]}" | grep -E ":\s+[Uw] ($names)(@.*)?$" |
    grep -vE ':atomic_file\.cpp\.o:\s+U write(@.*)?$' |
    grep -vE ':(safetensors|checkpoint|json_reader|load|load_json|to_json)\.cpp\.o:\s+U __assert_fail(@.*)?$' |
    grep -vE ':attention\.cu\.o:\s+U (_ZSt4cerr|_ZNSt8ios_base4InitC1Ev)(@.*)?$'
}
silent "no exit, abort or output" ends_or_prints

finish
